"""Clauses: the interface of every kind of rule.

A kind of rule is one class in one file of this folder. It derives from

* `OwningClause`, if it decides every dimension of the arrays that it applies to (a path rule),
* `FillingClause`, if it shards one dimension that is still open (`fsdp`), or
* `WideningClause`, if it adds mesh axes to a dimension of optimizer state (`optimizer_over`),

and has everything about the kind: how users write it, the mesh axes that it names, its TOML form, its
checks of bad input, and the reason that `Layout.check` reports when it decided nothing. The table, the
resolver, the planner and the text form ask the class. They treat two kinds specially: name rules, which are
resolved together, and path rules, which are matched together.
"""

from __future__ import annotations

import abc
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

from jax.sharding import PartitionSpec

from flax_spmd._src.public import public
from flax_spmd._src.rules.decisions import (
  UNCONSTRAINED,
  Axes,
  Decision,
  Reason,
  Resolution,
  RuleId,
  Skipped,
  axis_names,
)
from flax_spmd._src.text import value_text
from flax_spmd.errors import Problem


@public('flax_spmd')
class Leaf(NamedTuple):
  """One array of a tree, as a function in a rule table receives it.

  Attributes:
    path: tree path, `params/layers/wi`.
    shape: global shape.
    dtype: dtype, or None where it is unknown.
    names: one logical name (or None) per dimension, or None for an array without names.
    optimizer: whether it is optimizer state: part of an Optax state, or below a key `opt_state` or `param_states`.

  Example:
    >>> by_size = lambda leaf: PartitionSpec('data') if leaf.size >= 64 else None
    >>> layout = Layout({'data': 8}, (by_size,))
    >>> layout.spec({'w': jnp.ones((16, 8)), 'b': jnp.ones(8)})
    {'b': P(), 'w': P('data', None)}
  """

  path: str
  shape: tuple[int, ...]
  dtype: Any = None
  names: Any = None
  optimizer: bool = False

  @property
  def size(self) -> int:
    """The number of elements."""
    return math.prod(self.shape)


class RuleTable(abc.ABC):
  """The base class of `Rules`, for clauses that contain a table."""

  @abc.abstractmethod
  def toml(self, indent: str) -> str:
    """The table as TOML; further lines begin with `indent`."""


Target = PartitionSpec | RuleTable
ReadTable = Callable[[Any], RuleTable]  # a table within a clause, from TOML


class Idle(NamedTuple):
  """The reason for which a clause decided nothing in a tree, and whether it is likely a mistake."""

  text: str
  suspicious: bool = False


class Clause(abc.ABC):
  """One rule of a table.

  Class attributes:
    form: how users write it, for error texts.
    reads: attributes of a `Leaf` that it reads besides names and shape: 'dtype', 'path', 'optimizer'. Arrays that
      agree in these share one resolution.
    toml_head: the key by which its TOML form is recognised; None: it has none of its own.
    toml_keys: all keys of that form.
    toml_form: the form, for error texts.
    toml_wraps: whether the form has the keys of another clause too.
  """

  form: ClassVar[str]
  reads: ClassVar[frozenset[str]] = frozenset()
  toml_head: ClassVar[str | None] = None
  toml_keys: ClassVar[frozenset[str]] = frozenset()
  toml_form: ClassVar[str] = ''
  toml_wraps: ClassVar[bool] = False

  @classmethod
  def parse(cls, written: Any) -> Self | None:
    """The clause that a user wrote, or None if it is of another kind."""
    return written if isinstance(written, cls) else None

  @property
  def written(self) -> Any:
    """The clause as users write it, in one canonical spelling."""
    return self

  @property
  def short(self) -> str:
    """The clause as a finding shows it."""
    return repr(self)

  @property
  def mesh_axes(self) -> tuple[str, ...]:
    """The mesh axes that it names itself; those of a table in it belong to that table."""
    return ()

  @property
  def table(self) -> RuleTable | None:
    """The table in it, if there is one."""
    return None

  def problems(self, index: int) -> Iterator[Problem]:
    """Everything wrong with it as rule `index` of a table."""
    yield from ()

  def idle(self, paths: Sequence[str], reasons: Counter[Reason]) -> Idle | None:
    """Why it decided nothing in a tree with arrays at these paths; None: no finding of its own.

    Args:
      paths: paths of all arrays.
      reasons: why it skipped arrays, if it fills dimensions.
    """
    return Idle('decided nothing.')

  def toml(self, indent: str) -> str:
    """Its fields as TOML, `path = "bias$", spec = []`; further lines begin with `indent`.

    Raises:
      ValueError: it has no text form.
    """
    raise ValueError('it has no text form')

  def toml_entry(self, indent: str) -> str:
    """The clause as an element of a TOML list."""
    return f'{{{self.toml(indent)}}}'

  @classmethod
  def from_toml(cls, entry: Mapping[str, Any], read_table: ReadTable) -> Any:
    """The clause of a TOML form, as users write it.

    Raises:
      ValueError: the entry is not such a clause.
      RulesError: from the function that makes the clause.
    """
    raise ValueError('it has no text form')


