"""Name meshes: a step lowered on a mesh that has one axis of size 1 for each of its logical names.

    lowered = lower_on_names(train_step, 'cuda')

Every named dimension is then sharded over the axis of its name: size 1 divides any dimension. The names appear in
the lowered program as mesh axes, and an estimate replaces them by the axes that a layout's rules assign. So the step
is lowered once for all layouts.
"""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from flax_spmd._src.active_layout import record_names
from flax_spmd._src.compare.lowering import abstract_arguments, abstract_batch, abstract_state
from flax_spmd._src.compare.train_step import TrainStep, TrainStepLike, train_step_on
from flax_spmd._src.compat import (
  equations_in,
  is_python_call,
  lower_with_placeholders,
  program_bytes,
  target_devices,
  used_arguments,
)
from flax_spmd._src.jit.batch_leaves import BatchLeaves
from flax_spmd._src.jit.nnx_modules import Updated, leaves_of_values
from flax_spmd._src.layout import Layout
from flax_spmd._src.mesh import abstract_mesh
from flax_spmd._src.names.nnx_variables import first_places
from flax_spmd._src.plan.planner import planner_for
from flax_spmd._src.plan.result_shardings import successors
from flax_spmd._src.rules.decisions import axis_names
from flax_spmd._src.rules.table import Rules
from flax_spmd.errors import EstimatorError, MeshAxisError

_OWN_MESH = (
  'The step uses mesh axes itself, in a shard_map or a constraint, so its logical names alone do not decide its layout.\n'
  'Fix: choose the layouts, and compile them with spmd.compare.'
)
_OF_A_MESH = (
  'The model is built for the axes of a mesh, so its logical names alone do not decide its layout. On a mesh whose '
  'axes are its names, it fails: {error}\n'
  'Fix: choose the layouts, and compile them with spmd.compare.'
)
OWN_AXES = (
  'The state has mesh axes among its names, so its logical names alone do not decide its layout.\n'
  'Fix: give each dimension one logical name, or choose the layouts, and compile them with spmd.compare.'
)
_AXES_OF_BATCH = (
  'The placements of the batch have mesh axes, so its logical names alone do not decide its layout.\n'
  "Fix: give its dimensions logical names, such as ('batch', None), or choose the layouts, and compile them with "
  'spmd.compare.'
)
_ORDERED = (
  'The step calls Python with ordered=True, so its program has arguments for this order, and none for all layouts.\n'
  'Fix: pass ordered=False, or choose the layouts, and compile them with spmd.compare.'
)
_SPARE_AXIS = '_'  # of size 2, and without rules: JAX drops all shardings on a mesh of one device


class NamedLowering(NamedTuple):
  """A step lowered on the mesh of its names.

  Attributes:
    code: MLIR bytecode of the step.
    train_step: the step, built on the mesh if it is built on any.
    state: tree of the step's first argument: shapes with shardings, in boxes.
    arguments: `(args, kwargs)` of the program, with modules as their states: shapes.
    result: tree of the program's results, likewise.
    places: positions of the leaves of `arguments` in `(state, batch)`, where a shared variable has several.
    used: indices of the leaves of `arguments` that the step uses; the program has no others.
    jaxpr: the step as traced.
    layout: the mesh of names, and their rules.
    platform: platform that the step is lowered for.
    as_axes: the names that are in boxes of mesh axes.
  """

  code: bytes
  train_step: TrainStep
  state: Any
  arguments: Any
  result: Any
  places: list[int]
  used: list[int]
  jaxpr: Any
  layout: Layout
  platform: str
  as_axes: frozenset[str]

  def leaves(self, batch: Any) -> list[Any]:
    """The leaves of `arguments`; `batch` as in `batch_under`."""
    every = jax.tree.leaves((self.state, batch))
    return [every[place] for place in self.places]

  def shardings(self, layout: Layout, batch: Any) -> list[NamedSharding]:
    """The sharding of each leaf of `arguments` under a layout; `batch` as in `batch_under`.

    Boxes may be around any number of arrays, such as an optimizer's `MaskedNode`.
    """
    of_state = planner_for(layout.mesh, layout.rules).leaf_shardings(self.state)
    every = [*of_state, *(leaf.sharding for leaf in jax.tree.leaves(batch))]
    return [every[place] for place in self.places]

  def replaced_arguments(self) -> list[int | None]:
    """For each leaf of the result, the leaf of `arguments` whose place it takes in the next step; None for others."""
    if not isinstance(self.result, Updated):
      return successors(self.result, self.arguments)
    result, modules, values, _ = self.result
    before = leaves_of_values(self.result, self.arguments)
    of_values = (
      leaves if len(leaves) == len(jax.tree.leaves(value)) else [None] * len(jax.tree.leaves(value))
      for leaves, value in zip(before, values, strict=True)
    )
    return [*successors((result, modules), self.arguments), *itertools.chain.from_iterable(of_values)]

  def batch_under(
    self, layout: Layout, batch: Any, shardings: Sequence[NamedSharding]
  ) -> BatchLeaves | None:
    """The batch that `layout.jit` constrains under a layout, over its logical name; None if it adds no constraints.

    Args:
      layout: layout of the step.
      batch: tree of the step's second argument: shapes with the layout's shardings.
      shardings: those of all leaves of `arguments` under the layout.
    """
    dynamic = jax.tree.unflatten(
      jax.tree.structure(self.arguments),
      [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        for leaf, sharding in zip(self.leaves(batch), shardings, strict=True)
      ],
    )
    found = self.train_step.jitted(layout).batch_of(dynamic, self.result, self.jaxpr)
    if found is None:
      return None
    named = self.shardings(self.layout, abstract_batch(self.train_step, self.layout))
    return found._replace(axes=axis_names(named[found.leaves[0]].spec[0]))

  def with_batch(self, batch: BatchLeaves) -> NamedLowering:
    """The same step with its batch constrained, as `batch_under` returns it."""
    with target_devices(self.platform):
      return _lowered_on(self.layout, self.train_step, self.platform, self.as_axes, batch)


