"""Step programs: a lowered step, prepared and analyzed once, and its costs under any shardings.

    program = StepProgram(code, 'cuda')
    costs = program.costs(request)     # equal in every process, whatever was asked for before

A `CostRequest` has the shardings that a layout leads to, so layouts that shard every array alike have one request.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from flax_spmd._src.compare.hardware import Target
from flax_spmd._src.compare.partitioner import can_partition
from flax_spmd._src.estimate import mlir
from flax_spmd._src.estimate.analyzed_graph import AnalyzedGraph, Remembered
from flax_spmd._src.estimate.compiler_traits import mark_traits, with_folded_pads
from flax_spmd._src.estimate.cost_walk import WalkResult, walk
from flax_spmd._src.estimate.equal_operations import EqualOperations
from flax_spmd._src.estimate.graph import Axes, Spec
from flax_spmd._src.estimate.partitioned_operations import PartitionedOperations
from flax_spmd._src.estimate.partitioned_step import PartitionedStep, partitioned_step

if TYPE_CHECKING:
  from flax_spmd._src.estimate.mlir.shardings import Resolve

_PROGRAMS = 16  # that are remembered, each with other equal operations merged
_WALKS = 2**12  # whose results are remembered

Costs: TypeAlias = WalkResult | PartitionedStep


class CostRequest(NamedTuple):
  """The shardings to find the costs under.

  Attributes:
    sizes: the mesh axes with their sizes, in order.
    arguments: sharding of each argument of the program.
    results: sharding that each result needs; None where the compiler may choose.
    constraints: mesh axes of each of the constraints of the prepared module, in order; None constrains nothing.
    platform: platform to estimate for.
    flags: the user's flags for compilers.
    target: hardware to partition the whole step for, if that can be; None to only estimate it.
    code: the step as lowered under the layout, to partition that; None to partition the program.
  """

  sizes: tuple[tuple[str, int], ...]
  arguments: tuple[Spec, ...]
  results: tuple[Spec | None, ...]
  constraints: tuple[tuple[Axes | None, ...] | None, ...]
  platform: str
  flags: tuple[str, ...]
  target: Target | None = None
  code: bytes | None = None


class StepProgram:
  """A lowered step, prepared and analyzed.

  Args:
    code: MLIR bytecode of the step.
    platform: platform that it is lowered for.

  Attributes:
    code, platform: the same.
    module: the prepared step.
    dtype: operands' dtype of most matrix products, such as `bf16` or `f32`.

  Raises:
    EstimatorError: the step contains operations that cannot be estimated.
  """

  def __init__(self, code: bytes, platform: str):
    self.code, self.platform = code, platform
    self.module = mlir.prepare(code, platform)
    self._numbers = {one: number for number, one in enumerate(self.module.constraints)}
    mark_traits(self.module.graph, platform)
    self._equal = EqualOperations(self.module.graph)
    self._remembered = Remembered({}, {})
    self._merged = functools.lru_cache(_PROGRAMS)(self._merge)
    self._walks: dict[CostRequest, WalkResult] = {}
    self.dtype = self._analyze([()] * len(self.module.graph.values))[0].dtype

  def _analyze(self, specs: Sequence[Spec]) -> tuple[AnalyzedGraph, PartitionedOperations]:
    """The program with the operations merged that are equal, and sharded alike."""
    return self._merged(frozenset(self._equal.merged_values(specs).items()))

  def _merge(self, merged: frozenset[tuple[int, int]]) -> tuple[AnalyzedGraph, PartitionedOperations]:
    graph = with_folded_pads(self._equal.merge(dict(merged)))
    analyzed = AnalyzedGraph(graph, self._remembered)
    return analyzed, PartitionedOperations(self.module, analyzed.rematerialisable)

  def costs(self, request: CostRequest) -> Costs:
    """The costs under a layout: those of the partitioned step if that is asked for and can be."""
    partitioned = self._partitioned(request, request.target) if request.target else None
    if partitioned and not partitioned.counts.opaque:
      return partitioned
    walked = self.walked(request)
    return partitioned._replace(doubts=walked.unknown) if partitioned else walked

  def walked(self, request: CostRequest) -> WalkResult:
    """The estimated costs under a layout."""
    request = request._replace(target=None, code=None)
    if request not in self._walks:
      self.remember(request, self._walked(request))
    return self._walks[request]

  def is_known(self, request: CostRequest) -> bool:
    """Whether the costs are remembered."""
    return request in self._walks

  def remember(self, request: CostRequest, result: WalkResult) -> None:
    """Remembers the estimated costs under a layout, as `walked` returns them."""
    if len(self._walks) >= _WALKS:
      self._walks.clear()
    self._walks[request] = result

  def _walked(self, request: CostRequest) -> WalkResult:
    sizes, platform = dict(request.sizes), request.platform
    resolve = self._resolve(request)
    specs = self.module.propagate(sizes, request.arguments, request.results, resolve)
    analyzed, operations = self._analyze(specs)
    partitions = operations if platform == 'cuda' and can_partition(platform) else None
    return walk(analyzed, specs, request.results, sizes, platform, partitions)

  def _partitioned(self, request: CostRequest, target: Target) -> PartitionedStep | None:
    sizes, code = dict(request.sizes), request.code
    if code is None:
      resolve = self._resolve(request)
      code = self.module.program(sizes, request.arguments, request.results, resolve)
    return partitioned_step(code, sizes, target)

  def _resolve(self, request: CostRequest) -> Resolve:
    return lambda logical, shape: request.constraints[self._numbers[logical, shape]]
