"""Gathered copies: arrays that are gathered once and used by several operations, as weights are by both passes.

XLA for GPUs and CPUs gathers an array once for all operations of a block that need it, and keeps the copy from the first to
the last of them: in a step, and in an iteration of a loop, as over microbatches. Values that are not stored are computed again
from the copy, so it is needed as long as they are. Compiled steps with FSDP show it: an embedding of 125 MiB is in the peak of an
LSTM to the byte.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from flax_spmd._src.estimate.graph import Spec


class GatheredCopies:
  """The copies of one block, with the operations that use them."""

  def __init__(self) -> None:
    self._uses: dict[tuple[int, Spec], tuple[int, int, float]] = {}

  def add(self, value: int, spec: Spec, index: int, size: float) -> None:
    """Adds a use.

    Args:
      value, spec: the array, and the sharding that it is gathered to.
      index: number of the operation that uses it.
      size: bytes of the copy.
    """
    first, _, size = self._uses.get((value, spec), (index, index, size))
    self._uses[value, spec] = first, index, size

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
      >>> copies = GatheredCopies()
      >>> copies.add(7, (), 0, 5.0)
      >>> copies.add(7, (), 3, 5.0)
      >>> copies.added([10.0, 2.0, 9.0, 3.0])
      4.0
    """
    steps = [0.0] * (len(present) + 2)
    for first, last, size in self._uses.values():
      if size > 0 and last > first:
        steps[first + 1] += size
        steps[last + 1] -= size
    kept = itertools.accumulate(steps)
    return max(map(sum, zip(present, kept)), default=0.0) - max(present, default=0.0)
