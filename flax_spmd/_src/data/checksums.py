"""Checksums of arrays: the CRC-32C of their bytes in C order, whatever their sharding.

CRCs of parts add up to that of the whole, so each device or process takes up its own shards (see `crc32c`). Every
change within 32 neighbouring bits is detected, and every change of two bits less than 0.2 GB apart. Any other change
goes undetected with probability 2**-32.

Arrays in host memory are taken up by threads on the host, without compiling anything; arrays on accelerators are taken
up there, and only a word per shard is transferred. Both give the same checksum. Checkpoints of earlier versions have
`mixed_sums`, which have no name before their digits.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flax_spmd._src.data.array_parts import ArrayBox, over_processes, own_host_parts, own_parts
from flax_spmd._src.data.crc32c import contracted, extended, followed
from flax_spmd._src.data.mixed_sums import mixed_sums
from flax_spmd._src.data.words import array_of, device_words, is_on_host, widened
from flax_spmd._src.worker_threads import map_in_threads

_FORM = re.compile(r'(crc32c:)?[0-9a-f]{8}')
_NAME = 'crc32c:'
_SMALL = 1 << 14  # bytes: JAX caches the host copy of an array, so it should be small
_BLOCK = 1 << 21  # bytes: fits into a cache
_ONES = 0xFFFFFFFF


def own_checksums(leaves: Sequence[Any], likes: Sequence[str] = ()) -> list[str]:
  """The checksums of leaves that this process holds as a whole. It exchanges nothing with other processes.

  Example:
    >>> x = np.arange(8, dtype=np.float32)
    >>> own_checksums([x, jax.device_put(x, jax.devices()[1])])
    ['crc32c:87a3ed00', 'crc32c:87a3ed00']
  """
  return PendingChecksums(leaves, None, likes).complete()


def is_checksum(text: Any) -> bool:
  """Whether this is a checksum of a known formula."""
  return isinstance(text, str) and _FORM.fullmatch(text) is not None


def formula_of(checksum: str) -> str:
  """The name of a checksum's formula; '' for that of earlier versions."""
  return checksum.rpartition(':')[0]


class PendingChecksums:
  """The checksums of leaves, which may be changed or donated from now on.

  In a job of several processes, every process makes this of the same leaves. Work on accelerators is queued, and arrays
  in host memory are kept. numpy arrays, which can be changed in place, are taken up at once.

  Args:
    leaves: arrays of any dtype and sharding, and Python numbers.
    topic: key of the exchange between processes; None if this process holds all of each leaf.
    likes: recorded checksums to compare with, whose formulas are used; default: CRC-32C. Those of earlier versions
      are taken up at the end.
  """

  def __init__(self, leaves: Sequence[Any], topic: str | None = 'sums', likes: Sequence[str] = ()):
    self._topic = topic
    self._old = {i: leaves[i] for i, like in enumerate(likes) if not formula_of(like)}
    new = [leaf for i, leaf in enumerate(leaves) if i not in self._old]
    self._arrays = arrays = [array_of(leaf) for leaf in new]
    alone = topic is None
    self._states = dict(_small_states(arrays, alone))
    large = [i for i in range(len(arrays)) if i not in self._states]
    on_host = [i for i in large if is_on_host(arrays[i])]
    self._held = {i: own_host_parts(arrays[i], alone) for i in on_host}
    now = {i: self._held.pop(i) for i in on_host if isinstance(arrays[i], np.ndarray)}
    self._states |= _host_states(arrays, now)
    self._queued = {i: _queued(arrays[i], alone) for i in sorted(set(large) - set(on_host))}

  def compute(self) -> None:
    """Takes up the arrays in host memory, in any thread. It exchanges nothing with other processes."""
    self._states |= _host_states(self._arrays, self._held)
    self._held = {}

  def complete(self) -> list[str]:
    """The checksums, after the rest of the work, in any thread. Every process calls this."""
    self.compute()
    found = self._states | _received(self._queued)
    totals = over_processes([found[i] for i in range(len(self._arrays))], self._topic, int.__xor__)
    texts = [_text(state, array) for state, array in zip(totals, self._arrays, strict=True)]
    if self._old:
      for i, text in zip(self._old, mixed_sums(list(self._old.values()), self._topic), strict=True):
        texts.insert(i, text)
    return texts


