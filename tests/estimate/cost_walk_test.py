"""Partial sums of one array, and arrays that are reshaped: the traffic of compiled programs, by hand."""

import random

import jax
import jax.numpy as jnp
import pytest

import flax_spmd as spmd
from flax_spmd.explore import Estimator, TrainStep, compare, parse_target
from tests.estimate.doubts import doubts_of
from tests.versions import needs_gpu_compiler

ROWS, WIDTH, BATCH = 512, 256, 64
TABLE = 4 * ROWS * WIDTH * 7 / 8  # bytes of a reduce-scatter of the table in float32
DATA = spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'),))
INPUTS = {
  'x': jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32),
  'ids': jax.ShapeDtypeStruct((BATCH,), jnp.int32),
}


def create():
  return {'w': spmd.LogicallyPartitioned(jnp.ones((ROWS, WIDTH)), ('vocab', 'embed'))}


GRID = spmd.Layout(
  spmd.abstract_mesh({'data': 4, 'model': 2}),
  (('rows', 'data'), ('columns', 'model'), ('batch', ('data', 'model'))),
)


def compiled(train, layout):
  """The work of the compiled program."""
  needs_gpu_compiler()
  return compare(train, [layout], 'h100:8')['layout 0'].counts


def tied(dtype, lookups):
  """A step with a table that is looked up, and a matrix too."""

  def loss(state, batch):
    w = state['w'].unbox()
    rows = [w.astype(dtype)[batch['ids'] + number].astype(jnp.float32) for number in range(lookups)]
    return sum(jnp.sum(jnp.tanh(row) ** (2 + number)) for number, row in enumerate(rows)) + jnp.sum(
      jnp.tanh(batch['x'] @ w.T) ** 2
    )

  def step(state, batch):
    value, gradient = jax.value_and_grad(loss)(state, batch)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradient), value

  return TrainStep(step, create, INPUTS)


@pytest.mark.parametrize(
  ('dtype', 'lookups', 'target', 'sent'),
  [
    (jnp.float32, 1, 'h100:8', 4),  # one all-reduce of the lookup, one of the product
    (jnp.float32, 1, 'v5e:2x4', 4),
    (jnp.bfloat16, 1, 'h100:8', 2),  # added in float32 before they are reduced
    (jnp.bfloat16, 1, 'v5e:2x4', 3),
    (jnp.bfloat16, 2, 'h100:8', 2),
    (jnp.bfloat16, 2, 'v5e:2x4', 4),
  ],
)
def test_the_gradient_of_a_tied_table_is_reduced_as_in_compiled_programs(dtype, lookups, target, sent):
  aim = parse_target(target)
  outcome = Estimator(tied(dtype, lookups), platform=aim.chip.platform).estimate(DATA, aim)
  assert doubts_of(outcome) == ()
  assert outcome.counts.by_kind()['all-reduce'] == pytest.approx(sent * TABLE, rel=0.01)


def test_logits_that_a_lookup_and_a_normalizer_read_do_not_move():
  """XLA scatters the gradient of the lookup onto that of the normalizer, which is sharded along the vocabulary."""

  def loss(state, batch):
    logits = batch['x'] @ state['w'].unbox().T
    picked = jnp.take_along_axis(logits, batch['ids'][:, None], -1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

  def step(state, batch):
    value, gradient = jax.value_and_grad(loss)(state, batch)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradient), value

  train, aim = TrainStep(step, create, INPUTS), parse_target('h100:8')
  estimator = Estimator(train)
  layout = DATA.replace(rules=(('batch', 'data'), ('vocab', 'data')))
  outcome = estimator.estimate(layout, aim)
  assert doubts_of(outcome) == ()
  assert outcome.counts.by_kind() == pytest.approx(compiled(train, layout).by_kind(), rel=0.01)


