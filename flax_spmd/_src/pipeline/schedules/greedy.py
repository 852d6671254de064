"""Greedy scheduling: a schedule derived by simulation, where no closed form is known.

Time advances, and a free rank takes the task that can start first. Ties are broken by kind (backward,
forward, weight gradient), then by stage: the forward nearest to the loss, the backward nearest to the
input. A forward also waits for memory: the number of live activations on a rank is limited.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from flax_spmd._src.pipeline.schedules.stage_ranks import check_positive
from flax_spmd._src.pipeline.schedules.tasks import KINDS, Order, Task, inputs
from flax_spmd._src.public_module import set_module
from flax_spmd.errors import PipelineError

_PRIORITY = {'bwd': 0, 'fwd': 1, 'wgrad': 2}


@set_module('flax_spmd.pipeline')
def greedy(
  stage_ranks: Sequence[int], microbatches: int, live: int, split: bool = True
) -> tuple[Order, ...]:
  """A schedule by simulation: a free rank takes the task that can start first.

  Task times are equal and transfers instant. Ties go to backwards, then forwards, then weight gradients; among
  forwards to the last stage, among backwards to the first.

  Args:
    stage_ranks: per stage, its rank.
    microbatches: number of microbatches.
    live: largest number of live activations per rank, each of one stage and one microbatch.
    split: whether weight gradients are tasks of their own, after the backwards.

  Returns:
    Per rank, its tasks in order: for the rule of a `Schedule.of`.

  Raises:
    PipelineError: a number is not positive, the ranks are not 0, 1, ... without gaps, or `live` is too small.

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
  orders = _simulated(placed, microbatches, live, split)
  if sum(map(len, orders)) < (3 if split else 2) * len(placed) * microbatches:
    raise PipelineError(
      f'greedy: with at most {live} live activation{"s" * (live != 1)} per rank, the ranks wait for each other.\n'
      f'Fix: pass live={len(placed)}, the number of stages, or more.'
    )
  return orders


@functools.lru_cache(maxsize=16)
def _simulated(
  stage_ranks: tuple[int, ...], microbatches: int, live: int, split: bool
) -> tuple[Order, ...]:
  """The tasks of every rank, up to a deadlock.

  As many live activations as stages avoid one: once rank 0 has run that many forwards, the first has returned.
  """
  count = len(set(stage_ranks))
  ranks = [_GreedyRank(rank, stage_ranks, microbatches, live, split) for rank in range(count)]
  near: list[set[int]] = [{rank} for rank in range(count)]  # with stages before or after those of a rank
  for one, other in itertools.pairwise(stage_ranks):
    near[one].add(other)
    near[other].add(one)
  ended: dict[Task, int] = {}
  ready = [rank.best(ended) for rank in ranks]
  while chosen := min(filter(None, ready), key=_order_of, default=None):
    ended[chosen.task] = chosen.start + 1
    at = stage_ranks[chosen.task.stage]
    ranks[at].run(chosen)
    for neighbour in near[at]:  # only these can have a new task
      ready[neighbour] = ranks[neighbour].best(ended)
  return tuple(tuple(rank.order) for rank in ranks)


class _ReadyTask(NamedTuple):
  """A task that a rank could run next; the smallest one runs."""

  start: int
  priority: int
  stage: int
  task: Task


def _order_of(ready: _ReadyTask) -> tuple[int, int, int]:
  return ready[:3]


class _GreedyRank:
  """The state of one rank during the simulation."""

  def __init__(self, rank: int, stage_ranks: Sequence[int], microbatches: int, live: int, split: bool):
    self._kinds = KINDS if split else KINDS[:2]
    self._own = [stage for stage, other in enumerate(stage_ranks) if other == rank]
    self._stages, self._microbatches, self._room = len(stage_ranks), microbatches, live
    self._next: collections.Counter[tuple[str, int]] = collections.Counter()
    self._free = 0
    self.order: list[Task] = []

  def best(self, ended: dict[Task, int]) -> _ReadyTask | None:
    """The task to run next, if any is ready."""
    tasks = [Task(kind, stage, self._next[kind, stage]) for kind in self._kinds for stage in self._own]
    return min(
      (ready for task in tasks if (ready := self._if_ready(task, ended))), key=_order_of, default=None
    )

  def run(self, chosen: _ReadyTask) -> None:
    task = chosen.task
    self.order.append(task)
    self._next[task.kind, task.stage] += 1
    self._free = chosen.start + 1
    self._room += (task.kind == self._kinds[-1]) - (task.kind == 'fwd')

  def _if_ready(self, task: Task, ended: dict[Task, int]) -> _ReadyTask | None:
    needed = inputs(task, self._stages)
    if task.microbatch == self._microbatches or not all(one in ended for one in needed):
      return None
    if task.kind == 'fwd' and not self._room:
      return None
    start = max(self._free, *(ended[one] for one in needed), 0)
    stage = -task.stage if task.kind == 'fwd' else task.stage
    return _ReadyTask(start, _PRIORITY[task.kind], stage, task)
