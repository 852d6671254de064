"""Staging: pipelines among what a search tries.

    search(step, create, batch, 'h100:64', pipelines=[OneFOneB(ranks=4), ZeroBubbleH1(ranks=4)])

A pipeline is searched on the devices of one of its ranks: there, the step without a pipeline (whose
`accumulate` is a loop) is estimated under many layouts. A rank has about an equal part of that: of the state
and of the work as many parts as there are ranks, and of the activations what its schedule keeps; ranks that
wait take longer. That is rough, and only says which few are compiled: as pipelines on all devices, their
stages over a mesh axis before the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from flax_spmd._src.compare.costs import Cost
from flax_spmd._src.compare.hardware import Target, share
from flax_spmd._src.compare.outcome import Memory, Outcome
from flax_spmd._src.compare.pipeline_lowering import Pipeline, cut_pipeline
from flax_spmd._src.hlo.counts import Counts
from flax_spmd._src.layout import Layout
from flax_spmd._src.mesh import abstract_mesh, axis_sizes
from flax_spmd._src.pipeline.schedules.schedule import Schedule
from flax_spmd._src.pipeline.schedules.simulation import Simulation
from flax_spmd._src.search.candidate import Candidate, layout_of, text_of
from flax_spmd._src.search.selection import SLACK, Choice
from flax_spmd._src.search.space import Space
from flax_spmd._src.search.trials import Choices, Trials
from flax_spmd._src.search.user_constraints import Wishes
from flax_spmd.errors import PipelineError, Problem, SearchError, raise_problems

AXIS = 'stage'
_DOUBT = 'a pipeline, from what the step does without one on the devices of a rank'


class Staged(NamedTuple):
  """A candidate that is a pipeline: which of the pipelines, and the layout of a rank's devices."""

  pipeline: int
  candidate: Candidate

  @property
  def choices(self) -> Choices:
    """The arguments of the step that it goes with."""
    return self.candidate.choices


class Staging(NamedTuple):
  """A schedule, and what is tried under it.

  Attributes:
    space: the layouts of a rank's devices.
    trials: what comes of them.
  """

  space: Space
  trials: StagedTrials

  def wanted(self, top: int) -> list[Candidate]:
    """The best few, which are compiled; where none seems to fit, the smallest."""
    choice = Choice(self.space, self.trials, {}, top)
    return choice.ranked(SLACK) or choice.smallest()

  def shown(self) -> dict[Candidate, Outcome]:
    """The best estimates, where nothing is compiled."""
    return Choice(self.space, self.trials, {}, 0).shown()


def check_pipelines(pipelines: Sequence[Any], target: Target) -> None:
  """Raises unless these are schedules whose ranks can share the devices.

  Raises:
    SearchError: all that are not.
  """
  problems: list[Problem] = []
  for one in pipelines:
    if not isinstance(one, Schedule):
      said, fix = f'pipelines: {one!r} is no schedule.', 'pass schedules, such as OneFOneB(ranks=4).'
      problems.append(Problem(said, fix, SearchError))
    elif target.devices % one.ranks:
      said = f'pipelines: {one} cannot share the {target.devices} devices of {target.text} equally.'
      legal = ', '.join(str(n) for n in range(2, target.devices + 1) if target.devices % n == 0)
      problems.append(Problem(said, f'use one of {legal} ranks.', SearchError))
  raise_problems(problems)


def stagings(
  pipelines: Sequence[Schedule],
  trials: Trials,
  space: Space,
  wished: Callable[[Target], Wishes],
) -> list[Staging]:
  """What is to be tried for each schedule, of a step that can be cut.

  Args:
    pipelines: the schedules.
    trials, space: of the step without a pipeline, on all devices.
    wished: what the user asks of a rank's devices.

  Raises:
    PipelineError: the step cannot be cut for a schedule, whatever is chosen.
    SearchError: wishes that cannot be met on a rank's devices.
  """
  if pipelines and AXIS in space.wishes.labels:
    raise SearchError(
      f'The mesh axis {AXIS!r} is the one that stages of pipelines are laid over.\n'
      'Fix: call the axis of your wishes something else.'
    )
  by_ranks: dict[int, Trials] = {}
  found: list[Staging] = []
  for schedule in pipelines:
    target = share(trials.task.target, schedule.ranks)
    if schedule.ranks not in by_ranks:
      by_ranks[schedule.ranks] = trials.on(target)
    staged = StagedTrials(trials, by_ranks[schedule.ranks], schedule)
    staged.check(space.choices)
    found.append(Staging(space._replace(wishes=wished(target), target=target), staged))
  return found


