"""Kept results: elementwise results that a compiler stores, or does not store, against the common rule.

The common rule (`live_buffers`): elementwise operations are fused into their users, and computed again for each of
them; operands of products are stored. XLA departs from it, as was measured on compiled programs. For GPUs:

* A result that several operations use, as an activation and its gradient do, is computed again for each of them, unless
  that takes longer than to write and read it: from about 150 clock cycles for each of its bytes. So `tanh` is stored
  in 16 bits and not in 32, `log(1 + exp(x))` too, and `sine` and the long polynomials of `erfc` always are.
* The mask of a dropout is stored, one byte an element, not the random bits, which every device could compute again.
* So is the mask of a function of a norm, such as `leaky_relu`, in 32 bits.
* So is the sum of a residual and a scaled branch (layer scale, adaptive norms): the branch is needed for the gradient
  of its scale. That of another branch is stored in place of the branch, which comes to the same.
* So are the logits less their maximum, if a logarithm of a softmax is computed from rows of up to 16,384 elements on
  one device: one kernel computes both.
* Products compute functions of their operands themselves, which are not stored then (`prologues`).

For TPUs, elementwise operations are always fused into the products that read them, expensive ones too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
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
_CYCLES_IN_DOUBT = 129  # a byte; up to the limit, XLA has been seen to choose both
_CYCLES_IN_DOUBT_AFTER_VECTORS = (
  110  # the same, after a bias that the step computes, as in sharpness-aware steps
)
_OTHER_CYCLES = 7  # of an addition or a multiplication
_LONG = 3  # operations after which a comparison in 32 bits is stored
_SHARED = 3  # operations that use a sum
_ELEMENTWISE = (
  *('abs', 'add', 'and', 'compare', 'divide', 'maximum', 'minimum', 'multiply', 'negate', 'not', 'or'),
  *('select', 'subtract'),
)
_ROW = 2**14  # elements, the most in a softmax that one kernel computes
_ROUNDS = 16  # of the 20 of Threefry, each of which ends in an exclusive or
_VIEWS = ('broadcast_in_dim', 'convert', 'reshape', 'sharding_constraint', 'transpose')


class KeptResults(NamedTuple):
  """The elementwise results that are exceptions to the common rule.

  Attributes:
    kept: those that are stored because they are expensive to compute again.
    fused: operands of products that are not stored, since they are computed as the products read them.
    sources: values that products read instead, and that are stored.
    unsure: values that are taken to be computed again, although that takes nearly as long.
    rows: for logits less their maximum that are stored, the dimension of their rows, and what they are computed from. The
      latter is stored in their place if the rows are sharded.
  """

  kept: frozenset[int]
  fused: frozenset[int] = frozenset()
  sources: frozenset[int] = frozenset()
  unsure: frozenset[int] = frozenset()
  rows: Mapping[int, tuple[int, int]] = MappingProxyType({})


def kept_results(graph: Graph, platform: str, given: frozenset[int]) -> KeptResults:
  """The exceptions in a program.

  Args:
    graph: the program.
    platform: 'cuda', 'tpu' or 'cpu'. The CPU's compiler fuses no operands.
    given: the arguments, views of them, and values that every device can compute by itself.
  """
  blocks = list(_blocks(graph.main))
  if platform == 'tpu':
    fused = frozenset(value for block in blocks for value in _elementwise(block))
    return KeptResults(frozenset(), fused)
  found = prologues(graph) if platform == 'cuda' else Prologues(frozenset(), frozenset())
  kept: set[int] = set()
  unsure: set[int] = set()
  rows: dict[int, tuple[int, int]] = {}
  for block in blocks:
    uses, depths = _Uses(block, found.fused), _depths(block, graph)
    kept.update(_masks(block, graph, uses, depths))
    kept.update(_scaled_sums(block, graph, uses, given))
    expensive = _Expensive(block, graph, found, uses, depths, given)
    kept |= expensive.kept
    unsure |= expensive.unsure
    rows |= dict(_rows(block, graph)) if platform == 'cuda' else {}
  return KeptResults(frozenset(kept.union(rows)), found.fused, found.sources, frozenset(unsure), rows)


def _blocks(block: Block) -> Iterator[Block]:
  yield block
  for op in block.ops:
    for inner in op.blocks:
      yield from _blocks(inner)


def _masks(block: Block, graph: Graph, uses: _Uses, depths: Mapping[int, int]) -> Iterator[int]:
  """The comparisons of random numbers, and of norms in 32 bits, that several operations use."""
  rounds: dict[int, int] = {}  # of a random generator, by value
  for op in block.ops:
    if op.blocks or len(op.results) != 1:
      rounds |= dict.fromkeys(op.results, _ROUNDS if op.kind == 'rng_bit_generator' else 0)
      continue
    (result,) = op.results
    value = graph.values[result]
    before = max((rounds.get(operand, 0) for operand in op.operands), default=0)
    rounds[result] = 0 if value.dtype == 'i1' else before + (op.kind == 'xor')
    is_long = depths.get(result, 0) > _LONG and graph.values[op.operands[0]].dtype == 'f32'
    is_mask = op.kind == 'compare' and value.shape and uses.count(result) > 1
    if is_mask and (before >= _ROUNDS or is_long):
      yield result


def _scaled_sums(block: Block, graph: Graph, uses: _Uses, given: frozenset[int]) -> Iterator[int]:
  """The sums of which an operand is the result of a product times a smaller array, and that several operations use."""
  products: set[int] = set()  # their results, and those plus a bias
  scaled: set[int] = set()
  for op in block.ops:
    if len(op.results) != 1:
      continue
    (result,) = op.results
    size = math.prod(graph.values[result].shape)
    same = [one for one in op.operands if math.prod(graph.values[one].shape) == size]
    if op.kind in PRODUCTS:
      products.add(result)
    elif op.kind in _VIEWS:
      products |= {result} if same and products.issuperset(same) else set()
      scaled |= {result} if same and scaled.issuperset(same) else set()
    elif op.kind == 'multiply':
      scaled |= {result} if not products.isdisjoint(same) else set()
    elif op.kind == 'add':
      if not scaled.isdisjoint(same) and uses.count(result) >= _SHARED:
        yield result
      products |= (
        {result}
        if not products.isdisjoint(same)
        and given.issuperset(one for one in op.operands if one not in products)
        else set()
      )


def _rows(block: Block, graph: Graph) -> Iterator[tuple[int, tuple[int, int]]]:
  """Each `x` in `x - log(sum(exp(x)))` with short rows: their dimension, and what `x` is computed from."""
  makers = {value: op for op in block.ops for value in op.results}

  def source(value: int) -> int:
    while value in makers and makers[value].kind in _VIEWS:
      value = makers[value].operands[0]
    return value

  def operand(value: int, kind: str) -> int | None:
    op = makers.get(source(value))
    return op.operands[0] if op is not None and op.kind == kind else None

  for op in block.ops:
    if op.kind != 'subtract' or (logits := operand(op.operands[0], 'subtract')) is None:
      continue
    value, total = op.operands
    if (summed := operand(total, 'log')) is None or (terms := operand(summed, 'reduce')) is None:
      continue
    dims = (
      makers[source(summed)].attributes['dimensions'] if operand(terms, 'exponential') == value else ()
    )
    if len(dims) == 1 and graph.values[value].shape[dims[0]] <= _ROW:
      yield value, (dims[0], source(logits))


def _depths(block: Block, graph: Graph) -> dict[int, int]:
  """By elementwise result, the number of operations in turn that compute it from arrays of its size."""
  result: dict[int, int] = {}
  for op in block.ops:
    if len(op.results) == 1 and (op.kind in _CYCLES or op.kind in _ELEMENTWISE or op.kind in _VIEWS):
      size = math.prod(graph.values[op.results[0]].shape)
      fused = [one for one in op.operands if math.prod(graph.values[one].shape) == size]
      depth = max((result.get(one, 0) for one in fused), default=0)
      result[op.results[0]] = depth + (op.kind not in _VIEWS)
  return result


class _Expensive:
  """The results that take longer to compute again than to write and read, and those of which that is unsure."""

  def __init__(
    self,
    block: Block,
    graph: Graph,
    found: Prologues,
    uses: _Uses,
    depths: Mapping[int, int],
    given: frozenset[int],
  ):
    self._graph, self._uses, self._depths, self._given = graph, uses, depths, given
    self._after_vectors: set[int] = (
      set()
    )  # results of functions of a smaller array that the step computes
    self.kept: set[int] = set()
    self.unsure: set[int] = set()
    products = (op.operands for op in block.ops if op.kind in PRODUCTS)
    stored = found.sources.union(*products) - found.fused
    steps: dict[
      int, dict[int, int]
    ] = {}  # by value, the cycles of the functions that it is computed with
    for op in block.ops:
      if len(op.results) == 1 and op.results[0] not in stored:
        self._visit(op, steps)

  def _visit(self, op: Op, steps: dict[int, dict[int, int]]) -> None:
    (result,) = op.results
    if op.kind not in _CYCLES and op.kind not in _ELEMENTWISE and op.kind not in _VIEWS:
      return
    size = math.prod(self._graph.values[result].shape)
    same = [one for one in op.operands if math.prod(self._graph.values[one].shape) == size]
    cycles = {key: value for one in same for key, value in steps.get(one, {}).items()}
    cycles |= {result: _CYCLES[op.kind]} if op.kind in _CYCLES else {}
    if not self._after_vectors.isdisjoint(same) or any(
      one not in same and one not in self._given for one in op.operands
    ):
      self._after_vectors.add(result)
    itemsize, total = self._graph.values[result].itemsize, sum(cycles.values())
    is_used = op.kind not in _VIEWS and self._uses.count(result) > 1
    if is_used and total >= _CYCLES_A_BYTE * itemsize:
      self.kept.add(result)
      return
    total += _OTHER_CYCLES * (self._depths.get(result, 1) - 1)
    doubtful = _CYCLES_IN_DOUBT_AFTER_VECTORS if result in self._after_vectors else _CYCLES_IN_DOUBT
    if is_used and op.kind in _CYCLES and total >= doubtful * itemsize:
      self.unsure.add(result)
    if cycles:
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
