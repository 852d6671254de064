"""Shards from host memory: arrays whose devices may belong to other processes, of which this one may have none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from flax_spmd._src.array_boxes import Box, box_of, whole_box

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


def own_boxes(request: Any) -> list[Box]:
  """The different shards of a request on this process; the whole array if it has no sharding."""
  shape = tuple(request.shape)
  if request.sharding is None:
    return [whole_box(shape)]
  indices = request.sharding.addressable_devices_indices_map(shape).values()
  return list(dict.fromkeys(box_of(index, shape) for index in indices))


def assembled(request: Any, shards: Mapping[Box, np.ndarray]) -> Any:
  """The array that was requested, of its shards on the host."""
  shape, sharding = tuple(request.shape), request.sharding
  if sharding is None:
    return shards[whole_box(shape)]
  if is_elsewhere(sharding):  # JAX asks for one shard of a replicated array even there
    return nowhere(request)
  return jax.make_array_from_callback(
    shape, sharding, lambda index: shards[box_of(index or (), shape)], dtype=request.dtype
  )
