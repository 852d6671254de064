"""Stages: what the ranks of a pipeline hold, send and wait for, and the memory of a device in parts."""

from __future__ import annotations

from typing import Any, NamedTuple

from flax_spmd._src.pipeline.schedules.simulation import Simulation
from flax_spmd._src.text import size_text


class Memory(NamedTuple):
  """Bytes on one device.

  Attributes:
    parameters, optimizer, rest: of the state.
    batch: of the batch.
    temporaries: activations, gradients, gathered parameters: what a step needs besides, at its peak.
    peak: all of it, as the compiler says.
  """

  parameters: int
  optimizer: int
  rest: int
  batch: int
  temporaries: int
  peak: int


class Rank(NamedTuple):
  """One rank of a pipeline.

  Attributes:
    stages: those that it has.
    memory: of each of its devices.
    sent: bytes that one of its devices sends to other ranks in a step.
    bubble: the part of the loop in which it has nothing to run, at best.
  """

  stages: tuple[int, ...]
  memory: Memory
  sent: int
  bubble: float


class Stages(NamedTuple):
  """The ranks of a pipeline, and its schedule over time.

  Attributes:
    ranks: one of each.
    low, high: the microbatch loop in milliseconds, if in each program everything overlaps, or nothing.
  """

  ranks: tuple[Rank, ...]
  low: Simulation
  high: Simulation

  @property
  def bubble(self) -> tuple[float, float]:
    """The part of the loop in which a rank has nothing to run, the mean over ranks; of `low` and `high`."""
    return self.low.bubble, self.high.bubble

  @property
  def sent(self) -> int:
    """Bytes that ranks send each other in a step, of one device of each."""
    return sum(rank.sent for rank in self.ranks)

  def lines(self, limit: float) -> list[str]:
    """What is said of it; `limit` is the memory of a device, to say by how much a rank is over it."""
    bubbles = ' to '.join(f'{bubble:.1%}' for bubble in dict.fromkeys(sorted(self.bubble)))
    ranks = [rank_text(number, rank, limit) for number, rank in enumerate(self.ranks)]
    return [f'{self.low.title}: bubble {bubbles}, {size_text(self.sent)} between ranks', *ranks]

  def record(self) -> dict[str, Any]:
    """All of it but the schedule's tasks, as JSON has it."""
    ranks = [rank._asdict() | {'memory': rank.memory._asdict()} for rank in self.ranks]
    return {'schedule': self.low.title, 'bubble': self.bubble, 'sent': self.sent, 'ranks': ranks}


def rank_text(number: int, rank: Rank, limit: float) -> str:
  """`rank 2 (stages 2, 6): 90 GiB on a device, 10 GiB over; idle 27.3%; sends 12 MiB`."""
  stages = f'stage{"s" if len(rank.stages) > 1 else ""} {", ".join(map(str, rank.stages))}'
  over = rank.memory.peak - limit
  said = f', {size_text(over)} over' if over > 0 else ''
  return (
    f'rank {number} ({stages}): {size_text(rank.memory.peak)} on a device{said}; idle {rank.bubble:.1%}; '
    f'sends {size_text(rank.sent)}'
  )
