"""Lowering: a training step lowered under a layout for a target, with nothing allocated.

The mesh is abstract, so the target's devices can be absent. The step is lowered as it would run: with the
layout's constraints, shardings and donation.
"""

from __future__ import annotations

import hashlib
import math
import re
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from flax_spmd._src import compat
from flax_spmd._src.compare.activation_moves import unconstrained_axes
from flax_spmd._src.compare.hardware import Target, check_mesh
from flax_spmd._src.compare.train_step import TrainStep, TrainStepLike, train_step_on
from flax_spmd._src.compat import (
  lower_for_target,
  program_bytes,
  target_devices,
  used_arguments,
)
from flax_spmd._src.constraint_log import record_constraints
from flax_spmd._src.data.unusable_leaves import check_usable
from flax_spmd._src.jit.doubtful_operations import doubtful_operations
from flax_spmd._src.jit.replicated_batches import batch_sizes, replicated_batches
from flax_spmd._src.layout import Layout
from flax_spmd._src.mesh import abstract_mesh, axis_sizes, axis_types
from flax_spmd._src.names.nnx_variables import arrays_of, first_places
from flax_spmd._src.names.tree_names import leaf_parts
from flax_spmd._src.names.unit_paths import leaves_with_paths
from flax_spmd._src.plan.rows import Row
from flax_spmd._src.source_lines import source_line
from flax_spmd.errors import MeshAxisError, TargetDeviceError


class LoweredStep(NamedTuple):
  """A step as StableHLO, and the arrays it is called with.

  Attributes:
    code: serialized module, with source locations.
    identity: digest of the module and of the model's source lines in it.
    layout: layout on an abstract mesh.
    dtype: dtype of the operands of most matrix products, such as `bf16` or `f32`.
    rows: the arrays of the state, with the decisions behind each sharding.
    parts: the part of the state that each of them belongs to: 'params', 'opt_state', or '' for the rest.
    batch_bytes: bytes of the batch on one device.
    findings: suspicious things about the layout, one line each.
    unconstrained: the mesh axes of both state and batch, if the step has no constraint.
    unused_bytes: bytes on one device of the arrays that the step does not use, and the program does not have.
    left_out: the calls of Python, in one line; see `python_calls`.
  """

  code: bytes
  identity: str
  layout: Layout
  dtype: str
  rows: list[Row]
  parts: list[str]
  batch_bytes: int
  findings: list[str]
  unconstrained: tuple[str, ...] = ()
  unused_bytes: int = 0
  left_out: tuple[str, ...] = ()

  @property
  def mesh(self) -> dict[str, int]:
    """Size per mesh axis."""
    return axis_sizes(self.layout.mesh)


def lower(
  train_step: TrainStepLike, layout: Layout, target: Target, with_findings: bool = True
) -> LoweredStep:
  """Lowers a step for a target.

  Args:
    train_step: the step and its arguments, or a function from a layout to it.
    layout: layout of the state and the batch. Of its mesh only the axes count; the devices are the target's.
    target: hardware to lower for.
    with_findings: whether operations and constraints of the step are searched for suspicious ones, which takes up to a
      quarter more time.

  Raises:
    TargetDeviceError: the mesh and the target differ in their number of devices; or the step calls `jax.debug` in a fixed
      order, and the target has several devices.
    LayoutError: logical names do not fit the arrays.
    MeshError: the step constrains arrays on another mesh than the layout's.
    Exception: any error that the model raises while it is traced.
  """
  abstract = layout_on_target(layout, target)
  with target_devices(target.chip.platform):
    train_step = train_step_on(abstract, train_step)
    state, batch = abstract_arguments(train_step, abstract)
    jitted = train_step.jitted(abstract, donate=True)
    with record_constraints() as requests:
      traced = jitted.trace(state, batch)
    _check_order(traced.jaxpr, target)
    lowered = lower_for_target(traced, target.chip.platform, abstract.mesh)
  text = lowered.as_text()
  used = set(used_arguments(lowered))
  of_state, of_batch = arrays_of(state), jax.tree.leaves(batch)
  described = describe_arguments(abstract, state, batch)
  findings, left_out = [], python_calls(traced.jaxpr)
  if with_findings:
    shapes = [array.shape for array in of_state]
    findings += doubtful_operations_of(traced.jaxpr, lambda: [lowered], abstract.mesh)
    findings += replicated_batches(requests, batch_sizes(batch), shapes)
  return described._replace(
    code=program_bytes(lowered),
    identity=identity_of(lowered, text),
    dtype=dtype_of(text),
    findings=[*left_out, *findings, *described.findings],
    unconstrained=unconstrained_axes(state, batch, traced.jaxpr),
    unused_bytes=sum(
      _bytes_on_device(array) for index, array in enumerate([*of_state, *of_batch]) if index not in used
    ),
    left_out=left_out,
  )


def doubtful_operations_of(jaxpr: Any, lower: Callable[[], Iterable[Any]], mesh: Any) -> list[str]:
  """The operations of a step that XLA may compute wrongly, a finding for each reason; arguments as for `doubtful_operations`."""
  return [
    f'{each.reason}: {each.lines[0]}{f" and {len(each.lines) - 1} more" * (len(each.lines) > 1)}. Fix: {each.fix}'
    for each in doubtful_operations(jaxpr, lower, mesh)
  ]


def python_calls(jaxpr: Any) -> tuple[str, ...]:
  """A line that lists the calls of Python of a step, if it has any: a program for absent devices does not have them."""
  lines = [
    f'{equation.primitive.name} at {source_line(equation.source_info)}'
    for equation in compat.equations_in(jaxpr)
    if compat.is_python_call(equation)
  ]
  if not lines:
    return ()
  listed = ', '.join(dict.fromkeys(lines))
  return (f'calls of Python are left out, with all that is computed for them alone: {listed}',)


