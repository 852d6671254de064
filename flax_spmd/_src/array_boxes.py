"""Boxes: parts of arrays, as a range of indices in each dimension.

    box = box_of(shard.index, array.shape)     # ((0, 4), (8, 16))
    boxes_of(sharding, shape)[device]

Copies of a shard on several devices have equal boxes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

Box: TypeAlias = tuple[tuple[int, int], ...]  # begin and end in each dimension


def box_of(index: Any, shape: tuple[int, ...]) -> Box:
  """The box of an index of JAX, which has a slice for each dimension.

  Example:
    >>> box_of((slice(0, 4), slice(None)), (8, 16))
    ((0, 4), (0, 16))
  """
  return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def whole_box(shape: tuple[int, ...]) -> Box:
  """The box of all elements of an array."""
  return tuple((0, size) for size in shape)


@functools.lru_cache(maxsize=4096)
def boxes_of(sharding: Any, shape: tuple[int, ...]) -> Mapping[Any, Box]:
  """The box of each device."""
  return {device: box_of(index, shape) for device, index in sharding.devices_indices_map(shape).items()}


def overlap(one: Box, other: Box) -> Box | None:
  """The common part of two boxes; None if it is empty.

  Example:
    >>> overlap(((0, 4), (0, 16)), ((2, 8), (0, 8))), overlap(((0, 4),), ((4, 8),))
    (((2, 4), (0, 8)), None)
  """
  found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
  return found if all(begin < end for begin, end in found) else None


def within(box: Box, outer: Box) -> tuple[Any, ...]:
  """The index of a box in an array of another one that contains it. It selects an array, of rank 0 too."""
  ranges = zip(box, outer, strict=True)
  return (*(slice(begin - first, end - first) for (begin, end), (first, _) in ranges), ...)


def volume(box: Box | None) -> int:
  """The number of elements of a box."""
  return 0 if box is None else math.prod(end - begin for begin, end in box)
