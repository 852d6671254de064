"""Mixed sums: the checksums of arrays in checkpoints of earlier versions, which have no name before their digits.

Each word of an array (an element's bits, 32 at a time) is mixed with its index in the whole array, and
the mixed words are added modulo 2**32. Addition is order-independent, so each device or process adds up
its own shards. For a given index the mixing is one-to-one, so every change of a single word is detected.
Any other change goes undetected with probability 2**-32; two flipped signs, the worst pair, with 2**-28.

The mixer is the finalizer of MurmurHash3 (Austin Appleby), complete. Without its first shift, the highest
bit, the sign of a float, would reach too few other bits: one exchange of x and -x in 2,000 would go
undetected.

Arrays in host memory are added up by threads on the host, without compiling anything; arrays on
accelerators are added up there. Both give the same sum.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flax_spmd._src.data.words import array_of, device_words, is_on_host, widened
from flax_spmd._src.multihost import CALLS, TIMEOUT, exchange, processes_of

_GOLDEN = 0x9E3779B9  # 2**32 / golden ratio: spreads consecutive indices
_MIXER = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))  # shift, then multiply
_LAST = 16  # shift
_MASK = 0xFFFFFFFF
_BLOCK = 1 << 17  # words: fits into a cache, and numpy releases the interpreter lock for a while
_SMALL = 1 << 14  # bytes: JAX caches the host copy of an array, so it should be small
_BATCH = 1 << 10  # small arrays


def mixed_sums(leaves: Sequence[Any], topic: str | None) -> list[str]:
  """The sum of each array or Python number, as eight hexadecimal digits.

  In a job of several processes, every process calls this with the same arrays.

  Args:
    leaves: arrays of any dtype and sharding, and Python numbers.
    topic: key of the exchange between processes; None if this process holds all of each leaf.
  """
  arrays = [array_of(leaf) for leaf in leaves]
  on_host = [i for i, array in enumerate(arrays) if is_on_host(array)]
  on_device = sorted(set(range(len(arrays))) - set(on_host))
  totals = {i: on_devices(arrays[i]) for i in on_device if arrays[i].sharding.addressable_devices}
  elsewhere = [i for i in on_device if topic is not None and not _has_devices_of_all(arrays[i])]
  host_sums = _host_sums([arrays[i] for i in on_host], topic)
  sums = dict.fromkeys(on_device, 0) | dict(zip(totals, map(int, jax.device_get([*totals.values()]))))
  own = [sums[i] if _is_first(arrays[i]) else 0 for i in elsewhere]
  shared = _over_processes([*host_sums, *own], topic)
  sums |= dict(zip([*on_host, *elsewhere], shared, strict=True))
  return [f'{sums[i]:08x}' for i in range(len(arrays))]


def _has_devices_of_all(array: Any) -> bool:
  """Whether every process has devices of an array, and so computes its sum."""
  return len(processes_of([array.sharding])) == jax.process_count()


def _over_processes(sums: list[int], topic: str | None) -> list[int]:
  """Adds up the sums of all processes."""
  if jax.process_count() == 1 or not sums or topic is None:
    return sums
  received = exchange(topic, tuple(range(jax.process_count())), json.dumps(sums), CALLS, TIMEOUT)
  parts = [[len(processes) * part for part in json.loads(text)] for processes, text in received]
  return [sum(column) & _MASK for column in zip(*parts, strict=True)]


# -- in host memory


def _host_sums(arrays: Sequence[Any], topic: str | None) -> list[int]:
  """The sums of arrays in host memory, over the shards of this process."""
  sums = [0] * len(arrays)
  small = [i for i, array in enumerate(arrays) if _is_small(array)]
  alone = topic is None
  owned = [i for i in small if alone or _is_first(arrays[i])]
  whole = jax.device_get([arrays[i] for i in owned])  # one call for all: far cheaper than one for each
  for i, total in zip(owned, _small_sums(whole), strict=True):
    sums[i] = total
  slabs = [(i, slab) for i in set(range(len(arrays))) - set(small) for slab in _slabs(arrays[i], alone)]
  with ThreadPoolExecutor(os.cpu_count()) as pool:
    for (i, _), part in zip(slabs, pool.map(lambda pair: _sum(pair[1]), slabs), strict=True):
      sums[i] = (sums[i] + part) & _MASK
  return sums


def _is_small(array: Any) -> bool:
  """Whether an array is addressable, and cheaper to sum as a whole than shard by shard."""
  addressable = isinstance(array, np.ndarray) or array.is_fully_addressable
  return addressable and math.prod(array.shape) * array.dtype.itemsize <= _SMALL


def _is_first(array: Any) -> bool:
  """Whether this process adds up an array that several processes may hold."""
  if isinstance(array, np.ndarray):
    return jax.process_index() == 0
  return jax.process_index() == min(device.process_index for device in array.sharding.device_set)


def _small_sums(arrays: Sequence[np.ndarray]) -> list[int]:
  """The sums of many whole arrays, a thousand of one word size at a time."""
  sums = [0] * len(arrays)
  by_size: dict[str, list[tuple[int, np.ndarray]]] = {}
  for i, array in enumerate(arrays):
    words, _ = _host_words(array)
    if words.size:
      by_size.setdefault(words.dtype.str, []).append((i, words))
  for pairs in by_size.values():
    for begin in range(0, len(pairs), _BATCH):
      some = pairs[begin : begin + _BATCH]
      for (i, _), total in zip(some, _vector_sums([words for _, words in some]), strict=True):
        sums[i] = total
  return sums


def _vector_sums(words: Sequence[np.ndarray]) -> list[int]:
  """The sum of each of several nonempty vectors of words."""
  sizes = np.array([vector.size for vector in words])
  starts = np.cumsum(sizes) - sizes
  index = (np.arange(sizes.sum()) - np.repeat(starts, sizes)).astype(np.uint32)
  mixed = np.multiply(index, np.uint32(_GOLDEN), out=index)
  _mix(mixed, np.concatenate(words), np.empty_like(mixed))
  return np.add.reduceat(mixed, starts, dtype=np.uint32).tolist()


def _mix(out: np.ndarray, words: np.ndarray, aside: np.ndarray) -> None:
  """Mixes words into `out`, which holds their multiplied indices; `aside` is a scratch buffer."""
  np.bitwise_xor(out, words, out=out)
  for shift, factor in _MIXER:
    np.right_shift(out, np.uint32(shift), out=aside)
    np.bitwise_xor(out, aside, out=out)
    np.multiply(out, np.uint32(factor), out=out)
  np.right_shift(out, np.uint32(_LAST), out=aside)
  np.bitwise_xor(out, aside, out=out)


class _Slab(NamedTuple):
  """A rectangular part of an array.

  Attributes:
    data: elements of the part.
    start: index of its first element in the whole array.
    whole: shape of the whole array.
  """

  data: np.ndarray
  start: tuple[int, ...]
  whole: tuple[int, ...]


def _slabs(array: Any, alone: bool) -> Iterator[_Slab]:
  """The parts of an array that this process adds up. Each element belongs to one part of one process, or each is alone."""
  shape = tuple(array.shape)
  if isinstance(array, np.ndarray):
    if alone or _is_first(array):
      yield _Slab(array, (0,) * array.ndim, shape)
  elif array.is_fully_replicated:
    if alone or _is_first(array):
      yield _Slab(np.asarray(array.addressable_data(0)), (0,) * array.ndim, shape)
  else:
    for shard in array.addressable_shards:
      if shard.replica_id == 0:
        start = tuple(part.indices(size)[0] for part, size in zip(shard.index, shape, strict=True))
        yield _Slab(np.asarray(shard.data), start, shape)


def _sum(slab: _Slab) -> int:
  """The sum of a part's mixed words; numpy releases the interpreter lock while it works."""
  words, start, whole = _rows(slab)
  count, length = words.shape
  width = max(1, min(length, _BLOCK))
  height = max(1, min(count, _BLOCK // width))
  steps = np.arange(width, dtype=np.uint32) * np.uint32(_GOLDEN)
  mixed, shifted = np.empty((height, width), np.uint32), np.empty((height, width), np.uint32)
  total = 0
  for top in range(0, count, height):
    first = _first_indices(top, min(top + height, count), slab, start, whole)
    for left in range(0, length, width):
      block = words[top : top + height, left : left + width]
      out, aside = mixed[: block.shape[0], : block.shape[1]], shifted[: block.shape[0], : block.shape[1]]
      np.add(
        (first + np.uint32(left & _MASK))[:, None] * np.uint32(_GOLDEN), steps[: block.shape[1]], out=out
      )
      _mix(out, block, aside)
      total += int(out.sum(dtype=np.uint32))
  return total & _MASK


def _rows(slab: _Slab) -> tuple[np.ndarray, tuple[int, ...], tuple[int, ...]]:
  """A part as rows of words contiguous in the whole array, the part's start, and the whole's shape."""
  words, per_element = _host_words(slab.data)
  start, whole, shape = [*slab.start, 0], [*slab.whole, per_element], [*slab.data.shape, per_element]
  while len(shape) > 1 and shape[-1] == whole[-1]:  # whole rows are contiguous
    size = whole.pop()
    shape.pop()
    start.pop()
    start[-1], whole[-1], shape[-1] = start[-1] * size, whole[-1] * size, shape[-1] * size
  return words.reshape(-1, shape[-1]) if words.size else words.reshape(0, 1), tuple(start), tuple(whole)


def _first_indices(
  top: int, bottom: int, slab: _Slab, start: tuple[int, ...], whole: tuple[int, ...]
) -> np.ndarray:
  """The index in the whole array, modulo 2**32, of the first word of each row in a range."""
  index = np.full(bottom - top, start[-1], np.uint64)
  leading = slab.data.shape[: len(whole) - 1]
  indices = np.unravel_index(np.arange(top, bottom), leading) if leading else ()
  for d, along in enumerate(indices):
    stride = math.prod(whole[d + 1 :])
    index += (along.astype(np.uint64) + np.uint64(start[d])) * np.uint64(stride)
  return index.astype(np.uint32)


def _host_words(data: np.ndarray) -> tuple[np.ndarray, int]:
  """The bits of an array as unsigned words of at most 32 bits, and the number of words per element."""
  data = np.ascontiguousarray(widened(data, np))
  size = data.dtype.itemsize
  words = data.reshape(-1).view(f'u{min(size, 4)}')
  return words, max(1, size // 4)


# -- on accelerators


@functools.partial(jax.jit)
def on_devices(array: jax.Array) -> jax.Array:
  """The sum of an array as a uint32, computed on the array's own devices."""
  words, _ = device_words(widened(array, jnp))
  index = jnp.zeros(words.shape, jnp.uint32)
  for d, size in enumerate(words.shape):
    stride = math.prod(words.shape[d + 1 :]) & _MASK
    index += jax.lax.broadcasted_iota(jnp.uint32, words.shape, d) * jnp.uint32(stride) if size > 1 else 0
  mixed = (index * jnp.uint32(_GOLDEN)) ^ words
  for shift, factor in _MIXER:
    mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
  mixed ^= mixed >> _LAST
  return jnp.sum(mixed, dtype=jnp.uint32)
