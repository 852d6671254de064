"""Coordinate descent over candidates, with random restarts.

For each thing that can change (the axes of a name, the mesh, `fsdp`, ...) all alternatives are tried and
the best is taken, until no single change lowers the cost. The search then restarts from the next of the
best starting points, and later from a good candidate with a few random changes. The order is random but
depends on the seed alone, never on time, so equal searches return equal results.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from flax_spmd._src.search.candidate import Candidate

CandidateCost = Callable[[Candidate], float]
"""Cost of a candidate; lower is better. Raises `BudgetSpent` once no more candidates may be tried."""

_MAX_STARTS = 8  # starting points to descend from
_PERTURBATIONS = 3  # random changes before a restart
_TOLERANCE = 5e-4  # relative cost that a simpler candidate may add
_MAX_IDLE = 25  # restarts in a row without a new candidate


class BudgetSpent(Exception):
  """Raised when the limit of candidates or of time is reached."""


def descend(
  starts: Sequence[Candidate],
  cost: CandidateCost,
  coordinates: Callable[[Candidate], list[list[Candidate]]],
  seed: int = 0,
  announce: Callable[[list[Candidate]], None] = lambda candidates: None,
) -> None:
  """Tries candidates until `cost` raises `BudgetSpent`, or restarts find nothing new.

  Args:
    starts: candidates to start from.
    cost: cost of a candidate; called again for known candidates.
    coordinates: for each thing that can change, the changed candidates.
    seed: seed of the random number generator.
    announce: called with the candidates whose costs are needed next, in order, if none of them is better.

  Example:
    >>> tried = {}
    >>> def cost(candidate):
    ...   return tried.setdefault(candidate, abs(candidate.min_size - 7))
    >>> def coordinates(candidate):
    ...   return [[candidate._replace(min_size=candidate.min_size + step) for step in (-1, 1)]]
    >>> descend([Candidate((), min_size=3)], cost, coordinates)
    >>> min(tried, key=cost).min_size
    7
  """
  rng = random.Random(seed)
  known: dict[Candidate, float] = {}

  def recorded(candidate: Candidate) -> float:
    known[candidate] = cost(candidate)
    return known[candidate]

  try:
    announce([*starts])
    best_starts = sorted(starts, key=recorded)[:_MAX_STARTS]
    minima = [_minimum(start, recorded, coordinates, rng, announce) for start in best_starts]
    idle = 0
    while minima and idle < _MAX_IDLE:
      before = len(known)
      best = sorted(dict.fromkeys(minima), key=recorded)[:_MAX_STARTS]
      restart = _perturbed(rng.choice(best), coordinates, rng)
      minima.append(_minimum(restart, recorded, coordinates, rng, announce))
      idle = idle + 1 if len(known) == before else 0
  except BudgetSpent:
    return


def _minimum(
  start: Candidate,
  cost: CandidateCost,
  coordinates: Callable[[Candidate], list[list[Candidate]]],
  rng: random.Random,
  announce: Callable[[list[Candidate]], None],
) -> Candidate:
  """A candidate that no single change improves."""
  current, improved = start, True
  while improved:
    improved, changes = False, coordinates(start)
    order = rng.sample(range(len(changes)), len(changes))
    for place, number in enumerate(order):
      announce([one for later in order[place:] if later < len(changes) for one in changes[later]])
      best = min(changes[number], key=cost, default=current) if number < len(changes) else current
      if cost(best) < cost(current):
        # The new candidate may have fewer coordinates.
        current, improved, changes = best, True, coordinates(best)
    start = current
  return current


def simplified(
  candidate: Candidate, cost: CandidateCost, simpler: Callable[[Candidate], list[Candidate]]
) -> Candidate:
  """The candidate without rules that do not lower its cost.

  Example:
    >>> simpler = lambda one: [one._replace(min_size=one.min_size - 1)]
    >>> cost = lambda one: 1.0 if one.min_size > 6 else 2.0
    >>> simplified(Candidate((), min_size=9), cost, simpler).min_size
    7
  """
  for one in simpler(candidate):
    if cost(one) <= cost(candidate) * (1 + _TOLERANCE):
      return simplified(one, cost, simpler)
  return candidate


def _perturbed(
  candidate: Candidate,
  coordinates: Callable[[Candidate], list[list[Candidate]]],
  rng: random.Random,
) -> Candidate:
  """The candidate after a few random changes."""
  for _ in range(_PERTURBATIONS):
    changes = [change for change in coordinates(candidate) if change]
    candidate = rng.choice(rng.choice(changes)) if changes else candidate
  return candidate
