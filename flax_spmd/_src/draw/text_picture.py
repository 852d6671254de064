"""Text pictures: the slices of an array as lines of characters.

A picture has one cell per distinct slice, with the ids of all devices that hold it. The last two sharded
dimensions are the rows and columns of a grid. Each position of the sharded dimensions before them has a grid
of its own, a *panel*. Omitted rows, columns and panels are a gap: `…`.

    for line in picture(pieces, axes, width=100):
      print(''.join(part.text for part in line))

A line is a list of segments with roles, so colours and SVG rectangles can be derived from the lines alone.
"""

from __future__ import annotations

import colorsys
import functools
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from flax_spmd._src.array_boxes import Box
from flax_spmd._src.draw.slices import Pieces, number_of, positions_of
from flax_spmd._src.text import plural

_ROWS, _ROWS_OF_MORE, _PANELS = 16, 8, 4  # up to 16 rows are all shown; of more, 8
_RUNS = 8  # largest number of runs of device ids in one cell
_GAP = '…'


class Segment(NamedTuple):
  """Characters of a line: words, a label, a part of the frame, or a cell with its slice's key and ranges."""

  text: str
  role: Literal['words', 'label', 'frame', 'cell']
  key: int = 0
  ranges: Box = ()

  @property
  def colour(self) -> str:
    """The background of a cell; '' for other roles."""
    return colour(self.key) if self.role == 'cell' else ''


Line: TypeAlias = list[Segment]


def picture(pieces: Pieces, axes: Sequence[Sequence[str]], width: int) -> Iterator[Line]:
  """The lines of a legend and of its grids.

  Args:
    pieces: pieces of the array, and their devices.
    axes: per dimension, the mesh axes that it is sharded over, as far as they are known.
    width: width in characters. A wider grid is shortened in the middle.
  """
  counts = pieces.counts
  # With fewer than two sharded dimensions, others fill the grid.
  grid = sorted(sorted(range(len(counts)), key=lambda dim: (counts[dim] > 1, dim))[-2:])
  panels = [dim for dim, count in enumerate(counts) if count > 1 and dim not in grid]
  yield from words(_legend(counts, axes, grid, panels), width)
  yield from _panels(pieces, grid, panels, width)


def words(text: str, width: int) -> list[Line]:
  """A sentence, wrapped to a width in characters."""
  wrapped = textwrap.wrap(text, width, subsequent_indent='  ', break_on_hyphens=False)
  return [[Segment(line, 'words')] for line in wrapped]


def colour(key: int) -> str:
  """A light background colour for dark text, distinct from those of neighbours in the same row and column.

  Hue and lightness are Roberts' R2 sequence (powers of 1 / plastic number). With a sequence of hues alone,
  grids of some widths would have nearly equal colours in one column.
  """
  hue, lightness = (0.58 + key * 0.7548777) % 1, 0.7 + 0.16 * (key * 0.5698403 % 1)
  red, green, blue = colorsys.hls_to_rgb(hue, lightness, 0.65)
  return f'#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}'


def _legend(
  counts: Sequence[int], axes: Sequence[Sequence[str]], grid: Sequence[int], panels: Sequence[int]
) -> str:
  """`rows: dim 0 over 'data'; columns: dim 3 (whole); whole: dim 1, dim 2`."""

  def cut(dim: int) -> str:
    if axes[dim]:
      return f'dim {dim} over {" x ".join(map(repr, axes[dim]))}'
    return f'dim {dim} ({"whole" if counts[dim] == 1 else f"{counts[dim]} pieces"})'

  roles = [('panels: ', panels), ('rows: ', grid[:-1]), ('columns: ', grid[-1:])]
  shown = [role + ', '.join(map(cut, dims)) for role, dims in roles if dims]
  others = [f'dim {dim}' for dim in range(len(counts)) if dim not in grid and dim not in panels]
  return '; '.join([*shown, *([f'whole: {", ".join(others)}'] if others else [])])


def _panels(pieces: Pieces, grid: Sequence[int], panels: Sequence[int], width: int) -> Iterator[Line]:
  """One grid per position of the panel dimensions; a single grid if there are none."""
  sizes = [pieces.counts[dim] for dim in panels]
  count = math.prod(sizes)
  for number in _some(count, _PANELS):
    if number is None:
      yield from [[], *words(f'{_GAP} {plural(count - _PANELS, "more panel")}', width)]
      continue
    at = dict(zip(panels, positions_of(number, sizes)))
    if at:
      positions = (f'dim {dim} at {_range(pieces, dim, position)}' for dim, position in at.items())
      yield from [[], *words(', '.join(positions), width)]
    yield from _grid(pieces, grid, at, width)


