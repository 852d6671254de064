"""Schedules: bubbles and live activations match theory, and errors underline the tasks at fault."""

import itertools
import math
import re
from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_spmd._src.pipeline.schedules.tasks import inputs, parse
from flax_spmd.errors import PipelineError
from flax_spmd.pipeline import (
  DualPipeV,
  Eager1F1B,
  FusedTask,
  GPipe,
  Interleaved1F1B,
  InterleavedGPipe,
  KimiK2,
  OneFOneB,
  Schedule,
  Task,
  ZeroBubbleH1,
  ZeroBubbleV,
)

RANKS = [2, 3, 4, 8]
FEW = settings(max_examples=50)  # 20 ms each
KINDS = [
  GPipe,
  InterleavedGPipe,
  OneFOneB,
  Eager1F1B,
  Interleaved1F1B,
  lambda ranks: Interleaved1F1B(ranks, chunks=3, fuse='steady'),
  lambda ranks: Interleaved1F1B(ranks, chunks=1, fuse=None),
  ZeroBubbleH1,
  ZeroBubbleV,
  DualPipeV,
  lambda ranks: DualPipeV(ranks, fuse=True),
  KimiK2,
]


def supported(schedule, microbatches):
  """The smallest supported number of microbatches from `microbatches` on."""
  return next(n for n in range(microbatches, microbatches + 100) if schedule.supports(n))


@st.composite
def schedules(pick, ranks=(1, *RANKS)):
  schedule = pick(st.sampled_from(KINDS))(pick(st.sampled_from(ranks)))
  return schedule, supported(schedule, pick(st.integers(1, 24)))


def message(call):
  with pytest.raises(PipelineError) as caught:
    call()
  assert isinstance(caught.value, ValueError)
  return str(caught.value)


def text(schedule):
  return dedent(schedule).strip()


# Order.


@pytest.mark.parametrize('ranks', RANKS)
@pytest.mark.parametrize('kind', KINDS)
def test_every_schedule_validates(kind, ranks):
  schedule = kind(ranks)
  counts = {supported(schedule, n) for n in [*range(1, 2 * ranks + 2), 3 * ranks, 32, 37]}
  for microbatches in counts:
    report = schedule.validate(microbatches)
    assert len(report.order) == sum(map(len, schedule.tasks(microbatches)))
    assert max(report.peaks) <= microbatches * schedule.stages // ranks


@FEW
@given(schedules())
def test_every_task_runs_once_and_after_its_inputs(case):
  """By definition, independently of `validate`."""
  schedule, microbatches = case
  simulation = schedule.simulate(microbatches)
  kinds = {task.kind for steps in simulation.steps for timed in steps for task in timed.step.tasks}
  ran = [task for steps in simulation.steps for timed in steps for task in timed.step.tasks]
  expected = {Task(k, s, i) for k in kinds for s in range(schedule.stages) for i in range(microbatches)}
  assert len(ran) == len(set(ran)) and set(ran) == expected
  for rank, steps in enumerate(simulation.steps):
    for before, after in itertools.pairwise(steps):
      assert before.end <= after.start
    for timed in steps:
      assert {schedule.stage_ranks[task.stage] for task in timed.step.tasks} == {rank}
      for task in timed.step.tasks:
        for needed in inputs(task, schedule.stages):
          assert simulation[needed].end <= timed.start or needed in timed.step.tasks


def test_interleaved_gpipe_repeats_no_task():
  """JaxPP's steps some tasks twice and others never."""
  for rank, order in enumerate(InterleavedGPipe(ranks=4, chunks=2).tasks(8)):
    stages = [rank, rank + 4]
    forwards = [f'fwd_{stage}__{i}' for stage in stages for i in range(8)]
    backwards = [f'bwd_{stage}__{i}' for stage in stages[::-1] for i in range(8)]
    assert [str(task) for task in order] == forwards + backwards


