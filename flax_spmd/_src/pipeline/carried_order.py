"""Order of the tasks of a loop that carries values: tasks of a microbatch wait for what the one before sets.

A value that a late task sets and an early one reads lets the microbatches run almost one after the other. A warning
names such values; where ranks would wait for one another, an error does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from flax_spmd._src.pipeline.cut import task_programs
from flax_spmd._src.pipeline.cut.microbatch_loop import Loop
from flax_spmd._src.pipeline.cut.task_programs import Accumulator, TaskPrograms
from flax_spmd._src.pipeline.schedules.schedule import Schedule, timed_steps
from flax_spmd._src.pipeline.schedules.simulation import TimedStep
from flax_spmd._src.source_lines import warn
from flax_spmd._src.text import first_lines
from flax_spmd.errors import PipelineError

_SLOWER = 1.1  # times the makespan without carried values; up to this, nothing is reported


def with_waits(
  schedule: Schedule, loop: Loop, programs: TaskPrograms, free: list[TimedStep], reported: set[str]
) -> list[TimedStep]:
  """The tasks in an order in which those that read carried values come after those that set them.

  Args:
    schedule, loop, programs: the schedule, and the microbatch loop with its task programs.
    free: the tasks in the order without carried values.
    reported: the kinds of warnings already issued.

  Raises:
    PipelineError: ranks would wait for one another.

  Warns:
    UserWarning: once, lists the values for which ranks are idle, with a fix.
  """
  waiting = [one for one in programs.accumulators if one.waiting]
  if not waiting:
    return free
  order = timed_steps(schedule, loop.count, task_programs.waits(waiting))
  if order is None:
    _refuse(schedule, loop, programs, waiting)
  if _makespan(order) > _SLOWER * _makespan(free) and 'carried' not in reported:
    reported.add('carried')
    _warn(schedule, loop, programs, free, order)
  return order


def _refuse(
  schedule: Schedule, loop: Loop, programs: TaskPrograms, waiting: Sequence[Accumulator]
) -> NoReturn:
  """Raises for carried values that tasks of a schedule cannot wait for."""
  alone = [one for one in waiting if not timed_steps(schedule, loop.count, task_programs.waits([one]))]
  raise PipelineError(
    f'The microbatch loop at {loop.source_line} carries values to the next microbatch. In {schedule}, tasks that read '
    'them come before the tasks that set them, and ranks would wait for one another:\n'
    + first_lines([f'  {programs.text(one, loop)}' for one in alone or waiting])
    + '\nFix: carry only sums, maxima and values that later stages read; pass the inputs of each microbatch with the '
    'batch, and update parameters after the loop; or use a schedule in which the next microbatch begins later.'
  )


def _warn(
  schedule: Schedule, loop: Loop, programs: TaskPrograms, free: list[TimedStep], order: list[TimedStep]
) -> None:
  bubbles: dict[tuple[object, ...], float] = {}
  lines = []
  for one in programs.accumulators:
    key = one.task, one.waiting
    if one.waiting and key not in bubbles:
      alone = timed_steps(schedule, loop.count, task_programs.waits([one])) or order
      bubbles[key] = _bubble(alone, schedule.ranks) * (_makespan(alone) > _SLOWER * _makespan(free))
    if bubbles.get(key):
      lines.append(f'  {programs.text(one, loop)}: {bubbles[key]:.0%}')
  if not lines:  # none alone, but all together
    lines = [f'  {programs.text(one, loop)}' for one in programs.accumulators if one.waiting]
  warn(
    f'The microbatch loop at {loop.source_line} carries values to earlier stages, which wait for them. In {schedule}, '
    f'the bubble is {_bubble(order, schedule.ranks):.0%} with these values, and '
    f'{_bubble(free, schedule.ranks):.0%} without them:\n'
    + first_lines(lines)
    + '\nFix: read a value in the stage that sets it or in later ones; or return it for each microbatch, and update it '
    'after the loop.'
  )


def _makespan(order: Sequence[TimedStep]) -> float:
  return max((one.end for one in order), default=0)


def _bubble(order: Sequence[TimedStep], ranks: int) -> float:
  return 1 - sum(one.end - one.start for one in order) / (_makespan(order) * ranks)
