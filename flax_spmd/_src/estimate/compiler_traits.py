"""Compiler traits: the operations that the compilers of the platforms partition in different ways.

* Lookups such as `x[jnp.arange(n), labels]`, whose first coordinate only counts. A position along which it counts from
  0 to the end of the table's dimension is a batch dimension, although the lookup does not declare it as one. The
  compilers for GPUs and TPUs find these dimensions; the CPU's does not simplify indices before it partitions.
* `top_k`, which only the TPU's compiler partitions.
* Convolutions, which GPUs leave to cuDNN. It has a gradient of the input, which reads the filter in reverse.
"""

from __future__ import annotations

from collections.abc import Sequence

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