def test_task_lists_of_the_jaxpp_tutorial():
  four, eight = Interleaved1F1B(ranks=4, chunks=1), Interleaved1F1B(ranks=4, chunks=2)

  def names(schedule, rank):
    return ' '.join(map(str, schedule.tasks(4)[rank]))

  assert names(four, 2) == 'fwd_2__0 fwd_2__1 fwd_2__2 bwd_2__0 fwd_2__3 bwd_2__1 bwd_2__2 bwd_2__3'
  assert names(four, 3) == ' '.join(f'FusedTask(fwd_3__{i}, bwd_3__{i})' for i in range(4))
  rounds = [f'{kind}__{i}' for kind in ('fwd_0', 'fwd_4', 'bwd_4', 'bwd_0') for i in range(4)]
  assert names(eight, 0) == ' '.join(rounds)
  last = [f'FusedTask(fwd_7__{i}, bwd_7__{i})' for i in range(4)]
  rounds = [[f'{kind}__{i}' for i in range(4)] for kind in ('fwd_3', 'bwd_3')]
  assert names(eight, 3) == ' '.join([*rounds[0], *last, *rounds[1]])


def test_stage_ranks():
  assert Interleaved1F1B(ranks=3, chunks=2).stage_ranks == (0, 1, 2, 0, 1, 2)
  assert ZeroBubbleV(ranks=3).stage_ranks == DualPipeV(ranks=3).stage_ranks == (0, 1, 2, 2, 1, 0)
  assert ZeroBubbleV(ranks=3).stages_of(1) == (1, 4)
  assert (KimiK2(ranks=4, chunks=3).stages, KimiK2(ranks=4, chunks=3).stage_ranks[6]) == (12, 2)


def test_a_schedule_is_a_value():
  assert OneFOneB(ranks=4) == OneFOneB(4) != OneFOneB(8)
  assert OneFOneB(4) != GPipe(4)
  assert len({Interleaved1F1B(4), Interleaved1F1B(4, chunks=2), DualPipeV(4)}) == 2
  with pytest.raises(AttributeError):
    OneFOneB(4).ranks = 8


# Bubbles.


@FEW
@given(st.sampled_from(RANKS), st.integers(1, 40))
def test_bubbles_of_unsplit_backwards_match_theory(p, m):
  for schedule in (GPipe(p), OneFOneB(p), Eager1F1B(p)):
    assert math.isclose(schedule.simulate(m).bubble, (p - 1) / (m + p - 1))


@FEW
@given(st.sampled_from(RANKS), st.integers(1, 4), st.integers(1, 6))
def test_interleaving_divides_the_bubble(p, v, rounds):
  m = rounds * p
  theory = (p - 1) / (v * m + p - 1)
  assert math.isclose(InterleavedGPipe(p, v).simulate(m).bubble, theory)
  for fuse in ('last', 'steady', None):
    assert math.isclose(Interleaved1F1B(p, v, fuse).simulate(m).bubble, theory)


@FEW
@given(st.sampled_from(RANKS), st.integers(0, 30), st.integers(1, 5), st.integers(1, 5))
def test_zero_bubble_h1(p, more, forward, equal):
  """(p - 1) (F + B - W) of 1F1B's (p - 1) (F + B + W), for the paper's case of B = W."""
  m = p + more
  simulation = ZeroBubbleH1(p).simulate(m)
  assert simulation.makespan == 3 * m + p - 1
  assert math.isclose(simulation.bubble, (p - 1) / (3 * m + p - 1))
  costs = {'fwd': forward, 'bwd': equal, 'wgrad': equal}
  assert ZeroBubbleH1(p).simulate(m, costs).makespan <= OneFOneB(p).simulate(m, costs).makespan


@FEW
@given(st.sampled_from(RANKS), st.integers(0, 24))
def test_v_shapes(p, more):
  """The makespan is optimal: the last rank starts after p - 1 and works for 6 m."""
  m = 2 * p + more
  assert ZeroBubbleV(p).simulate(m).makespan == DualPipeV(p).simulate(m).makespan == 6 * m + p - 1
  whole, fused, weights = 2, 3, 1  # DeepSeek's B, F&B and W, in our unit
  bubble = (p - 1) * (fused + whole - 3 * weights)
  assert DualPipeV(p, fuse=True).simulate(m).makespan == 6 * m + bubble


