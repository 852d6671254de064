"""Whole steps that are partitioned: their work and memory are those of the compiled program."""

import random
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jaxlib.mlir import ir

import flax_spmd as spmd
from flax_spmd._src.compare.compile_worker import without_passes
from flax_spmd._src.compare.lowering import lower
from flax_spmd._src.compat import mlir_context
from flax_spmd._src.estimate.doubts import UNCHECKED
from flax_spmd._src.estimate.estimator import TPU_DOUBT, Estimator
from flax_spmd._src.estimate.partitioned_step import (
  PartitionedStep,
  is_as_slow_as_compilation,
  partitioned_step,
)
from flax_spmd._src.hlo.counts import Counts
from flax_spmd.explore import TrainStep, compare, parse_target
from tests.estimate.partitioners import replace_partitioner

SIZES = {'batch': 16, 'length': 64, 'embed': 128, 'heads': 4, 'head': 32, 'mlp': 512, 'vocab': 1024}
WEIGHTS = {
  'in': ('embed', 'heads', 'head'),
  'out': ('heads', 'head', 'embed'),
  'up': ('embed', 'mlp'),
  'down': ('mlp', 'embed'),
}
DATA = spmd.Layout(spmd.abstract_mesh({'a': 8}), (('batch', 'a'),))
MESHES = ({'a': 8}, {'a': 2, 'b': 4}, {'a': 2, 'b': 2, 'c': 2})


def transformer():
  """Two blocks in a loop, on tokens, with a cross-entropy."""

  def create():
    weights = {
      name: spmd.LogicallyPartitioned(jnp.ones((2, *map(SIZES.get, names))), ('layers', *names))
      for name, names in WEIGHTS.items()
    }
    table = jnp.ones((SIZES['vocab'], SIZES['embed']))
    return weights | {'table': spmd.LogicallyPartitioned(table, ('vocab', 'embed'))}

  def block(x, w):
    x = spmd.with_logical_constraint(x, ('batch', 'length', 'embed'))
    heads = jnp.einsum('bte,ehd->bthd', x, w['in'])
    scores = jax.nn.softmax(jnp.einsum('bthd,bshd->bhts', heads, heads))
    x += jnp.einsum('bthd,hde->bte', jnp.einsum('bhts,bshd->bthd', scores, heads), w['out'])
    x /= jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    return x + jax.nn.gelu(x @ w['up']) @ w['down'], None

  def loss(state, ids):
    plain = spmd.unbox(state)
    weights = {name: plain[name] for name in WEIGHTS}
    x, _ = lax.scan(block, plain['table'][ids], weights)
    chances = jax.nn.log_softmax(x @ plain['table'].T)
    return -jnp.mean(jnp.take_along_axis(chances, ids[..., None], -1))

  def step(state, ids):
    value, gradient = jax.value_and_grad(loss)(state, ids)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradient), value

  ids = jax.ShapeDtypeStruct((SIZES['batch'], SIZES['length']), jnp.int32)
  return TrainStep(step, create, ids, placements=('batch', 'length'))


def random_layouts(count, seed):
  """Layouts with rules that may contradict each other."""
  draw = random.Random(seed)
  layouts = {}
  while len(layouts) < count:
    mesh = spmd.abstract_mesh(draw.choice(MESHES))
    names = draw.sample(sorted(SIZES), 4)
    rules = tuple((name, draw.choice(mesh.axis_names)) for name in names)
    layouts[f'{mesh.shape} {rules}'] = spmd.Layout(mesh, rules)
  return layouts


@pytest.mark.usefixtures('gpu_compiler')
def test_work_and_memory_are_those_of_compiled_programs(whole_steps):
  train = transformer()
  estimator, layouts = Estimator(train), random_layouts(5, 3)
  for compiled in compare(train, layouts, 'h100:8'):
    assert_alike(estimator.estimate(layouts[compiled.name], 'h100:8'), compiled, memory=0.07)


@pytest.mark.usefixtures('tpu_compiler')
def test_steps_for_tpus_are_compiled_by_their_own_compiler(whole_steps):
  train, layouts = transformer(), random_layouts(2, 4)
  estimator = Estimator(train, platform='tpu')
  for compiled in compare(train, layouts, 'v5e:2x4'):
    assert_alike(estimator.estimate(layouts[compiled.name], 'v5e:2x4'), compiled)


