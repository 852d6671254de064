"""Rules: one ordered table that says over which mesh axes each dimension of each array is laid.

    rules = Rules(('batch', 'data'), ('hidden', 'model'), ('vocab', ('data', 'model')), ('embed', None))
    rules = Rules(('attn/.*kernel$', PartitionSpec(None, 'model')), fsdp('data'))

A table is a value: immutable, hashable, equal by content. It adds with `+`, and swapping it for
another one is how layouts are tried. The kinds of clauses: `flax_spmd.clauses`; how names are
resolved: `flax_spmd.resolution`.

Two steps decide an array. The first rule that applies to it *owns* it: a path rule whose expression is
found in its path, a policy that returns a spec, or a logical rule for one of its names (then all its names
are resolved). Then each `fsdp` fills a dimension that is still open. So a rule for a part of the tree goes
before the rules for names that occur in that part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

from jax.sharding import PartitionSpec

from flax_spmd._src.public_module import set_module
from flax_spmd._src.rules.clauses import Fsdp
from flax_spmd._src.rules.decisions import (
  UNCONSTRAINED,
  Axes,
  Names,
  Policies,
  Resolution,
  RuleId,
  axis_names,
  rule_text,
)
from flax_spmd._src.rules.logical_axes import Resolver
from flax_spmd._src.rules.path_patterns import compiled
from flax_spmd.errors import (
  MeshAxisError,
  Problem,
  RulesError,
  did_you_mean,
  problems_text,
  raise_problems,
)

Clause: TypeAlias = Any
"""`(name, axes)`, `(path, PartitionSpec)`, `(path, Rules)`, `('@name', ...)`, an `Fsdp`, or a function."""


@set_module('flax_spmd')
class Rules:
  """An ordered, immutable, hashable table of clauses.

  Args:
    *clauses: `(logical name, mesh axes)`, `(path regex, PartitionSpec)`, `(path regex, Rules)`,
      `fsdp(...)`, `('@annotation', PartitionSpec | Rules | fsdp(...) | policy)`, a policy
      `(leaf) -> PartitionSpec | None`; or whole tables (tuples, lists, `Rules`), which are put in at
      that place.
    **policies: `unmatched`, `conflict`, `indivisible`, `missing_axis`; see `Policies`. They are the
      table's: those of tables that are put in, or added on the right, are not taken over.

  Raises:
    RulesError: a clause is no clause, a path is no regular expression, or a policy is no policy.

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
    """`rules` as a table: a `Rules` (with these policies changed), the tuple or list of one, or a
    single `fsdp(...)` or policy.

    Raises:
      RulesError: `rules` is neither, or a clause in it is no clause.
    """
    if isinstance(rules, Rules):
      return rules.replace(**policies) if policies else rules
    if isinstance(rules, Fsdp) or (callable(rules) and not isinstance(rules, type)):
      return cls(rules, **policies)
    if not isinstance(rules, (tuple, list)):
      raise RulesError(
        f'A rule table is a tuple or a list of rules, got {rules!r}.\n'
        "Fix: write it as (('batch', 'data'), ('hidden', 'model'))."
      )
    if is_logical(rules) or is_path(rules) or is_annotation(rules):
      raise RulesError(
        f'{rules!r} is one rule, where a table of rules is expected.\n'
        f'Fix: write a table of one rule with a comma, ({rules!r},).'
      )
    return cls(*rules, **policies)

  @property
  def clauses(self) -> tuple[Clause, ...]:
    """The clauses, in order."""
    return self._clauses

  @cached_property
  def pairs(self) -> tuple[tuple[str, Axes], ...]:
    """The logical rules as plain pairs, which is what Flax takes."""
    return tuple(clause for clause in self._clauses if is_logical(clause))

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

  def __reduce__(self):
    # the hash is this process's own: strings hash differently in the next one
    return _unpickled, (self._clauses, dataclasses.asdict(self._policies))

  def __repr__(self) -> str:
    policies = [f'{name}={value!r}' for name, value in self._policies.changed().items()]
    return f'Rules({", ".join([*map(repr, self._clauses), *policies])})'

  def at(self, rule: RuleId) -> Clause:
    """The clause that a decision's `rule` names; in a table within the table, the inner one."""
    first, *rest = rule if isinstance(rule, tuple) else (rule,)
    clause = self._clauses[first]
    inner = clause[1] if rest and isinstance(clause, tuple) else None
    return inner.at(tuple(rest)) if isinstance(inner, Rules) else clause

  def all_rules(self, *, annotations: bool = False) -> list[tuple[RuleId, Clause]]:
    """Every rule with its id; those of tables within the table stand for these tables.

    Args:
      annotations: whether rules for annotations are in it, which decide nothing about a tree.
    """
    found: list[tuple[RuleId, Clause]] = []
    for index, clause in enumerate(self._clauses):
      if is_annotation(clause) and not annotations:
        continue
      if isinstance(clause, tuple) and isinstance(clause[1], Rules):
        inner = clause[1].all_rules(annotations=annotations)
        found += [((index, *_as_tuple(rule)), nested) for rule, nested in inner]
      else:
        found.append((index, clause))
    return found

  @cached_property
  def by_name(self) -> Mapping[str, tuple[int, ...]]:
    """Indices of each name's rules: a long table costs nothing per array."""
    found: dict[str, list[int]] = {}
    for index, clause in enumerate(self._clauses):
      if is_logical(clause):
        found.setdefault(clause[0], []).append(index)
    return {name: tuple(indices) for name, indices in found.items()}

  @cached_property
  def annotations(self) -> Mapping[str, int]:
    """The index of the rule for each annotation, by its name without the `@`."""
    found: dict[str, int] = {}
    for index, clause in enumerate(self._clauses):
      if is_annotation(clause):
        found.setdefault(clause[0][1:], index)
    return found

  def resolve(
    self,
    names: Names,
    shape: Sequence[int] | None = None,
    sizes: Mapping[str, int] | None = None,
  ) -> Resolution:
    """Decides every dimension of an array, and says how.

    Args:
      names: a logical name per dimension; or None, UNCONSTRAINED, or a tuple of mesh axes, which are
        taken as they are and, with `sizes`, checked.
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
    raise_problems(self._axis_problems(sizes, ()))

  def _axis_problems(self, sizes: Mapping[str, int], within: tuple[int, ...]) -> list[Problem]:
    """The axes that the mesh lacks; a table within the table has its own policy about them."""
    problems: list[Problem] = []
    for index, clause in enumerate(self._clauses):
      missing = [] if self._policies.missing_axis == 'drop' else axes_of(clause)
      problems += [
        Problem(
          f'Rule {rule_text((*within, index))} {clause!r} uses mesh axis {axis!r}, but the mesh has axes '
          f'{tuple(sizes)!r}.' + did_you_mean(axis, sizes),
          "correct the axis name, add the axis to the mesh, or give the table missing_axis='drop'.",
          MeshAxisError,
        )
        for axis in missing
        if axis not in sizes
      ]
      if isinstance(clause, tuple) and isinstance(clause[1], Rules):
        problems += clause[1]._axis_problems(sizes, (*within, index))
    return problems


def _unpickled(clauses: tuple[Clause, ...], policies: dict[str, Any]) -> Rules:
  return Rules(*clauses, **policies)


def is_logical(clause: Clause) -> bool:
  """Whether a clause is `(logical name, mesh axes)`."""
  return _is_pair(clause) and _is_axes(clause[1]) and not is_annotation(clause)


def is_path(clause: Clause) -> bool:
  """Whether a clause is `(path regex, PartitionSpec | Rules)`."""
  return _is_pair(clause) and isinstance(clause[1], (PartitionSpec, Rules)) and not is_annotation(clause)


def is_annotation(clause: Clause) -> bool:
  """Whether a clause is `('@annotation', where)`."""
  return _is_pair(clause) and clause[0].startswith('@')


def axes_of(clause: Clause) -> tuple[str, ...]:
  """The mesh axes that a clause names itself; those of a table in it are that table's."""
  target = clause[1] if isinstance(clause, tuple) else clause
  if isinstance(target, Fsdp):
    return axis_names(target.axes)
  return () if isinstance(target, Rules) or callable(target) else axis_names(_plain(target))


