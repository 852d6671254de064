"""Matrix products and convolutions: their requirements.

A dimension of the result is sharded as the result is. A contracted dimension is sharded over the axes that both
operands have there, and the result is then a partial sum along these axes. If both want an axis, XLA prefers the
partial sum. Where choices remain, the product with the fewest FLOPs per device wins, then the one that sends the
fewest bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from flax_spmd._src.estimate.dot_groups import (
  BATCH,
  CONTRACTED,
  LEFT,
  RIGHT,
  ProductDim,
  partitioned,
)
from flax_spmd._src.estimate.graph import (
  Axes,
  GraphValue,
  Op,
  Spec,
  replicated,
  shard_count,
  shard_size,
  used_axes,
)
from flax_spmd._src.estimate.halos import exchanges
from flax_spmd._src.estimate.requirements import Context, Requirement, sent_bytes
from flax_spmd._src.estimate.split_products import PART_ITEMSIZE, parts
from flax_spmd._src.hlo.flops import Window, meetings

_MAX_CHOICES = 4096  # shardings of one product to consider
_MOVED = 'an operand of a product whose shards can move to unused mesh axes'
_VECTOR = 16  # bytes of which the rows of the parts of a product are a multiple


class Factor(NamedTuple):
  """A dimension of a product.

  Attributes:
    left, right, result: index of the dimension in each array; None where the array lacks it.
    size: global size.
  """

  left: int | None
  right: int | None
  result: int | None
  size: int


def dot(op: Op, context: Context) -> Requirement:
  """A `dot_general`."""
  factors = dot_factors(op, context.values[0].shape, context.values[1].shape)
  requirement = _partitioned(factors, context, is_dot=True)
  if context.platform != 'cuda':
    return requirement
  split, padded = _split(factors, requirement, context)
  return requirement._replace(split=split, padded=padded)


def _split(
  factors: Sequence[Factor], requirement: Requirement, context: Context
) -> tuple[float, tuple[float, ...]]:
  """The bytes of the parts of a product that is split along its sum, and of its operands if they are padded for it."""
  left, right = (
    [
      -(-size // shard_count(axes, context.sizes))
      for size, axes in zip(value.shape, spec or (), strict=False)
    ]
    for value, spec in zip(context.values[:2], requirement.operands[:2])
  )
  if not left or not right:
    return 0.0, ()
  batch = math.prod(left[factor.left or 0] for factor in factors if None not in factor[:3])
  summed = math.prod(left[factor.left or 0] for factor in factors if factor.result is None)
  rows, columns = (math.prod(one) // max(1, batch * summed) for one in (left, right))
  sizes = [value.itemsize for value in (*context.values[:2], context.result)]
  number = parts(batch, rows, columns, summed, sizes)
  if number == 1:
    return 0.0, ()
  is_padded = summed % (number * _VECTOR // min(sizes[:2])) != 0
  padded = (batch * rows * summed * sizes[0], batch * columns * summed * sizes[1])
  return number * batch * rows * columns * PART_ITEMSIZE, padded if is_padded else ()


def _partitioned(factors: Sequence[Factor], context: Context, is_dot: bool = False) -> Requirement:
  """A product as XLA partitions it: as its arrays are sharded if they agree, else as their groups of devices do."""
  cheapest = _cheapest(factors, context)
  kept = zip(cheapest.operands, context.specs)
  scattered = used_axes(context.result_spec).intersection(cheapest.partial_axes)
  if not cheapest.doubt and not scattered and all(required == spec for required, spec in kept):
    return cheapest
  return _grouped(factors, context, is_dot) or cheapest


def _grouped(factors: Sequence[Factor], context: Context, is_dot: bool) -> Requirement | None:
  """A product whose operands have to be resharded; None if it is not modelled."""
  if any(context.rematerialisable):
    return None
  arrays = *context.wire_values, context.result
  dims = [ProductDim(_role(factor), factor[:3]) for factor in factors]
  plan = partitioned(dims, arrays, (*context.specs, context.result_spec), context.sizes, is_dot)
  if plan is None:
    return None
  choice = [
    plan.natural[factor.result] if factor.result is not None else plan.operands[0][factor.left or 0]
    for factor in factors
  ]
  flops = _sharded(factors, choice, context).flops
  permutes = tuple(permute for _, permute in plan.permutes)
  doubt = _MOVED if plan.is_split else ''
  return Requirement(plan.operands, plan.natural, plan.partial, flops, permutes, doubt, is_settled=True)


def _role(factor: Factor) -> int:
  if factor.result is None:
    return CONTRACTED
  if factor.right is None:
    return LEFT
  return RIGHT if factor.left is None else BATCH


def dot_factors(op: Op, left: Sequence[int], right: Sequence[int]) -> list[Factor]:
  """The dimensions of a `dot_general`: those of its result in order, then the contracted ones."""
  batch = list(zip(*(op.attributes.get(f'{side}_batching_dimensions', ()) for side in ('lhs', 'rhs'))))
  contracted = list(
    zip(*(op.attributes.get(f'{side}_contracting_dimensions', ()) for side in ('lhs', 'rhs')))
  )
  paired_left, paired_right = ({pair[side] for pair in (*batch, *contracted)} for side in (0, 1))
  pairs: list[tuple[int | None, int | None]] = [*batch]
  pairs += [(dim, None) for dim in range(len(left)) if dim not in paired_left]
  pairs += [(None, dim) for dim in range(len(right)) if dim not in paired_right]
  factors = [
    Factor(a, b, result, left[a] if a is not None else right[b or 0])
    for result, (a, b) in enumerate(pairs)
  ]
  return [*factors, *(Factor(a, b, None, left[a]) for a, b in contracted)]


def _cheapest(factors: Sequence[Factor], context: Context) -> Requirement:
  """The cheapest sharding of a product."""
  best: tuple[tuple[float, float], Requirement] | None = None
  partial = {
    axis for factor in factors if factor.result is None for axis in _contracted_axes(factor, context)
  }
  options = [_options(factor, context, partial) for factor in factors]
  for choice in itertools.islice(itertools.product(*options), _MAX_CHOICES):
    axes = [axis for chosen in choice for axis in chosen]
    if len(set(axes)) < len(axes):
      continue
    requirement = _sharded(factors, choice, context)
    cost = round(requirement.flops), sent_bytes(requirement, context)
    if best is None or cost < best[0]:
      best = cost, requirement
  if best is None:
    return _sharded(factors, replicated(len(factors)), context)
  return best[1]._replace(doubt=_doubt(best[1], context))


def _doubt(requirement: Requirement, context: Context) -> str:
  """A doubt if an operand has to give up axes, and as many devices are along axes that the product does not use.

  XLA can then move the shards of the operand to those axes, and share the product among them.
  """
  serving = {*used_axes(requirement.natural_sharding), *requirement.partial_axes}
  taken = {axis.partition('[')[0] for axis in serving}
  free = shard_count([axis for axis in context.sizes if axis not in taken], context.sizes)
  for spec, required, is_free in zip(context.specs, requirement.operands, context.rematerialisable):
    lost = used_axes(spec) & serving - used_axes(required or spec)
    if lost and not is_free and free >= shard_count(tuple(lost), context.sizes):
      return _MOVED
  return ''


def _options(factor: Factor, context: Context, partial: set[str]) -> list[Axes]:
  """The axes that a dimension may be sharded over; always with the option of none."""
  if factor.result is None:
    left, right = _operand_axes(factor, context)
    options = [_contracted_axes(factor, context), *([left, right] if left and right else [])]
  else:
    options = [tuple(axis for axis in context.result_spec[factor.result] if axis not in partial)]
  return list(dict.fromkeys([*options, ()]))


def _contracted_axes(factor: Factor, context: Context) -> Axes:
  """The axes that both operands of a contracted dimension are sharded over."""
  pairs = zip(*_operand_axes(factor, context))
  return tuple(left for left, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _operand_axes(factor: Factor, context: Context) -> tuple[Axes, Axes]:
  """The axes of a dimension in both operands; a rematerialisable operand follows the other."""
  left = context.specs[0][factor.left] if factor.left is not None else ()
  right = context.specs[1][factor.right] if factor.right is not None else ()
  left_free, right_free = context.rematerialisable[:2]
  return (right if left_free else left), (left if right_free else right)


def _sharded(factors: Sequence[Factor], choice: Sequence[Axes], context: Context) -> Requirement:
  """A product whose dimensions are sharded over the chosen axes."""
  left, right = (list(replicated(len(value.shape))) for value in context.values[:2])
  result = list(replicated(len(context.result.shape)))
  partial_axes: Axes = ()
  flops = 2.0
  for factor, axes in zip(factors, choice):
    flops *= factor.size / shard_count(axes, context.sizes)
    if factor.left is not None:
      left[factor.left] = axes
    if factor.right is not None:
      right[factor.right] = axes
    if factor.result is None:
      partial_axes += axes
    else:
      result[factor.result] = axes
  return Requirement((tuple(left), tuple(right)), tuple(result), partial_axes, flops)


def convolution(op: Op, context: Context) -> Requirement:
  """A convolution: a product over features at each position of the window."""
  inputs, kernel, outputs = (value.shape for value in (*context.values[:2], context.result))
  windows = _windows(op, kernel)
  factors, halo_dims, sizes = _features(op, inputs, kernel), {}, []
  left, right, result = op.attributes['dimension_numbers']
  for dim, window in enumerate(windows):  # of size 1, as the positions are counted below
    at, over, to = (labels.index(str(dim)) for labels in (left, right, result))
    sizes.append((inputs[at], kernel[over], outputs[to]))
    if kernel[over] > outputs[to]:  # the gradient of a kernel, whose window is the whole array
      factors.append(Factor(at, over, None, 1))
      by_kernel = Window(outputs[to], window.rhs_dilate, window.pad, window.lhs_dilate, window.stride)
      halo_dims[at] = kernel[over], by_kernel
    else:
      factors.append(Factor(at, None, to, 1))
      halo_dims[at] = outputs[to], window
  is_reversed, pads = False, op.attributes.get('padding') or ()
  is_even = pads[::2] == pads[1::2]
  groups = (op.attributes.get(f'{one}_group_count', 1) for one in ('feature', 'batch'))
  places = [
    place
    for factor in factors[-len(windows) :]
    for place in zip(factor, (*context.specs, context.result_spec))
  ]
  is_product = {*groups} == {1} and not any(spec[dim] for dim, spec in places if dim is not None)
  if _is_grouped(op, inputs):
    requirement = _sharded(factors, replicated(len(factors)), context)
  else:
    requirement = (_partitioned if is_product else _cheapest)(factors, context)
  halos = exchanges(halo_dims, requirement.operands[0] or context.specs[0], context)
  is_moved = requirement.operands[1] not in (None, context.specs[1])
  if context.platform == 'cuda':
    # XLA takes no gradient with groups for one
    is_whole = op.attributes.get('feature_group_count', 1) == 1
    is_reversed = op.attributes.get('is_reversed', False) and not is_moved and is_whole
    positions = _library_positions(sizes, windows, is_reversed, is_even)
  else:
    positions = _positions(sizes, windows)
  doubt = requirement.doubt or _doubt_of_groups(op, inputs, requirement)
  padded: tuple[float, ...] = ()
  if context.platform == 'cuda' and _library_call(sizes, windows, is_reversed, is_even) == 'padded':
    spec = requirement.operands[0] or context.specs[0]
    padded = (_padded_bytes(context.values[0], spec, sizes, windows, context),)
  return requirement._replace(
    flops=requirement.flops * positions, halos=halos, doubt=doubt, padded=padded
  )


def _doubt_of_groups(op: Op, inputs: Sequence[int], requirement: Requirement) -> str:
  """A doubt if each feature is a group, and features are another dimension of the result than of the input.

  So it is with the gradients of a kernel by example (`vmap` of `grad`). XLA takes the result for one that is sharded
  along another dimension, and exchanges it whole; in JAX 0.10.2 and 0.12.0.1, its values are wrong then.
  """
  left, _, result = op.attributes['dimension_numbers']
  before, after = left.index('f'), result.index('f')
  is_depthwise = op.attributes.get('feature_group_count', 1) == inputs[before] > 1
  if not is_depthwise or before == after or not requirement.natural_sharding[after]:
    return ''
  return 'a convolution with a group for each feature, whose result XLA exchanges'


def _is_grouped(op: Op, inputs: Sequence[int]) -> bool:
  """Whether features are in groups of several, as in a ResNeXt: XLA gathers all arrays, and shards nothing."""
  return (
    1
    < op.attributes.get('feature_group_count', 1)
    < inputs[op.attributes['dimension_numbers'][0].index('f')]
  )


def _features(op: Op, inputs: Sequence[int], kernel: Sequence[int]) -> list[Factor]:
  """The batch and feature dimensions; the groups of a gradient are a batch dimension, and features of one each too."""
  left, right, result = op.attributes['dimension_numbers']
  batch, features, contracted = left.index('b'), left.index('f'), right.index('i')
  of_kernel, of_result = right.index('o'), result.index('f')
  groups = op.attributes.get('batch_group_count', 1)
  if groups > 1:  # the gradient of a grouped kernel
    return [
      Factor(batch, of_kernel, of_result, kernel[of_kernel] * inputs[batch] // groups),
      Factor(features, contracted, None, kernel[contracted]),
    ]
  factors = [Factor(batch, None, result.index('b'), inputs[batch])]
  if op.attributes.get('feature_group_count', 1) == inputs[features] > 1:
    return [*factors, Factor(features, of_kernel, of_result, kernel[of_kernel])]
  factors.append(Factor(None, of_kernel, of_result, kernel[of_kernel]))
  return [*factors, Factor(features, contracted, None, kernel[contracted])]


def _windows(op: Op, kernel: Sequence[int]) -> list[Window]:
  """The window along each spatial dimension."""
  left, right, _ = op.attributes['dimension_numbers']
  rank = len(left) - 2
  ones = (1,) * rank
  options = (
    ('window_strides', ones),
    ('padding', (0, 0) * rank),
    ('lhs_dilation', ones),
    ('rhs_dilation', ones),
  )
  strides, pads, holes, steps = (op.attributes.get(name) or default for name, default in options)
  return [
    Window(kernel[right.index(str(dim))], strides[dim], pads[2 * dim], holes[dim], steps[dim])
    for dim in range(rank)
  ]


def _positions(sizes: Sequence[tuple[int, int, int]], windows: Sequence[Window]) -> float:
  """The number of (output, kernel) positions over an input element: neither over padding nor over a dilation hole."""
  return math.prod(meetings(at, to, window) for (at, _, to), window in zip(sizes, windows))


def _library_positions(
  sizes: Sequence[tuple[int, int, int]],
  windows: Sequence[Window],
  is_reversed: bool,
  is_even: bool,
) -> float:
  """The positions for cuDNN, to which GPUs leave convolutions.

  Zeros are stored in the holes and the padding of an input that has holes or is padded on one side more than on the
  other, and in the holes of its filter, and these count. It computes gradients without holes: of a filter, and of the input if the filter is of size 1,
  or reversed right before, and no device gets parts of it in between.
  """
  each, call = [*zip(sizes, windows)], _library_call(sizes, windows, is_reversed, is_even)
  if call == 'filter':
    return math.prod(
      _forward(at, over, Window(to, one.rhs_dilate, rhs_dilate=one.stride), one.pad)
      for (at, over, to), one in each
    )
  if call == 'input':
    return math.prod(
      _forward(
        to,
        at,
        Window(over, one.lhs_dilate, rhs_dilate=one.rhs_dilate),
        (over - 1) * one.rhs_dilate - one.pad,
      )
      for (at, over, to), one in each
    )
  if call == 'padded':
    return math.prod(((over - 1) * one.rhs_dilate + 1) * to for (_, over, to), one in each)
  return _positions(sizes, windows)


def _library_call(
  sizes: Sequence[tuple[int, int, int]],
  windows: Sequence[Window],
  is_reversed: bool,
  is_even: bool,
) -> str:
  """The gradient that cuDNN computes, of a 'filter' or an 'input'; 'padded' if it reads a padded copy; else ''."""
  has_holes = any(window.lhs_dilate > 1 for window in windows)
  if any(over > to for _, over, to in sizes):
    return '' if has_holes else 'filter'
  is_small = has_holes and all(over == 1 for _, over, _ in sizes)
  if (is_small or is_reversed) and all(window.stride == 1 for window in windows):
    return 'input'
  return '' if is_even and not has_holes else 'padded'


def _padded_bytes(
  array: GraphValue,
  spec: Spec,
  sizes: Sequence[tuple[int, int, int]],
  windows: Sequence[Window],
  context: Context,
) -> float:
  """The bytes on one device of an input with its padding and holes."""
  each = zip(sizes, windows)
  ends = [(to - 1) * one.stride + (over - 1) * one.rhs_dilate + 1 for (_, over, to), one in each]
  shard = shard_size(array.shape, spec, context.sizes) * array.itemsize
  return shard * math.prod(ends) / math.prod(at for at, _, _ in sizes)


def _forward(inputs: int, outputs: int, window: Window, low: int) -> int:
  """The positions of a convolution of which cuDNN computes a gradient.

  Its padding is the same on both sides; what one side has more than the other is stored.
  """
  high = _high(inputs, outputs, window, low)
  pad = max(0, min(low, high))
  return meetings(inputs + low + high - 2 * pad, outputs, window._replace(pad=pad))


def _high(inputs: int, outputs: int, window: Window, low: int) -> int:
  """The padding after the last input."""
  end = (outputs - 1) * window.stride + (window.size - 1) * window.rhs_dilate + 1
  return max(0, end - inputs - low)
