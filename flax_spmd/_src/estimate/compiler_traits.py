"""Compiler traits: the operations that the compilers of the platforms partition in different ways.

* Lookups such as `x[jnp.arange(n), labels]`, whose first coordinate only counts. A position along which it counts from
  0 to the end of the table's dimension is a batch dimension, although the lookup does not declare it as one. The
  compilers for GPUs and TPUs find these dimensions; the CPU's does not simplify indices before it partitions.
* `top_k`, which only the TPU's compiler partitions.
* Convolutions, which GPUs leave to cuDNN. It has a gradient of the input, which reads the filter in reverse.
* Padding before a convolution, which becomes padding of the convolution (`with_folded_pads`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from flax_spmd._src.estimate.graph import Block, Graph, Op

_LOOKUPS = {  # by kind, the attributes with the dimensions of the table, and the declared batch of the indices
  'gather': ('start_index_map', 'start_indices_batching_dims'),
  'scatter': ('scatter_dims_to_operand_dims', 'scatter_indices_batching_dims'),
}
# Operations whose result counts along the same dimension as their operands; a negation stands for an addition.
_SAME_SHAPE = ('convert', 'copy', 'negate', 'select', 'sharding_constraint')


def mark_traits(graph: Graph, platform: str) -> None:
  """Adds to the attributes of operations how a platform's compiler treats them.

  Lookups get `iota_dims`: pairs of a dimension of the table and one of the indices. `top_k` gets `is_partitioned`, and
  a convolution `is_reversed`: whether its filter is the result of a reversal.

  Args:
    graph: the program, which is changed.
    platform: 'cuda', 'tpu' or 'cpu'.
  """
  if platform != 'cpu':
    _IotaDims(graph).visit(graph.main)
  _mark_top_k(graph.main, platform == 'tpu')
  _mark_convolutions(graph.main)


def with_folded_pads(graph: Graph) -> Graph:
  """A program whose convolutions pad their inputs themselves, where these were padded along positions alone."""
  return graph._replace(main=_with_folded_pads(graph.main))


def _with_folded_pads(block: Block) -> Block:
  pads = {op.results[0]: op for op in block.ops if op.kind == 'pad'}
  ops = [op._replace(blocks=tuple(map(_with_folded_pads, op.blocks))) for op in block.ops]
  folded = [_folded(op, pads[op.operands[0]]) if _is_padded(op, pads) else op for op in ops]
  return block._replace(ops=tuple(folded))


def _is_padded(op: Op, pads: Mapping[int, Op]) -> bool:
  if op.kind != 'convolution' or op.operands[0] not in pads:
    return False
  pad, positions = pads[op.operands[0]].attributes, _positions(op)
  amounts = [pad.get(name) or () for name in ('edge_padding_low', 'edge_padding_high')]
  return not any(
    [
      *(amount for one in amounts for dim, amount in enumerate(one) if dim not in positions),
      *(pad.get('interior_padding') or ()),
      *(size - 1 for size in op.attributes.get('lhs_dilation') or ()),
    ]
  )


def _folded(op: Op, pad: Op) -> Op:
  positions = _positions(op)
  low, high = (pad.attributes[f'edge_padding_{side}'] for side in ('low', 'high'))
  added = [amounts[dim] for dim in positions for amounts in (low, high)]
  own = op.attributes.get('padding') or (0,) * len(added)
  attributes = {**op.attributes, 'padding': tuple(map(operator.add, own, added))}
  return op._replace(operands=(pad.operands[0], *op.operands[1:]), attributes=attributes)


def _positions(op: Op) -> list[int]:
  """The dimensions of a convolution's input that are positions, in order."""
  labels = op.attributes['dimension_numbers'][0]
  return [labels.index(str(dim)) for dim in range(len(labels) - 2)]


def _mark_top_k(block: Block, is_partitioned: bool) -> None:
  for op in block.ops:
    if op.kind == 'top_k' and isinstance(op.attributes, dict):
      op.attributes['is_partitioned'] = is_partitioned
    for inner in op.blocks:
      _mark_top_k(inner, is_partitioned)


def _mark_convolutions(block: Block) -> None:
  reversed_values = {op.results[0] for op in block.ops if op.kind == 'reverse'}
  for op in block.ops:
    if op.kind == 'convolution' and isinstance(op.attributes, dict):
      op.attributes['is_reversed'] = op.operands[1] in reversed_values
    for inner in op.blocks:
      _mark_convolutions(inner)


class _IotaDims:
  """The dimensions along which values count: one per coordinate, None if it does not count."""

  def __init__(self, graph: Graph):
    self.values = graph.values
    self.known: dict[int, tuple[int | None, ...]] = {}

  def visit(self, block: Block) -> None:
    for op in block.ops:
      if op.kind in _LOOKUPS:
        self._mark(op)
      elif len(op.results) == 1:
        counts = self._counts(op)
        if any(one is not None for one in counts):
          self.known[op.results[0]] = counts
      for inner in op.blocks:
        self.visit(inner)

  def _mark(self, op: Op) -> None:
    indices = op.operands[len(op.operands) // 2]  # a scatter has as many updates as tables
    counts = self.known.get(indices, ())
    table, shape = self.values[op.operands[0]].shape, self.values[indices].shape
    looked_up, declared = (op.attributes.get(name, ()) for name in _LOOKUPS[op.kind])
    pairs = tuple(
      (dim, count)
      for dim, count in zip(looked_up, counts)
      if count is not None and shape[count] == table[dim] and count not in declared
    )
    is_diagonal = len({count for _, count in pairs}) < len(
      pairs
    )  # XLA takes none of these dimensions as a batch
    if pairs and not is_diagonal and isinstance(op.attributes, dict):
      op.attributes['iota_dims'] = pairs

  def _counts(self, op: Op) -> tuple[int | None, ...]:
    if op.kind == 'iota':
      return (op.attributes['iota_dimension'],)
    sources = [self.known.get(value, (None,)) for value in op.operands]
    if op.kind == 'concatenate':
      return sum(sources, ())
    if op.kind == 'select':
      sources = sources[1:]
    if op.kind in _SAME_SHAPE and sources:
      return sources[0] if len(set(sources)) == 1 else (None,)
    if op.kind == 'broadcast_in_dim' and len(sources[0]) == 1 and sources[0][0] is not None:
      return (op.attributes['broadcast_dimensions'][sources[0][0]],)
    if op.kind == 'reshape' and len(sources[0]) == 1 and sources[0][0] is not None:
      before, after = (self.values[value].shape for value in (op.operands[0], op.results[0]))
      return (_reshaped_dim(sources[0][0], before, after),)
    return (None,)


def _reshaped_dim(dim: int, before: Sequence[int], after: Sequence[int]) -> int | None:
  """The dimension that a dimension becomes in a reshape that only adds or removes dimensions of size 1."""
  numbered = [[at for at, size in enumerate(shape) if size != 1] for shape in (before, after)]
  if [before[at] for at in numbered[0]] != [after[at] for at in numbered[1]] or dim not in numbered[0]:
    return None
  return numbered[1][numbered[0].index(dim)]
