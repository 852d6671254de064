"""Greedy scheduling: a schedule derived by simulation, where no closed form is known.

Time advances, and a free rank takes the task that can start first. Ties are broken by kind (backward,
forward, weight gradient), then by stage: the forward nearest to the loss, the backward nearest to the
input. A forward also waits for memory: the number of live activations on a rank is limited.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from flax_spmd._src.pipeline.schedules.simulation import (
  Costs,
  check_time,
  cost_function,
  stage_costs,
)
from flax_spmd._src.pipeline.schedules.stage_ranks import check_positive
from flax_spmd._src.pipeline.schedules.tasks import KINDS, Kind, Order, Task, inputs
from flax_spmd._src.public_module import set_module
from flax_spmd.errors import PipelineError

_PRIORITY = {'bwd': 0, 'fwd': 1, 'wgrad': 2}


@set_module('flax_spmd.pipeline')
def greedy(
  stage_ranks: Sequence[int],
  microbatches: int,
  live: int,
  split: bool = True,
  costs: Costs | None = None,
  transfer: float = 0,
) -> tuple[Order, ...]:
  """A schedule by simulation: a free rank takes the task that can start first.

  Ties go to backwards, then forwards, then weight gradients; among forwards to the last stage, among backwards to
  the first.

  Args:
    stage_ranks: per stage, its rank.
    microbatches: number of microbatches.
    live: largest number of live activations per rank, each of one stage and one microbatch.
    split: whether weight gradients are tasks of their own, after the backwards.
    costs: task times in any unit, as for `Schedule.simulate`; None: all tasks take equally long, backwards that are not
      split too.
    transfer: time to move a result from one rank to another, in the same unit.

  Returns:
    Per rank, its tasks in order: for the rule of a `Schedule.of`.

  Raises:
    PipelineError: a number is not positive, the ranks are not 0, 1, ... without gaps, `live` is too small, or costs
      do not match the stages.

  Example:
    >>> [str(task) for task in pipeline.greedy((0, 0), 1, 2)[0]]
    ['fwd_0__0', 'fwd_1__0', 'bwd_1__0', 'bwd_0__0', 'wgrad_0__0', 'wgrad_1__0']
  """
  placed = tuple(stage_ranks)
  if not placed or set(placed) != set(range(len(set(placed)))):
    raise PipelineError(
      f'greedy: the ranks {placed} are not 0, 1, ... without gaps.\n'
      'Fix: pass the rank of every stage, such as (0, 1, 2, 2, 1, 0).'
    )
  check_positive(microbatches, 'greedy: microbatches')
  check_positive(live, 'greedy: live')
  needed = max(map(placed.count, placed))
  if live < needed:
    raise PipelineError(
      f'greedy: with at most {live} live activation{"s" * (live != 1)} per rank, the ranks wait for each other.\n'
      f'Fix: pass live={needed}, the number of stages of a rank, or more.'
    )
  if costs is None:
    costs = {'fwd': 1, 'bwd': 1, 'wgrad': int(split)}
  if not callable(costs):
    costs = stage_costs(costs, len(placed), KINDS if split else KINDS[:2])
  table = costs if callable(costs) else tuple(costs.items())
  arguments = placed, microbatches, live, split, table, check_time(transfer, 'transfer')
  simulated = (
    _simulated.__wrapped__ if callable(costs) else _simulated
  )  # a function may change, or have no hash
  orders = simulated(*arguments, reserve=False)
  complete = sum(map(len, orders)) == (3 if split else 2) * len(placed) * microbatches
  return orders if complete else simulated(*arguments, reserve=True)


@functools.lru_cache(maxsize=16)
def _simulated(
  stage_ranks: tuple[int, ...],
  microbatches: int,
  live: int,
  split: bool,
  costs: Callable[[Task], float] | tuple[tuple[str, tuple[float, ...]], ...],
  transfer: float,
  reserve: bool,
) -> tuple[Order, ...]:
  """The tasks of every rank; up to a deadlock, which cannot occur if every rank reserves memory."""
  count = len(set(stage_ranks))
  kinds = KINDS if split else KINDS[:2]
  cost = cost_function(costs if callable(costs) else dict(costs), len(stage_ranks), kinds)
  common = stage_ranks, microbatches, live, kinds, transfer, reserve
  ranks = [_GreedyRank(rank, *common) for rank in range(count)]
  near: list[set[int]] = [{rank} for rank in range(count)]  # with stages before or after those of a rank
  for one, other in itertools.pairwise(stage_ranks):
    near[one].add(other)
    near[other].add(one)
  ended: dict[Task, float] = {}
  ready = [rank.best(ended) for rank in ranks]
  while chosen := min(filter(None, ready), default=None):
    ended[chosen.task] = end = chosen.start + cost(chosen.task)
    at = stage_ranks[chosen.task.stage]
    ranks[at].run(chosen.task, end)
    for neighbour in near[at]:  # only these can have a new task
      ready[neighbour] = ranks[neighbour].best(ended)
  return tuple(tuple(rank.order) for rank in ranks)


class _ReadyTask(NamedTuple):
  """A task that a rank could run next; the smallest one runs. No two have the same priority and stage."""

  start: float
  priority: int
  stage: int
  task: Task


class _GreedyRank:
  """The state of one rank during the simulation."""

  def __init__(
    self,
    rank: int,
    stage_ranks: Sequence[int],
    microbatches: int,
    live: int,
    kinds: Sequence[Kind],
    transfer: float,
    reserve: bool,
  ):
    self._kinds, self._rank, self._stage_ranks, self._transfer = kinds, rank, stage_ranks, transfer
    self._own = [stage for stage, other in enumerate(stage_ranks) if other == rank]
    self._microbatches, self._room, self._reserve = microbatches, live, reserve
    self._next: collections.Counter[tuple[str, int]] = collections.Counter()
    self._free: float = 0
    self.order: list[Task] = []

  def best(self, ended: dict[Task, float]) -> _ReadyTask | None:
    """The task to run next, if any is ready."""
    tasks = [Task(kind, stage, self._next[kind, stage]) for kind in self._kinds for stage in self._own]
    return min((ready for task in tasks if (ready := self._if_ready(task, ended))), default=None)

  def run(self, task: Task, end: float) -> None:
    self.order.append(task)
    self._next[task.kind, task.stage] += 1
    self._free = end
    self._room += (task.kind == self._kinds[-1]) - (task.kind == 'fwd')

  def _if_ready(self, task: Task, ended: dict[Task, float]) -> _ReadyTask | None:
    needed = inputs(task, len(self._stage_ranks))
    if task.microbatch == self._microbatches or not all(one in ended for one in needed):
      return None
    if task.kind == 'fwd' and self._room <= self._reserved_before(task):
      return None
    start = max(self._free, *(ended[one] + self._delay(one) for one in needed), 0)
    stage = -task.stage if task.kind == 'fwd' else task.stage
    return _ReadyTask(start, _PRIORITY[task.kind], stage, task)

  def _reserved_before(self, task: Task) -> int:
    """The live activations that the oldest microbatch still adds to this rank, if a forward is of a younger one.

    Without them, younger microbatches could take all memory, and the oldest, whose backwards free it, would wait.
    """
    done = [self._next['fwd', stage] for stage in self._own]
    oldest = min(done)
    return done.count(oldest) if self._reserve and task.microbatch > oldest else 0

  def _delay(self, task: Task) -> float:
    """The time that a result of the task takes to this rank."""
    return self._transfer * (self._stage_ranks[task.stage] != self._rank)
