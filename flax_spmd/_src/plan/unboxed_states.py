"""Unboxed states: the axis names of states whose boxes were removed.

A state without boxes costs nothing extra per step, but its arrays have no names. The layout that planned it
records its boxes under its *structure* (treedef and shapes), and puts them back where names are needed.
Equal layouts share their records, so either of them may have planned the state.

    plain = states.unbox(state)     # recorded
    states.rebox(result)            # boxes back on every part of the result with a recorded structure

Two states of one structure may have different names. The shardings of their arrays then decide between
them; arrays without shardings stay unboxed.

A state of a model without names is recorded by its structure as well. Rules for paths and `fsdp` apply to
it, and the record shows that they do when it is a result of a jitted function.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from flax_spmd._src.names import box_trees

_instances: weakref.WeakSet[UnboxedStates] = weakref.WeakSet()


def rebox_by_shardings(state: Any) -> Any:
  """Puts back the boxes that any layout removed from a state.

  Args:
    state: a state without boxes, concrete or abstract.

  Returns:
    The state with its boxes, or unchanged if no layout has planned it with the shardings of its arrays, or
    if states with different names were planned so.
  """
  shardings, structure = _shardings(state), _structure(state)
  if structure is None:
    return state
  candidates = [one for states in list(_instances) for one in states.with_structure(structure)]
  boxed = {one.boxed for one in candidates if one.shardings == shardings}
  return boxed.pop().unflatten(jax.tree.leaves(state)) if len(boxed) == 1 else state


class _UnboxedState(NamedTuple):
  """A recorded state: its structure with boxes, and the sharding of each leaf."""

  boxed: Any
  shardings: tuple[NamedSharding, ...]


class UnboxedStates:
  """The states that were planned under one mesh and one rule table, by their structure.

  Args:
    leaf_shardings: function that returns a sharding per leaf of a boxed tree.
  """

  def __init__(self, leaf_shardings: Callable[[Any], list[NamedSharding]]):
    self._leaf_shardings = leaf_shardings
    self._boxed: dict[Any, list[_UnboxedState]] = {}
    self._unnamed: dict[Any, tuple[NamedSharding, ...] | None] = {}
    _instances.add(self)

  def with_structure(self, structure: Any) -> list[_UnboxedState]:
    """The states of a structure that were unboxed here."""
    return self._boxed.get(structure, [])

  def unbox(self, state: Any) -> Any:
    """Removes the boxes of a state and records them, unless it is a lone array."""
    plain = box_trees.unbox(state, apply_constraint=False)
    structure = _structure(plain)
    if structure is not None:
      unboxed = _UnboxedState(jax.tree.structure(state), tuple(self._leaf_shardings(state)))
      if unboxed not in self._boxed.setdefault(structure, []):
        self._boxed[structure].append(unboxed)
    return plain

  def record(self, state: Any) -> Any:
    """Records the shardings of a state; of a tuple or list also those of each element. Returns the state."""
    leaves, treedef = jax.tree.flatten(state)
    shardings = treedef.unflatten(self._leaf_shardings(state)) if leaves else state
    parts = zip(state, shardings, strict=True) if type(state) in (tuple, list) else ()
    for part, part_shardings in ((state, shardings), *parts):
      structure = _structure(part)
      if structure is not None:
        planned = tuple(jax.tree.leaves(part_shardings))
        # parts of one structure that are sharded differently cannot be distinguished
        same = self._unnamed.get(structure, planned) == planned
        self._unnamed[structure] = planned if same else None
    return state

  def shardings_of(self, tree: Any) -> tuple[NamedSharding, ...] | None:
    """The shardings recorded for the structure of a tree; None if there are none."""
    return self._unnamed.get(_structure(tree)) if self._unnamed else None

  def rebox(self, tree: Any) -> Any:
    """Puts the boxes back on every part of a tree that was unboxed here."""
    if not self._boxed:
      return tree
    parts, treedef = jax.tree.flatten(tree, is_leaf=lambda node: _structure(node) in self._boxed)
    return treedef.unflatten(map(self._rebox_part, parts))

  def _rebox_part(self, part: Any) -> Any:
    candidates = self.with_structure(_structure(part))
    if len(candidates) > 1:
      shardings = _shardings(part)
      candidates = [one for one in candidates if one.shardings == shardings]
    return candidates[0].boxed.unflatten(jax.tree.leaves(part)) if len(candidates) == 1 else part


def _shardings(tree: Any) -> tuple[Any, ...]:
  return tuple(getattr(leaf, 'sharding', None) for leaf in jax.tree.leaves(tree))


def _structure(tree: Any) -> Any:
  """Treedef and shapes of a state; None for a lone array, and for a treedef without a hash."""
  leaves, treedef = jax.tree.flatten(tree)
  if jax.tree_util.treedef_is_leaf(treedef):
    return None
  try:
    hash(treedef)
  except TypeError:  # it holds static data without a hash
    return None
  return treedef, tuple(getattr(leaf, 'shape', ()) for leaf in leaves)
