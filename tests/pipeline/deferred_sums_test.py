"""Sums over examples: devices of a stage add their parts once, after the loop, and the results stay those of `jax.jit`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd._src.hlo.counts import count
from flax_spmd.pipeline import OneFOneB, ZeroBubbleH1, accumulate, stage_end
from tests.pipeline.cases import assert_same

WIDTH, HEADS, LENGTH, WORDS, MICROBATCHES, ROWS = 16, 2, 6, 11, 3, 8
SCHEDULE = OneFOneB(ranks=2)
RULES = (('batch', 'data'),)


# -- one weight each, used in the ways of different models


def dense(h, w):
  return jnp.tanh(h @ w)


def flattened(h, w):
  return jnp.tanh((h.reshape(-1, WIDTH) @ w).reshape(h.shape))


def by_einsum(h, w):
  w = w.reshape(WIDTH, HEADS, WIDTH // HEADS)
  return jnp.sin(jnp.einsum('bld,dhe->blhe', h, w)).reshape(h.shape)


def by_example(h, w):
  return jax.vmap(lambda row: jnp.tanh(row @ w))(h)


def biased(h, w):
  return h * w[None, :1] + w[None, 1:2]


def normed(h, w):
  return (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-3) * (
    1 + w[None, 2:3]
  ) + w[None, 3:4]


def over_examples(h, w):
  """Batch normalization: its statistics are over all examples."""
  return (h - h.mean((0, 1), keepdims=True)) / jnp.sqrt(h.var((0, 1), keepdims=True) + 1e-3) @ w


def embedded(h, w):
  return h + w[jnp.argsort(h[..., :WORDS], -1)[..., 0]]


def masked(h, w):
  return jnp.tanh(h @ jnp.where(w > 0, w, 0.1 * jnp.tril(w)))


def placed(h, w):
  """The rows of the weight are the same for all examples."""
  return jnp.tanh(h + w[(jnp.arange(LENGTH) * 5) % 7][None])


def in_layers(h, w):
  layers = jnp.stack([w, w.T, 2 * w])
  return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, layers)[0]


def in_shared_layers(h, w):
  return lax.scan(lambda h, _: (jnp.tanh(h @ w + w[None, :1]), None), h, None, length=3)[0]


def over_time(h, w):
  state = jnp.zeros_like(h[:, 0])
  step = jax.checkpoint(lambda state, x: (jnp.tanh(state @ w + x), state))
  return lax.scan(step, state, jnp.moveaxis(h, 1, 0))[1].swapaxes(0, 1)


def jitted(h, w):
  return jax.jit(lambda h, w: jax.nn.gelu(h @ w))(h, w)


def repeated(h, w):
  return jax.checkpoint(lambda h, w: jnp.sin(jnp.tanh(h @ w) @ w.T))(h, w)


def in_repeated_layers(h, w):
  layer = jax.checkpoint(lambda h, w: (jax.jit(jnp.sin)(h @ w) + w[None, :1], None))
  return lax.scan(layer, h, jnp.stack([w, w.T]))[0]


def in_numbered_layers(h, w):
  layers = jnp.stack([w, w.T])
  return lax.scan(lambda h, number: (jnp.tanh(h @ layers[number]), None), h, jnp.arange(2))[0]


def in_bounded_layers(h, w):
  """Functions of `jax.numpy` are calls inside the body."""
  of_weight = lambda w: jnp.where(w > 0.5, 0.0, jnp.clip(jnp.tril(w), -1, 1))
  return lax.scan(lambda h, w: (jnp.tanh(h @ of_weight(w)), None), h, jnp.stack([w, w.T]))[0]


def rounded(h, w):
  return jnp.tanh(h @ (w + lax.stop_gradient(jnp.round(8 * w) / 8 - w)))


def pruned(h, w):
  return jnp.tanh(h @ jnp.where(w > 0, w, 0.0))


def of_low_rank(h, w):
  return h + h @ (w[:, :2] @ w[:2])


def convolved(h, w):
  kernel = jnp.stack([w, w.T])
  return lax.conv_general_dilated(h, kernel, (1,), 'SAME', dimension_numbers=('NWC', 'WIO', 'NWC'))


def convolved_in_groups(h, w):
  kernel, options = w[None, :4], {'feature_group_count': 4, 'rhs_dilation': (2,)}
  return lax.conv_general_dilated(
    h, kernel, (1,), 'SAME', dimension_numbers=('NWC', 'WIO', 'NWC'), **options
  )


def convolved_and_back(h, w):
  """With strides, in layers."""
  numbers = ('NHWC', 'HWIO', 'NHWC')

  def layer(h, kernel):
    small = lax.conv_general_dilated(h, kernel, (2, 1), 'SAME', dimension_numbers=numbers)
    return jnp.tanh(lax.conv_transpose(small, kernel, (2, 1), 'SAME', dimension_numbers=numbers)), None

  kernels = jnp.stack([w, w.T]).reshape(2, 8, 2, 8, 2).transpose(0, 2, 4, 1, 3)
  return lax.scan(layer, h.reshape(*h.shape[:-1], 2, 8), kernels)[0].reshape(h.shape)


def rearranged(h, w):
  """Functions of `jax.numpy` are calls whose operands have parts, in the backward pass."""
  w = jnp.roll(jnp.sort(w, 0), 1, 1).at[0].set(w[1])
  return jnp.tanh(h @ jnp.take(w, np.arange(WIDTH) * 5 % WIDTH, 0))


def filtered(h, w):
  w = jnp.cumsum(w, 0) / 4 + jnp.abs(lax.complex(w, w.T))
  w = lax.reduce_window(lax.optimization_barrier(w), 0.0, lax.add, (2, 1), (1, 1), 'SAME')
  return jnp.tanh(h @ lax.reduce_precision(w, 8, 20 if w.dtype == np.float32 else 52))


def computed(h, w):
  """In a loop, a branch and a remat of the weight alone."""
  w = lax.scan(lambda old, row: (0.5 * old + row, jnp.sin(old)), w[0], w)[1]
  w = lax.cond(w[0, 0] > 0, lambda w, v: w.T - v, lambda w, _: 2 * w, w, jnp.cos(w))
  return jnp.tanh(h @ jax.checkpoint(lambda w: jnp.tanh(w) @ w)(w))


def placed_call(function, *specs):
  """A jitted function with shardings of its operands, of which the first is that of its result."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:  # on one device
    return function
  shardings = [NamedSharding(mesh, spec) for spec in specs]
  return jax.jit(function, in_shardings=shardings, out_shardings=shardings[0])