def _grid(pieces: Pieces, grid: Sequence[int], at: Mapping[int, int], width: int) -> list[Line]:
  """One grid, with as many columns as fit into the width."""
  row, column = [None, None, *grid][-2:]
  counts = {None: 1, **dict(enumerate(pieces.counts))}
  rows = _some(counts[row], _ROWS if counts[row] <= _ROWS else _ROWS_OF_MORE)
  labels = [_range(pieces, row, position) for position in rows]
  cell = functools.cache(lambda i, j: _cell(pieces, {**at, row: i, column: j}))
  lines = []
  for most in range(max(2, min(counts[column], width // 4)), 1, -1):  # no column is narrower than 4
    columns = _some(counts[column], most)
    headings = [_range(pieces, column, position) for position in columns]
    cells = [[cell(i, j) for j in columns] for i in rows]
    lines = _framed(labels, headings, cells)
    if sum(len(part.text) for part in lines[-1]) <= width:
      break
  return lines


def _some(count: int, most: int) -> list[int | None]:
  """All of `range(count)`, or its first and last entries around a gap (None).

  Example:
    >>> _some(9, 4)
    [0, 1, None, 7, 8]
  """
  if count <= most:
    return list(range(count))
  return [*range(most - most // 2), None, *range(count - most // 2, count)]


def _range(pieces: Pieces, dim: int | None, position: int | None) -> str:
  if position is None:
    return _GAP
  return '' if dim is None else '{}:{}'.format(*pieces.bounds[dim][position])


def _cell(pieces: Pieces, at: Mapping[int | None, int | None]) -> Segment:
  if None in at.values():
    return Segment(_GAP, 'label')
  counts = pieces.counts
  key = number_of([at.get(dim, 0) for dim in range(len(counts))], counts)
  [ranges] = pieces.ranges(np.array([key]))
  empty = any(start == stop for start, stop in ranges)
  return Segment(_ids(pieces.held_by(key)) + (' (empty)' if empty else ''), 'cell', key, ranges)


def _ids(devices: np.ndarray) -> str:
  """Device ids as runs; many runs are shortened, with the number of devices.

  Example:
    >>> _ids(np.array([0, 1, 4, 8, 9, 10])), _ids(np.arange(0, 64, 2))
    ('0, 1, 4, 8-10', '0, 2, … (32 devices)')
  """
  starts = np.flatnonzero(np.diff(devices, prepend=-2) != 1)
  stops = np.append(starts[1:], len(devices))
  runs = [_run(*devices[[start, stop - 1]]) for start, stop in zip(starts[:_RUNS], stops)]
  if len(starts) <= _RUNS and len(', '.join(runs)) <= 20:
    return ', '.join(runs)
  first = ', '.join(runs[: 2 if len(runs[0]) <= 4 else 1])
  return f'{first}, {_GAP} ({len(devices)} devices)'


def _run(first: int, last: int) -> str:
  return {0: f'{first}', 1: f'{first}, {last}'}.get(last - first, f'{first}-{last}')


def _framed(labels: Sequence[str], headings: Sequence[str], cells: list[list[Segment]]) -> list[Line]:
  """A framed table with cells centred in columns of equal width, except for gaps."""
  widest = max(len(text) for text in [*headings, *(cell.text for row in cells for cell in row)])
  widths = [(1 if heading == _GAP else widest) + 2 for heading in headings]
  margin = max(map(len, labels))

  def line(label: str, left: str, parts: Sequence[Segment], middle: str, right: str) -> Line:
    frames = [left, *[middle] * (len(parts) - 1), right]
    margins = [Segment(label.rjust(margin), 'label'), Segment(' ' * bool(margin), 'frame')]
    parts = [part._replace(text=part.text.center(size)) for part, size in zip(parts, widths)]
    joined = [segment for i, part in enumerate(parts) for segment in (Segment(frames[i], 'frame'), part)]
    return [*margins, *joined, Segment(right, 'frame')]

  def rule(ends: str) -> Line:
    return line('', ends[0], [Segment('─' * size, 'frame') for size in widths], ends[1], ends[2])

  top = [line('', ' ', [Segment(heading, 'label') for heading in headings], ' ', ' ')]
  rows = [line(label, '│', row, '│', '│') for label, row in zip(labels, cells)]
  ruled = [part for row in rows for part in (rule('├┼┤'), row)][1:]
  return [*(top if any(headings) else []), rule('┌┬┐'), *ruled, rule('└┴┘')]
