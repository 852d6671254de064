"""Lookups: how rows are taken from a table that is divided, and added to one."""

from __future__ import annotations

import itertools

from flax_spmd._src.estimate.graph import Axes, Op, pieces, used, whole
from flax_spmd._src.estimate.requirements import Need, Seen, collectives, wire


def gather(op: Op, seen: Seen) -> Need:
  """Rows of a table: either it is whole along the rows, or every device adds those that it has."""
  offsets, gone = op.details.get('offset_dims', ()), op.details.get('collapsed_slice_dims', ())
  table = seen.dims[0]
  kept = [dim for dim in range(len(table)) if dim not in gone]
  rows = [dim for dim in range(len(seen.after)) if dim not in offsets]
  found = []
  for by_parts, as_result in itertools.product((True, False), (True, False)):
    natural = list(seen.after)
    operand = list(whole(len(table)))
    for dim, place in zip(kept, offsets):
      natural[place] = seen.after[place] if as_result else table[dim]
      operand[dim] = natural[place]
    if not as_result:
      taken = {axis for place in offsets for axis in natural[place]}
      for dim in rows:
        natural[dim] = tuple(axis for axis in seen.after[dim] if axis not in taken)
    parts: Axes = ()
    if by_parts:
      taken = used(tuple(natural))
      for dim in gone:
        operand[dim] = tuple(axis for axis in table[dim] if axis not in taken)
        parts += operand[dim]
    found.append(Need((tuple(operand), None), tuple(natural), parts))
  return min(found, key=lambda one: _received(one, seen))


def scatter(op: Op, seen: Seen) -> Need:
  """Rows added to a table: each device its own, to be summed, or every row where the table's part is."""
  windows, gone = op.details.get('update_window_dims', ()), op.details.get('inserted_window_dims', ())
  updates = seen.dims[2]
  kept = [dim for dim in range(len(seen.after)) if dim not in gone]
  rows = [dim for dim in range(len(updates)) if dim not in windows]
  found = []
  for as_result in (False, True):
    natural = list(whole(len(seen.after)))
    wanted = list(updates)
    for dim, place in zip(kept, windows):
      wanted[place] = seen.after[dim] if as_result else updates[place]
      natural[dim] = wanted[place]
    taken = used(tuple(natural))
    for dim in rows:
      wanted[dim] = tuple(axis for axis in updates[dim] if axis not in taken)
    parts = tuple(axis for dim in rows for axis in wanted[dim])
    found.append(Need((None, None, tuple(wanted)), tuple(natural), parts))
  return min(found, key=lambda one: (wire(one, seen), _received(one, seen)))


def _received(found: Need, seen: Seen) -> float:
  """The bytes that the collectives leave on a device, by which XLA chooses how to divide a lookup."""
  scale = {'all-gather': 1, 'reduce-scatter': -1}
  return sum(
    move.bytes * pieces(move.axes, seen.sizes) ** scale.get(move.kind, 0)
    for move in collectives(found, seen)
  )
