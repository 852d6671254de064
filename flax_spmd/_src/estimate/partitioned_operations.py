"""Partitioned operations: XLA's partition of an operation for which it has several ways.

The operation is partitioned on its own. Its collectives are compared with those that its requirement leads to, operand
by operand and for the result; where they differ, XLA's take their place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from flax_spmd._src.compare.partitioner import partitioner
from flax_spmd._src.estimate.doubts import Bound
from flax_spmd._src.estimate.graph import PRODUCTS, GraphValue, Op, Spec
from flax_spmd._src.estimate.requirements import (
  Context,
  Requirement,
  operand_collectives,
  result_collectives,
)
from flax_spmd._src.estimate.resharding import CollectiveOp, wire_bytes
from flax_spmd._src.hlo.collectives import Collective
from flax_spmd._src.hlo.operation_costs import OperationCosts, operation_costs

if TYPE_CHECKING:
  from flax_spmd._src.estimate.mlir.module import PreparedModule

# By kind, the opcodes of operations that compute; others only move their operands, and have no collectives of their own.
_OPCODES = {
  'dot_general': ('dot',),
  'convolution': ('convolution', 'custom-call'),
  'gather': ('gather',),
  'scatter': ('scatter',),
}
_ALIKE = 0.01  # largest difference in bytes on the wire of collectives that count as the same
_SMALL = 256  # bytes on the wire


class Partition(NamedTuple):
  """XLA's collectives for one operation on each device.

  Attributes:
    operands: those of each operand, in order.
    result: those of the result.
    flops: FLOPs of a product.
  """

  operands: tuple[tuple[CollectiveOp, ...], ...]
  result: tuple[CollectiveOp, ...]
  flops: float


class PartitionedOperations:
  """Partitions single operations of a step.

  Args:
    module: the step.
    computed: values that every device can compute by itself.
  """

  def __init__(self, module: PreparedModule, computed: Collection[int]):
    self._module, self._computed = module, computed

  def partition(self, op: Op, specs: Sequence[Spec], sizes: Mapping[str, int]) -> Partition | None:
    """XLA's partition of an operation; None if there is none.

    Args:
      op: the operation.
      specs: sharding of each value.
      sizes: size per mesh axis.
    """
    if op.kind == 'custom_call':
      return None
    single = self._module.single_operation(op, specs, sizes, self._computed)
    costs = single and _costs(single.code, sizes, _OPCODES.get(op.kind, ()))
    if not single or not costs:
      return None
    operands: list[list[CollectiveOp]] = [[] for _ in op.operands]
    for argument, ones in costs.operands.items():
      operands[single.positions[argument]] += map(_op, ones)
    return Partition(tuple(map(tuple, operands)), tuple(map(_op, costs.result)), costs.flops)

  def reshard(
    self, value: GraphValue, before: Spec, after: Spec, sizes: Mapping[str, int]
  ) -> list[CollectiveOp] | None:
    """XLA's collectives between two shardings of an array; None if they are not known.

    Args:
      value: shape and wire dtype of the array.
      before, after: mesh axes per dimension.
      sizes: size per mesh axis.
    """
    code = self._module.resharding(value, before, after, sizes)
    costs = code and _costs(code, sizes, ())
    return [*map(_op, costs.result)] if costs else None


def _costs(code: bytes, sizes: Mapping[str, int], opcodes: Collection[str]) -> OperationCosts | None:
  """The work of a program as partitioned; None if that fails, or has groups that are no part of the mesh."""
  text = partitioner('cuda').partition(code, tuple(sizes.values()))
  if text is None:
    return None
  try:
    costs = operation_costs(text, sizes, opcodes)
  except ValueError:
    return None
  everything = (*costs.result, *(one for ones in costs.operands.values() for one in ones))
  return costs if all(one.axes for one in everything) else None


def _op(one: Collective) -> CollectiveOp:
  return CollectiveOp(one.kind, one.axes, one.bytes)


def adopted(
  op: Op, required: Requirement, context: Context, partition: Partition
) -> tuple[Requirement, Bound]:
  """The requirement with XLA's collectives where it has others, and by how much the two differ.

  Args:
    op: the operation.
    required: its requirement.
    context: its operands and result.
    partition: XLA's partition of it.
  """
  moved = [
    ops if op.operands.index(value) == position else []  # one that occurs twice is resharded once
    for position, (value, ops) in enumerate(zip(op.operands, operand_collectives(required, context)))
  ]
  reduced = [*result_collectives(required, context), *required.halos]
  if op.kind not in _OPCODES:
    reduced, moved = [one for ops in (*moved, reduced) for one in ops], [[] for _ in moved]
  operands, difference = list(required.operands), 0.0
  exchanges: list[tuple[CollectiveOp, ...]] = [()] * len(moved)
  for position, (ours, xla) in enumerate(zip(moved, partition.operands)):
    if apart := _apart(ours, xla, context.sizes):
      operands[position], exchanges[position] = None, xla
      difference += apart
  flops = partition.flops if op.kind in PRODUCTS else required.flops
  bound = Bound(flops=abs(flops - required.flops))
  if apart := _apart(reduced, partition.result, context.sizes):
    difference += apart
    required = required._replace(
      natural_sharding=context.result_spec, partial_axes=(), halos=partition.result
    )
    operands = operands if op.kind in _OPCODES else [None] * len(operands)
  required = required._replace(
    operands=tuple(operands), exchanges=tuple(exchanges), flops=flops, doubt='', is_settled=True
  )
  return required, bound._replace(wire=difference)


def _apart(ours: Sequence[CollectiveOp], xla: Sequence[CollectiveOp], sizes: Mapping[str, int]) -> float:
  """The difference in bytes on the wire; 0 for collectives that count as the same."""
  one, other = wire_bytes(ours, sizes), wire_bytes(xla, sizes)
  return 0.0 if abs(one - other) <= max(_ALIKE * max(one, other), _SMALL) else abs(one - other)
