"""Which names each array of a tree has, optimizer state included.

A box's names are its value's names, as long as the two fit. Where an optimizer left arrays of other
shapes under its parameters' names, `flax_spmd.optimizer_state` says what they are.

    reading = read(state)
    reading.statics   # per box or bare leaf: its names, or None
    reading.guesses   # per index: what the arrays under it were taken for
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax.linen.partitioning import AxisMetadata as LegacyAxisMetadata
from jax.tree_util import GetAttrKey, KeyPath

from flax_spmd._src.names.box_trees import is_axis_metadata, statics_of
from flax_spmd._src.names.boxes import Static
from flax_spmd._src.names.optimizer_state import (
  Guess,
  Unit,
  field_of,
  guess,
  guess_alone,
  inside_optax,
  owners,
)
from flax_spmd._src.names.unit_paths import unit_places
from flax_spmd._src.tree_paths import path_string


class Reading(NamedTuple):
  """The units of a tree (boxes, and leaves without a box) and what is known of their names.

  Per unit: its names, its value, and the value's shape (a tuple; None: it is no array). `guesses` holds, per
  index of a unit whose names do not apply as they are, one guess for each array in it.
  """

  units: list[Any]
  treedef: Any
  statics: list[Static | None]
  values: list[Any]
  shapes: list[Any]
  guesses: dict[int, list[Guess]]


def read(tree: Any) -> Reading:
  """Reads the names of every unit of `tree`. Never raises: what does not fit is left to the plan."""
  units, treedef = jax.tree.flatten(tree, is_leaf=is_axis_metadata)
  statics, values = statics_of(units)
  shapes = [getattr(value, 'shape', None) for value in values]
  odd = _odd(set(zip(statics, shapes, strict=True)))
  guesses = _guess_all(tree, statics, values, odd) if odd else {}
  return Reading(units, treedef, statics, values, shapes, guesses)


def _odd(found: set[tuple[Static | None, Any]]) -> set[Static]:
  """The names that values of several shapes share, or whose number is not a value's rank."""
  once: set[Static] = set()
  odd: set[Static] = set()
  for static, shape in found:
    if static is not None:
      if static in once or shape is None or len(shape) != len(static.names):
        odd.add(static)
      once.add(static)
  return odd


def read_for_layout(tree: Any) -> Reading:
  """`read`, and names from the `*_axes` collections of `flax.linen.partitioning` (T5X's older API)."""
  reading = read(tree)
  legacy = _legacy_names(tree)
  if not legacy:
    return reading
  statics = [
    static or legacy.get(path)
    for static, path in zip(reading.statics, unit_places(tree).paths, strict=True)
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


def copies(tree: Any) -> dict[int, int]:
  """Units that are only a parameter once more (moments in optimizer state), and that parameter.

  Whatever is wrong with a parameter is wrong with its copies too, and is said once.
  """
  units = _all_units(tree, read(tree))
  return {i: owner for i, owner in owners(units).items() if units[i].shape == units[owner].shape}


def parameters_of(
  tree: Any, reading: Reading, is_state: Sequence[bool], routes: Sequence[Any]
) -> dict[int, tuple[int, str]]:
  """Optimizer state that path rules reach and that is not shaped like its parameter.

  Args:
    tree: any tree.
    reading: what `read_for_layout` says of it.
    is_state: per unit, whether it is below a field (`Places.below_a_field`).
    routes: per unit, which path rule reaches it (None: none does).

  Returns:
    Per index of such a unit, its parameter's index, and the field of the optimizer that holds it.
  """
  if not any(state and _names_a_spec(route) for state, route in set(zip(is_state, routes, strict=True))):
    return {}
  keys = [path for path, _ in _with_paths(tree)]
  by_tail = {
    path[first:]: i
    for i, (path, state) in enumerate(zip(keys, is_state, strict=True))
    if not state
    for first in (2, 1, 0)
  }
  odd = [
    i
    for i, (path, state) in enumerate(zip(keys, is_state, strict=True))
    if state and _names_a_spec(routes[i]) and not _has_the_shape(reading, i, by_tail.get(_tail(path)))
  ]
  if not odd:
    return {}
  units = _all_units(tree, reading)
  owned = owners(units)
  return {
    i: (owned[i], field_of(units[i].path))
    for i in odd
    if i in owned and units[i].shape != units[owned[i]].shape
  }


def _tail(path: KeyPath) -> KeyPath:
  """What of a state's path repeats its parameter's: all after the optimizer's last field."""
  last = max(i for i, entry in enumerate(path) if type(entry) is GetAttrKey)
  return path[last + 1 :]


def _has_the_shape(reading: Reading, index: int, parameter: int | None) -> bool:
  """Whether an array surely is what a path rule means: one element, or shaped as its parameter."""
  shape = reading.shapes[index]
  if not shape or math.prod(shape) <= 1:
    return True
  return parameter is not None and reading.shapes[parameter] == shape


def _names_a_spec(route: Any) -> bool:
  """Whether a route ends at a rule with a spec, in whatever table within the table."""
  return isinstance(route[-1] if isinstance(route, tuple) else route, int)


def _all_units(tree: Any, reading: Reading) -> dict[int, Unit]:
  """Every unit that is one array, with names or without."""
  described = zip(_with_paths(tree), reading.statics, reading.shapes, strict=True)
  return {
    i: Unit(path, static, shape, fits=True)
    for i, ((path, _), static, shape) in enumerate(described)
    if shape is not None
  }


def _guess_all(tree, statics, values, odd) -> dict[int, list[Guess]]:
  """Guesses for the units under odd names: values of several shapes share them, or they do not fit."""
  units = {i: unit for i, unit in _units(tree, statics, values).items() if statics[i] in odd}
  owned = owners(units)
  guesses = {}
  for i, unit in units.items():
    arrays = [tuple(getattr(leaf, 'shape', ())) for leaf in jax.tree.leaves(values[i])]
    if i in owned and unit.shape != units[owned[i]].shape:
      owner = units[owned[i]]
      field, parameter = field_of(unit.path), path_string(owner.path)
      guesses[i] = [guess(statics[i].names, owner.shape, shape, field, parameter) for shape in arrays]
    elif i not in owned and _says_little(unit) and inside_optax(tree, unit.path):
      guesses[i] = [guess_alone(shape) for shape in arrays]
  return guesses


def _says_little(unit: Unit) -> bool:
  """Whether a unit's shape alone shows that its names are not its own."""
  return not unit.fits or unit.shape is None or math.prod(unit.shape) == 1


def _units(tree, statics, values) -> dict[int, Unit]:
  """The units that have names, as `owners` takes them."""
  units = {}
  for i, (path, _) in enumerate(_with_paths(tree)):
    if statics[i] is not None:
      shape, names = getattr(values[i], 'shape', None), statics[i].names
      fits = shape is not None and not isinstance(names, str) and len(names) == len(shape)
      units[i] = Unit(path, statics[i], shape, fits)
  return units


def _with_paths(tree):
  return jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_axis_metadata)[0]
