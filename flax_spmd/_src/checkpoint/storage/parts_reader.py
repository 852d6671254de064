"""Parts: a Composite checkpoint of Orbax, whose items are the top-level keys of one tree.

A `CheckpointManager` with `Composite(params=..., opt_state=...)` and `save_checkpointables` write a folder
for each item. Items with arrays become one tree; a checkpoint with a single such item is that item's tree.
Items of other kinds, such as JSON and the positions of data iterators, are left to those who wrote them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from etils import epath

from flax_spmd._src.checkpoint.storage import skeleton
from flax_spmd._src.checkpoint.storage.record import NUMBERS, LeafRecord, Record


class _PartReader(Protocol):
  record: Record

  def read(self, requests: Mapping[str, Any], memory: int | None = None) -> dict[str, Any]: ...


class PartsReader:
  """Reads several parts of a checkpoint as one tree.

  Args:
    path: folder of the checkpoint.
    parts: reader of each part, by its name.
  """

  def __init__(self, path: epath.Path, parts: Mapping[str, _PartReader]):
    self.path = self.folder = path
    self._parts = parts
    self._inner = {
      _joined(name, inner): (name, inner) for name, part in parts.items() for inner in part.record.leaves
    }
    self.record = _joined_record(parts)

  def read(self, requests: Mapping[str, Any], memory: int | None = None) -> dict[str, Any]:
    """See `CheckpointReader`."""
    by_part: dict[str, dict[str, Any]] = {}
    for path, request in requests.items():
      name, inner = self._inner[path]
      by_part.setdefault(name, {})[inner] = request
    read = {name: self._parts[name].read(inner, memory) for name, inner in by_part.items()}
    return {path: read[name][inner] for path in requests for name, inner in [self._inner[path]]}


def with_others(record: Record, skipped: Sequence[str], unreadable: Mapping[str, str]) -> Record:
  """The record, with the names of the parts that are not read, and the reasons for those that cannot be."""
  return dataclasses.replace(record, skipped=tuple(sorted(skipped)), unreadable=unreadable)


def is_state(record: Record) -> bool:
  """Whether a part holds arrays, or numbers only. Strings beside numbers are a description of something else."""
  dtypes = [leaf.dtype for leaf in record.leaves.values()]
  has_arrays = any(not leaf.is_number for leaf in record.leaves.values())
  return has_arrays or (bool(dtypes) and all(dtype in NUMBERS for dtype in dtypes))


def _joined(name: str, path: str) -> str:
  return name if path == skeleton.ROOT else f'{name}/{path}'


def _joined_record(parts: Mapping[str, _PartReader]) -> Record:
  """One record of all parts. Indices of leaves continue from part to part."""
  tree: dict[str, Any] = {}
  leaves: dict[str, LeafRecord] = {}
  for name, part in parts.items():
    start = len(leaves)
    tree[name] = skeleton.unflatten(part.record.skeleton, lambda index, start=start: start + index)
    leaves |= {_joined(name, path): leaf for path, leaf in part.record.leaves.items()}
  return Record(tree, leaves, {}, None, next(iter(parts.values())).record.written_by)
