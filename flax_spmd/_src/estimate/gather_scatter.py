"""Gather and scatter: the requirements of table lookups and of their gradients.

A table that is sharded over its rows need not be gathered: each device looks up the rows that it has, and the
results are partial sums. Which way is cheaper depends on the sizes, so each is tried.
"""

from __future__ import annotations

import itertools

from flax_spmd._src.estimate.graph import Axes, Op, replicated, shard_count, used_axes
from flax_spmd._src.estimate.requirements import Context, Requirement, collectives, sent_bytes


def gather(op: Op, context: Context) -> Requirement:
  """Rows of a table: from a table whose rows are replicated, or as a partial sum over its shards."""
  offsets = op.attributes.get('offset_dims', ())
  collapsed = op.attributes.get('collapsed_slice_dims', ())
  table = context.specs[0]
  kept = [dim for dim in range(len(table)) if dim not in collapsed]
  rows = [dim for dim in range(len(context.result_spec)) if dim not in offsets]
  options = []
  for as_partial_sum, as_result in itertools.product((True, False), (True, False)):
    natural = list(context.result_spec)
    operand = list(replicated(len(table)))
    for dim, result_dim in zip(kept, offsets):
      natural[result_dim] = context.result_spec[result_dim] if as_result else table[dim]
      operand[dim] = natural[result_dim]
    if not as_result:
      used = {axis for result_dim in offsets for axis in natural[result_dim]}
      for dim in rows:
        natural[dim] = tuple(axis for axis in context.result_spec[dim] if axis not in used)
    partial_axes: Axes = ()
    if as_partial_sum:
      used = used_axes(tuple(natural))
      for dim in collapsed:
        operand[dim] = tuple(axis for axis in table[dim] if axis not in used)
        partial_axes += operand[dim]
    options.append(Requirement((tuple(operand), None), tuple(natural), partial_axes))
  return min(options, key=lambda option: _received_bytes(option, context))


def scatter(op: Op, context: Context) -> Requirement:
  """Rows added to a table: as a partial sum of each device's own rows, or from gathered rows."""
  windows = op.attributes.get('update_window_dims', ())
  inserted = op.attributes.get('inserted_window_dims', ())
  updates = context.specs[2]
  kept = [dim for dim in range(len(context.result_spec)) if dim not in inserted]
  rows = [dim for dim in range(len(updates)) if dim not in windows]
  options = []
  for as_result in (False, True):
    natural = list(replicated(len(context.result_spec)))
    required = list(updates)
    for dim, update_dim in zip(kept, windows):
      required[update_dim] = context.result_spec[dim] if as_result else updates[update_dim]
      natural[dim] = required[update_dim]
    used = used_axes(tuple(natural))
    for dim in rows:
      required[dim] = tuple(axis for axis in updates[dim] if axis not in used)
    partial_axes = tuple(axis for dim in rows for axis in required[dim])
    options.append(Requirement((None, None, tuple(required)), tuple(natural), partial_axes))
  return min(options, key=lambda option: (sent_bytes(option, context), _received_bytes(option, context)))


def _received_bytes(requirement: Requirement, context: Context) -> float:
  """Bytes of the collectives' results on one device, by which XLA chooses how to partition a lookup."""
  growth = {'all-gather': 1, 'reduce-scatter': -1}
  return sum(
    op.bytes * shard_count(op.axes, context.sizes) ** growth.get(op.kind, 0)
    for op in collectives(requirement, context)
  )
