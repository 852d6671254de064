"""Timelines: the tasks of a schedule over time, for the terminal and as SVG.

    print(schedule.draw(8))                            # a row per rank; long timelines wrap into bands
    Path('1f1b.svg').write_text(schedule.draw(8).svg)

A *cell* is a task with its start and end; a fused task has several. Every column, of a character or a pixel, represents
the same time. In text a cell starts with a stroke and shows the name of its task if it fits; an empty cell is a
bubble. Cells of one fused task have no stroke between them.
"""

from __future__ import annotations

import colorsys
import dataclasses
import html
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from flax_spmd._src.draw.lines import Lines
from flax_spmd._src.pipeline.schedules.simulation import Simulation
from flax_spmd._src.pipeline.schedules.tasks import Task
from flax_spmd._src.public import public

_LETTERS = {'fwd': 'F', 'bwd': 'B', 'wgrad': 'W'}
_WORDS = {'fwd': 'forward', 'bwd': 'backward', 'wgrad': 'weight gradient'}
_HUES = {'fwd': 0.58, 'bwd': 0.38, 'wgrad': 0.09}
_BANDS = 16  # largest number of bands; a timeline that needs more omits names
_SUBSCRIPT = str.maketrans('0123456789', '₀₁₂₃₄₅₆₇₈₉')
_CHARACTER, _ROW, _LINE = 6.8, 26, 18  # pixels: width of a character, height of a row, of a line of text
_LEFT, _WIDE = 62, 1600  # pixels left of a band, and of its largest width