def of_placed_examples(h, w):
  return placed_call(lambda h, w: jnp.tanh(h @ w.T), P('data'), P())(h, w)


def of_placed_weights(h, w):
  return h @ placed_call(lambda w: jnp.cumsum(jnp.sin(w) @ w, 0) / 4, P())(w)


def chosen(h, w):
  return lax.cond(jnp.max(h) > 1, lambda: h @ w, lambda: h)


def of_experts(h, w):
  share = jax.nn.one_hot(jnp.argmax(h[..., :2], -1), 2)
  return jnp.einsum('ble,blf,efg->blg', share, h, jnp.stack([w, w.T]))


LAYERS = [
  dense,
  flattened,
  by_einsum,
  by_example,
  biased,
  normed,
  over_examples,
  embedded,
  masked,
  placed,
  in_layers,
  in_shared_layers,
  over_time,
  jitted,
  repeated,
  in_repeated_layers,
  in_numbered_layers,
  in_bounded_layers,
  rounded,
  pruned,
  of_low_rank,
  convolved,
  convolved_in_groups,
  convolved_and_back,
  rearranged,
  filtered,
  computed,
  of_placed_examples,
  of_placed_weights,
  chosen,
  of_experts,
]
WHOLE = [of_placed_examples, of_placed_weights, chosen]
"""Layers whose gradients stay whole: shardings of a call have no room for parts, and no rule opens branches."""
CONSTANT = np.linspace(-1, 1, WIDTH * WIDTH).reshape(WIDTH, WIDTH)
UPDATES = [
  lambda g: g,
  lambda g: 0.5 * g.astype(jnp.float32),
  lambda g: jnp.maximum(g, -1e-3),
  lambda g: spmd.with_logical_constraint(g, ('rows', 'columns')),
  lambda g: g + g.T - 2 * lax.pad(g[1:, :-1], jnp.zeros((), g.dtype), [(1, 0, 0), (0, 1, 0)]),
  lambda g: g / (1e-3 + jnp.linalg.norm(g)),  # of the whole gradient of a microbatch
  lambda g: (64 * g).astype(jnp.int4).astype(g.dtype),
  lambda g: (64 * g).astype(jnp.float8_e4m3fn).astype(g.dtype),
  lambda g: jax.jit(lambda g: jnp.roll(g, 1) + jnp.eye(WIDTH, dtype=g.dtype))(g),
  lambda g: jax.jit(lambda g: jnp.roll(g, 1) * jnp.linalg.norm(g))(g),
  lambda g: lax.scan(lambda old, row: (old + row, old), jnp.zeros_like(g[0]), g)[1],
  lambda g: lax.scan(lambda old, row: (old + row + CONSTANT[0].astype(g.dtype), old), g[0], g)[1],
  lambda g: lax.cond(True, jnp.zeros_like, jnp.transpose, g),
  lambda g: lax.cond(False, jnp.ones_like, jnp.transpose, g),
  lambda g: g.at[jnp.array([0, WIDTH])].get(mode='fill', fill_value=0.0).repeat(WIDTH // 2, 0),
  lambda g: g.at[jnp.array([0, WIDTH])].get(mode='fill', fill_value=1.0).repeat(WIDTH // 2, 0),
  lambda g: g.at[jnp.array([1, 1])].set(g[2:4]),  # no order of its updates is certain
]
IN_PARTS = [0, 1, 3, 4, 10, 12, 14]


def training(layers, update=UPDATES[0], schedule: Any = SCHEDULE, own_loop=False, end_at=1, penalty=0.0):
  """A step on one weight for each layer, with a stage end after some of them."""

  def loss(params, h):
    for number, (layer, w) in enumerate(zip(layers, params, strict=True)):
      h = layer(stage_end(h) if number == end_at else h, w)
    value = jnp.mean((h @ params[-1]) ** 2)
    if penalty:
      value += penalty * sum(jnp.sum(w**2) for w in params)
    return value, {'loss': value, 'positive': jnp.sum(h > 0)}

  def of_microbatch(params, h):
    grads, sums = jax.grad(loss, has_aux=True)(params, h)
    return jax.tree.map(update, grads), sums

  def step(params, batch):
    one = functools.partial(of_microbatch, params)
    if own_loop:  # with a first value and a decay
      start = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), jax.eval_shape(one, batch[0]))
      decay = lambda old, new: new + (0.5 * old).astype(old.dtype)
      result = lax.scan(lambda old, h: (jax.tree.map(decay, old, one(h)), None), start, batch)[0]
    else:
      result = accumulate(one, batch, schedule)
    grads, sums = result
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], sums

  return step


