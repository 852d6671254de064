"""Placement: putting arrays that exist onto the devices of a mesh, in one transfer for a tree.

    batch = shard(batch, ('batch', None), planner)      # every leaf by the same names
    batch = shard(batch, {'x': ('batch', None), 'y': ('batch',)}, planner)
    state = shard(state, None, planner)                 # boxes by their own names
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from flax_spmd.boxes import Static
from flax_spmd.errors import MeshError, Problem, raise_problems
from flax_spmd.mesh import MeshLike, describe
from flax_spmd.naming import path_string
from flax_spmd.plan import Planner


def shard(tree: Any, names: Any, planner: Planner) -> Any:
  """Places every leaf of `tree` on the planner's mesh.

  Args:
    tree: arrays (numpy or JAX, boxed or not) and numbers.
    names: one array's names for all leaves, a tree of names that is a prefix of `tree`, or None to
      take the names of boxes (what has no box is replicated).
    planner: says where things go.

  Returns:
    `tree` with `jax.Array` leaves, each laid out over the whole mesh.

  Raises:
    MeshError: the mesh is abstract; there are no devices to place anything on.
    LayoutError: names that do not fit their leaf's rank, or a size that does not divide.
  """
  check_concrete(planner.mesh)
  shardings = planner.shardings(tree) if names is None else _by_names(tree, names, planner)
  return jax.device_put(tree, shardings)


def check_concrete(mesh: MeshLike) -> None:
  """Raises `MeshError` if the mesh is abstract: nothing can be placed on it."""
  if not isinstance(mesh, Mesh):
    raise MeshError(
      f'The mesh {describe(mesh)} is abstract: there are no devices to place arrays on.\n'
      'Fix: use a layout over a concrete mesh, made by Layout({...}, rules) or make_mesh.'
    )


def _by_names(tree: Any, names: Any, planner: Planner) -> Any:
  """A sharding per leaf, after checking all of them."""
  by_leaf = jax.tree.map(
    lambda one, subtree: jax.tree.map(lambda _: _Names(one), subtree), names, tree, is_leaf=_is_names
  )
  problems: list[Problem] = []

  def place(path, leaf, one: _Names) -> NamedSharding:
    shape = np.shape(leaf)
    if one.names is None:
      return planner.replicated
    resolution = planner.resolve(Static(one.names, True), shape)
    problems.extend(problem.at(path_string(path)) for problem in resolution.problems)
    return NamedSharding(planner.mesh, resolution.spec)

  shardings = jax.tree_util.tree_map_with_path(place, tree, by_leaf)
  raise_problems(problems)
  return shardings


class _Names:
  """Names as a leaf: a bare tuple would be taken for a tree."""

  def __init__(self, names: Any):
    self.names = names


def _is_names(x: Any) -> bool:
  return x is None or (
    isinstance(x, tuple) and all(entry is None or isinstance(entry, str) for entry in x)
  )
