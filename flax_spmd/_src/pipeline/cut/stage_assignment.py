"""Stage assignment: the stage of every equation of the microbatch function.

A microbatch passes through the stages and, if the function takes gradients, back again. Its work is a
sequence of *positions*: the forwards of stages 0 to S-1, then the backwards of stages S-1 to 0. A mark
ends a position; any other equation has the last position of its inputs. An equation that depends on no
mark (casts of parameters, masks, position embeddings) gets the position of its first reader. A layer on a value of an
earlier stage, such as attention to the results of an encoder, is in the stage whose marks it is between.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from flax_spmd._src import compat
from flax_spmd._src.pipeline.cut import equations as eq
from flax_spmd._src.pipeline.cut import residuals
from flax_spmd._src.pipeline.cut.equations import Atom, Equation, Value
from flax_spmd._src.pipeline.cut.stage_marks import MARKS, marks_inside, stage_end_p
from flax_spmd._src.pipeline.schedules.tasks import Kind
from flax_spmd._src.text import first_lines
from flax_spmd.errors import PipelineError


@dataclasses.dataclass
class Body:
  """The microbatch function, or a whole function without a loop.

  Attributes:
    equations: its operations.
    index: the number of the microbatch; None without a loop.
    rows: for each input of one microbatch, the array of the batch that it is a row of.
    carried: inputs carried over from the pass before.
    updated: the carried values after the pass.
    kept: results of one microbatch.
    idle: marks with unused results, which are not among the equations.
    any_order: whether each carried value may be updated in any order of the microbatches.
  """

  equations: list[Equation]
  index: Value | None
  rows: Mapping[Value, Atom]
  carried: list[Value]
  updated: list[Value]
  kept: list[Value]
  idle: list[Equation] = dataclasses.field(default_factory=list)
  any_order: bool = False

  @property
  def inputs(self) -> set[Value]:
    """The inputs that no pass changes: those that are the same for all microbatches, and `index`."""
    return {*eq.free_values(self.equations)}.difference(self.carried)

  @property
  def results(self) -> list[Value]:
    """All outputs."""
    return [*self.updated, *self.kept]


@dataclasses.dataclass(frozen=True)
class Positions:
  """The positions that a microbatch passes through.

  Attributes:
    stages: number of stages.
    backward: whether there is a backward pass.
    turn: whether the last stage's forward and backward are merged into one position.
  """

  stages: int
  backward: bool
  turn: bool

  @property
  def end(self) -> int:
    """One more than the last position."""
    return 2 * self.stages if self.backward else self.stages

  def at(self, position: int) -> int:
    """The position, after merging the last stage's forward and backward."""
    last = self.stages - 1
    return min(last + 1 if self.turn and position == last else position, self.end - 1)

  def task(self, position: int) -> tuple[Kind, int]:
    """The kind and stage of a position's task."""
    if position < self.stages:
      return 'fwd', position
    return 'bwd', self.stage(position)

  def stage(self, position: int) -> int:
    """The stage of a position."""
    return position if position < self.stages else 2 * self.stages - 1 - position

  def around(self, direction: str, mark: int) -> tuple[int, int]:
    """The last position before a mark, and the first position after it."""
    if direction == 'forward':
      return self.at(mark), self.at(mark + 1)
    after = 2 * self.stages - 1 - mark
    return self.at(max(after - 1, self.stages)), self.at(after)


@dataclasses.dataclass
class StageAssignment:
  """A body, with the position of every equation.

  Attributes:
    body: the body, without marks.
    positions: all positions.
    position: the position of each equation.
    free: equations that depend on no mark; any earlier position would do.
    border: operands of marks, which are sent to the next stage and not recomputed there.
  """

  body: Body
  positions: Positions
  position: dict[Equation, int]
  free: set[Equation]
  border: set[Value]


