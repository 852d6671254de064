"""Doubts: places where a compiler could choose otherwise, each with the most that its choice could change.

A doubt counts by its bound: the bytes on the wire, the memory and the FLOPs of the costliest alternative, which gathers
the arrays of the operation whole. An estimate is in doubt if all of its doubts together could change it by more than
the accuracy that estimates have without one.

    doubts = Doubts()
    doubts.add('model.py:31', 'slice along a sharded dimension', Bound(wire=2**20))
    doubts.texts(wire=2**30, memory=2**30, flops=1e12)      # (): a thousandth of the traffic
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from flax_spmd._src.estimate.graph import GraphValue, Spec, shard_count, shard_size
from flax_spmd._src.text import size_text

UNCHECKED = (
  'the step is not partitioned: memory can be off by half, and traffic by a third, where a model is written in another way than '
  'those that estimates were compared for'
)
"""The doubt about every estimate whose step no compiler partitions, until a search compares it with compiled layouts."""
_WIRE, _MEMORY, _FLOPS = 0.05, 0.05, 0.01  # shares of a step's costs; doubts below them do not matter
_LISTED = 0.01  # share of all doubts; those below it are not listed
_LEAST = 2**14  # bytes on the wire; a step with less counts as this much


class Bound(NamedTuple):
  """The most that a choice of the compiler could change, on one device.

  Attributes:
    wire: bytes on the wire.
    memory: bytes of memory.
    flops: FLOPs.
  """

  wire: float = 0.0
  memory: float = 0.0
  flops: float = 0.0

  def plus(self, other: Bound) -> Bound:
    return Bound(self.wire + other.wire, max(self.memory, other.memory), self.flops + other.flops)


UNBOUNDED = Bound(math.inf, math.inf)


def particular(doubts: Iterable[str]) -> tuple[str, ...]:
  """The doubts about a step and its layout, without that about every estimate."""
  return tuple(one for one in doubts if not one.startswith(UNCHECKED))


def gathered(value: GraphValue, spec: Spec, sizes: Mapping[str, int], times: int) -> Bound:
  """The bound of an array that may be gathered whole in every run.

  Example:
    >>> gathered(GraphValue((8, 8), 'f32'), (('data',), ()), {'data': 4}, 2)
    Bound(wire=384.0, memory=192.0, flops=0.0)
  """
  whole = math.prod(value.shape) * value.itemsize
  shards = math.prod(shard_count(axes, sizes) for axes in spec)
  added = whole - shard_size(value.shape, spec, sizes) * value.itemsize
  return Bound(times * whole * (1 - 1 / shards), max(0.0, added))


class Doubts:
  """The doubts of one estimate."""

  def __init__(self) -> None:
    self._bounds: dict[str, Bound] = {}
    self._kept: dict[str, float] = {}  # memory of those whose arrays are kept, as for a backward pass

  def add(self, source: str, reason: str, bound: Bound) -> None:
    """Adds a doubt; the bounds of equal ones are added."""
    text = f'{source}: {reason}'
    self._bounds[text] = self._bounds.get(text, Bound()).plus(bound)

  def add_kept(self, source: str, reason: str, memory: float) -> None:
    """Adds a doubt about arrays in bytes that may be in memory with those of all other such doubts."""
    text = f'{source}: {reason}'
    self._kept[text] = self._kept.get(text, 0.0) + memory

  def unbounded(self) -> tuple[str, ...]:
    """One line for each doubt that could change anything."""
    return tuple(text for text, bound in self._bounds.items() if math.isinf(bound.wire))

  def texts(self, wire: float, memory: float, flops: float) -> tuple[str, ...]:
    """One line per doubt, largest first; none if they cannot matter together.

    Args:
      wire: bytes that each device sends in the step.
      memory: peak memory in bytes.
      flops: FLOPs on each device.
    """
    bounds = self._bounds | {text: Bound(memory=memory) for text, memory in self._kept.items()}
    total = Bound()
    for bound in bounds.values():
      total = total.plus(bound)
    total = total._replace(memory=max(total.memory, sum(self._kept.values())))
    is_small = total.wire <= _WIRE * max(wire, _LEAST) and total.memory <= _MEMORY * memory
    if is_small and total.flops <= _FLOPS * flops:
      return ()
    largest = sorted(bounds.items(), key=lambda item: (-item[1].wire, -item[1].memory))
    matter = [
      (text, bound)
      for text, bound in largest
      if bound.wire >= _LISTED * total.wire > 0
      or bound.memory >= _LISTED * total.memory > 0
      or bound.flops >= _LISTED * total.flops > 0
    ]
    return tuple(text + _extent(bound) for text, bound in matter)


def _extent(bound: Bound) -> str:
  if math.isinf(bound.wire) or math.isinf(bound.memory):
    return ''
  if bound.wire:
    return f', by up to {size_text(bound.wire)} on the wire'
  return f', by about {size_text(bound.memory)} of memory'
