"""Findings: parts of a plan that are allowed, but may be mistakes.

    findings = layout.check(state)
    if findings: print(findings)

A typo in a logical name is the most common one. Under the default policies its dimension is replicated, as
in Flax; a finding reports it, with the name that was probably meant.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from flax_spmd._src.notebook_html import bullets
from flax_spmd._src.plan.folding import FoldedRow, fold_rows
from flax_spmd._src.plan.planner import Planner
from flax_spmd._src.plan.rows import Row
from flax_spmd._src.rules.clauses import AnnotationRule, Clause, NameRule, OwningClause
from flax_spmd._src.rules.decisions import Reason, RuleId, axis_names, rule_text
from flax_spmd._src.rules.table import Rules
from flax_spmd._src.text import listed_paths, plural, size_text, value_text
from flax_spmd.errors import did_you_mean


class Finding(NamedTuple):
  """One possible mistake in a plan.

  Attributes:
    kind: 'not as planned' (arrays whose own sharding is another one), 'unmatched' (a name without a rule),
      'not inferred' (optimizer state whose names could not be inferred), 'few names' (fewer than dimensions),
      'many names' (more than dimensions, without a rule), 'conflict' (a dimension that lost its axis), 'idle
      rule', 'idle axis', 'nothing sharded' (every array is whole on every device, and no other finding is a
      reason), 'sharded less' (optimizer state with fewer shards than its parameter), 'replicated' (an array
      with few shards for its size).
    text: a sentence.
    paths: the arrays concerned.
    suspicious: whether it is likely a mistake. A name may deliberately have no rule, for example; such
      findings are not suspicious.
  """

  kind: Literal[
    'not as planned',
    'unmatched',
    'not inferred',
    'few names',
    'many names',
    'conflict',
    'idle rule',
    'idle axis',
    'nothing sharded',
    'sharded less',
    'replicated',
  ]
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

  def _repr_html_(self) -> str:
    return bullets(finding.text for finding in self) or 'No findings.'

  def of(self, kind: str) -> Findings:
    """The findings of one kind."""
    return Findings(finding for finding in self if finding.kind == kind)


def find(planner: Planner, rows: Sequence[Row]) -> Findings:
  """The findings in a tree's rows, suspicious ones first."""
  kinds = _kinds(rows)
  reasons = [
    *_not_as_planned(rows),
    *_unmatched(planner, rows, kinds),
    *_not_inferred(rows),
    *_many_names(rows),
    *_conflicts(planner, rows, kinds),
    *_idle_rules(planner, rows, kinds),
  ]
  findings = [
    *reasons,
    *_few_names(rows),
    *_idle_axes(planner, kinds),
    *([] if reasons else _nothing_sharded(planner, kinds)),
    *_sharded_less(rows),
    *_replicated(planner, rows, kinds),
  ]
  return Findings(sorted(findings, key=lambda finding: not finding.suspicious))


class _Kind(NamedTuple):
  """Arrays with one shape, dtype and resolution: the first row, and the positions of all in the tree."""

  row: Row
  positions: list[int]


def _kinds(rows: Sequence[Row]) -> list[_Kind]:
  """The kinds of arrays in a tree; most findings are about a kind, and trees have few of them."""
  kinds: dict[Any, _Kind] = {}
  for position, row in enumerate(rows):
    resolved = id(row.spec), id(row.decisions), id(row.skipped)
    key = row.shape, row.dtype, row.logical, row.owner, resolved
    kind = kinds.get(key)
    if kind is None:
      kind = kinds[key] = _Kind(row, [])
    kind.positions.append(position)
  return list(kinds.values())


def _paths(rows: Sequence[Row], positions: Iterable[int]) -> tuple[str, ...]:
  """The paths at some positions, in tree order; each once."""
  return tuple(rows[position].path for position in sorted(set(positions)))


