"""Loops: what compilers move out of them.

A loop sum is a gradient of a weight that a loop adds up in its carry, as in a recurrent network.

    def body(carry, x):
      total, h = carry
      return (total + product(x, h), ...), None       # `total` is a loop sum

Along a sharded batch each product is a partial sum. XLA for GPUs and TPUs adds up the partial sums of all iterations
and reduces their total once after the loop (its pass `while-loop-all-reduce-code-motion`). It does so if

* the partial sum has no use but the addition, and the addition none but the carry;
* the reduction is an all-reduce: a sum that is sharded over the same axes is reduced in every iteration, by a
  reduce-scatter on GPUs and by an all-reduce on TPUs;
* the loop is the innermost one: a total that was reduced after an inner loop is not moved again.

XLA for CPUs reduces in every iteration. But it alone gathers a weight that does not change in the loop once before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from flax_spmd._src.estimate.graph import PRODUCTS, Block, Graph, Op

_FORWARDS = ('transpose', 'sharding_constraint', 'reshard')  # of a partial sum, without a reduction
_IN_SUMS = (*_FORWARDS, 'convert', 'reshape', 'slice')  # also forwarded on the way to an addition
_VIEWS = (*_FORWARDS, 'convert', 'reshape', 'copy')
MOVING_PLATFORMS = ('cuda', 'tpu')  # these move sums
WIDENING_PLATFORMS = ('cuda',)  # these widen partial sums to add them before they are reduced
GATHERING_PLATFORMS = ('cpu',)  # these move gathers


def loop_sums(graph: Graph, uses: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
  """The values that are added to a loop's carry, from the product to the addition.

  A product may be cut first, if all of its parts are added to carries: those of several weights in one product.

  Args:
    graph: the program.
    uses: number of uses per value.

  Returns:
    For each such value, the loop's results that it, or a part of it, is added to.
  """
  sums: dict[int, tuple[int, ...]] = {}
  for value, result in _in_block(graph.main, uses):
    sums[value] = (*sums.get(value, ()), result)
  return sums


def _in_block(block: Block, uses: Mapping[int, int]) -> Iterator[tuple[int, int]]:
  for op in block.ops:
    for inner in op.blocks:
      yield from _in_block(inner, uses)
    if op.kind == 'while':
      yield from _in_loop(op, op.blocks[1], uses)


def _in_loop(loop: Op, body: Block, uses: Mapping[int, int]) -> Iterator[tuple[int, int]]:
  producers = {value: op for op in body.ops for value in op.results}
  parts: Counter[int] = Counter()  # per value that is cut, the number of its parts on the way to a carry
  totals: dict[int, list[int]] = {}  # per value that is cut, the results that they are added to
  for result, carry, returned in zip(loop.results, body.arguments, body.returned):
    addition = producers.get(returned)
    if addition is None or addition.kind != 'add' or carry not in addition.operands:
      continue
    [value] = [operand for operand in addition.operands if operand != carry] or [carry]
    if value == carry or uses[carry] > 1 or uses[returned] > 1:
      continue
    yield returned, result
    results = [result]
    while value in producers:
      op = producers[value]
      if uses[value] > 1 and parts[value] < uses[value]:
        break
      results = totals.get(value, results)
      yield from ((value, one) for one in results)
      if op.kind not in _IN_SUMS:
        break
      value = op.operands[0]
      if op.kind == 'slice':
        parts[value] += 1
        totals.setdefault(value, []).extend(results)


def forwarded_sums(graph: Graph, uses: Mapping[int, int], sums: Collection[int]) -> frozenset[int]:
  """The results of operations that rearrange or widen a partial sum before it is reduced.

  A dimension of size 1 is added before the reduction, as of the gradient of a layer that a scan stacks. A sum is widened
  before it is reduced if it is then added to another one, or to a loop's carry; it is cut only on the way to carries.
  """
  return frozenset(_forwarded(graph.main, graph, uses, sums))


def _forwarded(
  block: Block, graph: Graph, uses: Mapping[int, int], sums: Collection[int]
) -> Iterator[int]:
  added = {value for op in block.ops if op.kind == 'add' for value in op.operands if uses[value] == 1}
  for op in reversed(block.ops):
    if op.kind in _IN_SUMS:
      [result, operand] = op.results[0], op.operands[0]
      is_alone = uses[operand] == 1
      before, after = (list(filter(_is_several, graph.values[one].shape)) for one in (operand, result))
      if (
        ((op.kind in _FORWARDS or (op.kind == 'reshape' and before == after)) and is_alone)
        or result in sums
        or (result in added and op.kind == 'convert' and is_alone)
      ):
        yield result
      if result in added and op.kind != 'slice' and is_alone:
        added.add(operand)
    for inner in op.blocks:
      yield from _forwarded(inner, graph, uses, sums)


def _is_several(size: int) -> bool:
  return size != 1


def origins(graph: Graph) -> dict[int, int]:
  """The number of loops around the place where each value is computed, or where the value it is a view of is."""
  result = dict.fromkeys(graph.main.arguments, 0)
  _add_origins(graph.main, 0, result)
  return result


def _add_origins(block: Block, depth: int, result: dict[int, int]) -> None:
  for op in block.ops:
    origin = result[op.operands[0]] if op.kind in _VIEWS else depth
    result |= dict.fromkeys(op.results, origin)
    is_loop = op.kind == 'while'
    for inner in op.blocks:
      result |= dict.fromkeys(inner.arguments, depth + is_loop)
      views = {view.results[0]: view.operands[0] for view in inner.ops if view.kind in _VIEWS}
      for operand, argument, returned in zip(op.operands, inner.arguments, inner.returned):
        while returned in views:
          returned = views[returned]
        if is_loop and argument == returned:
          result[argument] = result[operand]
      _add_origins(inner, depth + is_loop, result)


class AcrossLoops(NamedTuple):
  """What may be computed on either side of a loop of the main block.

  Attributes:
    products: by index of each product before a loop whose result is first read after it, the index of that reader.
    after: by value that is computed from a loop's results, the index of the last such loop.
  """

  products: Mapping[int, int]
  after: Mapping[int, int]


def across_loops(graph: Graph) -> AcrossLoops:
  """The products that a loop need not wait for, and the values that wait for a loop.

  The gradient of a table that logits are computed with is such a product: it is added to that of the lookup, which
  waits for the loop over the layers.
  """
  after: dict[int, int] = {}
  pending: dict[int, int] = {}  # by value, the product that it is a view of
  readers: dict[int, tuple[int, int]] = {}  # by product, with the last loop before
  last = -1  # loop
  for index, op in enumerate(graph.main.ops):
    is_loop = op.kind == 'while'
    loop = index if is_loop else max((after.get(value, -1) for value in op.operands), default=-1)
    after |= dict.fromkeys(op.results, loop) if loop >= 0 else {}
    if op.blocks and not is_loop:
      pending.clear()  # a branch may read any of them
    if op.kind in _VIEWS and op.operands[0] in pending:
      pending[op.results[0]] = pending[op.operands[0]]
      continue
    for value in op.operands:
      if value in pending:
        readers.setdefault(pending[value], (index, last))
    pending |= {op.results[0]: index} if op.kind in PRODUCTS else {}
    last = index if is_loop else last
  return AcrossLoops({one: reader for one, (reader, loop) in readers.items() if one < loop}, after)
