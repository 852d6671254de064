"""Splitting: a cut body as one program for each task of a schedule.

    Programs
      tasks           per kind and stage, what the task computes
      accumulators    what is summed over microbatches, each by one task
      kept            results of every microbatch

Three things are done that the trace does not have. A sum that several stages add to (the gradient of a
weight that they share) becomes a sum for each stage, and these are added after the loop. What costs
nothing to compute is computed where it is used, in place of being sent. And what a stage keeps for its
backward is chosen anew: see `residuals`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from flax_spmd._src.pipeline.cut import equations as eq
from flax_spmd._src.pipeline.cut import residuals
from flax_spmd._src.pipeline.cut.equations import Atom, Equation, Value
from flax_spmd._src.pipeline.cut.stage_assignment import Body, Cut
from flax_spmd._src.pipeline.schedules.tasks import KINDS, Kind
from flax_spmd._src.text import few
from flax_spmd.errors import PipelineError

Key: TypeAlias = tuple[Kind, int]
_SPLIT_FROM = 1024  # bytes; a smaller sum is not worth one for each stage


@dataclasses.dataclass(eq=False)
class TaskProgram:
  """What a task computes.

  Attributes:
    key: the kind of task, and its stage.
    equations: what it does.
    outputs: what others need of it.
    inputs: what it needs.
  """

  key: Key
  equations: list[Equation]
  outputs: list[Value]

  @property
  def inputs(self) -> list[Value]:
    """The values that it uses and does not make."""
    return eq.free_values(self.equations)


class Accumulator(NamedTuple):
  """A value that one task hands from microbatch to microbatch.

  Attributes:
    before, after: as the task gets it, and as it leaves it.
    task: which one.
    origin: the place among the values that the loop carries.
    first: whether it starts with what the loop carries in; else with zeros.
  """

  before: Value
  after: Value
  task: Key
  origin: int
  first: bool


class Programs(NamedTuple):
  """The programs of a body's tasks.

  Attributes:
    tasks: by kind and stage; a stage that has nothing to do is left out.
    accumulators: what is carried.
    body: the body that was split.
    origins: per value that it carries, the place among those that the loop carries.
  """

  tasks: dict[Key, TaskProgram]
  accumulators: list[Accumulator]
  body: Body
  origins: list[int]

  def made_by(self) -> dict[Value, Key]:
    """The task that each value comes from."""
    return {value: key for key, task in self.tasks.items() for value in task.outputs}

  def residuals(self) -> dict[int, int]:
    """Per stage, the bytes that it keeps from a microbatch's forward until its backward."""
    maker, kept = self.made_by(), defaultdict(set)
    for kind, stage in self.tasks:
      if kind != 'fwd':
        uses = self.tasks[kind, stage].inputs
        kept[stage].update(one for one in uses if one in maker and maker[one][0] == 'fwd')
    return {stage: sum(one.bytes for one in values) for stage, values in sorted(kept.items())}


def split(cut: Cut, weights_apart: bool) -> Programs:
  """The programs of the tasks.

  Args:
    cut: the body, and where everything is.
    weights_apart: whether gradients of weights are tasks of their own.

  Raises:
    PipelineError: a value that is carried from pass to pass is not updated by one task.
  """
  origins = _split_sums(cut)
  members: dict[int, list[Equation]] = defaultdict(list)
  for equation in cut.body.equations:
    members[cut.position[equation]].append(equation)
  again = _choose_residuals(cut, members) if cut.line.backward else {}
  tasks = _tasks(cut, members, again)
  if weights_apart and cut.line.backward:
    tasks = [part for task in tasks for part in _weights_apart(task, tasks)]
  programs = {task.key: task for task in tasks if task.equations}
  accumulators = _accumulators(cut.body, programs, origins)
  return Programs(programs, accumulators, cut.body, [origin for origin, _ in origins])


# -- sums that several stages add to


