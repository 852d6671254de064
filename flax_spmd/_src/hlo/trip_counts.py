"""Trip counts: how often the body of a `while` runs.

A scan is a `while` in HLO, and its body counts once per trip. Some backends annotate the trip count. On
others (TPUs) it follows from three constants: the condition compares a counter, an element of the loop's
state, with a limit; the counter starts at a constant; and the body adds a constant to it.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flax_spmd._src.hlo.parser import Computation, HloModule, Instruction

_KNOWN = re.compile(r'known_trip_count\\?"?:\s*\{\\?"?n\\?"?:\s*\\?"?(\d+)')
THROUGH = ('copy', 'bitcast', 'convert', 'reshape', 'copy-done', 'copy-start', 'opt-barrier')
_PASSES = {
  'LT': operator.lt,
  'LE': operator.le,
  'GT': operator.gt,
  'GE': operator.ge,
  'NE': operator.ne,
  'EQ': operator.eq,
}
SWAPPED = {'LT': 'GT', 'LE': 'GE', 'GT': 'LT', 'GE': 'LE', 'NE': 'NE', 'EQ': 'EQ'}

State = Mapping[int, int]  # constant elements of a loop's state: value by index


class Trips(NamedTuple):
  """The trip count of a loop.

  Attributes:
    number: number of trips. If the loop can end early, the largest possible number; 1 if unknown.
    how: `'known'` (annotated by the compiler), `'condition'` (derived from the condition), `'at most'` (derived from a
      condition that can end the loop earlier) or `'unknown'`.
  """

  number: int
  how: str


UNKNOWN = Trips(1, 'unknown')


class AffineValue(NamedTuple):
  """An integer: a constant, or an element of the loop's state plus a constant."""

  constant: int
  element: int | None = None


Given = tuple[AffineValue | None, ...]  # arguments of a called computation


def trips(loop: Instruction, computation: Computation, module: HloModule, state: State) -> Trips:
  """The trip count of a `while` instruction.

  Args:
    loop: the `while` instruction.
    computation: computation that contains it.
    module: module that contains its condition and its body.
    state: constant elements of the computation's parameter, if the computation is the body of an outer loop.

  Example:
    >>> from flax_spmd._src.hlo.parser import parse
    >>> module = parse('''
    ... %condition (p: (s32[])) -> pred[] {
    ...   %p = (s32[]) parameter(0)
    ...   %i = s32[] get-tuple-element(%p), index=0
    ...   %n = s32[] constant(10)
    ...   ROOT %less = pred[] compare(%i, %n), direction=LT
    ... }
    ... %body (q: (s32[])) -> (s32[]) {
    ...   %q = (s32[]) parameter(0)
    ...   %j = s32[] get-tuple-element(%q), index=0
    ...   %two = s32[] constant(2)
    ...   %next = s32[] add(%j, %two)
    ...   ROOT %state = (s32[]) tuple(%next)
    ... }
    ... ENTRY %main (x: s32[]) -> (s32[]) {
    ...   %zero = s32[] constant(0)
    ...   %start = (s32[]) tuple(%zero)
    ...   ROOT %loop = (s32[]) while(%start), condition=%condition, body=%body
    ... }''')
    >>> trips(module.main.instructions['loop'], module.main, module, {})
    Trips(number=5, how='condition')
  """
  if noted := _KNOWN.search(loop.attributes.get('backend_config', '')):
    return Trips(int(noted[1]), 'known')
  condition = module.computations.get(loop.computation('condition'))
  body = module.computations.get(loop.computation('body'))
  if condition is None or body is None:
    return UNKNOWN
  start = entering(loop, computation, module, state)
  return _ConditionAnalysis(_Integers(module), body, start).trips(condition)


def unsure_text(trips: Trips) -> str:
  """How a loop is counted whose trips depend on values; '' for other loops."""
  if trips.how == 'unknown':
    return 'a loop whose number of trips depends on values, counted as one trip'
  return (
    f'a loop that can end early, counted with the most trips, {trips.number}'
    if trips.how == 'at most'
    else ''
  )


