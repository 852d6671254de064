"""Outcomes: memory, work and time of one layout, for one device and one step."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

from flax_spmd._src.compare.compilation import CompileResult
from flax_spmd._src.compare.costs import Cost
from flax_spmd._src.compare.lowering import LoweredStep
from flax_spmd._src.hlo.counts import Collective, Counts
from flax_spmd._src.hlo.live_arrays import LiveArray
from flax_spmd._src.layout import Layout
from flax_spmd._src.mesh import axis_sizes
from flax_spmd._src.pipeline.schedules.simulation import Simulation
from flax_spmd._src.public import public
from flax_spmd._src.text import size_text

ESTIMATED, PARTITIONED = 'estimated', 'partitioned'  # sources of outcomes that are not compiled


@public('flax_spmd.explore')
class Outcome(NamedTuple):
  """The result for one layout.

  Attributes:
    name: name of the layout.
    layout: layout on an abstract mesh.
    memory: bytes on one device; None if unknown.
    counts: work of a step on one device; None if it was not compiled.
    cost: bracket for the time of a step; None if it was not compiled.
    fits: whether the peak memory fits on the chip; in a search, whether it is within the budget.
    error: reason why it was not compiled, or None.
    program: lowered step, or None.
    compiled: result of the compilation, or None.
    source: origin of the figures: `estimated`; `partitioned` if the FLOPs and collectives are those of XLA's partitioner,
      and the rest is estimated; or `compiled:h100`.
    doubts: reasons why an estimate could be inaccurate.
    pipeline: ranks and schedule of a pipeline; None for a single program.
    batch: elements of the batch, relative to the first choice of a search. Layouts are ranked by time over `batch`.

  Example:
    >>> from flax_spmd.explore import Estimator
    >>> from flax_spmd.explore import parse_target
    >>> create = lambda: {'w': LogicallyPartitioned(jnp.ones((64, 256)), ('embed', 'mlp'))}
    >>> step = lambda state, x: (state, jnp.sum(x @ state['w'].unbox()))
    >>> train_step = explore.TrainStep(step, create, jax.ShapeDtypeStruct((32, 64), jnp.float32))
    >>> estimator = Estimator(train_step)
    >>> layout = Layout(abstract_mesh({'data': 8}), (('batch', 'data'),))
    >>> outcome = estimator.estimate(layout, parse_target('h100:8'), partition=False)
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
  program: LoweredStep | None
  compiled: CompileResult | None
  source: str = ''
  doubts: tuple[str, ...] = ()
  pipeline: PipelineRanks | None = None
  batch: float = 1.0

  @property
  def mesh(self) -> dict[str, int]:
    """Size per mesh axis."""
    return axis_sizes(self.layout.mesh)

  @property
  def live(self) -> tuple[LiveArray, ...]:
    """The temporary arrays that are in memory at the peak of a compiled step, largest first.

    Empty for an estimate, and for a pipeline, which has a program per stage.
    """
    return self.compiled.live if self.compiled else ()

  @classmethod
  def failed(cls, name: str, layout: Layout, error: str) -> Self:
    """The outcome of a layout that was not compiled."""
    return cls(name, layout, None, None, None, False, error, None, None)


def collective_text(one: Collective) -> str:
  """`all-gather over data (8): 3.1 GiB on the wire, 32 x 4 MiB bf16, model.py:31`."""
  source = f', {one.source}' if one.source else ''
  return (
    f'{one.kind} over {"+".join(one.axes) or "?"} ({one.group}): {size_text(one.wire)} on the wire, '
    f'{one.times} x {size_text(one.bytes)} {one.dtype}{source}'
  )


def record(outcome: Outcome) -> dict[str, Any]:
  """The outcome as JSON values."""
  counts, cost, compiled = outcome.counts, outcome.cost, outcome.compiled
  return {
    'name': outcome.name,
    'mesh': outcome.mesh,
    'rules': repr(outcome.layout.rules),
    'source': outcome.source,
    'doubts': list(outcome.doubts),
    'fits': outcome.fits,
    'batch': outcome.batch,
    'error': outcome.error,
    'memory': outcome.memory and outcome.memory._asdict(),
    'flops': counts and counts.flops,
    'hbm_bytes': counts and counts.hbm_bytes,
    'collectives': [one._asdict() for one in counts.collectives] if counts else [],
    'opaque': counts and counts.opaque,
    'live': [one._asdict() for one in outcome.live],
    'cost': cost and cost._asdict() | {'links': {'+'.join(axes): s for axes, s in cost.links.items()}},
    'warnings': compiled.warnings if compiled else [],
    'pipeline': outcome.pipeline and outcome.pipeline.record(),
    'findings': outcome.program.findings if outcome.program else [],
    'compile': compiled
    and {name: getattr(compiled, name) for name in ('seconds', 'cpu_seconds', 'rss', 'cached')},
  }


