"""HTML: escaped tables, sections and bar charts, shared by the reports of a comparison and of a search."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

from flax_spmd._src.text import size_text


def safe(text: Any) -> str:
  """Text that stands for itself in HTML."""
  return html.escape(str(text))


def section(title: str, content: str) -> str:
  """A part of the page; nothing, if there is nothing in it."""
  return f'<section><h2>{safe(title)}</h2>{content}</section>' if content else ''


def table(titles: Sequence[str], rows: Iterable[Sequence[Any]], name: str) -> str:
  """A table that sorts and filters. A cell is a text, or a number and how it is shown."""
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
    number = 'Infinity' if math.isinf(value) else f'{value:.6g}'  # as JavaScript spells it
    return f'<td class="number" data-value="{number}">{safe(shown)}</td>'
  return f'<td>{safe(content)}</td>'


def _bytes(count: float) -> tuple[float, str]:
  return count, size_text(count)


def _bars(
  rows: Sequence[tuple[str, Sequence[tuple[str, float, str]], str]], most: float, mark: float | None
) -> str:
  """Stacked bars: name, its parts (kind, value, text), and what stands at the end."""
  height = len(rows) * (_BAR + 8) + 8
  scale = _WIDE / max(most, 1e-30)
  shapes = []
  for number, (name, parts, total) in enumerate(rows):
    x, y = 160.0, 4 + number * (_BAR + 8)
    shapes.append(
      f'<text x="150" y="{y + _BAR / 2}" text-anchor="end" dominant-baseline="central">{safe(name)}</text>'
    )
    for kind, value, text in parts:
      width = value * scale
      shapes.append(
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{_COLOURS[kind]}">'
        f'<title>{safe(text)}</title></rect>'
      )
      x += width
    shapes.append(
      f'<text x="{x + 6:.1f}" y="{y + _BAR / 2}" dominant-baseline="central">{safe(total)}</text>'
    )
  if mark is not None and mark * scale <= _WIDE:
    at = 160 + mark * scale
    shapes.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{height}" class="limit"/>')
  return svg(160 + _WIDE + 200, height, shapes)


def svg(width: float, height: float, shapes: Iterable[str]) -> str:
  """A picture of so many pixels."""
  box = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
  return f'<div class="wide"><svg xmlns="http://www.w3.org/2000/svg" role="img" {box}>{"".join(shapes)}</svg></div>'


def _legend(kinds: Iterable[str]) -> str:
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


_WIDE, _BAR = 720, 26