def test_what_is_scattered_onto_and_read_nowhere_else_is_stored_once():
  """XLA scatters in place: the gradient of the logits of a loss with integer labels is stored once (2.0004 times compiled)."""
  tokens, vocab = 4096, 8192

  def loss(w, batch):
    logits = jnp.tanh(batch['x'] @ w)
    picked = jnp.take_along_axis(logits, batch['ids'][:, None], -1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

  def step(state, batch):
    value, gradient = jax.value_and_grad(loss)(state['w'], batch)
    return {'w': state['w'] - 0.1 * gradient}, value

  inputs = {'x': jnp.ones((tokens, 64)), 'ids': jnp.zeros((tokens,), jnp.int32)}
  train = TrainStep(step, lambda: {'w': jnp.ones((64, vocab))}, inputs)
  layout = spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'),))
  temporaries = Estimator(train).estimate(layout, parse_target('h100:8')).memory.temporaries
  assert temporaries / (tokens * vocab * 4 // 8) == pytest.approx(2, abs=0.05)


@pytest.mark.parametrize(('rules', 'is_in_doubt'), [((), False), ((('vocab', 'data'),), True)])
def test_a_product_that_a_step_computes_twice_counts_once(rules, is_in_doubt):
  """Its collectives are not merged, nor what follows them: they are in doubt."""

  def create():
    return {'w': spmd.LogicallyPartitioned(jnp.ones((WIDTH, ROWS)), ('vocab', None))}

  def halves(state, x):
    return jnp.split(jnp.tanh(x @ state['w'].unbox()), 2, -1)

  def step(state, batch):
    first, second = halves(state, batch['x']), halves(state, batch['x'])
    return state, jnp.sum(jnp.sin(first[0]) * jnp.cos(second[1]), 1)

  train, aim = TrainStep(step, create, INPUTS), parse_target('h100:8')
  estimator = Estimator(train)
  layout = DATA.replace(rules=(('batch', 'data'), *rules))
  outcome = estimator.estimate(layout, aim)
  assert any('that the step computes several times' in doubt for doubt in outcome.doubts) == is_in_doubt
  if not is_in_doubt:
    assert outcome.counts.flops == compiled(train, layout).flops


@pytest.mark.parametrize(('names', 'is_in_doubt'), [((None, 'rows'), True), (('rows', None), False)])
def test_a_sum_whose_shards_move_as_it_is_reduced_is_in_doubt(names, is_in_doubt):
  """The partitioner groups devices in an order of its own, which a further operand may have already."""

  def loss(w, x):
    x = spmd.with_logical_constraint(x, ('rows', 'columns'))
    y = x @ spmd.with_logical_constraint(w, ('columns', None))
    y = spmd.with_logical_constraint(y, ('rows', None))
    return jnp.sum(spmd.with_logical_constraint(y, names) ** 2)

  doubts = found_doubts(loss, (None, None), is_updated=False)
  assert any('whose shards move as it is reduced' in doubt for doubt in doubts) == is_in_doubt


@pytest.mark.parametrize('batch', ['data', 'model'])
@pytest.mark.parametrize('vocab', [('data', 'model'), ('model', 'data')])
def test_rows_of_a_batch_are_gathered_for_a_table_over_all_devices(batch, vocab):
  def loss(state, batch):
    rows = spmd.with_logical_constraint(jnp.tanh(state['w'].unbox()[batch['ids']]), ('batch', None))
    return jnp.sum(rows * batch['x'])

  def step(state, batch):
    value, gradient = jax.value_and_grad(loss)(state, batch)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradient), value

  train, aim = TrainStep(step, create, INPUTS), parse_target('h100:8')
  estimator = Estimator(train)
  layout = GRID.replace(rules=(('batch', batch), ('vocab', vocab)))
  outcome = estimator.estimate(layout, aim)
  assert doubts_of(outcome) == ()
  assert outcome.counts.by_kind() == pytest.approx(compiled(train, layout).by_kind(), rel=0.01)


def test_a_batch_that_is_cut_into_microbatches_moves_once():
  def step(state, batch):
    parts = spmd.with_logical_constraint(batch['x'].reshape(4, -1, WIDTH), (None, 'batch', None))
    return state, jax.lax.map(lambda x: jnp.sum(jnp.tanh(x) @ state['w'].unbox().T), parts)

  outcome = Estimator(TrainStep(step, create, INPUTS)).estimate(DATA, parse_target('h100:8'))
  shard = 4 * BATCH * WIDTH / 8
  kinds = outcome.counts.by_kind()
  assert (kinds['collective-permute'], kinds['all-to-all']) == (shard, shard * 3 / 4)
  assert 'all-gather' not in kinds and doubts_of(outcome) == ()


@pytest.mark.parametrize('is_chained', [True, False])
def test_a_value_that_several_constraints_replicate_is_gathered_once(is_chained):
  def replicated(x):
    return spmd.with_logical_constraint(x, (None, None))

  def step(state, batch):
    x = jnp.tanh(batch['x'] @ state['w'].unbox().T)
    first = replicated(x)
    second = replicated(first if is_chained else x)
    return state, (jnp.sort(first, 0), jnp.argsort(second, 0))

  outcome = Estimator(TrainStep(step, create, INPUTS)).estimate(DATA, parse_target('h100:8'))
  shard = 4 * BATCH * ROWS / 8
  assert outcome.counts.by_kind() == {'all-gather': 7 * shard}
  assert doubts_of(outcome) == ()


def estimate_of(loss, names, is_updated, target='h100:8'):
  """The estimate of a step with a matrix of such names."""

  def step(state, batch):
    if is_updated:
      gradient = jax.grad(lambda state: loss(state['w'].unbox(), batch))(state)
      return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradient), None
    return state, loss(state['w'].unbox(), batch)

  def matrix():
    return {'w': spmd.LogicallyPartitioned(jnp.ones((ROWS, WIDTH)), names)}

  inputs = jax.ShapeDtypeStruct((BATCH, ROWS), jnp.float32)
  return Estimator(TrainStep(step, matrix, inputs)).estimate(GRID, parse_target(target))


