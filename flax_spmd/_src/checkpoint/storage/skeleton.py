"""Skeletons: the structure of a state in JSON's terms, as it is stored on disk.

A mapping, a dataclass and a NamedTuple become an object, a list and a tuple become an array, an empty node
becomes null, and a leaf becomes its index among the leaves:

    {"step": 0, "params": {"w": 1}, "opt_state": [{"count": 2, "mu": {"w": 3}}, null]}

A checkpoint can therefore be read without the code that made the state, and Orbax sees the same tree for
every choice of node classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import SequenceKey

from flax_spmd._src.tree_paths import key_value
from flax_spmd.errors import CheckpointError

Skeleton = Any  # int | None | list[Skeleton] | dict[str, Skeleton]
ROOT = '(root)'  # the path of a state that is one leaf


class Flattened(NamedTuple):
  """A flattened tree.

  Attributes:
    skeleton: structure of the tree.
    leaves: leaves in the order of `jax.tree.leaves`.
    kinds: class name of each NamedTuple below the root, by path. optax's optimizer states are NamedTuples.
  """

  skeleton: Skeleton
  leaves: list[Any]
  kinds: dict[str, str]


def flatten(tree: Any) -> Flattened:
  """Flattens a tree without boxes into its skeleton and leaves.

  Raises:
    CheckpointError: two keys of one node are equal as text.
  """
  leaves: list[Any] = []
  kinds: dict[str, str] = {}

  def walk(node: Any, path: str, prefix: str) -> Skeleton:
    if isinstance(node, _LEAVES):
      leaves.append(node)
      return len(leaves) - 1
    children = one_level(node)
    if children and not children[0][0]:
      leaves.append(node)
      return len(leaves) - 1
    if prefix and isinstance(node, tuple) and hasattr(node, '_fields'):
      kinds[path] = type(node).__name__
    below = [(str(key_value(key)), key, child) for (key,), child in children]
    structure = {name: walk(child, prefix + name, f'{prefix}{name}/') for name, _, child in below}
    if len(structure) < len(below):
      raise CheckpointError(
        f'Two keys at {path} are equal as text.\nFix: give them names that differ as text.'
      )
    if not structure:
      return None
    is_list = all(isinstance(key, SequenceKey) for _, key, _ in below)
    return list(structure.values()) if is_list else structure

  return Flattened(walk(tree, ROOT, ''), leaves, kinds)


_LEAVES = (jax.Array, np.ndarray, jax.ShapeDtypeStruct, int, float)  # recognised without calling JAX


def one_level(node: Any) -> list[tuple[Any, Any]]:
  """The children of a node with their keys; a leaf is its own child, with an empty key."""
  return jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda inner: inner is not node)[0]


def paths(skeleton: Skeleton) -> list[str]:
  """The path of each leaf, in the order of their indices."""
  return ['/'.join(names) if names else ROOT for names in keys(skeleton)]


def keys(skeleton: Skeleton) -> list[tuple[str, ...]]:
  """The keys on the way to each leaf, in the order of their indices. A key may hold a slash or a dot."""
  by_index: dict[int, tuple[str, ...]] = {}

  def walk(node: Skeleton, names: tuple[str, ...]) -> None:
    for name, child in children(node):
      if isinstance(child, int):
        by_index[child] = (*names, name)
      else:
        walk(child, (*names, name))

  if isinstance(skeleton, int):
    return [()]
  walk(skeleton, ())
  return [by_index[index] for index in range(len(by_index))]


def children(skeleton: Skeleton) -> Iterable[tuple[str, Skeleton]]:
  """The named children of a node; a leaf has none."""
  if isinstance(skeleton, dict):
    return skeleton.items()
  if isinstance(skeleton, list):
    return [(str(index), child) for index, child in enumerate(skeleton)]
  return ()


def unflatten(skeleton: Skeleton, leaf: Callable[[int], Any]) -> Any:
  """Builds a tree of dicts and lists with `leaf(index)` as its leaves."""
  if isinstance(skeleton, dict):
    return {name: unflatten(child, leaf) for name, child in skeleton.items()}
  if isinstance(skeleton, list):
    return [unflatten(child, leaf) for child in skeleton]
  return None if skeleton is None else leaf(skeleton)
