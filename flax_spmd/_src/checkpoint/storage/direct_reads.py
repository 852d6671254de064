"""Direct reads: the arrays of a damaged checkpoint of ours, by the record alone.

Orbax finds arrays through its own description of the tree, `_METADATA`, and through one index of their bytes,
`manifest.ocdbt`. Where one of these is damaged, the bytes may still be whole. The record has names, shapes and dtypes,
and each process has left an index of the bytes that it wrote:

    state/manifest.ocdbt                     the index of all processes, with its nodes in state/d
    state/ocdbt.process_0/manifest.ocdbt     that of process 0, with nodes and arrays in state/ocdbt.process_0/d

Nothing is written. Every array is read on its own, so that the damage of one leaves the others whole.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import tensorstore as ts
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from flax_spmd._src.checkpoint.storage import contents, skeleton
from flax_spmd._src.checkpoint.storage.host_shards import assembled
from flax_spmd._src.checkpoint.storage.record import (
  LeafRecord,
  Record,
  dtype_of,
  ends_of_packs,
  is_key,
  key_implementation,
  raw_keys,
  typed_keys,
)
from flax_spmd._src.checkpoint.storage.refused_reads import refusal
from flax_spmd._src.checkpoint.storage.tensorstore_slices import (
  batches,
  kvstore_of,
  opened,
  started,
)
from flax_spmd._src.data.checksums import own_checksums
from flax_spmd._src.data.host_values import placed

CHANGED = 'its content has changed'
_OF_PROCESS = re.compile(r'ocdbt\.process_\d+/?')
_FORMATS = {'zarr3': b'zarr.json', 'zarr': b'.zarray'}  # the file that describes an array
# the context in TensorStore's errors, thousands of characters
_SPEC = re.compile(r' \[[a-z_]+(\[\d+\])?=')


class Contradiction(NamedTuple):
  """A leaf that is not stored as it is recorded.

  Attributes:
    reason: the difference, for the report.
    stored: its record with the shape and dtype that are stored; None if they are unknown.
  """

  reason: str
  stored: LeafRecord | None


class DirectReads:
  """Reads arrays without Orbax's description of them.

  Args:
    folder: folder of the arrays.
    record: their description.
  """

  def __init__(self, folder: epath.Path, record: Record):
    self._record, self._folder = record, folder
    own = [folder / child.name for child in _children(folder) if _OF_PROCESS.fullmatch(child.name)]
    self._indexes = [[_index_of(folder)], [_index_of(each) for each in sorted(own)]]
    self._names = names_of_arrays(record)

  def read(
    self, requests: Mapping[str, Any], memory: int | None = None
  ) -> tuple[dict[str, Any], dict[str, str]]:
    """The arrays that can be read, and the reasons for the others.

    Args:
      requests, memory: see `CheckpointReader.read`.
    """
    leaves: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for group in batches(requests, memory):
      reads: dict[str, Any] = {}
      for path, request in group.items():
        try:
          array = self._opened(path)
          stored = _stored_request(self._record.leaves[path], request)
          reads[path] = stored, started(array, stored)
        except (ValueError, OSError) as error:
          reasons[path] = self._reason(error)
      for path, (stored, futures) in reads.items():
        try:
          slices = {index: np.asarray(future.result()) for index, future in futures.items()}
        except (ValueError, OSError) as error:
          reasons[path] = self._reason(error)
        else:
          leaves[path] = _leaf(self._record.leaves[path], requests[path], assembled(stored, slices))
    return leaves, reasons

  def _opened(self, path: str) -> Any:
    """An opened array, of the shape and dtype in the record. A missing chunk is an error, not zeros.

    Raises:
      ValueError, OSError: it cannot be read, or is another array.
    """
    leaf, store = self._record.leaves[path], self._stored(self._names[path])
    plain = raw_keys(leaf) if is_key(leaf) else leaf
    if leaf.packed is not None and store.rank == 1 and not is_key(leaf):
      begin, size = leaf.packed[1], math.prod(leaf.shape)
      if begin < 0 or begin + size > store.shape[0]:
        raise ValueError(
          f'elements {begin} to {begin + size} are not in its packed array, of {store.shape[0]}'
        )
      store = store[begin : begin + size][ts.d[:].translate_to[0]]
      plain = plain._replace(shape=(size,))
    if (store.shape, store.dtype.numpy_dtype) != (plain.shape, dtype_of(plain.dtype)):
      raise ValueError(f'{store.dtype.name}{list(store.shape)} is stored in its place')
    return store

  def misfits(self) -> set[str]:
    """The names of packed arrays that their leaves, one after the other, do not fill exactly."""
    ends, wrong = ends_of_packs(self._record.leaves.values())
    for name, end in ends.items():
      with contextlib.suppress(ValueError, OSError):  # a lost array is no misfit
        if self._stored(f'{contents.PACKED}.{name}').shape != (end,):
          wrong.add(name)
    return wrong

  def contradictions(self) -> dict[str, Contradiction]:
    """The leaves that the record describes otherwise than they are stored.

    The record does not show which leaf of a misfit is wrong. So these, which are small, are read, and their
    checksums compared; of others no bytes are read.
    """
    found: dict[str, Contradiction] = {}
    for path, leaf in self._record.leaves.items():
      try:
        if not leaf.is_number and not leaf.is_empty:
          self._opened(path)
      except (ValueError, OSError) as error:
        found[path] = Contradiction(self._reason(error), self._as_stored(path))
    misfits = self.misfits()
    unclear = {
      path: jax.ShapeDtypeStruct(leaf.shape, dtype_of(leaf.dtype))
      for path, leaf in self._record.leaves.items()
      if leaf.packed is not None and leaf.packed[0] in misfits and path not in found
    }
    leaves, reasons = self.read(unclear)
    likes = {path: self._record.leaves[path].checksum or '' for path in leaves}
    totals = own_checksums(list(leaves.values()), list(likes.values()))
    changed = [path for path, total in zip(likes, totals, strict=True) if total != likes[path]]
    reasons |= dict.fromkeys(changed, CHANGED)
    return found | {path: Contradiction(reason, None) for path, reason in reasons.items()}

  def unrecorded(self, names: Iterable[str]) -> dict[str, Contradiction]:
    """Arrays that are stored, of which the record has no leaf.

    Args:
      names: their names, keys joined by dots.
    """
    found = {}
    for name in names:
      # if Orbax's description is damaged, there may be no such array
      with contextlib.suppress(ValueError, OSError):
        store = self._stored(name)
        leaf = LeafRecord(tuple(store.shape), str(store.dtype.numpy_dtype))
        found[name.replace('.', '/')] = Contradiction('it is stored, and missing in the record', leaf)
    return found

  def _as_stored(self, path: str) -> LeafRecord | None:
    """The record of a leaf with the stored shape and dtype; None if they are unknown, as of packed leaves."""
    leaf = self._record.leaves[path]
    try:
      store = None if leaf.packed else self._stored(self._names[path])
    except (ValueError, OSError):
      store = None
    if store is None:
      return None
    stored = LeafRecord(tuple(store.shape), str(store.dtype.numpy_dtype))
    stored = (typed_keys(stored, leaf.dtype) if is_key(leaf) else None) or stored
    has_rank = leaf.names is not None and len(leaf.names) == len(stored.shape)
    return stored._replace(names=leaf.names if has_rank else None, on_mesh=leaf.on_mesh and has_rank)

  def _stored(self, name: str) -> Any:
    """An opened array, by its name; raises as `_opened`."""
    return opened(*self._found(name)).result()

  def _found(self, name: str) -> tuple[str, dict[str, Any]]:
    """TensorStore's driver and key-value store of an array: from the index of all, or from those of the processes."""
    failure: Exception = ValueError('its bytes are in no index that can be read')
    for indexes in self._indexes:
      keys: dict[bytes, Any] = {}
      for index in indexes:
        try:
          listed = ts.KvStore.open({**index, 'path': f'{name}/'}).result().list().result()
        except (ValueError, OSError) as error:
          self._reason(error)
          failure = error
        else:
          keys |= {key: index for key in listed if key not in keys}
      for driver, described in _FORMATS.items():
        if described in keys:
          return driver, _joined(name, keys)
    raise failure

  def _reason(self, error: Exception) -> str:
    """The first line of TensorStore's error, without its context.

    Raises:
      CheckpointError: the read was refused.
    """
    refused = refusal(error, self._folder)
    if refused is not None:
      raise refused from None
    return _SPEC.split((str(error).splitlines() or [''])[0])[0]


