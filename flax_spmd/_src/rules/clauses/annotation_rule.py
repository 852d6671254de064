"""Annotation rules: `('@weights', ...)` for values that a program annotates with a name.

They decide nothing in a tree; `with_sharding_annotation` applies them inside a jitted function.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from jax.sharding import PartitionSpec

from flax_spmd._src.rules.clauses.base import Clause, ReadTable, RuleTable, invalid_entries, kind_of_toml
from flax_spmd._src.rules.clauses.function_rule import FunctionRule
from flax_spmd._src.rules.clauses.name_rule import is_pair
from flax_spmd._src.rules.clauses.path_rule import read_target, target_toml
from flax_spmd._src.rules.decisions import axis_names
from flax_spmd._src.rules.toml_values import quoted
from flax_spmd._src.text import value_text
from flax_spmd.errors import Problem


@dataclass(frozen=True, repr=False)
class AnnotationRule(Clause):
  """The name of an annotation with its `@`, and a PartitionSpec, table, clause or function for its values."""

  name: str
  target: Any

  form = "('@annotation', PartitionSpec)"
  toml_head = 'annotation'
  toml_wraps = True
  toml_form = '{annotation = "name", ...} with one of spec, rules, fsdp and optimizer_over'

  @classmethod
  def parse(cls, written: Any) -> Self | None:
    """A pair whose first element begins with `@`."""
    return cls(*written) if is_pair(written) and written[0].startswith('@') else None

  @property
  def written(self) -> tuple[str, Any]:
    """The pair."""
    return self.name, self.target

  def __repr__(self) -> str:
    return repr(self.written)

  @property
  def mesh_axes(self) -> tuple[str, ...]:
    """The mesh axes of its PartitionSpec or clause."""
    if isinstance(self.target, PartitionSpec):
      return axis_names(tuple(self.target))
    return self.target.mesh_axes if isinstance(self.target, Clause) else ()

  @property
  def table(self) -> RuleTable | None:
    """Its table, if it has one."""
    return self.target if isinstance(self.target, RuleTable) else None

  def problems(self, index: int) -> Iterator[Problem]:
    """A target that does not shard a value on its own, or shards nothing."""
    if isinstance(self.target, PartitionSpec):
      yield from invalid_entries(index, self, self.target)
    known = isinstance(self.target, (PartitionSpec, RuleTable, Clause))
    if not known and FunctionRule.parse(self.target) is None:
      yield Problem(
        f'Rule {index} is {value_text(self)}, but mesh axes alone do not shard an annotated value.',
        'give an annotation a PartitionSpec, Rules, fsdp(...), optimizer_over(...) or a function.',
      )

  def toml(self, indent: str) -> str:
    """`annotation = "grads", fsdp = "data"`."""
    if isinstance(self.target, (PartitionSpec, RuleTable)):
      target = target_toml(self.target, indent)
    else:
      target = (FunctionRule.parse(self.target) or self.target).toml(indent)
    return f'annotation = {quoted(self.name[1:])}, {target}'

  @classmethod
  def from_toml(cls, entry: Mapping[str, Any], read_table: ReadTable) -> Any:
    """The name with a `spec`, with `rules`, or with the fields of another clause."""
    rest = {key: value for key, value in entry.items() if key != 'annotation'}
    if 'path' in rest or not isinstance(entry['annotation'], str):
      raise ValueError('an annotation has a name, and no path')
    if rest.keys() <= {'spec', 'rules'}:
      return f'@{entry["annotation"]}', read_target(rest, read_table)
    return f'@{entry["annotation"]}', kind_of_toml(rest).from_toml(rest, read_table)
