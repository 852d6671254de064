"""Repeated rows: a check that processes did not load the same rows for different parts of a batch.

A loader that is sharded wrongly, or not at all, gives every process the same rows. All of them then count several times, and
no error shows it. The digest of a process's rows is compared with those of the others when they compare the
structure of a batch for the first time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Sharding

from flax_spmd._src.data.digests import digests
from flax_spmd._src.multihost import named
from flax_spmd._src.source_lines import warn

ROWS = 'rows'  # the name of the digest in an exchange
_FEWEST = 64  # bytes; fewer may be equal by chance


class LoadedPart(NamedTuple):
  """A process's part of one array of a batch.

  Attributes:
    name: path, dtype and global shape, as in a message.
    part: the values, on the host.
    sharding: sharding of the global array.
    shape: shape of the global array.
  """

  name: str
  part: np.ndarray
  sharding: Sharding
  shape: tuple[int, ...]

  def held(self) -> dict[int, frozenset[tuple[int, ...]]]:
    """By process, where the pieces on its devices begin."""
    found: dict[int, set[tuple[int, ...]]] = {}
    for device, index in self.sharding.devices_indices_map(self.shape).items():
      found.setdefault(device.process_index, set()).add(tuple(piece.start or 0 for piece in index))
    return {process: frozenset(starts) for process, starts in found.items()}


def varied(arrays: Sequence[LoadedPart]) -> list[LoadedPart]:
  """The arrays of which processes hold different parts, and whose values here are not all equal, as those of padding are."""
  return [
    one
    for one in arrays
    if len({*one.held().values()}) > 1 and one.part.size and (one.part != one.part.flat[0]).any()
  ]


def rows_digest(arrays: Sequence[LoadedPart]) -> dict[str, str]:
  """The digest of this process's rows, by its name in an exchange; empty where they may be equal by chance."""
  parts = [one.part for one in arrays]
  return {ROWS: ' '.join(digests(parts))} if sum(part.nbytes for part in parts) >= _FEWEST else {}


def warn_of_repeated(arrays: Sequence[LoadedPart], groups: Sequence[Sequence[int]]) -> None:
  """Warns, on every process alike, of processes with equal rows that hold different parts of the batch.

  Args:
    arrays: the arrays whose digests were compared.
    groups: the processes with equal digests, for each digest.
  """
  held = [one.held() for one in arrays]
  parts_of = lambda process: tuple(each.get(process) for each in held)
  wrong = [group for group in groups if len(set(map(parts_of, group))) > 1]
  if wrong:
    who = ' and '.join(map(named, wrong)).capitalize()
    names = ', '.join(one.name for one in arrays)
    warn(
      f'{who} loaded equal rows for different parts of a batch ({names}): every row counts several times.\n'
      'Fix: give the loader of each process its index and count, shard = layout.data_shard(...); or other random numbers.',
    )
