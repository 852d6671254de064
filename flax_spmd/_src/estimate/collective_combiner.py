"""Bundling: collectives that do not wait for each other and are of one kind are one, as compilers make them.

Each value knows, as bits of a number, which bundles it waits for. A collective joins the first bundle of its
kind, dtype, axes and block that its operand does not wait for, and that has room: XLA puts no more than 30 MiB
together (`xla_gpu_all_reduce_combine_threshold_bytes` and its like). What comes of it waits for that bundle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from flax_spmd._src.estimate.graph import pieces
from flax_spmd._src.estimate.resharding import Move
from flax_spmd._src.hlo.collectives import Collective, wire

_ROOM = 30 * 2**20


class Bundles:
  """The collectives of a step, together where they may be.

  Args:
    sizes: size per mesh axis.
  """

  def __init__(self, sizes: Mapping[str, int]):
    self._sizes = sizes
    self._found: list[Collective] = []
    self._largest: list[float] = []
    self._open: dict[tuple, list[int]] = {}
    self._waits: dict[int, int] = {}

  def add(
    self, value: int, moves: Sequence[Move], times: int, dtype: str, source: str, block: int
  ) -> None:
    """Collectives on a value, one after the other, that run `times` in a step."""
    for move in moves:
      group = pieces(move.axes, self._sizes)
      if group > 1:
        one = Collective(move.kind, move.axes, group, move.bytes, times, 0.0, dtype, '', source)
        self._join(value, one, block)

  def _join(self, value: int, one: Collective, block: int) -> None:
    waits = self._waits.get(value, 0)
    bundles = self._open.setdefault((one.kind, one.dtype, one.axes, one.times, block), [])
    room = _ROOM / (one.group if one.kind == 'all-gather' else 1) - one.bytes
    number = next(
      (number for number in bundles if not waits >> number & 1 and self._found[number].bytes <= room),
      None,
    )
    if number is None:
      number = len(self._found)
      bundles.append(number)
      self._found.append(one)
      self._largest.append(one.bytes)
    else:
      before = self._found[number]
      named = one if one.bytes > self._largest[number] else before
      self._largest[number] = max(one.bytes, self._largest[number])
      self._found[number] = named._replace(bytes=before.bytes + one.bytes)
    self._waits[value] = waits | 1 << number

  def follow(self, results: Iterable[int], operands: Iterable[int]) -> None:
    """Results of an operation wait for all that its operands wait for."""
    waits = 0
    for value in operands:
      waits |= self._waits.get(value, 0)
    for value in results:
      self._waits[value] = self._waits.get(value, 0) | waits

  def take(self, others: Bundles) -> None:
    """Takes over those of a part of the step that nothing joins any more."""
    self._found += others._found
    self._largest += others._largest

  def collectives(self) -> list[Collective]:
    """All of them, with what each sends."""
    return [one._replace(wire=one.times * wire(one.kind, one.bytes, one.group)) for one in self._found]