def lower_on_names(
  train_step: TrainStepLike, platform: str, groups: int = 1, known: NamedLowering | None = None
) -> NamedLowering:
  """Traces a step to record its logical names, and lowers it on a mesh of these names.

  Args:
    train_step: the step and its arguments, or a function from a layout to it.
    platform: platform to lower for: 'cuda', 'tpu' or 'cpu'.
    groups: number of parts of the batch that a step with an axis name computes apart. The axis of that name has this
      size.
    known: the step lowered for another number of groups, whose names are the same.

  Raises:
    EstimatorError: the step or the state uses mesh axes, or calls Python in a fixed order.
    LayoutError: the step was already jitted by a layout.
    Exception: any error that the step raises while it is traced.
  """
  with target_devices(platform):
    if isinstance(train_step, TrainStep):
      return _lowered(train_step, platform, groups, known)
    try:
      return _lowered(train_step, platform, groups, known)
    except Exception as error:  # a true error of the step is raised again when it is compiled
      if groups > 1 or isinstance(error, EstimatorError):  # with one group, the model was built
        raise
      text = f'{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ""}'
      raise EstimatorError(_OF_A_MESH.format(error=text)) from error


def _lowered(
  train_step: TrainStepLike, platform: str, groups: int, known: NamedLowering | None
) -> NamedLowering:
  if known is None:
    names, as_axes, axis_name = _names_of(train_step)
  else:
    names = {*known.layout.mesh.axis_names} - {_SPARE_AXIS}
    as_axes, axis_name = known.as_axes, known.train_step.axis_name
  sizes = {name: groups if name == axis_name else 1 for name in sorted(names)}
  layout = Layout(abstract_mesh(sizes | {_SPARE_AXIS: 2}), Rules(*((name, name) for name in sizes)))
  with _explained() if as_axes else contextlib.nullcontext():
    return _lowered_on(layout, train_step_on(layout, train_step), platform, as_axes)


def _lowered_on(
  layout: Layout,
  train_step: TrainStep,
  platform: str,
  as_axes: frozenset[str],
  constrained: BatchLeaves | None = None,
) -> NamedLowering:
  state, batch = abstract_arguments(train_step, layout)
  jitted = train_step.jitted(layout, donate=True)
  traced = (jitted.with_batch(constrained) if constrained else jitted).trace(state, batch)
  if any(is_python_call(one) and one.params.get('ordered') for one in equations_in(traced.jaxpr)):
    raise EstimatorError(_ORDERED)
  lowered = lower_with_placeholders(traced, platform, layout.mesh)
  code, used = program_bytes(lowered), used_arguments(lowered)
  places, arguments = first_places((state, batch)), lowered.args_info
  result, jaxpr = lowered.out_info, traced.jaxpr
  return NamedLowering(
    code, train_step, state, arguments, result, places, used, jaxpr, layout, platform, as_axes
  )


def _names_of(train_step: TrainStepLike) -> tuple[set[str], frozenset[str], str | None]:
  """The logical names of a step's state, batch and constraints, those in boxes of mesh axes, and its axis name, which is among them."""
  # a rule unlike all others, as `record_names` requires
  layout = Layout(abstract_mesh({_SPARE_AXIS: 2}), Rules((uuid.uuid4().hex, None)))
  train_step = train_step_on(layout, train_step)
  with record_names() as names:
    with _explained():
      state, layout, as_axes = abstract_state(train_step, layout)
    jitted = train_step.jitted(layout)
    try:
      batch = abstract_batch(train_step, layout)
    except MeshAxisError as error:
      raise EstimatorError(_AXES_OF_BATCH) from error
    with _explained():
      jitted.trace(state, batch)
  return names | as_axes, as_axes, train_step.axis_name


@contextlib.contextmanager
def _explained() -> Iterator[None]:
  """Replaces errors about the mesh of names, which the user has never seen, in the state and in the step alike."""
  try:
    yield
  except ValueError as error:  # a true error of the step is raised again when it is compiled
    in_names = isinstance(error, MeshAxisError) and ' of names ' in str(error)  # else in the model
    if in_names:
      raise EstimatorError(OWN_AXES) from error
    if 'mesh' in str(error) or 'shard_map' in str(error):
      raise EstimatorError(_OWN_MESH) from error
    raise
