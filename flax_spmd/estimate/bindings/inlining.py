"""Inlining: what functions compute, put in where they are called; and operations that Shardy does not know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxlib.mlir import ir


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
