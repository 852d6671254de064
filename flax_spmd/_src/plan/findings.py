"""Findings: parts of a plan that are allowed, but may be mistakes.

    findings = layout.check(state)
    if findings: print(findings)

A typo in a logical name is the most common one. Under the default policies its dimension is replicated, as
in Flax; a finding reports it, with the name that was probably meant.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from flax_spmd._src.plan.planner import Planner
from flax_spmd._src.plan.rows import Row
from flax_spmd._src.rules.clauses import Clause, OwningClause
from flax_spmd._src.rules.decisions import Reason, RuleId, axis_names, rule_text
from flax_spmd._src.rules.table import Rules
from flax_spmd._src.text import plural, size_text
from flax_spmd.errors import did_you_mean


class Finding(NamedTuple):
  """One possible mistake in a plan.

  Attributes:
    kind: 'unmatched' (a name without a rule), 'not inferred' (optimizer state whose names could not be
      inferred), 'conflict' (a dimension that lost its axis), 'idle rule', 'idle axis', 'replicated' (an
      array with few shards for its size).
    text: a sentence.
    paths: the arrays concerned.
    suspicious: whether it is likely a mistake. A name may deliberately have no rule, for example; such
      findings are not suspicious.
  """

  kind: Literal['unmatched', 'not inferred', 'conflict', 'idle rule', 'idle axis', 'replicated']
  text: str
  paths: tuple[str, ...] = ()
  suspicious: bool = False


class Findings(tuple[Finding, ...]):
  """All findings of a tree, suspicious ones first; false if empty. `str` gives one line each."""

  __slots__ = ()

  @property
  def suspicious(self) -> Findings:
    """The likely mistakes: `assert not layout.check(state).suspicious`."""
    return Findings(finding for finding in self if finding.suspicious)

  def __str__(self) -> str:
    return '\n'.join(finding.text for finding in self)

  def of(self, kind: str) -> Findings:
    """The findings of one kind."""
    return Findings(finding for finding in self if finding.kind == kind)


def find(planner: Planner, rows: Sequence[Row]) -> Findings:
  """The findings in a tree's rows, suspicious ones first."""
  findings = [
    *_unmatched(planner, rows),
    *_not_inferred(rows),
    *_conflicts(planner, rows),
    *_idle_rules(planner, rows),
    *_idle_axes(planner, rows),
    *_replicated(planner, rows),
  ]
  return Findings(sorted(findings, key=lambda finding: not finding.suspicious))


def _unmatched(planner: Planner, rows: Sequence[Row]) -> Iterable[Finding]:
  paths: dict[tuple[str, Rules], list[str]] = defaultdict(list)
  for row, decision in _decisions(rows):
    table = _table_for(planner.rules, row.owner)
    open_name = row.logical and decision.rule is None and isinstance(decision.name, str)
    if open_name and table is not None and decision.name not in table.by_name:
      paths[decision.name, table].append(row.path)
  for (name, table), unmatched in paths.items():
    text = f'name {name!r} has no rule and is replicated ({_listed(unmatched)}).'
    suggestion = did_you_mean(name, table.by_name)
    yield Finding('unmatched', text + suggestion, tuple(unmatched), bool(suggestion))


def _table_for(rules: Rules, owner: RuleId | None) -> Rules | None:
  """The table that resolved an array's names; None if a rule for its path decided."""
  if owner is None:
    return rules
  first, *rest = owner if isinstance(owner, tuple) else (owner,)
  clause = rules.clauses[first]
  inner = clause[1] if isinstance(clause, tuple) and isinstance(clause[1], Rules) else None
  return None if inner is None else _table_for(inner, tuple(rest) or None)


def _not_inferred(rows: Sequence[Row]) -> Iterable[Finding]:
  for row in rows:
    if row.inference is not None and row.inference.names is None:
      parameter = row.inference.parameter or 'any parameter in this tree'
      if row.inference.how == 'ambiguous':
        reason = f'shape {row.shape} follows from the shape of {parameter} in more than one way'
      else:
        reason = f'shape {row.shape} does not follow from the shape of {parameter}'
      yield Finding('not inferred', f'{row.path}: {reason}; it is replicated.', (row.path,), True)


