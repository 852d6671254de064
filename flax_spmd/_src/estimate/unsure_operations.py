"""Unsure operations: those of a walk that XLA could partition in several ways.

If its partitioner is at hand, it is asked about the operation on its own. Otherwise a doubt notes the most that another way
could change.
"""

from __future__ import annotations

import math

from flax_spmd._src.estimate.doubts import Bound, gathered
from flax_spmd._src.estimate.graph import (
  Op,
  Spec,
)
from flax_spmd._src.estimate.halos import is_plain_slice
from flax_spmd._src.estimate.operations import is_elementwise
from flax_spmd._src.estimate.partitioned_operations import Partition, adopted
from flax_spmd._src.estimate.requirements import (
  Requirement,
  operand_collectives,
  result_collectives,
)
from flax_spmd._src.estimate.resharding import (
  is_cut_often,
  move_shards,
  wire_bytes,
)
from flax_spmd._src.estimate.value_moves import ValueMoves

_SLICES = ('dynamic_slice', 'dynamic_update_slice')
_RESHARDING = {'dot_general': 'matrix product', 'gather': 'lookup', 'scatter': 'lookup'}


class UnsureOperations(ValueMoves):
  """The operations of a walk for which XLA has several ways, as it partitions them or with a doubt."""

  def settled(self, op: Op, required: Requirement, times: int) -> Requirement:
    """The requirement of an operation for which XLA has several ways, as XLA partitions it; else with doubts."""
    reasons = self._reasons(op, required)
    if not reasons and not (self.partitions and self._is_unsure_product(op, required)):
      return required
    partition = self._partition(op)
    if partition is None:
      for reason in reasons:
        self.doubts.add(op.source, reason, self._bound(op, required, times))
      return required
    settled, apart = adopted(op, required, self.context_of(op), partition)
    if settled.partial_axes:
      self.settled_sums.add(op.results[0])
    if apart.wire or apart.flops:
      bound = Bound(wire=times * apart.wire, flops=times * apart.flops)
      self.doubts.add(op.source, 'an operation that XLA partitions otherwise on its own', bound)
    return settled

  def _reasons(self, op: Op, required: Requirement) -> list[str]:
    """Why XLA could partition an operation otherwise: activations resharded for a product or a lookup, slices, halos."""
    reasons = [required.doubt] if required.doubt else []
    use = _RESHARDING.get(op.kind)
    for value, spec in zip(op.operands, required.operands):
      is_fixed = value in self.analyzed.argument_derived or value in self.analyzed.rematerialisable
      if spec is None or (is_fixed and op.kind not in _SLICES):
        continue
      if use and not required.is_settled and self.changes(value, spec):
        reasons.append(f'activations resharded for a {use}')
      elif op.kind in _SLICES and spec != self.specs[value]:
        reasons.append('slice along a sharded dimension')
    if required.halos and not (required.is_settled or is_plain_slice(op)):
      reasons.append('parts of shards that devices exchange')
    return reasons

  def _is_unsure_product(self, op: Op, required: Requirement) -> bool:
    """Whether shards of a product's operands move to other mesh axes, or its result is a sum of parts that move or are cut often."""
    if op.kind != 'dot_general':
      return False
    if required.halos or not required.partial_axes:
      return bool(required.halos)
    ops = result_collectives(required, self.context_of(op))
    return move_shards(ops) or is_cut_often(ops, self.specs[op.results[0]])

  def _partition(self, op: Op) -> Partition | None:
    """XLA's partition of an operation on its own, if there is a partitioner."""
    key = self.requirement_key(op)
    if key not in self.known.partitions:
      partition = self.partitions and self.partitions.partition(op, self.specs, self.sizes)
      self.known.partitions[key] = partition
    return self.known.partitions[key]

  def doubt_moves(self, op: Op, value: int, spec: Spec | None, times: int) -> None:
    """Notes arrays that move for elementwise operations."""
    if spec is None or spec == self.specs[value] or not is_elementwise(op):
      return
    if value in self.analyzed.rematerialisable:
      return
    changes = self.changes(value, spec)
    if not any(one.kind == 'all-to-all' for one in changes):
      return
    if value in self.analyzed.argument_derived:
      self.doubts.add(
        op.source, 'a weight that activations shard along another dimension', Bound(math.inf)
      )
      return
    # that of this array, or of another one of the same chain
    bound = Bound(wire=times * wire_bytes(changes, self.sizes))
    self.doubts.add(op.source, 'activations that move within elementwise operations', bound)
    self.doubts.add(op.source, 'buffers of an exchange', Bound(memory=2 * self.bytes_of(value)))

  def doubt_copies(self, op: Op, required: Requirement, times: int) -> None:
    """Notes an operation that the step has several times, and that compilers may compute more than once.

    They merge what precedes a collective, and not what follows it. What is reshaped may be simplified in several ways,
    as other operations read it.
    """
    context = self.context_of(op)
    ops = [*result_collectives(required, context), *required.halos]
    for apart, moves in zip(op.attributes['copies'], operand_collectives(required, context)):
      ops += moves if apart else []
    flops = times * required.flops
    if ops:
      sent = times * wire_bytes(ops, self.sizes)
      reason = 'an operation that the step computes several times, whose collectives are not merged'
      self.doubts.add(op.source, reason, Bound(sent, self.bytes_of(op.results[0]), flops))
    elif copies := op.attributes['reshaped']:
      reason = 'a product of reshaped arrays that the step computes several times'
      self.doubts.add(op.source, reason, Bound(flops=copies * flops))

  def _bound(self, op: Op, required: Requirement, times: int) -> Bound:
    """The most that another way to partition an operation could change: all of its arrays gathered."""
    bound = Bound(flops=times * required.flops)
    for value in (*op.operands, *op.results):
      if value not in self.analyzed.rematerialisable:
        bound = bound.plus(gathered(self.wire_value(value), self.specs[value], self.sizes, times))
    return bound
