"""Pipelined functions: steps that are cut into one program per stage and run by a schedule.

    step = layout.pipeline_jit(train_step, axis='stage', donate_argnums=0)
    state, loss = step(state, batch)

The phases, by module: `microbatch_loop` finds the loop; `stage_assignment` and `task_programs` cut it
into programs; `outside_loop` assigns the other equations to ranks; `call_list` orders all calls by the
schedule; `stage_lowering` lowers and compiles the programs; `machine` runs them.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any, Generic

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.active_layout import InForce, UnderLayout, check_function
from flax_spmd._src.compat import NO_TRACE, trace_context
from flax_spmd._src.constraint_log import ConstraintRequest, record_constraints
from flax_spmd._src.host_memory import check_host
from flax_spmd._src.jit.arguments import Arguments
from flax_spmd._src.jit.batch_constraints import with_batch_constraints
from flax_spmd._src.jit.batch_leaves import BatchLeaves, batch_leaves, is_decided_by_author, sizes_over
from flax_spmd._src.jit.constrained_results import (
  has_constraints,
  is_constrained_over,
  results_of_constrained_shapes,
)
from flax_spmd._src.jit.doubtful_operations import warn_of_doubtful_operations
from flax_spmd._src.jit.foreign_meshes import STAGES_MESH, check_meshes
from flax_spmd._src.jit.jitted import P, Result
from flax_spmd._src.jit.replicated_batches import warn_of_replicated_batches
from flax_spmd._src.joint_call import current_call
from flax_spmd._src.mesh import MeshLike
from flax_spmd._src.multihost import joint, named
from flax_spmd._src.names.nnx_variables import check_functional
from flax_spmd._src.names.tree_names import TreeNames
from flax_spmd._src.pipeline import carried_order, garbage_collection
from flax_spmd._src.pipeline.argument_checks import (
  check_arrays,
  check_seconds,
  named_arguments,
  named_leaves,
)
from flax_spmd._src.pipeline.cut import (
  auto_stages,
  microbatch_loop,
  outside_loop,
  stage_assignment,
  task_programs,
)
from flax_spmd._src.pipeline.cut import equations as eq
from flax_spmd._src.pipeline.cut.batch_rows import examples, sources_of_rows, warn_of_whole_rows
from flax_spmd._src.pipeline.cut.deferred_sums import defer_sums
from flax_spmd._src.pipeline.cut.equations import Constant, Value, is_key
from flax_spmd._src.pipeline.cut.microbatch_loop import Loop, StepParts
from flax_spmd._src.pipeline.cut.outside_loop import JoinedStep
from flax_spmd._src.pipeline.cut.stage_marks import proposed_ends
from flax_spmd._src.pipeline.cut.task_programs import Accumulator, TaskPrograms
from flax_spmd._src.pipeline.run import agreement, memory, submeshes
from flax_spmd._src.pipeline.run.assembly import Assembler
from flax_spmd._src.pipeline.run.call_list import CallList, CallListBuilder
from flax_spmd._src.pipeline.run.compiled import CompiledPipeline
from flax_spmd._src.pipeline.run.elementwise_specs import specs_of_groups
from flax_spmd._src.pipeline.run.host_copies import with_host_copies
from flax_spmd._src.pipeline.run.machine import Machine
from flax_spmd._src.pipeline.run.request import Request, Setting, aval_of
from flax_spmd._src.pipeline.run.stage_lowering import LoweredStages
from flax_spmd._src.pipeline.schedules.schedule import Schedule, check_schedule, timed_steps
from flax_spmd._src.pipeline.schedules.simulation import TimedStep
from flax_spmd._src.pipeline.schedules.stage_ranks import assign_ranks, check_positive
from flax_spmd._src.pipeline.schedules.tasks import Task
from flax_spmd._src.pipeline.sent_gradients import warn_of_sent_gradients
from flax_spmd._src.plan.result_shardings import successors
from flax_spmd._src.rules.placements import PlannedResult
from flax_spmd._src.rules.table import Rules
from flax_spmd._src.text import plural
from flax_spmd.errors import PipelineError

InputPlanner = Callable[[Any], Sequence[Any]]
ResultPlanner = Callable[[Any, Any, Sequence[bool]], Sequence[PlannedResult]]


_LARGE_VALUE = 1 << 16  # bytes; a smaller carried value is replicated unless its sharding is known


class Pipelined(UnderLayout, Generic[P, Result]):
  """A function that runs as a pipeline; called, traced, lowered and compiled like a `jax.jit` function.

  Args:
    fn, mesh, rules: the function, and the layout.
    plan_results: see `Jitted`.
    plan_inputs: function from the dynamic arguments, a pair `(args, kwargs)`, to the required sharding
      (or None) of each leaf. None: arguments keep their shardings.
    options: arguments of `jax.jit` for static and donated arguments.
    settings: the other attributes of `Setting`.
  """

  __name__: str
  __wrapped__: Callable[P, Result]

  def __init__(
    self,
    fn: Callable[P, Result],
    mesh: MeshLike,
    rules: Rules,
    plan_results: ResultPlanner,
    plan_inputs: InputPlanner | None,
    options: Mapping[str, Any],
    **settings: Any,
  ):
    self.in_force = InForce(mesh, rules)
    check_function(fn, self.in_force)
    if isinstance(fn, UnderLayout):
      name = getattr(fn, '__name__', 'the function')
      raise PipelineError(
        f'pipeline_jit: {name} is already jitted by a layout, so it cannot be cut into stages.\n'
        f'Fix: pass the function itself, {name}.__wrapped__.'
      )
    functools.update_wrapper(self, fn)
    self._fn, self._arguments = fn, Arguments.of(fn, options)
    name = f'pipeline_jit of {getattr(fn, "__name__", type(fn).__name__)}'
    self._setting = Setting(name, mesh, rules, self._arguments, **settings)
    _check(self._setting)
    self._plan_results, self._plan_inputs = plan_results, plan_inputs
    self._donated = Arguments.of(
      fn, {key.replace('donate', 'static'): value for key, value in options.items() if 'donate' in key}
    )
    self._compiled: dict[Any, CompiledPipeline] = {}
    self._latest: CompiledPipeline | None = None
    self._lock = threading.RLock()

  def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Result:
    """Runs the function; first traces and compiles it if the structure of the arguments is new."""
    if trace_context.trace is not NO_TRACE:
      raise PipelineError(
        f'{self._setting.name} is called in a function that JAX traces, such as one of jit, grad or vmap: '
        'a pipeline is several programs.\n'
        'Fix: call it outside, and move the code around it into the function of pipeline_jit.'
      )
    values, named = self._arguments.by_position(args, kwargs)
    latest = self._latest
    leaves = None if latest is None else latest.leaves(values, named)
    if latest is None or leaves is None:
      self._latest = latest = self.compile(*values, **named)
      leaves = jax.tree.leaves(self._arguments.dynamic(values, named))
    return latest.run(leaves)

  def compile(self, *args: Any, **kwargs: Any) -> CompiledPipeline:
    """The compiled pipeline for these arguments, which may be abstract."""
    args, kwargs = self._arguments.by_position(args, kwargs)
    with self._lock:
      request = self._request(args, kwargs)
      if request.key not in self._compiled:
        subject = f'The compilation of {self._setting.name}'
        with joint('pipeline', subject, self._setting.processes, PipelineError):
          self._compiled[request.key] = self._traced(request).lower().compile_jointly()
      return self._compiled[request.key]

  def trace(self, *args: Any, **kwargs: Any) -> TracedPipelineStep:
    """The traced step for these arguments, which may be abstract; `.lower()` is the next phase."""
    return self._traced(self._request(*self._arguments.by_position(args, kwargs)))

  def lower(self, *args: Any, **kwargs: Any) -> LoweredPipelineStep:
    """The programs of the stages, as a list of calls and sends; `.compile()` is the next phase."""
    return self.trace(*args, **kwargs).lower()

  def __repr__(self) -> str:
    return f'<layout.pipeline_jit of {getattr(self, "__qualname__", self._fn)}>'

  def _request(self, args, kwargs) -> Request:
    """The request for these arguments: structure, shapes, dtypes and specs."""
    dynamic = self._arguments.dynamic(args, kwargs)
    check_functional(dynamic, 'pipeline_jit')
    check_arrays(
      named_arguments(dynamic),
      'Arguments are not arrays',
      'pass arrays and numbers, or make these arguments static by static_argnums or static_argnames.',
    )
    leaves, treedef = jax.tree.flatten(dynamic)
    mesh, axis, sizes = self._setting.mesh, self._setting.axis, self._setting.sizes
    if self._plan_inputs is None:
      shardings: Sequence[Any] = [None] * len(leaves)
    else:
      shardings = self._plan_inputs(dynamic)
      submeshes.check_shardings(named_arguments(dynamic), shardings, mesh, axis, 'Arguments')
    specs = [
      submeshes.spec_of(leaf, axis, sizes)
      if sharding is None
      else submeshes.without(sharding.spec, axis)
      for leaf, sharding in zip(leaves, shardings, strict=True)
    ]
    static = self._arguments.statics(args, kwargs)
    return Request(args, kwargs, treedef, [aval_of(leaf) for leaf in leaves], specs, static)

  @garbage_collection.of_young_objects
  def _traced(self, request: Request) -> TracedPipelineStep:
    begin = time.perf_counter()
    setting = self._setting
    abstract = setting.ranks[0].abstract_mesh

    def function(leaves):
      dynamic = jax.tree.unflatten(request.treedef, leaves)
      args, kwargs = self._arguments.filled(dynamic, request.args, request.kwargs)
      ends = nullcontext() if setting.stages is None else proposed_ends()
      with setting.trace_scope(abstract), ends:
        return self._fn(*args, **kwargs)

    with compat.without_mesh():  # a block around the call may have set one of another size
      with record_constraints(anew=False) as constraints:
        jaxpr, result = jax.make_jaxpr(function, return_shape=True)(request.avals)
      known, constrained = self._known_arguments(request), results_of_constrained_shapes(jaxpr)
      batch = self._unconstrained_batch(jaxpr, request, result)
      if batch is not None:
        rewritten = with_batch_constraints(function, batch, abstract)
        jaxpr, result = jax.make_jaxpr(rewritten, return_shape=True)(request.avals)
    several = len(setting.ranks) > 1 and isinstance(setting.mesh, Mesh)
    check_meshes(jaxpr, abstract, STAGES_MESH, several)
    shardings: list[Any] = [each.sharding for each in self._plan_results(result, known, constrained)]
    submeshes.check_shardings(named_leaves(result), shardings, setting.mesh, setting.axis, 'Results')
    planned = [
      None if sharding is None else submeshes.without(sharding.spec, setting.axis)
      for sharding in shardings
    ]
    times = {'trace': time.perf_counter() - begin}
    donations = self._donations(request)
    return TracedPipelineStep(jaxpr, setting, request, result, planned, donations, constraints, times)

  def _unconstrained_batch(self, jaxpr: Any, request: Request, result: Any) -> BatchLeaves | None:
    """The arguments whose examples have to be constrained throughout the step; None if it needs no constraints."""
    setting, mesh = self._setting, self._setting.ranks[0].abstract_mesh
    dynamic = jax.tree.unflatten(request.treedef, request.avals)
    is_named = any(TreeNames(dynamic).statics)
    is_settled = not any(map(any, request.specs)) or (not is_named and has_constraints(jaxpr))
    if not setting.constrain_batch or is_settled:
      return None
    try:
      step = microbatch_loop.read_step(jaxpr, mesh, request.specs)
    except PipelineError:  # `lower` raises it
      return None
    if step.loop.once:
      return batch_leaves(self._known_arguments(request), set, jaxpr, setting.mesh, setting.rules)
    found = _sources_of_rows(step, setting, request)
    if found is None:
      return None
    state = [number for number in range(len(request.specs)) if number not in found.leaves]
    shapes = {number: request.avals[number].shape for number in state}
    each = {number: sizes_over(shapes[number], request.specs[number], found.axes) for number in state}
    over_axes = {number: sizes for number, sizes in each.items() if sizes}
    over = set().union(*over_axes.values())
    is_updated = over_axes.keys() <= {*successors(result, dynamic)}
    is_decided = is_decided_by_author(jaxpr, is_named, shapes.values(), over, is_updated)
    return None if is_decided or not over_axes else found._replace(is_named=is_named)

  def _known_arguments(self, request: Request) -> Any:
    """The dynamic arguments with their shardings on the whole mesh; those of an argument on the host are unknown."""
    mesh = self._setting.mesh
    args, kwargs = jax.tree.unflatten(
      request.treedef,
      [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=NamedSharding(mesh, spec))
        for aval, spec in zip(request.avals, request.specs, strict=True)
      ],
    )
    return tuple(map(_unless_replicated, args)), {k: _unless_replicated(v) for k, v in kwargs.items()}

  def _donations(self, request: Request) -> list[bool]:
    """Per leaf, whether it is donated."""
    count = len(request.avals)
    numbers = jax.tree.unflatten(request.treedef, range(count))
    static = [None] * len(request.args), dict.fromkeys(request.kwargs)
    kept = jax.tree.leaves(self._donated.dynamic(*self._arguments.filled(numbers, *static)))
    return [number not in kept for number in range(count)]


def _check(setting: Setting) -> None:
  """Raises if an argument of `pipeline_jit` is wrong."""
  submeshes.check_axis(setting.mesh, setting.rules, setting.axis)
  check_schedule(setting.schedule, 'pipeline_jit')
  check_seconds(setting.timeout, 'pipeline_jit: timeout')
  if setting.stages is not None:
    check_positive(setting.stages, 'pipeline_jit: stages')
  if setting.host_after is not None:
    check_positive(setting.host_after, 'pipeline_jit: host_after')
    check_host(setting.mesh, [f'pipeline_jit: host_after={setting.host_after}'], 'leave it out')


def _sources_of_rows(step: StepParts, setting: Setting, request: Request) -> BatchLeaves | None:
  """The arguments that microbatches come from, if their examples are sharded."""
  rows, specs = [*step.loop.body.rows.values()], dict(zip(step.arguments, request.specs, strict=True))
  mesh, axes = setting.ranks[0].abstract_mesh, setting.batch_axes
  return sources_of_rows(rows, step.loop.count, step.batch, specs, mesh, axes)


def _unless_replicated(argument: Any) -> Any:
  """An argument, without the shardings of its arrays if all of them are replicated: it may be on the host."""
  if any(any(leaf.sharding.spec) for leaf in jax.tree.leaves(argument)):
    return argument
  return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), argument)


@dataclasses.dataclass
class TracedPipelineStep:
  """A traced step.

  Attributes:
    jaxpr: the whole step as one program.
    times: seconds that each phase took.
  """

  jaxpr: Any
  _setting: Setting
  _request: Request
  _result: Any
  _planned: list[PartitionSpec | None]
  _donations: list[bool]
  _constraints: list[ConstraintRequest]
  times: dict[str, float]

  @garbage_collection.of_young_objects
  def lower(self) -> LoweredPipelineStep:
    """Cuts the step into programs for its stages, and orders them by the schedule.

    Raises:
      PipelineError: the step cannot be cut, or the schedule does not match its stages or the mesh.
    """
    begin = time.perf_counter()
    mesh = self._setting.ranks[0].abstract_mesh
    axes = self._setting.batch_axes
    step = microbatch_loop.read_step(self.jaxpr, mesh, self._request.specs, axes)
    if not step.loop.once:
      self._warn_of_batch(step)
    schedule, stages = step.loop.schedule or self._setting.schedule, self._setting.stages
    if stages is not None:
      self._check_stages(stages, schedule)
    if stages is not None and not stage_assignment.ends_among(step.loop.body.equations):
      name, reported = self._setting.name, self._setting.reported
      step.loop.body = auto_stages.with_ends(step.loop.body, stages, name, reported)
    deferred = self._deferred(step)
    order, ranks, title = self._order(step.loop, schedule)
    turn = _turns(order, len(ranks) - 1)
    split = any(task.kind == 'wgrad' for one in order for task in one.step.tasks)
    cut = stage_assignment.cut(step.loop.body, len(ranks), title, turn, split)
    programs = task_programs.split(cut, split)
    warn_of_sent_gradients(self._setting.name, cut, programs, ranks, self._setting.reported)
    if schedule is not None:
      order = carried_order.with_waits(schedule, step.loop, programs, order, self._setting.reported)
    joined = outside_loop.join(step, programs, ranks)
    several = len(self._setting.processes) > 1
    arguments = step.arguments, self._succeeded(step, joined.results)
    builder = CallListBuilder(joined, programs, order, ranks, *arguments, several)
    call_list, after = builder.build(), self._setting.host_after
    if after is not None:
      sums = {one.after for one in programs.accumulators if not one.passed}
      call_list = with_host_copies(call_list, programs.producers().keys() - sums, after)
    times = {**self.times, 'plan': time.perf_counter() - begin}
    return LoweredPipelineStep(self, step, programs, joined, call_list, schedule, times, deferred)

  def _deferred(self, step: StepParts) -> dict[int, PartitionSpec]:
    """Lets the loop carry sums over examples in parts; returns the specs of these, by their number."""
    found = None if step.loop.once else _sources_of_rows(step, self._setting, self._request)
    if found is None or AxisType.Explicit in self._setting.mesh.axis_types:
      return {}
    results = zip(step.results, self._planned, strict=True)
    known = self.argument_specs(step) | {value: spec for value, spec in results if spec is not None}
    finals = step.loop.finals
    groups = [
      [final, start] if isinstance(start, Value) else [final]
      for final, start in zip(finals, step.loop.starts, strict=True)
    ]
    grouped = specs_of_groups([*step.before, *step.after], groups, known, finals)
    small = {value: PartitionSpec() for value in finals if value.bytes < _LARGE_VALUE}
    return defer_sums(step, small | grouped, found.axes, self._setting.ranks[0].abstract_mesh)

  def argument_specs(self, step: StepParts) -> dict[Value, PartitionSpec]:
    """The spec of each argument. Those that the loop reads come first: a gradient is sharded as its weight is.

    Of an optimizer's state that is sharded otherwise (ZeRO-1), the order of arguments would decide.
    """
    read = step.loop.body.inputs
    read = read.union(*(one.values for one in eq.needed(step.before, read)))
    specs = zip(step.arguments, self._request.specs, strict=True)
    return dict(sorted(specs, key=lambda each: each[0] not in read))

  def _succeeded(self, step: StepParts, results: Sequence[Value]) -> dict[Value, Value]:
    """The argument whose place each result takes in the next step; predictions take that of no batch."""
    numbers = successors(self._result, jax.tree.unflatten(self._request.treedef, self._request.avals))
    pairs, batch = zip(results, numbers, strict=True), step.batch
    return {
      result: step.arguments[number]
      for result, number in pairs
      if number is not None and step.arguments[number] not in batch
    }

  def _warn_of_batch(self, step: StepParts) -> None:
    """Warns of a batch that is not sharded: one on no mesh that the step does not constrain, or that constraints replicate."""
    setting, request, mesh = self._setting, self._request, self._setting.ranks[0].abstract_mesh
    rows, specs = [*step.loop.body.rows.values()], dict(zip(step.arguments, request.specs, strict=True))
    if not is_constrained_over(self.jaxpr, setting.batch_axes):
      every = zip(
        specs.items(), named_arguments(jax.tree.unflatten(request.treedef, request.avals)), strict=True
      )
      given = [(path, aval, spec) for (value, spec), (path, aval) in every if value in step.batch]
      warn_of_whole_rows(setting.name, rows, given, mesh, setting.batch_axes, setting.reported)
    found = _sources_of_rows(step, setting, request)
    if found is not None and setting.constrain_batch and isinstance(setting.mesh, Mesh):
      shapes = enumerate(aval.shape for aval in request.avals)
      state = [shape for number, shape in shapes if number not in found.leaves]
      batch = dict.fromkeys(examples(rows), found.axes)
      find = lambda: (batch, state)
      warn_of_replicated_batches(setting.name, self._constraints, find, setting.reported)

  def _check_stages(self, stages: int, schedule: Schedule | None) -> None:
    """Raises unless a schedule, or without one the mesh, has a place for a number of stages."""
    ranks, axis = len(self._setting.ranks), self._setting.axis
    if schedule is None and stages % ranks:
      raise PipelineError(
        f'stages={stages}, but the mesh axis {axis!r} has size {ranks}.\n'
        f'Fix: pass stages={ranks}, or a multiple for several stages on each rank.'
      )
    if schedule is not None and stages != schedule.stages:
      raise PipelineError(
        f'stages={stages}, but {schedule} has {plural(schedule.stages, "stage")}.\n'
        f'Fix: pass stages={schedule.stages}, or a schedule of {plural(stages, "stage")}.'
      )

  def _order(
    self, loop: Loop, schedule: Schedule | None
  ) -> tuple[list[TimedStep], tuple[int, ...], str]:
    """The scheduled steps in order, the rank of each stage, and the schedule's name for errors."""
    ranks, axis = len(self._setting.ranks), self._setting.axis
    if schedule is not None and schedule.ranks != ranks:
      raise PipelineError(
        f'{schedule} runs on {schedule.ranks} ranks, but the mesh axis {axis!r} has size {ranks}.\n'
        f'Fix: use a schedule of {ranks} ranks, or a mesh whose axis has size {schedule.ranks}.'
      )
    if loop.once:
      stage_ranks = _default_ranks(loop, ranks, axis) if schedule is None else schedule.stage_ranks
      once = [
        TimedStep(Task('fwd', stage, 0), stage, stage + 1, (1,)) for stage in range(len(stage_ranks))
      ]
      return once, stage_ranks, 'this pipeline'
    if schedule is None and not loop.is_clear:
      raise PipelineError(
        f'The model is called in each pass of the loop at {loop.source_line}, and there is no schedule.\n'
        'Fix: for tokens or steps, write a Python loop around the function of one pass.\n'
        'Fix: for layers, loop over the stages in Python, with one scan for each, and end stages between the scans.\n'
        'Fix: for microbatches, use flax_spmd.pipeline.accumulate, or pass a schedule such as '
        f'OneFOneB(ranks={ranks}).'
      )
    if schedule is None:
      raise PipelineError(
        f'The microbatch loop at {loop.source_line} has no schedule.\n'
        f'Fix: pass one to accumulate, such as schedule=OneFOneB(ranks={ranks}), or to pipeline_jit.'
      )
    return timed_steps(schedule, loop.count) or [], schedule.stage_ranks, str(schedule)


