"""Readers: the formats that can be restored, each with a record and a way to read its arrays.

`OrbaxReader` reads the checkpoints of Orbax, with a record of ours or without; `FlaxReader` reads the files
of `flax.training.checkpoints`, `T5xReader` those of T5X with the arrays beside them, and `SafetensorsReader`
those of Hugging Face.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import jax
import numpy as np
from etils import epath
from orbax.checkpoint import v1 as ocp

from flax_spmd._src.checkpoint.storage import contents, skeleton
from flax_spmd._src.checkpoint.storage.direct_reads import DirectReads
from flax_spmd._src.checkpoint.storage.head import HEAD, read_head
from flax_spmd._src.checkpoint.storage.host_shards import is_elsewhere, nowhere, put
from flax_spmd._src.checkpoint.storage.manifest import FileRecord, whole_generations
from flax_spmd._src.checkpoint.storage.orbax_context import local_context
from flax_spmd._src.checkpoint.storage.parts_reader import PartsReader, is_state, with_others
from flax_spmd._src.checkpoint.storage.record import (
  KEY,
  LeafRecord,
  Record,
  by_path,
  describe,
  dtype_of,
  from_json,
  is_key,
  key_dtype,
)
from flax_spmd._src.checkpoint.storage.safetensors_files import is_safetensors
from flax_spmd._src.checkpoint.storage.safetensors_reader import SafetensorsReader
from flax_spmd._src.checkpoint.storage.source import Source, current_source
from flax_spmd._src.checkpoint.storage.store import as_path, open_store
from flax_spmd._src.checkpoint.storage.t5x_reader import T5xReader, is_t5x
from flax_spmd.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError

_METADATA, _TREE_METADATA, _INDICATOR = '_CHECKPOINT_METADATA', '_METADATA', 'orbax.checkpoint'
_MSGPACK = 'checkpoint'  # the file of flax and T5X in a folder
_PART = 'state'  # the folder that Orbax v1 writes arrays to
_UNFINISHED = 'orbax-checkpoint-tmp'
_FLAX_FILE = re.compile(r'.*_\d+(\.\d+)?\Z')
_ARRAYS = 'array_metadatas'
_INDEX = 'manifest.ocdbt'  # of the bytes of arrays
_MIN_IN_FLIGHT = 64 << 20  # bytes
_LARGEST_METADATA = 512 << 20  # bytes; 10,000 leaves take two million


class CheckpointReader(Protocol):
  """A checkpoint that can be read.

  Attributes:
    path: folder or file of the checkpoint.
    record: description of its arrays.
    folder: folder or file that the library whose format it has can read.
  """

  path: epath.Path
  record: Record
  folder: epath.Path

  def read(self, requests: Mapping[str, Any], memory: int | None = None) -> dict[str, Any]:
    """Reads leaves by path.

    Args:
      requests: per path, a `jax.ShapeDtypeStruct` of the stored shape and dtype. With a sharding, the
        leaf is returned as a jax.Array, without one as a numpy array. Python numbers cannot be requested.
      memory: most bytes in flight from storage.
    """
    ...


def open_checkpoint(path: str | os.PathLike[str]) -> CheckpointReader:
  """Opens the checkpoint at a path, in any supported format.

  Raises:
    CheckpointNotFoundError: there is no checkpoint at the path.
    CheckpointDamagedError: the checkpoint cannot be read.
    CheckpointError: a newer version wrote the checkpoint.
  """
  return reader_of(path, current_source(as_path(path)))


def reader_of(path: str | os.PathLike[str], source: Source | None) -> CheckpointReader:
  """A reader of a generation; of the path itself if it has none."""
  if source is None:
    return _foreign_reader(as_path(path))
  return OrbaxReader(
    source.path, source.manifest.record, folder=source.folder, files=source.manifest.files
  )


def _foreign_reader(given: epath.Path) -> CheckpointReader:
  """A reader of a path without generations: of another library, or of an earlier version of this one."""
  folder = given
  if _holds_msgpack(folder):
    return _msgpack_reader(folder / _MSGPACK)
  if is_safetensors(folder) and not is_checkpoint(folder):
    return SafetensorsReader(folder)
  if folder.is_file():
    return _msgpack_reader(folder)
  _check_head(given)
  folder, part = _folder_and_part(folder)
  if not is_checkpoint(folder):
    raise CheckpointNotFoundError(
      f'There is no checkpoint at {given}{_nearby(given)}.\n'
      'Fix: pass the path that was given to flax_spmd.checkpoint.save.'
    )
  custom = custom_metadata(folder)
  if KEY in custom and part in (None, _PART):
    return OrbaxReader(folder, from_json(custom[KEY], os.fspath(given)))
  if part is not None:
    return OrbaxReader(folder, _foreign_record(folder, part), part)
  return _reader_of_parts(folder, _parts_with_arrays(folder))


def _holds_msgpack(path: epath.Path) -> bool:
  """Whether a folder is a checkpoint of flax or T5X. Orbax wrote such a file too, beside its description."""
  return path.is_dir() and (path / _MSGPACK).is_file() and not (path / _TREE_METADATA).exists()


def _msgpack_reader(file: epath.Path) -> CheckpointReader:
  content = _flax_tree(file)
  try:
    return T5xReader(file, content) if is_t5x(content) else FlaxReader(file, content)
  except CheckpointError:
    raise
  except (ValueError, TypeError, RecursionError) as error:  # JAX refuses keys of different types
    raise _not_flax(file, error) from error


def _reader_of_parts(folder: epath.Path, names: Sequence[str | None]) -> CheckpointReader:
  """The reader of a checkpoint without a record of ours: of its only part with arrays, or of all of them.

  A part whose description is damaged leaves the others readable; it is an error for those who ask for it.

  Raises:
    CheckpointDamagedError: no part can be read.
  """
  records: dict[str | None, Record] = {}
  damage: dict[str, CheckpointDamagedError] = {}
  for name in names:
    try:
      records[name] = _foreign_record(folder, name)
    except CheckpointDamagedError as error:
      damage[str(name)] = error
  if not records:
    raise next(iter(damage.values()))
  states = {name: record for name, record in records.items() if is_state(record)} or records
  readers = {name: OrbaxReader(folder, record, name) for name, record in states.items()}
  if len(readers) == 1 and not damage:
    (reader,) = readers.values()
  else:
    reader = PartsReader(folder, {str(name): each for name, each in readers.items()})
  others = {child.name for child in folder.iterdir() if child.is_dir()} if None not in names else set()
  skipped = [name for name in others if name not in readers and name not in damage]
  reasons = {name: str(error).partition('\n')[0] for name, error in damage.items()}
  reader.record = with_others(reader.record, skipped, reasons)
  return reader


def is_checkpoint(path: epath.Path) -> bool:
  """Whether a path holds a complete checkpoint of this package or of Orbax."""
  if has_generation(path):
    return True
  if not path.is_dir() or _UNFINISHED in path.name:
    return False
  try:
    is_marked = any((path / mark).exists() for mark in (_METADATA, _INDICATOR, _TREE_METADATA))
    if not is_marked and not _parts(path):
      return False
    return (path / _METADATA).exists() or ocp.is_orbax_checkpoint(path)
  except FileNotFoundError:  # it is being removed
    return False


def _folder_and_part(path: epath.Path) -> tuple[epath.Path, str | None]:
  """The checkpoint of a path, and the name of its part if the path is a part of one."""
  has_own = any((path / mark).exists() for mark in (_METADATA, _INDICATOR))
  if not has_own and _may_hold_arrays(path) and (path.parent / _METADATA).exists():
    return path.parent, path.name
  return path, None


def has_generation(path: epath.Path) -> bool:
  """Whether a path has a head that names a generation, or one that is lost or cannot be read."""
  store = open_store(path.parent)
  try:
    found = read_head(store, path)
    if found.tag is None:
      return bool(whole_generations(store, path.name))
    return found.head.generation is not None
  except CheckpointError:
    return True


def custom_metadata(path: epath.Path) -> dict[str, Any]:
  """The JSON values stored with a checkpoint; raises as `open_checkpoint`."""
  return metadata_of(path, current_source(path))


def metadata_of(path: epath.Path, source: Source | None) -> dict[str, Any]:
  """The JSON values stored with a generation; with the path itself if it has none."""
  if source is not None:
    return source.manifest.metadata
  custom = _metadata(path / _METADATA, path).get('custom_metadata')
  return custom if isinstance(custom, dict) else {}


def has_metadata(path: epath.Path) -> bool:
  """Whether a checkpoint has the file that holds its record. Only old versions of Orbax write none."""
  return has_generation(path) or (path / _METADATA).exists()


def has_record(path: epath.Path) -> bool:
  """Whether a checkpoint has a record of this package."""
  return has_generation(path) or KEY in custom_metadata(path)


def _metadata(file: epath.Path, checkpoint: epath.Path) -> dict[str, Any]:
  """A metadata file of Orbax. Anyone may have written or damaged it."""
  if not file.exists():
    return {}
  try:
    size = file.stat().length
    if size > _LARGEST_METADATA:
      raise ValueError(f'it has {size:,} bytes')
    content = json.loads(file.read_text())
    if not isinstance(content, dict):
      raise ValueError('it is not a JSON object')
    return content
  except (ValueError, RecursionError) as error:
    reason = 'it is nested too deeply' if isinstance(error, RecursionError) else str(error)
    raise CheckpointDamagedError(
      f'Checkpoint {checkpoint} cannot be read, because of {file.name}: {reason}.\n'
      'Fix: restore another checkpoint; this one was changed after it was written.'
    ) from error


def _check_head(path: epath.Path) -> None:
  """Raises CheckpointDamagedError for generations without a head, which is written first and removed last."""
  store = open_store(path.parent)
  names = whole_generations(store, path.name) if read_head(store, path).tag is None else []
  if names:
    raise CheckpointDamagedError(
      f'Checkpoint {path} has lost its HEAD, so the current one of its generations is unknown: {", ".join(names)}.\n'
      f'Fix: restore another checkpoint; or a generation, by its path: {path / names[-1]}.'
    )


def _nearby(path: epath.Path) -> str:
  """A hint at the right path: checkpoints in the folder, or beside it."""
  if path.is_dir():
    inside = checkpoints_in(path)
    return f'; it holds the checkpoints {", ".join(inside)}' if inside else _why_none(path)
  if not path.parent.is_dir():
    return f'; {path.parent} does not exist either'
  beside = checkpoints_in(path.parent)
  return f'; beside it are {", ".join(beside)}' if beside else ''


def saved_at(path: epath.Path) -> datetime.datetime | None:
  """The time at which a checkpoint was saved; None if it is not recorded."""
  source = current_source(path)
  if source is not None:
    return datetime.datetime.fromtimestamp(source.manifest.saved / 1e9)
  stamp = _metadata(path / _METADATA, path).get('commit_timestamp_nsecs') if path.is_dir() else None
  return datetime.datetime.fromtimestamp(stamp / 1e9) if isinstance(stamp, int) else None


def checkpoints_in(folder: epath.Path) -> list[str]:
  """The names of the checkpoints in a folder."""
  return sorted(
    child.name
    for child in folder.iterdir()
    if not child.name.startswith('.')
    and (is_checkpoint(child) or _is_flax_file(child) or _holds_msgpack(child) or is_safetensors(child))
  )


def _is_flax_file(path: epath.Path) -> bool:
  """Whether a path looks like a file of `flax.training.checkpoints`."""
  return path.is_file() and _FLAX_FILE.match(path.name) is not None


def _why_none(path: epath.Path) -> str:
  """Why a folder is not a checkpoint, for an error text."""
  if _UNFINISHED in path.name or (path / HEAD).exists():
    return ' (an unfinished save)'
  unfinished = [child.name for child in path.iterdir() if _UNFINISHED in child.name]
  return (
    f'; the save of {unfinished[0]} is unfinished' if unfinished else ' (a folder without a checkpoint)'
  )


class OrbaxReader:
  """Reads an Orbax checkpoint, written by this package or another.

  Args:
    path: path of the checkpoint.
    record: description of its arrays.
    part: subfolder with the arrays; default: found by its contents.
    folder: folder of the Orbax checkpoint; default: the path.
    files: the files in it, if they are recorded.
  """

  def __init__(
    self,
    path: epath.Path,
    record: Record,
    part: str | None = None,
    folder: epath.Path | None = None,
    files: Mapping[str, FileRecord] = MappingProxyType({}),
  ):
    self.path, self.record, self._part = path, record, part
    self.folder, self.files = folder or path, files
    self._is_packed = any(leaf.packed for leaf in record.leaves.values())

  def read(self, requests: Mapping[str, Any], memory: int | None = None) -> dict[str, Any]:
    """See `CheckpointReader`."""
    _check_names(self.folder, self._name())
    own = {path: each for path, each in requests.items() if not is_elsewhere(_sharding(each))}
    leaves = self._read_packed(own, memory) if self._is_packed else self._read(own, memory)
    self._check_keys(leaves)
    return {path: leaves[path] if path in own else nowhere(each) for path, each in requests.items()}

  @property
  def has_own_record(self) -> bool:
    """Whether the record is this package's, and not derived from Orbax's description."""
    return self.record.written_by == KEY

  def read_directly(
    self, requests: Mapping[str, Any], memory: int | None = None
  ) -> tuple[dict[str, Any], dict[str, str]]:
    """Reads leaves without Orbax's description of the arrays; see `DirectReads.read`."""
    return DirectReads(self.folder / (self._part or _PART), self.record).read(requests, memory)

  def _check_keys(self, leaves: Mapping[str, Any]) -> None:
    """Raises if random keys came as their numbers: Orbax keeps their implementation in a file of its own."""
    records = self.record.leaves
    wrong = [
      path for path, leaf in leaves.items() if is_key(records[path]) and str(leaf.dtype) == 'uint32'
    ]
    if wrong:
      raise CheckpointDamagedError(
        f'Checkpoint {self.path} cannot be read: the kind of random keys is lost, for {", ".join(wrong)}.\n'
        'Fix: restore another checkpoint; files of this one are missing, or have changed since it was written.'
      )

  def _read(self, requests: Mapping[str, Any], memory: int | None) -> dict[str, Any]:
    paths = list(self.record.leaves)
    target = contents.disk_tree(
      self.record, lambda index: _orbax_request(requests.get(paths[index], ...))
    )
    leaves = contents.disk_leaves(self.record, self._load(target, memory)) if requests else {}
    return {path: leaves[path] for path in requests}

  def _read_packed(self, requests: Mapping[str, Any], memory: int | None) -> dict[str, Any]:
    records = self.record.leaves
    indices = {path: str(i) for i, path in enumerate(records)}
    large = {
      indices[path]: _orbax_request(requests.get(path, ...))
      for path, leaf in records.items()
      if leaf.packed is None and not leaf.is_number
    }
    sizes: dict[str, int] = {}
    for leaf in records.values():
      if leaf.packed:
        sizes[leaf.packed[0]] = sizes.get(leaf.packed[0], 0) + int(np.prod(leaf.shape, dtype=int))
    packed = {dtype: np.empty(size, dtype_of(dtype)) for dtype, size in sizes.items()}
    tree = self._load({contents.LEAVES: large, contents.PACKED: packed}, memory)
    leaves = {}
    for path in requests:
      leaf = records[path]
      if leaf.packed is None:
        leaves[path] = tree[contents.LEAVES][indices[path]]
      else:
        leaves[path] = _unpacked(tree[contents.PACKED][leaf.packed[0]], leaf)
    small = [path for path in requests if records[path].packed and requests[path].sharding is not None]
    sharded = put([leaves[p] for p in small], [requests[p].sharding for p in small])
    return leaves | dict(zip(small, sharded, strict=True))

  def _load(self, target: Any, memory: int | None) -> Any:
    try:
      with local_context(self.folder, _in_flight(target, memory)):
        return ocp.load(self.folder, target, checkpointable_name=self._name())
    except Exception as error:  # Orbax raises many kinds for missing or malformed files
      if isinstance(error, MemoryError) or 'RESOURCE_EXHAUSTED' in str(error):
        raise
      raise CheckpointDamagedError(
        f'Checkpoint {self.path} cannot be read: {(str(error).splitlines() or [""])[0][:500]}\n'
        'Fix: restore another checkpoint; files of this one are missing, or have changed since it was written.'
      ) from error

  def _name(self) -> str | None:
    return self._part or _part_with_arrays(self.folder)


