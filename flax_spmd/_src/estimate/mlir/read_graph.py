"""Graph reader: a prepared MLIR module as a graph of plain values."""

from __future__ import annotations

import re
from typing import Any

from jaxlib.mlir import ir

from flax_spmd._src.compat import kernel_text
from flax_spmd._src.estimate.graph import Block, Graph, GraphValue, Op
from flax_spmd._src.mlir.equal import pop_number
from flax_spmd._src.mlir.functions import WITH_BLOCKS
from flax_spmd._src.source_lines import line_of_location
from flax_spmd.errors import EstimatorError

_EDGE = 'sdy.data_flow_edge'
_OPAQUE = {'sdy.manual_computation': 'shard_map'}
_DIMENSIONS = re.compile(r'(\w+) = (?:\[([\d, ]*)\]|(\d+))')
_CONVOLUTION = re.compile(r'\[([^\]]*)\]x\[([^\]]*)\]->\[([^\]]*)\]')
_SCALAR = re.compile(r'dense<(-?\d+)> : tensor<\w+>')


class GraphReader:
  """Reads a prepared module into a graph.

  Attributes:
    numbers: number of each value, its index in the graph.
    loops: per operation with blocks, its results and the arguments of each block.
  """

  def __init__(self):
    self._values: list[GraphValue] = []
    self._ops = 0
    self.numbers: dict[Any, int] = {}
    self.loops: list[tuple[tuple[int, ...], list[tuple[int, ...]]]] = []

  def graph(self, main: Any) -> Graph:
    """The graph of a function."""
    block = self._block(main.regions[0].blocks[0])
    return Graph(tuple(self._values), block)

  def _block(self, block: Any) -> Block:
    arguments = tuple(map(self._add_value, block.arguments))
    ops = []
    for view in block.operations:
      op = view.operation
      if op.name in ('func.return', 'stablehlo.return', 'sdy.return'):
        return Block(arguments, tuple(ops), tuple(self.numbers[value] for value in op.operands))
      result = self._op(op)
      if result is not None:
        ops.append(result)
    return Block(arguments, tuple(ops), ())

  def _op(self, op: Any) -> Op | None:
    if op.name in _OPAQUE:
      raise EstimatorError(
        f'The step contains {_OPAQUE[op.name]}, which cannot be estimated.\n'
        'Fix: choose the layouts, and compile them with spmd.compare.'
      )
    if op.name == _EDGE:  # its result is its operand
      self.numbers[op.results[0]] = self.numbers[op.operands[0]]
      return None
    operands = tuple(self.numbers[value] for value in op.operands)
    results = tuple(map(self._add_value, op.results))
    kind = op.name.partition('.')[2]
    blocks: tuple[Block, ...] = ()
    if kind in WITH_BLOCKS:
      blocks = tuple(self._block(region.blocks[0]) for region in op.regions)
      self.loops.append((results, [block.arguments for block in blocks]))
    self._ops += 1
    number = pop_number(op)
    equal = -self._ops if number is None else number
    return Op(kind, operands, results, _attributes(op), blocks, _source(op), equal)

  def _add_value(self, value: Any) -> int:
    try:
      ranked = ir.RankedTensorType(value.type)
      self._values.append(GraphValue(tuple(ranked.shape), str(ranked.element_type)))
    except ValueError:
      self._values.append(GraphValue((), 'token'))
    self.numbers[value] = len(self._values) - 1
    return len(self._values) - 1


def _attributes(op: Any) -> dict[str, Any]:
  """Attributes as numbers: lists of dimensions by their names, a scalar's value, a call's target."""
  result: dict[str, Any] = {}
  for name in op.attributes:
    text = str(op.attributes[name]) if name not in ('value', 'sdy.sharding', 'sharding') else ''
    if text.startswith('array<'):
      result[name] = tuple(map(int, re.findall(r'-?\d+', text.partition(':')[2])))
    elif convolution := _CONVOLUTION.search(text):
      result[name] = tuple(tuple(part.split(', ')) for part in convolution.groups())
    elif name == 'padding':
      result[name] = _pairs(text)
    elif listed := _DIMENSIONS.findall(text):
      result |= {key: tuple(map(int, re.findall(r'\d+', many or one))) for key, many, one in listed}
    elif text[:1].isdigit():
      result[name] = int(text.partition(' ')[0])
    elif text.startswith('"'):
      result[name] = text.strip('"')
  if op.name in ('stablehlo.constant', 'sdy.constant') and not op.results[0].type.rank:
    result['value'] = _integer(op)
  if op.name == 'stablehlo.custom_call':
    result['kernel'] = _kernel(op.attributes)
  if op.name == 'stablehlo.compare':
    result['direction'] = str(op.attributes['comparison_direction']).rpartition(' ')[2].rstrip('>')
  return result


def _integer(op: Any) -> int | None:
  """The value of a scalar constant; None if it is no integer. The bindings have no complex constants."""
  if str(op.results[0].type.element_type).startswith('complex'):
    return None
  scalar = _SCALAR.match(str(op.attributes['value']))
  return int(scalar[1]) if scalar else None


def _kernel(attributes: Any) -> str:
  """The target of a custom call and its configuration; those of the kernel inside, if it is known."""
  if 'kernel' in attributes:
    return ir.StringAttr(attributes['kernel']).value
  return kernel_text(attributes)


def _pairs(text: str) -> tuple[int, ...]:
  """The numbers of a `dense<...>` of pairs; a single number is repeated for all of them."""
  numbers = tuple(map(int, re.findall(r'-?\d+', text.partition('>')[0])))
  return numbers if len(numbers) > 1 else numbers * 2 * int(re.findall(r'tensor<(\d+)', text)[0])


def _source(op: Any) -> str:
  """The user's source line of an operation, as compiled programs report it."""
  return line_of_location(str(op.location))