@pytest.mark.usefixtures('tpu_compiler')
@pytest.mark.parametrize('platform', ['cuda', 'cpu'])
def test_a_step_lowered_for_another_platform_is_partitioned_for_the_target(whole_steps, platform):
  """The step is another one on each platform."""
  model = transformer()

  def step(state, ids):
    more = {
      'cuda': lambda: jnp.sum(state['up'].value @ state['down'].value),
      'default': lambda: jnp.float32(0),
    }
    state, value = model.step(state, ids)
    return state, value + lax.platform_dependent(**more)

  train = model._replace(step=step)
  estimator = Estimator(train, platform=platform)
  [compiled] = compare(train, {'data': DATA}, 'v5e:2x4')
  assert_alike(estimator.estimate(DATA, 'v5e:2x4'), compiled)
  estimated = estimator.estimate(DATA, 'v5e:2x4', partition=False)
  assert estimated.source == 'estimated' and TPU_DOUBT in estimated.doubts


def by_example():
  """Gradients by example of a loss whose lookup JAX lowers as a function of its own, and a layer that is called twice."""

  def create():
    return spmd.LogicallyPartitioned(jnp.ones((SIZES['embed'], SIZES['mlp'])), ('embed', 'mlp'))

  @jax.jit
  def layer(w, x):
    x = spmd.with_logical_constraint(jnp.tanh(x @ w), (None, 'mlp'))
    return spmd.with_logical_constraint(x @ w.T, (None, 'embed'))

  def loss(w, x):
    scores = jax.nn.log_softmax(layer(w, layer(w, x[None])))
    return -jnp.mean(jnp.take_along_axis(scores, jnp.argmax(scores, -1, keepdims=True), -1))

  def step(boxed, x):
    w = boxed.unbox()
    values, gradients = jax.vmap(jax.value_and_grad(loss), (None, 0))(w, x)
    return boxed.replace_boxed(w - 0.1 * jnp.mean(gradients, 0)), jnp.mean(values)

  x = jax.ShapeDtypeStruct((SIZES['batch'], SIZES['embed']), jnp.float32)
  return TrainStep(step, create, x, placements=('batch', 'embed'))


@pytest.mark.parametrize('model', [transformer, by_example])
def test_the_program_that_is_partitioned_is_that_of_compare(monkeypatch, model):
  train, asked = model(), []
  replace_partitioner(monkeypatch, can_partition=lambda platform: True)
  replace_partitioner(
    monkeypatch,
    partitioned_step=lambda code, *others: (
      asked.append(code) or PartitionedStep(Counts(0.0, 0.0, (), (), ()), 0)
    ),
  )
  estimator, target = Estimator(train), parse_target('h100:8')
  for layout in random_layouts(4, 6).values():
    estimator.estimate(layout, target)
    assert text_of(asked.pop()) == text_of(lower(train, layout, target).code)


def text_of(code):
  """A program, without the names of the arguments and results of its main function, and of its mesh for JAX."""
  with mlir_context():
    text = str(ir.Module.parse(code))
  text = re.sub(r'^  sdy.mesh .* \{stablehlo.mesh = .*\}', '', text, flags=re.MULTILINE)
  return (
    re.sub(r'(, )?jax.result_info = "[^"]*"(, )?', '', text).replace(' {})', ')').replace(' {},', ',')
  )


def in_groups(axis_name):
  """All pairs of the examples of a group, among which a step computes on its own, and a mean over groups."""

  def create():
    return {'w': spmd.LogicallyPartitioned(jnp.ones((64, 128)), ('embed', 'mlp')), 'step': 0}

  def step(state, x):
    def loss(w):
      z = spmd.with_logical_constraint(
        jnp.tanh(x @ w), ('batch', 'mlp') if axis_name != 'batch' else (None, 'mlp')
      )
      return jnp.mean(jax.nn.logsumexp(z @ z[::-1].T, -1))

    value, gradient = jax.value_and_grad(loss)(state['w'].unbox())
    gradient, value = lax.pmean((gradient, value), axis_name)
    return {
      'w': state['w'].replace_boxed(state['w'].unbox() - 0.1 * gradient),
      'step': state['step'] + 1,
    }, value

  return TrainStep(step, create, jax.ShapeDtypeStruct((64, 64), jnp.float32), axis_name=axis_name)


GROUPED = {
  'all': ({'a': 8}, (('batch', 'a'),)),
  'sharded weights': ({'a': 4, 'b': 2}, (('batch', 'a'), ('mlp', 'b'))),
  'over two axes': ({'a': 2, 'b': 2, 'c': 2}, (('batch', ('a', 'c')), ('embed', 'b'))),
  'fsdp': ({'a': 2, 'b': 4}, (('batch', 'a'), ('embed', 'a'))),
  'none': ({'a': 2, 'b': 4}, (('embed', 'b'),)),
}


