"""Collective combiner: the collectives that an estimate adds, combined as XLA does it (`hlo.combined_collectives`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flax_spmd._src.estimate.graph import shard_count
from flax_spmd._src.estimate.resharding import CollectiveOp
from flax_spmd._src.hlo.collectives import Collective, wire
from flax_spmd._src.hlo.combined_collectives import CombinedCollectives


class CollectiveCombiner(CombinedCollectives):
  """The collectives of a step, combined where XLA would.

  Args:
    sizes: size per mesh axis.
  """

  def __init__(self, sizes: Mapping[str, int]):
    super().__init__()
    self._sizes = sizes

  def add(
    self,
    value: int,
    ops: Sequence[CollectiveOp],
    times: int,
    dtype: str,
    kind: str,
    source: str,
    block: int,
  ) -> list[int]:
    """Adds collectives that follow each other on one value, and returns the indices of the combined ones.

    Args:
      value: the value.
      ops: collectives, in order.
      times: number of runs per step.
      dtype: wire dtype.
      kind: kind of the operation that needs them.
      source: source line to report.
      block: identity of the loop body; collectives of different loops are not combined.
    """
    joined: list[int] = []
    for op in ops:
      group_size = shard_count(op.axes, self._sizes)
      if group_size > 1:
        collective = Collective(op.kind, op.axes, group_size, op.bytes, times, 0.0, dtype, kind, source)
        joined.append(self.join(value, collective, block))
    return joined

  def collectives(self) -> list[Collective]:
    """The combined collectives, with the bytes that each sends."""
    return [
      one._replace(wire=one.times * wire(one.kind, one.bytes, one.group))
      for one in super().collectives()
    ]
