"""Verification: compares a checkpoint's arrays with the checksums in its record, leaf by leaf."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from flax_spmd._src.checkpoint.storage.possible_sizes import impossible
from flax_spmd._src.checkpoint.storage.readers import CheckpointReader
from flax_spmd._src.checkpoint.storage.record import LeafRecord, dtype_of, leaf_count
from flax_spmd._src.data.checksums import checksums
from flax_spmd.errors import CheckpointDamagedError, raise_problems

GROUP_BYTES = 1 << 30  # read and compared at a time
_SHOWN = 30


def damaged(leaves: Mapping[str, Any], records: Mapping[str, LeafRecord]) -> list[str]:
  """The paths of the leaves whose checksum differs from the recorded one.

  Args:
    leaves: arrays as stored in the checkpoint, by path. In a job of several processes, every process
      passes the same paths.
    records: record of each leaf, by path. Leaves without a checksum are skipped.
  """
  known = [path for path in leaves if records[path].checksum is not None]
  sums = checksums([leaves[path] for path in known])
  return [path for path, total in zip(known, sums, strict=True) if total != records[path].checksum]


def raise_damaged(checkpoint: Any, paths: list[str]) -> None:
  """Raises CheckpointDamagedError if any leaves are damaged.

  Args:
    checkpoint: path of the checkpoint, for the error text.
    paths: damaged leaves.
  """
  if paths:
    more = len(paths) - _SHOWN
    shown = paths[:_SHOWN] + ([f'and {leaf_count(more, "more ")}'] if more > 0 else [])
    raise CheckpointDamagedError(
      f'Checkpoint {checkpoint} is damaged in {leaf_count(len(paths))}:\n'
      + '\n'.join(shown)
      + '\nFix: restore another checkpoint; the data of this one have changed since the save.'
    )


def verify(reader: CheckpointReader, shardings: Mapping[str, Any] | None = None) -> list[str]:
  """The paths of the damaged leaves. Reads the whole checkpoint, about 1 GiB at a time.

  Args:
    reader: a checkpoint with checksums in its record.
    shardings: sharding of each leaf, by path. A leaf without one is read into host memory.
  """
  shardings = shardings or {}
  wrong: list[str] = []
  for group in groups(reader.record.leaves):
    raise_problems(impossible(reader.path, group, shardings))
    requests = {
      path: jax.ShapeDtypeStruct(leaf.shape, dtype_of(leaf.dtype), sharding=shardings.get(path))
      for path, leaf in group.items()
    }
    wrong += damaged(reader.read(requests), group)
  return wrong


def require_undamaged(reader: CheckpointReader, shardings: Mapping[str, Any]) -> None:
  """Reads a whole checkpoint back; raises CheckpointDamagedError unless every checksum matches."""
  raise_damaged(reader.path, verify(reader, shardings))


def groups(leaves: Mapping[str, LeafRecord]) -> Iterator[dict[str, LeafRecord]]:
  """Splits leaves into groups that end where they exceed `GROUP_BYTES`; Python numbers are skipped."""
  group: dict[str, LeafRecord] = {}
  size = 0
  for path, leaf in leaves.items():
    if leaf.is_number:
      continue
    group[path] = leaf
    size += leaf.bytes
    if size > GROUP_BYTES:
      yield group
      group, size = {}, 0
  if group:
    yield group
