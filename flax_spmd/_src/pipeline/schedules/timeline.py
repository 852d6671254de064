"""Timelines: the tasks of a schedule over time, for the terminal and as SVG.

    print(schedule.draw(8))                            # a row per rank; long timelines wrap into bands
    Path('1f1b.svg').write_text(schedule.draw(8).svg)

Every character represents the same time. A cell starts with a stroke and shows the name of its task if
it fits; an empty cell is a bubble. Cells of one fused task have no stroke between them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from flax_spmd._src.pipeline.schedules.simulation import Simulation
from flax_spmd._src.pipeline.schedules.timeline_cells import Cell, cells_of, heading, ticks
from flax_spmd._src.pipeline.schedules.timeline_svg import svg_of
from flax_spmd._src.public_module import set_module

if TYPE_CHECKING:
  from rich.text import Text

_WIDTH = 100  # characters
_BANDS = 16  # largest number of bands; a timeline that needs more omits names


class StyledText(NamedTuple):
  """A part of a line, with a background colour if it belongs to a task."""

  text: str
  colour: str = ''


@set_module('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Timeline:
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

  def text(self, width: int = _WIDTH) -> str:
    """The timeline as text.

    Args:
      width: largest width in characters; longer timelines wrap into bands.
    """
    return '\n'.join(''.join(piece.text for piece in line).rstrip() for line in self._lines(width))

  @functools.cached_property
  def svg(self) -> str:
    """The timeline as a standalone SVG document, legible on light and dark backgrounds."""
    return svg_of(self.simulation)

  def __repr__(self) -> str:
    return self.text()

  def _repr_svg_(self) -> str:
    return self.svg

  def _repr_html_(self) -> str:
    return f'<div style="overflow-x: auto">{self.svg}</div>'

  def __rich_console__(self, console: Any, options: Any) -> Iterator[Text]:
    from rich.text import Text  # takes 20 ms; needed only to print

    for line in self._lines(options.max_width):
      text = Text(no_wrap=True, overflow='crop')
      for piece in line:
        text.append(piece.text, f'#111111 on {piece.colour}' if piece.colour else '')
      yield text

  def _lines(self, width: int) -> Iterator[list[StyledText]]:
    for words in heading(self.simulation):
      yield from ([StyledText(line)] for line in textwrap.wrap(words, width, subsequent_indent='  '))
    rows, makespan = cells_of(self.simulation), self.simulation.makespan
    margin = len(f'rank {len(rows) - 1} ')
    scale = _scale(rows, makespan, max(8, width - margin - 1))
    for number, columns in enumerate(_bands(makespan, scale, max(8, width - margin - 1))):
      if number:
        yield [StyledText('')]
      yield from _band(rows, makespan, scale, columns, margin)


def _bands(makespan: float, scale: float, columns: int) -> Iterator[range]:
  """Bands of equal length, in whole units of time where possible, so that few cells are split."""
  total = round(makespan * scale)
  unit = int(scale) if 1 <= scale <= columns and scale == int(scale) else 1
  count = max(1, math.ceil(total / (columns // unit * unit)))
  length = max(1, math.ceil(total / count / unit) * unit)
  yield from (range(start, min(start + length, total)) for start in range(0, max(total, 1), length))


def _scale(rows: Sequence[Sequence[Cell]], makespan: float, columns: int) -> float:
  """Characters per unit of time: enough for all names, up to the largest number of bands."""
  cells = [cell for row in rows for cell in row if cell.end > cell.start]
  if not cells:
    return 0
  fitting = max((len(cell.name) + (not cell.joined)) / (cell.end - cell.start) for cell in cells)
  scale = min(fitting, _BANDS * columns / makespan)
  return math.ceil(scale) if scale > 1 and math.ceil(scale) * makespan <= _BANDS * columns else scale


def _band(
  rows: Sequence[Sequence[Cell]], makespan: float, scale: float, columns: range, margin: int
) -> Iterator[list[StyledText]]:
  """The time axis and all ranks, between two columns."""
  yield [StyledText(' ' * margin + _axis(makespan, scale, columns))]
  for rank, row in enumerate(rows):
    yield [StyledText(f'rank {rank}'.ljust(margin)), *_row(row, scale, columns), StyledText('│')]


def _axis(makespan: float, scale: float, columns: range) -> str:
  axis = ''
  for time in ticks(makespan, 8 / scale if scale else 0):
    column = round(time * scale)
    if column in columns and column + len(f'{time:g}') <= columns.stop + 1:
      axis = axis.ljust(column - columns.start) + f'{time:g}'
  return axis


def _row(row: Sequence[Cell], scale: float, columns: range) -> Iterator[StyledText]:
  """One rank between two columns: its cells and the bubbles between them."""
  at = columns.start
  for cell in row:
    start, stop = round(cell.start * scale), min(round(cell.end * scale), columns.stop)
    first = max(start, columns.start)
    if stop <= first:
      continue
    yield from _empty(first - at)
    at = stop
    stroke = '' if cell.joined or stop - first == 1 else '│' if start == first else '┆'
    room = stop - first - len(stroke)
    name = cell.name if len(cell.name) <= room else cell.name[0]
    yield from (StyledText(stroke), StyledText(name.ljust(room), cell.colour))
  yield from _empty(columns.stop - at)


def _empty(columns: int) -> list[StyledText]:
  return [StyledText('│'.ljust(columns))] if columns else []
