"""Words: the bits of arrays, as checksums see them on the host and on accelerators."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_NARROW = {f'{sign}int{bits}' for sign in ('', 'u') for bits in (1, 2, 4)}
_ON_HOST = {'pinned_host', 'unpinned_host'}


def array_of(leaf: Any) -> Any:
  """The array of a leaf: of random keys, the numbers; of a Python number, a numpy array."""
  if isinstance(leaf, jax.Array):
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
  return np.asarray(leaf)


def is_on_host(array: Any) -> bool:
  """Whether an array is in the memory of hosts."""
  if isinstance(array, np.ndarray) or array.sharding.memory_kind in _ON_HOST:
    return True
  return all(device.platform == 'cpu' for device in array.sharding.device_set)


def widened(data: Any, xp: Any) -> Any:
  """Elements of less than a byte as bytes: host and device pack them differently.

  Args:
    data: array.
    xp: numpy or jax.numpy, whichever the array is of.
  """
  name = str(data.dtype)
  if name == 'bool':
    return data.astype(xp.uint8)
  if name in _NARROW:
    return data.astype(xp.uint8 if name.startswith('u') else xp.int8)
  return data.astype(xp.float32) if name.startswith('float4') else data


def device_words(data: jax.Array) -> tuple[jax.Array, int]:
  """The words of an array on devices, in the order of their addresses on the host.

  Args:
    data: array; its elements have whole bytes.

  Returns:
    The words as uint32, those of a wide element along one more dimension; and the bits of a word: 8, 16 or 32.
  """
  if jnp.issubdtype(data.dtype, jnp.complexfloating):
    parts = [device_words(part)[0] for part in (data.real, data.imag)]
    wide = data.dtype.itemsize == 16
    return jnp.concatenate(parts, axis=-1) if wide else jnp.stack(parts, axis=-1), 32
  bits = min(8 * data.dtype.itemsize, 32)
  kind = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[bits]
  return jax.lax.bitcast_convert_type(data, kind).astype(jnp.uint32), bits
