"""Parts of arrays: the boxes of which each process takes up its own, so that together they are each array once."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from flax_spmd._src.data.words import widened
from flax_spmd._src.multihost import exchange


class ArrayBox(NamedTuple):
  """A box of an array.

  Attributes:
    data: its elements: a numpy array, or an array on one device.
    start: index of its first element in the whole array.
  """

  data: Any
  start: tuple[int, ...]


def own_parts(array: Any, alone: bool) -> list[ArrayBox]:
  """The parts of an array that this process takes up. Each element belongs to one part of one process, or each is alone."""
  if isinstance(array, np.ndarray):
    return [ArrayBox(array, (0,) * array.ndim)] if alone or jax.process_index() == 0 else []
  parts: dict[tuple[int, ...], ArrayBox] = {}
  for shard in array.addressable_shards:
    start = tuple(part.indices(size)[0] for part, size in zip(shard.index, array.shape, strict=True))
    if shard.replica_id == 0 or (alone and start not in parts):
      parts[start] = ArrayBox(shard.data, start)
  return list(parts.values())


def own_host_parts(array: Any, alone: bool) -> list[ArrayBox]:
  """`own_parts` as numpy arrays, which keep their memory from being donated; narrow elements are widened."""
  return [ArrayBox(widened(np.asarray(data), np), start) for data, start in own_parts(array, alone)]


def over_processes(values: list[int], topic: str | None, add: Callable[[int, int], int]) -> list[int]:
  """Adds up the values of all processes, each with a number per array; their own ones without a topic."""
  if jax.process_count() == 1 or not values or topic is None:
    return values
  received = exchange(topic, json.dumps(values))
  each: Sequence[list[int]] = [json.loads(text) for processes, text in received for _ in processes]
  return [functools.reduce(add, column) for column in zip(*each, strict=True)]
