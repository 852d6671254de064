"""Rules: one ordered table that says over which mesh axes each logical name is laid.

    rules = Rules(('batch', 'data'), ('hidden', 'model'), ('vocab', ('data', 'model')), ('embed', None))

A table is a value: immutable, hashable, equal by content. It adds with `+`, and swapping it for
another one is how layouts are tried. How names are resolved against it: `flax_spmd.resolution`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from jax.sharding import PartitionSpec

from flax_spmd.errors import (
  MeshAxisError,
  Problem,
  RulesError,
  did_you_mean,
  problems_text,
  raise_problems,
)
from flax_spmd.resolution import (
  UNCONSTRAINED,
  Axes,
  Clause,
  Names,
  Policies,
  Resolution,
  Resolver,
  axis_names,
)


class Rules:
  """An ordered, immutable, hashable table of clauses `(logical name, mesh axes)`.

  Args:
    *clauses: pairs, or whole tables (tuples, lists, `Rules`), which are put in at that place.
    **policies: `unmatched`, `conflict`, `indivisible`, `missing_axis`; see `Policies`.

  Raises:
    RulesError: a clause is no clause, or a policy is no policy.

  Example:
    >>> rules = Rules(('batch', 'data'), ('hidden', 'model'))
    >>> rules.spec(('batch', 'embed'))
    P('data', None)
    >>> rules + Rules(('embed', 'data'))
    Rules(('batch', 'data'), ('hidden', 'model'), ('embed', 'data'))
  """

  def __init__(self, *clauses: Any, **policies: Any):
    self._clauses = _read(clauses)
    self._policies = _read_policies(policies)
    self._hash = hash((self._clauses, self._policies))

  @classmethod
  def of(cls, rules: Any, **policies: Any) -> Rules:
    """`rules` as a table: a `Rules` (with these policies changed), or the tuple or list of one.

    Raises:
      RulesError: `rules` is neither, or a clause in it is no clause.
    """
    if isinstance(rules, Rules):
      return rules.replace(**policies) if policies else rules
    if not isinstance(rules, (tuple, list)):
      raise RulesError(
        f'A rule table is a tuple or a list of (logical name, mesh axes), got {rules!r}.\n'
        "Fix: write it as (('batch', 'data'), ('hidden', 'model'))."
      )
    if _is_clause(rules):
      raise RulesError(
        f'{rules!r} is one rule, where a table of rules is expected.\n'
        f'Fix: write a table of one rule with a comma, ({rules!r},).'
      )
    return cls(*rules, **policies)

  @property
  def clauses(self) -> tuple[Clause, ...]:
    """The table as plain pairs, which is what Flax takes."""
    return self._clauses

  @property
  def policies(self) -> Policies:
    """What the table does where Flax is silent."""
    return self._policies

  def replace(self, **policies: Any) -> Rules:
    """The same clauses under other policies."""
    return Rules(*self._clauses, **{**dataclasses.asdict(self._policies), **policies})

  def __add__(self, other: Any) -> Rules:
    return Rules(*self._clauses, *Rules.of(other), **dataclasses.asdict(self._policies))

  def __radd__(self, other: Any) -> Rules:
    return Rules(*Rules.of(other), *self._clauses, **dataclasses.asdict(self._policies))

  def __iter__(self) -> Iterator[Clause]:
    return iter(self._clauses)

  def __len__(self) -> int:
    return len(self._clauses)

  def __eq__(self, other: object) -> bool:
    if self is other:
      return True
    if not isinstance(other, Rules):
      return NotImplemented
    return self._clauses == other._clauses and self._policies == other._policies

  def __hash__(self) -> int:
    return self._hash

  def __repr__(self) -> str:
    policies = [f'{name}={value!r}' for name, value in self._policies.changed().items()]
    return f'Rules({", ".join([*map(repr, self._clauses), *policies])})'

  @cached_property
  def by_name(self) -> Mapping[str, tuple[int, ...]]:
    """Indices of each name's rules: a long table costs nothing per array."""
    found: dict[str, list[int]] = {}
    for index, (name, _) in enumerate(self._clauses):
      found.setdefault(name, []).append(index)
    return {name: tuple(indices) for name, indices in found.items()}

  def resolve(
    self,
    names: Names,
    shape: Sequence[int] | None = None,
    sizes: Mapping[str, int] | None = None,
  ) -> Resolution:
    """Decides every dimension of an array, and says how.

    Args:
      names: a logical name per dimension. What is not a string (None, UNCONSTRAINED, a tuple of
        mesh axes) passes through as it is.
      shape: the array's shape, if divisibility is to be looked at (with `sizes`).
      sizes: size per mesh axis, if the mesh is known.

    Returns:
      The spec, one decision per dimension, and what the policies object to; nothing is raised.

    Example:
      >>> rules = Rules(('heads', 'model'), ('mlp', 'model'), ('mlp', 'data'))
      >>> rules.resolve(('mlp', 'heads')).decisions[0]
      Decision(dim=0, name='mlp', axes='data', rule=2, skipped=(Skipped(rule=1, reason='taken', axes=('model',)),))
    """
    return Resolver(self._clauses, self.by_name, self._policies, sizes).resolve(names, shape)

  def spec(self, names: Names | None) -> PartitionSpec | None:
    """The PartitionSpec of an array with these logical names; None for None.

    Raises:
      LayoutError: a name occurs twice.
      UnmatchedNameError, ConflictError: as the policies say.
    """
    if names is None:
      return None
    resolution = self.resolve(names)
    raise_problems(resolution.problems)
    return resolution.spec

  def check_axes(self, sizes: Mapping[str, int]) -> None:
    """Raises if a rule uses an axis that is not in `sizes` (unless `missing_axis='drop'`).

    Raises:
      MeshAxisError: names every such rule and axis, and the axis that was probably meant.
    """
    if self._policies.missing_axis == 'drop':
      return
    problems = [
      Problem(
        f'Rule {index} {clause!r} uses mesh axis {axis!r}, but the mesh has axes {tuple(sizes)!r}.'
        + did_you_mean(axis, sizes),
        "correct the axis name, add the axis to the mesh, or give the table missing_axis='drop'.",
        MeshAxisError,
      )
      for index, clause in enumerate(self._clauses)
      for axis in axis_names(clause[1])
      if axis not in sizes
    ]
    raise_problems(problems)


