"""Storing: which values of a program are in memory, and from when to when.

A compiler fuses what is done element by element into whatever needs it; those values never exist as a whole.
Products, sums, lookups and loops' buffers do, and so does what a product reads. A value in memory stays until
the last operation that reads it, be it through others that were fused.

This depends on the program only, not on how it is laid out, so it is found out once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from flax_spmd._src.estimate.graph import Block, Graph, Op

# What writes its result to memory; what needs its operands there.
_WRITES = frozenset(
  [
    'dot_general',
    'convolution',
    'gather',
    'scatter',
    'reduce',
    'sort',
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
_READS = frozenset(
  ['dot_general', 'convolution', 'scatter', 'sort', 'custom_call', 'fft', 'cholesky', 'triangular_solve']
)
_IN_PLACE = ('dynamic_update_slice',)
BARRIER = 'optimization_barrier'  # its results are its operands, one by one
_SAME = (
  'sharding_constraint',
  'broadcast_in_dim',
  'reshape',
  'transpose',
  'convert',
  'dynamic_slice',
  'slice',
  'copy',
)
_CUTS = ('dynamic_slice', 'slice')
# Every device can make these itself; they are in no memory and need not be moved.
_FREE = ('constant', 'iota', 'create_token', 'partition_id')


class Stored(NamedTuple):
  """Of a block.

  Attributes:
    written: by operation, the values that it writes to new memory.
    reads: by operation, what it reads of memory, if it writes anything: values there, or slices of them.
    ending: by operation, the values that nothing reads after it.
    returned: what is read and written at the end, for results that are made of other values then.
    inner: by operation, that of the blocks in it.
  """

  written: tuple[tuple[int, ...], ...]
  reads: tuple[tuple[int, ...], ...]
  ending: tuple[tuple[int, ...], ...]
  returned: tuple[int, ...]
  inner: tuple[tuple[Stored, ...], ...]


def free_values(graph: Graph) -> frozenset[int]:
  """The values that every device can make by itself, whatever part of them it needs."""
  found: set[int] = set()
  _find_free(graph.main, graph, found)
  return frozenset(found)


def _find_free(block: Block, graph: Graph, found: set[int]) -> None:
  for op in block.ops:
    scalar = op.kind == 'broadcast_in_dim' and not graph.values[op.operands[0]].shape
    made = op.kind not in _WRITES and not op.blocks and op.operands
    if op.kind in _FREE or scalar or (made and all(value in found for value in op.operands)):
      found.update(op.results)
    for inner in op.blocks:
      _find_free(inner, graph, found)


def given_values(graph: Graph) -> frozenset[int]:
  """The arguments of a step, and what is only cut out of them, converted or turned: weights, mostly."""
  found: set[int] = set(graph.main.arguments)
  _find_given(graph.main, found)
  return frozenset(found)


def _find_given(block: Block, found: set[int]) -> None:
  for op in block.ops:
    kept = (
      op.operands[1:2] if op.kind in _IN_PLACE else op.operands[:1]
    )  # a scan's stack is made of what is put in
    if (op.kind in _SAME or op.kind in _IN_PLACE) and found.issuperset(kept):
      found.update(op.results)
    for inner in op.blocks:
      if op.kind == 'while':
        pairs = zip(inner.arguments, op.operands)
        found.update(argument for argument, operand in pairs if operand in found)
      _find_given(inner, found)
      if op.kind == 'while':
        pairs = zip(op.results, inner.returned)
        found.update(result for result, value in pairs if value in found)


def stored(block: Block, free: frozenset[int]) -> Stored:
  """What a block has in memory, and when."""
  users = _users(block.ops)
  written = tuple(tuple(_written(op, users, block, free)) for op in block.ops)
  reading = _Reading(free, {value for values in written for value in values})
  reads = tuple(map(reading.read, block.ops, written))
  returned = reading.returned(block.returned)
  ending: list[list[int]] = [[] for _ in block.ops]
  for value, index in reading.last.items():
    if value in reading.kept and index < len(block.ops):
      ending[index].append(value)
  for index, op in enumerate(block.ops):  # what a loop hands on and nobody wants
    ending[index] += [value for value in op.results if op.blocks and value not in reading.last]
  inner = tuple(tuple(stored(one, free) for one in op.blocks) for op in block.ops)
  return Stored(written, reads, tuple(map(tuple, ending)), returned, inner)


class _Origins(dict[int, frozenset[int]]):
  """The values in memory that values which were fused away are made of."""

  def of(self, values: Iterable[int]) -> frozenset[int]:
    """Those of several values; one that is made of nothing else is its own."""
    return frozenset().union(*(self.get(value, frozenset((value,))) for value in values))


class _Reading:
  """Goes through a block, and notes what is read, and last by which operation.

  `origins` are what has to stay in memory for a value, `sources` what is read for it: of a slice, the slice.
  """

  def __init__(self, free: frozenset[int], kept: set[int]):
    self._free, self.kept = free, kept
    self._origins, self._sources = _Origins(), _Origins()
    self._updated: set[int] = set()
    self._number = 0
    self.last: dict[int, int] = {}

  def read(self, op: Op, written: Sequence[int]) -> tuple[int, ...]:
    """What an operation reads of memory, if it writes there."""
    operands = [value for value in (*op.operands, *_captured(op)) if value not in self._free]
    sources = self._sources.of(operands)
    self.last |= dict.fromkeys(self._origins.of(operands), self._number)
    self._number += 1
    if op.blocks:
      self.kept |= set(op.results)
    elif op.kind == BARRIER:
      for value, result in zip(op.operands, op.results):
        self._add(result, [value], self._sources.of([value]))
      return ()
    for value in op.results:
      if value not in self.kept:
        self._add(value, operands, frozenset((value,)) if op.kind in _CUTS else sources)
    if op.kind in _IN_PLACE:  # it reads an update, and writes as much
      self._updated |= set(op.results)
      return (*sorted(self._sources.of(operands[1:2])), *operands[1:2])
    return tuple(sorted(sources)) if written else ()

  def _add(self, value: int, operands: Sequence[int], sources: frozenset[int]) -> None:
    self._origins[value], self._sources[value] = self._origins.of(operands), sources

  def returned(self, values: Sequence[int]) -> tuple[int, ...]:
    """What is read and written for results at the end of the block; all that they are made of stays until then."""
    self.last |= dict.fromkeys(self._origins.of(values), self._number)
    made = [value for value in values if value in self._sources and value not in self._updated]
    return tuple(one for value in made for one in (value, *sorted(self._sources[value])))


def _users(ops: Sequence[Op]) -> Mapping[int, list[Op]]:
  found: dict[int, list[Op]] = {}
  for op in ops:
    for value in (*op.operands, *_captured(op)):
      found.setdefault(value, []).append(op)
  return found


def _captured(op: Op) -> tuple[int, ...]:
  """The values that what is in an operation takes from outside."""
  found: dict[int, None] = {}
  for block in op.blocks:
    made = set(block.arguments)
    for inner in block.ops:
      for value in (*inner.operands, *_captured(inner)):
        if value not in made:
          found[value] = None
      made.update(inner.results)
    found |= {value: None for value in block.returned if value not in made}
  return tuple(found)


def _written(op: Op, users: Mapping[int, list[Op]], block: Block, free: frozenset[int]):
  """The results of an operation that are put into new memory."""
  for value in op.results:
    if value in free or op.blocks or op.kind in _IN_PLACE:
      continue
    needed = (user for user in users.get(value, ()) if user.kind in _READS or user.blocks)
    if op.kind in _WRITES or any(value in user.operands for user in needed):
      yield value
