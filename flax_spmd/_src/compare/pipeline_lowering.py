"""Pipelines: a row of a comparison whose step is cut into stages, a program for each task.

    staged = Layout(abstract_mesh({'stage': 4, 'data': 16}), rules)
    rows = {
      'one program': plain,
      '1F1B': Pipeline(staged, OneFOneB(ranks=4)),
      'ZB-H1': Pipeline(staged, ZeroBubbleH1(ranks=4)),
      '32 microbatches': Pipeline(staged, OneFOneB(4), step=functools.partial(step, microbatches=32)),
    }
    print(compare(step, create, batch, rows, target='h100:64'))

What is lowered is what `layout.pipeline_jit` would run: each program for the devices of its rank. Programs
that are equal, of middle stages mostly, are compiled once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from flax_spmd._src.compare.hardware import Target, share
from flax_spmd._src.compare.lowering import Program, abstract_arguments, described, dtype_of, identity_of
from flax_spmd._src.compat import program_bytes, program_text
from flax_spmd._src.layout import Layout
from flax_spmd._src.mesh import axis_sizes
from flax_spmd._src.pipeline.pipelined import Lowered
from flax_spmd._src.pipeline.run.call_list import Unit
from flax_spmd._src.pipeline.run.offline import Offline
from flax_spmd._src.pipeline.run.submeshes import submesh
from flax_spmd._src.pipeline.schedules.schedule import Schedule
from flax_spmd._src.public_module import set_module
from flax_spmd._src.tree_paths import path_string
from flax_spmd.errors import PipelineError


@set_module('flax_spmd.explore')
class Pipeline(NamedTuple):
  """A step as a pipeline, where a layout is compared with others.

  Attributes:
    layout: its mesh has an axis for the stages.
    schedule: for an `accumulate` that is given none.
    axis: the mesh axis that stages are laid over.
    stages: into how many stages a model that ends none is cut, as of `layout.pipeline_jit`.
    step: a step of its own (other microbatches, other ends of stages) in place of the one that is compared.

  Example:
    >>> staged = Layout(abstract_mesh({'stage': 4, 'data': 2}), (('batch', 'data'),))
    >>> explore.Pipeline(staged, pipeline.OneFOneB(ranks=4), stages=4).axis
    'stage'
  """

  layout: Layout
  schedule: Schedule | None = None
  axis: str = 'stage'
  stages: int | None = None
  step: Callable[..., Any] | None = None


class Staged(NamedTuple):
  """A step that was cut and lowered.

  Attributes:
    layout: its layout, on an abstract mesh.
    whole: the state and the batch on one rank's devices; its code is none.
    tasks: per unit, its program.
    plan: what runs in which order, and how everything lies.
    names: the paths of the arguments, the state's under `0/`.
    schedule, microbatches, axis: as it runs.
    target: the devices of a rank.
  """

  layout: Layout
  whole: Program
  tasks: Mapping[Unit, Program]
  plan: Offline
  names: Sequence[str]
  schedule: Schedule
  microbatches: int
  axis: str
  target: Target

  @property
  def distinct(self) -> list[Program]:
    """The programs to be compiled, each once."""
    return list({program.identity: program for program in self.tasks.values()}.values())


class Cut(NamedTuple):
  """A step that was cut, of which nothing is lowered yet.

  Attributes:
    layout: its layout, on an abstract mesh.
    state, data: what it is called with.
    lowered: its parts, in order.
    schedule, microbatches: as it runs.
  """

  layout: Layout
  state: Any
  data: Any
  lowered: Lowered
  schedule: Schedule
  microbatches: int


def cut_pipeline(
  step: Callable[..., Any],
  create: Callable[..., Any],
  batch: Any,
  pipeline: Pipeline,
  target: Target,
  *,
  args: Sequence[Any] = (),
  places: Any = None,
  donate: bool = True,
) -> Cut:
  """Cuts `step(state, batch)` into stages; arguments and what it raises as of `lower_pipeline`."""
  layout, state, data = abstract_arguments(create, batch, pipeline.layout, target, args, places)
  jitted = layout.pipeline_jit(
    pipeline.step or step,
    axis=pipeline.axis,
    schedule=pipeline.schedule,
    stages=pipeline.stages,
    donate_argnums=0 if donate else None,
  )
  lowered = jitted.lower(state, data)
  if lowered.microbatches is None or lowered.schedule is None:
    raise PipelineError(
      'The step has no microbatch loop, whose schedule is what a comparison of pipelines is about.\n'
      'Fix: let it take its gradients in flax_spmd.pipeline.accumulate.'
    )
  _check_schedule(lowered.schedule, pipeline.schedule)
  return Cut(layout, state, data, lowered, lowered.schedule, lowered.microbatches)


def lower_pipeline(
  step: Callable[..., Any],
  create: Callable[..., Any],
  batch: Any,
  pipeline: Pipeline,
  target: Target,
  *,
  args: Sequence[Any] = (),
  places: Any = None,
  donate: bool = True,
) -> Staged:
  """Cuts `step(state, batch)` into stages, and lowers their programs for a target; arguments as of `lower`.

  Raises:
    TargetDeviceError: the layout's mesh is of another size than the target.
    PipelineError: the step cannot be cut, or has no microbatch loop.
    LayoutError: names that do not fit; or whatever the model itself raises.
  """
  cut = cut_pipeline(step, create, batch, pipeline, target, args=args, places=places, donate=donate)
  layout, lowered = cut.layout, cut.lowered
  plan = lowered.offline(target.chip.platform)
  mesh = submesh(layout.mesh, pipeline.axis, [0])
  of_rank = layout.replace(mesh=mesh)
  tasks = {unit: _program(one.lowered, of_rank) for unit, one in plan.programs.items()}
  sizes = axis_sizes(layout.mesh)
  return Staged(
    layout,
    described(of_rank, cut.state, cut.data),
    tasks,
    plan,
    _paths(cut.state, cut.data),
    cut.schedule,
    cut.microbatches,
    pipeline.axis,
    share(target, sizes[pipeline.axis]),
  )


def _check_schedule(found: Schedule, wanted: Schedule | None) -> None:
  """Raises if a row asks for another schedule than its step, whose own one counts first."""
  if wanted not in (None, found):
    raise PipelineError(
      f"The row asks for {wanted}, but the step's accumulate is given {found}, which it runs by.\n"
      'Fix: give accumulate no schedule, or the row a step of its own.'
    )


def _program(lowered: Any, layout: Layout) -> Program:
  """A task's program; its name, in the first line, does not make it another one."""
  text = program_text(lowered, locations=False)
  text = text[text.index('\n') :]
  return Program(program_bytes(lowered), identity_of(lowered, text), layout, dtype_of(text), [], 0, [])


def _paths(state: Any, data: Any) -> list[str]:
  """`0/params/w` for an array of the state, `1/x` for one of the batch."""
  paths = jax.tree_util.tree_leaves_with_path((state, data))
  return [path_string(path) for path, _ in paths]
