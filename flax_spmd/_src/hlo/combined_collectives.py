"""Combined collectives: XLA combines independent collectives of one kind into one.

An all-gather, reduce-scatter or all-reduce joins the first group of its kind, dtype, axes and block that its operand
does not depend on and that has room left. Dependences are a bit set per value: the groups that it is computed from. XLA's limit is
30 MiB per combined collective (`xla_gpu_all_reduce_combine_threshold_bytes`, and its like for other kinds).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from flax_spmd._src.hlo.collectives import Collective

LIMIT = 30 * 2**20
_COMBINED = ('all-gather', 'reduce-scatter', 'all-reduce')


class CombinedCollectives:
  """The collectives of a program, combined where XLA would."""

  def __init__(self) -> None:
    self._combined: list[Collective] = []
    self._largest: list[float] = []  # bytes of the largest member, whose source line the group reports
    self._open: dict[tuple, list[int]] = {}
    self._dependences: dict[Hashable, int] = {}

  def join(self, value: Hashable, one: Collective, block: Hashable = 0) -> int:
    """Adds a collective of a value, and returns the index of the combined one that it joins.

    Args:
      value: the operand, which depends on the collective afterwards.
      one: the collective.
      block: identity of the loop body; collectives of different loops are not combined.
    """
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
      self._combined[index] = largest._replace(
        bytes=before.bytes + one.bytes, wire=before.wire + one.wire
      )
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

  def extend(self, other: CombinedCollectives) -> None:
    """Adds the collectives of a branch, which combine with no others."""
    self._combined += other._combined
    self._largest += other._largest

  def collectives(self) -> list[Collective]:
    """The combined collectives."""
    return list(self._combined)
