"""Inlining and simplification: a module without calls, and without operations that no sharding depends on.

Each operation costs time in every propagation, so those that cannot matter are removed once. Where shardings meet that do
not fit together, the first one wins; so the simplifications and the order are XLA's.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxlib.mlir import ir

from flax_spmd._src.mlir.equal import take_number

# Elementwise operations on two arrays, in a dtype that can be negated.
_BINARY = frozenset(
  f'stablehlo.{kind}'
  for kind in ('add', 'divide', 'maximum', 'minimum', 'multiply', 'power', 'subtract')
)
_UNARY = 'stablehlo.negate'
_ELEMENTWISE = _BINARY | {  # on arrays of the result's dtype
  f'stablehlo.{kind}'
  for kind in (
    'negate',
    'sqrt',
    'rsqrt',
    'exponential',
    'log',
    'log_plus_one',
    'tanh',
    'logistic',
    'abs',
    'floor',
  )
}
_CHEAP_CHLO = ('chlo.square', 'chlo.conj', 'chlo.next_after', 'chlo.erf')
_BROADCAST = 'stablehlo.broadcast_in_dim'
_OF_UNITS = ('stablehlo.reduce', _BROADCAST)  # of dimensions of size 1: a reshape
_OTHER_SIDE = {'lhs': 'rhs', 'rhs': 'lhs'}
_COPIES = {  # operations whose result may be one of their operands, by its position
  'stablehlo.convert': 0,
  'stablehlo.reshape': 0,
  'stablehlo.dynamic_slice': 0,
  'stablehlo.dynamic_update_slice': 1,
}
_CUSTOM_CALL = 'stablehlo.custom_call'
_EFFECTS = frozenset(f'stablehlo.{kind}' for kind in ('infeed', 'outfeed', 'recv', 'send'))
_ADDITIVE = ('stablehlo.add', 'stablehlo.subtract')  # left alone, as they also add partial sums


def inline(module: Any) -> None:
  """Inlines calls and loops that run once, and drops copies."""
  inline_all(module)
  inline_single_iterations(module)
  drop_copies(module)


def simplify(module: Any) -> None:
  """Simplifies an inlined module."""
  replace_chlo(module)
  add_scan_rules(module)
  drop_uniform(module)
  drop_selects(module)
  scatter_into_sums(module)
  transpose_products(module)
  erase_dead(module)
  reshape_units(module)


def inline_all(module: Any) -> None:
  """Inlines every call, and erases all functions but `main`."""
  functions = {
    str(view.operation.attributes['sym_name']).strip('"'): view.operation
    for view in module.regions[0].blocks[0].operations
    if view.operation.name == 'func.func'
  }
  done: set[str] = set()

  def inline(name: str) -> None:
    if name in done:
      return
    done.add(name)
    for call in [op for op in _all_ops(functions[name]) if op.name == 'func.call']:
      callee = str(call.attributes['callee']).removeprefix('@').strip('"')
      inline(callee)
      _inline(call, functions[callee].regions[0].blocks[0])

  inline('main')
  for name, function in functions.items():
    if name != 'main':
      function.erase()


def _all_ops(op: Any) -> Iterator[Any]:
  for region in op.regions:
    for block in region.blocks:
      for view in list(block.operations):
        yield view.operation
        yield from _all_ops(view.operation)


def inline_single_iterations(module: Any) -> None:
  """Replaces each loop that runs once by its body, as XLA does before propagation: a scan over one layer, say."""
  for op in reversed(list(_all_ops(module))):  # inner loops first
    if op.name == 'stablehlo.while' and _runs_once(op):
      _inline(op, op.regions[1].blocks[0])


def _runs_once(loop: Any) -> bool:
  """Whether a loop's condition is that a counter is less than its start plus 1."""
  condition = loop.regions[0].blocks[0]
  compared = condition.operations[len(condition.operations) - 1].operation.operands[0].owner
  if isinstance(compared, ir.Block) or compared.name != 'stablehlo.compare':
    return False
  if 'LT' not in str(compared.operation.attributes['comparison_direction']):
    return False
  outer = [
    loop.operands[ir.BlockArgument(value).arg_number] if isinstance(value.owner, ir.Block) else value
    for value in compared.operation.operands
  ]
  ends = list(map(_constant, outer))
  return all(end is not None for end in ends) and operator.sub(*map(_number, reversed(ends))) == 1


