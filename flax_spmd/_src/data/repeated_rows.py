"""Repeated rows: a check that processes did not load the same rows for different parts of a batch.

A loader that is sharded wrongly, or not at all, gives every process the same rows. All of them then count several times, and
no error shows it. The digest of a process's rows is compared with those of the others when they compare the
structure of a batch for the first time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Sharding

from flax_spmd._src.data.digests import digests
from flax_spmd._src.multihost import named

ROWS = 'rows of arrays '  # the name of a digest in an exchange begins with it
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

  def varies(self) -> bool:
    """Whether its rows differ, unlike those of padding or of positions; of a single row, its elements."""
    if not self.part.size:
      return False
    words = np.ascontiguousarray(self.part).view(np.uint8).reshape(*self.part.shape, -1)
    sizes = zip(self.shape, self.part.shape, strict=False)  # keys have a dimension more
    sharded = [dim for dim, (size, mine) in enumerate(sizes) if 1 < mine < size]
    firsts = [words.take([0], axis=dim) for dim in sharded] or [words.reshape(-1, words.shape[-1])[0]]
    return all(bool((words != first).any()) for first in firsts)


def rows_digest(arrays: Sequence[LoadedPart]) -> dict[str, str]:
  """The digest of this process's rows, by its name in an exchange; empty where they may be equal by right.

  Args:
    arrays: all arrays that are sharded between processes; the name has the numbers of those that count.
  """
  counted = {number: one.part for number, one in enumerate(arrays) if one.varies()}
  if sum(part.nbytes for part in counted.values()) < _FEWEST:
    return {}
  return {ROWS + ' '.join(map(str, counted)): ' '.join(digests([*counted.values()]))}


def repeated_text(arrays: Sequence[LoadedPart], differing: Mapping[str, Any]) -> str:
  """A warning, the same on every process, of processes with equal rows that hold different parts; or ''.

  Args:
    arrays: those of `rows_digest`.
    differing: the result of the exchange: the processes with equal digests, by name.
  """
  lines = []
  for name, groups in differing.items():
    if name.startswith(ROWS):
      compared = [arrays[int(number)] for number in name.removeprefix(ROWS).split()] if arrays else []
      lines += _repeated(compared, [processes for processes, _ in groups])
  return '\n'.join([*lines, _FIX]) if lines else ''


def _repeated(arrays: Sequence[LoadedPart], groups: Sequence[Sequence[int]]) -> Iterator[str]:
  """The line about the groups whose processes hold different parts of these arrays, if there are any."""
  held = [one.held() for one in arrays]
  parts_of = lambda process: tuple(each.get(process) for each in held)
  wrong = [group for group in groups if len(set(map(parts_of, group))) > 1]
  if wrong:
    who = ' and '.join(map(named, wrong)).capitalize()
    names = ', '.join(one.name for one in arrays)
    yield f'{who} loaded equal rows for different parts of a batch ({names}): every row counts several times.'


_FIX = 'Fix: give the loader of each process its index and count, shard = layout.data_shard(...); or other random numbers.'
