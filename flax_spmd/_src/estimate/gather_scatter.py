"""Gather and scatter: the requirements of lookups and of their gradients.

Each dimension of a lookup has one of four roles, by the arrays that have it:

    role      table  indices  rows    if it is sharded
    batch     yes    yes      yes     each device looks up its own part
    window    yes             yes     each device has a part of each row
    lookup    yes                     a gather is a partial sum over the shards; a scatter is local
    position         yes      yes     a gather is local; a scatter is a partial sum of each device's own rows

The table is the operand of a gather, and the result of a scatter, whose first operand is its initial value. The rows
are the result of a gather, and the updates of a scatter. The other dimensions are replicated: windows that are neither
one element nor the whole dimension, and the coordinates of an index.

XLA shards one role after the other over the axes that the arrays already have there; no axis serves two roles. Batch
dimensions come first. Then comes the role with the smallest largest array, and among equals with the fewest bytes
to send, as if nothing else were sharded (`PartitionGather` and `EvaluatePartitionCost` in XLA's `spmd` folder).

An array without the dimensions of a role has to be alike along its axes. It moves its shards to axes that it does not
use; if these are too few, it has fewer shards, first of looked-up and last of window dimensions
(`GroupShardingOnReplicatedDim`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flax_spmd._src.estimate.graph import (
  Axes,
  GraphValue,
  Op,
  Spec,
  prime_factors,
  replicated,
  shard_count,
  shard_size,
  used_axes,
)
from flax_spmd._src.estimate.requirements import Context, Requirement
from flax_spmd._src.estimate.resharding import CollectiveOp, reduce_partial_sum, reshard

_MANY_ROWS = 8  # tables of rows, as a batch has for its positions: XLA adds up the tables, and does not gather the rows


class LookupDim(NamedTuple):
  """A dimension of a lookup.

  Attributes:
    table, indices, rows: index of the dimension in each array; None where the array lacks it.
  """

  table: int | None
  indices: int | None
  rows: int | None

  @property
  def role(self) -> str:
    """The role of the dimension, as in the table above."""
    if self.table is None:
      return 'position'
    if self.indices is not None:
      return 'batch'
    return 'lookup' if self.rows is None else 'window'


class _Lookup(NamedTuple):
  """A gather or scatter.

  Attributes:
    dims: the dimensions that can be sharded.
    arrays: table, indices and rows.
    specs: shardings of the three.
    summed: role whose shards are partial sums: `lookup` in a gather, `position` in a scatter.
    sizes: size per mesh axis.
  """

  dims: Sequence[LookupDim]
  arrays: tuple[GraphValue, GraphValue, GraphValue]
  specs: tuple[Spec, Spec, Spec]
  summed: str
  sizes: Mapping[str, int]


def gather(op: Op, context: Context) -> Requirement:
  """A gather: its rows are partial sums along the axes of looked-up dimensions."""
  table, indices = context.values
  dims = _gather_dims(op, table.shape, len(indices.shape), context.result.shape)
  arrays, specs = (
    (table, indices, context.result),
    (context.specs[0], context.specs[1], context.result_spec),
  )
  lookup = _Lookup(dims, arrays, specs, 'lookup', context.sizes)
  chosen, doubt = _choose(lookup)
  table_spec, indices_spec, rows_spec = _specs(lookup, chosen)
  partial_axes = _partial_axes(lookup, chosen)
  is_settled = _is_settled(lookup, chosen)
  return Requirement(
    (table_spec, indices_spec), rows_spec, partial_axes, doubt=doubt, is_settled=is_settled
  )


def scatter(op: Op, context: Context) -> Requirement:
  """A scatter: its result is a partial sum along the axes of positions."""
  tables = len(context.values) // 2
  table, indices, rows = context.values[0], context.values[tables], context.values[-1]
  dims = _scatter_dims(op, table.shape, len(indices.shape), rows.shape)
  specs = (context.specs[0], context.specs[tables], context.specs[-1])
  lookup = _Lookup(dims, (table, indices, rows), specs, 'position', context.sizes)
  chosen, doubt = _choose(lookup)
  table_spec, indices_spec, rows_spec = _specs(lookup, chosen)
  operands = (*[table_spec] * tables, indices_spec, *[rows_spec] * tables)
  partial_axes = _partial_axes(lookup, chosen)
  is_settled = _is_settled(lookup, chosen)
  if not doubt and _choose(lookup, 2)[0] != chosen:
    doubt = 'the order of the dimensions of a scatter'
  elif (
    not doubt
    and partial_axes
    and any(dim.role == 'batch' for dim in lookup.dims)
    and math.prod(rows.shape) < _MANY_ROWS * math.prod(table.shape)
  ):
    doubt = 'the sum of a scatter that is sharded along its positions, not along its batch'
  return Requirement(operands, table_spec, partial_axes, doubt=doubt, is_settled=is_settled)


def _choose(lookup: _Lookup, copies: int = 1) -> tuple[dict[LookupDim, Axes], str]:
  """The axes of each dimension, one role after the other, if a reduction counts as some copies of its array; a doubt."""
  chosen: dict[LookupDim, Axes] = {}
  roles, doubt, inner = ['batch', 'window', 'lookup', 'position'], '', lookup
  while roles:
    used = {axis for axes in chosen.values() for axis in axes}
    options = {role: _role_axes(inner, role, used) for role in roles}
    options = {role: axes for role, axes in options.items() if axes}
    if not options:
      break
    role = min(
      options, key=lambda role: (role != 'batch', *_cost(lookup, chosen | options[role], copies))
    )
    chosen |= options[role]
    roles.remove(role)
    specs = [_within(inner, array, options[role]) for array in range(3)]
    if None in specs:
      doubt = 'a mesh axis that shards several dimensions of a lookup'
    kept = [old if new is None else new for old, new in zip(inner.specs, specs)]
    inner = inner._replace(specs=(kept[0], kept[1], kept[2]))
  return chosen, doubt


def _within(lookup: _Lookup, array: int, option: Mapping[LookupDim, Axes]) -> Spec | None:
  """An array's sharding for the roles that are left; None if mesh axes would have to be split for it."""
  spec, sizes = lookup.specs[array], lookup.sizes
  taken = tuple(axis for axes in option.values() for axis in axes)
  places = {dim[array]: axes for dim, axes in option.items() if dim[array] is not None}
  if places:
    return tuple(places.get(dim, _free(axes, {*taken})) for dim, axes in enumerate(spec))
  if not used_axes(spec).intersection(taken):
    return spec
  tiles = _tiles_within(lookup, array, shard_count(taken, sizes))
  unused = {*taken, *used_axes(spec)}
  left = [axis for axis, size in sizes.items() if size > 1 and axis not in unused]
  result = []
  for axes, count in zip(spec, tiles):
    present: Axes = ()
    left = [*_free(axes, {*taken}), *left]
    for axis in [*left]:
      if count % (shard_count(present, sizes) * sizes[axis]) == 0:
        left.remove(axis)
        present = (*present, axis)
    if shard_count(present, sizes) != count:
      return None
    result.append(present)
  return tuple(result)


