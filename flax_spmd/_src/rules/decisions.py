"""How logical names become a PartitionSpec: one pass over a rule table, every decision kept.

The pass is exactly Flax's `logical_to_mesh_axes`:

* order is priority: the first rule whose name is among the array's names gets its mesh axes first;
* a mesh axis is given once per array: a rule whose axes are (even partly) taken is skipped;
* a later rule for a name whose dimension is still open is its fallback;
* `None` (or `()`) decides a dimension too: it is replicated, and no fallback is looked at.

What Flax leaves silent is a *policy*. A resolution carries what its policies object to, as problems
without a path; whoever knows the path collects them over a whole tree and raises them at once.

    resolution.spec        P('data', None)
    resolution.decisions   one per dimension: which rule, and which rules were skipped and why
    resolution.problems    () when nothing is wrong
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from jax import tree_util
from jax.sharding import PartitionSpec

from flax_spmd.errors import (
  ConflictError,
  MeshAxisError,
  Problem,
  RulesError,
  UnmatchedNameError,
  did_you_mean,
  problems_text,
)

Axes: TypeAlias = Any  # None, a mesh axis, a (nested) tuple of them, or PartitionSpec.UNCONSTRAINED
Names: TypeAlias = Sequence[Any]
RuleId: TypeAlias = int | tuple[int, ...]  # a tuple for a rule of a table within a table
Reason: TypeAlias = Literal[
  'decided', 'taken', 'indivisible', 'missing', 'small', 'not floating', 'no open dimension'
]

UNCONSTRAINED = PartitionSpec.UNCONSTRAINED


class Skipped(NamedTuple):
  """A rule that was asked about a dimension (or, by `fsdp`, about a whole array) and did not decide it.

  `reason` is 'decided' (by an earlier rule), 'taken' (its mesh axes belong to another dimension),
  'indivisible', or 'missing' (the mesh has none of its axes); of `fsdp` also 'small', 'not floating'
  and 'no open dimension'. `axes` are the axes in question.
  """

  rule: RuleId
  reason: Reason
  axes: tuple[str, ...]


class Decision(NamedTuple):
  """What happened to one dimension: its name, the axes it got, by which rule, and who was skipped.

  `rule` is the index in the table, or None where no rule decided (then the dimension is replicated, or
  its name is mesh axes already, of which those that the mesh has are taken). A rule of a table within the
  table is a tuple of indices, the outermost first.

  Example:
    >>> embed, mlp = Rules(('mlp', 'model'), ('embed', 'model')).resolve(('embed', 'mlp')).decisions
    >>> mlp.axes, mlp.rule
    ('model', 0)
    >>> embed.axes, embed.lost
    (None, Skipped(rule=1, reason='taken', axes=('model',)))
  """

  dim: int
  name: Any
  axes: Axes
  rule: RuleId | None
  skipped: tuple[Skipped, ...] = ()

  @property
  def lost(self) -> Skipped | None:
    """The first rule that would have decided, had its axes not gone to another dimension."""
    taken = (skip for skip in self.skipped if skip.reason == 'taken')
    return next(taken, None) if self.rule is None else None


class Resolution(NamedTuple):
  """A PartitionSpec, the decisions that led to it, and what the policies object to.

  Attributes:
    spec: mesh axes per dimension.
    decisions: one per dimension that something is known about.
    problems: what is wrong, without the array's path.
    owner: the rule that took the array as a whole (a path rule, a policy), if one did.
    skipped: the `fsdp` rules that had no dimension to fill.

  Example:
    >>> found = Rules(('mlp', 'model')).resolve(('embed', 'mlp'))
    >>> found.spec, [decision.rule for decision in found.decisions]
    (P(None, 'model'), [None, 0])
  """

  spec: PartitionSpec
  decisions: tuple[Decision, ...]
  problems: tuple[Problem, ...] = ()
  owner: RuleId | None = None
  skipped: tuple[Skipped, ...] = ()

  def within(self, rule: int, where: str) -> Resolution:
    """The same resolution, seen from the table that has this one's table as its rule `rule`."""
    return Resolution(
      self.spec,
      tuple(
        decision._replace(rule=_within(rule, decision.rule), skipped=_all_within(rule, decision.skipped))
        for decision in self.decisions
      ),
      tuple(problem.at(f'in the table of {where}', joint=': ') for problem in self.problems),
      rule if self.owner is None else _within(rule, self.owner),
      _all_within(rule, self.skipped),
    )


