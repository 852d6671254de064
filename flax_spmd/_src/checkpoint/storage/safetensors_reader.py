"""The reader of safetensors: each process reads the bytes of its own shards, a few arrays at a time.

The host holds at most two batches of arrays: one being read, one on its way to the devices. A batch is an array, or
several small ones.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from flax_spmd._src.checkpoint.storage.byte_ranges import (
  Box,
  Extent,
  Piece,
  RangeFile,
  allocated,
  box_of,
  pieces,
  stamp,
)
from flax_spmd._src.checkpoint.storage.record import LeafRecord, Record, dtype_of
from flax_spmd._src.checkpoint.storage.safetensors_files import located_tensors
from flax_spmd._src.checkpoint.storage.safetensors_header import TensorEntry, tensor_path
from flax_spmd.errors import CheckpointDamagedError

_BATCH_BYTES = 32 << 20
_THREADS = 8


class SafetensorsReader:
  """Reads safetensors, one file or several with an index.

  The path of an array is its name in the file, whose dots separate modules: `model/norm/weight`.

  Args:
    path: file, index, or folder of the checkpoint.

  Raises:
    CheckpointDamagedError: a header or the index is invalid (lists every problem). No data has been read.
    CheckpointError: the folder holds several checkpoints.
  """

  def __init__(self, path: epath.Path):
    self.path = self.folder = path
    self._tensors = {tensor_path(name): at for name, at in located_tensors(path).items()}
    self._stamps = {file: stamp(file) for file in {file for file, _ in self._tensors.values()}}
    paths = sorted(self._tensors, key=_in_numeric_order)
    leaves = {path: _leaf(self._tensors[path][1]) for path in paths}
    self.record = Record(
      {path: index for index, path in enumerate(paths)}, leaves, {}, None, 'safetensors'
    )

  def read(self, requests: Mapping[str, Any], memory: int | None = None) -> dict[str, Any]:
    """See `CheckpointReader`."""
    results: dict[str, Any] = {}
    arriving: list[Any] = []
    with contextlib.ExitStack() as stack:
      pool = stack.enter_context(ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)))
      files: dict[epath.Path, RangeFile] = {}
      for batch in self._batches(requests, memory):
        for array in batch:
          if array.file not in files:
            files[array.file] = self._opened(array.file, stack)
        tasks = [(files[array.file], piece) for array in batch for piece in array.pieces()]
        list(pool.map(lambda task: self._read_piece(*task), tasks))
        jax.block_until_ready(arriving)
        made = {array.path: array.made() for array in batch}
        arriving = [value for value in made.values() if isinstance(value, jax.Array)]
        results |= made
      for file in files:
        self._check_unchanged(file)
    return {path: results[path] for path in requests}

  def _batches(self, requests: Mapping[str, Any], memory: int | None) -> Iterator[list[_RequestedArray]]:
    """Arrays in the order of the files, a batch at a time, with memory for the shards of this process."""
    most, batch, size = (memory or 2 * _BATCH_BYTES) // 2, [], 0
    for path in sorted(requests, key=self._position):
      array = _requested(path, *self._tensors[path], requests[path])
      if batch and size + array.bytes > most:
        yield batch
        batch, size = [], 0
      batch.append(array)
      size += array.bytes
    yield batch

  def _position(self, path: str) -> tuple[str, int]:
    file, entry = self._tensors[path]
    return os.fspath(file), entry.begin

  def _opened(self, path: epath.Path, stack: contextlib.ExitStack) -> RangeFile:
    try:
      file = RangeFile(path)
    except OSError as error:
      raise self._unreadable(path, error) from error
    stack.callback(file.close)
    return file

  def _read_piece(self, file: RangeFile, piece: Piece) -> None:
    try:
      piece.read(file)
    except (OSError, EOFError) as error:
      raise self._unreadable(file.path, error) from error

  def _check_unchanged(self, file: epath.Path) -> None:
    """Raises CheckpointDamagedError for a file that was written to since its header was read: it has no checksums."""
    try:
      if stamp(file) != self._stamps[file]:
        raise EOFError('it has been written to')
    except (OSError, EOFError) as error:
      raise self._unreadable(file, error) from error

  def _unreadable(self, file: epath.Path, error: Exception) -> CheckpointDamagedError:
    return CheckpointDamagedError(
      f'Checkpoint {self.path} cannot be read, because of {file.name}: {error}.\n'
      'Fix: copy or download it again; it has changed since it was opened, or its storage fails.'
    )


class _RequestedArray(NamedTuple):
  """An array to read.

  Attributes:
    path: its path in the record.
    file: file that holds it.
    extent: its place in the file.
    request: see `CheckpointReader.read`.
    memory: memory of each different shard on this process, by box.
  """

  path: str
  file: epath.Path
  extent: Extent
  request: Any
  memory: dict[Box, np.ndarray]

  @property
  def bytes(self) -> int:
    """Bytes of its memory on the host."""
    return sum(array.nbytes for array in self.memory.values())

  def pieces(self) -> Iterator[Piece]:
    """The pieces to read."""
    return pieces(self.extent, self.memory)

  def made(self) -> Any:
    """The array that was requested, from the memory that has been filled."""
    shape, dtype = self.request.shape, self.request.dtype
    shards = {box: words.view(dtype) for box, words in self.memory.items()}
    if self.request.sharding is None:
      return shards[_whole(shape)]
    return jax.make_array_from_callback(
      shape, self.request.sharding, lambda index: shards[box_of(index or (), shape)], dtype=dtype
    )


def _requested(path: str, file: epath.Path, entry: TensorEntry, request: Any) -> _RequestedArray:
  extent = Extent(entry.shape, dtype_of(entry.dtype).itemsize, entry.begin)
  boxes = [_whole(entry.shape)]
  if request.sharding is not None:
    indices = request.sharding.addressable_devices_indices_map(entry.shape).values()
    boxes = list(dict.fromkeys(box_of(index, entry.shape) for index in indices))
  return _RequestedArray(path, file, extent, request, {box: allocated(extent, box) for box in boxes})


def _whole(shape: tuple[int, ...]) -> Box:
  return tuple((0, size) for size in shape)


def _leaf(entry: TensorEntry) -> LeafRecord:
  return LeafRecord(entry.shape, entry.dtype)


def _in_numeric_order(path: str) -> list[tuple[bool, int, str]]:
  """A key that sorts `layers/10` after `layers/9`."""
  return [(name.isdecimal(), int(name) if name.isdecimal() else 0, name) for name in path.split('/')]
