"""Collective combiner: the collectives that an estimate adds; XLA combines independent ones of one kind into one.

An all-gather, reduce-scatter or all-reduce joins the first group of its kind, dtype, axes and block that its operand
does not depend on and that has room left. Dependences are a bit set per value: the groups that it is computed from. XLA's limit is
30 MiB per combined collective (`xla_gpu_all_reduce_combine_threshold_bytes`, and its like for other kinds).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

from flax_spmd._src.estimate.graph import shard_count
from flax_spmd._src.estimate.resharding import CollectiveOp
from flax_spmd._src.hlo.collectives import Collective, wire

LIMIT = 30 * 2**20
_COMBINED = ('all-gather', 'reduce-scatter', 'all-reduce')


class CollectiveCombiner:
  """The collectives of a step, combined where XLA would.

  Args:
    sizes: size per mesh axis.
  """

  def __init__(self, sizes: Mapping[str, int]):
    self._sizes = sizes
    self._combined: list[Collective] = []
    self._largest: list[float] = []  # bytes of the largest member, whose source line the group reports
    self._open: dict[tuple, list[int]] = {}
    self._dependences: dict[Hashable, int] = {}

  def add(
    self,
    value: Hashable,
    ops: Sequence[CollectiveOp],
    times: int,
    dtype: str,
    kind: str,
    source: str,
    block: Hashable,
  ) -> list[int]:
    """Adds collectives that follow each other on one value, and returns the indices of the combined ones.

    Args:
      value: the value, which depends on them afterwards.
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
        joined.append(self._join(value, collective, block))
    return joined

  def _join(self, value: Hashable, one: Collective, block: Hashable) -> int:
    dependences = self._dependences.get(value, 0)
    candidates = self._open.setdefault((one.kind, one.dtype, one.axes, one.times, block), [])
    room = LIMIT / (one.group if one.kind == 'all-gather' else 1) - one.bytes
    fitting = (i for i in candidates if not dependences >> i & 1 and self._combined[i].bytes <= room)
    index = next(fitting, None) if one.kind in _COMBINED else None
    if index is None:
      index = len(self._combined)
      candidates.append(index)
      self._combined.append(one)
      self._largest.append(one.bytes)
    else:
      before = self._combined[index]
      largest = one if one.bytes > self._largest[index] else before
      self._largest[index] = max(one.bytes, self._largest[index])
      self._combined[index] = largest._replace(bytes=before.bytes + one.bytes)
    self._dependences[value] = dependences | 1 << index
    return index

  def add_dependences(self, results: Iterable[Hashable], operands: Iterable[Hashable]) -> None:
    """Makes the results of an operation depend on all collectives that its operands depend on."""
    dependences = self.dependences(operands)
    for value in results if dependences else ():
      self._dependences[value] = self._dependences.get(value, 0) | dependences

  def key(self, index: int) -> tuple[str, str, tuple[str, ...]]:
    """The kind, dtype and axes of a combined collective."""
    one = self._combined[index]
    return one.kind, one.dtype, one.axes

  def dependences(self, values: Iterable[Hashable]) -> int:
    """The combined collectives that values depend on: a bit for each."""
    result = 0
    for value in values:
      result |= self._dependences.get(value, 0)
    return result

  def extend(self, other: CollectiveCombiner) -> None:
    """Adds the collectives of a branch, which combine with no others."""
    self._combined += other._combined
    self._largest += other._largest

  def collectives(self) -> list[Collective]:
    """The combined collectives, with the bytes that each sends."""
    return [
      one._replace(wire=one.times * wire(one.kind, one.bytes, one.group)) for one in self._combined
    ]