def _in_flight(target: Any, memory: int | None) -> int:
  """The limit of bytes in flight. Without any limit, the host would hold up to twice the state.

  It exceeds the largest array, which Orbax reads as a whole.
  """
  arrays = [leaf for leaf in jax.tree.leaves(target) if hasattr(leaf, 'shape')]
  sizes = [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in arrays]
  return max(memory or max(_MIN_IN_FLIGHT, sum(sizes) // 8), 1 + max(sizes, default=0))


def _sharding(request: Any) -> Any:
  """The sharding of a request; None for a numpy array or a Python number."""
  return getattr(request, 'sharding', None)


def _orbax_request(leaf: Any) -> Any:
  """A request in Orbax's terms: a sharded abstract array, a numpy array, or `...` for a leaf to skip.

  numpy has no random keys: without a sharding, they are read onto a device of this process.
  """
  if leaf is ... or isinstance(leaf, type) or leaf.sharding is not None:
    return leaf
  if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    return leaf.update(sharding=jax.sharding.SingleDeviceSharding(jax.local_devices()[0]))
  return np.empty(leaf.shape, leaf.dtype)


def _unpacked(vector: np.ndarray, leaf: LeafRecord) -> np.ndarray:
  _, offset = leaf.packed or ('', 0)
  return vector[offset : offset + int(np.prod(leaf.shape, dtype=int))].reshape(leaf.shape)


def _parts(path: epath.Path) -> list[str]:
  """The subfolders of a checkpoint that hold arrays, or have lost their description."""
  children = [child for child in path.iterdir() if _may_hold_arrays(child)]
  return sorted(child.name for child in children if not (child / _METADATA).exists())


def _may_hold_arrays(part: epath.Path) -> bool:
  return any((part / mark).exists() for mark in (_TREE_METADATA, _INDEX))


def _part_with_arrays(path: epath.Path) -> str | None:
  """The subfolder of a checkpoint of ours that holds its arrays; None if the checkpoint itself does."""
  parts = _parts_with_arrays(path)
  return _PART if _PART in parts else parts[0]


def _parts_with_arrays(path: epath.Path) -> Sequence[str | None]:
  """The subfolders of a checkpoint that hold arrays; only None if the checkpoint itself does."""
  if (path / _TREE_METADATA).exists():
    return [None]
  parts = _parts(path)
  if not parts:
    raise CheckpointDamagedError(
      f'Checkpoint {path} has no arrays: none of its folders contains {_TREE_METADATA}.\n'
      'Fix: restore another checkpoint; this one lacks files, or holds no arrays.'
    )
  return parts


def _check_names(path: epath.Path, part: str | None) -> None:
  """Raises if the name of a leaf leads out of the checkpoint: Orbax may use it as a file path.

  Args:
    path: folder of the checkpoint.
    part: its part to read; None if its arrays are in the folder itself.
  """
  file = (path / part if part else path) / _TREE_METADATA
  content = _metadata(file, path).get('tree_metadata') or {}
  for key, entry in content.items() if isinstance(content, dict) else ():
    if any(map(_leads_out, [*re.split(r"'(?:, ')?", key), *_keys(entry)])):
      raise CheckpointDamagedError(
        f'Checkpoint {path} has a leaf named {key}, which leads out of its folder.\n'
        'Fix: do not use this checkpoint; none of its arrays were read.'
      )


def _keys(entry: Any) -> list[str]:
  """The keys on the way to a leaf, which Orbax stores beside the leaf's own name."""
  keys = entry.get('key_metadata') if isinstance(entry, dict) else None
  return [str(key.get('key')) for key in keys or () if isinstance(key, dict)]


def _leads_out(name: str) -> bool:
  return name.startswith(('/', '\\')) or '..' in re.split(r'[/\\]', name)


def _foreign_record(path: epath.Path, part: str | None) -> Record:
  """A record of shapes and dtypes, for a checkpoint that has none."""
  _check_names(path, part)
  flat = skeleton.flatten(_foreign_tree(path, part))
  leaves = by_path(skeleton.paths(flat.skeleton), [_foreign_leaf(leaf) for leaf in flat.leaves])
  for name, dtype in _random_keys(path / part if part else path).items():
    leaf = leaves.get(name)
    if leaf is not None and leaf.shape:
      leaves[name] = LeafRecord(leaf.shape[:-1], dtype)
  return Record(flat.skeleton, leaves, {}, None, 'orbax')


def _random_keys(folder: epath.Path) -> dict[str, str]:
  """The dtypes of arrays of random keys, by path. Orbax describes such an array as its key data."""
  dtypes = {}
  for file in (folder / _ARRAYS).iterdir() if (folder / _ARRAYS).is_dir() else ():
    for entry in _metadata(file, folder).get('array_metadatas') or ():
      array = entry.get('array_metadata') if isinstance(entry, dict) else None
      array = array if isinstance(array, dict) else {}
      extra = array.get('ext_metadata')
      dtype = key_dtype(extra.get('random_key_impl')) if isinstance(extra, dict) else None
      if dtype is not None:
        dtypes[str(array.get('param_name')).replace('.', '/')] = dtype
  return dtypes


def _foreign_tree(path: epath.Path, part: str | None) -> Any:
  """A tree with Orbax's metadata of each leaf as its leaves."""
  try:
    tree = ocp.metadata(path, checkpointable_name=part).metadata
    reason = 'Orbax returns no metadata, as for a state that contains a Python bool'
  except Exception as error:  # of many kinds
    tree, reason = None, (str(error).splitlines() or [''])[0][:500]
  if tree is None:
    raise CheckpointDamagedError(
      f'Checkpoint {path} cannot be read: {reason}.\n'
      'Fix: load it with orbax.checkpoint, and save it with flax_spmd.checkpoint.save.'
    )
  return tree


def _foreign_leaf(leaf: Any) -> LeafRecord:
  """The record of a leaf of Orbax's metadata: an array's metadata, or a sample value of its Python type."""
  if hasattr(leaf, 'shape'):
    return LeafRecord(tuple(leaf.shape), str(leaf.dtype))
  return LeafRecord((), f'python.{type(leaf).__name__}')


class FlaxReader:
  """Reads a msgpack file of `flax.training.checkpoints`, as a whole.

  Args:
    path: the file.
    content: its content.
  """

  def __init__(self, path: epath.Path, content: Any):
    self.path = self.folder = path
    flat = skeleton.flatten(content)
    self._by_path = by_path(skeleton.paths(flat.skeleton), flat.leaves)
    leaves = {path: describe(leaf) for path, leaf in self._by_path.items()}
    self.record = Record(flat.skeleton, leaves, {}, None, 'flax')

  def read(self, requests: Mapping[str, Any], memory: int | None = None) -> dict[str, Any]:
    """See `CheckpointReader`."""
    del memory  # the file has been read already
    return {
      path: self._by_path[path]
      if request.sharding is None
      else put([self._by_path[path]], [request.sharding])[0]
      for path, request in requests.items()
    }


def _flax_tree(path: epath.Path) -> Any:
  from flax import serialization

  try:
    return serialization.msgpack_restore(path.read_bytes())
  except Exception as error:  # msgpack raises a dozen kinds
    raise _not_flax(path, error) from error


def _not_flax(path: epath.Path, error: Exception) -> CheckpointDamagedError:
  return CheckpointDamagedError(
    f'The file {path} is not a checkpoint of flax.training.checkpoints: {str(error).rstrip(".")}.\n'
    'Fix: pass the folder of a checkpoint, or a file that save_checkpoint wrote.'
  )
