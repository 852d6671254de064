"""Task programs: the microbatch function, split into one program for each kind of task and stage.

    ('fwd', 0)     the forward of stage 0
    ('bwd', 0)     its backward
    ('wgrad', 0)   the gradients of its weights, where the schedule splits them from the backward

The split changes the traced program in three ways. A sum that several stages add to, the gradient of a
shared weight, becomes one sum per stage, added up after the loop. A cast, constraint or constant factor of
the gradient then changes each of its terms. A value that costs nothing to compute
is recomputed where it is used, not sent. The residuals of each stage are chosen anew: see `residuals`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp

from flax_spmd._src.pipeline.cut import equations as eq
from flax_spmd._src.pipeline.cut import residuals
from flax_spmd._src.pipeline.cut.equations import Atom, Equation, Value
from flax_spmd._src.pipeline.cut.microbatch_loop import Loop
from flax_spmd._src.pipeline.cut.stage_assignment import Body, StageAssignment
from flax_spmd._src.pipeline.schedules.tasks import KINDS, Kind

Key: TypeAlias = tuple[Kind, int]
SPLIT_FROM = 1024  # bytes; a smaller sum is not split by stage


@dataclasses.dataclass(eq=False)
class TaskProgram:
  """The program of a task.

  Attributes:
    key: kind and stage of the task.
    equations: its operations.
    outputs: the values that others read.
  """

  key: Key
  equations: list[Equation]
  outputs: list[Value]

  @functools.cached_property
  def inputs(self) -> list[Value]:
    """The values that it reads but does not compute."""
    return eq.free_values(self.equations)


class Accumulator(NamedTuple):
  """A value that one task updates from microbatch to microbatch.

  Attributes:
    before, after: the value before and after an update.
    final: the value after the last one.
    task: kind and stage of the task.
    origin: index among the values that the traced loop carries.
    passed: whether other tasks read it, too. Then every microbatch has a value of its own.
    waiting: the tasks of a microbatch that need the value of the microbatch before: its readers. None for a sum
      that only its task reads, as the order of its terms is free.
  """

  before: Value
  after: Value
  final: Value
  task: Key
  origin: int
  passed: bool
  waiting: tuple[Key, ...]


class TaskPrograms(NamedTuple):
  """The programs of a body's tasks.

  Attributes:
    tasks: the programs by kind and stage; empty ones are left out.
    accumulators: the values carried from microbatch to microbatch.
    body: the body that was split.
  """

  tasks: dict[Key, TaskProgram]
  accumulators: list[Accumulator]
  body: Body

  def producers(self) -> dict[Value, Key]:
    """The task that computes each value."""
    return {value: key for key, task in self.tasks.items() for value in task.outputs}

  def text(self, one: Accumulator, loop: Loop) -> str:
    """A carried value, the line of the user's program that sets it, and the tasks that set and read it."""
    setting = next(each for each in self.tasks[one.task].equations if one.after in each.outputs)
    reads = ' and '.join(map(_task_text, one.waiting))
    whole = loop.whole.get(one.origin, one.before)
    value = f'{whole.aval.str_short()} at {setting.source_line}'
    return f'{value}: set by {_task_text(one.task)}, read by {reads}'


def split(cut: StageAssignment, split_weights: bool) -> TaskPrograms:
  """Splits a body into the programs of its tasks.

  Args:
    cut: the body, with the position of every equation.
    split_weights: whether gradients of weights are separate tasks.
  """
  _copy_moved(cut)
  origins = _split_sums(cut)
  members: dict[int, list[Equation]] = defaultdict(list)
  for equation in cut.body.equations:
    members[cut.position[equation]].append(equation)
  repeated = _choose_residuals(cut, members) if cut.positions.backward else {}
  tasks = _tasks(cut, members, repeated)
  if split_weights and cut.positions.backward:
    tasks = [part for task in tasks for part in _split_weights(task, tasks)]
  programs = {task.key: task for task in tasks if task.equations}
  accumulators = _accumulators(cut.body, programs, origins)
  return TaskPrograms(programs, accumulators, cut.body)


# -- values that a pass only moves


