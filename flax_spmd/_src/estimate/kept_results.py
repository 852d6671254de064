"""Kept results: elementwise results that a compiler stores, or does not store, against the common rule.

The common rule (`live_buffers`): elementwise operations are fused into their users, and computed again for each of
them; operands of products are stored. XLA departs from it, as was measured on compiled programs. For GPUs:

* A result that is expensive to compute is stored if several operations use it, as an activation and its gradient do:
  `tanh` in 16 bits (in 32 bits it is computed twice), `sine`, what CHLO expands to long polynomials (`erfc`), and
  three transcendental functions one after the other (`tanh` of `softplus`).
* The mask of a dropout is stored, one byte an element, not the random bits, which every device could compute again.
* An elementwise function of one array is fused into the products that read it, if that array is a product's result
  itself: of `relu(x @ w) @ v`, `x @ w` is stored alone.

For TPUs, elementwise operations are always fused into the products that read them, expensive ones too.
"""

from __future__ import annotations

from collections.abc import Iterator

from flax_spmd._src.estimate.graph import PRODUCTS, Block, Graph, Op

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
# Functions of one array, or of one array and numbers, which have become a negation; and views of it.
_UNARY = ('negate', 'reshape', 'sharding_constraint')
_ROUNDS = 16  # of the 20 of Threefry, each of which ends in an exclusive or
_VIEWS = ('broadcast_in_dim', 'convert', 'reshape', 'sharding_constraint', 'transpose')


def kept_values(graph: Graph, platform: str) -> frozenset[int]:
  """The results of elementwise operations that are stored because they are expensive to compute again.

  Args:
    graph: the program.
    platform: 'cuda', 'tpu' or 'cpu'.
  """
  if platform == 'tpu':
    return frozenset()
  return frozenset(value for block in _blocks(graph.main) for value in _kept(block, graph))


def fused_operands(graph: Graph, platform: str) -> frozenset[int]:
  """The operands of products that are not stored, since they are computed as the products read them.

  Args:
    graph: the program.
    platform: 'cuda', 'tpu' or 'cpu'. The CPU's compiler fuses no operands.
  """
  if platform == 'cpu':
    return frozenset()
  fused = _elementwise if platform == 'tpu' else _of_products
  return frozenset(value for block in _blocks(graph.main) for value in fused(block))


def _blocks(block: Block) -> Iterator[Block]:
  yield block
  for op in block.ops:
    for inner in op.blocks:
      yield from _blocks(inner)


def _kept(block: Block, graph: Graph) -> Iterator[int]:
  users = _users(block)
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
    if (is_mask or is_expensive) and _use_count(result, users) > 1:
      yield result


def _use_count(value: int, users: dict[int, list[Op]]) -> int:
  """The number of operations that use a value, directly or through views of it."""
  return sum(
    _use_count(user.results[0], users) if user.kind in _VIEWS else 1 for user in users.get(value, ())
  )


def _elementwise(block: Block) -> Iterator[int]:
  """The results of operations that are not stored unless something reads them as a whole."""
  for op in block.ops:
    if op.kind not in PRODUCTS:
      yield from op.results


def _of_products(block: Block) -> Iterator[int]:
  """Functions of one array that is the result of a product."""
  of_product: set[int] = set()  # products, and functions of one of them
  for op in block.ops:
    if op.kind == 'dot_general':
      of_product.update(op.results)
    elif op.kind in _UNARY and op.operands[0] in of_product:
      of_product.update(op.results)
      if op.kind == 'negate':
        yield op.results[0]


def _users(block: Block) -> dict[int, list[Op]]:
  result: dict[int, list[Op]] = {}
  for op in block.ops:
    for value in op.operands:
      result.setdefault(value, []).append(op)
  return result
