"""The plan of a tree: where each of its arrays goes on a mesh under a rule table, and why.

A planner resolves each distinct (names, shape) once and remembers it, and remembers whole trees too,
so that a state of ten thousand leaves costs little more than walking it. Everything that is wrong with a tree is found here,
before anything is compiled or placed, and is raised as one error that lists every offender.

    planner = Planner(mesh, rules)
    planner.shardings(tree)    # a NamedSharding per leaf
    planner.rows(tree)         # path, shape, names, spec and decisions per array, for reports
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flax_spmd.boxes import Static
from flax_spmd.errors import Problem, raise_problems
from flax_spmd.mesh import MeshLike, axis_sizes
from flax_spmd.naming import Reading, copies, read_for_layout, unit_paths
from flax_spmd.optimizer_state import Guess
from flax_spmd.resolution import Decision, Resolution, axis_names, resolve_axes
from flax_spmd.rules import Rules

_REPLICATED = Resolution(PartitionSpec(), ())


class Row(NamedTuple):
  """One array of a tree and what was decided about it.

  Attributes:
    path: its place in the tree, `params/layers/wi`.
    shape, dtype: of the whole array.
    names: its names (None: it has none).
    logical: whether these are logical names, rather than mesh axes.
    spec: where it goes.
    decisions: one per dimension that has a name.
    bytes: of the whole array.
    bytes_per_device: of the piece that one device holds.
    guess: for optimizer state that is not shaped like its parameter, what it was taken for.
  """

  path: str
  shape: tuple[int, ...]
  dtype: Any
  names: Any
  logical: bool
  spec: PartitionSpec
  decisions: tuple[Decision, ...]
  bytes: int
  bytes_per_device: int
  guess: Guess | None


class _Placed(NamedTuple):
  """Where a tree goes: its structure with boxes as leaves, a place for each of these, and per array.

  A unit's place is its sharding, or where its arrays go different ways, a box of shardings.
  """

  treedef: Any
  by_unit: list[Any]
  by_leaf: list[NamedSharding]


_REMEMBERED_TREES = 64


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
    self._memo: dict[Any, NamedSharding] = {}
    self._trees: dict[Any, _Placed] = {}

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

  def leaf_names(self, tree: Any) -> list[Any]:
    """The names of each leaf, in the order of `jax.tree.leaves(tree)`; None for a leaf without."""
    reading = read_for_layout(tree)
    return [
      None if static is None else static.names if guess is None else guess.names
      for index, static in enumerate(reading.statics)
      for _, _, guess in _arrays(reading, index)
    ]

  def _placed(self, tree: Any) -> _Placed:
    """Where everything goes; remembered by structure (names are part of it) and shapes."""
    leaves, treedef = jax.tree.flatten(tree)
    form = treedef, tuple([getattr(leaf, 'shape', None) for leaf in leaves])
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
    reading = read_for_layout(tree)
    pairs = list(zip(reading.statics, reading.shapes, strict=True))
    for static, shape in set(pairs).difference(self._memo):
      self._learn(static, shape)
    places: list[Any] = list(map(self._memo.get, pairs))
    if reading.guesses or None in places:
      places = [
        self._unusual(reading, index) if place is None or index in reading.guesses else place
        for index, place in enumerate(places)
      ]
    if None in places:
      raise_problems(self._problems(tree, reading))
    by_leaf = places
    if None in reading.shapes:  # some units are no single array
      by_leaf = list(itertools.chain.from_iterable(map(_spread, reading.units, places)))
    return _Placed(reading.treedef, places, by_leaf)

  def rows(self, tree: Any) -> list[Row]:
    """Every array of the tree with its decisions; raises nothing."""
    reading = read_for_layout(tree)
    return [
      row for index, path in enumerate(unit_paths(tree)) for row in self._rows(reading, index, path)
    ]

  def resolve(self, static: Static | None, shape: tuple[int, ...]) -> Resolution:
    """What is decided about an array of this shape under a box's names (None: it has no box)."""
    if static is None:
      return _REPLICATED
    wrong = _misfit(static.names, shape)
    if wrong is not None:
      return Resolution(PartitionSpec(), (), (wrong,))
    return self._resolve_names(static, static.names, shape)

  def _resolve_names(self, static: Static, names: Sequence[Any], shape) -> Resolution:
    if static.logical:
      rules = self.rules if static.rules is None else static.rules
      return rules.resolve(names, shape, self.sizes)
    return resolve_axes(names, shape, self.sizes, self.rules.policies)

  def _learn(self, static: Static | None, shape: Any) -> None:
    """Remembers the place of an array of this shape under these names, if nothing is wrong with it."""
    if static is None or shape is not None:
      resolution = self.resolve(static, shape)
      if not resolution.problems:
        self._memo[static, shape] = NamedSharding(self.mesh, resolution.spec)

  def _unusual(self, reading: Reading, index: int) -> Any:
    """The place of a unit that names and shape do not decide; None if something is wrong with it."""
    if index in reading.guesses:
      return self._guessed(reading, index)
    static = reading.statics[index]
    if static is None or reading.shapes[index] is not None:
      return None
    return self._subtree(static, reading.values[index])

  def _subtree(self, static: Static, value: Any) -> NamedSharding | None:
    """A box around a tree: one spec for all of its arrays, as in Flax."""
    resolutions = [self.resolve(static, np.shape(leaf)) for leaf in jax.tree.leaves(value)]
    if any(resolution.problems for resolution in resolutions):
      return None
    return NamedSharding(self.mesh, resolutions[0].spec) if resolutions else self.replicated

  def _guessed(self, reading: Reading, index: int) -> Any:
    resolutions = [resolution for _, _, _, resolution in self._resolutions(reading, index)]
    if any(resolution.problems for resolution in resolutions):
      return None
    placed = [NamedSharding(self.mesh, resolution.spec) for resolution in resolutions]
    if len(set(placed)) <= 1:
      return placed[0] if placed else self.replicated
    return jax.tree.structure(reading.units[index]).unflatten(placed)

  def _from_guess(self, static: Static, guess: Guess, shape) -> Resolution:
    if guess.names is None:
      return _REPLICATED
    return self._resolve_names(static, guess.names, tuple(shape))

  def _resolutions(self, reading: Reading, index: int):
    """The arrays of one unit, with what is decided about each."""
    static = reading.statics[index]
    for leaf, shape, guess in _arrays(reading, index):
      if static is None or guess is None:
        yield leaf, shape, guess, self.resolve(static, shape)
      else:
        yield leaf, shape, guess, self._from_guess(static, guess, shape)

  def _rows(self, reading: Reading, index: int, path: str):
    static = reading.statics[index]
    arrays = list(self._resolutions(reading, index))
    for number, (leaf, shape, guess, resolution) in enumerate(arrays):
      dtype = getattr(leaf, 'dtype', None) or jax.dtypes.canonicalize_dtype(np.result_type(leaf))
      size = math.prod(shape) * dtype.itemsize
      yield Row(
        path if len(arrays) == 1 else f'{path}/{number}',
        shape,
        dtype,
        static and (static.names if guess is None else guess.names),
        static is not None and static.logical,
        resolution.spec,
        resolution.decisions,
        size,
        self._bytes_per_device(resolution.spec, shape, dtype),
        guess,
      )

  def _bytes_per_device(self, spec: PartitionSpec, shape, dtype) -> int:
    """Bytes of the largest piece; uneven pieces are rounded up."""
    entries = tuple(spec) + (None,) * len(shape)
    pieces = [
      -(-size // math.prod(self.sizes.get(axis, 1) for axis in axis_names(entry)))
      for size, entry in zip(shape, entries, strict=False)
    ]
    return math.prod(pieces) * dtype.itemsize

  def _problems(self, tree: Any, reading: Reading) -> list[Problem]:
    copied = copies(tree)
    return [
      problem.at(path)
      for index, path in enumerate(unit_paths(tree))
      if index not in copied
      for _, _, _, resolution in self._resolutions(reading, index)
      for problem in resolution.problems
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
