"""Sharding requirements: how an operation needs its operands sharded, given the sharding of its result.

Propagation assigns a sharding to every value, but these do not always fit together: an operation may need other
shardings of its operands, and may compute its result in another sharding or as a partial sum. The `Context` of an
operation determines its `Requirement`, and the difference between the two determines the collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flax_spmd._src.estimate.graph import Axes, GraphValue, Spec
from flax_spmd._src.estimate.resharding import CollectiveOp, reduce_partial_sum, reshard, wire_bytes


class Context(NamedTuple):
  """The operands and the result of an operation, with the shardings that propagation assigned.

  Attributes:
    values: shapes and dtypes of the operands.
    specs: shardings of the operands.
    wire_values: the operands with their wire dtypes.
    rematerialisable: whether each operand is free to reshard, since every device can compute it.
    result: shape and dtype of the first result.
    result_spec: sharding of the first result.
    sizes: size per mesh axis.
    platform: platform of the target: 'cuda', 'tpu' or 'cpu'.
  """

  values: Sequence[GraphValue]
  specs: Sequence[Spec]
  wire_values: Sequence[GraphValue]
  rematerialisable: Sequence[bool]
  result: GraphValue
  result_spec: Spec
  sizes: Mapping[str, int]
  platform: str


class Requirement(NamedTuple):
  """The shardings that an operation computes with.

  Attributes:
    operands: sharding that each operand needs; None accepts the present one.
    natural_sharding: sharding in which the result is computed.
    partial_axes: axes along which the result is a partial sum.
    flops: FLOPs on one device, for products.
    halos: exchanges between the shards of the first operand.
    doubt: reason why XLA could choose otherwise, or ''.
    is_settled: whether XLA's choice for operands that are resharded is known.
    split: bytes on one device of the parts that a product is computed in, before they are added; 0 for a whole one.
    padded: bytes on one device of copies of the operands with padding, which the operation reads instead.
    exchanges: collectives of each operand whose shardings do not imply them, as found by a partitioner.
  """

  operands: tuple[Spec | None, ...]
  natural_sharding: Spec
  partial_axes: Axes = ()
  flops: float = 0.0
  halos: tuple[CollectiveOp, ...] = ()
  doubt: str = ''
  is_settled: bool = False
  split: float = 0.0
  padded: tuple[float, ...] = ()
  exchanges: tuple[tuple[CollectiveOp, ...], ...] = ()


def collectives(requirement: Requirement, context: Context) -> list[CollectiveOp]:
  """The collectives that reshard the operands as required, and the result to its sharding."""
  operands = operand_collectives(requirement, context)
  return [*result_collectives(requirement, context), *(one for ops in operands for one in ops)]


def operand_collectives(requirement: Requirement, context: Context) -> list[list[CollectiveOp]]:
  """The collectives that reshard each operand as required."""
  return [
    [] if required is None or is_free else reshard(value, spec, required, context.sizes)
    for value, spec, required, is_free in zip(
      context.wire_values, context.specs, requirement.operands, context.rematerialisable
    )
  ]


def result_collectives(requirement: Requirement, context: Context) -> list[CollectiveOp]:
  """The collectives that reduce and reshard the result to its sharding."""
  return reduce_partial_sum(
    context.result,
    requirement.natural_sharding,
    requirement.partial_axes,
    context.result_spec,
    context.sizes,
    context.platform,
  )


def sent_bytes(requirement: Requirement, context: Context) -> float:
  """Bytes that each device sends in these collectives."""
  return wire_bytes(collectives(requirement, context), context.sizes)
