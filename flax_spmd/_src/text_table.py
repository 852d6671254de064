"""Text tables: many rows, printed by `rich` with its borders and colours, a hundred times as fast as its own.

A `rich.table.Table` measures and wraps each cell as styled text, which takes 0.6 ms a row. Here cells are
plain text, and only those that are too wide are wrapped.
"""

from __future__ import annotations

import io
import itertools
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
  from rich.segment import Segment


class TextTable(NamedTuple):
  """A table of plain text, to be printed by `rich`; the last column is aligned to the right.

  Attributes:
    head: titles of the columns.
    rows: cells.
  """

  head: Sequence[str]
  rows: Sequence[Sequence[str]]

  def __rich_console__(self, console: Any, options: Any) -> Iterator[Segment]:
    from rich import box
    from rich.segment import Segment
    from rich.style import Style

    style = box.HEAVY_HEAD.substitute(options)
    widths = self._widths(options.max_width)
    head = style.head_left, style.head_vertical, style.head_right
    body = style.mid_left, style.mid_vertical, style.mid_right
    padded = [width + 2 for width in widths]
    top, middle = style.get_top(padded), style.get_row(padded, 'head')
    lines = (line for row in self.rows for line in _lines(row, widths, body))
    titles = [(line, Style(bold=True)) for line in _lines(self.head, widths, head)]
    end = [(style.get_bottom(padded), None)]
    for line, look in [(top, None), *titles, (middle, None), *zip(lines, itertools.repeat(None)), *end]:
      yield Segment(line, look)
      yield Segment.line()

  def _widths(self, available: int) -> list[int]:
    """The width of each column: its widest cell, but of the widest columns as much as there is room for."""
    columns = list(zip(self.head, *self.rows, strict=True))
    widths = [max(map(_width, column)) for column in columns]
    room = available - 3 * len(widths) - 1
    while sum(widths) > room and max(widths) > 1:
      most = max(widths)
      next_most = max([width for width in widths if width < most], default=1)
      over = -(-(sum(widths) - room) // widths.count(most))
      widths = [max(most - over, next_most, 1) if width == most else width for width in widths]
    return widths


def _lines(row: Sequence[str], widths: Sequence[int], edges: tuple[str, str, str]) -> Iterator[str]:
  """The lines of one row: several if a cell is wrapped."""
  left, between, right = edges
  cells = [
    [cell] if _width(cell) <= width else _wrapped(cell, width)
    for cell, width in zip(row, widths, strict=True)
  ]
  for parts in itertools.zip_longest(*cells, fillvalue=''):
    padding = [' ' * (width - _width(part)) for part, width in zip(parts, widths, strict=True)]
    texts = [part + pad for part, pad in zip(parts[:-1], padding)]
    yield f'{left} {f" {between} ".join([*texts, padding[-1] + parts[-1]])} {right}'


def _wrapped(cell: str, width: int) -> list[str]:
  from rich.console import Console
  from rich.text import Text

  if _is_narrow(cell):
    return textwrap.wrap(cell, width, break_on_hyphens=False)
  return [line.plain.rstrip() for line in Text(cell).wrap(Console(), width, overflow='fold')]


def _width(text: str) -> int:
  """The number of columns that a text takes in a terminal."""
  if _is_narrow(text):
    return len(text)
  from rich.cells import cell_len

  return cell_len(text)


def _is_narrow(text: str) -> bool:
  """Whether each of its characters is known to be one column wide."""
  return text.isascii() or text.replace('→', '').isascii()


def plain_text(printable: Any, width: int = 140, *, soft_wrap: bool = False) -> str:
  """The text that `rich` prints of an object, without colours.

  Args:
    printable: the object.
    width: length of the lines.
    soft_wrap: whether lines outside of tables may be longer.
  """
  from rich.console import Console

  file = io.StringIO()
  console = Console(file=file, width=width, color_system=None, force_jupyter=False, force_terminal=False)
  console.print(printable, markup=False, highlight=False, soft_wrap=soft_wrap)
  return '\n'.join(line.rstrip() for line in file.getvalue().splitlines())
