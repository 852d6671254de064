"""Comparisons of training steps as people write them; for a GPU and a TPU too, if their compilers are installed."""

import functools
import math
from textwrap import dedent

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd._src.compare.compilation import check_compiler
from flax_spmd.errors import TargetDeviceError
from flax_spmd.explore import TrainStep, compare, parse_target

LAYERS, BATCH, EMBED, MLP = 4, 1024, 32, 128
PRODUCT = 2 * BATCH * EMBED * MLP  # FLOPs of a product of a batch and a weight
FORWARD = 2 * LAYERS * PRODUCT
WEIGHTS = 2 * LAYERS * EMBED * MLP


class Block(nn.Module):
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x, _=None):
    h = self._constrain(nn.relu(x @ self._weight('up', 'embed', 'mlp')), 'mlp')
    return self._constrain(x + h @ self._weight('down', 'mlp', 'embed'), None), None

  def _constrain(self, x, name):
    return spmd.with_logical_constraint(x, ('batch', name))

  def _weight(self, name, *names):
    init = spmd.with_logical_partitioning(nn.initializers.lecun_normal(), names)
    sizes = {'embed': EMBED, 'mlp': MLP}
    return self.param(name, init, tuple(sizes[axis] for axis in names)).astype(self.dtype)


class Model(nn.Module):
  scan: bool = True
  remat: bool = False
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x):
    block = nn.remat(Block, prevent_cse=not self.scan) if self.remat else Block
    x = x.astype(self.dtype)
    if not self.scan:
      for number in range(LAYERS):
        x, _ = block(self.dtype, name=f'block_{number}')(x)
      return x
    stack = nn.scan(
      block,
      length=LAYERS,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      metadata_params={nn.PARTITION_NAME: 'layers'},
    )
    return stack(self.dtype, name='blocks')(x, None)[0]


def create(model=None, tx=None):
  model = model or Model()
  params = model.init(jax.random.key(0), jnp.ones((1, EMBED)))['params']
  return TrainState.create(apply_fn=model.apply, params=params, tx=tx or optax.adamw(1e-3))


def loss_of(params, apply, x):
  return jnp.mean(apply({'params': params}, x).astype(jnp.float32) ** 2)


def step(state, x):
  loss, grads = jax.value_and_grad(loss_of)(state.params, state.apply_fn, x)
  return state.apply_gradients(grads=grads), loss


