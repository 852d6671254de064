"""SVG: a text picture as an image, for notebooks and web pages.

    path.write_text(svg_of(picture(pieces, axes, width=100)))

Characters map to a fixed grid of pixels, so the image has the layout of the text. Cells become coloured
rectangles without frames, with the ranges of their slices as tooltips.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator

from flax_spmd._src.draw.text_picture import Line, Segment

_CHARACTER, _LINE, _ROW = 7.8, 20, 28  # in pixels: monospace at 13 px; a line; a row of cells


def svg_of(lines: Iterable[Line]) -> str:
  """An SVG document, as large as its lines."""
  y, right, elements = 0, 0.0, []
  for line in lines:
    if _is_rule(line):
      continue
    height = _ROW if any(part.role == 'cell' for part in line) else _LINE
    x = 0.0
    for part in line:
      elements += _elements(part, x, y, height)
      x += len(part.text) * _CHARACTER
    y, right = y + height, max(right, x)
  size = f'width="{right + 8:.0f}" height="{y + 8}" viewBox="-4 -4 {right + 8:.0f} {y + 8}"'
  font = 'font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="13"'
  # A grey that is legible on both white and black backgrounds.
  head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} fill="#7a7a7a">'
  return '\n'.join([head, *elements, '</svg>'])


def _is_rule(line: Line) -> bool:
  """Whether a line contains only frame characters; an empty line is the space between panels."""
  return bool(line) and not any(part.text.strip() for part in line if part.role != 'frame')


def _elements(part: Segment, x: float, y: float, height: float) -> Iterator[str]:
  width, text = len(part.text) * _CHARACTER, html.escape(part.text.strip())
  ink, position = '', f'x="{x + width / 2:.1f}" text-anchor="middle"'
  if part.role == 'cell':
    ranges = ', '.join(f'{start}:{stop}' for start, stop in part.ranges)
    yield (
      f'<rect x="{x - 3:.1f}" y="{y + 1}" width="{width + 6:.1f}" height="{height - 2}" rx="3" '
      f'fill="{part.colour}"><title>[{ranges}]: {text}</title></rect>'
    )
    ink = 'fill="#111" '
  if part.role == 'words':
    indent = len(part.text) - len(part.text.lstrip())
    position = f'x="{indent * _CHARACTER:.1f}"'
  if text and part.role != 'frame':
    yield f'<text {ink}{position} y="{y + height / 2:.1f}" dominant-baseline="central">{text}</text>'
