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

import dataclasses
import functools
import itertools
import numbers
from collections import defaultdict
from collections.abc import Iterator, Set
from typing import Any, NamedTuple, cast

import jax
from jax.sharding import NamedSharding, PartitionSpec

from flax_spmd._src.active_layout import report_names
from flax_spmd._src.cycles import check_no_cycles
from flax_spmd._src.mesh import MeshLike, axis_sizes
from flax_spmd._src.names.boxes import Static
from flax_spmd._src.names.optimizer_state import Inference, infer, infer_without_parameter
from flax_spmd._src.names.tree_names import TreeNames
from flax_spmd._src.plan.deviations import planned_memory
from flax_spmd._src.plan.row_maker import RowMaker
from flax_spmd._src.plan.rows import Row
from flax_spmd._src.rules.array_resolver import (
  ArrayResolver,
  resolver_of,
  wrong_number_of_names,
)
from flax_spmd._src.rules.clauses import Leaf, PathRule
from flax_spmd._src.rules.decisions import Resolution, RuleId
from flax_spmd._src.rules.mesh_axes import resolve_axes
from flax_spmd._src.rules.path_patterns import Search, searcher
from flax_spmd._src.rules.table import Rules
from flax_spmd._src.shared import shared
from flax_spmd._src.text import value_text
from flax_spmd.errors import LayoutError, Problem, raise_problems

_CACHED_TREES = 64
_CACHED_TABLES = 64


