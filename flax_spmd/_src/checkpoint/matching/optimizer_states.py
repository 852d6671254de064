"""Optimizer states: which saved state corresponds to which state of the target.

optax builds an optimizer's state from NamedTuples, one for each transformation in a chain. When a chain
grows, the same state gets another path. Its class identifies it: `mu` of a `ScaleByAdamState` is a running
average of gradients at any position, and `mu` of another class is something else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from flax_spmd._src.checkpoint.matching.routes import Side


class StateField(NamedTuple):
  """The optimizer state that a leaf belongs to.

  Attributes:
    state: path of the innermost state around the leaf.
    kind: class name of that state.
  """

  state: str
  kind: str


def state_fields(paths: Iterable[str], kinds: Mapping[str, str]) -> dict[str, StateField]:
  """The optimizer state of each leaf that belongs to one, by path.

  Example:
    >>> state_fields(['params/w', 'opt_state/0/mu/w'], {'opt_state/0': 'ScaleByAdamState'})
    {'opt_state/0/mu/w': StateField(state='opt_state/0', kind='ScaleByAdamState')}
  """
  fields = {}
  for path in paths:
    state = path
    while kinds and '/' in state:
      state = state.rpartition('/')[0]
      if state in kinds:
        fields[path] = StateField(state, kinds[state])
        break
  return fields


def optimizer_of(state: str, kinds: Mapping[str, str]) -> str:
  """The path of the optimizer that contains a state: the path before the first chain index or state.

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
  saved: Mapping[str, StateField],
  target: Mapping[str, StateField],
  saved_kinds: Mapping[str, str],
  target_kinds: Mapping[str, str],
) -> dict[str, str]:
  """Maps target states to saved states at another path.

  A target state has moved if the checkpoint holds another kind, or no state, at its path. Moved states of
  one kind and optimizer are paired in order, provided that both sides have equally many left over.
  """
  of_saved, of_target = (
    {field.state: field.kind for field in fields.values()} for fields in (saved, target)
  )
  left = [state for state, kind in of_saved.items() if of_target.get(state) != kind]
  unmatched = [state for state, kind in of_target.items() if of_saved.get(state) != kind]
  candidates = _grouped(left, of_saved, saved_kinds)
  moved = {}
  for group, states in _grouped(unmatched, of_target, target_kinds).items():
    if len(states) == len(candidates.get(group, ())):
      moved.update(zip(states, candidates[group], strict=True))
  return moved


def _grouped(
  states: Iterable[str], kind_of: Mapping[str, str], kinds: Mapping[str, str]
) -> dict[tuple[str, str], list[str]]:
  """States by their optimizer and kind."""
  groups: dict[tuple[str, str], list[str]] = {}
  for state in states:
    groups.setdefault((optimizer_of(state, kinds), kind_of[state]), []).append(state)
  return groups


class ParameterIndex:
  """Finds the parameter of each optimizer leaf: the leaf whose path ends alike.

  Args:
    side: leaves and optimizer states to index.
  """

  def __init__(self, side: Side):
    self._leaves = side.leaves
    self._fields = state_fields(side.leaves, side.kinds)
    self._by_tail: dict[str, str] = {}
    for path in side.leaves:
      if path not in self._fields:
        for tail in _tails(path):
          self._by_tail.setdefault(tail, path)

  def parameter_of(self, path: str) -> str:
    """The path of the parameter that an optimizer leaf belongs to; any other leaf's own path."""
    if path not in self._fields:
      return path
    return next((self._by_tail[tail] for tail in _tails(path) if tail in self._by_tail), path)

  def is_placeholder(self, path: str) -> bool:
    """Whether a leaf is a one-element stand-in for state that an optimizer does not keep of a parameter."""
    leaf = self._leaves[path]
    return (
      path in self._fields
      and math.prod(leaf.shape) == 1
      and leaf.shape != self._leaves[self.parameter_of(path)].shape
    )


def _tails(path: str) -> Iterator[str]:
  """`a/b/c`, `b/c`, `c`."""
  yield path
  while '/' in path:
    path = path.partition('/')[2]
    yield path
