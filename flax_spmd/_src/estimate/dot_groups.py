"""Products whose arrays want one mesh axis for several dimensions, partitioned as XLA does it.

XLA groups the devices by one role of dimensions at a time: batch, kept or contracted ones. Within a group it goes on
with the rest. Its tables of devices know no axes: an operand that has to give up an axis gets another one of the same
size that it does not use, by a collective-permute. Of the roles that match, the one with the smallest largest array
comes first, and among equals the one that sends the fewest bytes (`PartitionDot` in XLA's `spmd` folder).

    plan = partitioned(factors, arrays, specs, sizes)      # None: a case that is not modelled
    plan.operands, plan.natural, plan.partial, plan.permutes
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from flax_spmd._src.estimate.graph import (
  Axes,
  GraphValue,
  Spec,
  axis_size,
  prime_factors,
  replicated,
  shard_count,
  shard_size,
)
from flax_spmd._src.estimate.resharding import CollectiveOp, reduce_partial_sum, reshard, wire_bytes

BATCH, LEFT, RIGHT, CONTRACTED = range(4)  # roles
_HAS = ((BATCH, LEFT, CONTRACTED), (BATCH, RIGHT, CONTRACTED), (BATCH, LEFT, RIGHT))  # roles per array


class ProductDim(NamedTuple):
  """A dimension of a product: its role, and its place in the left and right operands and the result."""

  role: int
  places: tuple[int | None, int | None, int | None]


class ProductPlan(NamedTuple):
  """A partitioned product.

  Attributes:
    operands: sharding of both operands in the product.
    natural: sharding of its result.
    partial: axes along which the result is a partial sum.
    permutes: collective-permutes of operands, each with the index of its operand.
    is_split: whether parts of axes serve different dimensions; XLA moves shards to them in several ways.
  """

  operands: tuple[Spec, Spec]
  natural: Spec
  partial: Axes = ()
  permutes: tuple[tuple[int, CollectiveOp], ...] = ()
  is_split: bool = False


class _Unmodelled(Exception):
  """A case that is not modelled."""


class _DeviceGroup(NamedTuple):
  """The product within one group of devices: shapes, and the axes that are left.

  Attributes:
    dims: the dimensions.
    arrays: operands and result with the shapes of one group.
    specs: their shardings over `axes`.
    axes: axes within the group.
    sizes: size per mesh axis.
    is_outermost: whether this group has all devices.
    is_dot: whether the product is no convolution; XLA replicates operands of those that it finds no role for.
  """

  dims: Sequence[ProductDim]
  arrays: tuple[GraphValue, ...]
  specs: tuple[Spec, ...]
  axes: Axes
  sizes: Mapping[str, int]
  is_outermost: bool = True
  is_dot: bool = True

  def tiles(self, array: int, *roles: int) -> int:
    """The number of shards of an array along the dimensions of some roles; of all of them without roles."""
    return shard_count(self.along(array, roles or range(4)), self.sizes)

  def along(self, array: int, roles: Iterable[int]) -> Axes:
    spec = self.specs[array]
    return tuple(axis for role in roles for dim in self.of(array, role) for axis in spec[dim])

  def of(self, array: int, role: int) -> list[int]:
    places = (dim.places[array] for dim in self.dims if dim.role == role)
    return [place for place in places if place is not None]

  def bytes(self, array: int, spec: Spec | None = None) -> float:
    value = self.arrays[array]
    return shard_size(value.shape, spec or self.specs[array], self.sizes) * value.itemsize

  def free(self, array: int) -> Axes:
    used = {axis for axes in self.specs[array] for axis in axes}
    return tuple(axis for axis in self.axes if axis not in used)

  def matched(self, array: int, other: int, role: int) -> Spec:
    """An array that is only sharded along one role, as another array is."""
    spec = list(replicated(len(self.specs[array])))
    for dim in self.dims:
      here, there = dim.places[array], dim.places[other]
      if dim.role == role and here is not None and there is not None:
        spec[here] = self.specs[other][there]
    return tuple(spec)

  def aligned(self, array: int, wanted: Mapping[int, Axes]) -> Spec:
    """An array with given axes along some dimensions; other dimensions get unused axes in exchange.

    Raises:
      Unmodelled: no unused axes have the right sizes.
    """
    spec = [wanted.get(dim, axes) for dim, axes in enumerate(self.specs[array])]
    taken = {axis for axes in wanted.values() for axis in axes}
    used = {axis for axes in spec for axis in axes}
    unused = [axis for axis in self.axes if axis not in used | taken]
    for dim, axes in enumerate(spec):
      if dim not in wanted and taken.intersection(axes):
        spec[dim] = tuple(self._instead(axis, unused) if axis in taken else axis for axis in axes)
    return tuple(spec)

  def _instead(self, axis: str, unused: list[str]) -> str:
    for one in unused:
      if self.sizes[one] == self.sizes[axis]:
        unused.remove(one)
        return one
    raise _Unmodelled

  def permutes(self, specs: Sequence[Spec]) -> Iterator[tuple[int, CollectiveOp]]:
    """The permutes of operands to shardings with as many shards."""
    for array, (before, after) in enumerate(zip(self.specs[:2], specs)):
      if before != after and [*map(self._count, before)] == [*map(self._count, after)]:
        yield array, CollectiveOp('collective-permute', self.axes, self.bytes(array))

  def _count(self, axes: Axes) -> int:
    return shard_count(axes, self.sizes)

  def inner(self, specs: Sequence[Spec], grouped: Axes) -> _DeviceGroup:
    """The product in each group of devices that agree in their positions along some axes."""
    arrays = []
    for value, spec in zip(self.arrays, specs):
      held = [tuple(axis for axis in axes if axis in grouped) for axes in spec]
      shape = tuple(-(-size // self._count(axes)) for size, axes in zip(value.shape, held))
      arrays.append(value._replace(shape=shape))
    inside = tuple(tuple(tuple(a for a in axes if a not in grouped) for axes in spec) for spec in specs)
    left = tuple(axis for axis in self.axes if axis not in grouped)
    return self._replace(arrays=tuple(arrays), specs=inside, axes=left, is_outermost=False)


def partitioned(
  dims: Sequence[ProductDim],
  arrays: Sequence[GraphValue],
  specs: Sequence[Spec],
  sizes: Mapping[str, int],
  is_dot: bool = True,
) -> ProductPlan | None:
  """The plan of a product; None if it is not modelled.

  Args:
    dims: the dimensions.
    arrays: operands and result.
    specs: their shardings.
    sizes: size per mesh axis.
    is_dot: whether the product is no convolution.
  """
  if any('[' in axis for spec in specs for axes in spec for axis in axes):
    return None
  axes = tuple(axis for axis, size in sizes.items() if size > 1)
  group = _DeviceGroup(dims, tuple(arrays), tuple(specs), axes, sizes, is_dot=is_dot)
  try:
    plan = _solved(group)
  except _Unmodelled:
    try:
      plan = _in_factors(group)
    except _Unmodelled:
      return None
  counts = lambda spec: [shard_count(one, sizes) for one in spec]
  shown = [counts(one) == counts(other) for one, other in zip(specs, plan.operands)]
  return plan._replace(permutes=tuple(one for one in plan.permutes if not shown[one[0]]))


def _in_factors(group: _DeviceGroup) -> ProductPlan:
  """The plan if axes can be split, in their prime factors, for another axis of the size of a part."""
  parts = {axis: axis_factors(axis, size) for axis, size in group.sizes.items()}
  if all(len(found) == 1 for found in parts.values()):
    raise _Unmodelled
  split = lambda axes: tuple(part for axis in axes for part in parts[axis])
  sizes = {part: axis_size(part, group.sizes) for part in split(group.sizes)}
  specs = tuple(tuple(map(split, spec)) for spec in group.specs)
  plan = _solved(group._replace(axes=split(group.axes), sizes=sizes, specs=specs))
  join = lambda axes: _joined(axes, parts)
  left, right, natural = (tuple(map(join, spec)) for spec in (*plan.operands, plan.natural))
  permutes = tuple((array, op._replace(axes=join(op.axes))) for array, op in plan.permutes)
  return ProductPlan((left, right), natural, join(plan.partial), permutes, is_split=True)


def axis_factors(axis: str, size: int) -> Axes:
  """The parts of an axis with a prime size each, outermost first.

  Example:
    >>> axis_factors('data', 12), axis_factors('model', 3)
    (('data[2/2]', 'data[2/4]', 'data[3/12]'), ('model',))
  """
  primes = prime_factors(size)
  outer = itertools.accumulate(primes, operator.mul)
  return (
    tuple(f'{axis}[{one}/{whole}]' for one, whole in zip(primes, outer)) if len(primes) > 1 else (axis,)
  )


def _joined(axes: Axes, parts: Mapping[str, Axes]) -> Axes:
  """The axes with all parts of an axis that follow each other replaced by it."""
  result, at = [], 0
  while at < len(axes):
    whole = next((one for one, found in parts.items() if axes[at : at + len(found)] == found), axes[at])
    result.append(whole)
    at += len(parts.get(whole, (whole,)))
  return tuple(result)


def _solved(group: _DeviceGroup) -> ProductPlan:
  if not group.axes:
    left, right, result = (replicated(len(spec)) for spec in group.specs)
    return ProductPlan((left, right), result)
  for strict in (True, False):
    if plan := _attempt(group, strict):
      return plan
  return _unmatched(group)


def _unmatched(group: _DeviceGroup) -> ProductPlan:
  """The product if no role matches: as its result is sharded."""
  kept = group.tiles(0, LEFT), group.tiles(1, RIGHT)
  specs = [replicated(len(spec)) for spec in group.specs]
  is_sharded = group.tiles(0, BATCH) * group.tiles(1, BATCH) * kept[0] * kept[1] > 1
  is_contested = is_sharded or min(group.tiles(0), group.tiles(1)) > 1
  if (group.is_outermost and is_contested) or (group.tiles(2) > 1 and not group.is_dot):
    raise _Unmodelled  # shards that the other arrays could be resharded for
  for role in (BATCH, LEFT, RIGHT):
    for array in (0, 1):
      if role in _HAS[array]:
        pairs = zip(specs[array], group.matched(array, 2, role))
        specs[array] = tuple((*axes, *more) for axes, more in pairs)
  return ProductPlan((specs[0], specs[1]), group.specs[2])


def _attempt(group: _DeviceGroup, strict: bool) -> ProductPlan | None:
  if plan := _whole(group, False):
    return plan
  plans = [plan for method in (_by_batch, _by_kept, _by_contracted) if (plan := method(group, strict))]
  if plans:
    return min(plans, key=lambda plan: _cost(group, plan))
  if group.tiles(0) == group.tiles(1) == 1 and 1 < group.tiles(2) < shard_count(group.axes, group.sizes):
    used = tuple(axis for axes in group.specs[2] for axis in axes)
    return _solved(group._replace(axes=used))
  return _whole(group, True)


def _cost(group: _DeviceGroup, plan: ProductPlan) -> tuple[float, float]:
  """The bytes of the largest operation, and the bytes that are sent."""
  used = [*plan.operands, plan.natural]
  ops = [op for _, op in plan.permutes]
  for array in (0, 1):
    ops += reshard(group.arrays[array], group.specs[array], used[array], group.sizes)
  ops += reduce_partial_sum(group.arrays[2], plan.natural, plan.partial, group.specs[2], group.sizes)
  largest = sum(group.bytes(array, spec) for array, spec in enumerate(used))
  grown = (
    op.bytes * shard_count(op.axes, group.sizes) if op.kind == 'all-gather' else 2 * op.bytes
    for op in ops
  )
  return max([largest, *grown]), wire_bytes(ops, group.sizes)


def _whole(group: _DeviceGroup, may_reshard: bool) -> ProductPlan | None:
  """The product if one role takes all devices; each array is sharded over all of them, or replicated."""
  count = shard_count(group.axes, group.sizes)
  if any(group.tiles(array) not in (1, count) for array in range(3)):
    return None
  specs, tiles, matched = group.specs, group.tiles, group.matched
  none = [replicated(len(spec)) for spec in specs]
  whole = lambda array, role: tiles(array, role) == count
  if whole(0, BATCH) and whole(1, BATCH) and matched(1, 0, BATCH) == specs[1]:
    return ProductPlan((specs[0], specs[1]), matched(2, 0, BATCH))
  for one in (0, 1):
    if whole(one, BATCH) and whole(2, BATCH) and matched(2, one, BATCH) == specs[2]:
      return ProductPlan((matched(0, one, BATCH), matched(1, one, BATCH)), specs[2])
  if whole(0, CONTRACTED) and whole(1, CONTRACTED):
    kept = 0 if group.bytes(0) >= group.bytes(1) else 1
    pair = matched(0, kept, CONTRACTED), matched(1, kept, CONTRACTED)
    return ProductPlan(pair, none[2], group.along(kept, (CONTRACTED,)))
  for one, role in ((0, LEFT), (1, RIGHT)):
    if whole(one, role) and whole(2, role) and matched(2, one, role) == specs[2]:
      return ProductPlan((specs[0], none[1]) if one == 0 else (none[0], specs[1]), specs[2])
  if may_reshard:
    for role in (BATCH, LEFT, RIGHT):
      if whole(2, role):
        pair = tuple(matched(one, 2, role) if role in _HAS[one] else none[one] for one in (0, 1))
        return ProductPlan((pair[0], pair[1]), specs[2])
  for one, other in ((1, 0), (0, 1)):
    larger = _elements(group, one) > _elements(group, 2)
    if whole(one, CONTRACTED) and tiles(other) == 1 and tiles(2) == 1 and larger:
      pair = matched(0, one, CONTRACTED), matched(1, one, CONTRACTED)
      return ProductPlan(pair, none[2], group.along(one, (CONTRACTED,)))
  return None


def _elements(group: _DeviceGroup, array: int) -> int:
  return shard_size(group.arrays[array].shape, replicated(len(group.specs[array])), group.sizes)


def _by_batch(group: _DeviceGroup, strict: bool) -> ProductPlan | None:
  """Devices grouped by batch dimensions."""
  count = group.tiles(2, BATCH)
  if count == 1 or count not in (group.tiles(0, BATCH), group.tiles(1, BATCH)):
    return None
  dims = [dim.places for dim in group.dims if dim.role == BATCH]
  alike = all(
    shard_count(group.specs[0][a or 0], group.sizes) == shard_count(group.specs[1][b or 0], group.sizes)
    for a, b, _ in dims
  )
  same = alike and all(group.specs[0][a or 0] == group.specs[1][b or 0] for a, b, _ in dims)
  if same if strict else alike:
    kept = 0 if group.bytes(0) > group.bytes(1) else 1
    axes = [group.specs[kept][index[kept] or 0] for index in dims]
    specs = [group.specs[0], group.specs[1], group.specs[2]]
    for array in (1 - kept, 2):
      specs[array] = group.aligned(array, {index[array] or 0: one for index, one in zip(dims, axes)})
  else:
    axes = [group.specs[2][index[2] or 0] for index in dims]
    specs = [*group.specs]
    for array in (0, 1):
      wanted = {index[array] or 0: one for index, one in zip(dims, axes)}
      found = _to_batch(group, array, wanted)
      if found is None or (strict and found != group.specs[array] and group.tiles(array) > 1):
        return None
      specs[array] = found
  return _within(group, specs, tuple(axis for one in axes for axis in one))


def _to_batch(group: _DeviceGroup, array: int, wanted: Mapping[int, Axes]) -> Spec | None:
  """An operand sharded along batch dimensions as the result; its other dimensions may have to give up their shards."""
  spec = [*group.specs[array]]
  taken = shard_count([axis for axes in wanted.values() for axis in axes], group.sizes)
  rest = [axes for dim, axes in enumerate(spec) if dim not in wanted]
  others = shard_count([axis for axes in rest for axis in axes], group.sizes)
  total = shard_count(group.axes, group.sizes)
  kept_role = (LEFT, RIGHT)[array]
  if taken * others > total:
    ratio = taken * others // total
    kept, contracted = group.tiles(array, kept_role), group.tiles(array, CONTRACTED)
    if ratio == kept and (ratio != contracted or contracted == group.tiles(1 - array, CONTRACTED)):
      dropped = group.of(array, kept_role)
    elif ratio == contracted:
      dropped = group.of(array, CONTRACTED)
    else:
      return None
    spec = [() if dim in dropped else axes for dim, axes in enumerate(spec)]
  specs = [*group.specs]
  specs[array] = tuple(spec)
  return group._replace(specs=tuple(specs)).aligned(array, wanted)


def _by_kept(group: _DeviceGroup, strict: bool) -> ProductPlan | None:
  """Devices grouped by the dimensions that one operand and the result have."""
  found = _kept_match(group)
  if found is None:
    return None
  matching, dims = found
  other = 1 - matching
  axes = tuple(axis for dim in dims for axis in group.specs[2][dim.places[2] or 0])
  wanted = {dim.places[matching] or 0: group.specs[2][dim.places[2] or 0] for dim in dims}
  specs = [*group.specs]
  specs[matching] = group.aligned(matching, wanted)
  if strict and specs[matching] != group.specs[matching]:
    return None
  specs[other] = _ungrouped(group, other, axes)
  return _within(group, specs, axes)


def _kept_match(group: _DeviceGroup) -> tuple[int, list[ProductDim]] | None:
  """The operand whose kept dimensions match the result's, and these dimensions."""
  tiles = group.tiles
  counts = [(tiles(one, role), tiles(2, role)) for one, role in ((0, LEFT), (1, RIGHT))]
  may = [one == result > 1 for one, result in counts]
  if any(may):
    left = counts[0][0] * group.bytes(1) < counts[1][0] * group.bytes(0)
    matching = 0 if may[0] and (not may[1] or left) else 1
    return matching, [dim for dim in group.dims if dim.role == (LEFT, RIGHT)[matching]]
  for one, role in ((0, LEFT), (1, RIGHT)):
    if min(counts[one]) > 1:
      dims = [dim for dim in group.dims if dim.role == role and _is_alike(group, one, dim)]
      return (one, dims) if dims else None
  return None