def entering(loop: Instruction, computation: Computation, module: HloModule, state: State) -> State:
  """The constant elements of a loop's initial state, by index."""
  initial = next(iter(computation.operands(loop)), None)
  while initial is not None and initial.op in THROUGH:
    initial = next(iter(computation.operands(initial)), None)
  if initial is None or initial.op != 'tuple':
    return {}
  known = _Integers(module).inside(computation)
  values = (known.get(name) for name in initial.operands)
  numbers = ((index, _evaluate(value, state)) for index, value in enumerate(values))
  return {index: number for index, number in numbers if number is not None}


def unchanging(loop: Instruction, module: HloModule, start: State) -> State:
  """The elements of `start` that the loop's body passes on unchanged."""
  body = module.computations.get(loop.computation('body'))
  if body is None:
    return {}
  integers = _Integers(module)
  return {
    index: number
    for index, number in start.items()
    if integers.following(index, body) == AffineValue(0, index)
  }


class _Integers:
  """The integers of a module that are constants, elements of a loop's state, or sums of these; each is computed once.

  Args:
    module: the module.
  """

  def __init__(self, module: HloModule):
    self._computations = module.computations
    self.inside = functools.cache(self._inside)

  def following(self, index: int, body: Computation) -> AffineValue | None:
    """An element of the state after one trip, in terms of the state before it."""
    root = body.result
    if root is None or root.op != 'tuple' or index >= len(root.operands):
      return None
    return self.inside(body).get(root.operands[index])

  def called(self, instruction: Instruction) -> Computation | None:
    """The computation that a fusion or a call has."""
    return self._computations.get(instruction.computation('calls', 'to_apply'))

  def _inside(self, computation: Computation, given: Given | None = None) -> Mapping[str, AffineValue]:
    """The integers in a computation, by instruction.

    Args:
      computation: the computation.
      given: arguments of a called one; None if its parameter is a loop's state.
    """
    known: dict[str, AffineValue] = {}
    for instruction in computation.instructions.values():
      value = self._value(instruction, computation, known, given)
      if value is not None:
        known[instruction.name] = value
    return known

  def _value(
    self,
    instruction: Instruction,
    inside: Computation,
    known: Mapping[str, AffineValue],
    given: Given | None,
  ) -> AffineValue | None:
    """The integer that an instruction computes from known ones."""
    op, operands = instruction.op, tuple(map(known.get, instruction.operands))
    if op in THROUGH:
      return operands[0] if operands else None
    if not _is_integer(instruction):
      return None
    if op == 'constant':
      return AffineValue(int(instruction.inner)) if re.fullmatch(r'-?\d+', instruction.inner) else None
    if op == 'parameter' and given is not None:
      return next(iter(given[int(instruction.inner) :]), None)
    if op == 'get-tuple-element' and given is None:
      [source] = inside.operands(instruction)
      return AffineValue(0, int(instruction.attributes['index'])) if source.op == 'parameter' else None
    if op in ('fusion', 'call'):
      called = self.called(instruction)
      return self.inside(called, operands).get(called.root) if called else None
    return _sum(op, *operands) if op in ('add', 'subtract') else None


