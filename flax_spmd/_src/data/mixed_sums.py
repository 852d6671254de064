"""Mixed sums: the checksums of arrays in checkpoints of earlier versions, which have no name before their digits.

Each word of an array (an element's bits, 32 at a time) is mixed with its index in the whole array, and
the mixed words are added modulo 2**32. Addition is order-independent, so each device or process adds up
its own shards. For a given index the mixing is one-to-one, so every change of a single word is detected.
Any other change goes undetected with probability 2**-32; two flipped signs, the worst pair, with 2**-28.

The mixer is the finalizer of MurmurHash3 (Austin Appleby), complete. Without its first shift, the highest
bit, the sign of a float, would reach too few other bits: one exchange of x and -x in 2,000 would go
undetected.

Checkpoints are compared with them on the host. Values of several processes are compared by the same sums on accelerators.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_spmd._src.data.array_parts import ArrayBox, over_processes, own_host_parts
from flax_spmd._src.data.words import array_of, device_words, widened
from flax_spmd._src.worker_threads import map_in_threads

_GOLDEN = 0x9E3779B9  # 2**32 / golden ratio: spreads consecutive indices
_MIXER = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))  # shift, then multiply
_LAST = 16  # shift
_MASK = 0xFFFFFFFF
_FIRST = np.zeros(1, np.uint32)
_BLOCK = 1 << 17  # elements: fits into a cache, and numpy releases the interpreter lock for a while


def mixed_sums(leaves: Sequence[Any], topic: str | None) -> list[str]:
  """The sum of each array or Python number, as eight hexadecimal digits.

  In a job of several processes, every process calls this with the same arrays.

  Args:
    leaves: arrays of any dtype and sharding, and Python numbers.
    topic: key of the exchange between processes; None if this process holds all of each leaf.
  """
  arrays = [array_of(leaf) for leaf in leaves]

  def own_sum(array: Any) -> int:
    parts = own_host_parts(array, topic is None)
    return sum(_part_sum(part, array.shape) for part in parts) & _MASK

  sums = map_in_threads(own_sum, arrays, os.cpu_count() or 1)
  total = over_processes(sums, topic, lambda one, two: (one + two) & _MASK)
  return [f'{one:08x}' for one in total]


def _part_sum(part: ArrayBox, whole: Sequence[int]) -> int:
  """The sum of the mixed words of a part of an array with the shape `whole`, a block of rows at a time."""
  if not part.data.size:
    return 0
  size = part.data.dtype.itemsize
  each = max(1, size // 4)
  words = np.ascontiguousarray(part.data).reshape(-1).view(f'u{min(size, 4)}')
  shape, lengths, start = [*part.data.shape, each], [*whole, each], [*part.start, 0]
  along = [
    (np.arange(first, first + count, dtype=np.uint64) * np.uint64(math.prod(lengths[d + 1 :]) & _MASK))
    for d, (count, first) in enumerate(zip(shape, start, strict=True))
  ]
  rows, *inner = (one.astype(np.uint32) for one in along)
  indices = functools.reduce(lambda outer, one: np.add.outer(outer, one).reshape(-1), inner, _FIRST)
  height = max(1, _BLOCK // indices.size)
  table = words.reshape(len(rows), -1)
  total = 0
  for top in range(0, len(rows), height):
    index = rows[top : top + height, None] + indices
    total += int(_mixed(index * np.uint32(_GOLDEN) ^ table[top : top + height]).sum(dtype=np.uint32))
  return total


def _mixed(words: Any) -> Any:
  for shift, factor in _MIXER:
    words = (words ^ (words >> np.uint32(shift))) * np.uint32(factor)
  return words ^ (words >> np.uint32(_LAST))


@jax.jit
def on_devices(array: jax.Array) -> jax.Array:
  """The sum of an array as a uint32, computed on the array's own devices."""
  words, _ = device_words(widened(array, jnp))
  index = jnp.zeros(words.shape, jnp.uint32)
  for d, size in enumerate(words.shape):
    stride = math.prod(words.shape[d + 1 :]) & _MASK
    index += jax.lax.broadcasted_iota(jnp.uint32, words.shape, d) * jnp.uint32(stride) if size > 1 else 0
  return jnp.sum(_mixed((index * jnp.uint32(_GOLDEN)) ^ words), dtype=jnp.uint32)
