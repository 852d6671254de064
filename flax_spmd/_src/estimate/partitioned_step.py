"""Partitioned steps: the FLOPs and collectives of a whole step, as XLA partitions it.

That takes a few times as long as an estimate, and leaves no doubt about them. The partitioner ends before it combines
collectives; here they are combined as in estimates.
"""

from __future__ import annotations

from collections.abc import Mapping

from flax_spmd._src.compare.partitioner import partitioner
from flax_spmd._src.estimate.collective_combiner import CollectiveCombiner
from flax_spmd._src.estimate.cost_walk import WalkResult
from flax_spmd._src.estimate.resharding import CollectiveOp
from flax_spmd._src.hlo.counts import Collective, Counts, count_module, scaled
from flax_spmd._src.hlo.parser import HloModule, parse
from flax_spmd._src.text import size_text

# Largest differences in FLOPs, and in bytes relative to the memory, of a walk that has the compiler's arrays. Few sums are live at once.
_ALIKE, _ALIKE_SUMS = 0.08, 0.2


def partitioned_counts(code: bytes, sizes: Mapping[str, int]) -> Counts | None:
  """The counts of a step as XLA for GPUs partitions it; None if it cannot.

  The memory traffic is that before operations are fused.

  Args:
    code: the step as MLIR bytecode, with shardings.
    sizes: size per mesh axis, in order.
  """
  text = partitioner().partition(code, tuple(sizes.values()))
  if text is None:
    return None
  module = parse(text)
  counts = count_module(module, sizes)
  return counts._replace(collectives=_combined(module, counts.collectives, sizes))


def _combined(
  module: HloModule, collectives: tuple[Collective, ...], sizes: Mapping[str, int]
) -> tuple[Collective, ...]:
  """Collectives, combined where they are independent; those over devices that are no part of the mesh are as before."""
  named = {one.name: one for one in collectives if one.axes}
  combiner = CollectiveCombiner(sizes)
  for computation in module.computations.values():
    for instruction in computation.instructions.values():
      combiner.add_dependences((instruction.name,), instruction.operands)
      if one := named.get(instruction.name):
        op = CollectiveOp(one.kind, one.axes, one.bytes)
        combiner.add(one.name, (op,), one.times, one.dtype, one.op, one.source, computation.name)
  found = [*combiner.collectives(), *(one for one in collectives if not one.axes)]
  return tuple(sorted(found, key=lambda one: -one.wire))


def with_partition(costs: WalkResult, counts: Counts) -> WalkResult:
  """The costs of a walk with the FLOPs and collectives of a partitioned step.

  What remains in doubt is the memory; all of it, where the walk gathers other arrays than the partitioned step.
  """
  flops = max(counts.flops, costs.counts.flops) if counts.opaque else counts.flops  # of kernels, too
  known = scaled(costs.counts, flops=flops / costs.counts.flops if costs.counts.flops else 1.0)
  known = known._replace(flops=flops, collectives=counts.collectives)
  doubts = costs.about_memory
  apart = abs(flops - costs.counts.flops)
  if apart > _ALIKE * flops:
    doubts = (
      *doubts,
      f'memory: of {flops:.3g} FLOPs the estimate has {costs.counts.flops:.3g}, with other shards of activations',
    )
  ours, theirs = _gathered(costs.counts), _gathered(counts)
  apart = sum(abs(ours.get(axes, 0.0) - theirs.get(axes, 0.0)) for axes in ours | theirs)
  if apart > _ALIKE * costs.memory:
    doubts = (*doubts, f'memory: gathered arrays of {size_text(apart)} are others than the estimate has')
  apart = abs(_summed(costs.counts) - _summed(counts))
  if apart > _ALIKE_SUMS * costs.memory:
    doubts = (
      *doubts,
      f'memory: sums of {size_text(apart)} are scattered otherwise than the estimate has',
    )
  return costs._replace(counts=known, doubts=doubts)


def _summed(counts: Counts) -> float:
  """The bytes that sums over devices write, each in one run: of scattered ones, the part of a device."""
  whole = sum(one.bytes for one in counts.collectives if one.kind == 'all-reduce')
  return whole + sum(one.bytes / one.group for one in counts.collectives if one.kind == 'reduce-scatter')


def _gathered(counts: Counts) -> dict[frozenset[str], float]:
  """The bytes that all-gathers write, each in one run, by mesh axes."""
  gathered: dict[frozenset[str], float] = {}
  for one in counts.collectives:
    if one.kind == 'all-gather':
      axes = frozenset(one.axes)
      gathered[axes] = gathered.get(axes, 0.0) + one.bytes * one.group
  return gathered
