"""Walking: what a step does on each device, from how each of its values lies.

One pass over the program, in the order in which it is written. Wherever an operand does not lie as an
operation needs it there are collectives, in loops as often as the loop runs; what is moved to the same place
twice is moved once. Of sums that devices have parts of, several that are added are added first, and reduced
once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flax_spmd._src.estimate.collective_combiner import Bundles
from flax_spmd._src.estimate.graph import Block, Dims, Graph, Op, Value, pieces, tile
from flax_spmd._src.estimate.live_buffers import BARRIER, Stored, free_values, given_values, stored
from flax_spmd._src.estimate.operations import is_elementwise, need
from flax_spmd._src.estimate.requirements import Need, Seen
from flax_spmd._src.estimate.resharding import Move, moves, summing, tangled
from flax_spmd._src.estimate.wire_dtypes import sent_as
from flax_spmd._src.hlo.counts import Counts

_GROWTH = {'all-gather': 1, 'reduce-scatter': -1}
_CUTS = ('dynamic_slice', 'dynamic_update_slice')
_CONSTRAINTS = ('sharding_constraint', 'reshard')
_PRODUCTS = ('dot_general', 'convolution')
_TINY = 2**16  # bytes on the wire in a step; what is tangled and smaller is not worth a doubt


class Walked(NamedTuple):
  """What a step does on each device.

  Attributes:
    counts: as of a compiled program.
    temporaries: bytes of memory at the peak, besides arguments and results.
    doubts: where XLA may do otherwise, as lines.
  """

  counts: Counts
  temporaries: float
  doubts: tuple[str, ...]


class Program:
  """A graph, with what is known of it whatever its layout."""

  def __init__(self, graph: Graph):
    self.graph = graph
    self.free = free_values(graph)
    self.stored = stored(graph.main, self.free)
    self.constants: dict[int, int] = {}
    self.narrow = sent_as(graph)
    self.given = given_values(graph)
    self.uses: dict[int, int] = {}
    products: dict[str, int] = {}
    self._learn(graph.main, products)
    self.dtype = _name(max(products, key=lambda dtype: products[dtype], default='f32'))

  def _learn(self, block: Block, products: dict[str, int]) -> None:
    for op in block.ops:
      for value in op.operands:
        self.uses[value] = self.uses.get(value, 0) + 1
      if op.details.get('value') is not None:
        self.constants[op.results[0]] = op.details['value']
      if op.kind in _PRODUCTS:
        dtype = self.graph.values[op.operands[0]].dtype
        products[dtype] = products.get(dtype, 0) + math.prod(self.graph.values[op.results[0]].shape)
      for inner in op.blocks:
        self._learn(inner, products)
    for value in block.returned:
      self.uses[value] = self.uses.get(value, 0) + 1

  def trips(self, loop: Op) -> int:
    """How often a loop runs: up to the constant that its condition compares with."""
    condition = loop.blocks[0]
    outer = dict(zip(condition.arguments, loop.operands))
    for op in condition.ops:
      if op.kind == 'compare':
        start, end = (self.constants.get(outer.get(value, value)) for value in op.operands)
        if end is not None:
          return max(0, end - (start or 0))
    return 1

  def walk(
    self, dims: Sequence[Dims], results: Sequence[Dims | None], sizes: Mapping[str, int]
  ) -> Walked:
    """What the program does if its values lie as `dims` says, and its results as `results`."""
    walk = _Walk(self, list(dims), sizes)
    peak = walk.block(self.graph.main, self.stored, 1, results)
    collectives = sorted(walk.bundles.collectives(), key=lambda one: -one.wire)
    counts = Counts(walk.flops, walk.hbm, tuple(collectives), tuple(walk.opaque.items()), ())
    return Walked(counts, peak, tuple(dict.fromkeys(walk.doubts)))


def _name(dtype: str) -> str:
  """A dtype as the table of chips has it."""
  return {'i8': 'int8', 'ui8': 'int8'}.get(dtype, 'f8' if dtype.startswith('f8') else dtype)


def _only_gathers(made: Sequence[Move]) -> bool:
  return bool(made) and all(move.kind == 'all-gather' for move in made)


class _Sum(NamedTuple):
  """A value of which devices have parts of a sum."""

  natural: Dims
  parts: tuple[str, ...]
  times: int
  source: str


class _Walk:
  """One pass, with what it has found so far."""

  def __init__(self, program: Program, dims: list[Dims], sizes: Mapping[str, int]):
    self.program, self.dims, self.sizes = program, dims, sizes
    self.values = program.graph.values
    self.bundles = Bundles(sizes)
    self.inside = 0  # the block, as the number of its loop's first result
    self.flops = self.hbm = 0.0
    self.opaque: dict[str, int] = {}
    self.doubts: list[str] = []
    self.moved: set[tuple[int, Dims]] = set()
    self.sums: dict[int, _Sum] = {}
    self.made: set[int] = set()  # of these, what was computed so
    self.late: dict[int, Dims] = {}  # how values still lie that are only gathered where that is needed
    self.sizes_known: dict[int, float] = {}  # bytes of values, as they lie
    self.copies = 0.0  # bytes of what the current operation has gathered

  def block(self, block: Block, stored: Stored, times: int, results: Sequence[Dims | None]) -> float:
    """Walks a block; returns the peak of what it needs besides what it is given."""
    alive: dict[int, float] = {}
    now = peak = 0.0
    held: set[int] = set()  # by what comes last
    stacks = any(op.kind == 'dynamic_update_slice' for op in block.ops)
    for index, op in enumerate(block.ops):
      self.copies = 0.0
      inner = self._op(op, stored.inner[index], times)
      self.bundles.follow(op.results, op.operands)
      for value in stored.written[index]:
        alive[value] = self._written(op, value)
        now += alive[value]
      self.hbm += times * sum(map(self._bytes, (*stored.written[index], *self._read(op, stored, index))))
      if op.kind == 'while':  # its buffers; those that it is given may be overwritten
        for operand, result in zip(op.operands, op.results):
          if operand in alive and operand in stored.ending[index]:
            now -= alive.pop(operand)
          alive[result] = 0.0 if self._is_argument(operand, block) else self._bytes(result)
          now += alive[result]
      peak = max(peak, now + inner + self.copies)
      if stacks and self._comes_last(op):
        held.update(stored.reads[index])
      for value in stored.ending[index]:
        if value not in held:
          now -= alive.pop(value, 0.0)
    for value, wanted in zip(block.returned, results):
      self._bring(value, wanted or self.dims[value], times, '')
    self.hbm += times * sum(map(self._bytes, stored.returned))
    return peak

  def _comes_last(self, op: Op) -> bool:
    """Whether it is a product that is reduced in a loop: schedulers put those off, and keep what they read.

    So they do in a loop over layers, which puts each one's gradient into a stack. A loop that adds
    gradients up (over microbatches) may have whole models in its body, and keeps less of them than that: it is
    taken to keep nothing for its sums, which is too little for a small body.
    """
    return self.inside > 0 and op.kind == 'dot_general' and op.results[0] in self.sums

  def _read(self, op: Op, stored: Stored, index: int) -> tuple[int, ...]:
    return () if op.blocks else stored.reads[index]

  def _is_argument(self, value: int, block: Block) -> bool:
    return value in block.arguments

  def _op(self, op: Op, inner: Sequence[Stored], times: int) -> float:
    """What an operation does; returns the memory that is needed while it runs."""
    if self._adds_sums(op) or self._hands_on_sum(op):
      return 0.0
    if op.kind == 'while':
      return self._loop(op, inner, times)
    if op.blocks:
      return self._branch(op, inner, times)
    if not op.results:
      return 0.0
    if op.kind in (*_CONSTRAINTS, BARRIER):
      for operand, result in zip(op.operands, op.results):
        self._constrain(operand, result, times, op.source)
      return 0.0
    if op.results[0] not in self.program.free and not self._is_at_home(op):
      self._compute(op, times)
    return 0.0

  def _is_at_home(self, op: Op) -> bool:
    """Whether nothing has to be moved: it works element by element on what lies as its result does."""
    after = self.dims[op.results[0]]
    return is_elementwise(op) and all(
      value in self.program.free
      or (self.dims[value] == after and value not in self.late and value not in self.sums)
      for value in op.operands
    )

  def _compute(self, op: Op, times: int) -> None:
    seen = self._seen(op)
    found = need(op, seen)
    for value, wanted in zip(op.operands, found.operands):
      self._doubt(op, value, wanted)
      self._bring(value, wanted or self.dims[value], times, op.source)
    self.flops += times * found.flops
    if op.kind == 'custom_call':
      name = op.details.get('call_target_name', op.kind)
      self.opaque[name] = self.opaque.get(name, 0) + times
    for value in op.results:
      self._came(value, found, times, op)

  def _doubt(self, op: Op, value: int, wanted: Dims | None) -> None:
    """Notes what XLA has several ways to do: activations moved for a product, slices along what is divided."""
    if wanted is None or self._bytes(value) < _TINY:
      return
    weight = value in self.program.given or value in self.program.free
    if op.kind == 'dot_general' and not weight and self._moves(op, value, wanted):
      self.doubts.append(f'{op.source}: activations moved for a product')
    if op.kind in _CUTS and wanted != self.dims[value]:
      self.doubts.append(f'{op.source}: slices along a dimension that is divided')

  def _moves(self, op: Op, value: int, wanted: Dims) -> bool:
    return bool(moves(self.values[value], self._seen_as(value, op), wanted, self.sizes))

  def _came(self, value: int, found: Need, times: int, op: Op) -> None:
    """A result; it lies as it does by itself until something needs it."""
    if found.parts:
      self.sums[value] = _Sum(found.natural, found.parts, times, op.source)
    elif found.natural != self.dims[value] and len(found.natural) == len(self.dims[value]):
      made = moves(self._sent(value), found.natural, self.dims[value], self.sizes)
      if _only_gathers(made):
        self.late[value] = found.natural
        self.made |= {value} if len(op.operands) > 1 else set()
      else:
        self._emit(made, times, value, op.source)

  def _seen(self, op: Op) -> Seen:
    return Seen(
      [self.values[value] for value in op.operands],
      [self._seen_as(value, op) for value in op.operands],
      [self._sent(value) for value in op.operands],
      [value in self.program.free or value in self.sums for value in op.operands],
      self.values[op.results[0]],
      self.dims[op.results[0]],
      self.sizes,
    )

  def _seen_as(self, value: int, op: Op) -> Dims:
    """How a value lies; for a product, what was made there lies as before it is gathered."""
    if op.kind == 'dot_general' and value in self.made:
      return self.late.get(value, self.dims[value])
    return self.dims[value]

  def _adds_sums(self, op: Op) -> bool:
    """Whether an addition adds parts of two sums alike, which nothing else needs."""
    if op.kind != 'add' or not all(value in self.sums for value in op.operands):
      return False
    one, other = (self.sums[value] for value in op.operands)
    if one[:2] != other[:2] or any(self.program.uses[value] > 1 for value in op.operands):
      return False
    for value in op.operands:
      del self.sums[value]
    self.sums[op.results[0]] = one
    return True

  def _hands_on_sum(self, op: Op) -> bool:
    """Whether a sum that nothing else needs is turned, or told where to lie: it is added up after that."""
    turned = op.kind == 'transpose'
    if not (turned or op.kind in _CONSTRAINTS) or self.program.uses[op.operands[0]] > 1:
      return False
    found = self.sums.pop(op.operands[0], None)
    if found and turned:
      found = found._replace(natural=tuple(found.natural[dim] for dim in op.details['permutation']))
    if found:
      self.sums[op.results[0]] = found
    return found is not None

  def _constrain(self, operand: int, result: int, times: int, source: str) -> None:
    """A value that is told where to lie; it is gathered for that only where somebody looks."""
    lies = self.late.get(operand, self.dims[operand])
    if _only_gathers(moves(self._sent(operand), lies, self.dims[result], self.sizes)):
      self.late[result] = lies
      self.made |= {result} if operand in self.made else set()
    else:
      self._bring(operand, self.dims[result], times, source)

  def _settle(self, value: int, wanted: Dims | None = None) -> None:
    """Adds up a sum that is needed: to where it is, if nothing else needs it."""
    found = self.sums.pop(value, None)
    if found is None:
      return
    if wanted is not None and self.program.uses[value] == 1:
      self.dims[value] = wanted
      self.sizes_known.pop(value, None)
    made = summing(self.values[value], found.natural, found.parts, self.dims[value], self.sizes)
    self._emit(made, found.times, value, found.source)

  def _loop(self, op: Op, inner: Sequence[Stored], times: int) -> float:
    """A loop: its body, as often as it runs."""
    for operand, result in zip(op.operands, op.results):
      self._bring(operand, self.dims[result], times, op.source)
    outside = self.moved, self.inside
    self.moved, self.inside = set(), op.results[0]
    often = times * self.program.trips(op)
    peak = self.block(op.blocks[1], inner[1], often, [self.dims[result] for result in op.results])
    self.moved, self.inside = outside
    return peak

  def _branch(self, op: Op, inner: Sequence[Stored], times: int) -> float:
    """A branch: the way that does most, as it is not known which is taken."""
    results = [self.dims[result] for result in op.results]
    before = self.flops, self.hbm, self.bundles
    ways: list[tuple[float, float, Bundles, float]] = []
    for block, kept in zip(op.blocks, inner):
      self.flops, self.hbm, self.bundles = 0.0, 0.0, Bundles(self.sizes)
      peak = self.block(block, kept, times, results)
      ways.append((self.flops, self.hbm, self.bundles, peak))
    flops, hbm, bundles, _ = max(ways, key=lambda way: (way[0], way[1]))
    self.flops, self.hbm, self.bundles = before[0] + flops, before[1] + hbm, before[2]
    self.bundles.take(bundles)
    return max(way[3] for way in ways) + sum(map(self._bytes, op.results))

  def _bring(self, value: int, wanted: Dims, times: int, source: str) -> None:
    """Moves a value to where it is needed, unless it was moved there before."""
    self._settle(value, wanted)
    if value in self.late and value not in self.program.free:
      if not moves(self.values[value], self.late[value], wanted, self.sizes):
        return
      self._move(value, self.late.pop(value), self.dims[value], times, source)
    if wanted == self.dims[value] or value in self.program.free or (value, wanted) in self.moved:
      return
    self.moved.add((value, wanted))
    self._move(value, self.dims[value], wanted, times, source)

  def _move(self, value: int, before: Dims, after: Dims, times: int, source: str) -> None:
    made = moves(self._sent(value), before, after, self.sizes)
    if any(move.kind == 'all-gather' for move in made):
      copy = tile(self.values[value].shape, after, self.sizes) * self.values[value].item
      self.copies += copy
      self.hbm += times * copy
    self._emit(made, times, value, source)

  def _emit(self, made: Sequence[Move], times: int, value: int, source: str) -> None:
    for move in made:  # each reads its operand and writes its result
      results = pieces(move.axes, self.sizes) ** _GROWTH.get(move.kind, 0)
      self.hbm += times * move.bytes * (1 + results)
    dtype = self._sent(value).dtype
    self.bundles.add(value, made, times, dtype, source, self.inside)
    if tangled(made) and times * sum(move.bytes for move in made) > _TINY:
      self.doubts.append(f'{source}: {" then ".join(move.kind for move in made)} of one array')

  def _sent(self, value: int) -> Value:
    """A value as it is sent."""
    return self.program.narrow.get(value, self.values[value])

  def _written(self, op: Op, value: int) -> float:
    """Bytes of a result; of a product that is added up some time later, as each device's part of it lies."""
    if value not in self.sums or op.kind not in _PRODUCTS or self.inside:
      return self._bytes(value)
    return tile(self.values[value].shape, self.sums[value].natural, self.sizes) * self.values[value].item

  def _bytes(self, value: int) -> float:
    if value not in self.sizes_known:
      shape, item = self.values[value].shape, self.values[value].item
      self.sizes_known[value] = tile(shape, self.dims[value], self.sizes) * item
    return self.sizes_known[value]
