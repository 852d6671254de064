"""Simulation: the start and end of every task of a schedule, for given task and transfer times.

A rank runs its list in order. A task starts when its rank is free and its inputs have arrived; a result
of another rank arrives `transfer` after it was computed, as transfers overlap with tasks. The simulation
is exact: the makespan of a schedule equals the formula of its paper.

The *bubble* is the fraction of the makespan in which a rank is idle.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

from flax_spmd._src.pipeline.schedules.tasks import KINDS, Step, Task, parse
from flax_spmd._src.pipeline.schedules.validation import TaskLists, external_inputs, validate
from flax_spmd._src.public import public
from flax_spmd._src.text import value_text
from flax_spmd.errors import PipelineError, did_you_mean

Costs: TypeAlias = Mapping[str, float | Sequence[float]] | Mapping[Task, float] | Callable[[Task], float]
EQUAL: Mapping[str, float | Sequence[float]] = {'fwd': 1, 'bwd': 1, 'wgrad': 1}
_FIX = (
  "pass {'fwd': 1, 'bwd': 1, 'wgrad': 1}, with a number or one number per stage, "
  'the times of tasks that `measure` returned, or a function of a task.'
)


@public('flax_spmd.pipeline')
class TimedStep(NamedTuple):
  """A task with its start and end.

  Attributes:
    step: the `Task` or `FusedTask`.
    start, end: times from the start of the pipeline, in the unit of the costs.
    lengths: duration of each task of the step, in the unit of the costs.

  Example:
    >>> from flax_spmd.pipeline import GPipe
    >>> forward = GPipe(ranks=2).simulate(4)['fwd_1__0']
    >>> forward.start, forward.end
    (1, 2)
  """

  step: Step
  start: float
  end: float
  lengths: tuple[float, ...]


@public('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class Simulation:
  """The result of simulating a schedule; `str` formats it as a table.

  Attributes:
    title: the schedule and the number of microbatches.
    steps: per rank, its tasks with their start and end times.
    peaks: per rank, the largest number of live activations, each of one stage and one microbatch.
    stage_ranks: per stage, its rank.

  Example:
    >>> from flax_spmd.pipeline import GPipe
    >>> simulation = GPipe(ranks=2).simulate(4, {'fwd': 1, 'bwd': 2})
    >>> simulation.makespan, simulation.peaks, round(simulation.bubble, 3)
    (15, (4, 4), 0.2)
  """

  title: str
  steps: tuple[tuple[TimedStep, ...], ...]
  peaks: tuple[int, ...]
  stage_ranks: tuple[int, ...]

  @functools.cached_property
  def makespan(self) -> float:
    """The time from the first start to the last end, in the unit of the costs."""
    return max((steps[-1].end for steps in self.steps if steps), default=0)

  @functools.cached_property
  def busy(self) -> tuple[float, ...]:
    """Per rank, the total time of its tasks, in the unit of the costs."""
    return tuple(sum(timed.end - timed.start for timed in steps) for steps in self.steps)

  @property
  def bubbles(self) -> tuple[float, ...]:
    """Per rank, the fraction of the makespan in which it is idle: 0 to 1."""
    return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

  @property
  def bubble(self) -> float:
    """The mean of `bubbles`."""
    return sum(self.bubbles) / len(self.bubbles)

  def __getitem__(self, task: Task | str) -> TimedStep:
    """The start and end of a task; for a part of a fused task, those of the fused task.

    Raises:
      PipelineError: the schedule does not have this task.
    """
    [task] = (parse(task) if isinstance(task, str) else task).tasks
    if task not in self._by_task:
      raise PipelineError(f'{self.title} has no task {task}.\nFix: choose one of the tasks in .steps.')
    return self._by_task[task]

  @functools.cached_property
  def _by_task(self) -> dict[Task, TimedStep]:
    return {task: timed for steps in self.steps for timed in steps for task in timed.step.tasks}

  def __str__(self) -> str:
    rows = [('rank', 'busy', 'bubble', 'live')]
    for rank, (busy, bubble, peak) in enumerate(zip(self.busy, self.bubbles, self.peaks)):
      rows.append((str(rank), f'{busy:g}', f'{bubble:.1%}', str(peak)))
    table = '\n'.join(f'{rank:>4}{busy:>10}{bubble:>9}{live:>6}' for rank, busy, bubble, live in rows)
    return f'{self.title}: makespan {self.makespan:g}, bubble {self.bubble:.1%}\n{table}'


def simulate(lists: TaskLists, costs: Costs, transfer: float) -> Simulation:
  """Computes the start and end of every task; see `Schedule.simulate`. A fused task takes the sum of its tasks' times."""
  report = validate(lists)
  by_rank: list[list[TimedStep]] = [[] for _ in lists.orders]
  for one in timed(lists, report.order, costs, transfer):
    by_rank[lists.stage_ranks[one.step.tasks[0].stage]].append(one)
  return Simulation(lists.title, tuple(map(tuple, by_rank)), report.peaks, lists.stage_ranks)