def cut(body: Body, stages: int, title: str, turn: bool, split: bool) -> StageAssignment:
  """Cuts a body at its marks.

  Args:
    body: the body.
    stages: number of stages of the schedule.
    title: name of the schedule, for errors.
    turn: whether the schedule runs the last stage's backward right after its forward.
    split: whether gradients of weights are separate tasks. Then calls in the backward pass are inlined.

  Raises:
    PipelineError: there are too many or too few marks, or marks inside other operations or out of order.
  """
  check_outside(body.equations)
  marks = paired(body.equations, stage_end_p)
  ends = _joined(in_sequence(body.equations, ends_among(body.equations)), stages)
  _check_count(len({*ends}), stages, title, body)
  marks = {one: (direction, ends[number]) for one, (direction, number) in marks.items()}
  backward = any(direction == 'backward' for direction, _ in marks.values())
  positions = Positions(stages, backward, backward and (turn or stages - 1 not in ends))
  position, free = assign(body, positions, marks)
  if positions.backward:
    body, floors = _inlined(body, _calls_to_inline(body, positions, position, split), position)
    position, free = assign(body, positions, marks, floors)
  border = {value for one in body.equations if one in marks for value in one.values}
  return StageAssignment(_without_marks(body), positions, position, free, border)


def ends_among(equations: Sequence[Equation]) -> list[Equation]:
  """The stage ends in the forward pass."""
  return [
    one for one in equations if one.primitive is stage_end_p and one.params['direction'] == 'forward'
  ]


def in_sequence(equations: Sequence[Equation], forward: Sequence[Equation]) -> dict[Equation, int]:
  """The marks in the forward pass, each with the number of marks before it, one after another."""
  before: dict[Value, int] = {}
  ends: dict[Equation, int] = {}
  marks = set(forward)
  for one in equations:
    count = max((before.get(value, 0) for value in one.values), default=0)
    if one in marks:
      ends[one] = count
      count += 1
    before.update(dict.fromkeys(one.outputs, count))
  return ends


def _joined(ends: Mapping[Equation, int], stages: int) -> list[int]:
  """The stage that each end ends.

  Every end starts a new stage, if their number fits. Otherwise, a model may be called several times: ends that do not
  depend on one another end the same stage. So do two ends of one line, which are one end of a model called twice.
  """
  fitting = stages, stages - 1
  depth = len({*ends.values()})
  twice = len(ends) == 2 > depth and len({*map(_named_line, ends)}) == 1
  if depth in fitting and (twice or len(ends) not in fitting):
    return [*ends.values()]
  return [*range(len(ends))]


def paired(equations: Sequence[Equation], primitive: Any) -> dict[Equation, tuple[str, int]]:
  """The direction of each mark of a primitive, and its index among the forward marks.

  A backward mark gets the index of the forward mark with its number. A number can occur several times,
  as JAX caches traces of jitted blocks: then the last forward mark pairs with the first backward mark. There may be
  several backward passes of one forward pass (`jax.vjp`).
  """
  forward: dict[int, list[int]] = defaultdict(list)
  passed: Counter[int] = Counter()
  marks: dict[Equation, tuple[str, int]] = {}
  indices = itertools.count()
  for equation in equations:
    if equation.primitive is not primitive:
      continue
    direction, number = equation.params['direction'], equation.params['number']
    if direction == 'tangent':
      raise PipelineError(
        f'The stage end at {equation.source_line} is differentiated in forward mode (jax.jvp), and a '
        'pipeline runs reverse mode only.\nFix: take gradients by jax.grad or jax.value_and_grad.'
      )
    if direction == 'forward':
      marks[equation] = direction, next(indices)
      forward[number].append(marks[equation][1])
      continue
    own = forward[number]
    if direction == 'second' or not own:
      raise PipelineError(
        f'Gradients are taken of gradients through the stage end at {equation.source_line}.\n'
        'Fix: take gradients once, by jax.grad or jax.value_and_grad of the loss.'
      )
    passed[number] += 1
    marks[equation] = direction, own[-passed[number] % len(own)]
  return marks


_FIXES = {
  'scan': 'loop over the stages in Python, with one scan for each, and end stages between the scans.',
  'while': 'loop over the stages in Python, and end stages between iterations.\nFix: for tokens or steps, write a '
  'Python loop around the function of one pass.',
  'cond': 'end the stage outside the branches.',
  **dict.fromkeys(compat.REMATS, 'put nn.remat (jax.checkpoint) inside a stage, not around its end.'),
}


def check_outside(equations: Sequence[Equation]) -> None:
  """Raises PipelineError with the operations that have marks inside, and cannot be cut."""
  nested: dict[str, dict[str, None]] = defaultdict(dict)
  fixes: dict[str, None] = {}
  for equation in equations:
    for mark in marks_inside(equation, stage_end_p):
      nested[eq.operation_text(equation)][eq.source_line(mark.source_info)] = None
      fixes[_FIXES.get(equation.name, 'end the stage outside it.')] = None
  if nested:
    raise PipelineError(
      'A stage ends inside an operation that cannot be cut:\n'
      + first_lines(
        [f'  {operation}, stage end at {", ".join(ends)}' for operation, ends in nested.items()]
      )
      + ''.join(f'\nFix: {fix}' for fix in fixes)
    )


