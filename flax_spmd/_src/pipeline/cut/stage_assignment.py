"""Cutting: which stage of a pipeline every equation of the microbatch function belongs to.

A microbatch goes through the stages and, where the function takes gradients, back again. So its work is
a line of *positions*: the forwards of stages 0 to S-1, then the backwards of stages S-1 to 0. A mark says
where one position ends; any other equation is at the last of its inputs' positions. What depends on no
mark (parameters cast, masks, positions of tokens) is where it is needed first.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from flax_spmd._src.pipeline.cut import equations as eq
from flax_spmd._src.pipeline.cut.equations import Atom, Equation, Value
from flax_spmd._src.pipeline.cut.stage_marks import may_end_p, microbatch_p, stage_end_p
from flax_spmd._src.pipeline.schedules.tasks import Kind
from flax_spmd._src.text import few
from flax_spmd.errors import PipelineError


@dataclasses.dataclass
class Body:
  """The microbatch function, or a whole function that has no loop.

  Attributes:
    equations: what it does.
    invariants: values that are the same for all microbatches.
    slices: values that are each microbatch's own.
    carried: values that one pass hands to the next, as they come in.
    updated: these values, as they go out.
    kept: results of each microbatch.
    idle: marks whose results nobody uses; they are not among the equations.
  """

  equations: list[Equation]
  invariants: list[Value]
  slices: list[Value]
  carried: list[Value]
  updated: list[Value]
  kept: list[Value]
  idle: list[Equation] = dataclasses.field(default_factory=list)

  @property
  def results(self) -> list[Value]:
    """All that goes out."""
    return [*self.updated, *self.kept]


@dataclasses.dataclass(frozen=True)
class Line:
  """The positions that a microbatch goes through.

  Attributes:
    stages: how many.
    backward: whether it goes back again.
    turn: whether the last stage's forward and backward are one position.
  """

  stages: int
  backward: bool
  turn: bool

  @property
  def end(self) -> int:
    """One more than the last position."""
    return 2 * self.stages if self.backward else self.stages

  def at(self, position: int) -> int:
    """The position, or that which it is one with."""
    last = self.stages - 1
    return min(last + 1 if self.turn and position == last else position, self.end - 1)

  def task(self, position: int) -> tuple[Kind, int]:
    """What a schedule calls it."""
    if position < self.stages:
      return 'fwd', position
    return 'bwd', self.stage(position)

  def stage(self, position: int) -> int:
    """Whose work it is."""
    return position if position < self.stages else 2 * self.stages - 1 - position

  @property
  def first_backward(self) -> int:
    """The first position that can have gradients."""
    return self.stages

  def ends(self, way: str, mark: int) -> tuple[int, int]:
    """The last position before a mark, and the first one after it."""
    if way == 'forward':
      return self.at(mark), self.at(mark + 1)
    after = 2 * self.stages - 1 - mark
    return self.at(max(after - 1, self.first_backward)), self.at(after)


@dataclasses.dataclass
class Cut:
  """A body, and where everything in it is.

  Attributes:
    body: without marks.
    line: the positions.
    position: of every equation.
    free: equations that depend on no mark, which could be anywhere before.
    border: values that a stage hands to the next, which are not computed again there.
  """

  body: Body
  line: Line
  position: dict[Equation, int]
  free: set[Equation]
  border: set[Value]


def cut(body: Body, stages: int, title: str, turn: bool, split: bool) -> Cut:
  """Cuts a body at its marks.

  Args:
    body: the body.
    stages: how many stages the schedule has.
    title: what the schedule is called in messages.
    turn: whether the schedule runs the last stage's backward right after its forward.
    split: whether gradients of weights are tasks of their own: then calls are opened on the way back.

  Raises:
    PipelineError: marks are too many or too few, inside other operations, or in a wrong order.
  """
  check_outside(body.equations)
  marks = paired(body.equations, stage_end_p)
  ends = {way for way, _ in marks.values()}
  count = sum(way == 'forward' for way, _ in marks.values())
  _check_count(count, stages, title, body)
  line = Line(stages, 'backward' in ends, 'backward' in ends and (turn or count < stages))
  position, free = _place(body, line, marks, {})
  if line.backward:
    body, floors = _opened(body, _seen_through(body, line, position, split), position)
    position, free = _place(body, line, marks, floors)
  border = {value for one in body.equations if one in marks for value in one.values}
  return Cut(_without_marks(body), line, position, free, border)


def stage_ends(equations: Sequence[Equation]) -> int:
  """How many stages equations end, going forward."""
  return len(ends_among(equations))


def ends_among(equations: Sequence[Equation]) -> list[Equation]:
  """The marks that end stages, going forward."""
  return [one for one in equations if one.primitive is stage_end_p and one.params['way'] == 'forward']


def paired(equations: Sequence[Equation], primitive: Any) -> dict[Equation, tuple[str, int]]:
  """Of the marks of a kind, which way each mark goes, and how many marks are before it on the way forward.

  A mark's number can occur several times, since JAX keeps the traces of jitted blocks: the last forward
  mark of a number goes with the first backward mark.
  """
  forward: dict[int, list[int]] = defaultdict(list)
  found: dict[Equation, tuple[str, int]] = {}
  for equation in equations:
    if equation.primitive is not primitive:
      continue
    way, number = equation.params['way'], equation.params['number']
    if way == 'tangent':
      raise PipelineError(
        f'The stage end at {equation.place} is differentiated forwards (jax.jvp), and a pipeline runs '
        'gradients only.\nFix: take gradients by jax.grad or jax.value_and_grad.'
      )
    if way == 'forward':
      found[equation] = way, sum(len(marks) for marks in forward.values())
      forward[number].append(found[equation][1])
      continue
    if not forward[number]:
      raise PipelineError(
        f'The stage end at {equation.place} is passed backwards more often than forwards: gradients are '
        'taken of gradients.\nFix: take gradients once, by jax.grad or jax.value_and_grad of the loss.'
      )
    found[equation] = way, forward[number].pop()
  return found


_INSTEAD = {
  'scan': 'loop over the stages in Python, each with a scan of its own, and end the stages between.',
  'while': 'loop over the stages in Python, and end the stages between.',
  'cond': 'end the stage outside of the branches.',
  **dict.fromkeys(eq.REMATS, 'put nn.remat (jax.checkpoint) inside of a stage, not around its end.'),
}


def check_outside(equations: Sequence[Equation]) -> None:
  """Marks have to be at the top of a body: what is inside an operation cannot be cut.

  Raises:
    PipelineError: some are not.
  """
  marked = eq.finder(stage_end_p)
  found: dict[str, dict[str, None]] = defaultdict(dict)
  fixes: dict[str, None] = {}
  for equation in equations:
    if equation.primitive is not stage_end_p and any(map(marked, equation.jaxprs)):
      for mark in eq.found_in(equation.jaxprs, stage_end_p):
        found[eq.called(equation)][eq.place_of(mark.source_info)] = None
      fixes[_INSTEAD.get(equation.name, 'end the stage outside of it.')] = None
  if found:
    raise PipelineError(
      'A stage ends inside of an operation that cannot be cut:\n'
      + few([f'  {called}, stage end at {", ".join(ends)}' for called, ends in found.items()])
      + ''.join(f'\nFix: {fix}' for fix in fixes)
    )


def places(equations: Sequence[Equation]) -> str:
  """The lines that equations come from, each on a line of its own."""
  counts = Counter(one.place for one in equations)
  return few(
    [f'  {place}' + (f', {count} times' if count > 1 else '') for place, count in counts.items()]
  )


def _check_count(count: int, stages: int, title: str, body: Body) -> None:
  if count in (stages, stages - 1):
    return
  found = places(ends_among(body.equations))
  idle = f'Stage ends whose results are not used:\n{places(body.idle)}\n' if body.idle else ''
  fixes = ['write x = stage_end(x), and go on with x.'] if body.idle else []
  fixes.append(
    f'end {stages - 1} {"stage" if stages == 2 else "stages"} by stage_end (between stages) or {stages} '
    f'(after each), or use a schedule of {fitting_stages(count)}.'
  )
  raise PipelineError(
    f'The model has {ends_text(count)}, and {title} has {stages} stages.\n'
    + (f'{found}\n' if found else '')
    + idle
    + '\n'.join(f'Fix: {fix}' for fix in fixes)
  )


def ends_text(count: int) -> str:
  """`3 stage ends`."""
  return f'{count or "no"} stage {"end" if count == 1 else "ends"}'


def fitting_stages(count: int) -> str:
  """How many stages a model with some stage ends can have, as text."""
  return f'{count} or {count + 1} stages' if count else '1 stage'


def placed_at(body: Body, line: Line, marks: Mapping[Equation, tuple[str, int]]) -> dict[Equation, int]:
  """The position of every equation of a body that is cut at some marks."""
  return _place(body, line, marks, {})[0]


def _place(
  body: Body, line: Line, marks: Mapping[Equation, tuple[str, int]], floors: Mapping[Equation, int]
) -> tuple[dict[Equation, int], set[Equation]]:
  """The position of every equation, and which of them depend on no mark.

  `floors` are the positions that some equations cannot be before.
  """
  known: dict[Value, int] = {}
  made_at: dict[Value, Equation] = {}
  position: dict[Equation, int] = {}
  free: list[Equation] = []
  for equation in body.equations:
    after = [(known[value], value) for value in equation.values if value in known]
    at = max([place for place, _ in after], default=floors.get(equation))
    at = at if at is None else max(at, floors.get(equation, 0))
    if equation in marks:
      before, at = line.ends(*marks[equation])
      late = [value for place, value in after if place > before]
      if late:
        _raise_backward_edge(equation, [made_at[value] for value in late])
    elif at is None:
      free.append(equation)
      continue
    position[equation] = at
    known.update(dict.fromkeys(equation.outputs, at))
    made_at.update(dict.fromkeys(equation.outputs, equation))
  _place_free(body, line, marks, position, set(free))
  return position, set(free)


def _place_free(
  body: Body,
  line: Line,
  marks: Mapping[Equation, tuple[str, int]],
  position: dict[Equation, int],
  free: set[Equation],
) -> None:
  """Puts equations that depend on no mark where they are needed first."""
  first: dict[Value, int] = {}
  for equation in reversed(body.equations):
    if equation in free:
      position[equation] = min(
        (first[one] for one in equation.outputs if one in first), default=line.at(0)
      )
    at: int = line.ends(*marks[equation])[0] if equation in marks else position[equation]
    for value in equation.values:
      first[value] = min(first.get(value, line.end), at)


def _raise_backward_edge(mark: Equation, makers: Sequence[Equation]) -> NoReturn:
  raise PipelineError(
    f'The stage end at {mark.place} gets what is computed after it, in a later stage or with gradients:\n'
    f'{places(makers)}\n'
    'Fix: end stages in the order in which the model computes them, and not on gradients; a value may go '
    'on to any later stage, and to none before.'
  )


def _seen_through(
  body: Body, line: Line, position: Mapping[Equation, int], split: bool
) -> dict[Equation, frozenset[str]]:
  """The calls whose insides matter, and which calls inside of them are opened too.

  Forward, those of which the backward keeps something: it might keep less. Backward, if gradients of
  weights are to be told from others, all.
  """
  backward = [one for one in body.equations if position[one] >= line.first_backward]
  late = {value for one in backward for value in one.values}
  found = {}
  for one in body.equations:
    if position[one] < line.first_backward and one.name in eq.JITS and not late.isdisjoint(one.outputs):
      found[one] = eq.JITS
    elif split and position[one] >= line.first_backward and one.name in eq.JITS | eq.REMATS:
      found[one] = eq.JITS | eq.REMATS
  return found


def _opened(
  body: Body, opens: Mapping[Equation, frozenset[str]], position: Mapping[Equation, int]
) -> tuple[Body, dict[Equation, int]]:
  """The body with some calls replaced by what is inside, and how early that can be.

  What is computed again for gradients stays there, though it depends on nothing that comes later.
  """
  equations: list[Equation] = []
  known: dict[Value, Atom] = {}
  floors: dict[Equation, int] = {}
  for equation in body.equations:
    equation.inputs = [eq.lookup(known, atom) for atom in equation.inputs]
    if equation not in opens:
      equations.append(equation)
      continue
    inside, outputs = eq.opened(equation, lambda one: one.primitive.name in opens[equation])  # noqa: B023
    equations += inside
    known.update(outputs)
    floors.update(dict.fromkeys(inside, position[equation]))
  updated, kept = (eq.resolved(known, values) for values in (body.updated, body.kept))
  equations = eq.needed(equations, [*updated, *kept])
  return dataclasses.replace(body, equations=equations, updated=updated, kept=kept), floors


def _without_marks(body: Body) -> Body:
  """The body with every mark's results replaced by its operands."""
  known: dict[Value, Atom] = {}
  equations = []
  for equation in body.equations:
    if equation.primitive in (stage_end_p, may_end_p, microbatch_p):
      known.update(zip(equation.outputs, equation.inputs, strict=True))
    else:
      equation.inputs = [eq.lookup(known, atom) for atom in equation.inputs]
      equations.append(equation)
  updated, kept = (eq.resolved(known, values) for values in (body.updated, body.kept))
  return dataclasses.replace(body, equations=equations, updated=updated, kept=kept)
