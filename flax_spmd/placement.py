"""Placement: where arrays that exist go on a mesh, by the names that the caller gives them.

jax.device_put(batch, shardings_by_names(batch, ('batch', None), planner))   # one transfer
{'x': ('batch', None), 'y': ('batch',)}, PartitionSpec('data')               # names may be these too
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_spmd.boxes import Static
from flax_spmd.errors import LayoutError, MeshError, Problem, did_you_mean, raise_problems
from flax_spmd.mesh import MeshLike, describe
from flax_spmd.naming import path_string
from flax_spmd.plan import Planner


def check_concrete(mesh: MeshLike) -> None:
  """Raises `MeshError` if the mesh is abstract: nothing can be placed on it."""
  if not isinstance(mesh, Mesh):
    raise MeshError(
      f'The mesh {describe(mesh)} is abstract: there are no devices to place arrays on.\n'
      'Fix: use a layout over a concrete mesh, made by Layout({...}, rules) or make_mesh.'
    )


def shardings_by_names(tree: Any, names: Any, planner: Planner) -> Any:
  """Where the arrays of a tree without boxes go.

  Args:
    tree: arrays (numpy or JAX) and numbers.
    names: one array's logical names for all leaves, or a PartitionSpec of mesh axes, or a tree of
      these that is a prefix of `tree`; None is replicated.
    planner: says where things go.

  Returns:
    A sharding per leaf.

  Warns:
    UserWarning: a name has no rule, but is nearly one that has.

  Raises:
    LayoutError: names that do not fit the tree or a leaf's rank, a size that does not divide, a mesh
      axis in the place of a name.
  """
  problems: list[Problem] = []

  def place(path, leaf, one: _Names) -> NamedSharding:
    if one.names is None:
      return planner.replicated
    resolution = planner.resolve(one.static(np.ndim(leaf)), np.shape(leaf))
    where = path_string(path)
    problems.extend(problem.at(where) for problem in resolution.problems)
    problems.extend(problem.at(where) for problem in _axes_for_names(one.names, planner))
    _warn_of_typos(where, one.names, planner)
    return NamedSharding(planner.mesh, resolution.spec)

  shardings = jax.tree_util.tree_map_with_path(place, tree, _spread(names, tree))
  raise_problems(problems)
  return shardings


def _spread(names: Any, tree: Any) -> Any:
  """Names for every leaf, from a tree of names that is a prefix of `tree`."""
  try:
    return jax.tree.map(
      lambda one, part: jax.tree.map(lambda _: _Names(one), part), names, tree, is_leaf=_is_names
    )
  except (ValueError, TypeError) as error:
    raise LayoutError(
      f'The names {names!r} are no prefix of the tree: {error}\n'
      "Fix: give one array's names, such as ('batch', None), for all leaves, or a tree of names shaped "
      'like the arrays; mesh axes go into a PartitionSpec.'
    ) from None


class _Names:
  """Names as a leaf: a bare tuple would be taken for a tree. A PartitionSpec is of mesh axes."""

  def __init__(self, names: Any):
    self.names = names

  def static(self, rank: int) -> Static:
    if isinstance(self.names, PartitionSpec):  # may be shorter than the rank, as everywhere in JAX
      return Static((*self.names, *(None,) * (rank - len(self.names))), False)
    return Static(self.names, True)


def _is_names(x: Any) -> bool:
  if x is None or isinstance(x, PartitionSpec):
    return True
  return isinstance(x, tuple) and all(entry is None or isinstance(entry, str) for entry in x)


def _axes_for_names(names: Any, planner: Planner) -> list[Problem]:
  """A mesh axis among logical names would silently mean nothing."""
  if isinstance(names, PartitionSpec):
    return []
  return [
    Problem(
      f'dim {dim} {name!r}: this is a mesh axis, where logical names are expected.',
      'give mesh axes as a PartitionSpec, or use a logical name that has a rule.',
    )
    for dim, name in enumerate(names)
    if name in planner.sizes and name not in planner.rules.by_name
  ]


def _warn_of_typos(where: str, names: Any, planner: Planner) -> None:
  """A batch is in no tree that `Layout.check` sees, so a name that is nearly known is reported here."""
  if not isinstance(names, PartitionSpec):
    for dim, name in enumerate(names):
      meant = did_you_mean(name, planner.rules.by_name) if isinstance(name, str) else ''
      if meant and name not in planner.rules.by_name:
        warnings.warn(
          f'{where}, dim {dim} {name!r}: no rule for this logical name; it is replicated.{meant}',
          stacklevel=2,
        )
