"""Rule effects: how the estimate of a layout changes when one of its rules is removed."""

from __future__ import annotations

from flax_spmd._src.compare.outcome import Outcome
from flax_spmd._src.search.candidate import Candidate
from flax_spmd._src.search.result import RuleEffect
from flax_spmd._src.search.trials import Trials, expected_seconds


def rule_effects(candidate: Candidate, trials: Trials) -> list[RuleEffect]:
  """The effect of each rule of a candidate; none without an estimator."""
  whole = trials.estimate_alone(candidate)
  if trials.reason or whole.memory is None:
    return []
  clauses = whole.layout.rules.clauses
  return [
    _effect(clause, whole, trials.with_rules(candidate, (*clauses[:n], *clauses[n + 1 :])))
    for n, clause in enumerate(clauses)
  ]


def _effect(clause: object, whole: Outcome, without: Outcome) -> RuleEffect:
  if without.memory is None or whole.memory is None:
    return RuleEffect(clause, 0, 0.0, without.error)
  memory = without.memory.peak - whole.memory.peak
  return RuleEffect(clause, memory, expected_seconds(without) / expected_seconds(whole) - 1)
