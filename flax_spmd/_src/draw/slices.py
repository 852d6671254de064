"""Slices: the part of an array on each device.

A sharding cuts every dimension into pieces. A *slice* is one piece per dimension; one device holds it or,
if it is replicated, several do. The *key* of a slice is its row-major number: two devices hold replicas if
and only if they have the same key.

    pieces = cut_by_axes(mesh, [('data',), ()], shape)                        # mesh axes per dimension
    pieces = cut_by_indices(sharding.devices_indices_map(shape), shape)       # indices per device
    pieces.slices

The data are numpy arrays with one number per device or piece, since a mesh may have 65,536 devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AbstractMesh

from flax_spmd._src.array_boxes import Box, box_of
from flax_spmd._src.mesh import MeshLike, axis_sizes


class Slice(NamedTuple):
  """One slice of an array: `(start, stop)` per dimension, and the ids of the devices that hold it."""

  ranges: Box
  devices: tuple[int, ...]


class Pieces(NamedTuple):
  """The pieces of every dimension of an array, and the key of the slice on every device.

  Attributes:
    bounds: per dimension, an array with the (start, stop) of each distinct piece.
    keys: the key of the slice on each device, sorted.
    devices: the ids of the devices, in the same order.
  """

  bounds: tuple[np.ndarray, ...]
  keys: np.ndarray
  devices: np.ndarray

  @property
  def counts(self) -> list[int]:
    """The number of pieces of every dimension."""
    return [len(bound) for bound in self.bounds]

  @property
  def slices(self) -> tuple[Slice, ...]:
    """Every distinct slice once, in row-major order, empty ones included."""
    keys, starts = np.unique(self.keys, return_index=True)
    ids = self.devices.tolist()
    runs = itertools.pairwise([*starts.tolist(), len(ids)])
    return tuple(Slice(at, tuple(ids[start:stop])) for at, (start, stop) in zip(self.ranges(keys), runs))

  def ranges(self, keys: np.ndarray) -> list[Box]:
    """The (start, stop) per dimension of every key."""
    positions = positions_of(keys, self.counts)
    dims = [map(tuple, bound[at].tolist()) for bound, at in zip(self.bounds, positions)]
    return list(zip(*dims)) if dims else [()] * len(keys)

  def held_by(self, key: int) -> np.ndarray:
    """The ids of the devices that hold one slice, in order."""
    start, stop = np.searchsorted(self.keys, [key, key + 1])
    return self.devices[start:stop]


def cut_by_axes(mesh: MeshLike, axes: Sequence[tuple[str, ...]], shape: Sequence[int]) -> Pieces:
  """The pieces of an array whose dimensions are sharded over these mesh axes.

  Args:
    mesh: concrete or abstract mesh; devices of an abstract mesh are numbered in row-major order.
    axes: per dimension, the mesh axes that it is sharded over, outermost first.
    shape: shape of the array. If a size is not divisible, pieces are rounded up as in JAX, so the last ones
      are smaller or empty. All empty pieces of a dimension count as one.

  Example:
    >>> cut_by_axes(abstract_mesh({'data': 2, 'model': 2}), [('data',)], (3,)).slices
    (Slice(ranges=((0, 2),), devices=(0, 1)), Slice(ranges=((2, 3),), devices=(2, 3)))
  """
  sizes = axis_sizes(mesh)
  devices = np.arange(math.prod(sizes.values()))
  coordinates = dict(zip(sizes, positions_of(devices, list(sizes.values()))))
  bounds, positions = [], []
  for size, names in zip(shape, axes):
    parts = [sizes[axis] for axis in names]
    bounds.append(_bounds(size, math.prod(parts)))
    part = number_of([coordinates[axis] for axis in names], parts)
    positions.append(np.minimum(part, len(bounds[-1]) - 1))  # all empty pieces are the last
  if not isinstance(mesh, AbstractMesh):
    devices = np.array([device.id for device in mesh.devices.flat])
  return _pieces(bounds, positions, devices)


def cut_by_indices(indices: Mapping[Any, Sequence[slice]], shape: Sequence[int]) -> Pieces:
  """The pieces of an array with the given indices per device.

  Args:
    indices: per device, a slice of every dimension, as `Sharding.devices_indices_map` returns them.
    shape: shape of the array.
  """
  devices = np.array([device.id for device in indices])
  ranges = [box_of(index, tuple(shape)) for index in indices.values()]
  bounds, positions = [], []
  for dim in zip(*ranges):
    bound, position = np.unique(np.array(dim), axis=0, return_inverse=True)
    bounds.append(bound)
    positions.append(position.reshape(-1))  # numpy 2.0 returns it with another shape
  return _pieces(bounds, positions, devices)


def positions_of(numbers: Any, sizes: Sequence[int]) -> list[Any]:
  """The row-major coordinates of `numbers`: `np.unravel_index`, also for no dimensions.

  Example:
    >>> positions_of(7, (2, 4))
    [1, 3]
  """
  strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
  return [numbers // stride % size for stride, size in zip(strides, sizes)]


def number_of(positions: Sequence[Any], sizes: Sequence[int]) -> Any:
  """The row-major number of some coordinates: `np.ravel_multi_index`, also for no dimensions.

  Example:
    >>> number_of([1, 3], (2, 4))
    7
  """
  number = 0
  for position, size in zip(positions, sizes):
    number = number * size + position
  return number


def _pieces(bounds: Sequence[np.ndarray], positions: Sequence[Any], devices: np.ndarray) -> Pieces:
  """The pieces, from the position of the piece that every device holds, per dimension."""
  keys = np.full(len(devices), number_of(positions, [len(bound) for bound in bounds]))
  order = np.lexsort((devices, keys))
  return Pieces(tuple(bounds), keys[order], devices[order])


def _bounds(size: int, parts: int) -> np.ndarray:
  """(start, stop) of the distinct pieces of a dimension, with sizes rounded up as in JAX.

  Example:
    >>> _bounds(5, 4).tolist()
    [[0, 2], [2, 4], [4, 5], [5, 5]]
  """
  starts = np.arange(parts + 1) * -(-size // parts)
  ends = np.minimum(starts, size)
  return np.unique(np.stack([ends[:-1], ends[1:]], axis=1), axis=0)