class StagedTrials(Trials):
  """What came of candidates as pipelines of one schedule.

  Args:
    whole: of the step without a pipeline, on all devices.
    plain: the same on the devices of a rank.
    schedule: in which order ranks run their tasks.
  """

  def __init__(self, whole: Trials, plain: Trials, schedule: Schedule):
    super().__init__(whole.task, whole.memory, whole.first, whole.choices)
    self.schedule, self._plain = schedule, plain
    self._lower = whole.program
    self._runs: dict[Choices, Simulation | PipelineError] = {}

  def check(self, choices: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises if the step cannot be cut under any choice; each is traced until one can."""
    every = (tuple(zip(choices, values, strict=True)) for values in itertools.product(*choices.values()))
    errors: list[PipelineError] = []
    for chosen in every:
      run = self._run(chosen)
      if isinstance(run, Simulation):
        return
      errors.append(run)
    raise errors[0]

  def _run(self, choices: Choices) -> Simulation | PipelineError:
    """The schedule over time for the step's microbatches, or why there is none; cut once per choice."""
    if choices not in self._runs:
      task = self.program(choices).task
      of_rank = task.target.devices // self.schedule.ranks
      bare = Layout(abstract_mesh({AXIS: self.schedule.ranks, 'devices': of_rank}))
      given = {'args': task.args, 'places': task.places, 'donate': task.donate}
      try:
        cut = cut_pipeline(
          task.step, task.create, task.batch, self._pipeline(bare), task.target, **given
        )
        self._runs[choices] = self.schedule.simulate(cut.microbatches)
      except PipelineError as error:
        self._runs[choices] = error
    return self._runs[choices]

  def _pipeline(self, layout: Layout) -> Pipeline:
    # Where a model ends its stages itself, the number of stages is not asked for.
    return Pipeline(layout, self.schedule, AXIS, self.schedule.stages)

  def name(self, candidate: Candidate) -> str:
    """What a candidate is called."""
    return f'{self.schedule}: {AXIS} {self.schedule.ranks}, {text_of(candidate, self.batch)}'

  def row(self, candidate: Candidate) -> Pipeline:
    """What is compiled."""
    return self._pipeline(self._layout(layout_of(candidate, self.batch)))

  def _layout(self, of_rank: Layout) -> Layout:
    """That of all devices."""
    mesh = abstract_mesh({AXIS: self.schedule.ranks, **axis_sizes(of_rank.mesh)})
    return of_rank.replace(mesh=mesh)

  def outcome(self, candidate: Candidate) -> Outcome:
    """What comes of a candidate, roughly."""
    if candidate not in self.estimated:
      self.estimated[candidate] = self._staged(candidate, self._plain.outcome(candidate))
    return self.estimated[candidate]

  def without(self, candidate: Candidate, layout: Layout) -> Outcome:
    """What is estimated of other rules for the same arguments of the step."""
    of_rank = layout_of(candidate, self.batch).replace(rules=layout.rules)
    return self._staged(candidate, self._plain.without(candidate, of_rank))

  def _staged(self, candidate: Candidate, plain: Outcome) -> Outcome:
    """What a rank has of a step that its devices would do alone."""
    run, layout = self._run(candidate.choices), self._layout(plain.layout)
    name, error = self.name(candidate), plain.error
    if isinstance(run, PipelineError):
      error = str(run)
    if error or plain.memory is None or plain.cost is None or isinstance(run, PipelineError):
      return Outcome.failed(name, layout, error or 'not estimated')._replace(source='estimated')
    memory = _memory(plain.memory, run)
    return plain._replace(
      name=name,
      layout=layout,
      memory=memory,
      counts=plain.counts and _counts(plain.counts, self.schedule.ranks),
      cost=_cost(plain.cost, self.schedule.ranks, run.bubble),
      fits=memory.peak <= self.task.target.chip.memory,
      program=None,
      compiled=None,
      source='estimated',
      doubts=(*plain.doubts, _DOUBT),
    )


def _memory(plain: Memory, run: Simulation) -> Memory:
  """Of a rank: its part of the state and of the gradients, and the activations that the schedule keeps.

  The first stages take the whole batch. Without a pipeline, the activations of one microbatch are alive.
  """
  ranks = len(run.runs)
  parameters, optimizer, rest = (size // ranks for size in plain[:3])
  gradients = min(plain.temporaries, plain.parameters)
  kept = (plain.temporaries - gradients) * max(run.peaks) // len(run.owners)
  temporaries = gradients // ranks + kept
  peak = parameters + optimizer + rest + plain.batch + temporaries
  return Memory(parameters, optimizer, rest, plain.batch, temporaries, peak)


def _cost(plain: Cost, ranks: int, bubble: float) -> Cost:
  """Of a rank: its part of the work, and the time that it waits."""
  longer = 1 / (ranks * (1 - bubble))
  links = {axes: seconds / ranks for axes, seconds in plain.links.items()}
  return Cost(
    plain.compute / ranks,
    plain.memory / ranks,
    links,
    plain.low * longer,
    plain.high * longer,
    plain.bound,
  )


def _counts(plain: Counts, ranks: int) -> Counts:
  """Of a rank: its part of the work, and of the bytes on the wire."""
  sent = tuple(one._replace(wire=one.wire / ranks) for one in plain.collectives)
  return plain._replace(flops=plain.flops / ranks, hbm_bytes=plain.hbm_bytes / ranks, collectives=sent)
