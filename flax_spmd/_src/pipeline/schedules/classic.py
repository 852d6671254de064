"""Classic schedules, with unsplit backwards: GPipe, 1F1B, and their eager and interleaved variants.

All have one pattern: a rank runs some forwards as a *warm-up*, then alternates one forward and one
backward, then runs the remaining backwards. GPipe's warm-up is all forwards; 1F1B's is just long enough
to fill the pipeline; the eager variant's is twice as long, so that transfers overlap with tasks.

For p ranks, m microbatches, and v equal stages per rank, the bubble is (p - 1) / (v m + p - 1).
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from flax_spmd._src.pipeline.schedules.schedule import Schedule
from flax_spmd._src.pipeline.schedules.tasks import FusedTask, Kind, Step, Task
from flax_spmd._src.public import public
from flax_spmd._src.text import value_text
from flax_spmd.errors import PipelineError, did_you_mean


class _OneByOne(Schedule):
  """A rank runs one of its stages after the other."""

  def _order(self, rank: int, microbatches: int) -> Iterator[Step]:
    stages = self.stages_of(rank)
    forwards, backwards = tasks('fwd', stages, microbatches), tasks('bwd', stages[::-1], microbatches)
    return alternate(forwards, backwards, self._warm_up(rank, len(forwards)))

  @abc.abstractmethod
  def _warm_up(self, rank: int, forwards: int) -> int:
    """The number of forwards before the first backward."""


@public('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class GPipe(_OneByOne):
  """All forwards, then all backwards; m live activations on every rank.

  Bubble (p - 1) / (m + p - 1). Huang et al., https://arxiv.org/abs/1811.06965.

  Attributes:
    ranks: number of ranks, p; each has one stage.

  Example:
    >>> GPipe(ranks=4).validate(8).peaks
    (8, 8, 8, 8)
  """

  def _warm_up(self, rank: int, forwards: int) -> int:
    return forwards


@public('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class InterleavedGPipe(GPipe):
  """GPipe with several stages per rank, assigned round-robin; a rank runs one stage after the other.

  Bubble (p - 1) / (v m + p - 1) for m >= p; v m live activations. The breadth-first schedule of
  Lamy-Poirier, https://arxiv.org/abs/2211.05953.

  Attributes:
    ranks: number of ranks, p.
    chunks: number of stages per rank, v.

  Example:
    >>> round(InterleavedGPipe(ranks=4, chunks=2).simulate(8).bubble, 3)
    0.158
  """

  chunks: int = 2


@public('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class OneFOneB(_OneByOne):
  """One forward, one backward (1F1B; JaxPP's `Std1F1B`); p - r live activations on rank r.

  Bubble (p - 1) / (m + p - 1), as for GPipe. PipeDream-Flush: Narayanan et al.,
  https://arxiv.org/abs/2006.09503, after PipeDream, https://arxiv.org/abs/1806.03377.

  Attributes:
    ranks: number of ranks, p; each has one stage.

  Example:
    >>> OneFOneB(ranks=4).validate(8).peaks
    (4, 3, 2, 1)
  """

  def _warm_up(self, rank: int, forwards: int) -> int:
    return self.ranks - 1 - rank


@public('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class Eager1F1B(_OneByOne):
  """1F1B with twice the warm-up, to hide transfers; 2 (p - r) - 1 live activations on rank r.

  Bubble (p - 1) / (m + p - 1) without transfers. Zhuang et al., https://arxiv.org/abs/2211.05322.

  Attributes:
    ranks: number of ranks, p; each has one stage.

  Example:
    >>> Eager1F1B(ranks=4).validate(8).peaks
    (7, 5, 3, 1)
    >>> slow = dict(costs={'fwd': 1, 'bwd': 1}, transfer=0.5)
    >>> OneFOneB(ranks=4).simulate(8, **slow).makespan, Eager1F1B(ranks=4).simulate(8, **slow).makespan
    (30.0, 25.0)
  """

  def _warm_up(self, rank: int, forwards: int) -> int:
    return 2 * (self.ranks - 1 - rank)


@public('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class Interleaved1F1B(Schedule):
  """1F1B with several stages per rank, assigned round-robin: a smaller bubble for more transfers.

  Bubble (p - 1) / (v m + p - 1); (v - 1) p + 2 (p - 1 - r) + 1 live activations on rank r, each of a
  stage v times smaller. Microbatches run in equal rounds of at least one per rank, so m must be a
  multiple of the number of rounds, max(1, m // p). Narayanan et al., https://arxiv.org/abs/2104.04473.

  Attributes:
    ranks: number of ranks, p.
    chunks: number of stages per rank, v.
    fuse: which tasks become one program: 'last' fuses the forward and backward of the last stage, which
      are adjacent; 'steady' fuses every forward after the warm-up with the backward that follows it;
      None fuses nothing.

  Example:
    >>> round(Interleaved1F1B(ranks=4, chunks=2).simulate(8).bubble, 3)
    0.158
    >>> [str(task) for task in Interleaved1F1B(ranks=4, chunks=1).tasks(4)[3]][:2]
    ['FusedTask(fwd_3__0, bwd_3__0)', 'FusedTask(fwd_3__1, bwd_3__1)']
  """

  chunks: int = 2
  fuse: Literal['last', 'steady'] | None = 'last'

  def __post_init__(self):
    super().__post_init__()
    if self.fuse not in ('last', 'steady', None):
      hint = did_you_mean(str(self.fuse), ('last', 'steady'))
      raise PipelineError(
        f"fuse={value_text(self.fuse)} is unknown.{hint}\nFix: use 'last', 'steady' or None."
      )

  def _order(self, rank: int, microbatches: int) -> Iterable[Step]:
    stages = self.stages_of(rank)
    forwards, backwards, warm_up = interleaved(stages, rank, self.ranks, microbatches)
    steps = list(alternate(forwards, backwards, warm_up))
    if self.fuse == 'steady':
      return _fused(steps, warm_up)
    return _fused(steps, 0, only=self.stages - 1) if self.fuse else steps

  def _limitation(self, microbatches: int) -> str | None:
    return uneven_rounds(self.ranks, microbatches)


def tasks(kind: Kind, stages: Iterable[int], microbatches: int) -> list[Task]:
  """The tasks of one kind: all microbatches of one stage, then those of the next.

  Example:
    >>> [str(task) for task in tasks('bwd', [4, 0], 2)]
    ['bwd_4__0', 'bwd_4__1', 'bwd_0__0', 'bwd_0__1']
  """
  return [Task(kind, stage, microbatch) for stage in stages for microbatch in range(microbatches)]


def alternate(forwards: Sequence[Task], backwards: Sequence[Task], warm_up: int) -> Iterator[Task]:
  """A warm-up of forwards, then one forward and one backward alternately, then the other backwards.

  Example:
    >>> ' '.join(str(task) for task in alternate(tasks('fwd', [0], 3), tasks('bwd', [0], 3), warm_up=1))
    'fwd_0__0 fwd_0__1 bwd_0__0 fwd_0__2 bwd_0__1 bwd_0__2'
  """
  warm_up = min(warm_up, len(forwards))
  yield from forwards[:warm_up]
  for forward, backward in zip(forwards[warm_up:], backwards):
    yield from (forward, backward)
  yield from backwards[len(forwards) - warm_up :]


def interleaved(
  stages: Sequence[int], rank: int, ranks: int, microbatches: int
) -> tuple[list[Task], list[Task], int]:
  """Megatron-LM's forwards, backwards and warm-up length of a rank: round by round, stage by stage."""
  size = microbatches // max(1, microbatches // ranks)

  def rounds(kind: Kind, stages: Sequence[int]) -> list[Task]:
    starts = range(0, microbatches, size)
    return [Task(kind, stage, start + i) for start in starts for stage in stages for i in range(size)]

  warm_up = (len(stages) - 1) * size + 2 * (ranks - 1 - rank)
  return rounds('fwd', stages), rounds('bwd', stages[::-1]), warm_up


def uneven_rounds(ranks: int, microbatches: int) -> str | None:
  """An explanation if the microbatches do not divide into equal rounds, else None."""
  rounds = max(1, microbatches // ranks)
  if microbatches % rounds:
    return f'{microbatches} microbatches cannot be split into {rounds} equal rounds.'
  return None


def _fused(steps: Sequence[Task], start: int, only: int | None = None) -> Iterator[Step]:
  """Fuses each forward from index `start` on with the backward after it; `only` selects one stage."""
  at = 0
  while at < len(steps):
    pair = tuple(steps[at : at + 2])
    fits = at >= start and [task.kind for task in pair] == ['fwd', 'bwd']
    fits = fits and (only is None or [task.stage for task in pair] == [only, only])
    yield FusedTask(pair) if fits else steps[at]
    at += 2 if fits else 1