def _tiles_within(lookup: _Lookup, array: int, groups: int) -> list[int]:
  """The number of shards of each dimension that an array keeps if some groups of devices need it."""
  spec, sizes = lookup.specs[array], lookup.sizes
  tiles = [shard_count(axes, sizes) for axes in spec]
  copies = shard_count(tuple(sizes), sizes) // math.prod(tiles)
  if copies % groups == 0:
    return tiles
  needed = groups // copies
  for dim in _least_needed(lookup, array):
    for factor in prime_factors(tiles[dim]):
      if needed > 1 and needed % factor == 0:
        tiles[dim], needed = tiles[dim] // factor, needed // factor
  return tiles if needed == 1 and groups % copies == 0 else [1] * len(tiles)


def _least_needed(lookup: _Lookup, array: int) -> list[int]:
  """The dimensions of an array that may have fewer shards, in order; those of a batch of tables have to keep them."""
  windows = [one for dim in lookup.dims if dim.role == 'window' and (one := dim[array]) is not None]
  if array == 0:
    return [dim.table for dim in lookup.dims if dim.role == 'lookup' and dim.table is not None] + windows
  return [dim for dim in range(len(lookup.specs[array])) if dim not in windows] + windows


def _role_axes(lookup: _Lookup, role: str, used: set[str]) -> dict[LookupDim, Axes]:
  """The axes over which the dimensions of a role are sharded, without those that serve another role."""
  dims = [dim for dim in lookup.dims if dim.role == role]
  if role == 'batch':  # the table keeps the shards of its other dimensions
    mine = {dim.table for dim in dims}
    used = used | {axis for dim, axes in enumerate(lookup.specs[0]) if dim not in mine for axis in axes}
  options = []
  for array in {'batch': (1, 0), 'window': (0,), 'lookup': (0,), 'position': (1,)}[role]:
    axes = {dim: _free(lookup.specs[array][dim[array] or 0], used) for dim in dims}
    options.append({dim: one for dim, one in axes.items() if one})
  best = max(options, key=lambda axes: shard_count(sum(axes.values(), ()), lookup.sizes))
  if role != 'position' or (lookup.summed == 'lookup' and not any(lookup.specs[1])):
    return best
  return _extended(lookup, best, dims, used)


