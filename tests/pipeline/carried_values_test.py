"""Random values that a loop of the user's own carries from microbatch to microbatch, compared with `jax.jit`.

A carried value is updated in a stage, and read in any others; it may be returned from every pass as it was before, take
the place of another one, or be a row of the batch. A schedule that cannot wait for a value refuses it; then the loop runs
with one microbatch after the other.
"""

import random
import re
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from flax_spmd._src.pipeline.run.call_list import Call
from flax_spmd.errors import PipelineError
from flax_spmd.pipeline import (
  DualPipeV,
  Eager1F1B,
  GPipe,
  Interleaved1F1B,
  OneFOneB,
  Schedule,
  ZeroBubbleH1,
  ZeroBubbleV,
  stage_end,
)
from tests.pipeline.cases import LAYOUT, MICROBATCHES, STAGES, assert_same, weight

SCHEDULES = (
  GPipe(STAGES),
  OneFOneB(STAGES),
  Eager1F1B(STAGES),
  ZeroBubbleH1(STAGES),
  Interleaved1F1B(STAGES, 2),
  ZeroBubbleV(STAGES),
  DualPipeV(STAGES),
)
QUICK, SEEDS = 8, 300


def one_by_one(schedule):
  """The schedule that ends each microbatch before the next one begins."""

  def rule(rank, microbatches):
    stages = schedule.stages_of(rank)
    for microbatch in range(microbatches):
      yield from (f'fwd_{stage}__{microbatch}' for stage in stages)
      yield from (f'bwd_{stage}__{microbatch}' for stage in reversed(stages))

  chunks = schedule.stages // schedule.ranks
  return Schedule.of(rule, schedule.ranks, chunks, schedule.stage_ranks)


def random_loop(seed):
  """A step with a loop over microbatches; its schedule and arguments."""
  draw = random.Random(seed)
  schedule = draw.choice(SCHEDULES)
  stages, count = schedule.stages, draw.randint(1, 3)
  shapes = [draw.choice([(), (8,), (4, 8), (16, 16)]) for _ in range(count)]
  stage_of = [draw.randrange(stages) for _ in shapes]  # updates the value
  early = draw.random() < 0.1
  readers = [
    [stage for stage in range(0 if early else at, stages) if draw.random() < 0.3] for at in stage_of
  ]
  returned = [draw.random() < 0.3 for _ in shapes]  # the new value
  returned_old = [draw.random() < 0.2 for _ in shapes]
  place = list(range(count))  # of each value, the one whose update it takes
  if draw.random() < 0.3:
    place[draw.randrange(count)] = draw.randrange(count)
  swaps, both = count > 1 and draw.random() < 0.3, draw.random() < 0.5
  moved = draw.choice([None, None, None, 'row', 'constant'])  # what the last value is replaced by
  reads_own = draw.random() < 0.8

  def loss(params, carried, x):
    new = [None] * count
    for stage in range(stages):
      x = jnp.tanh(x @ params[stage])
      for number, shape in enumerate(shapes):
        if stage == stage_of[number]:
          new[number] = jnp.broadcast_to(jnp.mean(x), shape) + (carried[number] / 2 if reads_own else 0)
        if stage in readers[number]:
          x = x * jnp.mean(jnp.cos(carried[number] if new[number] is None else new[number]))
      x = stage_end(x)
    return jnp.mean(x**2), new

  def step(params, carried, batch):
    def one_pass(carry, x):
      sums, carried = carry
      (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params, carried, x)
      sums = jax.tree.map(jnp.add, sums, grads)
      kept = [one for one, keep in zip(new, returned) if keep]
      kept += [one for one, keep in zip(carried, returned_old) if keep]
      new = [
        new[number] if shapes[number] == like else old for number, like, old in zip(place, shapes, new)
      ]
      if swaps and shapes[0] == shapes[1]:
        new[0], new[1] = carried[1], carried[0] if both else new[1]
      if moved == 'row' and shapes[-1] == x.shape:
        new[-1] = x
      if moved == 'constant':
        new[-1] = jnp.full(shapes[-1], 0.125)
      return (sums, new), (value, kept)

    (grads, carried), results = lax.scan(
      one_pass, (jax.tree.map(jnp.zeros_like, params), carried), batch
    )
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), carried, results

  params = [weight(number, 8, 8) for number in range(stages)]
  carried = [jnp.full(shape, 0.25 + number) for number, shape in enumerate(shapes)]
  batch = jax.random.normal(jax.random.key(seed), (2 * MICROBATCHES, 4, 8))
  return step, schedule, jax.tree.map(lambda x: x.astype(jnp.float64), (params, carried, batch))


