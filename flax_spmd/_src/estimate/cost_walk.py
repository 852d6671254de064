"""Cost walk: FLOPs, memory traffic, collectives and peak memory of a step, from the shardings of its values.

One pass over the program in order. It adds up what each operation computes, reads and writes; the arrays that are live;
and, as `value_moves` finds them, the collectives between the operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flax_spmd._src.estimate.analyzed_graph import CONSTRAINTS, IDENTITIES, AnalyzedGraph
from flax_spmd._src.estimate.collective_combiner import CollectiveCombiner
from flax_spmd._src.estimate.doubts import UNBOUNDED, Bound, gathered
from flax_spmd._src.estimate.gathered_copies import GatheredCopies
from flax_spmd._src.estimate.graph import (
  PRODUCTS,
  Block,
  Op,
  Spec,
  shard_count,
  shard_size,
  used_axes,
)
from flax_spmd._src.estimate.kernels import unknown_kernel
from flax_spmd._src.estimate.live_buffers import (
  BARRIER,
  WRITES,
  BlockLiveness,
  copy_of,
)
from flax_spmd._src.estimate.operations import is_unknown
from flax_spmd._src.estimate.partial_sum import PartialSum
from flax_spmd._src.estimate.partitioned_operations import PartitionedOperations
from flax_spmd._src.estimate.requirements import (
  Requirement,
)
from flax_spmd._src.estimate.resharding import (
  are_gathers,
  gathered_bytes,
)
from flax_spmd._src.estimate.unsure_operations import UnsureOperations
from flax_spmd._src.estimate.weight_gradients import SCHEDULING_PLATFORMS, WeightGradients
from flax_spmd._src.hlo.counts import CountedLoop, Counts
from flax_spmd._src.hlo.trip_counts import unsure_text
from flax_spmd._src.hlo.work import Work

_RESHAPE = 'reshape'
# Kernels of an operation whose result is stored: norms, sums and copies take several in XLA's programs.
_KERNELS = 1.3
_SCAN_KERNELS = 5  # of XLA for GPUs for each element of a shard, if it sums the elements so far along a sharded dimension
_FEW_ROWS = 4096  # that XLA for GPUs sums in one step
# Of logits: the gradient of longer rows is computed by a kernel that reads each element once.
_ROW_BYTES = 48 * 2**10


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
  memory = sum(map(step.bytes_of, analyzed.graph.main.arguments)) + peak + kept
  doubts = step.doubts.texts(sum(one.wire for one in collectives), memory, work.flops)
  return WalkResult(counts, peak + kept, doubts, step.doubts.unbounded())


class _CostWalk(UnsureOperations):
  """One pass, with its running totals."""

  def __init__(
    self,
    analyzed: AnalyzedGraph,
    specs: list[Spec],
    sizes: Mapping[str, int],
    platform: str,
    partitions: PartitionedOperations | None,
  ):
    super().__init__(analyzed, specs, sizes, platform, partitions)
    self.kept = analyzed.kept(platform)
    self.flops = 0.0  # of the current operation
    self.opaque: dict[str, int] = {}
    self.loops: list[CountedLoop] = []  # that XLA makes of single operations
    self.fills_stacks = False  # whether it does, as a loop over layers
    self.unreduced = 0.0  # bytes of the last product in a loop that its reduction frees
    self.exchanged: set[int] = set()  # results that an all-to-all reshards
    self.views: set[int] = set()  # arguments of blocks in another shape
    self.padded = 0.0  # bytes of a gathered operand that the current operation pads
    self.products: dict[int, float] = {}  # by operand that is no weight, bytes of its last product
    self.spikes: list[tuple[str, str, float]] = []  # memory that operations may need, with the reason
    self.forward: set[tuple[int, str]] = set()  # operations before the first barrier
    self.barrier = -1  # index of the first one in the main block
    self.again = 0.0  # bytes that operations after it compute again
    self.reduced: set[int] = set()  # operands of reductions over several arrays of one size

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
        alive[copy_of(value)] = self.bytes_of(value)
        now += self.bytes_of(value)
      moved = sum(map(self.bytes_of, written if op.blocks else (*written, *reads)))
      self.work.add(0.0 if op.blocks else self.flops, moved, times)
      if op.kind == 'while':  # its buffers reuse those of operands that end here
        for number, result in enumerate(op.results):
          operand = self._before_transposes(op.operands[number])
          if operand in alive and operand in ending:
            now -= alive.pop(operand)
          is_read = op.blocks[1].returned[number] == op.blocks[1].arguments[number]
          is_stored = operand in block.arguments or (is_read and operand in self.views)
          alive[result] = 0.0 if is_stored else self.bytes_of(result)
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
      self.bring(value, required or self.specs[value], times, '')
    self.work.hbm_bytes += times * sum(map(self.bytes_of, live.returned))
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
    required = self.required_by(op)
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
    return partial is not None and not self.is_reduced_later(product, partial)

  def _is_added_at_once(self, op: Op) -> bool:
    """Whether an operation is a product that a loop over microbatches adds to its carry, and reduces after the loop.

    The program adds gradients when it has all of them; XLA adds each one where it is computed.
    """
    if not self.loop or op.kind not in PRODUCTS or op.results[0] not in self.analyzed.loop_sums:
      return False
    partial = self.partial_sums.get(op.results[0])
    return partial is None or self.is_reduced_later(op.results[0], partial)

  def _op(self, op: Op, inner: Sequence[BlockLiveness], times: int) -> float:
    """Adds the costs of an operation, and returns the peak memory of its blocks."""
    self.kind = op.kind
    if op.results and op.results[0] in self.kept.unsure:
      size = self.bytes_of(op.results[0])
      self.doubts.add_kept(op.source, 'a function that takes long to compute again', size)
    if self._is_local(op):
      return 0.0
    if self.add_to_total(op) or self.merge_partial_sums(op) or self.forward_partial_sum(op):
      return 0.0
    if op.kind == 'while':
      return self._loop(op, inner, times)
    if op.blocks:
      return self._branch(op, inner, times)
    if not op.results:
      return 0.0
    if op.kind in IDENTITIES:
      for operand, result in zip(op.operands, op.results):
        self.constrain(operand, result, times, op.source)
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
    required = self.required_by(op)
    if required.is_settled and self._are_resharded(op, required):
      required = required._replace(halos=())
    required = self.settled(op, required, times)
    for position, (value, spec) in enumerate(zip(op.operands, required.operands)):
      self.doubt_moves(op, value, spec, times)
      is_grouped = op.kind == 'dot_general' and self._is_grouped(op, position, required)
      self.bring(value, spec or self.specs[value], times, op.source, is_grouped)
    for value, ops in zip(op.operands, required.exchanges):
      self.exchange(value, ops, times, op.source)
    if 'copies' in op.attributes:
      self.doubt_copies(op, required, times)
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

  def _are_resharded(self, op: Op, required: Requirement) -> bool:
    """Whether all operands of an operation were brought to the required shardings before."""
    return all(
      spec == self.specs[value] or any((value, spec, form) in self.resharded for form in (True, False))
      for value, spec in zip(op.operands, required.operands)
    )

  def _add_halos(self, op: Op, required: Requirement, times: int) -> None:
    if not required.halos:
      return
    self.gathered_bytes += sum(gathered_bytes(one, self.sizes) for one in required.halos)
    value = op.operands[0] if op.operands else 0
    self.add_collectives(required.halos, times, value, op.source, is_settled=bool(required.exchanges))

  def _add_scan(self, op: Op, times: int) -> None:
    """Adds the loop over the elements of a shard that XLA for GPUs makes of sums along a sharded dimension."""
    dim, result = op.attributes['dimension'], op.results[0]
    trips = -(-self.values[result].shape[dim] // shard_count(self.specs[result][dim], self.sizes))
    self.loops.append(CountedLoop('scan', trips, 'known', times * trips * _SCAN_KERNELS, op.source))

  def _doubt_memory(self, op: Op) -> None:
    """Notes operations around which compilers store more than `live_buffers` counts, with the bytes to expect."""
    [result] = op.results[:1] or [0]
    if (
      op.kind == 'convolution' and self.platform != 'cuda'
    ):  # its neighbours are copied in another layout, or to float32
      self.doubts.add_kept(op.source, 'copies beside a convolution', 2 * self.bytes_of(result))
    elif op.kind == 'pad' and any(op.attributes.get('interior_padding') or ()):
      self.doubts.add(op.source, 'temporaries of a scan', Bound(memory=2 * self.bytes_of(result)))

  def add_spikes(self, peak: float) -> None:
    """Adds doubts about the operations that may need more than the peak, in bytes."""
    updated = 0.0
    for arrays in self.analyzed.filters.values():  # the parameter, its moments and its gradient
      updated += (len(arrays) + 1) * min(map(self.bytes_of, arrays), default=0.0)
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
      return (1 if is_apart else 4) * self.bytes_of(value)  # of the norms of a block and of its shortcut
    return 0.0

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
        self.unreduced = max(0.0, whole - self.bytes_of(value))
    elif natural != spec and len(natural) == len(spec):
      if op.kind == 'convolution':  # it is computed whole, and cut then
        whole = shard_size(self.values[value].shape, natural, self.sizes) * self.values[value].itemsize
        self.gathered_bytes += max(0.0, whole - self.bytes_of(value))
      ops = self.changes_between(self.wire_value(value), natural, spec)
      if are_gathers(ops):
        self.deferred_gathers[value] = natural
      else:
        is_own = op.kind == 'concatenate'  # XLA makes this exchange where the parts are joined
        is_exchanged = not is_own and any(one.kind == 'all-to-all' for one in ops)
        self.exchanged |= {value} if is_exchanged else set()
        is_settled = (self.wire_value(value), natural, spec) in self.known.settled
        self.add_collectives(ops, times, value, op.source, is_settled=is_settled)

  def _loop(self, op: Op, inner: Sequence[BlockLiveness], times: int) -> float:
    """Adds the costs of all iterations of a loop."""
    for operand, result in zip(op.operands, op.results):
      moved = any(one.kind == 'all-to-all' for one in self.changes(operand, self.specs[result]))
      if operand in self.exchanged or moved:
        every = times * self.analyzed.trips(op).number
        bound = gathered(self.values[operand], self.specs[operand], self.sizes, every)
        self.doubts.add(op.source, 'all-to-all of an array for a loop, or in its every iteration', bound)
      self.bring(operand, self.specs[result], times, op.source)
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
    return max(branch[2] for branch in branches) + sum(map(self.bytes_of, op.results))

  def _is_grouped(self, op: Op, position: int, required: Requirement) -> bool:
    """Whether an activation is gathered for a product by groups of devices that compute parts of its result.

    XLA does not merge such a gather with that for the gradient of a weight, where no group has a part of the result: it
    writes their groups of devices in two ways. It forms groups only if the other operand has the shards of the result.
    """
    value, spec, natural = op.operands[position], required.operands[position], required.natural_sharding
    if spec is None or value in self.analyzed.argument_derived:
      return False
    other, needed = op.operands[1 - position], required.operands[1 - position]
    summed = op.attributes.get(f'{("rhs", "lhs")[position]}_contracting_dimensions', ())
    keeps = all(
      one == wanted or dim in summed
      for dim, (one, wanted) in enumerate(zip(self.specs[other], needed or self.specs[other]))
    )
    return keeps and not used_axes(spec).isdisjoint(used_axes(natural or ()))

  def _written_bytes(self, op: Op, value: int) -> float:
    """Bytes of a result; outside of loops, an unreduced product has its natural sharding."""
    if (op.kind == 'transpose' and self._is_folded(op, value)) or self._is_added(value):
      return 0.0
    if value in self.kept.rows:
      dim, source = self.kept.rows[value]
      narrowed = (
        self.values[source].itemsize / self.values[value].itemsize if self.specs[value][dim] else 1
      )
      return self.bytes_of(value) * narrowed
    if value not in self.partial_sums or op.kind not in PRODUCTS or self.loop:
      return self.bytes_of(value)
    natural = self.partial_sums[value].natural_sharding
    return shard_size(self.values[value].shape, natural, self.sizes) * self.values[value].itemsize

  def _is_added(self, value: int) -> bool:
    """Whether the kernel of a product adds it to an earlier product, in the place of that."""
    return self.platform == 'cuda' and value in self.analyzed.added and value not in self.partial_sums

  def _is_folded(self, op: Op, value: int) -> bool:
    """Whether products read a transposed matrix as it is: one of the step's arguments that no device gathers."""
    is_matrix = len(self.specs[value]) == 2 and op.operands[0] in self.analyzed.graph.main.arguments
    return self.platform == 'cuda' and is_matrix and not used_axes(self.specs[value])
