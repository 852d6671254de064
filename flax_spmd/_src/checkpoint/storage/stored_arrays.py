"""Arrays beside a msgpack file: a tree of which some leaves are in the file, and others in folders of their own or in OCDBT."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from flax_spmd._src.array_boxes import Box
from flax_spmd._src.checkpoint.storage import skeleton
from flax_spmd._src.checkpoint.storage.host_shards import assembled
from flax_spmd._src.checkpoint.storage.parsed_json import unreadable
from flax_spmd._src.checkpoint.storage.record import Record, by_path, describe
from flax_spmd._src.checkpoint.storage.refused_reads import refusal
from flax_spmd._src.checkpoint.storage.tensorstore_slices import (
  batches,
  opened,
  started,
)
from flax_spmd._src.data.host_values import placed
from flax_spmd._src.joint_call import first_line


@dataclasses.dataclass(frozen=True)
class StoredArray:
  """An array that is not in the msgpack file.

  Attributes:
    name: its name, for errors.
    driver: TensorStore's driver of its format.
    kvstore: TensorStore's key-value store of its bytes.
    shape: shape of the array.
    dtype: dtype of the array.
    stored: dtype in which its bits are stored.
  """

  name: str
  driver: str
  kvstore: Mapping[str, Any]
  shape: tuple[int, ...]
  dtype: Any
  stored: Any


class StoredArraysReader:
  """Reads a tree of arrays and of `StoredArray`s. Of these, each process reads only its own slices.

  Args:
    path: folder of the checkpoint.
    file: the msgpack file, for errors.
    tree: its content.
    written_by: name of the library that wrote it.

  Raises:
    CheckpointDamagedError: there are no arrays.
  """

  def __init__(self, path: epath.Path, file: epath.Path, tree: Any, written_by: str):
    self.path = self.folder = path
    flat = skeleton.flatten(tree)
    self._by_path = by_path(skeleton.paths(flat.skeleton), flat.leaves)
    if not self._by_path:
      raise unreadable(path, f'{file.name} has no arrays')
    leaves = {path: describe(leaf) for path, leaf in self._by_path.items()}
    self.record = Record(flat.skeleton, leaves, {}, None, written_by)

  def read(self, requests: Mapping[str, Any], memory: int | None = None) -> dict[str, Any]:
    """See `CheckpointReader`."""
    stored = {path: request for path, request in requests.items() if self._is_stored(path)}
    arrays: dict[str, Any] = {}
    for group in batches(stored, memory):
      arrays |= self._read(group)
    for path, request in requests.items():
      if path not in stored:
        value = np.asarray(self._by_path[path])
        arrays[path] = placed(value, request.sharding)
    return arrays

  def _is_stored(self, path: str) -> bool:
    return isinstance(self._by_path[path], StoredArray)

  def _read(self, requests: Mapping[str, Any]) -> dict[str, Any]:
    """Reads a group of arrays at the same time."""
    stored = {path: self._by_path[path] for path in requests}
    arrays = {path: opened(each.driver, each.kvstore) for path, each in stored.items()}
    reads = {path: self._start(path, arrays[path], requests[path]) for path in requests}
    return {path: self._array(path, requests[path], reads[path]) for path in requests}

  def _start(self, path: str, future: Any, request: Any) -> dict[Box, Any]:
    """Starts the reads of slices of an array."""
    array, store = self._by_path[path], self._result(path, future)
    if store.shape != array.shape or store.dtype.numpy_dtype != array.stored:
      found = f'{array.name} has {store.dtype.name}{list(store.shape)}'
      raise unreadable(self.path, f'its description is {array.stored}{list(array.shape)}, and {found}')
    return started(store, request)

  def _array(self, path: str, request: Any, reads: Mapping[Box, Any]) -> Any:
    array = self._by_path[path]
    slices = {
      box: np.asarray(self._result(path, future)).view(array.dtype) for box, future in reads.items()
    }
    return assembled(request, slices)

  def _result(self, path: str, future: Any) -> Any:
    try:
      return future.result()
    except (ValueError, OSError) as error:
      raise refusal(error, self.path) or unreadable(self.path, first_line(error)) from error
