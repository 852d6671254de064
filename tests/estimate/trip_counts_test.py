"""Numbers of trips of loops, as estimated and as counted in compiled programs, beside those of loops that run."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flax_spmd as spmd
from flax_spmd._src.hlo.counts import count
from flax_spmd.explore import Estimator, TrainStep, compare
from tests.estimate.doubts import doubts_of

WIDTH, LAYOUT = 8, spmd.Layout(spmd.abstract_mesh({'data': 2}), (('batch', 'data'),))
PRODUCT = 2 * WIDTH**3 / 2  # FLOPs of a device
X = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
COMPARISONS = {
  '<': lambda i, limit: i < limit,
  '<=': lambda i, limit: i <= limit,
  '>': lambda i, limit: i > limit,
  '>=': lambda i, limit: i >= limit,
  'limit >': lambda i, limit: limit > i,
  '!=': lambda i, limit: i != limit,
  '==': lambda i, limit: i == limit,
}
UNKNOWN = 'a loop whose number of trips depends on values, counted as one trip'


def loop_step(condition, advance, start):
  """A step with a loop over products, with the carry (product, counter)."""

  def step(state, x):
    body = lambda carry: (jnp.tanh(carry[0] @ state['w']), advance(carry[1]))
    return state, jnp.sum(jax.lax.while_loop(condition, body, (x, start))[0])

  return TrainStep(step, lambda: {'w': jnp.eye(WIDTH)}, X)


def both(train_step):
  """The trips and the doubts, estimated and of the program that the CPU's compiler makes."""
  estimated = Estimator(train_step).estimate(LAYOUT, 'h100:2', partition=False)
  compiled = compare(train_step, [LAYOUT], 'cpu:2')['layout 0']
  return [(one.counts.flops / PRODUCT, *doubts_of(one)) for one in (estimated, compiled)]


@settings(max_examples=25, deadline=None)
@given(
  start=st.integers(-4, 4),
  step=st.sampled_from([-3, -1, 1, 2]),
  limit=st.integers(-6, 6),
  comparison=st.sampled_from([*COMPARISONS]),
  added=st.sampled_from(['i + step', 'step + i', 'i - step']),
)
def test_counters_run_as_often_as_estimated(start, step, limit, comparison, added):
  change = -step if added == 'i - step' else step
  number, value = 0, start
  while COMPARISONS[comparison](value, limit) and number < 40:
    number, value = number + 1, value + change
  if number == 40:  # it would run until the counter overflows
    return
  advances = {
    'i + step': lambda i: i + step,
    'step + i': lambda i: step + i,
    'i - step': lambda i: i - step,
  }
  condition = lambda carry: COMPARISONS[comparison](carry[1], limit)
  train_step = loop_step(condition, advances[added], start)
  text = jax.jit(train_step.step).lower({'w': jnp.eye(WIDTH)}, X).compile().as_text()
  estimated = Estimator(train_step).estimate(LAYOUT, 'h100:2', partition=False)
  assert count(text, {}).flops == number * PRODUCT * 2
  assert (estimated.counts.flops, doubts_of(estimated)) == (number * PRODUCT, ())


def test_a_loop_that_ends_by_its_values_counts_once_and_puts_the_result_in_doubt():
  train_step = loop_step(lambda carry: jnp.sum(carry[0]) > 1e-3, lambda i: i + 1, 0)
  assert [one[0] for one in both(train_step)] == [1, 1]
  assert all(doubt.endswith(f': {UNKNOWN}') for _, doubt in both(train_step))


def test_a_loop_that_can_end_early_counts_with_the_most_trips_and_puts_the_result_in_doubt():
  text = 'a loop that can end early, counted with the most trips, 6'
  train_step = loop_step(lambda carry: (carry[1] < 6) & (jnp.sum(carry[0]) > 1e-3), lambda i: i + 1, 0)
  assert [one[0] for one in both(train_step)] == [6, 6]
  assert all(doubt.endswith(f': {text}') for _, doubt in both(train_step))


@pytest.mark.parametrize('advance', [lambda i: 2 * i + 1, lambda i: jnp.where(i > 2, 5, i + 1)])
def test_a_counter_that_does_not_count_evenly_is_of_unknown_length(advance):
  [estimated, compiled] = both(loop_step(lambda carry: carry[1] < 5, advance, 0))
  assert estimated[0] == compiled[0] == 1
  assert estimated[1].endswith(UNKNOWN) and compiled[1].endswith(UNKNOWN)


def test_a_limit_that_changes_makes_the_trips_unknown():
  def step(state, x):
    body = lambda carry: (jnp.tanh(carry[0] @ state['w']), carry[1] + 1, carry[2] // 2)
    return state, jnp.sum(jax.lax.while_loop(lambda carry: carry[1] < carry[2], body, (x, 0, 40))[0])

  [estimated, compiled] = both(TrainStep(step, lambda: {'w': jnp.eye(WIDTH)}, X))
  assert estimated[0] == compiled[0] == 1
  assert estimated[1].endswith(UNKNOWN) and compiled[1].endswith(UNKNOWN)


def test_a_comparison_shows_that_trips_are_unknown():
  train_step = loop_step(lambda carry: jnp.sum(carry[0]) > 1e-3, lambda i: i + 1, 0)
  assert 'a rough estimate: trip_counts_test.py:' in str(compare(train_step, [LAYOUT], 'cpu:2'))