class OwningClause(Clause):
  """A rule that decides every dimension of the arrays that it applies to."""

  @abc.abstractmethod
  def target(self, leaf: Leaf) -> Any:
    """The PartitionSpec of an array, or None if the rule does not apply to it."""


class FillingClause(Clause):
  """A rule that shards one dimension that no other rule has decided."""

  reads = frozenset({'dtype'})

  @abc.abstractmethod
  def choose(
    self, leaf: Leaf, is_open: Sequence[bool], taken: set[str], sizes: Mapping[str, int]
  ) -> int | Reason:
    """The dimension to shard, or the reason for which none is.

    Args:
      leaf: the array.
      is_open: per dimension, whether it is undecided.
      taken: mesh axes that other dimensions use.
      sizes: size per mesh axis.
    """

  def fill(self, index: int, resolution: Resolution, leaf: Leaf, sizes: Mapping[str, int]) -> Resolution:
    """The resolution with one more dimension sharded, by this clause as rule `index`."""
    decisions, entries = _by_dimension(resolution, leaf)
    is_open = [
      entry is UNCONSTRAINED or (decision.rule is None and entry is None)
      for decision, entry in zip(decisions, entries, strict=True)
    ]
    choice = self.choose(leaf, is_open, set(axis_names(entries)), sizes)
    axes = tuple(axis for axis in self.mesh_axes if axis in sizes)
    if isinstance(choice, str):
      return resolution._replace(skipped=(*resolution.skipped, Skipped(index, choice, axes)))
    entry = axes[0] if len(axes) == 1 else axes
    return resolution._replace(
      spec=PartitionSpec(*entries[:choice], entry, *entries[choice + 1 :]),
      decisions=tuple(
        decision._replace(axes=entry, rule=index) if decision.dim == choice else decision
        for decision in decisions
      ),
    )


class WideningClause(Clause):
  """A rule that adds mesh axes to one dimension of optimizer state, after all other rules."""

  reads = frozenset({'optimizer'})

  @abc.abstractmethod
  def choose(
    self, leaf: Leaf, entries: Sequence[Axes], sizes: Mapping[str, int]
  ) -> tuple[int, tuple[str, ...]] | Reason:
    """The dimension and the axes that it gets in addition, or the reason for which none does.

    Args:
      leaf: the array.
      entries: mesh axes per dimension, by the other rules.
      sizes: size per mesh axis.
    """

  def widen(
    self, rule: RuleId, resolution: Resolution, leaf: Leaf, sizes: Mapping[str, int]
  ) -> Resolution:
    """The resolution with further axes for one dimension, by this clause with the id `rule`."""
    decisions, entries = _by_dimension(resolution, leaf)
    choice = self.choose(leaf, entries, sizes)
    if isinstance(choice, str):
      axes = tuple(axis for axis in self.mesh_axes if axis in sizes)
      return resolution._replace(skipped=(*resolution.skipped, Skipped(rule, choice, axes)))
    dim, added = choice
    axes = (*added, *axis_names(entries[dim]))
    entry = axes[0] if len(axes) == 1 else axes
    old = decisions[dim]
    new = old._replace(axes=entry, further=rule)
    if old.rule is None and not axis_names(entries[dim]):
      new = old._replace(axes=entry, rule=rule)
    return resolution._replace(
      spec=PartitionSpec(*entries[:dim], entry, *entries[dim + 1 :]),
      decisions=(*decisions[:dim], new, *decisions[dim + 1 :]),
    )


