"""Every branch on a JAX or Flax version, and every name they do not promise to keep.

Supported: jax 0.10.2 and newer, flax 0.12.8 and newer. A branch says with which version it can go.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import flax.linen as nn
import jax
from jax._src import distributed
from jax.sharding import AbstractMesh, Mesh


def mesh_scope(mesh: Mesh | AbstractMesh) -> AbstractContextManager[Any]:
  """Makes `mesh` JAX's current mesh, inside a trace or outside of one.

  `jax.set_mesh` knows the devices, so it is preferred; it refuses abstract meshes and refuses to
  run inside a trace, where only the abstract mesh can change.
  """
  if isinstance(mesh, Mesh):
    try:
      return jax.set_mesh(mesh)
    except ValueError:  # inside a trace
      return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
  return jax.sharding.use_abstract_mesh(mesh)


def current_module() -> str | None:
  """`'module decoder/layers'` for the Linen module that is running, or None outside of any.

  Flax keeps its module stack private; a message without a place would send its reader searching.
  """
  stack = nn.module._context.module_stack
  modules = [module for module in stack if module is not None]
  if not modules:
    return None
  return f'module {"/".join(modules[-1].path)}' if modules[-1].path else 'the top module'


def coordination_service() -> Any:
  """JAX's coordination service, or None where it does not run; JAX has no public name for it."""
  return distributed.global_state.client


def random_numbers_divide() -> bool:
  """Whether each device draws its own piece of a random array; JAX's stubs leave its options out."""
  return bool(getattr(jax.config, 'jax_threefry_partitionable'))  # noqa: B009
