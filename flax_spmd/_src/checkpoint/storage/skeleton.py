"""The skeleton of a state: its structure in the terms of JSON, which is how it lies on disk.

A mapping, a dataclass and a NamedTuple become an object, a list and a tuple an array, what is empty
null, and a leaf the number that it has among the leaves:

    {"step": 0, "params": {"w": 1}, "opt_state": [{"count": 2, "mu": {"w": 3}}, null]}

So a checkpoint can be read without the code that made the state, and looks the same to Orbax whichever
classes its nodes had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import SequenceKey

from flax_spmd._src.tree_paths import key_value
from flax_spmd.errors import CheckpointError

Skeleton = Any  # int | None | list[Skeleton] | dict[str, Skeleton]
ROOT = '(root)'  # the path of a state that is one leaf


class Apart(NamedTuple):
  """A tree taken apart: its skeleton, its leaves as `jax.tree.leaves` has them, its states' kinds.

  `kinds` is the class name of each NamedTuple below the root, by path: what optax calls its states.
  """

  skeleton: Skeleton
  leaves: list[Any]
  kinds: dict[str, str]


def take_apart(tree: Any) -> Apart:
  """The skeleton and the leaves of a tree without boxes.

  Raises:
    CheckpointError: two keys of one node are the same as texts.
  """
  leaves: list[Any] = []
  kinds: dict[str, str] = {}

  def walk(node: Any, path: str, prefix: str) -> Skeleton:
    if isinstance(node, _LEAVES):
      leaves.append(node)
      return len(leaves) - 1
    children = _one_level(node)
    if children and not children[0][0]:
      leaves.append(node)
      return len(leaves) - 1
    if prefix and isinstance(node, tuple) and hasattr(node, '_fields'):
      kinds[path] = type(node).__name__
    below = [(str(key_value(key)), key, child) for (key,), child in children]
    made = {name: walk(child, prefix + name, f'{prefix}{name}/') for name, _, child in below}
    if len(made) < len(below):
      raise CheckpointError(f'Two keys at {path} are written alike.\nFix: give them other names.')
    if not made:
      return None
    return list(made.values()) if all(isinstance(key, SequenceKey) for _, key, _ in below) else made

  return Apart(walk(tree, ROOT, ''), leaves, kinds)


_LEAVES = (jax.Array, np.ndarray, jax.ShapeDtypeStruct, int, float)  # known without asking JAX


def _one_level(node: Any) -> list[tuple[Any, Any]]:
  """The children of a node with their keys; a leaf is its own child, without a key."""
  return jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda inner: inner is not node)[0]


def paths(skeleton: Skeleton) -> list[str]:
  """The path of each leaf, by its number."""
  found = dict(_walk(skeleton, ROOT, ''))
  return [found[number] for number in range(len(found))]


def _walk(skeleton: Skeleton, path: str, prefix: str) -> Iterator[tuple[int, str]]:
  if isinstance(skeleton, int):
    yield skeleton, path
  for name, child in children(skeleton):
    yield from _walk(child, prefix + name, f'{prefix}{name}/')


def children(skeleton: Skeleton) -> Iterator[tuple[str, Skeleton]]:
  """The parts of a node with their names; none of a leaf."""
  if isinstance(skeleton, dict):
    yield from skeleton.items()
  elif isinstance(skeleton, list):
    yield from ((str(index), child) for index, child in enumerate(skeleton))


def put_together(skeleton: Skeleton, leaf: Callable[[int], Any]) -> Any:
  """A tree of dicts and lists with `leaf(number)` for each leaf."""
  if isinstance(skeleton, dict):
    return {name: put_together(child, leaf) for name, child in skeleton.items()}
  if isinstance(skeleton, list):
    return [put_together(child, leaf) for child in skeleton]
  return None if skeleton is None else leaf(skeleton)


def pruned(skeleton: Skeleton, kept: Mapping[int, int]) -> Skeleton:
  """The skeleton with the kept leaves only, under their new numbers."""
  return put_together(skeleton, kept.get)
