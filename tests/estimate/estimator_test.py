"""The estimator against what can be worked out by hand, against compiled programs, and its parts."""

import functools
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from hypothesis import given
from hypothesis import strategies as st
from jaxlib.mlir import ir

import flax_spmd as spmd
from flax_spmd._src.compat import mlir_context
from flax_spmd._src.estimate import mlir as bindings
from flax_spmd._src.estimate.graph import Value, tile
from flax_spmd._src.estimate.mlir.inline import drop_uniform, inline_all
from flax_spmd._src.estimate.operations import reshaped
from flax_spmd._src.estimate.resharding import Move, moves, sent, summing, tangled
from flax_spmd.errors import EstimatorError, LayoutError, TargetDeviceError
from flax_spmd.explore import Estimator, compare, parse

LAYERS, EMBED, MLP, BATCH = 4, 64, 256, 64
TARGET = parse('h100:8')


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, _=None):
    init = nn.initializers.normal(0.02)
    up = self.param('up', spmd.with_logical_partitioning(init, ('embed', 'mlp')), (EMBED, MLP))
    down = self.param('down', spmd.with_logical_partitioning(init, ('mlp', 'embed')), (MLP, EMBED))
    x = spmd.with_logical_constraint(x, ('batch', 'act_embed'))
    y = nn.with_logical_constraint(nn.relu(x @ up), ('batch', 'act_mlp'))  # Flax's own
    return spmd.with_logical_constraint(x + y @ down, ('batch', 'act_embed')), None


class Model(nn.Module):
  again: bool = False

  @nn.compact
  def __call__(self, x):
    stack = nn.scan(
      nn.remat(Block) if self.again else Block,
      length=LAYERS,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      metadata_params={nn.PARTITION_NAME: 'layers'},
    )
    return stack(name='blocks')(x, None)[0]


def create():
  model = Model()
  params = model.init(jax.random.key(0), jnp.zeros((1, EMBED)))['params']
  return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))


def step(state, x, again=False):
  apply = Model(again).apply
  loss, grads = jax.value_and_grad(lambda params: jnp.sum(apply({'params': params}, x) ** 2))(
    state.params
  )
  return state.apply_gradients(grads=grads), loss


BATCHES = jax.ShapeDtypeStruct((BATCH, EMBED), jnp.float32)


@pytest.fixture(scope='module')
def estimator():
  return Estimator(step, create, BATCHES)


def layout(mesh, **rules):
  alike = {'act_mlp': rules.get('mlp')}
  return spmd.Layout(spmd.abstract_mesh(mesh), tuple((alike | rules).items()))


DATA = layout({'data': 8}, batch='data')
FSDP = layout({'data': 8}, batch='data', embed='data')
TENSOR = layout({'model': 8}, mlp='model')
BOTH = layout({'data': 2, 'model': 4}, batch='data', mlp='model')

WEIGHTS = 2 * LAYERS * EMBED * MLP  # elements
PRODUCTS = 3 * 2 * BATCH * WEIGHTS  # FLOPs: forward, and the gradients of inputs and weights


def test_names_are_found_in_boxes_in_constraints_of_ours_and_of_flax_and_in_the_batch(estimator):
  assert estimator.names == {
    'act_embed': (EMBED,),
    'act_mlp': (MLP,),
    'batch': (BATCH,),
    'embed': (EMBED,),
    'layers': (LAYERS,),
    'mlp': (MLP,),
  }
  assert estimator.parameter_names == {'embed', 'mlp', 'layers'}
  assert frozenset(('embed', 'mlp')) in estimator.together
  assert frozenset(('batch', 'act_mlp')) in estimator.together
  assert frozenset(('embed', 'batch')) not in estimator.together


