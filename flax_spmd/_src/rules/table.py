"""Rules: the ordered table of rules that determines the mesh axes of every dimension of every array.

    rules = Rules(('batch', 'data'), ('hidden', 'model'), ('vocab', ('data', 'model')), ('embed', None))
    rules = Rules(('attn/.*kernel$', PartitionSpec(None, 'model')), fsdp('data'))

A table is a value: immutable, hashable, equal by content. Tables add with `+`, and trying another layout
means swapping the table. The kinds of rules are in `rules/clauses`, name resolution in `logical_axes`.

An array is decided in two steps. First, one rule *owns* it: the first in order that applies, whether a path
rule whose expression matches its path, a function that returns a spec, or a name rule for one of its names
(then all its names are resolved together). Then each `fsdp` shards one dimension that is still open, and each
`optimizer_over` adds axes to a dimension of optimizer state. So a rule for one part of the tree stands before the rules for names that occur in that part.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import MethodType
from typing import Any
from weakref import WeakMethod, ref

from jax.sharding import PartitionSpec

from flax_spmd._src.mesh import MeshLike, describe
from flax_spmd._src.notebook_html import bullets, plain_table, safe
from flax_spmd._src.public import public
from flax_spmd._src.rules.clauses import (
  AnnotationRule,
  Clause,
  Fsdp,
  FunctionRule,
  Host,
  NameRule,
  OptimizerOver,
  PathRule,
  RuleTable,
  host_problems,
  without_host,
)
from flax_spmd._src.rules.decisions import Axes, Names, Policies, Resolution, RuleId, rule_text
from flax_spmd._src.rules.logical_axes import Resolver
from flax_spmd._src.rules.toml_values import quoted
from flax_spmd._src.text import plain_strings, shown, value_text, without_addresses
from flax_spmd.errors import (
  LayoutError,
  MeshAxisError,
  Problem,
  RulesError,
  did_you_mean,
  problems_text,
  raise_problems,
)

KINDS: tuple[type[Clause], ...] = (
  NameRule,
  PathRule,
  AnnotationRule,
  Fsdp,
  OptimizerOver,
  FunctionRule,
)
"""The kinds of rules, in the order in which they are tried on a clause that a user wrote."""


@public('flax_spmd')
class Rules(RuleTable):
  """An ordered, immutable, hashable table of clauses.

  Args:
    *clauses: `(logical name, mesh axes)`, `(path regex, PartitionSpec)`, `(path regex, Rules)`,
      `fsdp(...)`, `optimizer_over(...)`, `('@annotation', PartitionSpec | Rules | fsdp(...) | function)`, or a
      function `(leaf) -> PartitionSpec | None`. Whole tables (tuples, lists, `Rules`) are inserted clause by clause.
      A PartitionSpec that begins with an Ellipsis, `PartitionSpec(..., None, 'model')`, has the entries of an
      array's last dimensions.
    **policies: `unmatched`, `conflict`, `indivisible`, `missing_axis`, `short_names`; see `Policies`.
      Policies of inserted tables, and of tables added on the right, are dropped.

  Without changed policies, a table equals the tuple of its clauses, Flax's form.

  Raises:
    RulesError: a clause or a policy is invalid, or a path is not a regular expression.

  Example:
    >>> rules = Rules(('batch', 'data'), ('hidden', 'model'))
    >>> rules == (('batch', 'data'), ('hidden', 'model'))
    True
    >>> rules.spec(('batch', 'embed'))
    P('data', None)
    >>> rules + Rules(('embed', 'data'))
    Rules(('batch', 'data'), ('hidden', 'model'), ('embed', 'data'))
  """

  def __init__(self, /, *clauses: Any, **policies: Any):
    described = _parsed(clauses)
    self._parsed = tuple(clause for clause, _ in described)
    self._hosted = frozenset(index for index, (_, hosted) in enumerate(described) if hosted)
    self._clauses = tuple(
      Host(clause.written) if hosted else clause.written for clause, hosted in described
    )
    self._policies = _read_policies(policies)
    # equal to its clauses as a tuple, if the policies are the defaults
    self._hash = hash((self._clauses, self._policies) if self._policies.changed() else self._clauses)

  @classmethod
  def of(cls, rules: Any, **policies: Any) -> Rules:
    """A table from a `Rules` (with these policies changed), a tuple or list of clauses, or a single
    `fsdp(...)` or function.

    Raises:
      RulesError: `rules` is none of these, or a clause in it is invalid.
    """
    if isinstance(rules, Rules):
      return rules.replace(**policies) if policies else rules
    if is_whole_table(rules):
      return cls(rules, **policies)
    if not isinstance(rules, (tuple, list)):
      raise RulesError(
        f'A rule table is a tuple or a list of rules, got {value_text(rules)}.\n'
        "Fix: write it as (('batch', 'data'), ('hidden', 'model'))."
      )
    if _parse(rules)[0] is not None:
      raise RulesError(
        f'{value_text(rules)} is one rule, where a table of rules is expected.\n'
        f'Fix: write a table of one rule with a comma, ({value_text(rules)},).'
      )
    return cls(*rules, **policies)

  @property
  def clauses(self) -> tuple[Any, ...]:
    """The clauses as users write them, in order."""
    return self._clauses

  @property
  def parsed(self) -> tuple[Clause, ...]:
    """The clauses as objects, in order; without `host`."""
    return self._parsed

  @property
  def hosted(self) -> frozenset[int]:
    """The indices of the clauses with `host`."""
    return self._hosted

  def host_rules(self) -> list[RuleId]:
    """The ids of all clauses with `host`, in tables within the table too."""
    inner = [
      (index, *_as_tuple(rule))
      for index, clause in enumerate(self._parsed)
      if isinstance(clause.table, Rules)
      for rule in clause.table.host_rules()
    ]
    return [*sorted(self._hosted), *inner]

  @cached_property
  def uses_host(self) -> bool:
    """Whether any clause has `host`, in tables within the table too."""
    return bool(self.host_rules())

  @cached_property
  def pairs(self) -> tuple[tuple[str, Axes], ...]:
    """The name rules as plain pairs, the form that Flax takes."""
    return tuple(clause.written for clause in self._parsed if isinstance(clause, NameRule))

  @property
  def content(self) -> Any:
    """The table as a key for caches that outlive it: equal for equal tables, with functions held weakly."""
    return self if self._weakly is None else self._weakly

  @cached_property
  def _weakly(self) -> tuple[Any, ...] | None:
    """The clauses with weak references to their functions, and the policies; None without functions."""
    clauses = tuple(map(_without_functions, self._clauses))
    return None if clauses == self._clauses else (clauses, self._policies)

  @property
  def policies(self) -> Policies:
    """The policies for cases in which Flax is silent."""
    return self._policies

  def replace(self, **policies: Any) -> Rules:
    """The same clauses under other policies."""
    return Rules(*self._clauses, **{**dataclasses.asdict(self._policies), **policies})

  def __add__(self, other: Any) -> Rules:
    return Rules(*self._clauses, *Rules.of(other), **dataclasses.asdict(self._policies))

  def __radd__(self, other: Any) -> Rules:
    return Rules(*Rules.of(other), *self._clauses, **dataclasses.asdict(self._policies))

  def __iter__(self) -> Iterator[Any]:
    return iter(self._clauses)

  def __len__(self) -> int:
    return len(self._clauses)

  def __eq__(self, other: object) -> bool:
    if self is other:
      return True
    if isinstance(other, tuple):  # Flax's tables
      return not self._policies.changed() and self._clauses == other
    if not isinstance(other, Rules):
      return NotImplemented
    return self._clauses == other._clauses and self._policies == other._policies

  def __hash__(self) -> int:
    return self._hash

  def __copy__(self) -> Rules:
    return self

  def __deepcopy__(self, memo: dict[int, Any]) -> Rules:
    return self

  def __reduce__(self):
    # the hash is this process's own: strings hash differently in the next one
    return _unpickled, (self._clauses, dataclasses.asdict(self._policies))

  def __reduce_ex__(self, protocol: Any) -> Any:
    if protocol < 2:  # a PartitionSpec needs 2
      return pickle.loads, (pickle.dumps(self, 2),)
    return super().__reduce_ex__(protocol)

  def __repr__(self) -> str:
    policies = [f'{name}={value!r}' for name, value in self._policies.changed().items()]
    return f'Rules({", ".join([*map(repr, self._clauses), *policies])})'

  def _repr_html_(self) -> str:
    rows = [
      (str(index), f'<code>{safe(repr(clause))}</code>') for index, clause in enumerate(self._clauses)
    ]
    policies = (f'{name}={value!r}' for name, value in self._policies.changed().items())
    return plain_table(('', 'rule'), rows) + bullets(policies)

  def at(self, rule: RuleId) -> Any:
    """The clause that a decision's `rule` identifies, as users write it; in a table within the table,
    the inner one.
    """
    first, *rest = rule if isinstance(rule, tuple) else (rule,)
    inner = self._parsed[first].table if rest else None
    return inner.at(tuple(rest)) if isinstance(inner, Rules) else self._clauses[first]

  def parsed_at(self, rule: RuleId) -> Clause:
    """The clause that a decision's `rule` identifies, as an object."""
    first, *rest = rule if isinstance(rule, tuple) else (rule,)
    clause = self._parsed[first]
    inner = clause.table if rest else None
    return inner.parsed_at(tuple(rest)) if isinstance(inner, Rules) else clause

  def all_rules(self, *, annotations: bool = False) -> list[tuple[RuleId, Clause]]:
    """Every rule with its id; a table within the table contributes its own rules instead of itself.

    Args:
      annotations: whether to include rules for annotations, which decide nothing about a tree.
    """
    result: list[tuple[RuleId, Clause]] = []
    for index, clause in enumerate(self._parsed):
      if isinstance(clause, AnnotationRule) and not annotations:
        continue
      if isinstance(clause.table, Rules):
        inner = clause.table.all_rules(annotations=annotations)
        result += [((index, *_as_tuple(rule)), nested) for rule, nested in inner]
      else:
        result.append((index, clause))
    return result

  @cached_property
  def by_name(self) -> Mapping[str, tuple[int, ...]]:
    """Indices of the rules for each name, so that a long table costs nothing per array."""
    indices: dict[str, list[int]] = {}
    for index, clause in enumerate(self._parsed):
      if isinstance(clause, NameRule):
        indices.setdefault(clause.name, []).append(index)
    return {name: tuple(each) for name, each in indices.items()}

  @cached_property
  def annotations(self) -> Mapping[str, int]:
    """Index of the first rule for each annotation, by name without its `@`."""
    indices: dict[str, int] = {}
    for index, clause in enumerate(self._parsed):
      if isinstance(clause, AnnotationRule):
        indices.setdefault(clause.name[1:], index)
    return indices

  def resolve(
    self,
    names: Names,
    shape: Sequence[int] | None = None,
    sizes: Mapping[str, int] | None = None,
  ) -> Resolution:
    """Decides every dimension of an array, and records the reasons.

    Args:
      names: per dimension a logical name; or None, UNCONSTRAINED, or a tuple of mesh axes, which is
        used unchanged and, with `sizes`, checked.
      shape: shape of the array, to check divisibility (with `sizes`).
      sizes: size per mesh axis, if the mesh is known.

    Returns:
      The spec, one decision per dimension, and the problems that the policies report. Nothing is raised.

    Example:
      >>> rules = Rules(('heads', 'model'), ('mlp', 'model'), ('mlp', 'data'))
      >>> rules.resolve(('mlp', 'heads')).decisions[0]
      Decision(dim=0, name='mlp', axes='data', rule=2, skipped=(Skipped(rule=1, reason='taken', axes=('model',)),), further=None)
    """
    written = tuple(clause.written for clause in self._parsed)
    return Resolver(written, self.by_name, self._policies, sizes).resolve(names, shape)

  def spec(self, names: Names | None) -> PartitionSpec | None:
    """The PartitionSpec of an array with these logical names; None for None.

    Raises:
      LayoutError: a name occurs twice, or the names are a bare string or another value that is no sequence.
      UnmatchedNameError, ConflictError: a policy is `error`.
    """
    if names is None:
      return None
    if isinstance(names, (str, bytes)) or not isinstance(names, (Sequence, PartitionSpec)):
      raise LayoutError(
        f'The names of an array are {shown(value_text(names))}.\n'
        "Fix: write a tuple with a name or None for each dimension, such as ('batch', None)."
      )
    resolution = self.resolve(names)
    raise_problems(resolution.problems)
    return resolution.spec

  def check_axes(self, sizes: Mapping[str, int]) -> None:
    """Raises if a rule uses an axis that is not in `sizes` (unless `missing_axis='drop'`).

    Raises:
      MeshAxisError: names every such rule and axis, and the axis that was probably meant.
    """
    raise_problems(self._axis_problems(sizes, ()))

  def toml(self, indent: str) -> str:
    """The table as a TOML inline table, `{clauses = [...]}`, one clause a line.

    Raises:
      RulesError: a clause has no text form.
    """
    policies = ''.join(f', {line}' for line in self.toml_policies())
    return '\n'.join(['{clauses = [', *self.toml_clauses(indent + '  '), f'{indent}]{policies}}}'])

  def toml_clauses(self, indent: str) -> list[str]:
    """The clauses as elements of a TOML list, each with a comma."""
    return [f'{indent}{self._entry(index, indent)},' for index in range(len(self))]

  def _entry(self, index: int, indent: str) -> str:
    clause = self._parsed[index]
    try:
      entry = clause.toml_entry(indent)
      return f'{{host = {entry}}}' if index in self._hosted else entry
    except RulesError:
      raise
    except ValueError as error:
      raise RulesError(
        f'Rule {index} {value_text(clause)} has no text form: {error}.\n'
        'Fix: write path rules and fsdp(...) instead, in tables that are saved.'
      ) from None

  def toml_policies(self) -> list[str]:
    """The policies that differ from the defaults, as TOML assignments."""
    return [f'{name} = {quoted(value)}' for name, value in self._policies.changed().items()]

  def _axis_problems(self, sizes: Mapping[str, int], within: tuple[int, ...]) -> list[Problem]:
    """The axes that the mesh lacks; a table within the table applies its own policy."""
    problems: list[Problem] = []
    for index, clause in enumerate(self._parsed):
      missing = [] if self._policies.missing_axis == 'drop' else clause.mesh_axes
      problems += [
        Problem(
          f'Rule {rule_text((*within, index))} {value_text(clause)} uses mesh axis {value_text(axis)}, but the mesh has axes '
          f'{tuple(sizes)!r}.' + did_you_mean(axis, sizes),
          "correct the axis name, add the axis to the mesh, or give the table missing_axis='drop'.",
          MeshAxisError,
        )
        for axis in missing
        if axis not in sizes
      ]
      if isinstance(clause.table, Rules):
        problems += clause.table._axis_problems(sizes, (*within, index))
    return problems


