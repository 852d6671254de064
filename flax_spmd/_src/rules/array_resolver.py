"""Arrays against a whole table: who owns an array, and what is left of it to fill.

    resolver = resolver_of(rules)
    resolver.resolve(Leaf('params/wi', (8, 16), jnp.float32, ('embed', 'mlp')), sizes).spec

The first rule that applies owns the array: a path rule that is found in its path, a policy that returns a
spec, or a logical rule for one of its names (then all its names are resolved). Then every `fsdp` fills one
open dimension. A table within the table decides alone about the arrays that it owns.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from flax_spmd._src.rules.clauses import Fsdp, Leaf, by_spec, fill
from flax_spmd._src.rules.decisions import Resolution
from flax_spmd._src.rules.mesh_axes import Source, resolve_axes
from flax_spmd._src.rules.path_patterns import PathMatcher
from flax_spmd._src.rules.table import Rules, is_path
from flax_spmd.errors import Problem, RulesError, UnmatchedNameError


class _Owner(NamedTuple):
  """A rule that owns an array: its index in the table, and the PartitionSpec or Rules that it gives."""

  rule: int
  target: Any


class ArrayResolver:
  """Resolves whole arrays by all rules of a table.

  Attributes:
    looks_at_paths: whether any rule needs an array's path.
    looks_at_dtypes: whether any needs its dtype; otherwise names and shape alone say where it goes.
    asks_functions: whether some rule is a function, which may look at anything.
  """

  def __init__(self, rules: Rules):
    self._rules = rules
    self._end = len(rules)
    clauses = list(enumerate(rules.clauses))
    self._paths = [(index, clause) for index, clause in clauses if is_path(clause)]
    self._matcher = PathMatcher([re.compile(pattern) for _, (pattern, _) in self._paths])
    self._ends: dict[int | None, tuple[int | None, ArrayResolver | None]] = {None: (None, None)}
    for position, (rule, (_, target)) in enumerate(self._paths):
      self._ends[position] = rule, resolver_of(target) if isinstance(target, Rules) else None
    self._policies: list[tuple[int, Callable[[Leaf], Any]]] = [(i, c) for i, c in clauses if callable(c)]
    self._fills = [(index, clause) for index, clause in clauses if isinstance(clause, Fsdp)]
    self._specs: dict[Any, Resolution] = {}
    self.asks_functions = bool(self._policies)
    self.looks_at_paths = bool(self._paths or self._policies)
    self.looks_at_dtypes = self.looks_at_paths or bool(self._fills)

  def route(self, path: str) -> Any:
    """What of a path matters: arrays with equal routes, names, shapes and dtypes go alike."""
    if self._policies:
      return path
    rule, inner = self._ends[self._matcher.first(path)]
    if inner is None:
      return rule
    end = inner.route(path)
    return (rule, *end) if isinstance(end, tuple) else (rule, end)

  def asked_route(self, leaf: Leaf, *, axes: bool = False) -> Any:
    """The same for a table with policies, which are asked about the array: what they say, or its path."""
    owner = self._owner(leaf, None if axes else leaf.names)
    is_table = isinstance(owner, _Owner) and isinstance(owner.target, Rules)
    return leaf.path if is_table else owner

  def resolve(
    self, leaf: Leaf, sizes: Mapping[str, int] | None = None, *, axes: bool = False
  ) -> Resolution:
    """Decides every dimension of an array, and says how. Nothing is raised.

    Args:
      leaf: path, shape, dtype and names of the array.
      sizes: size per mesh axis, if the mesh is known; without, `fsdp` fills nothing.
      axes: whether the leaf's names are mesh axes, rather than logical names.

    Example:
      >>> table = Rules(('bias$', PartitionSpec()), fsdp('data', min_size=1))
      >>> resolver_of(table).resolve(Leaf('dense/kernel', (8, 16)), {'data': 4}).spec
      P(None, 'data')
    """
    owner = self._owner(leaf, None if axes else leaf.names)
    if isinstance(owner, Resolution):
      return owner
    if owner is not None and isinstance(owner.target, Rules):
      inner = resolver_of(owner.target).resolve(leaf, sizes, axes=axes)
      return inner.within(owner.rule, self._text(owner.rule))
    if owner is not None:
      found = self._by_spec(owner, leaf, sizes)
    elif leaf.names is None:
      found = Resolution(PartitionSpec(), (), self._unowned(leaf))
    elif axes:
      found = resolve_axes(leaf.names, leaf.shape, sizes, self._rules.policies)
    else:
      found = self._rules.resolve(leaf.names, leaf.shape, sizes)
    if found.problems or sizes is None or not self._fills:
      return found
    return fill(found, self._fills, leaf, sizes)

  def resolve_annotated(
    self, name: str, leaf: Leaf, sizes: Mapping[str, int] | None = None
  ) -> Resolution:
    """What the rule of an annotation says of a value in a program.

    Args:
      name: the annotation, without `@`; the table has a rule for it.
      leaf: the value; its path is the one within what was annotated.
      sizes: size per mesh axis, if the mesh is known.
    """
    index = self._rules.annotations[name]
    target = self._rules.clauses[index][1]
    if isinstance(target, PartitionSpec):
      return self._by_spec(_Owner(index, target), leaf, sizes)
    if not isinstance(target, Rules):
      target = Rules(target, **dataclasses.asdict(self._rules.policies))
    return resolver_of(target).resolve(leaf, sizes).within(index, self._text(index))

  def _owner(self, leaf: Leaf, logical: Any) -> _Owner | Resolution | None:
    """The rule that owns an array; None if its names do, or nothing does."""
    by_path = self._by_path(leaf.path) if self._paths else None
    last = self._names_at(logical) if logical else self._end
    if by_path is not None and by_path.rule < last:
      last = by_path.rule
    for index, policy in self._policies:
      spec = self._asked(index, policy, leaf) if index < last else None
      if spec is not None:
        return _Owner(index, spec) if isinstance(spec, PartitionSpec) else self._no_spec(index, spec)
    return by_path if by_path is not None and by_path.rule == last else None

  def _asked(self, index: int, policy: Callable[[Leaf], Any], leaf: Leaf) -> Any:
    try:
      return policy(leaf)
    except Exception as error:
      error.add_note(f'in the policy of rule {index} {policy!r}, asked about {leaf}')
      raise

  def _names_at(self, names: Any) -> int:
    """Where an array's names stand among the rules: at the first rule for any of them."""
    known = (self._rules.by_name.get(name) for name in names if isinstance(name, str))
    return min((indices[0] for indices in known if indices), default=self._end)

  def _by_path(self, path: str) -> _Owner | None:
    match = self._matcher.first(path)
    if match is None:
      return None
    index, (_, target) = self._paths[match]
    return _Owner(index, target)

  def _by_spec(self, owner: _Owner, leaf: Leaf, sizes) -> Resolution:
    key = (owner, leaf.shape, leaf.names, None if sizes is None else tuple(sizes.items()))
    found = self._specs.get(key)
    if found is None:
      source = Source(owner.rule, repr(self._rules.clauses[owner.rule]))
      found = by_spec(owner.target, leaf, sizes, self._rules.policies, source)
      self._specs[key] = found
    return found

  def _text(self, index: int) -> str:
    return f'rule {index} {self._rules.clauses[index][0]!r}'

  def _unowned(self, leaf: Leaf) -> tuple[Problem, ...]:
    """What a strict table says of an array that no rule applies to."""
    strict = self._rules.policies.unmatched == 'error'
    if not strict or self._fills or not self.looks_at_paths or leaf.size <= 1:
      return ()
    text = f'no rule applies to this array of shape {leaf.shape}, which has no names.'
    fix = "add a rule for this path; ('.*', PartitionSpec()) at the end replicates what is left."
    return (Problem(text, fix, UnmatchedNameError),)

  def _no_spec(self, index: int, spec: Any) -> Resolution:
    wrong = Problem(
      f'the policy of rule {index} {self._rules.clauses[index]!r} returned {spec!r}.',
      'return a PartitionSpec, or None where the policy does not apply.',
      RulesError,
    )
    return Resolution(PartitionSpec(), (), (wrong,), index)


@functools.lru_cache(maxsize=256)
def resolver_of(rules: Rules) -> ArrayResolver:
  """The resolver of a table; equal tables share one."""
  return ArrayResolver(rules)
