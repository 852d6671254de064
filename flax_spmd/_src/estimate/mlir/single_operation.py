"""Single operations: an operation of a step as a program of its own, sharded as it is in the step.

Its operands are the program's arguments. Those that every device can compute by itself are computed by the program, as
in the step, and so are the coordinates of a lookup that count.
"""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jaxlib.mlir import ir

from flax_spmd._src.estimate.graph import GraphValue, Op, Spec, shard_count
from flax_spmd._src.estimate.mlir.shardings import dimension_text

_COMPUTED = (  # operations that the program may have before the one in question
  'constant',
  'iota',
  'broadcast_in_dim',
  'concatenate',
  'reshape',
  'convert',
  'add',
  'subtract',
  'multiply',
  'compare',
  'select',
  'pad',
)
_SHARDING = 'sdy.sharding'
_RULE = 'sdy.sharding_rule'  # of the sharding that propagation has replaced


class SingleOperation(NamedTuple):
  """A program of one operation.

  Attributes:
    code: MLIR bytecode.
    positions: by argument of the program, the position of the operand that it is, or that is computed from it.
  """

  code: bytes
  positions: tuple[int, ...]


class SingleOperationBuilder:
  """Builds the program of one operation. It needs the context of the module.

  Args:
    makers: by value, the operation of the module that computes it.
    numbers: number of each value of the module.
    specs: sharding of each value.
    computed: values that every device can compute by itself.
  """

  def __init__(
    self,
    makers: Mapping[int, Any],
    numbers: Mapping[Any, int],
    specs: Sequence[Spec],
    computed: Collection[int],
  ):
    self._makers, self._numbers, self._specs, self._computed = makers, numbers, specs, computed
    self._arguments: dict[Any, int] = {}  # values of the module, with the position of the operand
    self._copied: dict[Any, None] = {}  # operations of the module before the one in question

  def build(
    self, op: Op, shapes: Sequence[Sequence[int]], sizes: Mapping[str, int]
  ) -> SingleOperation | None:
    """The program of an operation; None if the module no longer has it as it is.

    Args:
      op: the operation.
      shapes: shape of each operand; another one than in the module is the operand of a pad.
      sizes: size per mesh axis.
    """
    made = self._makers.get(op.results[0])
    if made is None or len(made.operands) != len(op.operands):
      return None
    indices = len(op.operands) // 2 if 'iota_dims' in op.attributes else -1
    for position, (value, shape) in enumerate(zip(made.operands, shapes)):
      is_padded = tuple(ir.RankedTensorType(value.type).shape) != tuple(shape)
      self._add(value, position, is_padded or position == indices, position == indices)
    module = ir.Module.parse(self._frame(made, sizes))
    self._fill(module, made)
    return SingleOperation(bytecode(module), tuple(self._arguments.values()))

  def _add(self, value: Any, position: int, is_computed: bool, is_index: bool) -> None:
    """Adds a value: as an argument, or with the operations that compute it."""
    maker = self._makers.get(self._numbers[value])
    is_needed = is_computed or self._numbers[value] in self._computed
    if maker is None or maker.name.partition('.')[2] not in _COMPUTED or not is_needed:
      self._arguments.setdefault(value, position)
    elif maker not in self._copied:
      for operand in maker.operands:
        self._add(operand, position, is_index, is_index)
      self._copied[maker] = None

  def _frame(self, made: Any, sizes: Mapping[str, int]) -> str:
    """The text of the program with placeholders for the results of the operation."""
    lines = [
      f'%r{number} = "builtin.unrealized_conversion_cast"() : () -> {result.type}'
      for number, result in enumerate(made.results)
    ]
    arguments, results = (
      [(each.type, self._spec(each)) for each in one] for one in (self._arguments, made.results)
    )
    return _program(arguments, lines, results, sizes)

  def _spec(self, value: Any) -> Spec:
    return self._specs[self._numbers[value]]

  def _fill(self, module: Any, made: Any) -> None:
    """Puts the operations in the place of the placeholders."""
    main = next(view for view in module.body.operations if view.operation.name == 'func.func')
    block = main.regions[0].blocks[0]
    placeholders = list(block.operations)[: len(made.results)]
    values = {value: block.arguments[number] for number, value in enumerate(self._arguments)}
    with ir.InsertionPoint(placeholders[0]):
      for one in (*self._copied, made):
        copy = one.clone()
        for number, operand in enumerate(one.operands):
          copy.operands[number] = values[operand]
        if _RULE in copy.attributes:
          del copy.attributes[_RULE]
        inner = ', '.join(_sharding_text(self._spec(result)) for result in one.results)
        copy.attributes[_SHARDING] = ir.Attribute.parse(f'#sdy.sharding_per_value<[{inner}]>')
        values |= dict(zip(one.results, copy.results))
    for placeholder, result in zip(placeholders, made.results):
      placeholder.results[0].replace_all_uses_with(values[result])
      placeholder.operation.erase()


