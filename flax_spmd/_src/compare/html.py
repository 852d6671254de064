"""HTML: escaped tables, sections and bar charts, shared by the reports of a comparison and of a search."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from flax_spmd._src.compare.chart_labels import LINE, name_lines, text_width
from flax_spmd._src.notebook_html import safe
from flax_spmd._src.text import size_text


def section(title: str, content: str) -> str:
  """A section of the page, or '' if it has no content."""
  return f'<section><h2>{safe(title)}</h2>{content}</section>' if content else ''


def table(titles: Sequence[str], rows: Iterable[Sequence[Any]], name: str) -> str:
  """A table that can be sorted and filtered.

  Args:
    titles: column headings.
    rows: cells of each row: text, or a pair of a number and its text.
    name: name of the rows, for the label of the filter.
  """
  head = ''.join(f'<th scope="col">{safe(title)}</th>' for title in titles)
  lines = [f'<tr>{"".join(map(_cell, row))}</tr>' for row in rows]
  search = (
    f'<input type="search" placeholder="filter" aria-label="filter {safe(name)}">'
    if len(lines) > 5
    else ''
  )
  return f'{search}<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _cell(content: Any) -> str:
  if isinstance(content, tuple):
    value, shown = content
    number = 'Infinity' if math.isinf(value) else f'{value:.6g}'  # JavaScript's spelling
    return f'<td class="number" data-value="{number}">{safe(shown)}</td>'
  short = ' class="short"' if len(content) <= _SHORT else ''
  return f'<td{short}>{safe(content)}</td>'


def byte_cell(count: float) -> tuple[float, str]:
  """A table cell for a number of bytes."""
  return count, size_text(count)


def bars(
  rows: Sequence[tuple[str, Sequence[tuple[str, float, str]], str]], most: float, mark: float | None
) -> str:
  """A chart of stacked bars.

  Args:
    rows: name, parts (kind, value, tooltip), and label of each bar.
    most: value of the full width.
    mark: value of a vertical line, such as a limit, or None.
  """
  names = [name_lines(name) for name, _, _ in rows]
  left = max((text_width(line) for lines in names for line in lines), default=0.0) + 10
  right = max((text_width(total) for _, _, total in rows), default=0.0) + 12
  scale, y, shapes = _WIDTH / max(most, 1e-30), 4.0, []
  for lines, row in zip(names, rows, strict=True):
    height = max(_HEIGHT, len(lines) * LINE)
    shapes += _bar(row, lines, left, y, height, scale)
    y += height + 8
  if mark is not None and mark * scale <= _WIDTH:
    at = left + mark * scale
    shapes.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{y:.0f}" class="limit"/>')
  return svg(left + _WIDTH + right, y + 4, shapes)


def _bar(
  row: tuple[str, Sequence[tuple[str, float, str]], str],
  lines: Sequence[str],
  left: float,
  y: float,
  height: float,
  scale: float,
) -> Iterable[str]:
  """A bar with the lines of its name on its left, and its label on its right."""
  name, parts, total = row
  x, middle = left, y + height / 2
  first = middle - (len(lines) - 1) * LINE / 2
  spans = ''.join(
    f'<tspan x="{left - 8:.1f}" y="{first + number * LINE:.1f}">{safe(line)}</tspan>'
    for number, line in enumerate(lines)
  )
  yield f'<text text-anchor="end" dominant-baseline="central"><title>{safe(name)}</title>{spans}</text>'
  for kind, value, text in parts:
    width = value * scale
    yield (
      f'<rect x="{x:.1f}" y="{middle - _HEIGHT / 2:.1f}" width="{width:.1f}" height="{_HEIGHT}" '
      f'fill="{_COLOURS[kind]}"><title>{safe(text)}</title></rect>'
    )
    x += width
  yield f'<text x="{x + 6:.1f}" y="{middle:.1f}" dominant-baseline="central">{safe(total)}</text>'


def svg(width: float, height: float, shapes: Iterable[str]) -> str:
  """An SVG picture; width and height in pixels."""
  box = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
  return f'<div class="wide"><svg xmlns="http://www.w3.org/2000/svg" role="img" {box}>{"".join(shapes)}</svg></div>'


def legend(kinds: Iterable[str]) -> str:
  """A legend of the colours of these kinds of parts."""
  items = (f'<span><i style="background:{_COLOURS[kind]}"></i>{kind}</span>' for kind in kinds)
  return f'<p class="legend">{"".join(items)}</p>'


_COLOURS = {
  'parameters': '#4477aa',
  'optimizer': '#66ccee',
  'rest': '#bbbbbb',
  'batch': '#ccbb44',
  'temporaries': '#ee6677',
  'compute': '#4477aa',
  'memory': '#ccbb44',
  'links': '#ee6677',
}


_WIDTH, _HEIGHT = 720, 26
_SHORT = 20  # characters of a cell whose text is not broken into lines