@pytest.mark.parametrize('one', [DATA, FSDP, TENSOR, BOTH], ids=['data', 'fsdp', 'tensor', 'both'])
def test_work_is_divided_over_all_devices(estimator, one):
  counts = estimator.estimate(one, TARGET).counts
  first_input = 2 * BATCH * EMBED * MLP  # whose gradient nobody asks for, but the loop computes it
  assert counts.flops == pytest.approx(PRODUCTS / 8, abs=first_input / 8)


def test_data_parallelism_adds_up_the_gradients_once(estimator):
  counts = estimator.estimate(DATA, TARGET).counts
  assert counts.by_kind().keys() == {'all-reduce'}
  assert counts.by_axis()[('data',)] == pytest.approx(2 * 7 / 8 * 4 * WEIGHTS, rel=1e-3)


def test_fsdp_gathers_weights_twice_and_scatters_gradients_once(estimator):
  kinds = estimator.estimate(FSDP, TARGET).counts.by_kind()
  assert kinds['all-gather'] == pytest.approx(2 * 7 / 8 * 4 * WEIGHTS, rel=1e-3)
  assert kinds['reduce-scatter'] == pytest.approx(7 / 8 * 4 * WEIGHTS, rel=1e-3)


def test_tensor_parallelism_adds_up_activations_in_each_layer_and_direction(estimator):
  counts = estimator.estimate(TENSOR, TARGET).counts
  once = 2 * 7 / 8 * 4 * BATCH * EMBED
  assert counts.by_kind()['all-reduce'] == pytest.approx(2 * LAYERS * once, rel=1e-3)


@pytest.mark.parametrize('one', [DATA, FSDP, TENSOR, BOTH], ids=['data', 'fsdp', 'tensor', 'both'])
def test_a_compiled_program_does_the_same(estimator, one):
  """The CPU's compiler reduces and slices where others reduce-scatter; its products are theirs."""
  compiled = compare(step, create, BATCHES, {'one': one}, 'cpu:8')['one']
  estimated = estimator.estimate(one, parse('cpu:8'))
  assert estimated.counts.flops == compiled.counts.flops
  state = [outcome.memory[:4] for outcome in (estimated, compiled)]
  assert state[0] == state[1]
  wire = [outcome.counts.by_kind().get('all-gather', 0) for outcome in (estimated, compiled)]
  assert wire[0] == pytest.approx(wire[1], rel=0.01)


def test_a_state_that_is_not_donated_is_there_twice_at_the_end():
  options = {'donate': False}
  compiled = compare(step, create, BATCHES, {'data': DATA}, 'cpu:8', **options)['data'].memory
  estimated = Estimator(step, create, BATCHES, **options).estimate(DATA, parse('cpu:8')).memory
  assert estimated.peak == pytest.approx(compiled.peak, rel=0.1)  # twice would be 28 % more


def test_an_estimate_says_what_it_is(estimator):
  outcome = estimator.estimate(FSDP, TARGET)
  assert (outcome.source, outcome.fits, outcome.error) == ('estimated', True, None)
  assert outcome.memory.peak == sum(outcome.memory[:5])
  assert all('estimator_test.py' in one.source for one in outcome.counts.collectives[:2])


def test_other_kinds_of_rules_place_the_state_too(estimator):
  filled = spmd.Layout(
    spmd.abstract_mesh({'data': 8}), spmd.Rules(('batch', 'data'), spmd.fsdp('data', min_size=1))
  )
  assert estimator.estimate(filled, TARGET).memory.parameters == 4 * WEIGHTS // 8


def test_names_that_do_not_fit_are_the_layout_s_error(estimator):
  with pytest.raises(LayoutError, match='size 4 is not divisible by'):
    estimator.estimate(layout({'data': 8}, layers='data'), TARGET)


def test_a_mesh_of_another_size_is_refused(estimator):
  with pytest.raises(TargetDeviceError) as error:
    estimator.estimate(DATA, parse('h100:16'))
  assert str(error.value) == (
    "The mesh {'data': 8} has 8 devices, the target h100:16 16.\n"
    'Fix: give the layout a mesh of 16 devices.'
  )