def _read(clauses: Sequence[Any]) -> tuple[Clause, ...]:
  """Checks and canonicalises clauses: whole tables are put in flat, lists become tuples."""
  flat: list[Any] = []
  for clause in clauses:
    flat.extend(clause if isinstance(clause, Rules) or _is_table(clause) else [clause])
  problems = [problem for i, clause in enumerate(flat) for problem in _wrong(i, clause)]
  if problems:
    raise RulesError(problems_text(problems))
  return tuple(
    (clause[0], _frozen(clause[1])) if isinstance(clause, (tuple, list)) else clause for clause in flat
  )


def _wrong(index: int, clause: Any) -> Iterator[Problem]:
  if is_annotation(clause):
    if not _is_place(clause[1]):
      yield Problem(
        f'Rule {index} is {clause!r}, but mesh axes alone are no place for an annotated value.',
        'give an annotation a PartitionSpec, Rules, fsdp(...) or a function.',
      )
  elif is_path(clause):
    found = compiled(index, clause[0])
    if isinstance(found, Problem):
      yield found
  elif not is_logical(clause) and (not _is_place(clause) or isinstance(clause, PartitionSpec)):
    yield Problem(
      f'Rule {index} is {clause!r}, which is no rule.',
      "write every rule as ('logical name', mesh axes), ('path regex', PartitionSpec), "
      "('path regex', Rules), ('@annotation', PartitionSpec), fsdp(...) or a function of a leaf.",
    )


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
  """Whether this is a tuple or list of clauses, rather than one."""
  return isinstance(clause, (tuple, list)) and not any(isinstance(c, str) for c in clause)


def _is_pair(clause: Any) -> bool:
  return isinstance(clause, (tuple, list)) and len(clause) == 2 and isinstance(clause[0], str)


def _is_place(target: Any) -> bool:
  """Whether this says on its own where an array goes."""
  return isinstance(target, (PartitionSpec, Rules, Fsdp)) or (
    callable(target) and not isinstance(target, type)
  )


def _is_axes(axes: Any) -> bool:
  if isinstance(axes, (tuple, list)):
    return all(_is_axes(axis) for axis in axes)
  return axes is None or axes is UNCONSTRAINED or isinstance(axes, str)


def _frozen(target: Any) -> Any:
  """Axes as a hashable value with one spelling: lists are tuples, and no axes are None."""
  if isinstance(target, (tuple, list)):
    return tuple(_frozen(axis) for axis in target) or None
  return target


def _as_tuple(rule: RuleId) -> tuple[int, ...]:
  return rule if isinstance(rule, tuple) else (rule,)


def _plain(target: Any) -> Any:
  return tuple(target) if isinstance(target, PartitionSpec) else target
