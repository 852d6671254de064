"""The reader of Orbax's checkpoints, with a record of ours or with one that is derived from Orbax's description."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from etils import epath
from orbax.checkpoint import v1 as ocp

from flax_spmd._src.checkpoint.storage import buckets, contents, skeleton
from flax_spmd._src.checkpoint.storage.absent_zeros import may_lack_zeros, warn_of_absent
from flax_spmd._src.checkpoint.storage.direct_reads import Contradiction, DirectReads, names_of_arrays
from flax_spmd._src.checkpoint.storage.host_shards import is_elsewhere, nowhere
from flax_spmd._src.checkpoint.storage.orbax_context import local_context
from flax_spmd._src.checkpoint.storage.orbax_folders import (
  PART,
  check_names,
  described_keys,
  part_with_arrays,
  read_metadata,
)
from flax_spmd._src.checkpoint.storage.parsed_json import unreadable
from flax_spmd._src.checkpoint.storage.possible_sizes import impossible
from flax_spmd._src.checkpoint.storage.record import (
  KEY,
  LeafRecord,
  Record,
  by_path,
  dtype_of,
  ends_of_packs,
  is_key,
  key_dtype,
  key_implementation,
  raw_keys,
)
from flax_spmd._src.checkpoint.storage.refused_reads import refusal
from flax_spmd._src.checkpoint.storage.store import FileRecord
from flax_spmd._src.checkpoint.storage.tensorstore_slices import in_flight
from flax_spmd._src.compat import describe_numbers
from flax_spmd._src.data.host_values import placed, put
from flax_spmd._src.joint_call import first_line
from flax_spmd.errors import CheckpointDamagedError, raise_problems

_ARRAYS = 'array_metadatas'


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
    own = {path: each for path, each in requests.items() if not is_elsewhere(_sharding(each))}
    empty, stored = self._by_emptiness(own)
    with buckets.listed_once(self.folder):
      check_names(self.folder, self._name())
      if self._lacks_zeros:
        warn_of_absent(self.path, self._arrays(), names_of_arrays(self.record), stored)
      leaves = self._read_packed(stored, memory) if self._is_packed else self._read(stored, memory)
    leaves |= empty
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
    empty, stored = self._by_emptiness(requests)
    leaves, reasons = self._direct_reads().read(stored, memory)
    return leaves | empty, reasons

  def _by_emptiness(self, requests: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The requested arrays that are empty, and the requests for the others."""
    records = self.record.leaves
    empty = {p: _empty(records[p], each) for p, each in requests.items() if records[p].is_empty}
    return empty, {path: each for path, each in requests.items() if path not in empty}

  def contradictions(self) -> dict[str, Contradiction]:
    """The differences of the record from the store, by path: `DirectReads.contradictions`, and arrays that it lacks."""
    return self._direct_reads().contradictions() | self.unrecorded()

  def misfits(self) -> set[str]:
    """See `DirectReads.misfits`; nothing is read if no leaf is packed."""
    return self._direct_reads().misfits() if self._is_packed else set()

  def unrecorded(self) -> dict[str, Contradiction]:
    """The arrays in Orbax's description that the record lacks; none if that description is damaged."""
    try:
      described = described_keys(self.folder, self._part or PART)
    except CheckpointDamagedError:
      return {}
    known = self._written_keys()
    return self._direct_reads().unrecorded('.'.join(keys) for keys in described if keys not in known)

  def _written_keys(self) -> set[tuple[str, ...]]:
    """The keys of each leaf of the tree that Orbax has written."""
    records = self.record.leaves
    if not self._is_packed:
      keys = skeleton.keys(contents.disk_tree(self.record, lambda index: index))
      return {each for each, leaf in zip(keys, records.values(), strict=True) if not leaf.is_empty}
    arrays = {(contents.PACKED, leaf.packed[0]) for leaf in records.values() if leaf.packed}
    return arrays | {
      (contents.LEAVES, str(i))
      for i, leaf in enumerate(records.values())
      if not leaf.packed and not leaf.is_empty
    }

  def _direct_reads(self) -> DirectReads:
    return DirectReads(self.folder / (self._part or PART), self.record)

  def _check_keys(self, leaves: Mapping[str, Any]) -> None:
    """Raises if random keys came as their numbers: Orbax keeps their implementation in a file of its own."""
    records = self.record.leaves
    wrong = [
      path for path, leaf in leaves.items() if is_key(records[path]) and str(leaf.dtype) == 'uint32'
    ]
    if wrong:
      raise unreadable(self.path, f'the kind of random keys is lost, for {", ".join(wrong)}')

  def _read(self, requests: Mapping[str, Any], memory: int | None) -> dict[str, Any]:
    paths, records = list(self.record.leaves), list(self.record.leaves.values())
    target = contents.disk_tree(
      self.record,
      lambda index: None if records[index].is_empty else _orbax_request(requests.get(paths[index], ...)),
    )
    if not requests:
      return {}
    # others write one array without a container
    if isinstance(self.record.skeleton, int) and not self.has_own_record:
      tree = {contents.ROOT_NAME: self._load(target[contents.ROOT_NAME], memory)}
    else:
      tree = self._load(target, memory)
    leaves = contents.disk_leaves(self.record, tree)
    return {path: leaves[path] for path in requests}

  def _read_packed(self, requests: Mapping[str, Any], memory: int | None) -> dict[str, Any]:
    records = self.record.leaves
    indices = {path: str(i) for i, path in enumerate(records)}
    large = {
      indices[path]: _orbax_request(requests.get(path, ...))
      for path, leaf in records.items()
      if leaf.packed is None and not leaf.is_number and not leaf.is_empty
    }
    raise_problems(
      impossible(self.path, {path: leaf for path, leaf in records.items() if leaf.packed}, {})
    )
    sizes, wrong = ends_of_packs(records.values())
    if wrong:
      raise _misfit(self.path, sorted(wrong))
    needed = {leaf.packed[0] for path in requests if (leaf := records[path]).packed}
    packed = {
      name: np.empty(size, dtype_of(name)) if name in needed else ... for name, size in sizes.items()
    }
    tree = self._load({contents.LEAVES: large, contents.PACKED: packed}, memory)
    wrong = {name for name in needed if tree[contents.PACKED][name].shape != (sizes[name],)}
    if wrong:
      raise _misfit(self.path, sorted(wrong))
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
      with local_context(self.folder, _in_flight(target, memory), self._lacks_zeros):
        return ocp.load(self.folder, target, checkpointable_name=self._name())
    except Exception as error:  # Orbax raises many kinds for missing or malformed files
      refused = refusal(error, self.path)
      if refused is None and (isinstance(error, MemoryError) or 'RESOURCE_EXHAUSTED' in str(error)):
        raise
      raise refused or unreadable(self.path, first_line(error)) from error

  def _name(self) -> str | None:
    return self._part or part_with_arrays(self.folder)

  def _arrays(self) -> epath.Path:
    """The folder of the arrays."""
    name = self._name()
    return self.folder / name if name else self.folder

  @functools.cached_property
  def _lacks_zeros(self) -> bool:
    """Whether chunks of zeros may be missing; not in checkpoints of ours."""
    return not self.has_own_record and may_lack_zeros(self._arrays())