def weights(count, seed=0):
  rng = np.random.default_rng(seed)
  return [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4 for _ in range(count)]


BATCH = np.random.default_rng(1).normal(size=(MICROBATCHES, ROWS, LENGTH, WIDTH)).astype(np.float32)


def carried(lowered):
  """The shapes of the values that the loop carries."""
  return [one.final.aval.shape for one in lowered.programs.accumulators]


def collectives(compiled, sizes):
  """The collectives of the programs of tasks, and those after the loop: kinds, and bytes on the wire of a device."""
  counted = [
    (program.name, count(one.compiled.as_text(), {**sizes, 'stage': 1}).by_kind())
    for program, one in compiled.executables.items()
  ]
  parts = [], []
  for name, by_kind in counted:
    parts[not name.startswith(('fwd', 'bwd', 'wgrad'))].append(by_kind)
  return [{kind: sum(one.get(kind, 0) for one in each) for kind in set().union(*each)} for each in parts]


def test_which_sums_are_in_parts():
  layout = spmd.Layout({'stage': 2, 'data': 4}, RULES)
  whole = []
  for layer in LAYERS:
    lowered = layout.pipeline_jit(training([layer, dense])).lower(weights(2), BATCH)
    shapes = carried(lowered)
    assert len(shapes) == 4 and (shapes.count((4, WIDTH, WIDTH)) == 2 or layer in WHOLE), layer
    whole += [layer] * ((WIDTH, WIDTH) in shapes)
  assert whole == [layer for layer in LAYERS if layer in WHOLE]