def check_warning(texts, schedule, lowered):
  """A warning gives the bubbles of the pipeline with and without waiting, if it is a tenth longer for it."""
  free, steps = schedule.simulate(lowered.microbatches), []
  for one in lowered.call_list.calls:
    steps += [one.when] if isinstance(one, Call) and one.step else []
  end = max(one.end for one in steps)
  if end <= 1.1 * free.makespan:
    assert not texts
    return
  [text] = texts
  bubble = 1 - sum(free.busy) / (schedule.ranks * end)
  assert f'{bubble:.0%} with these values, and {free.bubble:.0%} without them' in text
  assert len(text.splitlines()) > 2 and f'{bubble:.0%}' in text.splitlines()[1]


@pytest.mark.parametrize(
  'seed',
  [pytest.param(n, marks=[] if n < QUICK else [pytest.mark.exhaustive]) for n in range(SEEDS)],
)
def test_equals_jit(seed):
  with jax.enable_x64(True):
    step, schedule, (params, carried, batch) = random_loop(seed)
    expected = result = params, carried
    try:
      pipelined = LAYOUT.pipeline_jit(step, schedule=schedule)
      with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        lowered = pipelined.lower(params, carried, batch)
      check_warning([str(one.message) for one in caught], schedule, lowered)
    except PipelineError as error:
      assert 'ranks would wait for one another' in str(error)
      pipelined = LAYOUT.pipeline_jit(step, schedule=one_by_one(schedule))
    for _ in range(2):
      expected = jax.jit(step)(*expected[:2], batch)
      result = pipelined(*result[:2], batch)
      assert_same(result, expected, 1e-9)


def test_an_update_that_a_later_stage_reads():
  def step(params, carried, batch):
    def one_pass(carried, x):
      def loss(params):
        h, new = x, carried
        for stage in range(STAGES):
          h = jnp.tanh(h @ params[stage])
          new = carried + jnp.mean(h) if stage == 1 else new
          h = stage_end(h)
        return jnp.mean(h) * new, new

      (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
      return new, (value, grads)

    return lax.scan(one_pass, carried, batch)

  params, batch = [weight(number, 8, 8) for number in range(STAGES)], jnp.ones((8, 4, 8))
  result = LAYOUT.pipeline_jit(step, schedule=GPipe(STAGES))(params, jnp.float32(0), batch)
  assert_same(result, jax.jit(step)(params, jnp.float32(0), batch), 1e-5)


def test_a_scale_that_its_own_stage_updates():
  """Its backward needs the scale too, and keeps it: the loop has gone on to that of a later microbatch."""

  def step(params, scale, batch):
    def one_pass(scale, x):
      def loss(params):
        h, new = x, scale
        for stage in range(STAGES):
          h = jnp.tanh(h @ params[stage])
          if stage == 1:
            h, new = h * scale, 0.9 * scale + jnp.mean(h)
          h = stage_end(h)
        return jnp.mean(h**2), new

      (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
      return new, (value, grads)

    return lax.scan(one_pass, scale, batch)

  params, batch = [weight(number, 8, 8) for number in range(STAGES)], jnp.ones((8, 4, 8))
  result = LAYOUT.pipeline_jit(step, schedule=OneFOneB(STAGES))(params, jnp.full((4, 8), 0.5), batch)
  assert_same(result, jax.jit(step)(params, jnp.full((4, 8), 0.5), batch), 1e-5)


def test_values_that_earlier_stages_read_are_named_with_the_bubble():
  def step(params, carried, batch):
    def one_pass(carried, x):
      last, scale = carried

      def loss(params):
        h = x * jnp.mean(last) * scale
        for stage in range(STAGES):
          h = stage_end(jnp.tanh(h @ params[stage]))
        return jnp.mean(h), h

      (value, last), grads = jax.value_and_grad(loss, has_aux=True)(params)
      return (last, 0.9 * scale), (value, grads)

    return lax.scan(one_pass, carried, batch)

  params, batch = [weight(number, 8, 8) for number in range(STAGES)], jnp.ones((8, 4, 8))
  pipelined = LAYOUT.pipeline_jit(step, schedule=GPipe(STAGES))
  arguments = params, (jnp.ones((4, 8)), jnp.float32(1)), batch
  with pytest.warns(UserWarning) as caught:
    pipelined.lower(*arguments)
  [text] = [str(one.message) for one in caught]
  assert re.sub(r'\.py:\d+', '.py:LINE', text) == (
    'The microbatch loop at carried_values_test.py:LINE carries values to earlier stages, which wait for them. In '
    'GPipe(ranks=4), the bubble is 56% with these values, and 27% without them:\n'
    '  float32[4,8] at carried_values_test.py:LINE: set by fwd of stage 3, read by fwd of stage 0: 56%\n'
    'Fix: read a value in the stage that sets it or in later ones; or return it for each microbatch, and update it '
    'after the loop.'
  )
  assert caught[0].filename == __file__
  with warnings.catch_warnings(action='error'):
    result = pipelined(*arguments)  # once
  assert_same(result, jax.jit(step)(*arguments), 1e-5)
