"""Graphs: what a lowered step computes, as plain values, read once and estimated under many layouts.

A value is a number; `Graph.values` says its shape and dtype. How a value lies over the mesh is a `Dims`: the
mesh axes of each of its dimensions, the major one first. `('model[2/4]',)` is a part of an axis, as in
`explore.groups`: 2 of its 4 positions, the inner ones.

    dims = ('data',), (), ('model',)         # a (batch, length, embed) array
    tile(values[number].shape, dims, sizes)  # its shape on one device
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Axes: TypeAlias = tuple[str, ...]
Dims: TypeAlias = tuple[Axes, ...]

_BITS = re.compile(r'[a-z]+(\d+)')


@functools.cache
def _item(dtype: str) -> float:
  found = _BITS.match(dtype.removeprefix('complex<'))
  bits = int(found[1]) if found else 0
  return 1.0 if dtype == 'i1' else bits / 8 * (2 if dtype.startswith('complex') else 1)


class Value(NamedTuple):
  """An array: its shape, and its dtype as StableHLO writes it (`bf16`, `i32`)."""

  shape: tuple[int, ...]
  dtype: str

  @property
  def item(self) -> float:
    """Bytes of an element; a boolean takes one, of 4 bits two share one."""
    return _item(self.dtype)


class Op(NamedTuple):
  """An operation.

  Attributes:
    kind: its name without the dialect, such as `dot_general`.
    operands, results: numbers of values.
    details: its attributes that matter, as numbers or tuples of them.
    blocks: of a loop, condition and body; of a branch, each of the ways; of others nothing.
    source: the line of the model that it comes from, `model.py:31`, or ''.
  """

  kind: str
  operands: tuple[int, ...]
  results: tuple[int, ...]
  details: Mapping[str, Any]
  blocks: tuple[Block, ...] = ()
  source: str = ''


class Block(NamedTuple):
  """Operations in order, on arguments, and what is returned."""

  arguments: tuple[int, ...]
  ops: tuple[Op, ...]
  returned: tuple[int, ...]


class Graph(NamedTuple):
  """A program: its values and its main block."""

  values: tuple[Value, ...]
  main: Block


def size_of(axis: str, sizes: Mapping[str, int]) -> int:
  """The number of devices along an axis, or along a part of one.

  Example:
    >>> size_of('model', {'model': 4}), size_of('model[2/4]', {'model': 4})
    (4, 2)
  """
  return sizes[axis] if axis in sizes else int(axis.rpartition('[')[2].partition('/')[0])


def pieces(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
  """Into how many pieces axes cut a dimension."""
  number = 1
  for axis in axes:
    number *= size_of(axis, sizes)
  return number


def tile(shape: Sequence[int], dims: Dims, sizes: Mapping[str, int]) -> int:
  """The number of elements that one device holds; uneven pieces are padded, as XLA does.

  Example:
    >>> tile((10, 6), (('data',), ()), {'data': 4})
    18
  """
  number = 1
  for size, axes in zip(shape, dims, strict=True):
    number *= -(-size // pieces(axes, sizes)) if axes else size
  return number


def whole(rank: int) -> Dims:
  """Replicated."""
  return ((),) * rank


def used(dims: Dims) -> set[str]:
  """The axes that an array is divided over."""
  return {axis for axes in dims for axis in axes}