@pytest.mark.usefixtures('gpu_compiler')
@pytest.mark.parametrize('axis_name', ['batch', 'a'])
@pytest.mark.parametrize('of_layout', [False, True])
def test_a_step_with_an_axis_name_computes_the_parts_of_its_layout(whole_steps, axis_name, of_layout):
  """The parts are as many as the layout's groups of devices, and so the work depends on the layout."""
  train = in_groups(axis_name)
  given = (lambda layout: train) if of_layout else train
  layouts = {
    name: spmd.Layout(spmd.abstract_mesh(mesh), rules) for name, (mesh, rules) in GROUPED.items()
  }
  estimator = Estimator(given)
  for compiled in compare(given, layouts, 'h100:8'):
    layout = layouts[compiled.name]
    assert_alike(estimator.estimate(layout, 'h100:8'), compiled, memory=0.07)
    if axis_name == 'batch' and compiled.name != 'none':  # there, XLA gathers a weight for a product
      estimated = estimator.estimate(layout, 'h100:8', partition=False)
      assert estimated.counts.flops == pytest.approx(compiled.counts.flops, rel=0.01), compiled.name


def test_a_step_is_traced_once_for_each_number_of_groups():
  train, calls = in_groups('batch'), []
  estimator = Estimator(train._replace(step=lambda *args: calls.append(args) or train.step(*args)))
  calls.clear()
  for size in (2, 4, 8, 4, 2):
    layout = spmd.Layout(spmd.abstract_mesh({'a': size}), (('batch', 'a'),))
    estimator.estimate(layout, f'h100:{size}', partition=False)
  assert len(calls) == 3