def _copy_moved(cut: StageAssignment) -> None:
  """Lets a task copy each carried value that is the old one of another, a row of the batch, or an invariant that passes read.

  The task is the one that updates the other value, or else the first that reads the new one. A carried value that is
  returned as it was before the pass is copied as well.
  """
  body, positions = cut.body, cut.positions
  producer = {value: one for one in body.equations for value in one.outputs if value not in body.rows}
  number = {value: index for index, value in enumerate(body.carried)}
  first: dict[Value, int] = {}
  for one in sorted(body.equations, key=cut.position.__getitem__):
    for value in number.keys() & set(one.values):
      first.setdefault(value, cut.position[one])

  def position(index: int, seen: tuple[int, ...] = ()) -> int:
    new = body.updated[index]
    if new in producer:
      return cut.position[producer[new]]
    if number.get(new, index) not in (index, *seen):
      return position(number[new], (*seen, index))
    return first.get(body.carried[index], positions.at(0))

  def copied(value: Value, index: int) -> Value:
    equations, [copy] = eq.traced(jnp.copy, value)
    cut.position.update(dict.fromkeys(equations, position(index)))
    added.extend(equations)
    return copy

  added: list[Equation] = []
  read, moved = {*first, *body.updated, *body.kept}, {*body.carried, *body.rows}
  updated = []
  for index, (old, new) in enumerate(zip(body.carried, body.updated, strict=True)):
    is_final = old not in read and new not in moved  # an invariant that no pass reads
    updated.append(new if new is old or new in producer or is_final else copied(new, index))
  kept = [copied(value, number[value]) if value in number else value for value in body.kept]
  cut.body = dataclasses.replace(body, equations=[*body.equations, *added], updated=updated, kept=kept)


# -- sums that several stages add to


def _split_sums(cut: StageAssignment) -> list[int]:
  """Splits sums by stage; returns the `origin` of each carried value. The first sum keeps the value before a pass."""
  body = cut.body
  uses = Counter(value for equation in body.equations for value in equation.values)
  uses.update(atom for atom in body.results if isinstance(atom, Value))
  producer = {value: equation for equation in body.equations for value in equation.outputs}
  carried, updated, origins, fixed = [], [], [], body.inputs
  for origin, (before, after) in enumerate(zip(body.carried, body.updated, strict=True)):
    parts = _terms(before, after, producer, uses, fixed) if before.bytes > SPLIT_FROM else None
    sums = [(before, after)] if parts is None else _sums(cut, before, producer[after], *parts, producer)
    carried += [one for one, _ in sums]
    updated += [one for _, one in sums]
    origins += [origin] * len(sums)
  cut.body = dataclasses.replace(body, carried=carried, updated=updated)
  return origins


class _Term(NamedTuple):
  """A term of a sum.

  Attributes:
    atom: the term, before any change.
    changes: the equations that change it on its way to the sum, in order, each with the operand that is the term.
  """

  atom: Atom
  changes: tuple[tuple[Value, Equation], ...]


def _terms(before, after, producer, uses, fixed) -> tuple[list[_Term], set[Equation]] | None:
  """The terms added to a carried value in a pass, and the equations that change and add them; None if it is not a sum."""
  last = producer.get(after)
  if (
    last is None
    or last.name != 'add'
    or before not in last.inputs
    or uses[before] > 1
    or uses[after] > 1
  ):
    return None
  terms, between = [], {last}
  pending = [_Term(one, ()) for one in last.inputs if one is not before]
  while pending:
    atom, changes = term = pending.pop()
    one = producer.get(atom) if isinstance(atom, Value) and uses[atom] == 1 else None
    operand = None if one is None else _changed_linearly(one, fixed)
    if one is not None and operand is not None:
      pending.append(_Term(operand, ((operand, one), *changes)))
      between.add(one)
    elif one is not None and one.name in ('add', 'add_any') and _same_shapes(one):
      pending += [_Term(summand, changes) for summand in one.inputs]
      between.add(one)
    else:
      terms.append(term)
  return terms, between


def _changed_linearly(one: Equation, fixed: set[Value]) -> Value | None:
  """The operand that an operation changes linearly, alike in each pass, and with as many elements as before."""
  varying = [value for value in one.values if value not in fixed]
  is_linear = one.name == 'mul' or (one.name in _LINEAR and one.inputs[:1] == varying)
  if len(varying) != 1 or not is_linear:
    return None
  [operand], [result] = varying, one.outputs
  keeps_size = operand.aval.size == result.aval.size
  return operand if keeps_size and eq.is_inexact(operand) and eq.is_inexact(result) else None


_LINEAR = frozenset(
  {'convert_element_type', 'copy', 'div', 'neg', 'reshape', 'sharding_constraint', 'transpose'}
)


def _same_shapes(addition: Equation) -> bool:
  """Whether both operands have the shape of the sum."""
  return all(
    isinstance(atom, Value) and atom.aval.shape == addition.outputs[0].aval.shape
    for atom in addition.inputs
  )


