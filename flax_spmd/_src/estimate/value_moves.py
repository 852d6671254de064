"""Value moves: the values of a step as a walk over its operations finds them, and the collectives that move them.

Wherever an operand is not sharded as its operation requires, collectives are added, once per run of the enclosing
loops. Like XLA, this saves communication in three ways:

* A value is resharded to one sharding once, however many operations need it.
* A gather is deferred until an operation needs its result; an elementwise operation often does not.
* Partial sums that are added to each other are added first, and reduced once; so are those that a loop adds up
  (`loops`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from flax_spmd._src.estimate.analyzed_graph import CONSTRAINTS, IDENTITIES, AnalyzedGraph
from flax_spmd._src.estimate.collective_combiner import CollectiveCombiner
from flax_spmd._src.estimate.doubts import Bound, Doubts, gathered
from flax_spmd._src.estimate.gathered_copies import GatheredCopies
from flax_spmd._src.estimate.graph import (
  PRODUCTS,
  GraphValue,
  Op,
  Spec,
  shard_count,
  shard_size,
  used_axes,
)
from flax_spmd._src.estimate.loops import (
  GATHERING_PLATFORMS,
  MOVING_PLATFORMS,
  WIDENING_PLATFORMS,
)
from flax_spmd._src.estimate.operations import requirement
from flax_spmd._src.estimate.partial_sum import PartialSum
from flax_spmd._src.estimate.partitioned_operations import PartitionedOperations
from flax_spmd._src.estimate.requirements import (
  Context,
  Requirement,
)
from flax_spmd._src.estimate.resharding import (
  CollectiveOp,
  are_gathers,
  gathered_bytes,
  is_ambiguous,
  is_cut_often,
  move_shards,
  reduce_partial_sum,
  reshard,
  wire_bytes,
  without_reduce_scatter,
)
from flax_spmd._src.estimate.weight_gradients import WeightGradients
from flax_spmd._src.hlo.work import Work

_GROWTH = {'all-gather': 1, 'reduce-scatter': -1}
_HIDDEN = ('all-gather', 'all-to-all')  # those that products hide


def _has_parts(spec: Spec) -> bool:
  """Whether an array is sharded over a part of an axis."""
  return any('[' in axis for axes in spec for axis in axes)


class ValueMoves:
  """The values of a step at the present operation of a walk: their shardings, and their collectives so far."""

  def __init__(
    self,
    analyzed: AnalyzedGraph,
    specs: list[Spec],
    sizes: Mapping[str, int],
    platform: str,
    partitions: PartitionedOperations | None,
  ):
    self.partitions = partitions
    self.analyzed, self.specs, self.sizes, self.platform = analyzed, specs, sizes, platform
    self.values, self.known = analyzed.graph.values, analyzed.known(sizes, platform)
    self.combiner = CollectiveCombiner(sizes)
    self.times_outside: list[int] = []  # of each loop around, how often it runs
    self.gathered_before = 0.0  # bytes that the present loop finds gathered
    # Of each resharding, the combined collective that it is a part of.
    self.gather_groups: dict[tuple[int, Spec, bool], int] = {}
    self.before_loops: set[tuple[int, Spec]] = set()  # arrays and shardings that loops find
    self.loop = 0  # the innermost loop, as its first result; 0 outside of loops
    self.kind = ''  # of the current operation
    self.work = Work()
    self.doubts = Doubts()
    self.resharded: set[tuple[int | None, Spec | tuple[CollectiveOp, ...], bool]] = set()
    self.settled_sums: set[int] = set()  # partial sums whose reduction a partitioner has confirmed
    self.copies = GatheredCopies()
    self.present: list[float] = []  # memory during each operation of the present block
    self.live = analyzed.liveness(platform)  # of the present block
    self.partial_sums: dict[int, PartialSum] = {}
    self.totals: dict[int, PartialSum] = {}  # results of the present loops that are reduced after them
    self.deferred_gathers: dict[int, Spec] = {}  # present shardings of values that are not gathered yet
    self.constrained: dict[int, int] = {}  # by the result of a constraint, the value that is gathered
    self.known_bytes: dict[int, float] = {}
    self.gathered_bytes = 0.0  # by the current operation
    self.needed_until = 0  # the last operation that needs what the current one reads
    self.weight_gradients = WeightGradients()
    self.sums: set[int] = set()  # sums that have been reduced over devices

  def bytes_of(self, value: int) -> float:
    """The bytes of a value on each device."""
    if value not in self.known_bytes:
      shape, itemsize = self.values[value].shape, self.values[value].itemsize
      self.known_bytes[value] = shard_size(shape, self.specs[value], self.sizes) * itemsize
    return self.known_bytes[value]

  def wire_value(self, value: int) -> GraphValue:
    """A value with the dtype in which it is sent."""
    return self.analyzed.wire_values.get(value, self.values[value])

  def requirement_key(self, op: Op) -> tuple:
    """Equal for operations with equal requirements."""
    specs, result = self.specs, op.results[0]
    partial = () if op.kind in PRODUCTS else tuple([value in self.partial_sums for value in op.operands])
    return self.analyzed.alike[result], specs[result], partial, *[specs[value] for value in op.operands]

  def required_by(self, op: Op) -> Requirement:
    """The shardings that an operation requires of its operands, and its work under them."""
    key = self.requirement_key(op)
    if key not in self.known.requirements:
      self.known.requirements[key] = requirement(op, self.context_of(op))
    return self.known.requirements[key]

  def context_of(self, op: Op) -> Context:
    """The values and shardings that the requirement of an operation depends on."""
    return Context(
      [self.values[value] for value in op.operands],
      [self.specs[value] for value in op.operands],
      [self.wire_value(value) for value in op.operands],
      [
        value in self.analyzed.rematerialisable
        or (op.kind not in PRODUCTS and value in self.partial_sums)
        for value in op.operands
      ],
      self.values[op.results[0]],
      self.specs[op.results[0]],
      self.sizes,
      self.platform,
    )

  def changes(self, value: int, required: Spec) -> Sequence[CollectiveOp]:
    """The collectives between a value's sharding and another one."""
    return self.changes_between(self.values[value], self.specs[value], required)

  def changes_between(self, array: GraphValue, before: Spec, after: Spec) -> Sequence[CollectiveOp]:
    """The collectives between two shardings of an array."""
    key = array, before, after
    if key not in self.known.collectives:
      ops = reshard(array, before, after, self.sizes)
      if ops and self.partitions and (is_ambiguous(ops) or _has_parts(before) or _has_parts(after)):
        asked = self.partitions.reshard(array, before, after, self.sizes)
        if asked is not None:
          ops = asked
          self.known.settled.add(key)
      self.known.collectives[key] = ops
    return self.known.collectives[key]

  def bring(self, value: int, required: Spec, times: int, source: str, is_grouped: bool = False) -> None:
    """Reshards a value as required, unless that was done before in the same way."""
    self._reduce(value, required)
    if value in self.deferred_gathers and value not in self.analyzed.rematerialisable:
      if not self.changes_between(self.values[value], self.deferred_gathers[value], required):
        return
      present = self.deferred_gathers.pop(value)
      once = self.constrained.get(value), self.specs[value], False
      if once not in self.resharded:
        self._reshard(value, present, self.specs[value], times, source)
        self._keep_gathered(value, present)
      self.resharded |= {once} if value in self.constrained else set()
    if required == self.specs[value] or value in self.analyzed.rematerialisable:
      return
    if (value, required, is_grouped) not in self.resharded:
      self.resharded.add((value, required, is_grouped))
      groups = self._reshard(value, self.specs[value], required, times, source)
      self.gather_groups[value, required, is_grouped] = groups[-1] if groups else -1
    size = shard_size(self.values[value].shape, required, self.sizes) * self.values[value].itemsize
    is_kept = size > self.bytes_of(value) and (value, required) not in self.before_loops
    group = self.gather_groups.get((value, required, is_grouped), -1)
    for index in (len(self.present), self.needed_until) if is_kept else ():
      self.copies.add(value, (required, is_grouped), index, size, group)

  def _keep_gathered(self, value: int, before: Spec) -> None:
    """Keeps a gathered array, which is not stored otherwise, for all operations that are computed from it."""
    last = self.live.fused.get(value)
    if last is not None:
      shard = shard_size(self.values[value].shape, before, self.sizes) * self.values[value].itemsize
      for index in (len(self.present), last):  # its shard is not needed any more
        self.copies.add(value, self.specs[value], index, self.bytes_of(value) - shard)

  def _reshard(self, value: int, before: Spec, after: Spec, times: int, source: str) -> list[int]:
    ops = self.changes_between(self.wire_value(value), before, after)
    self._hide(value, ops)
    if any(op.kind == 'all-gather' for op in ops):
      copy = shard_size(self.values[value].shape, after, self.sizes) * self.values[value].itemsize
      loops = self._loops_since(value)
      if loops and (self.platform in GATHERING_PLATFORMS or self.kind in CONSTRAINTS):
        times = self.times_outside[-loops]
        self.gathered_before += copy
        self.before_loops.add((value, after))
      else:
        self.gathered_bytes += copy
      self.work.hbm_bytes += times * copy
    is_settled = (self.wire_value(value), before, after) in self.known.settled
    return self.add_collectives(ops, times, value, source, is_settled=is_settled)

  def _hide(self, value: int, ops: Sequence[CollectiveOp]) -> None:
    """Notes the collectives of an array that a loop has computed, which a product before the loop can hide."""
    (products, after), index = self.analyzed.across_loops, len(self.present)
    is_inside = self.live is not self.analyzed.liveness(self.platform)
    if is_inside or value not in after or all(op.kind not in _HIDDEN for op in ops):
      return
    for product, reader in products.items():
      is_between = product < after[value] and index <= reader
      if is_between and self.weight_gradients.add_hiding(product, index, len(ops) > 1):
        self.copies.prolong(product, index)

  def _loops_since(self, value: int) -> int:
    """The number of present loops that do not change a value."""
    return len(self.times_outside) - self.analyzed.origins.get(value, len(self.times_outside))

  def exchange(self, value: int, ops: tuple[CollectiveOp, ...], times: int, source: str) -> None:
    """Adds collectives of an operand, unless they were added before."""
    if not ops or (value, ops, False) in self.resharded:
      return
    self.resharded.add((value, ops, False))
    self.gathered_bytes += sum(gathered_bytes(one, self.sizes) for one in ops)
    self.add_collectives(ops, times, value, source, is_settled=True)

  def constrain(self, operand: int, result: int, times: int, source: str) -> None:
    """Reshards a value as a constraint demands; a gather is deferred until an operation needs it.

    Compilers move a constraint of a value that a loop does not change out of the loop.
    """
    present = self.deferred_gathers.get(operand, self.specs[operand])
    ops = self.changes_between(self.wire_value(operand), present, self.specs[result])
    if are_gathers(ops) and self._loops_since(operand):
      self.bring(operand, self.specs[result], times, source)
    elif are_gathers(ops):
      self.deferred_gathers[result] = present
      self.constrained[result] = self.constrained.get(operand, operand)
    else:
      self.bring(operand, self.specs[result], times, source)

  def add_to_total(self, op: Op) -> bool:
    """Adds a partial sum to a loop's carry, to reduce the total after the loop; returns whether it did."""
    for value in op.operands if op.kind == 'add' and op.results[0] in self.analyzed.loop_sums else ():
      total, partial = self.analyzed.loop_sums.get(value, (0,))[0], self.partial_sums.get(value)
      if (
        partial
        and self.is_reduced_later(value, partial)
        and partial.natural_sharding == self.specs[total]
      ):
        self.totals[total] = self.partial_sums.pop(value)
        return True
    return False

  def is_reduced_later(self, value: int, partial: PartialSum) -> bool:
    """Whether a partial sum in a loop is added to the loop's carry, which is reduced after the loop."""
    is_moved = self.platform in MOVING_PLATFORMS and not partial.is_total
    return is_moved and self._is_unused_in_totals(value, partial.partial_axes)

  def _is_unused_in_totals(self, value: int, axes: Collection[str]) -> bool:
    """Whether a value is added, whole or in parts, to loops' carries that are not sharded over some axes."""
    totals = self.analyzed.loop_sums.get(value, ())
    return bool(totals) and all(used_axes(self.specs[total]).isdisjoint(axes) for total in totals)

  def merge_partial_sums(self, op: Op) -> bool:
    """Adds two partial sums before either is reduced, if that is their only use; returns whether it did."""
    if op.kind != 'add' or not all(value in self.partial_sums for value in op.operands):
      return False
    one, other = (self.partial_sums[value] for value in op.operands)
    if one[1:3] != other[1:3] or any(self.analyzed.uses[value] > 1 for value in op.operands):
      return False
    for value in op.operands:
      self.partial_sums.pop(value, None)
    self.partial_sums[op.results[0]] = one._replace(array=self.values[op.results[0]])
    return True

  def forward_partial_sum(self, op: Op) -> bool:
    """Rearranges or widens a partial sum before it is reduced, if all of its uses do; returns whether it did."""
    partial = self.partial_sums.get(op.operands[0]) if op.operands else None
    if partial is None or op.results[0] not in self.analyzed.forwarded:
      return False
    if op.kind == 'convert' and not self.loop and self.platform not in WIDENING_PLATFORMS:
      return False
    if op.kind == 'slice' and not used_axes(self.specs[op.operands[0]]).isdisjoint(partial.partial_axes):
      return False  # it is scattered, and cut then
    forwarded = partial.of(op, self.values)
    if forwarded is None:
      return False
    if op.kind == 'convert':
      axes = used_axes(self.specs[op.operands[0]])
      forwarded = forwarded._replace(is_cut=not axes.isdisjoint(partial.partial_axes))
    self.partial_sums[op.results[0]] = forwarded
    if self.analyzed.uses[op.operands[0]] == 1:
      del self.partial_sums[op.operands[0]]
    return True

  def _reduce(self, value: int, required: Spec | None = None) -> None:
    """Reduces a partial sum that is needed now, straight to the required sharding if that is its only use."""
    partial = self.partial_sums.pop(value, None)
    if partial is None:
      return
    if required is not None and self.analyzed.uses[value] == 1:
      self.specs[value] = required
      self.known_bytes.pop(value, None)
    array, natural, partial_axes = partial[:3]
    is_product = partial.kind in PRODUCTS
    arrays = array, natural, partial_axes, self.specs[value]
    ops = reduce_partial_sum(*arrays, self.sizes, self.platform, partial.kind)
    is_widened = partial.array.itemsize < self.values[value].itemsize and not partial.is_cut
    is_whole = value in self.analyzed.loop_sums and (self.platform == 'tpu' or is_widened)
    if is_whole or (is_product and self.platform == 'cuda' and self._is_cut_again(value)):
      ops = without_reduce_scatter(ops)
    dtype = partial.array.dtype
    is_split = self.platform in MOVING_PLATFORMS and not partial.is_total
    is_split = is_split and [op.kind for op in ops] == ['reduce-scatter', 'all-reduce']
    if is_split and self._is_unused_in_totals(value, ops[1].axes):
      loop, self.loop = self.loop, 0  # the rest is reduced once, after the loop
      self.add_collectives(ops[1:], self.times_outside[-1], value, partial.source, partial.kind, dtype)
      ops, self.loop = ops[:1], loop
    groups = self.add_collectives(ops, partial.times, value, partial.source, partial.kind, dtype)
    if ops and self.platform == 'cuda':
      self.sums.add(partial.product)
      self._add_reduced(partial, ops)
    self._doubt_sum(value, partial, ops)
    size = shard_size(partial.array.shape, partial.natural_sharding, self.sizes)
    size *= partial.array.itemsize
    if groups and not self.loop:
      key = self.combiner.key(groups[0])
      is_narrow = partial.array.itemsize < 4
      is_filter = partial.kind == 'convolution' and self.values[value].shape in self.analyzed.filters
      kind = 'filter' if is_filter else partial.kind
      self.weight_gradients.add_reduction(groups[0], key, partial.made, kind, size, is_narrow)

  def _add_reduced(self, partial: PartialSum, ops: Sequence[CollectiveOp]) -> None:
    """Adds the result of a reduction, which is written beside its operand.

    An all-reduce writes over its operand, unless that is a product of matrices seen as an array with more dimensions.
    """
    is_seen_otherwise = partial.kind == 'dot_general' and len(partial.array.shape) > 2
    if ops[0].kind == 'all-reduce' and not is_seen_otherwise:
      return
    size = shard_size(partial.array.shape, partial.natural_sharding, self.sizes) * partial.array.itemsize
    for op in ops:
      size *= shard_count(op.axes, self.sizes) ** _GROWTH.get(op.kind, 0)
    self.gathered_bytes += size

  def _is_cut_again(self, value: int) -> bool:
    """Whether an operation needs a part of a value's shards: XLA cuts them at once, and scatters no sum like that."""
    for op in self.analyzed.users.get(value, ()) if self.analyzed.uses[value] > 1 else ():
      if op.blocks or op.kind in IDENTITIES or not op.results:
        continue
      for operand, spec in zip(op.operands, self.required_by(op).operands):
        if operand == value and spec not in (None, self.specs[value]) and not self.changes(value, spec):
          return True
    return False

  def _doubt_sum(self, value: int, partial: PartialSum, ops: Sequence[CollectiveOp]) -> None:
    """Notes sums that are scattered along several dimensions, or along the channels of images."""
    scattered = {axis for op in ops if op.kind == 'reduce-scatter' for axis in op.axes}
    size = shard_size(partial.array.shape, partial.natural_sharding, self.sizes) * partial.array.itemsize
    if scattered and partial.kind == 'convolution':
      reason = 'a copy with its channels first, of a sum that is scattered along them'
      self.doubts.add(partial.source, reason, Bound(memory=size))
    if value in self.settled_sums:
      return
    if move_shards(ops) and partial.kind == 'dot_general':
      reason = 'a sum of a product whose shards move as it is reduced'
      self.doubts.add(partial.source, reason, Bound(wire=3 * partial.times * size))
    if is_cut_often(ops, self.specs[value]):
      reason = 'a sum that is scattered along several dimensions'
      self.doubts.add(partial.source, reason, Bound(wire=2 * partial.times * size))

  def add_collectives(
    self,
    ops: Sequence[CollectiveOp],
    times: int,
    value: int,
    source: str,
    kind: str = '',
    dtype: str = '',
    is_settled: bool = False,
  ) -> list[int]:
    """Adds collectives, and returns the indices of the combined ones that they join."""
    if self.platform == 'cpu':
      ops = without_reduce_scatter(ops)
    for op in ops:  # each reads its operand and writes its result
      growth = shard_count(op.axes, self.sizes) ** _GROWTH.get(op.kind, 0)
      self.work.hbm_bytes += times * op.bytes * (1 + growth)
    dtype = dtype or self.wire_value(value).dtype
    groups = self.combiner.add(value, ops, times, dtype, kind or self.kind, source, self.loop)
    kinds = [op.kind for op in ops]
    if kinds == ['all-to-all', 'collective-permute'] and not any('[' in axis for axis in ops[0].axes):
      self.doubts.add(source, 'buffers of an exchange', Bound(memory=2 * ops[-1].bytes))
    if is_ambiguous(ops) and not is_settled:
      bound = gathered(self.wire_value(value), self.specs[value], self.sizes, times)
      sent = times * wire_bytes(ops, self.sizes)
      bound = bound._replace(wire=max(bound.wire, sent))
      self.doubts.add(source, f'{" then ".join(op.kind for op in ops)} of one array', bound)
    return groups