def _inline(call: Any, block: Any) -> None:
  """Replaces a call, or a loop, by a copy of a block; the location of a call is the caller of each operation."""
  substitutes = dict(zip(block.arguments, call.operands))
  before = ir.InsertionPoint(call)
  for view in block.operations:
    op = view.operation
    if op.name.endswith('.return'):
      for result, value in zip(call.results, op.operands):
        result.replace_all_uses_with(substitutes.get(value, value))
      break
    copy = op.clone(before)
    for each in (copy, *_all_ops(copy)) if call.name == 'func.call' else ():
      each.location = ir.Location.callsite(each.location, [call.location])
    _replace_operands(copy, substitutes)
    substitutes |= dict(zip(op.results, copy.results))
  call.erase()


def reshape_units(module: Any) -> None:
  """Replaces reductions and broadcasts of dimensions of size 1 by reshapes, as XLA does before propagation.

  Shardy lets shardings through reshapes and elementwise operations first, then through all others.
  """
  for op in list(_all_ops(module)):
    if op.name not in _OF_UNITS or len(op.results) != 1:
      continue
    before, after = (_shape(value) for value in (op.operands[0], op.results[0]))
    kept = [size for size in before if size != 1]
    if (
      len(before) == len(after)
      or not min(before, after)
      or kept != [size for size in after if size != 1]
    ):
      continue
    if op.name == _BROADCAST and not _is_sorted(op.attributes['broadcast_dimensions']):
      continue
    with ir.InsertionPoint(op):
      substitute = ir.Operation.create(
        'stablehlo.reshape', results=[op.results[0].type], operands=[op.operands[0]], loc=op.location
      )
    take_number(substitute, op)
    op.results[0].replace_all_uses_with(substitute.results[0])
    op.erase()


def _is_sorted(dimensions: Any) -> bool:
  return (listed := list(ir.DenseI64ArrayAttr(dimensions))) == sorted(listed)


def order_by_operands(block: Any) -> None:
  """Puts a block's operations in the order of XLA: each after its operands, from the first result on."""
  ops = [view.operation for view in block.operations]
  last = ops[-1]
  placed: set[Any] = set()
  stack = [(op, False) for op in ops]  # those that no result depends on come at the end
  while stack:
    op, is_ready = stack.pop()
    if op in placed:
      continue
    if is_ready:
      placed.add(op)
      if op != last:
        op.move_before(last)
      continue
    stack.append((op, True))
    values = [*op.operands, *(value for inner in _all_ops(op) for value in inner.operands)]
    owners = [value.owner for value in values if not isinstance(value.owner, ir.Block)]
    stack += [(owner.operation, False) for owner in reversed(owners) if owner.operation.block == block]
  for op in ops:
    for region in op.regions:
      for inner in region.blocks:
        order_by_operands(inner)


def _replace_operands(op: Any, substitutes: Mapping[Any, Any]) -> None:
  for index, value in enumerate(op.operands):
    if value in substitutes:
      op.operands[index] = substitutes[value]
  for inner in _all_ops(op):
    for index, value in enumerate(inner.operands):
      if value in substitutes:
        inner.operands[index] = substitutes[value]


