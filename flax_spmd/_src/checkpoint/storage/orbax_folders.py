"""Orbax's folders: the files that mark a checkpoint, the parts with arrays, and the names that its descriptions claim.

Anyone may have written or damaged them: sizes and names are checked before they are used.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from flax_spmd._src.checkpoint.storage.parsed_json import expect, json_object, parsing
from flax_spmd._src.checkpoint.storage.tensorstore_slices import kvstore_of
from flax_spmd.errors import CheckpointDamagedError

METADATA, TREE_METADATA, INDICATOR = '_CHECKPOINT_METADATA', '_METADATA', 'orbax.checkpoint'
PART = 'state'  # the folder that Orbax v1 writes arrays to
UNFINISHED = 'orbax-checkpoint-tmp'
_INDEX = 'manifest.ocdbt'  # of the bytes of arrays
_ARRAYS = ('jax.Array', 'np.ndarray', 'scalar')  # Orbax's names of types that have bytes of their own
_EMPTY: dict[Any, Any] = {'Dict': {}, 'List': [], 'None': None}  # those that have none
_LARGEST_METADATA = 512 << 20  # bytes; 10,000 leaves take two million


def read_metadata(file: epath.Path, checkpoint: epath.Path) -> dict[str, Any]:
  """A metadata file of Orbax. Anyone may have written or damaged it."""
  if not file.exists():
    return {}
  with parsing(checkpoint, file.name):
    expect(not file.is_dir(), 'it is a folder')
    size = file.stat().length
    expect(size <= _LARGEST_METADATA, f'it has {size:,} bytes')
    return json_object(file.read_bytes())


def folder_and_part(path: epath.Path) -> tuple[epath.Path, str | None]:
  """The checkpoint of a path, and the name of its part if the path is a part of one."""
  has_own = any((path / mark).exists() for mark in (METADATA, INDICATOR))
  if not has_own and may_hold_arrays(path) and (path.parent / METADATA).exists():
    return path.parent, path.name
  return path, None


def parts_of(path: epath.Path) -> list[str]:
  """The subfolders of a checkpoint that hold arrays, or have lost their description."""
  children = [child for child in path.iterdir() if may_hold_arrays(child)]
  return sorted(child.name for child in children if not (child / METADATA).exists())


def may_hold_arrays(part: epath.Path) -> bool:
  return any((part / mark).exists() for mark in (TREE_METADATA, _INDEX))


def part_with_arrays(path: epath.Path) -> str | None:
  """The subfolder of a checkpoint of ours that holds its arrays; None if the checkpoint itself does."""
  parts = parts_with_arrays(path)
  return PART if PART in parts else parts[0]


def parts_with_arrays(path: epath.Path) -> Sequence[str | None]:
  """The subfolders of a checkpoint that hold arrays; only None if the checkpoint itself does."""
  if (path / TREE_METADATA).exists():
    return [None]
  parts = parts_of(path)
  if not parts:
    raise CheckpointDamagedError(
      f'Checkpoint {path} has no arrays: none of its folders contains {TREE_METADATA}.\n'
      'Fix: restore another checkpoint; this one lacks files, or holds no arrays.'
    )
  return parts


def check_names(path: epath.Path, part: str | None) -> None:
  """Raises if the name of a leaf leads out of the checkpoint: Orbax may use it as a file path.

  Args:
    path: folder of the checkpoint.
    part: its part to read; None if its arrays are in the folder itself.
  """
  file = (path / part if part else path) / TREE_METADATA
  content = read_metadata(file, path).get('tree_metadata') or {}
  for key, entry in content.items() if isinstance(content, dict) else ():
    if any(map(_leads_out, [*_names_in(key), *_keys(entry)])):
      raise CheckpointDamagedError(
        f'Checkpoint {path} has a leaf named {key}, which leads out of its folder.\n'
        'Fix: do not use this checkpoint; none of its arrays were read.'
      )


def described_keys(path: epath.Path, part: str) -> list[tuple[str, ...]]:
  """The keys on the way to each array in Orbax's description of a part.

  Raises:
    CheckpointDamagedError: the description is not JSON.
  """
  content = read_metadata(path / part / TREE_METADATA, path)
  return [tuple(_keys(entry)) for entry in _entries(content) if _array_value(entry)]


def array_values(content: Mapping[str, Any]) -> list[dict[str, Any]]:
  """The value of each array in Orbax's description of a part."""
  return [value for entry in _entries(content) if (value := _array_value(entry))]


def empty_values(content: Mapping[str, Any]) -> dict[str, Any]:
  """The values in Orbax's description of a part that have no bytes: empty containers and None, by keys joined by dots."""
  values = {
    '.'.join(_keys(entry)): entry.get('value_metadata')
    for entry in _entries(content)
    if isinstance(entry, dict)
  }
  kinds = {name: value.get('value_type') for name, value in values.items() if isinstance(value, dict)}
  return {name: _EMPTY[kind] for name, kind in kinds.items() if kind in _EMPTY}


def names_of_entries(content: Mapping[str, Any]) -> list[str]:
  """The name of each leaf in Orbax's description of a part: keys joined by dots."""
  return ['.'.join(_keys(entry)) for entry in _entries(content)]


def _entries(content: Mapping[str, Any]) -> Iterable[Any]:
  entries = content.get('tree_metadata')
  return entries.values() if isinstance(entries, dict) else ()


def _array_value(entry: Any) -> dict[str, Any] | None:
  value = entry.get('value_metadata') if isinstance(entry, dict) else None
  return value if isinstance(value, dict) and value.get('value_type') in _ARRAYS else None


def array_kvstore(folder: epath.Path, name: str) -> dict[str, Any]:
  """TensorStore's key-value store of an array: in the index of the bytes of arrays, or in a folder of its own."""
  if (folder / _INDEX).exists():
    return {'driver': 'ocdbt', 'base': kvstore_of(folder), 'path': f'{name}/'}
  return kvstore_of(folder / name)


def _keys(entry: Any) -> list[str]:
  """The keys on the way to a leaf, which Orbax stores beside the leaf's own name."""
  keys = entry.get('key_metadata') if isinstance(entry, dict) else None
  return [str(key.get('key')) for key in keys or () if isinstance(key, dict)]


def _names_in(key: str) -> list[str]:
  """The names in the key of an entry: a tuple as Python writes it, with its escapes; else the parts between quotes."""
  if re.fullmatch(rf'\({_LITERAL}(?:, {_LITERAL})*,?\)', key):
    try:
      return [
        *map(ast.literal_eval, re.findall(_LITERAL, key))
      ]  # never a nested value, which may end the process
    except (SyntaxError, ValueError):
      pass
  return re.split(r"'(?:, ')?", key)


_LITERAL = r"""(?:'(?:[^'\\\n]|\\[^\n])*'|"(?:[^"\\\n]|\\[^\n])*")"""


def _leads_out(name: str) -> bool:
  return name.startswith(('/', '\\')) or '..' in re.split(r'[/\\]', name)
