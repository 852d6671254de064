"""Weight gradients: the products that compute them wait for other reductions, and their operands wait with them.

XLA's latency-hiding scheduler puts work between the start and the end of a collective. A reduction of one group of
gradients hides behind the products whose results another group reduces later. These products are the last to run of
all that may run then, after the gradients of the activations:

* The gradients of norms and biases, which are sums in 32 bits, depend on the whole backward pass. They are reduced
  first; all gradients of matrices in 16 bits are computed after it. Those in 32 bits are reduced together with the sums,
  if one collective takes them all, and are computed after it as well.
* Of several groups of matrices, each is computed once the activations' gradients of all of its layers are known.
  The first group has no other to wait for, and is computed as the program is written.

Where the backward pass itself needs collectives, as with tensor parallelism, they hide behind the products of the same
layer.

A product before a loop whose result is read after it, as the gradient of a tied table, hides the gather of what the loop
has computed if nothing reduces its result. If something does, it hides only an array that takes several collectives in
turn: its own reduction hides behind the loop.

Convolutions are computed as the program is written where their gradients are converted to another dtype after the reduction. In
32 bits nothing converts them, and each has been seen to run after the gradient of the next filter's input. Where the
backward pass itself reduces the gradient of an activation, those of all filters before it wait for it.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from flax_spmd._src.estimate.collective_combiner import LIMIT

SCHEDULING_PLATFORMS = ('cuda',)  # these delay products
_SCALARS = 64  # bytes of a group; metrics, which are reduced last
_FILTERS = 4  # the most gradients of filters that have been seen to wait


class _Reduction(NamedTuple):
  """A partial sum, with the operation that made it, and the collectives that it is or may be combined with."""

  group: int
  key: Hashable
  made: int
  kind: str
  bytes: float
  is_narrow: bool = False

  @property
  def is_product(self) -> bool:
    return self.kind == 'dot_general'

  @property
  def is_filter(self) -> bool:
    return self.kind in ('convolution', 'filter')


class _Step(NamedTuple):
  """Memory while one operation runs, the sizes of the values that end there, and the values that it reads."""

  memory: float
  ended: Mapping[int, float]
  read: Sequence[int]
  written: float


class WeightGradients:
  """The memory of a step's operations in the order of the program, and as they are scheduled."""

  def __init__(self) -> None:
    self._steps: list[_Step] = []
    self._reductions: list[_Reduction] = []
    self._hiding: dict[int, int] = {}  # by product, the operation whose operand's exchange it hides
    self._needed = 0  # by products: a bit for each combined collective

  @property
  def index(self) -> int:
    """The index of the next operation."""
    return len(self._steps)

  def add_step(
    self, memory: float, ended: Mapping[int, float], read: Sequence[int], written: float
  ) -> None:
    """Adds an operation.

    Args:
      memory: bytes in use while it runs.
      ended: sizes in bytes of the values that no later operation reads.
      read: the stored values that it reads.
      written: bytes of its results.
    """
    self._steps.append(_Step(memory, ended, read, written))

  def add_product(self, needed: int) -> None:
    """Adds the collectives that a product depends on, as a bit set."""
    self._needed |= needed

  def add_hiding(self, product: int, until: int, is_long: bool) -> bool:
    """Adds an exchange of a loop's result that a product before the loop can hide; returns whether it does.

    Args:
      product: index of the product.
      until: index of the operation that needs the array.
      is_long: whether the array takes several collectives in turn.
    """
    is_reduced = any(one.made == product for one in self._reductions)
    if product in self._hiding or (is_reduced and not is_long):
      return False
    self._hiding[product] = until
    return True

  def add_reduction(
    self, group: int, key: Hashable, made: int, kind: str, size: float, is_narrow: bool = False
  ) -> None:
    """Adds a reduction that is needed now.

    Args:
      group: index of the combined collective that it depends on or that depends on it.
      key: kind, dtype and axes of the collective; those with another one are never combined with it.
      made: index of the operation whose result is reduced; -1 for one in a loop.
      kind: kind of that operation, or 'filter' for a convolution whose result has the shape of one.
      size: bytes.
      is_narrow: whether its elements have less than 32 bits.
    """
    self._reductions.append(_Reduction(group, key, made, kind, size, is_narrow))

  def has_sums_after(self, index: int) -> bool:
    """Whether products wait for the reduction of a result that an operation after an index computes."""
    return any(one.made > index and self._needed >> one.group & 1 for one in self._reductions)

  def peak(self) -> float:
    """The peak memory in bytes, with the products delayed."""
    delays = self._delays(0) | self._filter_delays(1) | self._backward_delays()
    return self._peak(delays | self._hiding)

  def _backward_delays(self) -> dict[int, int]:
    """By the index of each gradient of a filter, that of the next result that the backward pass itself reduces."""
    needed = sorted(
      one.made
      for one in self._reductions
      if self._needed >> one.group & 1 and one.made >= 0 and one.kind != 'filter'
    )
    made = [one.made for one in self._reductions if one.is_filter and one.made >= 0]
    filters = set(made).difference(needed)
    nexts = {made: bisect.bisect(needed, made) for made in filters}
    return {made: needed[index] for made, index in nexts.items() if index < len(needed)}

  def spread(self) -> float:
    """The most bytes by which the peak may be off, where the gradients of matrices have several groups, or one with sums.

    XLA's scheduler has been seen to compute the products of a group as they are written, and after those of the next
    group.
    """
    others = [{}]
    if self._has_several_groups:
      others.append(self._delays(1))
    elif not self._waits_for_sums:
      return 0.0
    peak = self._peak(self._delays(0))
    return max(abs(self._peak(delays) - peak) for delays in others)

  def _peak(self, delays: Mapping[int, int]) -> float:
    added = [0.0] * (len(self._steps) + 1)  # changes of the memory from one operation to the next
    ends = self._ends
    held: dict[int, int] = {}
    for made, until in delays.items():
      for value in self._steps[made].read:
        held[value] = max(until, held.get(value, 0))
      added[made] -= self._steps[made].written
      added[until] += self._steps[made].written
    for value, until in held.items():
      if ends.get(value, until) < until:
        size = self._steps[ends[value]].ended[value]
        added[ends[value] + 1] += size
        added[until] -= size
    memory = [step.memory for step in self._steps]
    return max(0.0, *map(operator.add, memory, itertools.accumulate(added)))

  @functools.cached_property
  def _ends(self) -> dict[int, int]:
    """The index of the operation that each value ends with."""
    return {value: index for index, step in enumerate(self._steps) for value in step.ended}

  @property
  def _final(self) -> list[_Reduction]:
    """The reductions that no product waits for."""
    return [one for one in self._reductions if not self._needed >> one.group & 1]

  @property
  def _has_several_groups(self) -> bool:
    """Whether the gradients of matrices are too many for one collective."""
    return sum(any(one.is_product for one in group) for group in _combined(self._final)) > 1

  @property
  def _waits_for_sums(self) -> bool:
    """Whether the gradients of all matrices, in 32 bits, are reduced together with sums, as those of biases are."""
    return not self._has_several_groups and any(
      any(one.is_product and not one.is_narrow for one in group)
      and any(one.kind == 'reduce' for one in group)
      for group in _combined(self._final)
    )

  def filter_spread(self) -> float:
    """The most bytes by which the peak may be off, if gradients of filters wait for others, or as matrices do, or longer."""
    if not any(one.is_filter for one in self._reductions):
      return 0.0
    delays = [self._delays(0) | self._filter_delays(further) for further in (1, 0, _FILTERS)]
    other = WeightGradients()
    other._steps, other._needed = self._steps, self._needed
    other._reductions = [
      one._replace(kind='dot_general') if one.is_filter else one for one in self._reductions
    ]
    delays += [other._delays(0), other._delays(1)]
    peaks = [self._peak(one) for one in delays]
    return max(abs(peak - peaks[0]) for peak in peaks)

  def _filter_delays(self, further: int) -> dict[int, int]:
    """By the index of each gradient of a filter in 32 bits, that of the one that it waits for."""
    made = sorted(
      one.made for one in self._final if one.is_filter and not one.is_narrow and one.made >= 0
    )
    return dict(zip(made, made[further:] + made[-1:] * further)) if further else {}

  def _delays(self, further: int) -> dict[int, int]:
    """By the index of each product that is delayed, that of the operation that it waits for.

    Args:
      further: number of further groups that a group waits for.
    """
    final = self._final
    products = [one.made for one in final if one.is_product and one.made >= 0]
    if not products or any(
      self._needed >> one.group & 1 and min(products) < one.made <= max(products)
      for one in self._reductions
    ):  # the backward pass needs collectives itself
      return {}
    ordered = sorted(
      (group for group in _combined(final) if sum(one.bytes for one in group) > _SCALARS),
      key=lambda group: (any(one.is_product for one in group), max(one.made for one in group)),
    )
    waits = self._waits_for_sums
    lasts = list(itertools.accumulate((max(one.made for one in group) for group in ordered), max))
    return {
      one.made: last
      for number, group in enumerate(ordered)
      if number or further or waits  # the first one waits for nothing else
      for last in [lasts[min(number + further, len(lasts) - 1)]]
      for one in group
      if one.is_product and 0 <= one.made < last
    }


def _combined(reductions: Sequence[_Reduction]) -> list[list[_Reduction]]:
  """The reductions in the groups that XLA combines, which it fills from the end of the program."""
  groups: dict[Hashable, list[list[_Reduction]]] = {}
  for one in sorted(reductions, key=lambda one: -one.made):
    filled = groups.setdefault(one.key, [[]])
    if filled[-1] and sum(other.bytes for other in filled[-1]) + one.bytes > LIMIT:
      filled.append([])
    filled[-1].append(one)
  return [group for filled in groups.values() for group in filled]
