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

from flax_spmd._src.estimate.graph import Op, Spec, shard_count
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
    file = io.BytesIO()
    module.operation.write_bytecode(file)
    return SingleOperation(file.getvalue(), tuple(self._arguments.values()))

  def _add(self, value: Any, position: int, is_computed: bool, is_index: bool) -> None:
    """Adds a value: as an argument, or with the operations that compute it."""
    maker = self._makers.get(self._numbers[value])
    is_known = maker is not None and maker.name.partition('.')[2] in _COMPUTED
    if not is_known or not (is_computed or self._numbers[value] in self._computed):
      self._arguments.setdefault(value, position)
    elif maker not in self._copied:
      for operand in maker.operands:
        self._add(operand, position, is_index, is_index)
      self._copied[maker] = None

  def _frame(self, made: Any, sizes: Mapping[str, int]) -> str:
    """The text of the program with placeholders for the results of the operation.

    A program cannot return unevenly sharded arrays: their sums are returned.
    """
    arguments = [f'{value.type} {{{self._sharded(value)}}}' for value in self._arguments]
    lines, returned = [], []
    for number, result in enumerate(made.results):
      lines.append(f'%r{number} = "builtin.unrealized_conversion_cast"() : () -> {result.type}')
      array = ir.RankedTensorType(result.type)
      if self._is_even(result, sizes):
        returned.append((f'%r{number}', str(result.type), self._sharded(result)))
        continue
      scalar, dims = f'tensor<{array.element_type}>', ', '.join(map(str, range(array.rank)))
      lines.append(
        f'%s{number} = stablehlo.reduce(%r{number} init: %a{len(arguments)}) applies stablehlo.add '
        f'across dimensions = [{dims}] : ({result.type}, {scalar}) -> {scalar}'
      )
      arguments.append(scalar)
      returned.append((f'%s{number}', scalar, ''))
    names, types, shardings = zip(*returned)
    axes = ', '.join(f'"{axis}"={size}' for axis, size in sizes.items())
    listed = ', '.join(f'%a{number}: {text}' for number, text in enumerate(arguments))
    results = ', '.join(f'{one} {{{sharding}}}' for one, sharding in zip(types, shardings))
    body = '\n'.join(lines)
    return (
      f'module @operation attributes {{mhlo.num_partitions = {math.prod(sizes.values())} : i32, '
      f'mhlo.num_replicas = 1 : i32}} {{\nsdy.mesh @mesh = <[{axes}]>\n'
      f'func.func public @main({listed}) -> ({results}) {{\n{body}\n'
      f'return {", ".join(names)} : {", ".join(types)}\n}}\n}}'
    )

  def _is_even(self, value: Any, sizes: Mapping[str, int]) -> bool:
    spec, shape = self._specs[self._numbers[value]], ir.RankedTensorType(value.type).shape
    return all(size % shard_count(axes, sizes) == 0 for size, axes in zip(shape, spec))

  def _sharded(self, value: Any) -> str:
    spec = self._specs[self._numbers[value]]
    return f'{_SHARDING} = #sdy.sharding<@mesh, [{", ".join(map(dimension_text, spec))}]>'

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
        specs = [self._specs[self._numbers[result]] for result in one.results]
        inner = ', '.join(f'<@mesh, [{", ".join(map(dimension_text, spec))}]>' for spec in specs)
        copy.attributes[_SHARDING] = ir.Attribute.parse(f'#sdy.sharding_per_value<[{inner}]>')
        values |= dict(zip(one.results, copy.results))
    for placeholder, result in zip(placeholders, made.results):
      placeholder.results[0].replace_all_uses_with(values[result])
      placeholder.operation.erase()