def _sums(cut, before, last, terms, between, producer) -> list[tuple[Value, Value]]:
  """One sum for each stage with terms: its value before and after a pass."""
  by_stage: dict[int, list[_Term]] = defaultdict(list)
  anywhere = [term for term in terms if term.atom not in producer]
  for term in terms:
    if term.atom in producer:
      by_stage[cut.positions.stage(cut.position[producer[term.atom]])].append(term)
  if len(by_stage) < 2:
    return [(before, last.outputs[0])]
  index = cut.body.equations.index(last)
  new: list[Equation] = []
  sums = []
  for number, stage_terms in enumerate(by_stage.values()):
    start = total = before if number == 0 else Value(before.aval)
    at = max(cut.position[producer[term.atom]] for term in stage_terms)
    added: list[Equation] = []
    for current, changes in stage_terms + (anywhere if number == 0 else []):
      for operand, one in changes:
        inputs = [current if atom is operand else atom for atom in one.inputs]
        added.append(one.on(inputs, [Value(one.outputs[0].aval)]))
        [current] = added[-1].outputs
      added.append(last.on([total, current], [Value(last.outputs[0].aval)]))
      [total] = added[-1].outputs
    cut.position.update(dict.fromkeys(added, at))
    new += added
    sums.append((start, total))
  rest = cut.body.equations
  cut.body.equations[:] = [one for one in rest[:index] if one not in between] + new + rest[index + 1 :]
  return sums


# -- residuals and recomputation


def _choose_residuals(
  cut: StageAssignment, members: dict[int, list[Equation]]
) -> dict[int, set[Equation]]:
  """Moves equations that only a backward needs into it; returns the equations that backwards repeat."""
  positions, repeated = cut.positions, {}
  available = cut.body.inputs  # not those carried over: a backward would read those of a later pass
  results = {*cut.body.results, *cut.border}
  for stage in range(positions.stages):
    back = 2 * positions.stages - 1 - stage
    if positions.at(stage) != stage:
      continue
    others = [members[at] for at in list(members) if at not in (stage, back)]
    outputs = results.union(*(one.values for equations in others for one in equations))
    later = {value for at in list(members) if at > stage for one in members[at] for value in one.outputs}
    used = {value for one in members[back] for value in one.values} - later - available
    moved, repeated[back] = residuals.choose(members[stage], used, outputs, available)
    cut.position.update(dict.fromkeys(moved, back))
    members[back] += moved
    members[stage] = [one for one in members[stage] if one not in moved]
  return repeated


def _tasks(
  cut: StageAssignment, members: Mapping[int, list[Equation]], repeated: Mapping[int, set[Equation]]
):
  """The programs of all positions, with copies of equations that are cheaper to repeat than to send."""
  order = {equation: number for number, equation in enumerate(cut.body.equations)}
  producer = {value: equation for equation in cut.body.equations for value in equation.outputs}
  anywhere = _computed_anywhere(cut)

  def copied(equation: Equation, at: int) -> bool:
    home = cut.position[equation]
    if home == at or not cut.border.isdisjoint(equation.outputs):
      return False
    if equation in repeated.get(at, ()):
      return True
    if equation in anywhere:
      return at not in repeated or cut.positions.stage(home) != cut.positions.stage(at)
    return equation.name in _EXPANDING and _expands(equation)

  bodies: dict[int, list[Equation]] = {}
  for at in sorted(members):
    own = set(members[at])
    pending = [value for equation in own for value in equation.values]
    while pending:
      equation = producer.get(pending.pop())
      if equation is not None and equation not in own and copied(equation, at):
        own.add(equation)
        pending += equation.values
    bodies[at] = sorted(own, key=order.__getitem__)
  read = {value for value in cut.body.results if value not in cut.body.rows}
  read = read.union(*map(eq.free_values, bodies.values()))
  tasks = []
  for at, equations in bodies.items():
    computed = [value for one in equations if cut.position[one] == at for value in one.outputs]
    outputs = [value for value in computed if value in read]
    tasks.append(TaskProgram(cut.positions.task(at), eq.needed(equations, outputs), outputs))
  return tasks


def _computed_anywhere(cut: StageAssignment) -> set[Equation]:
  """The cheap equations that depend on no mark, for whose operands fewer bytes are sent than for their results, or none.

  An operand counts as the bytes that are sent for it, if it is itself computed anywhere.
  """
  found = set()
  sent: dict[Value, int] = {}  # nothing for inputs, which every stage can read
  for one in cut.body.equations:
    results = sum(value.bytes for value in one.outputs)
    total = sum(sent.get(value, 0) for value in set(one.values))
    if one in cut.free and one.name in residuals.CHEAP and total < max(results, 1):
      found.add(one)
      sent.update(dict.fromkeys(one.outputs, total))
    else:
      sent.update((value, value.bytes) for value in one.outputs)
    sent.update((value, 0) for value in one.outputs if value in cut.border)  # sent in any case
  return found


