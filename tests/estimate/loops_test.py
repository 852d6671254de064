"""Loops: what compilers move out of them, by hand and in random loops against compiled programs."""

import functools
import random

import jax
import jax.numpy as jnp
import pytest

import flax_spmd as spmd
from flax_spmd.explore import Estimator, TrainStep, compare, parse_target
from tests.estimate.doubts import doubts_of

LENGTH, WIDTH, BATCH = 8, 64, 64
X = jax.ShapeDtypeStruct((LENGTH, BATCH, WIDTH), jnp.float32)
ON_BATCH = (None, 'batch', None)
DATA = spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'),))
FSDP = spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'), ('embed', 'data')))
WEIGHT = 4 * WIDTH * WIDTH * 7 / 8  # bytes that an all-gather or a reduce-scatter sends


def create():
  return {'w': spmd.LogicallyPartitioned(jnp.ones((WIDTH, WIDTH)), ('embed', 'mlp'))}


def cell(w, h, x):
  h = spmd.with_logical_constraint(jnp.tanh(h @ w + x), ('batch', None))
  return h, h


def recurrent(w, xs, unroll=1):
  return jax.lax.scan(functools.partial(cell, w), jnp.zeros(xs.shape[1:]), xs, unroll=unroll)[1]


def nested(w, xs):
  scan = lambda h, xs: jax.lax.scan(functools.partial(cell, w), h, xs)
  return jax.lax.scan(scan, jnp.zeros(xs.shape[1:]), xs.reshape(2, LENGTH // 2, *xs.shape[1:]))[1]


def train_step(model):
  def step(state, xs):
    loss, gradient = jax.value_and_grad(lambda state: jnp.sum(model(state['w'].unbox(), xs) ** 2))(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradient), loss

  return TrainStep(step, create, X, placements=ON_BATCH)


@pytest.mark.parametrize(
  ('model', 'target', 'reductions'),
  [
    (recurrent, 'h100:8', 1),
    (recurrent, 'v5e:2x4', 1),
    (recurrent, 'cpu:8', LENGTH),
    (functools.partial(recurrent, unroll=2), 'h100:8', LENGTH),
    (nested, 'h100:8', 2),  # after each inner loop
  ],
  ids=['h100', 'v5e', 'cpu', 'unrolled', 'nested'],
)
def test_the_gradient_of_a_recurrent_weight_is_reduced_as_in_compiled_programs(
  model, target, reductions
):
  estimator = Estimator(train_step(model), platform=parse_target(target).chip.platform)
  counts = estimator.estimate(DATA, parse_target(target)).counts
  assert counts.by_kind() == pytest.approx({'all-reduce': reductions * 2 * WEIGHT}, rel=0.01)


@pytest.mark.parametrize(
  ('target', 'kind', 'sent'),
  [('h100:8', 'reduce-scatter', WEIGHT), ('v5e:2x4', 'all-reduce', 2 * WEIGHT)],
)
def test_a_sharded_gradient_of_a_recurrent_weight_is_reduced_in_every_iteration(target, kind, sent):
  estimator = Estimator(train_step(recurrent), platform=parse_target(target).chip.platform)
  kinds = estimator.estimate(FSDP, parse_target(target)).counts.by_kind()
  assert kinds[kind] == pytest.approx(LENGTH * sent, rel=0.01)


def random_loop(draw):
  """A loop over time: recurrent, residual, nested or a map; with a gradient, remat and stacked results, or without."""
  kind = draw.choice(('recurrent', 'residual', 'nested', 'map', 'fori'))
  has_gradient, has_remat, stacks = (draw.random() < 0.6 for _ in range(3))
  length, batch, width, wide = (
    draw.choice(sizes) for sizes in ((4, 8), (256, 512), (64, 128), (128, 256))
  )

  def create():
    shapes = {'up': (width, wide), 'down': (wide, width)}
    names = {'up': ('embed', 'mlp'), 'down': ('mlp', 'embed')}
    return {one: spmd.LogicallyPartitioned(jnp.ones(shapes[one]), names[one]) for one in names}

  def model(weights, xs):
    def cell(h, x):
      y = spmd.with_logical_constraint(jnp.tanh(h @ weights['up']), ('batch', 'act_mlp'))
      y = spmd.with_logical_constraint(y @ weights['down'], ('batch', None))
      h = y + h if kind == 'residual' else jnp.tanh(y + x)
      return h, h if stacks else jnp.sum(h)

    body = jax.checkpoint(cell) if has_remat else cell
    first = spmd.with_logical_constraint(jnp.zeros(xs.shape[1:]), ('batch', None))
    if kind == 'map':
      return jax.lax.map(lambda x: body(x, x)[0], xs)
    if kind == 'fori':
      return jax.lax.fori_loop(0, length, lambda _, h: body(h, xs[0])[0], first)
    if kind == 'nested':
      return jax.lax.scan(
        lambda h, xs: jax.lax.scan(body, h, xs), first, xs.reshape(2, -1, *xs.shape[1:])
      )
    return jax.lax.scan(body, first, xs)

  def loss(state, xs):
    results = model({name: box.unbox() for name, box in state.items()}, xs)
    return sum(jnp.sum(one**2) for one in jax.tree.leaves(results))

  def step(state, xs):
    if not has_gradient:
      return state, loss(state, xs)
    value, gradient = jax.value_and_grad(loss)(state, xs)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradient), value

  xs = jax.ShapeDtypeStruct((length, batch, width), jnp.float32)
  return TrainStep(step, create, xs, placements=ON_BATCH)


def random_layout(draw):
  mesh = draw.choice(({'data': 8}, {'data': 2, 'model': 4}, {'data': 4, 'model': 2}))
  model = draw.choice((None, 'model')) if 'model' in mesh else None
  rules = [('batch', 'data'), ('mlp', model), ('act_mlp', model), ('embed', draw.choice((None, 'data')))]
  return spmd.Layout(spmd.abstract_mesh(mesh), tuple(rules))


SEEDS = [
  *range(6),
  *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(6, 11)),
]


@pytest.mark.parametrize('seed', SEEDS)
def test_random_loops_send_what_compiled_programs_send(seed):
  draw = random.Random(seed)
  step, layout, target = random_loop(draw), random_layout(draw), parse_target('cpu:8')
  estimated = Estimator(step, platform='cpu').estimate(layout, target)
  compiled = compare(step, {'one': layout}, 'cpu:8')['one'].counts
  sent = [sum(counts.by_kind().values()) for counts in (estimated.counts, compiled)]
  assert estimated.counts.flops == pytest.approx(compiled.flops, rel=0.01)
  assert doubts_of(estimated) or sent[0] == pytest.approx(sent[1], rel=0.05, abs=256)


@pytest.mark.parametrize(('names', 'is_in_doubt'), [((None, 'batch'), True), (('batch', None), False)])
def test_an_array_whose_shards_move_for_a_loop_is_in_doubt(names, is_in_doubt):
  def step(state, xs):
    start = jnp.sin(spmd.with_logical_constraint(jnp.cos(xs[0]), ('batch', None)))
    body = lambda _, h: spmd.with_logical_constraint(jnp.sin(h), names)
    return state, jnp.sum(jax.lax.fori_loop(0, LENGTH, body, start))

  outcome = Estimator(TrainStep(step, create, X, placements=ON_BATCH)).estimate(
    DATA, parse_target('h100:8')
  )
  assert any('all-to-all of an array for a loop' in doubt for doubt in outcome.doubts) == is_in_doubt