def _within(rule: int, inner: RuleId | None) -> RuleId | None:
  if inner is None:
    return None
  return (rule, *(inner if isinstance(inner, tuple) else (inner,)))


def _all_within(rule: int, skipped: tuple[Skipped, ...]) -> tuple[Skipped, ...]:
  return tuple(skip._replace(rule=_within(rule, skip.rule)) for skip in skipped)


@dataclasses.dataclass(frozen=True)
class Policies:
  """What a rule table does where Flax is silent.

  Attributes:
    unmatched: a name without any rule: 'replicate' its dimension, or 'error'. In a table with path
      rules or policies also an array that no rule applies to.
    conflict: a dimension whose every rule lost its axes to other dimensions: 'skip' (replicated),
      or 'error'.
    indivisible: a size that the mesh axes do not divide: 'error', look for the 'next' rule of that
      name, or 'replicate' the dimension.
    missing_axis: a mesh axis that the mesh lacks: 'error', or 'drop' it from the rule (a rule that
      is left with no axis is skipped), so that one table serves several meshes.

  Raises:
    RulesError: a value is none of these.

  Example:
    >>> Policies(unmatched='error').changed()
    {'unmatched': 'error'}
    >>> Rules(('mlp', 'model'), indivisible='replicate').policies.indivisible
    'replicate'
  """

  unmatched: Literal['replicate', 'error'] = 'replicate'
  conflict: Literal['skip', 'error'] = 'skip'
  indivisible: Literal['error', 'next', 'replicate'] = 'error'
  missing_axis: Literal['error', 'drop'] = 'error'

  def __post_init__(self):
    problems = [
      Problem(
        f'{name}={getattr(self, name)!r} is no policy.',
        f'{name} is one of {", ".join(map(repr, values))}.',
      )
      for name, values in _POLICY_VALUES.items()
      if getattr(self, name) not in values
    ]
    if problems:
      raise RulesError(problems_text(problems))

  def changed(self) -> dict[str, str]:
    """The policies that differ from the defaults."""
    return {
      field.name: getattr(self, field.name)
      for field in dataclasses.fields(self)
      if getattr(self, field.name) != field.default
    }


_POLICY_VALUES = {
  'unmatched': ('replicate', 'error'),
  'conflict': ('skip', 'error'),
  'indivisible': ('error', 'next', 'replicate'),
  'missing_axis': ('error', 'drop'),
}


def axis_names(axes: Axes) -> tuple[str, ...]:
  """The mesh axes in an entry of a rule or a spec, in order, nested tuples flattened.

  Example:
    >>> axis_names(('data', ('model',)))
    ('data', 'model')
    >>> axis_names(None)
    ()
  """
  if isinstance(axes, str):
    return (axes,)
  if axes is None or axes is UNCONSTRAINED:
    return ()
  return tuple(leaf for leaf in tree_util.tree_leaves(axes) if isinstance(leaf, str))


def rule_text(rule: RuleId) -> str:
  """A rule's index; `2.0` for the first rule of the table that is rule 2."""
  return '.'.join(map(str, rule)) if isinstance(rule, tuple) else str(rule)


