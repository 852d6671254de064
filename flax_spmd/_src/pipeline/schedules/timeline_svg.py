"""Timelines as SVG: a row per rank, a rectangle per task, time to the right."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence

from flax_spmd._src.pipeline.schedules.simulation import Simulation
from flax_spmd._src.pipeline.schedules.timeline_cells import Cell, cells_of, heading, ticks

_CHARACTER, _ROW, _LINE = 6.8, 26, 18  # pixels: width of a character, height of a row, of a line of text
_LEFT, _WIDE, _BANDS = (
  62,
  1600,
  16,
)  # pixels left of a band, pixels of its largest width; number of bands


def svg_of(simulation: Simulation) -> str:
  """A standalone SVG document; each rectangle has a tooltip with its task, rank and times."""
  rows, head = cells_of(simulation), heading(simulation)
  scale, bands = _scale(rows, simulation.makespan), list(_bands(rows, simulation.makespan))
  elements = [_words(line, 0, (at + 0.5) * _LINE) for at, line in enumerate(head)]
  tall = (len(rows) * _ROW) + 2 * _LINE
  for number, (start, stop) in enumerate(bands):
    elements += _band(rows, start, stop, scale, len(head) * _LINE + 6 + number * tall)
  time = max(stop - start for start, stop in bands) * scale
  width = max(_LEFT + time, max(map(len, head)) * _CHARACTER) + 8
  height = len(head) * _LINE + 6 + len(bands) * tall
  size = f'width="{width:.0f}" height="{height}" viewBox="-4 -4 {width:.0f} {height}"'
  font = 'font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="11"'
  # The background is the page's: this grey is legible on black and on white.
  opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} fill="#7a7a7a">'
  return '\n'.join([opening, *elements, '</svg>'])


def _scale(rows: Sequence[Sequence[Cell]], makespan: float) -> float:
  """Pixels per unit of time: enough for all names, within bounds on the total width."""
  required = [
    (len(cell.name) * _CHARACTER + 6) / (cell.end - cell.start)
    for row in rows
    for cell in row
    if cell.end > cell.start
  ]
  if not required:
    return 0
  return min(max(max(required), _WIDE / 2 / makespan), _BANDS * _WIDE / makespan)


def _bands(rows: Sequence[Sequence[Cell]], makespan: float) -> Iterator[tuple[float, float]]:
  """Equal parts of the time, in whole units if these are fine enough."""
  count = max(1, math.ceil(makespan * _scale(rows, makespan) / _WIDE - 1e-9))
  length = makespan / count
  length = math.ceil(length) if length > 8 and count > 1 else length
  yield from (
    (at * length, min((at + 1) * length, makespan)) for at in range(count) if at * length <= makespan
  )


def _band(
  rows: Sequence[Sequence[Cell]], start: float, stop: float, scale: float, top: float
) -> Iterator[str]:
  bottom = top + _LINE + len(rows) * _ROW
  for time in ticks(stop, 60 / scale if scale else 0):
    if start <= time:
      x = _LEFT + (time - start) * scale
      yield f'<path d="M{x:.1f} {top + 2:.0f}V{bottom:.0f}" stroke="#7a7a7a" stroke-opacity=".35"/>'
      yield _words(f'{time:g}', x + 3, top + _LINE / 2)
  for rank, row in enumerate(rows):
    y = top + _LINE + rank * _ROW
    yield _words(f'rank {rank}', 0, y + _ROW / 2)
    for cell in row:
      if cell.end > start and cell.start < stop:
        begin, end = max(cell.start, start), min(cell.end, stop)
        yield from _elements(cell, rank, _LEFT + (begin - start) * scale, y, (end - begin) * scale)


def _elements(cell: Cell, rank: int, x: float, y: float, width: float) -> Iterator[str]:
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


def _words(text: str, x: float, y: float) -> str:
  return f'<text x="{x:.1f}" y="{y:.1f}" dominant-baseline="central">{html.escape(text)}</text>'
