"""T5X: checkpoints in its own format, a msgpack file beside a zarr array for each parameter.

    checkpoint_1000/checkpoint                        {'version': 3, 'optimizer': {'target': ..., 'state': ...}}
    checkpoint_1000/target.encoder.mlp.wi.kernel/     .zarray, 0.0, 0.1, ...

A leaf of the file is an array, or TensorStore's spec of the folder that holds it. Of a spec, only the name of
the folder, the shape and the dtype are used: drivers, buckets and paths are those of the checkpoint at hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from flax_spmd._src.checkpoint.storage import skeleton
from flax_spmd._src.checkpoint.storage.parsed_json import unreadable
from flax_spmd._src.checkpoint.storage.record import Record, by_path, describe, dtype_of
from flax_spmd._src.checkpoint.storage.refused_reads import refusal
from flax_spmd._src.checkpoint.storage.store import checked
from flax_spmd._src.checkpoint.storage.tensorstore_slices import (
  Index,
  assembled,
  batches,
  kvstore_of,
  opened,
  started,
)
from flax_spmd._src.data.host_values import placed
from flax_spmd._src.joint_call import first_line
from flax_spmd.errors import CheckpointDamagedError

_STATE, _VERSION = 'optimizer', 'version'
_NATIVE_BFLOAT16 = 3  # the first version that writes it as such; earlier ones write its bits as uint16
_DRIVERS = ('zarr', 'zarr3')


def is_t5x(content: Any) -> bool:
  """Whether the content of a msgpack file is a checkpoint of T5X, not of `flax.training.checkpoints`."""
  return isinstance(content, dict) and (set(content) == {_VERSION, _STATE} or _has_specs(content))


def _has_specs(node: Any) -> bool:
  return isinstance(node, dict) and (_is_spec(node) or any(map(_has_specs, node.values())))


def _is_spec(node: Any) -> bool:
  return isinstance(node, dict) and {'driver', 'kvstore', 'metadata'} <= set(node)


@dataclasses.dataclass(frozen=True)
class StoredArray:
  """An array in a folder of its own.

  Attributes:
    folder: name of the folder.
    driver: TensorStore's driver of its format.
    shape: shape of the array.
    dtype: dtype of the array.
    stored: dtype in which its bits are stored.
  """

  folder: str
  driver: str
  shape: tuple[int, ...]
  dtype: Any
  stored: Any


class T5xReader:
  """Reads a checkpoint of T5X. Each process reads only its own slices.

  Args:
    file: the msgpack file.
    content: its content.

  Raises:
    CheckpointDamagedError: it describes no arrays, or one of its descriptions is invalid.
  """

  def __init__(self, file: epath.Path, content: dict[str, Any]):
    self.path = self.folder = file.parent
    tree = content.get(_STATE, content) if _VERSION in content else content
    flat = skeleton.flatten(self._with_arrays(tree, content.get(_VERSION, 0)))
    self._by_path = by_path(skeleton.paths(flat.skeleton), flat.leaves)
    if not self._by_path:
      raise unreadable(self.path, f'{file.name} has no arrays')
    leaves = {path: describe(leaf) for path, leaf in self._by_path.items()}
    self.record = Record(flat.skeleton, leaves, {}, None, 't5x')

  def _with_arrays(self, node: Any, version: Any) -> Any:
    """The tree with its specs as stored arrays."""
    if _is_spec(node):
      return self._stored(node, version)
    if isinstance(node, dict):
      return {name: self._with_arrays(child, version) for name, child in node.items()}
    return node

  def _stored(self, spec: dict[str, Any], version: Any) -> StoredArray:
    """A validated spec. Anyone may have written or damaged it."""
    try:
      metadata = spec['metadata']
      folder = spec['kvstore'].get('path') or spec['path']  # TensorStore before 0.1.14 has it outside
      dtype, shape = spec['dtype'] if 'dtype' in spec else metadata['dtype'], tuple(metadata['shape'])
      is_valid = isinstance(dtype, str) and all(type(size) is int and size >= 0 for size in shape)
      if spec['driver'] not in _DRIVERS or not is_valid:
        raise ValueError('an unknown driver, or an invalid dtype or shape')
      stored = dtype_of(np.dtype(dtype).name)
      is_bfloat16 = stored == np.uint16 and type(version) is int and version < _NATIVE_BFLOAT16
      name = checked(folder.rstrip('/'), self.path)
    except (
      KeyError,
      TypeError,
      ValueError,
      AttributeError,
      SyntaxError,
    ) as error:  # numpy parses dtypes
      if isinstance(error, CheckpointDamagedError):
        raise
      raise unreadable(self.path, f'the description {str(spec)[:500]} of an array is invalid') from error
    return StoredArray(
      name, spec['driver'], shape, dtype_of('bfloat16') if is_bfloat16 else stored, stored
    )

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
    arrays = {
      path: opened(each.driver, kvstore_of(self.path / each.folder)) for path, each in stored.items()
    }
    reads = {path: self._start(path, arrays[path], requests[path]) for path in requests}
    return {path: self._array(path, requests[path], reads[path]) for path in requests}

  def _start(self, path: str, future: Any, request: Any) -> dict[Index, Any]:
    """Starts the reads of slices of an array."""
    array, store = self._by_path[path], self._result(path, future)
    if store.shape != array.shape or store.dtype.numpy_dtype != array.stored:
      found = f'{array.folder} has {store.dtype.name}{list(store.shape)}'
      raise unreadable(self.path, f'its description is {array.stored}{list(array.shape)}, and {found}')
    return started(store, request)

  def _array(self, path: str, request: Any, reads: Mapping[Index, Any]) -> Any:
    array = self._by_path[path]
    slices = {
      index: np.asarray(self._result(path, future)).view(array.dtype) for index, future in reads.items()
    }
    return assembled(request, slices)

  def _result(self, path: str, future: Any) -> Any:
    try:
      return future.result()
    except (ValueError, OSError) as error:
      raise refusal(error, self.path) or unreadable(self.path, first_line(error)) from error
