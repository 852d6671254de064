"""Operand dimensions: the dimensions that a dimension of a result comes from, through the operations of a program.

    operand_dimensions(equation, 0, 0)   # [(0, 1)]: dimension 1 of operand 0, for a transpose
    input_dimensions(jaxpr, 0, 0)        # the same for a program, through all of its equations

A row of a result is computed from the same row of these operands. A dimension of a reshape comes from the one with as
many elements before it, in row-major order: their leading parts are one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jax.extend.core import Literal

from flax_spmd._src import compat

Node = TypeVar('Node')
Dimension = tuple[int, int]  # number of an operand, and its dimension
Shape = Sequence[int]


def walk(
  start: Node, key: Callable[[Node], Hashable], before: Callable[[Node], Sequence[Node]]
) -> Iterator[Node]:
  """Every node that leads to one, itself first; each once.

  Args:
    start: the last node.
    key: function to the identity of a node.
    before: function to the nodes that lead to a node.
  """
  seen, left = {key(start)}, [start]
  while left:
    node = left.pop()
    yield node
    for each in before(node):
      if key(each) not in seen:
        seen.add(key(each))
        left.append(each)


def operand_dimensions(equation: Any, index: int, dim: int) -> Sequence[Dimension]:
  """The dimensions of operands that a dimension of a result comes from.

  Args:
    equation: an equation with `primitive`, `params`, `invars` and `outvars`, also of a trace in progress.
    index: number of the result.
    dim: its dimension.
  """
  name, params = equation.primitive.name, equation.params
  if name in _CONTROL:
    return _CONTROL[name](params, index, dim)
  if name in compat.CALLS:
    return list(input_dimensions(next(compat.jaxprs_in(params)), index, dim))
  shapes = [tuple(getattr(each.aval, 'shape', ())) for each in equation.invars]
  return _RULES.get(name, _same_place)(params, shapes, equation.outvars[index].aval.shape, dim)


def input_dimensions(
  jaxpr: Any, index: int, dim: int, last: Callable[[int], int | None] = lambda number: None
) -> set[Dimension]:
  """The dimensions of a program's inputs that a dimension of a result comes from.

  Args:
    jaxpr: the program, closed or not.
    index: number of the result.
    dim: its dimension.
    last: for the body of a loop, function from the number of an input to that of the result which it is in the next turn.
  """
  parts = compat.jaxpr_parts(jaxpr)
  results = {each: (one, number) for one in parts.equations for number, each in enumerate(one.outvars)}
  inputs = {each: number for number, each in enumerate(parts.inputs)}

  def before(node: tuple[Any, int]) -> list[tuple[Any, int]]:
    atom, dim = node
    if atom in results:
      equation, number = results[atom]
      found = [(equation.invars[i], each) for i, each in operand_dimensions(equation, number, dim)]
    else:
      number = last(inputs[atom]) if atom in inputs else None
      found = [] if number is None else [(parts.outputs[number], dim)]
    return [each for each in found if not isinstance(each[0], Literal)]

  if isinstance(parts.outputs[index], Literal):
    return set()
  nodes = walk((parts.outputs[index], dim), lambda node: node, before)
  return {(inputs[atom], each) for atom, each in nodes if atom in inputs}


def _scan(params: Mapping[str, Any], index: int, dim: int) -> list[Dimension]:
  """The stacked results of a turn come from the stacked inputs of that turn."""
  constants, carried = compat.scan_counts(params)
  before, is_stacked = constants + carried, index >= carried
  if is_stacked and dim == 0:
    return [(number, 0) for number in range(before, len(compat.jaxpr_parts(params['jaxpr']).inputs))]
  last = lambda number: number - constants if constants <= number < before else None
  found = input_dimensions(params['jaxpr'], index, dim - is_stacked, last)
  return [(number, each + (number >= before)) for number, each in found]


def _while(params: Mapping[str, Any], index: int, dim: int) -> list[Dimension]:
  constants, skipped = params['body_nconsts'], params['cond_nconsts']
  last = lambda number: number - constants if number >= constants else None
  found = input_dimensions(params['body_jaxpr'], index, dim, last) | {(constants + index, dim)}
  return [(skipped + number, each) for number, each in found]


def _cond(params: Mapping[str, Any], index: int, dim: int) -> list[Dimension]:
  found = {each for branch in params['branches'] for each in input_dimensions(branch, index, dim)}
  return [(number + 1, each) for number, each in found]


def _same_place(
  params: Mapping[str, Any], shapes: Sequence[Shape], result: Shape, dim: int
) -> list[Dimension]:
  """The dimensions at the same place, of operations by element and all others without a rule."""
  del params
  alike = lambda shape: len(shape) == len(result) and shape[dim] == result[dim]
  return [(number, dim) for number, shape in enumerate(shapes) if alike(shape)]


def _first(dim: int | None) -> list[Dimension]:
  return [] if dim is None else [(0, dim)]


def _broadcast(params: Mapping[str, Any], shapes: Any, result: Shape, dim: int) -> list[Dimension]:
  places = [int(each) for each in params['broadcast_dimensions']]
  operand = places.index(dim) if dim in places else None
  return _first(None if operand is None or shapes[0][operand] != result[dim] else operand)


def _reshape(params: Any, shapes: Any, result: Shape, dim: int) -> list[Dimension]:
  del params
  before = math.prod(result[:dim])
  alike = (
    each for each, size in enumerate(shapes[0]) if size > 1 and math.prod(shapes[0][:each]) == before
  )
  return _first(next(alike, None) if result[dim] > 1 else None)


def _reduced(params: Mapping[str, Any], shapes: Any, result: Shape, dim: int) -> list[Dimension]:
  """Those that are not reduced, or squeezed."""
  del result
  axes = params['axes'] if 'axes' in params else params['dimensions']
  return _first([each for each in range(len(shapes[0])) if each not in axes][dim])


def _dot(params: Mapping[str, Any], shapes: Any, result: Shape, dim: int) -> list[Dimension]:
  """A result has the batch dimensions, then those of either operand that are not contracted."""
  del result
  (contracted, (left, right)) = params['dimension_numbers']
  if dim < len(left):
    return [(0, left[dim]), (1, right[dim])]
  free = [
    (number, each)
    for number, batch in enumerate((left, right))
    for each in range(len(shapes[number]))
    if each not in batch and each not in contracted[number]
  ]
  return [free[dim - len(left)]]


def _convolution(params: Mapping[str, Any], shapes: Any, result: Shape, dim: int) -> list[Dimension]:
  del shapes, result
  numbers = params['dimension_numbers']
  return _first(numbers.lhs_spec[0] if dim == numbers.out_spec[0] else None)


def _gather(params: Mapping[str, Any], shapes: Any, result: Shape, dim: int) -> list[Dimension]:
  """A result has the windows of the operand, and the positions of the indices."""
  numbers, rank = params['dimension_numbers'], len(result)
  if dim in numbers.offset_dims:
    absent = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    windows = [each for each in range(len(shapes[0])) if each not in absent]
    operand = windows[numbers.offset_dims.index(dim)]
    return _first(operand if params['slice_sizes'][operand] == shapes[0][operand] else None)
  position = [each for each in range(rank) if each not in numbers.offset_dims].index(dim)
  if position in numbers.start_indices_batching_dims:
    batch = numbers.operand_batching_dims[numbers.start_indices_batching_dims.index(position)]
    return [(0, batch), (1, position)]
  return [(1, position)]


def _concatenated(params: Any, shapes: Any, result: Any, dim: int) -> list[Dimension]:
  del params, result
  return [(number, dim) for number in range(len(shapes))]


def _cut(params: Any, shapes: Any, result: Any, dim: int) -> list[Dimension]:
  """A part of a dimension, or one that is padded, has another size."""
  del params, shapes, result
  return [(0, dim)]


_CONTROL = {'scan': _scan, 'while': _while, 'cond': _cond}
_REDUCED = (
  'argmax',
  'argmin',
  *(f'reduce_{each}' for each in ('sum', 'max', 'min', 'prod', 'and', 'or', 'xor')),
)
_RULES: dict[str, Any] = {
  **dict.fromkeys((*_REDUCED, 'squeeze'), _reduced),
  **dict.fromkeys(('slice', 'dynamic_slice', 'dynamic_update_slice', 'pad', 'scatter'), _cut),
  'broadcast_in_dim': _broadcast,
  'concatenate': _concatenated,
  'conv_general_dilated': _convolution,
  'dot_general': _dot,
  'gather': _gather,
  'iota': lambda *_: [],
  'reshape': _reshape,
  'transpose': lambda params, shapes, result, dim: _first(params['permutation'][dim]),
}