@dataclasses.dataclass(frozen=True, eq=False)
class Resolver:
  """Resolves names against `clauses`; `sizes` (per mesh axis) may be unknown.

  Without sizes nothing is known of a mesh, so divisibility and mesh axes are not looked at.
  """

  clauses: Sequence[Any]
  by_name: Mapping[str, Sequence[int]]
  policies: Policies
  sizes: Mapping[str, int] | None = None

  def resolve(self, names: Names, shape: Sequence[int] | None = None) -> Resolution:
    """Decides every dimension of an array with these names (and this shape, if it is known)."""
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
      axes, wanted, missing = self._present(axes)
      refusal = self._refusal(wanted, missing, dim in decided, taken, shape and shape[dim])
      if refusal is None:
        entries[dim] = axes
        taken.update(wanted)
      else:
        skipped.setdefault(dim, []).append(Skipped(index, refusal, wanted or missing))
      if refusal is None or (refusal == 'indivisible' and self.policies.indivisible == 'replicate'):
        decided[dim] = index

    decisions = tuple(
      Decision(dim, name, entries[dim], decided.get(dim), tuple(skipped.get(dim, ())))
      for dim, name in enumerate(names)
    )
    problems = (*given.problems, *self._objections(names, decisions, shape))
    return Resolution(PartitionSpec(*entries), decisions, problems)

  def _present(self, axes: Axes) -> tuple[Axes, tuple[str, ...], tuple[str, ...]]:
    """A rule's axes on this mesh: the entry, its axis names, and those that are all missing."""
    wanted = axis_names(axes)
    if self.sizes is None or self.policies.missing_axis == 'error':
      return axes, wanted, ()
    kept = tuple(axis for axis in wanted if axis in self.sizes)
    if kept == wanted:
      return axes, wanted, ()
    return (kept[0] if len(kept) == 1 else kept), kept, () if kept else wanted

  def _refusal(self, wanted, missing, decided, taken, size) -> Reason | None:
    """Why a rule cannot decide a dimension, or None if it can."""
    if decided:
      return 'decided'
    if missing:
      return 'missing'
    if not taken.isdisjoint(wanted):
      return 'taken'
    if size is not None and self.policies.indivisible != 'error' and size % self._parts(wanted):
      return 'indivisible'
    return None

  def _parts(self, axes: Sequence[str]) -> int:
    """Into how many pieces these axes cut a dimension."""
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
      f'correct the name, or add a rule for it; ({decision.name!r}, None) replicates it.',
      UnmatchedNameError,
    )

  def _indivisible(self, decision: Decision, size: int) -> Problem:
    axes, rule = axis_names(decision.axes), decision.rule
    parts = self._parts(axes)
    return Problem(
      f'{_dimension(decision)}: size {size} is not divisible by {_cut(axes, self.sizes or {})}, '
      f'asked for by {self._rule(rule)}.',
      f'pad it to {-(-size // parts) * parts}, put the rule ({decision.name!r}, None) before rule '
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
      f'add a fallback for {decision.name!r} after rule {lost.rule}, such as '
      f'({decision.name!r}, None), or put its rule first.',
      ConflictError,
    )


class Source(NamedTuple):
  """Where mesh axes come from, if not from a box: a rule of the table, by its index and its text."""

  rule: int
  text: str


def resolve_axes(
  entries: Sequence[Axes],
  shape: Sequence[int],
  sizes: Mapping[str, int] | None,
  policies: Policies,
  source: Source | None = None,
) -> Resolution:
  """The resolution of entries that are mesh axes already: they are taken as they are, and checked.

  Args:
    entries: mesh axes per dimension; UNCONSTRAINED leaves a dimension open.
    shape: the array's shape.
    sizes: size per mesh axis; None: nothing is known of the mesh, and nothing checked against it.
    policies: `missing_axis` and `indivisible` apply.
    source: the rule that the entries are from; None for those of a box.

  Example:
    >>> resolve_axes(('data', None), (6, 8), {'data': 4}, Policies(indivisible='replicate')).spec
    P(None, None)
  """
  checked = _AxesCheck(tuple(entries), sizes, policies, source)
  decisions = tuple(checked.decide(dim, shape[dim]) for dim in range(len(entries)))
  spec = PartitionSpec(*(None if d.axes is UNCONSTRAINED else d.axes for d in decisions))
  return Resolution(spec, decisions, tuple(checked.problems), None if source is None else source.rule)