def found_doubts(loss, names, is_updated):
  return estimate_of(loss, names, is_updated).doubts


@pytest.mark.parametrize(
  ('names', 'kinds'),
  [(('rows', 'columns'), {'all-reduce'}), (('rows', None), {'reduce-scatter', 'all-reduce'})],
)
def test_gpus_reduce_a_sum_whole_that_is_cut_along_several_dimensions(names, kinds):
  def loss(w, x):
    x, w = (spmd.with_logical_constraint(one, (name, None)) for one, name in ((x, 'batch'), (w, None)))
    return jnp.sum(jnp.tanh(x @ w) ** 2)

  reason = 'a sum that is scattered along several dimensions'
  gpu, tpu = (estimate_of(loss, names, True, target=target) for target in ('h100:8', 'v5e:2x4'))
  found = {op.kind for op in gpu.counts.collectives if op.kind != 'all-gather'}
  assert found == kinds
  assert not any(reason in one for one in gpu.doubts)
  assert any(reason in one for one in tpu.doubts) == ('reduce-scatter' not in kinds)


@pytest.mark.parametrize(('names', 'is_in_doubt'), [(('rows', None), True), ((None, 'rows'), False)])
def test_a_weight_that_activations_shard_along_another_dimension_is_in_doubt(names, is_in_doubt):
  def loss(w, x):
    y = spmd.with_logical_constraint(jnp.tanh(x.T @ x)[:, :WIDTH], (None, 'rows'))
    return jnp.sum(jnp.tanh(spmd.with_logical_constraint(y + w, (None, 'rows'))) ** 2)

  found = found_doubts(loss, names, is_updated=False)
  reason = 'a weight that activations shard along another dimension'
  assert any(one.endswith(reason) for one in found) == is_in_doubt


