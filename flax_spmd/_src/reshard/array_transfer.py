"""Array transfers: the way of one array from its sharding to another one, on the same or other devices.

    transfer = transfer_of(array, target, dtype, most)   # compiles the array's program, if there is one
    transfer.wire, transfer.needed(device)               # bytes; nothing moves
    moved = transfer.run(array, keep=True)

Four ways, the first that serves:

* nothing moves: every device has its slice already;
* whole shards are copied from device to device;
* a program on the source's devices cuts the shards as the target has them, with the interconnect's collectives, and
  whole shards are copied where the devices differ;
* the host cuts them: it reads the slices, and writes each shard of the target.

A program is used if both meshes have equally many devices, and if the compiler asks for no more temporary memory than
`most`. The host's way takes no memory of devices beside source and target.

Devices of several processes: whole shards are copied within a process only. Hosts that lack slices gather the shards of
all processes, in parts of at most `most` bytes on a device.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from flax_spmd._src import compat
from flax_spmd._src.array_boxes import Box, box_of, boxes_of, overlap, whole_box, within
from flax_spmd._src.data.key_arrays import as_keys, of_numbers
from flax_spmd._src.hlo.counts import count
from flax_spmd._src.reshard.process_gather import ProcessGather, gather_of, is_local


class TransferProgram(NamedTuple):
  """A compiled program that changes sharding and dtype of an array on its devices.

  Attributes:
    run: the program.
    result: sharding of its result.
    temporary: bytes of temporary memory on each device.
    wire: bytes that all devices send.
  """

  run: Any
  result: Sharding
  temporary: int
  wire: int


class ArrayTransfer(NamedTuple):
  """The way of one array to its target.

  Attributes:
    way: 'stays', 'copied', 'program', 'host' or 'gathered': the host's, with shards of other processes.
    source: its sharding; None for an array of numpy or a number.
    target: the sharding of the result.
    shape, before, after: shape, and the dtypes of array and result.
    program: the program; None without one.
    wire: bytes that leave a device, or the host, for another.
    is_weak: whether the result has a weak type, as numbers of Python have.
    gather: the gather of the shards of other processes; None without one.
  """

  way: str
  source: Sharding | None
  target: NamedSharding
  shape: tuple[int, ...]
  before: Any
  after: Any
  program: TransferProgram | None
  wire: int
  is_weak: bool = False
  gather: ProcessGather | None = None

  @property
  def crosses(self) -> bool:
    """Whether other processes have devices of the array or of the result."""
    return crosses(self.source, self.target)

  def held(self) -> dict[Any, int]:
    """Bytes of the array on each device."""
    return {} if self.source is None else _bytes_of(self.source, self.shape, self.before)

  def made(self) -> dict[Any, int]:
    """Bytes of the result on each device."""
    return _bytes_of(self.target, self.shape, self.after)

  def staged(self) -> dict[Any, int]:
    """Bytes on each device beside array and result, at most: of the program, and of its result before it is copied."""
    if self.gather is not None:
      return dict.fromkeys(self.gather.sharding.device_set, self.gather.temporary)
    if self.program is None:
      return {}
    result = _bytes_of(self.program.result, self.shape, self.after)
    copied = not _same_slices(self.program.result, self.target, self.shape)
    return {device: self.program.temporary + copied * size for device, size in result.items()}

  def run(self, array: Any, keep: bool) -> jax.Array:
    """The array as its target; shares no memory with the array if that is to be kept."""
    if self.crosses:
      return self._between_processes(array, keep)
    if self.is_weak:  # arrays that are made of shards have a strong type
      is_new = self.source is None or (self.way == 'stays' and not keep)
      return jax.device_put(array if is_new else jnp.copy(array), self.target)
    if self.way == 'host':
      return self._by_host(array)
    if self.program is not None:
      array = jax.block_until_ready(self.program.run(array))
    if self.way != 'copied' and _same_slices(array.sharding, self.target, self.shape):
      keep = keep and self.program is None
      return jax.device_put(array, self.target, may_alias=not keep)
    return _copied(array, self.target)

  def _between_processes(self, array: Any, keep: bool) -> jax.Array:
    if self.way in ('host', 'gathered'):
      made = self._by_host(array)
      like = ShapedArray(self.shape, self.after, weak_type=self.is_weak)
      return compat.from_shards(like, self.target, _shards(made)) if self.is_weak else made
    if self.program is not None:
      array = jax.block_until_ready(self.program.run(array))
    return _copied(array, self.target, may_alias=self.program is not None or not keep)

  def _by_host(self, array: Any) -> jax.Array:
    if not jnp.issubdtype(self.before, jax.dtypes.prng_key):
      return _through_host(array, self.target, self.after, self.gather)
    sharding = of_numbers(self.target, len(self.shape))
    numbers = _through_host(jax.random.key_data(array), sharding, np.dtype(np.uint32), self.gather)
    return as_keys(numbers, array, self.target)


def transfer_of(array: Any, target: NamedSharding, dtype: Any, most: int) -> ArrayTransfer:
  """The way of an array.

  Args:
    array: an array, abstract or not, or a number.
    target: sharding of the result.
    dtype: dtype of the result.
    most: bytes of temporary memory that a program may take on a device.
  """
  shape, before = tuple(np.shape(array)), dtype_of(array)
  source = getattr(array, 'sharding', None)
  is_weak = bool(getattr(array, 'weak_type', isinstance(array, (int, float, complex))))
  on_device = source is None or _memory(source) == 'device'
  keeps = is_weak and before == dtype and on_device
  transfer = ArrayTransfer('host', source, target, shape, before, dtype, None, 0, keeps)
  if source is None or (transfer.crosses and source.is_fully_addressable):  # every process has all of it
    return transfer._replace(wire=sum(transfer.made().values()))
  if _memory(source) == _memory(target) and before == dtype and _same_slices(source, target, shape):
    return transfer._replace(way='stays')
  is_key = jnp.issubdtype(before, jax.dtypes.prng_key)
  is_empty = not math.prod(shape)  # its shards have wrong shapes in a program's result, in JAX 0.10.2
  if _memory(source) == _memory(target) == 'device' and not (is_key or is_empty):
    found = _on_devices(transfer, is_weak, most)
    if found is not None:
      return found
  if transfer.crosses and not is_local(source, target, shape):
    return _gathered(transfer, most)
  read = len(set(boxes_of(source, shape).values())) * shard_bytes(source, shape, before)
  return transfer._replace(wire=read + sum(transfer.made().values()))


def _gathered(transfer: ArrayTransfer, most: int) -> ArrayTransfer:
  """The way of the host, where it lacks slices of the array."""
  source, shape, dtype = _named(transfer.source), transfer.shape, transfer.before
  if source is None:
    return transfer
  if jnp.issubdtype(dtype, jax.dtypes.prng_key):
    numbers = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
    source, shape, dtype = of_numbers(source, len(shape)), numbers.shape, numbers.dtype
  gather = gather_of(source, shape, dtype, most)
  wire = gather.wire + sum(transfer.made().values())
  return transfer._replace(way='gathered', gather=gather, wire=wire)


def crosses(source: Any, target: Any) -> bool:
  """Whether other processes have devices of one of two shardings; the first may be None."""
  return not (target.is_fully_addressable and (source is None or source.is_fully_addressable))


def can_cross(source: Any, target: Any, shape: tuple[int, ...]) -> bool:
  """Whether an array on devices of several processes can reach its target: the processes have it, or can gather it."""
  if source is None or source.is_fully_addressable or is_local(source, target, shape):
    return True
  owners, wanted = ({device.process_index for device in one.device_set} for one in (source, target))
  return wanted <= owners and _named(source) is not None and _memory(source) == 'device'


def dtype_of(leaf: Any) -> Any:
  """The dtype that a leaf has as an array of JAX."""
  is_array = isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))
  return leaf.dtype if is_array else jnp.result_type(leaf)


def _on_devices(transfer: ArrayTransfer, weak: bool, most: int) -> ArrayTransfer | None:
  """The way without the host; None if there is none."""
  source, target, shape = _named(transfer.source), transfer.target, transfer.shape
  result = source
  if not _has_shards_of(transfer.source, target, shape):
    result = source and _mirrored(source, target)
  elif transfer.before == transfer.after and _is_copied_locally(transfer.source, target, shape):
    return transfer._replace(
      way='copied', wire=_copied_bytes(transfer.source, target, shape, transfer.after)
    )
  if source is None or result is None:
    return None
  if transfer.crosses and not _is_copied_locally(result, target, shape):
    return None
  program = _program(shape, transfer.before, weak, source, result, transfer.after)
  if program.temporary > most:
    return None
  wire = program.wire + _copied_bytes(result, target, shape, transfer.after)
  return transfer._replace(way='program', program=program, wire=wire)


def _named(sharding: Any) -> NamedSharding | None:
  """The sharding over a mesh with Auto axes: types of axes mean nothing for arrays. None if JAX knows no mesh."""
  if isinstance(sharding, NamedSharding):
    return _on(sharding, sharding.mesh.devices)
  if isinstance(sharding, SingleDeviceSharding):
    [device] = sharding.device_set
    return NamedSharding(Mesh(np.array([device], object), ('device',)), PartitionSpec())
  return None


def _mirrored(source: NamedSharding, target: NamedSharding) -> NamedSharding | None:
  """The target's slices on the source's devices, in their order; None if their numbers differ."""
  devices, wanted = np.asarray(source.mesh.devices), np.asarray(target.mesh.devices)
  return _on(target, devices.reshape(wanted.shape)) if devices.size == wanted.size else None


def _on(sharding: NamedSharding, devices: Any) -> NamedSharding:
  """A sharding on devices in the shape of its mesh, with Auto axes."""
  return NamedSharding(Mesh(devices, sharding.mesh.axis_names), sharding.spec)


@functools.lru_cache(maxsize=1024)
def _program(
  shape: tuple[int, ...],
  before: Any,
  weak: bool,
  source: NamedSharding,
  result: NamedSharding,
  after: Any,
) -> TransferProgram:
  """The compiled program of one kind of array."""

  def changed(x):
    return x if x.dtype == after else x.astype(after)

  abstract = jax.ShapeDtypeStruct(shape, before, sharding=source, weak_type=weak)
  with compat.mesh_scope(source.mesh):  # whatever mesh is in force
    jitted = jax.jit(changed, out_shardings=result)
    compiled = jitted.lower(abstract).compile()
  memory = compiled.memory_analysis()
  temporary = memory.temp_size_in_bytes if memory else math.prod(shape) * after.itemsize
  counts = count(compiled.as_text() or '', {'devices': result.num_devices})
  sent = sum(one.wire for one in counts.collectives) * result.num_devices
  run = compat.compiled_call(jitted, compiled, source.mesh, before)
  return TransferProgram(run, result, temporary, int(sent))


def _copied(array: jax.Array, target: NamedSharding, may_alias: bool = False) -> jax.Array:
  """An array whose shards are those of the target, on other devices of their processes."""
  shards = {shard.device: shard.data for shard in array.addressable_shards}
  mine = target.addressable_devices
  pairs = [pair for pair in _copies(array.sharding, target, array.shape) if pair[1] in mine]
  singles = [SingleDeviceSharding(device, memory_kind=target.memory_kind) for _, device in pairs]
  moved = jax.device_put([shards[device] for device, _ in pairs], singles, may_alias=may_alias)
  return compat.from_shards(array, target, moved)


def _shards(array: jax.Array) -> list[jax.Array]:
  return [shard.data for shard in array.addressable_shards]


def _copies(source: Any, target: Any, shape: tuple[int, ...]) -> list[tuple[Any, Any]]:
  """For each device of the target, the device that its shard is copied from.

  That is itself, or each of the holders in turn: those of its process, if there are any.
  """
  holders: dict[Box, list[Any]] = defaultdict(list)
  for device, index in boxes_of(source, shape).items():
    holders[index].append(device)
  pairs = []
  for number, (device, index) in enumerate(boxes_of(target, shape).items()):
    everyone = holders[index]
    found = [one for one in everyone if one.process_index == device.process_index] or everyone
    pairs.append((device if device in found else found[number % len(found)], device))
  return pairs


def _is_copied_locally(source: Any, target: Any, shape: tuple[int, ...]) -> bool:
  """Whether every copy is between devices of one process."""
  return all(one.process_index == other.process_index for one, other in _copies(source, target, shape))


def _copied_bytes(source: Any, target: Any, shape: tuple[int, ...], dtype: Any) -> int:
  """Bytes that copies of whole shards send to other devices."""
  moved = sum(one != other for one, other in _copies(source, target, shape))
  return moved * shard_bytes(target, shape, dtype)


def _through_host(
  array: Any, target: NamedSharding, dtype: Any, gather: ProcessGather | None
) -> jax.Array:
  """An array whose shards the host cuts. It holds one array at a time."""
  shape = tuple(np.shape(array))
  mine = {boxes_of(target, shape)[device] for device in target.addressable_devices}
  pieces = gather.pieces(array, mine) if gather else _host_pieces(array)

  @functools.cache
  def shard(index: Box) -> np.ndarray:
    made = np.empty([stop - start for start, stop in index], dtype)
    for at, piece in pieces.items():
      common = overlap(index, at)
      if common is not None:
        made[within(common, index)] = piece[within(common, at)]
    return made

  return jax.make_array_from_callback(
    shape, target, lambda index: shard(box_of(index, shape)), dtype=dtype
  )


def _host_pieces(array: Any) -> dict[Box, np.ndarray]:
  """The distinct slices of an array on the host.

  An array of JAX keeps the copy that it was read into; arrays of the same shards that are made for the read do not last.
  """
  if not isinstance(array, jax.Array):
    whole = np.asarray(array)
    return {whole_box(whole.shape): whole}
  distinct = {box_of(shard.index, array.shape): shard for shard in array.addressable_shards}
  once = {
    index: jax.make_array_from_single_device_arrays(shard.data.shape, shard.data.sharding, [shard.data])
    for index, shard in distinct.items()
  }
  for each in once.values():
    each.copy_to_host_async()
  return {index: np.asarray(each) for index, each in once.items()}


def _same_slices(source: Any, target: Any, shape: tuple[int, ...]) -> bool:
  return boxes_of(source, shape) == boxes_of(target, shape)


def _has_shards_of(source: Any, target: Any, shape: tuple[int, ...]) -> bool:
  """Whether every shard of the target is one of the source."""
  return set(boxes_of(target, shape).values()) <= set(boxes_of(source, shape).values())


def _memory(sharding: Any) -> str:
  return sharding.memory_kind or 'device'


def _bytes_of(sharding: Any, shape: tuple[int, ...], dtype: Any) -> dict[Any, int]:
  """Bytes on each device; an array in the host's memory takes none."""
  if _memory(sharding) != 'device':
    return {}
  return dict.fromkeys(boxes_of(sharding, shape), shard_bytes(sharding, shape, dtype))


@functools.lru_cache(maxsize=1024)
def shard_bytes(sharding: Any, shape: tuple[int, ...], dtype: Any) -> int:
  return math.prod(sharding.shard_shape(shape)) * dtype.itemsize
