"""Pipelines in a comparison: a step cut into stages, and one lowered program per task.

    staged = Layout(abstract_mesh({'stage': 4, 'data': 16}), rules)
    rows = {
      'one program': plain,
      '1F1B': Pipeline(staged, OneFOneB(ranks=4)),
      'ZB-H1': Pipeline(staged, ZeroBubbleH1(ranks=4)),
      '32 microbatches': Pipeline(staged, OneFOneB(4), step=functools.partial(step, microbatches=32)),
    }
    print(compare(TrainStep(step, create, batch), rows, target='h100:64'))

The programs are those that `layout.pipeline_jit` would run, each lowered for the devices of its rank. Equal
programs, usually those of the middle stages, are compiled once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from flax_spmd._src.compare.hardware import Target, share
from flax_spmd._src.compare.lowering import (
  LoweredStep,
  abstract_arguments,
  describe_arguments,
  doubtful_operations_of,
  dtype_of,
  identity_of,
  layout_on_target,
  python_calls,
)
from flax_spmd._src.compare.train_step import TrainStep, TrainStepLike, check_step, train_step_on
from flax_spmd._src.compat import program_bytes, target_devices
from flax_spmd._src.layout import Layout
from flax_spmd._src.mesh import axis_sizes
from flax_spmd._src.names.tree_names import leaf_parts
from flax_spmd._src.pipeline.pipelined import LoweredPipelineStep
from flax_spmd._src.pipeline.run.call_list import StageProgram
from flax_spmd._src.pipeline.run.stage_lowering import LoweredStages
from flax_spmd._src.pipeline.run.submeshes import submesh
from flax_spmd._src.pipeline.schedules.schedule import Schedule
from flax_spmd._src.public import public
from flax_spmd.errors import PipelineError


@public('flax_spmd.explore')
class Pipeline(NamedTuple):
  """A pipeline as one row of a comparison.

  Attributes:
    layout: layout whose mesh has an axis for the stages.
    schedule: schedule of a step whose `accumulate` is given none.
    axis: mesh axis of the stages.
    stages: number of stages for a model that marks no stage ends, as for `layout.pipeline_jit`.
    step: step function of this row, with other microbatches or stage ends. Default: the compared one; of a function
      of the layout, that for the mesh of one rank.
    host_after: number of tasks after which arrays of microbatches wait on the host, as for `layout.pipeline_jit`.

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
  host_after: int | None = None


class LoweredPipeline(NamedTuple):
  """A step cut into stages, with its programs lowered.

  Attributes:
    layout: layout on an abstract mesh.
    on_rank: the state and the batch on the devices of one rank, with empty code.
    programs: lowered program of each unit.
    plan: calls and transfers in order, with the sharding of every value.
    parts: the part that each of the step's arguments belongs to: 'params', 'opt_state', '' (of the state), or 'batch'.
    schedule: schedule of the microbatch loop.
    microbatches: number of microbatches.
    axis: mesh axis of the stages.
    target: the devices of one rank.
  """

  layout: Layout
  on_rank: LoweredStep
  programs: Mapping[StageProgram, LoweredStep]
  plan: LoweredStages
  parts: Sequence[str]
  schedule: Schedule
  microbatches: int
  axis: str
  target: Target

  @property
  def distinct(self) -> list[LoweredStep]:
    """The programs to compile, without duplicates."""
    return list({program.identity: program for program in self.programs.values()}.values())


class CutStep(NamedTuple):
  """A step cut into stages, before its programs are lowered.

  Attributes:
    layout: layout on an abstract mesh.
    state: abstract state.
    batch: abstract batch.
    jaxpr: the step, as traced.
    lowered: the calls and transfers of the step, in order.
    schedule: schedule of the microbatch loop.
    microbatches: number of microbatches.
  """

  layout: Layout
  state: Any
  batch: Any
  jaxpr: Any
  lowered: LoweredPipelineStep
  schedule: Schedule
  microbatches: int