def source_lines(equations: Sequence[Equation]) -> str:
  """The source lines of equations, as text of one line each."""
  counts = Counter(map(_named_line, equations))
  return first_lines(
    [f'  {line}' + (f', {count} times' if count > 1 else '') for line, count in counts.items()]
  )


def _named_line(equation: Equation) -> str:
  """The source line of an equation, with the name of the stage that it ends."""
  name = equation.params.get('name') if equation.primitive is stage_end_p else None
  return equation.source_line + (f' ({name})' if name else '')


def _check_count(count: int, stages: int, title: str, body: Body) -> None:
  if count in (stages, stages - 1):
    return
  ends = in_sequence(body.equations, ends_among(body.equations))
  if late := _ends_after_gradients(body.equations, ends):
    raise PipelineError(
      f'The model is called on values that depend on its gradients, and {title} passes through the stages forwards and '
      f'backwards once:\n{source_lines(late)}\n'
      'Fix: let a first pipeline_jit return these values, and pass them to a second one, which calls the model on them.'
    )
  lines = source_lines([*ends])
  idle = f'Stage ends whose results are not used:\n{source_lines(body.idle)}\n' if body.idle else ''
  fixes = ['write x = stage_end(x), and use the new x.'] if body.idle else []
  fixes.append(
    f'end {stages - 1} {"stage" if stages == 2 else "stages"} by stage_end (between stages) or {stages} '
    f'(after each), or use a schedule of {_fitting_stages(ends)}.'
  )
  raise PipelineError(
    f'The model has {ends_text(ends)}, and {title} has {stages} stages.\n'
    + (f'{lines}\n' if lines else '')
    + idle
    + '\n'.join(f'Fix: {fix}' for fix in fixes)
  )


def _ends_after_gradients(equations: Sequence[Equation], ends: Iterable[Equation]) -> list[Equation]:
  """The ends that depend on the backward pass of an end."""
  after: set[Value] = set()
  for one in equations:
    is_back = one.primitive is stage_end_p and one.params['direction'] == 'backward'
    if is_back or not after.isdisjoint(one.values):
      after.update(one.outputs)
  return [one for one in ends if not after.isdisjoint(one.values)]


def ends_text(ends: Mapping[Equation, int]) -> str:
  """`3 stage ends`; `6 stage ends, 3 of them one after another`."""
  count, depth = len(ends), len({*ends.values()})
  text = f'{count or "no"} stage {"end" if count == 1 else "ends"}'
  return text if depth == count else f'{text}, {depth} of them one after another'


def _fitting_stages(ends: Mapping[Equation, int]) -> str:
  """The possible numbers of stages of a model with some stage ends, as text."""
  if not ends:
    return '1 stage'
  counts = {len({*ends.values()}), len(ends)}
  *others, last = sorted({stages for count in counts for stages in (count, count + 1)})
  return f'{", ".join(map(str, others))} or {last} stages'


def assign(
  body: Body,
  positions: Positions,
  marks: Mapping[Equation, tuple[str, int]],
  floors: Mapping[Equation, int] = MappingProxyType({}),
) -> tuple[dict[Equation, int], set[Equation]]:
  """The position of every equation, and the equations that depend on no mark.

  `floors` gives some equations a minimum position.
  """
  known: dict[Value, int] = {}
  producer: dict[Value, Equation] = {}
  position: dict[Equation, int] = {}
  free: list[Equation] = []
  between: dict[Equation, int] = {}
  numbers = [number for direction, number in marks.values() if direction == 'forward']
  is_one_call = len({*numbers}) == len(numbers)
  passed = positions.at(0)
  for equation in body.equations:
    inputs = [(known[value], value) for value in equation.values if value in known]
    at = max([floors.get(equation, 0), *(input_at for input_at, _ in inputs)]) if inputs else None
    if equation in marks:
      before, at = positions.around(*marks[equation])
      passed = at if marks[equation][0] == 'forward' else passed
      late = [value for input_at, value in inputs if input_at > before]
      if late:
        _raise_backward_edge(equation, [producer[value] for value in late])
    elif at is None:
      free.append(equation)
      continue
    elif is_one_call and at < min(passed, positions.stages) and not equation.has_effects:
      between[equation] = passed
    position[equation] = at
    known.update(dict.fromkeys(equation.outputs, at))
    producer.update(dict.fromkeys(equation.outputs, equation))
  _assign_by_readers(body, positions, marks, position, set(free), between)
  return position, set(free)


