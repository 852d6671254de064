"""Schedules with split backwards: the gradients of weights wait until there is nothing better to do.

Only the gradient of a stage's input (`bwd`) is what another stage waits for; the gradient of its weights
(`wgrad`) can fill what would be a bubble. Until then the activation stays alive.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

from flax_spmd._src.pipeline.schedules.classic import in_turn, interleaved, tasks, uneven_rounds
from flax_spmd._src.pipeline.schedules.greedy import greedy
from flax_spmd._src.pipeline.schedules.schedule import Schedule
from flax_spmd._src.pipeline.schedules.stage_ranks import placed
from flax_spmd._src.pipeline.schedules.tasks import FusedTask, Order, Step, Task
from flax_spmd._src.public_module import set_module


@set_module('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class ZeroBubbleH1(Schedule):
  """1F1B whose weight gradients are put off, by r microbatches on rank r: p activations on every rank.

  For F = B = W and m >= p the makespan is 3 m + p - 1, so the bubble is (p - 1) / (3 m + p - 1), a third
  of 1F1B's at about the same memory. Qi et al., https://arxiv.org/abs/2401.10241.

  Attributes:
    ranks: how many there are; each has one stage.

  Example:
    >>> found = ZeroBubbleH1(ranks=4).simulate(8)
    >>> round(found.bubble, 3), found.peaks
    (0.111, (4, 4, 4, 4))
  """

  def _order(self, rank: int, microbatches: int) -> Iterator[Step]:
    forwards, weights = tasks('fwd', [rank], microbatches), tasks('wgrad', [rank], microbatches)
    ahead = min(self.ranks - rank, microbatches)
    yield from forwards[:ahead]
    for at, backward in enumerate(tasks('bwd', [rank], microbatches)):
      yield backward
      yield from weights[at - rank : at - rank + 1] if at >= rank else ()
      yield from forwards[ahead + at : ahead + at + 1]
    yield from weights[max(0, microbatches - rank) :]


@set_module('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class ZeroBubbleV(Schedule):
  """Two stages per rank in a V, weights put off: no bubble but the way to the last rank and back.

  For F = B = W, m >= 2 p and up to 8 ranks the makespan is 6 m + p - 1 and the bubble
  (p - 1) / (6 m + p - 1), the least there can be (16 ranks: up to 2 % more). At most 2 p activations,
  each of a stage half as large as 1F1B's, are alive on a rank; with so few, transfers cannot hide: where
  they take long, compare it with `DualPipeV` by `simulate(..., transfer=...)`. Placement and memory are
  those of ZB-V, Qi et al., https://arxiv.org/abs/2401.10241 and https://arxiv.org/abs/2405.15362; the
  order is found greedily (`flax_spmd.pipeline.greedy`).

  Attributes:
    ranks: how many there are.

  Example:
    >>> found = ZeroBubbleV(ranks=4).simulate(8)
    >>> round(found.bubble, 3), found.peaks
    (0.059, (8, 8, 8, 8))
  """

  @property
  def owners(self) -> tuple[int, ...]:
    """Per stage, the rank that it is on."""
    return placed(self.ranks, 2, 'v')

  def _order(self, rank: int, microbatches: int) -> Order:
    return greedy(self.owners, microbatches, live=self.stages)[rank]


@set_module('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class KimiK2(Schedule):
  """Interleaved 1F1B with one more warm-up forward, and weight gradients apart from their backward.

  The forward that is ahead lets the communication within a stage (of experts) hide behind a backward; a
  weight gradient comes right after its backward, whose result is sent meanwhile. Kimi K2, section 2.4,
  https://arxiv.org/abs/2507.20534. Microbatches go around in rounds, as in `Interleaved1F1B`.

  Attributes:
    ranks: how many there are.
    chunks: how many stages each of them has.

  Example:
    >>> [kind(ranks=4).simulate(8, transfer=0.5).makespan for kind in (pipeline.Interleaved1F1B, KimiK2)]
    [64.0, 59.0]
  """

  chunks: int = 2

  @property
  def owners(self) -> tuple[int, ...]:
    """Per stage, the rank that it is on."""
    return placed(self.ranks, self.chunks, 'loop')

  def _order(self, rank: int, microbatches: int) -> Iterator[Step]:
    forwards, backwards, warm_up = interleaved(self.stages_of(rank), rank, self.ranks, microbatches)
    for task in in_turn(forwards, backwards, warm_up + 1):
      yield task
      if task.kind == 'bwd':
        yield Task('wgrad', task.stage, task.microbatch)

  def _objection(self, microbatches: int) -> str | None:
    return uneven_rounds(self.ranks, microbatches)


@set_module('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class DualPipeV(Schedule):
  """DeepSeek's DualPipe, cut in half: a V, with backwards of one stage beside forwards of the other.

  Weight gradients are split off only where they fill a bubble, in the warm-up and towards the end;
  elsewhere a whole backward is one fused task. It needs 2 p microbatches or more; 2 p + 1 activations
  are alive on every rank. DeepSeek-V3, https://arxiv.org/abs/2412.19437; the V and its bubble of
  (p - 1) (F&B + B - 3 W) when fused, B being a whole backward: https://github.com/deepseek-ai/DualPipe.

  Attributes:
    ranks: how many there are.
    fuse: make one program of a forward and the backward of the other stage beside it, so that one's
      communication can hide behind the other's work.

  Example:
    >>> round(DualPipeV(ranks=4).simulate(8).bubble, 3)
    0.059
    >>> round(DualPipeV(ranks=4, fuse=True).simulate(8).bubble, 3)  # in a run, what hides pays for it
    0.111
  """

  fuse: bool = False

  @property
  def owners(self) -> tuple[int, ...]:
    """Per stage, the rank that it is on."""
    return placed(self.ranks, 2, 'v')

  def _objection(self, microbatches: int) -> str | None:
    if microbatches < 2 * self.ranks:
      return f'{microbatches} microbatches do not fill it: it needs {2 * self.ranks}, two per rank.'
    return None

  def _order(self, rank: int, microbatches: int) -> Iterator[Step]:
    after, upto = self.ranks - 1 - rank, rank + 1  # ranks after this one, and up to it
    run = _Hands(self.stages_of(rank), self.fuse)
    for _ in range(2 * after):
      yield run.forward(0)
    for _ in range(upto):
      yield from (run.forward(0), run.forward(1))
    for _ in range(after):
      yield from (run.inputs(1), run.weights(), run.forward(1))
    for _ in range(microbatches - 2 * self.ranks + upto):
      yield from (*run.both(0, 1), *run.both(1, 0))
    for _ in range(after):
      yield from (run.whole(1), *run.both(1, 0))
    for at in range(2 * upto):  # the second half puts its weights off
      yield (run.inputs if at >= upto else run.whole)(1 - at % 2)
    for _ in range(after):
      yield from (run.weights(), run.inputs(0))
    for _ in range(upto):
      yield run.weights()


class _Hands:
  """Makes the tasks of one rank's two stages, each kind with its next microbatch."""

  def __init__(self, stages: tuple[int, ...], fuse: bool):
    self._stages, self._fuse = stages, fuse
    self._next: collections.Counter[tuple[str, int]] = collections.Counter()
    self._put_off: collections.deque[Task] = collections.deque()

  def forward(self, which: int) -> Task:
    return Task('fwd', self._stages[which], self._count('fwd', which))

  def inputs(self, which: int) -> Task:
    """A backward whose weights are put off."""
    stage, microbatch = self._stages[which], self._count('bwd', which)
    self._put_off.append(Task('wgrad', stage, microbatch))
    return Task('bwd', stage, microbatch)

  def weights(self) -> Task:
    """What was put off first."""
    return self._put_off.popleft()

  def whole(self, which: int) -> FusedTask:
    stage, microbatch = self._stages[which], self._count('bwd', which)
    return FusedTask((Task('bwd', stage, microbatch), Task('wgrad', stage, microbatch)))

  def both(self, forward: int, backward: int) -> tuple[Step, ...]:
    """A forward of one stage beside a backward of the other."""
    pair = self.forward(forward), self.whole(backward)
    return (FusedTask((pair[0], *pair[1].tasks)),) if self._fuse else pair

  def _count(self, kind: str, which: int) -> int:
    self._next[kind, which] += 1
    return self._next[kind, which] - 1
