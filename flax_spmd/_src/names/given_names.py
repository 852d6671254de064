"""Given names: boxes from names that are not in the tree itself, such as a table or a function.

create = lambda: with_names(create_state(), params_axes)
plan = layout.plan(create, boxed=False)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from flax_spmd._src.compat import is_variable_type
from flax_spmd._src.cycles import check_no_cycles
from flax_spmd._src.names.axes_collections import (
  Keys,
  entries_in,
  is_names,
  keys_of,
  placements,
)
from flax_spmd._src.names.box_trees import is_unit, static_of
from flax_spmd._src.names.boxes import LogicallyPartitioned, Partitioned
from flax_spmd._src.names.nnx_variables import with_metadata_names
from flax_spmd._src.public import public
from flax_spmd._src.rules.clauses import Leaf
from flax_spmd._src.text import value_text
from flax_spmd._src.tree_paths import path_string
from flax_spmd.errors import LayoutError, Problem, raise_problems


@public('flax_spmd')
def with_names(tree: Any, names: Any) -> Any:
  """The tree with a box around every array that is given names; it may have boxes with the same names already.

  Optimizer state needs no names: it has those of its parameters.

  Args:
    tree: any tree, concrete or abstract.
    names: an axes collection (`params_axes`), a tree of names, or a function `leaf -> names` of a `Leaf`. Names are a
      tuple of logical names, a PartitionSpec of mesh axes, or None for an array without names. A tree of names may be
      for a part of `tree`: the outermost part that has its arrays.

  Raises:
    LayoutError: names for an array that is not in the tree, names that differ from those of a box, names that are
      neither a tuple nor a PartitionSpec (lists all of them), or a tree without names in place of `names`.

  Example:
    >>> state = {'params': {'w': jnp.ones((8, 16)), 'b': jnp.ones(16)}}
    >>> with_names(state, {'w': ('embed', 'mlp')})['params']['w']
    LogicallyPartitioned(float32[8,16], names=('embed', 'mlp'))
    >>> with_names(state, lambda leaf: ('mlp',) if leaf.path.endswith('/b') else None)['params']['b']
    LogicallyPartitioned(float32[16], names=('mlp',))
  """
  check_no_cycles(tree)
  flat, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_unit)
  units = [_NamedUnit(path_string(path), keys_of(path), unit) for path, unit in flat]
  given = _by_function(units, names) if callable(names) else _by_tree(units, names)
  raise_problems(
    [problem for unit, each in zip(units, given, strict=True) for problem in _problems(unit, each)]
  )
  return jax.tree.unflatten(
    treedef, [_boxed(unit.unit, each) for unit, each in zip(units, given, strict=True)]
  )


class _NamedUnit(NamedTuple):
  """A box or bare leaf, and its path."""

  path: str
  keys: Keys
  unit: Any


def _by_function(units: Sequence[_NamedUnit], function: Callable[[Leaf], Any]) -> list[list[Any]]:
  """The names that a function gives each unit."""
  given = []
  for each in units:
    static, value = static_of(each.unit)
    shape, own = getattr(value, 'shape', None), static and static.names
    names = None if shape is None else function(Leaf(each.path, tuple(shape), value.dtype, own))
    given.append([] if names is None else [names])
  return given


def _by_tree(units: Sequence[_NamedUnit], names: Any) -> list[list[Any]]:
  """The names that a tree of names gives each unit."""
  entries = entries_in(names)
  if not entries and jax.tree.leaves(names):
    raise LayoutError(
      f'There are no names in the {type(names).__name__} that with_names is given.\n'
      "Fix: write with_names(tree, names), with names such as {'kernel': ('embed', 'mlp')}."
    )
  placed = placements([entry.keys for entry in entries], [each.keys for each in units])
  raise_problems(
    [
      Problem(
        f'{entry.origin} has names {value_text(entry.names)}, but the tree has no such array.',
        'give names to arrays of the tree, by their paths in the tree or in a part of it.',
      )
      for entry in entries
      if entry.keys not in placed
    ]
  )
  given: list[list[Any]] = [[] for _ in units]
  for entry in entries:
    for index in placed[entry.keys]:
      given[index].append(entry.names)
  return given


def _problems(unit: _NamedUnit, given: Iterable[Any]) -> Iterator[Problem]:
  for names in given:
    if not is_names(names):
      yield Problem(
        f'{unit.path}: its names are {value_text(names)}, a {type(names).__name__}.',
        'give a tuple of logical names, a PartitionSpec of mesh axes, or None.',
      )
      return
  static, _ = static_of(unit.unit)
  boxed = (
    [] if static is None else [tuple(static.names) if static.logical else PartitionSpec(*static.names)]
  )
  named = list(dict.fromkeys([*boxed, *given]))
  if len(named) > 1:
    yield Problem(
      f'{unit.path}: its names differ: {", ".join(map(repr, named))}.',
      'name the array once, or alike everywhere.',
    )


def _boxed(unit: Any, given: Sequence[Any]) -> Any:
  """A box around a bare leaf with names, or the variable with names; every other unit as it is."""
  if not given or static_of(unit)[0] is not None:
    return unit
  if is_variable_type(type(unit)):
    return with_metadata_names(unit, tuple(given[0]))
  box = Partitioned if isinstance(given[0], PartitionSpec) else LogicallyPartitioned
  return box(unit, tuple(given[0]))
