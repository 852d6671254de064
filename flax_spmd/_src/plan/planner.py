"""Planner: the sharding of every array of a tree on a mesh under a rule table, and the reason for it.

    planner = Planner(mesh, rules)
    planner.shardings(tree)    # a NamedSharding per box or bare leaf
    planner.rows(tree)         # path, shape, names, spec and decisions per array, for reports

A planner resolves each distinct kind of array once: names, shape, and dtype or path where rules depend on
them. It also caches the shardings of whole trees, so that a state of ten thousand leaves costs little more
than its traversal. All problems of a tree are found before anything is compiled or placed, and are raised
as one error.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flax_spmd._src.active_layout import report_names
from flax_spmd._src.mesh import MeshLike, axis_sizes
from flax_spmd._src.names.boxes import Static
from flax_spmd._src.names.optimizer_state import Inference, infer
from flax_spmd._src.names.tree_names import TreeNames
from flax_spmd._src.plan.rows import Row
from flax_spmd._src.rules.array_resolver import resolver_of
from flax_spmd._src.rules.clauses import Leaf
from flax_spmd._src.rules.decisions import Resolution, RuleId, axis_names
from flax_spmd._src.rules.mesh_axes import resolve_axes
from flax_spmd._src.rules.table import Rules
from flax_spmd.errors import Problem, raise_problems

_CACHED_TREES = 64


@functools.lru_cache(maxsize=256)
def planner_for(mesh: MeshLike, rules: Rules) -> Planner:
  """The planner of a mesh and a table; equal ones share its caches."""
  return Planner(mesh, rules)


class Planner:
  """Plans trees for one mesh and one rule table.

  Args:
    mesh: a mesh, concrete or abstract.
    rules: a rule table.
  """

  def __init__(self, mesh: MeshLike, rules: Rules):
    self.mesh = mesh
    self.rules = rules
    self.sizes = axis_sizes(mesh)
    self.replicated = NamedSharding(mesh, PartitionSpec())
    self._resolver = resolver_of(rules)
    self._by_key: dict[Any, NamedSharding] = {}
    self._resolutions: dict[Any, Resolution] = {}
    self._by_spec: dict[PartitionSpec, NamedSharding] = {}
    self._by_structure: dict[Any, _TreeShardings] = {}

  @property
  def looks_at_paths(self) -> bool:
    """Whether the sharding of an array may depend on its path."""
    return self._resolver.looks_at_paths

  @property
  def places_unnamed_arrays(self) -> bool:
    """Whether some rule may shard arrays that have no names."""
    return self._resolver.looks_at_dtypes

  def shardings(self, tree: Any) -> Any:
    """A tree like `tree` with a NamedSharding for every box and every bare leaf.

    Raises:
      LayoutError, MeshAxisError, UnmatchedNameError, ConflictError: lists the path and the problem of
        every array that cannot be sharded as the rules demand.
    """
    shardings = self._tree_shardings(tree)
    return shardings.treedef.unflatten(shardings.by_unit)

  def leaf_shardings(self, tree: Any) -> list[NamedSharding]:
    """A NamedSharding per leaf, in the order of `jax.tree.leaves(tree)`; raises as `shardings`."""
    return list(self._tree_shardings(tree).by_leaf)

  def rows(self, tree: Any) -> list[Row]:
    """Every array of a tree with its decisions; raises nothing."""
    return _TreePlan(self, tree).rows()

  def checked_rows(self, tree: Any) -> list[Row]:
    """`rows`, after a check that raises as `shardings`."""
    plan = _TreePlan(self, tree)
    self._tree_shardings(tree, plan)
    return plan.rows()

  def problems(self, tree: Any) -> list[Problem]:
    """Every problem of a tree; those of a parameter are not repeated for its copies."""
    return _TreePlan(self, tree).problems()

  def resolve(
    self, static: Static | None, shape: tuple[int, ...], dtype: Any = None, path: str = ''
  ) -> Resolution:
    """Resolves one array by all rules.

    Args:
      static: its box's names; None for an array without a box.
      shape, dtype, path: of the array.
    """
    if static is None:
      return self._resolver.resolve(Leaf(path, shape, dtype), self.sizes)
    resolver = self._resolver if static.rules is None else resolver_of(static.rules)
    misfit = _misfit(static.names, shape)
    if misfit is not None:
      return Resolution(PartitionSpec(), (), (misfit,))
    if static.logical:
      report_names(static.names)
    leaf = Leaf(path, shape, dtype, tuple(static.names))
    resolution = resolver.resolve(leaf, self.sizes, axes=not static.logical)
    if static.rules is None:
      return resolution
    # a decision's rule is an index into the layout's table, and these rules are the box's own
    decisions = tuple(each._replace(rule=None, skipped=()) for each in resolution.decisions)
    return resolution._replace(decisions=decisions)

  def resolve_names(self, static: Static, shape: tuple[int, ...]) -> Resolution:
    """Resolves one array by its names alone, for values outside of a tree of parameters, such as a batch."""
    misfit = _misfit(static.names, shape)
    if misfit is not None:
      return Resolution(PartitionSpec(), (), (misfit,))
    if static.logical:
      report_names(static.names)
      return self.rules.resolve(static.names, shape, self.sizes)
    return resolve_axes(static.names, shape, self.sizes, self.rules.policies)

  def _tree_shardings(self, tree: Any, plan: _TreePlan | None = None) -> _TreeShardings:
    """The shardings of a tree, cached by structure (which includes names), shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(tree)
    structure: Any = treedef, tuple([getattr(leaf, 'shape', None) for leaf in leaves])
    if self._resolver.looks_at_dtypes:
      structure += (tuple([getattr(leaf, 'dtype', None) for leaf in leaves]),)
    try:
      shardings = self._by_structure.get(structure)
    except TypeError:  # the treedef holds static data without a hash
      return (plan or _TreePlan(self, tree)).shardings()
    if shardings is None:
      shardings = (plan or _TreePlan(self, tree)).shardings()
      if len(self._by_structure) >= _CACHED_TREES:
        self._by_structure.clear()
      self._by_structure[structure] = shardings
    return shardings

  def _sharding(self, spec: PartitionSpec) -> NamedSharding:
    sharding = self._by_spec.get(spec)
    if sharding is None:
      sharding = self._by_spec[spec] = NamedSharding(self.mesh, spec)
    return sharding