# layouts in which the dimensions of weights and activations want the same axes
CONTESTED = (
  ({'a': 8}, {'mlp': ('a',), 'vocab': ('a',)}),
  ({'a': 8}, {'batch': ('a',), 'mlp': ('a',)}),
  ({'a': 2, 'b': 4}, {'batch': ('b',), 'embed': ('a',), 'vocab': ('a',), 'length': ('b',)}),
  (
    {'a': 2, 'b': 4},
    {'batch': ('b',), 'embed': ('a',), 'mlp': ('b',), 'vocab': ('b',), 'width': ('a', 'b')},
  ),
)


@pytest.mark.usefixtures('gpu_compiler')
def test_products_of_contested_axes_send_and_compute_as_much_as_compiled_ones():
  def step(state, tokens):
    def loss(state):
      p = spmd.unbox(state)
      x = jnp.take(p['table'], tokens, axis=0)
      x = x + jax.nn.gelu(x @ p['up']) @ p['down']
      x = spmd.with_logical_constraint(x, ('batch', 'length', 'width'))
      chances = jax.nn.log_softmax(x @ p['out'])
      return -jnp.take_along_axis(chances, tokens[..., None], -1).mean()

    return jax.tree.map(jnp.subtract, state, jax.grad(loss)(state)), jnp.float32(0)

  def create():
    shapes = {'table': (1024, 256), 'up': (256, 768), 'down': (768, 256), 'out': (256, 1024)}
    sizes = {1024: 'vocab', 256: 'embed', 768: 'mlp'}
    return {
      key: spmd.LogicallyPartitioned(jnp.zeros(shape), tuple(map(sizes.get, shape)))
      for key, shape in shapes.items()
    }

  train_step = TrainStep(step, create, jax.ShapeDtypeStruct((32, 128), jnp.int32))
  estimator = Estimator(train_step)
  layouts = {
    str(rules): spmd.Layout(
      spmd.abstract_mesh(mesh),
      tuple(
        (name, rules.get(name, ())) for name in ('batch', 'length', 'width', 'vocab', 'embed', 'mlp')
      ),
    )
    for mesh, rules in CONTESTED
  }
  for compiled in compare(train_step, layouts, 'h100:8'):
    estimated = estimator.estimate(layouts[compiled.name], parse_target('h100:8'))
    sent = [sum(one.counts.by_axis().values()) for one in (estimated, compiled)]
    assert sent[0] == pytest.approx(sent[1], rel=0.05), compiled.name
    assert estimated.counts.flops == pytest.approx(compiled.counts.flops, rel=0.01)


@pytest.mark.usefixtures('gpu_compiler')
@pytest.mark.parametrize('heads', [12, 6, 8, 4, 2, 3])
def test_features_that_are_cut_into_heads_send_as_much_as_in_compiled_programs(heads):
  width = 16 * heads * 8

  def step(state, x):
    def loss(state):
      q = (x @ state['in'].unbox()).reshape(*x.shape[:2], heads, -1)
      chances = jax.nn.softmax(jnp.einsum('blhd,bmhd->bhlm', q, q))
      y = jnp.einsum('bhlm,bmhd->blhd', chances, q).reshape(x.shape)
      return jnp.sum(jnp.tanh(y @ state['out'].unbox()) ** 2)

    return jax.tree.map(jnp.subtract, state, jax.grad(loss)(state)), jnp.float32(0)

  def create():
    weight = jnp.zeros((width, width))
    names = {'in': ('embed', 'heads'), 'out': ('heads', 'embed')}
    return {key: spmd.LogicallyPartitioned(weight, names[key]) for key in names}

  train = TrainStep(step, create, jax.ShapeDtypeStruct((8, 64, width), jnp.float32))
  layout = spmd.Layout(spmd.abstract_mesh({'model': 8}), (('heads', 'model'), ('batch', ())))
  estimated = Estimator(train).estimate(layout, parse_target('h100:8')).counts
  sent = [sum(one.by_axis().values()) for one in (estimated, compiled(train, layout))]
  assert sent[0] == pytest.approx(sent[1], rel=0.01)


