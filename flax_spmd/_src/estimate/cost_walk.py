"""Cost walk: FLOPs, memory traffic, collectives and peak memory of a step, from the shardings of its values.

One pass over the program in order. Wherever an operand is not sharded as its operation requires, collectives are
added, once per run of the enclosing loops. Like XLA, the walk saves communication in three ways:

* A value is resharded to one sharding once, however many operations need it.
* A gather is deferred until an operation needs its result; an elementwise operation often does not.
* Partial sums that are added to each other are added first, and reduced once; so are those that a loop adds up
  (`loops`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from flax_spmd._src.estimate.analyzed_graph import CONSTRAINTS, IDENTITIES, AnalyzedGraph
from flax_spmd._src.estimate.collective_combiner import CollectiveCombiner
from flax_spmd._src.estimate.doubts import UNBOUNDED, Bound, Doubts, gathered
from flax_spmd._src.estimate.gathered_copies import GatheredCopies
from flax_spmd._src.estimate.graph import (
  PRODUCTS,
  Block,
  GraphValue,
  Op,
  Spec,
  shard_count,
  shard_size,
  used_axes,
)
from flax_spmd._src.estimate.halos import is_plain_slice
from flax_spmd._src.estimate.kernels import unknown_kernel
from flax_spmd._src.estimate.live_buffers import (
  BARRIER,
  WRITES,
  BlockLiveness,
  copy_of,
)
from flax_spmd._src.estimate.loops import (
  GATHERING_PLATFORMS,
  MOVING_PLATFORMS,
  WIDENING_PLATFORMS,
)
from flax_spmd._src.estimate.operations import is_elementwise, is_unknown, requirement
from flax_spmd._src.estimate.partial_sum import PartialSum
from flax_spmd._src.estimate.partitioned_operations import Partition, PartitionedOperations, adopted
from flax_spmd._src.estimate.requirements import (
  Context,
  Requirement,
  operand_collectives,
  result_collectives,
)
from flax_spmd._src.estimate.resharding import (
  CollectiveOp,
  is_ambiguous,
  reduce_partial_sum,
  reshard,
  wire_bytes,
  without_reduce_scatter,
)
from flax_spmd._src.estimate.weight_gradients import SCHEDULING_PLATFORMS, WeightGradients
from flax_spmd._src.hlo.counts import CountedLoop, Counts
from flax_spmd._src.hlo.trip_counts import unsure_text
from flax_spmd._src.hlo.work import Work

_GROWTH = {'all-gather': 1, 'reduce-scatter': -1}
_SLICES = ('dynamic_slice', 'dynamic_update_slice')
_RESHAPE = 'reshape'
_RESHARDING = {'dot_general': 'matrix product', 'gather': 'lookup', 'scatter': 'lookup'}
_HIDDEN = ('all-gather', 'all-to-all')  # those that products hide
# Kernels of an operation whose result is stored: norms, sums and copies take several in XLA's programs.
_KERNELS = 1.3
_SCAN_KERNELS = 5  # of XLA for GPUs for each element of a shard, if it sums the elements so far along a sharded dimension
_FEW_ROWS = 4096  # that XLA for GPUs sums in one step
_ROW_BYTES = (
  48 * 2**10
)  # of logits: the gradient of longer rows is computed by a kernel that reads each element once


class WalkResult(NamedTuple):
  """The costs of a step on each device.

  Attributes:
    counts: FLOPs, memory traffic and collectives, in the form of a compiled program's counts.
    temporaries: peak memory in bytes besides arguments and results.
    doubts: places where XLA could choose otherwise, one line each.
    unknown: those of them that are kernels with unknown costs.
  """

  counts: Counts
  temporaries: float
  doubts: tuple[str, ...]
  unknown: tuple[str, ...]


def walk(
  analyzed: AnalyzedGraph,
  specs: Sequence[Spec],
  results: Sequence[Spec | None],
  sizes: Mapping[str, int],
  platform: str = 'cuda',
  partitions: PartitionedOperations | None = None,
) -> WalkResult:
  """The costs under a layout.

  Args:
    analyzed: the program.
    specs: sharding of each value.
    results: sharding that each result of the step needs; None accepts any.
    sizes: size per mesh axis.
    platform: platform to estimate for: 'cuda', 'tpu' or 'cpu'.
    partitions: partitions of single operations, for those that XLA has several ways for.
  """
  step = _CostWalk(analyzed, list(specs), sizes, platform, partitions)
  peak = step.block(analyzed.graph.main, analyzed.liveness(platform), 1, results)
  kept = step.kept_copies()
  if platform == 'tpu':  # its compiler may gather them again
    step.doubts.add_kept('gathered arrays', 'copies that several operations use', kept)
    kept = 0.0
  if platform in SCHEDULING_PLATFORMS:
    peak = max(peak, step.weight_gradients.peak())
    spread = step.weight_gradients.spread()
    step.doubts.add_kept('gradients', 'the order of their products and reductions', spread)
    spread = step.weight_gradients.filter_spread()
    step.doubts.add_kept('gradients', 'the order of those of filters', spread)
    step.doubts.add_kept('remat', 'blocks that are computed again early, beside sums', step.repeated)
    step.add_spikes(peak)
  collectives = sorted(step.combiner.collectives(), key=lambda one: -one.wire)
  work = step.work
  counts = Counts(
    work.flops,
    work.hbm_bytes,
    tuple(collectives),
    tuple(step.opaque.items()),
    tuple(step.loops),
    work.products,
    _KERNELS * work.kernels + sum(loop.kernels for loop in step.loops),
  )
  memory = sum(map(step._bytes, analyzed.graph.main.arguments)) + peak + kept
  doubts = step.doubts.texts(sum(one.wire for one in collectives), memory, work.flops)
  return WalkResult(counts, peak + kept, doubts, step.doubts.unbounded())


def _moves(ops: Sequence[CollectiveOp]) -> bool:
  return any(op.kind in ('all-to-all', 'collective-permute') for op in ops)


def _is_cut_often(ops: Sequence[CollectiveOp], spec: Spec) -> bool:
  """Whether a sum is scattered along several dimensions."""
  scattered = {axis for op in ops if op.kind == 'reduce-scatter' for axis in op.axes}
  return sum(not scattered.isdisjoint(axes) for axes in spec) > 1


def _has_parts(spec: Spec) -> bool:
  """Whether an array is sharded over a part of an axis."""
  return any('[' in axis for axes in spec for axis in axes)


def _gathered_bytes(op: CollectiveOp, sizes: Mapping[str, int]) -> float:
  return op.bytes * shard_count(op.axes, sizes) if op.kind == 'all-gather' else 0.0


def _are_gathers(ops: Sequence[CollectiveOp]) -> bool:
  return bool(ops) and all(op.kind == 'all-gather' for op in ops)


class _CostWalk:
  """One pass, with its running totals."""

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
    self.kept = analyzed.kept(platform)
    self.combiner = CollectiveCombiner(sizes)
    self.times_outside: list[int] = []  # of each loop around, how often it runs
    self.gathered_before = 0.0  # bytes that the present loop finds gathered
    # Of each resharding, the combined collective that it is a part of.
    self.gather_groups: dict[tuple[int, Spec, bool], int] = {}
    self.before_loops: set[tuple[int, Spec]] = set()  # arrays and shardings that loops find
    self.loop = 0  # the innermost loop, as its first result; 0 outside of loops
    self.kind = ''  # of the current operation
    self.work = Work()
    self.flops = 0.0  # of the current operation
    self.opaque: dict[str, int] = {}
    self.loops: list[CountedLoop] = []  # that XLA makes of single operations
    self.doubts = Doubts()
    self.resharded: set[tuple[int | None, Spec | tuple[CollectiveOp, ...], bool]] = set()
    self.settled_sums: set[int] = set()  # partial sums whose reduction a partitioner has confirmed
    self.copies = GatheredCopies()
    self.present: list[float] = []  # memory during each operation of the present block
    self.live = analyzed.liveness(platform)  # of the present block
    self.fills_stacks = False  # whether it does, as a loop over layers
    self.unreduced = 0.0  # bytes of the last product in a loop that its reduction frees
    self.partial_sums: dict[int, PartialSum] = {}
    self.totals: dict[int, PartialSum] = {}  # results of the present loops that are reduced after them
    self.deferred_gathers: dict[int, Spec] = {}  # present shardings of values that are not gathered yet
    self.constrained: dict[int, int] = {}  # by the result of a constraint, the value that is gathered
    self.exchanged: set[int] = set()  # results that an all-to-all reshards
    self.known_bytes: dict[int, float] = {}
    self.views: set[int] = set()  # arguments of blocks in another shape
    self.gathered_bytes = 0.0  # by the current operation
    self.padded = 0.0  # bytes of a gathered operand that the current operation pads
    self.products: dict[int, float] = {}  # by operand that is no weight, bytes of its last product
    self.needed_until = 0  # the last operation that needs what the current one reads
    self.weight_gradients = WeightGradients()
    self.spikes: list[tuple[str, str, float]] = []  # memory that operations may need, with the reason
    self.forward: set[tuple[int, str]] = set()  # operations before the first barrier
    self.barrier = -1  # index of the first one in the main block
    self.again = 0.0  # bytes that operations after it compute again
    self.reduced: set[int] = set()  # operands of reductions over several arrays of one size
    self.sums: set[int] = set()  # sums that have been reduced over devices

  def kept_copies(self) -> float:
    """The bytes that gathered arrays, which several operations of the present block use, add to its peak."""
    return self.copies.added(self.present)

  def _inner_block(
    self, block: Block, live: BlockLiveness, times: int, results: Sequence[Spec | None]
  ) -> float:
    """Walks a block of an operation, and returns its peak memory, with the arrays that it keeps gathered."""
    outside = self.copies, self.present, self.live, self.needed_until, self.fills_stacks
    self.copies, self.present = GatheredCopies(), []
    peak = self.block(block, live, times, results)
    peak += 0.0 if self.platform == 'tpu' else self.kept_copies()
    self.copies, self.present, self.live, self.needed_until, self.fills_stacks = outside
    return peak

  def block(
    self, block: Block, live: BlockLiveness, times: int, results: Sequence[Spec | None]
  ) -> float:
    """Walks a block, and returns its peak memory besides its arguments, and without the arrays that it keeps gathered."""
    self.live = live
    alive: dict[int, float] = {}
    now = peak = 0.0
    held: set[int] = set()  # by operations that run last
    self.fills_stacks = any(op.kind == 'dynamic_update_slice' for op in block.ops)
    is_main = block is self.analyzed.graph.main
    for index, op in enumerate(block.ops):
      self.gathered_bytes = self.padded = self.flops = 0.0
      self.needed_until = live.needed[index]
      inner_peak = self._op(op, live.inner[index], times)
      if self._is_view(op, block):
        self.views.add(op.results[0])
      self.combiner.add_dependences(op.results, op.operands)
      written, reads, ending = live.written[index], live.reads[index], live.ending[index]
      for value in written:
        alive[value] = 0.0 if value in self.views else self._written_bytes(op, value)
        now += alive[value]
      for value in live.copied[index]:
        alive[copy_of(value)] = self._bytes(value)
        now += self._bytes(value)
      moved = sum(map(self._bytes, written if op.blocks else (*written, *reads)))
      self.work.add(0.0 if op.blocks else self.flops, moved, times)
      if op.kind == 'while':  # its buffers reuse those of operands that end here
        for number, result in enumerate(op.results):
          operand = self._before_transposes(op.operands[number])
          if operand in alive and operand in ending:
            now -= alive.pop(operand)
          is_read = op.blocks[1].returned[number] == op.blocks[1].arguments[number]
          is_stored = operand in block.arguments or (is_read and operand in self.views)
          alive[result] = 0.0 if is_stored else self._bytes(result)
          now += alive[result]
      reused = self._reused(op, live, index, alive)
      present = now - reused + inner_peak + self.gathered_bytes
      peak = max(peak, present)
      self.present.append(present)
      if is_main:
        self._add_again(op, sum(alive[value] for value in written))
        added = self._image_sums(op, reads) if op.kind == 'reduce' else 0.0
        self._add_step(present + added, live, index, alive)
        if self.padded:
          reason = 'a padded operand of a product that is split along its sum'
          self.spikes.append((op.source, reason, present + self.padded))
      if self.fills_stacks and self._runs_last(op):
        held.update(reads)
      if self._is_added_at_once(op):
        now -= alive.pop(op.results[0], 0.0)
      for value in ending:
        if value not in held:
          now -= alive.pop(value, 0.0)
    for value, required in zip(block.returned, results):
      self._bring(value, required or self.specs[value], times, '')
    self.work.hbm_bytes += times * sum(map(self._bytes, live.returned))
    return peak

  def _add_again(self, op: Op, size: float) -> None:
    """Notes a repeated operation of the backward pass outside of loops, with its size in bytes."""
    if op.kind == BARRIER and self.barrier < 0:
      self.barrier = len(self.present)
    key = self.analyzed.alike.get(op.results[0], -1) if op.results else -1, op.source
    if self.barrier < 0:
      self.forward.add(key)
    elif key in self.forward:
      self.again += size

  @property
  def repeated(self) -> float:
    """The bytes that a backward pass with sums over devices may compute again before it needs them.

    XLA removes the barriers before it schedules: repeated operations hide the sums.
    """
    return self.again if self.weight_gradients.has_sums_after(self.barrier) else 0.0

  def _add_step(
    self, present: float, live: BlockLiveness, index: int, alive: Mapping[int, float]
  ) -> None:
    """Records the memory while an operation of the main block runs."""
    ended = {value: alive[value] for value in live.ending[index] if value in alive}
    written = sum([alive[value] for value in live.written[index]])
    self.weight_gradients.add_step(present, ended, live.reads[index], written)

  def _reused(self, op: Op, live: BlockLiveness, index: int, alive: Mapping[int, float]) -> float:
    """Bytes of fused results that take the place of an operand that ends, as the gradient of logits does.

    An operand of a reduction over several arrays, as in the gradient of a norm, is still read as the result is written.
    The result of an asynchronous collective is not written to. A result that is fused with a pad takes no operand's
    place, since it is larger. Neither do logits less their maximum, nor results that are computed from them: their kernels
    read each row several times.
    """
    if op.kind in WRITES:
      if op.kind == 'reduce' and self.platform == 'cuda':
        reads = live.reads[index]
        sizes = [alive.get(value, 0.0) for value in reads]
        self.reduced |= {value for value, size in zip(reads, sizes) if size and sizes.count(size) > 1}
      return 0.0
    if any(self._row_bytes(value) <= _ROW_BYTES for value in live.ending[index]):
      return 0.0
    written = [
      value
      for value in live.written[index]
      if value not in live.padded and math.isinf(self._row_bytes(value))
    ]
    results = [(self.values[value].dtype, alive[value]) for value in written]
    ends = [
      (self.values[value].dtype, alive.get(value))
      for value in live.ending[index]
      if value not in self.reduced and value not in self.sums and value >= 0
    ]
    if results and not self.loop:
      ends += [(self.values[value].dtype, size) for value, size in self.copies.ending(index)]
    return sum(size for dtype, size in results if (dtype, size) in ends)

  def _row_bytes(self, value: int) -> float:
    """The bytes of each row of logits less their maximum that one kernel computes; infinite for other values."""
    dim, _ = self.kept.rows.get(value, (None, None))
    if dim is None or self.specs[value][dim]:
      return math.inf
    return self.values[value].shape[dim] * self.values[value].itemsize

  def _is_view(self, op: Op, block: Block) -> bool:
    """Whether an operation only changes the shape of an argument of its block, and of its shards."""
    if op.kind not in (_RESHAPE, *CONSTRAINTS):
      return False
    operand, result = op.operands[0], op.results[0]
    if operand not in block.arguments and operand not in self.views:
      return False
    if op.kind != _RESHAPE:
      return self.specs[operand] == self.specs[result]
    required = self._required(op)
    is_local = required.operands[0] in (None, self.specs[operand])
    return is_local and required.natural_sharding == self.specs[result]

  def _before_transposes(self, value: int) -> int:
    """The array that a loop's operand is a transpose of: on GPUs no copy, as its layout is free."""
    while value in self.analyzed.transposed and self.platform == 'cuda':
      value = self.analyzed.transposed[value]
    return value

  def _runs_last(self, op: Op) -> bool:
    """Whether an operation is a product in a loop whose result is reduced over devices.

    Schedulers delay such a product, which keeps its operands live, in a loop over layers that stacks their
    gradients. They do not if the sum is reduced after the loop. A loop over microbatches, which adds gradients up, can
    have a whole model as its body, and keeps far less of it; it is taken to keep nothing, which is too little for a
    small body.
    """
    product = op.results[0] if op.results else 0
    partial = self.partial_sums.get(product) if self.loop and op.kind == 'dot_general' else None
    return partial is not None and not self._is_reduced_later(product, partial)

  def _is_added_at_once(self, op: Op) -> bool:
    """Whether an operation is a product that a loop over microbatches adds to its carry, and reduces after the loop.

    The program adds gradients when it has all of them; XLA adds each one where it is computed.
    """
    if not self.loop or op.kind not in PRODUCTS or op.results[0] not in self.analyzed.loop_sums:
      return False
    partial = self.partial_sums.get(op.results[0])
    return partial is None or self._is_reduced_later(op.results[0], partial)

  def _is_reduced_later(self, value: int, partial: PartialSum) -> bool:
    """Whether a partial sum in a loop is added to the loop's carry, which is reduced after the loop."""
    is_moved = self.platform in MOVING_PLATFORMS and not partial.is_total
    return is_moved and self._is_unused_in_totals(value, partial.partial_axes)

  def _is_unused_in_totals(self, value: int, axes: Collection[str]) -> bool:
    """Whether a value is added, whole or in parts, to loops' carries that are not sharded over some axes."""
    totals = self.analyzed.loop_sums.get(value, ())
    return bool(totals) and all(used_axes(self.specs[total]).isdisjoint(axes) for total in totals)

  def _op(self, op: Op, inner: Sequence[BlockLiveness], times: int) -> float:
    """Adds the costs of an operation, and returns the peak memory of its blocks."""
    self.kind = op.kind
    if op.results and op.results[0] in self.kept.unsure:
      size = self._bytes(op.results[0])
      self.doubts.add_kept(op.source, 'a function that takes long to compute again', size)
    if self._is_local(op):
      return 0.0
    if self._add_to_total(op) or self._merge_partial_sums(op) or self._forward_partial_sum(op):
      return 0.0
    if op.kind == 'while':
      return self._loop(op, inner, times)
    if op.blocks:
      return self._branch(op, inner, times)
    if not op.results:
      return 0.0
    if op.kind in IDENTITIES:
      for operand, result in zip(op.operands, op.results):
        self._constrain(operand, result, times, op.source)
      return 0.0
    if op.results[0] not in self.analyzed.rematerialisable:
      self._compute(op, times)
    return 0.0

  def _is_local(self, op: Op) -> bool:
    """Whether an operation is elementwise, and its operands have the sharding of its result."""
    sources = self.analyzed.elementwise.get(op.results[0]) if op.results else None
    if sources is None:
      return False
    result_spec = self.specs[op.results[0]]
    for value in sources:
      if (
        self.specs[value] != result_spec or value in self.deferred_gathers or value in self.partial_sums
      ):
        return False
    return True

  def _compute(self, op: Op, times: int) -> None:
    required = self._required(op)
    if required.is_settled and self._are_resharded(op, required):
      required = required._replace(halos=())
    required = self._settled(op, required, times)
    for value, spec in zip(op.operands, required.operands):
      self._doubt_moves(op, value, spec, times)
      is_grouped = op.kind == 'dot_general' and self._is_grouped(value, spec, required)
      self._bring(value, spec or self.specs[value], times, op.source, is_grouped)
    for value, ops in zip(op.operands, required.exchanges):
      self._exchange(value, ops, times, op.source)
    if 'copies' in op.attributes:
      self._doubt_copies(op, required, times)
    if op.kind == 'convolution':
      self.gathered_bytes = max(self.gathered_bytes, *required.padded, 0.0)
    elif required.padded:
      self._add_padded(op, required)
    self._add_halos(op, required, times)
    if op.kind == 'scan' and required.halos and self.platform == 'cuda':
      self._add_scan(op, times)
    self.gathered_bytes += required.split
    self.work.hbm_bytes += 2 * times * required.split
    self.flops = required.flops
    what = 'operation' if is_unknown(op) else 'kernel'
    if name := op.kind if what == 'operation' else unknown_kernel(op):
      self.opaque[name] = self.opaque.get(name, 0) + times
      self.doubts.add(op.source, f'the costs of the {what} {name} are unknown', UNBOUNDED)
    if op.kind in PRODUCTS:
      self.weight_gradients.add_product(self.combiner.dependences(op.operands))
    self._doubt_memory(op)
    before, self.unreduced = self.unreduced, 0.0
    for value in op.results:
      self._add_result(value, required, times, op)
    if op.kind in PRODUCTS:  # an activation's gradient follows a weight's, which is reduced meanwhile
      self.gathered_bytes += before + self.unreduced
    if op.kind == 'dot_general':
      values = [value for value in op.operands if value not in self.analyzed.argument_derived]
      self.products |= dict.fromkeys(values, self._written_bytes(op, op.results[0]))

  def _add_padded(self, op: Op, required: Requirement) -> None:
    """Adds the padded operands of a product.

    That of a gathered array takes its place, or not, as is scheduled. The gradient of a weight that reads the same
    operand comes before in the program, and after it in XLA's.
    """
    specs = zip(op.operands, required.operands)
    is_gathered = [spec not in (None, self.specs[value]) for value, spec in specs]
    self.padded = max(size * gathered for size, gathered in zip(required.padded, is_gathered))
    added = sum(size for size, gathered in zip(required.padded, is_gathered) if not gathered)
    later = [self.products.get(value, 0.0) for value in op.operands]
    self.gathered_bytes += max(0.0, added - max(later))

  def _key(self, op: Op) -> tuple:
    """Equal for operations with equal requirements."""
    specs, result = self.specs, op.results[0]
    partial = () if op.kind in PRODUCTS else tuple([value in self.partial_sums for value in op.operands])
    return self.analyzed.alike[result], specs[result], partial, *[specs[value] for value in op.operands]

  def _required(self, op: Op) -> Requirement:
    key = self._key(op)
    if key not in self.known.requirements:
      self.known.requirements[key] = requirement(op, self._context(op))
    return self.known.requirements[key]

  def _are_resharded(self, op: Op, required: Requirement) -> bool:
    """Whether all operands of an operation were brought to the required shardings before."""
    return all(
      spec == self.specs[value] or any((value, spec, form) in self.resharded for form in (True, False))
      for value, spec in zip(op.operands, required.operands)
    )

  def _settled(self, op: Op, required: Requirement, times: int) -> Requirement:
    """The requirement of an operation for which XLA has several ways, as XLA partitions it; else with doubts."""
    reasons = self._reasons(op, required)
    if not reasons and not (self.partitions and self._is_unsure_sum(op, required)):
      return required
    partition = self._partition(op)
    if partition is None:
      for reason in reasons:
        self.doubts.add(op.source, reason, self._bound(op, required, times))
      return required
    settled, apart = adopted(op, required, self._context(op), partition)
    if settled.partial_axes:
      self.settled_sums.add(op.results[0])
    if apart.wire or apart.flops:
      bound = Bound(wire=times * apart.wire, flops=times * apart.flops)
      self.doubts.add(op.source, 'an operation that XLA partitions otherwise on its own', bound)
    return settled

  def _reasons(self, op: Op, required: Requirement) -> list[str]:
    """Why XLA could partition an operation otherwise: activations resharded for a product or a lookup, slices, halos."""
    reasons = [required.doubt] if required.doubt else []
    use = _RESHARDING.get(op.kind)
    for value, spec in zip(op.operands, required.operands):
      is_fixed = value in self.analyzed.argument_derived or value in self.analyzed.rematerialisable
      if spec is None or (is_fixed and op.kind not in _SLICES):
        continue
      if use and not required.is_settled and self._changes(value, spec):
        reasons.append(f'activations resharded for a {use}')
      elif op.kind in _SLICES and spec != self.specs[value]:
        reasons.append('slice along a sharded dimension')
    if required.halos and not (required.is_settled or is_plain_slice(op)):
      reasons.append('parts of shards that devices exchange')
    return reasons

  def _is_unsure_sum(self, op: Op, required: Requirement) -> bool:
    """Whether the result of a product is a partial sum whose shards move, or are cut along several dimensions."""
    if op.kind != 'dot_general' or not required.partial_axes:
      return False
    ops = result_collectives(required, self._context(op))
    return _moves(ops) or _is_cut_often(ops, self.specs[op.results[0]])

  def _partition(self, op: Op) -> Partition | None:
    """XLA's partition of an operation on its own, if there is a partitioner."""
    key = self._key(op)
    if key not in self.known.partitions:
      partition = self.partitions and self.partitions.partition(op, self.specs, self.sizes)
      self.known.partitions[key] = partition
    return self.known.partitions[key]

  def _exchange(self, value: int, ops: tuple[CollectiveOp, ...], times: int, source: str) -> None:
    """Adds collectives of an operand, unless they were added before."""
    if not ops or (value, ops, False) in self.resharded:
      return
    self.resharded.add((value, ops, False))
    self.gathered_bytes += sum(_gathered_bytes(one, self.sizes) for one in ops)
    self._add_collectives(ops, times, value, source, is_settled=True)

  def _add_halos(self, op: Op, required: Requirement, times: int) -> None:
    if not required.halos:
      return
    self.gathered_bytes += sum(_gathered_bytes(one, self.sizes) for one in required.halos)
    value = op.operands[0] if op.operands else 0
    self._add_collectives(required.halos, times, value, op.source, is_settled=bool(required.exchanges))

  def _add_scan(self, op: Op, times: int) -> None:
    """Adds the loop over the elements of a shard that XLA for GPUs makes of sums along a sharded dimension."""
    dim, result = op.attributes['dimension'], op.results[0]
    trips = -(-self.values[result].shape[dim] // shard_count(self.specs[result][dim], self.sizes))
    self.loops.append(CountedLoop('scan', trips, 'known', times * trips * _SCAN_KERNELS, op.source))

  def _doubt_moves(self, op: Op, value: int, spec: Spec | None, times: int) -> None:
    """Notes arrays that move for elementwise operations."""
    if spec is None or spec == self.specs[value] or not is_elementwise(op):
      return
    if value in self.analyzed.rematerialisable:
      return
    changes = self._changes(value, spec)
    if not any(one.kind == 'all-to-all' for one in changes):
      return
    if value in self.analyzed.argument_derived:
      self.doubts.add(
        op.source, 'a weight that activations shard along another dimension', Bound(math.inf)
      )
      return
    # that of this array, or of another one of the same chain
    bound = Bound(wire=times * wire_bytes(changes, self.sizes))
    self.doubts.add(op.source, 'activations that move within elementwise operations', bound)
    self.doubts.add(op.source, 'buffers of an exchange', Bound(memory=2 * self._bytes(value)))

  def _doubt_copies(self, op: Op, required: Requirement, times: int) -> None:
    """Notes an operation that the step has several times, and that compilers may compute more than once.

    They merge what precedes a collective, and not what follows it. What is reshaped may be simplified in several ways,
    as other operations read it.
    """
    context = self._context(op)
    ops = [*result_collectives(required, context), *required.halos]
    for apart, moves in zip(op.attributes['copies'], operand_collectives(required, context)):
      ops += moves if apart else []
    flops = times * required.flops
    if ops:
      sent = times * wire_bytes(ops, self.sizes)
      reason = 'an operation that the step computes several times, whose collectives are not merged'
      self.doubts.add(op.source, reason, Bound(sent, self._bytes(op.results[0]), flops))
    elif copies := op.attributes['reshaped']:
      reason = 'a product of reshaped arrays that the step computes several times'
      self.doubts.add(op.source, reason, Bound(flops=copies * flops))

  def _bound(self, op: Op, required: Requirement, times: int) -> Bound:
    """The most that another way to partition an operation could change: all of its arrays gathered."""
    bound = Bound(flops=times * required.flops)
    for value in (*op.operands, *op.results):
      if value not in self.analyzed.rematerialisable:
        bound = bound.plus(gathered(self._wire_value(value), self.specs[value], self.sizes, times))
    return bound

  def _doubt_memory(self, op: Op) -> None:
    """Notes operations around which compilers store more than `live_buffers` counts, with the bytes to expect."""
    [result] = op.results[:1] or [0]
    if (
      op.kind == 'convolution' and self.platform != 'cuda'
    ):  # its neighbours are copied in another layout, or to float32
      self.doubts.add_kept(op.source, 'copies beside a convolution', 2 * self._bytes(result))
    elif op.kind == 'pad' and any(op.attributes.get('interior_padding') or ()):
      self.doubts.add(op.source, 'temporaries of a scan', Bound(memory=2 * self._bytes(result)))

  def add_spikes(self, peak: float) -> None:
    """Adds doubts about the operations that may need more than the peak, in bytes."""
    updated = 0.0
    for arrays in self.analyzed.filters.values():  # the parameter, its moments and its gradient
      updated += (len(arrays) + 1) * min(map(self._bytes, arrays), default=0.0)
    reason = 'copies of filters in another layout as they are updated'
    for source, text, memory in (*self.spikes, ('gradients', reason, updated)):
      self.doubts.add(source, text, Bound(memory=max(0.0, memory - peak)))

  def _image_sums(self, op: Op, reads: Sequence[int]) -> float:
    """Bytes that sums in the gradient of a norm over images add, whose operands XLA may store in 32 bits.

    It sums few rows, or dimensions that are not adjacent, in kernels of their own, which compute less of their operand.
    """
    (value, *_), dims = op.operands, op.attributes['dimensions']
    shape, spec = self.values[value].shape, self.specs[value]
    size = math.prod(shape)
    kept = [dim for dim, length in enumerate(shape) if dim not in dims and length > 1]
    reduced = [dim for dim in dims if shape[dim] > 1]
    are_read = sum(math.prod(self.values[one].shape) == size for one in reads) > 1
    if len(shape) < 4 or not reduced or not are_read:
      return 0.0
    rows = math.prod(shape[dim] / shard_count(spec[dim], self.sizes) for dim in reduced)
    is_apart = any(min(reduced) < dim < max(reduced) for dim in kept)
    if is_apart or (kept == [len(shape) - 1] and rows <= _FEW_ROWS):
      return (1 if is_apart else 4) * self._bytes(value)  # of the norms of a block and of its shortcut
    return 0.0

  def _changes(self, value: int, required: Spec) -> Sequence[CollectiveOp]:
    return self._between(self.values[value], self.specs[value], required)

  def _between(self, array: GraphValue, before: Spec, after: Spec) -> Sequence[CollectiveOp]:
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

  def _add_result(self, value: int, required: Requirement, times: int, op: Op) -> None:
    """Records a result in its natural sharding, until an operation needs it otherwise."""
    natural, spec = required.natural_sharding, self.specs[value]
    if required.partial_axes:
      self.partial_sums[value] = PartialSum(
        self.values[value],
        natural,
        required.partial_axes,
        times,
        op.kind,
        op.source,
        value,
        -1 if self.loop else self.weight_gradients.index,
      )
      if self.loop and not self.fills_stacks and op.kind in PRODUCTS:
        whole = shard_size(self.values[value].shape, natural, self.sizes) * self.values[value].itemsize
        self.unreduced = max(0.0, whole - self._bytes(value))
    elif natural != spec and len(natural) == len(spec):
      if op.kind == 'convolution':  # it is computed whole, and cut then
        whole = shard_size(self.values[value].shape, natural, self.sizes) * self.values[value].itemsize
        self.gathered_bytes += max(0.0, whole - self._bytes(value))
      ops = self._between(self._wire_value(value), natural, spec)
      if _are_gathers(ops):
        self.deferred_gathers[value] = natural
      else:
        is_own = op.kind == 'concatenate'  # XLA makes this exchange where the parts are joined
        is_exchanged = not is_own and any(one.kind == 'all-to-all' for one in ops)
        self.exchanged |= {value} if is_exchanged else set()
        is_settled = (self._wire_value(value), natural, spec) in self.known.settled
        self._add_collectives(ops, times, value, op.source, is_settled=is_settled)

  def _context(self, op: Op) -> Context:
    return Context(
      [self.values[value] for value in op.operands],
      [self.specs[value] for value in op.operands],
      [self._wire_value(value) for value in op.operands],
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

  def _add_to_total(self, op: Op) -> bool:
    """Adds a partial sum to a loop's carry, to reduce the total after the loop; returns whether it did."""
    for value in op.operands if op.kind == 'add' and op.results[0] in self.analyzed.loop_sums else ():
      total, partial = self.analyzed.loop_sums.get(value, (0,))[0], self.partial_sums.get(value)
      if (
        partial
        and self._is_reduced_later(value, partial)
        and partial.natural_sharding == self.specs[total]
      ):
        self.totals[total] = self.partial_sums.pop(value)
        return True
    return False

  def _merge_partial_sums(self, op: Op) -> bool:
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

  def _forward_partial_sum(self, op: Op) -> bool:
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

  def _constrain(self, operand: int, result: int, times: int, source: str) -> None:
    """Reshards a value as a constraint demands; a gather is deferred until an operation needs it.

    Compilers move a constraint of a value that a loop does not change out of the loop.
    """
    present = self.deferred_gathers.get(operand, self.specs[operand])
    ops = self._between(self._wire_value(operand), present, self.specs[result])
    if _are_gathers(ops) and self._loops_since(operand):
      self._bring(operand, self.specs[result], times, source)
    elif _are_gathers(ops):
      self.deferred_gathers[result] = present
      self.constrained[result] = self.constrained.get(operand, operand)
    else:
      self._bring(operand, self.specs[result], times, source)

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
      self._add_collectives(ops[1:], self.times_outside[-1], value, partial.source, partial.kind, dtype)
      ops, self.loop = ops[:1], loop
    groups = self._add_collectives(ops, partial.times, value, partial.source, partial.kind, dtype)
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
      for operand, spec in zip(op.operands, self._required(op).operands):
        if operand == value and spec not in (None, self.specs[value]) and not self._changes(value, spec):
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
    if _moves(ops) and partial.kind == 'dot_general':
      reason = 'a sum of a product whose shards move as it is reduced'
      self.doubts.add(partial.source, reason, Bound(wire=3 * partial.times * size))
    if _is_cut_often(ops, self.specs[value]):
      reason = 'a sum that is scattered along several dimensions'
      self.doubts.add(partial.source, reason, Bound(wire=2 * partial.times * size))

  def _loop(self, op: Op, inner: Sequence[BlockLiveness], times: int) -> float:
    """Adds the costs of all iterations of a loop."""
    for operand, result in zip(op.operands, op.results):
      moved = any(one.kind == 'all-to-all' for one in self._changes(operand, self.specs[result]))
      if operand in self.exchanged or moved:
        every = times * self.analyzed.trips(op).number
        bound = gathered(self.values[operand], self.specs[operand], self.sizes, every)
        self.doubts.add(op.source, 'all-to-all of an array for a loop, or in its every iteration', bound)
      self._bring(operand, self.specs[result], times, op.source)
    outside = self.resharded, self.loop, self.gathered_before
    self.resharded, self.loop, self.gathered_before = set(), op.results[0], 0.0
    self.times_outside.append(times)
    trips = self.analyzed.trips(op)
    if text := unsure_text(trips):
      self.doubts.add(op.source, text, UNBOUNDED._replace(memory=0.0))
    iterations = times * trips.number
    carried = [self.specs[result] for result in op.results]
    peak = self._inner_block(op.blocks[1], inner[1], iterations, carried)
    peak += self.gathered_before
    self.times_outside.pop()
    self.resharded, self.loop, self.gathered_before = outside
    for result in op.results:
      if result in self.totals:
        self.partial_sums[result] = self.totals.pop(result)._replace(times=times, is_total=True)
    return peak

  def _branch(self, op: Op, inner: Sequence[BlockLiveness], times: int) -> float:
    """Adds the costs of the most expensive branch, as the one taken is unknown."""
    results = [self.specs[result] for result in op.results]
    work, combiner = self.work, self.combiner
    scheduled, self.weight_gradients = (
      self.weight_gradients,
      WeightGradients(),
    )  # those of branches do not wait
    branches: list[tuple[Work, CollectiveCombiner, float]] = []
    for block, live in zip(op.blocks, inner):
      self.work, self.combiner = Work(), CollectiveCombiner(self.sizes)
      peak = self._inner_block(block, live, times, results)
      branches.append((self.work, self.combiner, peak))
    taken = max(branches, key=lambda branch: (branch[0].flops, branch[0].hbm_bytes))
    self.work, self.combiner = work, combiner
    self.work.extend(taken[0])
    self.weight_gradients = scheduled
    self.combiner.extend(taken[1])
    return max(branch[2] for branch in branches) + sum(map(self._bytes, op.results))

  def _is_grouped(self, value: int, spec: Spec | None, required: Requirement) -> bool:
    """Whether an activation is gathered for a product by groups of devices that compute parts of its result.

    XLA does not merge such a gather with that for the gradient of a weight, where no group has a part of the result: it
    writes their groups of devices in two ways.
    """
    natural = required.natural_sharding
    return (
      spec is not None
      and value not in self.analyzed.argument_derived
      and not used_axes(spec).isdisjoint(used_axes(natural or ()))
    )

  def _bring(
    self, value: int, required: Spec, times: int, source: str, is_grouped: bool = False
  ) -> None:
    """Reshards a value as required, unless that was done before in the same way."""
    self._reduce(value, required)
    if value in self.deferred_gathers and value not in self.analyzed.rematerialisable:
      if not self._between(self.values[value], self.deferred_gathers[value], required):
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
    is_kept = size > self._bytes(value) and (value, required) not in self.before_loops
    group = self.gather_groups.get((value, required, is_grouped), -1)
    for index in (len(self.present), self.needed_until) if is_kept else ():
      self.copies.add(value, (required, is_grouped), index, size, group)

  def _keep_gathered(self, value: int, before: Spec) -> None:
    """Keeps a gathered array, which is not stored otherwise, for all operations that are computed from it."""
    last = self.live.fused.get(value)
    if last is not None:
      shard = shard_size(self.values[value].shape, before, self.sizes) * self.values[value].itemsize
      for index in (len(self.present), last):  # its shard is not needed any more
        self.copies.add(value, self.specs[value], index, self._bytes(value) - shard)

  def _reshard(self, value: int, before: Spec, after: Spec, times: int, source: str) -> list[int]:
    ops = self._between(self._wire_value(value), before, after)
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
    is_settled = (self._wire_value(value), before, after) in self.known.settled
    return self._add_collectives(ops, times, value, source, is_settled=is_settled)

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

  def _add_collectives(
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
    dtype = dtype or self._wire_value(value).dtype
    groups = self.combiner.add(value, ops, times, dtype, kind or self.kind, source, self.loop)
    kinds = [op.kind for op in ops]
    if kinds == ['all-to-all', 'collective-permute'] and not any('[' in axis for axis in ops[0].axes):
      self.doubts.add(source, 'buffers of an exchange', Bound(memory=2 * ops[-1].bytes))
    if is_ambiguous(ops) and not is_settled:
      bound = gathered(self._wire_value(value), self.specs[value], self.sizes, times)
      sent = times * wire_bytes(ops, self.sizes)
      bound = bound._replace(wire=max(bound.wire, sent))
      self.doubts.add(source, f'{" then ".join(op.kind for op in ops)} of one array', bound)
    return groups

  def _wire_value(self, value: int) -> GraphValue:
    """A value with the dtype in which it is sent."""
    return self.analyzed.wire_values.get(value, self.values[value])

  def _written_bytes(self, op: Op, value: int) -> float:
    """Bytes of a result; outside of loops, an unreduced product has its natural sharding."""
    if (op.kind == 'transpose' and self._is_folded(op, value)) or self._is_added(value):
      return 0.0
    if value in self.kept.rows:
      dim, source = self.kept.rows[value]
      narrowed = (
        self.values[source].itemsize / self.values[value].itemsize if self.specs[value][dim] else 1
      )
      return self._bytes(value) * narrowed
    if value not in self.partial_sums or op.kind not in PRODUCTS or self.loop:
      return self._bytes(value)
    natural = self.partial_sums[value].natural_sharding
    return shard_size(self.values[value].shape, natural, self.sizes) * self.values[value].itemsize

  def _is_added(self, value: int) -> bool:
    """Whether the kernel of a product adds it to an earlier product, in the place of that."""
    return self.platform == 'cuda' and value in self.analyzed.added and value not in self.partial_sums

  def _is_folded(self, op: Op, value: int) -> bool:
    """Whether products read a transposed matrix as it is: one of the step's arguments that no device gathers."""
    is_matrix = len(self.specs[value]) == 2 and op.operands[0] in self.analyzed.graph.main.arguments
    return self.platform == 'cuda' and is_matrix and not used_axes(self.specs[value])

  def _bytes(self, value: int) -> float:
    if value not in self.known_bytes:
      shape, itemsize = self.values[value].shape, self.values[value].itemsize
      self.known_bytes[value] = shard_size(shape, self.specs[value], self.sizes) * itemsize
    return self.known_bytes[value]
