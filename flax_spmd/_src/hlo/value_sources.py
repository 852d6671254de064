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
_Value = tuple[Instruction, Computation, int | None]  # with the element of a tuple


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
    self._computations = module.computations
    self._callers = {
      name: (instruction, computation)
      for computation in module.computations.values()
      for instruction in computation.instructions.values()
      for name in instruction.called(*_CALLS, 'body', 'condition')
    }

  def of(self, value: Instruction, inside: Computation) -> _Sources:
    """The sources of a value; empty if it has none but constants and device numbers."""
    return self._reached((value, inside, None))

  def of_element(self, whole: Instruction, inside: Computation, index: int) -> _Sources:
    """The sources of one element of a tuple."""
    return self._reached((whole, inside, index))

  def _reached(self, start: _Value) -> _Sources:
    """The sources behind a value. Each value is followed once: loops pass theirs on, and values have several uses."""
    sources: set[ValueSource] = set()
    seen: set[ValueSource] = set()
    left = [start]
    while left:
      value, inside, index = left.pop()
      place = ValueSource(inside.name, value.name, index)
      if place not in seen:
        seen.add(place)
        before = (
          self._before(value, inside) if index is None else self._before_element(value, inside, index)
        )
        left += before or ()
        sources |= {place} if before is None else set()
    return frozenset(sources)

  def _before(self, value: Instruction, inside: Computation) -> list[_Value] | None:
    """The values that a value consists of; None if it is computed here."""
    op, operands = value.op, inside.operands(value)
    if op == 'parameter':
      caller, outside = self._callers.get(inside.name, (None, None))
      if caller is None or outside is None or caller.op not in ('fusion', 'call'):
        return None
      return [(one, outside, None) for one in outside.operands(caller)[int(value.inner) :][:1]]
    if op in _WITHOUT_DATA:
      return []
    if op == 'get-tuple-element':
      return [(operands[0], inside, int(value.attributes['index']))]
    if op in ('fusion', 'call') and (called := self._called(value)) and called.result:
      return [(called.result, called, None)]
    moved = _OPERANDS_MOVED.get(op, _FIRST if op.endswith('-done') else None)
    return None if moved is None else [(one, inside, None) for one in operands[moved]]

  def _before_element(self, whole: Instruction, inside: Computation, index: int) -> list[_Value] | None:
    """The values that an element of a tuple is; those of a loop's state are its first one, and that after each trip."""
    op, operands = whole.op, inside.operands(whole)
    if op == 'tuple':
      return [(operands[index], inside, None)]
    if op in ('fusion', 'call') and (called := self._called(whole)) and called.result:
      return [(called.result, called, index)]
    if op == 'while':
      body = self._computations.get(whole.computation('body'))
      if body is not None and body.result is not None:
        return [(operands[0], inside, index), (body.result, body, index)]
    if op == 'parameter' and inside.name in self._callers:
      caller, outside = self._callers[inside.name]
      if caller.op == 'while':
        return [(caller, outside, index)]
      if caller.op in ('fusion', 'call'):
        return [(outside.operands(caller)[int(whole.inner)], outside, index)]
    if op in ('copy', 'optimization-barrier') or op.endswith('-done'):
      return [(operands[0], inside, index)]
    return None

  def _called(self, caller: Instruction) -> Computation | None:
    return self._computations.get(caller.computation(*_CALLS))
