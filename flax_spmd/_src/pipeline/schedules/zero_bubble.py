"""Zero-bubble schedules: backwards are split, and weight gradients fill the bubbles.

Other stages wait only for the gradient of a stage's input (`bwd`). The gradient of its weights (`wgrad`)
can run later, in the place of a bubble; until then the activation stays live.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

from flax_spmd._src.pipeline.schedules.classic import alternate, interleaved, tasks, uneven_rounds
from flax_spmd._src.pipeline.schedules.greedy import greedy
from flax_spmd._src.pipeline.schedules.schedule import Schedule
from flax_spmd._src.pipeline.schedules.tasks import FusedTask, Order, Step, Task
from flax_spmd._src.public import public


@public('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class ZeroBubbleH1(Schedule):
  """1F1B with weight gradients delayed by r microbatches on rank r; p live activations on every rank.

  For F = B = W and m >= p the makespan is 3 m + p - 1 and the bubble (p - 1) / (3 m + p - 1): a third of
  1F1B's, at about the same memory. Qi et al., https://arxiv.org/abs/2401.10241.

  Attributes:
    ranks: number of ranks, p; each has one stage.

  Example:
    >>> simulation = ZeroBubbleH1(ranks=4).simulate(8)
    >>> round(simulation.bubble, 3), simulation.peaks
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


