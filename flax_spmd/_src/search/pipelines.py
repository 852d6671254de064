"""Pipelines in a search: estimates and compiled outcomes of a step cut into stages.

    search(train_step, 'h100:64', pipelines=[OneFOneB(ranks=4), ZeroBubbleH1(ranks=4)])

A pipeline is searched on the devices of one rank: there, the step without a pipeline (its `accumulate`
is a loop) is estimated under many layouts. A rank has a share of 1 / ranks of the state and of the work,
and the activations that its schedule keeps alive; idle ranks make the step longer. These estimates are
rough and only select the candidates to compile, as pipelines on all devices with the mesh axis of the
stages first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from flax_spmd._src.compare.costs import Cost
from flax_spmd._src.compare.hardware import Target, share
from flax_spmd._src.compare.outcome import ESTIMATED, Memory, Outcome
from flax_spmd._src.compare.pipeline_lowering import Pipeline, cut_pipeline
from flax_spmd._src.hlo.counts import Counts, scaled
from flax_spmd._src.layout import Layout
from flax_spmd._src.mesh import abstract_mesh, axis_sizes
from flax_spmd._src.pipeline.schedules.schedule import Schedule
from flax_spmd._src.pipeline.schedules.simulation import Simulation
from flax_spmd._src.search.candidate import Candidate, Choices, text_of
from flax_spmd._src.search.selection import SLACK, Selection
from flax_spmd._src.search.space import Space
from flax_spmd._src.search.trials import Trials
from flax_spmd._src.search.user_constraints import UserConstraints
from flax_spmd._src.text import value_text
from flax_spmd.errors import PipelineError, Problem, SearchError, raise_problems

AXIS = 'stage'
DOUBT = 'pipeline: derived from the step without a pipeline on the devices of one rank'


class PipelineCandidate(NamedTuple):
  """A candidate that is a pipeline.

  Attributes:
    pipeline: number of the pipeline search that it belongs to.
    candidate: the layout of a rank's devices.
  """

  pipeline: int
  candidate: Candidate


class PipelineSearch(NamedTuple):
  """The search under one schedule.

  Attributes:
    space: the layouts of a rank's devices.
    trials: their outcomes as pipelines.
  """

  space: Space
  trials: PipelineTrials

  def selected(self, top: int) -> list[Candidate]:
    """The best candidates to compile; the smallest if none seems to fit."""
    selection = Selection(self.space, self.trials, {}, top)
    return selection.ranked(SLACK) or selection.smallest()

  def shown(self) -> dict[Candidate, Outcome]:
    """The best estimates, to show if nothing was compiled."""
    return Selection(self.space, self.trials, {}, 0).shown()


def check_pipelines(pipelines: Sequence[Any], target: Target) -> None:
  """Checks that the pipelines are schedules whose ranks can share the devices.

  Raises:
    SearchError: lists all pipelines that are not.
  """
  problems: list[Problem] = []
  for one in pipelines:
    if not isinstance(one, Schedule):
      text, fix = (
        f'pipelines: {value_text(one)} is not a schedule.',
        'pass schedules, such as OneFOneB(ranks=4).',
      )
      problems.append(Problem(text, fix, SearchError))
    elif target.devices % one.ranks:
      text = f'pipelines: {one} cannot share the {target.devices} devices of {target.text} equally.'
      legal = ', '.join(str(n) for n in range(2, target.devices + 1) if target.devices % n == 0)
      problems.append(Problem(text, f'use one of {legal} ranks.', SearchError))
  raise_problems(problems)


def pipeline_searches(
  pipelines: Sequence[Schedule],
  trials: Trials,
  space: Space,
  constraints_on: Callable[[Target], UserConstraints],
) -> list[PipelineSearch]:
  """The searches for all schedules of a step that can be cut.

  Args:
    pipelines: the schedules.
    trials, space: of the step without a pipeline, on all devices.
    constraints_on: the user's constraints for the devices of a rank.

  Raises:
    PipelineError: the step cannot be cut for a schedule under any choice.
    SearchError: constraints that cannot be met on a rank's devices.
  """
  if pipelines and AXIS in space.constraints.labels:
    raise SearchError(
      f'The mesh axis {value_text(AXIS)} is reserved for the stages of pipelines.\n'
      'Fix: rename this axis in mesh, pin, forbid or batch_only.'
    )
  by_ranks: dict[int, Trials] = {}
  searches: list[PipelineSearch] = []
  for number, schedule in enumerate(pipelines):
    if schedule in pipelines[:number]:
      continue
    target = share(trials.task.target, schedule.ranks)
    if schedule.ranks not in by_ranks:
      by_ranks[schedule.ranks] = trials.on(target)
    pipelined = PipelineTrials(trials, by_ranks[schedule.ranks], schedule)
    pipelined.check(space.choices)
    constraints = constraints_on(target)._replace(host=())  # pipeline_jit keeps all arrays on the device
    of_rank = space._replace(constraints=constraints, target=target)
    searches.append(PipelineSearch(of_rank, pipelined))
  return searches


class PipelineTrials(Trials):
  """The outcomes of candidates as pipelines of one schedule.

  Args:
    whole: trials of the step without a pipeline, on all devices.
    plain: the same on the devices of one rank.
    schedule: the order of each rank's tasks.
  """

  def __init__(self, whole: Trials, plain: Trials, schedule: Schedule):
    super().__init__(whole.task, whole.memory, whole.first, whole.choices, whole.workers, whole.variant)
    self.schedule, self._plain = schedule, plain
    self._simulations: dict[Choices, Simulation | PipelineError] = {}

  def check(self, choices: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises unless the step can be cut under some choice; traces it under each until one succeeds."""
    every = (tuple(zip(choices, values, strict=True)) for values in itertools.product(*choices.values()))
    errors: list[PipelineError] = []
    for chosen in every:
      simulation = self._simulation(chosen)
      if isinstance(simulation, Simulation):
        return
      errors.append(simulation)
    raise errors[0]

  def _simulation(self, choices: Choices) -> Simulation | PipelineError:
    """The schedule for the step's number of microbatches, or the error of cutting the step."""
    if choices not in self._simulations:
      task = self.variant(choices).task
      per_rank = task.target.devices // self.schedule.ranks
      bare = Layout(abstract_mesh({AXIS: self.schedule.ranks, 'devices': per_rank}))
      try:
        cut = cut_pipeline(task.train_step, self._pipeline(bare), task.target)
        self._simulations[choices] = self.schedule.simulate(cut.microbatches)
      except PipelineError as error:
        self._simulations[choices] = error
    return self._simulations[choices]

  def _pipeline(self, layout: Layout) -> Pipeline:
    # The number of stages has no effect on a model that marks its own.
    return Pipeline(layout, self.schedule, AXIS, self.schedule.stages)

  def name(self, candidate: Candidate) -> str:
    """The name of a candidate's outcome."""
    return f'{self.schedule}: {AXIS}={self.schedule.ranks},{text_of(candidate, self.batch)}'

  def row(self, candidate: Candidate) -> Pipeline:
    """The row of a comparison that compiles a candidate."""
    return self._pipeline(self._layout(self.layout(candidate)))

  def _layout(self, of_rank: Layout) -> Layout:
    """The layout on all devices."""
    mesh = abstract_mesh({AXIS: self.schedule.ranks, **axis_sizes(of_rank.mesh)})
    return of_rank.replace(mesh=mesh)

  def outcome(self, candidate: Candidate) -> Outcome:
    """The rough estimate of a candidate."""
    if candidate not in self.estimated:
      plain = self._plain.outcome(candidate)
      self.estimated[candidate] = self._pipelined(candidate, plain)
    return self.estimated[candidate]

  def prepare(self, candidates: Sequence[Candidate], most: int, *, partition: bool = False) -> None:
    """Estimates the steps of the first candidates without a pipeline at the same time."""
    self._plain.prepare(candidates, most, partition=partition)

  def with_rules(self, candidate: Candidate, rules: Sequence[Any]) -> Outcome:
    """The rough estimate of a candidate with another rule table on its mesh."""
    return self._pipelined(candidate, self._plain.with_rules(candidate, rules))

  def _pipelined(self, candidate: Candidate, plain: Outcome) -> Outcome:
    """The outcome of a pipeline, from the outcome of the whole step on a rank's devices."""
    simulation, layout = self._simulation(candidate.choices), self._layout(plain.layout)
    name, error = self.name(candidate), plain.error
    if isinstance(simulation, PipelineError):
      error = str(simulation)
    if error or plain.memory is None or plain.cost is None or isinstance(simulation, PipelineError):
      return Outcome.failed(name, layout, error or 'not estimated')._replace(source=ESTIMATED)
    memory = rank_memory(plain.memory, simulation)
    return plain._replace(
      name=name,
      layout=layout,
      memory=memory,
      counts=plain.counts and _rank_counts(plain.counts, self.schedule.ranks),
      cost=rank_cost(plain.cost, self.schedule.ranks, simulation.bubble),
      fits=memory.peak <= self.memory,
      program=None,
      compiled=None,
      source=ESTIMATED,
      doubts=(*plain.doubts, DOUBT),
    )