_EXPANDING = frozenset({'broadcast_in_dim', 'iota'})


def _expands(equation: Equation) -> bool:
  """Whether its results have more bytes than its operands."""
  return sum(one.bytes for one in equation.outputs) > sum(one.bytes for one in equation.values)


def _split_weights(task: TaskProgram, tasks: list[TaskProgram]) -> list[TaskProgram]:
  """A backward as two tasks: the gradients that earlier stages wait for, and those of the weights."""
  kind, stage = task.key
  if kind != 'bwd':
    return [task]
  others = [other for other in tasks if other is not task]
  awaited = set().union(*(other.inputs for other in others))
  first = eq.needed(task.equations, [value for value in task.outputs if value in awaited])
  rest = [one for one in task.equations if one not in set(first)]
  # the second task reads what the first one repeats of other tasks: a value has one producer, so these copies are new
  computed = {value for one in first for value in one.outputs}
  copies = {value: Value(value.aval) for other in others for value in other.outputs if value in computed}
  first, rest = ([one.renamed(copies) for one in each] for each in (first, rest))
  read = {*eq.free_values(rest), *task.outputs}
  outputs = [value for one in first for value in one.outputs if value in read]
  late = [value for one in rest for value in one.outputs if value in set(task.outputs)]
  return [TaskProgram(('bwd', stage), first, outputs), TaskProgram(('wgrad', stage), rest, late)]


# -- accumulators


def _accumulators(body: Body, tasks: Mapping[Key, TaskProgram], origins: list[int]) -> list[Accumulator]:
  """The carried values that tasks update, without those that stay unchanged."""
  producer = {value: key for key, task in tasks.items() for value in task.outputs}
  users_of = eq.readers((one, one.values) for one in body.equations)
  users = eq.readers((key, task.inputs) for key, task in tasks.items())
  accumulators = []
  taken = set(body.kept)
  for before, after, origin in zip(body.carried, body.updated, origins, strict=True):
    task = producer.get(after)
    if task is None:
      continue
    passed = any(user != task for user in users[before])
    free = not passed and (body.any_order or _is_reduction(before, after, users_of))
    own = _copied(after, tasks[task]) if after in taken or (users[after] and not passed) else after
    taken.add(after)
    waiting = [] if free else sorted(users[before], key=lambda key: (KINDS.index(key[0]), key[1]))
    final = Value(own.aval)  # the initial value may have a weak type
    accumulators.append(Accumulator(before, own, final, task, origin, passed, tuple(waiting)))
  return accumulators


def waits(accumulators: Iterable[Accumulator]) -> dict[Key, list[Key]]:
  """For each task, those of the microbatch before that it waits for, since it reads what they set."""
  found: dict[Key, list[Key]] = defaultdict(list)
  for one in accumulators:
    for task in one.waiting:
      found[task].append(one.task)
  return found


_REDUCTIONS = {'add': '+', 'add_any': '+', 'sub': '+', 'mul': '*', 'div': '*'} | {
  name: name for name in ('max', 'min', 'and', 'or', 'xor')
}
_NEUTRAL = frozenset({'convert_element_type', 'sharding_constraint', 'copy'})


def _is_reduction(before: Value, after: Value, readers: Mapping[Value, list[Equation]]) -> bool:
  """Whether an update combines the value with others by one operation whose order is free, such as a sum."""
  operations, value = set(), before
  while value is not after:
    if len(readers[value]) != 1:
      return False
    [one] = readers[value]
    if one.name in ('sub', 'div') and one.inputs[0] is not value:
      return False
    operations |= set() if one.name in _NEUTRAL else {_REDUCTIONS.get(one.name)}
    [value] = one.outputs if len(one.outputs) == 1 else [before]
    if None in operations or len(operations) > 1 or value is before:
      return False
  return True


def _copied(value: Value, task: TaskProgram) -> Value:
  """A copy of a result of a task. An accumulator is overwritten, and others read this result later."""
  equations, [copy] = eq.traced(jnp.copy, value)
  task.equations, task.outputs = [*task.equations, *equations], [*task.outputs, copy]
  return copy


def _task_text(key: Key) -> str:
  return f'{key[0]} of stage {key[1]}'