def layouts(devices=8):
  data, both = {'data': devices}, {'data': devices // 4, 'model': 4}
  return {
    'data': spmd.Layout(spmd.abstract_mesh(data), (('batch', 'data'),)),
    'fsdp': spmd.Layout(spmd.abstract_mesh(data), (('batch', 'data'), ('embed', 'data'))),
    'tensor': spmd.Layout(spmd.abstract_mesh(both), (('batch', 'data'), ('mlp', 'model'))),
  }


X = jax.ShapeDtypeStruct((BATCH, EMBED), jnp.float32)


def on_cpu(names, a_step=step, make=create, batch=X, placements=None):
  given = {name: layout for name, layout in layouts().items() if name in names.split()}
  return compare(TrainStep(a_step, make, batch, placements=placements), given, 'cpu:8')


@functools.cache
def plain():
  return on_cpu('data fsdp tensor')


def flops(model):
  """The FLOPs of a step of a model on each of 8 devices."""
  recomputed = FORWARD / 2 if model.remat else 0  # only the first product of a layer
  return (3 * FORWARD + recomputed) / 8


def kinds(outcome):
  """Bytes on the wire by kind of collective, without those of the loss."""
  return {kind: wire for kind, wire in outcome.counts.by_kind().items() if wire > 1000}


# -- forms of a model


def test_scanned_layers_count_once_per_trip():
  for outcome in plain():
    assert outcome.counts.flops == flops(Model())
    assert any(one.trips == LAYERS for one in outcome.counts.loops)
  assert kinds(plain()['data']) == {'all-reduce': pytest.approx(2 * 4 * WEIGHTS * 7 / 8, rel=1e-3)}


def test_unrolled_layers_count_as_scanned_ones():
  result = on_cpu('data tensor', make=lambda: create(Model(scan=False)))
  for name in ('data', 'tensor'):
    one, other = result[name], plain()[name]
    # Without a loop the compiler can remove the unused gradient of the first layer's input.
    assert one.counts.flops in (flops(Model()), flops(Model()) - PRODUCT / 8)
    assert one.counts.loops == ()
    assert one.memory.parameters == other.memory.parameters
    assert sum(kinds(one).values()) == pytest.approx(sum(kinds(other).values()), rel=0.25)


def test_remat_recomputes_and_saves_memory():
  model = Model(remat=True)
  remat, kept = on_cpu('data', make=lambda: create(model))['data'], plain()['data']
  assert kept.counts.flops < remat.counts.flops == flops(model)
  assert remat.memory.temporaries < kept.memory.temporaries


def test_remat_of_unrolled_layers_may_be_undone():
  remat = on_cpu('data', make=lambda: create(Model(scan=False, remat=True)))['data']
  # Some versions of the CPU's compiler undo the rematerialisation, and the counts are of the compiled program.
  assert flops(Model()) - PRODUCT / 8 <= remat.counts.flops <= flops(Model(remat=True))
  assert remat.memory.temporaries <= plain()['data'].memory.temporaries


def test_a_state_without_boxes():
  def make():
    return spmd.unbox(create())

  rules = {
    'paths': (('batch', 'data'), ('/up$', P(None, 'data', None)), ('/down$', P(None, None, 'data'))),
    'fsdp': (('batch', 'data'), spmd.fsdp('data', min_size=256)),
  }
  given = {name: spmd.Layout(spmd.abstract_mesh({'data': 8}), table) for name, table in rules.items()}
  result = compare(TrainStep(step, make, X), given, 'cpu:8')
  for outcome in result:
    assert outcome.memory.parameters == plain()['fsdp'].memory.parameters
    assert outcome.memory.optimizer == plain()['fsdp'].memory.optimizer
    assert outcome.counts.flops == flops(Model())
  assert result['paths'].counts.by_kind() == plain()['fsdp'].counts.by_kind()


# -- forms of a step


def accumulated(state, x, parts=4):
  """A step that sums the gradients of parts of the batch."""

  def add(sums, part):
    part = spmd.with_logical_constraint(part, ('batch', None))
    result = jax.value_and_grad(loss_of)(state.params, state.apply_fn, part)
    return jax.tree.map(jnp.add, sums, result), None

  zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params)
  (loss, grads), _ = jax.lax.scan(add, zeros, x.reshape(parts, -1, x.shape[1]))
  return state.apply_gradients(grads=jax.tree.map(lambda grad: grad / parts, grads)), loss / parts


def test_gradient_accumulation():
  result = on_cpu('data tensor', accumulated)
  for outcome in result:
    assert outcome.counts.flops == flops(Model())
    assert max(one.trips for one in outcome.counts.loops) == LAYERS
  once = plain()['data'].counts.by_kind()['all-reduce']
  assert kinds(result['data'])['all-reduce'] == pytest.approx(4 * once, rel=0.01)  # once per part


def test_placements_of_several_arrays_in_a_batch():
  def weighted(state, batch):
    def loss(params):
      y = state.apply_fn({'params': params}, batch['x'])
      return jnp.mean(y**2 * batch['weight'][:, None])

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value

  batch = {'x': jnp.ones((BATCH, EMBED)), 'weight': jnp.ones(BATCH)}
  placements = {'x': ('batch', None), 'weight': ('batch',)}
  by_default = on_cpu('data', weighted, batch=batch)['data']
  given = on_cpu('data', weighted, batch=batch, placements=placements)['data']
  assert by_default.memory == given.memory
  assert given.memory.batch == 4 * (BATCH * EMBED + BATCH) // 8
  replicated = on_cpu('data', weighted, batch=batch, placements=P())['data']
  assert replicated.memory.batch == 8 * given.memory.batch


# -- dtypes


def test_mixed_precision():
  result = on_cpu('data', make=lambda: create(Model(dtype=jnp.bfloat16)))['data']
  assert result.program.dtype == 'bf16' and plain()['data'].program.dtype == 'f32'
  assert result.memory.parameters == plain()['data'].memory.parameters  # they stay float32
  assert result.counts.flops == flops(Model())