def _joined(name: str, keys: Mapping[bytes, Any]) -> dict[str, Any]:
  """The key-value store of an array whose keys are in several indexes."""
  layers = [
    {'base': {**index, 'path': f'{name}/{key.decode()}'}, 'exact': key.decode()}
    for key, index in keys.items()
  ]
  return {'driver': 'kvstack', 'layers': layers}


def _index_of(folder: epath.Path) -> dict[str, Any]:
  return {'driver': 'ocdbt', 'base': kvstore_of(folder)}


def _children(folder: epath.Path) -> list[epath.Path]:
  try:
    return list(folder.iterdir())
  except (FileNotFoundError, NotADirectoryError):
    return []


def names_of_arrays(record: Record) -> dict[str, str]:
  """The name that Orbax gave each array: the keys of the written tree, joined by dots."""
  is_packed = any(leaf.packed for leaf in record.leaves.values())
  if isinstance(record.skeleton, int) and not is_packed:
    return dict.fromkeys(record.leaves, contents.ROOT_NAME)
  names = {}
  keys = skeleton.keys(record.skeleton)
  for number, (path, leaf) in enumerate(record.leaves.items()):
    if leaf.packed is not None:
      names[path] = f'{contents.PACKED}.{leaf.packed[0]}'
    else:
      names[path] = f'{contents.LEAVES}.{number}' if is_packed else '.'.join(keys[number])
  return names


def _stored_request(leaf: LeafRecord, request: Any) -> Any:
  """The request for the stored array. Packed ones have one dimension; random keys have one more than they show."""
  if leaf.packed is not None:
    return jax.ShapeDtypeStruct((math.prod(leaf.shape),), request.dtype)
  if not is_key(leaf):
    return request
  sharding = request.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  if isinstance(sharding, NamedSharding):
    entries = [*sharding.spec, *[None] * (len(leaf.shape) + 1 - len(sharding.spec))]
    sharding = NamedSharding(sharding.mesh, PartitionSpec(*entries))
  plain = raw_keys(leaf)
  return jax.ShapeDtypeStruct(plain.shape, dtype_of(plain.dtype), sharding=sharding)


def _leaf(leaf: LeafRecord, request: Any, array: Any) -> Any:
  """The leaf of a stored array."""
  if is_key(leaf):
    return jax.random.wrap_key_data(array, impl=key_implementation(leaf.dtype))
  if leaf.packed is None:
    return array
  return placed(array.reshape(leaf.shape), request.sharding)