def _default_ranks(loop: Loop, ranks: int, axis: str) -> tuple[int, ...]:
  """Per stage, its rank, for a function without a loop and a schedule."""
  equations = loop.body.equations
  ends = stage_assignment.in_sequence(equations, stage_assignment.ends_among(equations))
  counts = len(ends), len({*ends.values()})  # of all calls of the model, or of one
  stages = next((n for count in counts for n in (count + 1, count) if n % ranks == 0), None)
  if not stages:
    raise PipelineError(
      f'The model has {stage_assignment.ends_text(ends)}, and the mesh axis {axis!r} has size {ranks}.\n'
      f'{stage_assignment.source_lines([*ends])}\n'
      f'Fix: end {ranks - 1} stages by stage_end (between stages) or {ranks} (after each); or '
      f'{2 * ranks - 1} or {2 * ranks} for two stages on each rank, and so on.'
    )
  return assign_ranks(ranks, stages // ranks, 'loop')


def _turns(order: Sequence[TimedStep], last: int) -> bool:
  """Whether the last stage runs each microbatch's backward right after its forward."""
  tasks = [task for one in order for task in one.step.tasks]
  tasks = [task for task in tasks if task.stage == last and task.kind != 'wgrad']
  pairs = zip(tasks[::2], tasks[1::2])
  return len(tasks) % 2 == 0 and all(
    (one.kind, other.kind) == ('fwd', 'bwd') and one.microbatch == other.microbatch
    for one, other in pairs
  )


@dataclasses.dataclass
class LoweredPipelineStep:
  """A step cut into programs for its stages.

  Attributes:
    programs: the programs of the tasks.
    call_list: the calls and sends, in order.
    schedule: the schedule, or None for a function without a loop and a schedule.
    times: seconds that each phase took.
  """

  _traced: TracedPipelineStep
  _step: StepParts
  programs: TaskPrograms
  _joined: JoinedStep
  call_list: CallList
  schedule: Schedule | None
  times: dict[str, float]
  _deferred: dict[int, PartitionSpec]

  @property
  def microbatches(self) -> int | None:
    """The number of microbatches; None for a function without a loop."""
    return None if self._step.loop.once else self._step.loop.count

  def as_text(self) -> str:
    """The calls and sends in order: one line per call of a program and per transfer between ranks.

    Example:
      >>> def double(w, batch):
      ...   return pipeline.stage_end(batch * w) * w
      >>> lowered = Layout({'stage': 2}).pipeline_jit(double).lower(jnp.float32(2), jnp.ones((8, 4)))
      >>> print(lowered.as_text())
      rank 0: fwd_0__0            2 arrays -> 1 array
      rank 0 -> rank 1            float32[8,4] of microbatch 0
      rank 1: fwd_1__0            2 arrays -> 1 array
    """
    return str(self.call_list)

  def compile(self) -> CompiledPipeline:
    """Compiles the programs in parallel.

    Raises:
      PipelineError: the mesh is abstract, or a rank's devices have less memory than its stages need.
      LayoutError: processes have other layouts, schedules, arguments or programs; every process raises it.
    """
    setting = self._traced._setting
    submeshes.check_concrete(setting.mesh)
    with joint('pipeline', f'The compilation of {setting.name}', setting.processes, PipelineError):
      return self.compile_jointly()

  def _check_agreement(self, stages: LoweredStages) -> None:
    """Raises unless all processes have the same pipeline."""
    traced, setting = self._traced, self._traced._setting
    parts = [
      agreement.setting_lines(setting, self.schedule, self._step.loop.count),
      agreement.argument_lines(traced._request, traced._donations, traced._planned),
      agreement.task_lines(self.call_list),
      agreement.callback_lines(traced.jaxpr),
      agreement.program_lines(stages),
    ]
    agreement.check_same_pipeline(setting, parts, agreement.closed_over(self.call_list))

  def compile_jointly(self) -> CompiledPipeline:
    """Compiles the programs within a joint call of the processes of the mesh."""
    setting = self._traced._setting
    begin = time.perf_counter()
    mesh, stages = submeshes.check_concrete(setting.mesh), self._stages()
    self._check_agreement(stages)
    lowered = lambda: (one.lowered for _, one in stages.lower())
    with compat.shardy():  # before XLA compiles them: it may fail, too
      warn_of_doubtful_operations(
        setting.name, self._traced.jaxpr, lowered, setting.ranks[0], setting.reported
      )
    executables = stages.compile()
    assembler = Assembler(stages, executables, mesh, setting.axis)
    # Processes have to dispatch their common transfers in the same order; threads do not keep one.
    has_order = len(setting.processes) > 1 or not compat.may_run_at_once(setting.ranks)
    threads = setting.threads and not has_order
    machine = assembler.machine(self._joined.results, threads)
    temporaries = {program: memory.temporary_bytes(one.compiled) for program, one in executables.items()}
    peaks, host_peaks = memory.peaks(stages, temporaries)
    memory.check(peaks, setting.ranks)
    times = {**self.times, 'compile': time.perf_counter() - begin}
    result, request = jax.tree.structure(self._traced._result), self._traced._request
    call, holders = current_call(), self._holders(machine)
    name = (
      f'{setting.name} (compilation {call.number + 1} of {named(setting.processes)})'
      if call
      else setting.name
    )
    return CompiledPipeline(
      setting, request, result, name, machine, holders, executables, peaks, host_peaks, times
    )

  def _holders(self, machine: Machine) -> list[set[int]]:
    """Per argument, the processes that have to pass the same value: all of them, or of own data those that use it.

    Own data is what microbatches depend on. Without a loop it is an argument, a whole tree, that one process alone uses.
    Keys are no data.
    """
    step, request, everyone = self._step, self._traced._request, {*self._traced._setting.processes}
    users = [
      {process for use in uses for process in submeshes.processes_of(use.sharding.mesh)}
      for uses in machine.arguments
    ]
    numbers = jax.tree.unflatten(request.treedef, range(len(users)))
    paths = [path[:2] for path, _ in jax.tree_util.tree_leaves_with_path(numbers)]
    of_argument: dict[Any, set[int]] = defaultdict(set)
    for path, each in zip(paths, users, strict=True):
      of_argument[path] |= each
    batch = step.batch

    def is_own(number: int) -> bool:
      alone = not step.loop.once or len(of_argument[paths[number]]) < 2
      return step.arguments[number] in batch and alone and not is_key(request.avals[number])

    return [each if is_own(number) else everyone for number, each in enumerate(users)]

  def offline(self, platform: str) -> LoweredStages:
    """The programs lowered for a platform, without compiling them. The mesh may be abstract.

    Args:
      platform: a JAX platform: `'cpu'`, `'cuda'`, `'tpu'`.
    """
    stages = self._stages(platform)
    with compat.shardy():
      list(stages.lower(platform))
    return stages

  def _stages(self, platform: str | None = None) -> LoweredStages:
    """The programs, to be lowered for a platform.

    A large carried value of unknown sharding takes the one that its stage's program gives it. The programs are lowered
    once more to find it, with the initial value replicated.
    """
    traced, step, specs = self._traced, self._step, self._specs()
    returned = set(self._joined.results)
    donations = zip(step.arguments, traced._donations, strict=True)
    donatable = {value for value, donated in donations if donated and value not in returned}
    ranks = traced._setting.ranks

    def stages(specs: Mapping[Value, PartitionSpec]) -> LoweredStages:
      return LoweredStages(self.call_list, ranks, specs, step.arguments, donatable)

    unknown = [one for one in self.programs.accumulators if one.after not in specs]
    specs |= {value: PartitionSpec() for one in unknown for value in self._versions(one)}
    large = [one for one in unknown if one.after.bytes >= _LARGE_VALUE and ranks[0].size > 1]
    if large:
      starts = {self._joined.start[one] for one in large}
      open_ = {value for one in large for value in self._versions(one)} - starts
      trial = stages({value: spec for value, spec in specs.items() if value not in open_})
      with compat.shardy():
        list(trial.lower(platform))
      for one in large:
        last = next(buffer for buffer in self.call_list.written if buffer.value is one.final)
        specs |= dict.fromkeys(self._versions(one), trial.spec(last))
    return stages(specs)

  def _versions(self, one: Accumulator) -> tuple[Value, ...]:
    return self._joined.start[one], one.after, one.final

  def _specs(self) -> dict[Value, PartitionSpec]:
    """The specs that are known before compilation."""
    step, joined, traced = self._step, self._joined, self._traced
    specs = traced.argument_specs(step)
    results = zip(joined.results, traced._planned, strict=True)
    planned = {value: spec for value, spec in results if spec is not None}
    axis, sizes = traced._setting.axis, traced._setting.sizes
    closed_over = {
      buffer.value: submeshes.spec_of(buffer.value.array, axis, sizes)
      for buffer in self.call_list.given
      if isinstance(buffer.value, Constant)
    }
    versions = [self._versions(one) for one in self.programs.accumulators]
    unknown = [*chain(*versions), *(value for value in joined.results if value not in specs)]
    accumulators = self.programs.accumulators
    parts = {
      one.final: self._deferred[one.origin] for one in accumulators if one.origin in self._deferred
    }
    grouped = specs_of_groups(joined.equations, versions, specs | planned | parts, unknown)
    returned = {value: planned[each[-1]] for each in versions if each[-1] in planned for value in each}
    return grouped | planned | returned | closed_over | specs