def _read(clauses: Sequence[Any]) -> tuple[Clause, ...]:
  """Checks and canonicalises clauses: whole tables are put in flat, lists become tuples."""
  flat: list[Any] = []
  for clause in clauses:
    flat.extend(clause if isinstance(clause, Rules) or _is_table(clause) else [clause])
  problems = [
    Problem(
      f'Rule {index} is {clause!r}, which is no (logical name, mesh axes) pair.',
      "write every rule as ('name', 'axis'), ('name', ('axis', 'axis')) or ('name', None).",
    )
    for index, clause in enumerate(flat)
    if not _is_clause(clause)
  ]
  if problems:
    raise RulesError(problems_text(problems))
  return tuple((name, _frozen(axes)) for name, axes in flat)


def _read_policies(policies: Mapping[str, Any]) -> Policies:
  known = [field.name for field in dataclasses.fields(Policies)]
  problems = [
    Problem(
      f'{name!r} is no policy of a rule table.' + did_you_mean(name, known),
      f'the policies are {", ".join(known)}.',
    )
    for name in policies
    if name not in known
  ]
  if problems:
    raise RulesError(problems_text(problems))
  return Policies(**policies)


def _is_table(clause: Any) -> bool:
  return isinstance(clause, (tuple, list)) and all(isinstance(c, (tuple, list)) for c in clause)


def _is_clause(clause: Any) -> bool:
  return (
    isinstance(clause, (tuple, list))
    and len(clause) == 2
    and isinstance(clause[0], str)
    and _is_axes(clause[1])
  )


def _is_axes(axes: Any) -> bool:
  if isinstance(axes, (tuple, list)):
    return all(_is_axes(axis) for axis in axes)
  return axes is None or axes is UNCONSTRAINED or isinstance(axes, str)


def _frozen(axes: Axes) -> Axes:
  """Axes as a hashable value with one spelling: lists are tuples, and no axes are None."""
  if isinstance(axes, (tuple, list)):
    return tuple(_frozen(axis) for axis in axes) or None
  return axes
