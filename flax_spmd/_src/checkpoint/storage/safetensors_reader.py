"""The reader of safetensors: each process reads the bytes of its own shards, a few arrays at a time.

An array may also be made of several in the files, each of which is transposed or split on the way: its bytes are
read once, and copied to their place in the memory of the result.

The host holds at most two batches of arrays: one being read, one on its way to the devices. A batch is an array, or
several small ones.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from flax_spmd._src.array_boxes import Box, boxes_of, whole_box
from flax_spmd._src.checkpoint.storage.byte_ranges import (
  Extent,
  Piece,
  RangeFile,
  allocated,
  pieces,
  stamp,
)
from flax_spmd._src.checkpoint.storage.host_shards import assembled, own_boxes
from flax_spmd._src.checkpoint.storage.record import LeafRecord, Record
from flax_spmd._src.checkpoint.storage.refused_reads import refusal
from flax_spmd._src.checkpoint.storage.safetensors_files import located_tensors
from flax_spmd._src.checkpoint.storage.safetensors_header import tensor_path
from flax_spmd.errors import CheckpointDamagedError, CheckpointError

_BATCH_BYTES = 32 << 20
_THREADS = 8


class Placement(NamedTuple):
  """The place of a saved array, or of a part of it, in the memory of a shard.

  Attributes:
    source: path of the saved array.
    shape: its shape, with dimensions split if the result has them apart.
    box: the part, in this shape.
    memory: view of the shard's memory, of the shape of the part.
  """

  source: str
  shape: tuple[int, ...]
  box: Box
  memory: np.ndarray


class Arranged(NamedTuple):
  """A request for an array that is made of saved ones without a change of any element.

  Attributes:
    request: its shape, dtype and sharding; see `CheckpointReader.read`.
    placements: function from a shard's box and memory to the places of the saved arrays in it.
  """

  request: Any
  placements: Callable[[Box, np.ndarray], Iterator[Placement]]


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
    self._stamps: dict[epath.Path, Any] = {}
    located = located_tensors(path, lambda file: self._stamps.update({file: stamp(file)}))
    self._tensors = {tensor_path(name): at for name, at in located.items()}
    paths = sorted(self._tensors, key=_in_numeric_order)
    entries = {path: self._tensors[path][1] for path in paths}
    leaves = {path: LeafRecord(entry.shape, entry.dtype) for path, entry in entries.items()}
    self.record = Record(
      {path: index for index, path in enumerate(paths)}, leaves, {}, None, 'safetensors'
    )

  def read(self, requests: Mapping[str, Any], memory: int | None = None) -> dict[str, Any]:
    """See `CheckpointReader`."""
    whole = {path: Arranged(request, self._itself(path)) for path, request in requests.items()}
    return self.read_arranged(whole, memory)

  def _itself(self, path: str) -> Callable[[Box, np.ndarray], Iterator[Placement]]:
    shape = self.record.leaves[path].shape
    return lambda box, memory: iter([Placement(path, shape, box, memory)])

  def read_arranged(self, requests: Mapping[str, Arranged], memory: int | None = None) -> dict[str, Any]:
    """Reads arrays that are made of saved ones.

    Args:
      requests: by any name.
      memory: see `CheckpointReader.read`.

    Raises:
      CheckpointDamagedError: a file cannot be read, or has been written to.
    """
    results: dict[str, Any] = {}
    arriving: list[Any] = []
    with contextlib.ExitStack() as stack:
      pool = stack.enter_context(ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)))
      files: dict[epath.Path, RangeFile] = {}
      for batch in self._batches(requests, memory):
        parts = [part for array in batch for part in array.parts]
        for file in dict.fromkeys(part.file for part in parts):
          files[file] = files.get(file) or self._opened(file, stack)
        tasks = [(files[each.file], piece) for each in parts for piece in each.pieces(files[each.file])]
        list(pool.map(lambda task: self._read_piece(*task), tasks))
        jax.block_until_ready(arriving)
        made = {array.path: array.made() for array in batch}
        arriving = [value for value in made.values() if isinstance(value, jax.Array)]
        results |= made
      for file in files:
        self._check_unchanged(file)
    return {path: results[path] for path in requests}

  def _batches(
    self, requests: Mapping[str, Arranged], memory: int | None
  ) -> Iterator[list[_RequestedArray]]:
    """Arrays in the order of the files, a batch at a time, with memory for the shards of this process."""
    most, batch, size = (memory or 2 * _BATCH_BYTES) // 2, [], 0
    positions = {name: self._position(request) for name, request in requests.items()}
    for name in sorted(requests, key=positions.__getitem__):
      array = self._requested(name, requests[name])
      if batch and size + array.bytes > most:
        yield batch
        batch, size = [], 0
      batch.append(array)
      size += array.bytes
    yield batch

  def _position(self, arranged: Arranged) -> tuple[str, int]:
    """The file of the first array of a request, and its place in it; the beginning if other processes have all of it."""
    boxes = own_boxes(arranged.request)
    if not boxes:
      return '', 0
    file, entry = self._tensors[next(_dry(arranged, boxes[0])).source]
    return os.fspath(file), entry.begin

  def _requested(self, name: str, arranged: Arranged) -> _RequestedArray:
    """A request with its memory, and the parts of files that fill it."""
    itemsize = arranged.request.dtype.itemsize
    memory = {
      box: allocated([high - low for low, high in box], itemsize) for box in own_boxes(arranged.request)
    }
    parts: dict[str, _FilledPart] = {}
    for box, words in memory.items():
      for source, shape, part, view in arranged.placements(box, words):
        file, entry = self._tensors[source]
        extent = Extent(shape, itemsize, entry.begin)
        parts.setdefault(source, _FilledPart(file, extent, {})).memory[part] = view
    return _RequestedArray(name, arranged.request, memory, list(parts.values()))

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

  def _unreadable(self, file: epath.Path, error: Exception) -> CheckpointError:
    return refusal(error, file) or CheckpointDamagedError(
      f'Checkpoint {self.path} cannot be read, because of {file.name}: {error}.\n'
      'Fix: copy or download it again; it has changed since it was opened, or its storage fails.'
    )


class _FilledPart(NamedTuple):
  """A saved array that fills memory.

  Attributes:
    file: file that holds it.
    extent: its place in the file.
    memory: memory of each box of it that this process needs.
  """

  file: epath.Path
  extent: Extent
  memory: dict[Box, np.ndarray]

  def pieces(self, file: RangeFile) -> Iterator[Piece]:
    """The pieces to read."""
    return pieces(self.extent, self.memory, file.piece)


class _RequestedArray(NamedTuple):
  """An array to read.

  Attributes:
    path: name of the request.
    request: its shape, dtype and sharding.
    memory: memory of each different shard on this process, by box.
    parts: the saved arrays that fill it.
  """

  path: str
  request: Any
  memory: dict[Box, np.ndarray]
  parts: list[_FilledPart]

  @property
  def bytes(self) -> int:
    """Bytes of its memory on the host."""
    return sum(array.nbytes for array in self.memory.values())

  def made(self) -> Any:
    """The array that was requested, from the memory that has been filled."""
    shards = {box: words.view(self.request.dtype) for box, words in self.memory.items()}
    return assembled(self.request, shards)


def is_in_boxes(arranged: Arranged) -> bool:
  """Whether every shard, of other processes too, consists of boxes of saved arrays."""
  sharding, shape = arranged.request.sharding, tuple(arranged.request.shape)
  boxes = [whole_box(shape)] if sharding is None else boxes_of(sharding, shape).values()
  try:
    return all(each is not None for box in dict.fromkeys(boxes) for each in _dry(arranged, box))
  except ValueError:
    return False


def _dry(arranged: Arranged, box: Box) -> Iterator[Placement]:
  """The placements in a shard, without memory."""
  none = np.broadcast_to(np.uint8(0), [high - low for low, high in box])
  return arranged.placements(box, none)


def _in_numeric_order(path: str) -> list[tuple[bool, int, str]]:
  """A key that sorts `layers/10` after `layers/9`."""
  return [(name.isdecimal(), int(name) if name.isdecimal() else 0, name) for name in path.split('/')]
