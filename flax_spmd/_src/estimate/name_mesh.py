"""Name meshes: a step lowered on a mesh that has one axis of size 1 for each of its logical names.

    lowered = lower_on_names(train_step, 'cuda')

Every named dimension is then sharded over the axis of its name: size 1 divides any dimension. The names appear in
the lowered program as mesh axes, and an estimate replaces them by the axes that a layout's rules assign. So the step
is lowered once for all layouts.
"""

from __future__ import annotations

import uuid
from typing import Any, NamedTuple

from flax_spmd._src.active_layout import record_names
from flax_spmd._src.compare.lowering import abstract_batch
from flax_spmd._src.compare.train_step import TrainStep
from flax_spmd._src.compat import program_bytes
from flax_spmd._src.layout import Layout
from flax_spmd._src.mesh import abstract_mesh
from flax_spmd._src.rules.table import Rules
from flax_spmd.errors import EstimatorError, MeshAxisError

_OWN_MESH = (
  'The step uses a mesh of its own (shard_map?), so its logical names alone do not decide its layout.\n'
  'Fix: choose the layouts, and compile them with spmd.compare.'
)
_OWN_AXES = (
  'The state has mesh axes among its names, so its logical names alone do not decide its layout.\n'
  'Fix: give each dimension one logical name, or choose the layouts, and compile them with spmd.compare.'
)
_SPARE_AXIS = '_'  # of size 2, and without rules: JAX drops all shardings on a mesh of one device


class NamedLowering(NamedTuple):
  """A step lowered on the mesh of its names.

  Attributes:
    code: MLIR bytecode of the step.
    state: tree of the step's first argument: shapes with shardings, in boxes.
    result: tree of the step's results: shapes.
  """

  code: bytes
  state: Any
  result: Any


def lower_on_names(train_step: TrainStep, platform: str) -> NamedLowering:
  """Traces a step to record its logical names, and lowers it on a mesh of these names.

  Args:
    train_step: the step and its arguments.
    platform: platform to lower for: 'cuda', 'tpu' or 'cpu'.

  Raises:
    EstimatorError: the step or the state uses mesh axes.
    LayoutError: the step was already jitted by a layout.
    Exception: any error that the step raises while it is traced.
  """
  names = sorted(_names_of(train_step))
  layout = Layout(
    abstract_mesh(dict.fromkeys(names, 1) | {_SPARE_AXIS: 2}), Rules(*((name, name) for name in names))
  )
  state = layout.abstract(train_step.create, *train_step.args)
  batch = abstract_batch(train_step, layout)
  lowered = layout.jit(train_step.step).trace(state, batch).lower(lowering_platforms=(platform,))
  return NamedLowering(program_bytes(lowered), state, lowered.out_info)


def _names_of(train_step: TrainStep) -> set[str]:
  """The logical names of a step's state, batch and constraints."""
  # a rule unlike all others, as `record_names` requires
  layout = Layout(abstract_mesh({_SPARE_AXIS: 2}), Rules((uuid.uuid4().hex, None)))
  jitted = layout.jit(train_step.step)
  with record_names() as names:
    try:
      state = layout.abstract(train_step.create, *train_step.args)
    except MeshAxisError as error:  # about a mesh that the user has never seen
      raise EstimatorError(_OWN_AXES) from error
    try:
      jitted.trace(state, abstract_batch(train_step, layout))
    except ValueError as error:  # a true error of the step is raised again when it is compiled
      if 'mesh' in str(error):
        raise EstimatorError(_OWN_MESH) from error
      raise
  return names
