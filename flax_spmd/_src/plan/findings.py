"""Findings: what in a plan deserves a second look, although nothing is wrong enough to refuse it.

    findings = layout.check(state)
    if findings: print(findings)

A typo in a logical name is the usual one: under the default policies its dimension is replicated, as
in Flax, and a finding says so and what was probably meant.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from flax_spmd._src.plan.planner import Planner
from flax_spmd._src.plan.rows import Row
from flax_spmd._src.rules.decisions import RuleId, axis_names, rule_text
from flax_spmd._src.rules.table import Rules, axes_of, is_logical, is_path
from flax_spmd._src.text import size_text
from flax_spmd.errors import did_you_mean


class Finding(NamedTuple):
  """One thing that deserves a look.

  Attributes:
    kind: 'unmatched' (a name without a rule), 'guessed' (optimizer state that could be read in no one
      way), 'conflict' (a dimension that lost its axis), 'idle rule', 'idle axis', 'replicated' (an
      array that lies in few pieces for its size).
    text: a sentence.
    paths: the arrays it is about.
    suspicious: whether it is likely a mistake. A rule for activations decides nothing in a state, and
      names may go without a rule; both are worth knowing and fine.
  """

  kind: Literal['unmatched', 'guessed', 'conflict', 'idle rule', 'idle axis', 'replicated']
  text: str
  paths: tuple[str, ...] = ()
  suspicious: bool = False


class Findings(tuple[Finding, ...]):
  """All findings of a tree, suspicious ones first; false where there are none. Prints one a line."""

  __slots__ = ()

  @property
  def suspicious(self) -> Findings:
    """The findings that are likely mistakes: `assert not layout.check(state).suspicious`."""
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
    *_guessed(rows),
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
  for (name, table), where in paths.items():
    text = f'name {name!r} has no rule and is replicated ({_places(where)}).'
    suggestion = did_you_mean(name, table.by_name)
    yield Finding('unmatched', text + suggestion, tuple(where), bool(suggestion))


def _table_for(rules: Rules, owner: RuleId | None) -> Rules | None:
  """The table that an array's names were looked up in; None where a rule for its path decided."""
  if owner is None:
    return rules
  first, *rest = owner if isinstance(owner, tuple) else (owner,)
  clause = rules.clauses[first]
  inner = clause[1] if isinstance(clause, tuple) and isinstance(clause[1], Rules) else None
  return None if inner is None else _table_for(inner, tuple(rest) or None)


def _guessed(rows: Sequence[Row]) -> Iterable[Finding]:
  for row in rows:
    if row.guess is not None and row.guess.names is None:
      why = 'in more than one way' if row.guess.how == 'ambiguous' else 'in no way'
      whose = row.guess.parameter or 'any parameter in this tree'
      text = f'{row.path}: shape {row.shape} follows from the shape of {whose} {why}; it is replicated.'
      yield Finding('guessed', text, (row.path,), True)


def _conflicts(planner: Planner, rows: Sequence[Row]) -> Iterable[Finding]:
  paths: dict[tuple[str, RuleId], list[str]] = defaultdict(list)
  for row, decision in _decisions(rows):
    if decision.lost is not None:
      paths[decision.name, decision.lost.rule].append(row.path)
  for (name, rule), where in paths.items():
    text = (
      f'name {name!r} is replicated: the axes of rule {rule_text(rule)} {planner.rules.at(rule)!r} went to '
      f'another dimension ({_places(where)}).'
    )
    yield Finding('conflict', text, tuple(where), True)


def _idle_rules(planner: Planner, rows: Sequence[Row]) -> Iterable[Finding]:
  """Rules that ask for mesh axes and got to decide nothing; activations are not in the tree."""
  used = {decision.rule for _, decision in _decisions(rows)} | {row.owner for row in rows}
  idle = [(rule, clause) for rule, clause in planner.rules.all_rules() if rule not in used]
  logical = [
    f'{rule_text(rule)} {clause!r}' for rule, clause in idle if is_logical(clause) and axes_of(clause)
  ]
  if logical:
    yield Finding('idle rule', f'rules that decided nothing in this tree: {", ".join(logical)}.')
  scopes = {(i,): clause for i, clause in enumerate(planner.rules.clauses) if _is_scope(clause)}
  owners = {row.owner if isinstance(row.owner, tuple) else (row.owner,) for row in rows}
  unmet = [scope for scope in scopes if not any(owner[:1] == scope for owner in owners)]
  for scope in unmet:
    yield _idle_path(scope[0], scopes[scope], rows)
  for rule, clause in idle:
    if isinstance(rule, tuple) and rule[:1] in unmet:
      continue
    if is_path(clause):
      yield _idle_path(rule, clause, rows)
    elif not is_logical(clause):
      yield Finding(
        'idle rule', f'rule {rule_text(rule)} {clause!r} decided nothing{_why(rule, clause, rows)}.'
      )


