"""Operations: how the operands of each have to lie, given how its result does.

What XLA's partitioner does with an operation is told by a `Need`: how each operand has to lie, how the result
then lies by itself, and along which axes devices have parts of a sum only. The walk brings operands there and
results from there.

A product of matrices has choices; the one with the least work is taken, and of those the one that sends least.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from flax_spmd.estimate.graph import Axes, Dims, Op, Value, pieces, used, whole
from flax_spmd.estimate.moving import moves, sent, summing

_CHOICES = 4096  # ways to divide one product that are looked at


class Seen(NamedTuple):
  """What is known where an operation stands.

  Attributes:
    values: shapes and dtypes of operands.
    dims: how they lie.
    sent_as: their dtypes where they are moved: of a converted value, the narrower one's.
    free: which of them cost nothing to move, as every device can make them.
    result: shape and dtype of the (first) result.
    after: how it has to lie.
    sizes: size per mesh axis.
  """

  values: Sequence[Value]
  dims: Sequence[Dims]
  sent_as: Sequence[Value]
  free: Sequence[bool]
  result: Value
  after: Dims
  sizes: Mapping[str, int]


class Need(NamedTuple):
  """What an operation needs.

  Attributes:
    operands: how each has to lie; None as it does.
    natural: how the result then lies.
    parts: the axes along which devices have parts of a sum.
    flops: work on one device, of products.
  """

  operands: tuple[Dims | None, ...]
  natural: Dims
  parts: Axes = ()
  flops: float = 0.0


def need(op: Op, seen: Seen) -> Need:
  """What an operation needs, and what comes of it."""
  found = _RULES.get(op.kind)
  return found(op, seen) if found else _alike(op, seen)


def _alike(op: Op, seen: Seen) -> Need:
  """Element by element: operands of the result's shape lie as it does."""
  wanted = (seen.after if value.shape == seen.result.shape else None for value in seen.values)
  return Need(tuple(wanted), seen.after)


def _as_they_are(op: Op, seen: Seen) -> Need:
  return Need((None,) * len(seen.values), seen.after)


def _transpose(op: Op, seen: Seen) -> Need:
  operand = list(whole(len(seen.after)))
  for dim, source in enumerate(op.details['permutation']):
    operand[source] = seen.after[dim]
  return Need((tuple(operand),), seen.after)


def _broadcast(op: Op, seen: Seen) -> Need:
  places = op.details['broadcast_dimensions']
  shape = seen.values[0].shape
  return Need(
    (tuple(seen.after[place] if shape[dim] != 1 else () for dim, place in enumerate(places)),),
    seen.after,
  )


def _reshape(op: Op, seen: Seen) -> Need:
  return Need((None,), reshaped(seen.values[0].shape, seen.dims[0], seen.result.shape, seen.sizes))


def reshaped(shape: Sequence[int], dims: Dims, into: Sequence[int], sizes: Mapping[str, int]) -> Dims:
  """How an array lies after a reshape that moves nothing.

  Example:
    >>> reshaped((8, 6), (('data',), ()), (2, 4, 6), {'data': 4})
    ((), ('data',), ())
    >>> reshaped((8, 6), (('data',), ()), (4, 2, 6), {'data': 4})
    (('data',), (), ())
  """
  found: list[Axes] = [()] * len(into)
  old = new = 0
  while old < len(shape) and new < len(into):
    first_old, first_new = old, new
    left, right = shape[old], into[new]
    while left != right:
      if left < right:
        old += 1
        left *= shape[old]
      else:
        new += 1
        right *= into[new]
    _spread(shape, dims, range(first_old, old + 1), into, range(first_new, new + 1), found, sizes)
    old, new = old + 1, new + 1
  return tuple(found)


