"""Places: the ways in which a caller may say where the arrays of a tree go.

A place is logical names (a tuple), a PartitionSpec of mesh axes, a sharding, a rule table (`Rules`,
`fsdp(...)`, a policy), or None. A tree of places that is a prefix of the arrays' tree gives each part
its own:

    ('batch', None)                                # every array by these names
    {'x': ('batch', None), 'y': None}              # each by its own
    (fsdp('data'), PartitionSpec('data'))          # two arguments
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec, Sharding
from jax.tree_util import KeyPath

from flax_spmd._src.rules.clauses import Fsdp
from flax_spmd._src.rules.table import Rules
from flax_spmd.errors import LayoutError


class Part(NamedTuple):
  """A part of a tree, where it is in the tree, and its place."""

  path: KeyPath
  place: Any
  tree: Any


def parts(tree: Any, places: Any) -> tuple[list[Part], Any]:
  """The parts of a tree that places are given for, and the structure that they are the leaves of.

  Raises:
    LayoutError: something is no place, or the places are no prefix of the tree.
  """
  described, treedef = jax.tree_util.tree_flatten_with_path(places, is_leaf=is_place)
  wrong = [place for _, place in described if not is_place(place)]
  try:
    if wrong:
      raise ValueError(f'{wrong[0]!r} is no place.')
    found = treedef.flatten_up_to(tree)
  except (ValueError, TypeError) as error:
    raise LayoutError(
      f'The places {places!r} are no prefix of the tree: {error}\n'
      "Fix: give one array's names, such as ('batch', None), for all leaves, or a tree of places shaped "
      'like the arrays; mesh axes go into a PartitionSpec, rules into Rules(...).'
    ) from None
  return [Part(path, place, part) for (path, place), part in zip(described, found, strict=True)], treedef


def is_place(x: Any) -> bool:
  """Whether this says where arrays go, rather than being a tree of such."""
  return x is None or is_names(x) or isinstance(x, (PartitionSpec, Sharding)) or is_table(x)


def is_table(x: Any) -> bool:
  """Whether this is a rule table, or a clause that is one on its own."""
  return isinstance(x, (Rules, Fsdp)) or (callable(x) and not isinstance(x, (type, Sharding)))


def is_names(x: Any) -> bool:
  """Whether this is one array's logical names."""
  return isinstance(x, tuple) and all(entry is None or isinstance(entry, str) for entry in x)
