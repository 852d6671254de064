"""Placement shardings: the shardings of a tree by the placements that a caller gives for it.

    shardings_by(parts(batch, ('batch', None))[0], planner, default)               # logical names
    shardings_by(parts(batch, {'x': PartitionSpec('data'), 'y': None})[0], planner, default)
    shardings_by(parts(grads, Rules(fsdp('data')))[0], planner, default)           # a table of its own

The forms of a placement are listed in `flax_spmd._src.rules.placements`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import KeyPath

from flax_spmd._src.mesh import MeshLike, describe
from flax_spmd._src.names.boxes import Static
from flax_spmd._src.plan.planner import Planner
from flax_spmd._src.rules.decisions import UNCONSTRAINED, aligned
from flax_spmd._src.rules.placements import PlacedPart, axes_for_names, is_table, parts
from flax_spmd._src.rules.table import Rules
from flax_spmd._src.source_lines import warn
from flax_spmd._src.text import rank_text, value_text
from flax_spmd._src.tree_paths import path_string
from flax_spmd.errors import FlaxSpmdError, LayoutError, MeshError, Problem, did_you_mean, raise_problems

_NO_RULE = 'no rule for this logical name; it is replicated.'
TYPO_WARNING = f'.*{_NO_RULE}'  # as an expression

Default = Callable[[Any], Sequence[Sharding | None]]


def check_concrete(mesh: MeshLike) -> None:
  """Raises `MeshError` if the mesh is abstract, because arrays cannot be placed on it."""
  if not isinstance(mesh, Mesh):
    raise MeshError(
      f'The mesh {describe(mesh)} is abstract: there are no devices to place arrays on.\n'
      'Fix: use a layout over a concrete mesh, made by Layout({...}, rules) or make_mesh.'
    )


def check_row_placement(placement: Any, planner: Planner) -> None:
  """Raises `LayoutError` unless a placement has rows and every logical name in it a rule.

  Without a rule, a misspelt name would make every process read the whole data set.
  """
  if not isinstance(placement, (tuple, PartitionSpec)) or placement == ():
    raise LayoutError(
      f'{value_text(placement)} is no placement of a batch.\n'
      "Fix: pass the logical name of its rows, or ('batch', None), or a PartitionSpec."
    )
  names = () if isinstance(placement, PartitionSpec) else placement
  by_name = planner.rules.by_name
  raise_problems(
    [
      Problem(
        f'dim {dim} {value_text(name)}: no rule for this logical name.{did_you_mean(name, by_name)}',
        f'add a rule to the layout; ({value_text(name)}, None) for rows that every process reads.',
      )
      for dim, name in enumerate(names)
      if isinstance(name, str) and name not in by_name and name not in planner.sizes
    ]
  )


def shardings_by(
  placed: Iterable[PlacedPart], planner: Planner, default: Default
) -> list[Sharding | None]:
  """The sharding of each leaf of a tree, by its placement.

  Args:
    placed: the parts of a tree of arrays (numpy, JAX or abstract), boxes and numbers, each with its placement.
    planner: the planner of the layout, for logical names and mesh axes.
    default: function that returns a sharding (or None) per leaf of a part with placement None.

  Returns:
    A sharding, or None from `default`, per leaf of the parts.

  Warns:
    UserWarning: a name has no rule, but resembles one that has.

  Raises:
    LayoutError: placements that do not fit a leaf's rank, a size that is not divisible, a mesh axis among
      logical names.
    MeshAxisError: a rule uses an axis that the mesh lacks.
  """
  shardings: list[Sharding | None] = []
  problems: list[Problem] = []
  named = _NamedArrays(planner, problems)
  for path, placement, part in placed:
    if placement is None:
      shardings += default(part)
    elif isinstance(placement, Sharding):
      leaves = jax.tree_util.tree_leaves_with_path(part)
      problems += _misfits(placement, path, leaves)
      shardings += [_stored(placement)] * len(leaves)
    elif is_table(placement):
      rules = Rules.of(placement)
      rules.check_axes(planner.sizes)
      shardings += _by_table(path, rules, part, planner, problems)
    else:
      leaves = jax.tree_util.tree_leaves_with_path(part)
      shapes = (((*path, *inner), np.shape(leaf)) for inner, leaf in leaves)
      shardings += named.shardings(placement, shapes)
  raise_problems(problems)
  return shardings


def _misfits(
  sharding: Sharding, path: KeyPath, leaves: Iterable[tuple[KeyPath, Any]]
) -> Iterator[Problem]:
  """The problem of every array that a sharding of the caller does not fit, by its rank or sizes."""
  for inner, leaf in leaves:
    try:
      sharding.shard_shape(np.shape(leaf))
    except (ValueError, IndexError):  # the latter is of a rank that is too small
      text = repr(sharding)
      if isinstance(sharding, NamedSharding):
        text = f'{sharding.spec} on {describe(sharding.mesh)}'
      yield Problem(
        f'{path_string((*path, *inner))}: shape {np.shape(leaf)} does not fit the sharding {text}.',
        'pass a sharding that fits every array, or a tree with one for each.',
      )


def unplaced(placed: Sequence[PlacedPart], treedef: Any) -> tuple[Any, list[bool]]:
  """The parts of a tree without a placement, with None for the others; and per leaf, whether it is in them."""
  rest = jax.tree.unflatten(
    treedef, [part if placement is None else None for _, placement, part in placed]
  )
  marks = [placement is None for _, placement, part in placed for _ in jax.tree.leaves(part)]
  return rest, marks


def shardings_of_parts(tree: Any, placements: Any, planner: Planner) -> list[Sharding]:
  """The shardings of global arrays whose local parts are in `tree`; sizes are not checked.

  Raises:
    LayoutError: placements that do not fit the tree or a leaf's rank, a rule table (its rules depend on the
      global shape), a mesh axis among logical names.
  """
  shardings: list[Sharding] = []
  problems: list[Problem] = []
  named = _NamedArrays(planner, problems)
  for path, placement, part in parts(tree, placements)[0]:
    leaves = jax.tree_util.tree_leaves_with_path(part)
    if placement is None or isinstance(placement, Sharding):
      shardings += [_stored(placement or planner.replicated)] * len(leaves)
    elif is_table(placement):
      problems.append(
        Problem(
          f'{path_string(path)}: {value_text(placement)} cannot place the local part of an array.',
          'give the logical names of its dimensions, a PartitionSpec or a sharding.',
        )
      )
    else:
      shapes = (((*path, *inner), (0,) * np.ndim(leaf)) for inner, leaf in leaves)
      shardings += named.shardings(placement, shapes)
  raise_problems(problems)
  return shardings


def _by_table(path, rules: Rules, part: Any, planner: Planner, problems: list[Problem]) -> list[Any]:
  """The shardings of a part by a table of its own; path rules match paths within the part."""
  own_planner = planner.for_table(rules)
  try:
    return list(own_planner.leaf_shardings(part))
  except FlaxSpmdError:
    in_part = own_planner.problems(part)
    problems += [problem.at(path_string(path)) for problem in in_part] if path else in_part
    return [own_planner.replicated] * len(jax.tree.leaves(part))


class _NamedArrays:
  """Shardings of arrays by logical names or a spec, resolved once per shape.

  Args:
    planner: the planner of the layout.
    problems: list to which problems are added.
  """

  def __init__(self, planner: Planner, problems: list[Problem]):
    self._planner, self._problems = planner, problems
    self._cache: dict[Any, NamedSharding] = {}

  def shardings(
    self, placement: Any, shapes: Iterable[tuple[KeyPath, tuple[int, ...]]]
  ) -> list[NamedSharding]:
    """The shardings of several arrays, given by path and shape, with one placement."""
    shardings = []
    for path, shape in shapes:
      key = (type(placement), placement, shape)
      sharding = self._cache.get(key)
      if sharding is None:
        before = len(self._problems)
        sharding = self._sharding(path_string(path), shape, placement)
        if len(self._problems) == before:
          self._cache[key] = sharding
      shardings.append(sharding)
    return shardings

  def _sharding(self, path: str, shape: tuple[int, ...], placement: Any) -> NamedSharding:
    planner, problems = self._planner, self._problems
    if isinstance(placement, PartitionSpec):
      placement = aligned(placement, len(shape))
    if isinstance(placement, PartitionSpec) and len(placement) > len(shape):
      if shape:
        problems.append(_too_long(placement, shape).at(path))
      return planner.replicated  # a number among the arrays of a batch
    if isinstance(placement, PartitionSpec):  # may be shorter than the rank, as everywhere in JAX
      static = Static((*placement, *(None,) * (len(shape) - len(placement))), False)
    else:
      static = Static(placement, True)
      wrong = axes_for_names(placement, planner.sizes, planner.rules)
      problems += [problem.at(path) for problem in wrong]
      _warn_of_typos(path, placement, planner)
    resolution = planner.resolve_names(static, shape)
    problems += [problem.at(path) for problem in resolution.problems]
    return NamedSharding(planner.mesh, PartitionSpec(*tuple(resolution.spec)[: len(placement)]))


def _stored(sharding: Sharding) -> Sharding:
  """The sharding of an array in memory: a dimension that is UNCONSTRAINED is replicated."""
  if not isinstance(sharding, NamedSharding) or UNCONSTRAINED not in tuple(sharding.spec):
    return sharding
  spec = PartitionSpec(*(None if axes is UNCONSTRAINED else axes for axes in sharding.spec))
  return sharding.update(spec=spec)


def _too_long(spec: PartitionSpec, shape: tuple[int, ...]) -> Problem:
  count = f'{len(spec)} entries' if len(spec) > 1 else '1 entry'
  return Problem(
    f'{spec} has {count} for an array of {rank_text(shape)}.',
    'give at most one entry per dimension.',
  )


def _warn_of_typos(path: str, names: Any, planner: Planner) -> None:
  """Warns of names that resemble one with a rule: `Layout.check` never sees the tree of a batch."""
  for dim, name in enumerate(names):
    if isinstance(name, str) and name not in planner.rules.by_name:
      suggestion = did_you_mean(name, planner.rules.by_name)
      if suggestion:
        warn(f'{path}, dim {dim} {name!r}: {_NO_RULE}{suggestion}')
