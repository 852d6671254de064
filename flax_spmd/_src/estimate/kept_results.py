"""Kept results: elementwise results that a compiler stores, or does not store, against the common rule.

The common rule (`live_buffers`): elementwise operations are fused into their users, and computed again for each of
them; operands of products are stored. XLA departs from it, as was measured on compiled programs. For GPUs:

* A result that is expensive to compute is stored if several operations use it, as an activation and its gradient do:
  `tanh` in 16 bits (in 32 bits it is computed twice), `sine`, what CHLO expands to long polynomials (`erfc`), and
  three transcendental functions one after the other (`tanh` of `softplus`).
* The mask of a dropout is stored, one byte an element, not the random bits, which every device could compute again.
* Products compute functions of their operands themselves, which are not stored then (`prologues`).

For TPUs, elementwise operations are always fused into the products that read them, expensive ones too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from flax_spmd._src.estimate.graph import PRODUCTS, Block, Graph, Op
from flax_spmd._src.estimate.prologues import Prologues, prologues

_EXPENSIVE = ('sine', 'cosine')
_EXPENSIVE_IN_16_BITS = ('tanh',)
_TRANSCENDENTAL = (
  'exponential',
  'exponential_minus_one',
  'log',
  'log_plus_one',
  'logistic',
  'power',
  'tanh',
)
_ELEMENTWISE = (
  'add',
  'convert',
  'divide',
  'maximum',
  'minimum',
  'multiply',
  'negate',
  'select',
  'subtract',
)
_CHAIN = 3  # of them, one after the other, are expensive too
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
  kept = frozenset(value for block in blocks for value in _kept(block, graph, found.fused))
  return KeptResults(kept, found.fused, found.sources)


def _blocks(block: Block) -> Iterator[Block]:
  yield block
  for op in block.ops:
    for inner in op.blocks:
      yield from _blocks(inner)


def _kept(block: Block, graph: Graph, fused: frozenset[int]) -> Iterator[int]:
  uses = _Uses(block, fused)
  rounds: dict[int, int] = {}  # of a random generator, by value
  chains: dict[int, int] = {}  # transcendental functions, one after the other, by value
  for op in block.ops:
    if op.blocks or len(op.results) != 1:
      rounds |= dict.fromkeys(op.results, _ROUNDS if op.kind == 'rng_bit_generator' else 0)
      continue
    (result,) = op.results
    value = graph.values[result]
    before = max((rounds.get(operand, 0) for operand in op.operands), default=0)
    is_mask = op.kind == 'compare' and before >= _ROUNDS and bool(value.shape)
    rounds[result] = 0 if value.dtype == 'i1' else before + (op.kind == 'xor')
    is_next = op.kind in _TRANSCENDENTAL
    if op.kind in _ELEMENTWISE or is_next:
      chains[result] = max((chains.get(one, 0) for one in op.operands), default=0) + is_next
    is_expensive = (
      op.kind in _EXPENSIVE
      or (op.kind in _EXPENSIVE_IN_16_BITS and value.itemsize < 4)
      or (is_next and chains[result] >= _CHAIN)
    )
    if (is_mask or is_expensive) and uses.count(result) > 1:
      yield result


def _elementwise(block: Block) -> Iterator[int]:
  """The results of operations that are not stored unless something reads them as a whole."""
  for op in block.ops:
    if op.kind not in PRODUCTS:
      yield from op.results


class _Uses:
  """The uses of values in a block, besides those of products that compute a value themselves."""

  def __init__(self, block: Block, fused: frozenset[int]):
    self._fused = fused
    self._users: dict[int, list[Op]] = {}
    for op in block.ops:
      for value in op.operands:
        self._users.setdefault(value, []).append(op)

  def count(self, value: int) -> int:
    """The number of operations that use a value, directly or through views of it."""
    return sum(self._count(value, user) for user in self._users.get(value, ()))

  def _count(self, value: int, user: Op) -> int:
    if user.kind in _VIEWS:
      return self.count(user.results[0])
    if user.kind == 'dot_general':
      return int(value not in self._fused)
    is_fused = user.results and user.results[0] in self._fused
    return min(1, self.count(user.results[0])) if is_fused else 1