def _by_dimension(resolution: Resolution, leaf: Leaf) -> tuple[tuple[Decision, ...], tuple[Axes, ...]]:
  """A decision and the mesh axes for every dimension of an array."""
  rank = len(leaf.shape)
  decisions = resolution.decisions or tuple(Decision(dim, None, None, None) for dim in range(rank))
  return decisions, (*resolution.spec, *(None,) * (rank - len(resolution.spec)))


def repeated_axes(index: int, clause: Clause) -> Iterator[Problem]:
  """The problem of a rule that would shard one dimension over a mesh axis twice."""
  axes = clause.mesh_axes
  for axis in dict.fromkeys(axis for axis in axes if axes.count(axis) > 1):
    yield Problem(
      f'Rule {index} {value_text(clause)} has mesh axis {value_text(axis)} twice.',
      'give every mesh axis of a rule once.',
    )


def invalid_entries(index: int, clause: Clause, spec: PartitionSpec) -> Iterator[Problem]:
  """The problems of a rule's PartitionSpec that no array could be sharded by."""
  if spec.unreduced or spec.reduced:
    yield Problem(
      f'Rule {index} {value_text(clause)} has axes that are unreduced or reduced, which is a property of a value, and '
      'shards nothing.',
      'give a rule mesh axes per dimension only.',
    )
    return
  for dim, entry in enumerate(spec):
    if entry is ... and dim == 0:
      continue
    if entry is ...:
      yield Problem(
        f'Rule {index} {value_text(clause)} has an Ellipsis for dim {dim}, where the number of dimensions before it is known.',
        "write it first, P(..., 'model'), for the last dimensions of an array; None replicates one dimension.",
      )
      continue
    names = entry if isinstance(entry, tuple) else (entry,)
    if entry is not None and entry is not UNCONSTRAINED and not all(isinstance(n, str) for n in names):
      yield Problem(
        f'Rule {index} {value_text(clause)} has {value_text(entry)} for dim {dim}, which is not a mesh axis.',
        'write a mesh axis, a tuple of mesh axes, None or UNCONSTRAINED for every dimension.',
      )


def toml_kinds() -> dict[str, type[Clause]]:
  """Every kind of clause with a TOML form, by the key that the form is recognised by."""
  pending, kinds = [Clause], {}
  while pending:
    kind = pending.pop(0)
    pending += kind.__subclasses__()
    if kind.toml_head is not None:
      kinds[kind.toml_head] = kind
  return kinds


def toml_forms() -> list[str]:
  """The TOML forms of all kinds, for error texts; those that wrap another clause last."""
  kinds = sorted(toml_kinds().values(), key=lambda kind: kind.toml_wraps)
  return [kind.toml_form for kind in kinds if kind.toml_form]


def kind_of_toml(entry: Mapping[str, Any]) -> type[Clause]:
  """The kind of clause that a TOML entry is.

  Raises:
    ValueError: it is of no kind, of several, or has keys that its kind lacks.
  """
  kinds = [kind for head, kind in toml_kinds().items() if head in entry]
  wrapping = [kind for kind in kinds if kind.toml_wraps]
  if len(wrapping) == 1:
    return wrapping[0]
  if len(kinds) != 1 or not entry.keys() <= kinds[0].toml_keys:
    raise ValueError('the entry is of no kind, or of several')
  return kinds[0]
