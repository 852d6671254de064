"""Equal operations: those that XLA computes once, although the step has them several times.

XLA merges them after it has propagated shardings. Until then each has its own sharding, which its users decide with: the
second product of `x @ w` may be sharded where the first is replicated, and both are computed. So which operations are
merged depends on the layout. Most layouts shard equal operations alike; they have one merged program in common.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flax_spmd._src.estimate.graph import Block, Graph, Op, Spec

_SLICES = ('slice', 'dynamic_slice')
_BROADCAST = 'broadcast_in_dim'
_COSTLY = (  # which are merged if their operands are equal, though not merged
  'dot_general',
  'convolution',
  'gather',
  'scatter',
  'reduce',
  'concatenate',
  'sharding_constraint',
)


class _Repeated(NamedTuple):
  """An operation that occurs more than once in its block.

  Attributes:
    op: the operation.
    block: number of its block.
    is_expanded: whether it is the broadcast of an array, which is computed again wherever it is read.
    inner: values of its blocks.
  """

  op: Op
  block: int
  is_expanded: bool
  inner: tuple[int, ...]


class EqualOperations:
  """The operations of a program that could be merged.

  Args:
    graph: the program.
  """

  def __init__(self, graph: Graph):
    self._graph = graph
    self._repeated: list[_Repeated] = []
    self._readers: dict[int, set[int]] = {}  # numbers of the operations on a value
    self._blocks = 0
    self._collect(graph.main)

  def _collect(self, block: Block) -> None:
    number, counts = self._blocks, {}
    self._blocks += 1
    for op in block.ops:
      counts[op.equal] = counts.get(op.equal, 0) + 1
      for value in op.operands:
        self._readers.setdefault(value, set()).add(op.equal)
    for op in block.ops:
      if counts[op.equal] > 1:
        self._repeated.append(_Repeated(op, number, self._is_expanded(op), tuple(_values(op.blocks))))
      for inner in op.blocks:
        self._collect(inner)

  def _is_expanded(self, op: Op) -> bool:
    values = self._graph.values
    return op.kind == _BROADCAST and bool(values[op.operands[0]].shape)

  def merged_values(self, specs: Sequence[Spec]) -> Mapping[int, int]:
    """By result of each operation that is merged into an equal one, the result of that one.

    Args:
      specs: sharding of each value.
    """
    merged: dict[int, int] = {}
    numbers: dict[int, int] = {}  # by value, the first one that is equal, and sharded alike
    known: dict[tuple, Op] = {}
    for op, block, is_expanded, inner in self._repeated:
      operands = tuple([numbers.get(value, value) for value in op.operands])
      shardings = tuple([specs[value] for value in (*op.results, *inner)])
      first = known.setdefault((block, op.equal, operands, shardings), op)
      if first is op:
        continue
      is_same = all(
        merged.get(one, one) == merged.get(other, other)
        for one, other in zip(first.operands, op.operands)
      )
      if op.kind in _COSTLY or (is_same and not is_expanded):
        merged |= zip(op.results, first.results)
      numbers |= zip(op.results, first.results)
    return merged

  def merge(self, merged: Mapping[int, int]) -> Graph:
    """The program with equal operations merged.

    In the place of several operations, one has two attributes: `copies`, of each operand the number of the others that
    read another, equal value in its place; and `reshaped`, the number of those with an operand that is computed from a
    reshape, and from a value with other readers. XLA moves reshapes past other operations, or not, as these are read;
    the arrays are then no longer equal.

    Args:
      merged: values that are replaced, from `merged_values`.
    """
    ops = {each.op.results[0]: each.op for each in self._repeated if each.op.results}
    added: dict[int, dict[str, Any]] = {}
    reshaped: set[int] = set()
    apart: set[int] = set()  # computed from values with other readers
    for value, op in ops.items():
      first = ops[merged.get(value, value)]
      if first is not op:
        about = added.setdefault(merged[value], {'copies': (0,) * len(op.operands), 'reshaped': 0})
        others = map(operator.ne, op.operands, first.operands)
        about['copies'] = tuple(map(operator.add, about['copies'], others))
        about['reshaped'] += any(one in reshaped and one in apart for one in op.operands)
      maker = ops.get(op.operands[0]) if op.kind == 'reshape' else None
      if (maker and maker.kind not in _SLICES) or not reshaped.isdisjoint(op.operands):
        reshaped.update(op.results)
      is_apart = self._readers.get(value) != self._readers.get(first.results[0])
      if is_apart or not apart.isdisjoint(op.operands):
        apart.update(op.results)
    return self._graph._replace(main=_merged(self._graph.main, merged, ops, added, set()))


def _merged(
  block: Block,
  merged: Mapping[int, int],
  repeated: Collection[int],
  added: Mapping[int, Mapping[str, Any]],
  used: set[int],
) -> Block:
  """A block without operations that are merged, or that only these have read.

  Args:
    block: the block.
    merged: values that are replaced.
    repeated: first results of operations that occur more than once.
    added: attributes of operations in whose place others are merged, by their first result.
    used: values that are read, which are added to.
  """
  returned = tuple([merged.get(value, value) for value in block.returned])
  used.update(returned)
  kept: list[Op] = []
  for op in reversed(block.ops):
    if any(value in merged for value in op.results):
      continue
    if op.results and op.results[0] in repeated and used.isdisjoint(op.results):
      continue
    operands = tuple([merged.get(value, value) for value in op.operands])
    used.update(operands)
    blocks = tuple([_merged(inner, merged, repeated, added, used) for inner in op.blocks])
    op = op._replace(operands=operands, blocks=blocks)
    if op.results and op.results[0] in added:
      op = op._replace(attributes={**op.attributes, **added[op.results[0]]})
    kept.append(op)
  return Block(block.arguments, tuple(reversed(kept)), returned)


def _values(blocks: Sequence[Block]) -> Iterator[int]:
  for block in blocks:
    yield from block.arguments
    for op in block.ops:
      yield from op.results
      yield from _values(op.blocks)
