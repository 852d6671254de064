"""Placements of routes: where the saved arrays of a stacked, split or transposed leaf are in the memory of its shards.

A conversion that changes no element is a view of its result: the leaf `stack of [W0.T, W1.T]` holds `W1` in
`leaf[1].T`. So a shard is read from the files directly into its memory, and no converted array is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from flax_spmd._src.array_boxes import Box
from flax_spmd._src.checkpoint.matching.arrangements import Rearrangement
from flax_spmd._src.checkpoint.matching.routes import Route, nodes
from flax_spmd._src.checkpoint.storage.record import LeafRecord
from flax_spmd._src.checkpoint.storage.safetensors_reader import Placement

_MOVES = ('same', 'stack', 'unstack', 'move', 'rearrange')


def moves_only(route: Route) -> bool:
  """Whether a route moves elements, and changes none. A rearranged operand is a saved leaf itself."""
  return all(
    node.step in _MOVES and (node.rearrangement is None or node.operands[0].is_source)
    for node in nodes(route)
  )


def placements(
  route: Route, saved: dict[str, LeafRecord], box: Box, memory: np.ndarray
) -> Iterator[Placement]:
  """The saved arrays in a shard of a route's result.

  Args:
    route: a route that only moves elements.
    saved: record of each saved leaf, by path.
    box: the shard.
    memory: its memory, or any view of its shape.

  Raises:
    ValueError: the shard holds no box of a saved array, such as a head and a half of merged heads.
  """
  if route.is_source:
    source = route.sources[0]
    yield Placement(source, saved[source].shape, box, memory)
    return
  axis, operands = route.axis, route.operands
  if route.rearrangement is not None:
    yield _split(operands[0].sources[0], route.rearrangement, box, memory)
  elif route.step == 'stack':
    rest = (*box[:axis], *box[axis + 1 :])
    for layer in range(*box[axis]):
      part = memory[(*(slice(None),) * axis, layer - box[axis][0], ...)]  # of numbers too, a view
      yield from placements(operands[layer], saved, rest, part)
  elif route.step == 'unstack':
    whole = (*box[:axis], (route.layer, route.layer + 1), *box[axis:])
    yield from placements(operands[0], saved, whole, np.expand_dims(memory, axis))
  elif route.step == 'move':
    before = [route.order.index(dim) for dim in range(len(box))]
    yield from placements(
      operands[0], saved, tuple(box[dim] for dim in before), memory.transpose(before)
    )
  else:
    yield from placements(operands[0], saved, box, memory)


def _split(source: str, rearrangement: Rearrangement, box: Box, memory: np.ndarray) -> Placement:
  """The place of a rearranged array, with its dimensions split into their parts."""
  sizes = [rearrangement.split[part] for part in rearrangement.order]
  ranges: list[tuple[int, int]] = []
  for count, (low, high) in zip(rearrangement.groups[1], box, strict=True):
    ranges += _ranges_of_parts(low, high, sizes[len(ranges) : len(ranges) + count])
  parts = memory.reshape([high - low for low, high in ranges])
  before = [rearrangement.order.index(part) for part in range(len(sizes))]
  return Placement(
    source, rearrangement.split, tuple(ranges[part] for part in before), parts.transpose(before)
  )


def _ranges_of_parts(low: int, high: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
  """The range in each part of a merged dimension.

  Example:
    >>> _ranges_of_parts(8, 16, [4, 8]), _ranges_of_parts(2, 4, [4, 8])
    ([(1, 2), (0, 8)], [(0, 1), (2, 4)])

  Raises:
    ValueError: the range is no box of the parts.
  """
  if low == high:
    return [(0, 0)] * len(sizes)
  ranges: list[tuple[int, int]] = []
  for number in range(len(sizes)):
    below = math.prod(sizes[number + 1 :])
    first, last = low // below, (high - 1) // below
    if first == last:
      ranges.append((first, first + 1))
      low, high = low - first * below, high - first * below
    elif low % below or high % below:
      raise ValueError(f'{low} to {high} is no box of {list(sizes)}')
    else:
      return [*ranges, (first, last + 1), *((0, size) for size in sizes[number + 1 :])]
  return ranges
