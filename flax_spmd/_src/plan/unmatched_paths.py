"""Unmatched paths: a rule table for paths that matches no array of a state, which would be replicated silently."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from flax_spmd._src.names.unit_paths import leaves_with_paths
from flax_spmd._src.rules.array_resolver import resolver_of
from flax_spmd._src.rules.clauses import PathRule
from flax_spmd._src.rules.decisions import RuleId, rule_text
from flax_spmd._src.rules.table import Rules
from flax_spmd._src.text import value_text
from flax_spmd.errors import Problem, RulesError, raise_problems


def check_some_path_matches(rules: Rules, state: Any, shardings: Sequence[NamedSharding]) -> None:
  """Raises if the table has rules that shard by path, but none applies, and no array of the state is sharded.

  Args:
    rules: the table.
    state: a state, concrete or abstract.
    shardings: the planned sharding of each leaf.

  Raises:
    RulesError: lists every path rule, with the closest path.
  """
  by_path = [(rule, clause) for rule, clause in rules.all_rules() if isinstance(clause, PathRule)]
  sharding = [(rule, clause) for rule, clause in by_path if clause.mesh_axes]
  if not sharding or not all(each.is_fully_replicated for each in set(shardings)):
    return
  paths = [path for path, leaf in leaves_with_paths(state) if math.prod(np.shape(leaf)) > 1]
  resolver = resolver_of(rules)
  if (
    not paths
    or shardings[0].mesh.size == 1
    or any(resolver.path_rule(path) is not None for path in paths)
  ):
    return
  raise_problems([_problem(rule, clause, paths) for rule, clause in sharding])


def _problem(rule: RuleId, clause: PathRule, paths: Sequence[str]) -> Problem:
  idle = clause.idle(paths, Counter())
  reason = 'matched no array.' if idle is None else idle.text
  return Problem(
    f'rule {rule_text(rule)} {clause.short} {reason}',
    f'no array of this state is sharded. Write expressions that its paths contain, such as {value_text(paths[0])}; '
    "('.*', PartitionSpec()) at the end of the table replicates what no expression matches.",
    RulesError,
  )
