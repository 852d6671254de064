"""Digests of arrays on one process: equal for equal bits, dtype and shape.

A digest has to cost a small part of a training step, which reads every array of a state several times. In
host memory it is therefore no cryptographic hash of all bytes, but one of *block sums*. Each 64-bit word
gets its upper bits mixed into its lower ones and is multiplied by the odd weight of its place in the block;
the products are added modulo 2**64. Every change of a single word is detected. Any other change goes
undetected with a probability of about 2**-32 or less. That is for faults, and not for an opponent.

Arrays on accelerators are added up there by `mixed_sums`, and a single number is transferred.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from flax_spmd._src.data.mixed_sums import on_devices

_BLOCK = 1 << 14  # words of 8 bytes; the block and its copy fit into a cache
_SHIFT = np.uint64(33)  # not 32: two signs that change in one word would cancel
_SMALL = 1 << 12  # bytes; hashed as they are


def digests(arrays: Sequence[Any]) -> list[str]:
  """A digest per array, as hexadecimal digits.

  Args:
    arrays: numpy arrays, or JAX arrays on a single device of this process; no PRNG key arrays.

  Example:
    >>> one, same, other = digests([np.arange(3), np.arange(3), np.arange(4)])
    >>> one, one == same, one == other
    ('ce0618b9f29b48dd', True, False)
  """
  totals: dict[int, Any] = {}
  for at, array in enumerate(arrays):
    if not _is_on_host(array):
      totals[at] = on_devices(array) if array.nbytes > _SMALL else array
  received = dict(zip(totals, jax.device_get(list(totals.values())), strict=True))
  return [
    f'{int(received[at]):08x}'
    if at in received and array.nbytes > _SMALL
    else _host_digest(np.asarray(received.get(at, array)))
    for at, array in enumerate(arrays)
  ]


def _is_on_host(array: Any) -> bool:
  return not isinstance(array, jax.Array) or all(device.platform == 'cpu' for device in array.devices())


def _host_digest(array: np.ndarray) -> str:
  content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
  total = hashlib.blake2b(_head(array.dtype, array.shape), digest_size=8)
  words = content[: content.size // 8 * 8].view(np.uint64) if content.size > _SMALL else _NO_WORDS
  total.update(_block_sums(words).data)
  total.update(content[8 * words.size :].data)
  return total.hexdigest()


@functools.lru_cache(maxsize=4096)
def _head(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
  return f'{dtype}{shape}'.encode()


_NO_WORDS = np.empty(0, np.uint64)


def _block_sums(words: np.ndarray) -> np.ndarray:
  sums = np.empty(-(-words.size // _BLOCK), np.uint64)
  mixed = np.empty(min(words.size, _BLOCK), np.uint64)
  for number in range(sums.size):
    block = words[number * _BLOCK : (number + 1) * _BLOCK]
    out = np.right_shift(block, _SHIFT, out=mixed[: block.size])
    np.bitwise_xor(out, block, out=out)
    sums[number] = np.einsum('i,i->', out, _weights()[: block.size])
  return sums


@functools.cache
def _weights() -> np.ndarray:
  """Odd pseudorandom weights: the finalizer of SplitMix64 (Steele, Lea, Flood 2014) of each place."""
  words = np.arange(1, _BLOCK + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
  for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
    words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
  return (words ^ (words >> np.uint64(31))) | np.uint64(1)
