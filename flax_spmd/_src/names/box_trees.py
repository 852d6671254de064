"""Trees of boxes: the functions that find boxes in a tree, whoever made them, and open or change them.

    unbox(state)                  # the values, as they are without names
    replace_boxed(state, values)  # the same boxes around other values

Flax's boxes, and other libraries' `AxisMetadata`, are boxes like ours here: a model that was annotated
by Flax's own functions works everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
from flax.core import meta

from flax_spmd._src.names.boxes import AxisMetadata, LogicallyPartitioned, Partitioned, Static
from flax_spmd._src.public_module import set_module


@set_module('flax_spmd')
def is_axis_metadata(val: Any) -> bool:
  """Whether `val` is a box: ours, Flax's, or anybody's `AxisMetadata`.

  Example:
    >>> is_axis_metadata(Partitioned(1.0, ('data',))), is_axis_metadata(nn.Partitioned(1.0, ('data',)))
    (True, True)
    >>> is_axis_metadata(1.0)
    False
  """
  return _is_box_type(type(val))


@functools.cache
def _is_box_type(cls: type) -> bool:
  """Asked of every node of every tree, and slow for abstract base classes."""
  return issubclass(cls, AxisMetadata)


@set_module('flax_spmd')
def map_axis_meta(fn: Callable[[AxisMetadata[Any]], Any], tree: Any) -> Any:
  """Maps over the boxes of a tree; everything else stays.

  Example:
    >>> tree = {'w': Partitioned(1.0, ('data',)), 'b': 2.0}
    >>> map_axis_meta(lambda box: box.names, tree)
    {'b': 2.0, 'w': ('data',)}
  """
  return meta.map_axis_meta(fn, tree)


@set_module('flax_spmd')
def add_axis(tree: Any, index: int, params: Mapping[Any, Any]) -> Any:
  """Adds an axis to every box of a tree, as `nn.scan` and `nn.vmap` do.

  Example:
    >>> tree = {'w': LogicallyPartitioned(jnp.ones((3, 8)), ('embed',))}  # three layers, stacked
    >>> add_axis(tree, 0, {nn.PARTITION_NAME: 'layers'})['w'].names
    ('layers', 'embed')
  """
  return map_axis_meta(lambda box: box.add_axis(index, dict(params)), tree)


@set_module('flax_spmd')
def remove_axis(tree: Any, index: int, params: Mapping[Any, Any]) -> Any:
  """Removes an axis from every box of a tree, as `nn.scan` and `nn.vmap` do.

  Example:
    >>> tree = {'w': LogicallyPartitioned(jnp.ones(8), ('layers', 'embed'))}  # one layer of a stack
    >>> remove_axis(tree, 0, {nn.PARTITION_NAME: 'layers'})['w'].names
    ('embed',)
  """
  return map_axis_meta(lambda box: box.remove_axis(index, dict(params)), tree)


@set_module('flax_spmd')
def unbox(tree: Any, apply_constraint: bool = True) -> Any:
  """The tree without its boxes.

  Args:
    tree: any tree; boxes in boxes are opened too. Abstract values are fine.
    apply_constraint: whether traced values are constrained to lie as their names say.

  Example:
    >>> unbox({'w': Partitioned(1.0, ('data',))})
    {'w': 1.0}
  """

  def open_box(box):
    ours = own(box)
    inner = box.unbox() if ours is None else ours.unbox(apply_constraint)
    return unbox(inner, apply_constraint)

  return map_axis_meta(open_box, tree)


@set_module('flax_spmd')
def replace_boxed(tree: Any, updates: Any) -> Any:
  """The boxes of `tree` around the values of `updates`, which has no boxes.

  Example:
    >>> replace_boxed({'w': Partitioned(1.0, ('data',))}, {'w': 2.0})
    {'w': Partitioned(2.0, names=('data',))}
  """
  return meta.replace_boxed(tree, updates)


def own(box: AxisMetadata[Any]) -> Partitioned | None:
  """Ours for a box of Flax's, with the same content; None for a kind of box that has no names."""
  if isinstance(box, Partitioned):
    return box
  if isinstance(box, nn.LogicallyPartitioned):
    return LogicallyPartitioned(box.value, box.names, box.mesh, box.rules)
  if isinstance(box, nn.Partitioned):
    return Partitioned(box.value, box.names, box.mesh)
  spec = getattr(box, 'get_partition_spec', None)
  if spec is None or not hasattr(box, 'value'):
    return None
  return Partitioned(getattr(box, 'value'), spec())  # noqa: B009 (a box of some other library)


def statics_of(units: Sequence[Any]) -> tuple[list[Static | None], list[Any]]:
  """`static_of` of boxes and leaves: the names of each, and the value of each."""
  if not any(map(_is_box_type, set(map(type, units)))):
    return [None] * len(units), list(units)
  pairs = [static_of(unit) for unit in units]
  return [static for static, _ in pairs], [value for _, value in pairs]


def static_of(leaf: Any) -> tuple[Static | None, Any]:
  """What a leaf of a tree is to a layout: its names (None: it has none) and its value.

  Boxes are opened whoever made them; of nested boxes, the outer one's names count.
  """
  cls = type(leaf)
  if cls is LogicallyPartitioned or cls is Partitioned:  # asked of every leaf of every tree
    (value,), static = leaf._pair
    return static, value
  if not _is_box_type(cls):
    return None, leaf
  box = own(leaf)
  if box is None:
    return None, unbox(leaf, apply_constraint=False)
  return box.static, unbox(box.value, apply_constraint=False)
