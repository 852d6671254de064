"""Operations: how the operands of each kind have to lie, given how its result does.

What XLA's partitioner does with an operation is told by a `Need` (`needs`). Products and lookups have choices,
and modules of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from flax_spmd._src.estimate.gather_scatter import gather, scatter
from flax_spmd._src.estimate.graph import Axes, Dims, Op, pieces, used, whole
from flax_spmd._src.estimate.matmuls import convolution, dot
from flax_spmd._src.estimate.requirements import Need, Seen


def need(op: Op, seen: Seen) -> Need:
  """What an operation needs, and what comes of it."""
  found = _RULES.get(op.kind)
  return found(op, seen) if found else _alike(op, seen)


def is_elementwise(op: Op) -> bool:
  """Whether an operation does the same with each element of its operands.

  Example:
    >>> is_elementwise(Op('add', (0, 1), (2,), {})), is_elementwise(Op('transpose', (0,), (1,), {}))
    (True, False)
  """
  return op.kind not in _RULES and op.kind != 'custom_call'


def _alike(op: Op, seen: Seen) -> Need:
  """Element by element: operands of the result's shape lie as it does.

  Where two would have to be gathered, XLA gathers what comes of them.
  """
  like = [value.shape == seen.result.shape for value in seen.values]
  apart = {dims for dims, same, free in zip(seen.dims, like, seen.free) if same and not free}
  moved = sum(same and not free for same, free in zip(like, seen.free))
  natural = apart.pop() if moved > 1 and len(apart) == 1 else seen.after
  return Need(tuple(natural if same else None for same in like), natural)


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
    >>> reshaped((8, 6), (('data',), ()), (48,), {'data': 4})
    (('data',),)
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
  'dot_general': dot,
  'convolution': convolution,
  'gather': gather,
  'scatter': scatter,
  'cholesky': _replicated,
  'triangular_solve': _replicated,
  'fft': _replicated,
  'custom_call': _as_they_are,
  'rng_bit_generator': _as_they_are,
}
