"""Halos: operations along a sharded dimension whose shards need elements of their neighbours.

A slice, a padding, a pooling or a convolution is sharded along its dimensions like its result. Each device then
needs a range of the operand that is not quite its own shard: the halo is the part that other devices have, and XLA
moves it by collective-permutes. A reversed dimension moves as a whole.

    halo(32, 31, 8, Window(pad=-1))         # x[1:], 32 elements on 8 devices: one element of the next device
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence

from flax_spmd._src.estimate.graph import Op, Spec, shard_count, shard_size, used_axes
from flax_spmd._src.estimate.requirements import Context, Requirement
from flax_spmd._src.estimate.resharding import CollectiveOp
from flax_spmd._src.hlo.flops import Window


def halo(inputs: int, outputs: int, shards: int, window: Window) -> tuple[int, int]:
  """The elements that a device needs of those before and after its shard, at most.

  Args:
    inputs, outputs: sizes of the dimension.
    shards: number of shards of both.
    window: window of each output.

  Example:
    >>> halo(32, 31, 8, Window(pad=-1)), halo(32, 32, 8, Window(size=3, pad=1))
    ((0, 1), (1, 1))
  """
  of_input, of_output = -(-inputs // shards), -(-outputs // shards)
  before = after = 0
  for shard in range(shards):
    first = shard * of_output
    last = min(outputs, first + of_output) - 1
    if last < first:
      break
    low = -(-(first * window.stride - window.pad) // window.lhs_dilate)
    high = (
      last * window.stride + (window.size - 1) * window.rhs_dilate - window.pad
    ) // window.lhs_dilate
    before = max(before, shard * of_input - max(low, 0))
    after = max(after, min(high, inputs - 1) - (shard + 1) * of_input + 1)
  return before, after


def parts(inputs: int, outputs: int, shards: int, start: int) -> list[int]:
  """The elements of each permute that a slice needs, as XLA sends them.

  Args:
    inputs, outputs: sizes of the dimension.
    shards: number of shards of both.
    start: first element of the slice.

  Example:
    >>> parts(32, 31, 8, 1), parts(32, 8, 4, 0)  # x[1:] sends one element of each shard, x[:8] three parts of two
    ([1], [2, 2, 2])
  """
  shard, part = -(-inputs // shards), max(1, -(-outputs // shards))  # an empty slice has no parts
  ranges = [(start + part * at, start + part * (at + 1)) for at in range(shards)]
  befores = [shard * at - low for at, (low, _) in enumerate(ranges)]
  afters = [high - shard * (at + 1) for at, (_, high) in enumerate(ranges)]
  is_near = max(*befores, *afters) <= 2 * part
  return _near_parts(befores, afters, shard) if is_near else _far_parts(ranges, shard, inputs)


def _near_parts(befores: Sequence[int], afters: Sequence[int], shard: int) -> list[int]:
  """The elements of each permute, if all devices send the same parts of their shards to the next ones.

  Args:
    befores, afters: per device, the elements that it needs before and after its shard; negative for parts of its own that
      it does not need.
    shard: elements of a shard.
  """
  before, after = max(befores[1:]), max(afters[:-1])
  first, end = -max(befores), shard + max(afters)  # of all that a device needs, from its shard on
  skipped = min(max(first - shard, 0), max(after, 0)) // shard
  sent = []
  for hop in range(-(-before // shard)):
    if -(hop + 1) * shard < end:
      sent.append(min(before - hop * shard, shard) - max(-hop * shard - end, 0))
  for hop in range(skipped, -(-after // shard)):
    sent.append(min(after - hop * shard, shard) - max(first - (hop + 1) * shard, 0))
  return sent


def _far_parts(ranges: Sequence[tuple[int, int]], shard: int, inputs: int) -> list[int]:
  """The elements of each permute, if each device sends to those that need its elements, one in each permute.

  Args:
    ranges: first and last element, exclusive, that each device needs.
    shard: elements of a shard.
    inputs: size of the dimension.
  """
  waiting: list[list[tuple[int, int, int, int]]] = [
    [] for _ in ranges
  ]  # place in the range, target, start, end
  for target, (low, high) in enumerate(ranges):
    for source in range(low // shard, -(-min(high, inputs) // shard)):
      start, end = max(low, shard * source), min(high, shard * (source + 1))
      if source != target:
        waiting[source].append((start - low, target, start - shard * source, end - shard * source))
  queues = [collections.deque(sorted(parts)) for parts in waiting]
  sent = []
  while any(queues):
    targets, first, last = set[int](), shard, 0
    for queue in filter(None, queues):
      _, target, start, end = queue[0]
      is_apart = (first > end and (start, last) == (0, shard)) or (
        last < start and (first, end) == (0, shard)
      )
      if targets and (target in targets or is_apart):
        continue
      queue.popleft()
      targets.add(target)
      first, last = min(first, start), max(last, end)
    sent.append(last - first)
  return sent


def _parts_of(inputs: int, outputs: int, shards: int, window: Window) -> Sequence[int]:
  return parts(inputs, outputs, shards, -window.pad)


def is_plain_slice(op: Op) -> bool:
  """Whether an operation is a slice without strides, whose `parts` are known."""
  return op.kind == 'slice' and {*(op.attributes.get('strides') or ()), 1} == {1}


def exchanges(
  dims: Mapping[int, tuple[int, Window]],
  operand: Spec,
  context: Context,
  needed: Callable[[int, int, int, Window], Sequence[int]] = halo,
) -> tuple[CollectiveOp, ...]:
  """The permutes of the first operand's halos, or a gather where a device needs all of its dimension.

  Args:
    dims: per dimension of the operand, the size of the result's and the window.
    operand: sharding of operand and result along these dimensions.
    context: context of the operation.
    needed: the elements of each permute, from the sizes of both arrays, the number of shards and the window.
  """
  value, sizes = context.wire_values[0], context.sizes
  size = shard_size(value.shape, operand, sizes) * value.itemsize
  result = []
  for dim, (outputs, window) in dims.items():
    shards = shard_count(operand[dim], sizes)
    if shards > 1:
      shard = -(-value.shape[dim] // shards)
      for count in needed(value.shape[dim], outputs, shards, window):
        if shards > 2 and count == (shards - 1) * shard:  # as of a window over the whole dimension
          result.append(CollectiveOp('all-gather', operand[dim], size))
        elif count:
          result.append(CollectiveOp('collective-permute', operand[dim], size * count / shard))
  return tuple(result)


def windowed(op: Op, context: Context) -> Requirement:
  """A slice, a padding or a pooling: sharded as its result, with halos."""
  windows = _windows(op, len(context.result.shape))
  spec = _shared(context)
  dims = {dim: (context.result.shape[dim], window) for dim, window in enumerate(windows)}
  count = _parts_of if is_plain_slice(op) else halo
  others = [None if not value.shape else spec for value in context.values[1:]]
  return Requirement((spec, *others), spec, halos=exchanges(dims, spec, context, count))


def _shared(context: Context) -> Spec:
  """The operand's sharding along unchanged dimensions, the result's along changed ones."""
  operand, result = context.values[0].shape, context.result.shape
  changed = [before != after for before, after in zip(operand, result)]
  used = used_axes(tuple(axes for axes, other in zip(context.result_spec, changed) if other))
  return tuple(
    after if other else tuple(axis for axis in before if axis not in used)
    for before, after, other in zip(context.specs[0], context.result_spec, changed)
  )


def _windows(op: Op, rank: int) -> Sequence[Window]:
  get = op.attributes.get
  ones, zeros = (1,) * rank, (0,) * rank
  if op.kind == 'slice':
    starts, strides = get('start_indices') or zeros, get('strides') or ones
    return [Window(stride=stride, pad=-start) for start, stride in zip(starts, strides)]
  if op.kind == 'pad':
    low, interior = get('edge_padding_low') or zeros, get('interior_padding') or zeros
    return [Window(pad=pad, lhs_dilate=1 + holes) for pad, holes in zip(low, interior)]
  pads = (get('padding') or zeros * 2)[::2]
  names = ('window_dimensions', 'window_strides')
  sizes, strides, holes, steps = (
    get(name) or ones for name in (*names, 'base_dilations', 'window_dilations')
  )
  return [Window(*one) for one in zip(sizes, strides, pads, holes, steps)]


def reverse(op: Op, context: Context) -> Requirement:
  """A reversal: each device exchanges its whole shard along reversed dimensions."""
  spec, value = context.result_spec, context.wire_values[0]
  axes = tuple(axis for dim in op.attributes['dimensions'] for axis in spec[dim])
  size = shard_size(value.shape, spec, context.sizes) * value.itemsize
  halos = (CollectiveOp('collective-permute', axes, size),) if axes else ()
  return Requirement((spec,), spec, halos=halos)
