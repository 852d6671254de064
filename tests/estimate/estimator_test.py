"""The estimator against figures worked out by hand, and against compiled programs."""

import functools
from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import flax_spmd as spmd
from flax_spmd.errors import LayoutError, TargetDeviceError
from flax_spmd.explore import Estimator, TrainStep, compare, parse_target
from tests.estimate.doubts import doubts_of

LAYERS, EMBED, MLP, BATCH = 4, 64, 256, 64
TARGET = parse_target('h100:8')


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
  remat: bool = False

  @nn.compact
  def __call__(self, x):
    stack = nn.scan(
      nn.remat(Block) if self.remat else Block,
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


def step(state, x, remat=False):
  apply = Model(remat).apply
  loss, grads = jax.value_and_grad(lambda params: jnp.sum(apply({'params': params}, x) ** 2))(
    state.params
  )
  return state.apply_gradients(grads=grads), loss


X = jax.ShapeDtypeStruct((BATCH, EMBED), jnp.float32)
TRAIN_STEP = TrainStep(step, create, X)


@pytest.fixture(scope='module')
def estimator():
  return Estimator(TRAIN_STEP)


def layout(mesh, **rules):
  rules = {'act_mlp': rules.get('mlp')} | rules
  return spmd.Layout(spmd.abstract_mesh(mesh), tuple(rules.items()))


DATA = layout({'data': 8}, batch='data')
FSDP = layout({'data': 8}, batch='data', embed='data')
TENSOR = layout({'model': 8}, mlp='model')
BOTH = layout({'data': 2, 'model': 4}, batch='data', mlp='model')

WEIGHTS = 2 * LAYERS * EMBED * MLP  # elements
PRODUCTS = 3 * 2 * BATCH * WEIGHTS  # FLOPs: forward, and the gradients of inputs and weights


def test_names_and_sizes_of_boxes_constraints_and_the_batch(estimator):
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
def test_flops_are_divided_among_all_devices(estimator, one):
  counts = estimator.estimate(one, TARGET).counts
  first_input = 2 * BATCH * EMBED * MLP  # its gradient is unused, but computed in the loop
  assert counts.flops == pytest.approx(PRODUCTS / 8, abs=first_input / 8)


def test_data_parallelism_reduces_gradients_once(estimator):
  counts = estimator.estimate(DATA, TARGET).counts
  assert counts.by_kind().keys() == {'all-reduce'}
  assert counts.by_axis()[('data',)] == pytest.approx(2 * 7 / 8 * 4 * WEIGHTS, rel=1e-3)


def test_fsdp_gathers_weights_twice_and_reduce_scatters_gradients_once(estimator):
  kinds = estimator.estimate(FSDP, TARGET).counts.by_kind()
  assert kinds['all-gather'] == pytest.approx(2 * 7 / 8 * 4 * WEIGHTS, rel=1e-3)
  assert kinds['reduce-scatter'] == pytest.approx(7 / 8 * 4 * WEIGHTS, rel=1e-3)


def test_tensor_parallelism_reduces_activations_in_each_layer_and_direction(estimator):
  counts = estimator.estimate(TENSOR, TARGET).counts
  once = 2 * 7 / 8 * 4 * BATCH * EMBED
  assert counts.by_kind()['all-reduce'] == pytest.approx(2 * LAYERS * once, rel=1e-3)


@pytest.mark.parametrize('one', [DATA, FSDP, TENSOR, BOTH], ids=['data', 'fsdp', 'tensor', 'both'])
def test_flops_memory_and_gathers_of_a_compiled_program(estimator, one):
  """Only these: where other compilers reduce-scatter, the CPU's reduces and slices."""
  compiled = compare(TRAIN_STEP, {'one': one}, 'cpu:8')['one']
  estimated = estimator.estimate(one, parse_target('cpu:8'))
  assert estimated.counts.flops == compiled.counts.flops
  runs = [Counter() for _ in range(2)]
  for number, outcome in zip(runs, (estimated, compiled), strict=True):
    for product in outcome.counts.products:
      number[product.flops] += product.runs
  assert runs[0] == runs[1]
  state = [outcome.memory[:4] for outcome in (estimated, compiled)]
  assert state[0] == state[1]
  wire = [outcome.counts.by_kind().get('all-gather', 0) for outcome in (estimated, compiled)]
  assert wire[0] == pytest.approx(wire[1], rel=0.01)


def test_a_state_that_is_not_donated_is_in_memory_twice_at_the_end():
  not_donated = TRAIN_STEP._replace(donate=False)
  compiled = compare(not_donated, {'data': DATA}, 'cpu:8')['data'].memory
  estimated = Estimator(not_donated).estimate(DATA, parse_target('cpu:8')).memory
  assert estimated.peak == pytest.approx(compiled.peak, rel=0.1)  # twice would be 28 % more


def test_an_estimate_is_marked_as_estimated(estimator):
  outcome = estimator.estimate(FSDP, TARGET)
  assert (outcome.source, outcome.fits, outcome.error) == ('estimated', True, None)
  assert outcome.memory.peak == sum(outcome.memory[:5])
  assert all('estimator_test.py' in one.source for one in outcome.counts.collectives[:2])


def test_fsdp_rules_shard_the_state(estimator):
  filled = spmd.Layout(
    spmd.abstract_mesh({'data': 8}), spmd.Rules(('batch', 'data'), spmd.fsdp('data', min_size=1))
  )
  assert estimator.estimate(filled, TARGET).memory.parameters == 4 * WEIGHTS // 8


@pytest.mark.parametrize('partition', [False, True])
def test_a_result_is_sharded_as_the_argument_that_it_replaces_unread(partition):
  def create_last():
    return {'last': spmd.LogicallyPartitioned(jnp.zeros((EMBED, EMBED)), ('embed', None))}

  def step(state, x):
    return {'last': state['last'].replace_boxed(x.T @ x)}, jnp.sum(x)

  estimator = Estimator(TrainStep(step, create_last, X))
  counts = estimator.estimate(FSDP, TARGET, partition=partition).counts
  assert counts.by_kind()['reduce-scatter'] == 4 * EMBED**2 * 7 / 8


@pytest.mark.parametrize(
  'optimizer',
  [
    optax.multi_transform(
      {'up': optax.adam(1e-3), 'rest': optax.set_to_zero()},
      functools.partial(
        jax.tree_util.tree_map_with_path, lambda path, _: 'up' if 'up' in str(path) else 'rest'
      ),
    ),
    optax.sm3(1e-3),
  ],
  ids=['no array in a box', 'several arrays in a box'],
)
def test_states_of_optimizers_with_any_number_of_arrays_in_a_box(optimizer):
  def create_with_optimizer():
    params = Model().init(jax.random.key(0), jnp.zeros((1, EMBED)))['params']
    return TrainState.create(apply_fn=None, params=params, tx=optimizer)

  estimator = Estimator(TrainStep(step, create_with_optimizer, X))
  layout = spmd.Layout(
    spmd.abstract_mesh({'data': 2, 'model': 4}), (('embed', 'data'), ('mlp', 'model'))
  )
  rows = layout.rows(layout.abstract(create_with_optimizer))
  memory = estimator.estimate(layout, TARGET, partition=False).memory
  for part, size in (('params', memory.parameters), ('opt_state', memory.optimizer)):
    assert size == sum(row.bytes_per_device for row in rows if row.path.startswith(part))


def test_a_dimension_that_is_not_divisible(estimator):
  with pytest.raises(LayoutError, match='size 4 is not divisible by'):
    estimator.estimate(layout({'data': 8}, layers='data'), TARGET)


def test_targets_as_text(estimator):
  assert estimator.estimate(DATA, 'h100:8') == estimator.estimate(DATA, parse_target('h100:8'))
  with pytest.raises(TargetDeviceError, match="There is no target 'h1000:8'"):
    estimator.estimate(DATA, 'h1000:8')


def test_a_mesh_with_another_number_of_devices_than_the_target(estimator):
  with pytest.raises(TargetDeviceError) as error:
    estimator.estimate(DATA, parse_target('h100:16'))
  assert str(error.value) == (
    "The mesh {'data': 8} has 8 devices, the target h100:16 16.\n"
    'Fix: give the layout a mesh of 16 devices.'
  )


def test_a_conditional_counts_as_its_most_expensive_branch():
  def branching(state, x):
    return state, jax.lax.cond(x[0, 0] > 0, lambda x: jnp.sum(x @ x.T), jnp.max, x)

  x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
  estimator = Estimator(TrainStep(branching, lambda: {'w': jnp.ones(8)}, x))
  assert estimator.estimate(DATA, TARGET).counts.flops == 2 * 8 * 8 * 16 / 8


def test_a_bare_function_is_refused():
  with pytest.raises(TypeError) as error:
    Estimator(step)
  assert str(error.value) == (
    'The first argument of Estimator is of type function, not a TrainStep.\n'
    'Fix: write Estimator(TrainStep(step, create, batch), ...), with TrainStep from flax_spmd.explore; or pass a '
    'function that returns one for a layout, lambda layout: TrainStep(...).'
  )


def test_arrays_that_the_step_does_not_use_occupy_memory_all_the_same():
  batch = {'x': X, 'mask': jax.ShapeDtypeStruct((X.shape[0],), jnp.int32)}
  train_step = TrainStep(lambda state, batch: step(state, batch['x']), create, batch)
  used = Estimator(TRAIN_STEP).estimate(DATA, TARGET).memory
  unused = Estimator(train_step).estimate(DATA, TARGET).memory
  mask = 4 * X.shape[0] // 8
  assert unused == used._replace(batch=used.batch + mask, peak=used.peak + mask)


def test_an_error_of_the_step_is_raised_as_it_is():
  def wrong(state, x):
    raise ZeroDivisionError('mine')

  with pytest.raises(ZeroDivisionError, match='mine'):
    Estimator(TrainStep(wrong, create, X))


def test_remat_trades_flops_for_memory(estimator):
  train_step = TRAIN_STEP._replace(step=functools.partial(step, remat=True))
  plain, remat = (one.estimate(DATA, TARGET) for one in (estimator, Estimator(train_step)))
  assert remat.counts.flops > plain.counts.flops
  assert remat.memory.temporaries < plain.memory.temporaries
  assert remat.counts.by_axis() == plain.counts.by_axis()


class ConvNet(nn.Module):
  @nn.compact
  def __call__(self, x):
    for _ in range(2):
      x = nn.Conv(16, (3, 3), strides=(2, 2))(x)
      x = nn.gelu(nn.BatchNorm(use_running_average=False)(x), approximate=False)  # has CHLO operations
      x = nn.max_pool(spmd.with_logical_constraint(x, ('batch', None, None, None)), (2, 2), (2, 2))
    return nn.Dense(10)(x.mean((1, 2)))


def test_convolutions_are_counted_as_in_compiled_programs():
  model = ConvNet()

  def convnet_step(variables, x):
    def loss(params):
      y, _ = model.apply(variables | {'params': params}, x, mutable=['batch_stats'])
      return jnp.mean(y**2)

    grads = jax.grad(loss)(variables['params'])
    return variables | {'params': jax.tree.map(lambda p, g: p - g, variables['params'], grads)}

  def create_convnet():
    return model.init(jax.random.key(0), jnp.zeros((1, 32, 32, 3)))

  images = jax.ShapeDtypeStruct((64, 32, 32, 3), jnp.float32)
  train_step = TrainStep(convnet_step, create_convnet, images)
  compiled = compare(train_step, {'one': DATA}, 'cpu:8')['one'].counts
  estimated = Estimator(train_step).estimate(DATA, parse_target('cpu:8')).counts
  assert estimated.flops == compiled.flops
  assert estimated.by_kind() == pytest.approx(compiled.by_kind(), rel=0.02)


def test_a_peak_close_to_the_limit_is_doubtful(estimator):
  plain = estimator.estimate(DATA, TARGET)
  limit = plain.memory.peak - 1000
  close = TARGET._replace(chip=TARGET.chip._replace(memory=limit))
  outcome = estimator.estimate(DATA, close)
  assert not outcome.fits
  assert set(plain.doubts) == set(outcome.doubts[:-1])
  assert outcome.doubts[-1].startswith('memory: ') and 'too close to call' in outcome.doubts[-1]


def test_slices_along_a_sharded_dimension_are_doubtful(estimator, no_partitioner):
  stacked = estimator.estimate(layout({'data': 2, 'model': 4}, batch='data', layers='model'), TARGET)
  assert any('slice along a sharded dimension' in doubt for doubt in stacked.doubts)
  assert doubts_of(estimator.estimate(BOTH, TARGET)) == ()


def test_a_partial_sum_is_transposed_before_it_is_reduce_scattered():
  """`unbox` constrains the gradient to be replicated, but its only use needs a shard."""

  def make():
    return {'w': spmd.LogicallyPartitioned(jnp.ones((EMBED, MLP)), ('embed', 'mlp'))}

  def descend(state, x):
    grads = jax.grad(lambda one: jnp.sum((x @ one['w'].unbox()) ** 2))(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), 0.0

  filled = spmd.Layout(spmd.abstract_mesh({'data': 8}), spmd.presets.fsdp(min_size=16))
  counts = Estimator(TrainStep(descend, make, X)).estimate(filled, TARGET).counts
  sent = 4 * EMBED * MLP * 7 / 8
  assert counts.by_kind() == {'all-gather': sent, 'reduce-scatter': sent}


def test_boolean_operations_are_not_negated():
  def masked(state, x):
    return state, jnp.sum(x * jax.lax.max(x > 0, jnp.ones(x.shape, bool)))

  estimator = Estimator(TrainStep(masked, lambda: {'w': jnp.ones((8, 8))}, X))
  assert estimator.estimate(DATA, TARGET).counts.flops == 0


ALIASES = {
  'unchanged': lambda w: w,
  'transposed': lambda w: w.T,
  'constrained': lambda w: spmd.with_logical_constraint(w, (None, None)),
}


@pytest.mark.parametrize('alias', ALIASES)
@pytest.mark.parametrize(('uses', 'itemsize'), [(1, 2), (2, 4)])
def test_a_gather_uses_the_narrow_dtype_if_the_conversion_has_one_use(uses, itemsize, alias):
  """As in XLA for GPUs, whose pass gives up if the converted value has several uses."""

  def make():
    return {'w': spmd.LogicallyPartitioned(jnp.ones((EMBED, EMBED)), ('embed', 'embed2'))}

  def multiplied(state, x):
    w = ALIASES[alias](state['w'].unbox().astype(jnp.bfloat16))
    x = x.astype(jnp.bfloat16)
    for _ in range(uses):
      x = jnp.tanh(x @ w)
    return state, jnp.sum(x.astype(jnp.float32))

  filled = spmd.Layout(
    spmd.abstract_mesh({'data': 8}), (('batch', 'data'), spmd.fsdp('data', min_size=16))
  )
  counts = Estimator(TrainStep(multiplied, make, X)).estimate(filled, TARGET).counts
  assert counts.by_kind()['all-gather'] == itemsize * EMBED * EMBED * 7 / 8


def test_unused_results_of_a_loop_are_freed():
  """A first loop reads `before_loop` in every iteration, and nothing reads it later."""

  def make():
    return {'w': jnp.ones((EMBED, EMBED)), 'wide': jnp.ones((EMBED, 16 * EMBED))}

  def looped(state, x, before):
    if before:
      before_loop = x @ state['wide']
      narrow = lambda c, _: (jnp.tanh(c @ state['w']) + before_loop[:, :EMBED] * jnp.sum(c), None)
      x = jax.lax.scan(narrow, x, length=2)[0]
    wide = lambda c, _: (jnp.tanh(c @ state['wide']) @ state['wide'].T, None)
    return state, jnp.sum(jax.lax.scan(wide, x, length=2)[0])

  def temporaries(before):
    estimator = Estimator(TrainStep(functools.partial(looped, before=before), make, X))
    return estimator.estimate(DATA, TARGET).memory.temporaries

  result = 4 * (BATCH // 8) * EMBED  # of the first loop; without it, the second loop reads an argument
  assert temporaries(before=True) == temporaries(before=False) + result


def test_a_reduced_gradient_runs_last_in_its_loop_and_keeps_its_operands():
  """The operands of each such product are then live together with the other gradients."""

  def descend(state, x):
    def loss(state):
      body = jax.checkpoint(lambda c, w: (jnp.tanh(jnp.tanh(c @ w['a']) @ w['b']), None))
      return jnp.sum(jax.lax.scan(body, x, state)[0])

    return jax.tree.map(jnp.subtract, state, jax.grad(loss)(state)), 0.0

  def make():
    return {'a': jnp.ones((4, EMBED, 8 * EMBED)), 'b': jnp.ones((4, 8 * EMBED, EMBED))}

  one_shard = jax.ShapeDtypeStruct((BATCH // 8, EMBED), jnp.float32)  # the same size on each device
  reduced = Estimator(TrainStep(descend, make, X)).estimate(DATA, TARGET).memory.temporaries
  alone = Estimator(TrainStep(descend, make, one_shard)).estimate(TENSOR, TARGET).memory.temporaries
  operands = 4 * (BATCH // 8) * (8 * EMBED + EMBED)  # of the two products
  assert (
    reduced - alone == operands + 4 * 8 * EMBED * EMBED
  )  # and the sum of a gradient (236 KiB compiled)


LOOKUPS = {
  'batch': layout({'data': 8}, batch='data'),
  'rows': layout({'data': 2, 'model': 4}, batch='data', vocab='model'),
  'columns': layout({'data': 2, 'model': 4}, batch='data', embed='model', act_embed='model'),
  'columns, gathered': layout({'data': 2, 'model': 4}, batch='data', embed='model'),
  'columns over the batch': layout({'data': 8}, batch='data', embed='data'),
}


MANY_LOOKUPS = {
  'columns over the batch, a free axis': layout({'data': 4, 'idle': 2}, batch='data', embed='data')
}


@pytest.mark.parametrize(('rows', 'layouts'), [(64, LOOKUPS), (2048, MANY_LOOKUPS)])
def test_lookups_communicate_as_in_compiled_programs(rows, layouts):
  """Rows of a table under every sharding of the table, and the table's gradient."""

  def create_table():
    return {'table': spmd.LogicallyPartitioned(jnp.ones((512, EMBED)), ('vocab', 'embed'))}

  def descend(state, tokens):
    def loss(state):
      found = jnp.take(state['table'].unbox(), tokens, axis=0)
      return jnp.sum(jnp.tanh(spmd.with_logical_constraint(found, ('batch', None, 'act_embed'))) ** 2)

    value, gradient = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda old, slope: old - 0.1 * slope, state, gradient), value

  tokens = jax.ShapeDtypeStruct((rows, 16), jnp.int32)
  train_step = TrainStep(descend, create_table, tokens)
  compiled = compare(train_step, layouts, 'cpu:8')
  estimator = Estimator(train_step)
  for name, one in layouts.items():
    estimated = estimator.estimate(one, parse_target('cpu:8')).counts.by_kind()
    expected = compiled[name].counts.by_kind()
    assert estimated == pytest.approx(expected, rel=1e-3), name


@pytest.mark.parametrize(('part', 'op', 'line'), [('table', 'scatter', 1), ('dense', 'dot_general', 2)])
def test_collectives_name_the_line_of_the_model_that_needs_them(part, op, line):
  """Also where JAX traces a function once for several callers, as it does `jnp.take`, and inside of Flax's modules."""

  def made():
    table = spmd.LogicallyPartitioned(jnp.ones((1024, EMBED)), ('vocab', 'embed'))
    dense = nn.Dense(MLP).init(jax.random.key(0), jnp.zeros((1, EMBED)))['params']
    return {'table': table, 'dense': dense}

  def loss(params, tokens):
    first, second = jnp.take(params['table'].unbox(), tokens, axis=0), params['dense']
    return jnp.sum(nn.Dense(MLP).apply({'params': second}, first) ** 2)

  def trained(params, tokens):
    grads = jax.grad(lambda own: loss(params | {part: own}, tokens))(params[part])
    return params | {part: jax.tree.map(jnp.subtract, params[part], grads)}, 0.0

  estimator = Estimator(TrainStep(trained, made, jax.ShapeDtypeStruct((BATCH,), jnp.int32)))
  layout = spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'),))
  [found] = estimator.estimate(layout, TARGET).counts.collectives
  start = loss.__code__.co_firstlineno
  assert (found.op, found.source) == (op, f'estimator_test.py:{start + line}')


def test_a_scatter_that_is_sharded_along_its_positions_is_in_doubt(no_partitioner):
  """XLA adds up the parts of all devices, or gathers the rows; which, is not known where the batch is not sharded."""

  def step(weight, x, places):
    rows = x @ weight
    table = jax.vmap(lambda row, place: jnp.zeros((128, 256)).at[place].add(row))(rows, places)
    return weight - 0.1 * jnp.mean(table**2)

  x = jax.ShapeDtypeStruct((16, 512, 256), jnp.float32)
  places = jax.ShapeDtypeStruct((16, 512), jnp.int32)
  create = lambda: jnp.ones((256, 256))
  names = ('batch', 'length', None), ('batch', 'length')
  train_step = TrainStep(lambda w, batch: step(w, *batch), create, (x, places), (), names)
  estimator, mesh = Estimator(train_step), spmd.abstract_mesh({'data': 8})
  for name, is_in_doubt in (('batch', False), ('length', True)):
    found = estimator.estimate(spmd.Layout(mesh, ((name, 'data'),)), parse_target('h100:8'))
    assert any('sharded along its positions' in doubt for doubt in found.doubts) == is_in_doubt, (
      found.doubts
    )


def scanned(function):
  """A step that scans a product of the batch."""

  def create():
    return {'w': spmd.LogicallyPartitioned(jnp.ones((EMBED, EMBED)), ('embed', 'mlp'))}

  def step(state, x):
    product = (x @ state['w'].unbox()).reshape(BATCH, 4, EMBED // 4)
    return state, jnp.sum(function(product) ** 2)

  return TrainStep(step, create, X)


@pytest.mark.parametrize('dim', [1, 2])
def test_a_cumulative_sum_along_a_replicated_dimension_stays_on_its_device(dim):
  outcome = Estimator(scanned(lambda x: jnp.cumsum(x, dim))).estimate(DATA, TARGET, partition=False)
  assert [(one.kind, one.bytes) for one in outcome.counts.collectives] == [('all-reduce', 4)]
  assert doubts_of(outcome) == ()


def test_shards_of_a_cumulative_sum_exchange_their_totals():
  """Older versions of JAX lower it to a window over the whole dimension, which is gathered."""
  outcome = Estimator(scanned(lambda x: jnp.cumsum(x, 0))).estimate(DATA, TARGET, partition=False)
  [gathered] = [one for one in outcome.counts.collectives if one.kind == 'all-gather']
  totals, shard = 4 * EMBED, 4 * BATCH * EMBED / 8
  assert gathered.bytes == (totals if jax.__version_info__ >= (0, 11, 2) else shard)


@pytest.mark.skipif(
  jax.__version_info__ < (0, 11, 2), reason='older versions of JAX gather the dimension'
)
@pytest.mark.usefixtures('gpu_compiler')
def test_the_loop_of_a_cumulative_sum_along_a_sharded_dimension_is_counted_and_named():
  """XLA for GPUs sums one element after another, with several kernels for each."""
  rows = 8 * 512
  train_step = TrainStep(
    lambda state, x: (state, jnp.sum(jnp.sin(jnp.cumsum(x * state['w'], 0)) ** 2)),
    lambda: {'w': jnp.ones((1, EMBED))},
    jax.ShapeDtypeStruct((rows, EMBED), jnp.float32),
  )
  estimated = Estimator(train_step).estimate(DATA, TARGET, partition=False)
  compared = compare(train_step, {'data': DATA}, 'h100:8')
  assert estimated.counts.kernels == pytest.approx(compared['data'].counts.kernels, rel=0.02)
  assert estimated.cost.expected == pytest.approx(compared['data'].cost.expected, rel=0.05)
  [line] = [one for one in str(compared).splitlines() if 'small kernels' in one]
  assert line == '  2558 small kernels in loops: at least 3.84 ms to start them, cumsum'
  assert '2558 small kernels in loops' in compared.to_html()


def ragged():
  """A product of groups of rows, four weights."""

  def create():
    return {'w': spmd.LogicallyPartitioned(jnp.ones((4, EMBED, MLP)), (None, 'embed', 'mlp'))}

  def step(state, x):
    sizes = jnp.full(4, BATCH // 4, jnp.int32)
    return state, jnp.sum(jax.lax.ragged_dot(x, state['w'].unbox(), sizes) ** 2)

  return TrainStep(step, create, X)


def test_products_of_ragged_groups_are_computed_for_all_groups_on_gpus():
  counts = Estimator(ragged()).estimate(DATA, TARGET, partition=False).counts
  assert counts.flops == pytest.approx(4 * 2 * BATCH * EMBED * MLP / 8)


def test_an_operation_whose_costs_are_unknown_leaves_an_estimate_in_doubt():
  estimator = Estimator(ragged(), platform='tpu')
  outcome = estimator.estimate(DATA, parse_target('v5e:2x4'), partition=False)
  assert any(one.endswith('the costs of the operation ragged_dot are unknown') for one in outcome.doubts)
  assert dict(outcome.counts.opaque) == {'ragged_dot': 1}
