"""Shardings outside the loop: a gradient, and the sum of gradients in the loop, takes its parameter's.

With any other sharding, every microbatch would move the sum. A program does not name the parameter of a
gradient. But an optimizer combines the two element by element. So values that are combined element by
element form a group, and all values of a group share one spec.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import PartitionSpec

from flax_spmd._src.pipeline.cut import residuals
from flax_spmd._src.pipeline.cut.equations import Equation, Value

_BY_ELEMENT = residuals.CHEAP - residuals.VIEWS - {'reduce_max', 'reduce_sum', 'pad'} | {
  'copy',
  'stop_gradient',
}


def specs_of_groups(
  equations: Iterable[Equation],
  groups: Iterable[Sequence[Value]],
  known: Mapping[Value, PartitionSpec],
  values: Iterable[Value],
) -> dict[Value, PartitionSpec]:
  """The specs of values in groups with a known spec; other values are left out.

  Args:
    equations: those whose operands and results form groups.
    groups: more values that belong together.
    known: the known specs.
    values: the values in question.
  """
  parent: dict[Value, Value] = {}  # a union-find structure

  def root(value: Value) -> Value:
    while parent.setdefault(value, value) is not value:
      parent[value] = value = parent[parent[value]]
    return value

  def merge(first: Value, *others: Value) -> None:
    for value in others:
      parent[root(value)] = root(first)

  for one in equations:
    shape = one.outputs[0].aval.shape if one.name in _BY_ELEMENT else ()
    if shape:
      merge(*(each for each in (*one.values, one.outputs[0]) if each.aval.shape == shape))
  for each in groups:
    merge(*each)
  by_group: dict[Value, PartitionSpec] = {}
  for value, spec in known.items():
    by_group.setdefault(root(value), spec)
  return {value: by_group[root(value)] for value in values if root(value) in by_group}
