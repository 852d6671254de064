"""Greedy: a schedule that is found by running it, where no closed form is known.

Time goes forward, and a rank that is free takes what can start first; at equal times a backward before
a forward before the gradients of weights, of forwards the one nearest to the loss, and of backwards the
one nearest to the input. A forward has to find room: only so many activations may be alive on a rank.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from typing import NamedTuple

from flax_spmd._src.pipeline.schedules.tasks import KINDS, Order, Task, inputs

_FIRST = {'bwd': 0, 'fwd': 1, 'wgrad': 2}


@functools.lru_cache(maxsize=16)
def greedy(owners: tuple[int, ...], microbatches: int, live: int) -> tuple[Order, ...]:
  """Per rank its tasks, for tasks that take equal times and transfers that take none.

  Args:
    owners: per stage, the rank that it is on; stages that follow one another are on one rank or on ranks
      that are neighbours.
    microbatches: how many.
    live: how many activations of one stage and one microbatch a rank keeps at most. As many as there are
      stages are enough never to get stuck: when rank 0 has run as many forwards, the first is back.

  Example:
    >>> [str(task) for task in greedy((0, 0), 1, 2)[0]]
    ['fwd_0__0', 'fwd_1__0', 'bwd_1__0', 'bwd_0__0', 'wgrad_0__0', 'wgrad_1__0']
  """
  ranks = [_Rank(rank, owners, microbatches, live) for rank in sorted(set(owners))]
  ended: dict[Task, int] = {}
  offers = [rank.offer(ended) for rank in ranks]
  while offer := min(filter(None, offers), key=_order_of, default=None):
    ended[offer.task] = offer.start + 1
    at = owners[offer.task.stage]
    ranks[at].take(offer)
    for near in range(max(0, at - 1), min(len(ranks), at + 2)):  # only they can have gained a task
      offers[near] = ranks[near].offer(ended)
  return tuple(tuple(rank.order) for rank in ranks)


class _Offer(NamedTuple):
  """A task that a rank could run next; the least is the best."""

  start: int
  first: int
  stage: int
  task: Task


def _order_of(offer: _Offer) -> tuple[int, int, int]:
  return offer[:3]


class _Rank:
  """A rank on its way through its tasks."""

  def __init__(self, rank: int, owners: Sequence[int], microbatches: int, live: int):
    self._own = [stage for stage, owner in enumerate(owners) if owner == rank]
    self._stages, self._microbatches, self._room = len(owners), microbatches, live
    self._next: collections.Counter[tuple[str, int]] = collections.Counter()
    self._free = 0
    self.order: list[Task] = []

  def offer(self, ended: dict[Task, int]) -> _Offer | None:
    """The best that it could run next, if there is anything."""
    tasks = [Task(kind, stage, self._next[kind, stage]) for kind in KINDS for stage in self._own]
    return min(
      (offer for task in tasks if (offer := self._if_ready(task, ended))), key=_order_of, default=None
    )

  def take(self, offer: _Offer) -> None:
    """Runs it."""
    task = offer.task
    self.order.append(task)
    self._next[task.kind, task.stage] += 1
    self._free = offer.start + 1
    self._room += (task.kind == 'wgrad') - (task.kind == 'fwd')

  def _if_ready(self, task: Task, ended: dict[Task, int]) -> _Offer | None:
    needed = inputs(task, self._stages)
    if task.microbatch == self._microbatches or not all(one in ended for one in needed):
      return None
    if task.kind == 'fwd' and not self._room:
      return None
    start = max(self._free, *(ended[one] for one in needed), 0)
    return _Offer(start, _FIRST[task.kind], -task.stage if task.kind == 'fwd' else task.stage, task)
