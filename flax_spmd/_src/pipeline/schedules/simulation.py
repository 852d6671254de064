"""Simulation: when every task of a schedule starts and ends, if tasks and transfers take known times.

A rank runs its list in order. A task starts when its rank is free and everything that it needs is there:
what another rank makes, `transfer` after it was made, for transfers run beside the tasks. That is exact,
so the simulated makespan of a schedule equals what the formulas of its paper say.

The *bubble* is the part of the makespan in which a rank has nothing to run.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import NamedTuple, TypeAlias

from flax_spmd._src.pipeline.schedules.tasks import KINDS, Step, Task, parse
from flax_spmd._src.pipeline.schedules.validation import Lists, outside, validate
from flax_spmd._src.public_module import set_module
from flax_spmd.errors import PipelineError, did_you_mean

Costs: TypeAlias = Mapping[str, float | Sequence[float]] | Callable[[Task], float]
EQUAL: Mapping[str, float | Sequence[float]] = {'fwd': 1, 'bwd': 1, 'wgrad': 1}
_FIX = (
  "pass {'fwd': 1, 'bwd': 1, 'wgrad': 1}, with a number or one number per stage, "
  'or a function of a task.'
)


@set_module('flax_spmd.pipeline')
class Run(NamedTuple):
  """A task with its start and its end, in the unit of the costs; `lengths` are those of its parts.

  Example:
    >>> from flax_spmd.pipeline import GPipe
    >>> run = GPipe(ranks=2).simulate(4)['fwd_1__0']
    >>> run.start, run.end
    (1, 2)
  """

  step: Step
  start: float
  end: float
  lengths: tuple[float, ...]


@set_module('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class Simulation:
  """What a simulation found; `str` gives a table.

  Attributes:
    title: the schedule and the number of microbatches.
    runs: per rank, its tasks with their starts and ends.
    peaks: per rank, the most activations that are alive at once, each of one stage and one microbatch.
    owners: per stage, the rank that it is on.

  Example:
    >>> from flax_spmd.pipeline import GPipe
    >>> simulation = GPipe(ranks=2).simulate(4, {'fwd': 1, 'bwd': 2})
    >>> simulation.makespan, simulation.peaks, round(simulation.bubble, 3)
    (15, (4, 4), 0.2)
  """

  title: str
  runs: tuple[tuple[Run, ...], ...]
  peaks: tuple[int, ...]
  owners: tuple[int, ...]

  @functools.cached_property
  def makespan(self) -> float:
    """From the first start to the last end, in the unit of the costs."""
    return max((runs[-1].end for runs in self.runs if runs), default=0)

  @functools.cached_property
  def busy(self) -> tuple[float, ...]:
    """Per rank, how long it has something to run."""
    return tuple(sum(run.end - run.start for run in runs) for runs in self.runs)

  @property
  def bubbles(self) -> tuple[float, ...]:
    """Per rank, the part of the makespan in which it has nothing to run: 0 to 1."""
    return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

  @property
  def bubble(self) -> float:
    """The mean of the ranks' bubbles."""
    return sum(self.bubbles) / len(self.bubbles)

  def __getitem__(self, task: Task | str) -> Run:
    """When a task runs; of one that is fused, the whole of what it is fused with.

    Raises:
      PipelineError: the schedule has no such task.
    """
    [wanted] = (parse(task) if isinstance(task, str) else task).tasks
    if wanted not in self._found:
      raise PipelineError(f'{self.title} has no task {wanted}.\nFix: see .runs for those that it has.')
    return self._found[wanted]

  @functools.cached_property
  def _found(self) -> dict[Task, Run]:
    return {task: run for runs in self.runs for run in runs for task in run.step.tasks}

  def __str__(self) -> str:
    rows = [('rank', 'busy', 'bubble', 'live')]
    for rank, (busy, bubble, peak) in enumerate(zip(self.busy, self.bubbles, self.peaks)):
      rows.append((str(rank), f'{busy:g}', f'{bubble:.1%}', str(peak)))
    table = '\n'.join(f'{rank:>4}{busy:>10}{bubble:>9}{live:>6}' for rank, busy, bubble, live in rows)
    return f'{self.title}: makespan {self.makespan:g}, bubble {self.bubble:.1%}\n{table}'


def simulate(lists: Lists, costs: Costs = EQUAL, transfer: float = 0) -> Simulation:
  """Runs a schedule on paper.

  Args:
    lists: the schedule.
    costs: how long tasks take, in any unit of time: a number, or one per stage, for each kind; where a
      schedule does not split the backward, its `bwd` takes 'bwd' and 'wgrad' together. Or a function
      from a task to its time, which is taken as it is. A fused task takes as long as its tasks do.
    transfer: how long a result takes from one rank to another, in the same unit.

  Raises:
    PipelineError: the schedule is wrong, or a time is no number from 0 up.

  Example:
    >>> forward, backward = Task('fwd', 0, 0), Task('bwd', 0, 0)
    >>> simulate(Lists('mine', ((forward, backward),), owners=(0,), microbatches=1)).makespan
    3
  """
  proof, stages = validate(lists), len(lists.owners)
  cost, transfer = _cost(lists, costs), _time(transfer, 'transfer')
  free: list[float] = [0] * len(lists.orders)
  runs: list[list[Run]] = [[] for _ in lists.orders]
  ended: dict[Task, float] = {}
  for step in proof.order:
    rank = lists.owners[step.tasks[0].stage]
    arrivals = (
      ended[one] + transfer * (lists.owners[one.stage] != rank) for one in outside(step, stages)
    )
    start = max(free[rank], *arrivals, 0)
    lengths = tuple(map(cost, step.tasks))
    free[rank] = start + sum(lengths)
    ended.update(dict.fromkeys(step.tasks, free[rank]))
    runs[rank].append(Run(step, start, free[rank], lengths))
  return Simulation(lists.title, tuple(map(tuple, runs)), proof.peaks, lists.owners)


def _cost(lists: Lists, costs: Costs) -> Callable[[Task], float]:
  """A task's time, checked."""
  if callable(costs):
    return lambda task: _time(costs(task), str(task))
  table = _table(costs, len(lists.owners))
  if 'wgrad' not in lists.kinds:
    table['bwd'] = [sum(pair) for pair in zip(table['bwd'], table['wgrad'])]
  return lambda task: table[task.kind][task.stage]


def _table(costs: Mapping[str, float | Sequence[float]], stages: int) -> dict[str, list[float]]:
  """Per kind, a time for every stage; 0 for a kind that is not there."""
  table: dict[str, list[float]] = {kind: [0] * stages for kind in KINDS}
  for kind, times in costs.items():
    if kind not in KINDS:
      raise PipelineError(
        f'costs[{kind!r}]: there is no such kind of task.{did_you_mean(kind, KINDS)}\nFix: {_FIX}'
      )
    table[kind] = list(times) if isinstance(times, Sequence) else [times] * stages
    if len(table[kind]) != stages:
      raise PipelineError(
        f'costs[{kind!r}] has {len(table[kind])} times, but there are {stages} stages.\nFix: {_FIX}'
      )
    table[kind] = [_time(time, f'costs[{kind!r}]') for time in table[kind]]
  return table


def _time(time: float, what: str) -> float:
  if not isinstance(time, Real) or not 0 <= time < math.inf:
    raise PipelineError(f'{what} takes {time!r}: that is no time.\nFix: pass a number from 0 up.')
  return time
