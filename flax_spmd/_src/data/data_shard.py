"""Data shard: the part of a data set that a process reads, as the index and count that loaders take.

    shard = layout.data_shard('batch')
    grain.sharding.ShardOptions(shard.index, shard.count)
    tf_dataset.shard(shard.count, shard.index)
    datasets.distributed.split_dataset_by_node(dataset, shard.index, shard.count)

Processes that hold the same rows of a batch have the same index, so the count may be less than the number of
processes. One index describes a process's rows only if they are one block, and all blocks have one size.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from fractions import Fraction
from typing import TypeAlias

import jax
from jax.sharding import NamedSharding

from flax_spmd._src.mesh import describe
from flax_spmd._src.multihost import named, ranges
from flax_spmd._src.public import public
from flax_spmd._src.text import value_text
from flax_spmd.errors import LayoutError, Problem, raise_problems

_Pieces: TypeAlias = Mapping[int, tuple[int, ...]]  # by process: the pieces of the rows, in order


@public('flax_spmd')
@dataclasses.dataclass(frozen=True)
class DataShard:
  """The part of a data set that this process reads.

  Attributes:
    index: index of the part, from 0.
    count: number of parts.
    processes: the processes that read this part, in order; they have to read equal batches.

  Example:
    >>> Layout({'data': 8}, (('batch', 'data'),)).data_shard('batch')
    DataShard(index=0, count=1, processes=(0,))
  """

  index: int
  count: int
  processes: tuple[int, ...]

  def local_size(self, size: int) -> int:
    """The number of rows of a batch that this process loads.

    Args:
      size: number of rows of the global batch.

    Raises:
      LayoutError: `size` is no number of rows, or they do not divide into the shards.

    Example:
      >>> DataShard(index=1, count=4, processes=(1,)).local_size(256)
      64
    """
    if size < 1:
      raise LayoutError(
        f'{value_text(size)} is no number of rows.\nFix: pass a whole number of 1 or more.'
      )
    if size % self.count:
      fits = max(self.count, size - size % self.count)
      raise LayoutError(
        f'A batch of {size} rows does not divide into {self.count} data shards of equal size.\n'
        f'Fix: pass a multiple of {self.count}, such as {fits}.'
      )
    return size // self.count


def data_shard_of(sharding: NamedSharding, rank: int, placement: str) -> DataShard:
  """The data shard of this process.

  Args:
    sharding: sharding of the batches, of any size.
    rank: number of dimensions of the batches; rows are the first.
    placement: text of the placement, for error texts.

  Raises:
    LayoutError: the rows of some process are no block, or blocks differ in size or overlap in part.
  """
  pieces, count = _pieces(sharding, rank)
  me = jax.process_index()
  if me not in pieces:
    raise LayoutError(
      f'Process {me} has no device of the mesh, only {named(pieces)}, so it has no rows of a batch to load.\n'
      f'Fix: load data on {named(pieces)} only, or use a mesh with devices of all processes.'
    )
  raise_problems(
    _problems(pieces, count, f'{placement} as {sharding.spec} over {describe(sharding.mesh)}')
  )
  mine = pieces[me]
  same = tuple(process for process, each in pieces.items() if each == mine)
  return DataShard(mine[0] // len(mine), count // len(mine), same)


def rows_of_processes(sharding: NamedSharding) -> list[str]:
  """The fractions of a batch's rows that each process holds, as text: '0-1/4, 1/2-3/4'; empty without devices.

  Args:
    sharding: sharding of the rows, of a batch of any size.
  """
  pieces, count = _pieces(sharding, 1)

  def text(mine: tuple[int, ...]) -> str:
    starts = [each for each in mine if each - 1 not in mine]
    stops = [each + 1 for each in mine if each + 1 not in mine]
    return ', '.join(
      f'{Fraction(start, count)}-{Fraction(stop, count)}'
      for start, stop in zip(starts, stops, strict=True)
    )

  return [text(pieces.get(process, ())) for process in range(jax.process_count())]


def _pieces(sharding: NamedSharding, rank: int) -> tuple[_Pieces, int]:
  """The pieces of the rows that each process holds, and the number of all pieces."""
  size = sharding.num_devices  # divisible into any number of pieces on these devices
  of_process: dict[int, set[int]] = defaultdict(set)
  for device, piece in sharding.devices_indices_map((size,) * rank).items():
    of_process[device.process_index].add(piece[0].start or 0)
  starts = sorted(set().union(*of_process.values()))
  position = {start: number for number, start in enumerate(starts)}
  pieces = {
    process: tuple(sorted(map(position.__getitem__, of_process[process])))
    for process in sorted(of_process)
  }
  return pieces, len(starts)


def _problems(pieces: _Pieces, count: int, placement: str) -> list[Problem]:
  """All processes' rows, if they are no blocks of one size that are equal or disjoint."""
  holders: dict[tuple[int, ...], list[int]] = defaultdict(list)
  for process, each in pieces.items():
    holders[each].append(process)
  is_block = all(each[-1] - each[0] + 1 == len(each) for each in holders)
  if is_block and len(set(map(len, holders))) == 1 and sum(map(len, holders)) == count:
    return []
  return [
    Problem(
      f'{named(processes)}: rows {ranges(each)} of every {count}, by {placement}: no single data shard.',
      _FIX,
    )
    for each, processes in sorted(holders.items())
  ]


_FIX = (
  'load the rows of layout.local_indices instead of a shard; or order the devices of the mesh such that '
  'every process holds one block of rows, of one size, which is either equal to those of another process or apart from them.'
)
