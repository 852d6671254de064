"""Trials: what came of the candidates that were tried, each looked at once.

    trials = Trials(task, target, facts, wishes)
    trials.outcome(candidate)      # estimated, or as it was kept
    trials.worth(candidate)        # one number, by which candidates are compared
    trials.compiled([candidate])   # by the target's own compiler

Arguments of the step that are tried too make another program each, which has an estimator of its own.
Where there is no estimator for this jaxlib, an outcome is a compiled one, and takes seconds.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from flax_spmd._src.compare.compare import compare
from flax_spmd._src.compare.hardware import Target
from flax_spmd._src.compare.lowering import lower
from flax_spmd._src.compare.outcome import Outcome
from flax_spmd._src.compare.pipeline_lowering import Pipeline
from flax_spmd._src.estimate.estimator import Estimator
from flax_spmd._src.layout import Layout
from flax_spmd._src.mesh import abstract_mesh
from flax_spmd._src.search.candidate import Candidate, layout_of, text_of
from flax_spmd._src.search.estimate_cache import Kept, open_kept
from flax_spmd._src.search.model_facts import Facts, facts_of
from flax_spmd.errors import EstimatorError, LayoutError, PipelineError

Choices = tuple[tuple[str, Any], ...]
_MISSING = 10.0  # how many times slower a layout counts that does not fit


class Task(NamedTuple):
  """What is asked to be laid out; the fields are the arguments of `search`."""

  step: Callable[..., Any]
  create: Callable[..., Any]
  batch: Any
  target: Target
  args: Sequence[Any] = ()
  places: Any = None
  donate: bool = True
  hardware: str | os.PathLike[str] | None = None
  jobs: int | None = None
  fresh: bool = False

  def chosen(self, choices: Choices) -> Task:
    """The task with arguments of the step, and of `create` where it has such parameters."""
    if not choices:
      return self
    known = inspect.signature(self.create).parameters
    own = {name: value for name, value in choices if name in known}
    create = functools.partial(self.create, **own) if own else self.create
    return self._replace(step=functools.partial(self.step, **dict(choices)), create=create)


class Program(NamedTuple):
  """The step under one choice of its arguments.

  Attributes:
    task: the step.
    estimator: lowered once; None if there is none for it here.
    facts: of the model.
    kept: what is known from earlier times.
    reason: why there is no estimator, or ''.
  """

  task: Task
  estimator: Estimator | None
  facts: Facts
  kept: Kept | None
  reason: str = ''

  def on(self, target: Target) -> Program:
    """The same step on other hardware of the same kind; it is lowered already."""
    task = self.task._replace(target=target)
    if self.estimator is None:
      return self._replace(task=task)
    kept = open_kept(_identity(task, self.facts), target, task.fresh)
    return self._replace(task=task, kept=kept)


def program_of(task: Task, choices: Choices) -> Program:
  """Lowers a step under a choice of its arguments."""
  task = task.chosen(choices)
  known = functools.partial(facts_of, task.create, task.args, task.places, task.batch)
  try:
    estimator = Estimator(
      task.step,
      task.create,
      task.batch,
      args=task.args,
      places=task.places,
      donate=task.donate,
      platform=task.target.chip.platform,
    )
  except EstimatorError as error:
    return Program(task, None, known(), None, str(error).splitlines()[0])
  facts = known(estimator.names, estimator.parameter_names, estimator.together)
  return Program(task, estimator, facts, open_kept(_identity(task, facts), task.target, task.fresh))


def _identity(task: Task, facts: Facts) -> str:
  """A digest of the program with its names in it: lowered on a mesh that has an axis for each of them."""
  names = [name for name in facts.names if name != 'devices']
  mesh = abstract_mesh({**dict.fromkeys(names, 1), 'devices': task.target.devices})
  layout = Layout(mesh, tuple((name, name) for name in names))
  program = lower(
    task.step,
    task.create,
    task.batch,
    layout,
    task.target,
    args=task.args,
    places=task.places,
    donate=task.donate,
  )
  return f'{program.identity} {task.donate}'


class Trials:
  """Everything that was tried.

  Args:
    task: what is to be laid out.
    memory: bytes that a device may need.
    first: the program under the first choice of arguments.
    choices: which that is.
  """

  def __init__(self, task: Task, memory: int, first: Program, choices: Choices):
    self.task, self.memory, self.first, self.choices = task, memory, first, choices
    self.batch = first.facts.batch
    self.estimated: dict[Candidate, Outcome] = {}
    self._programs: dict[Choices, Program] = {choices: first}
    self._lower: Callable[[Choices], Program] = functools.partial(program_of, task)

  def on(self, target: Target) -> Trials:
    """Nothing tried yet, of the same step on other hardware of the same kind."""
    task = self.task._replace(target=target)
    found = Trials(task, self.memory, self.first.on(target), self.choices)
    found._lower = lambda choices: self.program(choices).on(target)
    return found

  @property
  def reason(self) -> str:
    """Why nothing can be estimated, or ''."""
    return next((one.reason for one in self._programs.values() if one.reason), '')

  @property
  def rebuilt(self) -> str:
    """The versions whose estimates were thrown away, or ''."""
    kept = (one.kept for one in self._programs.values() if one.kept)
    return next((one.rebuilt for one in kept if one.rebuilt), '')

  def outcome(self, candidate: Candidate) -> Outcome:
    """What comes of a candidate; compiled only if it cannot be estimated."""
    if candidate not in self.estimated:
      program = self.program(candidate.choices)
      layout, name = layout_of(candidate, self.batch), self.name(candidate)
      if program.estimator is None:
        self.estimated[candidate] = self.compiled([candidate])[0]
      else:
        self.estimated[candidate] = self.estimate(program, name, layout)
    return self.estimated[candidate]

  def estimate(self, program: Program, name: str, layout: Layout) -> Outcome:
    """What is estimated of a layout, which is kept."""
    found = program.kept.get(name, layout) if program.kept else None
    if found is None and program.estimator is not None:
      try:
        found = program.estimator.estimate(layout, self.task.target)._replace(name=name)
      except LayoutError as error:
        found = Outcome.failed(name, layout, str(error))._replace(source='estimated')
      if program.kept:
        program.kept.add(found)
    return found or Outcome.failed(name, layout, 'not estimated')

  def without(self, candidate: Candidate, layout: Layout) -> Outcome:
    """What is estimated of another layout for the same arguments of the step."""
    return self.estimate(self.program(candidate.choices), '', layout)

  def compiled(self, candidates: Sequence[Candidate]) -> list[Outcome]:
    """What the target's compiler makes of candidates; names that do not fit are an outcome too."""
    by_choice: dict[Choices, list[Candidate]] = {}
    for candidate in candidates:
      by_choice.setdefault(candidate.choices, []).append(candidate)
    found: dict[Candidate, Outcome] = {}
    for choices, group in by_choice.items():
      found |= dict(zip(group, self._compiled(self.program(choices).task, group), strict=True))
    return [found[candidate] for candidate in candidates]

  def _compiled(self, task: Task, group: Sequence[Candidate]) -> list[Outcome]:
    rows = {self.name(one): self.row(one) for one in group}
    try:
      compared = compare(
        task.step,
        task.create,
        task.batch,
        rows,
        task.target.text,
        args=task.args,
        places=task.places,
        donate=task.donate,
        hardware=task.hardware,
        jobs=task.jobs,
      )
      return list(compared)
    except (LayoutError, PipelineError) as error:  # of all of them
      layouts = {name: row.layout if isinstance(row, Pipeline) else row for name, row in rows.items()}
      return [Outcome.failed(name, layout, str(error)) for name, layout in layouts.items()]

  def name(self, candidate: Candidate) -> str:
    """What a candidate is called."""
    return text_of(candidate, self.batch)

  def row(self, candidate: Candidate) -> Layout | Pipeline:
    """What is compiled."""
    return layout_of(candidate, self.batch)

  def program(self, choices: Choices) -> Program:
    """The step under a choice of its arguments, lowered once."""
    if choices not in self._programs:
      self._programs[choices] = self._lower(choices)
    return self._programs[choices]

  def worth(self, candidate: Candidate) -> float:
    """Seconds of a candidate, and more if it does not fit."""
    return worth(self.outcome(candidate), self.memory)


def seconds(outcome: Outcome) -> float:
  """One number for a time bracket: its geometric middle; infinite if nothing is known."""
  return (outcome.cost.low * outcome.cost.high) ** 0.5 if outcome.cost else float('inf')


def worth(outcome: Outcome, memory: int) -> float:
  """Seconds; a layout that needs too much counts as many times slower, by how much it misses."""
  if outcome.memory is None or outcome.cost is None:
    return float('inf')
  over = outcome.memory.peak / memory - 1
  return seconds(outcome) * (_MISSING * (1 + over) if over > 0 else 1.0)


def fits(outcome: Outcome, memory: int, slack: float = 0.0) -> bool:
  """Whether a device has room for it, with so much slack for the estimate."""
  return outcome.memory is not None and outcome.memory.peak <= memory * (1 + slack)


def chunks(many: Sequence[Any], size: int) -> list[Sequence[Any]]:
  """In pieces of at most so many."""
  return [many[begin : begin + size] for begin in range(0, len(many), size)]


def as_choices(choices: Mapping[str, Sequence[Any]]) -> Choices:
  """The first value of each."""
  return tuple((name, values[0]) for name, values in choices.items())
