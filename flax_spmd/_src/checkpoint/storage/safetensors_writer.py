"""The writer of safetensors: files of a known layout, filled one array at a time, and complete or absent.

Files are written under temporary names. When all are on disk, they get their own names, the index last: it is what
makes several files a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flax_spmd._src.checkpoint.storage.disk_store import sync_folder
from flax_spmd._src.checkpoint.storage.record import LeafRecord
from flax_spmd._src.checkpoint.storage.safetensors_files import INDEX_SUFFIX, MODEL, shard_name
from flax_spmd._src.checkpoint.storage.safetensors_header import DTYPES, header_bytes

INDEX = f'{MODEL}{INDEX_SUFFIX}'
FORMAT_NAMES = {name: ours for ours, name in DTYPES.items()}  # the format's dtype, by numpy's name
_CHUNK = 64 << 20  # bytes of one write


class PlannedFile(NamedTuple):
  """One file to write.

  Attributes:
    name: its name.
    header: its length and header.
    places: first byte of each tensor in the file, by name.
    bytes: bytes of its data.
  """

  name: str
  header: bytes
  places: dict[str, int]
  bytes: int


def planned_files(
  tensors: Mapping[str, LeafRecord], most: int | None, metadata: Mapping[str, str], name: str | None
) -> list[PlannedFile]:
  """The files for some tensors.

  Args:
    tensors: record of each tensor, by name, in the order of the files. If wide elements come first, all are aligned.
    most: most bytes of data in a file, unless one tensor has more; None: no limit.
    metadata: texts for every header.
    name: name of the only file; None: Hugging Face's names.
  """
  groups: list[list[str]] = [[]]
  size = 0
  for tensor in tensors:
    bytes_ = tensors[tensor].bytes
    if groups[-1] and most is not None and size + bytes_ > most:
      groups.append([])
      size = 0
    groups[-1].append(tensor)
    size += bytes_
  return [
    _planned(name or shard_name(MODEL, number, len(groups)), group, tensors, metadata)
    for number, group in enumerate(groups, 1)
  ]


def _planned(
  name: str, group: Sequence[str], tensors: Mapping[str, LeafRecord], metadata: Mapping[str, str]
) -> PlannedFile:
  places: dict[str, int] = {}
  entries: dict[str, Any] = {}
  end = 0
  for tensor in group:
    leaf, begin = tensors[tensor], end
    end += leaf.bytes
    places[tensor] = begin
    entries[tensor] = {
      'dtype': FORMAT_NAMES[leaf.dtype],
      'shape': list(leaf.shape),
      'data_offsets': [begin, end],
    }
  header = header_bytes(entries, metadata)
  return PlannedFile(
    name, header, {tensor: begin + len(header) for tensor, begin in places.items()}, end
  )


class SafetensorsWriter:
  """Writes planned files to a folder; a context that removes them if it ends with an error.

  Args:
    folder: folder of the files; made if it does not exist.
    files: files to write.
  """

  def __init__(self, folder: Path, files: Sequence[PlannedFile]):
    self._folder, self._files = folder, files
    self._at = {tensor: number for number, file in enumerate(files) for tensor in file.places}
    self._ending = f'.{os.getpid()}-{secrets.token_hex(4)}.new'
    self._descriptors: list[int] = []
    self._made: list[Path] = []
    self._named: list[Path] = []

  def __enter__(self) -> SafetensorsWriter:
    try:
      self._made = _make(self._folder)
      for file in self._files:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._descriptors.append(os.open(self._temporary(file.name), flags, 0o666))
        _write(self._descriptors[-1], np.frombuffer(file.header, np.uint8), 0)
    except BaseException:
      self._abandon()
      raise
    return self

  def __exit__(self, kind: Any, *_: Any) -> None:
    if kind is not None:
      self._abandon()

  def write(self, tensor: str, array: np.ndarray) -> None:
    """Writes the data of one tensor.

    Raises:
      OSError: the disk refuses.
    """
    number = self._at[tensor]
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    _write(self._descriptors[number], data, self._files[number].places[tensor])

  def commit(self) -> None:
    """Makes everything durable, and gives the files their names.

    Raises:
      OSError: the disk refuses. No file keeps its name once the context has ended.
    """
    if len(self._files) > 1:
      self._descriptors.append(
        os.open(self._temporary(INDEX), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
      )
      _write(self._descriptors[-1], np.frombuffer(index_bytes(self._files), np.uint8), 0)
    while self._descriptors:
      descriptor = self._descriptors.pop()
      try:
        os.fsync(descriptor)
      finally:
        os.close(descriptor)
    for name in self._names():
      os.rename(self._temporary(name), self._folder / name)
      self._named.append(self._folder / name)
    for folder in (self._folder, *(made.parent for made in self._made)):
      sync_folder(folder)

  def _names(self) -> Iterator[str]:
    yield from (file.name for file in self._files)
    if len(self._files) > 1:
      yield INDEX

  def _temporary(self, name: str) -> Path:
    return self._folder / f'.{name}{self._ending}'

  def _abandon(self) -> None:
    for descriptor in self._descriptors:
      os.close(descriptor)
    self._descriptors = []
    with contextlib.suppress(OSError):  # the error that is being raised comes first
      for name in self._names():
        self._temporary(name).unlink(missing_ok=True)
      for file in reversed(self._named):  # the index first: without it, the others are no checkpoint
        file.unlink(missing_ok=True)
      for folder in self._made:
        folder.rmdir()


def _make(folder: Path) -> list[Path]:
  """Makes a folder; returns those that did not exist, the innermost first."""
  missing = [each for each in (folder, *folder.parents) if not each.exists()]
  folder.mkdir(parents=True, exist_ok=True)
  return missing


def _write(descriptor: int, data: np.ndarray, offset: int) -> None:
  done = 0
  while done < data.size:
    done += os.pwrite(descriptor, data[done : done + _CHUNK].data, offset + done)


def index_bytes(files: Sequence[PlannedFile]) -> bytes:
  """The contents of the index of several files."""
  weight_map = {tensor: file.name for file in files for tensor in file.places}
  total = sum(file.bytes for file in files)
  content = {'metadata': {'total_size': total}, 'weight_map': dict(sorted(weight_map.items()))}
  return json.dumps(content, indent=2).encode() + b'\n'