def _free(axes: Axes, used: set[str]) -> Axes:
  return tuple(axis for axis in axes if axis not in used)


def _extended(
  lookup: _Lookup, axes: dict[LookupDim, Axes], dims: Sequence[LookupDim], used: set[str]
) -> dict[LookupDim, Axes]:
  """The axes of positions, with further ones of the rows that no dimension of the indices has."""
  taken = {axis for one in lookup.specs[1] for axis in one}
  result = dict(axes)
  for dim in dims:
    before, rows = axes.get(dim, ()), _free(lookup.specs[2][dim.rows or 0], used)
    if rows[: len(before)] == before and not taken.intersection(rows[len(before) :]) and rows:
      result[dim] = rows
  return result


def _specs(lookup: _Lookup, chosen: Mapping[LookupDim, Axes]) -> tuple[Spec, Spec, Spec]:
  """The shardings of table, indices and rows."""
  specs = [list(replicated(len(spec))) for spec in lookup.specs]
  for one, axes in chosen.items():
    for spec, dim in zip(specs, one):
      if dim is not None:
        spec[dim] = axes
  table, indices, rows = map(tuple, specs)
  return table, indices, rows


def _partial_axes(lookup: _Lookup, chosen: Mapping[LookupDim, Axes]) -> Axes:
  return sum((axes for dim, axes in chosen.items() if dim.role == lookup.summed), ())


def _cost(lookup: _Lookup, chosen: Mapping[LookupDim, Axes], copies: int) -> tuple[float, float]:
  """The bytes of the largest operation on one device, and the bytes that are sent."""
  specs = _specs(lookup, chosen)
  partial_axes = _partial_axes(lookup, chosen)
  moved = zip(lookup.arrays, lookup.specs, specs)
  if lookup.summed == 'lookup':
    result, moved = 2, list(moved)[:2]
  else:
    result = 0
  ops = [op for one, before, after in moved for op in reshard(one, before, after, lookup.sizes)]
  ops += reduce_partial_sum(
    lookup.arrays[result], specs[result], partial_axes, lookup.specs[result], lookup.sizes
  )
  costs = [_collective_cost(op, lookup.sizes, copies) for op in ops]
  return max([_held(lookup, specs), *(memory for memory, _ in costs)]), sum(sent for _, sent in costs)


def _is_settled(lookup: _Lookup, chosen: Mapping[LookupDim, Axes]) -> bool:
  """Whether XLA is known to reshard the arrays as required.

  It is not if an array changes in one of several sharded dimensions, or if the updates of a scatter lose shards of a
  dimension while some devices have the same shard, unless positions alone had them, and all of them are gathered.
  """
  for array, before, after in [*zip(range(3), lookup.specs, _specs(lookup, chosen))][1:]:
    is_input = array == 1 or lookup.summed == 'position'
    changed = [axes for one, axes in zip(before, after) if one != axes]
    is_one_of_several = is_input and changed and sum(map(bool, before)) > 1
    if is_one_of_several or (any(changed) and sum(map(bool, after)) > 1):
      return False
  if lookup.summed == 'lookup':
    return True
  before, after = lookup.specs[2], _specs(lookup, chosen)[2]
  is_moved = any(one and one != other for one, other in zip(before, after))
  is_spare = shard_count(sum(before, ()), lookup.sizes) < math.prod(lookup.sizes.values())
  if is_moved and is_spare and not _are_positions_gathered(lookup, before, after):
    return False
  return not _is_contested(lookup, chosen)


