"""Automatic schedules and measured costs: never slower than the others, training as without, the same in all processes."""

from textwrap import dedent

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_spmd import pipeline
from flax_spmd.errors import PipelineError
from flax_spmd.pipeline import Automatic, OneFOneB, Task, ZeroBubbleH1, ZeroBubbleV
from tests.pipeline.cases import LAYOUT, PARAMS, X, Y, assert_same, squared, training


def draw_costs(data, stages):
  times = st.lists(st.floats(0.5, 2), min_size=stages, max_size=stages)
  return {kind: data.draw(times) for kind in ('fwd', 'bwd', 'wgrad')}


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_it_is_never_slower_than_others_with_as_much_memory(data):
  ranks, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
  chunks, placement = data.draw(st.sampled_from([(1, 'loop'), (2, 'loop'), (2, 'v')]))
  costs, transfer = draw_costs(data, ranks * chunks), data.draw(st.sampled_from([0, 0.3]))
  live = data.draw(st.integers(chunks, 2 * ranks * chunks))
  found = Automatic(ranks, costs, transfer, chunks, placement, live).simulate(microbatches)
  assert max(found.peaks) <= live
  classes = {
    (1, 'loop'): (OneFOneB, ZeroBubbleH1, pipeline.GPipe, pipeline.Eager1F1B),
    (2, 'v'): (ZeroBubbleV,),
  }
  for kind in classes.get((chunks, placement), (pipeline.KimiK2, pipeline.Interleaved1F1B)):
    other = kind(ranks)
    if other.supports(microbatches) and max(other.validate(microbatches).peaks) <= live:
      assert found.makespan <= other.simulate(microbatches, costs, transfer).makespan


def test_costs_of_a_schedule_are_those_of_its_simulation_and_drawing():
  costs = {'fwd': (1, 2, 1, 1), 'bwd': 2}
  schedule = OneFOneB(4).with_costs(costs, transfer=0.5)
  assert schedule.tasks(8) == OneFOneB(4).tasks(8) and str(schedule) == str(OneFOneB(4))
  assert schedule.simulate(8) == OneFOneB(4).simulate(8, costs, 0.5) == schedule.draw(8).simulation
  assert schedule.simulate(8, {'fwd': 1, 'bwd': 2}, 0) == OneFOneB(4).simulate(8, {'fwd': 1, 'bwd': 2})
  assert schedule == OneFOneB(4).with_costs(dict(costs), transfer=0.5) != OneFOneB(4).with_costs(costs)
  assert hash(schedule) == hash(OneFOneB(4).with_costs(dict(costs), transfer=0.5))


def test_measured_times_are_medians_of_each_kind_and_stage():
  """Of any number of microbatches; the last forward may be part of its backward."""
  measured = {Task('fwd', 0, i): time for i, time in enumerate((9.0, 1.0, 2.0))}
  measured |= {Task('bwd', stage, 0): 3.0 for stage in (0, 1)}
  expected = OneFOneB(2).simulate(4, {'fwd': (2, 0), 'bwd': 3})
  assert OneFOneB(2).simulate(4, measured) == expected
  assert Automatic(2, measured, split=False).simulate(4).makespan <= expected.makespan


def test_a_function_of_a_task_has_the_times_of_split_backwards():
  """Without their weight gradients, the backwards of 1F1B would seem shorter than they are."""
  equal = {'fwd': 1, 'bwd': 1, 'wgrad': 1}
  chosen = Automatic(4, lambda task: equal[task.kind])
  assert chosen.simulate(16) == Automatic(4, equal).simulate(16)
  assert any(task.kind == 'wgrad' for task in chosen.tasks(16)[0])


class TaskTimes:
  """A function of a task that has no hash."""

  __hash__ = None

  def __call__(self, task):
    return 1 + task.stage


def test_costs_of_other_types():
  lists = {'fwd': [1, 2], 'bwd': [1, 2], 'wgrad': [1, 2]}
  arrays = {kind: np.array(times) for kind, times in lists.items()}
  assert Automatic(2, arrays) == Automatic(2, lists)
  assert OneFOneB(2).simulate(4, arrays) == OneFOneB(2).simulate(4, lists)
  assert pipeline.greedy((0, 1), 4, 2, costs=TaskTimes()) == pipeline.greedy((0, 1), 4, 2, costs=lists)
  assert Automatic(2, TaskTimes()).simulate(4).makespan == Automatic(2, lists).simulate(4).makespan