def _spread(shape, dims, olds, into, news, found: list[Axes], sizes) -> None:
  """Axes of some dimensions, given to those that these become: from the outside, as far as they fit."""
  axes: list[str] = []
  for dim in olds:
    axes += dims[dim]
    if shape[dim] not in (1, pieces(dims[dim], sizes)):
      break
  for dim in news:
    taken: list[str] = []
    while axes and into[dim] % pieces([*taken, axes[0]], sizes) == 0:
      taken.append(axes.pop(0))
    found[dim] = tuple(taken)
    if into[dim] not in (1, pieces(taken, sizes)):
      break


def _slice(op: Op, seen: Seen) -> Need:
  """Along dimensions that are cut, the operand has to be whole."""
  operand = _kept(seen.values[0].shape, seen.result.shape, seen.dims[0])
  return Need((operand, *[None] * (len(seen.values) - 1)), operand)


def _pieces(op: Op, seen: Seen) -> Need:
  """Of padded or joined arrays."""
  wanted = (
    _kept(value.shape, seen.result.shape, seen.after) if value.shape else None for value in seen.values
  )
  return Need(tuple(wanted), seen.after)


def _update(op: Op, seen: Seen) -> Need:
  """A part of an array written in place."""
  update = _kept(seen.values[1].shape, seen.result.shape, seen.after)
  return Need((seen.after, update, *[None] * (len(seen.values) - 2)), seen.after)


def _kept(shape: Sequence[int], other: Sequence[int], dims: Dims) -> Dims:
  return tuple(axes if a == b else () for a, b, axes in zip(shape, other, dims))


def _reduce(op: Op, seen: Seen) -> Need:
  gone = op.details['dimensions']
  values = len(seen.values) // 2
  taken = used(seen.after)
  kept = iter(seen.after)
  dims = seen.dims[0]
  operand = tuple(
    tuple(axis for axis in axes if axis not in taken) if dim in gone else next(kept)
    for dim, axes in enumerate(dims)
  )
  parts = tuple(axis for dim in gone for axis in operand[dim])
  return Need((*[operand] * values, *[None] * values), seen.after, parts)


def _sort(op: Op, seen: Seen) -> Need:
  """The dimension that is sorted has to be whole."""
  dim = op.details.get('dimension', len(seen.after) - 1)
  wanted = tuple(() if place == dim else axes for place, axes in enumerate(seen.after))
  return Need((wanted,) * len(seen.values), wanted)


def _replicated(op: Op, seen: Seen) -> Need:
  """Of what XLA does not divide: along the last two dimensions (factorisations, FFT)."""
  wanted = tuple(
    whole(len(value.shape)) if len(value.shape) < 3 else (*dims[:-2], (), ())
    for value, dims in zip(seen.values, seen.dims)
  )
  natural = wanted[0] if wanted and len(wanted[0]) == len(seen.after) else seen.after
  return Need(wanted, natural)


# -- products


class Factor(NamedTuple):
  """A dimension of a product: where it is in the left, the right, and the result, and its size."""

  left: int | None
  right: int | None
  result: int | None
  size: int


def _dot(op: Op, seen: Seen) -> Need:
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
    price = round(found.flops), _wire(found, seen)
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


def _wire(found: Need, seen: Seen) -> float:
  """What it sends to bring the operands there, and the result to where it has to be."""
  total = sent(summing(seen.result, found.natural, found.parts, seen.after, seen.sizes), seen.sizes)
  for value, dims, wanted, free in zip(seen.sent_as, seen.dims, found.operands, seen.free):
    if wanted is not None and not free:
      total += sent(moves(value, dims, wanted, seen.sizes), seen.sizes)
  return total


def _convolution(op: Op, seen: Seen) -> Need:
  left, right, result = op.details['dimension_numbers']
  spots = [name for name in left if name.isdigit()]
  factors = [
    Factor(left.index('b'), None, result.index('b'), seen.values[0].shape[left.index('b')]),
    Factor(None, right.index('o'), result.index('f'), seen.values[1].shape[right.index('o')]),
    Factor(left.index('f'), right.index('i'), None, seen.values[1].shape[right.index('i')]),
  ]
  found = _product(factors, seen)
  window = 1.0
  for spot in spots:
    window *= seen.result.shape[result.index(spot)] * seen.values[1].shape[right.index(spot)]
  return found._replace(flops=found.flops * window)