def test_a_step_with_a_mesh_of_its_own_cannot_be_estimated():
  mesh = spmd.make_mesh({'data': 8})

  def mapped(state, x):
    inner = jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=jax.P('data'), out_specs=jax.P('data'))
    return state, jnp.sum(inner(x))

  with pytest.raises(EstimatorError) as error:
    Estimator(mapped, lambda: {'w': jnp.ones(8)}, jax.ShapeDtypeStruct((8,), jnp.float32))
  assert str(error.value) == (
    'The step is written for a mesh of its own (shard_map?), and cannot be laid out by names alone.\n'
    'Fix: compare layouts that you choose, with spmd.compare; it compiles each.'
  )


@pytest.mark.parametrize(
  'box',
  [
    spmd.Partitioned(jnp.ones((8, 8)), ('data', None)),
    spmd.LogicallyPartitioned(jnp.ones((8, 8)), (('data',), 'mlp')),
  ],
)
def test_a_state_with_mesh_axes_among_its_names(box):
  with pytest.raises(EstimatorError) as error:
    Estimator(lambda state, x: (state, x), lambda: {'w': box}, BATCHES)
  assert str(error.value) == (
    'The state has mesh axes among its names, and cannot be laid out by names alone.\n'
    'Fix: give every dimension one logical name, or compare layouts that you choose, with spmd.compare.'
  )


def test_of_a_branch_the_way_with_most_work_counts():
  def branching(state, x):
    return state, jax.lax.cond(x[0, 0] > 0, lambda x: jnp.sum(x @ x.T), jnp.max, x)

  made = Estimator(branching, lambda: {'w': jnp.ones(8)}, jax.ShapeDtypeStruct((8, 16), jnp.float32))
  assert made.estimate(DATA, TARGET).counts.flops == 2 * 8 * 8 * 16 / 8


def test_an_unknown_jaxlib_is_refused(monkeypatch):
  monkeypatch.setattr(bindings, 'jaxlib_version', lambda: '0.99.1')
  with pytest.raises(EstimatorError) as error:
    Estimator(step, create, BATCHES)
  assert str(error.value) == (
    'The estimator knows the MLIR bindings of jaxlib 0.10 to 0.12, this is jaxlib 0.99.1.\n'
    'Fix: use one of these, or go without estimates: every layout is then compiled, which takes seconds '
    'for each in place of a fraction of one.'
  )


def test_bindings_are_imported_after_they_are_known():
  code = (
    'import sys, flax_spmd.explore, flax_spmd.explore; '
    'print("flax_spmd._src.estimate.mlir.module" in sys.modules)'
  )
  said = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout
  assert said.strip() == 'False'


def test_an_error_of_the_step_is_the_users_own():
  def wrong(state, x):
    raise ZeroDivisionError('mine')

  with pytest.raises(ZeroDivisionError, match='mine'):
    Estimator(wrong, create, BATCHES)


# -- moving

SIZES = {'a': 2, 'b': 4, 'c': 2}


@st.composite
def shardings(draw):
  axes = draw(st.permutations('abc'))
  places = [draw(st.integers(0, 3)) for _ in axes]
  return tuple(tuple(axis for axis, place in zip(axes, places) if place == dim) for dim in range(3))


@given(before=shardings(), after=shardings())
def test_what_only_gets_smaller_is_free_and_the_rest_is_not(before, after):
  found = moves(Value((16, 16, 16), 'f32'), before, after, SIZES)
  smaller = all(axes == wanted[: len(axes)] for axes, wanted in zip(before, after))
  assert (not found) == smaller
  assert sent(found, SIZES) >= 0
  assert {axis for move in found for axis in move.axes} <= set('abc')


