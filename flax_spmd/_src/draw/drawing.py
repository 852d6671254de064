"""Drawings: the slice of an array on each device, for the terminal and as SVG.

    print(draw(x))                                           # an array with its sharding
    print(draw((8, 16), NamedSharding(mesh, P('data'))))     # a shape with a sharding
    draw(x).slices                                           # the same as data

A drawing needs only a shape and a sharding. It has one cell per distinct slice, with the ids of all devices
that hold it, and notes for facts that cells cannot show. Devices of an abstract mesh are numbered in
row-major order.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding, Sharding

from flax_spmd._src.draw.lines import WIDTH, Lines
from flax_spmd._src.draw.slices import Pieces, Slice, cut_by_axes, cut_by_indices
from flax_spmd._src.draw.svg import svg_of
from flax_spmd._src.draw.text_picture import Line, picture, words
from flax_spmd._src.mesh import axis_sizes, describe
from flax_spmd._src.public import public
from flax_spmd._src.rules.decisions import UNCONSTRAINED, axis_names
from flax_spmd._src.text import array_text, plural, value_text
from flax_spmd.errors import LayoutError


@public('flax_spmd')
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Drawing(Lines):
  """The slice of an array on each device: `str` returns text, notebooks show SVG, `rich` prints in colour.

  Attributes:
    shape: shape of the array.
    title: dtype and shape of the array, and its sharding.
    summary: number and shape of its slices, and the number of devices that hold each.
    notes: padding, partial results, and dimensions that the compiler may shard.

  Example:
    >>> mesh = abstract_mesh({'data': 2, 'model': 2})
    >>> drawing = draw((8, 16), jax.sharding.NamedSharding(mesh, PartitionSpec('data')))
    >>> drawing.slices[0]
    Slice(ranges=((0, 4), (0, 16)), devices=(0, 1))
    >>> _ = (tmp / 'array.svg').write_text(drawing.svg)
  """

  shape: tuple[int, ...]
  title: str
  summary: str
  notes: tuple[str, ...]
  _axes: tuple[tuple[str, ...], ...]
  _pieces: Pieces

  @functools.cached_property
  def slices(self) -> tuple[Slice, ...]:
    """Every distinct slice once, in row-major order, empty ones included."""
    return self._pieces.slices

  @property
  def svg(self) -> str:
    """The drawing as an SVG document, legible on light and dark backgrounds."""
    return svg_of(self._lines(WIDTH))

  def _lines(self, width: int) -> Iterator[Line]:
    header = f'{self.title}: {self.summary}'
    for text in [header] if len(header) <= width else [f'{self.title}:', f'  {self.summary}']:
      yield from words(text, width)
    yield from picture(self._pieces, self._axes, width)
    for note in self.notes:
      yield from words(f'- {note}', width)


@public('flax_spmd')
def draw(x: Any, sharding: Sharding | None = None) -> Drawing:
  """Draws the slice of an array on each device; the array need not exist.

  Args:
    x: an array, a `jax.ShapeDtypeStruct`, another object with a shape (boxed or not), or a shape.
    sharding: any JAX sharding, such as a `NamedSharding` over a concrete or abstract mesh; default:
      `x.sharding`. Sizes need not be divisible: JAX rounds the size of shards up, so the last ones are
      smaller or empty.

  Returns:
    A drawing: print it, display it in a notebook, write its `svg` to a file, or read its `slices`.

  Raises:
    LayoutError: there is no shape or no sharding, or the two do not fit.

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
  name = functools.partial(array_text, getattr(array, 'dtype', ''))
  sharding = _checked(x, name(shape), getattr(array, 'sharding', None) if sharding is None else sharding)
  if isinstance(sharding, NamedSharding):
    axes = _axes(sharding.spec, name(shape), len(shape))
    pieces = cut_by_axes(sharding.mesh, axes, shape)
    where = f'over {describe(sharding.mesh)} as {_spec(sharding.spec, len(shape))}'
    notes = tuple(_notes(sharding, shape))
  else:
    axes = ((),) * len(shape)
    pieces = cut_by_indices(_indices(sharding, name(shape), shape), shape)
    where, notes = f'as {sharding!r}', ()
  return Drawing(shape, f'{name(shape)} {where}', _summary(pieces, name), notes, axes, pieces)


