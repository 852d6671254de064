"""Findings: what in a plan deserves a second look, although nothing is wrong enough to refuse it.

    findings = layout.check(state)
    if findings: print(findings)

A typo in a logical name is the usual one: under the default policies its dimension is replicated, as
in Flax, and a finding says so and what was probably meant.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from flax_spmd.errors import did_you_mean
from flax_spmd.plan import Planner, Row
from flax_spmd.resolution import axis_names


class Finding(NamedTuple):
  """One thing that deserves a look.

  Attributes:
    kind: 'unmatched' (a name without a rule), 'guessed' (optimizer state that could be read in no one
      way), 'conflict' (a dimension that lost its axis), 'idle rule', 'idle axis'.
    text: a sentence.
    paths: the arrays it is about.
    suspicious: whether it is likely a mistake. A rule for activations decides nothing in a state, and
      names may go without a rule; both are worth knowing and fine.
  """

  kind: Literal['unmatched', 'guessed', 'conflict', 'idle rule', 'idle axis']
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
  ]
  return Findings(sorted(findings, key=lambda finding: not finding.suspicious))


def _unmatched(planner: Planner, rows: Sequence[Row]) -> Iterable[Finding]:
  paths: dict[str, list[str]] = defaultdict(list)
  for row, decision in _decisions(rows):
    if row.logical and isinstance(decision.name, str) and decision.name not in planner.rules.by_name:
      paths[decision.name].append(row.path)
  for name, where in paths.items():
    text = f'name {name!r} has no rule and is replicated ({_places(where)}).'
    suggestion = did_you_mean(name, planner.rules.by_name)
    yield Finding('unmatched', text + suggestion, tuple(where), bool(suggestion))


def _guessed(rows: Sequence[Row]) -> Iterable[Finding]:
  for row in rows:
    if row.guess is not None and row.guess.names is None:
      why = 'in more than one way' if row.guess.how == 'ambiguous' else 'in no way'
      whose = row.guess.parameter or 'any parameter in this tree'
      text = f'{row.path}: shape {row.shape} follows from the shape of {whose} {why}; it is replicated.'
      yield Finding('guessed', text, (row.path,), True)


def _conflicts(planner: Planner, rows: Sequence[Row]) -> Iterable[Finding]:
  paths: dict[tuple[str, int], list[str]] = defaultdict(list)
  for row, decision in _decisions(rows):
    if decision.lost is not None:
      paths[decision.name, decision.lost.rule].append(row.path)
  for (name, rule), where in paths.items():
    text = (
      f'name {name!r} is replicated: the axes of rule {rule} {planner.rules.clauses[rule]!r} went to '
      f'another dimension ({_places(where)}).'
    )
    yield Finding('conflict', text, tuple(where), True)


def _idle_rules(planner: Planner, rows: Sequence[Row]) -> Iterable[Finding]:
  """Rules that ask for mesh axes and got to decide nothing; activations are not in the tree."""
  used = {decision.rule for _, decision in _decisions(rows)}
  idle = [
    f'{index} {clause!r}'
    for index, clause in enumerate(planner.rules.clauses)
    if index not in used and axis_names(clause[1])
  ]
  if idle:
    yield Finding('idle rule', f'rules that decided nothing in this tree: {", ".join(idle)}.')


def _idle_axes(planner: Planner, rows: Sequence[Row]) -> Iterable[Finding]:
  used = {axis for row in rows for entry in row.spec for axis in axis_names(entry)}
  for axis, size in planner.sizes.items():
    if axis not in used and size > 1:
      yield Finding('idle axis', f'mesh axis {axis!r} ({size}) is not used by this tree.')


def _decisions(rows: Sequence[Row]) -> Iterable[tuple[Row, Any]]:
  return ((row, decision) for row in rows for decision in row.decisions)


def _places(paths: Sequence[str]) -> str:
  """`3 arrays: a, b, ...`."""
  count = f'{len(paths)} array{"" if len(paths) == 1 else "s"}'
  return f'{count}: {", ".join(paths[:2])}{", ..." if len(paths) > 2 else ""}'
