"""Draw: which device holds which slice of an array, for the terminal and as SVG.

    print(draw(x))                                           # an array where it lies
    print(draw((8, 16), NamedSharding(mesh, P('data'))))     # one that exists nowhere yet
    draw(x).slices                                           # the same as data

A sharding cuts every dimension into pieces; a *slice* is one piece per dimension, and it lies on one
device or, replicated, on several. A drawing has one cell per distinct slice, with all devices that
hold it: two devices are replicas of one another just if they stand in the same cell.

Where the mesh is abstract there are no devices yet: they are numbered in its row-major order.
"""

from __future__ import annotations

import colorsys
import dataclasses
import functools
import html
import itertools
import math
import operator
import reprlib
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from flax_spmd.errors import LayoutError
from flax_spmd.mesh import axis_sizes, describe
from flax_spmd.resolution import UNCONSTRAINED, axis_names

if TYPE_CHECKING:
  from rich.text import Text

_WIDTH = 100  # characters
_ROWS, _ROWS_OF_MORE, _PANELS = 16, 8, 4  # a grid's rows are all shown up to 16, else 8 of them
_RUNS = 8  # of device ids in one cell: more are never shown
_GAP = '…'
_CHARACTER, _LINE, _ROW = 7.8, 20, 28  # SVG, in pixels: monospace at 13 px; a line; a row of cells


class Slice(NamedTuple):
  """One slice of an array: `(start, stop)` per dimension, and the ids of the devices that hold it."""

  ranges: tuple[tuple[int, int], ...]
  devices: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Drawing:
  """Which device holds which slice: `str` gives text, notebooks show SVG, `rich` prints in colour.

  Attributes:
    shape: the array's shape.
    title: the array and its sharding.
    summary: how many slices it has, of which size, and on how many devices each lies.
    notes: what a grid cannot show: padding, partial results, what is left to the compiler.
  """

  shape: tuple[int, ...]
  title: str
  summary: str
  notes: tuple[str, ...]
  _axes: tuple[tuple[str, ...], ...]
  _pieces: _Pieces

  @functools.cached_property
  def slices(self) -> tuple[Slice, ...]:
    """Every distinct slice once, in row-major order, empty ones included."""
    keys, starts = np.unique(self._pieces.keys, return_index=True)
    ranges = zip(*self._pieces.ranges(keys)) if self.shape else [()]
    ids = self._pieces.devices.tolist()
    runs = itertools.pairwise([*starts.tolist(), len(ids)])
    return tuple(Slice(at, tuple(ids[start:stop])) for at, (start, stop) in zip(ranges, runs))

  def text(self, width: int = _WIDTH) -> str:
    """The drawing in box-drawing characters.

    Args:
      width: in characters. A wider grid loses its middle; its first and last column always stay.
    """
    return '\n'.join(''.join(part.text for part in line).rstrip() for line in _lines(self, width))

  @property
  def svg(self) -> str:
    """The drawing as a document of its own, legible on light and on dark backgrounds."""
    return _svg(self)

  def __repr__(self) -> str:
    return self.text()

  def _repr_svg_(self) -> str:
    return self.svg

  def _repr_html_(self) -> str:
    return f'<div style="overflow-x: auto">{self.svg}</div>'

  def __rich_console__(self, console: Any, options: Any) -> Iterator[Text]:
    from rich.text import Text  # only who prints pays for rich: 20 ms

    for line in _lines(self, options.max_width):
      text = Text(no_wrap=True, overflow='crop')
      for part in line:
        text.append(part.text, f'#111111 on {_colour(part.key)}' if part.role == 'cell' else '')
      yield text