def _assign_by_readers(
  body: Body,
  positions: Positions,
  marks: Mapping[Equation, tuple[str, int]],
  position: dict[Equation, int],
  free: set[Equation],
  between: Mapping[Equation, int],
) -> None:
  """Assigns equations that depend on no mark to the position of their first reader, and moves others up to it.

  `between` has the position of the marks around an equation. It moves there if it is a layer, which reads a parameter,
  or if no more bytes are sent for its operands than for its results.
  """
  readers: dict[Value, set[int]] = defaultdict(set)
  last = positions.at(positions.stages - 1)  # of the forward pass
  sendable, arrays = _sendable_and_arrays(body)
  for equation in reversed(body.equations):
    first = min((at for one in equation.outputs for at in readers[one]), default=None)
    if equation in free:
      position[equation] = positions.at(0) if first is None else first
    elif equation in between and first is not None and first <= last:
      later = min(first, between[equation])
      sent = [value for value in equation.values if value in sendable and later not in readers[value]]
      is_layer = not arrays.isdisjoint(equation.values)
      if is_layer or sum(x.bytes for x in sent) <= sum(x.bytes for x in equation.outputs):
        position[equation] = max(position[equation], later)
    at: int = positions.around(*marks[equation])[0] if equation in marks else position[equation]
    for value in equation.values:
      readers[value].add(at)


def _sendable_and_arrays(body: Body) -> tuple[set[Value], set[Value]]:
  """The values that a pass computes, without views of its inputs; and the arrays of the step, with their views.

  Every stage can read arrays of the step, and views of them, such as a bias that is broadcast.
  """
  sendable = {value for one in body.equations for value in one.outputs}
  own = {*body.carried, body.index}
  arrays = {
    value for one in body.equations for value in one.values if value.aval.shape and value not in sendable
  }.difference(own)
  for one in body.equations:
    if one.name in residuals.VIEWS and sendable.isdisjoint(one.values) and own.isdisjoint(one.values):
      sendable.difference_update(one.outputs)
      arrays.update(one.outputs if one.values else ())
  return sendable, arrays


def _raise_backward_edge(mark: Equation, producers: Sequence[Equation]) -> NoReturn:
  raise PipelineError(
    f'The stage end at {mark.source_line} uses values computed after it, in a later stage or with '
    f'gradients:\n{source_lines(producers)}\n'
    'Fix: end stages in the order in which the model computes them, and not on gradients; any later '
    'stage may use a value, but no earlier one.'
  )


def _calls_to_inline(
  body: Body, positions: Positions, position: Mapping[Equation, int], split: bool
) -> dict[Equation, frozenset[str]]:
  """The calls to inline, each with the primitives of the calls inside it to inline as well.

  In the forward pass: calls with results that the backward reads, since it might keep fewer bytes from inside the
  call. In the backward pass: all calls, if gradients of weights are separate tasks.
  """
  backward = [one for one in body.equations if position[one] >= positions.stages]
  late = {value for one in backward for value in one.values}
  calls = {}
  for one in body.equations:
    if position[one] < positions.stages and one.name in compat.JITS and not late.isdisjoint(one.outputs):
      calls[one] = compat.JITS
    elif split and position[one] >= positions.stages and one.name in compat.JITS | compat.REMATS:
      calls[one] = compat.JITS | compat.REMATS
  return calls


def _inlined(
  body: Body, opens: Mapping[Equation, frozenset[str]], position: Mapping[Equation, int]
) -> tuple[Body, dict[Equation, int]]:
  """The body with some calls inlined, and the minimum position of each inlined equation.

  The minimum keeps the recomputation of `nn.remat`, which depends on forward values, in the backward.
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
    if equation.primitive in MARKS:
      known.update(zip(equation.outputs, equation.inputs, strict=True))
    else:
      equation.inputs = [eq.lookup(known, atom) for atom in equation.inputs]
      equations.append(equation)
  updated, kept = (eq.resolved(known, values) for values in (body.updated, body.kept))
  return dataclasses.replace(body, equations=equations, updated=updated, kept=kept)