def test_devices_add_gradients_once():
  gathered = convolved_in_groups  # by XLA, the examples: also in the forward pass, and in `jax.jit`
  layers = [layer for layer in LAYERS if layer not in (*WHOLE, over_examples, gathered)]
  layout = spmd.Layout({'stage': 2, 'data': 4}, RULES)
  params, step = layout.shard(weights(len(layers))), training(layers, end_at=7)
  pipelined = layout.pipeline_jit(step)
  compiled = pipelined.compile(params, BATCH)
  in_tasks, after = collectives(compiled, layout.mesh.shape)
  bytes_ = sum(leaf.nbytes for leaf in params) + 8
  assert not in_tasks
  assert after == {'all-reduce': pytest.approx(2 * bytes_ * 3 / 4, rel=0.01)}
  assert_same(compiled(params, BATCH), jax.jit(step)(jax.device_get(params), BATCH), 1e-4)


def test_what_is_done_to_a_gradient():
  layout = spmd.Layout({'stage': 2, 'data': 4}, RULES)
  steps = [training([dense, dense], update) for update in UPDATES]
  shapes = [carried(layout.pipeline_jit(step).lower(weights(2), BATCH)) for step in steps]
  counts = [each.count((4, WIDTH, WIDTH)) for each in shapes]
  assert counts == [2 * (number in IN_PARTS) for number in range(len(UPDATES))]


JOINT = [
  (lambda old, g: 0.5 * old + g.T, 4),
  (lambda old, g: old + g**2, 0),
  (lambda old, g: jnp.maximum(old, g), 0),
]


@pytest.mark.parametrize('update, in_parts', JOINT)
def test_two_values_from_one_gradient(update, in_parts):
  """Both have parts, or none: devices need the whole gradient for the other."""
  layout = spmd.Layout({'stage': 2, 'data': 4}, RULES)

  def step(params, batch):
    loss = lambda params, h: jnp.mean(dense(stage_end(dense(h, params[0])), params[1]) ** 2)

    def body(old, h):
      grads = jax.grad(loss)(params, h)
      return (jax.tree.map(jnp.add, old[0], grads), jax.tree.map(update, old[1], grads)), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    return lax.scan(body, (zeros, zeros), batch)[0]

  pipelined = layout.pipeline_jit(step, schedule=SCHEDULE)
  shapes = carried(pipelined.lower(weights(2), BATCH))
  assert len(shapes) == 4 and shapes.count((4, WIDTH, WIDTH)) == in_parts
  assert_same(pipelined(weights(2), BATCH), jax.jit(step)(weights(2), BATCH), 1e-4)


def test_a_penalty_on_weights_is_added_to_one_part():
  layout = spmd.Layout({'stage': 2, 'data': 4}, RULES)
  compiled = layout.pipeline_jit(training([dense, dense], penalty=0.1)).compile(weights(2), BATCH)
  in_tasks, _ = collectives(compiled, layout.mesh.shape)
  assert not in_tasks


