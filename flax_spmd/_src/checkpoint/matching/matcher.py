"""Matching: which saved leaves each wanted leaf is made of.

A leaf comes from the leaf of its own path, after renaming; or, inside an optimizer's state, from the
same field of the state of the same kind, wherever that stands in a chain; or from the layers that a stack
says. Whatever is left over on either side is for `differences` to tell.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from flax_spmd._src.checkpoint.matching.allowed_changes import Conversion, Stack
from flax_spmd._src.checkpoint.matching.moved_axes import followers
from flax_spmd._src.checkpoint.matching.optimizer_states import Place, moved_states, places
from flax_spmd._src.checkpoint.matching.routes import Route, Side, without
from flax_spmd._src.checkpoint.storage.record import Leaf
from flax_spmd.errors import Problem


class Matched(NamedTuple):
  """Where the wanted leaves come from.

  Attributes:
    routes: per wanted path, if something was found.
    lacking: wanted paths for which nothing was found.
    extra: saved paths that nothing is made of.
    moved: states of optimizers that stand elsewhere in the checkpoint, and where.
    problems: what is wrong with the renames and stacks themselves.
  """

  routes: dict[str, Route]
  lacking: list[str]
  extra: list[str]
  moved: dict[str, str]
  problems: list[Problem]


def match(saved: Side, wanted: Side, conversion: Conversion) -> Matched:
  """Finds where each wanted leaf comes from."""
  matcher = _Matcher(saved, wanted, conversion)
  routes = {path: matcher.route(path, leaf) for path, leaf in wanted.leaves.items()}
  routes = matcher.check(routes, wanted.leaves)
  moved, unclear = followers(routes, saved, wanted)
  matcher.problems += unclear
  routes |= moved
  found = {path: route for path, route in routes.items() if route is not None}
  lacking = [path for path, route in routes.items() if route is None]
  used = {source for route in found.values() for source in route.sources}
  extra = [old for old in matcher.saved_by_path.values() if old not in used]
  return Matched(found, lacking, extra, matcher.moved, matcher.problems)


class _Matcher:
  """Looks up saved leaves for wanted ones."""

  def __init__(self, saved: Side, wanted: Side, conversion: Conversion):
    self.saved, self.conversion = saved.leaves, conversion
    self.problems: list[Problem] = []
    self.saved_by_path = self._renamed()
    kinds = {conversion.renamed(path): kind for path, kind in saved.kinds.items()}
    self._saved_places = places(self.saved_by_path, kinds)
    self._places = places(wanted.leaves, wanted.kinds)
    self.moved = moved_states(self._saved_places, self._places, kinds, wanted.kinds)

  def _renamed(self) -> dict[str, str]:
    """The saved path by the path that it is looked up by; a renamed leaf displaces one that is not."""
    stay = {path: path for path in self.saved if self.conversion.renamed(path) == path}
    changed: dict[str, str] = {}
    for path in self.saved:
      to = self.conversion.renamed(path)
      if to != path and to in changed:
        text = f'{changed[to]} and {path} are both renamed to {to}.'
        self.problems.append(Problem(text, 'make the patterns in renames match one of them only.'))
      elif to != path:
        changed[to] = path
    for pattern, _ in self.conversion.renames:
      if not any(re.search(pattern, path) for path in self.saved):
        text = f'renames: {pattern!r} is found in no path of the checkpoint.'
        self.problems.append(Problem(text, _LOOK))
    return stay | changed

  def route(self, path: str, leaf: Leaf) -> Route | None:
    """Where a wanted leaf comes from; None: from nowhere."""
    old = self._look_up(path, path)
    if old is not None:
      order = self._order(self.saved[old], leaf)
      return Route((old,), 'move', order=order) if order else Route((old,))
    for stack in self.conversion.stacks:
      found = self._unstacked(stack, path, leaf) or self._stacked(stack, path, leaf)
      if found is not None:
        return found
    return None

  def _look_up(self, path: str, other: str) -> str | None:
    """The saved leaf called `other`, where the wanted leaf `path` would have it.

    Inside an optimizer's state, that is in the saved state of the same kind.
    """
    place = self._places.get(path)
    if place is None:
      return self.saved_by_path.get(other)
    if place.state in self.moved:
      return self.saved_by_path.get(self.moved[place.state] + other[len(place.state) :])
    old = self.saved_by_path.get(other)
    return old if self._fits(place, self._saved_places.get(other)) else None

  def _fits(self, wanted: Place, saved: Place | None) -> bool:
    """Whether a saved leaf is of the same kind of state, as far as that is known."""
    return saved is None or saved.kind == wanted.kind

  def _order(self, saved: Leaf, wanted: Leaf) -> tuple[int, ...] | None:
    """For each wanted dimension the saved one, where names that may move have moved."""
    names, others, moved = self.conversion.names(saved.names), wanted.names, self.conversion.moved
    if not moved or names is None or others is None or names == others or len(set(names)) < len(names):
      return None
    stay, stays = ([name for name in these if name not in moved] for these in (names, others))
    is_permuted = sorted(map(str, names)) == sorted(map(str, others))
    return tuple(map(names.index, others)) if is_permuted and stay == stays else None

  # -- stacks

  def _placeholder(self, path: str, sources: tuple[str, ...], leaf: Leaf) -> Route | None:
    """An optimizer's stand-in for what it does not keep of a parameter: one element, however many layers."""
    shapes = {self.saved[source].shape for source in sources} | {leaf.shape}
    is_one = path in self._places and len(shapes) == 1 and math.prod(leaf.shape) == 1
    return Route(sources) if is_one else None

  def _unstacked(self, stack: Stack, path: str, leaf: Leaf) -> Route | None:
    """A single layer's leaf, of the stacked one that was saved."""
    stacked, number = stack.number(path) or ('', 0)
    old = self._look_up(path, stacked) if stacked else None
    axis = self._axis(stack, path, self.saved[old], leaf) if old else None
    if old is None or axis is None:
      return self._placeholder(path, (old,), leaf) if old else None
    return Route((old,), 'unstack', axis, number)

  def _stacked(self, stack: Stack, path: str, leaf: Leaf) -> Route | None:
    """A stacked leaf, of the single layers' that were saved."""
    if stack.split(path) is None:
      return None
    sources: list[str] = []
    while (old := self._look_up(path, stack.single_path(path, len(sources)))) is not None:
      sources.append(old)
    axis = self._axis(stack, path, leaf, self.saved[sources[0]]) if sources else None
    if axis is None:
      return self._placeholder(path, tuple(sources), leaf) if sources else None
    if leaf.shape[axis] != len(sources):
      text = f'{path}: the checkpoint has {len(sources)} of these layers, the target {leaf.shape[axis]}.'
      self._wrong(text, _COUNT)
    return Route(tuple(sources), 'stack', axis)

  def _axis(self, stack: Stack, path: str, stacked: Leaf, single: Leaf) -> int | None:
    """The dimension that a stacked leaf has and a single one has not."""
    rank = len(stacked.shape)
    fits = [axis for axis in range(rank) if without(stacked.shape, axis) == single.shape]
    if stack.axis is not None:
      return stack.axis % rank if rank and stack.axis % rank in fits else None
    names = stacked.names, single.names
    if names[0] is not None and names[1] is not None:
      fits = [axis for axis in fits if without(names[0], axis) == names[1]] or fits
    if len(fits) > 1:
      text = f'{path}: dimensions {" and ".join(map(str, fits))} of {stacked} could each be that of the layers.'
      self._wrong(text, f'say which one: stacks={{{stack.stacked!r}: ({stack.single!r}, {fits[0]})}}.')
    return fits[0] if fits else None

  def check(
    self, routes: Mapping[str, Route | None], wanted: Mapping[str, Leaf]
  ) -> dict[str, Route | None]:
    """The routes without those that take another dimension than that of the layers for it.

    Each layer of a stacked leaf has to be used.
    """
    odd = self._odd(routes, wanted)
    checked = {path: None if path in odd else route for path, route in routes.items()}
    taken: dict[tuple[str, int], dict[int, str]] = {}
    for path, route in checked.items():
      if route and route.step == 'unstack':
        taken.setdefault((route.sources[0], route.axis), {})[route.number] = path
    for (old, axis), paths in taken.items():
      size = self.saved[old].shape[axis]
      for path in (path for number, path in paths.items() if number >= size):
        self._wrong(f'{path}: the checkpoint has {size} of these layers, in {old}.', _COUNT)
      if len(paths) < size:
        self._wrong(
          f'{old}: the checkpoint has {size} of these layers, the target {len(paths)}.', _COUNT
        )
    return checked

  def _odd(
    self, routes: Mapping[str, Route | None], wanted: Mapping[str, Leaf]
  ) -> Mapping[str, Route | None]:
    """Leaves whose stacked dimension is called otherwise than that of the parameters: factored state."""
    names: dict[str, Any] = {}
    for path, route in routes.items():
      if route and route.step in ('stack', 'unstack'):
        leaf = self.saved[route.sources[0]] if route.step == 'unstack' else wanted[path]
        if leaf.names is not None and leaf.names[route.axis] is not None:
          names[path] = leaf.names[route.axis]
    of_parameters = {name for path, name in names.items() if path not in self._places}
    known = of_parameters or (set(names.values()) if len(set(names.values())) < 2 else set())
    odd = {path: routes[path] for path, name in names.items() if name not in known}
    called = ' or '.join(sorted(map(repr, known)))
    told: dict[str, Any] = {}
    for path, route in odd.items() if known else ():
      if route and not self.conversion.keeps(path):
        told[route.sources[0] if route.step == 'unstack' else path] = names[path]
    for path, name in told.items():
      self._wrong(f'{path}: its dimension {name!r} is no stack of layers, as {called} is.', _ODD)
    return odd

  def _wrong(self, text: str, fix: str) -> None:
    self.problems.append(Problem(text, fix))


_LOOK = 'look the paths up with flax-spmd checkpoint show.'
_ODD = (
  "such state cannot be converted; keep the target's own with missing=, and leave it out with unused=."
)
_COUNT = 'give the model as many layers as were saved.'
