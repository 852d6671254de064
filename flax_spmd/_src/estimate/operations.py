"""Operations: the sharding requirement of each kind of operation, as XLA's partitioner treats it.

Most follow from the result's sharding alone: dimensions that the operation keeps are sharded alike, dimensions
that it slices, sorts or factorises are replicated. Products and lookups weigh several options, in `matmuls` and
`gather_scatter`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from flax_spmd._src.compat import KEEPS_FFT_BATCHES
from flax_spmd._src.estimate.gather_scatter import gather, scatter
from flax_spmd._src.estimate.graph import (
  Axes,
  Op,
  Spec,
  replicated,
  shard_count,
  shard_size,
  used_axes,
)
from flax_spmd._src.estimate.halos import reverse, windowed
from flax_spmd._src.estimate.kernels import custom_call
from flax_spmd._src.estimate.matmuls import convolution, dot
from flax_spmd._src.estimate.requirements import Context, Requirement
from flax_spmd._src.estimate.resharding import CollectiveOp


def requirement(op: Op, context: Context) -> Requirement:
  """The sharding requirement of an operation."""
  rule = _RULES.get(op.kind)
  return rule(op, context) if rule else _elementwise(op, context)


def is_elementwise(op: Op) -> bool:
  """Whether an operation treats each element of its operands alike.

  Example:
    >>> is_elementwise(Op('add', (0, 1), (2,), {})), is_elementwise(Op('transpose', (0,), (1,), {}))
    (True, False)
  """
  return op.kind in _ELEMENTWISE


def is_unknown(op: Op) -> bool:
  """Whether nothing is known of the costs of an operation, such as one that a later version of StableHLO has."""
  return not any(op.kind in known for known in (_ELEMENTWISE, _RULES, _FREE))


def _elementwise(op: Op, context: Context) -> Requirement:
  """Operands of the result's shape are sharded as the result.

  If several operands would have to be gathered alike, XLA gathers the result instead.
  """
  same_shape = [value.shape == context.result.shape for value in context.values]
  moving = [
    spec
    for spec, same, free in zip(context.specs, same_shape, context.rematerialisable)
    if same and not free
  ]
  natural = moving[0] if len(moving) > 1 and len(set(moving)) == 1 else context.result_spec
  return Requirement(tuple(natural if same else None for same in same_shape), natural)


def _any_sharding(op: Op, context: Context) -> Requirement:
  return Requirement((None,) * len(context.values), context.result_spec)


def _transpose(op: Op, context: Context) -> Requirement:
  operand = list(replicated(len(context.result_spec)))
  for dim, source in enumerate(op.attributes['permutation']):
    operand[source] = context.result_spec[dim]
  return Requirement((tuple(operand),), context.result_spec)


def _broadcast(op: Op, context: Context) -> Requirement:
  result_dims = op.attributes['broadcast_dimensions']
  shape = context.values[0].shape
  operand = tuple(
    context.result_spec[result_dim] if shape[dim] != 1 else ()
    for dim, result_dim in enumerate(result_dims)
  )
  return Requirement((operand,), context.result_spec)


def _reshape(op: Op, context: Context) -> Requirement:
  natural = reshaped(context.values[0].shape, context.specs[0], context.result.shape, context.sizes)
  operand = tuple(
    tuple(part for axis in axes for part in _kept_parts(axis, natural, context.sizes))
    for axes in context.specs[0]
  )
  return Requirement((operand,), natural)


def _kept_parts(axis: str, natural: Spec, sizes: Mapping[str, int]) -> Axes:
  """An axis of a reshaped array, if the result is sharded over all of it; else the parts that shard the result."""
  parts = tuple(one for axes in natural for one in axes if one.partition('[')[0] == axis)
  is_whole = axis in used_axes(natural) or shard_count(parts, sizes) == sizes.get(axis)
  return (axis,) if is_whole else parts


def reshaped(
  shape: Sequence[int], spec: Spec, new_shape: Sequence[int], sizes: Mapping[str, int]
) -> Spec:
  """The sharding of an array after a local reshape.

  Example:
    >>> reshaped((8, 6), (('data',), ()), (48,), {'data': 4})
    (('data',),)
    >>> reshaped((8, 6), (('data',), ()), (4, 2, 6), {'data': 4})
    (('data',), (), ())
    >>> reshaped((8, 6), (('data',), ()), (2, 4, 6), {'data': 4})  # its outer and its inner half
    (('data[2/2]',), ('data[2/4]',), ())
    >>> reshaped((24,), (('data',),), (6, 4), {'data': 4})  # 6 divides by its outer half only
    (('data[2/2]',), ())
  """
  result: list[Axes] = [()] * len(new_shape)
  if 0 in shape:  # an empty part, as in an associative scan
    return tuple(result)
  old = new = 0
  while old < len(shape) and new < len(new_shape):
    first_old, first_new = old, new
    left, right = shape[old], new_shape[new]
    while left != right:
      if left < right:
        old += 1
        left *= shape[old]
      else:
        new += 1
        right *= new_shape[new]
    _assign_axes(
      shape, spec, range(first_old, old + 1), new_shape, range(first_new, new + 1), result, sizes
    )
    old, new = old + 1, new + 1
  return tuple(result)


def _assign_axes(shape, spec, old_dims, new_shape, new_dims, result: list[Axes], sizes) -> None:
  """Moves the axes of some dimensions to the dimensions that replace them, outermost first, while they divide."""
  axes: list[str] = []
  for dim in old_dims:
    axes += spec[dim]
    if shape[dim] not in (1, shard_count(spec[dim], sizes)):
      break
  for dim in new_dims:
    assigned: list[str] = []
    while axes and new_shape[dim] % shard_count([*assigned, axes[0]], sizes) == 0:
      assigned.append(axes.pop(0))
    if axes and axes[0] in sizes and dim != new_dims[-1]:
      outer = math.gcd(new_shape[dim] // shard_count(assigned, sizes), sizes[axes[0]])
      if outer > 1:
        assigned.append(f'{axes[0]}[{outer}/{outer}]')
        axes[0] = f'{axes[0]}[{sizes[axes[0]] // outer}/{sizes[axes[0]]}]'
    result[dim] = tuple(assigned)
    if new_shape[dim] not in (1, shard_count(assigned, sizes)):
      break


def _slice(op: Op, context: Context) -> Requirement:
  """Sliced dimensions of the operand are replicated."""
  operand = _keep_equal_dims(context.values[0].shape, context.result.shape, context.specs[0])
  return Requirement((operand, *[None] * (len(context.values) - 1)), operand)


def _concatenate(op: Op, context: Context) -> Requirement:
  """Along a sharded dimension, XLA moves the shards to another one, if it can, concatenates, and moves them back."""
  result = context.result.shape
  grown = next((dim for dim, size in enumerate(context.values[0].shape) if size != result[dim]), None)
  axes = context.result_spec[grown] if grown is not None else ()
  others = [dim for dim in range(len(result)) if dim != grown]
  taking = lambda dim: (*context.result_spec[dim], *axes)
  fits = lambda dim: result[dim] % shard_count(taking(dim), context.sizes) == 0
  free_first = sorted(others, key=lambda dim: bool(context.result_spec[dim]))
  other = next(filter(fits, free_first), None)
  if axes and other is not None:
    moved = {grown: (), other: taking(other)}
    spec = tuple(moved.get(dim, one) for dim, one in enumerate(context.result_spec))
    doubt = 'a concatenation along a sharded dimension, whose result is gathered several times'
    return Requirement((spec,) * len(context.values), spec, doubt=doubt)
  operands = (
    _keep_equal_dims(value.shape, context.result.shape, context.result_spec) if value.shape else None
    for value in context.values
  )
  return Requirement(tuple(operands), context.result_spec)


def _update(op: Op, context: Context) -> Requirement:
  """An update in place is sharded as the array, except along updated dimensions."""
  update = _keep_equal_dims(context.values[1].shape, context.result.shape, context.result_spec)
  others = [None] * (len(context.values) - 2)
  return Requirement((context.result_spec, update, *others), context.result_spec)


def _keep_equal_dims(shape: Sequence[int], other: Sequence[int], spec: Spec) -> Spec:
  return tuple(axes if a == b else () for a, b, axes in zip(shape, other, spec))


def _reduce(op: Op, context: Context) -> Requirement:
  """The operand keeps its sharding: along the axes of reduced dimensions, the result is a partial sum."""
  reduced, operand = op.attributes['dimensions'], context.specs[0]
  values = len(context.values) // 2
  natural = tuple(axes for dim, axes in enumerate(operand) if dim not in reduced)
  partial_axes = tuple(axis for dim in reduced for axis in operand[dim])
  return Requirement((*[operand] * values, *[None] * values), natural, partial_axes)


def _sort(op: Op, context: Context) -> Requirement:
  """The sorted dimension is replicated, which is in doubt: XLA can move its axes to another dimension instead."""
  sorted_dim = op.attributes.get('dimension', len(context.result_spec) - 1)
  spec = tuple(() if dim == sorted_dim else axes for dim, axes in enumerate(context.result_spec))
  sharded = any(one[sorted_dim] for one in (*context.specs, context.result_spec))
  doubt = 'sort along a sharded dimension' if sharded else ''
  return Requirement((spec,) * len(context.values), spec, doubt=doubt)


def _scan(op: Op, context: Context) -> Requirement:
  """Sums of the elements so far, and the like. Along a sharded dimension, devices exchange the sums of their shards."""
  dim, spec = op.attributes['dimension'], context.result_spec
  scanned = [value.shape == context.result.shape for value in context.values]
  totals = shard_size(context.result.shape, spec, context.sizes) / -(
    -context.result.shape[dim] // shard_count(spec[dim], context.sizes)
  )
  exchange = CollectiveOp('all-gather', spec[dim], totals * context.result.itemsize)
  operands = tuple(spec if each else None for each in scanned)
  return Requirement(operands, spec, halos=(exchange,) if spec[dim] else (), is_settled=True)


def _top_k(op: Op, context: Context) -> Requirement:
  """The largest elements of the last dimension. Not every compiler shards the other dimensions."""
  is_partitioned = op.attributes.get('is_partitioned')
  spec = (*context.specs[0][:-1], ()) if is_partitioned else replicated(len(context.result_spec))
  return Requirement((spec,), spec)


def _replicate_matrix(op: Op, context: Context) -> Requirement:
  """The last two dimensions are replicated: XLA does not partition factorisations."""
  operands = tuple(
    replicated(len(value.shape)) if len(value.shape) < 3 else (*spec[:-2], (), ())
    for value, spec in zip(context.values, context.specs)
  )
  same_rank = operands and len(operands[0]) == len(context.result_spec)
  return Requirement(operands, operands[0] if same_rank else context.result_spec)


def _fft(op: Op, context: Context) -> Requirement:
  """Dimensions that are transformed are replicated; where the result's are sharded, XLA replicates all of them.

  Over all devices, it can transform the parts of the last one instead, which is in doubt.
  """
  transformed, spec = len(op.attributes['fft_length']), context.result_spec
  batch = spec[:-transformed]
  if not KEEPS_FFT_BATCHES or any(spec[-transformed:]):
    batch = replicated(len(batch))
  operand = (*batch, *replicated(transformed))
  is_everywhere = shard_count(spec[-1], context.sizes) == math.prod(context.sizes.values()) > 1
  return Requirement((operand,), operand, doubt='FFT along a sharded dimension' if is_everywhere else '')


_ELEMENTWISE = frozenset(
  [
    'abs',
    'add',
    'and',
    'atan2',
    'bitcast_convert',
    'cbrt',
    'ceil',
    'clamp',
    'compare',
    'complex',
    'convert',
    'copy',
    'cosine',
    'count_leading_zeros',
    'divide',
    'exponential',
    'exponential_minus_one',
    'floor',
    'imag',
    'is_finite',
    'log',
    'log_plus_one',
    'logistic',
    'map',
    'maximum',
    'minimum',
    'multiply',
    'negate',
    'not',
    'or',
    'popcnt',
    'power',
    'real',
    'reduce_precision',
    'remainder',
    'round_nearest_afz',
    'round_nearest_even',
    'rsqrt',
    'select',
    'shift_left',
    'shift_right_arithmetic',
    'shift_right_logical',
    'sign',
    'sine',
    'sqrt',
    'subtract',
    'tan',
    'tanh',
    'xor',
  ]
)
# Each device has the result, or computes its part of it, without its neighbours.
_FREE = frozenset(
  [
    'constant',
    'create_token',
    'iota',
    'optimization_barrier',
    'partition_id',
    'replica_id',
    'reshard',
    'select_and_scatter',
    'sharding_constraint',
  ]
)
_RULES: dict[str, Callable[[Op, Context], Requirement]] = {
  'transpose': _transpose,
  'broadcast_in_dim': _broadcast,
  'reshape': _reshape,
  'slice': windowed,
  'dynamic_slice': _slice,
  'pad': windowed,
  'reduce_window': windowed,
  'reverse': reverse,
  'concatenate': _concatenate,
  'dynamic_update_slice': _update,
  'reduce': _reduce,
  'sort': _sort,
  'scan': _scan,
  'top_k': _top_k,
  'dot_general': dot,
  'convolution': convolution,
  'gather': gather,
  'scatter': scatter,
  'cholesky': _replicate_matrix,
  'triangular_solve': _replicate_matrix,
  'fft': _fft,
  'custom_call': custom_call,
  'rng_bit_generator': _any_sharding,
}