class _TreeShardings(NamedTuple):
  """The shardings of a tree.

  Attributes:
    treedef: the tree's structure, with units as leaves.
    by_unit: the sharding of each unit, or a box of shardings if its arrays have different ones.
    by_leaf: the sharding of each leaf.
  """

  treedef: Any
  by_unit: list[Any]
  by_leaf: list[NamedSharding]


class _ResolvedArray(NamedTuple):
  """One array of a unit, the inference of its names if it is optimizer state, and its resolution."""

  leaf: Any
  shape: tuple[int, ...]
  inference: Inference | None
  resolution: Resolution


class _TreePlan:
  """The plan of one tree: a resolution for each of its arrays.

  Args:
    planner: the planner; its caches are read and filled.
    tree: any tree, concrete or abstract.
  """

  def __init__(self, planner: Planner, tree: Any):
    self._planner, self._resolver = planner, planner._resolver
    self._names = TreeNames(tree)

  def shardings(self) -> _TreeShardings:
    """The sharding of every array; raises all problems as one error."""
    names, by_key = self._names, self._planner._by_key
    for key, index in dict(zip(self._keys, itertools.count())).items():
      if key not in by_key:
        self._cache_sharding(index)
    by_unit: list[Any] = list(map(by_key.get, self._keys))
    if names.inferred or self._derived or None in by_unit:
      irregular = {*names.inferred, *self._derived}
      by_unit = [
        self._unit_sharding(index) if sharding is None or index in irregular else sharding
        for index, sharding in enumerate(by_unit)
      ]
    if None in by_unit:
      raise_problems(self.problems())
    by_leaf = by_unit
    if None in names.shapes:  # some units are not a single array
      by_leaf = list(itertools.chain.from_iterable(map(_spread, names.units, by_unit)))
    return _TreeShardings(names.treedef, by_unit, by_leaf)

  def rows(self) -> list[Row]:
    """A row per array, in tree order."""
    return [row for index in range(len(self._keys)) for row in self._unit_rows(index)]

  def problems(self) -> list[Problem]:
    """The problems of all arrays, without those that a copy shares with its parameter."""
    by_unit = [
      [problem for array in self._arrays(index) for problem in array.resolution.problems]
      for index in range(len(self._keys))
    ]
    copies = self._names.copies
    return [
      problem.at(path)
      for index, (path, problems) in enumerate(zip(self._names.paths, by_unit, strict=True))
      if index not in copies or problems != by_unit[copies[index]]
      for problem in problems
    ]

  @functools.cached_property
  def _keys(self) -> list[Any]:
    """Per unit, the properties that its sharding depends on; units with equal keys are sharded alike."""
    names = self._names
    columns: list[list[Any]] = [names.statics, names.shapes]
    if self._resolver.looks_at_dtypes:
      columns.append(names.dtypes)
    if self._resolver.looks_at_paths:
      columns.append(self._routes)
    return list(zip(*columns, strict=True))

  @functools.cached_property
  def _routes(self) -> list[Any]:
    """Per unit, the rules that its path leads to, or the result of the table's functions for it."""
    names = self._names
    if not self._resolver.asks_functions:
      return list(map(self._resolver.route, names.paths))
    return list(map(self._asked_route, names.statics, names.shapes, names.dtypes, names.paths))

  def _asked_route(self, static: Static | None, shape, dtype, path: str) -> Any:
    if static is None:
      return self._resolver.asked_route(Leaf(path, shape or (), dtype))
    if static.rules is not None or shape is None or _misfit(static.names, shape) is not None:
      return path  # functions are not called for it
    leaf = Leaf(path, shape, dtype, tuple(static.names))
    return self._resolver.asked_route(leaf, axes=not static.logical)

  @functools.cached_property
  def _derived(self) -> dict[int, tuple[Inference, Resolution]]:
    """Optimizer state that a path rule reaches although the rule is for a parameter of another shape."""
    if not self._resolver.looks_at_paths or self._resolver.asks_functions:
      return {}  # functions receive the shape of each array itself
    names, routes = self._names, self._routes
    to_specs = {route for route in set(routes) if _ends_at_a_spec(route)}
    candidates = [
      index
      for index, (below, route) in enumerate(zip(names.below_a_field, routes, strict=True))
      if below and route in to_specs
    ]
    derived = {
      index: self._derive(index, parameter, field)
      for index, (parameter, field) in names.reshaped_states(candidates).items()
      if self._is_for(routes[index], names.paths[parameter])
    }
    return {index: each for index, each in derived.items() if each is not None}

  def _is_for(self, route: RuleId, parameter: str) -> bool:
    """Whether the pattern of a path rule is found in a parameter's path too."""
    pattern, _ = self._planner.rules.at(route)
    return re.search(pattern, parameter) is not None

  def _derive(self, index: int, parameter: int, field: str) -> tuple[Inference, Resolution] | None:
    """The resolution of optimizer state from its parameter's spec; None if the parameter's names decide."""
    names, planner = self._names, self._planner
    full, shape, parameter_path = names.shapes[parameter], names.shapes[index], names.paths[parameter]
    whole = planner.resolve(names.statics[parameter], full, names.dtypes[index], names.paths[index])
    if whole.owner is None:
      return None
    if whole.problems:
      return Inference(None, 'unrelated', parameter_path), whole
    entries = (*whole.spec, *(None,) * (len(full) - len(whole.spec)))
    inference = infer(entries, full, shape, field, parameter_path)
    resolution = resolve_axes(inference.names or (), shape, planner.sizes, planner.rules.policies)
    decisions = tuple(each._replace(name=None, rule=whole.owner) for each in resolution.decisions)
    return inference, resolution._replace(decisions=decisions, owner=whole.owner)

  def _cache_sharding(self, index: int) -> None:
    """Caches the sharding of arrays with the key of this one, unless they have problems."""
    if self._names.statics[index] is None or self._names.shapes[index] is not None:
      resolution = self._resolution(index)
      if not resolution.problems:
        self._planner._by_key[self._keys[index]] = self._planner._sharding(resolution.spec)

  def _resolution(self, index: int) -> Resolution:
    """The resolution of a unit that is one array, shared by arrays with equal keys."""
    key, resolutions = self._keys[index], self._planner._resolutions
    resolution = resolutions.get(key)
    if resolution is None:
      names = self._names
      dtype = getattr(names.values[index], 'dtype', None)
      resolution = resolutions[key] = self._planner.resolve(
        names.statics[index], names.shapes[index] or (), dtype, self._path(index)
      )
    return resolution

  def _path(self, index: int) -> str:
    """A unit's path, or '' if no rule reads paths: writing paths takes longer than planning."""
    return self._names.paths[index] if self._resolver.looks_at_paths else ''

  def _unit_sharding(self, index: int) -> Any:
    """The sharding of a unit that its key does not decide; None if it has problems."""
    resolutions = [array.resolution for array in self._arrays(index)]
    if any(resolution.problems for resolution in resolutions):
      return None
    shardings = [self._planner._sharding(resolution.spec) for resolution in resolutions]
    if len(set(shardings)) <= 1:
      return shardings[0] if shardings else self._planner.replicated
    if index not in self._names.inferred:  # a box around a tree has one spec, as in Flax
      return shardings[0]
    return jax.tree.structure(self._names.units[index]).unflatten(shardings)

  def _arrays(self, index: int) -> Iterator[_ResolvedArray]:
    """The arrays of one unit, resolved."""
    names = self._names
    if index in self._derived:
      leaf = names.values[index]
      yield _ResolvedArray(leaf, tuple(leaf.shape), *self._derived[index])
      return
    if index not in names.inferred and names.shapes[index] is not None:
      leaf = names.values[index]
      yield _ResolvedArray(leaf, tuple(leaf.shape), None, self._resolution(index))
      return
    for leaf, shape, inference in names.arrays(index):
      static = names.statics[index]
      if static is not None and inference is not None:
        inferred = inference.names
        static = None if inferred is None else Static(inferred, static.logical, None, static.rules)
      dtype = getattr(leaf, 'dtype', None)
      resolution = self._planner.resolve(static, shape, dtype, self._path(index))
      yield _ResolvedArray(leaf, shape, inference, resolution)

  def _unit_rows(self, index: int) -> Iterator[Row]:
    static, path = self._names.statics[index], self._names.paths[index]
    mesh, sizes = self._planner.mesh, self._planner.sizes
    arrays = list(self._arrays(index))
    for number, (leaf, shape, inference, resolution) in enumerate(arrays):
      dtype = getattr(leaf, 'dtype', None) or jax.dtypes.canonicalize_dtype(np.result_type(leaf))
      yield Row(
        path if len(arrays) == 1 else f'{path}/{number}',
        shape,
        dtype,
        static and (static.names if inference is None else inference.names),
        static is not None and static.logical,
        resolution.spec,
        resolution.decisions,
        resolution.owner,
        resolution.skipped,
        math.prod(shape) * dtype.itemsize,
        _bytes_per_device(resolution.spec, shape, dtype, sizes),
        mesh.size // math.prod(map(sizes.__getitem__, axis_names(tuple(resolution.spec)))),
        inference,
      )