def replace_chlo(module: Any) -> None:
  """Replaces elementwise CHLO operations (`square`, `erf`, ...), which Shardy does not know, by ones that it knows.

  XLA expands them before it propagates shardings. Here only their cost matters: a conversion is cheap, and a sine is
  stored if it is used more than once, as are the long polynomials of `erfc`, `lgamma` and the like.
  """
  for op in list(_all_ops(module)):
    if op.name.startswith('chlo.') and len(op.results) == 1 and _is_elementwise(op):
      expensive = op.name not in _CHEAP_CHLO and not _is_boolean(op.results[0])
      with ir.InsertionPoint(op):
        substitute = ir.Operation.create(
          'stablehlo.sine' if expensive else 'stablehlo.convert',
          results=[op.results[0].type],
          operands=[op.operands[0]],
          loc=op.location,
        )
      take_number(substitute, op)
      op.results[0].replace_all_uses_with(substitute.results[0])
      op.erase()


def add_scan_rules(module: Any) -> None:
  """Gives scans along a dimension, which Shardy of the package does not know, their rules: all dimensions are sharded alike."""
  for op in _all_ops(module):
    if op.name == 'chlo.scan':
      rank, dim = len(_shape(op.results[0])), ir.IntegerAttr(op.attributes['dimension']).value
      whole, carry = (
        f'[{", ".join(_factor(number) for number in range(rank) if number != without)}]'
        for without in (rank, dim)
      )
      arrays, results = (
        ', '.join(whole if len(_shape(value)) == rank else carry for value in values)
        for values in (op.operands, op.results)
      )
      sizes = ', '.join(f'{_factor(one)}={size}' for one, size in enumerate(_shape(op.results[0])))
      text = f'#sdy.op_sharding_rule<({arrays})->({results}) {{{sizes}}}>'
      op.attributes['sdy.sharding_rule'] = ir.Attribute.parse(text)


def _factor(number: int) -> str:
  """Shardy's name of a factor: i to z, then z_1 and so on."""
  return chr(ord('i') + number) if number < 18 else f'z_{number - 17}'


def _is_elementwise(op: Any) -> bool:
  return all(_shape(value) == _shape(op.results[0]) for value in op.operands)


def drop_uniform(module: Any) -> None:
  """Drops operands with one number everywhere, such as `0.9` in `0.9 * mu`, or a learning rate.

  They are replicated under every layout. A negation replaces the operation: as many FLOPs, in the same dtype, on
  one operand. Consecutive negations are merged.
  """
  known: dict[Any, bool] = {}
  for op in list(_all_ops(module)):
    if op.name not in _BINARY or not _has_shape(op.results[0]) or _is_boolean(op.results[0]):
      continue
    arrays = [value for value in op.operands if not _is_uniform(value, known)]
    if len(arrays) == 1:
      with ir.InsertionPoint(op):
        substitute = ir.Operation.create(
          _UNARY,
          results=[op.results[0].type],
          operands=[_skip_negation(arrays[0])],
          loc=op.location,
        )
      take_number(substitute, op)
      op.results[0].replace_all_uses_with(substitute.results[0])
      op.erase()
    elif op.name not in _ADDITIVE:
      for index, value in enumerate(op.operands):
        op.operands[index] = _skip_negation(value)


def merge_unary(ops: Iterable[Any], numbers: Mapping[Any, int]) -> list[tuple[int, int]]:
  """Erases elementwise operations on one array, whose results are sharded as their operand.

  Those beside a constraint, an argument or a result of a block are left alone. Where two shardings meet at one that
  is erased, its neighbour is resharded in its place.

  Args:
    ops: the operations, each after those of its operands.
    numbers: number of each value.

  Returns:
    The numbers of result and operand of each operation that was erased, in order.
  """
  alike = [op for op in ops if op.name in _ELEMENTWISE and _is_sharded_alike(op)]
  pairs = [(numbers[op.results[0]], numbers[op.operands[0]]) for op in alike]
  for op in alike:
    op.results[0].replace_all_uses_with(op.operands[0])
  for op in reversed(alike):
    op.erase()
  return pairs