class Memory(NamedTuple):
  """Bytes on one device.

  Attributes:
    parameters: bytes of the parameters: the arrays below a key `params`, or in an `nnx.Param`. In a state with neither, all
      arrays of real or complex numbers that are no optimizer state.
    optimizer: bytes of the optimizer state: of Optax's states, and below a key `opt_state` or `param_states`.
    rest: bytes of the rest of the state.
    batch: bytes of the batch.
    temporaries: bytes of activations, gradients and gathered parameters at the peak.
    peak: peak memory, as reported by the compiler.
    host: bytes in the memory of the host, not part of the others.
  """

  parameters: int
  optimizer: int
  rest: int
  batch: int
  temporaries: int
  peak: int
  host: int = 0

  def text(self, device: int) -> str:
    """Bytes of the device, with those of the host if there are any.

    Args:
      device: bytes of the device to show: the peak, or a part of it.

    Example:
      >>> Memory(1, 0, 0, 0, 1, 2, host=2**20).text(2**30)
      '1 GiB, 1 MiB on host'
    """
    return size_text(device) + (f', {size_text(self.host)} on host' if self.host else '')


class RankOutcome(NamedTuple):
  """One rank of a pipeline.

  Attributes:
    stages: numbers of its stages.
    memory: memory of each of its devices.
    sent: bytes that each of its devices sends to other ranks in a step.
    bubble: idle share of the microbatch loop, with the `low` times.
  """

  stages: tuple[int, ...]
  memory: Memory
  sent: int
  bubble: float


class PipelineRanks(NamedTuple):
  """The ranks of a pipeline, and the simulation of its schedule.

  Attributes:
    ranks: outcome of each rank.
    low: microbatch loop in milliseconds, if everything within a program overlaps.
    high: microbatch loop in milliseconds, if nothing overlaps.
  """

  ranks: tuple[RankOutcome, ...]
  low: Simulation
  high: Simulation

  @property
  def bubble(self) -> tuple[float, float]:
    """The idle share of the loop in `low` and in `high`, as the mean over ranks."""
    return self.low.bubble, self.high.bubble

  @property
  def sent(self) -> int:
    """Bytes sent between ranks in a step, by one device of each rank."""
    return sum(rank.sent for rank in self.ranks)

  def lines(self, limit: float) -> list[str]:
    """A summary, and one line per rank.

    Args:
      limit: memory of a device in bytes; the lines show by how much a rank exceeds it.
    """
    bubbles = ' to '.join(f'{bubble:.1%}' for bubble in dict.fromkeys(sorted(self.bubble)))
    ranks = [rank_text(number, rank, limit) for number, rank in enumerate(self.ranks)]
    return [f'{self.low.title}: bubble {bubbles}, {size_text(self.sent)} between ranks', *ranks]

  def record(self) -> dict[str, Any]:
    """Ranks and bubble as JSON values, without the tasks of the schedule."""
    ranks = [rank._asdict() | {'memory': rank.memory._asdict()} for rank in self.ranks]
    return {'schedule': self.low.title, 'bubble': self.bubble, 'sent': self.sent, 'ranks': ranks}


def rank_text(number: int, rank: RankOutcome, limit: float) -> str:
  """`rank 2 (stages 2, 6): 90 GiB on a device, 8 GiB on host, 10 GiB over; idle 27.3%; sends 12 MiB`."""
  stages = f'stage{"s" if len(rank.stages) > 1 else ""} {", ".join(map(str, rank.stages))}'
  over = rank.memory.peak - limit
  excess = f', {size_text(over)} over' if over > 0 else ''
  host = f', {size_text(rank.memory.host)} on host' if rank.memory.host else ''
  return (
    f'rank {number} ({stages}): {size_text(rank.memory.peak)} on a device{host}{excess}; idle {rank.bubble:.1%}; '
    f'sends {size_text(rank.sent)}'
  )
