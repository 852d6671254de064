"""Graphs: a lowered step as plain values, read once and estimated under many layouts.

A value is an integer, an index into `Graph.values`, which holds its shape and dtype. The sharding of a value is
a `Spec`: like a `PartitionSpec`, but with one tuple of mesh axes for every dimension, major axis first. The
entry `'model[2/4]'` is a part of an axis, as in `hlo.device_groups`: 2 of its 4 positions, the inner ones.

    spec = ('data',), (), ('model',)                        # a (batch, length, embed) array
    shard_size(graph.values[number].shape, spec, sizes)     # its number of elements on one device
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Axes: TypeAlias = tuple[str, ...]
Spec: TypeAlias = tuple[Axes, ...]

PRODUCTS = ('dot_general', 'convolution')

_BITS = re.compile(r'[a-z]+(\d+)')


@functools.cache
def _itemsize(dtype: str) -> float:
  match = _BITS.match(dtype.removeprefix('complex<'))
  bits = int(match[1]) if match else 0
  return 1.0 if dtype == 'i1' else bits / 8 * (2 if dtype.startswith('complex') else 1)


class GraphValue(NamedTuple):
  """An array of the program.

  Attributes:
    shape: global shape.
    dtype: element type in StableHLO's spelling, such as `bf16` or `i32`.
  """

  shape: tuple[int, ...]
  dtype: str

  @property
  def itemsize(self) -> float:
    """Bytes per element: 1 for a boolean, 0.5 for a 4-bit integer."""
    return _itemsize(self.dtype)


class Op(NamedTuple):
  """An operation.

  Attributes:
    kind: name without the dialect, such as `dot_general`.
    operands, results: values.
    attributes: the attributes that costs depend on, as numbers or tuples of numbers.
    blocks: condition and body of a loop, the branches of a conditional; empty for other kinds.
    source: line of the model that it was traced from, such as `model.py:31`, or ''.
    equal: a number; equal for operations whose results are equal.
  """

  kind: str
  operands: tuple[int, ...]
  results: tuple[int, ...]
  attributes: Mapping[str, Any]
  blocks: tuple[Block, ...] = ()
  source: str = ''
  equal: int = 0


class Block(NamedTuple):
  """A sequence of operations, with the values that it takes and returns."""

  arguments: tuple[int, ...]
  ops: tuple[Op, ...]
  returned: tuple[int, ...]


class Graph(NamedTuple):
  """A program: all of its values, and its main block."""

  values: tuple[GraphValue, ...]
  main: Block


def axis_size(axis: str, sizes: Mapping[str, int]) -> int:
  """The number of devices along a mesh axis or a part of one.

  Example:
    >>> axis_size('model', {'model': 4}), axis_size('model[2/4]', {'model': 4})
    (4, 2)
  """
  return sizes[axis] if axis in sizes else int(axis.rpartition('[')[2].partition('/')[0])


def shard_count(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
  """The number of shards of a dimension that is sharded over some axes."""
  count = 1
  for axis in axes:
    count *= axis_size(axis, sizes)
  return count


def shard_size(shape: Sequence[int], spec: Spec, sizes: Mapping[str, int]) -> int:
  """The number of elements on one device. Uneven shards are padded, as in XLA.

  Example:
    >>> shard_size((10, 6), (('data',), ()), {'data': 4})
    18
  """
  count = 1
  for size, axes in zip(shape, spec, strict=True):
    count *= -(-size // shard_count(axes, sizes)) if axes else size
  return count


def prime_factors(number: int) -> list[int]:
  """The prime factors of a number, smallest first.

  Example:
    >>> prime_factors(12), prime_factors(1)
    ([2, 2, 3], [])
  """
  factors, factor = [], 2
  while number > 1:
    while number % factor == 0:
      factors.append(factor)
      number //= factor
    factor += 1
  return factors


def replicated(rank: int) -> Spec:
  """The sharding of a replicated array."""
  return ((),) * rank


def used_axes(spec: Spec) -> set[str]:
  """The mesh axes that an array is sharded over."""
  return {axis for axes in spec for axis in axes}
