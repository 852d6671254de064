"""Shards from host memory: arrays whose devices may belong to other processes, of which this one may have none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding


def is_elsewhere(sharding: Sharding | None) -> bool:
  """Whether no device of a sharding belongs to this process."""
  return sharding is not None and not sharding.addressable_devices


def nowhere(array: Any) -> jax.Array:
  """An array of the shape, dtype and sharding of another, without a shard on this process."""
  return jax.make_array_from_single_device_arrays(
    tuple(array.shape), array.sharding, [], dtype=array.dtype
  )


def from_callback(
  shape: Sequence[int], dtype: Any, sharding: Sharding, shard: Callable[[Any], np.ndarray]
) -> jax.Array:
  """An array of shards on the host. JAX asks for one shard of a replicated array even where no device is.

  Args:
    shape, dtype, sharding: those of the array.
    shard: function from the index of a shard to its values.
  """
  if is_elsewhere(sharding):
    return nowhere(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))
  return jax.make_array_from_callback(tuple(shape), sharding, shard, dtype=dtype)


def put(values: Sequence[Any], shardings: Sequence[Sharding]) -> list[jax.Array]:
  """Arrays that every process holds on its host, on the devices of all.

  `jax.device_put` would compare them between all processes, and refuses devices of which this process has none.
  """
  if all(sharding.is_fully_addressable for sharding in shardings):
    return jax.device_put(list(values), list(shardings))
  return [_put(value, sharding) for value, sharding in zip(values, shardings, strict=True)]


def _put(value: Any, sharding: Sharding) -> jax.Array:
  if not jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
    return from_callback(value.shape, value.dtype, sharding, lambda index: value[index])
  if is_elsewhere(sharding):
    return nowhere(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding))
  numbers = np.asarray(jax.random.key_data(value))
  shards = [
    jax.device_put(jax.random.wrap_key_data(numbers[index], impl=jax.random.key_impl(value)), device)
    for device, index in sharding.addressable_devices_indices_map(value.shape).items()
  ]
  return jax.make_array_from_single_device_arrays(value.shape, sharding, shards, dtype=value.dtype)
