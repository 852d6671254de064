"""Unit paths: the path of every box or bare leaf of a tree, much faster than by JAX's own key paths."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
from jax.tree_util import GetAttrKey

from flax_spmd._src.names.box_trees import is_axis_metadata
from flax_spmd._src.tree_paths import _ROOT, _TEXT


class Places(NamedTuple):
  """Per unit of a tree, in the order of `Reading.units`: its path, and whether it is `below_a_field`."""

  paths: list[str]
  below_a_field: list[bool]


def unit_places(tree: Any) -> Places:
  """The place of every unit.

  The same as `path_string` of JAX's own paths, and much faster: what units share of a path is written once.
  """
  walk = _Walk()
  walk.visit(tree, '', '')
  below = [False] * len(walk.paths)
  for first, end in walk.fields:
    below[first:end] = [True] * (end - first)
  return Places(walk.paths, below)


class _Walk:
  """A walk through a tree that writes paths as it goes, and notes which of them lie in a field.

  It knows dicts, lists, tuples and None itself, and asks JAX for the children of any other node.
  """

  def __init__(self):
    self.paths: list[str] = []
    self.fields: list[tuple[int, int]] = []  # first and end among the paths; not those of the root
    self._units: set[type] = set()  # the kinds of units that were met

  def visit(self, node: Any, path: str, prefix: str) -> None:
    """Notes the units of what is at `path`; paths of what is below begin with `prefix`."""
    kind = type(node)
    if kind is dict:
      self._visit_children(node, sorted(node), prefix)
    elif kind is list or kind is tuple:
      self._visit_children(node, range(len(node)), prefix)
    elif node is not None:
      self._visit_other(node, path, prefix)

  def _visit_children(self, node: Any, keys: Iterable[Any], prefix: str) -> None:
    units, add = self._units, self.paths.append
    for key in keys:
      child, path = node[key], f'{prefix}{key!s}'
      if type(child) in units:
        add(path or _ROOT)
      else:
        self.visit(child, path, f'{path}/')

  def _visit_other(self, node: Any, path: str, prefix: str) -> None:
    children = None if is_axis_metadata(node) else _children(node)
    if children is None:
      self._units.add(type(node))
      self.paths.append(path or _ROOT)
      return
    for entry, child in children:
      first, key = len(self.paths), _TEXT[type(entry)](entry)
      self._visit_children({key: child}, [key], prefix)
      if prefix and type(entry) is GetAttrKey:
        self.fields.append((first, len(self.paths)))


def _children(node: Any) -> list[tuple[Any, Any]] | None:
  """The children of a node, each with JAX's key; None for a leaf."""
  found = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda inner: inner is not node)[0]
  if found and not found[0][0]:  # itself
    return None
  return [(path[0], child) for path, child in found]
