"""Sources: what can be restored from, and how its arrays are read.

A source has a record and reads leaves by path. There is one for what Orbax wrote, with our record or
without, and one for the files of `flax.training.checkpoints`.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import re
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np
from etils import epath
from orbax.checkpoint import v1 as ocp

from flax_spmd._src.checkpoint.storage import contents, folders, skeleton
from flax_spmd._src.checkpoint.storage import record as records
from flax_spmd._src.checkpoint.storage.orbax_context import context
from flax_spmd._src.checkpoint.storage.record import Leaf, Record
from flax_spmd.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError

_METADATA, _TREE_METADATA, _INDICATOR = '_CHECKPOINT_METADATA', '_METADATA', 'orbax.checkpoint'
_PART = 'state'  # the folder in which Orbax v1 puts the arrays
_UNFINISHED = 'orbax-checkpoint-tmp'
_FLAX_FILE = re.compile(r'.*_\d+(\.\d+)?\Z')
_ARRAYS = 'array_metadatas'
_LEAST_ON_THE_WAY = 64 << 20  # bytes
_LARGEST_METADATA = 512 << 20  # bytes: 10,000 leaves take two million


class Source(Protocol):
  """A checkpoint that can be read."""

  path: epath.Path
  record: Record

  def read(self, wanted: Mapping[str, Any], memory: int | None = None) -> dict[str, Any]:
    """The leaves that are wanted, by path.

    Args:
      wanted: per path a `jax.ShapeDtypeStruct` of the stored shape and dtype with a sharding (comes
        as a jax.Array), or without (comes as a numpy array). No Python numbers.
      memory: bytes that may be on their way at once.
    """
    ...


def open_source(path: str | os.PathLike[str]) -> Source:
  """The checkpoint at a path, whoever wrote it.

  Raises:
    CheckpointNotFoundError: there is none.
    CheckpointDamagedError: it cannot be read.
    CheckpointError: a newer version wrote it.
  """
  asked = folders.as_path(path)
  found = folders.existing(asked)
  if found.is_dir() and (found / 'checkpoint').is_file():
    return FlaxSource(found / 'checkpoint')  # of flax, in a folder
  if found.is_file():
    return FlaxSource(found)
  folder, part = _folder_and_part(found)
  if not is_checkpoint(folder):
    raise CheckpointNotFoundError(
      f'There is no checkpoint at {asked}{_nearby(asked)}.\n'
      'Fix: pass the path that was given to flax_spmd.checkpoint.save.'
    )
  custom = custom_metadata(folder)
  if records.KEY in custom and part in (None, _PART):
    return OrbaxSource(folder, records.from_json(custom[records.KEY], os.fspath(asked)))
  part = part or _part_with_arrays(folder)
  return OrbaxSource(folder, _foreign_record(folder, part), part)


def is_checkpoint(path: epath.Path) -> bool:
  """Whether there is a whole checkpoint of Orbax's at a path."""
  if not path.is_dir() or _UNFINISHED in path.name:
    return False
  is_marked = any((path / mark).exists() for mark in (_METADATA, _INDICATOR, _TREE_METADATA))
  if not is_marked and not _parts(path):
    return False
  return (path / _METADATA).exists() or ocp.is_orbax_checkpoint(path)


def _folder_and_part(path: epath.Path) -> tuple[epath.Path, str | None]:
  """The checkpoint, and its part if the path is that of one."""
  has_own = any((path / mark).exists() for mark in (_METADATA, _INDICATOR))
  if not has_own and (path / _TREE_METADATA).exists() and (path.parent / _METADATA).exists():
    return path.parent, path.name
  return path, None


def custom_metadata(path: epath.Path) -> dict[str, Any]:
  """What was given to Orbax to be kept with a checkpoint; raises as `open_source`."""
  custom = _metadata(path / _METADATA, path).get('custom_metadata')
  return custom if isinstance(custom, dict) else {}


