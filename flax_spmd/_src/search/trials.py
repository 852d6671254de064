"""Trials: the outcomes of the candidates tried so far, each computed once.

    trials = Trials(task, memory, variant, choices, workers)
    trials.outcome(candidate)      # an estimate, cached on disk
    trials.cost(candidate)         # one number, by which candidates are compared
    trials.compile([candidate])    # results of the target's own compiler

Each choice of the step's arguments makes another program with an estimator of its own. If this jaxlib
has no estimator, outcomes are compiled instead, which takes seconds each. A step that uses mesh axes itself is
partitioned for each candidate.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from flax_spmd._src.compare.compare import compare
from flax_spmd._src.compare.hardware import Target
from flax_spmd._src.compare.lowering import lower
from flax_spmd._src.compare.outcome import ESTIMATED, PARTITIONED, Outcome
from flax_spmd._src.compare.partitioner import can_partition
from flax_spmd._src.compare.pipeline_lowering import Pipeline
from flax_spmd._src.compare.train_step import TrainStep, TrainStepLike, train_step_on
from flax_spmd._src.compat import target_devices
from flax_spmd._src.estimate.estimator import BegunEstimate, Estimator, begin_estimate
from flax_spmd._src.estimate.name_mesh import OWN_AXES
from flax_spmd._src.estimate.partitioned_step import PartitionedStep
from flax_spmd._src.estimate.walk_workers import WalkWorkers
from flax_spmd._src.layout import Layout
from flax_spmd._src.mesh import abstract_mesh
from flax_spmd._src.search.candidate import Candidate, Choices, layout_of, may_be_axis, text_of
from flax_spmd._src.search.corrections import corrected
from flax_spmd._src.search.descent import simplified
from flax_spmd._src.search.estimate_cache import EstimateCache, open_cache
from flax_spmd._src.search.estimate_check import EstimateCheck
from flax_spmd._src.search.model_facts import ModelFacts, facts_of
from flax_spmd.errors import (
  EstimatorError,
  LayoutError,
  MeshAxisError,
  MeshError,
  PipelineError,
  SearchError,
  did_you_mean,
)

_CLOSE = 1e-3  # relative distance of estimates that differ by rules without an effect
_STARTING = 3.0  # seconds that a worker takes to start, about
_AHEAD = 2  # candidates that each worker estimates before the first of them is needed
_MISFIT = 10.0  # factor on the time of a layout that needs too much memory


class SearchTask(NamedTuple):
  """A training step to find a layout for.

  Attributes:
    train_step: the step and its arguments, or a function from a layout to it.
    target: the hardware.
    hardware: TOML file with descriptions of further chips.
    jobs: number of compilers to run in parallel.
    fresh: whether to discard cached estimates.
    axes: mesh axes that the user names, with their sizes, or 1.
  """

  train_step: TrainStepLike
  target: Target
  hardware: str | os.PathLike[str] | None = None
  jobs: int = 1
  fresh: bool = False
  axes: Mapping[str, int] = MappingProxyType({})

  def with_choices(self, choices: Choices) -> SearchTask:
    """The task with arguments of the step bound, and those of `create` that have the same names.

    A function of a layout receives those that it has parameters for, and the step the others.
    """
    if not choices:
      return self
    if isinstance(self.train_step, TrainStep):
      return self._replace(train_step=_bound(self.train_step, dict(choices)))
    train_step_of = self.train_step
    own, others = _split(train_step_of, dict(choices))
    make = functools.partial(train_step_of, **own)
    return self._replace(train_step=lambda layout: _bound(train_step_on(layout, make), others))


def _split(
  function: Callable[..., Any], choices: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
  """The choices that a function has parameters for, and the others."""
  parameters = inspect.signature(function).parameters
  own = {name: value for name, value in choices.items() if name in parameters}
  return own, {name: value for name, value in choices.items() if name not in own}


def _check_choices(step: Callable[..., Any], choices: Mapping[str, Any]) -> None:
  """Raises SearchError for choices that are no arguments of the step."""
  parameters = inspect.signature(step).parameters
  if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
    return
  others = [name for name in choices if name not in parameters]
  if others:
    raise SearchError(
      f'The choices do not fit {getattr(step, "__name__", "step")}({", ".join(parameters)}):'
      + ''.join(f'\n  no argument {name!r}.{did_you_mean(name, parameters)}' for name in others)
      + '\nFix: name arguments of the step that have defaults, such as def step(state, batch, remat=None) and '
      "choices={'remat': [None, 'dots']}."
    )


def _bound(train_step: TrainStep, choices: Mapping[str, Any]) -> TrainStep:
  """The step with arguments bound, and those of its `create` that have the same names."""
  if not choices:
    return train_step
  _check_choices(train_step.step, choices)
  shared, _ = _split(train_step.create, choices)
  create = functools.partial(train_step.create, **shared) if shared else train_step.create
  return train_step._replace(step=functools.partial(train_step.step, **choices), create=create)


class TaskVariant(NamedTuple):
  """A task under one choice of the step's arguments.

  Attributes:
    task: the task, with the arguments bound.
    estimator: estimator of the lowered step, or None if the step has none.
    facts: logical names of the model.
    cache: estimates of earlier searches.
    reason: why there is no estimator, or ''.
  """

  task: SearchTask
  estimator: Estimator | None
  facts: ModelFacts
  cache: EstimateCache | None
  reason: str = ''

  @property
  def partitions_each(self) -> str:
    """Why each candidate is partitioned, or ''."""
    return self.estimator.reason if self.estimator else ''

  def on(self, target: Target) -> TaskVariant:
    """The variant on another number of the same chips; it is not lowered again."""
    task = self.task._replace(target=target)
    if self.cache is None or self.estimator is None:
      return self._replace(task=task)
    identity = _identity(task, self.facts, self.estimator)
    return self._replace(task=task, cache=open_cache(identity, target, task.fresh))


def lower_variant(task: SearchTask, choices: Choices) -> TaskVariant:
  """Lowers a step under a choice of its arguments."""
  task = task.with_choices(choices)
  platform = task.target.chip.platform
  with target_devices(platform):
    try:
      estimator = Estimator(task.train_step, platform=platform)
    except EstimatorError as error:
      return TaskVariant(task, None, _facts_without_estimator(task), None, str(error).splitlines()[0])
    if estimator.reason:
      return TaskVariant(task, estimator, _facts_without_estimator(task), None)
    if any(map(may_be_axis, estimator.names_as_axes.difference(task.axes))):
      return TaskVariant(task, None, _facts_without_estimator(task), None, OWN_AXES.splitlines()[0])
    facts = _facts_of(task, estimator)
    cache = open_cache(_identity(task, facts, estimator), task.target, task.fresh)
  return TaskVariant(task, estimator, facts, cache)


def _facts_of(task: SearchTask, estimator: Estimator) -> ModelFacts:
  """The facts of a model with an estimator, among whose names are mesh axes of boxes."""
  axes = estimator.names_as_axes & task.axes.keys()
  return facts_of(
    task.train_step,
    task.axes if estimator.names_as_axes else {},
    {name: sizes for name, sizes in estimator.names.items() if name not in axes},
    estimator.parameter_names - axes,
    frozenset(pair for pair in estimator.together if not pair & axes),
    estimator.batch_names,
  )


def _facts_without_estimator(task: SearchTask) -> ModelFacts:
  """The facts of a model, which may need the axes of a mesh."""
  try:
    return facts_of(task.train_step, task.axes)
  except Exception as error:
    is_step = isinstance(task.train_step, TrainStep)
    if isinstance(error, SearchError) or (is_step and not isinstance(error, (MeshError, MeshAxisError))):
      raise
    problem = f'on the mesh {dict(task.axes)}' if task.axes else 'without the mesh axes that it uses'
    text = '\n'.join(filter(str.strip, str(error).split('\nFix: ')[0].splitlines()))
    raise SearchError(_AXES.format(problem=problem, error=f'{type(error).__name__}: {text}')) from error


_AXES = (
  'The model cannot be built {problem}: {error}\n'
  'Fix: pass mesh= or pin= to search, which name axes that each of its meshes has; a model that holds a mesh is built for each of '
  'these by a function of the layout, lambda layout: TrainStep(...).'
)


def _identity(task: SearchTask, facts: ModelFacts, estimator: Estimator) -> str:
  """A digest of the program and its logical names, lowered on a mesh with an axis for each name."""
  names = sorted({*facts.names, *estimator.names_as_axes} - {'devices'})
  mesh = abstract_mesh({**dict.fromkeys(names, 1), 'devices': task.target.devices})
  layout = Layout(mesh, tuple((name, name) for name in names))
  program = lower(task.train_step, layout, task.target, with_findings=False)
  return f'{program.identity} {train_step_on(layout, task.train_step).donate}'


class Trials:
  """The outcomes of the candidates tried so far.

  Args:
    task: the step to find a layout for.
    memory: bytes available to the step on each device.
    first: the task under the first choice of arguments.
    choices: that choice.
    workers: processes that estimate, if they are more than one.
    lower: lowers the step under another choice; `lower_variant` by default.

  Attributes:
    estimated: outcome per candidate, corrected by the check if there is one.
    partitioned: those among them whose whole step was partitioned.
    compiled: those among them that were compiled.
    workers: the processes.
    checked_by: what compiled layouts say about the estimates, or None.
  """

  def __init__(
    self,
    task: SearchTask,
    memory: int,
    first: TaskVariant,
    choices: Choices,
    workers: WalkWorkers,
    lower: Callable[[Choices], TaskVariant] | None = None,
  ):
    self.task, self.memory, self.first, self.choices = task, memory, first, choices
    self.batch = first.facts.batch
    self.estimated: dict[Candidate, Outcome] = {}
    self.checked_by: EstimateCheck | None = None
    self.partitioned: dict[Candidate, Outcome] = {}
    self.compiled: dict[Candidate, Outcome] = {}
    self._uncorrected: dict[Candidate, Outcome] = {}
    self._known: dict[Any, Candidate] = {}  # by their estimates, those that were partitioned or compiled
    self._simplified: dict[Candidate, Candidate] = {}  # candidates without rules that change nothing
    self._variants: dict[Choices, TaskVariant] = {choices: first}
    self._lower = lower or functools.partial(lower_variant, task)
    self.workers = workers
    self._prepared: set[tuple[Candidate, bool]] = set()  # with whether they were partitioned
    self._seconds = 0.0  # of estimates

  def on(self, target: Target) -> Trials:
    """New trials of the same step on another number of the same chips."""
    task = self.task._replace(target=target)
    lower = lambda choices: self.variant(choices).on(target)
    return Trials(task, self.memory, self.first.on(target), self.choices, self.workers, lower)

  @property
  def reason(self) -> str:
    """Why nothing can be estimated, or ''."""
    return next((one.reason for one in self._variants.values() if one.reason), '')

  @property
  def outdated(self) -> str:
    """The versions whose cached estimates were discarded, or ''."""
    caches = (one.cache for one in self._variants.values() if one.cache)
    return next((cache.outdated for cache in caches if cache.outdated), '')

  def outcome(self, candidate: Candidate) -> Outcome:
    """The estimate of a candidate; the compiled outcome if there is no estimator."""
    if candidate not in self.estimated:
      variant = self.variant(candidate.choices)
      layout, name = self.layout(candidate), self.name(candidate)
      if variant.estimator is None:
        self.estimated[candidate] = self.compile([candidate])[0]
      else:
        begin = time.monotonic()
        outcome = self._uncorrected[candidate] = self._estimate(variant, name, layout)
        self._seconds += time.monotonic() - begin
        if outcome.source == PARTITIONED:
          self.partitioned[candidate] = outcome
        self._update(candidate)
    return self.estimated[candidate]

  def prepare(self, candidates: Sequence[Candidate], most: int, *, partition: bool = False) -> None:
    """Estimates the first unknown candidates at the same time, unless they are cached; `outcome` and `partition` find them there.

    Args:
      candidates: candidates, in the order of their outcomes.
      most: number of candidates to estimate at most.
      partition: whether to partition their whole steps.
    """
    workers = self.workers
    if workers.count <= 1 or (not partition and self._seconds < _STARTING):
      return
    known = self.partitioned if partition else self.estimated
    first = next((one for one in candidates if one not in known), None)
    if first is None or (first, partition) in self._prepared:
      return
    if (of_first := self._begun(first, partition)) is None:
      return
    workers.start(of_first[2].program)
    if not (ready := workers.ready()):
      return
    others = (one for one in candidates if one not in known and (one, partition) not in self._prepared)
    group = list(dict.fromkeys(others))[: min(most, _AHEAD * len(ready))]
    begun = [of_first, *(one for each in group[1:] if (one := self._begun(each, partition)))]
    self._prepared.update((one, partition) for one in group)
    costs = workers.costs([(one.program, one.request) for _, _, one in begun])
    for (cache, name, one), found in zip(begun, costs, strict=True):
      if found is not None and isinstance(found, PartitionedStep) == partition:
        cache.add(one.finished(found)._replace(name=name))

  def _begun(
    self, candidate: Candidate, partition: bool
  ) -> tuple[EstimateCache, str, BegunEstimate] | None:
    """An estimate for a worker, with its cache and name; None of one that is cached, or for which there is none."""
    variant = self.variant(candidate.choices)
    layout, name = self.layout(candidate), self.name(candidate)
    source = PARTITIONED if partition else ESTIMATED
    if variant.cache is None or variant.estimator is None or variant.cache.get(name, layout, source):
      return None
    try:
      begun = begin_estimate(variant.estimator, layout, variant.task.target, partition=partition)
    except (LayoutError, EstimatorError):  # its outcome has this error
      return None
    return variant.cache, name, begun

  def uncorrected(self, candidate: Candidate) -> Outcome:
    """The estimate of a candidate as it is without a check."""
    self.outcome(candidate)
    return self._uncorrected[candidate]

  def correct_by(self, check: EstimateCheck | None) -> None:
    """Corrects all estimates, those to come too; corrections of an earlier check are undone."""
    self.checked_by = check
    self._update_all()

  @property
  def has_partitioner(self) -> bool:
    """Whether whole steps can be partitioned for the target."""
    return not self.reason and can_partition(self.task.target.chip.platform)

  def partition(self, candidate: Candidate) -> None:
    """Takes the partitioned step in the place of an estimate; `correct_by` then takes it for equal candidates, too."""
    self.outcome(candidate)
    if candidate in self.partitioned:
      return
    variant, layout = self.variant(candidate.choices), self.layout(candidate)
    self.partitioned[candidate] = self._estimate(variant, self.name(candidate), layout, True)
    self._known[self._key(candidate)] = candidate
    self._update(candidate)

  def replace_by(self, compiled: Mapping[Candidate, Outcome]) -> None:
    """Takes compiled outcomes in the place of estimates, and of those of equal candidates; those that do not fit too."""
    known = {one: outcome for one, outcome in compiled.items() if one in self._uncorrected}
    self.compiled |= known
    self._known |= {self._key(one): one for one in known}
    self._update_all()

  def simplified(
    self, candidate: Candidate, simpler: Callable[[Candidate], list[Candidate]]
  ) -> Candidate:
    """The candidate without rules that do not lower its estimate. If these change nothing, both have one outcome.

    Args:
      candidate: the candidate.
      simpler: the candidates with a rule less.
    """

    def prepared(one: Candidate) -> list[Candidate]:
      self.prepare(found := simpler(one), len(found))
      return found

    plain = simplified(candidate, self.estimated_cost, prepared)
    if candidate in self._uncorrected and _are_close(*map(self.uncorrected, (candidate, plain))):
      self._simplified[candidate] = plain
      self._update(candidate)
    return plain

  def _update_all(self) -> None:
    for candidate in self._uncorrected:
      self._update(candidate)

  def _update(self, candidate: Candidate) -> None:
    """Takes the best that is known of a candidate: its own outcome, that of an equal one, or its corrected estimate."""
    own = self._uncorrected[candidate]
    for other in (candidate, self._known.get(self._key(candidate)), self._simplified.get(candidate)):
      if other and (known := self.compiled.get(other) or self.partitioned.get(other)):
        is_own = other == candidate
        self.estimated[candidate] = (
          known if is_own else known._replace(name=own.name, layout=own.layout, source=own.source)
        )
        return
    self.estimated[candidate] = self._corrected(own, self.variant(candidate.choices))

  def _key(self, candidate: Candidate) -> Any:
    """Equal for candidates with equal estimates."""
    estimate = self._uncorrected[candidate]
    return (candidate.choices, estimate.memory, estimate.counts) if estimate.counts else candidate

  def _corrected(self, outcome: Outcome, variant: TaskVariant) -> Outcome:
    if self.checked_by is None or variant.estimator is None or outcome.source == PARTITIONED:
      return outcome
    return corrected(outcome, self.checked_by, self.task.target, self.memory, variant.estimator.dtype)

  def _estimate(
    self, variant: TaskVariant, name: str, layout: Layout, partition: bool = False
  ) -> Outcome:
    [outcome] = self._relative([_estimate(variant, name, layout, partition)], variant)
    return outcome

  def _relative(self, outcomes: Sequence[Outcome], variant: TaskVariant) -> list[Outcome]:
    """Outcomes of a variant with the size of its batch relative to the first variant's, and whether they fit into the budget."""
    batch = variant.facts.batch_elements / self.first.facts.batch_elements
    return [one._replace(batch=batch, fits=not one.error and fits(one, self.memory)) for one in outcomes]

  def with_rules(self, candidate: Candidate, rules: Sequence[Any]) -> Outcome:
    """The estimate of a candidate with another rule table on its mesh."""
    layout = self.layout(candidate).replace(rules=rules)
    variant = self.variant(candidate.choices)
    return self._corrected(self._estimate(variant, '', layout), variant)

  def compile(self, candidates: Sequence[Candidate]) -> list[Outcome]:
    """The compiled outcomes of candidates; a layout that does not fit the model gives a failed outcome."""
    outcomes: dict[Candidate, Outcome] = {}
    for choices, group in self._by_choices(candidates).items():
      variant = self.variant(choices)
      compiled = self._relative(self._compile(variant.task, group), variant)
      outcomes |= dict(zip(group, compiled, strict=True))
    return [outcomes[candidate] for candidate in candidates]

  def _by_choices(self, candidates: Sequence[Candidate]) -> dict[Choices, list[Candidate]]:
    groups: dict[Choices, list[Candidate]] = {}
    for candidate in candidates:
      groups.setdefault(candidate.choices, []).append(candidate)
    return groups

  def _compile(self, task: SearchTask, group: Sequence[Candidate]) -> list[Outcome]:
    rows = {self.name(one): self.row(one) for one in group}
    options = {'hardware': task.hardware, 'jobs': task.jobs}
    try:
      return list(compare(task.train_step, rows, task.target.text, **options))
    except Exception as error:  # every row of the group failed
      if isinstance(task.train_step, TrainStep) and not isinstance(error, (LayoutError, PipelineError)):
        raise  # on every other mesh, too; a function of the layout may need axes that these meshes lack
      layouts = {name: row.layout if isinstance(row, Pipeline) else row for name, row in rows.items()}
      return [Outcome.failed(name, layout, str(error)) for name, layout in layouts.items()]

  def name(self, candidate: Candidate) -> str:
    """The name of a candidate's outcome."""
    return text_of(candidate, self.batch)

  def layout(self, candidate: Candidate) -> Layout:
    """The layout of a candidate; it drops names in boxes of mesh axes that have no rule, if the model has such names."""
    return layout_of(candidate, self.batch, 'drop' if self.first.facts.as_axes else 'error')

  def row(self, candidate: Candidate) -> Layout | Pipeline:
    """The row of a comparison that compiles a candidate."""
    return self.layout(candidate)

  def variant(self, choices: Choices) -> TaskVariant:
    """The task under a choice of arguments, lowered once."""
    if choices not in self._variants:
      self._variants[choices] = self._lower(choices)
    return self._variants[choices]

  def cost(self, candidate: Candidate) -> float:
    """Seconds of a step, with a penalty if the candidate needs too much memory."""
    return penalized_seconds(self.outcome(candidate), self.memory)

  def estimate_alone(self, candidate: Candidate) -> Outcome:
    """The estimate of a candidate, corrected, also if it was partitioned or compiled."""
    outcome = self.outcome(candidate)
    return self._corrected(self._uncorrected.get(candidate, outcome), self.variant(candidate.choices))

  def estimated_cost(self, candidate: Candidate) -> float:
    """The cost by the estimate alone, to compare candidates of which only some were compiled."""
    return penalized_seconds(self.estimate_alone(candidate), self.memory)


