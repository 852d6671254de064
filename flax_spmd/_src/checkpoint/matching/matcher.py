"""Matching: which saved leaves each target leaf is restored from.

A target leaf is restored from the saved leaf of its own path, after renaming. Inside an optimizer's state, it
comes from the same field of the state of the same kind, at any position in a chain. A saved leaf is rearranged
first. A stack relates stacked leaves to those of single layers, which may come from another stack. Leaves left over
on either side are reported by `differences`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from flax_spmd._src.checkpoint.matching.allowed_changes import (
  Changes,
  LayerStack,
  arrangement_of,
  may_be_missing,
  may_be_unused,
  renamed,
  renamed_axes,
  stacks_of,
)
from flax_spmd._src.checkpoint.matching.arrangements import Arrangement
from flax_spmd._src.checkpoint.matching.moved_axes import inferred_moves
from flax_spmd._src.checkpoint.matching.optimizer_states import StateField, moved_states, state_fields
from flax_spmd._src.checkpoint.matching.resized_dimensions import resized_leaves
from flax_spmd._src.checkpoint.matching.routes import (
  Route,
  Side,
  converted,
  nodes,
  record_of,
  with_keys,
  without,
)
from flax_spmd._src.checkpoint.storage.record import LeafRecord
from flax_spmd._src.text import plural
from flax_spmd.errors import Problem


class Matched(NamedTuple):
  """A checkpoint matched with a target.

  Attributes:
    routes: routes of the target leaves that were matched, by path.
    missing: paths of the other target leaves.
    unused: paths of the saved leaves without a route.
    moved: optimizer states at another path in the checkpoint: target path to saved path.
    problems: errors in the renames and stacks themselves.
  """

  routes: dict[str, Route]
  missing: list[str]
  unused: list[str]
  moved: dict[str, str]
  problems: list[Problem]


def match(saved: Side, target: Side, changes: Changes) -> Matched:
  """Matches each target leaf with saved leaves."""
  matcher = _Matcher(saved, target, changes)
  candidates = {path: matcher.route(path, leaf) for path, leaf in target.leaves.items()}
  candidates = matcher.check(candidates, target.leaves)
  moved, ambiguous = inferred_moves(candidates, saved, target)
  matcher.problems += ambiguous
  candidates |= moved
  candidates |= resized_leaves(candidates, saved, target, changes)
  routes = {
    path: with_keys(route, record_of(route, saved.leaves), target.leaves[path])
    for path, route in candidates.items()
    if route is not None
  }
  for path in [
    path for path, route in routes.items() if _may_be_left(route, path, saved, target, changes)
  ]:
    del routes[path]
  missing = [path for path in candidates if path not in routes]
  matcher.check_numbers(missing)
  used = {source for route in routes.values() for source in route.sources}
  unused = [old for old in dict.fromkeys(matcher.saved_by_path.values()) if old not in used]
  return Matched(routes, missing, unused, matcher.moved, matcher.problems)


def _may_be_left(route: Route, path: str, saved: Side, target: Side, changes: Changes) -> bool:
  """Whether a leaf has another shape in the checkpoint, and may be left out there and kept in the target."""
  return (
    may_be_missing(changes, path)
    and all(may_be_unused(changes, source) for source in route.sources)
    and record_of(route, saved.leaves).shape != target.leaves[path].shape
  )


class _Matcher:
  """Looks up the saved leaves for target leaves."""

  def __init__(self, saved: Side, target: Side, changes: Changes):
    self.saved, self.changes = saved.leaves, changes
    self.problems: list[Problem] = []
    self.saved_by_path = self._renamed()
    self._stacks = stacks_of(changes)
    kinds = {to: kind for path, kind in saved.kinds.items() for to in renamed(changes, path)}
    self._saved_fields = state_fields(self.saved_by_path, kinds)
    self._fields = state_fields(target.leaves, target.kinds)
    self.moved = moved_states(self._saved_fields, self._fields, kinds, target.kinds)

  def _renamed(self) -> dict[str, str]:
    """Saved paths by their renamed paths. A renamed leaf displaces a leaf already at its new path."""
    unchanged: dict[str, str] = {}
    changed: dict[str, str] = {}
    for path, to in ((old, new) for old in self.saved for new in renamed(self.changes, old)):
      if to == path:
        unchanged[path] = path
      elif to in changed:
        text = f'{changed[to]} and {path} are both renamed to {to}.'
        self.problems.append(Problem(text, 'make the pattern in renames match only one of them.'))
      else:
        changed[to] = path
    for pattern, _ in self.changes.renames if self.changes.only is None else ():
      if not any(re.search(pattern, path) for path in self.saved):
        text = f'renames: {pattern!r} matches no path of the checkpoint.'
        self.problems.append(Problem(text, SHOW))
    return unchanged | changed

  def route(self, path: str, leaf: LeafRecord) -> Route | None:
    """The route of a target leaf; None for an unmatched one."""
    route = self._found(path, path, leaf, self._stacks)
    if route is None or route.step in ('stack', 'unstack'):
      return route
    order = self._order(record_of(route, self.saved), leaf)
    return converted([route], 'move', order=order) if order else route

  def _found(
    self, path: str, other: str, leaf: LeafRecord | None, stacks: tuple[LayerStack, ...]
  ) -> Route | None:
    """The route of a leaf at path `other`, which may be an operand of the target leaf at `path`.

    Args:
      path: path of the target leaf.
      other: path of the leaf to find.
      leaf: its record; None for an operand.
      stacks: stacks that may have been applied before.
    """
    old = self._look_up(path, other)
    if old is not None:
      return self._rearranged(old, other)
    for number, stack in reversed(list(enumerate(stacks))):  # the last one is applied last
      before = stacks[:number]
      route = self._unstacked(stack, path, other, leaf, before) or self._stacked(
        stack, path, other, leaf, before
      )
      if route is not None:
        return route
    return None

  def _rearranged(self, old: str, path: str) -> Route:
    """The route of a saved leaf, at its renamed path."""
    arrangement = arrangement_of(self.changes, path)
    return Route((old,)) if arrangement is None else self._arranged(Route((old,)), arrangement, old)

  def _arranged(self, route: Route, arrangement: Arrangement, path: str) -> Route:
    """A route, rearranged; `path` is for the report of one that does not fit."""
    record = record_of(route, self.saved)
    try:
      rearrangement = arrangement.of_shape(record.shape)
    except ValueError as error:
      text = f'{path}: {arrangement.text!r} does not fit {record}: {error}.'
      if all(text != problem.text for problem in self.problems):
        self._wrong(text, _ARRANGEMENT)
      return route
    return converted([route], 'rearrange', rearrangement=rearrangement)

  def _look_up(self, path: str, other: str) -> str | None:
    """The saved leaf at path `other`, on behalf of the target leaf at `path`.

    Inside an optimizer's state, the leaf is looked up in the saved state of the same kind.
    """
    field = self._fields.get(path)
    if field is None:
      return self.saved_by_path.get(other)
    if field.state in self.moved:
      return self.saved_by_path.get(self.moved[field.state] + other[len(field.state) :])
    old = self.saved_by_path.get(other)
    return old if self._same_kind(field, self._saved_fields.get(other)) else None

  def _same_kind(self, target: StateField, saved: StateField | None) -> bool:
    """Whether a saved leaf belongs to the same kind of state, as far as the record shows."""
    return saved is None or saved.kind == target.kind

  def _order(self, saved: LeafRecord, target: LeafRecord) -> tuple[int, ...] | None:
    """The saved dimension of each target dimension, if only names in `Changes.moved` have moved."""
    names, others, moved = renamed_axes(self.changes, saved.names), target.names, self.changes.moved
    if not moved or names is None or others is None or names == others or len(set(names)) < len(names):
      return None
    stay, stays = ([name for name in side if name not in moved] for side in (names, others))
    is_permuted = sorted(map(str, names)) == sorted(map(str, others))
    return tuple(map(names.index, others)) if is_permuted and stay == stays else None

  # -- stacks

  def _placeholder(self, path: str, sources: tuple[str, ...], leaf: LeafRecord | None) -> Route | None:
    """The route of an optimizer's one-element placeholder, which is the same for any number of layers."""
    if leaf is None:
      return None
    shapes = {self.saved[source].shape for source in sources} | {leaf.shape}
    is_one = path in self._fields and len(shapes) == 1 and math.prod(leaf.shape) == 1
    return Route(sources) if is_one else None

  def _unstacked(
    self,
    stack: LayerStack,
    path: str,
    other: str,
    leaf: LeafRecord | None,
    before: tuple[LayerStack, ...],
  ) -> Route | None:
    """The route of a single layer's leaf from a stacked one; the arguments of `_found`."""
    stacked, number = stack.number(other) or ('', 0)
    found = self._found(path, stacked, None, before) if stacked else None
    if found is None:
      return None
    axis = self._axis(stack, path, record_of(found, self.saved), leaf)
    if axis is None:
      return self._placeholder(path, found.sources, leaf)
    return converted([found], 'unstack', axis=axis, layer=number)

  def _stacked(
    self,
    stack: LayerStack,
    path: str,
    other: str,
    leaf: LeafRecord | None,
    before: tuple[LayerStack, ...],
  ) -> Route | None:
    """The route of a stacked leaf from the leaves of single layers; the arguments of `_found`."""
    if stack.split(other) is None:
      return None
    merged = self._merge(stack, other)
    leaf = None if merged else leaf
    found: list[Route] = []
    while stack.is_layer(len(found)):
      single = self._found(path, stack.single_path(other, len(found)), None, before)
      if single is None:
        break
      found.append(single)
    if not found or (stack.labels is not None and len(found) < len(stack.labels)):
      return None
    axis = self._axis(stack, path, leaf, record_of(found[0], self.saved))
    if axis is None:
      return self._placeholder(path, tuple(s for part in found for s in part.sources), leaf)
    if leaf is not None and leaf.shape[axis] != len(found) and not self.changes.resized:
      module = (stack.split(other) or ('',))[0] + stack.stacked
      if stack.labels is not None or self._check_numbers(stack, module):
        self._wrong_count(path, len(found), leaf.shape[axis])
    route = converted(found, 'stack', axis=axis)
    return self._arranged(route, merged, other) if merged else route

  def _merge(self, stack: LayerStack, path: str) -> Arrangement | None:
    """The arrangement of a stack after stacking, as of gates in one dimension: one that its layers do not have."""
    arrangement = arrangement_of(self.changes, path)
    return (
      None if arrangement is arrangement_of(self.changes, stack.single_path(path, 0)) else arrangement
    )

  def _axis(
    self, stack: LayerStack, path: str, stacked: LeafRecord | None, single: LeafRecord | None
  ) -> int | None:
    """The stacked dimension: the one that a stacked leaf has in addition to a single one.

    One of the two is unknown between two stacks. The dimension is then given, named like the module, or the first.
    """
    if stacked is None or single is None:
      return self._unconfirmed_axis(stack, path, stacked, single)
    rank = len(stacked.shape)
    axes = [axis for axis in range(rank) if without(stacked.shape, axis) == single.shape]
    axes = axes or self._resized_axes(stacked, single)
    if axes and self._lacks_axis(stack, path, rank):
      return None
    if not axes and not may_be_missing(self.changes, path):
      return self._misfit_axis(stack, stacked, single)
    if stack.axis is not None:
      axis = stack.given_axis(rank)
      return axis if axis in axes else None
    names = stacked.names, single.names
    if names[0] is not None and names[1] is not None:
      axes = [axis for axis in axes if without(names[0], axis) == names[1]] or axes
    if len(axes) > 1:
      text = (
        f'{path}: dimensions {" and ".join(map(str, axes))} of {stacked} could each be the stacked one.'
      )
      choice = f'Changes(stacks={{{stack.stacked!r}: ({stack.text!r}, {axes[0]})}})'
      self._wrong(text, f'choose one: pass {choice}.')
    return axes[0] if axes else None

  def _resized_axes(self, stacked: LeafRecord, single: LeafRecord) -> list[int]:
    """The possible stacked dimensions of a leaf whose other dimensions may have other sizes."""
    rank = len(stacked.shape)
    if not self.changes.resized or len(single.shape) != rank - 1:
      return []
    ours, theirs = (
      renamed_axes(self.changes, leaf.names) or (None,) * len(leaf.shape) for leaf in (stacked, single)
    )

    def fits(axis: int) -> bool:
      pairs = zip(without(stacked.shape, axis), single.shape, without(ours, axis), theirs, strict=True)
      return all(
        (one is None or two is None or one == two)
        and (a == b or one is two is None or {one, two} & {*self.changes.resized})
        for a, b, one, two in pairs
      )

    return [axis for axis in range(rank) if fits(axis)]

  def _misfit_axis(self, stack: LayerStack, stacked: LeafRecord, single: LeafRecord) -> int | None:
    """The stacked dimension of a leaf with as many elements in other dimensions, to report their shapes."""
    sizes = [math.prod(without(stacked.shape, axis)) for axis in range(len(stacked.shape))]
    axes = [axis for axis, size in enumerate(sizes) if size == math.prod(single.shape) > 1]
    if stack.axis is not None:
      axes = [axis for axis in axes if axis == stack.given_axis(len(stacked.shape))]
    is_insertable = axes and axes[0] <= len(single.shape)
    return axes[0] if is_insertable else None

  def _unconfirmed_axis(
    self, stack: LayerStack, path: str, stacked: LeafRecord | None, single: LeafRecord | None
  ) -> int | None:
    rank = (
      len(single.shape) + 1 if single is not None else len(stacked.shape) if stacked is not None else 0
    )
    if not rank or self._lacks_axis(stack, path, rank):
      return None
    if stack.axis is not None:
      return stack.given_axis(rank)
    return stack.axis_by_names(stacked.names if stacked is not None else None)

  def _lacks_axis(self, stack: LayerStack, path: str, rank: int) -> bool:
    """Whether a leaf has no dimension of the given number, which is reported."""
    lacks = stack.axis is not None and stack.given_axis(rank) is None
    if lacks:
      self.problems.append(stack.axis_problem(path, rank))
    return lacks

  def check(
    self, routes: Mapping[str, Route | None], target: Mapping[str, LeafRecord]
  ) -> dict[str, Route | None]:
    """Removes routes along a dimension other than that of the layers.

    Reports stacked leaves of which some layers are unused, or too many requested.
    """
    odd = self._odd(routes, target)
    checked = {path: None if path in odd else route for path, route in routes.items()}
    layers: dict[tuple[Route, int], dict[int, str]] = {}
    for path, route in checked.items():
      for node in nodes(route) if route else ():
        if node.step == 'unstack':
          layers.setdefault((node.operands[0], node.axis), {})[node.layer] = path
    stacked = {(operand, axis): record_of(operand, self.saved) for operand, axis in layers}
    resized = {
      record.shape[axis]
      for (_, axis), record in stacked.items()
      if (names := renamed_axes(self.changes, record.names)) and names[axis] in self.changes.resized
    }
    for (operand, axis), paths in layers.items():
      size, old = stacked[operand, axis].shape[axis], operand.sources[0]
      if size in resized:
        checked.update((path, None) for layer, path in paths.items() if layer >= size)
        continue
      for path in (path for layer, path in paths.items() if layer >= size):
        self._wrong(f'{path}: the checkpoint has only {plural(size, "layer")}, in {old}.', _COUNT)
      if len(paths) < size:
        self._wrong_count(old, size, len(paths))
    return checked

  def _odd(
    self, routes: Mapping[str, Route | None], target: Mapping[str, LeafRecord]
  ) -> Mapping[str, Route | None]:
    """Routes of factored state along a dimension that is named unlike the parameters' stacked dimension."""
    names: dict[str, Any] = {}
    for path, route in routes.items():
      if route and route.step in ('stack', 'unstack'):
        stacked = record_of(route.operands[0], self.saved)
        leaf = stacked if route.step == 'unstack' else target[path]
        if leaf.names is not None and leaf.names[route.axis] is not None:
          names[path] = leaf.names[route.axis]
    of_parameters = {name for path, name in names.items() if path not in self._fields}
    known = of_parameters or (set(names.values()) if len(set(names.values())) < 2 else set())
    odd = {path: routes[path] for path, name in names.items() if name not in known}
    listed = ' or '.join(sorted(map(repr, known)))
    reported: dict[str, Any] = {}
    for path, route in odd.items() if known else ():
      if route and not may_be_missing(self.changes, path):
        reported[route.sources[0] if route.step == 'unstack' else path] = names[path]
    for path, name in reported.items():
      self._wrong(f'{path}: its dimension {name!r} does not stack layers, as {listed} does.', _ODD)
    return odd

  def check_numbers(self, missing: Iterable[str]) -> None:
    """Reports stacks of missing leaves whose single layers have other numbers than 0, 1, 2, ..., or lack a name."""
    for path in missing:
      for number, stack in enumerate(self._stacks) if not may_be_missing(self.changes, path) else ():
        parts = stack.split(path)
        if parts is not None and stack.labels is None:
          self._check_numbers(stack, parts[0] + stack.stacked)
        elif parts is not None:
          self._check_labels(stack, path, self._stacks[:number])

  def _check_labels(self, stack: LayerStack, path: str, before: tuple[LayerStack, ...]) -> None:
    """Reports a stacked leaf of which the checkpoint has some named layers, and not others."""
    singles = [stack.single_path(path, number) for number in range(len(stack.labels or ()))]
    absent = [single for single in singles if self._found(path, single, None, before) is None]
    if 0 < len(absent) < len(singles):
      text = f'{path}: stacks makes it of {stack.text}, and the checkpoint has no {", ".join(absent)}.'
      self._wrong(text, 'name the layers that the checkpoint has, or rename them first.')

  def _check_numbers(self, stack: LayerStack, module: str) -> bool:
    """Whether the layers of a stacked module are numbered from 0 without gaps; reported if not."""
    found = filter(None, map(stack.number, self.saved_by_path))
    numbers = sorted({number for path, number in found if f'{path}/'.startswith(f'{module}/')})
    if numbers == list(range(len(numbers))):
      return True
    labels = tuple(map(str, numbers))
    listed = stack._replace(labels=labels).text
    text = f'{module}: the checkpoint has the layers {", ".join(labels)}; stacks counts them from 0, without gaps.'
    choice = f'Changes(stacks={{{stack.stacked!r}: {(listed if stack.axis is None else (listed, stack.axis))!r}}})'
    if all(text != problem.text for problem in self.problems):
      self._wrong(text, f'name them in order: pass {choice}.')
    return False

  def _wrong_count(self, path: str, saved: int, target: int) -> None:
    self._wrong(f'{path}: the checkpoint has {plural(saved, "layer")}, the target {target}.', _COUNT)

  def _wrong(self, text: str, fix: str) -> None:
    self.problems.append(Problem(text, fix))


SHOW = 'look up paths and names with flax-spmd checkpoint show.'
_ODD = (
  "such state cannot be converted; to keep the target's own, pass Changes(missing='regex', unused='regex') "
  'with patterns for its paths.'
)
_COUNT = 'give the model as many layers as were saved.'
_ARRANGEMENT = 'correct the arrangement in rearranged; its left side describes the saved dimensions.'
