"""Products: how products of matrices and convolutions are divided.

A dimension of the result is divided as the result has to be, a contracted one as both sides are, which leaves
sums to be added up; where both want an axis, XLA sums. Of what is left to choose, the least work is taken, and
of that what sends least.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from flax_spmd._src.estimate.graph import Axes, Op, pieces, whole
from flax_spmd._src.estimate.requirements import Need, Seen, wire
from flax_spmd._src.hlo.flops import Window, meetings

_CHOICES = 4096  # ways to divide one product that are looked at


class Factor(NamedTuple):
  """A dimension of a product: where it is in the left, the right, and the result, and its size."""

  left: int | None
  right: int | None
  result: int | None
  size: int


def dot(op: Op, seen: Seen) -> Need:
  """A `dot_general`."""
  return _product(dot_factors(op, seen.values[0].shape, seen.values[1].shape), seen)


def dot_factors(op: Op, left: Sequence[int], right: Sequence[int]) -> list[Factor]:
  """The dimensions of a `dot_general`, in the order of its result, the contracted ones at the end."""
  batch = list(zip(*(op.details.get(f'{side}_batching_dimensions', ()) for side in ('lhs', 'rhs'))))
  contracted = list(
    zip(*(op.details.get(f'{side}_contracting_dimensions', ()) for side in ('lhs', 'rhs')))
  )
  taken_left, taken_right = ({pair[side] for pair in (*batch, *contracted)} for side in (0, 1))
  pairs: list[tuple[int | None, int | None]] = [*batch]
  pairs += [(dim, None) for dim in range(len(left)) if dim not in taken_left]
  pairs += [(None, dim) for dim in range(len(right)) if dim not in taken_right]
  found = [
    Factor(a, b, place, left[a] if a is not None else right[b or 0])
    for place, (a, b) in enumerate(pairs)
  ]
  return [*found, *(Factor(a, b, None, left[a]) for a, b in contracted)]


def _product(factors: Sequence[Factor], seen: Seen) -> Need:
  """The cheapest way to divide a product."""
  best: tuple[tuple[float, float], Need] | None = None
  summed = {axis for factor in factors if factor.result is None for axis in _contracted(factor, seen)}
  options = [_options(factor, seen, summed) for factor in factors]
  for choice in itertools.islice(itertools.product(*options), _CHOICES):
    axes = [axis for chosen in choice for axis in chosen]
    if len(set(axes)) < len(axes):
      continue
    found = _divided(factors, choice, seen)
    price = round(found.flops), wire(found, seen)
    if best is None or price < best[0]:
      best = price, found
  if best is None:
    return _divided(factors, whole(len(factors)), seen)
  return best[1]


def _options(factor: Factor, seen: Seen, summed: set[str]) -> list[Axes]:
  """The axes that a dimension may be divided over: of the result's those along which nothing is summed; or none."""
  if factor.result is None:
    left, right = _sides(factor, seen)
    found = [_contracted(factor, seen), *([left, right] if left and right else [])]
  else:
    found = [tuple(axis for axis in seen.after[factor.result] if axis not in summed)]
  return list(dict.fromkeys([*found, ()]))


def _contracted(factor: Factor, seen: Seen) -> Axes:
  """The axes that a contracted dimension is divided over on both sides, and so can stay divided over."""
  pairs = zip(*_sides(factor, seen))
  return tuple(left for left, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _sides(factor: Factor, seen: Seen) -> tuple[Axes, Axes]:
  """How a dimension is divided left and right; what costs nothing to divide goes along with the other."""
  left = seen.dims[0][factor.left] if factor.left is not None else ()
  right = seen.dims[1][factor.right] if factor.right is not None else ()
  return (right if seen.free[0] else left), (left if seen.free[1] else right)


def _divided(factors: Sequence[Factor], choice: Sequence[Axes], seen: Seen) -> Need:
  """A product with its dimensions divided over some axes."""
  left, right = (list(whole(len(value.shape))) for value in seen.values[:2])
  result = list(whole(len(seen.result.shape)))
  parts: Axes = ()
  flops = 2.0
  for factor, axes in zip(factors, choice):
    flops *= factor.size / pieces(axes, seen.sizes)
    if factor.left is not None:
      left[factor.left] = axes
    if factor.right is not None:
      right[factor.right] = axes
    if factor.result is None:
      parts += axes
    else:
      result[factor.result] = axes
  return Need((tuple(left), tuple(right)), tuple(result), parts, flops)


def convolution(op: Op, seen: Seen) -> Need:
  """A convolution: a product over features, at every place at which the window meets the input."""
  left, right, result = op.details['dimension_numbers']
  inputs, kernel, outputs = (value.shape for value in (*seen.values[:2], seen.result))
  factors = [
    Factor(left.index('b'), None, result.index('b'), inputs[left.index('b')]),
    Factor(None, right.index('o'), result.index('f'), kernel[right.index('o')]),
    Factor(left.index('f'), right.index('i'), None, kernel[right.index('i')]),
  ]
  found = _product(factors, seen)
  return found._replace(flops=found.flops * _places(op, inputs, kernel, outputs))


def _places(op: Op, inputs: Sequence[int], kernel: Sequence[int], outputs: Sequence[int]) -> float:
  """At how many places the window meets the input; padding and holes of dilation count as nothing."""
  left, right, result = op.details['dimension_numbers']
  rank = len(left) - 2
  ones = (1,) * rank
  options = (
    ('window_strides', ones),
    ('padding', (0, 0) * rank),
    ('lhs_dilation', ones),
    ('rhs_dilation', ones),
  )
  strides, pads, holes, steps = (op.details.get(name) or default for name, default in options)
  number = 1
  for dim in range(rank):
    window = Window(kernel[right.index(str(dim))], strides[dim], pads[2 * dim], holes[dim], steps[dim])
    number *= meetings(inputs[left.index(str(dim))], outputs[result.index(str(dim))], window)
  return number