@shared
def planner_for(mesh: MeshLike, rules: Rules) -> Planner:
  """The planner of a mesh and a table; equal ones share its caches while a layout or another planner uses it."""
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
    self._by_spec: dict[Any, NamedSharding] = {}
    self._by_structure: dict[Any, _TreeShardings] = {}
    self._of_boxes: dict[Any, ArrayResolver] = {}
    self._of_tables: dict[Rules, Planner] = {}

  @property
  def looks_at_paths(self) -> bool:
    """Whether the sharding of an array may depend on its path."""
    return self._resolver.looks_at_paths

  def for_table(self, rules: Rules) -> Planner:
    """The planner of another table on the same mesh.

    It is kept together with this one, unless functions are among the rules: these are often lambdas, which
    differ on every call.
    """
    planner = self if rules == self.rules else self._of_tables.get(rules)
    if planner is None:
      planner = planner_for(self.mesh, rules)
      if not planner._resolver.asks_functions:
        if len(self._of_tables) >= _CACHED_TABLES:
          self._of_tables.clear()
        self._of_tables[rules] = planner
    return planner

  def shardings(self, tree: Any) -> Any:
    """A tree like `tree` with a NamedSharding for every box and every bare leaf.

    Raises:
      LayoutError, MeshAxisError, UnmatchedNameError, ConflictError: lists the path and the problem of
        every array that cannot be sharded as the rules demand.
    """
    shardings = self._tree_shardings(tree)
    return jax.tree.unflatten(shardings.treedef, shardings.by_unit)

  def leaf_shardings(self, tree: Any) -> list[NamedSharding]:
    """A NamedSharding per leaf, in the order of `jax.tree.leaves(tree)`; raises as `shardings`."""
    return list(self._tree_shardings(tree).by_leaf)

  def named_leaf_shardings(self, tree: Any) -> list[NamedSharding | None]:
    """`leaf_shardings`, with None for leaves without names; these are not planned, so they have no problems."""
    names = TreeNames(tree)
    if not any(names.statics):
      return [None] * len(jax.tree.leaves(tree))
    described = zip(names.units, names.statics, strict=True)
    named = jax.tree.unflatten(names.treedef, [unit if static else None for unit, static in described])
    planned = iter(self.leaf_shardings(named))
    return [
      next(planned) if static else None
      for unit, static in zip(names.units, names.statics, strict=True)
      for _ in jax.tree.leaves(unit)
    ]

  def stored_specs(self, tree: Any) -> dict[Static, PartitionSpec]:
    """The specs of boxes whose arrays are placed by a rule for their path, or a function, rather than by names.

    Dimensions that `fsdp` shards are not part of these specs: such an array is gathered where it is used.

    Args:
      tree: a state, concrete or abstract.

    Returns:
      By the static part of a box, the spec of its arrays; UNCONSTRAINED if they have different ones. The
      optimizer's copies of a parameter do not count: a step opens the boxes of parameters.
    """
    if not self._resolver.has_owners:
      return {}
    names = TreeNames(tree)
    specs: dict[Static, set[PartitionSpec]] = defaultdict(set)
    owned: dict[Static, None] = {}
    for index, static in enumerate(names.box_statics):
      if static is None or index in names.copies or not _is_placed_by_table(static, names.shapes[index]):
        continue
      leaf = Leaf(names.paths[index], names.shapes[index], names.dtypes[index], tuple(static.names))
      resolution = self._resolver.resolve(leaf, self.sizes, axes=not static.logical, fill=False)
      specs[static].add(resolution.spec)
      if resolution.owner is not None:
        owned[static] = None
    return {static: common_spec(static, specs[static]) for static in owned}

  def rows(self, tree: Any, stored: Any = None) -> list[Row]:
    """Every array of a tree with its decisions; raises nothing.

    Args:
      tree: the planned tree, concrete or abstract.
      stored: a tree whose leaves are the arrays of `tree`, if those in `tree` are not.
    """
    return _TreePlan(self, tree).rows(stored)

  def checked_rows(self, tree: Any, stored: Any = None) -> list[Row]:
    """`rows`, after a check that raises as `shardings` and `check_is_tree`."""
    check_is_tree(tree)
    plan = _TreePlan(self, tree)
    plan.shardings()
    return plan.rows(stored)

  def problems(self, tree: Any) -> list[Problem]:
    """Every problem of a tree; those of a parameter are not repeated for its copies."""
    return _TreePlan(self, tree).problems()

  def resolve(
    self,
    static: Static | None,
    shape: tuple[int, ...],
    dtype: Any = None,
    path: str = '',
    optimizer: bool = False,
  ) -> Resolution:
    """Resolves one array in memory by all rules.

    Args:
      static: its box's names; None for an array without a box.
      shape, dtype, path: of the array.
      optimizer: whether it is optimizer state.
    """
    return self._resolve(static, Leaf(path, shape, dtype, None, optimizer)).stored()

  def _resolve(self, static: Static | None, leaf: Leaf, owned: bool = True) -> Resolution:
    if static is None:
      return self._resolver.resolve(leaf, self.sizes, owned=owned)
    resolver = self._resolver if not static.rules else self._resolver_of_box(static)
    if isinstance(static.names, str):
      return Resolution(PartitionSpec(), (), (_bare_string(static.names),))
    if static.logical:
      report_names(static.names)
    leaf = leaf._replace(names=self._axes_as_tuples(static))
    resolution = resolver.resolve(leaf, self.sizes, axes=not static.logical, owned=owned)
    if not static.rules:
      return resolution
    # a decision's rule is an index into the layout's table, and these rules are the box's own
    decisions = tuple(each._replace(rule=None, skipped=()) for each in resolution.decisions)
    return self._resolver.widened(resolution._replace(decisions=decisions), leaf, self.sizes)

  def resolve_by_names(
    self,
    static: Static | None,
    shape: tuple[int, ...],
    dtype: Any = None,
    optimizer: bool = False,
  ) -> Resolution:
    """Resolves one array in memory by its names, and by the rules that fill and widen dimensions."""
    return self._resolve(static, Leaf('', shape, dtype, None, optimizer), owned=False).stored()

  def resolve_names(self, static: Static, shape: tuple[int, ...]) -> Resolution:
    """Resolves one array by its names alone, for values outside of a tree of parameters, such as a batch."""
    if static.logical:
      report_names(static.names)
    leaf = Leaf('', shape, names=tuple(static.names))
    if len(leaf.names) > len(shape):  # by a caller's own word, so that it matters even without a rule
      return Resolution(PartitionSpec(), (), (wrong_number_of_names(leaf),))
    return self._resolver.by_names(leaf, self.sizes, axes=not static.logical).stored()

  def _tree_shardings(self, tree: Any) -> _TreeShardings:
    """The shardings of a tree, cached by structure (which includes names), shapes and dtypes."""
    check_no_cycles(tree)
    leaves, treedef = jax.tree.flatten(tree)
    structure: Any = treedef, tuple([getattr(leaf, 'shape', None) for leaf in leaves])
    if self._resolver.looks_at_dtypes:
      structure += (tuple([getattr(leaf, 'dtype', None) for leaf in leaves]),)
    try:
      shardings = self._by_structure.get(structure)
    except TypeError:  # the treedef holds static data without a hash
      return _TreePlan(self, tree).shardings()
    if shardings is None:
      shardings = _TreePlan(self, tree).shardings()
      if len(self._by_structure) >= _CACHED_TREES:
        self._by_structure.clear()
      self._by_structure[structure] = shardings
    return shardings

  def _axes_as_tuples(self, static: Static) -> tuple[Any, ...]:
    """The names of an array; mesh axes among them, which NNX does not mark, as tuples."""
    if not static.or_axes:
      return tuple(static.names)
    known = self.rules.by_name.keys() | (static.rules.by_name.keys() if static.rules else set())
    return tuple(
      (name,) if isinstance(name, str) and name in self.sizes and name not in known else name
      for name in static.names
    )

  def _resolver_of_box(self, static: Static) -> ArrayResolver:
    """The resolver of an array with rules of its own: these alone for a box, before the table's for a variable."""
    key = static.rules, static.or_axes
    resolver = self._of_boxes.get(key)
    if resolver is None:
      rules = cast(Rules, static.rules)
      if static.or_axes:
        policies = dataclasses.asdict(self.rules.policies)
        rules = Rules.of((*rules.clauses, *self.rules.clauses), **policies)
      resolver = self._of_boxes[key] = resolver_of(rules)
    return resolver

  def _sharding(self, spec: PartitionSpec, memory: str | None = None) -> NamedSharding:
    sharding = self._by_spec.get((spec, memory))
    if sharding is None:
      sharding = self._by_spec[spec, memory] = NamedSharding(self.mesh, spec, memory_kind=memory)
    return sharding


