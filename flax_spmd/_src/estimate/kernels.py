"""Kernels: custom calls, with the costs of those that are known.

cuDNN's attention is partitioned along its batch and its heads; whatever else it is sharded along is gathered. A TPU
kernel has the costs that its author has given it (`cost_estimate` of `pallas_call`). All others are unknown, and make
an estimate doubtful.
"""

from __future__ import annotations

import math

from flax_spmd._src.estimate.graph import Axes, GraphValue, Op, Spec, replicated, shard_count
from flax_spmd._src.estimate.requirements import Context, Requirement
from flax_spmd._src.hlo.flops import attention_scores, is_negligible_call, kernel_flops

_PLACEMENTS = ('annotate_device_placement', 'MoveToHost', 'MoveToDevice')
_MOVED = 'a value moves between device and host; estimates count it as memory of the device throughout'


def custom_call(op: Op, context: Context) -> Requirement:
  """A custom call; every operand may have any sharding, except in attention."""
  kernel = op.attributes.get('kernel', '')
  scores = attention_scores(kernel)
  flops = kernel_flops(kernel, context.values[0].shape if context.values else ()) or 0.0
  if scores is None or len(context.result_spec) != 4:
    doubt = _MOVED if kernel.partition(' ')[0] in _PLACEMENTS else ''
    return Requirement((None,) * len(context.values), context.result_spec, flops=flops, doubt=doubt)
  query, heads_dim = context.values[0].shape, _heads_dim(context.values[0], scores)
  batch, heads = context.specs[0][0], context.specs[0][heads_dim]
  operands = tuple(
    _attention_spec(value, query, heads_dim, batch, heads, context) for value in context.values
  )
  natural = _attention_spec(context.result, query, heads_dim, batch, heads, context)
  shards = shard_count((*batch, *heads), context.sizes)
  return Requirement(operands, natural or context.result_spec, flops=flops / shards)


def unknown_kernel(op: Op) -> str:
  """The name of a custom call whose costs are unknown; '' for other operations."""
  kernel = op.attributes.get('kernel', '')
  name = kernel.partition(' ')[0]
  if op.kind != 'custom_call' or is_negligible_call(name):
    return ''
  return name if kernel_flops(kernel, (1,)) is None else ''


def _heads_dim(query: GraphValue, scores: tuple[int, ...]) -> int:
  """The dimension of the heads: the third of (batch, length, heads, size), or the second."""
  return 2 if query.shape[2] == scores[1] else 1


def _attention_spec(
  value: GraphValue, query: tuple[int, ...], heads_dim: int, batch: Axes, heads: Axes, context: Context
) -> Spec | None:
  """The sharding of an operand or result of attention; None for seeds, offsets and other small arrays."""
  if len(value.shape) not in (3, 4) or value.shape[0] != query[0] or not math.prod(value.shape):
    return None
  spec = list(replicated(len(value.shape)))
  dim = heads_dim if len(value.shape) == 4 else 1
  spec[0] = batch
  if value.shape[dim] % shard_count(heads, context.sizes) == 0:
    spec[dim] = heads
  return tuple(spec)
