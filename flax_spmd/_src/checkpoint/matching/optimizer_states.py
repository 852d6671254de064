"""States of optimizers: which of a checkpoint's is which of a target's.

optax makes an optimizer's state of NamedTuples, one for each transformation in a chain, so that the same
state has another path when a chain grows. What it is, is its class: `mu` of a `ScaleByAdamState` is an
average of gradients wherever it stands, and `mu` of another class is something else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from flax_spmd._src.checkpoint.matching.routes import Side


class Place(NamedTuple):
  """Where a leaf stands in an optimizer: the path of the innermost state around it, and its kind."""

  state: str
  kind: str


def places(paths: Iterable[str], kinds: Mapping[str, str]) -> dict[str, Place]:
  """The place of each leaf that is in a state.

  Example:
    >>> places(['params/w', 'opt_state/0/mu/w'], {'opt_state/0': 'ScaleByAdamState'})
    {'opt_state/0/mu/w': Place(state='opt_state/0', kind='ScaleByAdamState')}
  """
  found = {}
  for path in paths:
    state = path
    while kinds and '/' in state:
      state = state.rpartition('/')[0]
      if state in kinds:
        found[path] = Place(state, kinds[state])
        break
  return found


def optimizer_of(state: str, kinds: Mapping[str, str]) -> str:
  """The path of the optimizer that a state is part of: what comes before the first chain or state.

  Example:
    >>> optimizer_of('generator/opt/1/0', {'generator/opt/1/0': 'ScaleByAdamState'})
    'generator/opt'
  """
  path = ''
  for name in state.split('/'):
    if name.isdecimal() or path in kinds:
      break
    path = f'{path}/{name}' if path else name
  return path


def moved_states(
  saved: Mapping[str, Place],
  wanted: Mapping[str, Place],
  saved_kinds: Mapping[str, str],
  wanted_kinds: Mapping[str, str],
) -> dict[str, str]:
  """The wanted states that stand elsewhere in the checkpoint, and where.

  A state stands elsewhere if its own path holds another kind, or nothing, in the checkpoint, and as many
  states of its kind are left over in the same optimizer there as here; then the first is the first, and
  so on.
  """
  of_saved, of_wanted = (
    {place.state: place.kind for place in them.values()} for them in (saved, wanted)
  )
  left = [state for state, kind in of_saved.items() if of_wanted.get(state) != kind]
  open_states = [state for state, kind in of_wanted.items() if of_saved.get(state) != kind]
  theirs = _grouped(left, of_saved, saved_kinds)
  found = {}
  for group, ours in _grouped(open_states, of_wanted, wanted_kinds).items():
    if len(ours) == len(theirs.get(group, ())):
      found.update(zip(ours, theirs[group], strict=True))
  return found


def _grouped(
  states: Iterable[str], kind_of: Mapping[str, str], kinds: Mapping[str, str]
) -> dict[tuple[str, str], list[str]]:
  """States by their optimizer and kind."""
  groups: dict[tuple[str, str], list[str]] = {}
  for state in states:
    groups.setdefault((optimizer_of(state, kinds), kind_of[state]), []).append(state)
  return groups


class Owners:
  """The parameter that each leaf of an optimizer is of: the one whose path ends alike."""

  def __init__(self, side: Side):
    self._leaves = side.leaves
    self._places = places(side.leaves, side.kinds)
    self._by_tail: dict[str, str] = {}
    for path in side.leaves:
      if path not in self._places:
        for tail in _tails(path):
          self._by_tail.setdefault(tail, path)

  def of(self, path: str) -> str:
    """The path of a leaf's parameter; its own if it is none's."""
    if path not in self._places:
      return path
    return next((self._by_tail[tail] for tail in _tails(path) if tail in self._by_tail), path)

  def is_placeholder(self, path: str) -> bool:
    """Whether a leaf only stands in for what an optimizer does not keep of a parameter: one element."""
    leaf = self._leaves[path]
    return (
      path in self._places
      and math.prod(leaf.shape) == 1
      and leaf.shape != self._leaves[self.of(path)].shape
    )


def _tails(path: str) -> Iterator[str]:
  """`a/b/c`, `b/c`, `c`."""
  yield path
  while '/' in path:
    path = path.partition('/')[2]
    yield path
