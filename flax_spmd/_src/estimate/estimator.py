"""Estimator: the costs and memory of a step under any layout, with or without the target's compiler.

    estimator = Estimator(TrainStep(step, create_state, batch))             # traced and lowered once
    outcome = estimator.estimate(layout, 'h100:64')                         # seconds: the compiler assigns buffers
    outcome = estimator.estimate(layout, 'h100:64', partition=False)        # a tenth of a second, always in doubt

The step is lowered on a mesh whose axes are its logical names (`name_mesh`). For a layout, mesh axes replace the
names. If the target's compiler is installed, it then partitions the whole step, and plans its memory (`partitioned_step`).

Without it, or where that is left out, as for most layouts of a search, Shardy's own propagation assigns a sharding to
every value (`mlir`), and one walk over the program counts FLOPs, memory traffic and collectives, and finds the peak
memory (`step_program`, `cost_walk`; for many layouts at a time in other processes, `walk_workers`):

* each operation requires shardings of its operands (`requirements`, `operations`, `matmuls`, `gather_scatter`);
* a value with another sharding is resharded (`value_moves`, `resharding`), in the dtype that is cheapest to send (`wire_dtypes`);
* independent collectives are combined into one (`collective_combiner`);
* a value occupies memory from its definition to its last use, unless it is fused (`live_buffers`).

Where XLA for GPUs could choose otherwise, it is asked about that operation, if it is installed (`unsure_operations`, `partitioned_operations`).
Where doubts remain, the estimate carries them.

A step that uses mesh axes itself, in a `shard_map` say, has no program for all layouts. The compiler partitions it for each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
from jax.sharding import NamedSharding

from flax_spmd._src.compare.costs import cost
from flax_spmd._src.compare.hardware import Target, check_mesh, parse_target, user_flags
from flax_spmd._src.compare.lowering import abstract_batch, lower, python_calls
from flax_spmd._src.compare.outcome import ESTIMATED, PARTITIONED, Memory, Outcome
from flax_spmd._src.compare.partitioner import can_partition
from flax_spmd._src.compare.step_outcome import argument_bytes, step_outcome
from flax_spmd._src.compare.train_step import TrainStepLike, check_train_step
from flax_spmd._src.compat import PLACEHOLDER
from flax_spmd._src.constraints import resolve_for_constraint
from flax_spmd._src.estimate import mlir
from flax_spmd._src.estimate.batch_names import batch_names
from flax_spmd._src.estimate.doubts import UNCHECKED
from flax_spmd._src.estimate.graph import Axes, Spec, shard_size
from flax_spmd._src.estimate.name_mesh import OWN_AXES, NamedLowering, lower_on_names
from flax_spmd._src.estimate.partitioned_step import PartitionedStep, partitioned_step
from flax_spmd._src.estimate.step_program import CostRequest, Costs, StepProgram
from flax_spmd._src.jit.batch_leaves import BatchLeaves
from flax_spmd._src.jit.named_axis import number_of_groups
from flax_spmd._src.layout import Layout
from flax_spmd._src.mesh import MeshLike, abstract_mesh, axis_sizes, axis_types
from flax_spmd._src.names.layer_outputs import BATCH_OF_LAYER, names_and_rules
from flax_spmd._src.names.nnx_variables import arrays_of
from flax_spmd._src.names.tree_names import leaf_parts
from flax_spmd._src.public import public
from flax_spmd._src.rules.clauses import HOST_MEMORY
from flax_spmd._src.rules.decisions import UNCONSTRAINED, axis_names
from flax_spmd._src.text import shown, size_text, value_text
from flax_spmd.errors import ArgumentTypeError, EstimatorError, raise_problems

if TYPE_CHECKING:
  from flax_spmd._src.estimate.mlir.shardings import LogicalSharding

_MEMORY_ERROR = {ESTIMATED: 0.12, PARTITIONED: 0.07}  # relative error of the peak
TPU_DOUBT = (
  'TPU: estimates partition as the compiler for GPUs, and that for TPUs often takes other collectives and keeps other '
  'arrays; compare compiles a layout in seconds'
)
_PLATFORMS = 'cuda', 'rocm', 'tpu', 'cpu'
_COMPARE = 'choose the layouts, and compile them with spmd.compare.'
_INSTALL = "; with pip install 'flax-spmd[cuda]', XLA for GPUs partitions the step, without a GPU"
_GROUPS_DOUBT = (
  'axis_name {name!r}: the {groups} parts of the batch are computed apart, and estimated as one, since their '
  'convolutions are in a shard_map'
)
_PROGRAMS = 16  # that are remembered, each with other equal operations merged
_PARTS = ('params', 'opt_state', '', 'batch')  # of the arguments, in the order of `Memory`


@public('flax_spmd.explore')
class Estimator:
  """A step, lowered once, whose costs and memory can be estimated under any layout.

  Args:
    train_step: the step and its arguments; for a model that holds a mesh, a function that returns it for a layout.
    platform: platform to lower for: 'cuda', 'rocm', 'tpu' or 'cpu'.

  Attributes:
    names: sizes of the dimensions with each logical name.
    parameter_names: logical names of dimensions of the state.
    together: pairs of logical names that occur on one array.
    batch_names: logical names of the dimension of examples, in the batch and in constraints of what comes from it.
    names_as_axes: those among the names that are in boxes of mesh axes: axes of a mesh, or logical names in `with_partitioning`.
    reason: why the step is lowered and partitioned for each layout, or ''. The other attributes are then empty.

  Raises:
    ArgumentTypeError: the first argument is neither a `TrainStep` nor a function that returns one, or its functions take other
      arguments.
    EstimatorError: the installed jaxlib is not supported, or parts of the step cannot be estimated, such as a `shard_map`;
      and the platform's compiler, which could partition it, is not installed.
    Exception: any error that the step raises while it is traced.

  Example:
    >>> def create():
    ...   return {'w': LogicallyPartitioned(jnp.ones((64, 256)), ('embed', 'mlp'))}
    >>> def step(state, x):
    ...   return jax.tree.map(lambda w: w - 0.1, state), jnp.sum((x @ state['w'].unbox()) ** 2)
    >>> train_step = explore.TrainStep(step, create, jax.ShapeDtypeStruct((32, 64), jnp.float32))
    >>> estimator = explore.Estimator(train_step)
    >>> layout = Layout(abstract_mesh({'data': 8}), (('batch', 'data'),))
    >>> estimator.estimate(layout, 'h100:8').counts.flops
    131072.0
  """

  names: Mapping[str, tuple[int, ...]] = MappingProxyType({})
  parameter_names: frozenset[str] = frozenset()
  together: frozenset[frozenset[str]] = frozenset()
  batch_names: frozenset[str] = frozenset()
  names_as_axes: frozenset[str] = frozenset()
  reason: str = ''

  def __init__(self, train_step: TrainStepLike, *, platform: str = 'cuda'):
    check_train_step(train_step, 'Estimator')
    if platform not in _PLATFORMS:
      raise EstimatorError(
        f'The platform {platform!r} is unknown.\nFix: pass one of {", ".join(map(repr, _PLATFORMS))}.'
      )
    self._given, self._platform = train_step, platform
    try:
      mlir.check_jaxlib()
      self._lower(1, None)
      self._by_groups = {1: self}
    except EstimatorError as error:
      self.reason, _, fix = str(error).rpartition('\n')
      if not can_partition(platform):
        raise self._not_partitioned(platform, fix) from error

  def _not_partitioned(self, platform: str, fix: str = f'Fix: {_COMPARE}') -> EstimatorError:
    """The error for a step that would have to be partitioned, for a platform without a partitioner."""
    if platform in ('cuda', 'tpu') and not can_partition(platform):
      install = (
        f"pip install 'flax-spmd[{platform}]', whose compiler partitions the step for each layout."
      )
      fix = fix.replace(_COMPARE, install)
    return EstimatorError(f'{self.reason}\n{fix}')

  def _lower(self, groups: int, known: NamedLowering | None) -> None:
    self._groups = groups
    self._lowering = lower_on_names(self._given, self._platform, groups, known)
    self._train_step, self.names_as_axes = self._lowering.train_step, self._lowering.as_axes
    state = arrays_of(self._lowering.state)
    self.parameter_names = frozenset(
      name for array in state for name in array.sharding.spec if isinstance(name, str)
    )
    self._step = _NamedStep(self._lowering, self._platform)
    self._steps: dict[BatchLeaves | None, _NamedStep] = {None: self._step}
    self._left_out = python_calls(self._lowering.jaxpr)
    batch = self._train_step.batch
    parts = [*leaf_parts(self._lowering.state), *['batch'] * len(jax.tree.leaves(batch))]
    self._parts = [parts[place] for place in self._lowering.places]
    self._collect_names()

  def _with_batch(self, batch: BatchLeaves | None) -> _NamedStep:
    """The step with the batch constrained that a layout constrains, if any; lowered where a layout first does."""
    if batch not in self._steps:
      lowering = self._lowering.with_batch(cast(BatchLeaves, batch))
      self._steps[batch] = _NamedStep(lowering, self._platform, True)
    return self._steps[batch]

  def _collect_names(self) -> None:
    sizes: dict[str, set[int]] = {}
    together: set[frozenset[str]] = set()
    batch = abstract_batch(self._train_step, self._lowering.layout)
    named = [(leaf.sharding.spec, leaf.shape) for leaf in arrays_of((self._lowering.state, batch))]
    constraints = self._step.program.module.constraints
    named += [(_with_plain_batch(logical.names), shape) for logical, shape in constraints]
    for names, shape in named:
      dims = {name: size for name, size in zip(names, shape) if isinstance(name, str)}
      for name, size in dims.items():
        sizes.setdefault(name, set()).add(size)
      together |= {frozenset((one, other)) for one in dims for other in dims if one != other}
    self.names = {name: tuple(sorted(values)) for name, values in sorted(sizes.items())}
    self.together = frozenset(together)
    self.batch_names = self._batch_names(batch) - self.parameter_names

  def _batch_names(self, batch: Any) -> frozenset[str]:
    places, known = set[tuple[int, int]](), set[str]()
    for number, leaf in enumerate(self._lowering.leaves(batch)):
      names = tuple(leaf.sharding.spec) if self._parts[number] == 'batch' else ()
      dim = names.index('batch') if 'batch' in names else 0
      if isinstance(name := next(iter(names[dim:]), None), str):
        places.add((number, dim))
        known.add(name)
    return batch_names(self._lowering.jaxpr, places, known) | known - {BATCH_OF_LAYER}

  def estimate(self, layout: Layout, target: Target | str, *, partition: bool = True) -> Outcome:
    """Estimates the costs and memory of the step under a layout.

    If the target's compiler is installed (the extra `cuda` or `tpu`), it partitions the step, fuses and schedules its
    operations, and assigns its buffers, in a process of its own that starts with the first one. FLOPs and collectives are
    then exact, and memory is that of the compiled step; for GPUs within a few percent if it has a softmax: to fuse that into
    one kernel takes most of a compilation, so it is done only where a softmax can decide the memory. A step that was lowered
    for another platform is lowered again for each estimate.

    Args:
      layout: layout to estimate. Of its mesh only the axes count; the devices are the target's.
      target: hardware to estimate for, as text such as `'h100:8'` or parsed.
      partition: whether to partition the whole step, which takes a few seconds; with a `reason`, it always is. Without
        it, FLOPs, collectives and memory are estimated, in a tenth of the time; for GPUs, XLA then partitions the single
        operations for which it has several ways. Where a model is written in another way than those that estimates were
        compared for, memory can be off by half, so such an estimate is always in doubt.

    Returns:
      The outcome; its `source` is `partitioned` if the step was partitioned, else `estimated`.

    Raises:
      ArgumentTypeError: the first argument is no layout.
      TargetDeviceError: the mesh and the target differ in their number of devices, or slices do not fit the mesh.
      LayoutError: logical names do not fit the arrays or the mesh.
      EstimatorError: the step has to be partitioned, and the target's compiler cannot, or is not installed.
    """
    if not isinstance(layout, Layout):
      raise ArgumentTypeError(
        f'estimate needs a layout, and {shown(value_text(layout))} is none.\n'
        "Fix: write estimate(Layout(mesh, rules), 'h100:64')."
      )
    target = target if isinstance(target, Target) else parse_target(target)
    if self.reason:
      return self._partitioned(layout, target)
    begun = self._begun(layout, target, partition)
    return begun.finished(begun.program.costs(begun.request))

  def _begun(self, layout: Layout, target: Target, partition: bool) -> BegunEstimate:
    sizes = axis_sizes(layout.mesh)
    check_mesh(sizes, target)
    layout = layout.replace(mesh=abstract_mesh(sizes, axis_types=axis_types(layout.mesh)))
    batch = abstract_batch(self._train_step, layout)  # raises where its sizes do not divide
    groups = self._groups_under(layout)
    return self._of_groups(groups)._begun_with(batch, groups, layout, target, partition)

  def _partitioned(self, layout: Layout, target: Target) -> Outcome:
    """The outcome of a step that is lowered for each layout."""
    lowered = lower(self._given, layout, target)
    platform = target.chip.platform
    step = partitioned_step(lowered.code, lowered.mesh, target) if can_partition(platform) else None
    if step is None:
      raise self._not_partitioned(platform)
    used = sum(argument_bytes(lowered)) - lowered.unused_bytes
    outcome = step_outcome('', lowered, step.counts, step.memory, step.memory - used, target)
    unknown = [f'the costs of the kernel {name} are unknown' for name, _ in step.counts.opaque]
    doubts = dict.fromkeys((*lowered.left_out, *outcome.doubts, *step.doubts, *unknown))
    close = _memory_doubts(step.memory, target.chip.memory, _MEMORY_ERROR[PARTITIONED])
    return outcome._replace(source=PARTITIONED, doubts=(*doubts, *close))

  def _groups_under(self, layout: Layout) -> int:
    """The layout's number of groups along the step's axis name; 1 without such a name."""
    name = self._train_step.axis_name
    if name is None:
      return 1
    bound = self._train_step.with_axis(layout)
    return number_of_groups(name, bound.mesh, bound.rules)

  def _of_groups(self, number: int) -> Estimator:
    """The estimator of the program for a number of groups; of one group, if that program cannot be estimated."""
    if number not in self._by_groups:
      other = copy.copy(self)
      try:
        other._lower(number, self._lowering)
      except EstimatorError:
        other = self._by_groups[1]
      self._by_groups[number] = other
    return self._by_groups[number]

  def _begun_with(
    self, batch: Any, groups: int, layout: Layout, target: Target, partition: bool
  ) -> BegunEstimate:
    shardings = self._lowering.shardings(layout, batch)
    step = self._with_batch(self._lowering.batch_under(layout, batch, shardings))
    lowered = lambda: lower(self._given, layout, target, with_findings=False).code
    bound = self._with_axes_of_boxes(self._train_step.with_axis(layout, of_mesh=True))
    request = step.request(bound, shardings, target, lowered if partition else None)
    arrays = self._lowering.leaves(batch)
    return BegunEstimate(
      self, step.program, request, layout, target, groups, arrays, shardings, step.used
    )

  def _with_axes_of_boxes(self, layout: Layout) -> Layout:
    """The layout with a rule for each axis of its mesh that a box of mesh axes names, which is among the names here.

    Raises:
      EstimatorError: the table has a rule for such an axis as a logical name.
    """
    axes = sorted(self.names_as_axes & axis_sizes(layout.mesh).keys())
    if not axes:
      return layout
    if layout.rules.by_name.keys() & {*axes}:
      raise EstimatorError(OWN_AXES)
    return layout.replace(rules=(*((axis, axis) for axis in axes), *layout.rules.clauses))

  def _finished(self, begun: BegunEstimate, costs: Costs) -> Outcome:
    layout, target, shardings = begun.layout, begun.target, begun.shardings
    sizes = axis_sizes(layout.mesh)
    argument_bytes = [
      int(shard_size(array.shape, _spec(sharding, len(array.shape)), sizes) * array.dtype.itemsize)
      for array, sharding in zip(begun.arrays, shardings, strict=True)
    ]
    is_partitioned = isinstance(costs, PartitionedStep)
    on_host = [sharding.memory_kind == HOST_MEMORY for sharding in shardings]
    if isinstance(costs, PartitionedStep):
      on_device = (argument_bytes[index] for index in begun.used if not on_host[index])
      temporaries: float = costs.memory - sum(on_device)
    else:
      temporaries = costs.temporaries
    memory = self._memory(argument_bytes, on_host, temporaries, is_partitioned)
    source = PARTITIONED if is_partitioned else ESTIMATED
    doubts = (*self._left_out, *costs.counts.doubts(), *costs.doubts)
    if not is_partitioned:
      doubts = (_unchecked(target.chip.platform), *doubts)
    if begun.groups != self._groups and not is_partitioned:
      doubts = (_GROUPS_DOUBT.format(groups=begun.groups, name=self._train_step.axis_name), *doubts)
    return Outcome(
      '',
      layout,
      memory,
      costs.counts,
      cost(costs.counts, target, sizes, self.dtype, memory.host),
      memory.peak <= target.chip.memory,
      None,
      None,
      None,
      source,
      (*dict.fromkeys(doubts), *_memory_doubts(memory.peak, target.chip.memory, _MEMORY_ERROR[source])),
    )

  @property
  def dtype(self) -> str:
    """The operands' dtype of most of the step's matrix products, such as `bf16` or `f32`."""
    return self._step.program.dtype

  def _memory(
    self,
    argument_bytes: Sequence[int],
    on_host: Sequence[bool],
    temporaries: float,
    is_partitioned: bool,
  ) -> Memory:
    """Bytes on one device; those of the state and the batch count whether the step uses them or not.

    The temporaries of a partitioned step are its compiler's. In an estimate, if the old state is kept, both it and the new one
    are live at the end of the step, when the memory of the temporaries is free again. So are arrays from the host's memory,
    which are fetched late.
    """
    by_part: dict[str, int] = dict.fromkeys(_PARTS, 0)
    for part, size, hosted in zip(self._parts, argument_bytes, on_host, strict=True):
      by_part[part] += 0 if hosted else size
    total = sum(by_part.values())
    host = sum(argument_bytes) - total
    new_state = 0 if self._train_step.donate else total - by_part['batch']
    extra = int(temporaries) if is_partitioned else max(int(temporaries), host, new_state)
    parameters, optimizer, rest, batch = (by_part[part] for part in _PARTS)
    return Memory(parameters, optimizer, rest, batch, extra, total + extra, host)


class BegunEstimate(NamedTuple):
  """An estimate whose costs are yet to be found.

  Attributes:
    estimator: the estimator of the layout's number of groups.
    program: the step.
    request: the request for its costs.
    layout, target: those of the estimate.
    groups: number of parts of the batch along the step's axis name.
    arrays, shardings: the leaves of the step's arguments.
    used: indices of those that the step uses.
  """

  estimator: Estimator
  program: StepProgram
  request: CostRequest
  layout: Layout
  target: Target
  groups: int
  arrays: Sequence[Any]
  shardings: Sequence[NamedSharding]
  used: Sequence[int]

  def finished(self, costs: Costs) -> Outcome:
    """The outcome with its costs."""
    return self.estimator._finished(self, costs)


def begin_estimate(
  estimator: Estimator, layout: Layout, target: Target, *, partition: bool
) -> BegunEstimate:
  """The first part of an estimate, up to the request for its costs; not with a `reason`.

  Args:
    estimator: the estimator.
    layout, target, partition: the arguments of `Estimator.estimate`, which has the same errors.
  """
  return estimator._begun(layout, target, partition)


class _NamedStep:
  """A step lowered on the mesh of its names, and its program.

  Args:
    lowering: the step.
    platform: platform that it is lowered for.
    is_automatic: whether its constraints are automatic ones, which are left out where they do not divide.
  """

  def __init__(self, lowering: NamedLowering, platform: str, is_automatic: bool = False):
    self.used, self._is_automatic = lowering.used, is_automatic
    # groups of an axis name take their axes from constraints inside
    self._has_all = lowering.train_step.axis_name is None and PLACEHOLDER.encode() not in lowering.code
    self.program = StepProgram(lowering.code, platform)
    self._replaced_arguments = lowering.replaced_arguments()

  def request(
    self,
    layout: Layout,
    shardings: Sequence[NamedSharding],
    target: Target,
    lowered: Callable[[], bytes] | None,
  ) -> CostRequest:
    """The request for the costs under a layout.

    Args:
      layout: the layout.
      shardings: those of all leaves of the step's arguments.
      target: hardware to estimate for.
      lowered: function that lowers the step under the layout, to partition it whole; None to only estimate it.
    """
    graph, platform = self.program.module.graph, target.chip.platform
    arguments = [
      _spec(shardings[index], len(graph.values[value].shape))
      for index, value in zip(self.used, graph.main.arguments, strict=True)
    ]
    results = [  # some replace arguments that the step does not use
      None if index is None else _spec(shardings[index], len(graph.values[value].shape))
      for index, value in zip(self._replaced_arguments, graph.main.returned, strict=True)
    ]
    constraints = (_resolve(layout, self._is_automatic, *one) for one in self.program.module.constraints)
    request = CostRequest(
      tuple(axis_sizes(layout.mesh).items()),
      tuple(arguments),
      tuple(results),
      tuple(constraints),
      platform,
      user_flags(),
    )
    if lowered is None or not can_partition(platform):
      return request
    is_here = all(sharding.memory_kind != HOST_MEMORY for sharding in shardings)
    is_whole = platform == self.program.platform and is_here and self._has_all
    return request._replace(target=target, code=None if is_whole else lowered())


def _unchecked(platform: str) -> str:
  """The doubt about every estimate for a platform whose step is not partitioned."""
  if platform == 'tpu':
    return TPU_DOUBT
  return UNCHECKED + (_INSTALL if platform == 'cuda' and not can_partition(platform) else '')


def _memory_doubts(peak: int, limit: int, error: float) -> Iterator[str]:
  """A doubt if the peak is within a relative error of the limit."""
  if abs(peak / limit - 1) < error:
    yield (
      f'memory: {size_text(peak)} of {size_text(limit)}, too close to call: a compiler rematerialises values '
      'that would just not fit'
    )


def _spec(sharding: NamedSharding, rank: int) -> Spec:
  entries = [_sharded(entry, sharding.mesh) for entry in sharding.spec]
  return tuple(entries + [()] * (rank - len(entries)))


def _sharded(entry: Any, mesh: MeshLike) -> Axes:
  """The axes of an entry of a spec; those of size 1 shard nothing, and XLA does not see them."""
  return tuple(axis for axis in axis_names(entry) if mesh.shape[axis] > 1)


def _resolve(
  layout: Layout, is_automatic: bool, logical: LogicalSharding, shape: tuple[int, ...]
) -> tuple[Axes | None, ...] | None:
  """The mesh axes of a constraint under a layout; None if the layout has no rules for names."""
  names, rules = logical.names, layout.rules
  if not rules.pairs:
    return None
  if BATCH_OF_LAYER in names:
    found = names_and_rules(_with_plain_batch(names), rules)
    if found is None:
      return None
    names, rules = found
  resolution = resolve_for_constraint(rules, names, shape, layout.mesh)
  if resolution.problems and is_automatic:
    return None
  raise_problems([problem.at('constraint') for problem in resolution.problems])
  entries = [*resolution.spec, *[None] * (len(shape) - len(resolution.spec))]
  return tuple(None if entry is UNCONSTRAINED else _sharded(entry, layout.mesh) for entry in entries)


def _with_plain_batch(names: tuple[str | None, ...]) -> tuple[str | None, ...]:
  """The names of a constraint, with `batch` for that of a layer's result."""
  return tuple('batch' if name == BATCH_OF_LAYER else name for name in names)