def draw(x: Any, sharding: Sharding | None = None) -> Drawing:
  """Which device holds which slice of an array, whether it exists or not.

  Args:
    x: an array, a `jax.ShapeDtypeStruct`, anything with a shape (also in a box), or a shape.
    sharding: where it lies, or would; default: `x.sharding`. A `NamedSharding` over a mesh, which may
      be abstract and of any size, or any other JAX sharding. Sizes need not be divisible: JAX rounds
      the pieces up, so the last ones are smaller, or empty.

  Returns:
    A drawing: print it, let a notebook show it, write its `svg` to a file, or read its `slices`.

  Raises:
    LayoutError: there is no shape, no sharding, or they do not fit.

  Example:
    >>> mesh = abstract_mesh({'data': 2, 'model': 2})
    >>> sharding = jax.sharding.NamedSharding(mesh, PartitionSpec('data'))
    >>> drawing = draw(jax.ShapeDtypeStruct((8, 16), jnp.float32), sharding)
    >>> print(drawing)
    float32[8,16] over {'data': 2, 'model': 2} as P('data', None):
      2 slices of float32[4,16], each on 2 devices
    rows: dim 0 over 'data'; columns: dim 1 (whole)
          0:16
        ┌──────┐
    0:4 │ 0, 1 │
        ├──────┤
    4:8 │ 2, 3 │
        └──────┘
    >>> drawing.slices[1]
    Slice(ranges=((4, 8), (0, 16)), devices=(2, 3))
  """
  array = getattr(x, 'value', x)
  shape = _shape(array)
  name = functools.partial(_name, getattr(array, 'dtype', ''))
  sharding = _known(x, name(shape), getattr(array, 'sharding', None) if sharding is None else sharding)
  if isinstance(sharding, NamedSharding):
    pieces, axes = _named(sharding, name(shape), shape)
    where = f'over {describe(sharding.mesh)} as {_spec(sharding.spec, len(shape))}'
    notes = tuple(_notes(sharding, shape))
  else:
    pieces, axes = _mapped(sharding, name(shape), shape), ((),) * len(shape)
    where, notes = f'as {sharding!r}', ()
  return Drawing(shape, f'{name(shape)} {where}', _summary(pieces, name), notes, axes, pieces)


# What lies where.


class _Pieces(NamedTuple):
  """All slices, as arrays: a mesh of 65,536 devices is drawn without an object per device.

  `bounds` are the distinct (start, stop) per dimension. A slice's *key* is its number in row-major
  order; `keys` (sorted) and `devices` have one entry per device.
  """

  bounds: tuple[np.ndarray, ...]
  keys: np.ndarray
  devices: np.ndarray

  @property
  def counts(self) -> list[int]:
    """How many pieces every dimension is cut into."""
    return [len(bound) for bound in self.bounds]

  def held_by(self, key: int) -> np.ndarray:
    start, stop = np.searchsorted(self.keys, [key, key + 1])
    return self.devices[start:stop]

  def ranges(self, keys: np.ndarray) -> list[list[tuple[int, int]]]:
    """Per dimension, the (start, stop) of every key."""
    positions = _positions(keys, self.counts)
    return [list(map(tuple, bound[at].tolist())) for bound, at in zip(self.bounds, positions)]


def _pieces(bounds: Sequence[np.ndarray], positions: Sequence[Any], devices: np.ndarray) -> _Pieces:
  """From the piece that every device holds, per dimension."""
  keys = np.zeros(len(devices), int)
  for bound, position in zip(bounds, positions):
    keys = keys * len(bound) + position
  order = np.lexsort((devices, keys))
  return _Pieces(tuple(bounds), keys[order], devices[order])


def _named(sharding: NamedSharding, name: str, shape: tuple[int, ...]) -> tuple[_Pieces, Any]:
  """The pieces of a NamedSharding, and the mesh axes of every dimension."""
  spec, sizes = sharding.spec, axis_sizes(sharding.mesh)
  if len(spec) > len(shape):
    raise LayoutError(
      f'{name} is of rank {len(shape)}, but its spec {_spec(spec, 0)} is of length {len(spec)}.\n'
      'Fix: give the spec at most one entry per dimension.'
    )
  axes = tuple(map(axis_names, _entries(spec, len(shape))))
  devices = np.arange(math.prod(sizes.values()))
  coordinates = dict(zip(sizes, _positions(devices, list(sizes.values()))))
  bounds, positions = [], []
  for size, names in zip(shape, axes):
    part, parts = 0, 1
    for axis in names:
      part, parts = part * sizes[axis] + coordinates[axis], parts * sizes[axis]
    bounds.append(_bounds(size, parts))
    positions.append(np.minimum(part, len(bounds[-1]) - 1))  # all empty pieces are one
  if not isinstance(sharding.mesh, AbstractMesh):
    devices = np.array([device.id for device in sharding.mesh.devices.flat])
  return _pieces(bounds, positions, devices), axes