def is_whole_table(x: Any) -> bool:
  """Whether this is a rule table, or a clause that shards arrays on its own: `fsdp(...)`, a function."""
  return isinstance(x, (Rules, Clause)) or FunctionRule.parse(x) is not None


def _without_functions(written: Any) -> Any:
  """A clause, or a part of one, with weak references to its functions, which are equal for equal functions."""
  if isinstance(written, Rules):
    return written.content
  if isinstance(written, Host):
    return Host, _without_functions(written.inner)
  if isinstance(written, tuple) and not isinstance(written, PartitionSpec):
    return tuple(map(_without_functions, written))
  if FunctionRule.parse(written) is None:
    return written
  try:
    return WeakMethod(written) if isinstance(written, MethodType) else ref(written)
  except TypeError:  # an object of a class with slots
    return written


def _unpickled(clauses: tuple[Any, ...], policies: dict[str, Any]) -> Rules:
  return Rules(*clauses, **policies)


def _parsed(clauses: Sequence[Any]) -> tuple[tuple[Clause, bool], ...]:
  """Clauses as objects, each with whether it has `host`; inserted tables flattened.

  Raises:
    RulesError: lists every invalid clause.
  """
  flat: list[Any] = []
  for clause in clauses:
    inner = clause.inner if isinstance(clause, Host) else clause
    is_table = isinstance(inner, Rules) or _is_table(inner)
    flat.extend(
      [*map(Host, inner)] if is_table and inner is not clause else inner if is_table else [clause]
    )
  parsed = [(clause, *_parse(clause)) for clause in flat]
  problems = [
    problem
    for index, (written, clause, hosted) in enumerate(parsed)
    for problem in (
      *(host_problems(index, written, clause) if hosted else ()),
      *(
        []
        if clause is None and hosted
        else [_invalid(index, written)]
        if clause is None
        else clause.problems(index)
      ),
    )
  ]
  if problems:
    raise RulesError(problems_text(problems))
  return tuple((clause, hosted) for _, clause, hosted in parsed if clause is not None)


