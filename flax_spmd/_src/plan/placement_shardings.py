"""Placement: where the arrays of a tree go, by the places that the caller gives them.

    shardings_by(batch, ('batch', None), planner, default)                    # logical names
    shardings_by(batch, {'x': PartitionSpec('data'), 'y': None}, planner, default)
    shardings_by(grads, Rules(fsdp('data')), planner, default)                # a table of its own

What a place is: `flax_spmd.places`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import KeyPath

from flax_spmd._src.mesh import MeshLike, describe
from flax_spmd._src.names.boxes import Static
from flax_spmd._src.plan.planner import Planner, planner_for
from flax_spmd._src.rules.placements import is_table, parts
from flax_spmd._src.rules.table import Rules
from flax_spmd._src.tree_paths import path_string
from flax_spmd.errors import FlaxSpmdError, MeshError, Problem, did_you_mean, raise_problems

Default = Callable[[Any], Sequence[Sharding | None]]


def check_concrete(mesh: MeshLike) -> None:
  """Raises `MeshError` if the mesh is abstract: nothing can be placed on it."""
  if not isinstance(mesh, Mesh):
    raise MeshError(
      f'The mesh {describe(mesh)} is abstract: there are no devices to place arrays on.\n'
      'Fix: use a layout over a concrete mesh, made by Layout({...}, rules) or make_mesh.'
    )


def shardings_by(tree: Any, places: Any, planner: Planner, default: Default) -> list[Sharding | None]:
  """Where the arrays of a tree go.

  Args:
    tree: arrays (numpy, JAX or abstract), boxes and numbers.
    places: a place, or a tree of places that is a prefix of `tree`.
    planner: the layout's; it resolves logical names and mesh axes.
    default: gives a sharding (or None) per leaf of a part whose place is None.

  Returns:
    A sharding, or None if the default says so, per leaf in the order of `jax.tree.leaves(tree)`.

  Warns:
    UserWarning: a name has no rule, but is nearly one that has.

  Raises:
    LayoutError: places that do not fit the tree or a leaf's rank, a size that does not divide, a mesh
      axis in the place of a name.
    MeshAxisError: a rule uses an axis that the mesh lacks.
  """
  found: list[Sharding | None] = []
  problems: list[Problem] = []
  right: dict[Any, NamedSharding] = {}
  for path, place, part in parts(tree, places)[0]:
    if place is None:
      found += default(part)
    elif isinstance(place, Sharding):
      found += [place] * len(jax.tree.leaves(part))
    elif is_table(place):
      rules = Rules.of(place)
      rules.check_axes(planner.sizes)
      found += _by_table(path, rules, part, planner, problems)
    else:
      described = jax.tree_util.tree_leaves_with_path(part)
      shapes = [((*path, *inner), np.shape(leaf)) for inner, leaf in described]
      found += _all_by_names(shapes, place, planner, problems, right)
  raise_problems(problems)
  return found


def _by_table(path, rules: Rules, part: Any, planner: Planner, problems: list[Problem]) -> list[Any]:
  """Where the arrays of a part go by a table of their own; their paths are those within the part."""
  # functions are often written on the spot, and what is new every time is not worth remembering
  remember = not any(callable(clause) for _, clause in rules.all_rules())
  own = planner_for(planner.mesh, rules) if remember else Planner(planner.mesh, rules)
  try:
    return list(own.leaf_shardings(part))
  except FlaxSpmdError:
    wrong = own.problems(part)
    problems += [problem.at(path_string(path)) for problem in wrong] if path else wrong
    return [own.replicated] * len(jax.tree.leaves(part))


def shardings_of_parts(tree: Any, places: Any, planner: Planner) -> list[Sharding]:
  """Where global arrays go of which `tree` is only this process's part: sizes are not looked at.

  Raises:
    LayoutError: places that do not fit the tree or a leaf's rank, a rule table (whose rules would have to
      know the whole array), a mesh axis in the place of a name.
  """
  found: list[Sharding] = []
  problems: list[Problem] = []
  right: dict[Any, NamedSharding] = {}
  for path, place, part in parts(tree, places)[0]:
    described = jax.tree_util.tree_leaves_with_path(part)
    if place is None or isinstance(place, Sharding):
      found += [place or planner.replicated] * len(described)
    elif is_table(place):
      problems.append(
        Problem(f'{path_string(path)}: {place!r} is no place for a part.', _PLACES_OF_PARTS)
      )
    else:
      shapes = [((*path, *inner), (0,) * np.ndim(leaf)) for inner, leaf in described]
      found += _all_by_names(shapes, place, planner, problems, right)
  raise_problems(problems)
  return found


_PLACES_OF_PARTS = 'give the logical names of its dimensions, a PartitionSpec or a sharding.'


def _all_by_names(
  shapes: Sequence[tuple[KeyPath, tuple[int, ...]]],
  place: Any,
  planner: Planner,
  problems: list[Problem],
  right: dict[Any, NamedSharding],
) -> list[NamedSharding]:
  """The shardings of arrays that have one place, by path and shape; `right` keeps what was found."""
  found = []
  for path, shape in shapes:
    key = (type(place), place, shape)
    sharding = right.get(key)
    if sharding is None:
      before = len(problems)
      sharding = _by_names(path_string(path), shape, place, planner, problems)
      if len(problems) == before:
        right[key] = sharding
    found.append(sharding)
  return found


def _by_names(
  where: str, shape: tuple[int, ...], place: Any, planner: Planner, problems: list[Problem]
) -> NamedSharding:
  """One array's sharding by names or a spec; what is wrong is added to `problems`."""
  if isinstance(place, PartitionSpec) and len(place) > len(shape):
    if shape:
      problems.append(_too_long(place, shape).at(where))
    return planner.replicated  # a number among the arrays of a batch
  if isinstance(place, PartitionSpec):  # may be shorter than the rank, as everywhere in JAX
    static = Static((*place, *(None,) * (len(shape) - len(place))), False)
  else:
    static = Static(place, True)
    problems += [problem.at(where) for problem in _axes_for_names(place, planner)]
    _warn_of_typos(where, place, planner)
  resolution = planner.resolve_names(static, shape)
  problems += [problem.at(where) for problem in resolution.problems]
  return NamedSharding(planner.mesh, PartitionSpec(*tuple(resolution.spec)[: len(place)]))


def _too_long(spec: PartitionSpec, shape: tuple[int, ...]) -> Problem:
  count = f'{len(spec)} entries' if len(spec) > 1 else '1 entry'
  return Problem(
    f'{spec} has {count} for an array of rank {len(shape)}, shape {shape}.',
    'give at most one entry per dimension.',
  )


def _axes_for_names(names: Any, planner: Planner) -> list[Problem]:
  """A mesh axis among logical names would silently mean nothing."""
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
  for dim, name in enumerate(names):
    if isinstance(name, str) and name not in planner.rules.by_name:
      meant = did_you_mean(name, planner.rules.by_name)
      if meant:
        warnings.warn(
          f'{where}, dim {dim} {name!r}: no rule for this logical name; it is replicated.{meant}',
          stacklevel=2,
        )
