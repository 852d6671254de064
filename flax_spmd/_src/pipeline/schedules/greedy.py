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

from flax_spmd._src.pipeline.schedules.simulation import Costs, check_time, cost_function, stage_costs
from flax_spmd._src.pipeline.schedules.stage_ranks import check_positive
from flax_spmd._src.pipeline.schedules.tasks import KINDS, Order, Task, inputs
from flax_spmd._src.public import public
from flax_spmd.errors import PipelineError

_PRIORITY = {'bwd': 0, 'fwd': 1, 'wgrad': 2}


@public('flax_spmd.pipeline')
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
  kinds = KINDS if split else KINDS[:2]
  cost = cost_function(costs if callable(costs) else dict(costs), len(stage_ranks), kinds)
  ranks = range(max(stage_ranks) + 1)
  own = [[stage for stage, other in enumerate(stage_ranks) if other == rank] for rank in ranks]
  near = [{rank} for rank in ranks]  # with stages before or after those of a rank
  for one, other in itertools.pairwise(stage_ranks):
    near[one].add(other)
    near[other].add(one)
  orders: list[list[Task]] = [[] for _ in ranks]
  free: list[float] = [0] * len(ranks)
  room = [live] * len(ranks)
  begun: collections.Counter[tuple[str, int]] = collections.Counter()
  ended: dict[Task, float] = {}

  def reserved(task: Task, rank: int) -> int:
    """The live activations that the oldest microbatch still adds to a rank, if a forward is of a younger one.

    Without them, younger microbatches could take all memory, and the oldest, whose backwards free it, would wait.
    """
    done = [begun['fwd', stage] for stage in own[rank]]
    return done.count(min(done)) if reserve and task.microbatch > min(done) else 0

  def if_ready(task: Task, rank: int) -> _ReadyTask | None:
    needed = inputs(task, len(stage_ranks))
    if task.microbatch == microbatches or not all(one in ended for one in needed):
      return None
    if task.kind == 'fwd' and room[rank] <= reserved(task, rank):
      return None
    arrivals = (ended[one] + transfer * (stage_ranks[one.stage] != rank) for one in needed)
    stage = -task.stage if task.kind == 'fwd' else task.stage
    return _ReadyTask(max(free[rank], *arrivals, 0), _PRIORITY[task.kind], stage, task)

  def best(rank: int) -> _ReadyTask | None:
    """The task that a rank runs next, if any is ready."""
    tasks = [Task(kind, stage, begun[kind, stage]) for kind in kinds for stage in own[rank]]
    return min((ready for task in tasks if (ready := if_ready(task, rank))), default=None)

  next_of = list(map(best, ranks))
  while chosen := min(filter(None, next_of), default=None):
    task, rank = chosen.task, stage_ranks[chosen.task.stage]
    ended[task] = free[rank] = chosen.start + cost(task)
    orders[rank].append(task)
    begun[task.kind, task.stage] += 1
    room[rank] += (task.kind == kinds[-1]) - (task.kind == 'fwd')
    for neighbour in near[rank]:  # only these can have a new task
      next_of[neighbour] = best(neighbour)
  return tuple(map(tuple, orders))


class _ReadyTask(NamedTuple):
  """A task that a rank could run next; the smallest one runs. No two have the same priority and stage."""

  start: float
  priority: int
  stage: int
  task: Task