@public('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Timeline(Lines):
  """The tasks of a schedule over time: text by `str`, SVG in notebooks, colour with `rich`.

  Attributes:
    simulation: the simulation to draw.

  Example:
    >>> print(pipeline.GPipe(ranks=2).draw(2))
    GPipe(ranks=2) with 2 microbatches: makespan 9, bubble 33.3%, live 2 2
    F: forward, B: backward; F2 is of microbatch 2
           0              5
    rank 0 │F0│F1│     │B0   │B1   │
    rank 1 │  │F0│F1│B0   │B1   │  │
  """

  simulation: Simulation

  @property
  def svg(self) -> str:
    """The timeline as a standalone SVG document, legible on light and dark backgrounds.

    Each rectangle has a tooltip with its task, rank and times.
    """
    rows, head = _rows(self.simulation), _heading(self.simulation)
    scale = _scale(rows, _WIDE, lambda cell: len(cell.name) * _CHARACTER + 6, least=_WIDE // 2)
    bands = list(_bands(math.ceil(self.simulation.makespan * scale), scale, _WIDE))
    elements = [_svg_words(line, 0, (at + 0.5) * _LINE) for at, line in enumerate(head)]
    tall = (len(rows) * _ROW) + 2 * _LINE
    for number, columns in enumerate(bands):
      elements += _svg_band(rows, columns, scale, len(head) * _LINE + 6 + number * tall)
    width = max(_LEFT + max(map(len, bands)), max(map(len, head)) * _CHARACTER) + 8
    height = len(head) * _LINE + 6 + len(bands) * tall
    size = f'width="{width:.0f}" height="{height}" viewBox="-4 -4 {width:.0f} {height}"'
    font = 'font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="11"'
    # The background is the page's: this grey is legible on black and on white.
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} fill="#7a7a7a">'
    return '\n'.join([opening, *elements, '</svg>'])

  def _lines(self, width: int) -> Iterator[list[StyledText]]:
    for words in _heading(self.simulation):
      yield from ([StyledText(line)] for line in textwrap.wrap(words, width, subsequent_indent='  '))
    rows, makespan = _rows(self.simulation), self.simulation.makespan
    margin = len(f'rank {len(rows) - 1} ')
    widest = max(8, width - margin - 1)
    scale = _scale(rows, widest, lambda cell: len(cell.name) + (not cell.joined))
    for number, columns in enumerate(_bands(round(makespan * scale), scale, widest)):
      if number:
        yield [StyledText('')]
      yield [StyledText(' ' * margin + _text_axis(makespan, scale, columns))]
      for rank, row in enumerate(rows):
        label = StyledText(f'rank {rank}'.ljust(margin))
        yield [label, *_text_row(row, scale, columns), StyledText('│')]


class Cell(NamedTuple):
  """A task in a timeline.

  Attributes:
    task: the task.
    name: `F2` for the forward of microbatch 2; `F₁2` for that of stage 1 if ranks have several.
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


def _rows(simulation: Simulation) -> list[list[Cell]]:
  """Per rank, its cells in order."""
  return [list(_cells(simulation, rank)) for rank in range(len(simulation.steps))]


def _cells(simulation: Simulation, rank: int) -> Iterator[Cell]:
  own = [stage for stage, other in enumerate(simulation.stage_ranks) if other == rank]
  for timed in simulation.steps[rank]:
    start = timed.start
    for task, length in zip(timed.step.tasks, timed.lengths):
      stage = str(task.stage).translate(_SUBSCRIPT) if _has_chunks(simulation) else ''
      name = f'{_LETTERS[task.kind]}{stage}{task.microbatch}'
      joined = task != timed.step.tasks[0]
      yield Cell(task, name, start, start + length, joined, _colour(task.kind, own.index(task.stage)))
      start += length


def _has_chunks(simulation: Simulation) -> bool:
  """Whether ranks have several stages."""
  return len(simulation.stage_ranks) > len(simulation.steps)


def _colour(kind: str, chunk: int) -> str:
  """One hue per kind, darker for a rank's later stages, and always light enough for dark text."""
  lightness = max(0.56, 0.8 - 0.11 * chunk)
  red, green, blue = colorsys.hls_to_rgb(_HUES[kind], lightness, 0.6)
  return f'#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}'


def _heading(simulation: Simulation) -> tuple[str, str]:
  """Two lines above a timeline: title and totals, and the key to the names of cells."""
  steps = [timed.step for steps in simulation.steps for timed in steps]
  present = {task.kind for step in steps for task in step.tasks}
  kinds = ', '.join(f'{_LETTERS[kind]}: {word}' for kind, word in _WORDS.items() if kind in present)
  chunks = _has_chunks(simulation)
  name = 'F₁2 is of stage 1 and microbatch 2' if chunks else 'F2 is of microbatch 2'
  fused = '; no gap: one program' if any(len(step.tasks) > 1 for step in steps) else ''
  live = ' '.join(map(str, simulation.peaks))
  return f'{str(simulation).splitlines()[0]}, live {live}', f'{kinds}; {name}{fused}'


def _scale(
  rows: Sequence[Sequence[Cell]], widest: int, width_of: Callable[[Cell], float], least: float = 0
) -> float:
  """Columns per unit of time: enough for all names, up to the largest number of bands.

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


def _bands(total: int, scale: float, widest: int) -> Iterator[range]:
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


# -- text


class StyledText(NamedTuple):
  """A part of a line, with a background colour if it belongs to a task."""

  text: str
  colour: str = ''


def _text_axis(makespan: float, scale: float, columns: range) -> str:
  axis = ''
  for time in ticks(makespan, 8 / scale if scale else 0):
    column = round(time * scale)
    if column in columns and column + len(f'{time:g}') <= columns.stop + 1:
      axis = axis.ljust(column - columns.start) + f'{time:g}'
  return axis


def _text_row(row: Sequence[Cell], scale: float, columns: range) -> Iterator[StyledText]:
  """One rank between two columns: its cells and the bubbles between them."""
  at = columns.start
  for cell in row:
    start, stop = round(cell.start * scale), min(round(cell.end * scale), columns.stop)
    first = max(start, columns.start)
    if stop <= first:
      continue
    yield from _bubble(first - at)
    at = stop
    stroke = '' if cell.joined or stop - first == 1 else '│' if start == first else '┆'
    room = stop - first - len(stroke)
    name = cell.name if len(cell.name) <= room else cell.name[0]
    yield from (StyledText(stroke), StyledText(name.ljust(room), cell.colour))
  yield from _bubble(columns.stop - at)


def _bubble(columns: int) -> list[StyledText]:
  return [StyledText('│'.ljust(columns))] if columns else []


# -- SVG


def _svg_band(rows: Sequence[Sequence[Cell]], columns: range, scale: float, top: float) -> Iterator[str]:
  bottom = top + _LINE + len(rows) * _ROW
  for time in ticks(columns.stop / scale, 60 / scale) if scale else [0]:
    if columns.start <= time * scale:
      x = _LEFT + time * scale - columns.start
      yield f'<path d="M{x:.1f} {top + 2:.0f}V{bottom:.0f}" stroke="#7a7a7a" stroke-opacity=".35"/>'
      yield _svg_words(f'{time:g}', x + 3, top + _LINE / 2)
  for rank, row in enumerate(rows):
    y = top + _LINE + rank * _ROW
    yield _svg_words(f'rank {rank}', 0, y + _ROW / 2)
    for cell in row:
      begin, end = max(cell.start * scale, columns.start), min(cell.end * scale, columns.stop)
      if begin < end:
        yield from _svg_cell(cell, rank, _LEFT + begin - columns.start, y, end - begin)


def _svg_cell(cell: Cell, rank: int, x: float, y: float, width: float) -> Iterator[str]:
  gap = 0 if cell.joined else min(1, width / 4)
  yield (
    f'<rect x="{x + gap:.1f}" y="{y + 1:.0f}" width="{width - gap:.1f}" height="{_ROW - 2}" '
    f'fill="{cell.colour}"><title>{cell.task} on rank {rank}: '
    f'{cell.start:g} to {cell.end:g}</title></rect>'
  )
  if width >= len(cell.name) * _CHARACTER + 2:
    yield (
      f'<text fill="#111" x="{x + width / 2:.1f}" text-anchor="middle" pointer-events="none" '
      f'y="{y + _ROW / 2:.0f}" dominant-baseline="central">{cell.name}</text>'
    )


def _svg_words(text: str, x: float, y: float) -> str:
  return f'<text x="{x:.1f}" y="{y:.1f}" dominant-baseline="central">{html.escape(text)}</text>'