def _not_as_planned(rows: Sequence[Row]) -> Iterable[Finding]:
  """The arrays that are sharded differently than planned, one finding for each kind of deviation."""
  deviating: dict[str, list[Row]] = defaultdict(list)
  for row in rows:
    if row.deviation is not None:
      deviating[row.deviation.kind].append(row)
  for kind, found in deviating.items():
    folds = fold_rows(found)
    listed = [_deviation_text(fold) for fold in folds]
    more = [f'{len(listed) - _LISTED} more'] if len(listed) > _LISTED else []
    text = (
      f'{plural(len(found), "array")} {_NOT_AS_PLANNED[kind]} ({"; ".join([*listed[:_LISTED], *more])}). '
      f'Fix: {_NAMES_IN_PLAN if any(map(_has_lost_names, found)) else _MOVE}'
    )
    yield Finding('not as planned', text, tuple(row.path for row in found), True)


def _has_lost_names(row: Row) -> bool:
  """Whether no name or rule concerns an array that is sharded, as those of a state without boxes."""
  return (
    row.names is None
    and row.owner is None
    and row.deviation is not None
    and row.deviation.kind == 'spec'
  )


def _deviation_text(fold: FoldedRow) -> str:
  """`params/w: planned P('data'), stored as P()`."""
  deviation = fold.row.deviation
  return f'{fold.name}: planned {fold.row.spec}, {deviation and deviation.text}'


_MOVE = 'move them with layout.shard(tree), or plan an abstract tree with this layout.'
_NAMES_IN_PLAN = (
  'a state without boxes has its names in its plan, which explains it: layout.plan(create, ...).explain(state). '
  'layout.shard(tree) would replicate arrays without names or rules.'
)
_LISTED = 4  # patterns of arrays in one finding
_NOT_AS_PLANNED = {
  'spec': 'not sharded as planned',
  'mesh': 'not on the planned mesh',
  'memory': 'not in the planned memory',
}


NO_RULE = 'has no rule and is replicated'


def _unmatched(planner: Planner, rows: Sequence[Row], kinds: Sequence[_Kind]) -> Iterable[Finding]:
  positions: dict[tuple[str, Rules], list[int]] = defaultdict(list)
  for kind, decision in _decisions(kinds):
    table = _table_for(planner.rules, kind.row.owner)
    if (
      table is None or decision.rule is not None or axis_names(decision.axes)
    ):  # also by a rule of its own
      continue
    if decision.name in _logical_names(kind.row, table, planner.sizes).difference(table.by_name):
      positions[decision.name, table] += kind.positions
  for (name, table), unmatched in positions.items():
    paths = _paths(rows, unmatched)
    axes = () if all(rows[position].logical for position in unmatched) else planner.sizes
    text = f'name {name!r} {NO_RULE} ({listed_paths(paths)}).'
    suggestion = did_you_mean(name, [*table.by_name, *axes])
    yield Finding('unmatched', text + suggestion, paths, bool(suggestion))


def _logical_names(row: Row, table: Rules, sizes: Mapping[str, int]) -> set[str]:
  """The logical names of an array: in a box of mesh axes, those that are none, if the table has a rule for one."""
  names = {name for name in row.names or () if isinstance(name, str)}
  if row.logical:
    return names
  names -= sizes.keys()
  return names if names & table.by_name.keys() else set()


def _table_for(rules: Rules, owner: RuleId | None) -> Rules | None:
  """The table that resolved an array's names; None if a rule for its path decided."""
  if owner is None:
    return rules
  first, *rest = owner if isinstance(owner, tuple) else (owner,)
  table = rules.parsed[first].table
  inner = table if isinstance(table, Rules) else None
  return None if inner is None else _table_for(inner, tuple(rest) or None)


def _not_inferred(rows: Sequence[Row]) -> Iterable[Finding]:
  for row in rows:
    if row.inference is not None and row.inference.names is None:
      parameter = row.inference.parameter or 'any parameter in this tree'
      if row.inference.how == 'ambiguous':
        reason = f'shape {row.shape} follows from the shape of {parameter} in more than one way'
      else:
        reason = f'shape {row.shape} does not follow from the shape of {parameter}'
      result = f'sharded as {row.spec}' if axis_names(tuple(row.spec)) else 'replicated'
      yield Finding('not inferred', f'{row.path}: {reason}; it is {result}.', (row.path,), True)