class _ConditionAnalysis(NamedTuple):
  """Derives a trip count from a loop's condition, its body, and the constants in its initial state."""

  integers: _Integers
  body: Computation
  start: State

  def trips(self, condition: Computation) -> Trips:
    """The trips that the condition allows."""
    return self._allowed(condition.result, condition, None)

  def _allowed(self, test: Instruction | None, inside: Computation, given: Given | None) -> Trips:
    """The trips until a test fails: a comparison, a conjunction of comparisons, or a fusion of these."""
    if test is None:
      return UNKNOWN
    if test.op == 'and':
      return conjunction([self._allowed(part, inside, given) for part in inside.operands(test)])
    if test.op in ('fusion', 'call'):
      called = self.integers.called(test)
      values = map(self.integers.inside(inside, given).get, test.operands)
      return self._allowed(called.result, called, tuple(values)) if called else UNKNOWN
    if test.op in THROUGH:
      return self._allowed(next(iter(inside.operands(test)), None), inside, given)
    number = self._compared(test, inside, given) if test.op == 'compare' else None
    return UNKNOWN if number is None else Trips(number, 'condition')

  def _compared(self, test: Instruction, inside: Computation, given: Given | None) -> int | None:
    """The trips until the comparison of a counter with a limit fails; None if unknown."""
    sides = list(map(self.integers.inside(inside, given).get, test.operands))
    if len(sides) != 2:
      return None
    direction = test.attributes.get('direction', '')
    for (counter, limit), way in zip((sides, sides[::-1]), (direction, SWAPPED.get(direction, ''))):
      if (
        counter is not None and counter.element is not None and (last := self._limit(limit)) is not None
      ):
        return self._count(counter, last, way)
    return None

  def _limit(self, value: AffineValue | None) -> int | None:
    """The number behind a constant or an unchanging element of the state."""
    if value is None or value.element is None:
      return value and value.constant
    changes = self.integers.following(value.element, self.body) != AffineValue(0, value.element)
    return None if changes else _evaluate(value, self.start)

  def _count(self, counter: AffineValue, limit: int, direction: str) -> int | None:
    """The trips of a counter with a constant start and a constant step."""
    index = counter.element
    if index is None or index not in self.start:
      return None
    following = self.integers.following(index, self.body)
    if following is None or following.element != index or not following.constant:
      return None
    return steps(self.start[index] + counter.constant, following.constant, limit, direction)


def conjunction(parts: Sequence[Trips]) -> Trips:
  """The trips of a loop that ends when one of several conditions fails.

  Example:
    >>> conjunction([Trips(8, 'condition'), Trips(9, 'condition')]), conjunction([Trips(8, 'condition'), UNKNOWN])
    (Trips(number=8, how='condition'), Trips(number=8, how='at most'))
  """
  counted = [part for part in parts if part != UNKNOWN]
  if not counted:
    return UNKNOWN
  is_exact = all(part.how == 'condition' for part in parts)
  return Trips(min(counted).number, 'condition' if is_exact else 'at most')


def steps(start: int, step: int, limit: int, direction: str) -> int | None:
  """How many of `start`, `start + step`, ... pass a comparison with the limit before the first that fails.

  Args:
    start: first number.
    step: difference of two numbers; not 0.
    limit: number that all are compared with.
    direction: comparison, such as 'LT'.

  Returns:
    The count; None if no number fails, or the direction is unknown.

  Example:
    >>> steps(0, 2, 5, 'LT'), steps(3, -1, 0, 'GE'), steps(0, 1, 4, 'NE'), steps(0, -1, 0, 'LT'), steps(0, -1, 1, 'LT')
    (3, 4, 4, 0, None)
  """
  passes = _PASSES.get(direction)
  if passes is None or not passes(start, limit):
    return None if passes is None else 0
  if direction == 'EQ':
    return 1
  if direction == 'NE':
    number, rest = divmod(limit - start, step)
    return number if number > 0 and not rest else None
  if (step > 0) != (direction in ('LT', 'LE')):
    return None
  limit += {'LE': 1, 'GE': -1}.get(direction, 0)
  return -((start - limit) // step)


def _is_integer(instruction: Instruction) -> bool:
  """Whether an instruction's result is one integer."""
  shapes = instruction.shapes
  return len(shapes) == 1 and shapes[0].size == 1 and shapes[0].dtype[0] in 'su'


def _sum(op: str, first: AffineValue | None, second: AffineValue | None) -> AffineValue | None:
  """The sum or difference of two values, of which at most one depends on the state."""
  if first is None or second is None or (first.element is not None and second.element is not None):
    return None
  if op == 'add':
    element = second.element if first.element is None else first.element
    return AffineValue(first.constant + second.constant, element)
  return (
    None if second.element is not None else AffineValue(first.constant - second.constant, first.element)
  )


def _evaluate(value: AffineValue | None, state: State) -> int | None:
  """The number of a value, given the constant elements of the state; None if unknown."""
  if value is None or (value.element is not None and value.element not in state):
    return None
  return value.constant + (0 if value.element is None else state[value.element])
