"""Timelines: the tasks of a schedule over time, for the terminal and as SVG.

    print(schedule.draw(8))                            # a row per rank; long timelines wrap into bands
    Path('1f1b.svg').write_text(schedule.draw(8).svg)

Every character represents the same time. A cell starts with a stroke and shows the name of its task if
it fits; an empty cell is a bubble. Cells of one fused task have no stroke between them.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flax_spmd._src.draw.lines import Lines
from flax_spmd._src.pipeline.schedules.simulation import Simulation
from flax_spmd._src.pipeline.schedules.timeline_cells import (
  Cell,
  bands,
  cells_of,
  heading,
  scale_of,
  ticks,
)
from flax_spmd._src.pipeline.schedules.timeline_svg import svg_of
from flax_spmd._src.public_module import set_module


class StyledText(NamedTuple):
  """A part of a line, with a background colour if it belongs to a task."""

  text: str
  colour: str = ''


@set_module('flax_spmd.pipeline')
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
    """The timeline as a standalone SVG document, legible on light and dark backgrounds."""
    return svg_of(self.simulation)

  def _lines(self, width: int) -> Iterator[list[StyledText]]:
    for words in heading(self.simulation):
      yield from ([StyledText(line)] for line in textwrap.wrap(words, width, subsequent_indent='  '))
    rows, makespan = cells_of(self.simulation), self.simulation.makespan
    margin = len(f'rank {len(rows) - 1} ')
    widest = max(8, width - margin - 1)
    scale = scale_of(rows, widest, lambda cell: len(cell.name) + (not cell.joined))
    for number, columns in enumerate(bands(round(makespan * scale), scale, widest)):
      if number:
        yield [StyledText('')]
      yield from _band(rows, makespan, scale, columns, margin)


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
