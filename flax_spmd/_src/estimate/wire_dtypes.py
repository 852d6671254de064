"""Wire dtypes: the dtype in which XLA moves a value that is converted nearby.

XLA converts on the side that sends fewer bytes: a widened value is moved before it is widened, and a value whose
every use narrows it is moved after it is narrowed. XLA's `collective-quantizer` does the latter only if the
narrowed value has one use. That use can be a reshape: of a layer's weight sliced out of a stack, or of a weight
with more than two dimensions that a product takes as a matrix.
"""

from __future__ import annotations

from collections import Counter

from flax_spmd._src.estimate.graph import Block, Graph, GraphValue, Op

# No operations in XLA's program: users of the result are users of the operand.
_ALIASES = ('sharding_constraint', 'transpose', 'copy')
_DTYPE_PRESERVING = ('sharding_constraint', 'reshape', 'transpose', 'dynamic_slice', 'slice', 'copy')


def wire_values(graph: Graph) -> dict[int, GraphValue]:
  """The values that are sent in a narrower dtype than their own, with that dtype."""
  result: dict[int, GraphValue] = {}
  _BlockDtypes(graph, result).visit(graph.main)
  return result


class _BlockDtypes:
  """The wire dtypes of one block, visited from its end, so that the uses of a value are known before it."""

  def __init__(self, graph: Graph, result: dict[int, GraphValue]):
    self.graph, self.result = graph, result
    self.values = graph.values
    self.use_dtypes: dict[int, set[str | None]] = {}  # None: the value's own dtype
    self.use_counts: Counter[int] = Counter()
    self.reshaped: set[int] = set()
    self.matrices: set[int] = set()  # operands of products that take them without a reshape

  def visit(self, block: Block) -> None:
    for op in block.ops:
      if op.kind == 'reshape' or (op.kind in _DTYPE_PRESERVING and op.operands[0] in self.reshaped):
        self.reshaped.update(op.results)
    for value in block.returned:
      self._add_use(value, None)
    for op in reversed(block.ops):
      for result in op.results:
        self._narrow_if_all_uses_do(result)
      for inner in op.blocks:
        _BlockDtypes(self.graph, self.result).visit(inner)
      count = max(1, self.use_counts[op.results[0]]) if op.kind in _ALIASES else 1
      if op.kind == 'dot_general':
        sides = zip(op.operands, ('lhs', 'rhs'))
        self.matrices |= {value for value, side in sides if self._is_matrix(op, value, side)}
      elif op.kind == 'convolution':
        self.matrices.update(op.operands)
      elif op.kind in _ALIASES and op.results[0] in self.matrices:
        self.matrices.add(op.operands[0])
      for value in op.operands:
        self._add_use(value, self._operand_dtype(op), count)
      if op.kind == 'convert':
        self._keep_narrow_source(op)
    for value in block.arguments:
      self._narrow_if_all_uses_do(value)

  def _add_use(self, value: int, dtype: str | None, count: int = 1) -> None:
    self.use_dtypes.setdefault(value, set()).add(dtype)
    self.use_counts[value] += count

  def _operand_dtype(self, op: Op) -> str | None:
    """The narrower dtype in which an operation could receive its operand; None if there is none."""
    if op.kind == 'convert' and self._itemsize(op.results[0]) < self._itemsize(op.operands[0]):
      return self.values[op.results[0]].dtype if self._has_one_use(op) else None
    if op.kind in _DTYPE_PRESERVING and op.results[0] in self.result:
      return self.result[op.results[0]].dtype
    return None

  def _has_one_use(self, convert: Op) -> bool:
    [result] = convert.results
    is_matrix = len(self.values[result].shape) <= 2 or result in self.matrices
    return self.use_counts[result] <= 1 or not is_matrix or convert.operands[0] in self.reshaped

  def _is_matrix(self, op: Op, value: int, side: str) -> bool:
    """Whether a product has at most one contracted and one other dimension of an operand, besides batch dimensions."""
    batch = op.attributes.get(f'{side}_batching_dimensions', ())
    contracted = op.attributes.get(f'{side}_contracting_dimensions', ())
    others = len(self.values[value].shape) - len(batch) - len(contracted)
    return len(contracted) <= 1 and others <= 1

  def _narrow_if_all_uses_do(self, value: int) -> None:
    dtypes = self.use_dtypes.get(value, {None})
    if len(dtypes) == 1 and None not in dtypes:
      self.result[value] = self.values[value]._replace(dtype=str(*dtypes))

  def _keep_narrow_source(self, convert: Op) -> None:
    """A widened value is sent in the dtype of its source, except for complex ones."""
    before, after = self.values[convert.operands[0]], self.values[convert.results[0]]
    if before.itemsize < after.itemsize and not after.dtype.startswith('complex'):
      self.result[convert.results[0]] = before

  def _itemsize(self, value: int) -> float:
    return self.values[value].itemsize
