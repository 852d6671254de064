"""Cycles: trees that contain themselves, which JAX would follow until the stack is full.

JAX does not give back the stack of a flattening that ended so, if it calls a function at every node: in the whole process,
no other tree can be flattened then. So trees that are too deep are found before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from flax.core.meta import AxisMetadata
from jax.tree_util import GetAttrKey, KeyPath, default_registry

from flax_spmd._src import compat
from flax_spmd._src.tree_paths import path_string
from flax_spmd.errors import LayoutError, Problem, problems_text

_DEEPEST = 500  # nodes in one another; JAX takes twice as many at best, and Python less than that
_LISTED = 10  # references back, in an error
LEAVES = frozenset(  # recognised at once
  {compat.ARRAY, jax.ShapeDtypeStruct, np.ndarray, bool, int, float, str, type(None)}
)


def check_no_cycles(tree: Any) -> None:
  """Checks that no part of a tree contains itself.

  Raises:
    LayoutError: one does, or the tree is as deep as if one did.
  """
  acyclic: set[int] = set()
  for node in outermost_modules(tree):
    _check_below(node, {id(node): ()}, acyclic, ())


def outermost_modules(tree: Any, named: Callable[[KeyPath], KeyPath] = tuple) -> list[Any]:
  """The modules of NNX in a tree that are in no other one.

  Args:
    tree: any tree.
    named: function from a path in it to the path in errors.

  Raises:
    LayoutError: the tree contains itself outside of its modules, or is as deep as if it did.
  """
  modules: list[Any] = []
  level: Iterable[Any] = [tree]
  for _ in range(_DEEPEST):
    below: dict[int, Any] = {}  # a part that is shared is searched once a level
    for node in level:
      kind = type(node)
      if kind is dict:
        children = node.values()
      elif compat.is_nnx_module_type(kind):
        modules.append(node)
        continue
      elif (found := default_registry.flatten_one_level(node)) is None:
        continue
      else:
        children = found[0]
      for child in children:
        if (kind := type(child)) in LEAVES or (_is_box(kind) and type(child.value) in LEAVES):
          continue
        below[id(child)] = child
    if not below:
      return modules
    level = below.values()
  raise LayoutError(problems_text(_references_back(tree, named)))


@functools.cache
def _is_box(kind: type) -> bool:
  fields = getattr(kind, '__dataclass_fields__', ())
  return issubclass(kind, AxisMetadata) and ('value' in fields or hasattr(kind, 'value'))


def _references_back(tree: Any, named: Callable[[KeyPath], KeyPath]) -> list[Problem]:
  """The places where a tree contains a node that they are in; if there are none, its depth.

  Nodes are kept, since another one could have the id of one that is gone.
  """
  problems: list[Problem] = []
  done: dict[int, Any] = {}
  above: dict[int, KeyPath] = {id(tree): ()}
  walk: list[tuple[Any, KeyPath, Iterator[Any]]] = [(tree, (), iter(_with_keys(tree)))]
  while walk and len(walk) <= _DEEPEST and len(problems) < _LISTED:
    node, path, children = walk[-1]
    entry, child = next(children, (None, None))
    if entry is None:
      walk.pop()
      del above[id(node)]
      done[id(node)] = node
      continue
    below = path if _is_box(type(node)) else (*path, entry)
    if id(child) in above:
      places = [path_string(named(each)) for each in (below, above[id(child)])]
      problems.append(
        Problem(f'{places[0]} is {places[1]} again: the tree contains itself.', _NO_REFERENCE)
      )
    elif type(child) not in LEAVES and id(child) not in done:
      above[id(child)] = below
      walk.append((child, below, iter(_with_keys(child))))
  where = f', at {path_string(named(walk[-1][1])[:_LISTED])} and below' if walk else ''
  text = f'The tree is nested more than {_DEEPEST} deep{where}.'
  return problems or [Problem(text, 'pass a flatter one.')]


_NO_REFERENCE = 'leave it out: no part of a tree may refer to a part around it.'


def _with_keys(node: Any) -> Iterable[tuple[Any, Any]]:
  """The children of a node with their keys; none of a module, which is checked by itself."""
  return () if compat.is_nnx_module_type(type(node)) else one_level(node)


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
  is_root = iter([True])  # a node may be its own child
  flat = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda _: not next(is_root, False))[0]
  return [(path[0], child) for path, child in flat if path]


def _is_internal(entry: Any) -> bool:
  return isinstance(entry, GetAttrKey) and str(entry.name).startswith('_pytree__')
