"""Resharding: the collectives that XLA's partitioner inserts between two shardings of one array.

* An axis that is added to a dimension is a slice, and free.
* An axis that moves to another dimension is an all-to-all.
* An axis that is removed is an all-gather.
* As many shards of each dimension on other devices are a collective-permute. XLA counts shards, so it also brings
  them into another order by a permute: before a gather, and after a slice or an all-to-all.
* A partial sum is reduce-scattered along the axes that cut its result first, and all-reduced along the rest. On GPUs, a
  reduce-scatter makes one cut: a sum that is cut along several dimensions, or further, is all-reduced whole.

    reshard(value, (('data',), ()), ((), ('data',)), sizes)   # one all-to-all over data

These rules were compared with compiled programs (`tests/estimate/resharding_test.py`); where they are too few,
`is_ambiguous` detects it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from flax_spmd._src.estimate.graph import (
  PRODUCTS,
  Axes,
  GraphValue,
  Spec,
  axis_size,
  shard_count,
  shard_size,
)
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
  parts = _in_parts(before, after, sizes), _in_parts(after, before, sizes)
  if parts[0] == parts[1]:
    return []
  if moved := _permuted(value, before, after, sizes):
    return [moved]
  before, after = parts
  if coarser := _coarsened(value, before, after, sizes):
    return coarser
  if _is_finer(before, after, sizes):
    is_sliced = all(other[: len(one)] == one for one, other in zip(before, after))
    return [] if is_sliced else [_permute(value, after, _all_axes((*before, *after)), sizes)]
  now = [list(axes) for axes in before]
  _slice(now, after, {to for _, to in _moves(before, after)})
  sliced = tuple(map(tuple, now))
  if sliced != before and all(one[: len(other)] == other for one, other in zip(sliced, after)):
    return _coarsened(value, sliced, after, sizes)
  held, wanted = (shard_count(_all_axes(spec), sizes) for spec in (before, after))
  if held == wanted and (exchanged := _exchanged(value, before, after, sizes)):
    return exchanged
  exchanged = _exchanged(value, sliced, after, sizes)
  if wanted > held and (len(exchanged) != 1 or _unused(before, sizes)[1:]):
    return _sliced_and_exchanged(value, before, after, sizes) or [_whole_gather(value, before, sizes)]
  return exchanged or _moved(value, before, after, sizes)


def _unused(spec: Spec, sizes: Mapping[str, int]) -> list[str]:
  return [axis for axis, size in sizes.items() if size > 1 and _is_unused(axis, spec)]


def _whole_gather(value: GraphValue, before: Spec, sizes: Mapping[str, int]) -> CollectiveOp:
  return CollectiveOp('all-gather', _all_axes(before), _shard_bytes(value, before, sizes))


def _sliced_and_exchanged(
  value: GraphValue, before: Spec, after: Spec, sizes: Mapping[str, int]
) -> list[CollectiveOp]:
  """The collectives to a shard for each device from fewer ones; [] if XLA gathers the array instead.

  XLA slices the array along unused axes in their order, until an all-to-all makes as many shards of each dimension, and
  brings these into order.
  """
  if _unused(after, sizes) or any('[' in axis for axis in (*_all_axes(before), *_all_axes(after))):
    return []
  counts = [(shard_count(one, sizes), shard_count(other, sizes)) for one, other in zip(before, after)]
  if any(max(pair) % min(pair) for pair in counts):
    return []
  fewer = [held // wanted for held, wanted in counts if held > wanted]
  more = {dim: wanted // held for dim, (held, wanted) in enumerate(counts) if wanted > held}
  if len(fewer) != 1 or (len(more) == 1 and all(counts[dim][0] > 1 for dim in more)):
    return []
  fits = [dim for dim, ratio in more.items() if ratio == fewer[0]]
  fits = fits or [dim for dim, ratio in more.items() if ratio % fewer[0] == 0]
  if not fits:
    return []
  shard = math.prod(value.shape) * value.itemsize / shard_count(tuple(sizes), sizes)
  [source] = [dim for dim, (held, wanted) in enumerate(counts) if held > wanted]
  moved = tuple(_innermost(before[source], fewer[0], sizes))[::-1]
  if any('[' in axis for axis in moved):
    return []
  return [
    CollectiveOp('all-to-all', moved, shard),
    _permute(value, after, _all_axes((*before, *after)), sizes),
  ]


def _moved(value: GraphValue, before: Spec, after: Spec, sizes: Mapping[str, int]) -> list[CollectiveOp]:
  """The collectives where some axes move and others are removed or added.

  XLA gathers an array whole if axes move from between others, or while another dimension, or that which they leave, gets
  new shards.
  """
  moves = _moves(before, after)
  targets, kept = {to for _, to in moves}, {*_all_axes(after)}
  now = [list(axes) for axes in before]
  _slice(now, after, targets)
  is_cut = any(dim not in targets and len(now[dim]) > len(axes) for dim, axes in enumerate(before))
  is_inner = all(before[dim][-len(axes) :] == axes for (dim, _), axes in moves.items())
  is_refilled = any(not {*after[dim]} <= {*before[dim]} for dim, _ in moves)
  if moves and (is_cut or is_refilled or not is_inner):
    return _partly_gathered(value, before, after, sizes)
  ops = _gather(value, now, sorted(targets), kept, sizes)
  for (dim, to), axes in moves.items():
    ops.append(CollectiveOp('all-to-all', axes, _shard_bytes(value, now, sizes)))
    now[dim] = [axis for axis in now[dim] if axis not in axes]
    now[to] += axes
  moved = tuple(map(tuple, now))
  if last := _permuted(value, moved, after, sizes):
    return [*ops, last]
  if moves and moved != after and (coarser := _coarsened(value, moved, after, sizes)):
    return [*ops, *coarser]
  ops += _gather(value, now, range(len(now)), kept, sizes)
  _slice(now, after, set())
  last = _permuted(value, tuple(map(tuple, now)), after, sizes)
  return [*ops, last] if last else ops


def _partly_gathered(
  value: GraphValue, before: Spec, after: Spec, sizes: Mapping[str, int]
) -> list[CollectiveOp]:
  """The collectives if XLA gathers a dimension with as many shards as there will be copies, or the whole array."""
  counts = [shard_count(axes, sizes) for axes in before]
  ratio, rest = divmod(math.prod(counts), shard_count(_all_axes(after), sizes))
  if rest == 0 and ratio > 1 and ratio in counts and not _unused(before, sizes):
    dim = counts.index(ratio)
    coarser = (*before[:dim], (), *before[dim + 1 :])
    gathered = CollectiveOp('all-gather', before[dim], _shard_bytes(value, before, sizes))
    return [gathered, *reshard(value, coarser, after, sizes)]
  return [_whole_gather(value, before, sizes)]


def _gather(
  value: GraphValue,
  now: list[list[str]],
  dims: Sequence[int],
  kept: Collection[str],
  sizes: Mapping[str, int],
) -> list[CollectiveOp]:
  """The gather of the axes of some dimensions that are not kept; they are removed from `now`."""
  removed = tuple(axis for dim in dims for axis in now[dim] if axis not in kept)
  if not removed:
    return []
  shard = _shard_bytes(value, now, sizes)
  for dim in dims:
    now[dim] = [axis for axis in now[dim] if axis in kept]
  return [CollectiveOp('all-gather', removed, shard)]


def _all_axes(spec: Spec) -> Axes:
  return tuple(axis for axes in spec for axis in axes)


def _coarsened(
  value: GraphValue, before: Spec, after: Spec, sizes: Mapping[str, int]
) -> list[CollectiveOp]:
  """The collectives to fewer shards of some dimensions; [] if another dimension gets more of them.

  Unless the shards that remain are the outermost ones, a permute brings them into order first.
  """
  ratios = [shard_count(one, sizes) / shard_count(other, sizes) for one, other in zip(before, after)]
  if any(ratio % 1 for ratio in ratios):
    return []
  shard = _shard_bytes(value, before, sizes)
  if all(one[: len(other)] == other for one, other in zip(before, after)):
    removed = (axis for one, other in zip(before, after) for axis in one[len(other) :])
    return [CollectiveOp('all-gather', tuple(removed), shard)]
  removed = (axis for one, ratio in zip(before, ratios) for axis in _innermost(one, int(ratio), sizes))
  moved = CollectiveOp('collective-permute', _all_axes(before), shard)
  return [moved, CollectiveOp('all-gather', tuple(removed), shard)]


def _innermost(axes: Axes, count: int, sizes: Mapping[str, int]) -> Iterator[str]:
  """The innermost axes of a dimension with a number of positions, and the part of the next one."""
  for axis in reversed(axes):
    size = axis_size(axis, sizes)
    if count >= size:
      yield axis
      count //= size
    elif count > 1:
      yield f'{axis.partition("[")[0]}[{count}/{size}]'
      return


def _moves(before: Spec, after: Spec) -> dict[tuple[int, int], Axes]:
  """The axes that move from one dimension to another."""
  targets = {axis: dim for dim, axes in enumerate(after) for axis in axes}
  moves: dict[tuple[int, int], Axes] = {}
  for dim, axes in enumerate(before):
    for axis in axes:
      to = targets.get(axis, dim)
      if to != dim:
        moves[dim, to] = (*moves.get((dim, to), ()), axis)
  return moves


def _permuted(
  value: GraphValue, before: Spec, after: Spec, sizes: Mapping[str, int]
) -> CollectiveOp | None:
  """The permute between two shardings with as many shards of each dimension; None for others."""
  counts = [[shard_count(axes, sizes) for axes in spec] for spec in (before, after)]
  if before == after or counts[0] != counts[1]:
    return None
  pairs = zip(before, after)
  axes = tuple(axis for one, other in pairs if one != other for axis in (*one, *other))
  return _permute(value, before, axes, sizes)


def _permute(value: GraphValue, spec: Spec, axes: Axes, sizes: Mapping[str, int]) -> CollectiveOp:
  size = shard_size(value.shape, spec, sizes) * value.itemsize
  return CollectiveOp('collective-permute', tuple(dict.fromkeys(axes)), size)


def _is_finer(before: Spec, after: Spec, sizes: Mapping[str, int]) -> bool:
  return all(
    shard_count(other, sizes) % shard_count(one, sizes) == 0 for one, other in zip(before, after)
  )


def _exchanged(
  value: GraphValue, before: Spec, after: Spec, sizes: Mapping[str, int]
) -> list[CollectiveOp]:
  """The all-to-alls that move shards between dimensions, and a permute if their order is another then; [] for others."""
  fewer: dict[int, list[int]] = {}
  more: dict[int, list[int]] = {}
  for dim, (one, other) in enumerate(zip(before, after)):
    held, wanted = shard_count(one, sizes), shard_count(other, sizes)
    if max(held, wanted) % min(held, wanted):
      return []
    if held != wanted:
      ratios = fewer if held > wanted else more
      ratios.setdefault(max(held, wanted) // min(held, wanted), []).append(dim)
  if {ratio: len(fewer[ratio]) for ratio in fewer} != {ratio: len(more[ratio]) for ratio in more}:
    return _rotated(value, before, after, sizes)
  now, ops = [*before], []
  shard = _shard_bytes(value, before, sizes)
  for ratio, dims in fewer.items():
    for dim, to in zip(dims, more[ratio]):
      axes = tuple(_innermost(now[dim], ratio, sizes))[::-1]
      ops.append(CollectiveOp('all-to-all', axes, shard))
      now[dim] = now[dim][: len(now[dim]) - len(axes)]
      now[to] = (*now[to], *axes)
  if tuple(now) != after:
    ops.append(_permute(value, after, _all_axes((*before, *after)), sizes))
  return ops


def _rotated(
  value: GraphValue, before: Spec, after: Spec, sizes: Mapping[str, int]
) -> list[CollectiveOp]:
  """The all-to-alls that move all shards of some dimensions to others with as many then; [] if none have as many."""
  counts = [(shard_count(one, sizes), shard_count(other, sizes)) for one, other in zip(before, after)]
  changed = [pair for pair in counts if pair[0] != pair[1]]
  if sorted(held for held, _ in changed) != sorted(wanted for _, wanted in changed):
    return []
  shard = _shard_bytes(value, before, sizes)
  moved = [axes for axes, (held, wanted) in zip(before, counts) if held != wanted and held > 1]
  ops = [CollectiveOp('all-to-all', axes, shard) for axes in moved]
  if all(axes in after for axes in moved):
    return ops
  return [*ops, _permute(value, after, _all_axes((*before, *after)), sizes)]


def _in_parts(spec: Spec, other: Spec, sizes: Mapping[str, int]) -> Spec:
  """A sharding with each axis split in two where the other sharding has both parts of it, or the outer one.

  Example:
    >>> _in_parts((('model',), ('data',)), (('data[2/2]',), ('data[2/4]',)), {'data': 4, 'model': 2})
    (('model',), ('data[2/2]', 'data[2/4]'))
    >>> _in_parts((('data',),), (('data[2/2]',),), {'data': 4})
    (('data[2/2]', 'data[2/4]'),)
  """
  parts: dict[str, list[str]] = {}
  for axis in (axis for axes in other for axis in axes if '[' in axis):
    parts.setdefault(axis.partition('[')[0], []).append(axis)
  for name, found in parts.items():
    count = shard_count(found, sizes)
    if name in sizes and found == [f'{name}[{count}/{count}]']:
      found.append(f'{name}[{sizes[name] // count}/{sizes[name]}]')
  parts = {name: found for name, found in parts.items() if shard_count(found, sizes) == sizes.get(name)}
  if not parts:
    return spec
  outermost = lambda axis: int(axis.rpartition('/')[2][:-1])
  return tuple(
    tuple(part for axis in axes for part in (sorted(parts.get(axis, ()), key=outermost) or (axis,)))
    for axes in spec
  )


def _slice(now: list[list[str]], after: Spec, targets: Collection[int]) -> None:
  """Adds the axes of `after` that no dimension is sharded over yet; the local slices cost nothing.

  Dimensions that get axes from others are sliced in any order, as a permute follows.
  """
  for dim, axes in enumerate(after):
    if dim in targets or tuple(now[dim]) == axes[: len(now[dim])]:
      for axis in axes[0 if dim in targets else len(now[dim]) :]:
        if _is_unused(axis, now):
          now[dim].append(axis)
        elif dim not in targets:
          break


def _is_unused(axis: str, now: Sequence[Sequence[str]]) -> bool:
  name = axis.partition('[')[0]
  return all(one.partition('[')[0] != name for axes in now for one in axes)


def _shard_bytes(value: GraphValue, now: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> float:
  return shard_size(value.shape, tuple(map(tuple, now)), sizes) * value.itemsize


def reduce_partial_sum(
  value: GraphValue,
  before: Spec,
  partial_axes: Axes,
  after: Spec,
  sizes: Mapping[str, int],
  platform: str = '',
  kind: str = 'dot_general',
) -> list[CollectiveOp]:
  """The collectives that reduce a partial sum and reshard the result.

  Args:
    value: shape and dtype of the sum.
    before: sharding of the terms, each of which is on one device.
    partial_axes: axes along which devices hold different terms.
    after: sharding of the reduced sum.
    sizes: size per mesh axis.
    platform: platform of the target: 'cuda', 'tpu' or 'cpu'.
    kind: kind of the operation that sums.

  Example:
    >>> reduce_partial_sum(GraphValue((8, 8), 'f32'), ((), ()), ('data',), (('data',), ()), {'data': 4})
    [CollectiveOp(kind='reduce-scatter', axes=('data',), bytes=256.0)]
  """
  now = [list(axes) for axes in before]
  ops: list[CollectiveOp] = []
  is_permuted = _permuted(value, before, after, sizes)
  scattered = [] if is_permuted else [*_scattered(before, partial_axes, after)]
  if platform == 'cuda' and not _is_scattered(kind, partial_axes, before, after, scattered):
    scattered = []
  for axis, dim in scattered:
    ops.append(CollectiveOp('reduce-scatter', (axis,), _shard_bytes(value, now, sizes)))
    now[dim].append(axis)
  rest = tuple(axis for axis in partial_axes if all(axis != one for one, _ in scattered))
  if rest:
    ops.append(CollectiveOp('all-reduce', rest, _shard_bytes(value, now, sizes)))
  return [*ops, *reshard(value, tuple(map(tuple, now)), after, sizes)]


def _scattered(before: Spec, partial_axes: Axes, after: Spec) -> Iterator[tuple[str, int]]:
  """The axes that a sum is scattered over, with their dimensions: those that cut the terms' shards first."""
  for dim, (held, axes) in enumerate(zip(before, after)):
    if axes[: len(held)] == held:
      for axis in itertools.takewhile(partial_axes.__contains__, axes[len(held) :]):
        yield axis, dim