def _split_sums(cut: Cut) -> list[tuple[int, bool]]:
  """Gives each stage a sum of its own; the origin of each carried value, and whether it is the first."""
  body = cut.body
  uses = Counter(value for equation in body.equations for value in equation.values)
  uses.update(atom for atom in body.results if isinstance(atom, Value))
  maker = {value: equation for equation in body.equations for value in equation.outputs}
  carried, updated, origins = [], [], []
  for origin, (before, after) in enumerate(zip(body.carried, body.updated, strict=True)):
    parts = _terms(before, after, maker, uses) if before.bytes > _SPLIT_FROM else None
    sums = [(before, after)] if parts is None else _sums(cut, before, maker[after], *parts, maker)
    carried += [one for one, _ in sums]
    updated += [one for _, one in sums]
    origins += [(origin, number == 0) for number in range(len(sums))]
  cut.body = dataclasses.replace(body, carried=carried, updated=updated)
  return origins


def _terms(before, after, maker, uses) -> tuple[list[Atom], list[Equation]] | None:
  """What is added to a carried value in a pass, and the equations that add these up; None: it is no sum."""
  last = maker.get(after)
  if (
    last is None
    or last.name != 'add'
    or before not in last.inputs
    or uses[before] > 1
    or uses[after] > 1
  ):
    return None
  terms, additions = [], []
  open_ = [one for one in last.inputs if one is not before]
  while open_:
    atom = open_.pop()
    adds = maker.get(atom) if isinstance(atom, Value) else None
    if adds is not None and adds.name in ('add', 'add_any') and uses[atom] == 1 and _alike(adds):
      additions.append(adds)
      open_ += adds.inputs
    else:
      terms.append(atom)
  return terms, additions


def _alike(addition: Equation) -> bool:
  """Whether all that is added has the shape of the sum."""
  return all(
    isinstance(atom, Value) and atom.aval.shape == addition.outputs[0].aval.shape
    for atom in addition.inputs
  )


def _sums(cut, before, last, terms, additions, maker) -> list[tuple[Value, Value]]:
  """One sum for each stage that has terms: what it is before and after a pass."""
  by_stage: dict[int, list[Atom]] = defaultdict(list)
  anywhere = [term for term in terms if term not in maker]
  for term in terms:
    if term in maker:
      by_stage[cut.line.stage(cut.position[maker[term]])].append(term)
  if len(by_stage) < 2:
    return [(before, last.outputs[0])]
  gone = {*additions, last}
  index = cut.body.equations.index(last)
  new: list[Equation] = []
  found = []
  for number, stage_terms in enumerate(by_stage.values()):
    start = current = before if number == 0 else Value(before.aval)
    at = max(cut.position[maker[term]] for term in stage_terms)
    for term in stage_terms + (anywhere if number == 0 else []):
      total = Value(before.aval)
      new.append(dataclasses.replace(last, inputs=[current, term], outputs=[total]))
      cut.position[new[-1]] = at
      current = total
    found.append((start, current))
  rest = cut.body.equations
  cut.body.equations[:] = [one for one in rest[:index] if one not in gone] + new + rest[index + 1 :]
  return found


# -- what is computed where


def _choose_residuals(cut: Cut, members: dict[int, list[Equation]]) -> dict[int, set[Equation]]:
  """Moves to each backward what only it needs; per position, what it computes again."""
  line, again = cut.line, {}
  results = {*cut.body.results, *cut.border}
  outside = {*cut.body.invariants, *cut.body.slices, *cut.body.carried}
  for stage in range(line.stages):
    back = 2 * line.stages - 1 - stage
    if line.at(stage) != stage:
      continue
    others = [members[at] for at in list(members) if at not in (stage, back)]
    others.append([one for one in members[stage] if one.has_effects])
    handed_on = results.union(*(one.values for equations in others for one in equations))
    later = {value for at in list(members) if at > stage for one in members[at] for value in one.outputs}
    used = {value for one in members[back] for value in one.values} - later - outside
    choice = residuals.choose(members[stage], used, handed_on, outside)
    for equation in choice.moved:
      cut.position[equation] = back
    members[back] += choice.moved
    members[stage] = [one for one in members[stage] if one not in choice.moved]
    again[back] = choice.again
  return again


