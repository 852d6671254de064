"""Timeline cells: the tasks of a timeline with their times, names and colours, for text and SVG alike.

A cell is a task with its start and end. A fused task has several cells, each joined to the one before.
Names are short: `F2` is the forward of microbatch 2; `F₁2`, that of stage 1 if ranks have several.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from flax_spmd._src.pipeline.schedules.simulation import Simulation
from flax_spmd._src.pipeline.schedules.tasks import Task

LETTERS = {'fwd': 'F', 'bwd': 'B', 'wgrad': 'W'}
WORDS = {'fwd': 'forward', 'bwd': 'backward', 'wgrad': 'weight gradient'}
_HUES = {'fwd': 0.58, 'bwd': 0.38, 'wgrad': 0.09}
_BANDS = 16  # largest number of bands; a timeline that needs more omits names
_SUBSCRIPT = str.maketrans('0123456789', '₀₁₂₃₄₅₆₇₈₉')


class Cell(NamedTuple):
  """A task in a timeline.

  Attributes:
    task: the task.
    name: short name, such as `F2`.
    start, end: times in the unit of the costs.
    joined: whether it is part of the same program as the cell before.
    colour: fill colour, as `#rrggbb`.
  """

  task: Task
  name: str
  start: float
  end: float
  joined: bool
  colour: str


def cells_of(simulation: Simulation) -> list[list[Cell]]:
  """Per rank, its cells in order."""
  several = len(simulation.stage_ranks) > len(simulation.steps)
  return [list(_cells(simulation, rank, several)) for rank in range(len(simulation.steps))]


def heading(simulation: Simulation) -> tuple[str, str]:
  """Two lines above a timeline: title and totals, and the key to the names of cells."""
  steps = [timed.step for steps in simulation.steps for timed in steps]
  present = {task.kind for step in steps for task in step.tasks}
  kinds = ', '.join(f'{LETTERS[kind]}: {word}' for kind, word in WORDS.items() if kind in present)
  several = len(simulation.stage_ranks) > len(simulation.steps)
  name = 'F₁2 is of stage 1 and microbatch 2' if several else 'F2 is of microbatch 2'
  fused = '; no gap: one program' if any(len(step.tasks) > 1 for step in steps) else ''
  live = ' '.join(map(str, simulation.peaks))
  return f'{str(simulation).splitlines()[0]}, live {live}', f'{kinds}; {name}{fused}'


def scale_of(
  rows: Sequence[Sequence[Cell]], widest: int, width_of: Callable[[Cell], float], least: float = 0
) -> float:
  """Columns (of characters or pixels) per unit of time: enough for all names, up to the largest number of bands.

  Args:
    rows: per rank, its cells.
    widest: columns of a band.
    width_of: returns the columns that a cell needs for its name.
    least: columns of the whole timeline.
  """
  cells = [cell for row in rows for cell in row if cell.end > cell.start]
  if not cells:
    return 0
  makespan = max(cell.end for cell in cells)
  required = max(width_of(cell) / (cell.end - cell.start) for cell in cells)
  scale, limit = max(required, least / makespan), _BANDS * widest / makespan
  return math.ceil(scale) if scale > 1 and math.ceil(scale) <= limit else min(scale, limit)


def bands(total: int, scale: float, widest: int) -> Iterator[range]:
  """The columns of each band: equally many, of whole units of time where possible, so that few cells are split."""
  unit = int(scale) if 1 <= scale <= widest and scale == int(scale) else 1
  count = max(1, math.ceil(total / (widest // unit * unit)))
  length = max(1, math.ceil(total / count / unit) * unit)
  yield from (range(start, min(start + length, total)) for start in range(0, max(total, 1), length))


def ticks(makespan: float, min_step: float) -> list[float]:
  """Round times from 0 to the makespan, at least `min_step` apart.

  Example:
    >>> ticks(33, 4)
    [0, 5, 10, 15, 20, 25, 30]
  """
  if makespan <= 0 or min_step <= 0:
    return [0]
  power = 10 ** math.floor(math.log10(min_step))
  step = next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor >= min_step)
  return [round(step * number, 9) for number in range(int(makespan / step + 1e-9) + 1)]


def _cells(simulation: Simulation, rank: int, several: bool) -> Iterator[Cell]:
  own = [stage for stage, other in enumerate(simulation.stage_ranks) if other == rank]
  for timed in simulation.steps[rank]:
    start = timed.start
    for task, length in zip(timed.step.tasks, timed.lengths):
      stage = str(task.stage).translate(_SUBSCRIPT) if several else ''
      name = f'{LETTERS[task.kind]}{stage}{task.microbatch}'
      joined = task != timed.step.tasks[0]
      yield Cell(task, name, start, start + length, joined, _colour(task.kind, own.index(task.stage)))
      start += length


def _colour(kind: str, chunk: int) -> str:
  """One hue per kind, darker for a rank's later stages, and always light enough for dark text."""
  lightness = max(0.56, 0.8 - 0.11 * chunk)
  red, green, blue = colorsys.hls_to_rgb(_HUES[kind], lightness, 0.6)
  return f'#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}'
