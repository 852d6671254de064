"""Axes collections: the names that `flax.linen.partitioning` keeps beside the arrays, as in T5X.

    variables = {'params': {'w': ...}, 'params_axes': {'w_axes': AxisMetadata(('embed', 'mlp'))}}
    read_collections(variables, paths)   # {index of params/w: [names with their origin]}

A collection may be anywhere in a tree: beside its arrays, in the field of a state (`params_axes`), or in a state whose
parameters have another name. It names the arrays beside it, `params` for `params_axes`. If these are not there, it names
the outermost part of the tree that has all the arrays that it names. The names are part of the tree's structure, so
they pass through every function of JAX; Flax's `scan_with_axes` and `vmap_with_axes` add the names of new axes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from flax.linen.partitioning import AxisMetadata
from jax.sharding import PartitionSpec
from jax.tree_util import KeyPath

from flax_spmd._src.cycles import check_no_cycles
from flax_spmd._src.names.boxes import Static
from flax_spmd._src.tree_paths import key_value, path_string

Keys: TypeAlias = tuple[Any, ...]

_SUFFIX = '_axes'


class GivenNames(NamedTuple):
  """Names that an array was given, and where they stand.

  Attributes:
    static: the names.
    origin: the place of the names, for error texts.
    below: number of the array's last keys that are its path in the collection of parameters; None if unknown.
  """

  static: Static
  origin: str
  below: int | None = None


class Entry(NamedTuple):
  """Names for one array: the path of the array in its part of a tree, the names, and their own path."""

  keys: Keys
  names: Any
  origin: str


def keys_of(path: KeyPath) -> Keys:
  """The keys of a path; positions as numbers, everything else as text."""
  values = map(key_value, path)
  return tuple(value if isinstance(value, int) else str(value) for value in values)


def is_axes(node: Any) -> bool:
  """Whether a node of a tree is an entry of an axes collection."""
  return isinstance(node, AxisMetadata)


def is_names(node: Any) -> bool:
  """Whether a value is the names of one array: a tuple or a PartitionSpec."""
  return isinstance(node, PartitionSpec) or (
    type(node) is tuple and all(name is None or isinstance(name, (str, tuple)) for name in node)
  )


def read_collections(tree: Any, paths: Sequence[KeyPath]) -> dict[int, list[GivenNames]]:
  """The names that the axes collections of a tree give its arrays.

  Args:
    tree: any tree.
    paths: the path of each of its units.

  Returns:
    The given names by index of the unit; several where several entries name one array.
  """
  keys = [keys_of(path) for path in paths]
  given: dict[int, list[GivenNames]] = defaultdict(list)
  for beside, entries in _collections(tree).items():
    for index, entry in _placed(entries, beside, keys):
      given[index].append(GivenNames(Static(entry.names, True), entry.origin, len(entry.keys)))
  return given


def entries_in(names: Any) -> list[Entry]:
  """The names in a tree of names: entries of axes collections, tuples and PartitionSpecs. Arrays in it are skipped."""
  check_no_cycles(names)
  flat = jax.tree_util.tree_leaves_with_path(names, is_leaf=lambda node: is_axes(node) or is_names(node))
  plain = [
    Entry(keys_of(path), node, path_string(path))
    for path, node in flat
    if not is_axes(node) and not hasattr(node, 'shape') and node != ()
  ]
  collected = [
    each._replace(keys=(*beside[1:], *each.keys))
    for beside, entries in _collections([names]).items()
    for each in entries
  ]
  return plain + collected


def placements(wanted: Iterable[Keys], keys: Sequence[Keys]) -> dict[Keys, list[int]]:
  """The arrays that paths below an unknown part of a tree refer to.

  It is the outermost part that has the most of these paths; of several, all.

  Args:
    wanted: the paths below that part.
    keys: the keys of every unit of the tree.

  Returns:
    The indices of units, by path.
  """
  wanted = set(wanted)
  below: dict[Keys, dict[Keys, int]] = defaultdict(dict)
  for index, each in enumerate(keys):
    for start in range(len(each) + 1):
      if each[start:] in wanted and (start < len(each) or not each):  # no path: the tree is one array
        below[each[:start]][each[start:]] = index
  most = max(map(len, below.values()), default=0)
  full = [part for part, found in below.items() if len(found) == most]
  depth = min(map(len, full), default=0)
  placed: dict[Keys, list[int]] = defaultdict(list)
  for part in full:
    if len(part) == depth:
      for path, index in below[part].items():
        placed[path].append(index)
  return placed


def _collections(tree: Any) -> dict[Keys, list[Entry]]:
  """The entries of every collection of a tree, by the path at which its arrays are expected."""
  found: dict[Keys, list[Entry]] = defaultdict(list)
  for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_axes):
    if is_axes(node):
      beside, keys = _split(keys_of(path))
      found[beside] += [
        Entry((*keys, *inner), names, path_string(path)) for inner, names in _names_in(node.names)
      ]
  return found


def _split(keys: Keys) -> tuple[Keys, Keys]:
  """The place of the arrays beside a collection, and the path of an entry below it: `params`, `layers/w`."""
  if not keys:
    return (), ()
  end = next((i for i, key in enumerate(keys[:-1]) if _without_suffix(key) != key), 0)
  return (*keys[:end], _without_suffix(keys[end])), (*keys[end + 1 : -1], _without_suffix(keys[-1]))


def _names_in(names: Any) -> Iterator[tuple[Keys, Any]]:
  """The names of one entry; of several arrays if the variable is a tree."""
  if isinstance(names, str):  # an error of the planner
    yield (), names
    return
  if isinstance(names, list) and all(name is None or isinstance(name, str) for name in names):
    names = tuple(names)
  if is_names(names):
    yield (), tuple(names)
    return
  for path, each in jax.tree_util.tree_leaves_with_path(names, is_leaf=is_names):
    if is_names(each):
      yield keys_of(path), tuple(each)


def _placed(entries: Sequence[Entry], beside: Keys, keys: Sequence[Keys]) -> Iterator[tuple[int, Entry]]:
  """The units that the entries of a collection name."""
  direct = {each: index for index, each in enumerate(keys)}
  if any((*beside, *entry.keys) in direct for entry in entries):
    for entry in entries:
      index = direct.get((*beside, *entry.keys))
      if index is not None:
        yield index, entry
    return
  found: Mapping[Keys, list[int]] = placements([entry.keys for entry in entries], keys)
  for entry in entries:
    for index in found.get(entry.keys, ()):
      yield index, entry


def _without_suffix(key: Any) -> Any:
  return key.removesuffix(_SUFFIX) if isinstance(key, str) else key
