"""Aggregated leaves: Orbax before 0.6 wrote arrays into one msgpack file if asked to, and Flax asked for all that are not sharded.

    checkpoint         {'params': {'w': 'PLACEHOLDER://params.w', 'b': an array}}
    params.w/          .zarray, 0.0, ...; or the same keys in OCDBT

Orbax's newest interface does not read that file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etils import epath

from flax_spmd._src.checkpoint.storage.orbax_folders import (
  TREE_METADATA,
  array_kvstore,
  array_values,
  empty_values,
  read_metadata,
)
from flax_spmd._src.checkpoint.storage.parsed_json import unreadable
from flax_spmd._src.checkpoint.storage.recognition import MSGPACK
from flax_spmd._src.checkpoint.storage.refused_reads import refusal
from flax_spmd._src.checkpoint.storage.store import checked
from flax_spmd._src.checkpoint.storage.stored_arrays import StoredArray, StoredArraysReader
from flax_spmd._src.checkpoint.storage.tensorstore_slices import opened
from flax_spmd._src.checkpoint.storage.whole_file_reader import flax_tree, not_flax
from flax_spmd._src.joint_call import first_line
from flax_spmd.errors import CheckpointError

_PLACEHOLDER = 'PLACEHOLDER://'


def is_aggregated(folder: epath.Path) -> bool:
  """Whether some arrays of a part are in its msgpack file. Orbax before 0.6 wrote that file in any case."""
  if not (folder / MSGPACK).is_file():
    return False
  content = read_metadata(folder / TREE_METADATA, folder)
  return any(value.get('skip_deserialize') is True for value in array_values(content))


def has_placeholders(node: Any) -> bool:
  """Whether a tree has leaves that stand for arrays beside its file."""
  if isinstance(node, (dict, list)):
    return any(map(has_placeholders, node.values() if isinstance(node, dict) else node))
  return isinstance(node, str) and node.startswith(_PLACEHOLDER)


def aggregated_reader(path: epath.Path, folder: epath.Path) -> StoredArraysReader:
  """The reader of a part with aggregated leaves.

  Args:
    path: folder of the checkpoint.
    folder: folder of the part.

  Raises:
    CheckpointDamagedError: the file or an array that it names cannot be read.
  """
  file = folder / MSGPACK
  content = read_metadata(folder / TREE_METADATA, folder)
  driver = 'zarr3' if content.get('use_zarr3') is True else 'zarr'
  tree = flax_tree(file)
  try:
    tree = _with_arrays(tree, folder, driver, empty_values(content))
    return StoredArraysReader(path, file, tree, 'orbax')
  except CheckpointError:
    raise
  except (ValueError, TypeError, RecursionError) as error:  # leaves that are no arrays, or too deep
    raise not_flax(file, error) from error


def _with_arrays(node: Any, folder: epath.Path, driver: str, empty: Mapping[str, Any]) -> Any:
  """The tree with its placeholders as stored arrays, and those of empty containers as such."""
  if isinstance(node, dict):
    return {name: _with_arrays(child, folder, driver, empty) for name, child in node.items()}
  if isinstance(node, list):
    return [_with_arrays(child, folder, driver, empty) for child in node]
  if not has_placeholders(node):
    return node
  name = node.removeprefix(_PLACEHOLDER)
  return empty[name] if name in empty else _stored(checked(name, folder), folder, driver)


def _stored(name: str, folder: epath.Path, driver: str) -> StoredArray:
  kvstore = array_kvstore(folder, name)
  try:
    store = opened(driver, kvstore).result()
  except (ValueError, OSError) as error:
    raise refusal(error, folder) or unreadable(folder, first_line(error)) from error
  dtype = store.dtype.numpy_dtype
  return StoredArray(name, driver, kvstore, tuple(store.shape), dtype, dtype)