def _in_flight(target: Any, memory: int | None) -> int:
  """The limit of bytes in flight. It exceeds the largest array, which Orbax reads as a whole."""
  arrays = [leaf for leaf in jax.tree.leaves(target) if hasattr(leaf, 'shape')]
  sizes = [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in arrays]
  return max(memory or in_flight(sum(sizes)), 1 + max(sizes, default=0))


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


def _empty(leaf: LeafRecord, request: Any) -> Any:
  """An array without elements, in the form of a request."""
  if is_key(leaf):
    plain = jax.numpy.empty(raw_keys(leaf).shape, np.uint32)
    value: Any = jax.random.wrap_key_data(plain, impl=key_implementation(leaf.dtype))
  else:
    value = np.empty(leaf.shape, request.dtype)
  return placed(value, request.sharding)


def _misfit(path: epath.Path, names: Sequence[str]) -> CheckpointDamagedError:
  """The error for packed arrays that their leaves do not fill."""
  return CheckpointDamagedError(
    f'Checkpoint {path} cannot be read: its leaves do not fill the packed arrays of {", ".join(names)}.\n'
    'Fix: restore another checkpoint, or the undamaged leaves of this one with salvage=True.'
  )


def _unpacked(vector: np.ndarray, leaf: LeafRecord) -> np.ndarray:
  _, offset = leaf.packed or ('', 0)
  return vector[offset : offset + math.prod(leaf.shape)].reshape(leaf.shape)


def foreign_record(path: epath.Path, part: str | None) -> Record:
  """A record of shapes and dtypes, for a checkpoint that has none."""
  check_names(path, part)
  flat = skeleton.flatten(_foreign_tree(path, part))
  leaves = by_path(skeleton.paths(flat.skeleton), [_foreign_leaf(leaf) for leaf in flat.leaves])
  keys = _random_keys(path / part if part else path)
  for name, leaf in leaves.items():
    dtype = keys.get(name.replace('/', '.'))
    if dtype is not None and leaf.shape:
      leaves[name] = LeafRecord(leaf.shape[:-1], dtype)
  return Record(flat.skeleton, leaves, {}, None, 'orbax')


def _random_keys(folder: epath.Path) -> dict[str, str]:
  """The dtypes of arrays of random keys, by keys joined by dots. Orbax describes such an array as its key data."""
  dtypes = {}
  for file in (folder / _ARRAYS).iterdir() if (folder / _ARRAYS).is_dir() else ():
    for entry in read_metadata(file, folder).get('array_metadatas') or ():
      array = entry.get('array_metadata') if isinstance(entry, dict) else None
      array = array if isinstance(array, dict) else {}
      extra = array.get('ext_metadata')
      dtype = key_dtype(extra.get('random_key_impl')) if isinstance(extra, dict) else None
      if dtype is not None:
        dtypes[str(array.get('param_name')).replace('/', '.')] = dtype
  return dtypes


def _foreign_tree(path: epath.Path, part: str | None) -> Any:
  """A tree with Orbax's metadata of each leaf as its leaves."""
  describe_numbers()
  try:
    tree = ocp.metadata(path, checkpointable_name=part).metadata
    reason = 'Orbax returns no metadata'
  except Exception as error:  # of many kinds
    refused = refusal(error, path)
    if refused is not None:
      raise refused from error
    tree, reason = None, first_line(error)
  if tree is None:
    raise CheckpointDamagedError(
      f'Checkpoint {path} cannot be read: {reason}.\n'
      'Fix: restore another checkpoint; or, if orbax.checkpoint loads this one, save the result with flax_spmd.checkpoint.save.'
    )
  return tree


def _foreign_leaf(leaf: Any) -> LeafRecord:
  """The record of a leaf of Orbax's metadata: an array's metadata, or a sample value of its Python type."""
  if hasattr(leaf, 'shape'):
    return LeafRecord(tuple(leaf.shape), str(leaf.dtype))
  return LeafRecord((), f'python.{type(leaf).__name__}')