def _is_alike(group: _DeviceGroup, array: int, dim: ProductDim) -> bool:
  mine, result = (
    shard_count(group.specs[each][dim.places[each] or 0], group.sizes) for each in (array, 2)
  )
  return mine == result > 1


def _ungrouped(group: _DeviceGroup, array: int, axes: Axes) -> Spec:
  """The other operand, replicated along the axes of the groups."""
  spec, free = group.specs[array], group.free(array)
  count = shard_count(axes, group.sizes)
  if set(axes) <= set(free):
    return spec
  if shard_count(free, group.sizes) % count == 0:
    return group.aligned(array, {-1: axes})
  dims = _dims_over(spec, free, axes)
  if dims is None:
    dims = _spared(group, array, count)
    if dims is None and group.is_dot:
      return _contracted_alike(group, array)
    if dims is None and group.tiles(1 - array, CONTRACTED) == 1:
      return replicated(len(spec))
    is_whole = dims is not None and not any(one for dim, one in enumerate(spec) if dim not in dims)
    if dims is None or not (is_whole or {axis for dim in dims for axis in spec[dim]} == set(axes)):
      raise _Unmodelled  # another order of devices
  return tuple(() if dim in dims else one for dim, one in enumerate(spec))


def _contracted_alike(group: _DeviceGroup, array: int) -> Spec:
  """The other operand without its shards; with those of the contracted dimensions if only the products need them."""
  if group.tiles(2, (LEFT, RIGHT)[array]) == 1:
    return group.matched(array, 1 - array, CONTRACTED)
  return replicated(len(group.specs[array]))