@given(before=shardings())
def test_gathering_all_leaves_the_whole(before):
  value = Value((16, 16, 16), 'bf16')
  found = moves(value, before, ((), (), ()), SIZES)
  received = sum(move.bytes * (count - 1) for move, count in zip(found, [tile_count(m) for m in found]))
  assert received == pytest.approx(2 * (16**3 - tile(value.shape, before, SIZES)))


def tile_count(move: Move) -> int:
  number = 1
  for axis in move.axes:
    number *= SIZES[axis]
  return number


@given(before=shardings(), after=shardings())
def test_a_sum_over_nothing_is_a_move(before, after):
  value = Value((16, 16, 16), 'f32')
  assert summing(value, before, (), after, SIZES) == moves(value, before, after, SIZES)


def test_two_changes_at_once_are_in_doubt():
  value = Value((16, 16), 'f32')
  assert not tangled(moves(value, (('a',), ()), ((), ('a',)), SIZES))
  assert tangled(moves(value, (('a',), ('b',)), (('b',), ('a',)), SIZES))
  assert tangled(moves(value, (('a', 'b'), ()), (('b', 'a'), ()), SIZES))


@pytest.mark.parametrize(
  ('shape', 'dims', 'into', 'result'),
  [
    ((8, 6), (('a',), ()), (48,), (('a',),)),
    ((8, 6), ((), ('a',)), (48,), ((),)),
    ((48,), (('b',),), (8, 6), (('b',), ())),
    ((4, 12), (('b',), ('a',)), (48,), (('b', 'a'),)),
    ((1, 8), ((), ('a',)), (8, 1), (('a',), ())),
  ],
)
def test_a_reshape_keeps_what_it_can(shape, dims, into, result):
  assert reshaped(shape, dims, into, SIZES) == result


def test_remat_computes_again_and_keeps_less(estimator):
  again = Estimator(functools.partial(step, again=True), create, BATCHES)
  plain, less = estimator.estimate(DATA, TARGET), again.estimate(DATA, TARGET)
  assert less.counts.flops > plain.counts.flops
  assert less.memory.temporaries < plain.memory.temporaries
  assert less.counts.by_axis() == plain.counts.by_axis()


class Pictures(nn.Module):
  @nn.compact
  def __call__(self, x):
    for _ in range(2):
      x = nn.Conv(16, (3, 3), strides=(2, 2))(x)
      x = nn.gelu(nn.BatchNorm(use_running_average=False)(x), approximate=False)  # has CHLO operations
      x = nn.max_pool(spmd.with_logical_constraint(x, ('batch', None, None, None)), (2, 2), (2, 2))
    return nn.Dense(10)(x.mean((1, 2)))


def test_convolutions_are_counted_as_in_compiled_programs():
  model = Pictures()
  pictures = jax.ShapeDtypeStruct((64, 32, 32, 3), jnp.float32)

  def see(variables, x):
    def loss(params):
      y, _ = model.apply(variables | {'params': params}, x, mutable=['batch_stats'])
      return jnp.mean(y**2)

    grads = jax.grad(loss)(variables['params'])
    return variables | {'params': jax.tree.map(lambda p, g: p - g, variables['params'], grads)}

  def begin():
    return model.init(jax.random.key(0), jnp.zeros((1, 32, 32, 3)))

  compiled = compare(see, begin, pictures, {'one': DATA}, 'cpu:8')['one'].counts
  estimated = Estimator(see, begin, pictures).estimate(DATA, parse('cpu:8')).counts
  assert estimated.flops == compiled.flops
  assert estimated.by_kind() == pytest.approx(compiled.by_kind(), rel=0.02)


def test_memory_that_is_about_the_limit_is_in_doubt(estimator):
  plain = estimator.estimate(DATA, TARGET)
  limit = plain.memory.peak - 1000
  close = TARGET._replace(chip=TARGET.chip._replace(memory=limit))
  outcome = estimator.estimate(DATA, close)
  assert not outcome.fits
  assert set(plain.doubts) == set(outcome.doubts[:-1])
  assert outcome.doubts[-1].startswith('memory: ')