def _text(state: int, array: Any) -> str:
  bits = 8 * math.prod(array.shape) * _width(array.dtype)
  return f'{_NAME}{state ^ _ones_before(bits) ^ _ONES:08x}'


@functools.lru_cache(maxsize=4096)
def _ones_before(bits: int) -> int:
  """The state of as many zero bits after the first state; most arrays have the size of others."""
  return followed(_ONES, bits)


@functools.cache
def _width(dtype: Any) -> int:
  """Bytes of an element."""
  return widened(np.empty(0, dtype), np).dtype.itemsize


# -- in host memory


def _small_states(arrays: Sequence[Any], alone: bool) -> Iterator[tuple[int, int]]:
  """The states of arrays that are cheaper to fetch, in one call for all, than to take up part by part."""
  small = [
    (i, array)
    for i, array in enumerate(arrays)
    if array.size * array.dtype.itemsize <= _SMALL
    and (isinstance(array, np.ndarray) or array.is_fully_addressable)
  ]
  own = [pair for pair in small if alone or _is_first(pair[1])]
  yield from ((i, 0) for i, _ in small)
  on_devices = [array for _, array in own if not isinstance(array, np.ndarray)]
  fetched = iter(jax.device_get(on_devices))
  for i, array in own:
    whole = array if isinstance(array, np.ndarray) else next(fetched)
    yield i, extended(0, _bytes(widened(whole, np)))


def _is_first(array: Any) -> bool:
  return not isinstance(array, np.ndarray) or jax.process_index() == 0


def _host_states(arrays: Sequence[Any], parts: Mapping[int, list[ArrayBox]]) -> dict[int, int]:
  states = map_in_threads(lambda i: _host_state(parts[i], arrays[i].shape), parts, os.cpu_count() or 1)
  return dict(zip(parts, states, strict=True))


def _host_state(parts: Sequence[ArrayBox], shape: tuple[int, ...]) -> int:
  """The state of an array with zeros in place of the parts that this process does not take up."""
  state = zeros = 0
  for block in _blocks(parts, shape, np.empty(_BLOCK, np.uint8)):
    if isinstance(block, int):
      zeros += block
    else:
      state, zeros = extended(followed(state, 8 * zeros), block), 0
  return followed(state, 8 * zeros)


