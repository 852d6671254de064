"""Placements: the ways in which a caller determines the sharding of the arrays of a tree.

A placement is logical names (a tuple), a PartitionSpec of mesh axes, a sharding, a rule table (`Rules`,
`fsdp(...)`, a function), or None. A tree of placements that is a prefix of the arrays' tree gives each part
its own:

    ('batch', None)                                # every array by these names
    {'x': ('batch', None), 'y': None}              # each by its own
    (fsdp('data'), PartitionSpec('data'))          # two arguments
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec, Sharding
from jax.tree_util import KeyPath

from flax_spmd._src.cycles import check_no_cycles
from flax_spmd._src.rules.table import Rules, is_whole_table
from flax_spmd._src.text import shown, value_text
from flax_spmd._src.tree_paths import path_string
from flax_spmd.errors import LayoutError, Problem


class PlacedPart(NamedTuple):
  """A part of a tree, its path in the tree, and its placement."""

  path: KeyPath
  placement: Any
  tree: Any


class PlannedResult(NamedTuple):
  """The sharding of one array of a jitted function's result.

  Attributes:
    sharding: the sharding that it is pinned to; None if the compiler chooses.
    source: the origin of the sharding: 'placement', 'names', or the index of the leaf, among those of the arguments,
      whose sharding it keeps. None: the compiler.
    on_host: whether the result is moved to the host's memory, if the compiler chooses its sharding.
  """

  sharding: Sharding | None
  source: str | int | None = None
  on_host: bool = False


def parts(tree: Any, placements: Any, below: KeyPath = ()) -> tuple[list[PlacedPart], Any]:
  """The parts of a tree that placements are given for, and the structure whose leaves they are.

  Args:
    tree: the tree.
    placements: one placement, or a tree of them that is a prefix of `tree`.
    below: path of `tree` in a larger one.

  Raises:
    LayoutError: something is not a placement, the placements are not a prefix of the tree, or a module of the tree
      contains itself.
  """
  check_no_cycles(tree)
  check_no_cycles(placements)
  described, treedef = jax.tree_util.tree_flatten_with_path(placements, is_leaf=is_placement)
  wrong = [placement for _, placement in described if not is_placement(placement)]
  try:
    if wrong:
      raise ValueError(f'{value_text(wrong[0])} is not a placement.')
    trees = treedef.flatten_up_to(tree)
  except (ValueError, TypeError) as error:
    raise LayoutError(
      f'{f"{path_string(below)}: the" if below else "The"} placements {value_text(placements)} are not a prefix of the tree: {shown(error)}\n'
      "Fix: give one array's names, such as ('batch', None), for all leaves, or a tree of placements shaped "
      'like the arrays; mesh axes go into a PartitionSpec, rules into Rules(...).'
    ) from None
  return [
    PlacedPart((*below, *path), one, part) for (path, one), part in zip(described, trees, strict=True)
  ], treedef


def is_placement(x: Any) -> bool:
  """Whether this is one placement, rather than a tree of them."""
  return x is None or is_names(x) or isinstance(x, (PartitionSpec, Sharding)) or is_table(x)


def is_table(x: Any) -> bool:
  """Whether this is a rule table, or a clause that is one on its own."""
  return not isinstance(x, Sharding) and is_whole_table(x)


def axes_for_names(names: Any, sizes: Container[str], rules: Rules) -> list[Problem]:
  """The mesh axes among logical names, which would be ignored silently.

  Args:
    names: logical names of one array.
    sizes: the axes of the mesh.
    rules: the rule table.
  """
  return [
    Problem(
      f'dim {dim} {value_text(name)}: this is a mesh axis, where logical names are expected.',
      'give mesh axes as a PartitionSpec, or use a logical name that has a rule.',
    )
    for dim, name in enumerate(names)
    if name in sizes and name not in rules.by_name
  ]


def is_names(x: Any) -> bool:
  """Whether this is one array's logical names."""
  return isinstance(x, tuple) and all(entry is None or isinstance(entry, str) for entry in x)
