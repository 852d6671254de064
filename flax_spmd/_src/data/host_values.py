"""Values that every process holds, as arrays on the devices of several processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from flax_spmd._src.compat import from_shards


def put(values: Sequence[Any], shardings: Sequence[Sharding]) -> list[jax.Array]:
  """Values on the devices of shardings; each process has the whole values or, of arrays of all processes, its shards.

  `jax.device_put` would compare the values of the processes, once for each, and refuses keys and devices of which
  this process has none.
  """
  if all(sharding.is_fully_addressable for sharding in shardings):
    return jax.device_put(list(values), list(shardings))
  return [_put(value, sharding) for value, sharding in zip(values, shardings, strict=True)]


def placed(value: Any, sharding: Sharding | None) -> Any:
  """A value on the devices of a sharding, as `put`; without one, as it is."""
  return value if sharding is None else put([value], [sharding])[0]


def _put(value: Any, sharding: Sharding) -> jax.Array:
  if sharding.is_fully_addressable or not getattr(value, 'is_fully_addressable', True):
    return jax.device_put(value, sharding)
  like = jax.typeof(value)
  if not jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
    value = np.asarray(value)
  shards = [
    jax.device_put(value[index], SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
    for device, index in sharding.addressable_devices_indices_map(like.shape).items()
  ]
  return from_shards(like, sharding, shards)