# -- tables


def _gather(op: Op, seen: Seen) -> Need:
  """Rows of a table: either it is whole along the rows, or every device adds those that it has."""
  offsets, gone = op.details.get('offset_dims', ()), op.details.get('collapsed_slice_dims', ())
  table = seen.dims[0]
  kept = [dim for dim in range(len(table)) if dim not in gone]
  rows = [dim for dim in range(len(seen.after)) if dim not in offsets]
  found = []
  for by_parts, as_result in itertools.product((True, False), (True, False)):
    natural = list(seen.after)
    operand = list(whole(len(table)))
    for dim, place in zip(kept, offsets):
      natural[place] = seen.after[place] if as_result else table[dim]
      operand[dim] = natural[place]
    if not as_result:
      taken = {axis for place in offsets for axis in natural[place]}
      for dim in rows:
        natural[dim] = tuple(axis for axis in seen.after[dim] if axis not in taken)
    parts: Axes = ()
    if by_parts:
      taken = used(tuple(natural))
      for dim in gone:
        operand[dim] = tuple(axis for axis in table[dim] if axis not in taken)
        parts += operand[dim]
    found.append(Need((tuple(operand), None), tuple(natural), parts))
  return min(found, key=lambda one: _received(one, seen))


def _scatter(op: Op, seen: Seen) -> Need:
  """Rows added to a table: each device its own, to be summed, or every row where the table's part is."""
  windows, gone = op.details.get('update_window_dims', ()), op.details.get('inserted_window_dims', ())
  updates = seen.dims[2]
  kept = [dim for dim in range(len(seen.after)) if dim not in gone]
  rows = [dim for dim in range(len(updates)) if dim not in windows]
  found = []
  for as_result in (False, True):
    natural = list(whole(len(seen.after)))
    wanted = list(updates)
    for dim, place in zip(kept, windows):
      wanted[place] = seen.after[dim] if as_result else updates[place]
      natural[dim] = wanted[place]
    taken = used(tuple(natural))
    for dim in rows:
      wanted[dim] = tuple(axis for axis in updates[dim] if axis not in taken)
    parts = tuple(axis for dim in rows for axis in wanted[dim])
    found.append(Need((None, None, tuple(wanted)), tuple(natural), parts))
  return min(found, key=lambda one: (_received(one, seen), _wire(one, seen)))


def _received(found: Need, seen: Seen) -> float:
  """The bytes that the collectives leave on a device, by which XLA chooses how to divide a lookup."""
  made = summing(seen.result, found.natural, found.parts, seen.after, seen.sizes)
  for value, dims, wanted, free in zip(seen.sent_as, seen.dims, found.operands, seen.free):
    if wanted is not None and not free:
      made += moves(value, dims, wanted, seen.sizes)
  scale = {'all-gather': 1, 'reduce-scatter': -1}
  return sum(move.bytes * pieces(move.axes, seen.sizes) ** scale.get(move.kind, 0) for move in made)


_RULES: dict[str, Callable[[Op, Seen], Need]] = {
  'transpose': _transpose,
  'broadcast_in_dim': _broadcast,
  'reshape': _reshape,
  'slice': _slice,
  'dynamic_slice': _slice,
  'pad': _pieces,
  'concatenate': _pieces,
  'dynamic_update_slice': _update,
  'reduce': _reduce,
  'sort': _sort,
  'dot_general': _dot,
  'convolution': _convolution,
  'gather': _gather,
  'scatter': _scatter,
  'cholesky': _replicated,
  'triangular_solve': _replicated,
  'fft': _replicated,
  'custom_call': _as_they_are,
  'rng_bit_generator': _as_they_are,
}
