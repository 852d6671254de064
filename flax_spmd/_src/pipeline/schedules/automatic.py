"""Automatic schedules: the fastest known order for the measured times of a model's own tasks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from flax_spmd._src.pipeline.schedules import classic, zero_bubble
from flax_spmd._src.pipeline.schedules.greedy import greedy
from flax_spmd._src.pipeline.schedules.schedule import Schedule
from flax_spmd._src.pipeline.schedules.simulation import EQUAL, Costs, Simulation, stage_costs
from flax_spmd._src.pipeline.schedules.stage_ranks import Placement, check_positive
from flax_spmd._src.pipeline.schedules.tasks import KINDS, Order
from flax_spmd._src.public import public


@public('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class Automatic(Schedule):
  """The order that is fastest in simulation, for given task times and a limit of memory.

  Chosen among the other schedules of this placement whose memory suffices, and two greedy orders: one by
  these costs, one by equal ones. So it is never slower than any of them, in simulation. Costs of the model at hand
  come from `compiled.measure`. All ranks wait for the most expensive stage, whatever the order: the work of
  stages is balanced by their ends, or by `pipeline_jit(..., stages=)`.

  Attributes:
    ranks: number of ranks.
    costs: task times, as for `Schedule.simulate`; default: equal ones. Kept as a time per kind and stage. A function of
      a task has one time for a backward, split or not: with `split`, only orders that split backwards are compared by it.
    transfer: time to move a result from one rank to another, in the same unit.
    chunks: number of stages per rank.
    placement: 'loop', 'v', or the rank of every stage; see `Schedule.of`.
    live: largest number of live activations per rank, each of one stage and one microbatch; None: the number of
      stages, which is 1F1B's.
    split: whether weight gradients may be tasks of their own. Then measured times need them too.

  Raises:
    PipelineError: a number below 1, a placement with a rank out of range or without a stage, costs that do not match
      the stages, or a limit of memory under which ranks wait for each other.

  Example: 1F1B and ZB-H1 have as much memory.
    >>> costs = {'fwd': (1, 1, 1, 2), 'bwd': (1, 1, 1, 2), 'wgrad': (1, 1, 1, 2)}
    >>> kinds = pipeline.OneFOneB(ranks=4), pipeline.ZeroBubbleH1(ranks=4), Automatic(4, costs)
    >>> [schedule.simulate(8, costs).makespan for schedule in kinds]
    [57, 51, 51]
  """

  costs: Costs = dataclasses.field(default_factory=lambda: EQUAL, hash=False)
  transfer: float = 0
  chunks: int = 1
  placement: Placement = 'loop'
  live: int | None = None
  split: bool = True

  def __post_init__(self):
    super().__post_init__()
    if self.live is not None:
      check_positive(self.live, 'Automatic.live')
    if not isinstance(self.placement, str):
      object.__setattr__(self, 'placement', tuple(self.placement))
    if not callable(self.costs):
      table = stage_costs(self.costs, self.stages, KINDS if self.split else KINDS[:2])
      object.__setattr__(self, 'costs', table)
    greedy(self.stage_ranks, 1, self._limit, self.split, self.costs, self.transfer)  # checks all numbers

  def __str__(self) -> str:
    """The schedule without its costs, and without fields that have their default."""
    fields = [field for field in dataclasses.fields(self) if field.name != 'costs']
    given = [f'{field.name}={getattr(self, field.name)!r}' for field in fields]
    defaults = [f'{field.name}={field.default!r}' for field in fields]
    return f'Automatic({", ".join(one for one in given if one not in defaults)})'

  @property
  def _limit(self) -> int:
    """The largest number of live activations per rank."""
    return self.stages if self.live is None else self.live

  def _order(self, rank: int, microbatches: int) -> Order:
    return _fastest(self, microbatches)[rank]

  def _times(self) -> tuple[Costs, float]:
    return self.costs, self.transfer

  def _simulations(self, microbatches: int) -> Iterator[tuple[Simulation, tuple[Order, ...]]]:
    """Every order to choose from, simulated with these costs."""
    for schedule in self._known():
      if schedule.supports(microbatches):
        simulation = schedule.simulate(microbatches, *self._times())
        if max(simulation.peaks) <= self._limit:
          yield simulation, schedule.tasks(microbatches)
    limited = self.stage_ranks, microbatches, self._limit, self.split
    for orders in (greedy(*limited, *self._times()), greedy(*limited)):
      schedule = Schedule.of(lambda rank, _: orders[rank], self.ranks, self.chunks, self.stage_ranks)  # noqa: B023
      yield schedule.simulate(microbatches, *self._times()), orders

  def _known(self) -> Iterator[Schedule]:
    """The schedules of this placement."""
    single = (classic.OneFOneB, classic.Eager1F1B, classic.GPipe)
    chunked = (classic.Interleaved1F1B, classic.InterleavedGPipe)
    known: list[Schedule] = []
    if not (self.split and callable(self.costs)):
      known += [kind(self.ranks) for kind in single]
      known += [kind(self.ranks, self.chunks) for kind in chunked]
    if self.split:
      known += [kind(self.ranks) for kind in (zero_bubble.ZeroBubbleH1, zero_bubble.DualPipeV)]
      known += [zero_bubble.KimiK2(self.ranks, self.chunks)]
    yield from (schedule for schedule in known if schedule.stage_ranks == self.stage_ranks)


@functools.lru_cache(maxsize=16)
def _fastest(schedule: Automatic, microbatches: int) -> tuple[Order, ...]:
  return min(schedule._simulations(microbatches), key=lambda each: each[0].makespan)[1]