@public('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class ZeroBubbleV(Schedule):
  """Two stages per rank in a V, with delayed weight gradients: no bubble except to fill the pipeline.

  For F = B = W, m >= 2 p and up to 8 ranks the makespan is 6 m + p - 1, which is optimal, and the bubble
  (p - 1) / (6 m + p - 1); for 16 ranks, up to 2 % more. A rank has at most 2 p live activations, each of
  a stage half as large as 1F1B's. That is too few to hide transfers: if they are slow, compare with
  `DualPipeV` by `simulate(..., transfer=...)`. Placement and memory are those of ZB-V, Qi et al.,
  https://arxiv.org/abs/2401.10241 and https://arxiv.org/abs/2405.15362; the order comes from a greedy
  simulation.

  Attributes:
    ranks: number of ranks, p.

  Example:
    >>> simulation = ZeroBubbleV(ranks=4).simulate(8)
    >>> round(simulation.bubble, 3), simulation.peaks
    (0.059, (8, 8, 8, 8))
  """

  _arrangement = 'v', 2

  def _order(self, rank: int, microbatches: int) -> Order:
    return greedy(self.stage_ranks, microbatches, live=self.stages)[rank]


@public('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class KimiK2(Schedule):
  """Interleaved 1F1B with one more warm-up forward, and weight gradients split from the backward.

  The extra forward lets communication within a stage (expert parallelism) overlap with a backward. A
  weight gradient directly follows its backward, so that the backward's result is sent in the meantime.
  Microbatches run in equal rounds, as in `Interleaved1F1B`. Kimi K2, section 2.4,
  https://arxiv.org/abs/2507.20534. The split is the paper's; JaxPP's schedule of this name has no split.

  Attributes:
    ranks: number of ranks, p.
    chunks: number of stages per rank, v.
    split: whether weight gradients are tasks of their own.

  Example:
    >>> [kind(ranks=4).simulate(8, transfer=0.5).makespan for kind in (pipeline.Interleaved1F1B, KimiK2)]
    [64.0, 59.0]
  """

  chunks: int = 2
  split: bool = True

  def _order(self, rank: int, microbatches: int) -> Iterator[Step]:
    forwards, backwards, warm_up = interleaved(self.stages_of(rank), rank, self.ranks, microbatches)
    for task in alternate(forwards, backwards, warm_up + 1):
      yield task
      if task.kind == 'bwd' and self.split:
        yield Task('wgrad', task.stage, task.microbatch)

  def _limitation(self, microbatches: int) -> str | None:
    return uneven_rounds(self.ranks, microbatches)


@public('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class DualPipeV(Schedule):
  """DeepSeek's DualPipe, cut in half: a V that pairs backwards of one stage with forwards of the other.

  Weight gradients are split off only where they fill a bubble, in the warm-up and towards the end;
  elsewhere an unsplit backward is one fused task. Needs m >= 2 p; 2 p + 1 live activations on every
  rank. DeepSeek-V3, https://arxiv.org/abs/2412.19437. The V, and its bubble of (p - 1) (F&B + B - 3 W)
  when fused, with B an unsplit backward: https://github.com/deepseek-ai/DualPipe.

  Attributes:
    ranks: number of ranks, p.
    fuse: whether a forward and the paired backward of the other stage are one program, so that the
      communication of each can overlap with the computation of the other.

  Example:
    >>> round(DualPipeV(ranks=4).simulate(8).bubble, 3)
    0.059
    >>> round(DualPipeV(ranks=4, fuse=True).simulate(8).bubble, 3)  # without the gain from overlap
    0.111
  """

  fuse: bool = False

  _arrangement = 'v', 2

  def _limitation(self, microbatches: int) -> str | None:
    if microbatches < 2 * self.ranks:
      return f'{microbatches} microbatches are too few: it needs {2 * self.ranks}, two per rank.'
    return None

  def _order(self, rank: int, microbatches: int) -> Iterator[Step]:
    after, upto = self.ranks - 1 - rank, rank + 1  # ranks after this one, and up to it
    make = _DualPipeTasks(self.stages_of(rank), self.fuse)
    for _ in range(2 * after):
      yield make.forward(0)
    for _ in range(upto):
      yield from (make.forward(0), make.forward(1))
    for _ in range(after):
      yield from (make.input_gradient(1), make.weight_gradient(), make.forward(1))
    for _ in range(microbatches - 2 * self.ranks + upto):
      yield from (*make.pair(0, 1), *make.pair(1, 0))
    for _ in range(after):
      yield from (make.backward(1), *make.pair(1, 0))
    for at in range(2 * upto):  # the second half delays its weight gradients
      yield (make.input_gradient if at >= upto else make.backward)(1 - at % 2)
    for _ in range(after):
      yield from (make.weight_gradient(), make.input_gradient(0))
    for _ in range(upto):
      yield make.weight_gradient()


class _DualPipeTasks:
  """Creates the tasks of one rank's two stages; each call takes the next microbatch of its kind."""

  def __init__(self, stages: tuple[int, ...], fuse: bool):
    self._stages, self._fuse = stages, fuse
    self._next: collections.Counter[tuple[str, int]] = collections.Counter()
    self._delayed: collections.deque[Task] = collections.deque()

  def forward(self, chunk: int) -> Task:
    return Task('fwd', self._stages[chunk], self._count('fwd', chunk))

  def input_gradient(self, chunk: int) -> Task:
    """A backward with delayed weight gradients."""
    stage, microbatch = self._stages[chunk], self._count('bwd', chunk)
    self._delayed.append(Task('wgrad', stage, microbatch))
    return Task('bwd', stage, microbatch)

  def weight_gradient(self) -> Task:
    """The weight gradient that has been delayed longest."""
    return self._delayed.popleft()

  def backward(self, chunk: int) -> FusedTask:
    stage, microbatch = self._stages[chunk], self._count('bwd', chunk)
    return FusedTask((Task('bwd', stage, microbatch), Task('wgrad', stage, microbatch)))

  def pair(self, forward: int, backward: int) -> tuple[Step, ...]:
    """A forward of one stage, paired with a backward of the other."""
    tasks = self.forward(forward), self.backward(backward)
    return (FusedTask((tasks[0], *tasks[1].tasks)),) if self._fuse else tasks

  def _count(self, kind: str, chunk: int) -> int:
    self._next[kind, chunk] += 1
    return self._next[kind, chunk] - 1
