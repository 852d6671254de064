"""Loops: how often the body of a `while` runs.

A scan is a `while` in HLO, and what its body does counts as often as it runs. Some backends note the
number of trips; on others (TPUs) it has to be read: the condition compares a counter, an element of the
loop's state, with a limit, the counter starts at a constant, and the body adds a constant to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from flax_spmd._src.hlo.parser import Computation, Instruction, Module

_KNOWN = re.compile(r'known_trip_count\\?"?:\s*\{\\?"?n\\?"?:\s*\\?"?(\d+)')
_THROUGH = ('copy', 'bitcast', 'convert', 'reshape', 'copy-done', 'copy-start', 'opt-barrier')
_SWAPPED = {'LT': 'GT', 'LE': 'GE', 'GT': 'LT', 'GE': 'LE', 'NE': 'NE', 'EQ': 'EQ'}

State = Mapping[int, int]  # what is known of a loop's state: the value of an element, by its place


class Trips(NamedTuple):
  """How often a loop runs, and how that is known: 'known' (noted), 'condition' (read), or 'unknown'.

  A loop that may also end early ('condition') counts with the most trips that it can make; one of which
  nothing is known counts once.
  """

  number: int
  how: str


class Value(NamedTuple):
  """What a number is: a constant, or an element of the loop's state plus a constant."""

  constant: int
  element: int | None = None


def trips(loop: Instruction, computation: Computation, module: Module, state: State) -> Trips:
  """How often a `while` instruction's body runs.

  Args:
    loop: the instruction.
    computation: it is in.
    module: has its condition and its body.
    state: what is known of the computation's own argument, if that is a loop's body itself.

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
    return Trips(1, 'unknown')
  start = entering(loop, computation, module, state)
  found = _Reader(module, body, start).read(condition)
  return Trips(1, 'unknown') if found is None else Trips(found, 'condition')


def entering(loop: Instruction, computation: Computation, module: Module, state: State) -> State:
  """The elements of a loop's state that are constants when it begins, by their places."""
  given = next(iter(computation.operands(loop)), None)
  while given is not None and given.op in _THROUGH:
    given = next(iter(computation.operands(given)), None)
  if given is None or given.op != 'tuple':
    return {}
  values = (_value(operand, computation, module) for operand in computation.operands(given))
  numbers = ((place, _known(value, state)) for place, value in enumerate(values))
  return {place: number for place, number in numbers if number is not None}


def unchanging(loop: Instruction, module: Module, start: State) -> State:
  """Of the elements in `start` those that the loop's body hands on as they are."""
  body = module.computations.get(loop.computation('body'))
  if body is None:
    return {}
  return {
    place: number for place, number in start.items() if _next(place, body, module) == Value(0, place)
  }


class _Reader(NamedTuple):
  """Reads a loop's condition, given its body and what its state begins with."""

  module: Module
  body: Computation
  start: State

  def read(self, condition: Computation) -> int | None:
    """The most trips that the condition allows; None if it says nothing."""
    return self._allowed(condition.result, condition, None)

  def _allowed(self, test: Instruction | None, inside: Computation, given: list[Value | None] | None):
    """The trips until a test fails: a comparison, several that all must hold, or a fusion of these."""
    if test is None:
      return None
    if test.op == 'and':
      found = [self._allowed(part, inside, given) for part in inside.operands(test)]
      return min((count for count in found if count is not None), default=None)
    if test.op in ('fusion', 'call'):
      called = self.module.computations.get(test.computation('calls', 'to_apply'))
      values = [_value(operand, inside, self.module, given) for operand in inside.operands(test)]
      return called and self._allowed(called.result, called, values)
    if test.op in _THROUGH:
      return self._allowed(next(iter(inside.operands(test)), None), inside, given)
    return self._compared(test, inside, given) if test.op == 'compare' else None

  def _compared(
    self, test: Instruction, inside: Computation, given: list[Value | None] | None
  ) -> int | None:
    """The trips that a comparison of a counter with a limit allows."""
    sides = [_value(operand, inside, self.module, given) for operand in inside.operands(test)]
    if len(sides) != 2:
      return None
    direction = test.attributes.get('direction', '')
    for (counter, limit), way in zip((sides, sides[::-1]), (direction, _SWAPPED.get(direction, ''))):
      if (
        counter is not None and counter.element is not None and (last := self._limit(limit)) is not None
      ):
        return self._count(counter, last, way)
    return None

  def _limit(self, value: Value | None) -> int | None:
    """A constant, or an element of the state that never changes."""
    if value is None or value.element is None:
      return value and value.constant
    changes = _next(value.element, self.body, self.module) != Value(0, value.element)
    return None if changes else _known(value, self.start)

  def _count(self, counter: Value, limit: int, direction: str) -> int | None:
    """The trips of a counter that starts at a constant and goes in steps."""
    place = counter.element
    if place is None or place not in self.start:
      return None
    following = _next(place, self.body, self.module)
    if following is None or following.element != place or not following.constant:
      return None
    return _steps(self.start[place] + counter.constant, following.constant, limit, direction)