def test_parameters_and_moments_in_bf16():
  def make():
    floating = lambda leaf: jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if floating(leaf) else leaf, create())

  result = on_cpu('fsdp', make=make)['fsdp']
  whole = plain()['fsdp'].memory
  assert 2 * result.memory.parameters == whole.parameters
  assert result.memory.optimizer == 4 + (whole.optimizer - 4) // 2  # and a count


def test_int8_leaves():
  def make():
    return {'w': spmd.LogicallyPartitioned(jnp.zeros((EMBED, MLP), jnp.int8), ('embed', 'mlp'))}

  def quantised(state, x):
    y = jax.lax.dot_general(
      x, state['w'].unbox(), (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32
    )
    return state, jnp.sum(spmd.with_logical_constraint(y, ('batch', 'mlp')))

  result = on_cpu('tensor', quantised, make, jax.ShapeDtypeStruct((BATCH, EMBED), jnp.int8))['tensor']
  assert result.program.dtype == 'int8'
  assert result.memory.rest == EMBED * MLP // 4
  assert result.counts.flops == PRODUCT / 8
  assert result.cost.compute > 0


# -- optimizers


CHAINS = {
  'clipped': lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
  'momentum': lambda: optax.sgd(1e-2, momentum=0.9),
  'masked': lambda: optax.chain(
    optax.masked(optax.add_decayed_weights(0.1), lambda p: jax.tree.map(lambda leaf: leaf.ndim > 2, p)),
    optax.scale_by_adam(mu_dtype=jnp.bfloat16),
    optax.scale_by_schedule(optax.warmup_cosine_decay_schedule(0, 1e-3, 10, 100)),
  ),
  'factored': lambda: optax.adafactor(1e-3, min_dim_size_to_factor=16),
  'several steps': lambda: optax.MultiSteps(optax.adam(1e-3), every_k_schedule=2),
}
MOMENTS = {'clipped': 2, 'momentum': 1, 'masked': 1.5, 'several steps': 3}


@pytest.mark.parametrize('name', CHAINS)
def test_chains_of_optax(name):
  result = on_cpu('fsdp', make=lambda: create(tx=CHAINS[name]()))['fsdp']
  assert result.error is None and result.counts.flops == flops(Model())
  parameters, optimizer = result.memory.parameters, result.memory.optimizer
  assert parameters == 4 * WEIGHTS // 8
  if name in MOMENTS:
    assert optimizer == pytest.approx(MOMENTS[name] * parameters, abs=64)
  else:
    assert 0 < optimizer < parameters


# -- opaque calls


def test_a_block_in_shard_map_is_counted():
  mesh = spmd.abstract_mesh({'data': 2, 'model': 4})

  def block(x, w):
    return jax.lax.psum(x @ w, 'model')

  def by_hand(state, x):
    specs = (P('data', 'model'), P('model', None))
    here = jax.sharding.get_abstract_mesh()
    y = jax.shard_map(block, mesh=here, in_specs=specs, out_specs=P('data', None))(x, state['w'].unbox())
    return state, jnp.sum(y)

  def make():
    return {'w': spmd.LogicallyPartitioned(jnp.ones((MLP, EMBED)), ('mlp', 'embed'))}

  x = jax.ShapeDtypeStruct((BATCH, MLP), jnp.float32)
  layout = spmd.Layout(mesh, (('batch', 'data'), ('mlp', 'model')))
  train_step = TrainStep(by_hand, make, x, placements=('batch', 'mlp'))
  result = compare(train_step, {'by hand': layout}, 'cpu:8')['by hand']
  assert result.counts.flops == PRODUCT / 8 and result.counts.opaque == ()
  [largest] = [one for one in result.counts.collectives if one.axes == ('model',)]
  assert (largest.kind, largest.group, largest.bytes) == ('all-reduce', 4, 4 * BATCH * EMBED // 2)


def test_a_custom_call_is_flagged(tmp_path):
  def factorised(state, x):
    return state, jnp.sum(jnp.linalg.qr(x @ state['w'].unbox())[1])

  def make():
    return {'w': spmd.LogicallyPartitioned(jnp.ones((EMBED, MLP)), ('embed', 'mlp'))}

  result = on_cpu('data', factorised, make)
  opaque = dict(result['data'].counts.opaque)
  assert opaque and all('lapack' in name for name in opaque)
  [line] = [line for line in str(result).splitlines() if line.startswith('  not counted: ')]
  assert next(iter(opaque)) in line
  result.to_html(tmp_path / 'report.html')
  assert f'Not counted: {next(iter(opaque))} x 1' in (tmp_path / 'report.html').read_text()


# -- compilers for other targets


def unless_missing(target):
  try:
    check_compiler(parse_target(target))
    return ()
  except TargetDeviceError as error:
    return pytest.mark.skip(reason=str(error).splitlines()[0])


@pytest.mark.parametrize(
  'target', [pytest.param(name, marks=unless_missing(name)) for name in ('h100:8', 'v5e:2x4')]
)
def test_other_targets(target, tmp_path):
  model = Model(dtype=jnp.bfloat16)
  given = {name: layout for name, layout in layouts().items() if name != 'data'}
  result = compare(TrainStep(step, lambda: create(model), X), given, target, jobs=1)
  for outcome in result:
    assert outcome.error is None and outcome.fits
    assert outcome.memory.parameters == plain()[outcome.name].memory.parameters
    assert math.isclose(outcome.counts.flops, flops(model), rel_tol=0.05)
    assert outcome.cost.low <= outcome.cost.high
  assert 'all-gather' in result['fsdp'].counts.by_kind()
  assert ('model',) in result['tensor'].counts.by_axis()
  assert any('training_steps_test.py' in one.source for one in result['tensor'].counts.collectives)
  result.to_html(tmp_path / 'report.html')


def test_a_missing_compiler_names_the_wheel_to_install(monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  with pytest.raises(TargetDeviceError) as caught:
    compare(TrainStep(step, create, X), layouts(), 'h100:8')
  assert str(caught.value) == dedent("""\
    There is no compiler for h100:8 on this machine: the wheel jax-cuda12-plugin is not installed.
    Fix: pip install 'flax-spmd[cuda]'""")


def pmean_step(reduce, state, x):
  def loss_fn(state):
    return jnp.mean(jnp.square(jnp.tanh(x @ state['w']) @ state['v']))

  loss, grads = reduce(jax.value_and_grad(loss_fn)(state))
  return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss


def pmean_steps():
  """A step over the whole batch, and the same as it is written for `jax.pmap`."""
  create = lambda: {'w': jnp.ones((64, 128)), 'v': jnp.ones((128, 64))}
  batch = jax.ShapeDtypeStruct((64, 64), jnp.float32)
  whole = functools.partial(pmean_step, lambda x: x)
  in_groups = functools.partial(pmean_step, lambda x: jax.lax.pmean(x, 'batch'))
  return TrainStep(whole, create, batch), TrainStep(in_groups, create, batch, axis_name='batch')


PMEAN_LAYOUTS = {
  'data': spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'),)),
  'fsdp': spmd.Layout(
    spmd.abstract_mesh({'data': 8}), (('batch', 'data'), spmd.fsdp('data', min_size=1))
  ),
  'no batch': spmd.Layout(spmd.abstract_mesh({'model': 8}), (('w$', P(None, 'model')),)),
}
CONSTRAINED = 'fsdp'  # the step over the whole batch has no names, so its batch is constrained here


@pytest.mark.slow
def test_a_step_for_pmap_has_the_flops_and_traffic_of_one_over_the_whole_batch():
  whole, in_groups = (compare(step, PMEAN_LAYOUTS, 'cpu:8') for step in pmean_steps())
  for name in PMEAN_LAYOUTS:
    assert in_groups[name].counts.flops == whole[name].counts.flops
    if name != CONSTRAINED:
      assert in_groups[name].counts.by_kind() == whole[name].counts.by_kind()


def test_a_step_for_pmap_is_estimated_and_searched():
  whole, in_groups = (spmd.explore.Estimator(step) for step in pmean_steps())
  for name, layout in PMEAN_LAYOUTS.items():
    one, other = (each.estimate(layout, parse_target('h100:8')).counts for each in (whole, in_groups))
    assert other.flops == one.flops
    if name != CONSTRAINED:
      assert other.by_kind() == one.by_kind()
  found = spmd.search(pmean_steps()[1], 'cpu:8', candidates=10, top=0, pin={'batch': 'data'})
  assert ('batch', 'data') in found.layout.rules.pairs
