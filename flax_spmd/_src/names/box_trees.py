"""Box trees: functions that find, open and change the boxes in a tree.

    unbox(state)                  # the values without their boxes
    replace_boxed(state, values)  # the same boxes around other values

They treat Flax's boxes, and `AxisMetadata` of other libraries, like ours. A model annotated with Flax's own
functions therefore works everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from flax.core import meta

from flax_spmd._src import compat
from flax_spmd._src.cycles import LEAVES, check_no_cycles
from flax_spmd._src.names.boxes import AxisMetadata, LogicallyPartitioned, Partitioned, Static
from flax_spmd._src.names.flax_boxes import as_own_box
from flax_spmd._src.names.nnx_variables import (
  attributes_as_keys,
  has_modules,
  rebuilt_modules,
  static_of_metadata,
  static_of_variable,
)
from flax_spmd._src.public import public


@public('flax_spmd')
def is_axis_metadata(val: Any) -> bool:
  """Whether `val` is a box: ours, Flax's, or another library's `AxisMetadata`.

  Example:
    >>> is_axis_metadata(Partitioned(1.0, ('data',))), is_axis_metadata(nn.Partitioned(1.0, ('data',)))
    (True, True)
    >>> is_axis_metadata(1.0)
    False
  """
  return is_box_type(type(val))


@functools.cache
def is_box_type(cls: type) -> bool:
  """Cached: this is called for every node of every tree, and abstract base classes are slow."""
  return issubclass(cls, AxisMetadata)


@functools.cache
def is_unit_type(cls: type) -> bool:
  """Whether an instance of a class carries names around an array: a box, or a variable of NNX."""
  return is_box_type(cls) or compat.is_variable_type(cls)


def is_unit(node: Any) -> bool:
  """Whether a node carries names around an array; see `is_unit_type`."""
  return is_unit_type(type(node))


@public('flax_spmd')
def map_axis_meta(fn: Callable[[AxisMetadata[Any]], Any], tree: Any) -> Any:
  """Applies a function to every box of a tree; other leaves stay.

  Example:
    >>> tree = {'w': Partitioned(1.0, ('data',)), 'b': 2.0}
    >>> map_axis_meta(lambda box: box.names, tree)
    {'b': 2.0, 'w': ('data',)}
  """
  check_no_cycles(tree)
  return meta.map_axis_meta(fn, tree)


@public('flax_spmd')
def add_axis(tree: Any, index: int, params: Mapping[Any, Any]) -> Any:
  """Adds an axis to every box of a tree, as `nn.scan` and `nn.vmap` do.

  Example:
    >>> tree = {'w': LogicallyPartitioned(jnp.ones((3, 8)), ('embed',))}  # three layers, stacked
    >>> add_axis(tree, 0, {nn.PARTITION_NAME: 'layers'})['w'].names
    ('layers', 'embed')
  """
  return map_axis_meta(lambda box: box.add_axis(index, dict(params)), tree)


@public('flax_spmd')
def remove_axis(tree: Any, index: int, params: Mapping[Any, Any]) -> Any:
  """Removes an axis from every box of a tree, as `nn.scan` and `nn.vmap` do.

  Example:
    >>> tree = {'w': LogicallyPartitioned(jnp.ones(8), ('layers', 'embed'))}  # one layer of a stack
    >>> remove_axis(tree, 0, {nn.PARTITION_NAME: 'layers'})['w'].names
    ('embed',)
  """
  return map_axis_meta(lambda box: box.remove_axis(index, dict(params)), tree)


@public('flax_spmd')
def unbox(tree: Any, apply_constraint: bool = True) -> Any:
  """The tree without its boxes.

  Args:
    tree: any tree, concrete or abstract; nested boxes are opened too.
    apply_constraint: whether traced values get the sharding constraint of their names.

  Example:
    >>> unbox({'w': Partitioned(1.0, ('data',))})
    {'w': 1.0}
  """

  check_no_cycles(tree)
  return _unboxed(tree, apply_constraint)


def _unboxed(tree: Any, apply_constraint: bool) -> Any:
  """A tree that does not contain itself, without its boxes."""

  def open_box(box):
    own_box = None if compat.is_bridge_box_type(type(box)) else as_own_box(box)
    inner = box.unbox() if own_box is None else own_box.unbox(apply_constraint)
    return inner if type(inner) in LEAVES else _unboxed(inner, apply_constraint)

  return meta.map_axis_meta(open_box, tree)


@public('flax_spmd')
def replace_boxed(tree: Any, updates: Any) -> Any:
  """The tree with the values of its boxes replaced.

  Args:
    tree: a tree with boxes.
    updates: a tree of the same structure without boxes.

  Example:
    >>> replace_boxed({'w': Partitioned(1.0, ('data',))}, {'w': 2.0})
    {'w': Partitioned(2.0, names=('data',))}
  """
  check_no_cycles(tree)
  return meta.replace_boxed(tree, updates)


def plain(tree: Any) -> Any:
  """The tree without boxes and variables, and with the attributes of NNX modules as keys; for paths and shapes.

  A model has the same paths as a module, as its `nnx.state`, and as a pure dictionary.
  """
  check_no_cycles(tree)
  units, treedef = jax.tree.flatten(attributes_as_keys(tree), is_leaf=is_unit)
  return jax.tree.unflatten(treedef, [static_of(unit)[1] for unit in units])


def rebuilt(tree: Any, leaves: Iterable[Any]) -> Any:
  """The tree with other leaves, in the order of `jax.tree.leaves`; modules and variables that are shared stay shared."""
  units = jax.tree.leaves(tree, is_leaf=is_unit)
  if any(compat.is_variable_type(type(unit)) for unit in units) or has_modules(tree):
    return rebuilt_modules(tree, leaves)
  return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def statics_of(units: Sequence[Any]) -> tuple[list[Static | None], list[Any]]:
  """The static part (None for a bare leaf) and the value of each unit, as two lists."""
  if not any(map(is_unit_type, set(map(type, units)))):
    return [None] * len(units), list(units)
  pairs = [static_of(unit) for unit in units]
  return [static for static, _ in pairs], [value for _, value in pairs]


def static_of(leaf: Any) -> tuple[Static | None, Any]:
  """The static part of a box or variable and its value; None and the leaf itself for a bare leaf.

  All types of boxes are opened; the names of nested boxes are those of the outermost.
  """
  cls = type(leaf)
  if cls is LogicallyPartitioned or cls is Partitioned:  # the fast path of every leaf of every tree
    (value,), static = leaf._pair
    return static, value
  if not is_unit_type(cls):
    return None, leaf
  if compat.is_variable_type(cls):
    return static_of_variable(leaf)
  if compat.is_bridge_box_type(cls):
    return static_of_metadata(leaf.metadata), leaf.value
  box = as_own_box(leaf)
  if box is None:
    return None, _unboxed(leaf, apply_constraint=False)
  return box.static, _unboxed(box.value, apply_constraint=False)
