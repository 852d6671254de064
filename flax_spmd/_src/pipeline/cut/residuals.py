"""Residuals: what a stage keeps from its forward for its backward.

JAX keeps what differentiation happens to use. Most of that can be computed again from less by cheap
operations, and some of it is only computed for the backward. What to keep is a minimum cut: of a graph of
values and equations, with the bytes of a value as the capacity of keeping it, between what the forward has
and what the backward uses. (As in Chen et al., arXiv:1604.06174, section 4; the cut is PyTorch
functorch's min-cut partitioner's.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from flax_spmd._src.pipeline.cut.equations import Equation, Value

VIEWS = frozenset(
  [
    'iota',
    'broadcast_in_dim',
    'reshape',
    'squeeze',
    'expand_dims',
    'transpose',
    'rev',
    'slice',
    'copy',
    'stop_gradient',
    'sharding_constraint',
  ]
)
"""Operations that compute nothing: they are cheaper to do again than to hand on."""

CHEAP = VIEWS | frozenset(
  [
    'abs',
    'add',
    'and',
    'ceil',
    'clamp',
    'convert_element_type',
    'cos',
    'div',
    'eq',
    'erf',
    'exp',
    'exp2',
    'expm1',
    'floor',
    'ge',
    'gt',
    'integer_pow',
    'is_finite',
    'le',
    'log',
    'log1p',
    'logistic',
    'lt',
    'max',
    'min',
    'mul',
    'ne',
    'neg',
    'not',
    'or',
    'pad',
    'pow',
    'reduce_max',
    'reduce_sum',
    'rsqrt',
    'select_n',
    'sign',
    'sin',
    'sqrt',
    'square',
    'sub',
    'tanh',
    'xor',
    'add_any',
  ]
)
"""Operations on elements, bound by memory: doing them again costs less than keeping their results."""


class Choice(NamedTuple):
  """Which equations of a forward are done in the backward.

  Attributes:
    moved: those that only the backward needs.
    again: those that both do.
  """

  moved: set[Equation]
  again: set[Equation]


def choose(
  forward: Sequence[Equation], used: set[Value], handed_on: set[Value], kept_anyway: set[Value]
) -> Choice:
  """Chooses what a stage keeps, so that it is the fewest bytes.

  Args:
    forward: the equations of its forward.
    used: the values that its backward uses.
    handed_on: the values that its forward has to make for others.
    kept_anyway: values that are there for the backward at no cost.

  Example:
    >>> from flax_spmd._src.pipeline.cut.equations import Value, traced
    >>> x = Value(jax.typeof(jnp.ones((8, 8))))
    >>> (product, sine, half), [result] = traced(lambda x: [jnp.sin(x @ x) * 0.5], x)
    >>> choose([product, sine, half], set(half.outputs), set(), {x}).again == set()
    True
    >>> found = choose([product, sine, half], {*sine.outputs, *half.outputs}, set(half.outputs), set())
    >>> found.again == {half}  # the sine is kept: it gives both
    True
  """
  graph = _Graph()
  maker = {value: equation for equation in forward for value in equation.outputs}
  must = _needed_by(handed_on, maker)
  values = set(maker).union(*(equation.values for equation in forward), used) - kept_anyway
  users: dict[Value, list[Equation]] = defaultdict(list)
  for equation in forward:
    for value in set(equation.values) & values:
      users[value].append(equation)
  for value in values:
    graph.add(maker.get(value, _HERE), value, max(value.bytes, 1))
    for user in users[value]:
      graph.add(value, user)
    if value in used:
      graph.add(value, _THERE)
  for equation in forward:
    if equation.name in CHEAP:
      continue
    if equation in must or equation.has_effects:
      graph.add(_HERE, equation)
    for value in equation.outputs:  # it is done once, so where a user needs it, it is
      for user in users[value]:
        graph.add(user, equation)
  here = graph.side()
  there = {equation for equation in forward if equation not in here}
  return Choice(there - must, there & must)


_HERE, _THERE = 'forward', 'backward'


def _needed_by(values: Iterable[Value], maker: dict[Value, Equation]) -> set[Equation]:
  """The equations that values come from."""
  found: set[Equation] = set()
  open_ = [maker[value] for value in values if value in maker]
  while open_:
    equation = open_.pop()
    if equation not in found:
      found.add(equation)
      open_ += [maker[value] for value in equation.values if value in maker]
  return found


class _Graph:
  """A graph with capacities, from `_HERE` to `_THERE`; scipy finds its minimum cut."""

  def __init__(self):
    self._numbers: dict[Hashable, int] = {_HERE: 0, _THERE: 1}
    self._edges: dict[tuple[int, int], float] = {}

  def add(self, start: Hashable, end: Hashable, capacity: float = float('inf')) -> None:
    """An edge; without a capacity it cannot be cut."""
    key = self._number(start), self._number(end)
    self._edges[key] = max(self._edges.get(key, 0), capacity)

  def _number(self, node: Hashable) -> int:
    return self._numbers.setdefault(node, len(self._numbers))

  def side(self) -> set[Hashable]:
    """The nodes on this side of the cut. Capacities are rounded to what 32 bits can tell apart."""
    if not self._edges:
      return set()
    finite = [capacity for capacity in self._edges.values() if capacity < float('inf')]
    scale = min(1.0, 2**29 / max(sum(finite), 1))
    rows, columns = np.array(list(self._edges), np.int32).T
    capacities = [
      2**30 if one == float('inf') else max(int(one * scale), 1) for one in self._edges.values()
    ]
    size = len(self._numbers)
    graph = csr_array((np.array(capacities, np.int32), (rows, columns)), shape=(size, size))
    left = graph - maximum_flow(graph, 0, 1).flow
    left.data = np.where(left.data > 0, left.data, 0)
    left.eliminate_zeros()
    # of several cuts that are as small, the one that leaves the least to be done again
    beyond = set(breadth_first_order(left.T.tocsr(), 1, return_predecessors=False).tolist())
    return {node for node, number in self._numbers.items() if number not in beyond}