def _bounds(size: int, parts: int) -> np.ndarray:
  """(start, stop) of the distinct pieces of a dimension: JAX rounds their size up.

  Example:
    >>> _bounds(5, 4).tolist()
    [[0, 2], [2, 4], [4, 5], [5, 5]]
  """
  starts = np.arange(parts + 1) * -(-size // parts)
  ends = np.minimum(starts, size)
  return np.unique(np.stack([ends[:-1], ends[1:]], axis=1), axis=0)


def _mapped(sharding: Sharding, name: str, shape: tuple[int, ...]) -> _Pieces:
  """The pieces of any other sharding, from the indices that it names per device."""
  try:
    indices = sharding.devices_indices_map(shape)
  except (ValueError, IndexError, AssertionError) as error:  # JAX asserts the rank
    raise LayoutError(
      f'{name} does not fit its sharding {sharding!r}: {error}\n'
      'Fix: choose a shape that it divides, or pass a NamedSharding, which is drawn padded.'
    ) from None
  devices = np.array([device.id for device in indices])
  ranges = [[at.indices(size)[:2] for at, size in zip(index, shape)] for index in indices.values()]
  bounds, positions = [], []
  for dim in zip(*ranges):
    bound, position = np.unique(np.array(dim), axis=0, return_inverse=True)
    bounds.append(bound)
    positions.append(position.reshape(-1))  # numpy 2.0 gives it another shape
  return _pieces(bounds, positions, devices)


def _positions(numbers: Any, sizes: Sequence[int]) -> list[Any]:
  """The row-major coordinates of `numbers`: `np.unravel_index`, also for no dimensions."""
  strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
  return [numbers // stride % size for stride, size in zip(strides, sizes)]


# What the caller passed, and how it is called.


def _shape(array: Any) -> tuple[int, ...]:
  try:
    shape = tuple(map(operator.index, getattr(array, 'shape', array)))
  except TypeError:
    shape = None
  if shape is None or min(shape, default=0) < 0:
    raise LayoutError(
      f'{reprlib.repr(array)} has no shape to draw.\n'
      'Fix: pass one array, a jax.ShapeDtypeStruct, or a shape such as (8, 16).'
    )
  return shape


def _known(x: Any, name: str, sharding: Any) -> Sharding:
  # What JAX says of arrays outside of any mesh: a NamedSharding over an empty one.
  if sharding is None or (isinstance(sharding, NamedSharding) and sharding.mesh.empty):
    raise LayoutError(
      f'{name} ({type(x).__name__}) has no sharding, so no device is known to hold it.\n'
      "Fix: pass one: draw(x, NamedSharding(mesh, PartitionSpec('data'))); the mesh may be abstract."
    )
  if not isinstance(sharding, Sharding):
    raise LayoutError(
      f'{sharding!r} is no sharding: it does not say which devices hold {name}.\n'
      "Fix: pass a jax.sharding.Sharding such as NamedSharding(mesh, PartitionSpec('data'))."
    )
  return sharding


def _name(dtype: Any, shape: Sequence[int]) -> str:
  return f'{dtype}[{",".join(map(str, shape))}]'


def _entries(spec: Any, rank: int) -> tuple[Any, ...]:
  """A spec's entries, one per dimension."""
  return spec.partitions + (None,) * (rank - len(spec))  # JAX forbids tuple(spec) of an unreduced one


def _spec(spec: Any, rank: int) -> str:
  """`P('data', None)`, in one spelling for all versions of JAX."""
  names = ['UNCONSTRAINED' if one is UNCONSTRAINED else repr(one) for one in _entries(spec, rank)]
  return f'P({", ".join(names)})'


def _notes(sharding: NamedSharding, shape: Sequence[int]) -> Iterator[str]:
  sizes = axis_sizes(sharding.mesh)
  for dim, (size, entry) in enumerate(zip(shape, _entries(sharding.spec, len(shape)))):
    parts = math.prod(sizes[axis] for axis in axis_names(entry))
    if entry is UNCONSTRAINED:
      yield f'dim {dim} is UNCONSTRAINED: it is drawn whole, and the compiler may shard it'
    elif size % parts:
      padded = -(-size // parts) * parts
      yield (
        f'dim {dim}: {parts} does not divide {size}: a program pads it to {padded}, '
        'an array cannot lie so'
      )
  unreduced = [repr(axis) for axis in sizes if axis in sharding.spec.unreduced]
  if unreduced:
    yield f'unreduced over {", ".join(unreduced)}: devices of one cell hold partial results, not copies'


def _summary(pieces: _Pieces, name: Any) -> str:
  """`2 slices of float32[4,16], each on 4 devices`."""
  devices = np.unique(pieces.keys, return_counts=True)[1]
  least, most = int(devices.min()), int(devices.max())
  sizes = [bound[:, 1] - bound[:, 0] for bound in pieces.bounds]
  uneven = any(size.min() < size.max() for size in sizes)
  of = f'of {"up to " if uneven else ""}{name([size.max() for size in sizes])}'
  holders = _plural(most, 'device') if least == most else f'{least} to {most} devices'
  return f'{_plural(len(devices), "slice")} {of}, {"each " if len(devices) > 1 else ""}on {holders}'


def _plural(count: int, noun: str) -> str:
  return f'{count} {noun}{"" if count == 1 else "s"}'


# Lines of characters, from which text, colours and SVG are made.


class _Segment(NamedTuple):
  """Some characters of a line: words, a label, the frame, or a cell with its slice's key."""

  text: str
  role: Literal['words', 'label', 'frame', 'cell']
  key: int = 0


_Line = list[_Segment]


def _lines(drawing: Drawing, width: int) -> Iterator[_Line]:
  counts = drawing._pieces.counts
  # The last two sharded dimensions are the grid; whole ones stand in where fewer are sharded.
  grid = sorted(sorted(range(len(counts)), key=lambda dim: (counts[dim] > 1, dim))[-2:])
  panels = [dim for dim, count in enumerate(counts) if count > 1 and dim not in grid]
  sizes = [counts[dim] for dim in panels]

  header = f'{drawing.title}: {drawing.summary}'
  if len(header) <= width:
    yield from _words(header, width)
  else:
    yield from [*_words(f'{drawing.title}:', width), *_words(f'  {drawing.summary}', width)]
  yield from _words(_legend(drawing, grid, panels), width)
  for number in _some(math.prod(sizes), _PANELS):
    if number is None:
      yield from [[], *_words(f'{_GAP} {_plural(math.prod(sizes) - _PANELS, "more panel")}', width)]
      continue
    at = dict(zip(panels, _positions(number, sizes)))
    if at:
      places = (f'dim {dim} at {_range(drawing, dim, position)}' for dim, position in at.items())
      yield from [[], *_words(', '.join(places), width)]
    yield from _grid(drawing, grid, at, width)
  for note in drawing.notes:
    yield from _words(f'- {note}', width)


def _words(text: str, width: int) -> list[_Line]:
  wrapped = textwrap.wrap(text, width, subsequent_indent='  ', break_on_hyphens=False)
  return [[_Segment(line, 'words')] for line in wrapped]


def _legend(drawing: Drawing, grid: Sequence[int], panels: Sequence[int]) -> str:
  """`rows: dim 0 over 'data'; columns: dim 3 (whole); whole: dim 1, dim 2`."""

  def cut(dim: int) -> str:
    count = drawing._pieces.counts[dim]
    if drawing._axes[dim]:
      return f'dim {dim} over {" x ".join(map(repr, drawing._axes[dim]))}'
    return f'dim {dim} ({"whole" if count == 1 else f"{count} pieces"})'

  roles = [('panels: ', panels), ('rows: ', grid[:-1]), ('columns: ', grid[-1:])]
  shown = [role + ', '.join(map(cut, dims)) for role, dims in roles if dims]
  others = [f'dim {dim}' for dim in range(len(drawing.shape)) if dim not in grid and dim not in panels]
  return '; '.join([*shown, *([f'whole: {", ".join(others)}'] if others else [])])


def _grid(drawing: Drawing, grid: Sequence[int], at: Mapping[int, int], width: int) -> list[_Line]:
  """One grid, with as many columns as fit."""
  row, column = [None, None, *grid][-2:]
  counts = {None: 1, **dict(enumerate(drawing._pieces.counts))}
  rows = _some(counts[row], _ROWS if counts[row] <= _ROWS else _ROWS_OF_MORE)
  labels = [_range(drawing, row, position) for position in rows]
  cell = functools.cache(lambda i, j: _cell(drawing, {**at, row: i, column: j}))
  lines = []
  for most in range(max(2, min(counts[column], width // 4)), 1, -1):  # no column is narrower than 4
    columns = _some(counts[column], most)
    headings = [_range(drawing, column, position) for position in columns]
    cells = [[cell(i, j) for j in columns] for i in rows]
    lines = _framed(labels, headings, cells)
    if sum(len(part.text) for part in lines[-1]) <= width:
      break
  return lines


def _some(count: int, most: int) -> list[int | None]:
  """All of `range(count)`, or its first and last ones around a gap.

  Example:
    >>> _some(9, 4)
    [0, 1, None, 7, 8]
  """
  if count <= most:
    return list(range(count))
  return [*range(most - most // 2), None, *range(count - most // 2, count)]


def _range(drawing: Drawing, dim: int | None, position: int | None) -> str:
  if position is None:
    return _GAP
  return '' if dim is None else '{}:{}'.format(*drawing._pieces.bounds[dim][position])


def _cell(drawing: Drawing, at: Mapping[int | None, int | None]) -> _Segment:
  if None in at.values():
    return _Segment(_GAP, 'label')
  key = 0
  for dim, count in enumerate(drawing._pieces.counts):
    key = key * count + (at.get(dim) or 0)
  empty = any(start == stop for start, stop in _slice(drawing, key))
  return _Segment(_ids(drawing._pieces.held_by(key)) + (' (empty)' if empty else ''), 'cell', key)


def _slice(drawing: Drawing, key: int) -> list[tuple[int, int]]:
  return [ranges[0] for ranges in drawing._pieces.ranges(np.array([key]))]


def _ids(devices: np.ndarray) -> str:
  """Device ids, in runs; many runs end in their number.

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


def _framed(labels: Sequence[str], headings: Sequence[str], cells: list[list[_Segment]]) -> list[_Line]:
  """A table: its cells, centred in columns of one width (but for a gap), and its frame."""
  widest = max(len(text) for text in [*headings, *(cell.text for row in cells for cell in row)])
  widths = [(1 if heading == _GAP else widest) + 2 for heading in headings]
  margin = max(map(len, labels))

  def line(label: str, left: str, parts: Sequence[_Segment], middle: str, right: str) -> _Line:
    frames = [left, *[middle] * (len(parts) - 1), right]
    margins = [_Segment(label.rjust(margin), 'label'), _Segment(' ' * bool(margin), 'frame')]
    parts = [part._replace(text=part.text.center(size)) for part, size in zip(parts, widths)]
    joined = [
      segment for i, part in enumerate(parts) for segment in (_Segment(frames[i], 'frame'), part)
    ]
    return [*margins, *joined, _Segment(right, 'frame')]

  def rule(ends: str) -> _Line:
    return line('', ends[0], [_Segment('─' * size, 'frame') for size in widths], ends[1], ends[2])

  top = [line('', ' ', [_Segment(heading, 'label') for heading in headings], ' ', ' ')]
  rows = [line(label, '│', row, '│', '│') for label, row in zip(labels, cells)]
  ruled = [part for row in rows for part in (rule('├┼┤'), row)][1:]
  return [*(top if any(headings) else []), rule('┌┬┐'), *ruled, rule('└┴┘')]


def _svg(drawing: Drawing) -> str:
  y, right, elements = 0, 0.0, []
  for line in _lines(drawing, _WIDTH):
    if line and not any(part.text.strip() for part in line if part.role != 'frame'):
      continue  # cells are rectangles here and need no rules
    height = _ROW if any(part.role == 'cell' for part in line) else _LINE
    x = 0.0
    for part in line:
      elements += _svg_segment(drawing, part, x, y, height)
      x += len(part.text) * _CHARACTER
    y, right = y + height, max(right, x)
  size = f'width="{right + 8:.0f}" height="{y + 8}" viewBox="-4 -4 {right + 8:.0f} {y + 8}"'
  font = 'font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="13"'
  # Words stand on whatever background there is: a grey that both black and white set off.
  head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} fill="#7a7a7a">'
  return '\n'.join([head, *elements, '</svg>'])


def _svg_segment(drawing: Drawing, part: _Segment, x: float, y: float, height: float) -> Iterator[str]:
  width, text = len(part.text) * _CHARACTER, html.escape(part.text.strip())
  ink, place = '', f'x="{x + width / 2:.1f}" text-anchor="middle"'
  if part.role == 'cell':
    ranges = ', '.join(f'{start}:{stop}' for start, stop in _slice(drawing, part.key))
    yield (
      f'<rect x="{x - 3:.1f}" y="{y + 1}" width="{width + 6:.1f}" height="{height - 2}" rx="3" '
      f'fill="{_colour(part.key)}"><title>[{ranges}]: {text}</title></rect>'
    )
    ink = 'fill="#111" '
  if part.role == 'words':
    indent = len(part.text) - len(part.text.lstrip())
    place = f'x="{indent * _CHARACTER:.1f}"'
  if text and part.role != 'frame':
    yield f'<text {ink}{place} y="{y + height / 2:.1f}" dominant-baseline="central">{text}</text>'


def _colour(key: int) -> str:
  """A light colour that dark words stand on, and unlike its neighbours' in row and column.

  Hue and lightness are Roberts' R2 sequence (powers of 1 / plastic number): in a sequence of hues
  alone, some widths of a grid put nearly equal ones below one another.
  """
  hue, lightness = (0.58 + key * 0.7548777) % 1, 0.7 + 0.16 * (key * 0.5698403 % 1)
  red, green, blue = colorsys.hls_to_rgb(hue, lightness, 0.65)
  return f'#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}'