def _parse(written: Any) -> tuple[Clause | None, bool]:
  """The clause without `host`, or None if it is no clause; and whether it has `host`."""
  written, hosted = without_host(written, lambda clause: Rules.of((clause,)))
  if isinstance(written, Clause):
    return written, hosted
  written = plain_strings(written)
  parsed = (clause for kind in KINDS if (clause := kind.parse(written)) is not None)
  return next(parsed, None), hosted


def _invalid(index: int, clause: Any) -> Problem:
  forms = [kind.form for kind in (*KINDS[:-1], Host, KINDS[-1])]
  return Problem(
    f'Rule {index} is {value_text(clause)}, which is not a rule.',
    f'write every rule as {", ".join(forms[:-1])} or {forms[-1]}.',
  )


def _read_policies(policies: Mapping[str, Any]) -> Policies:
  known = [field.name for field in dataclasses.fields(Policies)]
  problems = [
    Problem(
      f'{value_text(name)} is not a policy of a rule table.' + did_you_mean(name, known),
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


def _as_tuple(rule: RuleId) -> tuple[int, ...]:
  return rule if isinstance(rule, tuple) else (rule,)


def layout_lines(mesh: MeshLike, rules: Rules) -> list[str]:
  """A mesh and a table as lines of text: equal for equal layouts, in every process."""
  return [
    f'mesh {describe(mesh)}',
    *(
      f'rule {rule_text(rule)} {without_addresses(repr(clause))}'
      for rule, clause in rules.all_rules(annotations=True)
    ),
    repr(rules.policies),
    *(f'host rule {rule_text(rule)}' for rule in rules.host_rules()),
  ]
