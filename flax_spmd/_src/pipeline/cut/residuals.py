"""Residuals: the values that a stage keeps from a microbatch's forward until its backward.

JAX keeps every value that differentiation happens to use. Most can be recomputed from fewer bytes by
cheap elementwise operations, and some are computed for the backward alone. The fewest bytes to keep are
a minimum cut. Its graph has the values and equations of the forward as nodes, between the forward's
inputs and the values that the backward reads; cutting a value means keeping it, at a capacity of its
bytes. Recomputation follows Chen et al., arXiv:1604.06174, section 4; the cut follows the min-cut
partitioner of PyTorch's functorch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from flax_spmd._src.pipeline.cut.equations import Equation, Value, needed

_VIEWS = (
  'iota broadcast_in_dim reshape squeeze expand_dims transpose rev slice dynamic_slice copy stop_gradient '
  'sharding_constraint'
)
_ELEMENTWISE = (
  'abs add add_any and ceil clamp convert_element_type cos div eq erf exp exp2 expm1 floor ge gt integer_pow '
  'is_finite le log log1p logistic lt max min mul ne neg not or pad pow reduce_max reduce_sum rsqrt select_n '
  'sign sin sqrt square sub tanh xor'
)
VIEWS = frozenset(_VIEWS.split())
"""Operations without arithmetic, cheaper to repeat than to store their results."""
CHEAP = VIEWS | frozenset(_ELEMENTWISE.split())
"""Memory-bound elementwise operations, cheaper to repeat than to store their results."""


class Recomputation(NamedTuple):
  """The equations of a forward that its backward evaluates.

  Attributes:
    moved: equations evaluated in the backward only.
    repeated: equations evaluated in both.
  """

  moved: set[Equation]
  repeated: set[Equation]


def choose(
  forward: Sequence[Equation], used: set[Value], outputs: set[Value], available: set[Value]
) -> Recomputation:
  """Chooses the residuals of a stage that take the fewest bytes.

  Args:
    forward: the equations of its forward.
    used: the values that its backward reads.
    outputs: the values that its forward computes for other tasks.
    available: values that the backward can read at no cost.

  Example:
    >>> from flax_spmd._src.pipeline.cut.equations import Value, traced
    >>> x = Value(jax.typeof(jnp.ones((8, 8))))
    >>> (product, sine, half), [result] = traced(lambda x: [jnp.sin(x @ x) * 0.5], x)
    >>> choose([product, sine, half], set(half.outputs), set(), {x}).repeated == set()
    True
    >>> result = choose([product, sine, half], {*sine.outputs, *half.outputs}, set(half.outputs), set())
    >>> result.repeated == {half}  # the sine is kept: both follow from it
    True
  """
  graph = _FlowNetwork()
  producer = {value: equation for equation in forward for value in equation.outputs}
  required = set(needed(forward, outputs))
  values = set(producer).union(*(equation.values for equation in forward), used) - available
  users: dict[Value, list[Equation]] = defaultdict(list)
  for equation in forward:
    for value in set(equation.values) & values:
      users[value].append(equation)
  for value in values:
    graph.add(producer.get(value, _SOURCE), value, max(value.bytes, 1))
    for user in users[value]:
      graph.add(value, user)
    if value in used:
      graph.add(value, _SINK)
  for equation in forward:
    if equation.name in CHEAP:
      continue
    if equation in required:
      graph.add(_SOURCE, equation)
    for value in equation.outputs:  # it runs once: if a user runs in the forward, so does it
      for user in users[value]:
        graph.add(user, equation)
  in_forward = graph.source_side()
  in_backward = {equation for equation in forward if equation not in in_forward}
  return Recomputation(in_backward - required, in_backward & required)


_SOURCE, _SINK = 'forward', 'backward'


class _FlowNetwork:
  """A graph with capacities from `_SOURCE` to `_SINK`, whose minimum cut scipy computes."""

  def __init__(self):
    self._numbers: dict[Hashable, int] = {_SOURCE: 0, _SINK: 1}
    self._edges: dict[tuple[int, int], float] = {}

  def add(self, start: Hashable, end: Hashable, capacity: float = float('inf')) -> None:
    """Adds an edge. With infinite capacity it is never cut."""
    key = self._number(start), self._number(end)
    self._edges[key] = max(self._edges.get(key, 0), capacity)

  def _number(self, node: Hashable) -> int:
    return self._numbers.setdefault(node, len(self._numbers))

  def source_side(self) -> set[Hashable]:
    """The nodes on the source's side of the minimum cut. Capacities are rounded to 32-bit integers."""
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
    # of several minimum cuts, the one with the fewest equations on the backward's side
    beyond = set(breadth_first_order(left.T.tocsr(), 1, return_predecessors=False).tolist())
    return {node for node, number in self._numbers.items() if number not in beyond}
