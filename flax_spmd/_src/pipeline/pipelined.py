"""The engine: a step, traced once, cut by its stages, compiled a program per stage, and run.

    step = layout.pipeline_jit(train_step, axis='stage', donate_argnums=0)
    state, loss = step(state, batch)

The way of a step: `reading` finds the microbatch loop; `cutting` and `splitting` make programs of its
tasks; `outside` places the rest; `linking` orders all of it by the schedule; `executables` compiles;
`running` runs.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.active_layout import InForce, UnderLayout, check_not_jitted, scope
from flax_spmd._src.jit.arguments import Arguments
from flax_spmd._src.mesh import MeshLike
from flax_spmd._src.pipeline.argument_checks import check_arrays, named_arguments, named_leaves
from flax_spmd._src.pipeline.cut import auto_stages as balancing
from flax_spmd._src.pipeline.cut import microbatch_loop as reading
from flax_spmd._src.pipeline.cut import outside_loop as outside
from flax_spmd._src.pipeline.cut import stage_assignment as cutting
from flax_spmd._src.pipeline.cut import task_programs as splitting
from flax_spmd._src.pipeline.cut.equations import Value
from flax_spmd._src.pipeline.cut.microbatch_loop import Loop, Step
from flax_spmd._src.pipeline.cut.outside_loop import Joined
from flax_spmd._src.pipeline.cut.stage_marks import proposed_ends
from flax_spmd._src.pipeline.cut.task_programs import Programs
from flax_spmd._src.pipeline.run import call_list as linking
from flax_spmd._src.pipeline.run import memory as footprint
from flax_spmd._src.pipeline.run import offline, submeshes
from flax_spmd._src.pipeline.run.assembly import Assembler
from flax_spmd._src.pipeline.run.call_list import Linked, Linker, Timed
from flax_spmd._src.pipeline.run.call_text import listing
from flax_spmd._src.pipeline.run.compilation import Compiler
from flax_spmd._src.pipeline.run.compiled import Compiled
from flax_spmd._src.pipeline.run.elementwise_specs import Kinds
from flax_spmd._src.pipeline.run.lowering import Preparer
from flax_spmd._src.pipeline.run.memory import Footprint
from flax_spmd._src.pipeline.run.offline import Offline
from flax_spmd._src.pipeline.run.process_transfer import processes_of
from flax_spmd._src.pipeline.run.request import Request, Setting, aval_of
from flax_spmd._src.pipeline.schedules.schedule import Schedule, check_schedule
from flax_spmd._src.pipeline.schedules.stage_ranks import placed
from flax_spmd._src.pipeline.schedules.tasks import Task
from flax_spmd._src.rules.table import Rules
from flax_spmd.errors import PipelineError

LeafPlanner = Callable[[Any], Sequence[Any]]


class Pipelined(UnderLayout):
  """A function that runs as a pipeline; called, traced, lowered and compiled like a `jax.jit` function.

  Args:
    fn: the function.
    mesh, rules: the layout.
    axis: the mesh axis that stages are laid over.
    schedule: used where `accumulate` is given none.
    plan_outputs: gives a sharding, or None, for each leaf of a result.
    plan_inputs: the same, for each leaf of the arguments that are not static, which it gets as a pair
      `(args, kwargs)`; None: as they lie.
    threads: whether each rank has a thread of its own.
    stages: how many stages a model without stage ends is cut into; None: it has them.
    options: arguments of `jax.jit` about static and donated arguments.
  """

  def __init__(
    self,
    fn: Callable[..., Any],
    mesh: MeshLike,
    rules: Rules,
    axis: str,
    schedule: Schedule | None,
    plan_outputs: LeafPlanner,
    plan_inputs: LeafPlanner | None,
    threads: bool,
    stages: int | None,
    options: Mapping[str, Any],
  ):
    self.in_force = InForce(mesh, rules)
    check_not_jitted(fn, self.in_force)
    functools.update_wrapper(self, fn)
    submeshes.check_axis(mesh, rules, axis)
    check_schedule(schedule, 'pipeline_jit')
    self._fn, self._arguments = fn, Arguments.of(fn, options)
    self._setting = Setting(mesh, rules, axis, schedule, self._arguments, threads, stages)
    self._plan_outputs, self._plan_inputs = plan_outputs, plan_inputs
    self._donated = Arguments.of(
      fn, {key.replace('donate', 'static'): value for key, value in options.items() if 'donate' in key}
    )
    self._compiled: dict[Any, Compiled] = {}
    self._latest: Compiled | None = None
    self._lock = threading.RLock()

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Runs the function; traces and compiles it first where these arguments are new."""
    args, kwargs = self._arguments.by_position(args, kwargs)
    latest = self._latest
    leaves = None if latest is None else latest.leaves(args, kwargs)
    if latest is None or leaves is None:
      self._latest = latest = self.compile(*args, **kwargs)
      leaves = jax.tree.leaves(self._arguments.dynamic(args, kwargs))
    return latest.run(leaves)

  def compile(self, *args: Any, **kwargs: Any) -> Compiled:
    """The programs for these arguments, which may be abstract."""
    args, kwargs = self._arguments.by_position(args, kwargs)
    with self._lock:
      request = self._request(args, kwargs)
      if request.key not in self._compiled:
        self._compiled[request.key] = self._traced(request).lower().compile()
      return self._compiled[request.key]

  def trace(self, *args: Any, **kwargs: Any) -> Traced:
    """The function's jaxpr for these arguments, which may be abstract; `.lower()` goes on."""
    return self._traced(self._request(*self._arguments.by_position(args, kwargs)))

  def lower(self, *args: Any, **kwargs: Any) -> Lowered:
    """The function cut into programs, linked to a list of calls and sends; `.compile()` goes on."""
    return self.trace(*args, **kwargs).lower()

  def __repr__(self) -> str:
    return f'<layout.pipeline_jit of {getattr(self, "__qualname__", self._fn)}>'

  def _request(self, args, kwargs) -> Request:
    """What these arguments ask for."""
    dynamic = self._arguments.dynamic(args, kwargs)
    check_arrays(dynamic)
    leaves, treedef = jax.tree.flatten(dynamic)
    mesh, axis, sizes = self._setting.mesh, self._setting.axis, self._setting.sizes
    if self._plan_inputs is None:
      planned: Sequence[Any] = [None] * len(leaves)
    else:
      planned = self._plan_inputs(dynamic)
      submeshes.check_places(named_arguments(dynamic), planned, mesh, axis, 'Arguments')
    specs = [
      submeshes.spec_of(leaf, axis, sizes)
      if sharding is None
      else submeshes.without(sharding.spec, axis)
      for leaf, sharding in zip(leaves, planned, strict=True)
    ]
    static = self._arguments.statics(args, kwargs)
    return Request(args, kwargs, treedef, [aval_of(leaf) for leaf in leaves], specs, static)

  def _traced(self, request: Request) -> Traced:
    begin = time.perf_counter()
    setting = self._setting
    abstract = setting.ranks[0].abstract_mesh

    def function(*leaves):
      dynamic = request.treedef.unflatten(leaves)
      args, kwargs = self._arguments.filled(dynamic, request.args, request.kwargs)
      ends = nullcontext() if setting.stages is None else proposed_ends()
      with scope(InForce(abstract, setting.rules)), compat.mesh_scope(abstract), ends:
        return self._fn(*args, **kwargs)

    shapes = [
      jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in request.avals
    ]
    jaxpr, result = jax.make_jaxpr(function, return_shape=True)(*shapes)
    places = self._plan_outputs(result)
    submeshes.check_places(named_leaves(result), places, setting.mesh, setting.axis, 'Results')
    planned = [
      None if sharding is None else submeshes.without(sharding.spec, setting.axis) for sharding in places
    ]
    times = {'trace': time.perf_counter() - begin}
    return Traced(jaxpr, setting, request, result, planned, self._donations(request), times)

  def _donations(self, request: Request) -> list[bool]:
    """Which leaves may be overwritten."""
    args, kwargs = self._arguments.dynamic(request.args, request.kwargs)
    positions = [i for i in range(len(request.args)) if i not in self._arguments.positions]
    marks = tuple(
      jax.tree.map(lambda _: position in self._donated.positions, arg)  # noqa: B023
      for position, arg in zip(positions, args, strict=True)
    )
    named = {
      name: jax.tree.map(lambda _: name in self._donated.names, arg)  # noqa: B023
      for name, arg in kwargs.items()
    }
    return jax.tree.leaves((marks, named))


