"""Lying: how values outside of the loop lie on the devices of their rank.

Arguments lie as they come. A gradient is to lie as its parameter does, and so are the sums of gradients
that the loop carries, or each microbatch would move them. Nobody says which parameter that is; but the
update of an optimizer combines them element by element, so what is combined so is of one kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jax.sharding import PartitionSpec

from flax_spmd._src.pipeline.cut import residuals
from flax_spmd._src.pipeline.cut.equations import Equation, Value

_BY_ELEMENT = residuals.CHEAP - residuals.VIEWS - {'reduce_max', 'reduce_sum', 'pad'} | {
  'copy',
  'stop_gradient',
}


class Kinds:
  """Values by kind: those that are combined with each other, element by element."""

  def __init__(self, equations: Iterable[Equation]):
    self._parent: dict[Value, Value] = {}
    for one in equations:
      if one.name in _BY_ELEMENT and one.outputs[0].aval.shape:
        self.join(*(each for each in (*one.values, one.outputs[0]) if _same_shape(each, one.outputs[0])))

  def join(self, *values: Value) -> None:
    """Makes values one kind."""
    for value in values[1:]:
      self._parent[self._root(value)] = self._root(values[0])

  def _root(self, value: Value) -> Value:
    while self._parent.setdefault(value, value) is not value:
      self._parent[value] = value = self._parent[self._parent[value]]
    return value

  def specs(
    self, known: Mapping[Value, PartitionSpec], wanted: Iterable[Value]
  ) -> dict[Value, PartitionSpec]:
    """How values are to lie, by those of their kind of which it is known."""
    by_kind: dict[Value, PartitionSpec] = {}
    for value, spec in known.items():
      by_kind.setdefault(self._root(value), spec)
    return {value: by_kind[self._root(value)] for value in wanted if self._root(value) in by_kind}


def _same_shape(one: Value, other: Value) -> bool:
  return one.aval.shape == other.aval.shape
