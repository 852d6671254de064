"""Decisions: the value types of a resolution, and the policies of a table.

    resolution.spec        P('data', None)
    resolution.decisions   one per dimension: its rule, and which rules were skipped and why
    resolution.problems    () when nothing is wrong

Flax is silent about much; here each of these cases is a *policy*. A resolution carries the problems that
its policies report, without a path; the caller knows the path, collects them over a whole tree and raises
them at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from jax import tree_util
from jax.sharding import PartitionSpec

from flax_spmd._src.public_module import set_module
from flax_spmd.errors import (
  Problem,
  RulesError,
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


@set_module('flax_spmd')
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


@set_module('flax_spmd')
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


@set_module('flax_spmd')
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
