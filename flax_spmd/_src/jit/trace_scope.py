"""The block in which a user's function is traced: a layout is in force, and errors about meshes and axes are explained."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import cast

from flax_spmd._src import compat
from flax_spmd._src.active_layout import InForce, scope
from flax_spmd._src.jit.foreign_meshes import LAYOUTS_MESH, explained_mesh_errors
from flax_spmd._src.jit.module_types import explicit_types
from flax_spmd._src.mesh import MeshLike, current_mesh, describe
from flax_spmd._src.unbound_axes import explained_axis_names
from flax_spmd.errors import MeshError


@contextlib.contextmanager
def trace_scope(in_force: InForce, owner: str = LAYOUTS_MESH) -> Iterator[None]:
  """Puts the mesh and rules of a layout in force for a trace. NNX's own sharding of new variables is off.

  Args:
    in_force: the mesh and rules.
    owner: the name of the mesh, for error texts.

  Raises:
    MeshError: another number of devices is in force around it; or as for `explained_mesh_errors`.
    AxisNameError, LayoutError: as for `explained_axis_names`.
  """
  mesh = cast(MeshLike, in_force.mesh)
  _check_devices(mesh, owner)
  with (
    scope(in_force),
    compat.mesh_scope(mesh),
    _without_eager_sharding(),
    explained_mesh_errors(mesh, owner),
    explained_axis_names(),
    explicit_types(mesh),
  ):
    yield


def _without_eager_sharding() -> contextlib.AbstractContextManager[object]:
  nnx = sys.modules.get('flax.nnx')
  return contextlib.nullcontext() if nnx is None else nnx.use_eager_sharding(False)


def _check_devices(mesh: MeshLike, owner: str) -> None:
  """Checks that the mesh around a trace has as many devices as its own, as JAX requires."""
  around = current_mesh()
  if around is not None and around.size != mesh.size:
    raise MeshError(
      f'A function is traced on {owner}, {describe(mesh)}, under a mesh of another number of devices, '
      f'{describe(around)}: JAX does not change between them inside a program.\n'
      'Fix: call the function outside of the block (`with layout:`, `jax.set_mesh`) or the program of that mesh.'
    )