def _steps(start: int, step: int, limit: int, direction: str) -> int | None:
  """How often `start`, `start + step`, ... passes a comparison with the limit.

  Example:
    >>> _steps(0, 2, 5, 'LT'), _steps(3, -1, 0, 'GE'), _steps(0, 1, 4, 'NE')
    (3, 4, 4)
  """
  if direction in ('LE', 'GE'):
    limit += 1 if direction == 'LE' else -1
  rising = direction in ('LT', 'LE') or (direction == 'NE' and step > 0)
  if rising != (step > 0) or direction not in ('LT', 'LE', 'GT', 'GE', 'NE'):
    return None
  return max(0, -((start - limit) // step))


def _next(place: int, body: Computation, module: Module) -> Value | None:
  """An element of the state after one trip, by what it was before."""
  root = body.result
  if root is None or root.op != 'tuple' or place >= len(root.operands):
    return None
  operand = body.instructions.get(root.operands[place])
  return operand and _value(operand, body, module)


def _value(
  instruction: Instruction, inside: Computation, module: Module, given: list[Value | None] | None = None
) -> Value | None:
  """What an integer is, if that can be read.

  Args:
    instruction: its result.
    inside: the computation it is in.
    module: has what it calls.
    given: of a called computation, the arguments; else its one argument is a loop's state.
  """
  if instruction.op in _THROUGH:
    operands = inside.operands(instruction)
    return _value(operands[0], inside, module, given) if operands else None
  if instruction.op == 'constant':
    return Value(int(instruction.inner)) if re.fullmatch(r'-?\d+', instruction.inner) else None
  if instruction.op == 'parameter' and given is not None:
    place = int(instruction.inner)
    return given[place] if place < len(given) else None
  if instruction.op == 'get-tuple-element':
    return _element(instruction, inside, given)
  if instruction.op in ('fusion', 'call'):
    called = module.computations.get(instruction.computation('calls', 'to_apply'))
    values = [_value(operand, inside, module, given) for operand in inside.operands(instruction)]
    return _value(called.result, called, module, values) if called and called.result else None
  return _sum(instruction, inside, module, given)


def _element(
  instruction: Instruction, inside: Computation, given: list[Value | None] | None
) -> Value | None:
  """An element of the loop's state."""
  source = next(iter(inside.operands(instruction)), None)
  if given is not None or source is None or source.op != 'parameter':
    return None
  return Value(0, int(instruction.attributes['index']))


def _sum(
  instruction: Instruction, inside: Computation, module: Module, given: list[Value | None] | None
) -> Value | None:
  """Of two numbers, at most one of which is an element of the state."""
  if instruction.op not in ('add', 'subtract') or len(instruction.operands) != 2:
    return None
  first, second = (_value(operand, inside, module, given) for operand in inside.operands(instruction))
  if first is None or second is None or (first.element is not None and second.element is not None):
    return None
  if instruction.op == 'add':
    element = second.element if first.element is None else first.element
    return Value(first.constant + second.constant, element)
  return None if second.element is not None else Value(first.constant - second.constant, first.element)


def _known(value: Value | None, state: State) -> int | None:
  """The number that a value is, given what is known of the state."""
  if value is None or (value.element is not None and value.element not in state):
    return None
  return value.constant + (0 if value.element is None else state[value.element])