def test_slices_of_a_divided_dimension_are_in_doubt(estimator):
  stacked = estimator.estimate(layout({'data': 2, 'model': 4}, batch='data', layers='model'), TARGET)
  assert any('slices along a dimension that is divided' in doubt for doubt in stacked.doubts)
  assert estimator.estimate(BOTH, TARGET).doubts == ()


def test_numbers_are_taken_out_of_what_is_propagated():
  def decayed(state, x):
    return jax.tree.map(lambda w: 0.9 * w * 0.5 + jnp.sum(x), state), jnp.float32(0)

  code = jax.jit(decayed).lower({'w': jnp.ones((64, 128))}, jnp.ones((4, 8)))
  text = code.compiler_ir().operation.get_asm(binary=False)
  assert text.count('stablehlo.multiply') == 2
  with mlir_context(), ir.Location.unknown():
    module = ir.Module.parse(text)
    inline_all(module)
    drop_uniform(module.operation)
    left = str(module)
  # the sum is of an array, and stays; so does one operation for both products
  counts = {kind: left.count(f'stablehlo.{kind}') for kind in ('multiply', 'negate', 'broadcast', 'add')}
  assert counts == {'multiply': 0, 'negate': 1, 'broadcast': 1, 'add': 2}


def test_a_sum_that_is_turned_before_it_is_divided_is_scattered():
  """Its gradient is constrained to lie whole where it is unboxed; what needs it has a part."""

  def make():
    return {'w': spmd.LogicallyPartitioned(jnp.ones((EMBED, MLP)), ('embed', 'mlp'))}

  def descend(state, x):
    grads = jax.grad(lambda one: jnp.sum((x @ one['w'].unbox()) ** 2))(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), 0.0

  filled = spmd.Layout(spmd.abstract_mesh({'data': 8}), spmd.presets.fsdp(min_size=16))
  counts = Estimator(descend, make, BATCHES).estimate(filled, TARGET).counts
  moved = 4 * EMBED * MLP * 7 / 8
  assert counts.by_kind() == {'all-gather': moved, 'reduce-scatter': moved}


def test_booleans_stay_as_they_are():
  def masked(state, x):
    return state, jnp.sum(x * jax.lax.max(x > 0, jnp.ones(x.shape, bool)))

  estimator = Estimator(masked, lambda: {'w': jnp.ones((8, 8))}, BATCHES)
  assert estimator.estimate(DATA, TARGET).counts.flops == 0


NOTHING_TO_XLA = {
  'as it is': lambda w: w,
  'transposed': lambda w: w.T,
  'constrained': lambda w: spmd.with_logical_constraint(w, (None, None)),
}


@pytest.mark.parametrize('form', NOTHING_TO_XLA)
@pytest.mark.parametrize(('uses', 'itemsize'), [(1, 2), (2, 4)])
def test_a_gather_before_a_conversion_is_narrow_if_that_has_one_use(uses, itemsize, form):
  """As XLA for GPUs does: it looks for one conversion that is used once."""

  def make():
    return {'w': spmd.LogicallyPartitioned(jnp.ones((EMBED, EMBED)), ('embed', 'embed2'))}

  def multiplied(state, x):
    w = NOTHING_TO_XLA[form](state['w'].unbox().astype(jnp.bfloat16))
    x = x.astype(jnp.bfloat16)
    for _ in range(uses):
      x = jnp.tanh(x @ w)
    return state, jnp.sum(x.astype(jnp.float32))

  filled = spmd.Layout(
    spmd.abstract_mesh({'data': 8}), (('batch', 'data'), spmd.fsdp('data', min_size=16))
  )
  gathered = Estimator(multiplied, make, BATCHES).estimate(filled, TARGET).counts.by_kind()['all-gather']
  assert gathered == itemsize * EMBED * EMBED * 7 / 8