def _is_scope(clause: Any) -> bool:
  return is_path(clause) and isinstance(clause[1], Rules)


def _idle_path(rule: RuleId, clause: Any, rows: Sequence[Row]) -> Finding:
  shown = f'({clause[0]!r}, Rules(...))' if _is_scope(clause) else repr(clause)
  text = f'rule {rule_text(rule)} {shown}'
  reached = [row.path for row in rows if re.search(clause[0], row.path)]
  if reached:
    return Finding(
      'idle rule', f'{text} decided nothing: earlier rules own what it matches ({_places(reached)}).'
    )
  meant = _closest_path(clause[0], [row.path for row in rows])
  closest = f' Closest path: {meant!r}.' if meant else ''
  return Finding('idle rule', f'{text} matched no array.{closest}', suspicious=bool(meant))


def _closest_path(pattern: str, paths: Sequence[str]) -> str | None:
  """The part of a path, of as many keys as the pattern has, that is most like the pattern."""
  plain = re.sub(r'[\^$\\.*+?()\[\]{}|]', '', pattern).strip('/')
  count = plain.count('/') + 1
  keys = (path.split('/') for path in paths)
  parts = {'/'.join(each[i : i + count]) for each in keys for i in range(len(each) - count + 1)}
  return next(iter(difflib.get_close_matches(plain, sorted(parts)[:_ENOUGH_PATHS], 1)), None)


def _why(rule: RuleId, clause: Any, rows: Sequence[Row]) -> str:
  """`: 3 x small (min_size=1048576), 1 x not floating` for an `fsdp` that filled nothing."""
  reasons = Counter(skip.reason for row in rows for skip in row.skipped if skip.rule == rule)
  each = [
    f'{count} x {reason}' + (f' (min_size={clause.min_size})' if reason == 'small' else '')
    for reason, count in reasons.items()
  ]
  return f': {", ".join(each)}' if each else ''


def _idle_axes(planner: Planner, rows: Sequence[Row]) -> Iterable[Finding]:
  used = {axis for row in rows for entry in row.spec for axis in axis_names(entry)}
  for axis, size in planner.sizes.items():
    if axis not in used and size > 1:
      yield Finding('idle axis', f'mesh axis {axis!r} ({size}) is not used by this tree.')


def _replicated(planner: Planner, rows: Sequence[Row]) -> Iterable[Finding]:
  """The arrays that cost a device most beyond an even split, if that is worth a thought."""
  total = sum(row.bytes_per_device for row in rows)
  excess = {row.path: row.bytes_per_device - row.bytes / planner.mesh.size for row in rows}
  worst = sorted((row for row in rows if row.copies > 1), key=lambda row: -excess[row.path])[:5]
  worst = [row for row in worst if excess[row.path] >= max(_MUCH, total / 100)]
  if worst:
    each = ', '.join(
      f'{row.path} {size_text(row.bytes_per_device)} (even: {size_text(row.bytes / planner.mesh.size)})'
      for row in worst
    )
    text = f'not sharded enough, bytes per device: {each}.'
    yield Finding('replicated', text, tuple(row.path for row in worst))


_MUCH = 2**20  # bytes a device
_ENOUGH_PATHS = 5000


def _decisions(rows: Sequence[Row]) -> Iterable[tuple[Row, Any]]:
  return ((row, decision) for row in rows for decision in row.decisions)


def _places(paths: Sequence[str]) -> str:
  """`3 arrays: a, b, ...`."""
  count = f'{len(paths)} array{"" if len(paths) == 1 else "s"}'
  return f'{count}: {", ".join(paths[:2])}{", ..." if len(paths) > 2 else ""}'
