"""Cycles: modules of NNX that contain themselves, which JAX would follow until the stack is full."""

from __future__ import annotations

from typing import Any

import jax
from jax.tree_util import GetAttrKey

from flax_spmd._src import compat
from flax_spmd._src.tree_paths import path_string
from flax_spmd.errors import LayoutError


def check_no_cycles(tree: Any) -> None:
  """Checks that no module of a tree contains itself.

  Raises:
    LayoutError: one does. JAX would follow the cycle until the stack is full.
  """
  if not compat.has_nnx():
    return
  acyclic: set[int] = set()
  for node in jax.tree.leaves(tree, is_leaf=lambda node: compat.is_nnx_module_type(type(node))):
    if compat.is_nnx_module_type(type(node)):
      _check_below(node, {id(node): ()}, acyclic, ())


def _check_below(node: Any, above: dict[int, Any], acyclic: set[int], path: tuple[Any, ...]) -> None:
  """Checks a module or another node.

  Args:
    node: the node.
    above: path of each module around it, by id.
    acyclic: ids of the modules that have been checked; this one is added.
    path: its own path.
  """
  for entry, child in one_level(node):
    below = (*path, entry)
    if id(child) in above:
      text = f'{type(child).__name__} contains itself, at {path_string(below)}: it is no tree of arrays.'
      raise LayoutError(f'{text}\n{_CYCLE_FIX}')
    if id(child) not in acyclic and not compat.is_variable_type(type(child)) and child is not node:
      is_inner = compat.is_nnx_module_type(type(child))
      _check_below(child, {**above, id(child): below} if is_inner else above, acyclic, below)
  acyclic.add(id(node))


_CYCLE_FIX = 'Fix: pass nnx.state(module), which has each variable once. Arguments of functions of layout.jit may be such modules.'


def one_level(node: Any) -> list[tuple[Any, Any]]:
  """The children of a node with their keys, without those by which NNX keeps the state of a module itself."""
  if compat.is_nnx_module_type(type(node)):
    return [(entry, child) for entry, child in compat.nnx_children(node) if not _is_internal(entry)]
  flat = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda inner: inner is not node)[0]
  return [(path[0], child) for path, child in flat if path]


def _is_internal(entry: Any) -> bool:
  return isinstance(entry, GetAttrKey) and str(entry.name).startswith('_pytree__')