def of_carried(start, update, params, batch):
  """A loop that carries a value beside the gradients of two weights."""

  def loss(params, h):
    h = stage_end(dense(h, params[0]))
    return jnp.mean(dense(h, params[1]) ** 2)

  def body(carried, h):
    grads, value = carried
    added = jax.tree.map(jnp.add, grads, jax.grad(loss)(params, h))
    return (added, update(value, jnp.sum(h > 0, dtype=jnp.int32), params)), None

  return lax.scan(body, (jax.tree.map(jnp.zeros_like, params), start()), batch)[0]


CARRIED = {
  'count': (lambda: jnp.int32(3), lambda old, count, _: old + count, (4,)),
  'quotient': (lambda: jnp.int32(3), lambda old, count, _: old + lax.div(count, 5), ()),
  'halved': (lambda: jnp.int32(101), lambda old, count, _: lax.div(old, 2) + count, ()),
  'flags': (lambda: jnp.array([True, False]), lambda old, *_: old[::-1], (2,)),
  'keys': (lambda: jax.random.split(jax.random.key(0)), lambda old, *_: old[::-1], (2,)),
  'average of weights': (
    lambda: jnp.ones((WIDTH, WIDTH)),
    lambda old, _, params: 0.9 * old + 0.1 * params[0],
    (WIDTH, WIDTH),
  ),
}


@pytest.mark.parametrize('name', CARRIED)
def test_what_is_carried(name):
  """Only sums over examples have parts, and no quotient of integers has."""
  start, update, shape = CARRIED[name]
  layout, step = (
    spmd.Layout({'stage': 2, 'data': 4}, RULES),
    functools.partial(of_carried, start, update),
  )
  pipelined = layout.pipeline_jit(step, schedule=SCHEDULE)
  shapes = carried(pipelined.lower(weights(2), BATCH))
  assert sorted(shapes) == sorted([*[(4, WIDTH, WIDTH)] * 2, shape])
  assert_same(pipelined(weights(2), BATCH), jax.jit(step)(weights(2), BATCH), 1e-4)


MESHES = [
  ({'stage': 2, 'data': 4}, RULES, (4, WIDTH, WIDTH)),
  ({'stage': 2, 'data': 2, 'model': 2}, (*RULES, ('columns', 'model')), (2, WIDTH, WIDTH)),
  ({'stage': 2, 'data': 4}, (*RULES, ('rows', 'data')), (WIDTH, WIDTH)),  # parts would need more memory
  (
    {'stage': 2, 'replica': 2, 'data': 2},
    (('batch', ('replica', 'data')), ('rows', 'data')),
    (2, WIDTH, WIDTH),
  ),
  (
    {'stage': 2, 'data': 2, 'replica': 2},
    (('batch', ('data', 'replica')), ('rows', 'data')),
    (2, WIDTH, WIDTH),
  ),
  ({'stage': 2, 'data': 4}, (), (WIDTH, WIDTH)),  # every device computes all examples
]


@pytest.mark.parametrize('sizes, rules, shape', MESHES)
def test_over_which_axes(sizes, rules, shape):
  """Those of the batch that do not shard the weight."""
  layout = spmd.Layout(sizes, rules)
  params = layout.shard(weights(2), [('rows', 'columns')] * 2)
  lowered = layout.pipeline_jit(training([flattened, dense])).lower(params, BATCH)
  assert carried(lowered).count(shape) == 2


def test_a_weight_of_two_stages_has_a_sum_on_each():
  layout = spmd.Layout({'stage': 2, 'data': 4}, RULES)

  def step(params, batch):
    def loss(params, h):
      h = stage_end(dense(dense(h, params['tied']), params['layers'][0]))
      return jnp.mean(dense(dense(h, params['tied']), params['layers'][1]) ** 2)

    return accumulate(lambda h: jax.grad(loss)(params, h), batch, SCHEDULE)

  params = {'tied': weights(1)[0], 'layers': jnp.stack(weights(2))}
  pipelined = layout.pipeline_jit(step)
  shapes = carried(pipelined.lower(params, BATCH))
  assert shapes == 2 * [(4, 2, WIDTH, WIDTH)] + 2 * [(4, WIDTH, WIDTH)]
  assert_same(pipelined(params, BATCH), jax.jit(step)(params, BATCH), 1e-4)