@pytest.mark.usefixtures('gpu_compiler')
def test_convolutions_of_groups_are_partitioned_and_else_in_doubt(whole_steps):
  """Their gradients are in a shard_map, one kernel for each group."""

  def step(state, x):
    def loss(w):
      y = lax.conv_general_dilated(x, w, (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC'))
      return jnp.mean(jnp.tanh(y - x[::-1]) ** 2)

    value, gradient = jax.value_and_grad(loss)(state)
    gradient, value = lax.pmean((gradient, value), 'batch')
    return state - 0.1 * gradient, value

  x = jax.ShapeDtypeStruct((16, 8, 8, 4), jnp.float32)
  train = TrainStep(step, lambda: jnp.ones((3, 3, 4, 4)), x, axis_name='batch')
  estimator = Estimator(train)
  for _ in range(2):
    [compiled] = compare(train, {'data': DATA}, 'h100:8')
    assert_alike(estimator.estimate(DATA, 'h100:8'), compiled, memory=0.07)
    estimated = estimator.estimate(DATA, 'h100:8', partition=False)
    assert estimated.doubts[0] == (
      "axis_name 'batch': the 8 parts of the batch are computed apart, and estimated as one, since their convolutions are "
      'in a shard_map'
    )
  alone = estimator.estimate(DATA.replace(rules=()), 'h100:8', partition=False)
  assert not any('parts of the batch' in one for one in alone.doubts)


@pytest.mark.parametrize('of_layout', [False, True])
def test_a_batch_that_groups_do_not_divide_is_a_layout_error(whole_steps, of_layout):
  train = in_groups('batch')._replace(batch=jax.ShapeDtypeStruct((12, 64), jnp.float32), placements=())
  estimator = Estimator((lambda layout: train) if of_layout else train)
  assert estimator.estimate(DATA.replace(mesh=spmd.abstract_mesh({'a': 4})), 'h100:4', partition=False)
  with pytest.raises(spmd.errors.LayoutError, match='12'):
    estimator.estimate(DATA, 'h100:8', partition=False)


@pytest.mark.usefixtures('gpu_compiler')
def test_memory_is_that_of_the_target(whole_steps):
  """GPUs have other kernels, and so other temporary arrays; what does not fit is computed again."""
  train, layout = transformer(), DATA
  estimator = Estimator(train)
  for target in ('a100:8', 'b200:8'):
    [compiled] = compare(train, {'data': layout}, target)
    assert_alike(estimator.estimate(layout, target), compiled)


def test_only_a_donated_state_is_updated_in_place(whole_steps, gpu_compiler):
  """The step does not use one of the arrays, and does not return another, in whose place JAX puts the first result."""

  def create():
    return {name: jnp.ones((256, 256)) for name in ('used', 'unused', 'not returned')}

  def step(state, x):
    weight = state['used'] - 0.1 * jnp.mean(x) * state['not returned']
    return {'used': weight, 'unused': state['unused']}, jnp.sum(weight)

  for donate, copies in ((True, 1), (False, 2)):
    train = TrainStep(step, create, jax.ShapeDtypeStruct((64,), jnp.float32), donate=donate)
    [compiled] = compare(train, {'data': DATA}, 'h100:8')
    outcome = Estimator(train).estimate(DATA, 'h100:8')
    assert_alike(outcome, compiled)
    assert outcome.memory.temporaries == pytest.approx(copies * 2**18, abs=2**12)


def test_a_softmax_that_decides_the_memory_is_fused_into_one_kernel(whole_steps, gpu_compiler):
  """XLA stores the chances that a loss compares, which it would compute again in kernels of its own."""

  def create():
    return spmd.LogicallyPartitioned(jnp.ones((64, 4096)), ('embed', 'vocab'))

  def step(state, x):
    def loss(weight):
      aims = jax.nn.softmax(x @ state.unbox())
      return jnp.mean(aims * (jnp.log(aims) - jax.nn.log_softmax(x @ weight.unbox() / 2)))

    value, gradient = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradient), value

  train = TrainStep(step, create, jax.ShapeDtypeStruct((8192, 64), jnp.bfloat16))
  [compiled] = compare(train, {'data': DATA}, 'h100:8')
  assert_alike(Estimator(train).estimate(DATA, 'h100:8'), compiled)
  [small] = compare(in_groups('batch'), {'data': DATA}, 'h100:8')
  target = parse_target('h100:8')
  assert [is_as_slow_as_compilation(target, one) for one in (compiled, small)] == [True, False]


def assert_alike(outcome, compiled, *, memory=0.002):
  """`memory` is the relative error of the peak: a small softmax is not fused into one kernel in a partitioned step."""
  assert outcome.source == 'partitioned' and outcome.doubts == ()
  assert outcome.counts.flops == pytest.approx(compiled.counts.flops, rel=1e-6), compiled.name
  ours, right = (
    sorted((one.kind, one.axes, one.times, one.bytes) for one in each.counts.collectives)
    for each in (outcome, compiled)
  )
  assert ours == right, compiled.name
  assert outcome.counts.hbm_bytes == pytest.approx(compiled.counts.hbm_bytes, rel=0.05)
  assert outcome.memory.peak == pytest.approx(compiled.memory.peak, rel=memory), compiled.name


def test_a_step_is_not_partitioned_where_that_is_not_asked_for(whole_steps, monkeypatch):
  replace_partitioner(monkeypatch, partitioned_step=None)
  layout = next(iter(random_layouts(1, 5).values()))
  assert Estimator(transformer()).estimate(layout, 'h100:8', partition=False).source == 'estimated'
  replace_partitioner(monkeypatch, can_partition=lambda platform: False)
  assert Estimator(transformer()).estimate(layout, 'h100:8').source == 'estimated'


PARTITIONED = 'XLA for GPUs partitions the step, without a GPU'


@pytest.mark.parametrize(
  ('target', 'is_able', 'unchecked'),
  [
    ('h100:8', False, [f"{UNCHECKED}; with pip install 'flax-spmd[cuda]', {PARTITIONED}"]),
    ('h100:8', True, [UNCHECKED]),
    ('mi300:8', False, [UNCHECKED]),
    ('v5e:2x4', False, [TPU_DOUBT]),
    ('v5e:2x4', True, [TPU_DOUBT]),
    ('cpu:8', False, [UNCHECKED]),
  ],
)
def test_every_estimate_whose_step_is_not_partitioned_is_in_doubt(
  target, is_able, unchecked, monkeypatch
):
  replace_partitioner(monkeypatch, can_partition=lambda platform: is_able)
  layout = next(iter(random_layouts(1, 5).values()))
  doubts = Estimator(transformer()).estimate(layout, target, partition=False).doubts
  assert [one for one in doubts if one.startswith((TPU_DOUBT, UNCHECKED))] == unchecked


def test_a_step_that_cannot_be_partitioned_is_estimated(monkeypatch):
  replace_partitioner(monkeypatch, can_partition=lambda platform: True)
  layout = next(iter(random_layouts(1, 5).values()))  # the partitioner returns nothing in these tests
  estimator = Estimator(transformer())
  outcome, plain = (
    estimator.estimate(layout, 'h100:8', partition=is_asked) for is_asked in (True, False)
  )
  assert outcome == plain and UNCHECKED in plain.doubts
  assert partitioned_step(b'no program', {'a': 8}, parse_target('h100:8')) is None


def test_kernels_with_unknown_costs_remain_in_doubt(monkeypatch):
  """Calls of the compiler's own are opaque, too; only those of the program are a doubt."""

  def step(state, x):
    call = jax.ffi.ffi_call('strange', jax.ShapeDtypeStruct(x.shape, x.dtype))
    return state, jnp.sum(call(x) * state['w'])

  replace_partitioner(monkeypatch, can_partition=lambda platform: True)
  found = PartitionedStep(Counts(1.0, 2.0, (), (('strange', 1), ('TopK', 1)), ()), memory=2**20)
  replace_partitioner(monkeypatch, partitioned_step=lambda code, sizes, target: found)
  batch = jax.ShapeDtypeStruct((64,), jnp.float32)
  outcome = Estimator(TrainStep(step, lambda: {'w': jnp.ones(())}, batch)).estimate(DATA, 'h100:8')
  assert outcome.source == 'partitioned' and outcome.counts == found.counts
  assert outcome.memory.peak == 2**20
  [doubt] = outcome.doubts
  assert doubt.endswith(': the costs of the kernel strange are unknown')


def test_a_step_whose_arrays_are_fetched_from_the_host(whole_steps, gpu_compiler):
  """What is fetched occupies memory beside the arguments."""

  def step(state, x):
    gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(state['w'])
    moment = 0.9 * state['moment'] + gradient
    return {'w': state['w'] - 0.1 * moment, 'moment': moment}, ()

  create = lambda: {name: jnp.ones((1024, 1024)) for name in ('w', 'moment')}
  train_step = TrainStep(step, create, jax.ShapeDtypeStruct((64, 1024), jnp.float32))
  layout = DATA.replace(rules=(('batch', 'a'), ('^moment', spmd.host(spmd.fsdp('a')))))
  outcome = Estimator(train_step).estimate(layout, 'h100:8')
  compiled = compare(train_step, {'data': layout}, 'h100:8')['data']
  assert_alike(outcome, compiled)
  assert outcome.memory == compiled.memory
  assert outcome.memory.host == 1024 * 1024 * 4 // 8 <= outcome.memory.temporaries


def test_a_step_is_compiled_under_the_flags_that_the_user_has_now(
  whole_steps, gpu_compiler, tmp_path, monkeypatch
):
  """Neither the process that partitions, nor results that are remembered or cached, have those of earlier calls."""

  def step(state, x):
    gradient = jax.grad(lambda state: jnp.sum(jnp.tanh(jnp.tanh(x @ state['w']) @ state['v'])))(state)
    return jax.tree.map(jnp.subtract, state, gradient), ()

  create = lambda: {'w': jnp.ones((64, 64)), 'v': jnp.ones((64, 64))}
  train_step = TrainStep(step, create, jax.ShapeDtypeStruct((64, 64), jnp.float32))
  monkeypatch.setenv('FLAX_SPMD_CACHE', str(tmp_path))
  estimator, sent, cached = Estimator(train_step), [], []
  for flags in ('', '--xla_gpu_all_reduce_combine_threshold_bytes=1', ''):
    monkeypatch.setenv('XLA_FLAGS', flags)
    compiled = compare(train_step, {'data': DATA}, 'h100:8')['data']
    for outcome in (estimator.estimate(DATA, 'h100:8'), compiled):
      sent.append(sorted(one.bytes for one in outcome.counts.collectives))
    cached.append(compiled.compiled.cached)
  together, apart = [2.0 * 64 * 64 * 4], [64 * 64 * 4.0] * 2
  assert sent == [together, together, apart, apart, together, together]
  assert cached == [False, False, True]


def test_passes_that_the_user_excludes_are_excluded(monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', '--xla_disable_hlo_passes=cse,dce --xla_gpu_autotune_level=0')
  assert without_passes('fusion') == {
    'xla_disable_hlo_passes': 'cse,dce,config-assigner,autotuner,fusion'
  }
  monkeypatch.setenv('XLA_FLAGS', '')
  assert without_passes() == {'xla_disable_hlo_passes': 'config-assigner,autotuner'}
