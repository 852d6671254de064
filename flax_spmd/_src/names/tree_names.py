"""Tree names: the axis names of every array of a tree, optimizer state included.

    names = TreeNames(state)
    names.paths      # per box or bare leaf: params/layers/wi
    names.statics    # per box or bare leaf: its names, or None
    names.inferred   # by index: names inferred for optimizer state

Names have carriers: the box around an array, a variable of NNX (`flax_spmd._src.names.nnx_variables`), or a collection
beside the array (`flax_spmd._src.names.axes_collections`). The
reader of a tree's names asks every carrier, and nothing above it distinguishes them.

An array's names are those of its dimensions, in order; the dimensions after the last name have none. Optimizers also
leave arrays of other shapes in their parameters' boxes; `flax_spmd._src.names.optimizer_state` infers the names of
these.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax.linen.partitioning import AxisMetadata
from jax.tree_util import GetAttrKey, KeyPath

from flax_spmd._src import compat
from flax_spmd._src.cycles import check_no_cycles
from flax_spmd._src.names.axes_collections import GivenNames, read_collections
from flax_spmd._src.names.box_trees import is_unit, is_unit_type, statics_of
from flax_spmd._src.names.boxes import Static
from flax_spmd._src.names.nnx_variables import attributes_as_keys, has_keyed_nodes
from flax_spmd._src.names.optimizer_state import (
  Inference,
  Shape,
  Unit,
  are_optimizer_state,
  field_of,
  find_bare_states,
  find_parameters,
  infer,
  infer_without_parameter,
)
from flax_spmd._src.names.unit_paths import UnitPaths
from flax_spmd._src.rules.decisions import padded
from flax_spmd._src.text import plural, value_text
from flax_spmd._src.tree_paths import path_string
from flax_spmd.errors import Problem

_OPTIMIZER_KEYS = {'opt_state', 'param_states'}  # of Flax's TrainState, and of T5X's


class TreeNames:
  """The names in one tree, read once.

  A *unit* is a box, a variable, or a leaf outside of these. Each list has one entry per unit, in tree order; each
  dictionary is keyed by the unit's index. Properties are computed on first use. Reading raises nothing but
  for a module that contains itself: the planner reports names that do not fit.

  Args:
    tree: any tree, concrete or abstract.

  Attributes:
    tree: the tree; the attributes of NNX modules are keys.
    units: its boxes, variables and bare leaves.
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
    kinds: set[type] = set()

    def is_seen_unit(node: Any) -> bool:
      kind = type(node)
      kinds.add(kind)
      return is_unit_type(kind)

    check_no_cycles(tree)
    self.units, self.treedef = jax.tree.flatten(tree, is_leaf=is_seen_unit)
    if has_keyed_nodes(kinds):
      self.tree = attributes_as_keys(tree)
    self._has_collections = AxisMetadata in kinds
    self.box_statics, self.values = statics_of(self.units)
    self.shapes: list[Any] = [getattr(value, 'shape', None) for value in self.values]

  @functools.cached_property
  def statics(self) -> list[Static | None]:
    """Per unit, the names that a carrier gives it; for optimizer state without any, those of its parameter."""
    statics = list(self.box_statics)
    for index, given in self._given.items():
      statics[index] = statics[index] or given[0].static
    if None in statics and any(statics):
      for index, parameter in self._bare_states(statics).items():
        statics[index] = statics[parameter]
    return statics

  @functools.cached_property
  def conflicts(self) -> list[Problem]:
    """The problem of every array that its carriers name differently."""
    found = []
    for index, given in sorted(self._given.items()):
      static = self.box_statics[index]
      boxed = [] if static is None else [GivenNames(static, 'its box')]
      named = {each.static: each for each in reversed([*boxed, *given])}
      if len(named) > 1:
        texts = [f'{each.origin} has {each.static.names!r}' for each in reversed(named.values())]
        problem = Problem(
          f'its names differ: {", ".join(texts)}.', 'name the array once, or alike everywhere.'
        )
        found.append(problem.at(self.paths[index]))
    return [*found, *self._lost_names()]

  def _lost_names(self) -> Iterator[Problem]:
    """The problem of every stacked array in a box of `nnx.bridge`, which loses the dimension that `nn.scan` adds."""
    for index, unit in enumerate(self.units):
      static, shape = self.box_statics[index], self.shapes[index] or ()
      if static is None or not compat.is_bridge_box_type(type(unit)) or self.optimizer[index]:
        continue
      if len(static.names) < len(shape):
        problem = Problem(
          f'{plural(len(static.names), "name")} {value_text(static.names)} for an array of rank {len(shape)}, in a box of nnx.bridge, '
          'which does not name the dimension that nn.scan or nn.vmap adds.',
          'create the variable with nnx.with_partitioning(init, names, '
          'linen_meta_type=flax_spmd.LogicallyPartitioned), whose box does.',
        )
        yield problem.at(self.paths[index])

  @property
  def paths(self) -> list[str]:
    """The path of each unit: `params/layers/wi`."""
    return self._unit_paths.paths

  @property
  def fields(self) -> list[str | None]:
    """The path of the field that holds each unit, such as `opt_state/0/mu`; None for other units."""
    return self._unit_paths.fields

  @functools.cached_property
  def optimizer(self) -> list[bool]:
    """Whether each unit is optimizer state: part of an Optax state, or below one of the usual keys for it."""
    below = (not _OPTIMIZER_KEYS.isdisjoint(path.split('/')) for path in self.paths)
    return [a or b for a, b in zip(self.of_optax, below, strict=True)]

  @functools.cached_property
  def parts(self) -> list[str]:
    """The part of a state that each unit belongs to: 'params', 'opt_state', or '' for the rest.

    Parameters are below a key `params`, or in an `nnx.Param`. Of a tree with neither, they are all arrays of real or
    complex numbers outside of optimizer state.
    """
    marked = [
      'params' in path.split('/') or compat.is_parameter_type(type(unit))
      for path, unit in zip(self.paths, self.units, strict=True)
    ]
    apart = self.optimizer
    if not any(one and not other for one, other in zip(marked, apart, strict=True)):
      marked = [_is_inexact(value) for value in self.values]
    return [
      'opt_state' if other else 'params' if one else '' for one, other in zip(marked, apart, strict=True)
    ]

  @functools.cached_property
  def of_optax(self) -> list[bool]:
    """Whether each unit is part of an Optax state."""
    return are_optimizer_state(self.tree, is_unit)

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
    units = self._array_units(self.statics)
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
    return [path for path, _ in jax.tree_util.tree_flatten_with_path(self.tree, is_leaf=is_unit)[0]]

  @functools.cached_property
  def _given(self) -> dict[int, list[GivenNames]]:
    """The names from collections beside the arrays."""
    return read_collections(self.tree, self._key_paths) if self._has_collections else {}

  def _bare_states(self, statics: Sequence[Static | None]) -> dict[int, int]:
    """The parameter of every array without names that repeats the path of one with names."""
    bare = [
      i
      for i, (static, shape) in enumerate(zip(statics, self.shapes, strict=True))
      if static is None and shape is not None and math.prod(shape) > 1
    ]
    if bare and not self._given:  # names are in boxes
      bare = self._repeating_boxes(bare)
    return find_bare_states(self._array_units(statics), set(bare)) if bare else {}

  def _repeating_boxes(self, bare: Sequence[int]) -> list[int]:
    """The units below a field whose path repeats that of a box: a quick test, without JAX's key paths."""
    fields, paths = self.fields, self.paths
    below = [i for i in bare if fields[i] is not None]
    if not below:
      return []
    boxed = [path for path, static in zip(paths, self.box_statics, strict=True) if static is not None]
    last = {path.rpartition('/')[2] for path in boxed}
    below = [i for i in below if not last.isdisjoint(paths[i].rsplit('/', 2)[-2:])]
    tails = _possible_tails(boxed) if below else set()
    return [i for i in below if _repeats(paths[i], tails)]

  def _below(self, index: int) -> int | None:
    given = self._given.get(index)
    return given[0].below if given else None

  def _doubtful_statics(self) -> set[Static]:
    """The names that arrays of several shapes share, or whose number differs from an array's rank."""
    seen: set[Static] = set()
    doubtful: set[Static] = set()
    for static, shape in set(zip(self.statics, self.shapes, strict=True)):
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
      of = parameter_of.get(i)
      if of is None or (not units[of].fits and self.of_optax[of]):
        if _is_misnamed(unit) and self.of_optax[i]:
          inferred[i] = [infer_without_parameter(shape) for shape in shapes]
        continue
      parameter = units[of]
      if unit.shape != parameter.shape:
        names, field, path = unit.static.names, field_of(unit.path), path_string(parameter.path)
        inferred[i] = [infer(names, parameter.shape, shape, field, path) for shape in shapes]
    return inferred

  def _units_named(self, statics: set[Static]) -> dict[int, Unit]:
    """The units with one of these names."""
    units = {}
    for i, (path, static) in enumerate(zip(self._key_paths, self.statics, strict=True)):
      if static is not None and static in statics:
        units[i] = Unit(path, static, self.shapes[i], _unnamed(static, self.shapes[i]), self._below(i))
    return units

  def _array_units(self, statics: Sequence[Static | None]) -> dict[int, Unit]:
    """The units that are a single array, named or not, and the boxes around several arrays."""
    described = zip(self._key_paths, statics, self.shapes, strict=True)
    return {
      i: Unit(path, static, shape, None if shape is None else 0, self._below(i))
      for i, (path, static, shape) in enumerate(described)
      if shape is not None or static is not None
    }

  def _without_parameters_shape(self, candidates: Sequence[int]) -> list[int]:
    """The candidates whose shape may differ from their parameter's: a quick test that ignores names."""
    if not candidates:
      return []
    by_tail = {
      path[first:]: i
      for i, (path, field) in enumerate(zip(self._key_paths, self.fields, strict=True))
      if field is None
      for first in (2, 1, 0)
    }
    return [i for i in candidates if not self._is_shaped_as(i, by_tail.get(_tail(self._key_paths[i])))]

  def _is_shaped_as(self, index: int, parameter: int | None) -> bool:
    """Whether a unit is an array with one element, or with the shape of the parameter."""
    shape = self.shapes[index]
    if shape is None:
      return self.statics[index] is None
    if math.prod(shape) == 1:
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
    else names_of(static, shape)
    if inference is None
    else inference.names
    for index, static in enumerate(names.statics)
    for _, shape, inference in names.arrays(index)
  ]


