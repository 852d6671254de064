"""Sending: in which dtype values are moved, where that is another one than their own.

Compilers move conversions to where less is sent: what was converted from fewer bytes is sent before it is, and
what is only going to be converted to fewer bytes is sent after that. The latter only if the converted value has one
use: XLA's `collective-quantizer` looks no further. Of a layer's weight, cut out of a stack, or one that a
product takes as a matrix first, the one use is the reshape.
"""

from __future__ import annotations

from collections import Counter

from flax_spmd._src.estimate.graph import Block, Graph, Op, Value

# Nothing in XLA's program: who uses the result uses the operand.
_NOTHING = ('sharding_constraint', 'transpose', 'copy')
_PASSING = ('sharding_constraint', 'reshape', 'transpose', 'dynamic_slice', 'slice', 'copy')


def sent_as(graph: Graph) -> dict[int, Value]:
  """The values that are sent in a narrower dtype than theirs, and as what."""
  found: dict[int, Value] = {}
  _Block(graph, found).look(graph.main)
  return found


class _Block:
  """Looks at a block from its end: by then, what is made of a value is known."""

  def __init__(self, graph: Graph, found: dict[int, Value]):
    self.values, self.found = graph.values, found
    self.graph = graph
    self.needed: dict[int, set[str | None]] = {}  # in which dtypes; None is its own
    self.uses: Counter[int] = Counter()
    self.reshaped: set[int] = set()

  def look(self, block: Block) -> None:
    for op in block.ops:
      if op.kind == 'reshape' or (op.kind in _PASSING and op.operands[0] in self.reshaped):
        self.reshaped.update(op.results)
    for value in block.returned:
      self._need(value, None)
    for op in reversed(block.ops):
      for result in op.results:
        self._decide(result)
      for inner in op.blocks:
        _Block(self.graph, self.found).look(inner)
      uses = max(1, self.uses[op.results[0]]) if op.kind in _NOTHING else 1
      for value in op.operands:
        self._need(value, self._as(op), uses)
      if op.kind == 'convert':
        self._made_of(op)
    for value in block.arguments:
      self._decide(value)

  def _need(self, value: int, dtype: str | None, uses: int = 1) -> None:
    self.needed.setdefault(value, set()).add(dtype)
    self.uses[value] += uses

  def _as(self, op: Op) -> str | None:
    """In which dtype an operation could take its operand, if it were sent so."""
    if op.kind == 'convert' and self._item(op.results[0]) < self._item(op.operands[0]):
      return self.values[op.results[0]].dtype if self._has_one_use(op) else None
    if op.kind in _PASSING and op.results[0] in self.found:
      return self.found[op.results[0]].dtype
    return None

  def _has_one_use(self, convert: Op) -> bool:
    [result] = convert.results
    matrix = len(self.values[result].shape) <= 2
    return self.uses[result] <= 1 or not matrix or convert.operands[0] in self.reshaped

  def _decide(self, value: int) -> None:
    needed = self.needed.get(value, {None})
    if len(needed) == 1 and None not in needed:
      self.found[value] = self.values[value]._replace(dtype=str(*needed))

  def _made_of(self, op: Op) -> None:
    """What was converted from fewer bytes."""
    before, after = self.values[op.operands[0]], self.values[op.results[0]]
    if before.item < after.item:
      self.found[op.results[0]] = before

  def _item(self, value: int) -> float:
    return self.values[value].item
