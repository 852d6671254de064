"""Storing: which values of a program are in memory, and from when to when.

A compiler fuses what is done element by element into whatever needs it; those values never exist as a whole.
Products, sums, lookups and loops' buffers do, and so does what a product reads. A value in memory stays until
the last operation that reads it, be it through others that were fused.

This depends on the program only, not on how it is laid out, so it is found out once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flax_spmd.estimate.graph import Block, Graph, Op

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


def stored(block: Block, free: frozenset[int]) -> Stored:
  """What a block has in memory, and when."""
  users = _users(block.ops)
  written = tuple(tuple(_written(op, users, block, free)) for op in block.ops)
  kept = {value for values in written for value in values}
  kept |= {value for op in block.ops if op.blocks for value in op.results}
  behind: dict[
    int, frozenset[int]
  ] = {}  # of a value that is fused, the values in memory that it is made of
  parts: dict[int, frozenset[int]] = {}  # the same, but of a slice the slice
  reads: list[tuple[int, ...]] = []
  updated: set[int] = set()
  last: dict[int, int] = {}
  for index, op in enumerate(block.ops):
    outer = [value for value in (*op.operands, *_captured(op)) if value not in free]
    found = _union(behind, outer)
    if op.kind in _IN_PLACE:  # reads an update, and writes as much
      reads.append((*sorted(_union(parts, outer[1:2])), *outer[1:2]))
      updated.update(op.results)
    else:
      reads.append(tuple(sorted(_union(parts, outer))) if written[index] else ())
    for value in found:
      last[value] = index
    if op.kind == BARRIER:
      behind |= {result: _union(behind, [value]) for result, value in zip(op.results, op.operands)}
      parts |= {result: _union(parts, [value]) for result, value in zip(op.results, op.operands)}
      continue
    for value in op.results:
      if value not in kept:
        behind[value] = found
        parts[value] = frozenset((value,)) if op.kind in _CUTS else _union(parts, outer)
  returned: list[int] = []
  for value in block.returned:
    for source in behind.get(value, frozenset((value,))):
      last[source] = len(block.ops)
    if value in parts and value not in updated:
      returned += (value, *sorted(parts[value]))
  ending: list[list[int]] = [[] for _ in block.ops]
  for value, index in last.items():
    if value in kept and index < len(block.ops):
      ending[index].append(value)
  inner = tuple(tuple(stored(one, free) for one in op.blocks) for op in block.ops)
  return Stored(written, tuple(reads), tuple(map(tuple, ending)), tuple(returned), inner)


def _union(made_of: Mapping[int, frozenset[int]], values: Sequence[int]) -> frozenset[int]:
  """What some values are made of; one that is made of nothing else, of itself."""
  return frozenset().union(*(made_of.get(value, frozenset((value,))) for value in values))


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
