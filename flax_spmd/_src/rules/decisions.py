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

from flax_spmd._src.public import public
from flax_spmd._src.text import plain_strings, value_text
from flax_spmd.errors import (
  Problem,
  RulesError,
  problems_text,
)

Axes: TypeAlias = Any  # None, a mesh axis, a (nested) tuple of them, or PartitionSpec.UNCONSTRAINED
Names: TypeAlias = Sequence[Any]
RuleId: TypeAlias = int | tuple[int, ...]  # a tuple for a rule of a table within a table
Reason: TypeAlias = Literal[
  'decided', 'taken', 'indivisible', 'missing', 'small', 'not numbers', 'no open dimension'
]

UNCONSTRAINED = PartitionSpec.UNCONSTRAINED


class Skipped(NamedTuple):
  """A rule that applied to a dimension (`fsdp`, `optimizer_over`: to an array) and did not decide it.

  Attributes:
    rule: id of the rule.
    reason: 'decided' (by an earlier rule), 'taken' (another dimension uses its mesh axes), 'indivisible', or
      'missing' (the mesh has none of its axes); for `fsdp` also 'small', 'not numbers' and 'no open
      dimension'.
    axes: the mesh axes of the rule.
  """

  rule: RuleId
  reason: Reason
  axes: tuple[str, ...]


@public('flax_spmd')
class Decision(NamedTuple):
  """The resolution of one dimension: its name, its mesh axes, the rule that decided, the rules skipped.

  Attributes:
    dim: index of the dimension.
    name: its logical name, or mesh axes, or None.
    axes: its mesh axes; None: it is replicated.
    rule: index of the rule in the table, as a tuple of indices (outermost first) for a table within the table.
      None: no rule decided. The dimension is then replicated, or has the mesh axes among its names.
    skipped: the rules that applied and did not decide.
    further: index of the `optimizer_over` rule that added axes to those of `rule`, if one did.

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
  further: RuleId | None = None

  @property
  def lost(self) -> Skipped | None:
    """The first rule that was skipped because another dimension uses its axes, if no rule decided."""
    taken = (skip for skip in self.skipped if skip.reason == 'taken')
    return next(taken, None) if self.rule is None else None


@public('flax_spmd')
class Resolution(NamedTuple):
  """A PartitionSpec, the decisions that led to it, and the problems that the policies report.

  Attributes:
    spec: mesh axes per dimension; UNCONSTRAINED: no axes are required, and `fsdp` may shard it.
    decisions: one `Decision` per dimension with a name or a rule.
    problems: every problem, without the array's path.
    owner: id of the rule that owns the whole array (a path rule, a function); None: its names decided.
    skipped: the `fsdp` and `optimizer_over` rules that found no dimension to shard.
    memory: 'pinned_host' if a rule with `host` decided; None: the memory of the device.

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
  memory: str | None = None

  def stored(self) -> Resolution:
    """The resolution of an array in memory: a dimension that is still UNCONSTRAINED is replicated.

    Inside a program, UNCONSTRAINED leaves a dimension to the compiler.
    """
    if UNCONSTRAINED not in tuple(self.spec):
      return self
    spec = PartitionSpec(*(None if axes is UNCONSTRAINED else axes for axes in self.spec))
    decisions = tuple(
      decision._replace(axes=None) if decision.axes is UNCONSTRAINED else decision
      for decision in self.decisions
    )
    return self._replace(spec=spec, decisions=decisions)

  def within(self, rule: int, where: str) -> Resolution:
    """The same resolution with the rule ids of the outer table, in which this table is rule `rule`."""
    return Resolution(
      self.spec,
      tuple(
        decision._replace(
          rule=_within(rule, decision.rule),
          skipped=_all_within(rule, decision.skipped),
          further=_within(rule, decision.further),
        )
        for decision in self.decisions
      ),
      tuple(problem.at(f'in the table of {where}', separator=': ') for problem in self.problems),
      rule if self.owner is None else _within(rule, self.owner),
      _all_within(rule, self.skipped),
      self.memory,
    )


def _within(rule: int, inner: RuleId | None) -> RuleId | None:
  if inner is None:
    return None
  return (rule, *(inner if isinstance(inner, tuple) else (inner,)))


def _all_within(rule: int, skipped: tuple[Skipped, ...]) -> tuple[Skipped, ...]:
  return tuple(skip._replace(rule=_within(rule, skip.rule)) for skip in skipped)


@public('flax_spmd')
@dataclasses.dataclass(frozen=True)
class Policies:
  """The behaviour of a rule table in cases in which Flax is silent.

  Attributes:
    unmatched: for a name without a rule: 'replicate' its dimension, or 'error'. In a table with path
      rules or functions, also for an array that no rule applies to.
    conflict: for a dimension whose rules all lost their axes to other dimensions: 'skip' (replicate it),
      or 'error'.
    indivisible: for a size that the mesh axes do not divide: 'error', try the 'next' rule for that name,
      or 'replicate' the dimension.
    missing_axis: for a mesh axis that the mesh lacks: 'error', or 'drop' it from the rule, so that one
      table serves several meshes. A rule without any axis left is skipped. The axis is also dropped from
      sharding constraints in the model, those of JAX and Flax included.
    short_names: for an array with fewer names than dimensions: 'pad' them with None at the end, as Flax and JAX
      do, or 'error'.

  Raises:
    RulesError: a value is not one of these.

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
  short_names: Literal['pad', 'error'] = 'pad'

  def __post_init__(self):
    problems = [
      Problem(
        f'{name}={value_text(getattr(self, name))} is not a policy value.',
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
  'short_names': ('pad', 'error'),
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
    return (plain_strings(axes),)
  if axes is None or axes is UNCONSTRAINED:
    return ()
  return tuple(plain_strings(leaf) for leaf in tree_util.tree_leaves(axes) if isinstance(leaf, str))


def padded(names: Names, rank: int) -> tuple[Any, ...]:
  """Names with None for the last dimensions that have none, so that there is one per dimension.

  Example:
    >>> padded(('embed', 'mlp'), 3)
    ('embed', 'mlp', None)
  """
  return (*names, *(None,) * (rank - len(names)))


def aligned(spec: PartitionSpec, rank: int) -> PartitionSpec:
  """A spec with its entries from the first dimension on.

  One that begins with an Ellipsis has the entries of the last dimensions, so it fits arrays of several ranks.

  Example:
    >>> aligned(PartitionSpec(..., None, 'model'), 3), aligned(PartitionSpec('data'), 3)
    (P(None, None, 'model'), P('data',))
  """
  if tuple(spec)[:1] != (...,):
    return spec
  return PartitionSpec(*(None,) * (rank - len(spec) + 1), *spec[1:])


def rule_text(rule: RuleId) -> str:
  """The text of a rule's id: `2`, or `2.0` for the first rule of the table that is rule 2."""
  return '.'.join(map(str, rule)) if isinstance(rule, tuple) else str(rule)
