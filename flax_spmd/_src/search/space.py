"""Space: every candidate that is legal, and how to get from one to the next.

    space = Space(facts, wishes, target, choices)
    space.meshes()                  # axes, in every way that the devices can be put into a grid
    space.coordinates(candidate)    # a list per thing that can change: what becomes of the candidate

A candidate is legal if every dimension that it cuts is divided, and if it is as the user wants it. What
comes out of here is canonical, so equal candidates are one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flax_spmd._src.compare.hardware import Target
from flax_spmd._src.search.candidate import Axis, Candidate, canonical, compete
from flax_spmd._src.search.model_facts import Facts
from flax_spmd._src.search.user_constraints import MOST_AXES, Wishes


class Space(NamedTuple):
  """What may be tried.

  Attributes:
    facts: of the model.
    wishes: of the user.
    target: the hardware.
    choices: arguments of the step, and the values that they may have.
  """

  facts: Facts
  wishes: Wishes
  target: Target
  choices: Mapping[str, tuple[Any, ...]] = {}

  @property
  def per_node(self) -> int:
    """Devices that are next to each other."""
    return self.target.devices if self.target.chip.torus else self.target.topology[-1]

  def legal(self, candidate: Candidate) -> Candidate | None:
    """A candidate in its one spelling, with its pins in place; None if it may not be tried."""
    candidate = self.wishes.pinned(candidate)
    if candidate.least not in self.facts.leasts:  # no array is that large
      candidate = candidate._replace(fill=(), state=())
    for over in candidate.used:
      if len({*over}) < len(over):
        return None
    for name, over in candidate.placed:
      if name not in self.facts.names or not self.facts.divides(name, candidate.size(over)):
        return None
    for pattern, _, dim, over in candidate.paths:
      if not self.facts.path_divides(pattern, dim, candidate.size(over)):
        return None
    if not self.wishes.allow(candidate, self.facts, self.per_node):
      return None
    if not candidate.choices and self.choices:
      first = tuple((name, values[0]) for name, values in self.choices.items())
      candidate = candidate._replace(choices=first)
    spelled = canonical(
      candidate, self.facts.together, self.per_node, not self.target.chip.torus and not self.wishes.mesh
    )
    # in a fixed mesh the axes are who they are
    return spelled if not self.wishes.pin else self.wishes.pinned(spelled)

  def mended(self, candidate: Candidate) -> Candidate:
    """A candidate without the axes that do not divide what lies over them."""
    for name, over in candidate.placed:
      while over and not self.facts.divides(name, candidate.size(over)):
        over = over[:-1]
      candidate = candidate.place(name, over)
    return candidate

  def meshes(self) -> list[tuple[Axis, ...]]:
    """The grids of the devices, those of few axes first."""
    if self.wishes.mesh is not None:
      return [tuple(Axis(size, label) for label, size in self.wishes.mesh.items())]
    labels = self.wishes.labels
    found: list[tuple[Axis, ...]] = []
    for count in range(max(1, len(labels)), MOST_AXES + 1):
      for sizes in factorisations(self.target.devices, count):
        for places in itertools.permutations(range(count), len(labels)):
          named = dict(zip(places, labels, strict=True))
          found.append(tuple(Axis(size, named.get(n, '')) for n, size in enumerate(sizes)))
    return found or [(Axis(self.target.devices),)]

  def coordinates(self, candidate: Candidate) -> list[list[Candidate]]:
    """For each thing that can change, the legal candidates that differ in it."""
    changes: list[Iterable[Candidate]] = [
      *(self._moved(candidate, [name]) for name in self._free),
      *(self._moved(candidate, group) for group in self._groups(candidate)),
      *(self._moved_path(candidate, kind.pattern) for kind in self.facts.paths),
      self._filled(candidate),
      self._stated(candidate),
      self._ordered(candidate),
      self._exchanged(candidate),
      self._resized(candidate),
      *(self._chosen(candidate, name) for name in self.choices),
    ]
    found = ([*dict.fromkeys(filter(None, map(self.legal, change)))] for change in changes)
    return [[one for one in many if one != candidate] for many in found if many]

  def simpler(self, candidate: Candidate) -> list[Candidate]:
    """The legal candidates that lack one of its rules, or have a usual one."""
    less = [
      *(candidate.place(name, ()) for name, _ in candidate.placed),
      *(
        candidate._replace(paths=candidate.paths[:n] + candidate.paths[n + 1 :])
        for n in range(len(candidate.paths))
      ),
      candidate._replace(state=()),
      candidate._replace(fill=()),
      candidate._replace(least=self.facts.leasts[0]),
    ]
    found = dict.fromkeys(one for one in map(self.legal, less) if one is not None)
    return [one for one in found if one != candidate]

  @property
  def _free(self) -> list[str]:
    """The names that may move, in alphabetical order."""
    stuck = {name for name, axes in self.wishes.forbid.items() if axes is None} | self.wishes.pin.keys()
    return [name for name in sorted(self.facts.names) if name not in stuck]

  def _groups(self, candidate: Candidate) -> Iterator[list[str]]:
    """Names that may well belong together: those at one place, and those with the same sizes."""
    by_place: dict[Any, list[str]] = {}
    for name in self._free:
      by_place.setdefault(candidate.over(name), []).append(name)
      by_place.setdefault(('sizes', self.facts.names[name]), []).append(name)
    by_place.pop((), None)
    groups = dict.fromkeys(tuple(group) for group in by_place.values() if len(group) > 1)
    yield from map(list, groups)

  def _moved(self, candidate: Candidate, names: Sequence[str]) -> Iterator[Candidate]:
    for over in _tuples(len(candidate.axes)):
      moved = candidate
      for name in names:
        moved = moved.place(name, over)
      yield moved

  def _moved_path(self, candidate: Candidate, pattern: str) -> Iterator[Candidate]:
    rest = tuple(path for path in candidate.paths if path[0] != pattern)
    yield candidate._replace(paths=rest)
    kind = next(kind for kind in self.facts.paths if kind.pattern == pattern)
    rank = len(kind.shapes[0])
    for dim in range(rank):
      for over in _tuples(len(candidate.axes))[1:]:
        yield candidate._replace(paths=(*rest, (pattern, rank, dim, over)))

  def _filled(self, candidate: Candidate) -> Iterator[Candidate]:
    """Other axes for `fsdp`, and other sizes from which it takes arrays."""
    for over in _subsets(len(candidate.axes)):
      for least in self.facts.leasts:
        state = () if over == candidate.state else candidate.state
        yield candidate._replace(fill=over, least=least, state=state)

  def _stated(self, candidate: Candidate) -> Iterator[Candidate]:
    """A table of its own for the optimizer's state, in place of `fsdp` for all or beside it."""
    for over in _subsets(len(candidate.axes)):
      yield candidate._replace(state=over)
      yield candidate._replace(state=over, fill=())

  def _ordered(self, candidate: Candidate) -> Iterator[Candidate]:
    """First choice to another name, of those that compete."""
    pairs = candidate.placed
    for n, one in enumerate(pairs):
      if any(compete(one, other, self.facts.together) for other in pairs[:n]):
        yield candidate._replace(placed=(one, *pairs[:n], *pairs[n + 1 :]))

  def _exchanged(self, candidate: Candidate) -> Iterator[Candidate]:
    """Two axes in each other's place in the machine, and two axes in each other's role."""
    count = len(candidate.axes)
    for one, other in itertools.combinations(range(count), 2):
      numbers = {n: (other if n == one else one if n == other else n,) for n in range(count)}
      swapped = [candidate.axes[numbers[n][0]] for n in range(count)]
      if self.wishes.mesh is None:
        yield candidate.renumbered(swapped, numbers)
      yield candidate.renumbered(candidate.axes, numbers)

  def _resized(self, candidate: Candidate) -> Iterator[Candidate]:
    """Devices from one axis to another, and an axis as two."""
    if self.wishes.mesh is not None:
      return
    axes = candidate.axes
    for one, other in itertools.permutations(range(len(axes)), 2):
      for factor in _divisors(axes[one].size):
        sizes = {one: axes[one].size // factor, other: axes[other].size * factor}
        changed = [axis._replace(size=sizes.get(n, axis.size)) for n, axis in enumerate(axes)]
        if all(axis.size > 1 or not axis.label for axis in changed):
          yield candidate._replace(axes=tuple(changed))
    for one in range(len(axes)) if len(axes) < MOST_AXES else ():
      yield from self._split(candidate, one)

  def _split(self, candidate: Candidate, one: int) -> Iterator[Candidate]:
    """An axis as two; some of what lay over it lies over one of them only."""
    axes = candidate.axes
    names = [name for name, over in candidate.placed if one in over and name not in self.wishes.pin]
    others = [name for name in names if name not in self.facts.batch]
    numbers = {n: (n + (n > one),) if n != one else (n, n + 1) for n in range(len(axes))}
    for outer in _divisors(axes[one].size)[:-1]:
      pair = axes[one]._replace(size=outer), Axis(axes[one].size // outer)
      both = candidate.renumbered([*axes[:one], *pair, *axes[one + 1 :]], numbers)
      for dropped in (one, one + 1):
        for group in filter(None, (others, *([name] for name in names))):
          split = both
          for name in group:
            split = split.place(name, _without(both.over(name), dropped))
          yield split
        yield both._replace(fill=_without(both.fill, dropped))
        yield both._replace(state=_without(both.state, dropped))

  def _chosen(self, candidate: Candidate, name: str) -> Iterator[Candidate]:
    for value in self.choices[name]:
      chosen = dict(candidate.choices) | {name: value}
      yield candidate._replace(choices=tuple(chosen.items()))


def factorisations(number: int, count: int) -> list[tuple[int, ...]]:
  """The ways to write a number as so many factors larger than one, in every order.

  Example:
    >>> factorisations(12, 2)
    [(2, 6), (3, 4), (4, 3), (6, 2)]
  """
  if count == 1:
    return [(number,)] if number > 1 else []
  return [
    (first, *rest)
    for first in _divisors(number)[:-1]
    for rest in factorisations(number // first, count - 1)
  ]


def _divisors(number: int) -> list[int]:
  """Those larger than one, itself included."""
  return [factor for factor in range(2, number + 1) if number % factor == 0]


def _tuples(count: int) -> list[tuple[int, ...]]:
  """No axes, and every choice of them in every order."""
  return [over for many in range(count + 1) for over in itertools.permutations(range(count), many)]


def _subsets(count: int) -> list[tuple[int, ...]]:
  """No axes, and every choice of them in the mesh's order."""
  return [over for many in range(count + 1) for over in itertools.combinations(range(count), many)]


def _without(axes: Iterable[int], dropped: int) -> tuple[int, ...]:
  return tuple(axis for axis in axes if axis != dropped)