def _spared(group: _DeviceGroup, array: int, count: int) -> list[int] | None:
  """The dimensions of the other operand that are gathered, if as many shards of them as groups exist."""
  role, matching = (LEFT, RIGHT)[array], 1 - array
  contracted, kept = group.tiles(array, CONTRACTED), group.tiles(array, role)
  may_contracted = contracted == count and kept == group.tiles(2, role)
  may_kept = count == kept and group.tiles(matching, CONTRACTED) == contracted
  if may_contracted and (not may_kept or group.bytes(array) <= group.bytes(2)):
    return group.of(array, CONTRACTED)
  return group.of(array, role) if may_kept else None


def _dims_over(spec: Spec, free: Axes, axes: Axes) -> list[int] | None:
  """The dimensions that are sharded over exactly these axes, without those that are all free; None if there are none."""
  dims = [dim for dim, one in enumerate(spec) if one and set(one) <= set(axes)]
  found = {axis for dim in dims for axis in spec[dim]}
  if set(free) <= set(axes):
    found |= set(free)
  return dims if dims and found == set(axes) else None


def _by_contracted(group: _DeviceGroup, strict: bool) -> ProductPlan | None:
  """Devices grouped by contracted dimensions: the result is a partial sum."""
  dims = [dim.places for dim in group.dims if dim.role == CONTRACTED]
  count = lambda array, index: shard_count(group.specs[array][index[array] or 0], group.sizes)
  if not group.tiles(0, CONTRACTED) == group.tiles(1, CONTRACTED) > 1:
    dims = [index for index in dims if count(0, index) == count(1, index) > 1]
  if not dims:
    return None
  kept = 0 if group.bytes(0) > group.bytes(1) else 1
  wanted = {index[1 - kept] or 0: group.specs[kept][index[kept] or 0] for index in dims}
  axes = tuple(axis for one in wanted.values() for axis in one)
  specs = [*group.specs]
  specs[1 - kept] = group.aligned(1 - kept, wanted)
  if strict and specs[1 - kept] != group.specs[1 - kept]:
    return None
  specs[2] = _summed(group, specs, axes)
  plan = _within(group, specs, axes)
  return plan._replace(partial=(*axes, *plan.partial))