def updated(loss, shapes, names, inputs):
  """A step that updates its parameters by the gradients of a loss."""

  def create():
    return {
      name: spmd.LogicallyPartitioned(jnp.ones(shape), names[name]) for name, shape in shapes.items()
    }

  def step(state, batch):
    value, gradient = jax.value_and_grad(loss)(state, batch)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradient), value

  return TrainStep(step, create, inputs)


def assert_as_compiled(train, layout):
  outcome = Estimator(train).estimate(layout, parse_target('h100:8'))
  counts = compiled(train, layout)
  assert doubts_of(outcome) == ()
  assert outcome.counts.flops == pytest.approx(counts.flops, rel=0.001)
  assert outcome.counts.by_kind() == pytest.approx(counts.by_kind(), rel=0.01)


LONG = {'x': jax.ShapeDtypeStruct((BATCH, 32, WIDTH), jnp.float32)}
TWO = spmd.abstract_mesh({'data': 2, 'model': 4})


def test_layers_under_one_mask_are_sharded_each_as_its_own_weights(no_partitioner):
  """XLA broadcasts the mask for each layer; one broadcast for both would shard the second layer as the first."""
  shapes = dict.fromkeys(('q0', 'k0', 'q1', 'k1'), (WIDTH, 8, 32))
  names = {name: (None, f'heads{name[1]}', None) for name in shapes}

  def loss(state, batch):
    x, mask = batch['x'], jnp.tril(jnp.ones((32, 32), bool))
    for layer in range(2):
      q, k = (jnp.einsum('bld,dhk->blhk', x, state[f'{name}{layer}'].unbox()) for name in 'qk')
      scores = jnp.einsum('bqhd,bkhd->bhqk', q, k)
      masked = jnp.where(mask[None, None], 0.0, -1e9) * jnp.mean(batch['x'])
      weights = jax.nn.softmax(scores + masked)
      x = jnp.einsum('bhqk,bkhd->bqhd', weights, k).reshape(x.shape)
      x = spmd.with_logical_constraint(x, ('batch', None, None))
    return jnp.sum(x**2)

  assert_as_compiled(
    updated(loss, shapes, names, LONG), spmd.Layout(TWO, (('batch', 'data'), ('heads0', 'model')))
  )


def test_products_of_arrays_that_are_computed_twice_count_once():
  """Broadcasts are not merged, but what is computed from them is, if it is costly: here the norm and the product."""
  shapes, names = {'w': (WIDTH, ROWS), 'scale': (WIDTH,)}, {'w': (None, None), 'scale': (None,)}

  def loss(state, batch):
    def product():
      normed = batch['x'] / jnp.sqrt(jnp.mean(batch['x'] ** 2, -1, keepdims=True))
      return (normed * state['scale'].unbox()[None, None]) @ state['w'].unbox()

    return jnp.sum(jnp.sin(product()) * jnp.cos(product()))

  assert_as_compiled(updated(loss, shapes, names, LONG), DATA)


@pytest.mark.parametrize('columns', [None, 'data'])
def test_a_sum_of_parts_is_reduced_after_a_loop_if_all_of_them_are(columns):
  """The gradients of two weights in one product, of which one is sharded over the devices that add it up."""
  shapes = {'v': (WIDTH, WIDTH), 'w': (WIDTH, WIDTH)}
  names = {'v': (None, None), 'w': (None, 'columns')}

  def loss(state, batch):
    both = jnp.concatenate([state['v'].unbox(), state['w'].unbox()], 1)

    def body(h, x):
      one, other = jnp.split(jnp.tanh((x + h) @ both), 2, 1)
      return spmd.with_logical_constraint(one * other, ('batch', None)), None

    return jnp.sum(jax.lax.scan(body, jnp.zeros((BATCH, WIDTH)), batch['x'].swapaxes(0, 1))[0] ** 2)

  layout = spmd.Layout(TWO, (('batch', ('data', 'model')), ('columns', columns)))
  train = updated(loss, shapes, names, LONG)
  outcome = Estimator(train).estimate(layout, parse_target('h100:8'))
  expected = compiled(train, layout).by_kind()
  assert outcome.counts.by_kind()['all-reduce'] == pytest.approx(expected['all-reduce'], rel=0.01)