class _AxesCheck:
  """Goes through entries of mesh axes, dimension by dimension, and notes what is wrong with them.

  Among logical names they are tuples, and other dimensions are not asked about.
  """

  def __init__(
    self, entries, sizes, policies: Policies, source: Source | None, *, among_names: bool = False
  ):
    self.entries, self.among_names = entries, among_names
    self.sizes = sizes
    self.policies = policies
    self.source = source
    self.seen: set[str] = set()
    self.problems: list[Problem] = []

  def decide(self, dim: int, size: int) -> Decision:
    entry = self.entries[dim]
    name = None if self.source else entry
    if entry is UNCONSTRAINED and self.source:
      return Decision(dim, name, UNCONSTRAINED, None)
    rule = self.source.rule if self.source else None
    if not (entry is None or entry is UNCONSTRAINED or isinstance(entry, (str, tuple, list))):
      self.problems.append(self._strange(dim))
      return Decision(dim, name, None, rule)
    entry, axes = self._present(dim, entry)
    self.problems += [
      self._reused(dim, axis, 'for an earlier dimension too') for axis in axes if axis in self.seen
    ]
    self.problems += [
      self._reused(dim, axis, 'twice') for axis in dict.fromkeys(axes) if axes.count(axis) > 1
    ]
    self.seen.update(axes)
    if not size % math.prod((self.sizes or {}).get(axis, 1) for axis in axes):
      return Decision(dim, name, entry, rule)
    if self.policies.indivisible == 'error':
      self.problems.append(self._indivisible(dim, axes, size))
    if rule is None:
      return Decision(dim, name, None, None)
    skipped = (Skipped(rule, 'indivisible', axes),)
    if self.policies.indivisible == 'next':  # what comes after may fill the dimension
      return Decision(dim, name, UNCONSTRAINED, None, skipped)
    return Decision(dim, name, None, rule, skipped)

  def _present(self, dim: int, entry: Axes) -> tuple[Axes, tuple[str, ...]]:
    """An entry without the axes that the mesh lacks."""
    axes = axis_names(entry)
    missing = [] if self.sizes is None else [axis for axis in axes if axis not in self.sizes]
    if not missing:
      return axes if isinstance(entry, (tuple, list)) else entry, axes
    if self.policies.missing_axis == 'error':
      self.problems += [self._missing(dim, axis) for axis in dict.fromkeys(missing)]
    axes = tuple(axis for axis in axes if axis not in missing)
    return axes[0] if len(axes) == 1 else axes or None, axes

  def _what(self) -> str:
    if self.source is None:
      return f'names {self.entries!r}'
    return f'spec {PartitionSpec(*self.entries)} of rule {self.source.rule} {self.source.text}'

  def _strange(self, dim: int) -> Problem:
    return Problem(
      f'dim {dim} of {self._what()}: {self.entries[dim]!r} is neither a name nor mesh axes.',
      'write a name, a tuple of mesh axes, or None.',
    )

  def _missing(self, dim: int, axis: str) -> Problem:
    known = self.sizes or {}
    if self.among_names:
      fix = ', or give the dimension one logical name, and the table a rule for it.'
    elif self.source is None:
      fix = ', or use with_logical_partitioning and a rule if it is a logical name.'
    else:
      fix = '.'
    return Problem(
      f'dim {dim} of {self._what()}: {axis!r} is no axis of the mesh, which has {tuple(known)!r}.'
      + did_you_mean(axis, known),
      f'correct the axis name{fix}',
      MeshAxisError,
    )

  def _reused(self, dim: int, axis: str, how: str) -> Problem:
    return Problem(
      f'dim {dim} of {self._what()}: mesh axis {axis!r} is used {how}.',
      'use every mesh axis for one dimension only.',
    )

  def _indivisible(self, dim: int, axes: tuple[str, ...], size: int) -> Problem:
    sizes = self.sizes or {}
    parts = math.prod(sizes[axis] for axis in axes)
    text = f'dim {dim}: size {size} is not divisible by {_cut(axes, sizes)}'
    if self.source is None:
      return Problem(
        f'{text}.',
        f'pad it to {-(-size // parts) * parts}, name the dimension None to replicate it, or give the '
        "table indivisible='replicate'.",
      )
    return Problem(
      f'{text}, asked for by rule {self.source.rule} {self.source.text}.',
      f'pad it to {-(-size // parts) * parts}, add a rule for this path before rule {self.source.rule}, '
      "or give the table indivisible='next' or 'replicate'.",
    )


def _cut(axes: Sequence[str], sizes: Mapping[str, int]) -> str:
  """`mesh axis 'model' (4)`, or `mesh axes 'data' (2) x 'model' (4) = 8`."""
  which = ' x '.join(f'{axis!r} ({sizes[axis]})' for axis in axes)
  if len(axes) == 1:
    return f'mesh axis {which}'
  return f'mesh axes {which} = {math.prod(sizes[axis] for axis in axes)}'


def _dimension(decision: Decision) -> str:
  return f'dim {decision.dim} {decision.name!r}'


def _repeated(names: Names) -> tuple[str, ...]:
  """The strings that occur more than once in `names`, each once, in order."""
  strings = [name for name in names if isinstance(name, str)]
  return tuple(dict.fromkeys(name for name in strings if strings.count(name) > 1))


def _repeated_problem(names: Names, twice: Sequence[str]) -> Problem:
  return Problem(
    f'names {tuple(names)!r}: {", ".join(map(repr, twice))} stands for more than one dimension.',
    'give every dimension a name of its own, or None.',
  )