def _few_names(rows: Sequence[Row]) -> Iterable[Finding]:
  """The arrays with fewer names than dimensions; optimizer state only if its parameters are elsewhere."""
  few = [row for row in rows if row.unnamed and row.owner is None]
  few = [row for row in few if row.field is None] or few
  if few:
    text = f'fewer names than dimensions, the last have none: {_by_names(few)}.'
    yield Finding('few names', text, tuple(row.path for row in few))


def _many_names(rows: Sequence[Row]) -> Iterable[Finding]:
  """The arrays with more names than dimensions, which are ignored."""
  many = [row for row in rows if row.names is not None and len(row.names) > len(row.shape)]
  if many:
    text = f'more names than dimensions, ignored as no rule uses them: {_by_names(many)}.'
    yield Finding('many names', text, tuple(row.path for row in many), True)


def _by_names(rows: Sequence[Row]) -> str:
  """`('embed', 'kv') for rank 3 (2 arrays: a, b); ...`."""
  paths: dict[Any, list[str]] = defaultdict(list)
  for row in rows:
    paths[row.names[: len(row.names) - row.unnamed], len(row.shape)].append(row.path)
  return '; '.join(
    f'{names!r} for rank {rank} ({listed_paths(each)})' for (names, rank), each in paths.items()
  )


def _conflicts(planner: Planner, rows: Sequence[Row], kinds: Sequence[_Kind]) -> Iterable[Finding]:
  positions: dict[tuple[str, RuleId], list[int]] = defaultdict(list)
  for kind, decision in _decisions(kinds):
    if decision.lost is not None:
      positions[decision.name, decision.lost.rule] += kind.positions
  for (name, rule), conflicting in positions.items():
    paths = _paths(rows, conflicting)
    text = (
      f'name {name!r} is replicated: the axes of rule {rule_text(rule)} {planner.rules.at(rule)!r} went to '
      f'another dimension ({listed_paths(paths)}).'
    )
    yield Finding('conflict', text, paths, True)


def _idle_rules(planner: Planner, rows: Sequence[Row], kinds: Sequence[_Kind]) -> Iterable[Finding]:
  """Rules that decided nothing, other than name rules: names of a batch or of activations are not in a state."""
  used = {kind.row.owner for kind in kinds}
  for _, decision in _decisions(kinds):
    used |= {decision.rule, decision.further}
  unmet = _unmet_tables(planner.rules, kinds)
  idle = [
    (rule, clause)
    for rule, clause in planner.rules.all_rules()
    if rule not in used and not (isinstance(rule, tuple) and rule[0] in unmet)
  ]
  paths = [row.path for row in rows]
  for rule, clause in [*unmet.items(), *idle]:
    reasons: Counter[Reason] = Counter()
    for kind in kinds:
      reasons.update(
        {skip.reason: len(kind.positions) for skip in kind.row.skipped if skip.rule == rule}
      )
    finding = clause.idle(paths, reasons)
    if finding is not None:
      text = f'rule {rule_text(rule)} {clause.short} {finding.text}'
      yield Finding('idle rule', text, suspicious=finding.suspicious)


def _unmet_tables(rules: Rules, kinds: Sequence[_Kind]) -> dict[RuleId, Clause]:
  """The tables within the table that own no array."""
  owners = {kind.row.owner[0] if isinstance(kind.row.owner, tuple) else kind.row.owner for kind in kinds}
  return {
    index: clause
    for index, clause in enumerate(rules.parsed)
    if isinstance(clause, OwningClause) and clause.table is not None and index not in owners
  }


def _idle_axes(planner: Planner, kinds: Sequence[_Kind]) -> Iterable[Finding]:
  used = {axis for kind in kinds for entry in kind.row.spec for axis in axis_names(entry)}
  used |= _axes_of_activations(planner, kinds)
  for axis, size in planner.sizes.items():
    if axis not in used and size > 1:
      yield Finding('idle axis', f'mesh axis {value_text(axis)} ({size}) is not used by this tree.')


