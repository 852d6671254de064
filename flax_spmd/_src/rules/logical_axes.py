"""Logical names resolved by a rule table: one pass over the rules, every decision kept.

The pass is exactly Flax's `logical_to_mesh_axes`:

* order is priority: the first rule whose name is among the array's names gets its mesh axes first;
* a mesh axis is given once per array: a rule whose axes are (even partly) taken is skipped;
* a later rule for a name whose dimension is still open is its fallback;
* `None` (or `()`) decides a dimension too: it is replicated, and no fallback is considered.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from flax_spmd._src.rules.decisions import (
  Axes,
  Decision,
  Names,
  Policies,
  Reason,
  Resolution,
  Skipped,
  axis_names,
)
from flax_spmd._src.rules.mesh_axes import _AxesCheck, _cut
from flax_spmd._src.text import value_text
from flax_spmd.errors import (
  ConflictError,
  Problem,
  UnmatchedNameError,
  did_you_mean,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Resolver:
  """Resolves names against `clauses`.

  Without `sizes` (per mesh axis), divisibility and the existence of mesh axes are not checked.
  """

  clauses: Sequence[Any]
  by_name: Mapping[str, Sequence[int]]
  policies: Policies
  sizes: Mapping[str, int] | None = None

  def resolve(self, names: Names, shape: Sequence[int] | None = None) -> Resolution:
    """Decides every dimension of an array with these names, and this shape if it is known."""
    twice = _repeated(names)
    if twice:
      return Resolution(PartitionSpec(), (), (_repeated_problem(names, twice),))
    given = _AxesCheck(tuple(names), self.sizes, self.policies, None, among_names=True)
    entries: list[Any] = [None if isinstance(name, str) else name for name in names]
    if self.sizes is not None:
      for dim, entry in enumerate(entries):
        if entry is not None:
          entries[dim] = given.decide(dim, shape[dim] if shape else 0).axes
    position = {name: dim for dim, name in enumerate(names) if isinstance(name, str)}
    taken = set(axis_names(entries))
    decided: dict[int, int] = {}
    skipped: dict[int, list[Skipped]] = {}

    for index in sorted(i for name in position for i in self.by_name.get(name, ())):
      name, axes = self.clauses[index]
      dim = position[name]
      axes, present, missing = self._present(axes)
      refusal = self._refusal(present, missing, dim in decided, taken, shape and shape[dim])
      if refusal is None:
        entries[dim] = axes
        taken.update(present)
      else:
        skipped.setdefault(dim, []).append(Skipped(index, refusal, present or missing))
      if refusal is None or (refusal == 'indivisible' and self.policies.indivisible == 'replicate'):
        decided[dim] = index

    decisions = tuple(
      Decision(dim, name, entries[dim], decided.get(dim), tuple(skipped.get(dim, ())))
      for dim, name in enumerate(names)
    )
    problems = (*given.problems, *self._objections(names, decisions, shape))
    return Resolution(PartitionSpec(*entries), decisions, problems)

  def _present(self, axes: Axes) -> tuple[Axes, tuple[str, ...], tuple[str, ...]]:
    """A rule's axes on this mesh: the entry, its axis names, and the names if the mesh lacks all of them."""
    present = axis_names(axes)
    if self.sizes is None or self.policies.missing_axis == 'error':
      return axes, present, ()
    kept = tuple(axis for axis in present if axis in self.sizes)
    if kept == present:
      return axes, present, ()
    return (kept[0] if len(kept) == 1 else kept), kept, () if kept else present

  def _refusal(self, present, missing, decided, taken, size) -> Reason | None:
    """The reason for which a rule cannot decide a dimension; None: it can."""
    if decided:
      return 'decided'
    if missing:
      return 'missing'
    if not taken.isdisjoint(present):
      return 'taken'
    if size is not None and self.policies.indivisible != 'error' and size % self._parts(present):
      return 'indivisible'
    return None

  def _parts(self, axes: Sequence[str]) -> int:
    """The number of pieces into which these axes split a dimension."""
    return math.prod((self.sizes or {}).get(axis, 1) for axis in axes)

  def _objections(self, names, decisions, shape) -> Iterator[Problem]:
    for decision in decisions:
      if decision.rule is not None:
        if shape is not None and shape[decision.dim] % self._parts(axis_names(decision.axes)):
          yield self._indivisible(decision, shape[decision.dim])
      elif isinstance(decision.name, str):
        if decision.name not in self.by_name:
          if self.policies.unmatched == 'error':
            yield self._unmatched(decision, names)
        elif self.policies.conflict == 'error' and decision.lost is not None:
          yield self._conflict(decision, decision.lost, decisions)

  def _rule(self, index: Any) -> str:
    return '' if index is None else f'rule {index} {self.clauses[index]!r}'

  def _unmatched(self, decision: Decision, names: Names) -> Problem:
    return Problem(
      f'{_dimension(decision)}: no rule for this logical name (names {tuple(names)!r}).'
      + did_you_mean(decision.name, self.by_name),
      f'correct the name, or add a rule for it; ({value_text(decision.name)}, None) replicates it.',
      UnmatchedNameError,
    )

  def _indivisible(self, decision: Decision, size: int) -> Problem:
    axes, rule = axis_names(decision.axes), decision.rule
    parts = self._parts(axes)
    return Problem(
      f'{_dimension(decision)}: size {size} is not divisible by {_cut(axes, self.sizes or {})}, '
      f'required by {self._rule(rule)}.',
      f'pad it to {-(-size // parts) * parts}, put the rule ({value_text(decision.name)}, None) before rule '
      f"{rule} to replicate it, or give the table indivisible='next' or 'replicate'.",
    )

  def _conflict(self, decision: Decision, lost: Skipped, decisions: Sequence[Decision]) -> Problem:
    owners = [
      _dimension(other) + ('' if other.rule is None else f' ({self._rule(other.rule)})')
      for other in decisions
      if not set(axis_names(other.axes)).isdisjoint(lost.axes)
    ]
    return Problem(
      f'{_dimension(decision)}: {self._rule(lost.rule)} lost its mesh axes to {" and ".join(owners)}.',
      f'add a fallback for {value_text(decision.name)} after rule {lost.rule}, such as '
      f'({value_text(decision.name)}, None), or put its rule first.',
      ConflictError,
    )


def _dimension(decision: Decision) -> str:
  return f'dim {decision.dim} {decision.name!r}'


def _repeated(names: Names) -> tuple[str, ...]:
  """The strings that occur more than once in `names`, each once, in order."""
  strings = [name for name in names if isinstance(name, str)]
  return tuple(dict.fromkeys(name for name in strings if strings.count(name) > 1))


def _repeated_problem(names: Names, twice: Sequence[str]) -> Problem:
  return Problem(
    f'names {tuple(names)!r}: {", ".join(map(repr, twice))} names more than one dimension.',
    'give every dimension a name of its own, or None.',
  )