def _is_sharded_alike(op: Any) -> bool:
  """Whether an operation has one operand, whose dtype its result has, and no constraint is on either."""
  value, result = op.operands[0], op.results[0]
  is_unary = all(other == value for other in op.operands)
  if not is_unary or isinstance(value.owner, ir.Block) or value.type != result.type or _is_marked(op):
    return False
  owner = value.owner.operation
  is_plain = owner.name.startswith('stablehlo.') and len(owner.results) == 1 and owner.block == op.block
  return is_plain and not _is_marked(owner) and not any(_ends(use.owner) for use in result.uses)


def _is_marked(op: Any) -> bool:
  return 'sdy.sharding' in op.attributes


def _ends(op: Any) -> bool:
  """Whether an operation returns values from a block, or constrains them."""
  return op.name.startswith('sdy.') or op.name.endswith('.return')


def drop_selects(module: Any) -> None:
  """Drops selections between equal constants, as XLA does: that of the old values of zeros by `x.at[...].set(y)`.

  They would shard the mask, here with the ids of all rows, as the array.
  """
  for op in list(_all_ops(module)):
    if op.name == 'stablehlo.select':
      one, other = (_constant(value) for value in op.operands[1:3])
      if one is not None and other is not None and one == other:
        op.results[0].replace_all_uses_with(op.operands[1])


def drop_copies(module: Any) -> None:
  """Drops conversions of arrays to the dtype that they have, slices and updates of whole arrays, and reshapes back."""
  for op in list(_all_ops(module)):
    if op.name in _COPIES:
      value = op.operands[_COPIES[op.name]]
      while op.name == 'stablehlo.reshape' and value.type != op.results[0].type and _is_reshaped(value):
        value = value.owner.operation.operands[0]
      if value.type == op.results[0].type:
        op.results[0].replace_all_uses_with(value)
        op.erase()


def _is_reshaped(value: Any) -> bool:
  """Whether a value has the elements of another one, in their order."""
  op = value.owner
  if isinstance(op, ir.Block) or op.name not in ('stablehlo.reshape', _BROADCAST):
    return False
  if op.name == _BROADCAST and not _is_sorted(op.operation.attributes['broadcast_dimensions']):
    return False
  return math.prod(_shape(op.operation.operands[0])) == math.prod(_shape(value))


def slice_before_reshapes(module: Any, any_rows: bool) -> None:
  """Slices arrays before they are reshaped, as the compilers for GPUs and TPUs do: minibatches of a batch, say.

  A batch of 4 minibatches may be sharded in 4 parts that have a minibatch each. Rows of the batch itself stay sharded
  over all devices. The CPU's compiler slices first once it has partitioned.

  Args:
    module: the module.
    any_rows: whether the compiler does so for any rows of an array, and not only for the first ones, from 0 on.
  """
  for op in list(_all_ops(module)):
    if op.name != 'stablehlo.slice':
      continue
    source = op.operands[0]
    while not isinstance(source.owner, ir.Block) and source.owner.name == 'stablehlo.reshape':
      if source.owner.operation.block != op.block:
        break
      source = source.owner.operation.operands[0]
    rows = None if source == op.operands[0] else _rows(op, source)
    if rows is None or (rows[0] and not any_rows):
      continue
    rank, (first, last) = len(_shape(source)), rows
    lead = next((dim for dim, size in enumerate(_shape(source)) if size > 1), 0)
    limits = [*_shape(source)]
    limits[lead] = last
    starts = [first if dim == lead else 0 for dim in range(rank)]
    shape = [last - first if dim == lead else size for dim, size in enumerate(limits)]
    edges = {'start_indices': starts, 'limit_indices': limits, 'strides': [1] * rank}
    element = ir.RankedTensorType(source.type).element_type
    with ir.InsertionPoint(op):
      part = ir.Operation.create(
        op.name,
        results=[ir.RankedTensorType.get(shape, element)],
        operands=[source],
        attributes={name: ir.DenseI64ArrayAttr.get(values) for name, values in edges.items()},
        loc=op.location,
      )
      reshaped = ir.Operation.create(
        'stablehlo.reshape', results=[op.results[0].type], operands=[part.results[0]], loc=op.location
      )
    op.results[0].replace_all_uses_with(reshaped.results[0])
    op.erase()


