"""Prologues: the functions that the kernel of a matrix product computes as it reads an operand.

XLA for GPUs compiles products with Triton, and fuses into them what does not add to the bytes that they read: functions
of one array, such as `relu`, and the addition of an argument of the step, such as a bias. The result of such a function
is not stored for the product. What it is a function of is stored instead, whatever computes it:

    relu(x @ w) @ v             # x @ w is stored
    relu(x @ w + b) @ v         # x @ w, if b is an argument; if b is converted first, the sum
    silu(h) @ v                 # silu(h), since h * sigmoid(h) is of two arrays

The rule is XLA's `GetPropagatedDimOrdersAndRequirementsIfProfitablyFusible`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flax_spmd._src.estimate.graph import Block, Graph, Op

# A function of one array and of numbers has become a negation when a program is read.
_UNARY = frozenset(
  [
    'abs',
    'cbrt',
    'ceil',
    'cosine',
    'exponential',
    'exponential_minus_one',
    'floor',
    'log',
    'log_plus_one',
    'logistic',
    'negate',
    'reshape',
    'rsqrt',
    'sharding_constraint',
    'sqrt',
    'tan',
    'tanh',
  ]
)
_BINARY = frozenset(['add', 'divide', 'maximum', 'minimum', 'multiply', 'power', 'subtract'])
_SAME = ('reshape', 'sharding_constraint')


class Prologues(NamedTuple):
  """The prologues of the products of a program.

  Attributes:
    fused: values that products compute themselves.
    sources: values that these are computed from, and that products read from memory.
  """

  fused: frozenset[int]
  sources: frozenset[int]


def prologues(graph: Graph) -> Prologues:
  """The prologues of all matrix products of a program."""
  fused: set[int] = set()
  sources: set[int] = set()
  _add(graph.main, graph, fused, sources)
  return Prologues(frozenset(fused), frozenset(sources))


def _add(block: Block, graph: Graph, fused: set[int], sources: set[int]) -> None:
  by_result: dict[int, Op] = {}
  for op in block.ops:
    by_result |= dict.fromkeys(op.results, op)
    for operand in op.operands if op.kind == 'dot_general' else ():
      value, path = operand, list[int]()
      while (following := _operand(value, by_result, graph)) is not None:
        path.append(value)
        value = following
      if any(by_result[one].kind not in _SAME for one in path):
        fused.update(path)
        sources.add(value)
    for inner in op.blocks:
      _add(inner, graph, fused, sources)
  others = {value for op in block.ops if op.kind == 'convolution' for value in op.operands}
  fused -= others  # cuDNN computes no prologues


def _operand(value: int, by_result: Mapping[int, Op], graph: Graph) -> int | None:
  """The array that a product reads instead of a value; None if it reads the value itself."""
  op = by_result.get(value)
  if op is None:
    return None
  if op.kind in _UNARY:
    return op.operands[0]
  if op.kind == 'convert':  # a narrowing one would add to the bytes that are read
    before, after = (graph.values[one].itemsize for one in (op.operands[0], value))
    return op.operands[0] if before <= after else None
  if op.kind in _BINARY:
    arrays = [one for one in op.operands if not _is_broadcast_argument(one, by_result, graph)]
    return arrays[0] if len(arrays) == 1 else None
  return None


def _is_broadcast_argument(value: int, by_result: Mapping[int, Op], graph: Graph) -> bool:
  op = by_result.get(value)
  if op is None or op.kind != 'broadcast_in_dim':
    return False
  while op is not None and (op.kind in _SAME or op.kind == 'broadcast_in_dim'):
    (value,) = op.operands
    op = by_result.get(value)
  return value in graph.main.arguments
