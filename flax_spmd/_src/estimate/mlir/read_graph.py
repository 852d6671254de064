"""Reading: a prepared module as a graph of plain values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from jaxlib.mlir import ir

from flax_spmd._src.estimate.graph import Block, Graph, Op, Value
from flax_spmd.errors import EstimatorError

_EDGE = 'sdy.data_flow_edge'
_OPAQUE = {'sdy.manual_computation': 'shard_map'}
_WITH_BLOCKS = ('while', 'case', 'if')
_LISTED = re.compile(r'(\w+) = (?:\[([\d, ]*)\]|(\d+))')
_CONVOLUTION = re.compile(r'\[([^\]]*)\]x\[([^\]]*)\]->\[([^\]]*)\]')
_SCALAR = re.compile(r'dense<(-?\d+)> : tensor<\w+>')
_PLACE = re.compile(r'"([^"]*)":(\d+):\d+')


class Reader:
  """Reads a prepared module into a graph, and notes whose results each operation's shardings are."""

  def __init__(self):
    self.values: list[Value] = []
    self.numbers: dict[Any, int] = {}
    self.results: list[tuple[int, ...]] = []
    self.loops: list[tuple[tuple[int, ...], list[tuple[int, ...]]]] = []

  def graph(self, main: Any) -> Graph:
    """The graph of a function."""
    block = self._block(main.regions[0].blocks[0])
    return Graph(tuple(self.values), block)

  def _block(self, block: Any) -> Block:
    arguments = tuple(map(self._number, block.arguments))
    ops = []
    for view in block.operations:
      op = view.operation
      if op.name in ('func.return', 'stablehlo.return', 'sdy.return'):
        self.results.append(())
        return Block(arguments, tuple(ops), tuple(self.numbers[value] for value in op.operands))
      read = self._op(op)
      if read is not None:
        ops.append(read)
    return Block(arguments, tuple(ops), ())

  def _op(self, op: Any) -> Op | None:
    if op.name in _OPAQUE:
      raise EstimatorError(
        f'The step has {_OPAQUE[op.name]} in it, of which nothing can be estimated.\n'
        'Fix: compare layouts that you choose, with spmd.compare; it compiles each.'
      )
    if op.name == _EDGE:  # the same value, seen from where it is used
      self.numbers[op.results[0]] = self.numbers[op.operands[0]]
      self.results.append((self.numbers[op.operands[0]],))
      return None
    operands = tuple(self.numbers[value] for value in op.operands)
    results = tuple(map(self._number, op.results))
    self.results.append(results)
    kind = op.name.partition('.')[2]
    blocks: tuple[Block, ...] = ()
    if kind in _WITH_BLOCKS:
      blocks = tuple(self._block(region.blocks[0]) for region in op.regions)
      self.loops.append((results, [block.arguments for block in blocks]))
    return Op(kind, operands, results, _details(op), blocks, _source(op))

  def _number(self, value: Any) -> int:
    kind = value.type
    try:
      ranked = ir.RankedTensorType(kind)
      self.values.append(Value(tuple(ranked.shape), str(ranked.element_type)))
    except ValueError:
      self.values.append(Value((), 'token'))
    self.numbers[value] = len(self.values) - 1
    return len(self.values) - 1


def _details(op: Any) -> dict[str, Any]:
  """Attributes as numbers: lists of dimensions by their names, a scalar's value, a call's target."""
  found: dict[str, Any] = {}
  for name in op.attributes:
    text = str(op.attributes[name]) if name not in ('value', 'sdy.sharding', 'sharding') else ''
    if text.startswith('array<'):
      found[name] = tuple(map(int, re.findall(r'-?\d+', text.partition(':')[2])))
    elif convolution := _CONVOLUTION.search(text):
      found[name] = tuple(tuple(part.split(', ')) for part in convolution.groups())
    elif name == 'padding':
      found[name] = _pairs(text)
    elif listed := _LISTED.findall(text):
      found |= {key: tuple(map(int, re.findall(r'\d+', many or one))) for key, many, one in listed}
    elif text[:1].isdigit():
      found[name] = int(text.partition(' ')[0])
    elif text.startswith('"'):
      found[name] = text.strip('"')
  if op.name in ('stablehlo.constant', 'sdy.constant') and not op.results[0].type.rank:
    scalar = _SCALAR.match(str(op.attributes['value']))
    found['value'] = int(scalar[1]) if scalar else None
  if op.name == 'stablehlo.compare':
    found['direction'] = str(op.attributes['comparison_direction']).rpartition(' ')[2].rstrip('>')
  return found


def _pairs(text: str) -> tuple[int, ...]:
  """Numbers of a `dense<...>` of pairs; if it is one number, it is both of each pair."""
  numbers = tuple(map(int, re.findall(r'-?\d+', text.partition('>')[0])))
  return numbers if len(numbers) > 1 else numbers * 2 * int(re.findall(r'tensor<(\d+)', text)[0])


def _source(op: Any) -> str:
  """The innermost place in a file that an operation comes from."""
  found = _PLACE.search(str(op.location))
  return f'{found[1].rpartition("/")[2]}:{found[2]}' if found else ''


def walk(op: Any) -> Iterator[Any]:
  """All operations of a function in order; that with regions before what is in them, as `Reader` has them."""
  for region in op.regions:
    for block in region.blocks:
      for view in block.operations:
        inner = view.operation
        yield inner
        if inner.name.partition('.')[2] in _WITH_BLOCKS:
          yield from walk(inner)


def main_of(module: Any) -> Any:
  """The function that the module is for."""
  return next(
    view.operation
    for view in module.regions[0].blocks[0].operations
    if view.operation.name == 'func.func' and str(view.operation.attributes['sym_name']) == '"main"'
  )
