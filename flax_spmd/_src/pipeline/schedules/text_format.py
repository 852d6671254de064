"""Text format: a schedule for one number of microbatches as text, one line per rank.

    rank 0: fwd_0__0 fwd_0__1 bwd_0__0 bwd_0__1
    rank 1: FusedTask(fwd_1__0, bwd_1__0) FusedTask(fwd_1__1, bwd_1__1)   # `#` begins a comment

`Schedule.to_text` is the inverse, except for comments and spaces.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator, Sequence

from flax_spmd._src.pipeline.schedules.tasks import FusedTask, Order, Step, Task, parse
from flax_spmd._src.pipeline.schedules.validation import point_at
from flax_spmd.errors import PipelineError, Problem, raise_problems

_LINE = re.compile(r'rank (\d+):(.*)')
_WORD = re.compile(r'FusedTask\([^()]*\)|[^\s,]+')
_FIX = 'Fix: write a line for every rank in order, such as "rank 0: fwd_0__0 bwd_0__0".'


def read(text: str) -> tuple[tuple[Order, ...], tuple[int, ...]]:
  """The tasks of each rank in a text, and the rank of each stage; see `Schedule.from_text`."""
  lines = list(filter(None, (line.partition('#')[0].strip() for line in text.splitlines())))
  orders: list[Order] = []
  problems: list[Problem] = []
  for rank, line in enumerate(lines):
    match = _LINE.fullmatch(line)
    if not match or int(match[1]) != rank:
      raise PipelineError(f'Line {line[:60]!r} does not begin with "rank {rank}:".\n{_FIX}')
    orders.append(tuple(_steps(rank, _WORD.findall(match[2]), problems)))
  raise_problems(problems)
  if not any(orders):
    raise PipelineError(f'The text has no tasks.\n{_FIX}')
  return tuple(orders), _stage_ranks(orders)


def steps_of(rank: int, items: Sequence[Step | str]) -> list[Step]:
  """Tasks from tasks or their texts; raises PipelineError with every item that is neither, underlined."""
  problems: list[Problem] = []
  steps = list(_steps(rank, items, problems))
  raise_problems(problems)
  return steps


def _steps(rank: int, items: Sequence[Step | str], problems: list[Problem]) -> Iterator[Step]:
  for at, item in enumerate(items):
    try:
      yield item if isinstance(item, Task | FusedTask) else parse(str(item))
    except PipelineError as error:
      text, _, fix = str(error).partition('\nFix: ')
      shown = point_at(rank, [str(step) for step in items], at)
      problems.append(Problem(f'rank {rank}, task {at}: {text}\n{shown}', fix, PipelineError))


def _stage_ranks(orders: Sequence[Order]) -> tuple[int, ...]:
  counts: dict[int, collections.Counter[int]] = collections.defaultdict(collections.Counter)
  for rank, order in enumerate(orders):
    for step in order:
      for task in step.tasks:
        counts[task.stage][rank] += 1
  missing = sorted(set(range(max(counts))) - set(counts))
  if missing:
    raise PipelineError(
      f'The text has tasks of stage {max(counts)}, but none of stage {missing[0]}.\n'
      'Fix: write the tasks of every stage; stages count from 0.'
    )
  return tuple(counts[stage].most_common(1)[0][0] for stage in sorted(counts))