def cut_pipeline(train_step: TrainStepLike, pipeline: Pipeline, target: Target) -> CutStep:
  """Cuts a step into stages; arguments and errors as for `lower_pipeline`."""
  layout = layout_on_target(pipeline.layout, target)
  if pipeline.step is not None:
    check_step(pipeline.step)
  with target_devices(target.chip.platform):
    whole = train_step_on(layout, train_step)
    state, batch = abstract_arguments(whole, layout)
    jitted = layout.pipeline_jit(
      pipeline.step or _step_of_a_rank(train_step, layout, pipeline.axis),
      axis=pipeline.axis,
      schedule=pipeline.schedule,
      stages=pipeline.stages,
      host_after=pipeline.host_after,
      donate_argnums=0 if whole.donate else None,
    )
    traced = jitted.trace(state, batch)
    lowered = traced.lower()
  if lowered.microbatches is None or lowered.schedule is None:
    raise PipelineError(
      'The step has no microbatch loop, so there is no schedule to compare.\n'
      'Fix: compute its gradients in flax_spmd.pipeline.accumulate.'
    )
  _check_schedule(lowered.schedule, pipeline.schedule)
  return CutStep(layout, state, batch, traced.jaxpr, lowered, lowered.schedule, lowered.microbatches)


def _step_of_a_rank(train_step: TrainStepLike, layout: Layout, axis: str) -> Callable[..., Any]:
  """The step, whose model is built on the mesh of one rank if it is built on any."""
  if isinstance(train_step, TrainStep) or axis not in layout.mesh.axis_names:
    return train_step_on(layout, train_step).step
  return train_step_on(layout.replace(mesh=submesh(layout.mesh, axis, [0])), train_step).step


def lower_pipeline(train_step: TrainStepLike, pipeline: Pipeline, target: Target) -> LoweredPipeline:
  """Cuts a step into stages and lowers their programs.

  Args:
    train_step: the step and its arguments.
    pipeline: how to cut it; `pipeline.step` takes precedence over the step function in `train_step`.
    target: hardware to lower for.

  Raises:
    TargetDeviceError: the mesh and the target differ in their number of devices.
    PipelineError: the step cannot be cut, or has no microbatch loop.
    TypeError: the step takes other arguments than a state and a batch.
    LayoutError: logical names do not fit the arrays.
    Exception: any error that the model raises while it is traced.
  """
  cut = cut_pipeline(train_step, pipeline, target)
  layout = cut.layout
  plan = cut.lowered.offline(target.chip.platform)
  rank_layout = layout.replace(mesh=submesh(layout.mesh, pipeline.axis, [0]))
  programs = {unit: _program(one.lowered, rank_layout) for unit, one in plan.programs.items()}
  on_rank = describe_arguments(rank_layout, _shapes(cut.state), cut.batch)
  doubtful = doubtful_operations_of(
    cut.jaxpr, lambda: [one.lowered for one in plan.programs.values()], rank_layout.mesh
  )
  return LoweredPipeline(
    layout,
    on_rank._replace(findings=[*python_calls(cut.jaxpr), *doubtful, *on_rank.findings]),
    programs,
    plan,
    [*leaf_parts(cut.state), *['batch'] * len(jax.tree.leaves(cut.batch))],
    cut.schedule,
    cut.microbatches,
    pipeline.axis,
    share(target, axis_sizes(layout.mesh)[pipeline.axis]),
  )


def _shapes(state: Any) -> Any:
  """A state without its shardings, which are on the mesh of all ranks."""
  return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)


def _check_schedule(actual: Schedule, requested: Schedule | None) -> None:
  """Raises if the step's own schedule, which takes precedence, differs from the row's."""
  if requested is None or requested == actual:
    return
  texts = [str(requested), str(actual)]
  if texts[0] == texts[1]:  # texts have no costs and no rules
    texts = [_with_fields(requested, actual), _with_fields(actual, requested)]
  raise PipelineError(
    f"The row has the schedule {texts[0]}, but the step's accumulate is given {texts[1]}, which takes precedence.\n"
    'Fix: pass no schedule to accumulate, or give the row a step of its own.'
  )


def _with_fields(schedule: Schedule, other: Schedule) -> str:
  """A schedule with its fields that are not those of another one: `Automatic(ranks=4) with transfer=1`."""
  fields = (field.name for field in dataclasses.fields(schedule))
  own = [name for name in fields if getattr(schedule, name) != getattr(other, name, None)]
  values = ', '.join(f'{name}={getattr(schedule, name)!r}' for name in own)
  return f'{schedule} with {values}' if own else str(schedule)


def _program(lowered: Any, layout: Layout) -> LoweredStep:
  """The program of a task. Its identity leaves out its name, which is in the first line."""
  text = lowered.as_text()
  text = text[text.index('\n') :]
  return LoweredStep(
    program_bytes(lowered), identity_of(lowered, text), layout, dtype_of(text), [], [], 0, []
  )
