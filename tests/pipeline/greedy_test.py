"""Schedules by simulation: every placement gives a legal schedule, and the known ones have their bubbles."""

from textwrap import dedent

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_spmd.errors import PipelineError
from flax_spmd.pipeline import KimiK2, Mean, Schedule, accumulate, greedy, stage_end
from tests.pipeline.cases import LAYOUT, STAGES, WIDTH, X, Y, check, descend, weight

WAVE = (0, 1, 2, 3, 3, 2, 1, 0) * 2


def schedule(placement, live, split=True, *costs):
  ranks = max(placement) + 1
  chunks = len(placement) // ranks
  rule = lambda rank, count: greedy(placement, count, live, split, *costs)[rank]
  return Schedule.of(rule, ranks=ranks, chunks=chunks, placement=placement)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_placement_gives_a_schedule_that_can_run(data):
  """Ranks in any order, not only of neighbouring stages, under any costs; the memory is respected."""
  ranks, chunks = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
  placement = tuple(data.draw(st.permutations(list(range(ranks)) * chunks)))
  live = data.draw(st.integers(chunks, 2 * len(placement)))
  stage_times = st.lists(st.floats(0, 9), min_size=len(placement), max_size=len(placement))
  costs = {kind: data.draw(stage_times) for kind in ('fwd', 'bwd', 'wgrad')}
  one = schedule(placement, live, data.draw(st.booleans()), costs, data.draw(st.sampled_from([0, 0.5])))
  microbatches = data.draw(st.integers(1, 9))
  assert max(one.validate(microbatches).peaks) <= live


@pytest.mark.parametrize('ranks', [2, 4, 8])
def test_zb_h2_has_no_bubble_between_the_first_and_last_task_of_a_rank(ranks):
  for microbatches in (2 * ranks, 3 * ranks):
    steps = schedule(tuple(range(ranks)), 2 * ranks - 1).simulate(microbatches).steps
    assert [each[-1].end - each[0].start for each in steps] == [3 * microbatches] * ranks


@pytest.mark.parametrize(
  'one', [schedule(WAVE, 16, split=False), KimiK2(4, chunks=4, split=False)], ids=['wave', 'Kimi']
)
def test_training_by_waves_and_without_split_weight_gradients(one):
  stages = len(WAVE)

  def loss(params, x, y):
    for number in range(stages):
      x = stage_end(jnp.tanh(x @ params[f'w{number}']))
    return jnp.mean((x - y) ** 2)

  def step(params, x, y):
    value, grads = accumulate(lambda each: jax.value_and_grad(loss)(params, *each), (x, y), one, Mean)
    return descend(params, grads), value

  params = {f'w{number}': weight(number, WIDTH, WIDTH) for number in range(stages)}
  check(step, params, X, Y, steps=1, layout=LAYOUT)
  assert all(task.kind != 'wgrad' for order in one.tasks(STAGES) for task in order)


def test_bad_input():
  def text_of(*args, **kwargs):
    with pytest.raises(PipelineError) as caught:
      greedy(*args, **kwargs)
    return str(caught.value)

  assert text_of((0, 1, 1, 0), 4, 1) == dedent("""\
    greedy: with at most 1 live activation per rank, the ranks wait for each other.
    Fix: pass live=2, the number of stages of a rank, or more.""")
  assert text_of((0, 2), 4, 4) == dedent("""\
    greedy: the ranks (0, 2) are not 0, 1, ... without gaps.
    Fix: pass the rank of every stage, such as (0, 1, 2, 2, 1, 0).""")
  assert text_of((0, 1), 0, 4) == 'greedy: microbatches is 0.\nFix: pass a positive integer.'
  assert text_of((0, 1), 4, -1) == 'greedy: live is -1.\nFix: pass a positive integer.'
