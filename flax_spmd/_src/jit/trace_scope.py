"""The block in which a user's function is traced: a layout is in force, and errors about meshes and axes are explained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import cast

from flax_spmd._src import compat
from flax_spmd._src.active_layout import InForce, scope
from flax_spmd._src.jit.foreign_meshes import LAYOUTS_MESH, explained_mesh_errors
from flax_spmd._src.mesh import MeshLike
from flax_spmd._src.unbound_axes import explained_axis_names


@contextlib.contextmanager
def trace_scope(in_force: InForce, owner: str = LAYOUTS_MESH) -> Iterator[None]:
  """Puts the mesh and rules of a layout in force for a trace. NNX's own sharding of new variables is off.

  Args:
    in_force: the mesh and rules.
    owner: the name of the mesh, for error texts.

  Raises:
    MeshError: as for `explained_mesh_errors`.
    AxisNameError, LayoutError: as for `explained_axis_names`.
  """
  mesh = cast(MeshLike, in_force.mesh)
  with (
    scope(in_force),
    compat.mesh_scope(mesh),
    compat.without_eager_sharding(),
    explained_mesh_errors(mesh, owner),
    explained_axis_names(),
  ):
    yield