@dataclasses.dataclass
class Traced:
  """A traced function.

  Attributes:
    jaxpr: its program, whole.
    times: how many seconds each phase took.
  """

  jaxpr: Any
  _setting: Setting
  _request: Request
  _result: Any
  _planned: list[PartitionSpec | None]
  _donations: list[bool]
  times: dict[str, float]

  def lower(self) -> Lowered:
    """Cuts it into programs for the stages, and orders these.

    Raises:
      PipelineError: it cannot be cut, or the schedule does not fit it or the mesh.
    """
    begin = time.perf_counter()
    step = reading.read(self.jaxpr)
    stages, mesh = self._setting.stages, self._setting.mesh
    if stages is not None and not cutting.stage_ends(step.loop.body.equations):
      step.loop.body = balancing.with_ends(step.loop.body, stages)
    schedule = step.loop.schedule or self._setting.schedule
    order, owners, title = self._order(step.loop, schedule)
    turn = _turns(order, len(owners) - 1)
    split = any(task.kind == 'wgrad' for one in order for task in one.step.tasks)
    cut = cutting.cut(step.loop.body, len(owners), title, turn, split)
    programs = splitting.split(cut, split)
    joined = outside.join(step, programs, owners.__getitem__)
    placed_ = outside.place(joined)
    told = isinstance(mesh, Mesh) and len(processes_of(mesh)) > 1
    linked = Linker(joined, placed_, programs, order, owners, step.arguments, told).link()
    times = {**self.times, 'plan': time.perf_counter() - begin}
    return Lowered(self, step, programs, joined, linked, schedule, times)

  def _order(self, loop: Loop, schedule: Schedule | None) -> tuple[list[Timed], tuple[int, ...], str]:
    """What is run in which order, the rank of each stage, and what all that is called."""
    ranks, axis = len(self._setting.ranks), self._setting.axis
    if schedule is not None and schedule.ranks != ranks:
      raise PipelineError(
        f'{schedule} runs on {schedule.ranks} ranks, but the mesh axis {axis!r} has size {ranks}.\n'
        f'Fix: use a schedule of {ranks} ranks, or a mesh whose axis has size {schedule.ranks}.'
      )
    if loop.once:
      owners = schedule.owners if schedule is not None else _owners_of(loop, ranks, axis)
      once = [Timed(Task('fwd', stage, 0), stage, stage + 1) for stage in range(len(owners))]
      return once, owners, 'this pipeline'
    if schedule is None:
      raise PipelineError(
        f'The microbatch loop at {loop.place} has no schedule.\n'
        f'Fix: pass one to accumulate, such as schedule=OneFOneB(ranks={ranks}), or to pipeline_jit.'
      )
    runs = schedule.simulate(loop.count).runs
    return linking.timeline(runs), schedule.owners, str(schedule)


