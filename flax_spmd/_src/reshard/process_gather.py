"""Process gather: the slices of an array on the host, where they are on devices of other processes.

    gather = gather_of(sharding, shape, dtype, most)   # compiles nothing
    gather.pieces(array, needed)                       # called by every process of the array

A program gathers some elements of every distinct shard at a time, so that each device holds at most `most` bytes beside the
array. The host keeps the shards that it needs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.array_boxes import Box, boxes_of, overlap, volume


class ProcessGather(NamedTuple):
  """The gather of one kind of array.

  Attributes:
    sharding: sharding of the array, on a mesh with Auto axes.
    shape, dtype: of the array.
    axes: the mesh axes that shard it.
    part: number of elements of each shard that are gathered at a time.
  """

  sharding: NamedSharding
  shape: tuple[int, ...]
  dtype: Any
  axes: tuple[str, ...]
  part: int

  @property
  def shards(self) -> int:
    """The number of distinct shards."""
    return math.prod(self.sharding.mesh.shape[axis] for axis in self.axes)

  @property
  def temporary(self) -> int:
    """Bytes on each device beside the array."""
    return (self.shards + 1) * self.part * self.dtype.itemsize

  @property
  def wire(self) -> int:
    """Bytes that all devices receive."""
    shard = math.prod(self.sharding.shard_shape(self.shape)) * self.dtype.itemsize
    return self.sharding.num_devices * (self.shards - 1) * shard

  def pieces(self, array: jax.Array, needed: Collection[Box]) -> dict[Box, np.ndarray]:
    """The distinct shards that overlap with some slices."""
    local = self.sharding.shard_shape(self.shape)
    kept = {
      slot: (index, np.empty(math.prod(local), self.dtype))
      for slot, index in enumerate(self._indices())
      if any(overlap(index, one) is not None for one in needed)
    }
    size, program = math.prod(local), _program(self)
    for start in range(0, size, self.part):
      start = min(start, size - self.part)
      gathered = np.asarray(program(array, np.uint32(start)).addressable_data(0))
      for slot, (_, buffer) in kept.items():
        buffer[start : start + self.part] = gathered[slot]
    return {index: buffer.reshape(local) for index, buffer in kept.values()}

  def _indices(self) -> Iterator[Box]:
    """The slice of each distinct shard, in the order in which they are gathered."""
    mesh, found = self.sharding.mesh, boxes_of(self.sharding, self.shape)
    sizes = [mesh.shape[axis] if axis in self.axes else 1 for axis in mesh.axis_names]
    for position in np.ndindex(*sizes):
      yield found[np.asarray(mesh.devices)[position]]


def gather_of(sharding: NamedSharding, shape: tuple[int, ...], dtype: Any, most: int) -> ProcessGather:
  """The gather of an array.

  Args:
    sharding: its sharding, on a mesh with Auto axes.
    shape, dtype: its shape and dtype.
    most: bytes that a device may hold beside the array.
  """
  entries = [each if isinstance(each, tuple) else (each,) for each in sharding.spec]
  used = {axis for entry in entries for axis in entry}
  axes = tuple(axis for axis in sharding.mesh.axis_names if axis in used)
  whole = ProcessGather(sharding, shape, dtype, axes, math.prod(sharding.shard_shape(shape)))
  fits = most // ((whole.shards + 1) * dtype.itemsize)
  return whole._replace(part=max(1, min(whole.part, fits)))


@functools.lru_cache(maxsize=256)
def _program(gather: ProcessGather) -> Any:
  """The compiled program: the elements of every shard from a number on, as (shards, elements) on every device."""
  sharding, part = gather.sharding, gather.part

  def local(shard: Any, start: Any) -> Any:
    elements = lax.dynamic_slice(shard.reshape(-1), (start,), (part,))
    return lax.all_gather(elements, gather.axes) if gather.axes else elements[None]

  everywhere = PartitionSpec()
  gathered = jax.shard_map(
    local,
    mesh=sharding.mesh,
    in_specs=(sharding.spec, everywhere),
    out_specs=everywhere,
    check_vma=False,
  )
  abstract = jax.ShapeDtypeStruct(gather.shape, gather.dtype, sharding=sharding)
  number = jax.ShapeDtypeStruct((), np.uint32, sharding=sharding.update(spec=everywhere))
  with compat.mesh_scope(sharding.mesh):  # whatever mesh is in force
    jitted = jax.jit(gathered)
    return compat.compiled_call(
      jitted, jitted.lower(abstract, number).compile(), sharding.mesh, gather.dtype
    )


def is_local(source: Any, target: Any, shape: tuple[int, ...]) -> bool:
  """Whether every process has the slices of its devices of the target on its devices of the source."""
  held: dict[int, set[Box]] = {}
  for device, index in boxes_of(source, shape).items():
    held.setdefault(device.process_index, set()).add(index)
  return all(
    sum(volume(overlap(index, one)) for one in held.get(process, ())) == volume(index)
    for process, index in {
      (device.process_index, index) for device, index in boxes_of(target, shape).items()
    }
  )
