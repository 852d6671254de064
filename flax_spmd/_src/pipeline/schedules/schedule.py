"""Schedules: the order in which every rank of a pipeline runs its tasks.

    schedule = OneFOneB(ranks=4)
    schedule.tasks(8)[2]                  the tasks of rank 2, for 8 microbatches
    schedule.validate(8)                  a proof that it can run, and its live activations
    schedule.simulate(8).bubble           the fraction of the time in which ranks are idle
    schedule.draw(8)                      a timeline

A model is cut into *stages*. Each stage runs on one *rank*, and a rank may have several stages. A
schedule is a value: a number of ranks, the rank of every stage, and a rule for the tasks of each rank,
given the number of microbatches. Define others by a rule with `Schedule.of`, or as text with
`Schedule.from_text`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

from flax_spmd._src.pipeline.schedules.simulation import (
  EQUAL,
  Costs,
  Simulation,
  TimedStep,
  check_time,
  own_costs,
  simulate,
  timed,
)
from flax_spmd._src.pipeline.schedules.stage_ranks import Placement, assign_ranks, check_positive
from flax_spmd._src.pipeline.schedules.tasks import Order, Step
from flax_spmd._src.pipeline.schedules.text_format import read, steps_of
from flax_spmd._src.pipeline.schedules.timeline import Timeline
from flax_spmd._src.pipeline.schedules.validation import ScheduleReport, TaskLists, Waits, validate, walk
from flax_spmd._src.public import public
from flax_spmd._src.text import value_text
from flax_spmd.errors import PipelineError

Rule: TypeAlias = Callable[[int, int], Iterable[Step | str]]


@public('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class Schedule(abc.ABC):
  """The order of tasks on every rank of a pipeline.

  Attributes:
    ranks: number of ranks; equals the size of the mesh axis that the stages are partitioned over.

  Example:
    >>> from flax_spmd.pipeline import OneFOneB
    >>> schedule = OneFOneB(ranks=2)
    >>> schedule.stages, schedule.stage_ranks
    (2, (0, 1))
    >>> print(*schedule.tasks(2)[1])
    fwd_1__0 bwd_1__0 fwd_1__1 bwd_1__1
  """

  ranks: int
  _arrangement: ClassVar[tuple[Placement, int]] = 'loop', 1  # without fields `placement` and `chunks`

  def __post_init__(self):
    for field in ('ranks', 'chunks'):
      if hasattr(self, field):
        check_positive(getattr(self, field), f'{type(self).__name__}.{field}')

  @staticmethod
  def of(rule: Rule, ranks: int, chunks: int = 1, placement: Placement = 'loop') -> Schedule:
    """A custom schedule.

    Args:
      rule: a function from a rank and the number of microbatches to the rank's tasks in order, as
        `Task`, `FusedTask` or their texts.
      ranks: number of ranks.
      chunks: number of stages per rank.
      placement: how stages are assigned to ranks: 'loop' is round-robin (0 1 2 0 1 2), 'v' runs down and
        up again (0 1 2 2 1 0); or the rank of every stage.

    Raises:
      PipelineError: a number below 1, or a placement with a rank out of range or without a stage.

    Example: forwards first, then the backwards from the last microbatch to the first.
      >>> def last_in_first_out(rank, microbatches):
      ...   for microbatch in range(microbatches):
      ...     yield f'fwd_{rank}__{microbatch}'
      ...   for microbatch in reversed(range(microbatches)):
      ...     yield f'bwd_{rank}__{microbatch}'
      >>> schedule = Schedule.of(last_in_first_out, ranks=3)
      >>> print(schedule.simulate(4))
      last_in_first_out(ranks=3) with 4 microbatches: makespan 18, bubble 33.3%
      rank      busy   bubble  live
         0        12    33.3%     4
         1        12    33.3%     4
         2        12    33.3%     4
    """
    sizes = check_positive(ranks, 'ranks'), check_positive(chunks, 'chunks')
    return RuleSchedule(ranks, assign_ranks(*sizes, placement), rule)

  @staticmethod
  def from_text(text: str) -> Schedule:
    """A schedule from its text, one line of tasks per rank. It supports one number of microbatches.

    Empty lines and comments (`# ...`) are skipped. A stage belongs to the rank with most of its tasks.

    Raises:
      PipelineError: a word that is not a task, a line out of order, or a stage without tasks.

    Example:
      >>> schedule = Schedule.from_text('''
      ...   rank 0: fwd_0__0 fwd_0__1 bwd_0__0 bwd_0__1
      ...   rank 1: FusedTask(fwd_1__0, bwd_1__0) fwd_1__1 bwd_1__1
      ... ''')
      >>> schedule.simulate(2).makespan
      9
    """
    orders, stage_ranks = read(text)
    return TextSchedule(len(orders), stage_ranks, orders)

  @property
  def stage_ranks(self) -> tuple[int, ...]:
    """Per stage, its rank."""
    placement, chunks = self._arrangement
    given: tuple[int, Any] = getattr(self, 'chunks', chunks), getattr(self, 'placement', placement)
    return assign_ranks(self.ranks, *given)

  @property
  def stages(self) -> int:
    """The number of stages; the model must have as many."""
    return len(self.stage_ranks)

  def stages_of(self, rank: int) -> tuple[int, ...]:
    """The stages of a rank, in the order of the model."""
    return tuple(stage for stage, other in enumerate(self.stage_ranks) if other == rank)

  def tasks(self, microbatches: int) -> tuple[Order, ...]:
    """Per rank, its tasks in order.

    Raises:
      PipelineError: the schedule does not support this number of microbatches; the message names the
        nearest supported ones.

    Example:
      >>> [str(task) for task in pipeline.Eager1F1B(ranks=4).tasks(4)[2]]
      ['fwd_2__0', 'fwd_2__1', 'fwd_2__2', 'bwd_2__0', 'fwd_2__3', 'bwd_2__1', 'bwd_2__2', 'bwd_2__3']
    """
    if not self.supports(check_positive(microbatches, 'microbatches')):
      nearest = self.nearest_supported(microbatches)
      raise PipelineError(
        f'{self.limitation(microbatches)}\n'
        f'Fix: use {nearest} microbatch{"" if nearest == "1" else "es"}.'
      )
    return tuple(tuple(self._order(rank, microbatches)) for rank in range(self.ranks))

  def to_text(self, microbatches: int) -> str:
    """The tasks in the format of `Schedule.from_text`, one line per rank.

    Raises:
      PipelineError: the schedule does not support this number of microbatches.

    Example:
      >>> print(pipeline.OneFOneB(ranks=2).to_text(2))
      rank 0: fwd_0__0 fwd_0__1 bwd_0__0 bwd_0__1
      rank 1: fwd_1__0 bwd_1__0 fwd_1__1 bwd_1__1
    """
    orders = self.tasks(microbatches)
    return '\n'.join(' '.join([f'rank {rank}:', *map(str, order)]) for rank, order in enumerate(orders))

  def with_costs(self, costs: Costs, transfer: float = 0) -> Schedule:
    """The same order of tasks on every rank, timed by these costs.

    `simulate` and `draw` use them unless others are passed. `pipeline_jit` dispatches the programs and transfers of
    different ranks in the order of their times.

    Args:
      costs: task times, as for `simulate`; those that `compiled.measure` returns.
      transfer: time to move a result from one rank to another, in the same unit.

    Costs that do not match the stages are an error where they are used.

    Raises:
      PipelineError: the costs are neither a mapping nor a function, or the transfer time is not a finite non-negative
        number.

    Example:
      >>> schedule = pipeline.OneFOneB(ranks=2).with_costs({'fwd': (1, 3), 'bwd': (2, 6)})
      >>> schedule.simulate(4).makespan
      39
    """
    return CostedSchedule(self.ranks, self, own_costs(costs), check_time(transfer, 'transfer'))

  def validate(self, microbatches: int, live: int | None = None) -> ScheduleReport:
    """Proves that the schedule can run: every task once, on its rank, after its inputs.

    Args:
      microbatches: number of microbatches.
      live: largest number of live activations per rank, each of one stage and one microbatch, or None
        for no limit.

    Returns:
      An order in which all ranks together can run the tasks, and the peak of live activations per rank.

    Raises:
      PipelineError: the schedule is illegal or exceeds `live`; the message underlines the wrong tasks.

    Example:
      >>> pipeline.OneFOneB(ranks=4).validate(8).peaks
      (4, 3, 2, 1)
    """
    return validate(self._lists(microbatches), live)

  def simulate(
    self, microbatches: int, costs: Costs | None = None, transfer: float | None = None
  ) -> Simulation:
    """Computes the start and end of every task, and the idle time of every rank.

    Args:
      microbatches: number of microbatches.
      costs: task times in any unit: for each of 'fwd', 'bwd' and 'wgrad', a number or one number per
        stage. The backward of a schedule that does not split it takes 'bwd' plus 'wgrad'. Or measured times
        by task, of any number of microbatches: each kind and stage takes the median of its times. Or a
        function from a task to its time. None: those of the schedule (see `with_costs`), otherwise equal.
      transfer: time to move a result from one rank to another, in the same unit. Transfers overlap with
        tasks. None: that of the schedule, otherwise 0.

    Raises:
      PipelineError: the schedule is illegal, or a time is not a finite non-negative number.

    Example:
      >>> costs = {'fwd': 10, 'bwd': 11, 'wgrad': 9}
      >>> simulation = pipeline.OneFOneB(ranks=4).simulate(8, costs, transfer=1)
      >>> simulation.makespan, round(simulation.bubble, 3), simulation.peaks
      (346, 0.306, (4, 3, 2, 1))
      >>> simulation['bwd_3__0']
      TimedStep(step=Task(kind='bwd', stage=3, microbatch=0), start=43, end=63, lengths=(20,))
    """
    own, delay = self._times()
    return simulate(
      self._lists(microbatches), own if costs is None else costs, delay if transfer is None else transfer
    )

  def draw(
    self, microbatches: int, costs: Costs | None = None, transfer: float | None = None
  ) -> Timeline:
    """The timeline of the tasks: text in the terminal, SVG in notebooks. Same arguments as `simulate`.

    Raises:
      PipelineError: the schedule is illegal, or a time is not a finite non-negative number.

    Example:
      >>> print(pipeline.OneFOneB(ranks=2).draw(2))
      OneFOneB(ranks=2) with 2 microbatches: makespan 9, bubble 33.3%, live 2 1
      F: forward, B: backward; F2 is of microbatch 2
             0              5
      rank 0 │F0│F1│     │B0   │  │B1   │
      rank 1 │  │F0│B0   │F1│B1   │     │
    """
    return Timeline(self.simulate(microbatches, costs, transfer))

  def __str__(self) -> str:
    return repr(self)

  def _lists(self, microbatches: int) -> TaskLists:
    title = f'{self} with {microbatches} microbatch{"" if microbatches == 1 else "es"}'
    return TaskLists(title, self.tasks(microbatches), self.stage_ranks, microbatches)

  def _times(self) -> tuple[Costs, float]:
    """The costs of tasks and transfers."""
    return EQUAL, 0

  @abc.abstractmethod
  def _order(self, rank: int, microbatches: int) -> Iterable[Step]:
    """The tasks of one rank."""

  def supports(self, microbatches: int) -> bool:
    """Whether the schedule supports this number of microbatches."""
    return self._limitation(microbatches) is None

  def limitation(self, microbatches: int) -> str:
    """A sentence on why the schedule does not support this number of microbatches."""
    return f'{self}: {self._limitation(microbatches)}'

  def _limitation(self, microbatches: int) -> str | None:
    """Why the schedule does not support this number of microbatches, or None if it does."""
    return None

  def nearest_supported(self, microbatches: int) -> str:
    """The nearest supported numbers of microbatches, below and above: `'8 or 10'`."""
    counts = range(microbatches - 1, 0, -1), range(microbatches + 1, 2 * microbatches + 4 * self.stages)
    nearest = (next((n for n in side if self.supports(n)), None) for side in counts)
    return ' or '.join(str(n) for n in nearest if n)


@dataclasses.dataclass(frozen=True)
class CostedSchedule(Schedule):
  """A schedule with costs: the result of `Schedule.with_costs`.

  Attributes:
    ranks: number of ranks.
    schedule: the order of its tasks.
    costs: task times.
    transfer: time to move a result from one rank to another.
  """

  schedule: Schedule
  costs: Costs = dataclasses.field(hash=False, repr=False)
  transfer: float

  @property
  def stage_ranks(self) -> tuple[int, ...]:
    """Per stage, its rank."""
    return self.schedule.stage_ranks

  def __str__(self) -> str:
    return str(self.schedule)

  def _order(self, rank: int, microbatches: int) -> Iterable[Step]:
    return self.schedule._order(rank, microbatches)

  def _limitation(self, microbatches: int) -> str | None:
    return self.schedule._limitation(microbatches)

  def _times(self) -> tuple[Costs, float]:
    return self.costs, self.transfer


@dataclasses.dataclass(frozen=True)
class RuleSchedule(Schedule):
  """A schedule defined by the rank of every stage and a rule, from a rank and the number of microbatches to its tasks."""

  placement: tuple[int, ...]
  rule: Rule

  def __repr__(self) -> str:
    chunks = self.stages // self.ranks
    name = getattr(self.rule, '__name__', type(self.rule).__name__)
    return f'{name}(ranks={self.ranks}{f", chunks={chunks}" if chunks > 1 else ""})'

  def _order(self, rank: int, microbatches: int) -> list[Step]:
    return steps_of(rank, list(self.rule(rank, microbatches)))


@dataclasses.dataclass(frozen=True)
class TextSchedule(Schedule):
  """A schedule defined by its text, with the rank of every stage and the tasks of each rank."""

  placement: tuple[int, ...] = dataclasses.field(repr=False)
  orders: tuple[Order, ...] = dataclasses.field(repr=False)

  def _order(self, rank: int, microbatches: int) -> Order:
    return self.orders[rank]

  def _limitation(self, microbatches: int) -> str | None:
    count = 1 + max(task.microbatch for order in self.orders for step in order for task in step.tasks)
    if microbatches != count:
      return f'the text has {count} microbatch{"" if count == 1 else "es"}, not {microbatches}.'
    return None


def timed_steps(
  schedule: Schedule, microbatches: int, waits: Waits = MappingProxyType({})
) -> list[TimedStep] | None:
  """The tasks of all ranks by their starts, each after those that it needs; None if they cannot wait for `waits`."""
  lists, (costs, transfer) = schedule._lists(microbatches), schedule._times()
  validate(lists)
  lists = lists._replace(waits=waits)
  order, blocked = walk(lists)
  return None if blocked else sorted(timed(lists, order, costs, transfer), key=lambda one: one.start)


def check_schedule(schedule: Any, caller: str) -> None:
  """Raises PipelineError unless the argument is a schedule or None."""
  if schedule is not None and not isinstance(schedule, Schedule):
    raise PipelineError(
      f'{caller}: schedule={getattr(schedule, "__name__", value_text(schedule))} is not a schedule.\n'
      'Fix: pass an instance, such as schedule=OneFOneB(ranks=4); op=... sets how results are combined.'
    )
