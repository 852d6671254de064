"""Every schedule trains like plain accumulation, for every number of ranks, with and without data parallelism."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_spmd as spmd
from flax_spmd.pipeline import (
  DualPipeV,
  Eager1F1B,
  GPipe,
  Interleaved1F1B,
  InterleavedGPipe,
  KimiK2,
  Mean,
  OneFOneB,
  Schedule,
  ZeroBubbleH1,
  ZeroBubbleV,
  accumulate,
  stage_end,
)

ROWS, WIDTH, STEPS = 4, 16, 3


def microbatches(ranks):
  """A number that every schedule supports."""
  return 2 * ranks


def written(ranks):
  """All forwards, then backwards in reverse order of microbatches, then weight gradients."""
  numbers = range(microbatches(ranks))
  lines = []
  for rank in range(ranks):
    tasks = [f'fwd_{rank}__{number}' for number in numbers]
    tasks += [f'bwd_{rank}__{number}' for number in reversed(numbers)]
    tasks += [f'wgrad_{rank}__{number}' for number in numbers]
    lines.append(f'rank {rank}: ' + ' '.join(tasks))
  return Schedule.from_text('\n'.join(lines))


def by_rule(ranks):
  """Two stages per rank, in a V; microbatches run in pairs, forward and backward."""

  def two_at_a_time(rank, count):
    first, second = rank, 2 * ranks - 1 - rank
    for start in range(0, count, 2):
      pair = range(start, min(start + 2, count))
      for kind, stage in (('fwd', first), ('fwd', second), ('bwd', second), ('bwd', first)):
        yield from (f'{kind}_{stage}__{number}' for number in pair)

  return Schedule.of(two_at_a_time, ranks, chunks=2, placement='v')


def fused_pairs(ranks):
  """Two microbatches at a time, whose backwards are one program, the later one first: it updates each sum twice."""

  def two_at_a_time(rank, count):
    for start in range(0, count, 2):
      yield from (f'fwd_{rank}__{start}', f'fwd_{rank}__{start + 1}')
      yield f'FusedTask(bwd_{rank}__{start + 1}, bwd_{rank}__{start})'

  return Schedule.of(two_at_a_time, ranks)


SCHEDULES = {
  'GPipe': GPipe,
  'OneFOneB': OneFOneB,
  'Eager1F1B': Eager1F1B,
  'InterleavedGPipe': InterleavedGPipe,
  'Interleaved1F1B': Interleaved1F1B,
  'Interleaved1F1B of 3, fused': functools.partial(Interleaved1F1B, chunks=3, fuse='steady'),
  'Interleaved1F1B of 1': functools.partial(Interleaved1F1B, chunks=1, fuse=None),
  'ZeroBubbleH1': ZeroBubbleH1,
  'ZeroBubbleV': ZeroBubbleV,
  'DualPipeV': DualPipeV,
  'DualPipeV fused': functools.partial(DualPipeV, fuse=True),
  'KimiK2': KimiK2,
  'from_text': written,
  'of': by_rule,
  'of, fused pairs': fused_pairs,
}
SHAPES = [(2, 1), (2, 2), (4, 1), (4, 2), (8, 1)]
QUICK = {
  *((name, 2, 2) for name in SCHEDULES),
  ('OneFOneB', 4, 2),
  ('ZeroBubbleV', 4, 2),
  ('GPipe', 8, 1),
}


QUICK_DROPOUT = {(name, 2, 2) for name in ('OneFOneB', 'ZeroBubbleH1', 'DualPipeV fused')}


def cases(shapes, quick):
  """A case for every schedule and mesh; those not in `quick` are exhaustive."""
  return [
    pytest.param(name, *shape, marks=[] if (name, *shape) in quick else [pytest.mark.exhaustive])
    for name in SCHEDULES
    for shape in shapes
  ]


def layout_of(ranks, inside):
  devices = jax.devices()[: ranks * inside]
  mesh = spmd.make_mesh({'stage': ranks, 'data': inside}, devices=devices)
  return spmd.Layout(mesh, (('batch', 'data'),))


def batch_of(ranks):
  x = jax.random.normal(jax.random.key(1), (microbatches(ranks), ROWS, WIDTH))
  return x, jnp.sin(3 * x)


def assert_same(actual, expected):
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for leaf, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    assert (leaf.shape, leaf.dtype) == (other.shape, other.dtype)
    np.testing.assert_allclose(np.asarray(leaf), np.asarray(other), 1e-5, 1e-5)


def check(step, state, layout, batch):
  """Losses and states equal those of plain accumulation at every step."""
  plain, pipelined = jax.jit(step), layout.pipeline_jit(step)
  sharded = layout.shard(batch, (None, 'batch', None))
  expected = actual = state
  for _ in range(STEPS):
    expected, expected_loss = plain(expected, batch)
    actual, loss = pipelined(actual, sharded)
    assert_same((actual, loss), (expected, expected_loss))


@pytest.mark.parametrize(('name', 'ranks', 'inside'), cases(SHAPES, QUICK))
def test_perceptron(name, ranks, inside):
  schedule = SCHEDULES[name](ranks)
  keys = jax.random.split(jax.random.key(0), schedule.stages)
  params = [jax.random.normal(key, (WIDTH, WIDTH)) / np.sqrt(WIDTH) for key in keys]

  def loss(params, x, y):
    for w in params:
      x = stage_end(jnp.tanh(x @ w))
    return jnp.mean((x - y) ** 2)

  def step(params, batch):
    value, grads = accumulate(lambda one: jax.value_and_grad(loss)(params, *one), batch, schedule, Mean)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

  check(step, params, layout_of(ranks, inside), batch_of(ranks))


class Dropping(nn.Module):
  """One residual block with dropout per stage."""

  stages: int

  @nn.compact
  def __call__(self, x):
    for _ in range(self.stages):
      hidden = nn.Dropout(0.2, deterministic=False)(nn.tanh(nn.Dense(WIDTH)(x)))
      x = stage_end(x + hidden)
    return x


@pytest.mark.parametrize(('name', 'ranks', 'inside'), cases([(2, 2), (4, 1)], QUICK_DROPOUT))
def test_dropout(name, ranks, inside):
  schedule = SCHEDULES[name](ranks)
  model, batch = Dropping(schedule.stages), batch_of(ranks)
  variables = model.init({'params': jax.random.key(0), 'dropout': jax.random.key(1)}, batch[0][0])

  def step(state, batch):
    variables, count = state
    key = jax.random.fold_in(jax.random.key(2), count)

    def loss(variables, number, x, y):
      rngs = {'dropout': jax.random.fold_in(key, number)}
      return jnp.mean((model.apply(variables, x, rngs=rngs) - y) ** 2)

    numbered = jnp.arange(microbatches(ranks)), *batch
    value, grads = accumulate(
      lambda one: jax.value_and_grad(loss)(variables, *one), numbered, schedule, Mean
    )
    return (jax.tree.map(lambda p, g: p - 0.1 * g, variables, grads), count + 1), value

  check(step, (variables, jnp.int32(0)), layout_of(ranks, inside), batch)
