"""Gather and scatter: the requirements of lookups and of their gradients.

Each dimension of a lookup has one of four roles, by the arrays that have it:

    role      table  indices  rows    if it is sharded
    batch     yes    yes      yes     each device looks up its own part
    window    yes             yes     each device has a part of each row
    position         yes      yes     a gather is local; a scatter is a partial sum of each device's own rows
    lookup    yes                     a gather is a partial sum over the shards; a scatter is local

The table is the operand of a gather, and the result of a scatter, whose first operand is its initial value. The rows
are the result of a gather, and the updates of a scatter. The other dimensions are replicated: windows that are neither
one element nor the whole dimension, and the coordinates of an index.

XLA tries the ways that follow from the shardings of the arrays, and takes the one whose collectives receive the fewest
bytes. So do these rules.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from flax_spmd._src.estimate.graph import Axes, Op, Spec, replicated, shard_count
from flax_spmd._src.estimate.requirements import Context, Requirement, collectives, sent_bytes

_MAX_CHOICES = 1024  # shardings of one lookup to consider


class LookupDim(NamedTuple):
  """A dimension of a lookup.

  Attributes:
    table, indices, rows: index of the dimension in each array; None where the array lacks it.
  """

  table: int | None
  indices: int | None
  rows: int | None


def gather(op: Op, context: Context) -> Requirement:
  """A gather: its rows are partial sums along the axes of looked-up dimensions."""
  dims = _gather_dims(op, context.values[0].shape, len(context.values[1].shape), context.result.shape)
  arrays = (context.specs[0], context.specs[1], context.result_spec)
  options = []
  for table, indices, rows in _choices(dims, arrays):
    partial_axes = _axes(table, (one.table for one in dims if one.rows is None and one.indices is None))
    options.append(Requirement((table, indices), rows, partial_axes))
  return min(options, key=lambda option: _received_bytes(option, context))


def scatter(op: Op, context: Context) -> Requirement:
  """A scatter: its result is a partial sum along the axes of positions."""
  tables = len(context.values) // 2
  dims = _scatter_dims(
    op, context.result.shape, len(context.values[tables].shape), context.values[-1].shape
  )
  arrays = (context.result_spec, context.specs[tables], context.specs[-1])
  if not context.rematerialisable[0]:
    arrays = (*arrays, context.specs[0])
  options = []
  for table, indices, rows in _choices(dims, arrays):
    partial_axes = _axes(indices, (one.indices for one in dims if one.table is None))
    options.append(Requirement((*[table] * tables, indices, *[rows] * tables), table, partial_axes))
  return min(options, key=lambda option: (sent_bytes(option, context), _received_bytes(option, context)))


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
    if rows[row] == table[dim]:
      result.append(LookupDim(dim, None, row))
    elif rows[row] == 1 and dim not in parallel:
      result.append(LookupDim(dim, None, None))
  return result


def _choices(dims: Sequence[LookupDim], arrays: Sequence[Spec]) -> Iterator[tuple[Spec, Spec, Spec]]:
  """The shardings of table, indices and rows in which each dimension is sharded as in one of some arrays, or not.

  Args:
    dims: the dimensions of the lookup.
    arrays: shardings of table, indices and rows; then of another table, if there is one.
  """
  options = []
  for one in dims:
    present = zip((one.table, one.indices, one.rows, one.table), arrays)
    options.append(list(dict.fromkeys([*(spec[dim] for dim, spec in present if dim is not None), ()])))
  for choice in itertools.islice(itertools.product(*options), _MAX_CHOICES):
    axes = [axis for chosen in choice for axis in chosen]
    if len(set(axes)) == len(axes):
      specs = [list(replicated(len(spec))) for spec in arrays[:3]]
      for one, chosen in zip(dims, choice):
        for spec, dim in zip(specs, one):
          if dim is not None:
            spec[dim] = chosen
      table, indices, rows = map(tuple, specs)
      yield table, indices, rows


def _axes(spec: Spec, dims: Iterable[int | None]) -> Axes:
  """The axes that some dimensions are sharded over."""
  return tuple(axis for dim in dims if dim is not None for axis in spec[dim])


def _received_bytes(requirement: Requirement, context: Context) -> float:
  """Bytes of the collectives' results on one device, by which XLA chooses how to partition a lookup."""
  growth = {'all-gather': 1, 'reduce-scatter': -1}
  return sum(
    op.bytes * shard_count(op.axes, context.sizes) ** growth.get(op.kind, 0)
    for op in collectives(requirement, context)
  )
