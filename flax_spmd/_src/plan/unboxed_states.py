"""Memory: which names a state had before its boxes were taken off.

A state without boxes costs nothing extra per step, but says nothing about its axes. The layout that
planned it remembers it by its *form* (tree structure and shapes) and puts the boxes back whenever it
has to know. Equal layouts share one memory, so it does not matter which of them planned the state.

    plain = memory.unboxed(state)   # remembered
    memory.reboxed(result)          # boxes back on, wherever a remembered form occurs in the tree

Two states of one form and other names cannot be told apart by form; then their arrays' shardings
decide, and where there are none yet, nothing is put back.

A state that never had boxes, of a model without names, is remembered by its form as well: the rules for
paths and for what is left say where it goes, and whoever meets it again knows that they apply.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from flax_spmd._src.names import box_trees as trees

_all: weakref.WeakSet[Memory] = weakref.WeakSet()


def recalled(state: Any) -> Any:
  """A state without boxes with those that it had when some layout planned it; itself if none did.

  The shardings of its arrays have to be those that were planned: that is how it is known. Where they
  were planned so for states of other names too, nothing is known.
  """
  found = tuple(getattr(leaf, 'sharding', None) for leaf in jax.tree.leaves(state))
  form = _form(state)
  known = [one for memory in list(_all) for one in memory.known(form)] if form is not None else []
  boxed = {one.boxed for one in known if one.shardings == found}
  return boxed.pop().unflatten(jax.tree.leaves(state)) if len(boxed) == 1 else state


class _Known(NamedTuple):
  """A remembered state: its structure with boxes, and where its leaves go."""

  boxed: Any
  shardings: tuple[NamedSharding, ...]


class Memory:
  """What has been planned under one mesh and one rule table, without its boxes.

  Args:
    leaf_shardings: gives a sharding per leaf of a boxed tree.
  """

  def __init__(self, leaf_shardings: Callable[[Any], list[NamedSharding]]):
    self._leaf_shardings = leaf_shardings
    self._known: dict[Any, list[_Known]] = {}
    self._noted: dict[Any, tuple[NamedSharding, ...] | None] = {}
    _all.add(self)

  def known(self, form: Any) -> list[_Known]:
    """The states of a form that are remembered."""
    return self._known.get(form, [])

  def unboxed(self, state: Any) -> Any:
    """The state without its boxes, remembered. A lone array has no form to be known by."""
    plain = trees.unbox(state, apply_constraint=False)
    form = _form(plain)
    if form is not None:
      known = _Known(jax.tree.structure(state), tuple(self._leaf_shardings(state)))
      if known not in self._known.setdefault(form, []):
        self._known[form].append(known)
    return plain

  def noted(self, state: Any) -> Any:
    """The state, remembered with its places, as a whole and, if it is a tuple or a list, in its parts."""
    leaves, treedef = jax.tree.flatten(state)
    placed = treedef.unflatten(self._leaf_shardings(state)) if leaves else state
    parts = zip(state, placed, strict=True) if type(state) in (tuple, list) else ()
    for part, where in ((state, placed), *parts):
      form = _form(part)
      if form is not None:
        shardings = tuple(jax.tree.leaves(where))
        # two parts of one form that lie differently cannot be told apart
        self._noted[form] = shardings if self._noted.get(form, shardings) == shardings else None
    return state

  def places_of(self, tree: Any) -> tuple[NamedSharding, ...] | None:
    """Where the leaves of a state that was noted go; None if it was not."""
    return self._noted.get(_form(tree)) if self._noted else None

  def reboxed(self, tree: Any) -> Any:
    """The tree with the boxes back on every part of it that is remembered."""
    if not self._known:
      return tree
    parts, treedef = jax.tree.flatten(tree, is_leaf=lambda node: _form(node) in self._known)
    return treedef.unflatten(map(self._rebox, parts))

  def _rebox(self, part: Any) -> Any:
    candidates = self._known.get(_form(part), [])
    leaves = jax.tree.leaves(part)
    if len(candidates) > 1:
      found = tuple(getattr(leaf, 'sharding', None) for leaf in leaves)
      candidates = [known for known in candidates if known.shardings == found]
    return candidates[0].boxed.unflatten(leaves) if len(candidates) == 1 else part


def _form(tree: Any) -> Any:
  """What a state without boxes is known by; None for a single leaf, and where that has no hash."""
  leaves, treedef = jax.tree.flatten(tree)
  if jax.tree_util.treedef_is_leaf(treedef):
    return None
  try:
    hash(treedef)
  except TypeError:  # something static in the tree is not hashable
    return None
  return treedef, tuple(getattr(leaf, 'shape', ()) for leaf in leaves)