def _check_order(jaxpr: Any, target: Target) -> None:
  """Raises if a step calls `jax.debug` in a fixed order for several devices: JAX cannot lower it, and names no line."""
  lines = [
    source_line(one.source_info) for one in compat.equations_in(jaxpr) if compat.is_ordered_print(one)
  ]
  if lines and target.devices > 1:
    raise TargetDeviceError(
      f'The step calls jax.debug with ordered=True, which JAX supports on one device, and {target.text} has '
      f'{target.devices}: {", ".join(dict.fromkeys(lines))}.\nFix: pass ordered=False there.'
    )


def layout_on_target(layout: Layout, target: Target) -> Layout:
  """The layout on an abstract mesh with the same axes.

  Raises:
    TargetDeviceError: the mesh and the target differ in their number of devices, or slices do not fit the mesh.
  """
  abstract = layout.replace(
    mesh=abstract_mesh(axis_sizes(layout.mesh), axis_types=axis_types(layout.mesh))
  )
  check_mesh(axis_sizes(abstract.mesh), target)
  return abstract


def abstract_arguments(train_step: TrainStep, layout: Layout) -> tuple[Any, Any]:
  """The abstract state and batch of a step, with the layout's shardings.

  Raises:
    LayoutError: logical names do not fit the arrays.
  """
  return layout.abstract(train_step.create, *train_step.args), abstract_batch(train_step, layout)


class AbstractState(NamedTuple):
  """A state whose boxes of mesh axes may have names that the mesh lacks, such as logical names in `with_partitioning`.

  Attributes:
    state: shapes with the shardings of the layout.
    layout: the layout; with such names, its policy is to drop them, so that the rules alone decide.
    names: such names.
  """

  state: Any
  layout: Layout
  names: frozenset[str]


def abstract_state(train_step: TrainStep, layout: Layout) -> AbstractState:
  """The abstract state of a step, whose boxes of mesh axes may have logical names.

  Raises:
    LayoutError: logical names do not fit the arrays.
  """
  try:
    return AbstractState(layout.abstract(train_step.create, *train_step.args), layout, frozenset())
  except MeshAxisError:
    dropping = layout.replace(missing_axis='drop')
    state = dropping.abstract(train_step.create, *train_step.args)
    named = [row.names for row in dropping.rows(state) if row.names and not row.logical]
    names = {name for names in named for name in names if isinstance(name, str)} - {*layout.mesh.shape}
    if not names:
      raise
    return AbstractState(state, dropping, frozenset(names))


def abstract_batch(train_step: TrainStep, layout: Layout) -> Any:
  """The batch of a step as `jax.ShapeDtypeStruct`s with the layout's shardings."""
  batch, placements = train_step.batch, train_step.placements
  check_usable(
    (path, leaf)
    for path, leaf in leaves_with_paths({'batch': batch})
    if not isinstance(leaf, jax.ShapeDtypeStruct)
  )
  shapes = batch if _is_abstract(batch) else jax.eval_shape(lambda: batch)
  if placements is None:
    placements = jax.tree.map(
      lambda leaf: ('batch', *[None] * (len(leaf.shape) - 1)) if leaf.shape else (), shapes
    )
  return jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
    shapes,
    layout.sharding(shapes, placements),
  )


def _is_abstract(batch: Any) -> bool:
  return all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(batch))


def describe_arguments(layout: Layout, state: Any, batch: Any) -> LoweredStep:
  """A `LoweredStep` of the arguments alone, with empty code."""
  rows, parts, places = layout.rows(state), leaf_parts(state), first_places(state)
  return LoweredStep(
    b'',
    '',
    layout,
    'f32',
    [rows[place] for place in places],
    [parts[place] for place in places],
    sum(_bytes_on_device(leaf) for leaf in jax.tree.leaves(batch)),
    [finding.text for finding in layout.check(state).suspicious],
  )


def _bytes_on_device(leaf: Any) -> int:
  return (
    jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype).size * leaf.dtype.itemsize
  )


_LOCATION = re.compile(r'^#loc\d* = loc\("(.*)":(\d+):\d+ to (\d*):\d+\)', re.MULTILINE)


def identity_of(lowered: Any, text: str) -> str:
  """A digest of a program and its source lines, without the lines of the callers on the stack."""
  callers = {(frame.filename, frame.lineno or 0) for frame in traceback.extract_stack()}
  locations = sorted(
    {
      (file, int(first), int(last or first))
      for file, first, last in _LOCATION.findall(lowered.as_text(debug_info=True))
      if not any(file == caller and int(first) <= line <= int(last or first) for caller, line in callers)
    }
  )
  return hashlib.sha256((text + repr(locations)).encode()).hexdigest()


_DOT = re.compile(
  r'stablehlo\.(?:dot_general|convolution).* : \(tensor<(?:\d+x)*(\w+)>.* -> tensor<((?:\d+x)*)\w+>'
)


def dtype_of(text: str) -> str:
  """The operands' dtype of most matrix products, weighted by the size of their results."""
  sizes: dict[str, int] = {}
  for dtype, shape in _DOT.findall(text):
    sizes[dtype] = sizes.get(dtype, 0) + math.prod(int(size) for size in shape.split('x') if size)
  dtype = max(sizes, key=lambda dtype: sizes[dtype], default='f32')
  return {'i8': 'int8', 'ui8': 'int8'}.get(dtype, 'f8' if dtype.startswith('f8') else dtype)
