"""Path rules: `('attn/.*kernel$', PartitionSpec(...))` for the arrays whose path matches an expression.

A PartitionSpec that begins with an Ellipsis has the entries of the last dimensions: `P(..., None, 'model')` is for
the kernel of one layer, and for the stacked kernels of scanned layers.

With a table, `('^opt_state/', Rules(...))`, that table alone decides these arrays.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from jax.sharding import PartitionSpec

from flax_spmd._src.rules.clauses.base import (
  Idle,
  Leaf,
  OwningClause,
  ReadTable,
  RuleTable,
  Target,
  invalid_entries,
)
from flax_spmd._src.rules.clauses.name_rule import is_pair
from flax_spmd._src.rules.decisions import Reason, axis_names
from flax_spmd._src.rules.path_patterns import problem_of, searcher
from flax_spmd._src.rules.toml_values import quoted, read_spec, spec_text
from flax_spmd._src.text import listed_paths
from flax_spmd.errors import Problem

_MANY_PATHS = 5000  # candidates among which the closest path is searched


@dataclass(frozen=True, repr=False)
class PathRule(OwningClause):
  """A regular expression for paths, and a PartitionSpec or a table for the arrays that it matches."""

  pattern: str
  owned: Target

  form = "('path regex', PartitionSpec), ('path regex', Rules)"
  reads = frozenset({'path', 'dtype'})  # a table in it may have `fsdp`
  toml_head = 'path'
  toml_keys = frozenset({'path', 'spec', 'rules'})
  toml_form = '{path = "regex", spec = [...]}, {path = "regex", rules = {...}}'

  @classmethod
  def parse(cls, written: Any) -> Self | None:
    """A pair of a regular expression and a PartitionSpec or table."""
    if not is_pair(written) or written[0].startswith('@'):
      return None
    return cls(*written) if isinstance(written[1], (PartitionSpec, RuleTable)) else None

  @property
  def written(self) -> tuple[str, Target]:
    """The pair."""
    return self.pattern, self.owned

  def __repr__(self) -> str:
    return repr(self.written)

  @property
  def short(self) -> str:
    """The pair, without the content of its table."""
    return f'({self.pattern!r}, Rules(...))' if self.table is not None else repr(self)

  @property
  def mesh_axes(self) -> tuple[str, ...]:
    """The mesh axes of its PartitionSpec."""
    return axis_names(tuple(self.owned)) if isinstance(self.owned, PartitionSpec) else ()

  @property
  def table(self) -> RuleTable | None:
    """Its table, if it has one."""
    return self.owned if isinstance(self.owned, RuleTable) else None

  def problems(self, index: int) -> Iterator[Problem]:
    """An expression that cannot be searched for, and a PartitionSpec that shards nothing."""
    problem = problem_of(f'Rule {index}', self.pattern)
    if problem is not None:
      yield problem
    if isinstance(self.owned, PartitionSpec):
      yield from invalid_entries(index, self, self.owned)

  def target(self, leaf: Leaf) -> Any:
    """Its spec or table, for arrays with a matching path."""
    return self.owned if searcher(self.pattern)(leaf.path) else None

  def idle(self, paths: Sequence[str], reasons: Counter[Reason]) -> Idle | None:
    """Earlier rules own the arrays that it matches, or it matches none."""
    matched = list(filter(searcher(self.pattern), paths))
    if matched:
      return Idle(
        f'decided nothing: earlier rules own the arrays that it matches ({listed_paths(matched)}).'
      )
    closest = _closest_path(self.pattern, paths)
    meant = f' Closest path: {closest!r}.' if closest else ''
    return Idle(f'matched no array.{meant}', suspicious=bool(closest))

  def toml(self, indent: str) -> str:
    """`path = "bias$", spec = []`, or a table on lines of its own."""
    return f'path = {quoted(self.pattern)}, {target_toml(self.owned, indent)}'

  @classmethod
  def from_toml(cls, entry: Mapping[str, Any], read_table: ReadTable) -> Any:
    """A path with a `spec` or with `rules`."""
    if not isinstance(entry['path'], str) or entry['path'].startswith('@'):
      raise ValueError('the path is not an expression')
    return entry['path'], read_target(entry, read_table)


def target_toml(target: Target, indent: str) -> str:
  """A PartitionSpec as `spec = [...]`, or a table as `rules = {clauses = [...]}`."""
  if isinstance(target, PartitionSpec):
    return f'spec = {spec_text(target)}'
  return f'rules = {target.toml(indent)}'


def read_target(entry: Mapping[str, Any], read_table: ReadTable) -> Target:
  """The PartitionSpec or table of a TOML entry; raises ValueError if it has neither, or both."""
  if ('spec' in entry) == ('rules' in entry):
    raise ValueError('one of spec and rules is needed')
  return read_spec(entry['spec']) if 'spec' in entry else read_table(entry['rules'])


def _closest_path(pattern: str, paths: Sequence[str]) -> str | None:
  """The part of a path, of as many keys as the pattern has, that is most similar to the pattern."""
  plain = re.sub(r'[\^$\\.*+?()\[\]{}|]', '', pattern).strip('/')
  count = plain.count('/') + 1
  keys = (path.split('/') for path in paths)
  parts = {'/'.join(each[i : i + count]) for each in keys for i in range(len(each) - count + 1)}
  return next(iter(difflib.get_close_matches(plain, sorted(parts)[:_MANY_PATHS], 1)), None)
