"""Outcomes: what came of one layout, in bytes and seconds for one device and one step."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

from flax_spmd._src.compare.compilation import Compiled
from flax_spmd._src.compare.costs import Cost
from flax_spmd._src.compare.lowering import Program
from flax_spmd._src.hlo.counts import Collective, Counts
from flax_spmd._src.layout import Layout
from flax_spmd._src.mesh import axis_sizes
from flax_spmd._src.pipeline.schedules.simulation import Simulation
from flax_spmd._src.public_module import set_module
from flax_spmd._src.text import size_text


@set_module('flax_spmd.explore')
class Outcome(NamedTuple):
  """What came of one layout.

  Attributes:
    name: its name.
    layout: itself, on an abstract mesh.
    memory: bytes on a device, or None if nothing is known.
    counts: what a step does on a device, or None if it was not compiled.
    cost: the time bracket, or None.
    fits: whether its peak fits into the chip's memory.
    error: why it was not compiled, or None.
    program, compiled: what it was lowered and compiled to, or None.
    source: where the figures are from: `estimated`, or `compiled:h100`.
    doubts: why an estimate may be far off.

  Example:
    >>> from flax_spmd.explore import Estimator
    >>> from flax_spmd.explore import parse
    >>> create = lambda: {'w': LogicallyPartitioned(jnp.ones((64, 256)), ('embed', 'mlp'))}
    >>> step = lambda state, x: (state, jnp.sum(x @ state['w'].unbox()))
    >>> estimator = Estimator(step, create, jax.ShapeDtypeStruct((32, 64), jnp.float32))
    >>> layout = Layout(abstract_mesh({'data': 8}), (('batch', 'data'),))
    >>> outcome = estimator.estimate(layout, parse('h100:8'))
    >>> outcome.fits, outcome.mesh, outcome.source
    (True, {'data': 8}, 'estimated')
  """

  name: str
  layout: Layout
  memory: Memory | None
  counts: Counts | None
  cost: Cost | None
  fits: bool
  error: str | None
  program: Program | None
  compiled: Compiled | None
  source: str = ''
  doubts: tuple[str, ...] = ()
  stages: Stages | None = None

  @property
  def mesh(self) -> dict[str, int]:
    """Size per mesh axis."""
    return axis_sizes(self.layout.mesh)

  @classmethod
  def failed(cls, name: str, layout: Layout, error: str) -> Self:
    """That of a layout that was not compiled."""
    return cls(name, layout, None, None, None, False, error, None, None)


def collective_text(one: Collective) -> str:
  """`all-gather over data (8): 3.1 GiB on the wire in 32 x 4 MiB bf16, model.py:31`."""
  source = f', {one.source}' if one.source else ''
  return (
    f'{one.kind} over {"+".join(one.axes) or "?"} ({one.group}): {size_text(one.wire)} on the wire, '
    f'{one.times} x {size_text(one.bytes)} {one.dtype}{source}'
  )


def record(outcome: Outcome) -> dict[str, Any]:
  """All of it, as JSON has it."""
  counts, cost, compiled = outcome.counts, outcome.cost, outcome.compiled
  return {
    'name': outcome.name,
    'mesh': outcome.mesh,
    'rules': repr(outcome.layout.rules),
    'source': outcome.source,
    'doubts': list(outcome.doubts),
    'fits': outcome.fits,
    'error': outcome.error,
    'memory': outcome.memory and outcome.memory._asdict(),
    'flops': counts and counts.flops,
    'hbm_bytes': counts and counts.hbm_bytes,
    'collectives': [one._asdict() for one in counts.collectives] if counts else [],
    'opaque': counts and counts.opaque,
    'cost': cost and cost._asdict() | {'links': {'+'.join(axes): s for axes, s in cost.links.items()}},
    'warnings': compiled.warnings if compiled else [],
    'stages': outcome.stages and outcome.stages.record(),
    'findings': outcome.program.findings if outcome.program else [],
    'compile': compiled
    and {name: getattr(compiled, name) for name in ('seconds', 'cpu_seconds', 'rss', 'cached')},
  }


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
