"""Tree names: the axis names of every array of a tree, optimizer state included.

    names = TreeNames(state)
    names.paths      # per box or bare leaf: params/layers/wi
    names.statics    # per box or bare leaf: its names, or None
    names.inferred   # by index: names inferred for optimizer state

A box's names are its array's names if there is one per dimension. Optimizers also leave arrays of other
shapes in their parameters' boxes; `flax_spmd._src.names.optimizer_state` infers the names of these.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax.linen.partitioning import AxisMetadata as LegacyAxisMetadata
from jax.tree_util import GetAttrKey, KeyPath

from flax_spmd._src.names.box_trees import is_axis_metadata, statics_of
from flax_spmd._src.names.boxes import Static
from flax_spmd._src.names.optimizer_state import (
  Inference,
  Shape,
  Unit,
  field_of,
  find_parameters,
  infer,
  infer_without_parameter,
  inside_optax,
)
from flax_spmd._src.names.unit_paths import UnitPaths
from flax_spmd._src.tree_paths import path_string


class TreeNames:
  """The names in one tree, read once.

  A *unit* is a box, or a leaf outside of any box. Each list has one entry per unit, in tree order; each
  dictionary is keyed by the unit's index. Properties are computed on first use. Reading raises nothing:
  the planner reports names that do not fit.

  Args:
    tree: any tree, concrete or abstract.

  Attributes:
    tree: the tree.
    units: its boxes and bare leaves.
    treedef: its structure, with units as leaves.
    box_statics: the static part of each box; None for a bare leaf.
    values: the value of each box; a bare leaf itself.
    shapes: shape of each value; None if the value is not a single array.

  Example:
    >>> w = LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'mlp'))
    >>> names = TreeNames({'params': {'w': w, 'b': jnp.ones(16)}})
    >>> names.paths, names.statics
    (['params/b', 'params/w'], [None, ('embed', 'mlp')])
  """

  def __init__(self, tree: Any):
    self.tree = tree
    self.units, self.treedef = jax.tree.flatten(tree, is_leaf=is_axis_metadata)
    self.box_statics, self.values = statics_of(self.units)
    self.shapes: list[Any] = [getattr(value, 'shape', None) for value in self.values]

  @functools.cached_property
  def statics(self) -> list[Static | None]:
    """Per unit, its box's names; else its names in a `*_axes` collection of `flax.linen.partitioning`."""
    legacy = _legacy_names(self.tree)
    if not legacy:
      return self.box_statics
    named = zip(self.box_statics, self.paths, strict=True)
    return [static or legacy.get(path) for static, path in named]

  @property
  def paths(self) -> list[str]:
    """The path of each unit: `params/layers/wi`."""
    return self._unit_paths.paths

  @property
  def below_a_field(self) -> list[bool]:
    """Whether each unit is below a field, as optimizer state is."""
    return self._unit_paths.below_a_field

  @functools.cached_property
  def dtypes(self) -> list[Any]:
    """The dtype of each value; None if it has none."""
    return [getattr(value, 'dtype', None) for value in self.values]

  @functools.cached_property
  def inferred(self) -> dict[int, list[Inference]]:
    """The names inferred for each array of a unit whose own names do not apply to it."""
    doubtful = self._doubtful_statics()
    return self._infer(doubtful) if doubtful else {}

  @functools.cached_property
  def copies(self) -> dict[int, int]:
    """The parameter of every unit that repeats its shape and names, such as an optimizer's moments.

    A problem of a parameter is a problem of its copies too, and is reported once.
    """
    units = self._array_units(self.box_statics)
    return {
      i: parameter
      for i, parameter in find_parameters(units).items()
      if units[i].shape == units[parameter].shape
    }

  def reshaped_states(self, candidates: Sequence[int]) -> dict[int, tuple[int, str]]:
    """Finds optimizer state whose shape differs from its parameter's.

    Args:
      candidates: indices of units below a field.

    Returns:
      By index of such a unit, the index of its parameter and the optimizer's field that holds it.
    """
    doubtful = self._without_parameters_shape(candidates)
    if not doubtful:
      return {}
    units = self._array_units(self.statics)
    parameter_of = find_parameters(units)
    return {
      i: (parameter_of[i], field_of(units[i].path))
      for i in doubtful
      if i in parameter_of and units[i].shape != units[parameter_of[i]].shape
    }

  def arrays(self, index: int) -> list[tuple[Any, Shape, Inference | None]]:
    """The arrays of one unit, each with its shape and the inference of its names, if any."""
    value = self.values[index]
    leaves = [value] if hasattr(value, 'shape') else jax.tree.leaves(value)
    inferred = self.inferred.get(index) or [None] * len(leaves)
    return [(leaf, tuple(np.shape(leaf)), each) for leaf, each in zip(leaves, inferred, strict=True)]

  @functools.cached_property
  def _unit_paths(self) -> UnitPaths:
    return UnitPaths(self.tree)

  @functools.cached_property
  def _key_paths(self) -> list[KeyPath]:
    """JAX's key path of each unit; slower than `paths`, and needed only to look for parameters."""
    return [
      path for path, _ in jax.tree_util.tree_flatten_with_path(self.tree, is_leaf=is_axis_metadata)[0]
    ]

  def _doubtful_statics(self) -> set[Static]:
    """The names that arrays of several shapes share, or whose number differs from an array's rank."""
    seen: set[Static] = set()
    doubtful: set[Static] = set()
    for static, shape in set(zip(self.box_statics, self.shapes, strict=True)):
      if static is not None:
        if static in seen or shape is None or len(shape) != len(static.names):
          doubtful.add(static)
        seen.add(static)
    return doubtful

  def _infer(self, doubtful: set[Static]) -> dict[int, list[Inference]]:
    """Infers the names of optimizer state among the units with doubtful names."""
    units = self._units_named(doubtful)
    parameter_of = find_parameters(units)
    inferred = {}
    for i, unit in units.items():
      shapes = [tuple(getattr(leaf, 'shape', ())) for leaf in jax.tree.leaves(self.values[i])]
      if i not in parameter_of:
        if _is_misnamed(unit) and inside_optax(self.tree, unit.path):
          inferred[i] = [infer_without_parameter(shape) for shape in shapes]
        continue
      parameter = units[parameter_of[i]]
      if unit.shape != parameter.shape:
        names, field, path = unit.static.names, field_of(unit.path), path_string(parameter.path)
        inferred[i] = [infer(names, parameter.shape, shape, field, path) for shape in shapes]
    return inferred

  def _units_named(self, statics: set[Static]) -> dict[int, Unit]:
    """The boxes with one of these names."""
    units = {}
    for i, (path, static) in enumerate(zip(self._key_paths, self.box_statics, strict=True)):
      if static is not None and static in statics:
        shape, names = self.shapes[i], static.names
        fits = shape is not None and not isinstance(names, str) and len(names) == len(shape)
        units[i] = Unit(path, static, shape, fits)
    return units

  def _array_units(self, statics: Sequence[Static | None]) -> dict[int, Unit]:
    """The units that are a single array, named or not."""
    described = zip(self._key_paths, statics, self.shapes, strict=True)
    return {
      i: Unit(path, static, shape, fits=True)
      for i, (path, static, shape) in enumerate(described)
      if shape is not None
    }

  def _without_parameters_shape(self, candidates: Sequence[int]) -> list[int]:
    """The candidates whose shape may differ from their parameter's: a quick test that ignores names."""
    if not candidates:
      return []
    by_tail = {
      path[first:]: i
      for i, (path, below) in enumerate(zip(self._key_paths, self.below_a_field, strict=True))
      if not below
      for first in (2, 1, 0)
    }
    return [i for i in candidates if not self._is_shaped_as(i, by_tail.get(_tail(self._key_paths[i])))]

  def _is_shaped_as(self, index: int, parameter: int | None) -> bool:
    """Whether an array has one element, or the shape of the parameter."""
    shape = self.shapes[index]
    if not shape or math.prod(shape) <= 1:
      return True
    return parameter is not None and self.shapes[parameter] == shape