@pytest.mark.parametrize(
  ('schedule', 'bubble'),
  [
    (GPipe(4), 0.273),
    (InterleavedGPipe(4), 0.158),
    (OneFOneB(4), 0.273),
    (Eager1F1B(4), 0.273),
    (Interleaved1F1B(4), 0.158),
    (KimiK2(4), 0.111),
    (ZeroBubbleH1(4), 0.111),
    (DualPipeV(4), 0.059),
    (DualPipeV(4, fuse=True), 0.111),
    (ZeroBubbleV(4), 0.059),
  ],
)
def test_bubbles_of_4_ranks_and_8_microbatches(schedule, bubble):
  """With F = B = W; an unsplit backward takes B + W."""
  assert round(schedule.simulate(8).bubble, 3) == bubble


# Activations.


@FEW
@given(st.sampled_from(RANKS), st.integers(1, 40))
def test_activations_of_one_stage_per_rank(p, m):
  ranks = range(p)
  assert GPipe(p).validate(m).peaks == (m,) * p
  assert OneFOneB(p).validate(m).peaks == tuple(min(m, p - r) for r in ranks)
  assert Eager1F1B(p).validate(m).peaks == tuple(min(m, 2 * (p - r) - 1) for r in ranks)
  assert ZeroBubbleH1(p).validate(m).peaks == (min(m, p),) * p


@FEW
@given(st.sampled_from(RANKS), st.integers(1, 4), st.integers(1, 5))
def test_activations_of_several_stages_per_rank(p, v, rounds):
  m = rounds * p
  warm_ups = [(v - 1) * p + 2 * (p - 1 - r) for r in range(p)]
  assert InterleavedGPipe(p, v).validate(m).peaks == (v * m,) * p
  assert Interleaved1F1B(p, v).validate(m).peaks == tuple(min(v * m, w + 1) for w in warm_ups)
  assert KimiK2(p, v).validate(m).peaks == tuple(min(v * m, w + 2) for w in warm_ups)


@FEW
@given(st.sampled_from(RANKS), st.integers(1, 40))
def test_activations_of_v_shapes(p, m):
  assert max(ZeroBubbleV(p).validate(m).peaks) <= 2 * p
  if m >= 2 * p:
    assert DualPipeV(p).validate(m).peaks == (2 * p + 1,) * p


@FEW
@given(schedules(), st.data())
def test_peaks_match_a_count_over_time(case, data):
  """For any task times."""
  schedule, microbatches = case
  costs = data.draw(st.fixed_dictionaries({kind: st.integers(1, 9) for kind in ('fwd', 'bwd', 'wgrad')}))
  simulation = schedule.simulate(microbatches, costs, transfer=data.draw(st.integers(0, 3)))
  last = (
    'wgrad'
    if any(task.kind == 'wgrad' for task in schedule.validate(microbatches).order[-1].tasks)
    else 'bwd'
  )
  for rank, peak in enumerate(simulation.peaks):
    changes = []
    for timed in simulation.steps[rank]:
      start = timed.start
      for task, length in zip(timed.step.tasks, timed.lengths):
        changes += [(start, 1)] * (task.kind == 'fwd') + [(start + length, -1)] * (task.kind == last)
        start += length
    alive, most = 0, 0
    for _, change in sorted(changes):
      alive += change
      most = max(most, alive)
    assert most == peak


# Simulation.


