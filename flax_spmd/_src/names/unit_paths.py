"""Unit paths: the path of every box or bare leaf of a tree, much faster than through JAX's key paths."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
from jax.tree_util import GetAttrKey

from flax_spmd._src.cycles import check_no_cycles
from flax_spmd._src.names.box_trees import is_unit
from flax_spmd._src.tree_paths import KEY_TEXT, ROOT_PATH


class UnitPaths:
  """The path of every unit of a tree, in tree order; a unit is a box, or a leaf outside of any box.

  Paths equal `path_string` of JAX's key paths. They are found faster because units below one node share
  a prefix that is written once. The children of dicts, lists and tuples are read directly, those of any
  other node through JAX.

  Args:
    tree: any tree.

  Attributes:
    paths: one path per unit, such as `params/layers/wi`.

  Example:
    >>> UnitPaths({'params': {'w': Partitioned(1.0, ('data',)), 'b': 2.0}}).paths
    ['params/b', 'params/w']
  """

  def __init__(self, tree: Any):
    self.paths: list[str] = []
    self._fields: list[
      tuple[int, int, str]
    ] = []  # ranges of `paths` below a field, and its path; inner first
    self._unit_types: set[type] = set()
    self._visit(tree, '', '')

  @functools.cached_property
  def fields(self) -> list[str | None]:
    """The path of the innermost field above each unit, `opt_state/0/mu`; None if it is one of the root."""
    fields: list[str | None] = [None] * len(self.paths)
    for first, end, path in reversed(self._fields):
      fields[first:end] = [path] * (end - first)
    return fields

  def _visit(self, node: Any, path: str, prefix: str) -> None:
    """Writes the paths of a node's units; those of its children begin with `prefix`."""
    kind = type(node)
    if kind is dict:
      self._visit_children(node, sorted(node), prefix)
    elif kind is list or kind is tuple:
      self._visit_children(node, range(len(node)), prefix)
    elif node is not None:
      self._visit_other(node, path, prefix)

  def _visit_children(self, node: Any, keys: Iterable[Any], prefix: str) -> None:
    unit_types, add = self._unit_types, self.paths.append
    for key in keys:
      child, path = node[key], f'{prefix}{key!s}'
      if type(child) in unit_types:
        add(path or ROOT_PATH)
      else:
        self._visit(child, path, f'{path}/')

  def _visit_other(self, node: Any, path: str, prefix: str) -> None:
    children = None if is_unit(node) else _children(node)
    if children is None:
      self._unit_types.add(type(node))
      self.paths.append(path or ROOT_PATH)
      return
    for entry, child in children:
      first, key = len(self.paths), KEY_TEXT[type(entry)](entry)
      self._visit_children({key: child}, [key], prefix)
      if prefix and type(entry) is GetAttrKey:
        self._fields.append((first, len(self.paths), f'{prefix}{key}'))


def _children(node: Any) -> list[tuple[Any, Any]] | None:
  """The children of a node, each with JAX's key; None for a leaf."""
  flat = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda inner: inner is not node)[0]
  if flat and not flat[0][0]:  # an empty path: the node is a leaf
    return None
  return [(path[0], child) for path, child in flat]


def leaves_with_paths(tree: Any) -> list[tuple[str, Any]]:
  """Every leaf of a tree with its path; that of a value in a box is the path of the box.

  Raises:
    LayoutError: a module of the tree contains itself.

  Example:
    >>> leaves_with_paths({'w': Partitioned(1.0, ('data',)), 'b': 2.0})
    [('b', 2.0), ('w', 1.0)]
  """
  check_no_cycles(tree)
  units = jax.tree.leaves(tree, is_leaf=is_unit)
  return [
    (path, leaf)
    for path, unit in zip(UnitPaths(tree).paths, units, strict=True)
    for leaf in jax.tree.leaves(unit)
  ]
