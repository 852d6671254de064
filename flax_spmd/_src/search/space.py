"""Search space: the legal candidates, and the changes that lead from one to the next.

    space = Space(facts, constraints, target, choices)
    space.meshes()                  # the devices as a grid of axes, in every possible way
    space.coordinates(candidate)    # one list of changed candidates per thing that can change

A candidate is legal if every sharded dimension is divisible and the user's constraints are met. The
space returns candidates in canonical form, so equivalent candidates are equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flax_spmd._src.compare.hardware import Target
from flax_spmd._src.mesh import within_slice
from flax_spmd._src.search.candidate import Axis, Candidate, Choices, canonical, compete
from flax_spmd._src.search.model_facts import ModelFacts
from flax_spmd._src.search.user_constraints import MAX_AXES, UserConstraints


class Space(NamedTuple):
  """The candidates of a search.

  Attributes:
    facts: logical names of the model, under the first choice.
    constraints: conditions of the user.
    target: the hardware.
    choices: possible values of arguments of the step.
    facts_under: the facts under a choice, which may have other sizes; those of the first by default.
  """

  facts: ModelFacts
  constraints: UserConstraints
  target: Target
  choices: Mapping[str, tuple[Any, ...]] = {}
  facts_under: Callable[[Choices], ModelFacts] | None = None

  def legal(self, candidate: Candidate) -> Candidate | None:
    """The canonical form of a candidate with pinned names on their axes, or None if it is not legal."""
    candidate = self.constraints.pinned(self._chosen(candidate))
    facts = self._facts_of(candidate)
    if candidate.min_size not in self.facts.min_sizes:  # no array is that large
      candidate = candidate._replace(fsdp_axes=(), zero1_axes=())
    if within_slice([axis.size for axis in candidate.axes], self.target.slices) is None:
      return None
    for over in candidate.used_axes:
      if len({*over}) < len(over):
        return None
    for name, over in candidate.name_rules:
      if name not in facts.names or not facts.divides(name, candidate.shards(over)):
        return None
    for pattern, _, dim, over in candidate.path_rules:
      if not facts.path_divides(pattern, dim, candidate.shards(over)):
        return None
    if not self.constraints.allow(candidate, self.facts):
      return None
    # The axes of the user's mesh keep their order, and so do those of a torus.
    exchange = not self.target.chip.torus and not self.constraints.mesh
    spelled = canonical(candidate, self.facts.together, self.target.per_node, exchange)
    return spelled if not self.constraints.pin else self.constraints.pinned(spelled)

  def _chosen(self, candidate: Candidate) -> Candidate:
    """The candidate with the first choices if it has none."""
    return candidate if candidate.choices else candidate._replace(choices=next(self.combinations))

  def _facts_of(self, candidate: Candidate) -> ModelFacts:
    """The facts of the model under a candidate's choices."""
    return self.facts_under(candidate.choices) if self.facts_under else self.facts

  def divisible(self, candidate: Candidate) -> Candidate:
    """The candidate without axes that do not divide the dimensions sharded over them."""
    facts = self._facts_of(self._chosen(candidate))
    for name, over in candidate.name_rules:
      while over and not (name in facts.names and facts.divides(name, candidate.shards(over))):
        over = over[:-1]
      candidate = candidate.with_name(name, over)
    return candidate

  def meshes(self) -> list[tuple[Axis, ...]]:
    """The possible meshes, those with few axes first."""
    if self.constraints.mesh is not None:
      return [tuple(Axis(size, label) for label, size in self.constraints.mesh.items())]
    labels = self.constraints.labels
    meshes: list[tuple[Axis, ...]] = []
    for count in range(max(1, len(labels)), MAX_AXES + 1):
      for sizes in factorisations(self.target.devices, count):
        for labelled in itertools.permutations(range(count), len(labels)):
          names = dict(zip(labelled, labels, strict=True))
          meshes.append(tuple(Axis(size, names.get(n, '')) for n, size in enumerate(sizes)))
    return meshes or [(Axis(self.target.devices),)]

  def coordinates(self, candidate: Candidate) -> list[list[Candidate]]:
    """For each thing that can change, the legal candidates that differ from this one in it."""
    changes: list[Iterable[Candidate]] = [
      *(self._change_names(candidate, [name]) for name in self._free_names),
      *(self._change_names(candidate, group) for group in self._groups(candidate)),
      *(self._change_path(candidate, kind.pattern) for kind in self.facts.paths),
      self._change_fsdp(candidate),
      self._change_zero1(candidate),
      self._change_precedence(candidate),
      self._exchange_axes(candidate),
      self._resize_axes(candidate),
      *(self._change_choice(candidate, name) for name in self.choices),
      *(self._change_memory(candidate, path) for path in self.constraints.host),
    ]
    legal = ([*dict.fromkeys(filter(None, map(self.legal, change)))] for change in changes)
    return [[one for one in changed if one != candidate] for changed in legal if changed]

  def simpler(self, candidate: Candidate) -> list[Candidate]:
    """The legal candidates with one rule fewer, or with the default `min_size`."""
    rules = candidate.path_rules
    simpler = [
      *(candidate.with_name(name, ()) for name, _ in candidate.name_rules),
      *(candidate._replace(path_rules=rules[:n] + rules[n + 1 :]) for n in range(len(rules))),
      candidate._replace(zero1_axes=()),
      candidate._replace(fsdp_axes=()),
      candidate._replace(min_size=self.facts.min_sizes[0]),
      *(candidate._replace(on_host=_without(candidate.on_host, path)) for path in candidate.on_host),
    ]
    legal = dict.fromkeys(one for one in map(self.legal, simpler) if one is not None)
    return [one for one in legal if one != candidate]

  @property
  def _free_names(self) -> list[str]:
    """The names whose axes may change, in alphabetical order."""
    constraints = self.constraints
    fixed = {name for name, axes in constraints.forbid.items() if axes is None} | constraints.pin.keys()
    return [name for name in sorted(self.facts.names) if name not in fixed]

  def _groups(self, candidate: Candidate) -> Iterator[list[str]]:
    """Names that probably belong together: sharded over the same axes, or of the same sizes."""
    groups: dict[Any, list[str]] = {}
    for name in self._free_names:
      groups.setdefault(candidate.axes_of(name), []).append(name)
      groups.setdefault(('sizes', self.facts.names[name]), []).append(name)
    groups.pop((), None)
    several = dict.fromkeys(tuple(group) for group in groups.values() if len(group) > 1)
    yield from map(list, several)

  @property
  def combinations(self) -> Iterator[Choices]:
    """The combinations of choices, the first values first."""
    for values in itertools.product(*self.choices.values()):
      yield tuple(zip(self.choices, values, strict=True))

  def _change_names(self, candidate: Candidate, names: Sequence[str]) -> Iterator[Candidate]:
    for over in _permutations(len(candidate.axes)):
      changed = candidate
      for name in names:
        changed = changed.with_name(name, over)
      yield changed

  def _change_path(self, candidate: Candidate, pattern: str) -> Iterator[Candidate]:
    rest = tuple(rule for rule in candidate.path_rules if rule[0] != pattern)
    yield candidate._replace(path_rules=rest)
    kind = next(kind for kind in self.facts.paths if kind.pattern == pattern)
    rank = len(kind.shapes[0])
    for dim in range(rank):
      for over in _permutations(len(candidate.axes))[1:]:
        yield candidate._replace(path_rules=(*rest, (pattern, rank, dim, over)))

  def _change_fsdp(self, candidate: Candidate) -> Iterator[Candidate]:
    """Other axes for `fsdp`, and other values of `min_size`."""
    for over in _combinations(len(candidate.axes)):
      for min_size in self.facts.min_sizes:
        zero1 = () if over == candidate.zero1_axes else candidate.zero1_axes
        yield candidate._replace(fsdp_axes=over, min_size=min_size, zero1_axes=zero1)

  def _change_zero1(self, candidate: Candidate) -> Iterator[Candidate]:
    """Other axes for the optimizer state, with `fsdp` for the rest and without it."""
    for over in _combinations(len(candidate.axes)):
      yield candidate._replace(zero1_axes=over)
      yield candidate._replace(zero1_axes=over, fsdp_axes=())

  def _change_precedence(self, candidate: Candidate) -> Iterator[Candidate]:
    """Another of the competing names first."""
    rules = candidate.name_rules
    for n, rule in enumerate(rules):
      if any(compete(rule, other, self.facts.together) for other in rules[:n]):
        yield candidate._replace(name_rules=(rule, *rules[:n], *rules[n + 1 :]))

  def _exchange_axes(self, candidate: Candidate) -> Iterator[Candidate]:
    """Two axes exchanged in the order of the mesh, or in the rules."""
    count = len(candidate.axes)
    for one, other in itertools.combinations(range(count), 2):
      numbers = {n: (other if n == one else one if n == other else n,) for n in range(count)}
      exchanged = [candidate.axes[numbers[n][0]] for n in range(count)]
      if self.constraints.mesh is None:
        yield candidate.renumbered(exchanged, numbers)
      yield candidate.renumbered(candidate.axes, numbers)

  def _resize_axes(self, candidate: Candidate) -> Iterator[Candidate]:
    """A factor moved from one axis to another, and an axis split in two."""
    if self.constraints.mesh is not None:
      return
    axes = candidate.axes
    for one, other in itertools.permutations(range(len(axes)), 2):
      for factor in _divisors(axes[one].size):
        sizes = {one: axes[one].size // factor, other: axes[other].size * factor}
        changed = [axis._replace(size=sizes.get(n, axis.size)) for n, axis in enumerate(axes)]
        if all(axis.size > 1 or not axis.label for axis in changed):
          yield candidate._replace(axes=tuple(changed))
    for one in range(len(axes)) if len(axes) < MAX_AXES else ():
      yield from self._split(candidate, one)

  def _split(self, candidate: Candidate, one: int) -> Iterator[Candidate]:
    """An axis split in two; some names, or a clause, keep one of the halves only."""
    axes, constraints = candidate.axes, self.constraints
    names = [name for name, over in candidate.name_rules if one in over and name not in constraints.pin]
    others = [name for name in names if name not in self.facts.batch]
    numbers = {n: (n + (n > one),) if n != one else (n, n + 1) for n in range(len(axes))}
    for outer in _divisors(axes[one].size)[:-1]:
      pair = axes[one]._replace(size=outer), Axis(axes[one].size // outer)
      both = candidate.renumbered([*axes[:one], *pair, *axes[one + 1 :]], numbers)
      for dropped in (one, one + 1):
        for group in filter(None, (others, *([name] for name in names))):
          split = both
          for name in group:
            split = split.with_name(name, _without(both.axes_of(name), dropped))
          yield split
        yield both._replace(fsdp_axes=_without(both.fsdp_axes, dropped))
        yield both._replace(zero1_axes=_without(both.zero1_axes, dropped))

  def _change_choice(self, candidate: Candidate, name: str) -> Iterator[Candidate]:
    for value in self.choices[name]:
      chosen = dict(candidate.choices) | {name: value}
      yield candidate._replace(choices=tuple(chosen.items()))

  def _change_memory(self, candidate: Candidate, path: str) -> Iterator[Candidate]:
    """Arrays moved to the host's memory, or back."""
    rest = _without(candidate.on_host, path)
    moved = {*rest, path} if rest == candidate.on_host else {*rest}
    yield candidate._replace(on_host=tuple(one for one in self.constraints.host if one in moved))


def factorisations(number: int, count: int) -> list[tuple[int, ...]]:
  """The products of `count` factors larger than one that equal a number, in every order.

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
  """The divisors larger than one, including the number itself."""
  return [factor for factor in range(2, number + 1) if number % factor == 0]


def _permutations(count: int) -> list[tuple[int, ...]]:
  """Every ordered selection of axes, beginning with none."""
  return [over for many in range(count + 1) for over in itertools.permutations(range(count), many)]


def _combinations(count: int) -> list[tuple[int, ...]]:
  """Every selection of axes in the order of the mesh, beginning with none."""
  return [over for many in range(count + 1) for over in itertools.combinations(range(count), many)]


def _without(items: Iterable[Any], dropped: Any) -> tuple[Any, ...]:
  return tuple(one for one in items if one != dropped)
