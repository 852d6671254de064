"""Which names each array of a tree has, optimizer state included.

A box's names are its value's names, as long as the two fit. Optimizers break that: they map over
parameters inside their boxes and leave there arrays of other shapes (Adafactor's factored moments,
L-BFGS's history, SM3's lists), under the parameter's names. Such a leaf is recognised by its path,
which ends like its parameter's, and takes what is certain:

    the parameter's shape             the parameter's names
    a scalar, or one element          no names: replicated
    the shape with dimensions left out or 1    the names of those that remain
    the shape with dimensions before it        None for those, then the names
    anything else, or two readings    no names: replicated, and reported

    reading = read(state)             # reading.names(i): the names of the i-th leaf or box
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
from flax.linen.partitioning import AxisMetadata as LegacyAxisMetadata
from jax.tree_util import DictKey, KeyPath

from flax_spmd.boxes import Static
from flax_spmd.trees import is_axis_metadata, static_of

Shape: TypeAlias = tuple[int, ...]
How: TypeAlias = Literal['same', 'single', 'subset', 'stacked', 'ambiguous', 'unrelated']


class Guess(NamedTuple):
  """What a leaf of optimizer state was taken for.

  `names` are its names, or None where nothing is certain; `parameter` is the path of the parameter.
  """

  names: tuple[Any, ...] | None
  how: How
  parameter: str


class Reading(NamedTuple):
  """The units of a tree (boxes, and leaves without a box) and what is known of their names.

  `guesses` holds, per index of a unit whose names do not apply as they are, one guess for each
  array in it.
  """

  units: list[Any]
  treedef: Any
  statics: list[Static | None]
  values: list[Any]
  guesses: dict[int, list[Guess]]


def read(tree: Any) -> Reading:
  """Reads the names of every unit of `tree`. Never raises: what does not fit is left to the plan."""
  units, treedef = jax.tree.flatten(tree, is_leaf=is_axis_metadata)
  statics: list[Static | None] = []
  values: list[Any] = []
  shape_of: dict[Static, Any] = {}
  odd: set[Static] = set()
  for unit in units:
    static, value = static_of(unit)
    statics.append(static)
    values.append(value)
    if static is not None:
      shape = getattr(value, 'shape', None)
      if shape_of.setdefault(static, shape) != shape or shape is None:
        odd.add(static)
  guesses = _guess_all(tree, statics, values, odd) if odd else {}
  return Reading(units, treedef, statics, values, guesses)


def read_for_layout(tree: Any) -> Reading:
  """`read`, and names from the `*_axes` collections of `flax.linen.partitioning` (T5X's older API)."""
  reading = read(tree)
  legacy = _legacy_names(tree)
  if not legacy:
    return reading
  statics = [
    static or legacy.get(path) for static, path in zip(reading.statics, unit_paths(tree), strict=True)
  ]
  return reading._replace(statics=statics)


def _legacy_names(tree: Any) -> dict[str, Static]:
  """Names by path, from collections such as `params_axes` beside `params`."""
  if not isinstance(tree, Mapping):
    return {}
  names = {}
  for collection in tree:
    of = str(collection).removesuffix('_axes')
    if of != collection and of in tree:
      found = jax.tree_util.tree_leaves_with_path(
        tree[collection], is_leaf=lambda x: isinstance(x, LegacyAxisMetadata)
      )
      for path, leaf in found:
        if isinstance(leaf, LegacyAxisMetadata) and isinstance(leaf.names, tuple):
          names[f'{of}/{path_string(path).removesuffix("_axes")}'] = Static(tuple(leaf.names), True)
  return names


def path_string(path: KeyPath) -> str:
  """`params/layers/wi` for a key path.

  Example:
    >>> path_string(jax.tree_util.tree_leaves_with_path({'params': {'w': 1}})[0][0])
    'params/w'
  """
  return '/'.join(str(_key(entry)) for entry in path) or '(root)'


def unit_paths(tree: Any) -> list[str]:
  """The path of every unit, in the order of `Reading.units`."""
  return [path_string(path) for path, _ in _with_paths(tree)]


def guess(names: Sequence[Any], full: Shape, shape: Shape, field: str, parameter: str) -> Guess:
  """What a state leaf of `shape` is to its parameter of shape `full` with these names.

  Args:
    names: the parameter's names.
    full: the parameter's shape.
    shape: the state leaf's shape.
    field: the field of the optimizer's state that holds the leaf; some say which of two equal
      dimensions they keep.
    parameter: the parameter's path, for reports.

  Example:
    >>> guess(('embed', 'mlp'), (16, 32), (32,), 'v_col', 'params/wi').names
    ('mlp',)
    >>> guess(('embed', 'mlp'), (16, 32), (8, 16, 32), 'updates_memory', 'params/wi').names
    (None, 'embed', 'mlp')
  """
  if shape == full:
    return Guess(tuple(names), 'same', parameter)
  if math.prod(shape) == 1:
    return Guess((None,) * len(shape), 'single', parameter)
  readings = set(_reshaped(tuple(names), full, shape, field))
  if len(readings) == 1:
    return Guess(*readings.pop(), parameter)
  return Guess(None, 'ambiguous' if readings else 'unrelated', parameter)


def _reshaped(
  names: tuple[Any, ...], full: Shape, shape: Shape, field: str
) -> Iterator[tuple[tuple[Any, ...], How]]:
  """The names under every way to read `shape` as a reshaped `full`."""
  if len(shape) == len(full):
    if all(size in (whole, 1) for size, whole in zip(shape, full, strict=True)):
      triples = zip(names, shape, full, strict=True)
      yield tuple(name if size == whole else None for name, size, whole in triples), 'subset'
  elif len(shape) < len(full):
    for kept in _kept_dimensions(full, shape, field):
      yield tuple(names[dim] for dim in kept), 'subset'
  elif shape[len(shape) - len(full) :] == full:
    yield (None,) * (len(shape) - len(full)) + names, 'stacked'


def _kept_dimensions(full: Shape, shape: Shape, field: str) -> list[tuple[int, ...]]:
  """The ways to get `shape` by leaving dimensions of `full` out; the field's own way if it has one."""
  ways = [
    kept
    for kept in itertools.combinations(range(len(full)), len(shape))
    if tuple(full[dim] for dim in kept) == shape
  ]
  own = _OWN_WAY.get(field)
  if own is not None and len(ways) > 1 and own(full) in ways:
    return [own(full)]
  return ways


def _without_largest(rank_from_largest: int) -> Callable[[Shape], tuple[int, ...]]:
  """Adafactor factors the two largest dimensions: rows lose the largest, columns the second.

  Source: `optax.scale_by_factored_rms` (`_factored_dims`), after arXiv:1804.04235, section 4.
  """

  def kept(full: Shape) -> tuple[int, ...]:
    by_size = sorted(range(len(full)), key=lambda dim: full[dim])
    return tuple(dim for dim in range(len(full)) if dim != by_size[-1 - rank_from_largest])

  return kept


_OWN_WAY = {'v_row': _without_largest(0), 'v_col': _without_largest(1)}


class _Place(NamedTuple):
  """Where a unit stands: what comes before its path in the parameter tree, and that path."""

  prefix: KeyPath
  inside: tuple[Any, ...]


def copies(tree: Any) -> dict[int, int]:
  """Units that are only a parameter once more (moments in optimizer state), and that parameter.

  Whatever is wrong with a parameter's names is wrong with its copies too, and is said once.
  """
  paths = [path for path, _ in _with_paths(tree)]
  reading = read(tree)
  places = {i: _place(paths[i]) for i, static in enumerate(reading.statics) if static is not None}
  owners = _owners(reading.statics, places)
  return {
    i: owner
    for i, owner in owners.items()
    if owner != i and _shape(reading.values[i]) == _shape(reading.values[owner])
  }


def _guess_all(tree, statics, values, odd) -> dict[int, list[Guess]]:
  """Guesses for the units under odd names (names that values of several shapes share)."""
  paths = [path for path, _ in _with_paths(tree)]
  places = {i: _place(paths[i]) for i, static in enumerate(statics) if static in odd}
  guesses = {}
  for i, owner in _owners(statics, places).items():
    full, names = _shape(values[owner]), statics[i].names
    if owner != i and full is not None and len(full) == len(names) and _shape(values[i]) != full:
      field, parameter = _field(places[i]), path_string(paths[owner])
      guesses[i] = [
        guess(names, full, tuple(getattr(leaf, 'shape', ())), field, parameter)
        for leaf in jax.tree.leaves(values[i])
      ]
  return guesses


def _owners(statics, places: dict[int, _Place]) -> dict[int, int]:
  """For each unit, the parameter that it belongs to: itself, or the one whose path its own repeats."""
  parameters: dict[tuple[Static, tuple[Any, ...]], int] = {}
  for i in sorted(places, key=lambda i: len(places[i].prefix)):
    for inside in _spellings(places[i].inside):
      parameters.setdefault((statics[i], inside), i)
  owners = {}
  for i, place in places.items():
    owner = next(parameters[statics[i], inside] for inside in _spellings(place.inside))
    owners[i] = owner if len(places[owner].prefix) < len(place.prefix) else i
  return owners


def _shape(value: Any) -> Any:
  return getattr(value, 'shape', None)


def _field(place: _Place) -> str:
  """The innermost field of the optimizer's state around a unit: `v_row`."""
  return next((str(key.name) for key in reversed(place.prefix) if hasattr(key, 'name')), '')


def _place(path: KeyPath) -> _Place:
  """Splits a path after its last key that is no dictionary key: optimizers keep the parameters'
  dictionaries as they are, below fields and positions of their own.
  """
  start = next((i + 1 for i in reversed(range(len(path))) if not isinstance(path[i], DictKey)), 0)
  return _Place(path[:start], tuple(_key(entry) for entry in path[start:]))


def _spellings(inside: tuple[Any, ...]) -> list[tuple[Any, ...]]:
  """A parameter's path with and without the collection in front of it."""
  return [inside, inside[1:]] if len(inside) > 1 and inside[0] == 'params' else [inside]


def _with_paths(tree):
  return jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_axis_metadata)[0]


def _key(entry: Any) -> Any:
  for attribute in ('key', 'name', 'idx'):
    if hasattr(entry, attribute):
      return getattr(entry, attribute)
  return entry