def _estimate(variant: TaskVariant, name: str, layout: Layout, partition: bool) -> Outcome:
  """The estimate of a layout, from the cache if it is there."""
  source = PARTITIONED if partition else ESTIMATED
  outcome = variant.cache.get(name, layout, source) if variant.cache else None
  if outcome is None and variant.estimator is not None:
    try:
      target = variant.task.target
      outcome = variant.estimator.estimate(layout, target, partition=partition)._replace(name=name)
    except Exception as error:
      fails_alone = variant.estimator.reason and not isinstance(variant.task.train_step, TrainStep)
      if not fails_alone and not isinstance(error, (LayoutError, EstimatorError)):
        raise  # on every other mesh, too; a function of the layout may need axes that this mesh lacks
      outcome = Outcome.failed(name, layout, str(error))._replace(source=source)
    if variant.cache:
      variant.cache.add(outcome)
  return outcome or Outcome.failed(name, layout, 'not estimated')


def expected_seconds(outcome: Outcome) -> float:
  """The expected time of a step, in seconds for the first choice's batch; infinite if there are no costs."""
  return float('inf') if outcome.cost is None else outcome.cost.expected / outcome.batch


def penalized_seconds(outcome: Outcome, memory: int) -> float:
  """Seconds of a step; more by a factor that grows with the memory beyond the budget."""
  if outcome.memory is None or outcome.cost is None:
    return float('inf')
  excess = outcome.memory.peak / memory - 1
  return expected_seconds(outcome) * (_MISFIT * (1 + excess) if excess > 0 else 1.0)


def _are_close(one: Outcome, other: Outcome) -> bool:
  """Whether two estimates have the same time and peak memory, nearly."""
  peaks = (each.memory.peak if each.memory else 0 for each in (one, other))
  times = map(expected_seconds, (one, other))
  return math.isclose(*times, rel_tol=_CLOSE) and math.isclose(*peaks, rel_tol=_CLOSE)


def fits(outcome: Outcome, memory: int, slack: float = 0.0) -> bool:
  """Whether the peak memory is within the budget plus a relative slack."""
  return outcome.memory is not None and outcome.memory.peak <= memory * (1 + slack)


def chunks(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
  """Splits a sequence into chunks of at most `size` items."""
  return [items[begin : begin + size] for begin in range(0, len(items), size)]


def first_choices(choices: Mapping[str, Sequence[Any]]) -> Choices:
  """The first value of each argument."""
  return tuple((name, values[0]) for name, values in choices.items())