def _summed(group: _DeviceGroup, specs: Sequence[Spec], axes: Axes) -> Spec:
  """The sharding of a result that is a partial sum along some axes, before it is reduced."""
  result, count = group.specs[2], shard_count(axes, group.sizes)
  spare = shard_count(group.free(2), group.sizes)
  if group.tiles(2) > 1 and (spare == 1 or spare % count):
    result = _coarser(group, specs, axes) or result
    used = {axis for one in result for axis in one}
    spare = shard_count([axis for axis in group.axes if axis not in used], group.sizes)
  group = group._replace(specs=(*group.specs[:2], result))
  if spare > 1 and spare % count == 0:
    return group.aligned(2, {-1: axes})
  dims = _dims_over(result, group.free(2), axes)
  if dims is not None:
    return tuple(() if dim in dims else one for dim, one in enumerate(result))
  dims = next((group.of(2, role) for role in (BATCH, LEFT, RIGHT) if group.tiles(2, role) == count), [])
  kept = tuple(() if dim in dims else one for dim, one in enumerate(result))
  if dims and any(axis in axes for one in kept for axis in one):
    raise _Unmodelled  # reduced along another order of devices
  return kept if dims else replicated(len(result))


def _coarser(group: _DeviceGroup, specs: Sequence[Spec], axes: Axes) -> Spec | None:
  """The sharding of the only operand that keeps one, if the result's is a finer one."""
  rest = [[[axis for axis in one if axis not in axes] for one in spec] for spec in specs[:2]]
  sharded = [any(map(len, spec)) for spec in rest]
  if sharded[0] == sharded[1]:
    return None
  one = int(sharded[1])
  coarse = [*replicated(len(specs[2]))]
  for dim in group.dims:
    here, there = dim.places[one], dim.places[2]
    if here is not None and there is not None:
      coarse[there] = tuple(rest[one][here])
  fine = all(tuple(after[: len(before)]) == before for before, after in zip(coarse, group.specs[2]))
  return tuple(coarse) if fine else None


def _within(group: _DeviceGroup, specs: Sequence[Spec], axes: Axes) -> ProductPlan:
  """The plan of a product whose devices are grouped along some axes."""
  plan = _solved(group.inner(specs, axes))
  pairs = zip(specs, (*plan.operands, plan.natural))
  joined = [
    tuple((*(axis for axis in one if axis in axes), *other) for one, other in zip(*pair))
    for pair in pairs
  ]
  permutes = *group.permutes(specs), *plan.permutes
  return ProductPlan((joined[0], joined[1]), joined[2], plan.partial, permutes)
