"""Shardings outside the loop: a gradient, and the sum of gradients in the loop, takes its parameter's.

With any other sharding, every microbatch would move the sum. A program does not name the parameter of a
gradient. But an optimizer combines the two element by element. So values that are combined element by
element form a group, and all values of a group share one spec.
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


class ElementwiseGroups:
  """Groups of values that are combined element by element, as a union-find structure."""

  def __init__(self, equations: Iterable[Equation]):
    self._parent: dict[Value, Value] = {}
    for one in equations:
      if one.name in _BY_ELEMENT and one.outputs[0].aval.shape:
        self.merge(
          *(each for each in (*one.values, one.outputs[0]) if _same_shape(each, one.outputs[0]))
        )

  def merge(self, *values: Value) -> None:
    """Merges the groups of some values."""
    for value in values[1:]:
      self._parent[self._root(value)] = self._root(values[0])

  def _root(self, value: Value) -> Value:
    while self._parent.setdefault(value, value) is not value:
      self._parent[value] = value = self._parent[self._parent[value]]
    return value

  def specs(
    self, known: Mapping[Value, PartitionSpec], values: Iterable[Value]
  ) -> dict[Value, PartitionSpec]:
    """The specs of values in groups with a known spec; other values are left out."""
    by_group: dict[Value, PartitionSpec] = {}
    for value, spec in known.items():
      by_group.setdefault(self._root(value), spec)
    return {value: by_group[self._root(value)] for value in values if self._root(value) in by_group}


def _same_shape(one: Value, other: Value) -> bool:
  return one.aval.shape == other.aval.shape
