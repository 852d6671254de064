"""Whole-file reader: files that are read as a whole, msgpack of `flax.training.checkpoints` and of EasyLM, npz of numpy."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath

from flax_spmd._src.checkpoint.storage import skeleton
from flax_spmd._src.checkpoint.storage.record import (
  Record,
  by_path,
  describe,
)
from flax_spmd._src.checkpoint.storage.refused_reads import refusal
from flax_spmd._src.data.host_values import placed
from flax_spmd.errors import CheckpointDamagedError

# numpy's error for the name of a dtype of texts, which Flax stores
_TEXTS = re.compile(r"data type '(str|bytes)\d+' not understood")


class WholeFileReader:
  """Reads a file that has been read as a whole.

  Args:
    path: the file.
    content: its content.
    written_by: name of the library that writes such files.
  """

  def __init__(self, path: epath.Path, content: Any, written_by: str = 'flax'):
    self.path = self.folder = path
    flat = skeleton.flatten(content)
    self._by_path = by_path(skeleton.paths(flat.skeleton), flat.leaves)
    leaves = {path: describe(leaf) for path, leaf in self._by_path.items()}
    self.record = Record(flat.skeleton, leaves, {}, None, written_by)

  def read(self, requests: Mapping[str, Any], memory: int | None = None) -> dict[str, Any]:
    """See `CheckpointReader`."""
    del memory  # the file has been read already
    return {path: placed(self._by_path[path], request.sharding) for path, request in requests.items()}


def flax_tree(path: epath.Path) -> Any:
  """The content of a file of `flax.training.checkpoints`, or of EasyLM.

  Raises:
    CheckpointDamagedError: it is neither, or incomplete.
  """
  import msgpack
  from flax import serialization

  try:
    data = path.read_bytes()
    try:
      content = serialization.msgpack_restore(data)
      return _streamed(data) if _is_leaf(content) else content
    except msgpack.ExtraData:
      if (streamed := _streamed(data)) is None:
        raise
      return streamed
  except Exception as error:  # msgpack raises a dozen kinds
    raise refusal(error, path) or not_flax(path, error) from error


def _streamed(data: bytes) -> Any:
  """The tree of a file of EasyLM: the path and the bytes of one leaf after the other. None if it is none."""
  import msgpack
  from flax import serialization, traverse_util

  unpacker = msgpack.Unpacker(io.BytesIO(data), max_buffer_size=len(data))
  leaves, end = [], 0
  for each in unpacker:
    leaves.append(each)
    end = unpacker.tell()
  if not all(map(_is_leaf, leaves)):
    return None
  if end < len(data):
    raise ValueError(f'the leaf at byte {end:,} is incomplete')
  return traverse_util.unflatten_dict(
    {tuple(keys): serialization.msgpack_restore(value) for keys, value in leaves}
  )


def _is_leaf(content: Any) -> bool:
  """Whether this is a leaf of a file of EasyLM, with its path."""
  return isinstance(content, list) and list(map(type, content)) == [list, bytes]


def is_npz(path: epath.Path) -> bool:
  """Whether a file is a zip archive, as those of `numpy.savez` are, or should be one by its name."""
  with path.open('rb') as file:
    return path.name.endswith('.npz') or file.read(4) == b'PK\x03\x04'


def npz_tree(path: epath.Path) -> Any:
  """The content of a file of `numpy.savez`. Slashes in names separate modules, as in the files of big_vision.

  Raises:
    CheckpointDamagedError: it holds something else than arrays, or is incomplete.
  """
  from flax import traverse_util

  try:
    with path.open('rb') as file, np.lib.npyio.NpzFile(file, allow_pickle=False) as arrays:
      flat = {tuple(name.split('/')): _typed(name, arrays[name]) for name in arrays.files}
    inner = ['/'.join(keys) for keys in flat if any(keys[:n] in flat for n in range(1, len(keys)))]
    if inner:
      raise ValueError(f'{inner[0]} is below another array')
    return traverse_util.unflatten_dict(flat)
  except Exception as error:  # numpy and zipfile raise many kinds
    raise refusal(error, path) or CheckpointDamagedError(
      f'The file {path} is not an archive of arrays of numpy: {str(error).rstrip(".")}.\n'
      'Fix: pass a file of numpy.savez; a file of PyTorch can be converted to safetensors.'
    ) from error


def _typed(name: str, array: Any) -> Any:
  """An array of an archive; a text as such. Numpy has no name for bfloat16, and calls it two bytes."""
  if not isinstance(array, np.ndarray):
    raise ValueError(f'{name} is no array')
  if array.dtype == np.dtype('V2'):
    return array.view(ml_dtypes.bfloat16)
  return array.astype(array.dtype.newbyteorder('=')) if array.dtype.kind in 'biufc' else array.tolist()


def not_flax(path: epath.Path, error: Exception) -> CheckpointDamagedError:
  """The error for a file that Flax does not read."""
  if _TEXTS.search(str(error)):
    return CheckpointDamagedError(
      f'The file {path} has an array of texts, which Flax writes but cannot read.\n'
      'Fix: save the state again without arrays of texts.'
    )
  return CheckpointDamagedError(
    f'The file {path} is not a checkpoint of flax.training.checkpoints: {str(error).rstrip(".")}.\n'
    'Fix: pass the folder of a checkpoint, or a file that save_checkpoint wrote.'
  )
