"""Writing: a schedule for one number of microbatches as text, a line per rank, and back.

    rank 0: fwd_0__0 fwd_0__1 bwd_0__0 bwd_0__1
    rank 1: FusedTask(fwd_1__0, bwd_1__0) FusedTask(fwd_1__1, bwd_1__1)   # `#` begins a comment

Text → tasks → text is the identity, but for comments and spaces.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flax_spmd._src.pipeline.schedules.tasks import FusedTask, Order, Step, Task, parse, words
from flax_spmd._src.pipeline.schedules.validation import point_at
from flax_spmd.errors import PipelineError, Problem, problems_text

_LINE = re.compile(r'rank (\d+):(.*)')


class Read(NamedTuple):
  """What a text says: what each rank runs, and per stage the rank that it is on."""

  orders: tuple[Order, ...]
  owners: tuple[int, ...]
  microbatches: int


def write(orders: Sequence[Order]) -> str:
  """A line for every rank.

  Example:
    >>> print(write(read('rank 0: fwd_0__0, bwd_0__0').orders))
    rank 0: fwd_0__0 bwd_0__0
  """
  return '\n'.join(' '.join([f'rank {rank}:', *map(str, order)]) for rank, order in enumerate(orders))


def read(text: str) -> Read:
  """The lists of a text, and what follows from them. A stage is on the rank that has most of its tasks.

  Raises:
    PipelineError: something in it is no task, or the ranks are not all there.

  Example:
    >>> read('rank 0: fwd_0__0 bwd_0__0').owners
    (0,)
  """
  lines = list(filter(None, (line.partition('#')[0].strip() for line in text.splitlines())))
  orders: list[Order] = []
  problems: list[Problem] = []
  for rank, line in enumerate(lines):
    found = _LINE.fullmatch(line)
    if not found or int(found[1]) != rank:
      raise PipelineError(f'Line {line[:60]!r} does not begin with "rank {rank}:".\n{_FIX}')
    orders.append(tuple(_steps(rank, words(found[2]), problems)))
  if problems:
    raise PipelineError(problems_text(problems))
  if not any(orders):
    raise PipelineError(f'The text has no task.\n{_FIX}')
  return Read(tuple(orders), _owners(orders), 1 + max(task.microbatch for _, task in _tasks(orders)))


_FIX = 'Fix: write a line for every rank in order, such as "rank 0: fwd_0__0 bwd_0__0".'


def steps_of(rank: int, given: Sequence[Step | str]) -> list[Step]:
  """Tasks from tasks or their texts.

  Raises:
    PipelineError: some of them are neither; all are shown where they stand.

  Example:
    >>> steps_of(0, ['fwd_0__0'])
    [Task(kind='fwd', stage=0, microbatch=0)]
  """
  problems: list[Problem] = []
  steps = list(_steps(rank, given, problems))
  if problems:
    raise PipelineError(problems_text(problems))
  return steps


def _steps(rank: int, given: Sequence[Step | str], problems: list[Problem]) -> Iterator[Step]:
  for at, one in enumerate(given):
    try:
      yield one if isinstance(one, Task | FusedTask) else parse(str(one))
    except PipelineError as error:
      text, _, fix = str(error).partition('\nFix: ')
      shown = point_at(rank, [str(step) for step in given], at)
      problems.append(Problem(f'rank {rank}, task {at}: {text}\n{shown}', fix, PipelineError))


def _tasks(orders: Sequence[Order]) -> Iterator[tuple[int, Task]]:
  return ((rank, task) for rank, order in enumerate(orders) for step in order for task in step.tasks)


def _owners(orders: Sequence[Order]) -> tuple[int, ...]:
  counts: dict[int, collections.Counter[int]] = collections.defaultdict(collections.Counter)
  for rank, task in _tasks(orders):
    counts[task.stage][rank] += 1
  missing = sorted(set(range(max(counts))) - set(counts))
  if missing:
    raise PipelineError(
      f'The text has no task of stage {missing[0]}, but one of stage {max(counts)}.\n'
      'Fix: write the tasks of every stage; they are counted from 0.'
    )
  return tuple(counts[stage].most_common(1)[0][0] for stage in sorted(counts))