@FEW
@given(schedules(), st.integers(1, 9), st.integers(0, 4))
def test_makespan_scales_with_costs_and_grows_with_transfers(case, unit, transfer):
  schedule, microbatches = case
  once, more = schedule.simulate(microbatches), dict.fromkeys(('fwd', 'bwd', 'wgrad'), unit)
  assert schedule.simulate(microbatches, more).makespan == unit * once.makespan
  assert schedule.simulate(microbatches, transfer=transfer).makespan >= once.makespan
  assert set(once.busy) == {3 * microbatches * schedule.stages // schedule.ranks}
  assert math.isclose(once.bubble, 1 - once.busy[0] / once.makespan, abs_tol=1e-12)


def test_costs_per_stage_and_per_task():
  slow = OneFOneB(2).simulate(1, {'fwd': [1, 10], 'bwd': (2, 20), 'wgrad': 0})
  assert (slow.makespan, slow.busy) == (33, (3, 30))
  measured = OneFOneB(2).simulate(1, lambda task: {'fwd_0__0': 0.5}.get(str(task), 1.0), transfer=0.25)
  assert measured.makespan == 0.5 + 0.25 + 1 + 1 + 0.25 + 1
  assert measured['fwd_1__0'].start == measured[Task('fwd', 1, 0)].start == 0.75


def test_a_fused_task_starts_after_all_its_inputs_and_releases_results_at_its_end():
  schedule = Schedule.from_text("""
    rank 0: fwd_0__0 fwd_0__1 bwd_0__0 bwd_0__1
    rank 1: FusedTask(fwd_1__0, bwd_1__0, fwd_1__1) bwd_1__1
  """)
  simulation = schedule.simulate(2)
  assert [(timed.start, timed.end) for timed in simulation.steps[1]] == [(2, 6), (6, 8)]
  assert simulation['bwd_1__0'] == simulation['fwd_1__1'] == simulation.steps[1][0]
  assert simulation['bwd_0__0'].start == 6


def test_a_simulation_prints_as_a_table():
  assert str(OneFOneB(2).simulate(2)) == text("""
    OneFOneB(ranks=2) with 2 microbatches: makespan 9, bubble 33.3%
    rank      busy   bubble  live
       0         6    33.3%     2
       1         6    33.3%     1
  """)


def test_eager_1f1b_and_kimi_k2_hide_transfers():
  assert [kind(4).simulate(8, transfer=0.5).makespan for kind in (OneFOneB, Eager1F1B)] == [41, 36]
  assert [kind(4).simulate(8, transfer=0.5).makespan for kind in (Interleaved1F1B, KimiK2)] == [64, 59]


# Text.


@FEW
@given(schedules())
def test_text_round_trips(case):
  schedule, microbatches = case
  written = schedule.to_text(microbatches)
  again = Schedule.from_text(written)
  assert again.tasks(microbatches) == schedule.tasks(microbatches)
  assert again.stage_ranks == schedule.stage_ranks
  assert again.to_text(microbatches) == written


@given(st.sampled_from(['fwd', 'bwd', 'wgrad']), st.integers(0, 999), st.integers(0, 999))
def test_tasks_round_trip(kind, stage, microbatch):
  task = Task(kind, stage, microbatch)
  assert str(task) == f'{kind}_{stage}__{microbatch}'
  assert parse(str(task)) == task
  fused = FusedTask((task, Task('bwd', stage + 1, microbatch)))
  assert parse(str(fused)) == fused
  assert hash(parse(str(fused))) == hash(fused)


def test_text_allows_comments_commas_and_spaces():
  schedule = Schedule.from_text("""
    # one stage on each rank

    rank 0:  fwd_0__0,bwd_0__0   # the whole of it
    rank 1: FusedTask( fwd_1__0 ,bwd_1__0 )
  """)
  assert schedule.to_text(1) == 'rank 0: fwd_0__0 bwd_0__0\nrank 1: FusedTask(fwd_1__0, bwd_1__0)'


# Illegal schedules.

GOOD = """
rank 0: fwd_0__0 fwd_0__1 bwd_0__0 bwd_0__1
rank 1: fwd_1__0 bwd_1__0 fwd_1__1 bwd_1__1
"""


def error_of(*changes, microbatches=2):
  """The error for the good schedule with some of its text replaced."""
  written = GOOD
  for old, new in changes:
    assert old in written
    written = written.replace(old, new)
  return message(lambda: Schedule.from_text(written).validate(microbatches))


def test_deadlock():
  error = error_of(
    ('fwd_0__1 bwd_0__0', 'bwd_0__0 fwd_0__1'),
    ('bwd_1__0 fwd_1__1', 'fwd_1__1 bwd_1__0'),
  )
  assert error == text("""
    TextSchedule(ranks=2) with 2 microbatches is not a legal schedule.
    It deadlocks. Blocked ranks:
    rank 0, task 1: bwd_0__0 waits for bwd_1__0 of rank 1:
      rank 0: fwd_0__0 bwd_0__0 fwd_0__1 bwd_0__1
                       ^^^^^^^^
    rank 1, task 1: fwd_1__1 waits for fwd_0__1 of rank 0:
      rank 1: fwd_1__0 fwd_1__1 bwd_1__0 bwd_1__1
                       ^^^^^^^^
    Fix: on rank 1, put bwd_1__0 before fwd_1__1.
  """)


def test_deadlock_over_several_ranks():
  def against_each_other(rank, microbatches):
    for i in range(microbatches) if rank % 2 else reversed(range(microbatches)):
      yield from (f'fwd_{rank}__{i}', f'bwd_{rank}__{i}')

  assert message(lambda: Schedule.of(against_each_other, ranks=3).validate(2)) == text("""
    against_each_other(ranks=3) with 2 microbatches is not a legal schedule.
    It deadlocks. Blocked ranks:
    rank 0, task 1: bwd_0__1 waits for bwd_1__1 of rank 1:
      rank 0: fwd_0__1 bwd_0__1 fwd_0__0 bwd_0__0
                       ^^^^^^^^
    rank 1, task 0: fwd_1__0 waits for fwd_0__0 of rank 0:
      rank 1: fwd_1__0 bwd_1__0 fwd_1__1 …
              ^^^^^^^^
    rank 2, task 0: fwd_2__1 waits for fwd_1__1 of rank 1:
      rank 2: fwd_2__1 bwd_2__1 fwd_2__0 …
              ^^^^^^^^
    Fix: on rank 1, put bwd_1__1 and its inputs before fwd_1__0.
  """)


def test_deadlock_by_fusing():
  error = message(
    lambda: Schedule.from_text("""
      rank 0: FusedTask(fwd_0__0, bwd_0__0)
      rank 1: fwd_1__0 bwd_1__0
    """).validate(1)
  )
  assert error == text("""
    TextSchedule(ranks=2) with 1 microbatch is not a legal schedule.
    It deadlocks. Blocked ranks:
    rank 0, task 0: FusedTask(fwd_0__0, bwd_0__0) waits for bwd_1__0 of rank 1:
      rank 0: FusedTask(fwd_0__0, bwd_0__0)
              ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
    rank 1, task 0: fwd_1__0 waits for fwd_0__0 of rank 0:
      rank 1: fwd_1__0 bwd_1__0
              ^^^^^^^^
    Fix: split the fused tasks: their parts wait for one another through other ranks.
  """)


@FEW
@given(schedules(ranks=(3,)), st.randoms())
def test_following_the_fixes_of_deadlocks_ends_in_a_legal_schedule(case, random):
  """From lists in any order that is legal for each rank on its own."""
  schedule, microbatches = case
  microbatches = min(microbatches, 3)
  if not schedule.supports(microbatches):
    return
  lists = [
    _shuffled([t for s in order for t in s.tasks], schedule.stages, random)
    for order in schedule.tasks(microbatches)
  ]
  for _ in range(500):
    mine = Schedule.of(lambda rank, _: lists[rank], ranks=3, placement=schedule.stage_ranks)
    try:
      mine.validate(microbatches)
      return
    except PipelineError as error:
      fix = re.search(r'Fix: on rank (\d+), put (\S+)( and its inputs)? before (\S+)\.$', str(error))
      rank, moved, more, before = int(fix[1]), parse(fix[2]), fix[3], parse(fix[4])
      order = lists[rank]
      at, to = order.index(moved), order.index(before)
      group = [t for t in order[to:at] if more and _above(t, moved, schedule.stages)] + [moved]
      lists[rank] = [*order[:to], *group, *[t for t in order[to:] if t not in group]]
  raise AssertionError('the fixes lead in a cycle')


def _above(task, of, stages):
  return any(one == task or _above(task, one, stages) for one in inputs(of, stages))


def _shuffled(order, stages, random):
  """A random order in which every task comes after its inputs on the same rank, transitively."""
  left, done = list(order), []
  while left:
    ready = [t for t in left if not any(_above(other, t, stages) for other in left)]
    done.append(random.choice(ready))
    left.remove(done[-1])
  return done


def test_missing_tasks():
  assert error_of((' bwd_0__1', ''), ('fwd_1__1 bwd_1__1', '')) == text("""
    TextSchedule(ranks=2) with 2 microbatches is not a legal schedule.
    rank 0 is missing bwd_0__1.
    rank 1 is missing fwd_1__1, bwd_1__1.
    Fix: run fwd and bwd of every stage once for each of the 2 microbatches.
  """)


def test_missing_weight_gradient():
  error = error_of(('bwd_0__1', 'bwd_0__1 wgrad_0__0 wgrad_0__1'), ('bwd_1__1', 'bwd_1__1 wgrad_1__1'))
  assert error == text("""
    TextSchedule(ranks=2) with 2 microbatches is not a legal schedule.
    rank 1 is missing wgrad_1__0.
    Fix: run fwd, bwd and wgrad of every stage once for each of the 2 microbatches.
  """)


def test_many_missing_tasks_are_counted():
  def half(rank, microbatches):
    yield from (f'fwd_{rank}__{i}' for i in range(microbatches))

  assert message(lambda: Schedule.of(half, ranks=1).validate(20)) == text("""
    half(ranks=1) with 20 microbatches is not a legal schedule.
    rank 0 is missing bwd_0__0, bwd_0__1, bwd_0__2, bwd_0__3, bwd_0__4, bwd_0__5, bwd_0__6, bwd_0__7, … 12 more.
    Fix: run fwd and bwd of every stage once for each of the 20 microbatches.
  """)


def test_duplicate_task():
  assert error_of(('bwd_0__1', 'bwd_0__0 bwd_0__1')) == text("""
    TextSchedule(ranks=2) with 2 microbatches is not a legal schedule.
    rank 0, task 3: bwd_0__0 is a duplicate of task 2.
      rank 0: … fwd_0__1 bwd_0__0 bwd_0__0 bwd_0__1
                                  ^^^^^^^^
    Fix: list every task once.
  """)


def test_task_on_the_wrong_rank():
  error = error_of(('bwd_0__1', 'bwd_0__1 fwd_1__1'), ('bwd_1__0 fwd_1__1', 'bwd_1__0'))
  assert error == text("""
    TextSchedule(ranks=2) with 2 microbatches is not a legal schedule.
    rank 0, task 4: fwd_1__1 is on the wrong rank: stage 1 is on rank 1.
      rank 0: … bwd_0__0 bwd_0__1 fwd_1__1
                                  ^^^^^^^^
    Fix: list each task on the rank of its stage.
  """)


def test_backward_before_forward():
  assert error_of(('fwd_1__0 bwd_1__0', 'bwd_1__0 fwd_1__0')) == text("""
    TextSchedule(ranks=2) with 2 microbatches is not a legal schedule.
    rank 1, task 0: bwd_1__0 comes before fwd_1__0 (task 1), whose result it needs.
      rank 1: bwd_1__0 fwd_1__0 fwd_1__1 …
              ^^^^^^^^
    Fix: put the forward of a microbatch first, then bwd, then wgrad.
  """)


def test_weight_gradient_before_backward_in_a_fused_task():
  written = 'rank 0: FusedTask(fwd_0__0, wgrad_0__0, bwd_0__0)'
  assert message(lambda: Schedule.from_text(written).validate(1)) == text("""
    TextSchedule(ranks=1) with 1 microbatch is not a legal schedule.
    rank 0, task 0: wgrad_0__0 comes before bwd_0__0 (task 0), whose result it needs.
      rank 0: FusedTask(fwd_0__0, wgrad_0__0, bwd_0__0)
              ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
    Fix: put the forward of a microbatch first, then bwd, then wgrad.
  """)


def test_tasks_out_of_range_are_listed_and_counted():
  def too_many(rank, microbatches):
    for i in range(microbatches):
      yield from (f'fwd_{rank}__{i}', f'bwd_{rank}__{i}', f'fwd_{rank}__{i + microbatches}')
    yield f'fwd_{rank + 1}__0'

  assert message(lambda: Schedule.of(too_many, ranks=1).validate(6)) == text("""
    too_many(ranks=1) with 6 microbatches is not a legal schedule.
    rank 0, task 2: fwd_0__6 is out of range: there are 6 microbatches.
      rank 0: fwd_0__0 bwd_0__0 fwd_0__6 fwd_0__1 bwd_0__1 …
                                ^^^^^^^^
    rank 0, task 5: fwd_0__7 is out of range: there are 6 microbatches.
      rank 0: … fwd_0__1 bwd_0__1 fwd_0__7 fwd_0__2 bwd_0__2 …
                                  ^^^^^^^^
    rank 0, task 8: fwd_0__8 is out of range: there are 6 microbatches.
      rank 0: … fwd_0__2 bwd_0__2 fwd_0__8 fwd_0__3 bwd_0__3 …
                                  ^^^^^^^^
    rank 0, task 11: fwd_0__9 is out of range: there are 6 microbatches.
      rank 0: … fwd_0__3 bwd_0__3 fwd_0__9 fwd_0__4 bwd_0__4 …
                                  ^^^^^^^^
    … and 2 more of these.
    rank 0, task 18: fwd_1__0 is out of range: the schedule has 1 stage.
      rank 0: … bwd_0__5 fwd_0__11 fwd_1__0
                                   ^^^^^^^^
    Fix: count microbatches from 0.
    Fix: count stages from 0.
  """)


def test_too_many_activations():
  assert OneFOneB(4).validate(8, live=4).peaks == (4, 3, 2, 1)
  assert message(lambda: ZeroBubbleH1(3).validate(8, live=2)) == text("""
    ZeroBubbleH1(ranks=3) with 8 microbatches keeps more than 2 activations live.
    rank 0, task 2: fwd_0__2 makes 3 activations live; the peak of this rank is 3.
      rank 0: fwd_0__0 fwd_0__1 fwd_0__2 bwd_0__0 wgrad_0__0 …
                                ^^^^^^^^
    rank 1, task 3: fwd_1__2 makes 3 activations live; the peak of this rank is 3.
      rank 1: … fwd_1__1 bwd_1__0 fwd_1__2 bwd_1__1 wgrad_1__0 …
                                  ^^^^^^^^
    rank 2, task 4: fwd_2__2 makes 3 activations live; the peak of this rank is 3.
      rank 2: … fwd_2__1 bwd_2__1 fwd_2__2 bwd_2__2 wgrad_2__0 …
                                  ^^^^^^^^
    Fix: put a wgrad before it, or pass live=3.
  """)


def test_an_illegal_schedule_is_neither_simulated_nor_drawn():
  with pytest.raises(PipelineError):
    Schedule.from_text(GOOD.replace('bwd_0__1', '')).simulate(2)
  with pytest.raises(PipelineError):
    Schedule.from_text(GOOD.replace('bwd_0__1', '')).draw(2)


# Other bad input.

SYNTAX = 'Fix: write fwd_2__0 for the forward of stage 2 and microbatch 0; bwd_2__0; wgrad_2__0; FusedTask(fwd_2__0, bwd_2__0).'
COSTS = "Fix: pass {'fwd': 1, 'bwd': 1, 'wgrad': 1}, with a number or one number per stage, the times of tasks that `measure` returned, or a function of a task."
LINES = 'Fix: write a line for every rank in order, such as "rank 0: fwd_0__0 bwd_0__0".'


@pytest.mark.parametrize(
  ('call', 'expected'),
  [
    (
      lambda: Interleaved1F1B(4).tasks(9),
      "Interleaved1F1B(ranks=4, chunks=2, fuse='last'): 9 microbatches cannot be split into 2 equal rounds.\n"
      'Fix: use 8 or 10 microbatches.',
    ),
    (
      lambda: KimiK2(4).validate(11),
      'KimiK2(ranks=4, chunks=2, split=True): 11 microbatches cannot be split into 2 equal rounds.\n'
      'Fix: use 10 or 12 microbatches.',
    ),
    (
      lambda: DualPipeV(4).draw(5),
      'DualPipeV(ranks=4, fuse=False): 5 microbatches are too few: it needs 8, two per rank.\n'
      'Fix: use 8 microbatches.',
    ),
    (
      lambda: Schedule.from_text(GOOD).simulate(3),
      'TextSchedule(ranks=2): the text has 2 microbatches, not 3.\nFix: use 2 microbatches.',
    ),
    (lambda: OneFOneB(0), 'OneFOneB.ranks is 0.\nFix: pass a positive integer.'),
    (lambda: KimiK2(4, chunks=-1), 'KimiK2.chunks is -1.\nFix: pass a positive integer.'),
    (lambda: GPipe(4).tasks(0), 'microbatches is 0.\nFix: pass a positive integer.'),
    (
      lambda: Interleaved1F1B(4, fuse='stedy'),
      "fuse='stedy' is unknown. Did you mean 'steady'?\nFix: use 'last', 'steady' or None.",
    ),
    (
      lambda: Schedule.of(print, ranks=2, placement='loops'),
      "placement='loops' is unknown. Did you mean 'loop'?\nFix: use 'loop', 'v', or the rank of every stage.",
    ),
    (
      lambda: Schedule.of(print, ranks=3, placement=(0, 1, 1)),
      'placement=(0, 1, 1) has no stage on rank 2, and there are 3 ranks.\nFix: name every rank from 0 to 2.',
    ),
    (
      lambda: Schedule.of(print, ranks=2, placement=(0, 1, 2)),
      'placement=(0, 1, 2) names rank 2, and there are 2 ranks.\nFix: name every rank from 0 to 1.',
    ),
    (
      lambda: Schedule.of(lambda rank, n: [Task('fwd', rank, 0), 7], ranks=2).tasks(1),
      f"rank 0, task 1: '7' is not a task.\n  rank 0: fwd_0__0 7\n                   ^\n{SYNTAX}",
    ),
    (
      lambda: Schedule.from_text(GOOD.replace('fwd_1__1', 'fdw_1__1')),
      "rank 1, task 2: 'fdw_1__1' is not a task. Did you mean 'fwd'?\n"
      '  rank 1: fwd_1__0 bwd_1__0 fdw_1__1 bwd_1__1\n'
      f'                            ^^^^^^^^\n{SYNTAX}',
    ),
    (lambda: Schedule.from_text('  \n# nothing'), f'The text has no tasks.\n{LINES}'),
    (
      lambda: Schedule.from_text('rank 1: fwd_0__0'),
      f'Line \'rank 1: fwd_0__0\' does not begin with "rank 0:".\n{LINES}',
    ),
    (
      lambda: Schedule.from_text('rank 0: fwd_1__0 bwd_1__0'),
      'The text has tasks of stage 1, but none of stage 0.\n'
      'Fix: write the tasks of every stage; stages count from 0.',
    ),
    (lambda: Task('wgard', 0, 0), f"'wgard' is not a kind of task. Did you mean 'wgrad'?\n{SYNTAX}"),
    (
      lambda: Task('fwd', -1, 0),
      'fwd_-1__0 has a negative index.\nFix: count stages and microbatches from 0.',
    ),
    (
      lambda: FusedTask((Task('fwd', 0, 0),)),
      f'FusedTask(fwd_0__0) has fewer than two tasks.\nFix: fuse two or more, or use the task itself: {SYNTAX.removeprefix("Fix: ")}',
    ),
    (
      lambda: OneFOneB(4).simulate(8, {'fwd': [1, 2]}),
      f"costs['fwd'] has 2 times, but there are 4 stages.\n{COSTS}",
    ),
    (
      lambda: OneFOneB(4).simulate(8, {'forward': 1}),
      f"costs['forward']: 'forward' is not a kind of task. Did you mean 'fwd'?\n{COSTS}",
    ),
    (
      lambda: OneFOneB(4).simulate(8, {'fwd': math.nan}),
      "The time of costs['fwd'] is nan.\nFix: pass a finite number that is not negative.",
    ),
    (
      lambda: OneFOneB(4).simulate(8, lambda task: None),
      'The time of fwd_0__0 is None.\nFix: pass a finite number that is not negative.',
    ),
    (
      lambda: OneFOneB(4).simulate(8, transfer=-1),
      'The time of transfer is -1.\nFix: pass a finite number that is not negative.',
    ),
    (
      lambda: OneFOneB(4).simulate(8)['fwd_0__9'],
      'OneFOneB(ranks=4) with 8 microbatches has no task fwd_0__9.\nFix: choose one of the tasks in .steps.',
    ),
  ],
)
def test_bad_input(call, expected):
  assert message(call) == expected
