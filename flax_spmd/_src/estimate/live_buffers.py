"""Liveness: which values of a program occupy memory, and when.

A compiler fuses elementwise operations into their users, and a fused value is never stored as a whole. Stored are
the results of products, reductions, lookups and loops, the operands of products, and activations. A stored value is live until
the last operation that reads it, directly or through fused values.

All of this follows from the program, whatever its layout, so it is computed once. `kept_results` has the exceptions.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from flax_spmd._src.estimate.graph import PRODUCTS, Block, Graph, Op
from flax_spmd._src.estimate.kept_results import KeptResults

# Operations that store their results.
WRITES = frozenset(
  [
    'dot_general',
    'convolution',
    'gather',
    'scatter',
    'reduce',
    'sort',
    'top_k',
    'concatenate',
    'custom_call',
    'rng_bit_generator',
    'fft',
    'cholesky',
    'triangular_solve',
    'reduce_window',
    'select_and_scatter',
  ]
)
# Operations whose operands are stored.
_READS = frozenset(
  [
    'dot_general',
    'convolution',
    'scatter',
    'sort',
    'top_k',
    'custom_call',
    'fft',
    'cholesky',
    'triangular_solve',
    'reduce_window',
    'select_and_scatter',
  ]
)
_IN_PLACE = ('dynamic_update_slice',)
BARRIER = 'optimization_barrier'  # its results are its operands, one by one
# Operations that only rearrange, convert or slice their first operand.
_VIEWS = (
  'sharding_constraint',
  'broadcast_in_dim',
  'reshape',
  'transpose',
  'convert',
  'dynamic_slice',
  'slice',
  'copy',
)
_SLICES = ('dynamic_slice', 'slice')
# Operations that every device can run by itself: their results are neither stored nor moved.
_REMATERIALISABLE = ('constant', 'iota', 'create_token', 'partition_id')


class BlockLiveness(NamedTuple):
  """Liveness of the values of one block.

  Attributes:
    written: per operation, the values that it writes to new memory.
    reads: per operation, the stored values, or slices of them, that it reads. Empty for an operation that
      writes nothing.
    copied: per operation, the values of which it needs a copy in another layout; `copy_of` numbers the copies.
    ending: per operation, the stored values, and copies, that it is the last to read.
    returned: values read and written once more when results are copied out.
    fused: for each value that is not stored, the index of the last operation that reads it, directly or as a part of
      other values that are not stored.
    needed: per operation, the index of the last operation that needs what it reads: its own, unless it is fused.
    padded: results of pads, and of operations that are fused with a pad of one of their operands.
    inner: per operation, the liveness of its blocks.
  """

  written: tuple[tuple[int, ...], ...]
  reads: tuple[tuple[int, ...], ...]
  copied: tuple[tuple[int, ...], ...]
  ending: tuple[tuple[int, ...], ...]
  returned: tuple[int, ...]
  fused: Mapping[int, int]
  needed: tuple[int, ...]
  padded: frozenset[int]
  inner: tuple[tuple[BlockLiveness, ...], ...]


def copy_of(value: int) -> int:
  """The number of the copy of a value, which is negative."""
  return -1 - value


def rematerialisable_values(graph: Graph, kept: frozenset[int] = frozenset()) -> frozenset[int]:
  """The values of which every device can compute any shard by itself; not `kept` ones, and what follows from these."""
  result: set[int] = set()
  _add_rematerialisable(graph.main, graph, kept, result)
  return frozenset(result)


def _add_rematerialisable(block: Block, graph: Graph, kept: frozenset[int], result: set[int]) -> None:
  for op in block.ops:
    if kept.issuperset(op.results) and op.results:
      continue
    scalar = op.kind == 'broadcast_in_dim' and not graph.values[op.operands[0]].shape
    fused = op.kind not in WRITES and not op.blocks and op.operands
    if op.kind in _REMATERIALISABLE or scalar or (fused and result.issuperset(op.operands)):
      result.update(op.results)
    for inner in op.blocks:
      _add_rematerialisable(inner, graph, kept, result)


def argument_derived_values(graph: Graph) -> frozenset[int]:
  """The arguments of a step, and their slices, conversions and transposes: mostly weights."""
  result: set[int] = set(graph.main.arguments)
  _add_argument_derived(graph.main, result)
  return frozenset(result)


def _add_argument_derived(block: Block, result: set[int]) -> None:
  for op in block.ops:
    # a stack that a scan fills in place holds the updates, whatever array it began as
    sources = op.operands[1:2] if op.kind in _IN_PLACE else op.operands[:1]
    if (op.kind in _VIEWS or op.kind in _IN_PLACE) and result.issuperset(sources):
      result.update(op.results)
    for inner in op.blocks:
      if op.kind == 'while':
        pairs = zip(inner.arguments, op.operands)
        result.update(argument for argument, operand in pairs if operand in result)
      _add_argument_derived(inner, result)
      if op.kind == 'while':
        pairs = zip(op.results, inner.returned)
        result.update(loop_result for loop_result, value in pairs if value in result)


class _Exceptions(NamedTuple):
  """Values that are stored, or not, whatever operation computes them.

  Attributes:
    rematerialisable: values that every device computes by itself.
    results: elementwise results that are stored, or that products compute themselves.
    weights: arguments of the step, and views of them.
    filters: arguments of the step, if convolutions read them in another layout.
  """

  rematerialisable: frozenset[int]
  results: KeptResults
  weights: frozenset[int]
  filters: frozenset[int]


def liveness(graph: Graph, platform: str, results: KeptResults) -> BlockLiveness:
  """The liveness of the main block of a program, and of the blocks in it.

  Args:
    graph: the program.
    platform: platform to estimate for: 'cuda', 'tpu' or 'cpu'.
    results: its elementwise results that are stored, or not, against the common rule.
  """
  rematerialisable = rematerialisable_values(graph, results.kept)
  filters = frozenset(graph.main.arguments) if platform == 'cuda' else frozenset()
  weights = argument_derived_values(graph)
  return _liveness(graph.main, _Exceptions(rematerialisable, results, weights, filters))


def _liveness(block: Block, exceptions: _Exceptions) -> BlockLiveness:
  users = _users(block.ops)
  written = tuple(tuple(_written(op, users, exceptions)) for op in block.ops)
  scan = _ReadScan(exceptions.rematerialisable, {value for values in written for value in values})
  reads = tuple(map(scan.visit, block.ops, written))
  returned = scan.copied_out(block.returned)
  ending: list[list[int]] = [[] for _ in block.ops]
  later = _later_products(block.ops, exceptions.weights)
  for value, index in scan.last_reads.items():
    if value in scan.stored and index < len(block.ops):
      ending[later.get(index, index)].append(value)
  for index, op in enumerate(block.ops):  # results of a loop that are never read
    ending[index] += [value for value in op.results if op.blocks and value not in scan.last_reads]
  copied = [[] for _ in block.ops]
  for value, (first, last) in _copies(block.ops, exceptions.filters).items():
    copied[first].append(value)
    ending[last].append(copy_of(value))
  inner = tuple(tuple(_liveness(one, exceptions) for one in op.blocks) for op in block.ops)
  fused = _last_uses(block, scan.stored)
  needed = [
    max((fused.get(value, index) for value in op.results), default=index)
    for index, op in enumerate(block.ops)
  ]
  return BlockLiveness(
    written,
    reads,
    tuple(map(tuple, copied)),
    tuple(map(tuple, ending)),
    returned,
    fused,
    tuple(needed),
    _padded(block.ops, scan.stored),
    inner,
  )


def _padded(ops: Sequence[Op], stored: set[int]) -> frozenset[int]:
  """The results of pads, and of operations that are fused with one."""
  result: set[int] = set()
  for op in ops:
    is_fused = op.kind not in WRITES and not op.blocks
    if op.kind == 'pad' or (
      is_fused and any(one in result and one not in stored for one in op.operands)
    ):
      result.update(op.results)
  return frozenset(result)


def _last_uses(block: Block, stored: set[int]) -> dict[int, int]:
  """For each value that is not stored, the index of the last operation that needs it."""
  result = dict.fromkeys(block.returned, len(block.ops))
  for index, op in reversed([*enumerate(block.ops)]):
    ends = [result[value] for value in op.results if value in result and value not in stored]
    last = max(ends, default=index)
    for value in (*op.operands, *_captured(op)):
      result[value] = max(last, result.get(value, 0))
  return {value: last for value, last in result.items() if value not in stored}


def _copies(ops: Sequence[Op], filters: frozenset[int]) -> dict[int, tuple[int, int]]:
  """The values that operations read in another layout, with the indices of the first and the last of these.

  cuDNN reads a filter with its positions between its channels, while JAX has them first. A filter that is converted
  is converted into that order. The gradient of a maximum over windows has its operand twice.
  """
  result: dict[int, tuple[int, int]] = {}
  origin: dict[
    int, int
  ] = {}  # of a filter that is reversed, or an image that is padded, as for gradients
  pooled: dict[int, int] = {}  # index of the maximum over windows, by its operand
  for index, op in enumerate(ops):
    value = op.operands[min(1, len(op.operands) - 1)] if op.operands else 0
    if op.kind in ('reverse', 'pad'):
      origin[op.results[0]] = op.operands[0]
    elif op.kind == 'reduce_window':
      pooled[op.operands[0]] = index
    elif op.kind == 'select_and_scatter' and filters:
      value = origin.get(op.operands[0], op.operands[0])
      result[value] = pooled.get(value, index), index
    elif op.kind == 'convolution' and origin.get(value, value) in filters:
      value = origin.get(value, value)
      result[value] = result.get(value, (index, index))[0], index
  return result


def _later_products(ops: Sequence[Op], weights: frozenset[int]) -> dict[int, int]:
  """By the index of a product, that of the next one with a common operand, which is no weight.

  In a backward pass, these are the gradients of a weight and of an activation. JAX computes the weight's first; XLA
  has the activation's first, since more depends on it, so what the weight's reads is still in memory. A product that is
  computed from the result of another one is not exchanged with it.
  """
  result: dict[int, int] = {}
  last: dict[int, int] = {}  # by operand
  before: dict[int, int] = {}  # by value, the products that it is computed from, one bit each
  for index, op in enumerate(ops):
    sources = functools.reduce(
      operator.or_, [before.get(one, 0) for one in (*op.operands, *_captured(op))], 0
    )
    if op.kind in PRODUCTS:
      values = [value for value in op.operands if value not in weights]
      earlier = [last[value] for value in values if value in last]
      result |= {one: index for one in earlier if not sources >> one & 1}
      last |= dict.fromkeys(values, index)
      sources |= 1 << index
    before |= dict.fromkeys(op.results, sources)
  return result


class _Sources(dict[int, frozenset[int]]):
  """The stored values that each fused value is computed from."""

  def of(self, values: Iterable[int]) -> frozenset[int]:
    """The union of the sources of several values; a stored value is its own source."""
    return frozenset().union(*(self.get(value, frozenset((value,))) for value in values))


class _ReadScan:
  """One pass over a block that records the reads of each operation, and the last read of each value.

  A slice of a stored value is two things: it keeps the whole value live (`_kept`), but only the slice itself is
  read (`_read`).
  """

  def __init__(self, rematerialisable: frozenset[int], stored: set[int]):
    self._rematerialisable, self.stored = rematerialisable, stored
    self._kept, self._read = _Sources(), _Sources()
    self._updated: set[int] = set()
    self._index = 0
    self.last_reads: dict[int, int] = {}

  def visit(self, op: Op, written: Sequence[int]) -> tuple[int, ...]:
    """The stored values that an operation reads, if it writes to memory."""
    operands = [value for value in (*op.operands, *_captured(op)) if value not in self._rematerialisable]
    sources = self._read.of(operands)
    self.last_reads |= dict.fromkeys(self._kept.of(operands), self._index)
    self._index += 1
    if op.blocks:
      self.stored |= set(op.results)
    elif op.kind == BARRIER:
      for value, result in zip(op.operands, op.results):
        self._add(result, [value], self._read.of([value]))
      return ()
    for value in op.results:
      if value not in self.stored:
        self._add(value, operands, frozenset((value,)) if op.kind in _SLICES else sources)
    if op.kind in _IN_PLACE:  # reads the update, and writes as many bytes
      self._updated |= set(op.results)
      return (*sorted(self._read.of(operands[1:2])), *operands[1:2])
    return tuple(sorted(sources)) if written else ()

  def _add(self, value: int, operands: Sequence[int], sources: frozenset[int]) -> None:
    self._kept[value], self._read[value] = self._kept.of(operands), sources

  def copied_out(self, values: Sequence[int]) -> tuple[int, ...]:
    """The reads and writes of fused results at the end of the block; their sources are live until then."""
    self.last_reads |= dict.fromkeys(self._kept.of(values), self._index)
    fused = [value for value in values if value in self._read and value not in self._updated]
    return tuple(one for value in fused for one in (value, *sorted(self._read[value])))


def _users(ops: Sequence[Op]) -> Mapping[int, list[Op]]:
  result: dict[int, list[Op]] = {}
  for op in ops:
    for value in (*op.operands, *_captured(op)):
      result.setdefault(value, []).append(op)
  return result


def _captured(op: Op) -> tuple[int, ...]:
  """The outer values that the blocks of an operation use."""
  result: dict[int, None] = {}
  for block in op.blocks:
    local = set(block.arguments)
    for inner in block.ops:
      for value in (*inner.operands, *_captured(inner)):
        if value not in local:
          result[value] = None
      local.update(inner.results)
    result |= {value: None for value in block.returned if value not in local}
  return tuple(result)


def _is_read_in_place(op: Op, users: Mapping[int, list[Op]]) -> bool:
  """Whether an operation is a transpose, and products read its operand as it is."""
  readers = users.get(op.results[0], ()) if op.kind == 'transpose' else ()
  return bool(readers) and all(_reads_in_place(user, op) for user in readers)


def _reads_in_place(product: Op, transpose: Op) -> bool:
  """Whether a product reads the operand of a transpose as it is: its batch, then all summed dimensions, or none of them first."""
  if product.kind != 'dot_general':
    return False
  order = transpose.attributes['permutation']
  for side, value in zip(('lhs', 'rhs'), product.operands):
    if value != transpose.results[0]:
      continue
    batch, summed = (
      [order[dim] for dim in product.attributes.get(f'{side}_{name}_dimensions') or ()]
      for name in ('batching', 'contracting')
    )
    free = [dim for dim in order if dim not in batch and dim not in summed]
    if not batch or sorted(order) not in ([*batch, *summed, *free], [*batch, *free, *summed]):
      return False
  return True


def _written(op: Op, users: Mapping[int, list[Op]], exceptions: _Exceptions) -> Iterator[int]:
  """The results of an operation that occupy new memory. What is scattered onto, and read nowhere else, is where the result is."""
  for value in op.results:
    if value in exceptions.rematerialisable or op.blocks or op.kind in _IN_PLACE:
      continue
    is_kept = value in exceptions.results.kept or value in exceptions.results.sources
    readers = [user for user in users.get(value, ()) if user.kind in _READS or user.blocks]
    if value in exceptions.results.fused:
      readers = [user for user in readers if user.kind not in PRODUCTS]
    if op.kind == 'transpose' and all(user.blocks or _reads_in_place(user, op) for user in readers):
      continue  # a loop takes its operand in any order of the dimensions
    in_place = [(user.kind, user.operands[:1]) for user in users.get(value, ())] == [
      ('scatter', (value,))
    ]
    is_read = not in_place and any(value in user.operands for user in readers)
    is_read |= any(_is_read_in_place(user, users) for user in users.get(value, ()))
    if op.kind in WRITES or is_kept or is_read:
      yield value