@pytest.mark.parametrize('uses', [1, 2])
def test_a_sum_that_is_cut_along_another_dimension_too_is_not_scattered(uses):
  """XLA cuts it once, along both dimensions, after an all-reduce."""
  shapes, names = {'w': (WIDTH, ROWS)}, {'w': ('columns', None)}

  def loss(state, batch):
    x = spmd.with_logical_constraint(batch['x'], (None, None, 'columns'))
    y = spmd.with_logical_constraint(x @ state['w'].unbox(), (None, None, 'columns'))
    parts = [spmd.with_logical_constraint(y, ('batch', None, 'columns')) for _ in range(uses)]
    return sum(jnp.sum(jnp.sin(part) ** (2 + number)) for number, part in enumerate(parts))

  train = updated(loss, shapes, names, LONG)
  layout = spmd.Layout(TWO, (('batch', 'data'), ('columns', 'model')))
  counts = Estimator(train).estimate(layout, parse_target('h100:8')).counts.by_kind()
  assert 'reduce-scatter' not in counts
  assert counts['all-reduce'] == pytest.approx(compiled(train, layout).by_kind()['all-reduce'], rel=0.01)


@pytest.mark.parametrize(
  ('rows', 'columns'), [(None, 'columns'), ('rows', 'columns'), (None, None), (None, 'both')]
)
def test_an_activation_is_gathered_again_for_the_gradient_of_a_weight(rows, columns):
  """XLA groups devices in another way then, and does not merge the two, if the weight has the shards of the result."""
  shapes, names = {'w': (WIDTH, ROWS)}, {'w': (rows, columns)}

  def loss(state, batch):
    x = spmd.with_logical_constraint(jnp.tanh(batch['x']), ('batch', None, 'columns'))
    return jnp.sum(spmd.with_logical_constraint(x @ state['w'].unbox(), ('batch', None, 'columns')) ** 2)

  axes = {'batch': 'data', 'columns': 'model', 'rows': 'data', 'both': ('model', 'data')}
  assert_as_compiled(updated(loss, shapes, names, LONG), spmd.Layout(TWO, tuple(axes.items())))


def test_gradients_that_a_scan_stacks_are_scattered():
  """A dimension of size 1 is added before the sum is reduced, and the stack is sharded."""
  shapes, names = {'w': (3, WIDTH, WIDTH)}, {'w': (None, None, 'columns')}

  def loss(state, batch):
    def layer(x, w):
      return spmd.with_logical_constraint(jnp.tanh(x @ w), ('batch', None, None)), None

    return jnp.sum(jax.lax.scan(layer, batch['x'], state['w'].unbox())[0] ** 2)

  layout = DATA.replace(rules=(('batch', 'data'), ('columns', 'data')))
  assert_as_compiled(updated(loss, shapes, names, LONG), layout)


@pytest.mark.parametrize('is_kept', [True, False])
def test_a_loop_that_runs_once_is_none(is_kept):
  """What a layer computes again is merged with the first time, unless a barrier keeps them apart."""
  shapes, names = {'w': (1, WIDTH, ROWS)}, {'w': (None, None, None)}

  def loss(state, batch):
    def layer(x, w):
      return x + jnp.sin(jnp.tanh(x @ w) @ w.T), None

    layer = jax.checkpoint(layer, prevent_cse=is_kept)
    return jnp.sum(jax.lax.scan(layer, batch['x'], state['w'].unbox())[0] ** 2)

  train = updated(loss, shapes, names, LONG)
  assert_as_compiled(train, DATA)
  products = Estimator(train).estimate(DATA, parse_target('h100:8')).counts.flops
  assert products / (2 * BATCH * 32 * WIDTH * ROWS / 8) == pytest.approx(7 if is_kept else 5, rel=0.02)


