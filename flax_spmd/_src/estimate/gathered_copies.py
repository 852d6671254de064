"""Gathered copies: arrays that are gathered once and used by several operations, as weights are by both passes.

XLA for GPUs and CPUs gathers an array once for all operations of a block that need it, and keeps the copy from the first to
the last of them: in a step, and in an iteration of a loop, as over microbatches. Values that are not stored are computed again
from the copy, so it is needed as long as they are. Gathers that are combined are made together, before the first of their
uses. Compiled steps with FSDP show it: an embedding of 125 MiB is in the peak of an
LSTM to the byte.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence


class GatheredCopies:
  """The copies of one block, with the operations that use them."""

  def __init__(self) -> None:
    self._uses: dict[tuple[int, Hashable], tuple[int, int, float]] = {}
    self._groups: dict[tuple[int, Hashable], int] = {}

  def add(self, value: int, spec: Hashable, index: int, size: float, group: int = -1) -> None:
    """Adds a use.

    Args:
      value, spec: the array, and the sharding that it is gathered to.
      index: number of the operation that uses it.
      size: bytes of the copy.
      group: number of the combined collective that makes it, with the other copies of that; -1 if it is unknown.
    """
    first, _, size = self._uses.get((value, spec), (index, index, size))
    self._uses[value, spec] = first, index, size
    if group >= 0:
      self._groups[value, spec] = group

  def prolong(self, index: int, until: int) -> None:
    """Keeps the copies that an operation is the last to use until a later one, which it is delayed to."""
    for key, (first, last, size) in self._uses.items():
      if last == index:
        self._uses[key] = first, until, size

  def ending(self, index: int) -> list[tuple[int, float]]:
    """The arrays whose copies an operation is the last to use, with the bytes of these copies."""
    return [(value, size) for (value, _), (_, last, size) in self._uses.items() if last == index]

  def added(self, present: Sequence[float]) -> float:
    """The bytes that the copies add to the peak.

    Args:
      present: memory in bytes during each operation, with the copies that it uses for the first time.

    Example:
      >>> copies, together = GatheredCopies(), GatheredCopies()
      >>> copies.add(7, (), 0, 5.0)
      >>> copies.add(7, (), 3, 5.0)
      >>> copies.added([10.0, 2.0, 9.0, 3.0])
      4.0
      >>> for value, index in ((1, 0), (2, 2)):  # made by one collective, before the first of them is used
      ...   together.add(value, (), index, 5.0, group=0)
      >>> together.added([10.0, 2.0, 9.0])
      5.0
    """
    steps = [0.0] * (len(present) + 2)
    together: dict[int, int] = {}
    for key, group in self._groups.items():
      together[group] = min(self._uses[key][0], together.get(group, len(present)))
    for key, (first, last, size) in self._uses.items():
      made = together.get(self._groups.get(key, -1), first)
      # `present` has it during the first.
      spans = ((made, first), (first + 1, last + 1)) if size > 0 else ()
      for start, end in spans:
        steps[start] += size
        steps[end] -= size
    kept = itertools.accumulate(steps)
    return max(map(sum, zip(present, kept)), default=0.0) - max(present, default=0.0)
