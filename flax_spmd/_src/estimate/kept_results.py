"""Kept results: elementwise results that a compiler stores, or does not store, against the common rule.

The common rule (`live_buffers`): elementwise operations are fused into their users, and computed again for each of
them; operands of products are stored. XLA departs from it, as was measured on compiled programs. For GPUs:

* A result that several operations use, as an activation and its gradient do, is computed again for each of them, unless
  that takes longer than to write and read it: from about 150 clock cycles for each of its bytes. So `tanh` is stored
  in 16 bits and not in 32, `log(1 + exp(x))` too, and `sine` and the long polynomials of `erfc` always are.
* The mask of a dropout is stored, one byte an element, not the random bits, which every device could compute again.
* Products compute functions of their operands themselves, which are not stored then (`prologues`).

For TPUs, elementwise operations are always fused into the products that read them, expensive ones too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from flax_spmd._src.estimate.graph import PRODUCTS, Block, Graph, Op
from flax_spmd._src.estimate.prologues import Prologues, prologues

# Clock cycles on an H100, from XLA's `hlo_op_profiles_data.h`. Those of other operations hardly count. CHLO's long
# polynomials have become a sine.
_CYCLES = {
  'cbrt': 178,
  'cosine': 978,
  'exponential': 79,
  'exponential_minus_one': 190,
  'log': 166,
  'log_plus_one': 229,
  'logistic': 129,  # an exponential, an addition and a division
  'power': 526,
  'rsqrt': 75,
  'sine': 958,
  'sqrt': 75,
  'tan': 978,
  'tanh': 467,
}
_CYCLES_A_BYTE = 150
_ELEMENTWISE = (
  *('abs', 'add', 'and', 'compare', 'divide', 'maximum', 'minimum', 'multiply', 'negate', 'not', 'or'),
  *('select', 'subtract'),
)
_ROUNDS = 16  # of the 20 of Threefry, each of which ends in an exclusive or
_VIEWS = ('broadcast_in_dim', 'convert', 'reshape', 'sharding_constraint', 'transpose')


class KeptResults(NamedTuple):
  """The elementwise results that are exceptions to the common rule.

  Attributes:
    kept: those that are stored because they are expensive to compute again.
    fused: operands of products that are not stored, since they are computed as the products read them.
    sources: values that products read instead, and that are stored.
  """

  kept: frozenset[int]
  fused: frozenset[int] = frozenset()
  sources: frozenset[int] = frozenset()


def kept_results(graph: Graph, platform: str) -> KeptResults:
  """The exceptions in a program.

  Args:
    graph: the program.
    platform: 'cuda', 'tpu' or 'cpu'. The CPU's compiler fuses no operands.
  """
  blocks = list(_blocks(graph.main))
  if platform == 'tpu':
    fused = frozenset(value for block in blocks for value in _elementwise(block))
    return KeptResults(frozenset(), fused)
  found = prologues(graph) if platform == 'cuda' else Prologues(frozenset(), frozenset())
  kept = frozenset(value for block in blocks for value in _kept(block, graph, found))
  return KeptResults(kept, found.fused, found.sources)


def _blocks(block: Block) -> Iterator[Block]:
  yield block
  for op in block.ops:
    for inner in op.blocks:
      yield from _blocks(inner)


def _kept(block: Block, graph: Graph, found: Prologues) -> Iterator[int]:
  yield from _masks(block, graph, _Uses(block, found.fused))
  yield from _expensive(block, graph, found)


def _masks(block: Block, graph: Graph, uses: _Uses) -> Iterator[int]:
  """The comparisons with random numbers that several operations use."""
  rounds: dict[int, int] = {}  # of a random generator, by value
  for op in block.ops:
    if op.blocks or len(op.results) != 1:
      rounds |= dict.fromkeys(op.results, _ROUNDS if op.kind == 'rng_bit_generator' else 0)
      continue
    (result,) = op.results
    value = graph.values[result]
    before = max((rounds.get(operand, 0) for operand in op.operands), default=0)
    rounds[result] = 0 if value.dtype == 'i1' else before + (op.kind == 'xor')
    if op.kind == 'compare' and before >= _ROUNDS and value.shape and uses.count(result) > 1:
      yield result


def _expensive(block: Block, graph: Graph, found: Prologues) -> Iterator[int]:
  """The results that take longer to compute again than to write and read."""
  uses = _Uses(block, found.fused)
  products = (op.operands for op in block.ops if op.kind in PRODUCTS)
  stored = found.sources.union(*products) - found.fused
  steps: dict[int, dict[int, int]] = {}  # by value, the cycles of the functions that it is computed with
  for op in block.ops:
    if len(op.results) != 1 or op.results[0] in stored:
      continue
    (result,) = op.results
    if op.kind in _CYCLES or op.kind in _ELEMENTWISE or op.kind in _VIEWS:
      size = math.prod(graph.values[result].shape)
      fused = [steps.get(one, {}) for one in op.operands if math.prod(graph.values[one].shape) == size]
      cycles = {key: value for one in fused for key, value in one.items()}
      cycles |= {result: _CYCLES[op.kind]} if op.kind in _CYCLES else {}
      limit = _CYCLES_A_BYTE * graph.values[result].itemsize
      if cycles and sum(cycles.values()) >= limit and op.kind not in _VIEWS and uses.count(result) > 1:
        yield result
      elif cycles:
        steps[result] = cycles


def _elementwise(block: Block) -> Iterator[int]:
  """The results of operations that are not stored unless something reads them as a whole."""
  for op in block.ops:
    if op.kind not in PRODUCTS:
      yield from op.results


class _Uses:
  """The uses of values in a block, besides those of products that compute a value themselves."""

  def __init__(self, block: Block, fused: frozenset[int]):
    self._counts: dict[int, int] = {}
    for op in reversed(block.ops):  # the users of its results come first
      for value in op.operands:
        self._counts[value] = self.count(value) + self._uses(op, value, fused)

  def count(self, value: int) -> int:
    """The number of operations that use a value, directly or through views of it."""
    return self._counts.get(value, 0)

  def _uses(self, op: Op, value: int, fused: frozenset[int]) -> int:
    if op.kind in _VIEWS:
      return self.count(op.results[0])
    if op.kind == 'dot_general':
      return int(value not in fused)
    is_fused = op.results and op.results[0] in fused
    return min(1, self.count(op.results[0])) if is_fused else 1