def _owners_of(loop: Loop, ranks: int, axis: str) -> tuple[int, ...]:
  """The ranks of the stages of a function that has no schedule."""
  ends = cutting.stage_ends(loop.body.equations)
  stages = next((n for n in (ends + 1, ends) if n % ranks == 0), None)
  if not stages:
    raise PipelineError(
      f'The model has {cutting.ends_text(ends)}, and the mesh axis {axis!r} has size {ranks}.\n'
      f'{cutting.places(cutting.ends_among(loop.body.equations))}\n'
      f'Fix: end {ranks - 1} stages by stage_end (between stages) or {ranks} (after each); or '
      f'{2 * ranks - 1} or {2 * ranks} for two stages on each rank, and so on.'
    )
  return placed(ranks, stages // ranks, 'loop')


def _turns(order: Sequence[Timed], last: int) -> bool:
  """Whether the rank of the last stage goes back with each microbatch right away."""
  tasks = [task for one in order for task in one.step.tasks]
  tasks = [task for task in tasks if task.stage == last and task.kind != 'wgrad']
  pairs = zip(tasks[::2], tasks[1::2])
  return len(tasks) % 2 == 0 and all(
    (one.kind, other.kind) == ('fwd', 'bwd') and one.microbatch == other.microbatch
    for one, other in pairs
  )


@dataclasses.dataclass
class Lowered:
  """A function cut into programs for stages.

  Attributes:
    linked: the calls and sends, in order.
    programs: the tasks.
    schedule: in whose order; None for a function that is given none.
    times: how many seconds each phase took.
  """

  _traced: Traced
  _step: Step
  programs: Programs
  _joined: Joined
  linked: Linked
  schedule: Schedule | None
  times: dict[str, float]

  @property
  def microbatches(self) -> int | None:
    """How many there are; None for a function without a loop."""
    return None if self._step.loop.once else self._step.loop.count

  def as_text(self) -> str:
    """What is run and sent, in order: a line for each call of a program and each transfer between ranks.

    Example:
      >>> def double(w, batch):
      ...   return pipeline.stage_end(batch * w) * w
      >>> lowered = Layout({'stage': 2}).pipeline_jit(double).lower(jnp.float32(2), jnp.ones((8, 4)))
      >>> print(lowered.as_text())
      rank 0: fwd_0__0            2 arrays -> 1 array
      rank 0 -> rank 1            float32[8,4] of microbatch 0
      rank 1: fwd_1__0            2 arrays -> 1 array
    """
    return listing(self.linked)

  def compile(self) -> Compiled:
    """Compiles the programs, several at once.

    Raises:
      PipelineError: the mesh is abstract, or a rank's devices have less memory than its stages need.
    """
    setting, step = self._traced._setting, self._step
    begin = time.perf_counter()
    mesh = submeshes.check_concrete(setting.mesh)
    meshes = [submeshes.submesh(mesh, setting.axis, [rank]) for rank in range(len(setting.ranks))]
    preparer = self._preparer()
    executables = Compiler(preparer, meshes).compile()
    assembler = Assembler(self.linked, preparer, executables, mesh, setting.axis)
    machine = assembler.machine(step.arguments, self._joined.results, setting.threads)
    memory = Footprint(self.linked, preparer.sharding, step.arguments, len(meshes)).peaks(
      {unit: one.donated for unit, one in executables.items()},
      {unit: footprint.working(one.compiled) for unit, one in executables.items()},
    )
    footprint.check(memory, meshes)
    times = {**self.times, 'compile': time.perf_counter() - begin}
    result = jax.tree.structure(self._traced._result)
    return Compiled(setting, self._traced._request, result, machine, executables, memory, times)

  def offline(self, platform: str) -> Offline:
    """The programs for a platform, with nothing compiled: the mesh may be abstract.

    Args:
      platform: as JAX calls it: `'cpu'`, `'cuda'`, `'tpu'`.
    """
    return offline.plan(self.linked, self._preparer(), platform, self._step.arguments)

  def _preparer(self) -> Preparer:
    traced = self._traced
    given, passed_on = (
      zip(self._step.arguments, traced._donations, strict=True),
      set(self._joined.results),
    )
    donatable = {value for value, donated in given if donated and value not in passed_on}
    return Preparer(self.linked, traced._setting.ranks, self._specs(), donatable)

  def _specs(self) -> dict[Value, PartitionSpec]:
    """How values lie, as far as it is known before anything is compiled."""
    step, joined, traced = self._step, self._joined, self._traced
    specs = dict(zip(step.arguments, traced._request.specs, strict=True))
    planned = {
      atom: spec
      for atom, spec in zip(joined.results, traced._planned, strict=True)
      if spec is not None and isinstance(atom, Value)
    }
    kinds = Kinds(joined.equations)
    sums = self.programs.accumulators
    for one in sums:
      kinds.join(joined.final[one], joined.start[one], one.before)
    wanted = [value for one in sums for value in (joined.final[one], joined.start[one], one.before)]
    results = [atom for atom in joined.results if isinstance(atom, Value) and atom not in specs]
    by_kind = kinds.specs(specs | planned, [*wanted, *results])
    whole = {value: PartitionSpec() for value in wanted}
    return whole | by_kind | planned | specs
