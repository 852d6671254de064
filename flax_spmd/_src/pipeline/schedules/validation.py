"""Validation: a proof that a schedule is complete, free of deadlocks, and within memory.

A rank runs its list in order and blocks before a task until its inputs have arrived. So a schedule is
legal if every list has the right tasks, has them after their inputs, and if all lists can be walked
together to their ends. Where they cannot, ranks wait for one another in a cycle.

The number of live activations follows from a list alone: a forward creates one; the backward, or the
weight gradient where the backward is split, is its last use.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from flax_spmd._src.pipeline.schedules.tasks import Kind, Order, Step, Task, depends_on, inputs
from flax_spmd._src.public import public
from flax_spmd._src.text import plural
from flax_spmd.errors import PipelineError, Problem, problems_text

Waits: TypeAlias = Mapping[tuple[Kind, int], Collection[tuple[Kind, int]]]

_SHOWN = 4  # problems of one kind in a message; the others are counted
_CONTEXT = 2  # tasks shown on either side of the underlined one


@public('flax_spmd.pipeline')
class ScheduleReport(NamedTuple):
  """The result of validating a schedule.

  Attributes:
    order: every task, in an order in which all ranks together can run them.
    peaks: per rank, the largest number of live activations, each of one stage and one microbatch.

  Example:
    >>> from flax_spmd.pipeline import OneFOneB
    >>> OneFOneB(ranks=4).validate(8).peaks
    (4, 3, 2, 1)
  """

  order: Order
  peaks: tuple[int, ...]


class TaskLists(NamedTuple):
  """A schedule for one number of microbatches, as data.

  Attributes:
    title: name of the schedule in errors and timelines.
    orders: per rank, its tasks in order.
    stage_ranks: per stage, its rank.
    microbatches: number of microbatches.
    waits: for the kind and stage of a task, those of the tasks of the microbatch before that it waits for, too.
  """

  title: str
  orders: tuple[Order, ...]
  stage_ranks: tuple[int, ...]
  microbatches: int
  waits: Waits = MappingProxyType({})

  @property
  def stages(self) -> int:
    """The number of stages."""
    return len(self.stage_ranks)

  @property
  def kinds(self) -> tuple[Kind, ...]:
    """The kinds of tasks; 'wgrad' is among them if any backward is split."""
    split = any(task.kind == 'wgrad' for order in self.orders for step in order for task in step.tasks)
    return ('fwd', 'bwd', 'wgrad') if split else ('fwd', 'bwd')


def validate(lists: TaskLists, live: int | None = None) -> ScheduleReport:
  """Proves that a schedule is legal; see `Schedule.validate`.

  Raises:
    PipelineError: the schedule is illegal. The message underlines each wrong task in its list.
  """
  problems = _first_of_each_kind([*_membership(lists), *_precedence(lists)])
  order, blocked = ([], {}) if problems else walk(lists)
  if blocked:
    problems = [_deadlock(lists, order, blocked)]
  if problems:
    raise PipelineError(f'{lists.title} is not a legal schedule.\n{problems_text(problems)}')
  peaks = tuple(max(counts, default=0) for counts in _live_counts(lists))
  if live is not None and max(peaks) > live:
    raise PipelineError(
      f'{lists.title} keeps more than {plural(live, "activation")} live.\n'
      f'{problems_text(_excess(lists, live))}'
    )
  return ScheduleReport(tuple(order), peaks)


def point_at(rank: int, texts: Sequence[str], at: int) -> str:
  """A task between its neighbours, underlined.

  Example:
    >>> print(point_at(1, ['fwd_1__0', 'bwd_1__0', 'bwd_1__0', 'fwd_1__1', 'bwd_1__1'], 1))
      rank 1: fwd_1__0 bwd_1__0 bwd_1__0 fwd_1__1 …
                       ^^^^^^^^
  """
  start, stop = max(0, at - _CONTEXT), at + 1 + _CONTEXT
  before = f'  rank {rank}: ' + ' '.join([*['…'][: start > 0], *texts[start:at], ''])
  after = ' '.join(['', *texts[at + 1 : stop], *['…'][: stop < len(texts)]])
  return f'{before}{texts[at]}{after}\n{" " * len(before)}{"^" * len(texts[at])}'


class _TaskPosition(NamedTuple):
  """A task and its position in the list of a rank."""

  rank: int
  at: int
  task: Task
  order: Order

  def problem(self, text: str, fix: str) -> Problem:
    shown = point_at(self.rank, [str(step) for step in self.order], self.at)
    return Problem(f'rank {self.rank}, task {self.at}: {self.task} {text}\n{shown}', fix, PipelineError)


def _positions(lists: TaskLists) -> list[list[_TaskPosition]]:
  """Per rank, the positions of all its tasks."""
  return [
    [_TaskPosition(rank, at, task, order) for at, step in enumerate(order) for task in step.tasks]
    for rank, order in enumerate(lists.orders)
  ]


# The right tasks, on the right ranks.


def _membership(lists: TaskLists) -> Iterator[Problem]:
  first: dict[Task, _TaskPosition] = {}
  for position in itertools.chain.from_iterable(_positions(lists)):
    task = position.task
    if task.stage >= lists.stages:
      text = f'is out of range: the schedule has {plural(lists.stages, "stage")}.'
      yield position.problem(text, 'count stages from 0.')
    elif task.microbatch >= lists.microbatches:
      text = f'is out of range: there are {lists.microbatches} microbatches.'
      yield position.problem(text, 'count microbatches from 0.')
    elif position.rank != lists.stage_ranks[task.stage]:
      text = f'is on the wrong rank: stage {task.stage} is on rank {lists.stage_ranks[task.stage]}.'
      yield position.problem(text, 'list each task on the rank of its stage.')
    elif task in first:
      text = f'is a duplicate of task {first[task].at}.'
      yield position.problem(text, 'list every task once.')
    first.setdefault(task, position)
  yield from _missing(lists, first)


def _missing(lists: TaskLists, listed: Mapping[Task, _TaskPosition]) -> Iterator[Problem]:
  kinds = lists.kinds
  for rank in range(len(lists.orders)):
    stages = [stage for stage, other in enumerate(lists.stage_ranks) if other == rank]
    required = (Task(k, s, i) for k in kinds for s in stages for i in range(lists.microbatches))
    missing = [str(task) for task in required if task not in listed]
    if missing:
      more = f', … {len(missing) - 2 * _SHOWN} more' if len(missing) > 2 * _SHOWN else ''
      text = f'rank {rank} is missing {", ".join(missing[: 2 * _SHOWN])}{more}.'
      work = f'{", ".join(kinds[:-1])} and {kinds[-1]} of every stage'
      fix = f'run {work} once for each of the {lists.microbatches} microbatches.'
      yield Problem(text, fix, PipelineError)


def _precedence(lists: TaskLists) -> Iterator[Problem]:
  """Tasks that come before one of their inputs on the same rank."""
  for positions in _positions(lists):
    last = {position.task: number for number, position in reversed(list(enumerate(positions)))}
    for number, position in enumerate(positions):
      for needed in inputs(position.task, lists.stages):
        if last.get(needed, -1) > number:
          at = positions[last[needed]].at
          text = f'comes before {needed} (task {at}), whose result it needs.'
          yield position.problem(text, 'put the forward of a microbatch first, then bwd, then wgrad.')


def _first_of_each_kind(problems: Sequence[Problem]) -> list[Problem]:
  """The first problems of each kind, and the number of the others."""
  groups: dict[str, list[Problem]] = collections.defaultdict(list)
  for problem in problems:
    groups[problem.fix].append(problem)
  shown = []
  for fix, group in groups.items():
    shown += group[:_SHOWN]
    if len(group) > _SHOWN:
      shown.append(Problem(f'… and {len(group) - _SHOWN} more of these.', fix, PipelineError))
  return shown


# All ranks together.


def walk(lists: TaskLists) -> tuple[list[Step], dict[int, int]]:
  """The steps that can run, in order; and, per blocked rank, the position at which it blocks."""
  done, order = set(), []
  at = [0] * len(lists.orders)
  blocked: dict[Task, list[int]] = collections.defaultdict(list)  # per task, the ranks that wait for it
  ready = list(range(len(at)))[::-1]
  while ready:
    rank = ready.pop()
    while at[rank] < len(lists.orders[rank]):
      step = lists.orders[rank][at[rank]]
      missing = next((task for task in external_inputs(step, lists) if task not in done), None)
      if missing:
        blocked[missing].append(rank)
        break
      order.append(step)
      done.update(step.tasks)
      at[rank] += 1
      ready += [waiting for task in step.tasks for waiting in blocked.pop(task, ())]
  return order, {rank: at[rank] for rank in range(len(at)) if at[rank] < len(lists.orders[rank])}


def external_inputs(step: Step, lists: TaskLists) -> list[Task]:
  """The inputs of a step's tasks that the step does not compute itself."""
  within = set(step.tasks)
  own = [one for task in step.tasks for one in inputs(task, lists.stages) if one not in within]
  for number, task in enumerate(step.tasks if lists.waits else ()):
    before = (Task(*key, task.microbatch - 1) for key in lists.waits.get((task.kind, task.stage), ()))
    own += [one for one in before if one not in step.tasks[:number]] if task.microbatch else []
  return own


