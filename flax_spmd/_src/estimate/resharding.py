"""Moving: which collectives bring an array from one sharding to another, as XLA's partitioner would.

Axes that only come are slices and cost nothing. An axis that changes its dimension is an all-to-all, one that
goes is an all-gather, and axes whose order in a dimension changes are a permute. A sum that every device has
a part of is reduced and scattered along the axes that the result is divided over, and all-reduced along the
others.

    moves(value, (('data',), ()), ((), ('data',)), sizes)   # one all-to-all over data

What XLA does with two such changes at once is its own affair; `tangled` says where that is so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flax_spmd._src.estimate.graph import Axes, Dims, Value, pieces, tile
from flax_spmd._src.hlo.collectives import wire


class Move(NamedTuple):
  """A collective: its kind, the axes that it goes over, and the bytes of its operand on one device."""

  kind: str
  axes: Axes
  bytes: float


def moves(value: Value, before: Dims, after: Dims, sizes: Mapping[str, int]) -> list[Move]:
  """The collectives between two shardings of an array.

  Args:
    value: the array; its dtype is that of what is sent.
    before, after: mesh axes per dimension.
    sizes: size per mesh axis.

  Example:
    >>> moves(Value((8, 8), 'f32'), (('data',), ()), ((), ('data',)), {'data': 4})
    [Move(kind='all-to-all', axes=('data',), bytes=64.0)]
    >>> moves(Value((8, 8), 'f32'), (('data',), ()), ((), ()), {'data': 4})
    [Move(kind='all-gather', axes=('data',), bytes=64.0)]
  """
  if before == after:
    return []
  now = [list(axes) for axes in before]
  _slice(now, before, after)
  found: list[Move] = []

  def move(kind: str, axes: Sequence[str]) -> None:
    bytes_ = tile(value.shape, tuple(map(tuple, now)), sizes) * value.item
    found.append(Move(kind, tuple(axes), bytes_))

  places = {axis: dim for dim, axes in enumerate(after) for axis in axes}
  for dim, axes in enumerate(before):
    for axis in axes:
      if places.get(axis, dim) != dim:
        move('all-to-all', [axis])
        now[dim].remove(axis)
        now[places[axis]].append(axis)
  gone = [axis for axes in now for axis in axes if axis not in places]
  if gone:
    move('all-gather', gone)
    now = [[axis for axis in axes if axis not in gone] for axes in now]
  _slice(now, before, after)
  turned = [axis for axes, wanted in zip(now, after) if tuple(axes) != wanted for axis in axes]
  if turned:
    move('collective-permute', turned)
  return found


def _slice(now: list[list[str]], before: Dims, after: Dims) -> None:
  """Takes the part that a device needs along axes that nothing is divided over yet."""
  for dim, axes in enumerate(after):
    if tuple(now[dim]) == axes[: len(now[dim])]:
      for axis in axes[len(now[dim]) :]:
        if _free(axis, now):
          now[dim].append(axis)
        else:
          break


def _free(axis: str, now: Sequence[Sequence[str]]) -> bool:
  name = axis.partition('[')[0]
  return all(one.partition('[')[0] != name for axes in now for one in axes)


def summing(
  value: Value, natural: Dims, parts: Axes, after: Dims, sizes: Mapping[str, int]
) -> list[Move]:
  """The collectives that add up the parts of a sum and bring it to a sharding.

  Args:
    value: the sum.
    natural: how each part lies.
    parts: the axes along which devices have parts.
    after: how the sum has to lie.
    sizes: size per mesh axis.

  Example:
    >>> summing(Value((8, 8), 'f32'), ((), ()), ('data',), (('data',), ()), {'data': 4})
    [Move(kind='reduce-scatter', axes=('data',), bytes=256.0)]
  """
  now = [list(axes) for axes in natural]
  _slice(now, natural, tuple(tuple(axis for axis in axes if axis not in parts) for axes in after))
  found: list[Move] = []
  scattered = [(axis, dim) for dim, axes in enumerate(after) for axis in axes if axis in parts]
  for axis, dim in scattered:
    bytes_ = tile(value.shape, tuple(map(tuple, now)), sizes) * value.item
    found.append(Move('reduce-scatter', (axis,), bytes_))
    now[dim].append(axis)
  rest = tuple(axis for axis in parts if all(axis != one for one, _ in scattered))
  if rest:
    found.append(Move('all-reduce', rest, tile(value.shape, tuple(map(tuple, now)), sizes) * value.item))
  return [*found, *moves(value, tuple(map(tuple, now)), after, sizes)]


def tangled(found: Sequence[Move]) -> bool:
  """Whether several changes come together, of which it is not known what XLA makes."""
  kinds = [move.kind for move in found if move.kind not in ('all-reduce', 'reduce-scatter')]
  return len(kinds) > 1 or 'collective-permute' in kinds


def sent(found: Sequence[Move], sizes: Mapping[str, int]) -> float:
  """Bytes on the wire, per device."""
  return sum(wire(move.kind, move.bytes, pieces(move.axes, sizes)) for move in found)
