"""Buys: what each rule of a layout is good for, by leaving it out."""

from __future__ import annotations

from flax_spmd._src.compare.outcome import Outcome
from flax_spmd._src.rules.table import Rules
from flax_spmd._src.search.candidate import Candidate
from flax_spmd._src.search.result import Buy
from flax_spmd._src.search.trials import Trials, seconds


def buys_of(candidate: Candidate, trials: Trials) -> list[Buy]:
  """What is estimated of the layout without each of its rules."""
  whole = trials.outcome(candidate)
  if trials.reason or whole.memory is None:
    return []
  clauses = whole.layout.rules.clauses
  return [
    _buy(clause, whole, trials.without(candidate, whole.layout.replace(rules=Rules(*rest))))
    for n, clause in enumerate(clauses)
    for rest in [clauses[:n] + clauses[n + 1 :]]
  ]


def _buy(clause: object, whole: Outcome, less: Outcome) -> Buy:
  if less.memory is None or whole.memory is None:
    return Buy(clause, 0, 0.0, less.error)
  return Buy(clause, less.memory.peak - whole.memory.peak, seconds(less) / seconds(whole) - 1)