def _deadlock(lists: TaskLists, walked: Sequence[Step], blocked: Mapping[int, int]) -> Problem:
  """The tasks at which ranks block; the fix moves a task of the cycle."""
  done = {task for step in walked for task in step.tasks}
  lines, missing = [], {}
  for rank, at in blocked.items():
    order = lists.orders[rank]
    missing[rank] = next(task for task in external_inputs(order[at], lists) if task not in done)
    other = lists.stage_ranks[missing[rank].stage]
    lines.append(f'rank {rank}, task {at}: {order[at]} waits for {missing[rank]} of rank {other}:')
    lines.append(point_at(rank, [str(step) for step in order], at))
  text = '\n'.join(['It deadlocks. Blocked ranks:', *lines])
  return Problem(text, _deadlock_fix(lists, blocked, missing), PipelineError)


def _deadlock_fix(lists: TaskLists, blocked: Mapping[int, int], missing: Mapping[int, Task]) -> str:
  for rank in _cycle(lists, missing):
    task = missing[rank]
    other = lists.stage_ranks[task.stage]
    rest = lists.orders[other][blocked[other] :]
    head = rest[0]
    at = next(at for at, step in enumerate(rest) if task in step.tasks)
    if at and not _depends(rest[at], head, lists.stages):
      with_inputs = any(_depends(rest[at], one, lists.stages) for one in rest[:at])
      also = ' and its inputs' if with_inputs else ''
      return f'on rank {other}, put {rest[at]}{also} before {head}.'
  return 'split the fused tasks: their parts wait for one another through other ranks.'