def _rows(op: Any, source: Any) -> tuple[int, int] | None:
  """The range of the first dimension of `source` of more than 1 that a slice of its reshaped copy has; None if it has none."""
  starts, limits, strides = (
    list(ir.DenseI64ArrayAttr(op.attributes[name]))
    for name in ('start_indices', 'limit_indices', 'strides')
  )
  sizes, of_source = _shape(op.operands[0]), [size for size in _shape(source) if size != 1]
  others = [*zip(starts, limits, sizes)][1:]
  is_of_rows = of_source and set(strides) == {1} and not any(lo or hi != size for lo, hi, size in others)
  if not is_of_rows or not math.prod(of_source):
    return None
  row, step = math.prod(of_source[1:]), math.prod(sizes[1:])
  edges = [each * step for each in (starts[0], limits[0])]
  return None if any(edge % row for edge in edges) else (edges[0] // row, edges[1] // row)


def transpose_products(module: Any) -> None:
  """Replaces the transpose of a product of two dimensions by the product of its operands in the other order, as XLA does.

  So it is with the gradient of a matrix, whose sharding reaches the product before those of its operands do.
  """
  for op in list(_all_ops(module)):
    if op.name != 'stablehlo.transpose' or len(_shape(op.results[0])) != 2 or _is_copied(op):
      continue
    product = op.operands[0].owner.operation
    numbers = str(product.attributes['dot_dimension_numbers'])
    numbers = re.sub('lhs|rhs', lambda side: _OTHER_SIDE[side[0]], numbers)
    sides = re.findall(r'(\w+) = (\[[^\]]*\])', numbers)
    numbers = ', '.join(f'{name} = {dims}' for name, dims in sorted(sides))
    attributes = {name: product.attributes[name] for name in product.attributes}
    attributes['dot_dimension_numbers'] = ir.Attribute.parse(f'#stablehlo.dot<{numbers}>')
    with ir.InsertionPoint(product):
      substitute = ir.Operation.create(
        product.name,
        results=[op.results[0].type],
        operands=[product.operands[1], product.operands[0]],
        attributes=attributes,
        loc=product.location,
      )
    take_number(substitute, op)
    op.results[0].replace_all_uses_with(substitute.results[0])
    op.erase()
    product.erase()


def _is_copied(transpose: Any) -> bool:
  """Whether the operand of a transpose is no product, or has other uses, or is not transposed."""
  value = transpose.operands[0]
  product = value.owner
  if isinstance(product, ir.Block) or product.name != 'stablehlo.dot_general':
    return True
  is_kept = len(list(value.uses)) > 1 or _is_sorted(transpose.attributes['permutation'])
  return is_kept or 'batching' in str(product.attributes['dot_dimension_numbers'])


def scatter_into_sums(module: Any) -> None:
  """Scatters onto a sum what is scattered onto one of its operands, as XLA does: the result is sharded as the sum.

  So it is with the gradient of logits that a lookup of labels and a normalizer read. A constraint between the two, as of
  the batch, then is one of the result.
  """
  for op in list(_all_ops(module)):
    if op.name != 'stablehlo.add':
      continue
    constraints = [_constraint_of(value) for value in op.operands]
    scatters = [
      _scatter_of(constraint.operands[0] if constraint else value)
      for constraint, value in zip(constraints, op.operands)
    ]
    if all(scatters) or not any(scatters):  # XLA makes one scatter of two
      continue
    scatter, other = scatters[0] or scatters[1], op.operands[1 if scatters[0] else 0]
    constraint = constraints[0 if scatters[0] else 1]
    start = scatter.operands[0]
    with ir.InsertionPoint(op):
      total = other
      if not _is_zero(start):
        added = op.clone()
        take_number(added, None)
        added.operands[0], added.operands[1] = other, start
        total = added.results[0]
      substitute = scatter.clone()
      take_number(substitute, None if constraint else op)
      substitute.operands[0] = total
      result = substitute.results[0]
      if constraint:
        copy = constraint.clone()
        take_number(copy, op)
        copy.operands[0], result = result, copy.results[0]
    op.results[0].replace_all_uses_with(result)
    for replaced in (op, constraint, scatter):
      if replaced:
        replaced.erase()


def _constraint_of(value: Any) -> Any:
  """The sharding constraint whose result a value is, if it has one use; else None."""
  op = value.owner
  if isinstance(op, ir.Block) or op.name != 'sdy.sharding_constraint' or len(list(value.uses)) > 1:
    return None
  return op.operation


def _scatter_of(value: Any) -> Any:
  """The operation whose result a value is, if it adds updates to an array and has one use; else None."""
  op = value.owner
  if isinstance(op, ir.Block) or op.name != 'stablehlo.scatter' or len(op.operands) != 3:
    return None
  first, *others = (view.operation.name for view in op.operation.regions[0].blocks[0].operations)
  is_sum = first == 'stablehlo.add' and len(others) == 1 and len(list(value.uses)) == 1
  return op.operation if is_sum else None


def _is_zero(value: Any) -> bool:
  number = _constant(value)
  return number is not None and not _number(number)


def _number(attribute: Any) -> float:
  return float(str(attribute).split(' : ')[0])


def erase_dead(module: Any) -> None:
  """Erases operations without uses: Shardy would too, and the graph, which is read before, would not match any more."""
  for op in reversed(list(_all_ops(module))):
    is_dead = len(op.results) and not any(list(value.uses) for value in op.results)
    if is_dead and not any(map(_has_effects, (op, *_all_ops(op)))):
      op.erase()


def _has_effects(op: Any) -> bool:
  if op.name == _CUSTOM_CALL:
    return 'has_side_effect' in op.attributes and ir.BoolAttr(op.attributes['has_side_effect']).value
  return op.name in _EFFECTS


def _constant(value: Any) -> Any:
  """The number that an array has everywhere, as an attribute; None if it is not known, or complex."""
  op = value.owner
  while not isinstance(op, ir.Block) and op.name == _BROADCAST:
    op = op.operation.operands[0].owner
  if isinstance(op, ir.Block) or op.name != 'stablehlo.constant':
    return None
  # the bindings have no class for complex numbers
  if isinstance(ir.RankedTensorType(value.type).element_type, ir.ComplexType):
    return None
  number = ir.DenseElementsAttr(op.attributes['value'])
  return number.get_splat_value() if number.is_splat else None


def _skip_negation(value: Any) -> Any:
  """The operand of a negation with no other use; otherwise the value itself."""
  op = value.owner
  if isinstance(op, ir.Block) or op.name != _UNARY or len(list(value.uses)) > 1:
    return value
  return op.operation.operands[0]


def _has_shape(value: Any) -> bool:
  return bool(_shape(value))


def _shape(value: Any) -> list[int]:
  return list(ir.RankedTensorType(value.type).shape)


def _is_boolean(value: Any) -> bool:
  return str(ir.RankedTensorType(value.type).element_type) == 'i1'  # which has no negation


def _is_uniform(value: Any, known: dict[Any, bool]) -> bool:
  """Whether a value is a scalar or a broadcast one, and no reduction of an array."""
  if value not in known:
    op = value.owner
    if isinstance(op, ir.Block):
      known[value] = not _has_shape(value)
    elif op.name == _BROADCAST or not _has_shape(value):
      op = op.operation
      pure = not len(op.regions) and op.name.startswith('stablehlo.')
      known[value] = pure and all(_is_uniform(operand, known) for operand in op.operands)
    else:
      known[value] = False
  return known[value]
