"""States of pipelines: created on their stages, trained with different numbers of stages, saved and moved."""

import functools
import threading
from collections import Counter, defaultdict
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax.training.train_state import TrainState
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import PartitionSpec
from orbax.checkpoint import v1

import flax_spmd as spmd
from flax_spmd._src.pipeline.run.call_list import Call, Send
from flax_spmd.pipeline import (
  DualPipeV,
  Eager1F1B,
  GPipe,
  Interleaved1F1B,
  InterleavedGPipe,
  KimiK2,
  Mean,
  OneFOneB,
  Stack,
  ZeroBubbleH1,
  ZeroBubbleV,
  accumulate,
  stage_end,
)
from tests.versions import ON_NEW_JAX

LAYERS, MICROBATCHES, ROWS, WIDTH = 8, 8, 8, 16
NUMBERS = (4, 2, 8)
EACH_NUMBER = [pytest.param(n, marks=[] if n == 4 else pytest.mark.exhaustive) for n in NUMBERS]
RULES = (('batch', 'data'), spmd.fsdp('data', min_size=64))
BATCH_NAMES = (None, 'batch', None)
ADAM = optax.adam(1e-2, eps=1e-3)
UNSTAGED = spmd.Layout({'data': 8}, RULES)


class Model(nn.Module):
  """A stack of layers, in stages of equal length."""

  stages: int = 1

  @nn.compact
  def __call__(self, x):
    for number in range(LAYERS):
      x = jnp.tanh(nn.Dense(WIDTH, name=f'layer_{number}')(x))
      if (number + 1) % (LAYERS // self.stages) == 0:
        x = stage_end(x)
    return x


def slow_on_new_jax(test):
  """Marks a test as slow, and for the new JAX only."""
  for mark in (pytest.mark.slow, *ON_NEW_JAX):
    test = mark(test)
  return test


def create(tx=ADAM):
  params = Model().init(jax.random.key(0), jnp.ones((1, WIDTH)))['params']
  return TrainState.create(apply_fn=None, params=params, tx=tx)


def train_step(stages=1, schedule=None):
  def step(state, batch):
    def loss_fn(params, x, y):
      return jnp.mean((Model(stages).apply({'params': params}, x) - y) ** 2)

    def of_one(one):
      return jax.value_and_grad(loss_fn)(state.params, *one)

    loss, grads = accumulate(of_one, batch, schedule, Mean)
    return state.apply_gradients(grads=grads), loss

  return step


def batch():
  x = np.asarray(jax.random.normal(jax.random.key(1), (MICROBATCHES, ROWS, WIDTH)))
  return x, np.sin(3 * x)


@functools.cache
def layout_of(stages):
  return spmd.Layout({'stage': stages, 'data': 8 // stages}, RULES)


@functools.cache
def pipeline(stages):
  """The step over a number of stages, its compiled pipeline, and its batch."""
  layout = layout_of(stages)
  step = layout.pipeline_jit(train_step(stages, OneFOneB(stages)))
  placed = layout.shard(batch(), BATCH_NAMES)
  return step, step.compile(layout.abstract(create), placed), placed


@functools.cache
def without_stages():
  return UNSTAGED.jit(train_step()), UNSTAGED.shard(batch(), BATCH_NAMES)


@functools.cache
def trained(steps):
  """The state after some steps without stages, and the loss of each step."""
  step, state, losses = jax.jit(train_step()), jax.jit(create)(), []
  for _ in range(steps):
    state, loss = step(state, batch())
    losses.append(float(loss))
  return jax.device_get(state), losses


def staged(steps=2):
  """A state over four stages, after some steps."""
  step, compiled, placed = pipeline(4)
  state = compiled.init(create)
  for _ in range(steps):
    state, _ = step(state, placed)
  return state


def state_shardings(compiled, argument=0):
  return compiled.input_shardings[0][argument]


def assert_equal(result, expected, atol=0.0):
  assert jax.tree.structure(result) == jax.tree.structure(expected)
  pairs = zip(jax.tree_util.tree_leaves_with_path(result), jax.tree.leaves(expected), strict=True)
  for (path, leaf), other in pairs:
    where = jax.tree_util.keystr(path)
    assert leaf.shape == other.shape and leaf.dtype == other.dtype, where
    np.testing.assert_allclose(np.asarray(leaf), np.asarray(other), 0, atol, err_msg=where)


def assert_shardings(tree, shardings):
  def check(path, leaf, sharding):
    assert leaf.sharding == sharding, f'{jax.tree_util.keystr(path)}: {leaf.sharding}, not {sharding}'

  jax.tree_util.tree_map_with_path(check, tree, shardings)


def devices(array):
  return sorted(device.id for device in array.devices())


# -- creation


def test_an_optimizer_that_each_call_of_create_makes():
  """Its functions differ from those that the pipeline was compiled with, as under `jax.jit`, which traces anew, too."""
  step = layout_of(4).pipeline_jit(train_step(4, OneFOneB(4)))
  compiled = step.compile(layout_of(4).abstract(lambda: create(optax.sgd(0.1))), batch())
  with pytest.warns(UserWarning) as caught:
    state = compiled.init(lambda: create(optax.sgd(0.3)))
  assert [str(one.message) for one in caught] == [
    'create returns the arrays that the pipeline was compiled for, in a state of another structure: an object in it that '
    'is no array differs, such as an optimizer that each call of create makes anew. The pipeline compiles anew for this '
    'state.\nFix: make such objects once, outside of create.'
  ]
  assert_shardings(
    state, jax.tree.structure(state).unflatten(jax.tree.leaves(state_shardings(compiled)))
  )
  result, _ = step(state, batch())
  expected, _ = jax.jit(train_step())(create(state.tx), batch())
  assert_equal(result, expected, 1e-6)


def test_a_state_of_other_paths():
  compiled = pipeline(4)[1]
  with pytest.raises(spmd.errors.PipelineError) as error:
    compiled.init(
      lambda: create().replace(opt_state={'ema': jnp.ones(2)}, params={'layer_0': jnp.ones(2)})
    )
  lines = str(error.value).splitlines()
  assert lines[:3] == [
    'create returns a state of another structure than the pipeline was compiled for:',
    '  params/layer_0/bias: missing',
    '  params/layer_0/kernel: missing',
  ]
  assert lines[-1] == 'Fix: pass the function that creates the state that the pipeline was compiled for.'


# -- different numbers of stages


@slow_on_new_jax
def test_one_state_on_4_2_8_and_no_stages():
  state, losses = pipeline(4)[1].init(create), []
  for stages in NUMBERS:
    step, compiled, placed = pipeline(stages)
    state = jax.device_put(state, state_shardings(compiled))
    for _ in range(2):
      state, loss = step(state, placed)
      losses.append(float(loss))
    assert_shardings(state, state_shardings(compiled))
  step, placed = without_stages()
  state = UNSTAGED.shard(state)
  for _ in range(2):
    state, loss = step(state, placed)
    losses.append(float(loss))
  expected, expected_losses = trained(8)
  np.testing.assert_allclose(losses, expected_losses, 0, 1e-6)
  assert_equal(state, expected, 1e-6)


@pytest.mark.parametrize('stages', EACH_NUMBER)
def test_a_step_accepts_states_of_other_layouts(stages):
  step, _, placed = pipeline(stages)
  expected, [*_, expected_loss] = trained(3)
  for state in (trained(2)[0], staged(), UNSTAGED.shard(trained(2)[0])):
    result, loss = step(state, placed)
    np.testing.assert_allclose(loss, expected_loss, 0, 1e-6)
    assert_equal(result, expected, 1e-6)


@pytest.mark.parametrize('stages', EACH_NUMBER)
def test_a_round_trip_to_one_mesh_changes_nothing(stages):
  compiled = pipeline(stages)[1]
  state = jax.device_put(staged(), state_shardings(compiled))
  whole = UNSTAGED.shard(state)
  assert_equal(whole, state)
  assert devices(whole.params['layer_0']['kernel']) == list(range(8))
  assert_shardings(whole, jax.tree.map(lambda x: x.sharding, UNSTAGED.init(create)))
  back = jax.device_put(whole, state_shardings(compiled))
  assert_equal(back, state)
  assert_shardings(back, state_shardings(compiled))


# -- a staged state is a tree of arrays


def test_device_get():
  result = jax.device_get(staged())
  assert all(isinstance(leaf, (np.ndarray, np.generic)) for leaf in jax.tree.leaves(result))
  assert_equal(result, trained(2)[0], 1e-6)


def test_printing():
  state = staged()
  kernel = state.params['layer_3']['kernel']
  assert str(kernel) == str(np.asarray(kernel))
  assert repr(kernel).startswith('Array([[')
  assert str(state.step) == '2' and f'{state.step}' == '2'
  assert 'layer_7' in repr(state)


def test_tree_map_leaves_arrays_where_they_are():
  state = staged()
  doubled = jax.tree.map(lambda x: 2 * x, state.params)
  summed = jax.tree.map(jnp.add, doubled, state.params)
  shardings = state_shardings(pipeline(4)[1]).params
  assert_shardings(summed, shardings)
  assert_equal(summed, jax.tree.map(lambda x: 3 * x, jax.device_get(state.params)), 1e-6)


def test_optax_functions_leaf_by_leaf():
  state, host = staged(), jax.device_get(staged())
  moments = state.opt_state[0].mu
  result = {
    'apply_updates': optax.apply_updates(state.params, moments),
    'incremental_update': optax.incremental_update(moments, state.params, 0.1),
    'scale': optax.tree.scale(0.5, state.params),
    'zeros_like': optax.tree.zeros_like(state.params),
    'init': ADAM.init(state.params)[0].nu,
    'get': optax.tree.get(state.opt_state, 'mu'),
    'cast': optax.tree.cast(state.params, jnp.bfloat16),
  }
  params, mu = host.params, host.opt_state[0].mu
  expected = {
    'apply_updates': optax.apply_updates(params, mu),
    'incremental_update': optax.incremental_update(mu, params, 0.1),
    'scale': optax.tree.scale(0.5, params),
    'zeros_like': optax.tree.zeros_like(params),
    'init': ADAM.init(params)[0].nu,
    'get': mu,
    'cast': optax.tree.cast(params, jnp.bfloat16),
  }
  for name, tree in result.items():
    assert_shardings(tree, state_shardings(pipeline(4)[1]).params)
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(np.float32(x), np.float32(y), 0, 1e-6),
      tree,
      expected[name],
    )


def test_a_norm_over_all_leaves():
  """A reduction over arrays of several ranks needs them on one mesh."""
  state, expected = staged(), optax.tree.norm(trained(2)[0].params)
  np.testing.assert_allclose(jax.jit(optax.tree.norm)(UNSTAGED.shard(state.params)), expected, 1e-6)
  np.testing.assert_allclose(optax.tree.norm(jax.device_get(state.params)), expected, 1e-6)


# -- initialization and shardings


@pytest.mark.parametrize('stages', EACH_NUMBER)
def test_init_equals_that_of_the_layout_on_the_devices_of_the_stages(stages):
  compiled = pipeline(stages)[1]
  state = compiled.init(create)
  assert_equal(state, layout_of(stages).init(create), 1e-7)
  assert_shardings(state, state_shardings(compiled))
  for number in range(LAYERS):
    rank, each = number * stages // LAYERS, 8 // stages
    own = list(range(rank * each, (rank + 1) * each))
    for tree in (state.params, state.opt_state[0].mu, state.opt_state[0].nu):
      assert devices(tree[f'layer_{number}']['kernel']) == own
      assert devices(tree[f'layer_{number}']['bias']) == own


def test_init_of_two_stages_per_rank():
  layout, schedule = layout_of(4), Interleaved1F1B(4, chunks=2)
  step = layout.pipeline_jit(train_step(8, schedule))
  compiled = step.compile(layout.abstract(create), layout.shard(batch(), BATCH_NAMES))
  state = compiled.init(create)
  result = [devices(state.params[f'layer_{number}']['kernel'])[0] // 2 for number in range(LAYERS)]
  assert tuple(result) == schedule.stage_ranks == (0, 1, 2, 3, 0, 1, 2, 3)
  new, loss = compiled(state, layout.shard(batch(), BATCH_NAMES))
  np.testing.assert_allclose(loss, trained(1)[1][0], 0, 1e-6)
  assert_equal(new, trained(1)[0], 1e-6)


def test_init_with_arguments_other_than_arrays():
  compiled = pipeline(4)[1]

  def create_by(key, model, tx, scale):
    params = model.init(key, jnp.ones((1, WIDTH)))['params']
    return TrainState.create(apply_fn=None, params=jax.tree.map(lambda x: scale * x, params), tx=tx)

  state = compiled.init(create_by, jax.random.key(0), Model(2), tx=ADAM, scale=1)
  assert_equal(state, jax.jit(create)(), 1e-7)


def test_input_shardings():
  _, compiled, placed = pipeline(4)
  (state, (x, y)), named = compiled.input_shardings
  assert named == {}
  ids = [sorted(device.id for device in sharding.device_set) for sharding in (x, y, state.step)]
  assert ids == [[0, 1], [6, 7], list(range(8))]
  kernel = state.params['layer_2']['kernel']
  assert kernel.spec == PartitionSpec('data')
  assert sorted(device.id for device in kernel.device_set) == [2, 3]
  assert kernel == state.opt_state[0].mu['layer_2']['kernel']
  assert jax.tree.structure(state) == jax.tree.structure(create())


def test_results_have_the_shardings_of_the_next_step():
  step, compiled, placed = pipeline(4)
  assert_shardings(staged(1), state_shardings(compiled))
  there = jax.device_put(placed, state_shardings(compiled, 1))
  assert_shardings(there, state_shardings(compiled, 1))
  new, _ = compiled(staged(1), there)
  assert_equal(new, staged(2))


# -- checkpoints


def target(stages):
  """The restore target for a number of stages; None: without stages."""
  if stages is None:
    return UNSTAGED.abstract(create)
  return jax.tree.map(
    lambda x, sharding: x.update(sharding=sharding),
    layout_of(stages).abstract(create),
    state_shardings(pipeline(stages)[1]),
  )


def save_here(path, state):
  spmd.checkpoint.save(path, state, layout=layout_of(4))


def orbax_load(path, abstract):
  return v1.load(path, abstract)


WAYS = {
  'spmd': (save_here, spmd.checkpoint.restore),
  'orbax': (v1.save, orbax_load),
  'orbax, then spmd': (v1.save, spmd.checkpoint.restore),
}


@pytest.mark.parametrize(
  'stages', [*(pytest.param(count, marks=pytest.mark.exhaustive) for count in (4, 8)), 2, None], ids=str
)
@pytest.mark.parametrize('way', WAYS.values(), ids=list(WAYS))
def test_saved_with_4_stages_and_restored(way, stages, tmp_path):
  save, restore = way
  state = staged()
  save(tmp_path / 'four', state)
  restored = restore(tmp_path / 'four', target(stages))
  assert_equal(restored, state)
  assert_shardings(restored, jax.tree.map(lambda x: x.sharding, target(stages)))
  step, placed = without_stages() if stages is None else pipeline(stages)[::2]
  new, loss = step(restored, placed)
  np.testing.assert_allclose(loss, trained(3)[1][2], 0, 1e-6)
  assert_equal(new, trained(3)[0], 1e-6)


def test_a_restored_state_needs_no_other_programs(tmp_path):
  """The number of steps has a weak type, as it began as a number of Python."""
  save_here(tmp_path / 'four', staged())
  step, compiled, placed = pipeline(2)
  restored = spmd.checkpoint.restore(tmp_path / 'four', target(2))
  assert restored.step.weak_type
  assert step.compile(restored, placed) is compiled


def test_saved_without_stages_and_restored_with_4(tmp_path):
  state = UNSTAGED.shard(trained(2)[0])
  spmd.checkpoint.save(tmp_path / 'none', state, layout=UNSTAGED)
  restored = spmd.checkpoint.restore(tmp_path / 'none', target(4))
  assert_shardings(restored, state_shardings(pipeline(4)[1]))
  new, _ = pipeline(4)[0](restored, pipeline(4)[2])
  assert_equal(new, trained(3)[0], 1e-6)


# -- transfers of optimizers

OPTIMIZERS = {
  'sgd': optax.sgd(1e-2),
  'momentum': optax.sgd(1e-2, momentum=0.9),
  'adam': optax.adam(1e-2),
  'adamw': optax.adamw(1e-2),
  'clipped adam': optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
  'adafactor': optax.adafactor(1e-2, min_dim_size_to_factor=8),
  'lamb': optax.lamb(1e-2),
  'MultiSteps': optax.MultiSteps(optax.adam(1e-2), 2),
  'apply_if_finite': optax.apply_if_finite(optax.adam(1e-2), 3),
  'ema of updates': optax.chain(optax.adam(1e-2), optax.ema(0.9)),
}


class Averaged(TrainState):
  """A state with an average of its parameters."""

  ema: dict

  def apply_gradients(self, *, grads, **kwargs):
    new = super().apply_gradients(grads=grads, **kwargs)
    return new.replace(ema=optax.incremental_update(new.params, self.ema, 0.1))


def create_averaged():
  state = create()
  return Averaged.create(apply_fn=None, params=state.params, tx=ADAM, ema=state.params)


STATES = {name: functools.partial(create, tx) for name, tx in OPTIMIZERS.items()}
STATES['ema of parameters'] = create_averaged


def moved_after_the_loop(call_list):
  """The bytes sent after the last task of the loop."""
  last = max(number for number, one in enumerate(call_list.calls) if isinstance(one, Call) and one.when)
  sends = [one for one in call_list.calls[last:] if isinstance(one, Send)]
  return sum(buffer.value.bytes for one in sends for buffer in one.inputs)


@pytest.mark.parametrize(
  'schedule',
  [OneFOneB(4), pytest.param(ZeroBubbleH1(4), marks=pytest.mark.exhaustive)],
  ids=['1f1b', 'zero_bubble'],
)
@pytest.mark.parametrize('create', STATES.values(), ids=list(STATES))
def test_an_optimizer_sends_at_most_1_kib(create, schedule):
  layout = layout_of(4)
  step = layout.pipeline_jit(train_step(4, schedule))
  result = step.lower(layout.abstract(create), layout.shard(batch(), BATCH_NAMES))
  assert moved_after_the_loop(result.call_list) <= 1024


@slow_on_new_jax
@pytest.mark.parametrize(
  'name',
  [
    'clipped adam',
    'ema of parameters',
    *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ('MultiSteps', 'adafactor')),
  ],
)
def test_an_optimizer_on_stages_equals_the_optimizer(name):
  layout, make = layout_of(2), STATES[name]
  step, placed = layout.pipeline_jit(train_step(2, OneFOneB(2))), layout.shard(batch(), BATCH_NAMES)
  plain, expected = jax.jit(train_step()), jax.jit(make)()
  compiled = step.compile(layout.abstract(make), placed)
  state = compiled.init(make)
  for _ in range(2):
    expected, _ = plain(expected, batch())
    state, _ = step(state, placed)
  assert_equal(state, expected, 1e-5)
  assert_shardings(state, state_shardings(compiled))


# -- lifetimes


SCHEDULES = [
  GPipe(4),
  OneFOneB(4),
  Eager1F1B(4),
  InterleavedGPipe(4),
  Interleaved1F1B(4),
  Interleaved1F1B(4, fuse='steady'),
  KimiK2(4),
  ZeroBubbleH1(4),
  ZeroBubbleV(4),
  DualPipeV(4),
  DualPipeV(4, fuse=True),
]


def microbatches_alive(call_list, schedule):
  """The peak number of microbatches that each rank keeps buffers of.

  The buffers of a microbatch on a stage live from the stage's first task to its last task that reads them. A
  forward that is merged into its backward has the inputs of that program.
  """
  calls = {
    task: one
    for one in call_list.calls
    if isinstance(one, Call) and one.when
    for task in one.when.step.tasks
  }
  peaks = []
  for order in schedule.tasks(MICROBATCHES):
    spans, alive = {}, {}  # by stage and microbatch: first and last step, and the buffers
    for number, task in ((number, task) for number, step in enumerate(order) for task in step.tasks):
      key, call = (task.stage, task.microbatch), calls.get(task)
      used = (
        {buffer for buffer in call.inputs if buffer.microbatch == task.microbatch} if call else set()
      )
      if key not in spans:
        spans[key] = number, number
      if call and key not in alive:
        alive[key] = used | {buffer for buffer in call.outputs if buffer.microbatch == task.microbatch}
      if not used.isdisjoint(alive.get(key, ())):
        spans[key] = spans[key][0], number
    live = (sum(start <= at <= end for start, end in spans.values()) for at in range(len(order)))
    peaks.append(max(live))
  return tuple(peaks)


@pytest.mark.parametrize('schedule', SCHEDULES, ids=str)
def test_residuals_live_as_long_as_in_the_schedule(schedule):
  layout = layout_of(4)
  step = layout.pipeline_jit(train_step(schedule.stages, schedule))
  lowered = step.lower(layout.abstract(create), layout.shard(batch(), BATCH_NAMES))
  assert microbatches_alive(lowered.call_list, schedule) == schedule.validate(MICROBATCHES).peaks


@pytest.mark.parametrize('schedule', [GPipe(4), OneFOneB(4), ZeroBubbleV(4)], ids=str)
def test_registers_are_emptied(schedule):
  """Each instruction reads filled registers; at the end only results and arguments are left."""
  layout = layout_of(4)
  step = layout.pipeline_jit(train_step(schedule.stages, schedule))
  compiled = step.compile(layout.abstract(create), layout.shard(batch(), BATCH_NAMES))
  machine = compiled.machine
  filled = {use.register for uses in machine.arguments for use in uses} | set(machine.constants)
  for one in machine.code:
    assert filled.issuperset(one.inputs)
    filled |= set(one.outputs)
    filled -= set(one.dead)
  results = {number for one in machine.results for number in one.registers}
  arguments = {use.register for uses in machine.arguments for use in uses}
  assert filled <= results | arguments | set(machine.constants)


# -- programs


def two_products(w, x):
  """Gradients of a weight of both stages, and all predictions."""

  def loss(w, x):
    y = stage_end(jnp.tanh(x @ w)) @ w
    return jnp.mean(y**2), y

  one = lambda x: jax.value_and_grad(loss, has_aux=True)(w, x)
  (_, predictions), grads = accumulate(one, x, OneFOneB(2), ((Mean, Stack), Mean))
  return grads, predictions


def test_programs_do_not_grow_with_the_microbatches():
  def programs(microbatches):
    shapes = jax.ShapeDtypeStruct((32, 32), jnp.float32), jnp.ones((microbatches, 8, 32))
    calls = layout_of(2).pipeline_jit(two_products).lower(*shapes).call_list.calls
    each = {one.program for one in calls if isinstance(one, Call)}
    return sorted((one.name, len(one.equations), len(one.inputs), len(one.outputs)) for one in each)

  assert programs(4) == programs(64)


def test_no_two_threads_share_a_context_of_programs():
  """One that lowers a program while another compiles may end the process with SIGSEGV."""
  contexts = defaultdict(list)  # by thread; kept, so that none is made anew at the place of another
  lower, compile_ = jax.stages.Traced.lower, jax.stages.Lowered.compile

  def noted(lowered):
    contexts[threading.get_ident()].append(lowered.compiler_ir('stablehlo').context)
    return lowered

  with (
    mock.patch.object(
      jax.stages.Traced, 'lower', lambda *args, **options: noted(lower(*args, **options))
    ),
    mock.patch.object(jax.stages.Lowered, 'compile', lambda lowered: compile_(noted(lowered))),
  ):
    layout_of(2).pipeline_jit(two_products).compile(jnp.eye(32), jnp.ones((4, 8, 32)))
  mine = {*map(id, contexts.pop(threading.get_ident()))}
  others = [one for each in contexts.values() for one in {*map(id, each)}]
  assert len(others) == len({*others} - mine) > 0


def test_a_result_is_kept_where_its_argument_is_used():
  """So the next step sends nothing. A prediction of the shape of the batch stays where it is computed."""
  w, x = jnp.eye(32), jnp.ones((4, 8, 32))
  compiled = layout_of(2).pipeline_jit(two_products).compile(w, x)
  grads, predictions = compiled(w, x)
  assert_equal((grads, predictions), jax.jit(two_products)(w, x), 1e-6)
  assert grads.sharding == compiled.input_shardings[0][0]
  assert len(devices(grads)) == 2 * len(devices(predictions)) == 8


def test_equal_stages_are_compiled_once():
  layers, stages = 32, 8
  layout = spmd.Layout({'stage': stages})

  def step(params, x):
    def loss_fn(params, x):
      for number in range(layers):
        x = jnp.tanh(x @ params[number])
        x = stage_end(x) if number % 4 == 3 else x
      return jnp.mean(x**2)

    def of_one(x):
      return jax.value_and_grad(loss_fn)(params, x)

    loss, grads = accumulate(of_one, x, OneFOneB(stages), Mean)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

  params = [jax.random.normal(jax.random.key(i), (WIDTH, WIDTH)) / 4 for i in range(layers)]
  compiled = layout.pipeline_jit(step).compile(params, batch()[0])
  own = Counter(unit.name.split('_')[0] for unit, one in compiled.executables.items() if not one.shared)
  every = Counter(unit.name.split('_')[0] for unit in compiled.executables)
  assert every['fwd'] == 7 and every['bwd'] == 8 and every['end'] == 8
  assert own['fwd'] <= 2  # the first and one in the middle; the last's is in its backward
  assert max(own.values()) <= 3
  new, loss = compiled(params, batch()[0])
  expected, expected_loss = jax.jit(step)(params, batch()[0])
  np.testing.assert_allclose(loss, expected_loss, 0, 1e-6)
  assert_equal(new, expected, 1e-6)


@pytest.fixture
def compilations():
  """The compilations since the test began, as a growing list."""
  result, listening = [], True

  def listener(event, seconds, **_):
    if listening and event == '/jax/core/compile/backend_compile_duration':
      result.append(seconds)

  jax.monitoring.register_event_duration_secs_listener(listener)
  yield result
  listening = False


def test_a_second_call_compiles_nothing(compilations):
  layout = layout_of(4)
  step = layout.pipeline_jit(train_step(4, OneFOneB(4)))
  placed = layout.shard(batch(), BATCH_NAMES)
  compiled = step.compile(layout.abstract(create), placed)
  assert compilations
  state = compiled.init(create)
  before = len(compilations)
  executables = dict(compiled.executables)
  for _ in range(3):
    state, loss = step(state, placed)
  jax.block_until_ready((state, loss))
  assert len(compilations) == before
  assert step.compile(state, placed) is compiled
  assert all(compiled.executables[unit] is one for unit, one in executables.items())


def test_calls_with_known_shapes_compile_nothing(compilations):
  step, compiled, placed = pipeline(4)
  shorter = jax.tree.map(lambda x: x[:4], placed)
  state = compiled.init(create)
  one, _ = step(state, placed)
  other, _ = step(state, shorter)
  before = len(compilations)
  assert_equal(step(state, placed)[0], one)
  assert_equal(step(state, shorter)[0], other)
  assert len(compilations) == before


@slow_on_new_jax
def test_results_are_the_same_with_threads():
  layout = layout_of(4)
  placed = layout.shard(batch(), BATCH_NAMES)
  results = []
  for threads in (False, True):
    step = layout.pipeline_jit(train_step(4, ZeroBubbleH1(4)), threads=threads, donate_argnums=0)
    state = layout.init(create)
    losses = []
    for _ in range(4):
      state, loss = step(state, placed)
      losses.append(float(loss))
    results.append((jax.device_get(state), np.asarray(losses)))
  assert_equal(*results)
  np.testing.assert_allclose(results[0][1], trained(4)[1], 0, 1e-6)


@pytest.fixture
def persistent_cache(tmp_path):
  """JAX caches every program in a folder."""
  options = {
    'jax_enable_compilation_cache': True,
    'jax_compilation_cache_dir': str(tmp_path),
    'jax_persistent_cache_min_compile_time_secs': 0,
    'jax_persistent_cache_min_entry_size_bytes': -1,
  }
  before = {name: getattr(jax.config, name) for name in options}
  for name, value in options.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()
  yield
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


def test_programs_of_the_persistent_cache(persistent_cache):
  """Cached programs run, also on the ranks of equal stages."""
  result = []
  for _ in range(2):
    step = layout_of(4).pipeline_jit(train_step(4, OneFOneB(4)))
    result.append(step(create(), batch()))
  jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, result))
