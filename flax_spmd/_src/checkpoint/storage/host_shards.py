"""Shards from host memory: arrays whose devices may belong to other processes, of which this one may have none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

_COPY = 'flax_spmd_copy'  # an axis beside those of the user's mesh


def is_elsewhere(sharding: Sharding | None) -> bool:
  """Whether no device of a sharding belongs to this process."""
  return sharding is not None and not sharding.addressable_devices


def nowhere(array: Any) -> jax.Array:
  """An array of the shape, dtype and sharding of another, without a shard on this process."""
  return jax.make_array_from_single_device_arrays(
    tuple(array.shape), array.sharding, [], dtype=array.dtype
  )


def with_copy_elsewhere(array: jax.Array) -> jax.Array:
  """An array of this process alone, as the first of two copies; the second is on devices of other processes.

  Orbax refuses to store an array of one process of several, since it takes it for one that each process has. It
  stores the first copy of an array, and this process holds no part of the second.
  """
  others = [device for device in jax.devices() if device.process_index != jax.process_index()]
  sharding = array.sharding
  if (
    not isinstance(sharding, NamedSharding)
    or array.is_fully_replicated
    or sharding.mesh.size > len(others)
  ):
    [first, *_] = sorted(sharding.device_set, key=lambda device: device.id)
    array = jax.device_put(array, SingleDeviceSharding(first, memory_kind=sharding.memory_kind))
    devices, names, spec = np.array([first, others[0]]), (_COPY,), PartitionSpec()
  else:
    own = np.asarray(sharding.mesh.devices)
    devices = np.stack([own, np.array(others[: own.size]).reshape(own.shape)])
    names, spec = (_COPY, *sharding.mesh.axis_names), sharding.spec
  shards = [shard.data for shard in array.addressable_shards]
  joint = NamedSharding(Mesh(devices, names), spec, memory_kind=sharding.memory_kind)
  return jax.make_array_from_single_device_arrays(array.shape, joint, shards, dtype=array.dtype)


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