def timed(lists: TaskLists, order: Sequence[Step], costs: Costs, transfer: float) -> list[TimedStep]:
  """The tasks in an order in which all ranks together can run them, with their times; see `simulate`."""
  ranks = lists.stage_ranks
  cost, transfer = cost_function(costs, lists.stages, lists.kinds), check_time(transfer, 'transfer')
  free: list[float] = [0] * len(lists.orders)
  steps: list[TimedStep] = []
  ended: dict[Task, float] = {}
  for step in order:
    rank = ranks[step.tasks[0].stage]
    arrivals = (
      ended[one] + transfer * (ranks[one.stage] != rank) for one in external_inputs(step, lists)
    )
    start = max(free[rank], *arrivals, 0)
    lengths = tuple(map(cost, step.tasks))
    free[rank] = start + sum(lengths)
    ended.update(dict.fromkeys(step.tasks, free[rank]))
    steps.append(TimedStep(step, start, free[rank], lengths))
  return steps


def cost_function(costs: Costs, stages: int, kinds: Collection[str]) -> Callable[[Task], float]:
  """A function from a task to its validated time; among `kinds` without 'wgrad', a backward takes the time of both."""
  if callable(costs):
    return lambda task: check_time(costs(task), str(task))
  table = stage_costs(costs, stages, kinds)
  return lambda task: table[task.kind][task.stage]


def own_costs(costs: Costs) -> Costs:
  """The costs with arrays as tuples, in a copy that later changes of the argument do not reach.

  Raises:
    PipelineError: they are neither a mapping nor a function.
  """
  if callable(costs):
    return costs
  if not isinstance(costs, Mapping):
    raise PipelineError(f'The costs are {value_text(costs)}.\nFix: {_FIX}')
  given: Mapping[Any, Any] = costs
  table: dict[Any, Any] = {}
  for key, times in given.items():
    plain = times.tolist() if hasattr(times, 'tolist') else times  # of NumPy's arrays and numbers
    table[key] = tuple(plain) if isinstance(plain, Sequence) else plain
  return table


def stage_costs(costs: Costs, stages: int, kinds: Collection[str]) -> dict[str, tuple[float, ...]]:
  """Per kind, the time of every stage; 0 for kinds without costs."""
  own: Any = own_costs(costs)
  if own and all(isinstance(one, Task) for one in own):
    own = _medians(own, stages, kinds)
  table: dict[str, tuple[float, ...]] = dict.fromkeys(KINDS, (0,) * stages)
  for kind, times in own.items():
    if kind not in KINDS:
      raise PipelineError(
        f'costs[{value_text(kind)}]: {value_text(kind)} is not a kind of task.{did_you_mean(str(kind), KINDS)}\nFix: {_FIX}'
      )
    each = times if isinstance(times, Sequence) else [times] * stages
    if len(each) != stages:
      raise PipelineError(
        f'costs[{kind!r}] has {len(each)} times, but there are {stages} stages.\nFix: {_FIX}'
      )
    table[kind] = tuple(check_time(time, f'costs[{kind!r}]') for time in each)
  if 'wgrad' not in kinds:
    table |= {'bwd': tuple(map(sum, zip(table['bwd'], table['wgrad']))), 'wgrad': (0,) * stages}
  return table


def _medians(costs: Mapping[Task, float], stages: int, kinds: Collection[str]) -> dict[str, list[float]]:
  """Per kind, the median of the measured times of every stage.

  0 for tasks that a model does not have: a forward within the backward of its stage, the input gradient of the first
  stage, weight gradients of a stage without weights.
  """
  times: dict[tuple[str, int], list[float]] = defaultdict(list)
  for task, time in costs.items():
    times[task.kind, task.stage].append(check_time(time, str(task)))
  measured, split = {stage for _, stage in times}, 'wgrad' in kinds
  faults = [f'{len(measured)} stages, not {stages}'] * (measured != set(range(stages)))
  faults += ['no weight gradients'] * (split and all(kind != 'wgrad' for kind, _ in times))
  if faults:
    raise PipelineError(
      f'The measured tasks have {" and ".join(faults)}.\n'
      f'Fix: measure a schedule of {stages} stages{", such as ZeroBubbleH1, that splits backwards" * split}.'
    )
  return {
    kind: [statistics.median(times.get((kind, stage), [0])) for stage in range(stages)] for kind in KINDS
  }


def check_time(time: float, name: str) -> float:
  """The time; raises PipelineError unless it is a finite number that is not negative."""
  if not isinstance(time, Real) or not 0 <= time < math.inf:
    raise PipelineError(
      f'The time of {name} is {value_text(time)}.\nFix: pass a finite number that is not negative.'
    )
  return time