def _conflicts(planner: Planner, rows: Sequence[Row]) -> Iterable[Finding]:
  paths: dict[tuple[str, RuleId], list[str]] = defaultdict(list)
  for row, decision in _decisions(rows):
    if decision.lost is not None:
      paths[decision.name, decision.lost.rule].append(row.path)
  for (name, rule), conflicting in paths.items():
    text = (
      f'name {name!r} is replicated: the axes of rule {rule_text(rule)} {planner.rules.at(rule)!r} went to '
      f'another dimension ({_listed(conflicting)}).'
    )
    yield Finding('conflict', text, tuple(conflicting), True)


def _idle_rules(planner: Planner, rows: Sequence[Row]) -> Iterable[Finding]:
  """Rules that decided nothing, other than name rules: names of a batch or of activations are not in a state."""
  used = {decision.rule for _, decision in _decisions(rows)} | {row.owner for row in rows}
  unmet = _unmet_tables(planner.rules, rows)
  idle = [
    (rule, clause)
    for rule, clause in planner.rules.all_rules()
    if rule not in used and not (isinstance(rule, tuple) and rule[0] in unmet)
  ]
  paths = [row.path for row in rows]
  for rule, clause in [*unmet.items(), *idle]:
    reasons: Counter[Reason] = Counter(
      skip.reason for row in rows for skip in row.skipped if skip.rule == rule
    )
    finding = clause.idle(paths, reasons)
    if finding is not None:
      text = f'rule {rule_text(rule)} {clause.short} {finding.text}'
      yield Finding('idle rule', text, suspicious=finding.suspicious)


def _unmet_tables(rules: Rules, rows: Sequence[Row]) -> dict[RuleId, Clause]:
  """The tables within the table that own no array."""
  owners = {row.owner[0] if isinstance(row.owner, tuple) else row.owner for row in rows}
  return {
    index: clause
    for index, clause in enumerate(rules.parsed)
    if isinstance(clause, OwningClause) and clause.table is not None and index not in owners
  }


def _idle_axes(planner: Planner, rows: Sequence[Row]) -> Iterable[Finding]:
  used = {axis for row in rows for entry in row.spec for axis in axis_names(entry)}
  for axis, size in planner.sizes.items():
    if axis not in used and size > 1:
      yield Finding('idle axis', f'mesh axis {axis!r} ({size}) is not used by this tree.')


def _replicated(planner: Planner, rows: Sequence[Row]) -> Iterable[Finding]:
  """The arrays that exceed an even split over all devices the most, if that costs noticeable memory."""
  total = sum(row.bytes_per_device for row in rows)
  excess = {row.path: row.bytes_per_device - row.bytes / planner.mesh.size for row in rows}
  worst = sorted((row for row in rows if row.copies > 1), key=lambda row: -excess[row.path])[:5]
  worst = [row for row in worst if excess[row.path] >= max(_NOTICEABLE, total / 100)]
  if worst:
    each = ', '.join(
      f'{row.path} {size_text(row.bytes_per_device)} (even: {size_text(row.bytes / planner.mesh.size)})'
      for row in worst
    )
    text = f'not sharded enough, bytes per device: {each}.'
    yield Finding('replicated', text, tuple(row.path for row in worst))


_NOTICEABLE = 2**20  # bytes per device


def _decisions(rows: Sequence[Row]) -> Iterable[tuple[Row, Any]]:
  return ((row, decision) for row in rows for decision in row.decisions)


def _listed(paths: Sequence[str]) -> str:
  """`3 arrays: a, b, ...`."""
  return f'{plural(len(paths), "array")}: {", ".join(paths[:2])}{", ..." if len(paths) > 2 else ""}'