def _tasks(cut: Cut, members: Mapping[int, list[Equation]], again: Mapping[int, set[Equation]]):
  """The programs of all positions, with copies of what costs nothing to compute."""
  order = {equation: number for number, equation in enumerate(cut.body.equations)}
  maker = {value: equation for equation in cut.body.equations for value in equation.outputs}

  def copied(equation: Equation, at: int) -> bool:
    home = cut.position[equation]
    if home == at or not cut.border.isdisjoint(equation.outputs):
      return False
    if equation in again.get(at, ()):
      return True
    if equation in cut.free and equation.name in residuals.CHEAP:
      return at not in again or cut.line.stage(home) != cut.line.stage(at)
    return equation.name in _GROWS and _grows(equation)

  bodies: dict[int, list[Equation]] = {}
  for at in sorted(members):
    there = set(members[at])
    open_ = [value for equation in there for value in equation.values]
    while open_:
      made = maker.get(open_.pop())
      if made is not None and made not in there and copied(made, at):
        there.add(made)
        open_ += made.values
    bodies[at] = sorted(there, key=order.__getitem__)
  wanted = {atom for atom in cut.body.results if isinstance(atom, Value)}
  wanted = wanted.union(*map(eq.free_values, bodies.values()))
  tasks = []
  for at, equations in bodies.items():
    home = [value for one in equations if cut.position[one] == at for value in one.outputs]
    outputs = [value for value in home if value in wanted]
    tasks.append(TaskProgram(cut.line.task(at), eq.needed(equations, outputs), outputs))
  return tasks


_GROWS = frozenset({'broadcast_in_dim', 'iota'})


def _grows(equation: Equation) -> bool:
  """Whether its results are larger than what it needs."""
  return sum(one.bytes for one in equation.outputs) > sum(one.bytes for one in equation.values)


def _weights_apart(task: TaskProgram, tasks: list[TaskProgram]) -> list[TaskProgram]:
  """A backward as two tasks: what earlier stages wait for, and the rest of it."""
  kind, stage = task.key
  if kind != 'bwd':
    return [task]
  others = set().union(*(other.inputs for other in tasks if other is not task))
  first = eq.needed(task.equations, [value for value in task.outputs if value in others])
  rest = [one for one in task.equations if one not in set(first)]
  wanted = {*eq.free_values(rest), *task.outputs}
  outputs = [value for one in first for value in one.outputs if value in wanted]
  late = [value for one in rest for value in one.outputs if value in set(task.outputs)]
  return [TaskProgram(('bwd', stage), first, outputs), TaskProgram(('wgrad', stage), rest, late)]


# -- what is carried


def _accumulators(
  body: Body, tasks: Mapping[Key, TaskProgram], origins: list[tuple[int, bool]]
) -> list[Accumulator]:
  """The carried values that tasks update; one that is handed on as it is, or replaced by something that
  is the same in every pass, is none.
  """
  maker = {value: key for key, task in tasks.items() for value in task.outputs}
  users: dict[Value, set[Key]] = defaultdict(set)
  for key, task in tasks.items():
    for value in task.inputs:
      users[value].add(key)
  found, problems = [], []
  for before, after, (origin, first) in zip(body.carried, body.updated, origins, strict=True):
    task = maker.get(after)
    others = users[before] - {task}
    if others or after in body.slices:
      reads = (
        ' and '.join(map(_say, sorted(others, key=lambda key: (KINDS.index(key[0]), key[1]))))
        or 'nobody'
      )
      sets = 'the batch' if after in body.slices else _say(task)
      problems.append(f'  {before.aval.str_short()}: set by {sets}, read by {reads}')
    if task is not None:
      found.append(Accumulator(before, after, task, origin, first))
  if problems:
    raise PipelineError(
      'The microbatch loop carries values from one microbatch to the next that no single task has to '
      'itself, and a pipeline runs tasks of several microbatches at once:\n'
      + few(problems)
      + '\nFix: carry sums, maxima and what one stage has for itself; pass what each microbatch needs '
      'with the batch, and update parameters after the loop.'
    )
  return found


def _say(key: Key | None) -> str:
  return 'no task' if key is None else f'{key[0]} of stage {key[1]}'
