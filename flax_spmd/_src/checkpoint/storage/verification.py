"""Verifying: whether a checkpoint holds what was written, leaf by leaf, by its checksums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from flax_spmd._src.checkpoint.storage.checksums import checksums
from flax_spmd._src.checkpoint.storage.readers import Source
from flax_spmd._src.checkpoint.storage.record import Leaf, dtype_of
from flax_spmd.errors import CheckpointDamagedError

_AT_ONCE = 1 << 30  # bytes that are read and compared at a time
_SHOWN = 30


def damaged(leaves: Mapping[str, Any], described: Mapping[str, Leaf]) -> list[str]:
  """The paths of the leaves that are not as they were when they were saved.

  Args:
    leaves: what was read, by path, as it lies in the checkpoint. In a program of several processes,
      every process calls this with the same paths.
    described: what the record says.
  """
  known = [path for path in leaves if described[path].checksum is not None]
  sums = checksums([leaves[path] for path in known])
  return [path for path, found in zip(known, sums, strict=True) if found != described[path].checksum]


def raise_damaged(where: Any, paths: list[str]) -> None:
  """Raises for leaves that are damaged; nothing if there are none."""
  if paths:
    more = len(paths) - _SHOWN
    shown = paths[:_SHOWN] + ([f'and {more} more leaves'] if more > 0 else [])
    raise CheckpointDamagedError(
      f'The data of the checkpoint {where} are damaged, in {len(paths)} of its leaves:\n'
      + '\n'.join(shown)
      + '\nFix: restore another checkpoint; bits of this one have changed since it was written.'
    )


def verify(source: Source, places: Mapping[str, Any] | None = None) -> list[str]:
  """The paths of the leaves that are damaged; reads all of them, a gigabyte at a time.

  Args:
    source: a checkpoint with a record.
    places: a sharding per path; without one, a leaf is read into the memory of the host.
  """
  places = places or {}
  wrong: list[str] = []
  for group in _groups(source.record.leaves):
    asked = {
      path: jax.ShapeDtypeStruct(leaf.shape, dtype_of(leaf.dtype), sharding=places.get(path))
      for path, leaf in group.items()
    }
    wrong += damaged(source.read(asked), group)
  return wrong


def check_same(source: Source, places: Mapping[str, Any]) -> None:
  """Raises unless all that was written can be read, and is the same."""
  raise_damaged(source.path, verify(source, places))


def _groups(leaves: Mapping[str, Leaf]) -> Iterator[dict[str, Leaf]]:
  group: dict[str, Leaf] = {}
  size = 0
  for path, leaf in leaves.items():
    if leaf.is_number:
      continue
    group[path] = leaf
    size += leaf.bytes
    if size > _AT_ONCE:
      yield group
      group, size = {}, 0
  if group:
    yield group
