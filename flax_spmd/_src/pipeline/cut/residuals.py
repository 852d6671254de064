"""Residuals: the values that a stage keeps from a microbatch's forward until its backward.

JAX keeps every value that differentiation happens to use. Most can be recomputed from fewer bytes by
cheap elementwise operations, and some are computed for the backward alone. The fewest bytes to keep are
a minimum cut. Its graph has the values and equations of the forward as nodes, between the forward's
inputs and the values that the backward reads; cutting a value means keeping it, at a capacity of its
bytes. Recomputation follows Chen et al., arXiv:1604.06174, section 4; the cut follows the min-cut
partitioner of PyTorch's functorch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from flax_spmd._src.pipeline.cut.equations import Equation, Value, needed

_VIEWS = (
  'iota broadcast_in_dim reshape squeeze expand_dims transpose rev slice dynamic_slice copy stop_gradient '
  'sharding_constraint'
)
_ELEMENTWISE = (
  'abs add add_any and ceil clamp complex conj convert_element_type cos div eq erf exp exp2 expm1 floor ge gt imag '
  'integer_pow is_finite le log log1p logistic lt max min mul ne neg not one_minus_square or pad pow real reduce_max '
  'reduce_sum rem round rsqrt select_n sign sin sqrt square sub tan tanh xor'
)
VIEWS = frozenset(_VIEWS.split())
"""Operations without arithmetic, cheaper to repeat than to store their results."""
CHEAP = VIEWS | frozenset(_ELEMENTWISE.split())
"""Memory-bound elementwise operations, cheaper to repeat than to store their results."""


def choose(
  forward: Sequence[Equation], used: set[Value], outputs: set[Value], available: set[Value]
) -> tuple[set[Equation], set[Equation]]:
  """The equations that a stage's backward evaluates alone, and those in both passes, for the fewest bytes of residuals.

  Args:
    forward: the equations of its forward.
    used: the values that its backward reads.
    outputs: the values that its forward computes for other tasks.
    available: values that the backward can read at no cost.

  Example:
    >>> from flax_spmd._src.pipeline.cut.equations import Value, traced
    >>> x = Value(jax.typeof(jnp.ones((8, 8))))
    >>> (product, sine, half), [result] = traced(lambda x: [jnp.sin(x @ x) * 0.5], x)
    >>> choose([product, sine, half], set(half.outputs), set(), {x})[1] == set()
    True
    >>> _, repeated = choose([product, sine, half], {*sine.outputs, *half.outputs}, set(half.outputs), set())
    >>> repeated == {half}  # the sine is kept: both follow from it
    True
  """
  capacities: dict[tuple[Hashable, Hashable], float] = defaultdict(float)

  def add(start: Hashable, end: Hashable, capacity: float = math.inf) -> None:
    """Adds an edge; one of infinite capacity is never cut."""
    capacities[start, end] = max(capacities[start, end], capacity)

  producer = {value: equation for equation in forward for value in equation.outputs}
  required = set(needed(forward, outputs))
  values = set(producer).union(*(equation.values for equation in forward), used) - available
  users: dict[Value, list[Equation]] = defaultdict(list)
  for equation in forward:
    for value in set(equation.values) & values:
      users[value].append(equation)
  for value in values:
    add(producer.get(value, _SOURCE), value, max(value.bytes, 1))
    for user in users[value]:
      add(value, user)
    if value in used:
      add(value, _SINK)
  for equation in forward:
    if equation.name in CHEAP:
      continue
    if equation in required:
      add(_SOURCE, equation)
    for value in equation.outputs:  # it runs once: if a user runs in the forward, so does it
      for user in users[value]:
        add(user, equation)
  in_forward = _source_side(capacities)
  in_backward = {equation for equation in forward if equation not in in_forward}
  return in_backward - required, in_backward & required


_SOURCE, _SINK = 'forward', 'backward'


def _source_side(capacities: Mapping[tuple[Hashable, Hashable], float]) -> set[Hashable]:
  """The nodes on the forward's side of the minimum cut of a graph; capacities are rounded to 32-bit integers."""
  if not capacities:
    return set()
  numbers: dict[Hashable, int] = {_SOURCE: 0, _SINK: 1}
  edges = [[numbers.setdefault(node, len(numbers)) for node in edge] for edge in capacities]
  finite = sum(one for one in capacities.values() if one < math.inf)
  scale = min(1.0, 2**29 / max(finite, 1))
  rounded = [2**30 if one == math.inf else max(int(one * scale), 1) for one in capacities.values()]
  rows, columns = np.array(edges, np.int32).T
  graph = csr_array((np.array(rounded, np.int32), (rows, columns)), shape=(len(numbers), len(numbers)))
  left = graph - maximum_flow(graph, 0, 1).flow
  left.data = np.where(left.data > 0, left.data, 0)
  left.eliminate_zeros()
  # of several minimum cuts, the one with the fewest equations on the backward's side
  beyond = set(breadth_first_order(left.T.tocsr(), 1, return_predecessors=False).tolist())
  return {node for node, number in numbers.items() if number not in beyond}