def rank_memory(plain: Memory, simulation: Simulation) -> Memory:
  """The memory of a device of a rank: its share of the state and the gradients, and the live activations.

  A rank of the first stages holds the whole batch. Without a pipeline, one microbatch's activations are
  alive.

  Args:
    plain: memory of a device that runs the whole step.
    simulation: the schedule.
  """
  ranks = len(simulation.steps)
  parameters, optimizer, rest = (size // ranks for size in plain[:3])
  gradients = min(plain.temporaries, plain.parameters)
  activations = plain.temporaries - gradients
  live = activations * max(simulation.peaks) // len(simulation.stage_ranks)
  temporaries = gradients // ranks + live
  peak = parameters + optimizer + rest + plain.batch + temporaries
  return Memory(parameters, optimizer, rest, plain.batch, temporaries, peak, plain.host // ranks)


def rank_cost(plain: Cost, ranks: int, bubble: float) -> Cost:
  """The cost of a rank: its share of the work, and the time in which it is idle.

  Args:
    plain: cost of the whole step on the devices of a rank.
    ranks: number of ranks.
    bubble: fraction of the step in which a rank is idle.
  """
  longer = 1 / (ranks * (1 - bubble))
  links = {axes: seconds / ranks for axes, seconds in plain.links.items()}
  return Cost(
    plain.compute / ranks,
    plain.memory / ranks,
    links,
    plain.low * longer,
    plain.expected * longer,
    plain.high * longer,
    plain.bound,
  )


def _rank_counts(plain: Counts, ranks: int) -> Counts:
  """A rank's share of the work and of the bytes on the wire."""
  sent = tuple(one._replace(wire=one.wire / ranks) for one in plain.collectives)
  return scaled(plain, runs=1 / ranks)._replace(collectives=sent)
