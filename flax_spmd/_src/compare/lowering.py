"""Programs: a training step lowered under a layout, for a target, with nothing allocated.

The mesh is abstract, so that neither the target's devices nor their number have to be here. What is
lowered is the step as it is: with its layout's constraints, shardings and donation.
"""

from __future__ import annotations

import hashlib
import math
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from flax_spmd._src.compare.hardware import Target
from flax_spmd._src.compat import program_bytes, program_text
from flax_spmd._src.layout import Layout
from flax_spmd._src.mesh import abstract_mesh, axis_sizes, axis_types
from flax_spmd._src.plan.rows import Row
from flax_spmd.errors import TargetDeviceError


class Program(NamedTuple):
  """A lowered step.

  Attributes:
    code: the module, with locations.
    identity: a digest of what it does and of the lines of the model that it comes from.
    layout: the layout, on an abstract mesh.
    dtype: of the operands of most of its matrix products, `bf16` or `f32`.
    rows: the arrays of the state, and what was decided about each.
    batch_bytes: of the batch, on one device.
    findings: what deserves a look, one a line.
  """

  code: bytes
  identity: str
  layout: Layout
  dtype: str
  rows: list[Row]
  batch_bytes: int
  findings: list[str]

  @property
  def mesh(self) -> dict[str, int]:
    """Size per mesh axis."""
    return axis_sizes(self.layout.mesh)


def lower(
  step: Callable[..., Any],
  create: Callable[..., Any],
  batch: Any,
  layout: Layout,
  target: Target,
  *,
  args: Sequence[Any] = (),
  places: Any = None,
  donate: bool = True,
) -> Program:
  """Lowers `step(state, batch)` for a target.

  Args:
    step: a training step; its first argument is the state.
    create: makes a state, of `args`; nothing of it runs.
    batch: the step's second argument: arrays, abstract or not, in full size.
    layout: the layout to try; its mesh counts by its axes only.
    target: what to lower for.
    args: arguments of `create`.
    places: where the batch goes, as of `layout.shard`; default: its first dimension is named `batch`.
    donate: whether the state is donated.

  Raises:
    TargetDeviceError: the layout's mesh is of another size than the target.
    LayoutError: names that do not fit; or whatever the model itself raises.
  """
  abstract, state, data = abstract_arguments(create, batch, layout, target, args, places)
  jitted = abstract.jit(step, donate_argnums=0 if donate else None)
  lowered = jitted.trace(state, data).lower(lowering_platforms=(target.chip.platform,))
  text = program_text(lowered, locations=False)
  return described(abstract, state, data)._replace(
    code=program_bytes(lowered), identity=identity_of(lowered, text), dtype=dtype_of(text)
  )


def abstract_arguments(
  create: Callable[..., Any],
  batch: Any,
  layout: Layout,
  target: Target,
  args: Sequence[Any],
  places: Any,
) -> tuple[Layout, Any, Any]:
  """The layout on an abstract mesh, and the state and the batch under it; arguments as of `lower`.

  Raises:
    TargetDeviceError: the layout's mesh is of another size than the target.
    LayoutError: names that do not fit.
  """
  abstract = layout.replace(
    mesh=abstract_mesh(axis_sizes(layout.mesh), axis_types=axis_types(layout.mesh))
  )
  if abstract.mesh.size != target.devices:
    raise TargetDeviceError(
      f'The mesh {axis_sizes(layout.mesh)} has {abstract.mesh.size} devices, the target {target.text} '
      f'{target.devices}.\nFix: give the layout a mesh of {target.devices} devices.'
    )
  return abstract, abstract.abstract(create, *args), abstract_batch(abstract, batch, places)


def described(layout: Layout, state: Any, data: Any) -> Program:
  """What is known of a step by its arguments, without its code."""
  return Program(
    b'',
    '',
    layout,
    'f32',
    layout.rows(state),
    sum(_bytes_on_device(leaf) for leaf in jax.tree.leaves(data)),
    [finding.text for finding in layout.check(state).suspicious],
  )


_PLACE = re.compile(r'^#loc\d* = loc\("(.*)":(\d+):\d+ to (\d*):\d+\)', re.MULTILINE)


def identity_of(lowered: Any, text: str) -> str:
  """A digest of a program that does not depend on who compares it: the callers' lines are left out."""
  callers = {(frame.filename, frame.lineno or 0) for frame in traceback.extract_stack()}
  places = sorted(
    {
      (file, int(first), int(last or first))
      for file, first, last in _PLACE.findall(program_text(lowered, locations=True))
      if not any(file == caller and int(first) <= line <= int(last or first) for caller, line in callers)
    }
  )
  return hashlib.sha256((text + repr(places)).encode()).hexdigest()


_DOT = re.compile(
  r'stablehlo\.(?:dot_general|convolution).* : \(tensor<(?:\d+x)*(\w+)>.* -> tensor<((?:\d+x)*)\w+>'
)


def dtype_of(text: str) -> str:
  """The dtype of the operands of most matrix products, by the size of their results."""
  sizes: dict[str, int] = {}
  for dtype, shape in _DOT.findall(text):
    sizes[dtype] = sizes.get(dtype, 0) + math.prod(int(size) for size in shape.split('x') if size)
  found = max(sizes, key=lambda dtype: sizes[dtype], default='f32')
  return {'i8': 'int8', 'ui8': 'int8'}.get(found, 'f8' if found.startswith('f8') else found)


def abstract_batch(layout: Layout, batch: Any, places: Any) -> Any:
  """The batch as the step gets it: abstract, with shardings."""
  shapes = jax.eval_shape(lambda: batch) if not _is_abstract(batch) else batch
  if places is None:
    places = jax.tree.map(
      lambda leaf: ('batch', *[None] * (len(leaf.shape) - 1)) if leaf.shape else (), shapes
    )
  return jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
    shapes,
    layout.sharding(shapes, places),
  )


def _is_abstract(batch: Any) -> bool:
  return all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(batch))


def _bytes_on_device(leaf: Any) -> int:
  return (
    jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype).size * leaf.dtype.itemsize
  )