def leaf_names(tree: Any, *, logical_only: bool = False) -> list[Any]:
  """The names of each leaf, in the order of `jax.tree.leaves(tree)`; None for a leaf without names.

  Args:
    tree: any tree.
    logical_only: whether names of mesh axes are left out.
  """
  names = TreeNames(tree)
  return [
    None
    if static is None or (logical_only and not static.logical)
    else static.names
    if inference is None
    else inference.names
    for index, static in enumerate(names.statics)
    for _, _, inference in names.arrays(index)
  ]


def _legacy_names(tree: Any) -> dict[str, Static]:
  """Names by path, from collections such as `params_axes` beside `params` (T5X's older API)."""
  if not isinstance(tree, Mapping):
    return {}
  names = {}
  for key in tree:
    collection = str(key).removesuffix('_axes')
    if collection != key and collection in tree:
      flat = jax.tree_util.tree_leaves_with_path(
        tree[key], is_leaf=lambda x: isinstance(x, LegacyAxisMetadata)
      )
      for path, leaf in flat:
        if isinstance(leaf, LegacyAxisMetadata) and isinstance(leaf.names, tuple):
          named = f'{collection}/{path_string(path).removesuffix("_axes")}'
          names[named] = Static(tuple(leaf.names), True)
  return names


def _tail(path: KeyPath) -> KeyPath:
  """The end of a state's path that repeats its parameter's: everything below the last field."""
  last = max(i for i, entry in enumerate(path) if type(entry) is GetAttrKey)
  return path[last + 1 :]


def _is_misnamed(unit: Unit) -> bool:
  """Whether a unit's shape alone shows that its names are another array's."""
  return not unit.fits or unit.shape is None or math.prod(unit.shape) == 1
