"""Validation: a proof that a schedule runs every task once, in a possible order, within memory.

A rank runs its list from the first to the last and waits before a task until what it needs is there. So
a list is right if it has the right tasks, has them after what they need, and if the lists of all ranks
together can be walked to their ends; where they cannot, ranks wait for one another in a circle.

How many activations are alive follows from a list alone: a forward leaves one behind, and the backward,
or the gradients of weights where these are split off, is the last to use it.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from flax_spmd._src.pipeline.schedules.tasks import Kind, Order, Step, Task, inputs, needs
from flax_spmd._src.public_module import set_module
from flax_spmd.errors import PipelineError, Problem, problems_text

_SHOWN = 4  # of problems of one kind; of more, a number
_BESIDE = 2  # tasks shown on either side of the one that is pointed at


@set_module('flax_spmd.pipeline')
class Proof(NamedTuple):
  """What was proven of a schedule.

  Attributes:
    order: every task, in one order in which all ranks together can run them.
    peaks: per rank, the most activations that are alive at once, each of one stage and one microbatch.

  Example:
    >>> from flax_spmd.pipeline import OneFOneB
    >>> OneFOneB(ranks=4).validate(8).peaks
    (4, 3, 2, 1)
  """

  order: Order
  peaks: tuple[int, ...]


class Lists(NamedTuple):
  """A schedule for one number of microbatches, as data.

  Attributes:
    title: what errors and pictures call it.
    orders: what each rank runs.
    owners: per stage, the rank that it is on.
    microbatches: how many.
  """

  title: str
  orders: tuple[Order, ...]
  owners: tuple[int, ...]
  microbatches: int

  @property
  def kinds(self) -> tuple[Kind, ...]:
    """Those of tasks; with 'wgrad' where the backward is split anywhere."""
    split = any(task.kind == 'wgrad' for order in self.orders for step in order for task in step.tasks)
    return ('fwd', 'bwd', 'wgrad') if split else ('fwd', 'bwd')


def validate(lists: Lists, live: int | None = None) -> Proof:
  """Proves a schedule right.

  Args:
    lists: the schedule.
    live: how many activations a rank may keep at once, or None for any number.

  Raises:
    PipelineError: it is wrong. The text names the tasks, and shows them where they stand.

  Example:
    >>> forward, backward = Task('fwd', 0, 0), Task('bwd', 0, 0)
    >>> validate(Lists('mine', ((forward, backward),), owners=(0,), microbatches=1)).peaks
    (1,)
  """
  problems = _few([*_membership(lists), *_precedence(lists)])
  order, waiting = ([], {}) if problems else _walk(lists)
  if waiting:
    problems = [_deadlock(lists, waiting)]
  if problems:
    raise PipelineError(f'{lists.title} is not a legal schedule.\n{problems_text(problems)}')
  proof = Proof(tuple(order), tuple(max(alive, default=0) for alive in _alive(lists)))
  if live is not None and max(proof.peaks) > live:
    raise PipelineError(f'{lists.title} keeps too much.\n{problems_text(_memory(lists, live))}')
  return proof


def point_at(rank: int, words: Sequence[str], at: int) -> str:
  """A task between its neighbours, underlined.

  Example:
    >>> print(point_at(1, ['fwd_1__0', 'bwd_1__0', 'bwd_1__0', 'fwd_1__1', 'bwd_1__1'], 1))
      rank 1: fwd_1__0 bwd_1__0 bwd_1__0 fwd_1__1 …
                       ^^^^^^^^
  """
  start, stop = max(0, at - _BESIDE), at + 1 + _BESIDE
  before = f'  rank {rank}: ' + ' '.join([*['…'][: start > 0], *words[start:at], ''])
  after = ' '.join(['', *words[at + 1 : stop], *['…'][: stop < len(words)]])
  return f'{before}{words[at]}{after}\n{" " * len(before)}{"^" * len(words[at])}'


class _Place(NamedTuple):
  """A task where it stands."""

  rank: int
  at: int
  task: Task
  order: Order

  def problem(self, text: str, fix: str) -> Problem:
    shown = point_at(self.rank, [str(step) for step in self.order], self.at)
    return Problem(f'rank {self.rank}, task {self.at}: {self.task} {text}\n{shown}', fix, PipelineError)


def _places(lists: Lists) -> list[list[_Place]]:
  """Per rank, where every task stands."""
  return [
    [_Place(rank, at, task, order) for at, step in enumerate(order) for task in step.tasks]
    for rank, order in enumerate(lists.orders)
  ]


# The right tasks, on the right ranks.


def _membership(lists: Lists) -> Iterator[Problem]:
  first: dict[Task, _Place] = {}
  for place in itertools.chain.from_iterable(_places(lists)):
    stages, microbatches = len(lists.owners), lists.microbatches
    if place.task.stage >= stages:
      yield place.problem(
        f'is of a stage that is not there: there are {stages}.', 'count stages from 0.'
      )
    elif place.task.microbatch >= microbatches:
      text = f'is of a microbatch that is not there: there are {microbatches}.'
      yield place.problem(text, 'count microbatches from 0.')
    elif place.rank != lists.owners[place.task.stage]:
      text = (
        f'is on the wrong rank: stage {place.task.stage} is on rank {lists.owners[place.task.stage]}.'
      )
      yield place.problem(text, 'list a task on the rank that its stage is on.')
    elif place.task in first:
      text = f'is a duplicate of task {first[place.task].at}.'
      yield place.problem(text, 'list every task once.')
    first.setdefault(place.task, place)
  yield from _missing(lists, first)


def _missing(lists: Lists, there: Mapping[Task, _Place]) -> Iterator[Problem]:
  kinds = lists.kinds
  for rank in range(len(lists.orders)):
    stages = [stage for stage, owner in enumerate(lists.owners) if owner == rank]
    wanted = (Task(k, s, i) for k in kinds for s in stages for i in range(lists.microbatches))
    missing = [str(task) for task in wanted if task not in there]
    if missing:
      more = f', … {len(missing) - 2 * _SHOWN} more' if len(missing) > 2 * _SHOWN else ''
      text = f'rank {rank} misses {", ".join(missing[: 2 * _SHOWN])}{more}.'
      work = f'{" and ".join(kinds)} of every stage'
      fix = f'run {work} for each of the {lists.microbatches} microbatches, once.'
      yield Problem(text, fix, PipelineError)


def _precedence(lists: Lists) -> Iterator[Problem]:
  """Tasks that stand before something of the same rank that they need."""
  for places in _places(lists):
    last = {place.task: number for number, place in reversed(list(enumerate(places)))}
    for number, place in enumerate(places):
      for needed in inputs(place.task, len(lists.owners)):
        if last.get(needed, -1) > number:
          at = places[last[needed]].at
          text = f'comes before {needed} (task {at}), whose result it needs.'
          yield place.problem(text, 'put the forward of a microbatch first, then bwd, then wgrad.')


def _few(problems: Sequence[Problem]) -> list[Problem]:
  """Some of every kind, and how many more there are."""
  groups: dict[str, list[Problem]] = collections.defaultdict(list)
  for problem in problems:
    groups[problem.fix].append(problem)
  few = []
  for fix, group in groups.items():
    few += group[:_SHOWN]
    if len(group) > _SHOWN:
      few.append(Problem(f'… and {len(group) - _SHOWN} more of these.', fix, PipelineError))
  return few


# All ranks at once.


def _walk(lists: Lists) -> tuple[list[Step], dict[int, int]]:
  """The steps that can be run, in order, and per rank that cannot go on, the place where it waits."""
  stages, done, order = len(lists.owners), set(), []
  at = [0] * len(lists.orders)
  asleep: dict[Task, int] = {}  # a rank that waits, under the task that it waits for
  awake = list(range(len(at)))[::-1]
  while awake:
    rank = awake.pop()
    while at[rank] < len(lists.orders[rank]):
      step = lists.orders[rank][at[rank]]
      lacking = next((task for task in outside(step, stages) if task not in done), None)
      if lacking:
        asleep[lacking] = rank
        break
      order.append(step)
      done.update(step.tasks)
      at[rank] += 1
      awake += [asleep.pop(task) for task in step.tasks if task in asleep]
  return order, {rank: at[rank] for rank in range(len(at)) if at[rank] < len(lists.orders[rank])}


def outside(step: Step, stages: int) -> list[Task]:
  """What a step needs that is not made within it."""
  within = set(step.tasks)
  return [one for task in step.tasks for one in inputs(task, stages) if one not in within]


def _deadlock(lists: Lists, waiting: Mapping[int, int]) -> Problem:
  """Who waits for whom; the fix moves one task of the circle that may be moved."""
  stages, owners = len(lists.owners), lists.owners
  done = {
    task
    for rank, order in enumerate(lists.orders)
    for step in order[: waiting.get(rank)]
    for task in step.tasks
  }
  lines, lacking = [], {}
  for rank, at in waiting.items():
    lacking[rank] = next(task for task in outside(lists.orders[rank][at], stages) if task not in done)
    of = owners[lacking[rank].stage]
    lines.append(
      f'rank {rank}, task {at}: {lists.orders[rank][at]} waits for {lacking[rank]} of rank {of}:'
    )
    lines.append(point_at(rank, [str(step) for step in lists.orders[rank]], at))
  return Problem(
    '\n'.join(['It deadlocks; waiting:', *lines]), _way_out(lists, waiting, lacking), PipelineError
  )


def _way_out(lists: Lists, waiting: Mapping[int, int], lacking: Mapping[int, Task]) -> str:
  for rank in _circle(lists, lacking):
    wanted = lacking[rank]
    owner = lists.owners[wanted.stage]
    head = lists.orders[owner][waiting[owner]]
    rest = lists.orders[owner][waiting[owner] :]
    at = next(at for at, step in enumerate(rest) if wanted in step.tasks)
    if at and not _needs(rest[at], head, len(lists.owners)):
      others = (
        ' and what it needs'
        if any(_needs(rest[at], one, len(lists.owners)) for one in rest[:at])
        else ''
      )
      return f'on rank {owner}, put {rest[at]}{others} before {head}.'
  return 'take the fused tasks apart: their tasks wait for one another through other ranks.'


def _needs(step: Step, other: Step, stages: int) -> bool:
  return any(needs(one, two, stages) for one in step.tasks for two in other.tasks)


def _circle(lists: Lists, lacking: Mapping[int, Task]) -> list[int]:
  """Ranks that wait for one another, each for the next."""
  seen: list[int] = []
  rank = next(iter(lacking))
  while rank not in seen:
    seen.append(rank)
    rank = lists.owners[lacking[rank].stage]
  return seen[seen.index(rank) :]


# Memory.


def _alive(lists: Lists) -> Iterator[list[int]]:
  """Per rank, how many activations there are at its tasks, what they take in included."""
  ends = lists.kinds[-1]
  for order in lists.orders:
    alive, counts = 0, []
    for step in order:
      for task in step.tasks:
        alive += task.kind == 'fwd'
        counts.append(alive)
        alive -= task.kind == ends
    yield counts


def _memory(lists: Lists, live: int) -> Iterable[Problem]:
  for places, counts in zip(_places(lists), _alive(lists)):
    if max(counts, default=0) > live:
      place = places[next(i for i, count in enumerate(counts) if count > live)]
      text = (
        f'makes {live + 1} activations live where {live} may be; the most on this rank is {max(counts)}.'
      )
      yield place.problem(text, f'put a {lists.kinds[-1]} before it, or allow {max(counts)}.')
