"""Greedy scheduling: a schedule derived by simulation, where no closed form is known.

Time advances, and a free rank takes the task that can start first. Ties are broken by kind (backward,
forward, weight gradient), then by stage: the forward nearest to the loss, the backward nearest to the
input. A forward also waits for memory: the number of live activations on a rank is limited.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from typing import NamedTuple

from flax_spmd._src.pipeline.schedules.tasks import KINDS, Order, Task, inputs

_PRIORITY = {'bwd': 0, 'fwd': 1, 'wgrad': 2}


@functools.lru_cache(maxsize=16)
def greedy(stage_ranks: tuple[int, ...], microbatches: int, live: int) -> tuple[Order, ...]:
  """The tasks of every rank, for equal task times and instant transfers.

  Args:
    stage_ranks: per stage, its rank; successive stages have the same rank or neighbouring ones.
    microbatches: number of microbatches.
    live: largest number of live activations per rank, each of one stage and one microbatch. As many as
      there are stages avoid a deadlock: once rank 0 has run that many forwards, the first has returned.

  Example:
    >>> [str(task) for task in greedy((0, 0), 1, 2)[0]]
    ['fwd_0__0', 'fwd_1__0', 'bwd_1__0', 'bwd_0__0', 'wgrad_0__0', 'wgrad_1__0']
  """
  ranks = [_GreedyRank(rank, stage_ranks, microbatches, live) for rank in sorted(set(stage_ranks))]
  ended: dict[Task, int] = {}
  ready = [rank.best(ended) for rank in ranks]
  while chosen := min(filter(None, ready), key=_order_of, default=None):
    ended[chosen.task] = chosen.start + 1
    at = stage_ranks[chosen.task.stage]
    ranks[at].run(chosen)
    for neighbour in range(max(0, at - 1), min(len(ranks), at + 2)):  # only these can have a new task
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

  def __init__(self, rank: int, stage_ranks: Sequence[int], microbatches: int, live: int):
    self._own = [stage for stage, other in enumerate(stage_ranks) if other == rank]
    self._stages, self._microbatches, self._room = len(stage_ranks), microbatches, live
    self._next: collections.Counter[tuple[str, int]] = collections.Counter()
    self._free = 0
    self.order: list[Task] = []

  def best(self, ended: dict[Task, int]) -> _ReadyTask | None:
    """The task to run next, if any is ready."""
    tasks = [Task(kind, stage, self._next[kind, stage]) for kind in KINDS for stage in self._own]
    return min(
      (ready for task in tasks if (ready := self._if_ready(task, ended))), key=_order_of, default=None
    )

  def run(self, chosen: _ReadyTask) -> None:
    task = chosen.task
    self.order.append(task)
    self._next[task.kind, task.stage] += 1
    self._free = chosen.start + 1
    self._room += (task.kind == 'wgrad') - (task.kind == 'fwd')

  def _if_ready(self, task: Task, ended: dict[Task, int]) -> _ReadyTask | None:
    needed = inputs(task, self._stages)
    if task.microbatch == self._microbatches or not all(one in ended for one in needed):
      return None
    if task.kind == 'fwd' and not self._room:
      return None
    start = max(self._free, *(ended[one] for one in needed), 0)
    stage = -task.stage if task.kind == 'fwd' else task.stage
    return _ReadyTask(start, _PRIORITY[task.kind], stage, task)
