"""T5X: checkpoints in its own format, a msgpack file beside a zarr array for each parameter.

    checkpoint_1000/checkpoint                        {'version': 3, 'optimizer': {'target': ..., 'state': ...}}
    checkpoint_1000/target.encoder.mlp.wi.kernel/     .zarray, 0.0, 0.1, ...

A leaf of the file is an array, or TensorStore's spec of the folder that holds it. Of a spec, only the name of
the folder, the shape and the dtype are used: drivers, buckets and paths are those of the checkpoint at hand.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from etils import epath

from flax_spmd._src.checkpoint.storage.parsed_json import unreadable
from flax_spmd._src.checkpoint.storage.record import dtype_of
from flax_spmd._src.checkpoint.storage.store import checked
from flax_spmd._src.checkpoint.storage.stored_arrays import StoredArray, StoredArraysReader
from flax_spmd._src.checkpoint.storage.tensorstore_slices import kvstore_of
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


class T5xReader(StoredArraysReader):
  """Reads a checkpoint of T5X.

  Args:
    file: the msgpack file.
    content: its content.

  Raises:
    CheckpointDamagedError: it describes no arrays, or one of its descriptions is invalid.
  """

  def __init__(self, file: epath.Path, content: dict[str, Any]):
    tree = content.get(_STATE, content) if _VERSION in content else content
    tree = _with_arrays(tree, content.get(_VERSION, 0), file.parent)
    super().__init__(file.parent, file, tree, 't5x')


def _with_arrays(node: Any, version: Any, path: epath.Path) -> Any:
  """The tree with its specs as stored arrays."""
  if _is_spec(node):
    return _stored(node, version, path)
  if isinstance(node, dict):
    return {name: _with_arrays(child, version, path) for name, child in node.items()}
  return node


def _stored(spec: dict[str, Any], version: Any, path: epath.Path) -> StoredArray:
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
    name = checked(folder.rstrip('/'), path)
  except (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    SyntaxError,
  ) as error:  # numpy parses dtypes
    if isinstance(error, CheckpointDamagedError):
      raise
    raise unreadable(path, f'the description {str(spec)[:500]} of an array is invalid') from error
  dtype = dtype_of('bfloat16') if is_bfloat16 else stored
  return StoredArray(name, spec['driver'], kvstore_of(path / name), shape, dtype, stored)