@pytest.mark.parametrize(
  ('vocab', 'rules', 'arrays'),
  [
    (
      32000,
      (),
      3,
    ),  # a gradient in 32 bits, and the logits in 16 bits, in whose place the whole gradient is written
    (32000, (('embed', 'model'),), 4),  # not in that of the result of an asynchronous all-reduce
    (8192, (), 5),  # short rows: the logits less their maximum are stored in 32 bits instead
    (8192, (('vocab', 'model'),), 1),  # of sharded rows the logits are
  ],
)
def test_memory_of_the_logarithm_of_a_softmax(vocab, rules, arrays):
  tokens = 4096

  def loss(w, batch):
    x = spmd.with_logical_constraint(batch['x'].astype(jnp.bfloat16), ('batch', 'embed'))
    logits = (x @ w.unbox().astype(jnp.bfloat16)).astype(jnp.float32)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch['ids'][:, None], -1)
    return -jnp.mean(picked)

  def step(state, batch):
    value, gradient = jax.value_and_grad(loss)(state['w'], batch)
    return {'w': jax.tree.map(lambda w, g: w - 0.1 * g, state['w'], gradient)}, value

  inputs = {'x': jnp.ones((tokens, 64)), 'ids': jnp.zeros((tokens,), jnp.int32)}
  create = lambda: {'w': spmd.LogicallyPartitioned(jnp.ones((64, vocab)), ('embed', 'vocab'))}
  layout = spmd.Layout(TWO, (('batch', 'data'), *rules))
  outcome = Estimator(TrainStep(step, create, inputs)).estimate(layout, parse_target('h100:8'))
  assert outcome.memory.temporaries / (tokens * vocab) == pytest.approx(arrays, abs=0.05)


@pytest.mark.new_jax  # older versions of XLA write each sum in place
@pytest.mark.usefixtures('gpu_compiler')
@pytest.mark.parametrize(
  ('rows', 'rules'),
  [((8192,), ()), ((64, 128), ()), ((8192,), (('rows', 'model'),))],
  ids=['in place', 'of more dimensions', 'scattered'],
)
def test_a_sum_over_devices_may_be_written_beside_its_operand(rows, rules):
  """The memory is that of the compiled program."""

  def step(state, x):
    y = spmd.with_logical_constraint(x @ state['w'].unbox(), ('rows', *[None] * (x.ndim - 1)))
    return state, jnp.sum(jnp.tanh(y) ** 2)

  create = lambda: {'w': spmd.LogicallyPartitioned(jnp.ones((1024, 4096)), ('embed', None))}
  x = jax.ShapeDtypeStruct((*rows, 1024), jnp.float32)
  train = TrainStep(step, create, x, placements=(*[None] * len(rows), 'embed'))
  layout = spmd.Layout(spmd.abstract_mesh({'model': 8}), (('embed', 'model'), *rules))
  memory = Estimator(train).estimate(layout, 'h100:8').memory
  [compiled] = compare(train, {'sum': layout}, 'h100:8')
  assert memory.temporaries == pytest.approx(compiled.memory.temporaries, rel=0.1)


@pytest.mark.usefixtures('gpu_compiler', 'whole_steps')
@pytest.mark.parametrize('seed', range(4))
def test_products_whose_operands_move_to_unused_axes_are_as_xla_partitions_them(seed):
  """Random orders of the mesh axes, of which one is unused."""
  rng = random.Random(seed)
  mesh = dict(rng.sample([('data', 2), ('unused', 2), ('fsdp', 2)], 3))
  rules = {'batch': 'data', 'embed': rng.sample(['fsdp', 'data'], 2), 'act': 'fsdp'}
  shapes = {'down': (512, 512), 'up': (512, 8192)}
  names = {'down': (None, 'embed'), 'up': ('embed', None)}

  def loss(state, batch):
    x = jnp.tanh(batch['x'] @ state['down'].unbox())
    x = spmd.with_logical_constraint(x, ('batch', None, 'act'))
    y = spmd.with_logical_constraint(x @ state['up'].unbox(), ('batch', None, None))
    return jnp.sum(jnp.tanh(y) ** 2)

  inputs = {'x': jax.ShapeDtypeStruct((64, 64, 512), jnp.float32)}
  layout = spmd.Layout(spmd.abstract_mesh(mesh), tuple(rules.items()))
  estimator = Estimator(updated(loss, shapes, names, inputs), platform='cuda')
  walked, partitioned = (
    sum(estimator.estimate(layout, 'h100:8', partition=one).counts.by_axis().values())
    for one in (False, True)
  )
  assert walked == pytest.approx(partitioned, rel=0.1)


