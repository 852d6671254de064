"""Timelines as SVG: a row per rank, a rectangle per task, time to the right."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence

from flax_spmd._src.pipeline.schedules.simulation import Simulation
from flax_spmd._src.pipeline.schedules.timeline_cells import (
  Cell,
  bands,
  cells_of,
  heading,
  scale_of,
  ticks,
)

_CHARACTER, _ROW, _LINE = 6.8, 26, 18  # pixels: width of a character, height of a row, of a line of text
_LEFT, _WIDE = 62, 1600  # pixels left of a band, and of its largest width


def svg_of(simulation: Simulation) -> str:
  """A standalone SVG document; each rectangle has a tooltip with its task, rank and times."""
  rows, head = cells_of(simulation), heading(simulation)
  scale = scale_of(rows, _WIDE, lambda cell: len(cell.name) * _CHARACTER + 6, least=_WIDE // 2)
  parts = list(bands(math.ceil(simulation.makespan * scale), scale, _WIDE))
  elements = [_words(line, 0, (at + 0.5) * _LINE) for at, line in enumerate(head)]
  tall = (len(rows) * _ROW) + 2 * _LINE
  for number, columns in enumerate(parts):
    elements += _band(rows, columns, scale, len(head) * _LINE + 6 + number * tall)
  width = max(_LEFT + max(map(len, parts)), max(map(len, head)) * _CHARACTER) + 8
  height = len(head) * _LINE + 6 + len(parts) * tall
  size = f'width="{width:.0f}" height="{height}" viewBox="-4 -4 {width:.0f} {height}"'
  font = 'font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="11"'
  # The background is the page's: this grey is legible on black and on white.
  opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} fill="#7a7a7a">'
  return '\n'.join([opening, *elements, '</svg>'])


def _band(rows: Sequence[Sequence[Cell]], columns: range, scale: float, top: float) -> Iterator[str]:
  bottom = top + _LINE + len(rows) * _ROW
  for time in ticks(columns.stop / scale, 60 / scale) if scale else [0]:
    if columns.start <= time * scale:
      x = _LEFT + time * scale - columns.start
      yield f'<path d="M{x:.1f} {top + 2:.0f}V{bottom:.0f}" stroke="#7a7a7a" stroke-opacity=".35"/>'
      yield _words(f'{time:g}', x + 3, top + _LINE / 2)
  for rank, row in enumerate(rows):
    y = top + _LINE + rank * _ROW
    yield _words(f'rank {rank}', 0, y + _ROW / 2)
    for cell in row:
      begin, end = max(cell.start * scale, columns.start), min(cell.end * scale, columns.stop)
      if begin < end:
        yield from _elements(cell, rank, _LEFT + begin - columns.start, y, end - begin)


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
