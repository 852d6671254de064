"""Array resolution: which rule of a table owns an array, and which dimensions are left to fill.

    resolver = resolver_of(rules)
    resolver.resolve(Leaf('params/wi', (8, 16), jnp.float32, ('embed', 'mlp')), sizes).spec

The first rule that applies owns the array: a path rule whose expression matches its path, a function that
returns a spec, or a name rule for one of its names (then all its names are resolved). Then every `fsdp`
shards one open dimension, and every `optimizer_over` adds axes to a dimension of optimizer state. A table within the table decides alone about the arrays that it owns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jax import dtypes
from jax.sharding import PartitionSpec

from flax_spmd._src.rules.clauses import (
  HOST_MEMORY,
  FillingClause,
  Leaf,
  OwningClause,
  PathRule,
  WideningClause,
)
from flax_spmd._src.rules.decisions import Resolution, RuleId, aligned, padded
from flax_spmd._src.rules.mesh_axes import RuleSource, resolve_axes
from flax_spmd._src.rules.path_patterns import PathMatcher
from flax_spmd._src.rules.table import Rules
from flax_spmd._src.shared import shared
from flax_spmd._src.text import plain_strings, plural, rank_text, value_text
from flax_spmd.errors import Problem, RulesError, UnmatchedNameError


class _Owner(NamedTuple):
  """The rule that owns an array: its index in the table, and the PartitionSpec or table that it gives."""

  rule: int
  target: Any


class ArrayResolver:
  """Resolves whole arrays by all rules of a table.

  Attributes:
    has_owners: whether some rule decides arrays as a whole: a rule for paths, or a function.
    has_path_rules: whether some rule is for paths.
    looks_at_paths: whether any rule reads an array's path.
    looks_at_dtypes: whether any rule reads its dtype; if not, names and shape determine the resolution.
    looks_at_optimizer: whether any rule reads whether it is optimizer state.
    asks_functions: whether some rule is a function, which may read anything.
  """

  def __init__(self, rules: Rules):
    self._rules = rules
    self._end = len(rules)
    clauses = list(enumerate(rules.parsed))
    self._paths = [(index, clause) for index, clause in clauses if isinstance(clause, PathRule)]
    self._matcher = PathMatcher([clause.pattern for _, clause in self._paths])
    self._tables: dict[int | None, tuple[int | None, ArrayResolver | None]] = {None: (None, None)}
    for position, (rule, clause) in enumerate(self._paths):
      self._tables[position] = (
        rule,
        resolver_of(clause.table) if isinstance(clause.table, Rules) else None,
      )
    self._owners = [
      (index, clause)
      for index, clause in clauses
      if isinstance(clause, OwningClause) and not isinstance(clause, PathRule)
    ]
    self._fills = [(index, clause) for index, clause in clauses if isinstance(clause, FillingClause)]
    self._widenings = [
      (index, clause) for index, clause in clauses if isinstance(clause, WideningClause)
    ]
    self._specs: dict[Any, Resolution] = {}
    self._annotated: dict[str, ArrayResolver] = {}
    reads = frozenset().union(*(clause.reads for clause in rules.parsed))
    self.asks_functions = any('path' in clause.reads for _, clause in self._owners)
    self.has_owners = bool(self._paths or self._owners)
    self.has_path_rules = bool(self._paths)
    self.looks_at_paths = 'path' in reads
    self.looks_at_dtypes = 'dtype' in reads
    inner = [resolver for _, resolver in self._tables.values() if resolver is not None]
    self.looks_at_optimizer = 'optimizer' in reads or any(one.looks_at_optimizer for one in inner)

  def route(self, path: str) -> Any:
    """The part of a path that matters: arrays with equal routes, names, shapes and dtypes agree."""
    if self.asks_functions:
      return path
    rule, inner = self._tables[self._matcher.first(path)]
    if inner is None:
      return rule
    end = inner.route(path)
    return (rule, *end) if isinstance(end, tuple) else (rule, end)

  def asked_route(
    self, leaf: Leaf, sizes: Mapping[str, int] | None = None, *, axes: bool = False
  ) -> Any:
    """The same for a table with functions: the result of these for the array, or its path."""
    logical = self._logical(leaf.names, sizes) if axes else leaf.names
    owner = self._owner(_with_padded_names(leaf), logical)
    is_table = isinstance(owner, _Owner) and isinstance(owner.target, Rules)
    return leaf.path if is_table else owner

  def path_rule(self, path: str) -> RuleId | None:
    """The path rule with a PartitionSpec that a path leads to, through tables within the table."""
    rule, inner = self._tables[self._matcher.first(path)]
    if inner is None or rule is None:
      return rule
    end = inner.path_rule(path)
    return None if end is None else (rule, *(end if isinstance(end, tuple) else (end,)))

  def resolve(
    self,
    leaf: Leaf,
    sizes: Mapping[str, int] | None = None,
    *,
    axes: bool = False,
    fill: bool = True,
    owned: bool = True,
  ) -> Resolution:
    """Decides every dimension of an array, and records the reasons. Nothing is raised.

    Args:
      leaf: path, shape, dtype and names of the array.
      sizes: size per mesh axis, if the mesh is known; without it, `fsdp` fills nothing.
      axes: whether the leaf's names are mesh axes, rather than logical names.
      fill: whether `fsdp` shards a dimension that is still open.
      owned: whether a rule may own the array as a whole; if not, its names decide, or it is replicated.

    Example:
      >>> table = Rules(('bias$', PartitionSpec()), fsdp('data', min_size=1))
      >>> resolver_of(table).resolve(Leaf('dense/kernel', (8, 16)), {'data': 4}).spec
      P(None, 'data')
    """
    resolution = self._resolved(leaf, sizes, axes=axes, fill=fill, owned=owned)
    return self.in_memory(resolution, leaf)

  def in_memory(self, resolution: Resolution, leaf: Leaf) -> Resolution:
    """The resolution with the host's memory, if a rule with `host` owns the array or shards a dimension of it."""
    hosted = self._rules.hosted
    if not hosted or resolution.problems or leaf.size <= 1:
      return resolution
    if leaf.dtype is not None and dtypes.issubdtype(leaf.dtype, dtypes.extended):
      return resolution
    decided = {rule for each in resolution.decisions for rule in (each.rule, each.further)}
    decided.add(resolution.owner)
    first = {rule[0] if isinstance(rule, tuple) else rule for rule in decided}
    return resolution._replace(memory=HOST_MEMORY) if first & hosted else resolution

  def _resolved(
    self, leaf: Leaf, sizes: Mapping[str, int] | None, *, axes: bool, fill: bool, owned: bool
  ) -> Resolution:
    given, leaf = leaf, _with_padded_names(leaf)
    logical = self._logical(given.names, sizes) if axes else given.names
    owner = self._owner(leaf, logical) if owned else None
    if isinstance(owner, Resolution):
      return owner
    if owner is not None and isinstance(owner.target, Rules):
      inner = resolver_of(owner.target).resolve(given, sizes, axes=axes, fill=fill)
      return inner.within(owner.rule, self._text(owner.rule))
    if owner is not None:
      resolution = self._by_spec(owner, leaf, sizes)
    elif given.names is None:
      resolution = Resolution(PartitionSpec(), (), self._unowned(leaf) if owned else ())
    else:
      resolution = self.by_names(given, sizes, axes=axes)
    if resolution.problems or sizes is None or not fill:
      return resolution
    for index, clause in self._fills:
      resolution = clause.fill(index, resolution, leaf, sizes)
    return self.widened(resolution, leaf, sizes)

  def widened(self, resolution: Resolution, leaf: Leaf, sizes: Mapping[str, int] | None) -> Resolution:
    """The resolution with the axes that `optimizer_over` adds, if the array is optimizer state.

    Args:
      resolution: the resolution by the other rules.
      leaf: the array.
      sizes: size per mesh axis, if the mesh is known.
    """
    if leaf.optimizer and sizes is not None and not resolution.problems:
      for rule, clause in self._widenings_for(resolution.owner):
        resolution = clause.widen(rule, resolution, leaf, sizes)
    return self.in_memory(resolution, leaf)

  def _widenings_for(self, owner: RuleId | None) -> list[tuple[RuleId, WideningClause]]:
    """The rules that add axes to an array: those of the table within the table, if one owns it."""
    if owner is None:
      return list(self._widenings)
    first, *rest = owner if isinstance(owner, tuple) else (owner,)
    table = self._rules.parsed[first].table
    if not isinstance(table, Rules):
      return list(self._widenings)
    inner = resolver_of(table)._widenings_for(tuple(rest) or None)
    return [((first, *(rule if isinstance(rule, tuple) else (rule,))), clause) for rule, clause in inner]

  def resolve_annotated(
    self, name: str, leaf: Leaf, sizes: Mapping[str, int] | None = None, *, axes: bool = False
  ) -> Resolution:
    """The resolution of a value in a program by the rule for its annotation.

    Args:
      name: the annotation, without `@`; the table has a rule for it.
      leaf: the value; its path is relative to the annotated tree.
      sizes: size per mesh axis, if the mesh is known.
      axes: whether the leaf's names are mesh axes. Only `optimizer_over` keeps these.
    """
    index = self._rules.annotations[name]
    _, target = self._rules.clauses[index]
    if isinstance(target, PartitionSpec):
      return self._by_spec(_Owner(index, target), leaf, sizes)
    if isinstance(target, WideningClause):
      resolution = self.resolve(leaf, sizes, axes=axes)
      if sizes is None or resolution.problems:
        return resolution
      return target.widen(index, resolution, leaf, sizes)
    if axes:
      leaf = leaf._replace(names=None)
    resolver = self._annotated.get(name)
    if resolver is None:
      table = target if isinstance(target, Rules) else Rules(target, **self._rules.policies.changed())
      resolver = self._annotated[name] = resolver_of(table)
    return resolver.resolve(leaf, sizes).within(index, self._text(index))

  def _owner(self, leaf: Leaf, logical: Any) -> _Owner | Resolution | None:
    """The rule that owns an array; None if its names decide, or no rule applies."""
    by_path = self._by_path(leaf.path) if self._paths else None
    last = self._names_at(logical) if logical else self._end
    if by_path is not None and by_path.rule < last:
      last = by_path.rule
    for index, clause in self._owners:
      target = self._target(index, clause, leaf) if index < last else None
      if target is not None:
        return (
          _Owner(index, target) if isinstance(target, PartitionSpec) else self._no_spec(index, target)
        )
    return by_path if by_path is not None and by_path.rule == last else None

  def _target(self, index: int, clause: OwningClause, leaf: Leaf) -> Any:
    try:
      return clause.target(leaf)
    except Exception as error:
      error.add_note(f'in rule {index} {clause!r}, called with {leaf}')
      raise

  def _names_at(self, names: Any) -> int:
    """The position of an array's names among the rules: that of the first rule for any of them."""
    known = (self._rules.by_name.get(name) for name in names if isinstance(name, str))
    return min((indices[0] for indices in known if indices), default=self._end)

  def _by_path(self, path: str) -> _Owner | None:
    match = self._matcher.first(path)
    if match is None:
      return None
    index, clause = self._paths[match]
    return _Owner(index, clause.owned)

  def by_names(self, leaf: Leaf, sizes: Mapping[str, int] | None, *, axes: bool) -> Resolution:
    """Decides every dimension of an array by its names alone; the dimensions after the last name have none.

    A wrong number of names is a problem only if the table uses one of them. Boxes of mesh axes may have logical names, too, as
    in Flax, where `logical_to_mesh_sharding` takes the specs of any boxes.
    """
    policies, rank = self._rules.policies, len(leaf.shape)
    too_many = len(leaf.names) > rank
    if too_many or (len(leaf.names) < rank and policies.short_names == 'error'):
      problems = (wrong_number_of_names(leaf),) if axes or self._uses(leaf.names) else ()
      if problems or too_many:
        return Resolution(PartitionSpec(), (), problems)
    names = padded(leaf.names, rank)
    if not axes:
      return self._rules.resolve(names, leaf.shape, sizes)
    if sizes is None or not self._logical(names, sizes):
      return resolve_axes(names, leaf.shape, sizes, policies, names=self._rules.by_name)
    among_names = ((name,) if isinstance(name, str) and name in sizes else name for name in names)
    resolution = self._rules.resolve(tuple(among_names), leaf.shape, sizes)
    decisions = tuple(each._replace(name=names[each.dim]) for each in resolution.decisions)
    return resolution._replace(decisions=decisions)

  def _logical(self, names: Any, sizes: Mapping[str, int] | None) -> Any:
    """The entries of a box of mesh axes if one is a logical name, no axis of the mesh and one with a rule; None otherwise."""
    known, by_name = sizes or {}, self._rules.by_name
    is_any = any(isinstance(name, str) and name not in known and name in by_name for name in names or ())
    return names if is_any else None

  def _uses(self, names: Any) -> bool:
    """Whether some of these names decide anything: by a rule, as mesh axes, or because all need a rule."""
    if self._rules.policies.unmatched == 'error':
      return True
    return any(isinstance(name, tuple) or name in self._rules.by_name for name in names)

  def _by_spec(self, owner: _Owner, leaf: Leaf, sizes) -> Resolution:
    key = (owner, leaf.shape, leaf.names, None if sizes is None else tuple(sizes.items()))
    resolution = self._specs.get(key)
    if resolution is None:
      source = RuleSource(owner.rule, repr(self._rules.parsed[owner.rule]))
      resolution = self._specs[key] = self._from_spec(owner.target, leaf, sizes, source)
    return resolution

  def _from_spec(self, spec: PartitionSpec, leaf: Leaf, sizes, source: RuleSource) -> Resolution:
    """The resolution by a rule's PartitionSpec; an array of one element is always replicated.

    Missing entries at the end are None, as everywhere in JAX; after an Ellipsis, those at the start.
    """
    rank = len(leaf.shape)
    spec = plain_strings(tuple(aligned(spec, rank)))
    if len(spec) > rank and leaf.size != 1:
      wrong = Problem(
        f'rule {source.rule} {source.text} has {_entries(len(spec))} for an array of {rank_text(leaf.shape)}.',
        f'give at most one entry per dimension, or add a rule for this path before rule {source.rule}.',
      )
      return Resolution(PartitionSpec(), (), (wrong,), source.rule)
    entries = (None,) * rank if leaf.size == 1 else (*spec, *(None,) * (rank - len(spec)))
    resolution = resolve_axes(entries, leaf.shape, sizes, self._rules.policies, source)
    if leaf.names is None:
      return resolution
    decisions = tuple(d._replace(name=leaf.names[d.dim]) for d in resolution.decisions)
    return resolution._replace(decisions=decisions)

  def _text(self, index: int) -> str:
    clause = self._rules.parsed[index].written
    shown = clause[0] if isinstance(clause, tuple) else clause
    return f'rule {index} {shown!r}'

  def _unowned(self, leaf: Leaf) -> tuple[Problem, ...]:
    """The problem that a strict table reports for an array that no rule applies to."""
    strict = self._rules.policies.unmatched == 'error'
    if not strict or self._fills or not (self._paths or self._owners) or leaf.size <= 1:
      return ()
    text = f'no rule applies to this array of shape {leaf.shape}, which has no names.'
    fix = "add a rule for this path; ('.*', PartitionSpec()) at the end replicates the rest."
    return (Problem(text, fix, UnmatchedNameError),)

  def _no_spec(self, index: int, result: Any) -> Resolution:
    wrong = Problem(
      f'rule {index} {value_text(self._rules.parsed[index])} returned {value_text(result)}.',
      'return a PartitionSpec, or None where the rule does not apply.',
      RulesError,
    )
    return Resolution(PartitionSpec(), (), (wrong,), index)


@shared
def resolver_of(rules: Rules) -> ArrayResolver:
  """The resolver of a table; equal tables share one while it is used."""
  return ArrayResolver(rules)


def _with_padded_names(leaf: Leaf) -> Leaf:
  """The array with one name per dimension, as rules receive it; without names if it has too many."""
  if leaf.names is None or len(leaf.names) == len(leaf.shape):
    return leaf
  too_many = len(leaf.names) > len(leaf.shape)
  return leaf._replace(names=None if too_many else padded(leaf.names, len(leaf.shape)))


def wrong_number_of_names(leaf: Leaf) -> Problem:
  """The problem with the number of an array's names."""
  text = (
    f'{plural(len(leaf.names), "name")} {tuple(leaf.names)!r} for an array of {rank_text(leaf.shape)}.'
  )
  if len(leaf.names) > len(leaf.shape):
    return Problem(text, 'give at most one name per dimension.')
  fix = "give one name per dimension, None for a dimension without a name, or give the table short_names='pad'."
  return Problem(text, fix)


def _entries(count: int) -> str:
  return f'{count} entr{"y" if count == 1 else "ies"}'