def _nothing_sharded(planner: Planner, kinds: Sequence[_Kind]) -> Iterable[Finding]:
  """A tree of arrays that are all whole on every device, as where a state has lost its names."""
  arrays = [kind for kind in kinds if math.prod(kind.row.shape) > 1]
  devices = planner.mesh.size
  if devices == 1 or not arrays or any(kind.row.copies < devices for kind in arrays):
    return
  count = sum(len(kind.positions) for kind in arrays)
  held = sum(kind.row.bytes * len(kind.positions) for kind in arrays)
  named = any(kind.row.names is not None for kind in arrays)
  text = f'no array is sharded: each of {devices} devices holds all {count}, {size_text(held)}.'
  without = '' if named else ' No array has names.'
  strict = planner.rules.policies.unmatched == 'error' and not named
  yield Finding('nothing sharded', text + without, suspicious=strict)


def _axes_of_activations(planner: Planner, kinds: Sequence[_Kind]) -> set[str]:
  """The mesh axes of rules that could not have decided about a tree: for annotations, and for other names.

  In a tree without names, no rule is known to be about activations. A rule for a name that resembles one of the
  tree's may be misspelt.
  """
  rules = planner.rules
  names = set().union(*(_logical_names(kind.row, rules, planner.sizes) for kind in kinds))
  pairs = [clause for _, clause in rules.all_rules() if isinstance(clause, NameRule)]
  open_names = names.difference(clause.name for clause in pairs)
  others = [
    clause for clause in pairs if clause.name not in names and not did_you_mean(clause.name, open_names)
  ]
  annotated = [clause for clause in rules.parsed if isinstance(clause, AnnotationRule)]
  return {axis for clause in annotated + (others if names else []) for axis in clause.mesh_axes}


def _sharded_less(rows: Sequence[Row]) -> Iterable[Finding]:
  """The optimizer's copies that have fewer shards than their parameter, such as those of a table without its names."""
  states = [row for row in rows if row.field is not None and row.bytes_per_device >= NOTICEABLE]
  shapes = {row.shape for row in states}
  parameters: dict[tuple[str, Any], Row] = {}
  for row in rows:
    if row.field is None and row.shape in shapes:
      for depth in range(min(3, row.path.count('/') + 1)):
        key = row.path.split('/', depth)[depth], row.shape
        other = parameters.get(key, row)
        parameters[key] = max(row, other, key=lambda each: each.copies)
  pairs = [(row, parameters.get((row.path[len(row.field or '') + 1 :], row.shape))) for row in states]
  less = [(row, of) for row, of in pairs if of is not None and row.copies > of.copies]
  if less:
    row, of = less[0]
    text = (
      f'optimizer state is sharded less than its parameter ({plural(len(less), "array")}: {row.path} as {row.spec}, '
      f'{of.path} as {of.spec}). optimizer_over(...) keeps the axes of the parameter, and adds others.'
    )
    yield Finding('sharded less', text, tuple(row.path for row, _ in less), True)


def _replicated(planner: Planner, rows: Sequence[Row], kinds: Sequence[_Kind]) -> Iterable[Finding]:
  """The arrays that exceed an even split over all devices the most, if that costs noticeable memory."""
  total = sum(kind.row.bytes_per_device * len(kind.positions) for kind in kinds)
  excess = [
    (kind.row.bytes_per_device - kind.row.bytes / planner.mesh.size, kind)
    for kind in kinds
    if kind.row.copies > 1
  ]
  least = max(NOTICEABLE, total / 100)
  worst = [(-over, position) for over, kind in excess if over >= least for position in kind.positions]
  if worst:
    found = [rows[position] for _, position in sorted(worst)[:5]]
    each = ', '.join(
      f'{row.path} {size_text(row.bytes_per_device)} (even: {size_text(row.bytes / planner.mesh.size)})'
      for row in found
    )
    text = f'not sharded enough, bytes per device: {each}.'
    yield Finding('replicated', text, tuple(row.path for row in found))


NOTICEABLE = 2**20  # bytes per device


def _decisions(kinds: Sequence[_Kind]) -> Iterable[tuple[_Kind, Any]]:
  return ((kind, decision) for kind in kinds for decision in kind.row.decisions)
