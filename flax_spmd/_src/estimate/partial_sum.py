"""Partial sums: results of products and lookups that devices have yet to add up.

A partial sum is rearranged, cut or widened like any other array, and reduced when an operation needs its total.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flax_spmd._src.estimate.graph import GraphValue, Op, Spec, replicated, used_axes


class PartialSum(NamedTuple):
  """A partial sum on each device, not yet reduced.

  Its shape and dtype are those in which it is reduced: before a conversion to a wider dtype.
  """

  array: GraphValue
  natural_sharding: Spec
  partial_axes: tuple[str, ...]
  times: int
  kind: str  # of the operation that made it
  source: str
  product: int  # the value that is stored
  made: int = -1  # index of the operation in the main block
  is_total: bool = False  # of all iterations of a loop
  is_cut: bool = False  # sharded over partial axes before it is widened

  def of(self, op: Op, values: Sequence[GraphValue]) -> PartialSum | None:
    """The sum after an operation that only rearranges or widens it; None if the operation cuts a sharded dimension."""
    before, after = (values[value] for value in (op.operands[0], op.results[0]))
    natural, array = self.natural_sharding, self.array
    if op.kind == 'transpose':
      natural = tuple(natural[dim] for dim in op.attributes['permutation'])
    elif op.kind == 'reshape':
      if used_axes(natural):
        return None
      natural = replicated(len(after.shape))
    elif op.kind == 'slice' and any(
      axes and one != other for axes, one, other in zip(natural, before.shape, after.shape)
    ):
      return None
    return self._replace(natural_sharding=natural, array=array._replace(shape=after.shape))
