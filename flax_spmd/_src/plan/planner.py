"""The plan of a tree: where each of its arrays goes on a mesh under a rule table, and why.

A planner resolves each distinct kind of array (names, shape, and what the rules ask for besides) once and
remembers it, and remembers whole trees too, so that a state of ten thousand leaves costs little more
than walking it. Everything that is wrong with a tree is found here, before anything is compiled or
placed, and is raised as one error that lists every offender.

    planner = Planner(mesh, rules)
    planner.shardings(tree)    # a NamedSharding per leaf
    planner.rows(tree)         # path, shape, names, spec and decisions per array, for reports
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flax_spmd._src.mesh import MeshLike, axis_sizes
from flax_spmd._src.names.boxes import Static
from flax_spmd._src.names.optimizer_state import Guess, guess
from flax_spmd._src.names.tree_names import Reading, copies, parameters_of, read_for_layout
from flax_spmd._src.names.unit_paths import Places, unit_places
from flax_spmd._src.plan.rows import Row
from flax_spmd._src.rules.array_resolver import resolver_of
from flax_spmd._src.rules.clauses import Leaf
from flax_spmd._src.rules.decisions import Resolution, RuleId, axis_names
from flax_spmd._src.rules.mesh_axes import resolve_axes
from flax_spmd._src.rules.table import Rules
from flax_spmd.errors import Problem, raise_problems


class _Placed(NamedTuple):
  """Where a tree goes: its structure with boxes as leaves, a place for each of these, and per array.

  A unit's place is its sharding, or where its arrays go different ways, a box of shardings.
  """

  treedef: Any
  by_unit: list[Any]
  by_leaf: list[NamedSharding]


class _Array(NamedTuple):
  """One array of a unit: the leaf, what it was taken for if it is optimizer state, what was decided."""

  leaf: Any
  shape: tuple[int, ...]
  guess: Guess | None
  resolution: Resolution


class _Survey(NamedTuple):
  """A tree as it was read, and what decides about each of its units.

  Units with equal `keys` go alike. `derived` holds, per index, optimizer state that a path rule would
  take for the parameter that it is not shaped like.
  """

  reading: Reading
  paths: list[str]
  keys: list[Any]
  derived: dict[int, tuple[Guess, Resolution]]


_REMEMBERED_TREES = 64


@functools.lru_cache(maxsize=256)
def planner_for(mesh: MeshLike, rules: Rules) -> Planner:
  """The planner of a mesh and a table; equal ones share what they have planned."""
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
    self._memo: dict[Any, NamedSharding] = {}
    self._resolutions: dict[Any, Resolution] = {}
    self._shardings: dict[PartitionSpec, NamedSharding] = {}
    self._trees: dict[Any, _Placed] = {}

  @property
  def looks_at_paths(self) -> bool:
    """Whether some rule looks at an array's path."""
    return self._resolver.looks_at_paths

  @property
  def needs_no_names(self) -> bool:
    """Whether some rule lays out arrays that have no names."""
    return self._resolver.looks_at_dtypes

  def shardings(self, tree: Any) -> Any:
    """A tree like `tree` with a NamedSharding for every box and every leaf without a box.

    Raises:
      LayoutError, MeshAxisError, UnmatchedNameError, ConflictError: names all leaves that do not
        fit, each with its path.
    """
    placed = self._placed(tree)
    return placed.treedef.unflatten(placed.by_unit)

  def leaf_shardings(self, tree: Any) -> list[NamedSharding]:
    """A NamedSharding per leaf, in the order of `jax.tree.leaves(tree)`; raises as `shardings`."""
    return list(self._placed(tree).by_leaf)

  def rows(self, tree: Any) -> list[Row]:
    """Every array of the tree with its decisions; raises nothing."""
    survey = self._survey(tree, with_paths=True)
    return [row for index in range(len(survey.keys)) for row in self._rows(survey, index)]

  def resolve(
    self, static: Static | None, shape: tuple[int, ...], dtype: Any = None, path: str = ''
  ) -> Resolution:
    """What is decided about an array with a box's names (None: it has no box)."""
    if static is None:
      return self._resolver.resolve(Leaf(path, shape, dtype), self.sizes)
    resolver = self._resolver if static.rules is None else resolver_of(static.rules)
    wrong = _misfit(static.names, shape)
    if wrong is not None:
      return Resolution(PartitionSpec(), (), (wrong,))
    leaf = Leaf(path, shape, dtype, tuple(static.names))
    found = resolver.resolve(leaf, self.sizes, axes=not static.logical)
    if static.rules is None:
      return found
    # a decision's rule is an index of the layout's table, which the box's own is not
    return found._replace(decisions=tuple(d._replace(rule=None, skipped=()) for d in found.decisions))

  def resolve_names(self, static: Static, shape: tuple[int, ...]) -> Resolution:
    """What names alone decide: for values that are in no tree of parameters, such as a batch."""
    wrong = _misfit(static.names, shape)
    if wrong is not None:
      return Resolution(PartitionSpec(), (), (wrong,))
    if static.logical:
      return self.rules.resolve(static.names, shape, self.sizes)
    return resolve_axes(static.names, shape, self.sizes, self.rules.policies)

  # -- placing

  def _placed(self, tree: Any) -> _Placed:
    """Where everything goes; remembered by structure (names are part of it), shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(tree)
    form: Any = treedef, tuple([getattr(leaf, 'shape', None) for leaf in leaves])
    if self._resolver.looks_at_dtypes:
      form += (tuple([getattr(leaf, 'dtype', None) for leaf in leaves]),)
    try:
      found = self._trees.get(form)
    except TypeError:  # something static in the tree is not hashable
      return self._place(tree)
    if found is None:
      found = self._place(tree)
      if len(self._trees) >= _REMEMBERED_TREES:
        self._trees.clear()
      self._trees[form] = found
    return found

  def _place(self, tree: Any) -> _Placed:
    survey = self._survey(tree)
    reading = survey.reading
    for key, index in dict(zip(survey.keys, itertools.count())).items():
      if key not in self._memo:
        self._learn(survey, index)
    places: list[Any] = list(map(self._memo.get, survey.keys))
    if reading.guesses or survey.derived or None in places:
      special = {*reading.guesses, *survey.derived}
      places = [
        self._unusual(survey, index) if place is None or index in special else place
        for index, place in enumerate(places)
      ]
    if None in places:
      raise_problems(self.problems(tree))
    by_leaf = places
    if None in reading.shapes:  # some units are no single array
      by_leaf = list(itertools.chain.from_iterable(map(_spread, reading.units, places)))
    return _Placed(reading.treedef, places, by_leaf)

  def _learn(self, survey: _Survey, index: int) -> None:
    """Remembers the place of arrays like this one, if nothing is wrong with it."""
    if survey.reading.statics[index] is None or survey.reading.shapes[index] is not None:
      resolution = self._resolution(survey, index)
      if not resolution.problems:
        self._memo[survey.keys[index]] = self._sharding(resolution.spec)

  def _sharding(self, spec: PartitionSpec) -> NamedSharding:
    found = self._shardings.get(spec)
    if found is None:
      found = self._shardings[spec] = NamedSharding(self.mesh, spec)
    return found

  def _resolution(self, survey: _Survey, index: int) -> Resolution:
    """What is decided about a unit that is one array; arrays with equal keys share it."""
    key = survey.keys[index]
    found = self._resolutions.get(key)
    if found is None:
      reading, path = survey.reading, survey.paths[index] if survey.paths else ''
      dtype = getattr(reading.values[index], 'dtype', None)
      found = self.resolve(reading.statics[index], reading.shapes[index] or (), dtype, path)
      self._resolutions[key] = found
    return found

  def _unusual(self, survey: _Survey, index: int) -> Any:
    """The place of a unit that its key does not decide; None if something is wrong with it."""
    resolutions = [array.resolution for array in self._decided(survey, index)]
    if any(resolution.problems for resolution in resolutions):
      return None
    placed = [self._sharding(resolution.spec) for resolution in resolutions]
    if len(set(placed)) <= 1:
      return placed[0] if placed else self.replicated
    if index not in survey.reading.guesses:  # a box around a tree: one spec for all of it, as in Flax
      return placed[0]
    return jax.tree.structure(survey.reading.units[index]).unflatten(placed)

  # -- what is known of a tree, and decided about it

  def _survey(self, tree: Any, with_paths: bool = False) -> _Survey:
    reading = read_for_layout(tree)
    by_names: list[Any] = list(zip(reading.statics, reading.shapes, strict=True))
    looks_at_paths = self._resolver.looks_at_paths
    places = unit_places(tree) if with_paths or looks_at_paths else Places([], [])
    paths = places.paths
    if not self._resolver.looks_at_dtypes:
      return _Survey(reading, paths, by_names, {})
    dtypes = [getattr(value, 'dtype', None) for value in reading.values]
    if not looks_at_paths:
      return _Survey(reading, paths, list(zip(by_names, dtypes, strict=True)), {})
    routes = self._routes(reading, dtypes, paths)
    derived = self._derived(tree, reading, places, routes)
    return _Survey(reading, paths, list(zip(by_names, dtypes, routes, strict=True)), derived)

  def _routes(self, reading: Reading, dtypes, paths) -> list[Any]:
    """What of each unit's path matters, or what policies say of it."""
    if not self._resolver.asks_functions:
      return list(map(self._resolver.route, paths))
    return list(map(self._asked_route, reading.statics, reading.shapes, dtypes, paths))

  def _asked_route(self, static: Static | None, shape, dtype, path: str) -> Any:
    if static is None:
      return self._resolver.asked_route(Leaf(path, shape or (), dtype))
    if static.rules is not None or shape is None or _misfit(static.names, shape) is not None:
      return path  # policies are not asked about it
    leaf = Leaf(path, shape, dtype, tuple(static.names))
    return self._resolver.asked_route(leaf, axes=not static.logical)

  def _derived(
    self, tree, reading: Reading, places: Places, routes
  ) -> dict[int, tuple[Guess, Resolution]]:
    """Optimizer state that rules for its parameter reach by path, and that is not shaped like it."""
    if self._resolver.asks_functions:  # those see each array's own shape
      return {}
    found = {
      index: self._derive(reading, places.paths, index, *owner)
      for index, owner in parameters_of(tree, reading, places.below_a_field, routes).items()
      if self._is_for(routes[index], places.paths[owner[0]])
    }
    return {index: derived for index, derived in found.items() if derived is not None}

  def _is_for(self, route: RuleId, parameter: str) -> bool:
    """Whether a path rule is for a parameter: its expression is found in the parameter's path too."""
    pattern, _ = self.rules.at(route)
    return re.search(pattern, parameter) is not None

  def _derive(
    self, reading: Reading, paths, index: int, parameter: int, field: str
  ) -> tuple[Guess, Resolution] | None:
    """What a rule for the parameter says of state that was made of it; None if its names decide."""
    full, shape = reading.shapes[parameter], reading.shapes[index]
    dtype = reading.values[index].dtype
    whole = self.resolve(reading.statics[parameter], full, dtype, paths[index])
    if whole.owner is None:
      return None
    if whole.problems:
      return Guess(None, 'unrelated', paths[parameter]), whole
    entries = (*whole.spec, *(None,) * (len(full) - len(whole.spec)))
    guessed = guess(entries, full, shape, field, paths[parameter])
    found = resolve_axes(guessed.names or (), shape, self.sizes, self.rules.policies)
    decisions = tuple(decision._replace(name=None, rule=whole.owner) for decision in found.decisions)
    return guessed, found._replace(decisions=decisions, owner=whole.owner)

  def _decided(self, survey: _Survey, index: int) -> Iterator[_Array]:
    """The arrays of one unit, with what is decided about each."""
    static = survey.reading.statics[index]
    path = survey.paths[index] if survey.paths else ''
    if index in survey.derived:
      guessed, resolution = survey.derived[index]
      leaf = survey.reading.values[index]
      yield _Array(leaf, tuple(leaf.shape), guessed, resolution)
      return
    if index not in survey.reading.guesses and survey.reading.shapes[index] is not None:
      leaf = survey.reading.values[index]
      yield _Array(leaf, tuple(leaf.shape), None, self._resolution(survey, index))
      return
    for leaf, shape, guessed in _arrays(survey.reading, index):
      dtype = getattr(leaf, 'dtype', None)
      names = static
      if static is not None and guessed is not None:
        names = (
          None if guessed.names is None else Static(guessed.names, static.logical, None, static.rules)
        )
      yield _Array(leaf, shape, guessed, self.resolve(names, shape, dtype, path))

  def _rows(self, survey: _Survey, index: int) -> Iterator[Row]:
    static, path = survey.reading.statics[index], survey.paths[index]
    arrays = list(self._decided(survey, index))
    for number, (leaf, shape, guessed, resolution) in enumerate(arrays):
      dtype = getattr(leaf, 'dtype', None) or jax.dtypes.canonicalize_dtype(np.result_type(leaf))
      yield Row(
        path if len(arrays) == 1 else f'{path}/{number}',
        shape,
        dtype,
        static and (static.names if guessed is None else guessed.names),
        static is not None and static.logical,
        resolution.spec,
        resolution.decisions,
        resolution.owner,
        resolution.skipped,
        math.prod(shape) * dtype.itemsize,
        self._bytes_per_device(resolution.spec, shape, dtype),
        self.mesh.size // math.prod(map(self.sizes.__getitem__, axis_names(tuple(resolution.spec)))),
        guessed,
      )

  def _bytes_per_device(self, spec: PartitionSpec, shape, dtype) -> int:
    """Bytes of the largest piece; uneven pieces are rounded up."""
    entries = tuple(spec) + (None,) * len(shape)
    pieces = [
      -(-size // math.prod(self.sizes.get(axis, 1) for axis in axis_names(entry)))
      for size, entry in zip(shape, entries, strict=False)
    ]
    return math.prod(pieces) * dtype.itemsize

  def problems(self, tree: Any) -> list[Problem]:
    """Everything that is wrong with a tree; what is wrong with a parameter is not said of its copies."""
    survey, copied = self._survey(tree, with_paths=True), copies(tree)
    found = [
      [problem for array in self._decided(survey, index) for problem in array.resolution.problems]
      for index in range(len(survey.keys))
    ]
    return [
      problem.at(path)
      for index, (path, problems) in enumerate(zip(survey.paths, found, strict=True))
      if index not in copied or problems != found[copied[index]]
      for problem in problems
    ]


def leaf_names(tree: Any, *, logical_only: bool = False) -> list[Any]:
  """The names of each leaf, in the order of `jax.tree.leaves(tree)`; None for a leaf without.

  With `logical_only`, None also for one whose names are those of mesh axes.
  """
  reading = read_for_layout(tree)
  return [
    None
    if static is None or (logical_only and not static.logical)
    else static.names
    if guess is None
    else guess.names
    for index, static in enumerate(reading.statics)
    for _, _, guess in _arrays(reading, index)
  ]


def _arrays(reading: Reading, index: int):
  """The arrays of one unit: leaf, shape, and the guess about it if there is one."""
  value = reading.values[index]
  leaves = [value] if hasattr(value, 'shape') else jax.tree.leaves(value)
  guesses = reading.guesses.get(index) or [None] * len(leaves)
  return [(leaf, tuple(np.shape(leaf)), guess) for leaf, guess in zip(leaves, guesses, strict=True)]


def _misfit(names: Any, shape: tuple[int, ...]) -> Problem | None:
  """What is wrong between an array's names and its rank, if anything is."""
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


def _spread(unit: Any, place: Any) -> list[NamedSharding]:
  """One sharding per array of a unit, whether the unit has one sharding or a box of them."""
  if isinstance(place, NamedSharding):
    return [place] * len(jax.tree.leaves(unit))
  return jax.tree.leaves(place, is_leaf=lambda x: isinstance(x, NamedSharding))
