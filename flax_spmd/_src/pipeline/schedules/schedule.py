"""Schedules: in which order every rank of a pipeline runs its tasks.

    schedule = OneFOneB(ranks=4)
    schedule.tasks(8)[2]                  what rank 2 runs, for 8 microbatches
    schedule.validate(8)                  a proof that it can be run, and how much it keeps
    schedule.simulate(8).bubble           the part of the time in which ranks are idle
    schedule.draw(8)                      tasks over time

A model is cut into *stages*, and a stage is on one *rank*, which may have several of them. A schedule
is a value: how many ranks, how many stages on each, and a rule that gives every rank its list for any
number of microbatches. A rule of your own makes a schedule by `Schedule.of`, a text by
`Schedule.from_text`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from flax_spmd._src.pipeline.schedules.simulation import EQUAL, Costs, Simulation, simulate
from flax_spmd._src.pipeline.schedules.stage_ranks import Placement, at_least_one, placed
from flax_spmd._src.pipeline.schedules.tasks import Order, Step
from flax_spmd._src.pipeline.schedules.text_format import Read, read, steps_of, write
from flax_spmd._src.pipeline.schedules.timeline import Timeline
from flax_spmd._src.pipeline.schedules.validation import Lists, Proof, validate
from flax_spmd._src.public_module import set_module
from flax_spmd.errors import PipelineError

Rule: TypeAlias = Callable[[int, int], Iterable[Step | str]]


@set_module('flax_spmd.pipeline')
@dataclasses.dataclass(frozen=True)
class Schedule(abc.ABC):
  """An order of tasks for every rank of a pipeline.

  Attributes:
    ranks: how many there are: the size of the mesh axis over which stages are laid.

  Example:
    >>> from flax_spmd.pipeline import OneFOneB
    >>> schedule = OneFOneB(ranks=2)
    >>> schedule.stages, schedule.owners
    (2, (0, 1))
    >>> print(*schedule.tasks(2)[1])
    fwd_1__0 bwd_1__0 fwd_1__1 bwd_1__1
  """

  ranks: int

  def __post_init__(self):
    for field in ('ranks', 'chunks'):
      if hasattr(self, field):
        at_least_one(getattr(self, field), f'{type(self).__name__}.{field}')

  @staticmethod
  def of(rule: Rule, ranks: int, chunks: int = 1, placement: Placement = 'loop') -> Schedule:
    """A schedule of your own.

    Args:
      rule: a function from a rank and the number of microbatches to the rank's tasks in order, as
        `Task`, `FusedTask` or their texts.
      ranks: how many there are.
      chunks: how many stages each rank has.
      placement: which rank a stage is on: 'loop' goes around the ranks (0 1 2 0 1 2), 'v' there and back
        (0 1 2 2 1 0); or the rank of every stage.

    Raises:
      PipelineError: a number is below 1, or the placement names a rank that is not there.

    Example: forwards first, and the backwards from the last microbatch to the first.
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
    sizes = at_least_one(ranks, 'ranks'), at_least_one(chunks, 'chunks')
    return Ruled(ranks, rule, placed(*sizes, placement))

  @staticmethod
  def from_text(text: str) -> Schedule:
    """A schedule from its text: a line of tasks for each rank; it is for one number of microbatches.

    Empty lines and what follows a `#` are left out. A stage is on the rank that has most of its tasks.

    Raises:
      PipelineError: something in it is no task, or a rank is missing.

    Example:
      >>> schedule = Schedule.from_text('''
      ...   rank 0: fwd_0__0 fwd_0__1 bwd_0__0 bwd_0__1
      ...   rank 1: FusedTask(fwd_1__0, bwd_1__0) fwd_1__1 bwd_1__1
      ... ''')
      >>> schedule.simulate(2).makespan
      9
    """
    found = read(text)
    return Written(len(found.orders), found)

  @property
  def owners(self) -> tuple[int, ...]:
    """Per stage, the rank that it is on."""
    return placed(self.ranks, 1, 'loop')

  @property
  def stages(self) -> int:
    """How many stages the model has to have."""
    return len(self.owners)

  def rank_of(self, stage: int) -> int:
    """The rank that a stage is on."""
    return self.owners[stage]

  def stages_of(self, rank: int) -> tuple[int, ...]:
    """The stages that are on a rank, from the model's input on."""
    return tuple(stage for stage, owner in enumerate(self.owners) if owner == rank)

  def tasks(self, microbatches: int) -> tuple[Order, ...]:
    """What each rank runs, in order.

    Raises:
      PipelineError: the schedule is not made for so many microbatches. The nearest that it is made for
        are named.

    Example:
      >>> [str(task) for task in pipeline.Eager1F1B(ranks=4).tasks(4)[2]]
      ['fwd_2__0', 'fwd_2__1', 'fwd_2__2', 'bwd_2__0', 'fwd_2__3', 'bwd_2__1', 'bwd_2__2', 'bwd_2__3']
    """
    if not self.takes(at_least_one(microbatches, 'microbatches')):
      nearest = self.nearest(microbatches)
      raise PipelineError(
        f'{self.objection(microbatches)}\nFix: use {nearest} microbatch{"" if nearest == "1" else "es"}.'
      )
    return tuple(tuple(self._order(rank, microbatches)) for rank in range(self.ranks))

  def to_text(self, microbatches: int) -> str:
    """The tasks as text that `Schedule.from_text` reads, one line per rank.

    Raises:
      PipelineError: the schedule is not made for so many microbatches.

    Example:
      >>> print(pipeline.OneFOneB(ranks=2).to_text(2))
      rank 0: fwd_0__0 fwd_0__1 bwd_0__0 bwd_0__1
      rank 1: fwd_1__0 bwd_1__0 fwd_1__1 bwd_1__1
    """
    return write(self.tasks(microbatches))

  def validate(self, microbatches: int, live: int | None = None) -> Proof:
    """Proves that the schedule can be run: every task once, on its rank, after what it needs.

    Args:
      microbatches: how many.
      live: how many activations (of one stage and one microbatch) a rank may keep at once; None: any.

    Returns:
      An order in which all ranks together can run the tasks, and the peak of activations per rank.

    Raises:
      PipelineError: it cannot; the tasks are shown where they stand.

    Example:
      >>> pipeline.OneFOneB(ranks=4).validate(8).peaks
      (4, 3, 2, 1)
    """
    return validate(self._lists(microbatches), live)

  def simulate(self, microbatches: int, costs: Costs = EQUAL, transfer: float = 0) -> Simulation:
    """When every task starts and ends, and how long ranks are idle.

    Args:
      microbatches: how many.
      costs: how long tasks take, in any unit of time: a number, or one per stage, for 'fwd', 'bwd' and
        'wgrad' each; where the backward is not split, it takes 'bwd' and 'wgrad' together. Or a function
        from a task to its time.
      transfer: how long a result takes from one rank to another, beside their tasks, in the same unit.

    Raises:
      PipelineError: the schedule is wrong, or a time is no number from 0 up.

    Example:
      >>> found = pipeline.OneFOneB(ranks=4).simulate(8, {'fwd': 10, 'bwd': 11, 'wgrad': 9}, transfer=1)
      >>> found.makespan, round(found.bubble, 3), found.peaks
      (346, 0.306, (4, 3, 2, 1))
      >>> found['bwd_3__0']
      Run(step=Task(kind='bwd', stage=3, microbatch=0), start=43, end=63, lengths=(20,))
    """
    return simulate(self._lists(microbatches), costs, transfer)

  def draw(self, microbatches: int, costs: Costs = EQUAL, transfer: float = 0) -> Timeline:
    """The tasks over time: text in the terminal, SVG in notebooks; arguments as of `simulate`.

    Raises:
      PipelineError: the schedule is wrong, or a time is no number from 0 up.

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

  def _lists(self, microbatches: int) -> Lists:
    title = f'{self} with {microbatches} microbatch{"" if microbatches == 1 else "es"}'
    return Lists(title, self.tasks(microbatches), self.owners, microbatches)

  @abc.abstractmethod
  def _order(self, rank: int, microbatches: int) -> Iterable[Step]:
    """The tasks of one rank."""

  def takes(self, microbatches: int) -> bool:
    """Whether it is made for so many microbatches."""
    return self._objection(microbatches) is None

  def objection(self, microbatches: int) -> str:
    """Why it is not made for so many microbatches, as a sentence."""
    return f'{self}: {self._objection(microbatches)}'

  def _objection(self, microbatches: int) -> str | None:
    """Why it is not made for so many microbatches."""
    return None

  def nearest(self, microbatches: int) -> str:
    """The nearest numbers on either side that it is made for."""
    counts = range(microbatches - 1, 0, -1), range(microbatches + 1, 2 * microbatches + 4 * self.stages)
    nearest = (next((n for n in side if not self._objection(n)), None) for side in counts)
    return ' or '.join(str(n) for n in nearest if n)


@dataclasses.dataclass(frozen=True)
class Ruled(Schedule):
  """A schedule by somebody's rule: what `Schedule.of` makes.

  Attributes:
    ranks: how many there are.
    rule: from a rank and the number of microbatches to the rank's tasks.
    placed: per stage, the rank that it is on.
  """

  rule: Rule
  placed: tuple[int, ...]

  @property
  def owners(self) -> tuple[int, ...]:
    """Per stage, the rank that it is on."""
    return self.placed

  def __str__(self) -> str:
    chunks = self.stages // self.ranks
    name = getattr(self.rule, '__name__', type(self.rule).__name__)
    return f'{name}(ranks={self.ranks}{f", chunks={chunks}" if chunks > 1 else ""})'

  def _order(self, rank: int, microbatches: int) -> list[Step]:
    return steps_of(rank, list(self.rule(rank, microbatches)))


@dataclasses.dataclass(frozen=True)
class Written(Schedule):
  """A schedule that was written down: what `Schedule.from_text` makes.

  Attributes:
    ranks: how many there are.
    found: what the text says.
  """

  found: Read = dataclasses.field(repr=False)

  @property
  def owners(self) -> tuple[int, ...]:
    """Per stage, the rank that it is on."""
    return self.found.owners

  def _order(self, rank: int, microbatches: int) -> Order:
    return self.found.orders[rank]

  def _objection(self, microbatches: int) -> str | None:
    if microbatches != self.found.microbatches:
      count = self.found.microbatches
      return f'it is written for {count} microbatch{"" if count == 1 else "es"}, not for {microbatches}.'
    return None


def check_schedule(schedule: Any, of: str) -> None:
  """Raises unless this is a schedule or None.

  Raises:
    PipelineError: it is something else.
  """
  if schedule is not None and not isinstance(schedule, Schedule):
    raise PipelineError(
      f'{of}: schedule={getattr(schedule, "__name__", repr(schedule))} is no schedule.\n'
      'Fix: pass one, such as schedule=OneFOneB(ranks=4); how results are combined is op=...'
    )
