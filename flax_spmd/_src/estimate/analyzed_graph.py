"""Analyzed graphs: a program with all analyses of it that do not depend on the layout, and the results of earlier walks over it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from flax_spmd._src.compare.hardware import user_flags
from flax_spmd._src.estimate.graph import PRODUCTS, Block, Graph, GraphValue, Op, Spec
from flax_spmd._src.estimate.kept_results import KeptResults, kept_results
from flax_spmd._src.estimate.live_buffers import (
  BARRIER,
  BlockLiveness,
  argument_derived_values,
  liveness,
  rematerialisable_values,
)
from flax_spmd._src.estimate.loops import across_loops, forwarded_sums, loop_sums, origins
from flax_spmd._src.estimate.operations import is_elementwise
from flax_spmd._src.estimate.partitioned_operations import Partition
from flax_spmd._src.estimate.requirements import Requirement
from flax_spmd._src.estimate.resharding import CollectiveOp
from flax_spmd._src.estimate.wire_dtypes import wire_values
from flax_spmd._src.hlo.trip_counts import SWAPPED, UNKNOWN, Trips, conjunction, steps

CONSTRAINTS = ('sharding_constraint', 'reshard')
IDENTITIES = (*CONSTRAINTS, BARRIER)  # their results are their operands, one by one
_REMEMBERED = 2**15  # requirements, and collectives, for each mesh


class Known(NamedTuple):
  """The results that are remembered under a mesh: of operations, and the collectives between two shardings of an array."""

  requirements: dict[tuple, Requirement]
  partitions: dict[tuple, Partition | None]
  collectives: dict[tuple[GraphValue, Spec, Spec], list[CollectiveOp]]
  settled: set[tuple[GraphValue, Spec, Spec]]  # those that a partitioner has found


class Remembered(NamedTuple):
  """The results of earlier walks over programs that have most of their operations in common.

  Attributes:
    numbers: a number per operation, equal for those with equal requirements, by all that these depend on.
    known: the results that are remembered under each mesh.
  """

  numbers: dict[tuple, int]
  known: dict[tuple, Known]


class AnalyzedGraph:
  """A graph, with all analyses of it that do not depend on the layout.

  Args:
    graph: the program.
    remembered: the results of earlier walks, which are added to.

  Attributes:
    graph: the program.
    rematerialisable: values that every device can compute by itself.
    argument_derived: arguments of the step, and views of them.
    wire_values: values that are sent in a narrower dtype.
    constants: scalar integer constants.
    uses: number of uses per value.
    users: operations on each value.
    transposed: operands of transposes, by their results.
    added: products that are added to an earlier one, and not to a sum; nothing else reads them.
    forwarded: results of operations that rearrange or widen a partial sum before it is reduced.
    loop_sums: values that are added to a loop's carry, with the loop's result.
    filters: arguments of the shapes of convolutions' filters, by shape.
    across_loops: products before a loop that are read after it, and the values that wait for a loop.
    origins: number of loops around the place where each value is computed.
    dtype: operands' dtype of most matrix products, such as `bf16` or `f32`.
    alike: a number per operation, by its first result; equal for operations with equal requirements.
    elementwise: operands of elementwise operations that devices cannot compute by themselves, by the first result.
  """

  def __init__(self, graph: Graph, remembered: Remembered):
    self.graph = graph
    self.alike: dict[int, int] = {}
    self._remembered = remembered
    self.rematerialisable = rematerialisable_values(graph)
    self.elementwise: dict[int, tuple[int, ...]] = {}
    self.argument_derived = argument_derived_values(graph)
    self.filters: dict[tuple[int, ...], list[int]] = {}
    self._liveness: dict[str, BlockLiveness] = {}
    self._kept: dict[str, KeptResults] = {}
    self.wire_values = wire_values(graph)
    self.constants: dict[int, int] = {}
    self._trips: dict[int, Trips] = {}  # of loops, by their first results
    self.uses: dict[int, int] = {}
    self.users: dict[int, list[Op]] = {}
    self.transposed: dict[int, int] = {}
    product_sizes: dict[str, int] = {}
    self.added: set[int] = set()
    self._scan(graph.main, product_sizes)
    self._find_added(graph.main)
    self._number(graph.main)
    for value in graph.main.arguments:
      if graph.values[value].shape in self.filters:
        self.filters[graph.values[value].shape].append(value)
    self.loop_sums = loop_sums(graph, self.uses)
    self.forwarded = forwarded_sums(graph, self.uses, self.loop_sums)
    self.origins = origins(graph)
    self.across_loops = across_loops(graph)
    self.dtype = _chip_dtype(max(product_sizes, key=lambda dtype: product_sizes[dtype], default='f32'))

  def _scan(self, block: Block, product_sizes: dict[str, int]) -> None:
    for op in block.ops:
      for value in op.operands:
        self.uses[value] = self.uses.get(value, 0) + 1
        self.users.setdefault(value, []).append(op)
      if op.kind == 'transpose':
        self.transposed[op.results[0]] = op.operands[0]
      if op.attributes.get('value') is not None:
        self.constants[op.results[0]] = op.attributes['value']
      if op.kind in PRODUCTS:
        dtype = self.graph.values[op.operands[0]].dtype
        size = math.prod(self.graph.values[op.results[0]].shape)
        product_sizes[dtype] = product_sizes.get(dtype, 0) + size
      if op.kind == 'convolution' and op.operands[1] in self.argument_derived:
        self.filters[self.graph.values[op.operands[1]].shape] = []
      for inner in op.blocks:
        self._scan(inner, product_sizes)
    for value in block.returned:
      self.uses[value] = self.uses.get(value, 0) + 1

  def _find_added(self, block: Block) -> None:
    """Finds sums of two products; of each, the later product is added to the other one as it is computed."""
    products: dict[int, int] = {}  # that are read once, by themselves and by their transposes
    for op in block.ops:
      found = sorted({products[value] for value in op.operands if value in products})
      if op.kind == 'add':
        self.added.update(found[1:])
      elif op.kind == 'dot_general' and self.uses.get(op.results[0]) == 1:
        products[op.results[0]] = op.results[0]
      elif op.kind == 'transpose' and found and self.uses.get(op.results[0]) == 1:
        products[op.results[0]] = found[0]
      for inner in op.blocks:
        self._find_added(inner)

  def _number(self, block: Block) -> None:
    numbers = self._remembered.numbers
    for op in block.ops:
      if op.results and not op.blocks and op.kind not in IDENTITIES and is_elementwise(op):
        sources = tuple(value for value in op.operands if value not in self.rematerialisable)
        self.elementwise[op.results[0]] = sources
      if op.results and not op.blocks:
        arrays = [(self.graph.values[value], self.wire_values.get(value)) for value in op.operands]
        free = tuple(value in self.rematerialisable for value in op.operands)
        attributes = repr(sorted(op.attributes.items()))
        about = op.kind, attributes, free, *arrays, self.graph.values[op.results[0]]
        self.alike[op.results[0]] = numbers.setdefault(about, len(numbers))
      for inner in op.blocks:
        self._number(inner)

  def known(self, sizes: Mapping[str, int], platform: str) -> Known:
    """The results of earlier walks under a mesh: layouts of a search have most of them in common."""
    key = platform, user_flags(), *sizes.items()
    known = self._remembered.known.setdefault(key, Known({}, {}, {}, set()))
    for one in known:
      if len(one) > _REMEMBERED:
        one.clear()
    return known

  def liveness(self, platform: str) -> BlockLiveness:
    """The liveness of the main block on a platform: that of the target, whatever platform the step is lowered for."""
    if platform not in self._liveness:
      self._liveness[platform] = liveness(self.graph, platform, self.kept(platform))
    return self._liveness[platform]

  def kept(self, platform: str) -> KeptResults:
    """The elementwise results that are stored on a platform, or not, against the common rule."""
    if platform not in self._kept:
      given = self.argument_derived | self.rematerialisable
      self._kept[platform] = kept_results(self.graph, platform, given)
    return self._kept[platform]

  def trips(self, loop: Op) -> Trips:
    """The number of iterations of a loop."""
    if loop.results[0] not in self._trips:
      self._trips[loop.results[0]] = self._allowed(loop.blocks[0].returned[0], loop)
    return self._trips[loop.results[0]]

  def _allowed(self, test: int, loop: Op) -> Trips:
    """The iterations until a value of a loop's condition is false: a comparison, or a conjunction of comparisons."""
    made = next((op for op in loop.blocks[0].ops if test in op.results), None)
    if made and made.kind == 'and':
      return conjunction([self._allowed(value, loop) for value in made.operands])
    if made is None or made.kind != 'compare':
      return UNKNOWN
    direction = made.attributes['direction']
    if direction == 'NE' and self.graph.values[made.operands[0]].dtype == 'i1':
      return self._allowed(made.operands[0], loop)  # from false, as JAX converts to bool
    sides = made.operands, made.operands[::-1]
    for (counter, limit), way in zip(sides, (direction, SWAPPED.get(direction, ''))):
      start, end = (self._initial(value, loop) for value in (counter, limit))
      step = self._step(counter, loop)
      if start is not None and step and end is not None and self._step(limit, loop) == 0:
        number = steps(start, step, end, way)
        return UNKNOWN if number is None else Trips(number, 'condition')
    return UNKNOWN

  def _initial(self, value: int, loop: Op) -> int | None:
    """The integer that a value of a loop's condition is at first; None if it is not constant."""
    outer = dict(zip(loop.blocks[0].arguments, loop.operands))
    return self.constants.get(outer.get(value, value))

  def _step(self, value: int, loop: Op) -> int | None:
    """The constant that each iteration adds to a value of the condition; None if it does something else."""
    condition, body = loop.blocks
    if value not in condition.arguments:
      return 0
    index = condition.arguments.index(value)
    before, after = body.arguments[index], body.returned[index]
    made = next((op for op in body.ops if after in op.results), None)
    if before == after:
      return 0
    if made is None or before not in made.operands or made.kind not in ('add', 'subtract'):
      return None
    amounts = [self.constants.get(operand) for operand in made.operands if operand != before]
    if made.kind == 'add':
      return amounts[0] if amounts else None
    return -amounts[0] if made.operands[0] == before and amounts and amounts[0] else None


def _chip_dtype(dtype: str) -> str:
  """A dtype in the spelling of the table of chips."""
  return {'i8': 'int8', 'ui8': 'int8'}.get(dtype, 'f8' if dtype.startswith('f8') else dtype)