def leaf_parts(tree: Any) -> list[str]:
  """The part of a state that each leaf belongs to, in the order of `jax.tree.leaves(tree)`; see `TreeNames.parts`."""
  names = TreeNames(tree)
  return [
    part for part, value in zip(names.parts, names.values, strict=True) for _ in jax.tree.leaves(value)
  ]


def names_of(static: Static, shape: Shape) -> Any:
  """The names of an array, one per dimension; a bare string, which the planner reports, stays."""
  return static.names if isinstance(static.names, str) else padded(static.names, len(shape))


def _is_inexact(value: Any) -> bool:
  """Whether all arrays of a value are of real or complex numbers."""
  dtypes = [getattr(leaf, 'dtype', None) for leaf in jax.tree.leaves(value)]
  return all(dtype is not None and jax.dtypes.issubdtype(dtype, np.inexact) for dtype in dtypes)


def _tail(path: KeyPath) -> KeyPath:
  """The end of a state's path that repeats its parameter's: everything below the last field."""
  last = max(i for i, entry in enumerate(path) if type(entry) is GetAttrKey)
  return path[last + 1 :]


def _possible_tails(paths: Sequence[str]) -> set[str]:
  """The ends of the paths of parameters that their state may repeat: all keys, and all but the root, or below `params`."""
  below_root = [path.partition('/')[2] for path in paths]
  below_params = {path.removeprefix('params/') for path in below_root}
  return {*paths, *below_root, *below_params}


def _repeats(path: str, tails: set[str]) -> bool:
  """Whether the path of a unit below a field, or of the list that holds it, may end with one of certain paths."""
  keys = path.split('/')
  ends = ['/'.join(keys[first:]) for first in range(1, len(keys))]
  return any(end in tails or end.rpartition('/')[0] in tails for end in ends)


def _unnamed(static: Static, shape: Shape | None) -> int | None:
  """The number of dimensions of an array for which it has no name; see `Unit`."""
  return None if shape is None or isinstance(static.names, str) else len(shape) - len(static.names)


def _is_misnamed(unit: Unit) -> bool:
  """Whether a unit's shape alone shows that its names are another array's."""
  return not unit.fits or unit.shape is None or math.prod(unit.shape) == 1