def _blocks(
  parts: Sequence[ArrayBox], shape: tuple[int, ...], scratch: np.ndarray
) -> Iterator[np.ndarray | int]:
  """The bytes of an array in C order, from its parts; and numbers of bytes that are in none of them.

  Args:
    parts: parts of the array.
    shape: shape of the array.
    scratch: memory for blocks that several parts make.
  """
  if not parts:
    return
  size = math.prod(shape) * parts[0].data.dtype.itemsize
  if _is_whole(parts[0], shape) or size <= _BLOCK or not shape:
    yield _assembled(parts, shape, scratch)
  else:
    row = size // shape[0]
    height = max(1, _BLOCK // row)
    for top in range(0, shape[0], height):
      count = min(height, shape[0] - top)
      some = [cut for part in parts if (cut := _rows(part, top, count)) is not None]
      if not some:
        yield count * row
      elif row <= _BLOCK:
        yield _assembled(some, (count, *shape[1:]), scratch)
      else:
        yield from _blocks([ArrayBox(p.data[0], p.start[1:]) for p in some], shape[1:], scratch)


def _rows(part: ArrayBox, top: int, count: int) -> ArrayBox | None:
  """The part within a range of rows, with its start relative to the first of them."""
  begin, end = max(part.start[0], top), min(part.start[0] + len(part.data), top + count)
  if begin >= end:
    return None
  data = part.data[begin - part.start[0] : end - part.start[0]]
  return ArrayBox(data, (begin - top, *part.start[1:]))


def _is_whole(part: ArrayBox, shape: tuple[int, ...]) -> bool:
  """Whether a part is an array of this shape, in C order."""
  return part.data.shape == shape and part.data.flags.c_contiguous


def _assembled(parts: Sequence[ArrayBox], shape: tuple[int, ...], scratch: np.ndarray) -> np.ndarray:
  """The bytes of an array in C order; a part that is all of it is not copied."""
  if _is_whole(parts[0], shape):
    return _bytes(parts[0].data)
  dtype = parts[0].data.dtype
  size = math.prod(shape) * dtype.itemsize
  raw = scratch[:size] if size <= scratch.size else np.empty(size, np.uint8)
  if sum(part.data.nbytes for part in parts) < size:
    raw[:] = 0
  whole = raw.view(dtype).reshape(shape)
  for data, start in parts:
    whole[tuple(slice(at, at + length) for at, length in zip(start, data.shape, strict=True))] = data
  return raw


def _bytes(data: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


# -- on accelerators


class _Queued(NamedTuple):
  """States of parts that accelerators compute.

  Attributes:
    states: uint32, one per part.
    bits: number of bits that follow each part.
  """

  states: Any
  bits: list[int]


def _queued(array: Any, alone: bool) -> list[_Queued]:
  parts = own_parts(array, alone)
  if not parts or not array.size:
    return []
  shape, ends = array.shape, parts[0].data.shape
  strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
  width = 8 * _width(array.dtype)
  bits = [
    width * sum((n - at - k) * s for n, at, k, s in zip(shape, start, ends, strides, strict=True))
    + min(width, 32)
    for _, start in parts
  ]
  return [_Queued(_computed([data for data, _ in parts], shape), bits)]


def _computed(parts: Sequence[jax.Array], whole: tuple[int, ...]) -> jax.Array:
  """`part_states` of parts on several devices, on a mesh of its own: another one may be in force."""
  devices = np.array([device for part in parts for device in part.devices()])
  shape, axes = parts[0].shape, ['parts'] if parts[0].ndim else []
  mesh = jax.sharding.Mesh(devices, 'parts')
  over_parts = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
  together = jax.make_array_from_single_device_arrays(
    (len(parts) * shape[0], *shape[1:]) if shape else (), over_parts, list(parts)
  )
  with jax.set_mesh(mesh):
    return part_states(together, len(parts), whole)


@functools.partial(jax.jit, static_argnums=(1, 2))
def part_states(parts: jax.Array, count: int, whole: tuple[int, ...]) -> jax.Array:
  """The state of each part, up to the bits of its last word and those that follow it, on the part's own device.

  Args:
    parts: parts of the same shape, one after another along the first dimension.
    count: their number.
    whole: shape of the array that they are parts of.

  Returns:
    uint32[count].
  """
  words, bits = device_words(widened(parts, jnp))
  each = list(words.shape[parts.ndim :])
  shape = [*parts.shape, *each]
  lengths = [*whole, *each]
  if parts.ndim:
    shape[0] //= count
  while len(shape) > 1 and shape[-1] == lengths[-1]:  # whole rows are contiguous
    last, length = shape.pop(), lengths.pop()
    shape[-1], lengths[-1] = shape[-1] * last, lengths[-1] * length
  states = words.reshape(count, *shape)
  low = bits
  for d in reversed(range(len(shape))):
    states = contracted(states, bits * math.prod(lengths[d + 1 :]), low, jnp)
    low = 32
  return states


def _received(queued: dict[int, list[_Queued]]) -> dict[int, int]:
  """The states of arrays, from those of their parts."""
  received = jax.device_get({i: [one.states for one in some] for i, some in queued.items()})
  found = {}
  for i, some in queued.items():
    pairs = [
      (int(s), b) for one, own in zip(some, received[i], strict=True) for s, b in zip(own, one.bits)
    ]
    found[i] = functools.reduce(int.__xor__, (followed(state, bits) for state, bits in pairs), 0)
  return found