def test_what_a_loop_hands_on_and_nobody_wants_is_not_kept():
  """What every turn of a first loop reads, and no later one."""

  def make():
    return {'w': jnp.ones((EMBED, EMBED)), 'wide': jnp.ones((EMBED, 16 * EMBED))}

  def looped(state, x, before):
    if before:
      seen = x @ state['wide']
      narrow = lambda c, _: (jnp.tanh(c @ state['w']) + seen[:, :EMBED] * jnp.sum(c), None)
      x = jax.lax.scan(narrow, x, length=2)[0]
    wide = lambda c, _: (jnp.tanh(c @ state['wide']) @ state['wide'].T, None)
    return state, jnp.sum(jax.lax.scan(wide, x, length=2)[0])

  def temporaries(before):
    one = Estimator(functools.partial(looped, before=before), make, BATCHES)
    return one.estimate(DATA, TARGET).memory.temporaries

  result = 4 * (BATCH // 8) * EMBED  # of the first loop, where the second had an argument
  assert temporaries(before=True) == temporaries(before=False) + result


def test_a_weight_s_gradient_comes_last_in_its_loop_and_keeps_what_it_reads():
  """Where it is added up over devices; the input of each product is then there beside the other gradients."""

  def descend(state, x):
    def loss(state):
      turn = jax.checkpoint(lambda c, w: (jnp.tanh(jnp.tanh(c @ w['a']) @ w['b']), None))
      return jnp.sum(jax.lax.scan(turn, x, state)[0])

    return jax.tree.map(jnp.subtract, state, jax.grad(loss)(state)), 0.0

  def make():
    return {'a': jnp.ones((4, EMBED, 8 * EMBED)), 'b': jnp.ones((4, 8 * EMBED, EMBED))}

  few = jax.ShapeDtypeStruct((BATCH // 8, EMBED), jnp.float32)  # as many on each device
  summed = Estimator(descend, make, BATCHES).estimate(DATA, TARGET).memory.temporaries
  alone = Estimator(descend, make, few).estimate(TENSOR, TARGET).memory.temporaries
  assert summed - alone == 4 * (BATCH // 8) * (8 * EMBED + EMBED)  # what the two products read


LOOKUPS = {
  'batch': layout({'data': 8}, batch='data'),
  'rows': layout({'data': 2, 'model': 4}, batch='data', vocab='model'),
  'columns': layout({'data': 2, 'model': 4}, batch='data', embed='model', act_embed='model'),
  'columns, gathered': layout({'data': 2, 'model': 4}, batch='data', embed='model'),
  'columns over the batch': layout({'data': 8}, batch='data', embed='data'),
}


def test_lookups_are_as_in_compiled_programs():
  """Rows of a table that is divided in each of its ways, and its gradient."""

  def begin():
    return {'table': spmd.LogicallyPartitioned(jnp.ones((512, EMBED)), ('vocab', 'embed'))}

  def descend(state, tokens):
    def loss(state):
      rows = jnp.take(state['table'].unbox(), tokens, axis=0)
      return jnp.sum(jnp.tanh(spmd.with_logical_constraint(rows, ('batch', None, 'act_embed'))) ** 2)

    value, gradient = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda old, slope: old - 0.1 * slope, state, gradient), value

  tokens = jax.ShapeDtypeStruct((64, 16), jnp.int32)
  compiled = compare(descend, begin, tokens, LOOKUPS, 'cpu:8')
  estimator = Estimator(descend, begin, tokens)
  for name, one in LOOKUPS.items():
    estimated = estimator.estimate(one, parse('cpu:8')).counts.by_kind()
    expected = compiled[name].counts.by_kind()
    if name == 'columns over the batch':  # the tokens themselves are not counted
      assert expected.pop('all-gather') == 64 * 16 * 4 * 7 / 8
    assert estimated == pytest.approx(expected, rel=1e-3), name
