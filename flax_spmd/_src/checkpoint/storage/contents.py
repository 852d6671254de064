"""Contents: what a state is written as, which is a tree for Orbax and a record.

The tree is the state without its boxes. Where small leaves are packed, it is a flat one: each large
leaf under its number, and the small ones one after the other in an array for each dtype.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from flax_spmd._src.checkpoint.storage import record as records
from flax_spmd._src.checkpoint.storage import skeleton
from flax_spmd._src.checkpoint.storage.checksums import checksums
from flax_spmd._src.checkpoint.storage.record import Leaf, Record
from flax_spmd._src.data.gather import gather
from flax_spmd._src.layout import Layout
from flax_spmd._src.names import box_trees as trees
from flax_spmd.errors import CheckpointError, Problem, RulesError, problems_text

LEAVES, PACKED = 'leaves', 'packed'  # the two parts of a packed tree
_ROOT = 'root'


class Contents(NamedTuple):
  """The leaves that are written, by path, and what is said of them."""

  leaves: dict[str, Any]
  record: Record

  @property
  def tree(self) -> Any:
    """The tree that Orbax writes."""
    values = list(self.leaves.values())
    if any(leaf.packed for leaf in self.record.leaves.values()):
      return _packed_tree(values, list(self.record.leaves.values()))
    return disk_tree(self.record, values.__getitem__)

  @property
  def metadata(self) -> dict[str, Any]:
    """The custom metadata of the checkpoint."""
    return records.to_json(self.record)

  def summed(self) -> Contents:
    """With the checksum of each leaf in the record. Every process calls this."""
    sums = checksums(list(self.leaves.values()))
    described = {
      path: leaf._replace(checksum=total)
      for (path, leaf), total in zip(self.record.leaves.items(), sums, strict=True)
    }
    return self._replace(record=dataclasses.replace(self.record, leaves=described))


def contents_of(state: Any, layout: Layout, where: str | None = None, pack: int = 0) -> Contents:
  """What a state is written as, without checksums yet.

  Args:
    state, layout, where, pack: as of `save`.

  Raises:
    CheckpointError: there is nothing to save, or there are leaves that cannot be.
  """
  apart = skeleton.take_apart(trees.unbox(state, apply_constraint=False))
  paths = skeleton.paths(apart.skeleton)
  leaves = records.by_path(paths, [_array(leaf) for leaf in apart.leaves])
  _check(leaves)
  kept = _kept(paths, where)
  rows = dict(zip(paths, layout.rows(state), strict=True))
  described = {
    path: records.describe(leaves[path], rows[path].names, on_mesh=not rows[path].logical)
    for path in kept
  }
  numbers = {number: kept[path] for number, path in enumerate(paths) if path in kept}
  record = Record(skeleton.pruned(apart.skeleton, numbers), described, apart.kinds, _text(layout))
  return _packed(Contents({path: leaves[path] for path in kept}, record), pack)


def disk_tree(record: Record, leaf: Any) -> Any:
  """The tree that lies on disk, with `leaf(number)` for each leaf; Orbax wants a container at its root."""
  made = skeleton.put_together(record.skeleton, leaf)
  return made if isinstance(made, (dict, list)) else {_ROOT: made}


def disk_leaves(record: Record, tree: Any) -> dict[str, Any]:
  """The leaves of a tree that was read, by path."""
  if isinstance(record.skeleton, int):
    return dict(zip(record.leaves, tree.values(), strict=True))
  found: dict[str, Any] = {}
  paths = list(record.leaves)

  def collect(structure: Any, node: Any) -> None:
    if isinstance(structure, int):
      found[paths[structure]] = node
    elif structure is not None:
      items = structure.items() if isinstance(structure, dict) else enumerate(structure)
      for key, child in items:
        collect(child, node[key])

  collect(record.skeleton, tree)
  return found


def _array(leaf: Any) -> Any:
  return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf


def _check(leaves: Mapping[str, Any]) -> None:
  problems = []
  for path, leaf in leaves.items():
    if isinstance(leaf, jax.ShapeDtypeStruct):
      fix = 'save a state that was made by layout.init, not one that was only planned.'
      problems.append(Problem(f'{path} is abstract: it has a shape, {leaf.shape}, and no values.', fix))
    elif not isinstance(leaf, (jax.Array, np.ndarray, bool, int, float)) or _is_odd(leaf):
      dtype = getattr(leaf, 'dtype', None)
      what = f'a {type(leaf).__name__}' if dtype is None else f'an array of {dtype}'
      problems.append(Problem(f'{path} is {what}.', 'keep only arrays and numbers in the state.'))
    elif 0 in np.shape(leaf):
      fix = 'keep arrays without elements out of the state; Orbax cannot store them.'
      problems.append(Problem(f'{path} has no elements: its shape is {np.shape(leaf)}.', fix))
    elif isinstance(leaf, jax.Array) and leaf.is_deleted():
      fix = 'save the state that the step returned, not the one that was donated to it.'
      problems.append(Problem(f'{path} has been deleted, or donated to a jitted function.', fix))
  problems += _name_problems(leaves)
  if not leaves:
    problems = [Problem('The state has no leaves.', 'save a state that has arrays in it.')]
  if problems:
    raise CheckpointError(problems_text(problems))


def _name_problems(paths: Iterable[str]) -> Iterator[Problem]:
  """Names that no file may have, and paths that are one name for Orbax, which joins theirs by dots."""
  by_name: dict[str, str] = {}
  for path in paths:
    if path != skeleton.ROOT and any(map(records.is_odd_name, path.split('/'))):
      yield Problem(f'{path!r} could lead out of the checkpoint, or nowhere.', _NAMES)
    other = by_name.setdefault(path.replace('/', '.'), path)
    if other != path:
      yield Problem(f'{path} and {other} would be one file.', _NAMES)


_NAMES = 'use no empty keys, no "/", "." or "\\" in the keys of the state, and no null characters.'


def _is_odd(leaf: Any) -> bool:
  """Whether it is an array of objects or texts, or of a structured dtype."""
  return (isinstance(leaf, np.ndarray) and leaf.dtype.kind in 'OSUMm') or _has_fields(leaf)


def _has_fields(leaf: Any) -> bool:
  return getattr(getattr(leaf, 'dtype', None), 'fields', None) is not None


def _kept(paths: Sequence[str], where: str | None) -> dict[str, int]:
  """The paths that are saved, and their numbers."""
  kept = [path for path in paths if where is None or re.search(where, path)]
  if not kept:
    raise CheckpointError(
      f'No leaf has a path in which {where!r} is found; there are {len(paths)}, such as {paths[0]}.\n'
      'Fix: pass a regular expression that is found in the paths to save.'
    )
  return {path: number for number, path in enumerate(kept)}


def _text(layout: Layout) -> str | None:
  try:
    return layout.to_toml()
  except RulesError:  # a rule is a function
    return None


# -- packing


def _packed(contents: Contents, pack: int) -> Contents:
  """The contents with all arrays of up to `pack` bytes packed."""
  described = contents.record.leaves
  small = [
    path
    for path, leaf in described.items()
    if not leaf.is_number and not records.is_key(leaf) and leaf.bytes <= pack
  ]
  if not small or not pack:
    return contents
  leaves = dict(contents.leaves)
  leaves.update(zip(small, gather([leaves[path] for path in small]), strict=True))
  sizes: dict[str, int] = {}
  placed = dict(described)
  for path in small:
    leaf = described[path]
    offset = sizes.get(leaf.dtype, 0)
    placed[path] = leaf._replace(packed=(leaf.dtype, offset))
    sizes[leaf.dtype] = offset + leaves[path].size
  return Contents(leaves, dataclasses.replace(contents.record, leaves=placed))


def _packed_tree(values: Sequence[Any], described: Sequence[Leaf]) -> Any:
  large = {str(i): values[i] for i, leaf in enumerate(described) if _is_alone(leaf)}
  packed: dict[str, list[Any]] = {}
  for value, leaf in zip(values, described, strict=True):
    if leaf.packed:
      packed.setdefault(leaf.packed[0], []).append(np.ravel(value))
  return {LEAVES: large, PACKED: {dtype: np.concatenate(parts) for dtype, parts in packed.items()}}


def _is_alone(leaf: Leaf) -> bool:
  return leaf.packed is None and not leaf.is_number