def _metadata(file: epath.Path, where: epath.Path) -> dict[str, Any]:
  """A metadata file of Orbax's, which may have been written or damaged by anybody."""
  if not file.exists():
    return {}
  try:
    size = file.stat().length
    if size > _LARGEST_METADATA:
      raise ValueError(f'it has {size:,} bytes')
    content = json.loads(file.read_text())
    if not isinstance(content, dict):
      raise ValueError('it is no JSON object')
    return content
  except (ValueError, RecursionError) as error:
    reason = 'it is nested too deeply' if isinstance(error, RecursionError) else str(error)
    raise CheckpointDamagedError(
      f'The checkpoint {where} cannot be read, because of {file.name}: {reason}.\n'
      'Fix: restore another checkpoint; this one was changed after it was written.'
    ) from error


def _nearby(path: epath.Path) -> str:
  """What there is instead, to find the right path by."""
  if path.is_dir():
    inside = checkpoints_in(path)
    return f'; it holds the checkpoints {", ".join(inside)}' if inside else _why_none(path)
  if not path.parent.is_dir():
    return f'; {path.parent} does not exist either'
  beside = checkpoints_in(path.parent)
  return f'; beside it are {", ".join(beside)}' if beside else ''


def saved_at(path: epath.Path) -> datetime.datetime | None:
  """When a checkpoint was saved, if it says so."""
  stamp = _metadata(path / _METADATA, path).get('commit_timestamp_nsecs') if path.is_dir() else None
  return datetime.datetime.fromtimestamp(stamp / 1e9) if isinstance(stamp, int) else None


def checkpoints_in(folder: epath.Path) -> list[str]:
  """The names of the checkpoints in a folder."""
  return sorted(
    child.name
    for child in folder.iterdir()
    if not child.name.startswith('.') and (is_checkpoint(child) or _is_of_flax(child))
  )


def _is_of_flax(path: epath.Path) -> bool:
  """Whether it looks like a file of `flax.training.checkpoints`."""
  return path.is_file() and _FLAX_FILE.match(path.name) is not None


def _why_none(path: epath.Path) -> str:
  if _UNFINISHED in path.name:
    return ' (a save that was not finished)'
  unfinished = [child.name for child in path.iterdir() if _UNFINISHED in child.name]
  return f'; the save of {unfinished[0]} was not finished' if unfinished else ' (a folder without one)'


class OrbaxSource:
  """What Orbax wrote, through this package or not."""

  def __init__(self, path: epath.Path, record: Record, part: str | None = None):
    self.path, self.record, self._part = path, record, part
    self._is_packed = any(leaf.packed for leaf in record.leaves.values())

  def read(self, wanted: Mapping[str, Any], memory: int | None = None) -> dict[str, Any]:
    """See `Source`."""
    _check_names(self.path)
    return self._read_packed(wanted, memory) if self._is_packed else self._read(wanted, memory)

  def _read(self, wanted: Mapping[str, Any], memory: int | None) -> dict[str, Any]:
    paths = list(self.record.leaves)
    target = contents.disk_tree(self.record, lambda number: _asked(wanted.get(paths[number], ...)))
    read = contents.disk_leaves(self.record, self._load(target, memory)) if wanted else {}
    return {path: read[path] for path in wanted}

  def _read_packed(self, wanted: Mapping[str, Any], memory: int | None) -> dict[str, Any]:
    leaves = self.record.leaves
    numbers = {path: str(i) for i, path in enumerate(leaves)}
    large = {
      numbers[path]: _asked(wanted.get(path, ...))
      for path, leaf in leaves.items()
      if leaf.packed is None and not leaf.is_number
    }
    sizes: dict[str, int] = {}
    for leaf in leaves.values():
      if leaf.packed:
        sizes[leaf.packed[0]] = sizes.get(leaf.packed[0], 0) + int(np.prod(leaf.shape, dtype=int))
    packed = {dtype: np.empty(size, records.dtype_of(dtype)) for dtype, size in sizes.items()}
    read = self._load({contents.LEAVES: large, contents.PACKED: packed}, memory)
    found = {}
    for path in wanted:
      leaf = leaves[path]
      if leaf.packed is None:
        found[path] = read[contents.LEAVES][numbers[path]]
      else:
        found[path] = _unpacked(read[contents.PACKED][leaf.packed[0]], leaf)
    small = [path for path in wanted if leaves[path].packed and wanted[path].sharding is not None]
    placed = jax.device_put([found[p] for p in small], [wanted[p].sharding for p in small])
    return found | dict(zip(small, placed, strict=True))

  def _load(self, target: Any, memory: int | None) -> Any:
    try:
      with context(memory=_at_once(target, memory)):
        return ocp.load(self.path, target, checkpointable_name=self._name())
    except (
      Exception
    ) as error:  # Orbax raises all kinds for files that are gone, or have anything in them
      if isinstance(error, MemoryError) or 'RESOURCE_EXHAUSTED' in str(error):
        raise
      raise CheckpointDamagedError(
        f'The checkpoint {self.path} cannot be read: {(str(error).splitlines() or [""])[0][:500]}\n'
        'Fix: restore another checkpoint; files of this one are gone, or have changed since it was written.'
      ) from error

  def _name(self) -> str | None:
    return self._part or _part_with_arrays(self.path)