def _ends_at_a_spec(route: Any) -> bool:
  """Whether a route ends at a path rule with a spec, in the table or in a table within it."""
  return isinstance(route[-1] if isinstance(route, tuple) else route, int)


def _bytes_per_device(spec: PartitionSpec, shape, dtype, sizes: Mapping[str, int]) -> int:
  """Bytes of the largest shard; sizes that do not divide are rounded up."""
  entries = tuple(spec) + (None,) * len(shape)
  shard = [
    -(-size // math.prod(sizes.get(axis, 1) for axis in axis_names(entry)))
    for size, entry in zip(shape, entries, strict=False)
  ]
  return math.prod(shard) * dtype.itemsize


def _misfit(names: Any, shape: tuple[int, ...]) -> Problem | None:
  """The problem with the number of an array's names, if there is one."""
  if isinstance(names, str):
    return Problem(
      f'its names are the bare string {names!r}, which would be read letter by letter.',
      f'write them as a tuple, ({names!r},).',
    )
  if len(names) == len(shape):
    return None
  count = f'{len(names)} name{"" if len(names) == 1 else "s"}'
  return Problem(
    f'{count} {names!r} for an array of rank {len(shape)}, shape {shape}.',
    'give one name per dimension, None for a dimension without a name.',
  )


def _spread(unit: Any, sharding: Any) -> list[NamedSharding]:
  """One sharding per array of a unit, from its one sharding or its box of shardings."""
  if isinstance(sharding, NamedSharding):
    return [sharding] * len(jax.tree.leaves(unit))
  return jax.tree.leaves(sharding, is_leaf=lambda x: isinstance(x, NamedSharding))
