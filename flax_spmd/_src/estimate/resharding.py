"""Resharding: the collectives that XLA's partitioner inserts between two shardings of one array.

* An axis that is added to a dimension is a slice, and free.
* An axis that moves to another dimension is an all-to-all.
* An axis that is removed is an all-gather.
* A new order of the axes of one dimension is a collective-permute.
* A partial sum is reduce-scattered along the axes that the result is sharded over, and all-reduced along the rest.

    reshard(value, (('data',), ()), ((), ('data',)), sizes)   # one all-to-all over data

How XLA combines several of these changes is not modelled: `is_ambiguous` detects them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flax_spmd._src.estimate.graph import Axes, GraphValue, Spec, shard_count, shard_size
from flax_spmd._src.hlo.collectives import wire


class CollectiveOp(NamedTuple):
  """A collective.

  Attributes:
    kind: name of the HLO operation, such as `all-gather`.
    axes: mesh axes that it communicates over.
    bytes: size of its operand on one device.
  """

  kind: str
  axes: Axes
  bytes: float


def reshard(
  value: GraphValue, before: Spec, after: Spec, sizes: Mapping[str, int]
) -> list[CollectiveOp]:
  """The collectives between two shardings of an array.

  Args:
    value: shape and wire dtype of the array.
    before, after: mesh axes per dimension.
    sizes: size per mesh axis.

  Example:
    >>> reshard(GraphValue((8, 8), 'f32'), (('data',), ()), ((), ('data',)), {'data': 4})
    [CollectiveOp(kind='all-to-all', axes=('data',), bytes=64.0)]
    >>> reshard(GraphValue((8, 8), 'f32'), (('data',), ()), ((), ()), {'data': 4})
    [CollectiveOp(kind='all-gather', axes=('data',), bytes=64.0)]
  """
  if before == after:
    return []
  before, after = _in_parts(before, after, sizes), _in_parts(after, before, sizes)
  now = [list(axes) for axes in before]
  _slice(now, before, after)
  ops: list[CollectiveOp] = []

  def add(kind: str, axes: Sequence[str]) -> None:
    ops.append(CollectiveOp(kind, tuple(axes), _shard_bytes(value, now, sizes)))

  target_dims = {axis: dim for dim, axes in enumerate(after) for axis in axes}
  for dim, axes in enumerate(before):
    for axis in axes:
      if target_dims.get(axis, dim) != dim:
        add('all-to-all', [axis])
        now[dim].remove(axis)
        now[target_dims[axis]].append(axis)
  removed = [axis for axes in now for axis in axes if axis not in target_dims]
  if removed:
    add('all-gather', removed)
    now = [[axis for axis in axes if axis not in removed] for axes in now]
  _slice(now, before, after)
  reordered = [axis for axes, target in zip(now, after) if tuple(axes) != target for axis in axes]
  if reordered:
    add('collective-permute', reordered)
  return ops


def _in_parts(spec: Spec, other: Spec, sizes: Mapping[str, int]) -> Spec:
  """A sharding with each axis split in two where the other sharding has both parts of it.

  Example:
    >>> _in_parts(((), ('data',)), (('data[2/2]',), ('data[2/4]',)), {'data': 4})
    ((), ('data[2/2]', 'data[2/4]'))
  """
  parts: dict[str, list[str]] = {}
  for axis in (axis for axes in other for axis in axes if '[' in axis):
    parts.setdefault(axis.partition('[')[0], []).append(axis)
  parts = {name: found for name, found in parts.items() if shard_count(found, sizes) == sizes.get(name)}
  if not parts:
    return spec
  outermost = lambda axis: int(axis.rpartition('/')[2][:-1])
  return tuple(
    tuple(part for axis in axes for part in sorted(parts.get(axis, [axis]), key=outermost))
    for axes in spec
  )


def _slice(now: list[list[str]], before: Spec, after: Spec) -> None:
  """Adds the axes of `after` that no dimension is sharded over yet; the local slices cost nothing."""
  for dim, axes in enumerate(after):
    if tuple(now[dim]) == axes[: len(now[dim])]:
      for axis in axes[len(now[dim]) :]:
        if _is_unused(axis, now):
          now[dim].append(axis)
        else:
          break


def _is_unused(axis: str, now: Sequence[Sequence[str]]) -> bool:
  name = axis.partition('[')[0]
  return all(one.partition('[')[0] != name for axes in now for one in axes)


def _shard_bytes(value: GraphValue, now: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> float:
  return shard_size(value.shape, tuple(map(tuple, now)), sizes) * value.itemsize


def reduce_partial_sum(
  value: GraphValue, before: Spec, partial_axes: Axes, after: Spec, sizes: Mapping[str, int]
) -> list[CollectiveOp]:
  """The collectives that reduce a partial sum and reshard the result.

  Args:
    value: shape and dtype of the sum.
    before: sharding of the terms, each of which is on one device.
    partial_axes: axes along which devices hold different terms.
    after: sharding of the reduced sum.
    sizes: size per mesh axis.

  Example:
    >>> reduce_partial_sum(GraphValue((8, 8), 'f32'), ((), ()), ('data',), (('data',), ()), {'data': 4})
    [CollectiveOp(kind='reduce-scatter', axes=('data',), bytes=256.0)]
  """
  now = [list(axes) for axes in before]
  ops: list[CollectiveOp] = []
  scattered = [(axis, dim) for dim, axes in enumerate(after) for axis in axes if axis in partial_axes]
  for axis, dim in scattered:
    ops.append(CollectiveOp('reduce-scatter', (axis,), _shard_bytes(value, now, sizes)))
    now[dim].append(axis)
  rest = tuple(axis for axis in partial_axes if all(axis != one for one, _ in scattered))
  if rest:
    ops.append(CollectiveOp('all-reduce', rest, _shard_bytes(value, now, sizes)))
  return [*ops, *reshard(value, tuple(map(tuple, now)), after, sizes)]


def without_reduce_scatter(ops: Sequence[CollectiveOp]) -> Sequence[CollectiveOp]:
  """The same collectives for a compiler without reduce-scatter, as XLA's for CPUs: an all-reduce, and a slice.

  Example:
    >>> without_reduce_scatter([CollectiveOp('reduce-scatter', ('data',), 256.0)])
    [CollectiveOp(kind='all-reduce', axes=('data',), bytes=256.0)]
  """
  if all(op.kind != 'reduce-scatter' for op in ops):
    return ops
  reductions = [op for op in ops if op.kind in ('reduce-scatter', 'all-reduce')]
  axes = tuple(axis for op in reductions for axis in op.axes)
  rest = [op for op in ops if op not in reductions]
  return [CollectiveOp('all-reduce', axes, reductions[0].bytes), *rest]


def is_ambiguous(ops: Sequence[CollectiveOp]) -> bool:
  """Whether XLA could choose other collectives: several changes at once, or a permute.

  A part of an axis that moves to the dimension with the rest of it, as in a reshape, is one change.
  """
  if len(ops) == 2 and [op.kind for op in ops] == ['all-to-all', 'collective-permute']:
    moved, reordered = ops[0].axes, ops[1].axes
    if len(moved) == 1 and '[' in moved[0] and {*moved} < {*reordered}:
      return len({axis.partition('[')[0] for axis in reordered}) > 1
  kinds = [op.kind for op in ops if op.kind not in ('all-reduce', 'reduce-scatter')]
  return len(kinds) > 1 or 'collective-permute' in kinds


def wire_bytes(ops: Sequence[CollectiveOp], sizes: Mapping[str, int]) -> float:
  """Bytes that each device sends."""
  return sum(wire(op.kind, op.bytes, shard_count(op.axes, sizes)) for op in ops)