def test_its_text_can_be_evaluated_and_its_name_is_short():
  measured = {Task(kind, stage, 0): 0.1 + stage for kind in ('fwd', 'bwd') for stage in range(4)}
  for schedule in (Automatic(4), Automatic(2, measured, 0.5, 2, 'v', live=5, split=False)):
    again = eval(repr(schedule), vars(pipeline))
    assert again == schedule and again.tasks(8) == schedule.tasks(8)
  assert str(Automatic(4)) == 'Automatic(ranks=4)'
  assert (
    str(schedule) == "Automatic(ranks=2, transfer=0.5, chunks=2, placement='v', live=5, split=False)"
  )
  assert Automatic(4).simulate(8).makespan <= ZeroBubbleH1(4).simulate(8).makespan


def test_later_changes_of_the_costs_change_no_schedule():
  times = [1, 1]
  schedules = [Automatic(2, {'fwd': times}, split=False), OneFOneB(2).with_costs({'fwd': times})]
  before = [one.simulate(4) for one in schedules]
  times[0] = 9
  assert [one.simulate(4) for one in schedules] == before


def test_training_under_measured_costs():
  step = training(squared, ZeroBubbleH1(4))
  compiled = LAYOUT.pipeline_jit(step).compile(PARAMS, X, Y)
  expected, seconds = compiled.measure(PARAMS, X, Y)
  for schedule in (Automatic(4, seconds), ZeroBubbleH1(4).with_costs(seconds)):
    measured = LAYOUT.pipeline_jit(training(squared, schedule)).compile(PARAMS, X, Y)
    assert_same(measured(PARAMS, X, Y), jax.device_get(expected))


def test_calls_of_different_ranks_are_in_the_order_of_their_costs():
  """The last stage is the slowest, so the backwards of one microbatch end before its next one does."""
  slow = OneFOneB(4).with_costs({'fwd': (1, 1, 1, 50), 'bwd': 1})
  text = LAYOUT.pipeline_jit(training(squared, slow)).lower(PARAMS, X, Y).as_text()
  equal = LAYOUT.pipeline_jit(training(squared, OneFOneB(4))).lower(PARAMS, X, Y).as_text()
  assert sorted(text.splitlines()) == sorted(equal.splitlines()) and text != equal
  assert text.index('bwd_0__0') < text.index('bwd_3__1')
  assert equal.index('bwd_3__1') < equal.index('bwd_0__0')


def test_bad_input():
  def text_of(function, *args, **kwargs):
    with pytest.raises(PipelineError) as caught:
      function(*args, **kwargs)
    return str(caught.value)

  unsplit = {Task(kind, stage, 0): 1.0 for kind in ('fwd', 'bwd') for stage in (0, 1, 4)}
  assert text_of(Automatic, 4, unsplit) == dedent("""\
    The measured tasks have 3 stages, not 4 and no weight gradients.
    Fix: measure a schedule of 4 stages, such as ZeroBubbleH1, that splits backwards.""")
  assert text_of(OneFOneB(4).with_costs(unsplit).simulate, 4) == dedent("""\
    The measured tasks have 3 stages, not 4.
    Fix: measure a schedule of 4 stages.""")
  assert (
    text_of(Automatic, 4, {'fwd': 1}, live=0) == 'Automatic.live is 0.\nFix: pass a positive integer.'
  )
  assert text_of(Automatic, 2, {'fwd': 1}, chunks=3, live=2) == dedent("""\
    greedy: with at most 2 live activations per rank, the ranks wait for each other.
    Fix: pass live=3, the number of stages of a rank, or more.""")
  fix = (
    "Fix: pass {'fwd': 1, 'bwd': 1, 'wgrad': 1}, with a number or one number per stage, "
    'the times of tasks that `measure` returned, or a function of a task.'
  )
  assert text_of(Automatic, 4, None) == f'The costs are None.\n{fix}'
  assert text_of(OneFOneB(4).with_costs, [1, 2]) == f'The costs are [1, 2].\n{fix}'
  mixed = {'bwd': 1, Task('fwd', 0, 0): 1.0}
  assert text_of(Automatic, 1, mixed, split=False) == (
    f"costs[Task(kind='fwd', stage=0, microbatch=0)]: Task(kind='fwd', stage=0, microbatch=0) is not a kind of task.\n{fix}"
  )
  assert text_of(OneFOneB(4).with_costs, {'fwd': 1}, transfer=-1) == dedent("""\
    The time of transfer is -1.
    Fix: pass a finite number that is not negative.""")