def _is_scattered(
  kind: str, partial_axes: Axes, before: Spec, after: Spec, scattered: Sequence[tuple[str, int]]
) -> bool:
  """Whether XLA for GPUs scatters a sum, rather than that each device has the whole sum and cuts its part.

  That of a product is cut along one dimension, and there by the axes that it is scattered over alone. Sums of other
  operations are scattered over all of their axes at once, in their order. What is looked up is scattered over some of them too, in their order.
  """
  dims, axes = {dim for _, dim in scattered}, tuple(axis for axis, _ in scattered)
  if kind == 'gather':
    return axes == tuple(axis for axis in partial_axes if axis in axes)
  if kind not in PRODUCTS:
    return len(dims) == 1 and axes == tuple(partial_axes)
  cut = {dim for dim, (held, now) in enumerate(zip(before, after)) if now[: len(held)] == held != now}
  return len(dims) == 1 and cut == dims and all(after[dim] == (*before[dim], *axes) for dim in dims)


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
  """Whether XLA could choose other collectives: several all-to-alls, a permute after a gather, or parts of axes.

  A part of an axis that moves to the dimension with the rest of it, as in a reshape, is one change.
  """
  kinds = [op.kind for op in ops if op.kind not in ('all-reduce', 'reduce-scatter')]
  if kinds.count('all-to-all') > 1 or ('all-gather' in kinds and kinds[-1] == 'collective-permute'):
    return True
  if len(ops) == 2 and kinds == ['all-to-all', 'collective-permute']:
    moved, reordered = ops[0].axes, ops[1].axes
    if len(moved) == 1 and '[' in moved[0] and {*moved} < {*reordered}:
      return len({axis.partition('[')[0] for axis in reordered}) > 1
  if kinds == ['collective-permute', 'all-gather']:
    return False
  return len(kinds) > 1 and any('[' in axis for op in ops for axis in op.axes)


def wire_bytes(ops: Sequence[CollectiveOp], sizes: Mapping[str, int]) -> float:
  """Bytes that each device sends."""
  return sum(wire(op.kind, op.bytes, shard_count(op.axes, sizes)) for op in ops)


def move_shards(ops: Sequence[CollectiveOp]) -> bool:
  """Whether one of these collectives sends shards to other places."""
  return any(op.kind in ('all-to-all', 'collective-permute') for op in ops)


def are_gathers(ops: Sequence[CollectiveOp]) -> bool:
  """Whether all of these collectives, of which there are some, are gathers."""
  return bool(ops) and all(op.kind == 'all-gather' for op in ops)


def is_cut_often(ops: Sequence[CollectiveOp], spec: Spec) -> bool:
  """Whether collectives scatter a sum along several dimensions of a sharding."""
  scattered = {axis for op in ops if op.kind == 'reduce-scatter' for axis in op.axes}
  return sum(not scattered.isdisjoint(axes) for axes in spec) > 1


def gathered_bytes(op: CollectiveOp, sizes: Mapping[str, int]) -> float:
  """The bytes of the result of a gather on each device; 0 for other collectives."""
  return op.bytes * shard_count(op.axes, sizes) if op.kind == 'all-gather' else 0.0