def _depends(step: Step, other: Step, stages: int) -> bool:
  return any(depends_on(one, two, stages) for one in step.tasks for two in other.tasks)


def _cycle(lists: TaskLists, missing: Mapping[int, Task]) -> list[int]:
  """Ranks of which each waits for the next, and the last for the first."""
  seen: list[int] = []
  rank = next(iter(missing))
  while rank not in seen:
    seen.append(rank)
    rank = lists.stage_ranks[missing[rank].stage]
  return seen[seen.index(rank) :]


# Memory.


def _live_counts(lists: TaskLists) -> Iterator[list[int]]:
  """Per rank, the number of live activations during each of its tasks."""
  last_use = lists.kinds[-1]
  for order in lists.orders:
    live, counts = 0, []
    for step in order:
      for task in step.tasks:
        live += task.kind == 'fwd'
        counts.append(live)
        live -= task.kind == last_use
    yield counts


def _excess(lists: TaskLists, live: int) -> Iterable[Problem]:
  """Per rank, the first task that exceeds the limit."""
  for positions, counts in zip(_positions(lists), _live_counts(lists)):
    if max(counts, default=0) > live:
      position = positions[next(i for i, count in enumerate(counts) if count > live)]
      text = f'makes {live + 1} activations live; the peak of this rank is {max(counts)}.'
      yield position.problem(text, f'put a {lists.kinds[-1]} before it, or pass live={max(counts)}.')
