"""Inlining: what functions compute, put in where they are called; and operations that say nothing about places.

Every operation costs time in each propagation, so what can't matter to it is taken out once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxlib.mlir import ir

# What is done element by element on two arrays, in a dtype that can be negated.
_BINARY = frozenset(
  f'stablehlo.{kind}'
  for kind in ('add', 'divide', 'maximum', 'minimum', 'multiply', 'power', 'subtract')
)
_UNARY = 'stablehlo.negate'
_SUMS = (
  'stablehlo.add',
  'stablehlo.subtract',
)  # sums of sums that devices have parts of are another matter


def inline_all(module: Any) -> None:
  """Puts what functions compute where they are called, and drops them."""
  functions = {
    str(view.operation.attributes['sym_name']).strip('"'): view.operation
    for view in module.body.operations
    if view.operation.name == 'func.func'
  }
  done: set[str] = set()

  def inline(name: str) -> None:
    if name in done:
      return
    done.add(name)
    for call in [op for op in _every(functions[name]) if op.name == 'func.call']:
      callee = str(call.attributes['callee']).removeprefix('@').strip('"')
      inline(callee)
      _inline(call, functions[callee].regions[0].blocks[0])

  inline('main')
  for name, function in functions.items():
    if name != 'main':
      function.erase()


def _every(op: Any) -> Iterator[Any]:
  for region in op.regions:
    for block in region.blocks:
      for view in list(block.operations):
        yield view.operation
        yield from _every(view.operation)


def _inline(call: Any, block: Any) -> None:
  """Replaces a call by copies of what is in its function's block."""
  now = dict(zip(block.arguments, call.operands))
  before = ir.InsertionPoint(call)
  for view in block.operations:
    op = view.operation
    if op.name == 'func.return':
      for result, value in zip(call.results, op.operands):
        result.replace_all_uses_with(now.get(value, value))
      break
    copy = op.clone(before)
    _replace(copy, now)
    now |= dict(zip(op.results, copy.results))
  call.erase()


def _replace(op: Any, now: Mapping[Any, Any]) -> None:
  for index, value in enumerate(op.operands):
    if value in now:
      op.operands[index] = now[value]
  for inner in _every(op):
    for index, value in enumerate(inner.operands):
      if value in now:
        inner.operands[index] = now[value]


def make_plain(module: Any) -> None:
  """Replaces what JAX has beside StableHLO (CHLO: `square`, `erf`, ...) by conversions, if it is done element by element.

  XLA takes these operations apart before it propagates shardings, which Shardy can't do for them. How they
  compute does not matter here, only that they do it element by element.
  """
  for op in list(_every(module)):
    if op.name.startswith('chlo.') and len(op.results) == 1 and _is_elementwise(op):
      with ir.InsertionPoint(op):
        same = ir.Operation.create(
          'stablehlo.convert', results=[op.results[0].type], operands=[op.operands[0]], loc=op.location
        )
      op.results[0].replace_all_uses_with(same.results[0])
      op.erase()


def _is_elementwise(op: Any) -> bool:
  shape = list(ir.RankedTensorType(op.results[0].type).shape)
  return all(list(ir.RankedTensorType(value.type).shape) == shape for value in op.operands)


def drop_uniform(module: Any) -> None:
  """Takes out operands that are one number everywhere, as `0.9` in `0.9 * mu` and a learning rate are.

  They lie on every device whatever the layout. What is left of the operation is a negation: it does as much, in
  the same dtype, on one operand; and where another operation does such with its result, nothing is left.
  """
  known: dict[Any, bool] = {}
  for op in list(_every(module)):
    if op.name not in _BINARY or not _has_shape(op.results[0]) or _is_boolean(op.results[0]):
      continue
    left = [value for value in op.operands if not _is_uniform(value, known)]
    if len(left) == 1:
      with ir.InsertionPoint(op):
        same = ir.Operation.create(
          _UNARY, results=[op.results[0].type], operands=[_before(left[0])], loc=op.location
        )
      op.results[0].replace_all_uses_with(same.results[0])
      op.erase()
    elif op.name not in _SUMS:
      for index, value in enumerate(op.operands):
        op.operands[index] = _before(value)
  for op in reversed(list(_every(module))):  # or propagation drops them, out of step with what was read
    dead = len(op.results) == 1 and not list(op.results[0].uses)
    if dead and (op.name == _UNARY or known.get(op.results[0])):
      op.erase()


def _before(value: Any) -> Any:
  """What a negation that has no other use is made of."""
  op = value.owner
  if isinstance(op, ir.Block) or op.name != _UNARY or len(list(value.uses)) > 1:
    return value
  return op.operation.operands[0]


def _has_shape(value: Any) -> bool:
  return bool(ir.RankedTensorType(value.type).shape)


def _is_boolean(value: Any) -> bool:
  return str(ir.RankedTensorType(value.type).element_type) == 'i1'  # which can't be negated


def _is_uniform(value: Any, known: dict[Any, bool]) -> bool:
  """Whether a value is a number, or one number everywhere, that no array was reduced to."""
  if value not in known:
    op = value.owner
    if isinstance(op, ir.Block):
      known[value] = not _has_shape(value)
    elif op.name == 'stablehlo.broadcast_in_dim' or not _has_shape(value):
      op = op.operation
      pure = not len(op.regions) and op.name.startswith('stablehlo.')
      known[value] = pure and all(_is_uniform(operand, known) for operand in op.operands)
    else:
      known[value] = False
  return known[value]
