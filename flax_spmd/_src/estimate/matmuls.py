"""Matrix products and convolutions: their requirements.

A dimension of the result is sharded as the result is. A contracted dimension is sharded over the axes that both
operands have there, and the result is then a partial sum along these axes. If both want an axis, XLA prefers the
partial sum. Where choices remain, the product with the fewest FLOPs per device wins, then the one that sends the
fewest bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from flax_spmd._src.estimate.graph import Axes, Op, replicated, shard_count
from flax_spmd._src.estimate.requirements import Context, Requirement, sent_bytes
from flax_spmd._src.hlo.flops import Window, meetings

_MAX_CHOICES = 4096  # shardings of one product to consider


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
  return _cheapest(factors, context)


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
  return best[1]


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
  """A convolution: a product over features at each position of the window, with only batch and features sharded."""
  left, right, result = op.attributes['dimension_numbers']
  inputs, kernel, outputs = (value.shape for value in (*context.values[:2], context.result))
  factors = [
    Factor(left.index('b'), None, result.index('b'), inputs[left.index('b')]),
    Factor(None, right.index('o'), result.index('f'), kernel[right.index('o')]),
    Factor(left.index('f'), right.index('i'), None, kernel[right.index('i')]),
  ]
  requirement = _cheapest(factors, context)
  return requirement._replace(flops=requirement.flops * _positions(op, inputs, kernel, outputs))


def _positions(op: Op, inputs: Sequence[int], kernel: Sequence[int], outputs: Sequence[int]) -> float:
  """The number of (output, kernel) positions over an input element: neither over padding nor over a dilation hole."""
  left, right, result = op.attributes['dimension_numbers']
  rank = len(left) - 2
  ones = (1,) * rank
  options = (
    ('window_strides', ones),
    ('padding', (0, 0) * rank),
    ('lhs_dilation', ones),
    ('rhs_dilation', ones),
  )
  strides, pads, holes, steps = (op.attributes.get(name) or default for name, default in options)
  count = 1
  for dim in range(rank):
    window = Window(kernel[right.index(str(dim))], strides[dim], pads[2 * dim], holes[dim], steps[dim])
    count *= meetings(inputs[left.index(str(dim))], outputs[result.index(str(dim))], window)
  return count