# -- the arguments


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


def _checked(x: Any, name: str, sharding: Any) -> Sharding:
  # Abstract values outside any mesh have a NamedSharding over an empty mesh.
  if sharding is None or (isinstance(sharding, NamedSharding) and sharding.mesh.empty):
    raise LayoutError(
      f'{name} ({type(x).__name__}) has no sharding, so its devices are unknown.\n'
      "Fix: pass one: draw(x, NamedSharding(mesh, PartitionSpec('data'))); the mesh may be abstract."
    )
  if not isinstance(sharding, Sharding):
    raise LayoutError(
      f'{value_text(sharding)} is not a sharding of {name}.\n'
      "Fix: pass a jax.sharding.Sharding such as NamedSharding(mesh, PartitionSpec('data'))."
    )
  return sharding


def _axes(spec: Any, name: str, rank: int) -> tuple[tuple[str, ...], ...]:
  """The mesh axes of every dimension."""
  if len(spec) > rank:
    raise LayoutError(
      f'{name} is of rank {rank}, but its spec {_spec(spec, 0)} is of length {len(spec)}.\n'
      'Fix: give the spec at most one entry per dimension.'
    )
  return tuple(map(axis_names, _entries(spec, rank)))


def _entries(spec: Any, rank: int) -> tuple[Any, ...]:
  """A spec's entries, one per dimension."""
  return spec.partitions + (None,) * (rank - len(spec))  # JAX forbids tuple(spec) of an unreduced one


def _indices(sharding: Sharding, name: str, shape: tuple[int, ...]) -> Mapping[Any, Any]:
  """The indices per device of a sharding other than NamedSharding."""
  try:
    return sharding.devices_indices_map(shape)
  except (ValueError, IndexError, AssertionError) as error:  # JAX asserts the rank
    raise LayoutError(
      f'{name} does not fit its sharding {value_text(sharding)}: {error}\n'
      'Fix: choose a divisible shape, or pass a NamedSharding, which is drawn with padding.'
    ) from None


# -- the text


def _spec(spec: Any, rank: int) -> str:
  """`P('data', None)`, spelled the same under all versions of JAX."""
  names = ['UNCONSTRAINED' if one is UNCONSTRAINED else repr(one) for one in _entries(spec, rank)]
  return f'P({", ".join(names)})'


def _summary(pieces: Pieces, name: Callable[[Sequence[int]], str]) -> str:
  """`2 slices of float32[4,16], each on 4 devices`."""
  devices = np.unique(pieces.keys, return_counts=True)[1]
  least, most = int(devices.min()), int(devices.max())
  sizes = [bound[:, 1] - bound[:, 0] for bound in pieces.bounds]
  uneven = any(size.min() < size.max() for size in sizes)
  of = f'of {"up to " if uneven else ""}{name([size.max() for size in sizes])}'
  holders = plural(most, 'device') if least == most else f'{least} to {most} devices'
  return f'{plural(len(devices), "slice")} {of}, {"each " if len(devices) > 1 else ""}on {holders}'


def _notes(sharding: NamedSharding, shape: Sequence[int]) -> Iterator[str]:
  sizes = axis_sizes(sharding.mesh)
  for dim, (size, entry) in enumerate(zip(shape, _entries(sharding.spec, len(shape)))):
    parts = math.prod(sizes[axis] for axis in axis_names(entry))
    if entry is UNCONSTRAINED:
      yield f'dim {dim} is UNCONSTRAINED: drawn as replicated, but the compiler may shard it'
    elif size % parts:
      padded = -(-size // parts) * parts
      yield (
        f'dim {dim}: {size} is not divisible by {parts}: a program pads it to {padded}, '
        'a concrete array cannot have this sharding'
      )
  unreduced = [repr(axis) for axis in sizes if axis in sharding.spec.unreduced]
  if unreduced:
    yield f'unreduced over {", ".join(unreduced)}: devices of one cell hold partial results, not copies'