def _are_positions_gathered(lookup: _Lookup, before: Spec, after: Spec) -> bool:
  """Whether the updates of a scatter, sharded along positions alone, are gathered whole for looked-up dimensions."""
  positions = {dim.rows for dim in lookup.dims if dim.role != 'window'}
  is_along = all(dim in positions for dim, axes in enumerate(before) if axes)
  return is_along and not any(after) and any(dim.role == 'lookup' for dim in lookup.dims)


def _is_contested(lookup: _Lookup, chosen: Mapping[LookupDim, Axes]) -> bool:
  """Whether a scatter could use some axes of the looked-up dimensions for its positions, in less memory."""
  looked_up = {axis for dim, axes in chosen.items() if dim.role == 'lookup' for axis in axes}
  positions = _role_axes(lookup, 'position', set())
  shared = looked_up.intersection(sum(positions.values(), ()))
  if not shared or shared == looked_up:
    return False
  left = {dim: _free(axes, shared) if dim.role == 'lookup' else axes for dim, axes in chosen.items()}
  totals = [_held(lookup, _specs(lookup, one)) for one in (chosen, left | positions)]
  return totals[1] < 0.9 * totals[0]


def _held(lookup: _Lookup, specs: Sequence[Spec]) -> float:
  """The bytes of the arrays on one device."""
  pairs = zip(lookup.arrays, specs)
  return sum(shard_size(one.shape, spec, lookup.sizes) * one.itemsize for one, spec in pairs)


def _collective_cost(op: CollectiveOp, sizes: Mapping[str, int], copies: int) -> tuple[float, float]:
  """The bytes of a collective's arrays, and those that it sends, as XLA counts them before it scatters sums."""
  group = shard_count(op.axes, sizes)
  if op.kind in ('all-reduce', 'reduce-scatter'):
    return copies * op.bytes, 2 * op.bytes
  result = op.bytes * group if op.kind == 'all-gather' else op.bytes
  return result, result if op.kind == 'collective-permute' else result * (group - 1) / group


def _gather_dims(op: Op, table: Sequence[int], rank: int, rows: Sequence[int]) -> list[LookupDim]:
  names = ('offset_dims', 'collapsed_slice_dims', 'operand_batching_dims', 'start_indices_batching_dims')
  return _dims(op, names, table, rank, rows)


def _scatter_dims(op: Op, table: Sequence[int], rank: int, rows: Sequence[int]) -> list[LookupDim]:
  names = (
    'update_window_dims',
    'inserted_window_dims',
    'input_batching_dims',
    'scatter_indices_batching_dims',
  )
  return _dims(op, names, table, rank, rows)


def _dims(
  op: Op, names: Sequence[str], table: Sequence[int], rank: int, rows: Sequence[int]
) -> list[LookupDim]:
  """The dimensions of a lookup that can be sharded.

  Args:
    op: the lookup.
    names: its attributes with the window dimensions of the rows, and the missing, batch and batch dimensions of
      the table and the indices.
    table: shape of the table.
    rank: rank of the indices.
    rows: shape of the rows.
  """
  windows, missing, table_batch, indices_batch = (op.attributes.get(name, ()) for name in names)
  parallel = dict(zip(table_batch, indices_batch)) | dict(op.attributes.get('iota_dims', ()))
  vector = op.attributes.get('index_vector_dim', (0,))[0]
  positions = zip(
    (dim for dim in range(rank) if dim != vector),
    (dim for dim in range(len(rows)) if dim not in windows),
  )
  row_of = dict(positions)
  result = [LookupDim(dim, index, row_of.pop(index)) for dim, index in parallel.items()]
  result += [LookupDim(None, index, row) for index, row in row_of.items()]
  kept = [dim for dim in range(len(table)) if dim not in missing and dim not in table_batch]
  result += [LookupDim(dim, None, None) for dim in missing if dim not in parallel]
  for dim, row in zip(kept, windows):
    if dim in parallel:
      continue
    if rows[row] == table[dim]:
      result.append(LookupDim(dim, None, row))
    elif rows[row] == 1:
      result.append(LookupDim(dim, None, None))
  return result