def _at_once(target: Any, memory: int | None) -> int:
  """Bytes that may be on their way at once; if nobody says, a part, or twice the state would be in memory.

  It is no less than the largest array, which Orbax reads as a whole.
  """
  arrays = [leaf for leaf in jax.tree.leaves(target) if hasattr(leaf, 'shape')]
  sizes = [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in arrays]
  return max(memory or max(_LEAST_ON_THE_WAY, sum(sizes) // 8), 1 + max(sizes, default=0))


def _asked(leaf: Any) -> Any:
  """A leaf as Orbax wants it: with a sharding, or as a numpy array, or `...` for one that is left out.

  There are no keys in numpy: without a sharding they come onto a device of this process.
  """
  if leaf is ... or isinstance(leaf, type) or leaf.sharding is not None:
    return leaf
  if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    return leaf.update(sharding=jax.sharding.SingleDeviceSharding(jax.local_devices()[0]))
  return np.empty(leaf.shape, leaf.dtype)


def _unpacked(vector: np.ndarray, leaf: Leaf) -> np.ndarray:
  _, offset = leaf.packed or ('', 0)
  return vector[offset : offset + int(np.prod(leaf.shape, dtype=int))].reshape(leaf.shape)


def _parts(path: epath.Path) -> list[str]:
  """The folders in which a checkpoint has arrays, beside each other."""
  children = [child for child in path.iterdir() if (child / _TREE_METADATA).exists()]
  return sorted(child.name for child in children if not (child / _METADATA).exists())


def _part_with_arrays(path: epath.Path) -> str | None:
  """The folder in which a checkpoint has its arrays; None: they lie in the checkpoint itself."""
  if (path / _TREE_METADATA).exists():
    return None
  parts = _parts(path)
  if _PART in parts or len(parts) == 1:
    return _PART if _PART in parts else parts[0]
  if not parts:
    raise CheckpointDamagedError(
      f'The checkpoint {path} has no arrays: {_TREE_METADATA} is in none of its folders.\n'
      'Fix: restore another checkpoint; files of this one are gone, or it holds something else.'
    )
  raise CheckpointError(
    f'The checkpoint {path} has {len(parts)} parts with arrays: {", ".join(parts)}.\n'
    f'Fix: pass the path of one of them, such as {path / parts[0]}.'
  )


def _check_names(path: epath.Path) -> None:
  """No leaf is called by a way out of the checkpoint: Orbax may take a name for the path of a file."""
  for folder in (path, *(child for child in path.iterdir() if child.is_dir())):
    content = _metadata(folder / _TREE_METADATA, path).get('tree_metadata') or {}
    for key, said in content.items() if isinstance(content, dict) else ():
      if any(map(_leads_out, [*re.split(r"'(?:, ')?", key), *_keys(said)])):
        raise CheckpointDamagedError(
          f'The checkpoint {path} has a leaf called {key}, which leads out of it.\n'
          'Fix: do not use this checkpoint; nothing of it was read.'
        )


def _keys(said: Any) -> list[str]:
  """The names on the way to a leaf, as Orbax says them beside the leaf's own."""
  keys = said.get('key_metadata') if isinstance(said, dict) else None
  return [str(key.get('key')) for key in keys or () if isinstance(key, dict)]


def _leads_out(name: str) -> bool:
  return name.startswith(('/', '\\')) or '..' in re.split(r'[/\\]', name)


def _foreign_record(path: epath.Path, part: str | None) -> Record:
  """The record of a checkpoint that has none: its shapes and dtypes."""
  _check_names(path)
  tree = _foreign_tree(path, part)
  apart = skeleton.take_apart(tree)
  described = [_described(leaf) for leaf in apart.leaves]
  leaves = records.by_path(skeleton.paths(apart.skeleton), described)
  for name, dtype in _random_keys(path / part if part else path).items():
    leaf = leaves.get(name)
    if leaf is not None and leaf.shape:
      leaves[name] = Leaf(leaf.shape[:-1], dtype)
  return Record(apart.skeleton, leaves, {}, None, 'orbax')


def _random_keys(folder: epath.Path) -> dict[str, str]:
  """The arrays that are of random keys, which Orbax describes as their data, and their dtypes."""
  found = {}
  for file in (folder / _ARRAYS).iterdir() if (folder / _ARRAYS).is_dir() else ():
    for entry in _metadata(file, folder).get('array_metadatas') or ():
      about = entry.get('array_metadata') if isinstance(entry, dict) else None
      about = about if isinstance(about, dict) else {}
      extra = about.get('ext_metadata')
      kind = records.key_dtype(extra.get('random_key_impl')) if isinstance(extra, dict) else None
      if kind is not None:
        found[str(about.get('param_name')).replace('.', '/')] = kind
  return found


def _foreign_tree(path: epath.Path, part: str | None) -> Any:
  """What Orbax says of each leaf, in the place of it."""
  try:
    tree = ocp.metadata(path, checkpointable_name=part).metadata
    reason = 'Orbax does not say what is in it; it cannot for a Python bool'
  except Exception as error:  # of all kinds
    tree, reason = None, (str(error).splitlines() or [''])[0][:500]
  if tree is None:
    raise CheckpointDamagedError(
      f'The checkpoint {path} cannot be read: {reason}.\n'
      'Fix: load it with orbax.checkpoint, and save it with flax_spmd.checkpoint.save.'
    )
  return tree


def _described(leaf: Any) -> Leaf:
  """A leaf of Orbax's metadata: an array's, or for a number or a text any one of its type."""
  if hasattr(leaf, 'shape'):
    return Leaf(tuple(leaf.shape), str(leaf.dtype))
  return Leaf((), f'python.{type(leaf).__name__}')


class FlaxSource:
  """A file of `flax.training.checkpoints`: one of msgpack, read as a whole."""

  def __init__(self, path: epath.Path):
    self.path = path
    self._leaves = _flax_leaves(path)
    apart = skeleton.take_apart(self._leaves)
    paths = skeleton.paths(apart.skeleton)
    self._by_path = records.by_path(paths, apart.leaves)
    described = {path: records.describe(leaf) for path, leaf in self._by_path.items()}
    self.record = Record(apart.skeleton, described, {}, None, 'flax')

  def read(self, wanted: Mapping[str, Any], memory: int | None = None) -> dict[str, Any]:
    """See `Source`."""
    del memory  # it is all there already
    return {
      path: self._by_path[path]
      if asked.sharding is None
      else jax.device_put(self._by_path[path], asked.sharding)
      for path, asked in wanted.items()
    }


def _flax_leaves(path: epath.Path) -> Any:
  from flax import serialization

  try:
    return serialization.msgpack_restore(path.read_bytes())
  except Exception as error:  # msgpack has a dozen kinds
    raise CheckpointDamagedError(
      f'The file {path} is no checkpoint of flax.training.checkpoints: {error}.\n'
      'Fix: pass the folder of a checkpoint, or a file that save_checkpoint wrote.'
    ) from error