def check_is_tree(tree: Any) -> None:
  """Checks that a tree is not a single object other than an array or a number: a function, a layout, a plan.

  Raises:
    LayoutError: it is.
  """
  if not jax.tree_util.all_leaves([tree]) or isinstance(tree, numbers.Number):
    return
  if not (isinstance(getattr(tree, 'shape', None), tuple) and hasattr(tree, 'dtype')):
    raise LayoutError(
      f'A {type(tree).__name__} is no tree of arrays.\n'
      'Fix: pass a state, or one without arrays, such as layout.abstract(model.init, key, x) or plan.abstract().'
    )


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
    if None in by_unit or names.conflicts:
      raise_problems(self.problems())
    by_leaf = by_unit
    if None in names.shapes:  # some units are not a single array
      by_leaf = list(itertools.chain.from_iterable(map(_spread, names.units, by_unit)))
    return _TreeShardings(names.treedef, by_unit, by_leaf)

  def rows(self, stored: Any = None) -> list[Row]:
    """A row per array, in tree order; the array is a leaf of `stored`, or else the tree's own."""
    names, planner, rows = self._names, self._planner, []
    maker, leaves = RowMaker(planner.mesh, planner._sharding), iter(jax.tree.leaves(stored))
    units = zip(names.paths, names.fields, names.statics, strict=True)
    for index, (path, field, static) in enumerate(units):
      arrays = list(self._arrays(index))
      for number, (own, shape, inference, resolution) in enumerate(arrays):
        where = path if len(arrays) == 1 else f'{path}/{number}'
        leaf = own if stored is None else next(leaves)
        rows.append(
          maker.row(
            where,
            field,
            static,
            shape,
            inference,
            resolution,
            leaf,
            resolution.memory or planned_memory(own),
          )
        )
    return rows

  def problems(self) -> list[Problem]:
    """The problems of all arrays, without those that a copy shares with its parameter; once for equal arrays of a box."""
    by_unit = [
      dict.fromkeys(problem for array in self._arrays(index) for problem in array.resolution.problems)
      for index in range(len(self._keys))
    ]
    copies = self._names.copies
    return self._names.conflicts + [
      problem.at(path)
      for index, (path, problems) in enumerate(zip(self._names.paths, by_unit, strict=True))
      for problem in problems
      if index not in copies or problem not in by_unit[copies[index]]
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
    if self._resolver.looks_at_optimizer:
      columns.append(names.optimizer)
    return list(zip(*columns, strict=True))

  @functools.cached_property
  def _routes(self) -> list[Any]:
    """Per unit, the rules that its path leads to, or the result of the table's functions for it."""
    names = self._names
    if not self._resolver.asks_functions:
      return list(map(self._resolver.route, names.paths))
    columns = names.statics, names.shapes, names.dtypes, names.paths, names.optimizer
    return list(map(self._asked_route, *columns))

  def _asked_route(self, static: Static | None, shape, dtype, path: str, optimizer: bool) -> Any:
    if static is None:
      return self._resolver.asked_route(Leaf(path, shape or (), dtype, None, optimizer))
    if static.rules or shape is None or isinstance(static.names, str):
      return path  # functions are not called for it
    leaf = Leaf(path, shape, dtype, self._planner._axes_as_tuples(static), optimizer)
    return self._resolver.asked_route(leaf, self._planner.sizes, axes=not static.logical)

  @functools.cached_property
  def _derived(self) -> dict[int, list[tuple[Inference, Resolution]]]:
    """Per array of a unit, optimizer state that a path rule for parameters of another shape reaches."""
    if not self._resolver.has_path_rules:
      return {}
    names, rules = self._names, self._path_rules
    candidates = [
      index
      for index, (field, rule) in enumerate(zip(names.fields, rules, strict=True))
      if field is not None and rule is not None
    ]
    derived = {
      index: self._derive(index, parameter, field)
      for index, (parameter, field) in names.reshaped_states(candidates).items()
      if self._search(rules[index])(names.paths[parameter])
    }
    return {index: each for index, each in derived.items() if each is not None}

  @functools.cached_property
  def _path_rules(self) -> list[RuleId | None]:
    """Per unit, the path rule with a PartitionSpec that its path leads to."""
    if self._resolver.asks_functions:
      return list(map(self._resolver.path_rule, self._names.paths))
    rules = {route: route if _ends_at_a_spec(route) else None for route in set(self._routes)}
    return list(map(rules.__getitem__, self._routes))

  def _search(self, rule: Any) -> Search:
    return searcher(cast(PathRule, self._planner.rules.parsed_at(rule)).pattern)

  def _derive(self, index: int, parameter: int, field: str) -> list[tuple[Inference, Resolution]] | None:
    """The resolutions of optimizer state, as the rule for its parameter implies; None: its own is right."""
    names, planner = self._names, self._planner
    static: Any = names.statics[parameter]  # None only where a path rule owns the parameter
    full, path = names.shapes[parameter], names.paths[parameter]
    whole = planner.resolve(static, full, names.dtypes[parameter], names.paths[index])
    if whole.problems:  # of a rule that the parameter itself does not have
      whole = planner.resolve(static, full, names.dtypes[parameter], path)
    if whole.problems:
      return [(Inference(None, 'unrelated', path), whole) for _ in names.arrays(index)]
    arrays = names.arrays(index)
    if whole.owner is None and static is not None:
      inferred = [infer(static.names, full, shape, field, path) for _, shape, _ in arrays]
      return [
        (
          each,
          planner.resolve_by_names(
            static.renamed(each.names),
            shape,
            getattr(leaf, 'dtype', None),
            self._is_optimizer(index),
          ),
        )
        for (leaf, shape, _), each in zip(arrays, inferred, strict=True)
      ]
    if whole.owner is None or not self._is_path_rule(whole.owner):
      return None
    entries = (*whole.spec, *(None,) * (len(full) - len(whole.spec)))
    inferred = [infer(entries, full, shape, field, path) for _, shape, _ in arrays]
    return [
      (
        each,
        self._widened(
          index, leaf, shape, self._by_entries(each, shape, whole.owner)._replace(memory=whole.memory)
        ),
      )
      for (leaf, shape, _), each in zip(arrays, inferred, strict=True)
    ]

  def _is_path_rule(self, owner: RuleId) -> bool:
    clause = self._planner.rules.parsed_at(owner)
    return isinstance(clause, PathRule) and clause.table is None

  def _by_entries(self, inference: Inference, shape, owner: RuleId) -> Resolution:
    """The resolution by those entries of a parameter's spec that an array has kept."""
    planner = self._planner
    resolution = resolve_axes(inference.names or (), shape, planner.sizes, planner.rules.policies)
    decisions = tuple(each._replace(name=None, rule=owner) for each in resolution.decisions)
    return resolution._replace(decisions=decisions, owner=owner)

  def _is_optimizer(self, index: int) -> bool:
    """Whether a unit is optimizer state, if a rule reads that."""
    return self._resolver.looks_at_optimizer and self._names.optimizer[index]

  def _widened(self, index: int, leaf: Any, shape, resolution: Resolution) -> Resolution:
    """The resolution of an array of optimizer state with the axes that `optimizer_over` adds."""
    if not self._is_optimizer(index):
      return resolution
    array = Leaf(self._path(index), shape, getattr(leaf, 'dtype', None), None, True)
    return self._resolver.widened(resolution, array, self._planner.sizes)

  def _cache_sharding(self, index: int) -> None:
    """Caches the sharding of arrays with the key of this one, unless they have problems."""
    if self._names.statics[index] is None or self._names.shapes[index] is not None:
      resolution = self._resolution(index)
      if not resolution.problems:
        self._planner._by_key[self._keys[index]] = self._planner._sharding(
          resolution.spec, resolution.memory
        )

  def _resolution(self, index: int) -> Resolution:
    """The resolution of a unit that is one array, shared by arrays with equal keys."""
    key, resolutions = self._keys[index], self._planner._resolutions
    resolution = resolutions.get(key)
    if resolution is None:
      names = self._names
      dtype = getattr(names.values[index], 'dtype', None)
      resolution = resolutions[key] = self._planner.resolve(
        names.statics[index],
        names.shapes[index] or (),
        dtype,
        self._path(index),
        self._is_optimizer(index),
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
    shardings = [
      self._planner._sharding(resolution.spec, resolution.memory) for resolution in resolutions
    ]
    if len(set(shardings)) <= 1:
      return shardings[0] if shardings else self._planner.replicated
    if (
      index not in self._names.inferred and index not in self._derived
    ):  # a box around a tree has one spec, as in Flax
      return shardings[0]
    return jax.tree.unflatten(jax.tree.structure(self._names.units[index]), shardings)

  def _arrays(self, index: int) -> Iterator[_ResolvedArray]:
    """The arrays of one unit, resolved."""
    names = self._names
    if index in self._derived:
      for (leaf, shape, _), derived in zip(names.arrays(index), self._derived[index], strict=True):
        yield _ResolvedArray(leaf, shape, *derived)
      return
    if index not in names.inferred and names.shapes[index] is not None:
      leaf = names.values[index]
      yield self._fitting(index, leaf, tuple(leaf.shape), None, self._resolution(index))
      return
    for leaf, shape, inference in names.arrays(index):
      static = names.statics[index]
      if static is not None and inference is not None:
        static = static.renamed(inference.names)
      dtype = getattr(leaf, 'dtype', None)
      resolution = self._planner.resolve(
        static, shape, dtype, self._path(index), self._is_optimizer(index)
      )
      yield self._fitting(index, leaf, shape, inference, resolution)

  def _fitting(
    self,
    index: int,
    leaf: Any,
    shape: tuple[int, ...],
    inference: Inference | None,
    resolution: Resolution,
  ) -> _ResolvedArray:
    """One array of a unit; replicated if it is Optax state, and a rule for parameters does not fit it."""
    if resolution.problems and self._is_owned_by_accident(index):
      inference = infer_without_parameter(shape)
      whole = Resolution(PartitionSpec(), (), (), resolution.owner)
      resolution = self._widened(index, leaf, shape, whole)
    return _ResolvedArray(leaf, shape, inference, resolution)

  def _is_owned_by_accident(self, index: int) -> bool:
    """Whether a unit is Optax state at a path that is found by a rule for parameters."""
    names = self._names
    if not self._resolver.looks_at_paths or names.fields[index] is None:
      return False
    rule = self._path_rules[index]
    if rule is None or not names.of_optax[index]:
      return False
    keys = rule if isinstance(rule, tuple) else (rule,)
    searches = [self._search(keys[: depth + 1]) for depth in range(len(keys))]  # through the tables
    paths = zip(names.paths, names.fields, strict=True)
    return any(field is None and all(search(path) for search in searches) for path, field in paths)


def common_spec(static: Static, specs: Set[PartitionSpec]) -> PartitionSpec:
  """The one spec of the arrays in equal boxes; UNCONSTRAINED if there are several."""
  if len(specs) == 1:
    return next(iter(specs))
  return PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * len(static.names))


def _is_placed_by_table(static: Static, shape: Any) -> bool:
  """Whether the layout's table places the array of a box: it has no rules of its own, and not too many names."""
  if static.rules or shape is None or isinstance(static.names, str):
    return False
  return len(static.names) <= len(shape)


def _ends_at_a_spec(route: Any) -> bool:
  """Whether a route ends at a path rule with a spec, in the table or in a table within it."""
  return isinstance(route[-1] if isinstance(route, tuple) else route, int)


def _bare_string(names: str) -> Problem:
  return Problem(
    f'its names are the bare string {value_text(names)}, which would be read letter by letter.',
    f'write them as a tuple, ({value_text(names)},).',
  )


def _spread(unit: Any, sharding: Any) -> list[NamedSharding]:
  """One sharding per array of a unit, from its one sharding or its box of shardings."""
  if isinstance(sharding, NamedSharding):
    return [sharding] * len(jax.tree.leaves(unit))
  return jax.tree.leaves(sharding, is_leaf=lambda x: isinstance(x, NamedSharding))
