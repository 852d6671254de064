"""Byte ranges: which bytes of a file hold the parts of an array that a process needs, and how they are read.

An array is stored contiguously, its last dimension fastest. A box is a part of it, a range in each dimension. Boxes that
together span whole rows, as those of the devices of one process often do, are read once, as one box. A box is
read in pieces:

- a contiguous piece straight into its array;
- long runs one by one;
- short runs together with the bytes between them, from which they are copied.

The memory of a box may be a view of another array, with its dimensions in another order: the pieces are then copied to
their places in that array, through a buffer that fits into the caches of a core.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from flax_spmd._src.array_boxes import Box, overlap, volume, within
from flax_spmd._src.checkpoint.storage.bucket_errors import explained
from flax_spmd._src.checkpoint.storage.buckets import Location, filesystem
from flax_spmd.errors import CheckpointError

_PIECE = 8 << 20  # bytes of one read
_BUFFER = 1 << 20  # bytes of one read through a buffer, from a disk
_LONG_RUN = 32 << 10  # bytes; shorter ones cost more calls than their neighbours cost reading
_MAPPED = (
  1 << 20
)  # bytes; memory of its own goes back to the system when it is freed, that of the heap may not
_ALIGNMENT = 64  # bytes; JAX then takes host memory over without a copy, on CPUs
_HUGE = 4 << 20  # bytes; larger memory is asked for in pages of 2 MiB, which cost a tenth
_buffers = threading.local()


class RangeFile:
  """A file that several threads read by ranges of bytes.

  Args:
    path: file on disk, or object in a bucket, of which no byte is read that is not asked for.
  """

  def __init__(self, path: epath.Path):
    self.path = path
    self._descriptor = None if _is_remote(path) else os.open(path, os.O_RDONLY)

  def read_into(self, memory: np.ndarray, offset: int) -> None:
    """Fills an array of bytes from a position of the file.

    Raises:
      EOFError: the file ends before.
      CheckpointError: the bucket refuses it.
    """
    done = 0
    while done < memory.size:
      count = self._read(memory[done:], offset + done)
      if not count:
        raise EOFError(f'it ends at byte {offset + done:,}')
      done += count

  def read(self, offset: int, size: int) -> bytes:
    """Some bytes from a position of the file; raises as `read_into`."""
    memory = np.empty(size, np.uint8)
    self.read_into(memory, offset)
    return memory.tobytes()

  def _read(self, memory: np.ndarray, offset: int) -> int:
    if self._descriptor is not None:
      return os.preadv(self._descriptor, [memory.data], offset)
    part = memory[:_PIECE]
    with _bucket_calls(self.path) as (files, name):
      data = files.cat_file(name, start=offset, end=offset + part.size)
    part[: len(data)] = np.frombuffer(data, np.uint8)
    return len(data)

  @property
  def piece(self) -> int:
    """Most bytes to read through a buffer: few from a disk, many from a server that is far away."""
    return _PIECE if self._descriptor is None else _BUFFER

  def close(self) -> None:
    """Closes the file."""
    if self._descriptor is not None:
      os.close(self._descriptor)


def stamp(path: epath.Path) -> tuple[Any, ...]:
  """The version of a file: its size, and the time of its last change; its generation or tag in a bucket.

  Raises:
    CheckpointError: the bucket refuses it.
  """
  if not _is_remote(path):
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns
  with _bucket_calls(path) as (files, name):
    found = files.info(name)
  return found['size'], found.get('generation') or found.get('ETag')


def _is_remote(path: epath.Path) -> bool:
  return '://' in os.fspath(path)


@contextlib.contextmanager
def _bucket_calls(path: epath.Path) -> Iterator[tuple[Any, str]]:
  """Fsspec's file system of a bucket, and the name of an object there. Its errors are raised as the checkpoint's."""
  location = Location.of(os.fspath(path))
  try:
    yield filesystem(location.scheme), f'{location.bucket}/{location.path}'
  except CheckpointError:
    raise
  except Exception as error:  # of many kinds
    raise explained(error, 'read', location) from None


class Extent(NamedTuple):
  """The place of an array in a file.

  Attributes:
    shape: shape of the array.
    itemsize: bytes of an element.
    begin: its first byte.
  """

  shape: tuple[int, ...]
  itemsize: int
  begin: int

  @property
  def strides(self) -> tuple[int, ...]:
    """Bytes between neighbours along each dimension."""
    return tuple(self.itemsize * math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))

  def position(self, box: Box) -> int:
    """The first byte of a box."""
    return self.begin + sum(low * by for (low, _), by in zip(box, self.strides, strict=True))

  def span(self, box: Box) -> int:
    """Bytes from the first to the last of a nonempty box."""
    return self.itemsize + sum(
      (high - low - 1) * by for (low, high), by in zip(box, self.strides, strict=True)
    )

  def size(self, box: Box) -> int:
    """Bytes of a box."""
    return self.itemsize * volume(box)


def allocated(lengths: Sequence[int], itemsize: int) -> np.ndarray:
  """Memory for a box of these lengths: aligned bytes, as an array of words of the element's size."""
  size = itemsize * math.prod(lengths)
  if size >= _MAPPED:
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE and hasattr(mmap, 'MADV_HUGEPAGE'):
      with contextlib.suppress(OSError):  # of a kernel without them
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapped, np.uint8)
  else:
    memory = np.empty(size + _ALIGNMENT, np.uint8)
  start = -memory.ctypes.data % _ALIGNMENT
  return memory[start : start + size].view(f'u{itemsize}').reshape(lengths)