def reshard_program(value: GraphValue, before: Spec, after: Spec, sizes: Mapping[str, int]) -> bytes:
  """The program that reshards an array, as MLIR bytecode. It needs a context.

  Args:
    value: shape and dtype of the array.
    before, after: mesh axes per dimension.
    sizes: size per mesh axis.
  """
  array = ir.Type.parse(f'tensor<{"".join(f"{size}x" for size in value.shape)}{value.dtype}>')
  line = f'%r0 = sdy.sharding_constraint %a0 {_sharding_text(after)} : {array}'
  return bytecode(ir.Module.parse(_program([(array, before)], [line], [(array, after)], sizes)))


def _program(
  arguments: Sequence[tuple[Any, Spec]],
  lines: Sequence[str],
  results: Sequence[tuple[Any, Spec]],
  sizes: Mapping[str, int],
) -> str:
  """The text of a program; its lines compute `%r0`, `%r1`, ... from `%a0`, `%a1`, ...

  A program cannot return unevenly sharded arrays: their sums are returned.
  """
  taken, returned, sums = [], [], []
  for number, (array, spec) in enumerate(arguments):
    taken.append(f'%a{number}: {array} {{{_SHARDING} = #sdy.sharding{_sharding_text(spec)}}}')
  for number, (array, spec) in enumerate(results):
    ranked = ir.RankedTensorType(array)
    if all(size % shard_count(axes, sizes) == 0 for size, axes in zip(ranked.shape, spec)):
      returned.append((f'%r{number}', array, f' {{{_SHARDING} = #sdy.sharding{_sharding_text(spec)}}}'))
      continue
    scalar, dims = f'tensor<{ranked.element_type}>', ', '.join(map(str, range(ranked.rank)))
    sums.append(
      f'%s{number} = stablehlo.reduce(%r{number} init: %z{number}) applies stablehlo.add '
      f'across dimensions = [{dims}] : ({array}, {scalar}) -> {scalar}'
    )
    taken.append(f'%z{number}: {scalar}')
    returned.append((f'%s{number}', scalar, ''))
  axes = ', '.join(f'"{axis}"={size}' for axis, size in sizes.items())
  devices = math.prod(sizes.values())
  return '\n'.join(
    [
      f'module @operation attributes {{mhlo.num_partitions = {devices} : i32, mhlo.num_replicas = 1 : i32}} {{',
      f'sdy.mesh @mesh = <[{axes}]>',
      f'func.func public @main({", ".join(taken)}) -> ({", ".join(f"{array}{text}" for _, array, text in returned)}) {{',
      *lines,
      *sums,
      f'return {", ".join(name for name, *_ in returned)} : {", ".join(str(array) for _, array, _ in returned)}',
      '}}',
    ]
  )


def _sharding_text(spec: Spec) -> str:
  return f'<@mesh, [{", ".join(map(dimension_text, spec))}]>'


def bytecode(module: Any) -> bytes:
  file = io.BytesIO()
  module.operation.write_bytecode(file)
  return file.getvalue()