@pytest.mark.parametrize('names', [('params', 'opt_state'), ('model', 'optimizer')])
def test_an_optimizer_state_that_is_sharded_otherwise(names):
  """ZeRO-1: gradients are sharded as weights are, whichever of both comes first in a state."""
  own_weights, moments = names
  layout = spmd.Layout({'stage': 2, 'data': 4}, (*RULES, (f'{moments}/', P('data'))))
  tx = optax.adam(1e-2)

  def step(state, batch):
    loss = lambda params, h: jnp.mean((stage_end(h @ params[0]) @ params[1]) ** 2)
    grads = accumulate(lambda h: jax.grad(loss)(state[own_weights], h), batch, SCHEDULE)
    updates, opt_state = tx.update(grads, state[moments], state[own_weights])
    return {own_weights: optax.apply_updates(state[own_weights], updates), moments: opt_state}

  params = weights(2)
  state = layout.shard({own_weights: params, moments: tx.init(params)})
  assert state[moments][0].mu[0].sharding.spec == P('data', None)
  assert carried(layout.pipeline_jit(step).lower(state, BATCH)) == 2 * [(4, WIDTH, WIDTH)]


def test_each_replica_adds_its_gradients_once():
  """FSDP within replicas: gradients are summed over 'data' in each microbatch, and over 'replica' after the loop."""
  sizes, rules, _ = MESHES[3]
  layout = spmd.Layout(sizes, rules)
  params = layout.shard(weights(2), [('rows', 'columns')] * 2)
  compiled = layout.pipeline_jit(training([flattened, dense])).compile(params, BATCH)
  _, after = collectives(compiled, sizes)
  bytes_ = sum(leaf.nbytes for leaf in params) / 2  # of a device
  assert after['all-reduce'] == pytest.approx(2 * bytes_ / 2, rel=0.05)


QUICK = 1


@pytest.mark.filterwarnings('ignore:pipeline_jit of step. XLA may return wrong values for these grouped')
@pytest.mark.parametrize(
  'seed', [pytest.param(n, marks=[pytest.mark.exhaustive] if n >= QUICK else []) for n in range(40)]
)
def test_equals_jit(seed):
  rng = np.random.default_rng(seed)
  sizes, rules, _ = MESHES[rng.integers(len(MESHES))]
  layers = [LAYERS[number] for number in rng.choice(len(LAYERS), rng.integers(2, 5))]
  schedule = (SCHEDULE, ZeroBubbleH1(ranks=2))[rng.integers(2)]
  options = {'update': UPDATES[rng.integers(len(UPDATES))], 'own_loop': bool(rng.integers(2))}
  options['penalty'] = 0.1 * rng.integers(2)
  print([layer.__name__ for layer in layers], sizes, rules, schedule, options)
  with jax.enable_x64(True):
    layout = spmd.Layout(sizes, rules)
    step = training(layers, schedule=schedule, end_at=int(rng.integers(1, len(layers))), **options)
    params = [w.astype(np.float64) for w in weights(len(layers), seed)]
    shards = layout.shard(params, [('rows', 'columns')] * len(layers))
    batch = BATCH.astype(np.float64)
    given = layout.shard(batch, (None, 'batch')) if rng.integers(2) else batch
    schedule = schedule if options['own_loop'] else None
    result = layout.pipeline_jit(step, schedule=schedule)(shards, given)
    assert_same(result, jax.jit(step)(params, batch), 1e-6 if options['update'] is UPDATES[1] else 1e-10)