def _buffer(size: int) -> np.ndarray:
  """Bytes to read into, which this thread uses again for its next piece."""
  if not hasattr(_buffers, 'bytes') or _buffers.bytes.size < size:
    _buffers.bytes = np.empty(size, np.uint8)
  return _buffers.bytes[:size]


class Piece(NamedTuple):
  """A part of an array that is read at once.

  Attributes:
    extent: place of the array.
    box: the part.
    memory: array of each box that needs bytes of it, by box.
  """

  extent: Extent
  box: Box
  memory: Mapping[Box, np.ndarray]

  def read(self, file: RangeFile) -> None:
    """Reads the bytes, and copies them to where they are needed."""
    position, span = self.extent.position(self.box), self.extent.span(self.box)
    direct = self._contiguous_memory() if span == self.extent.size(self.box) else None
    if direct is not None:
      file.read_into(direct, position)
      return
    data = _buffer(span)
    file.read_into(data, position)
    lengths = [high - low for low, high in self.box]
    words = f'u{self.extent.itemsize}'
    stored = np.ndarray(lengths, words, data, strides=self.extent.strides)
    for box, memory in self.memory.items():
      common = overlap(self.box, box) or ()
      memory[within(common, box)] = stored[within(common, self.box)]

  def _contiguous_memory(self) -> np.ndarray | None:
    """The bytes of the one array to fill, if this part is contiguous in it."""
    if len(self.memory) > 1:
      return None
    ((box, memory),) = self.memory.items()
    part = memory[within(self.box, box)]
    return part.reshape(-1).view(np.uint8) if part.flags.c_contiguous else None


def pieces(extent: Extent, memory: Mapping[Box, np.ndarray], most: int) -> Iterator[Piece]:
  """The pieces to read for several boxes of one array.

  Args:
    extent: place of the array.
    memory: memory of each box; any view of the shape of the box.
    most: most bytes to read through a buffer.
  """
  boxes = [box for box in memory if extent.size(box)]
  for whole, members in _joined(extent, boxes):
    is_direct = len(members) == 1 and memory[whole].flags.c_contiguous
    for part in _divided(extent, whole, _PIECE if is_direct else most):
      yield Piece(extent, part, {box: memory[box] for box in members if overlap(part, box) is not None})


def _joined(extent: Extent, boxes: list[Box]) -> Iterator[tuple[Box, list[Box]]]:
  """Boxes joined along the last dimension that any of them divides, if they leave less than half of it out."""
  divided = [dim for dim, size in enumerate(extent.shape) if any(box[dim] != (0, size) for box in boxes)]
  if len(boxes) < 2 or not divided:
    yield from ((box, [box]) for box in boxes)
    return
  dim = divided[-1]
  groups: dict[Any, list[Box]] = {}
  for box in boxes:
    groups.setdefault(box[:dim], []).append(box)
  for members in groups.values():
    low, high = min(box[dim][0] for box in members), max(box[dim][1] for box in members)
    if 2 * sum(box[dim][1] - box[dim][0] for box in members) >= high - low:
      yield (*members[0][:dim], (low, high), *members[0][dim + 1 :]), members
    else:
      yield from ((box, [box]) for box in members)


def _divided(extent: Extent, box: Box, most: int) -> Iterator[Box]:
  """Parts of a box, each to be read at once, of `most` bytes if it can be divided so far."""
  span, size = extent.span(box), extent.size(box)
  run = _run(extent, box)
  if span <= most and (span == size or run < _LONG_RUN):
    yield box
    return
  dim = next(dim for dim, (low, high) in enumerate(box) if high - low > 1)
  low, high = box[dim]
  is_sparse = span > size and run >= _LONG_RUN and extent.strides[dim] > run
  step = 1 if is_sparse else max(1, most // extent.strides[dim])
  for begin in range(low, high, step):
    part = (*box[:dim], (begin, min(begin + step, high)), *box[dim + 1 :])
    yield from _divided(extent, part, most)


def _run(extent: Extent, box: Box) -> int:
  """Bytes of a contiguous run of a box."""
  run = extent.itemsize
  for (low, high), size in zip(reversed(box), reversed(extent.shape), strict=True):
    run *= high - low
    if high - low < size:
      break
  return run
