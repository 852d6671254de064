"""Value sources: the instruction that computed a value which others only copy, cast, slice or reshape.

    %p   = f32[2,8] parameter(0)
    %t   = f32[8,2] transpose(%p)
    %all = f32[8,8] all-gather(%t)        moves parameter 0

`ValueSources` follows a value backwards through fusions, calls and loops, until an instruction computes
something. So a collective can be attributed to the argument that it gathers, or to the result that it feeds.
"""

from __future__ import annotations

from typing import NamedTuple

from flax_spmd._src.hlo.parser import Computation, HloModule, Instruction

_FIRST = slice(0, 1)
_OPERANDS_MOVED = {  # op: its operands that are moved; the others are indices or a mask
  'bitcast': _FIRST,
  'broadcast': _FIRST,
  'convert': _FIRST,
  'copy': _FIRST,
  'copy-start': _FIRST,
  'dynamic-slice': _FIRST,
  'optimization-barrier': _FIRST,
  'reduce-precision': _FIRST,
  'reshape': _FIRST,
  'reverse': _FIRST,
  'slice': _FIRST,
  'transpose': _FIRST,
  'concatenate': slice(None),
  'dynamic-update-slice': slice(0, 2),
  'pad': slice(0, 2),
  'select': slice(1, 3),
  'tuple': slice(None),
}
_WITHOUT_DATA = frozenset(('constant', 'iota', 'partition-id', 'replica-id'))
_CALLS = ('calls', 'to_apply')


class ValueSource(NamedTuple):
  """An instruction that computes a value, or a parameter of the program.

  Attributes:
    computation: name of its computation.
    instruction: its name.
    element: the element of its result, if that is a tuple and not followed as a whole.
  """

  computation: str
  instruction: str
  element: int | None = None


_Sources = frozenset[ValueSource]


class ValueSources:
  """Finds where the values of a module are computed.

  Args:
    module: a compiled program.

  Example:
    >>> from flax_spmd._src.hlo.parser import parse
    >>> module = parse('''
    ... ENTRY %main (x: f32[4,8]) -> f32[8,4] {
    ...   %x = f32[4,8]{1,0} parameter(0)
    ...   %y = f32[4,8]{1,0} convert(%x)
    ...   ROOT %t = f32[8,4]{1,0} transpose(%y), dimensions={1,0}
    ... }''')
    >>> ValueSources(module).of(module.main.result, module.main)
    frozenset({ValueSource(computation='main', instruction='x', element=None)})
  """

  def __init__(self, module: HloModule):
    self._module = module
    self._callers = {
      name: (instruction, computation)
      for computation in module.computations.values()
      for instruction in computation.instructions.values()
      for name in instruction.called(*_CALLS, 'body', 'condition')
    }
    self._open: set[tuple[str, int]] = set()  # elements of loops that are being followed

  def of(self, value: Instruction, inside: Computation) -> _Sources:
    """The sources of a value; empty if it has none but constants and device numbers."""
    op = value.op
    if op == 'parameter':
      return self._of_parameter(value, inside)
    if op in _WITHOUT_DATA:
      return frozenset()
    if op == 'get-tuple-element':
      [whole] = inside.operands(value)
      return self.of_element(whole, inside, int(value.attributes['index']))
    if op in ('fusion', 'call') and (called := self._called(value)) and called.result:
      return self.of(called.result, called)
    moved = _OPERANDS_MOVED.get(op, _FIRST if op.endswith('-done') else None)
    if moved is None:
      return frozenset((ValueSource(inside.name, value.name),))
    return frozenset().union(*(self.of(operand, inside) for operand in inside.operands(value)[moved]))

  def of_element(self, whole: Instruction, inside: Computation, index: int) -> _Sources:
    """The sources of one element of a tuple."""
    op, operands = whole.op, inside.operands(whole)
    if op == 'tuple':
      return self.of(operands[index], inside)
    if op in ('fusion', 'call') and (called := self._called(whole)) and called.result:
      return self.of_element(called.result, called, index)
    if op == 'while':
      return self._of_state(whole, inside, index)
    if op == 'parameter' and inside.name in self._callers:
      return self._of_passed(whole, inside, index)
    if op in ('copy', 'optimization-barrier') or op.endswith('-done'):
      return self.of_element(operands[0], inside, index)
    return frozenset((ValueSource(inside.name, whole.name, index),))

  def _called(self, caller: Instruction) -> Computation | None:
    return self._module.computations.get(caller.computation(*_CALLS))

  def _of_parameter(self, parameter: Instruction, inside: Computation) -> _Sources:
    caller, outside = self._callers.get(inside.name, (None, None))
    number = int(parameter.inner)
    if caller is None or outside is None or caller.op not in ('fusion', 'call'):
      return frozenset((ValueSource(inside.name, parameter.name),))
    operands = outside.operands(caller)
    return self.of(operands[number], outside) if number < len(operands) else frozenset()

  def _of_passed(self, parameter: Instruction, inside: Computation, index: int) -> _Sources:
    """The sources of an element of a loop's state inside the loop, or of a tuple that is passed to a call."""
    caller, outside = self._callers[inside.name]
    if caller.op == 'while':
      return self._of_state(caller, outside, index)
    if caller.op in ('fusion', 'call'):
      return self.of_element(outside.operands(caller)[int(parameter.inner)], outside, index)
    return frozenset((ValueSource(inside.name, parameter.name, index),))

  def _of_state(self, loop: Instruction, outside: Computation, index: int) -> _Sources:
    """The sources of an element of a loop's state: of its first value, and of the value after each trip."""
    key = loop.name, index
    if key in self._open:  # the body passes it on
      return frozenset()
    self._open.add(key)
    try:
      first = self.of_element(outside.operands(loop)[0], outside, index)
      body = self._module.computations.get(loop.computation('body'))
      if body is None or body.result is None:
        return first | {ValueSource(outside.name, loop.name, index)}
      return first | self.of_element(body.result, body, index)
    finally:
      self._open.discard(key)