def chosen(logits, ids):
  return jnp.take_along_axis(logits, ids[..., None], -1)[..., 0]


# ways to write a loss of the next token
NEXT = {
  'one slice': lambda logits, ids: -chosen(jax.nn.log_softmax(logits[:, :-1]), ids),
  'two slices': lambda logits, ids: jax.nn.logsumexp(logits[:, :-1], -1) - chosen(logits[:, :-1], ids),
  'one-hot': lambda logits, ids: (
    jax.nn.logsumexp(logits[:, :-1], -1)
    - jnp.sum(logits[:, :-1] * jax.nn.one_hot(ids, logits.shape[-1]), -1)
  ),
}


@pytest.mark.usefixtures('gpu_compiler')
@pytest.mark.parametrize('form', NEXT)
@pytest.mark.parametrize('is_constrained', [False, True])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_the_gradient_of_logits_without_the_last_position_is_written_beside_them(
  dtype, is_constrained, form
):
  """A loss of the next token; the memory is that of the compiled program."""

  def loss(state, batch):
    logits = jnp.tanh(batch['x'].astype(dtype)) @ state['w'].astype(dtype)
    if is_constrained:
      logits = spmd.with_logical_constraint(logits, ('batch', None, 'vocab'))
    return jnp.mean(NEXT[form](logits.astype(jnp.float32), batch['ids'][:, 1:]))

  def step(state, batch):
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, jax.grad(loss)(state, batch)), 0.0

  create = lambda: {'w': jnp.ones((512, 32000))}
  inputs = {
    'x': jax.ShapeDtypeStruct((64, 256, 512), jnp.float32),
    'ids': jax.ShapeDtypeStruct((64, 256), jnp.int32),
  }
  train = TrainStep(step, create, inputs)
  memory = Estimator(train).estimate(DATA, 'h100:8').memory
  [compiled] = compare(train, {'data': DATA}, 'h100:8')
  assert memory.temporaries == pytest.approx(compiled.memory.temporaries, rel=0.1)


@pytest.mark.parametrize(
  ('mesh', 'is_in_doubt'), [({'data': 8, 'model': 1}, False), ({'data': 2, 'model': 4}, True)]
)
def test_blocks_that_are_computed_again_beside_sums_are_in_doubt(mesh, is_in_doubt):
  """XLA's scheduler runs them early to hide the sums of tensor parallelism."""

  @jax.checkpoint
  def block(x, weights):
    up, down = weights
    hidden = jnp.tanh(x @ up)
    return x + jnp.tanh(hidden * hidden) @ down

  def step(state, x):
    def loss(state):
      y = x
      for weights in spmd.unbox(state):
        y = block(y, weights)
      return jnp.mean(y**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, state, jax.grad(loss)(state)), 0.0

  def create():
    box = lambda *names: spmd.LogicallyPartitioned(
      jnp.ones([{'embed': 256, 'mlp': 1024}[name] for name in names]), names
    )
    return [(box('embed', 'mlp'), box('mlp', 'embed')) for _ in range(3)]

  x = jax.ShapeDtypeStruct((8192, 256), jnp.float32)
  layout = spmd.Layout(spmd.abstract_mesh(mesh), (('batch', 'data'), ('mlp', 'model')))
  outcome = Estimator(TrainStep(step, create, x)).estimate(layout, 'h100:8')
  found = [
    doubt for doubt in outcome.doubts if doubt.startswith('remat: blocks that are computed again')
  ]
  assert bool(found) == is_in_doubt
