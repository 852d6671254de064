"""JAX's own constraints under a layout: what does not fit is an error that shows where, or dropped on request.

    jax.lax.with_sharding_constraint(x, P('data', 'tensor'))   # somewhere in a model, for a mesh with other axes

All sharding constraints end in this function of JAX: those of Flax, T5X and other libraries too. While a layout is in
force, `compat.py` passes the shardings of each call through `fitted_shardings`.

A model may hold the layout's mesh. In a pipeline, each stage has a part of it: `mesh_of_stage`, for constraints, jits and
`shard_map`s.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_spmd._src import compat, open_blocks
from flax_spmd._src.constraint_log import user_line
from flax_spmd._src.mesh import MeshLike, axis_sizes, axis_types, current_mesh, describe
from flax_spmd._src.rules.decisions import UNCONSTRAINED, axis_names
from flax_spmd._src.text import value_text
from flax_spmd.errors import LayoutError, MeshAxisError, Problem, did_you_mean, raise_problems


def fitted(spec: PartitionSpec, shape: Sequence[int], mesh: MeshLike) -> PartitionSpec:
  """The spec of a constraint, without the axes that the mesh lacks if the rules in force have `missing_axis='drop'`.

  Raises:
    MeshAxisError: the spec uses an axis that the mesh lacks.
    LayoutError: it has more entries than the array has dimensions, or uses an axis twice.
  """
  if drops_missing_axes():
    spec = only_axes(spec, axis_sizes(mesh).__contains__)
  raise_problems(_problems(spec, shape, mesh))
  return spec


def fitted_shardings(x: Any, shardings: Any, names: Any) -> Any:
  """The shardings of a call of JAX's `with_sharding_constraint`, each as from `fitted`.

  Args:
    x: the arrays.
    shardings: a tree of specs, shardings and Nones that is a prefix of `x`.
    names: the logical names that the spec was resolved from; None if there are none.

  Raises:
    MeshAxisError, LayoutError: as for `fitted`; lists every array.
  """
  mesh = current_mesh()
  if mesh is None or open_blocks.of_task().own.mesh is None:
    return shardings
  shardings = on_meshes_of_stage(shardings)
  given, treedef = jax.tree.flatten(shardings, is_leaf=lambda each: each is None)
  try:
    parts = treedef.flatten_up_to(x)
  except ValueError:  # JAX reports the difference
    return shardings
  kept = [_without_missing(each, mesh) for each in given]
  problems = [
    problem
    for sharding, part in zip(kept, parts, strict=True)
    for leaf in jax.tree.leaves(part)
    for problem in _problems_of(sharding, np.shape(leaf), mesh, names)
  ]
  raise_problems(list(dict.fromkeys(problems)))
  return jax.tree.unflatten(treedef, kept)


def on_meshes_of_stage(shardings: Any) -> Any:
  """A tree of shardings, each as on the mesh from `mesh_of_stage`."""

  def on_mesh(sharding):
    if not isinstance(sharding, NamedSharding):
      return sharding
    mesh, _ = mesh_of_stage(sharding.mesh, [sharding.spec])
    if mesh is sharding.mesh:
      return sharding
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)

  if open_blocks.of_task().own.whole is None:
    return shardings
  return jax.tree.map(on_mesh, shardings, is_leaf=lambda each: each is None)


def mesh_of_stage(mesh: Any, specs: Any, axes: Collection[str] = ()) -> tuple[Any, Collection[str]]:
  """The mesh of a stage of a pipeline, in the place of the mesh of all its stages, which a model may hold.

  Args:
    mesh: the mesh that a part of the function of a pipeline is written for; None: the current one.
    specs: the specs of its arrays, a tree.
    axes: the axes of its `shard_map`; none stand for all axes of the mesh.

  Returns:
    The mesh, and the axes without that of the stages: a sum over it would be one over all stages. Both are as given if the
    mesh is another one, or if the specs use the axis of the stages.
  """
  own = open_blocks.of_task().own
  if mesh is None or own.mesh is None or own.whole is None or not _are_equal(mesh, own.whole):
    return mesh, axes
  of_stage = axis_sizes(own.mesh)
  kept = {axis for axis, size in axis_sizes(mesh).items() if of_stage[axis] == size}
  leaves = [spec for spec in jax.tree.leaves(specs) if isinstance(spec, PartitionSpec)]
  used = {axis for spec in leaves for axis in axis_names(tuple(spec))}
  return (own.mesh, kept.intersection(axes or kept)) if kept and used <= kept else (mesh, axes)


def _are_equal(one: MeshLike, two: MeshLike) -> bool:
  """Whether meshes have the same axes, and the same devices if both have some."""
  if isinstance(one, Mesh) and isinstance(two, Mesh):
    return one == two
  return axis_sizes(one) == axis_sizes(two) and axis_types(one) == axis_types(two)


def check_axes_of_sharding(mesh: MeshLike, spec: PartitionSpec) -> None:
  """Checks that the mesh of a `NamedSharding` has its axes. None can be dropped from an object that the user makes.

  Raises:
    MeshAxisError: it lacks some.
  """
  if open_blocks.of_task().own.mesh is None:
    return
  axes = dict.fromkeys(axis_names(tuple(spec)))
  problems = [
    _missing(axis, mesh, 'correct the axis name, or add the axis to the mesh.')
    for axis in axes
    if axis not in mesh.axis_names
  ]
  where = _where('sharding', spec)
  raise_problems([problem.at(where, ' ') for problem in problems])


def drops_missing_axes() -> bool:
  """Whether a constraint leaves out the axes that the mesh lacks; an axis of size 1 in their place has no effect either."""
  return open_blocks.of_task().own.rules.policies.missing_axis == 'drop'


def only_axes(spec: PartitionSpec, keep: Callable[[str], bool]) -> PartitionSpec:
  """`spec` without the mesh axes that `keep` rejects; itself if it keeps all of them."""
  if all(map(keep, axis_names(tuple(spec)))):
    return spec

  def entry(axes):
    if axes is UNCONSTRAINED:
      return axes
    kept = tuple(axis for axis in axis_names(axes) if keep(axis))
    return kept[0] if len(kept) == 1 else (kept or None)

  return PartitionSpec(*map(entry, spec))


def _without_missing(sharding: Any, mesh: MeshLike) -> Any:
  if not isinstance(sharding, PartitionSpec) or not drops_missing_axes():
    return sharding
  return only_axes(sharding, axis_sizes(mesh).__contains__)


def _problems_of(sharding: Any, shape: Sequence[int], mesh: MeshLike, names: Any) -> list[Problem]:
  if isinstance(sharding, NamedSharding):
    return _problems(sharding.spec, shape, sharding.mesh, names)
  return _problems(sharding, shape, mesh, names) if isinstance(sharding, PartitionSpec) else []


def _problems(
  spec: PartitionSpec, shape: Sequence[int], mesh: MeshLike, names: Any = None
) -> list[Problem]:
  axes = axis_names(tuple(spec))
  missing = [axis for axis in dict.fromkeys(axes) if axis not in mesh.axis_names]
  problems = [_missing(axis, mesh) for axis in missing]
  if len(set(axes)) < len(axes):
    problems.append(_REUSED)
  if len(spec) > len(shape):
    problems.append(_too_long(spec, shape))
  if not problems:
    return []
  named = '' if names is None else f'{tuple(names)!r} as '
  where = _where('constraint', f'{named}{spec}')
  return [problem.at(where, ' ') for problem in problems]


def _where(kind: str, spec: Any) -> str:
  """`The constraint P('data',) at model.py:31 (module block)`."""
  module = compat.current_module()
  return f'The {kind} {spec} at {user_line()}' + (f' ({module})' if module else '')


_DROPPING = "correct the axis name, add the axis to the mesh, or give the layout missing_axis='drop'."


def _missing(axis: str, mesh: MeshLike, fix: str = _DROPPING) -> Problem:
  return Problem(
    f'uses mesh axis {value_text(axis)}, but the mesh is {describe(mesh)}.'
    + did_you_mean(axis, mesh.axis_names),
    fix,
    MeshAxisError,
  )


def _too_long(spec: PartitionSpec, shape: Sequence[int]) -> Problem:
  return Problem(
    f'has {len(spec)} entries for an array of rank {len(shape)}, shape {tuple(shape)}.',
    'give at most one entry per dimension.',
    LayoutError,
  )


_REUSED = Problem(
  'uses a mesh axis for more than one dimension.', 'use every mesh axis once.', LayoutError
)


compat.handle_constraints(fitted_shardings, check_axes_of_sharding, on_meshes_of_stage, mesh_of_stage)
