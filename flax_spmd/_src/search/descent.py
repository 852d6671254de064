"""Descent: from candidate to candidate, one change at a time, as long as it gets better.

Of each thing that can change (a name's place, the mesh, the fill, ...) all alternatives are tried, and the
best is kept, until no single change helps. Then it begins again, from the next of the best seeds, and
later from a good candidate with a few random changes. What is good is made simpler in the end. The order is random, by a seed; what is random
does not depend on time, so that the same question has the same answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from flax_spmd._src.search.candidate import Candidate

Worth = Callable[[Candidate], float]
"""What a candidate costs, the less the better; raises `Enough` where no more may be tried."""

_STARTS = 8  # of the best seeds, how many are gone down from
_KICKS = 3  # random changes before a new beginning
_ALIKE = 5e-4  # by how much a simpler candidate may be worse
_IDLE = 25  # beginnings in a row that find nothing new


class Enough(Exception):
  """As many candidates have been tried as were asked for, or for as long."""


def descend(
  seeds: Sequence[Candidate],
  worth: Worth,
  coordinates: Callable[[Candidate], list[list[Candidate]]],
  seed: int = 0,
) -> None:
  """Tries candidates until `worth` has enough, or nothing new is found.

  Args:
    seeds: where to begin.
    worth: tries a candidate; it is asked again for those that it knows.
    coordinates: for each thing that can change in a candidate, what becomes of it.
    seed: of what is random.

  Example:
    >>> tried = {}
    >>> def worth(candidate):
    ...   return tried.setdefault(candidate, abs(candidate.least - 7))
    >>> def coordinates(candidate):
    ...   return [[candidate._replace(least=candidate.least + step) for step in (-1, 1)]]
    >>> descend([Candidate((), least=3)], worth, coordinates)
    >>> min(tried, key=worth).least
    7
  """
  chance = random.Random(seed)
  known: dict[Candidate, float] = {}

  def asked(candidate: Candidate) -> float:
    known[candidate] = worth(candidate)
    return known[candidate]

  try:
    starts = sorted(seeds, key=asked)[:_STARTS]
    bottoms = [_down(start, asked, coordinates, chance) for start in starts]
    idle = 0
    while bottoms and idle < _IDLE:
      before = len(known)
      best = sorted(dict.fromkeys(bottoms), key=asked)[:_STARTS]
      bottoms.append(
        _down(_kicked(chance.choice(best), coordinates, chance), asked, coordinates, chance)
      )
      idle = idle + 1 if len(known) == before else 0
  except Enough:
    return


def _down(
  start: Candidate,
  worth: Worth,
  coordinates: Callable[[Candidate], list[list[Candidate]]],
  chance: random.Random,
) -> Candidate:
  """The candidate that no single change improves."""
  here, improved = start, True
  while improved:
    improved, changes = False, coordinates(start)
    for number in chance.sample(range(len(changes)), len(changes)):
      best = min(changes[number], key=worth, default=here) if number < len(changes) else here
      if worth(best) < worth(here):
        here, improved, changes = best, True, coordinates(best)  # there may be fewer of them now
    start = here
  return here


def simplified(
  candidate: Candidate, worth: Worth, simpler: Callable[[Candidate], list[Candidate]]
) -> Candidate:
  """Without what buys nothing: the simpler one is taken as long as it is as good.

  Example:
    >>> simpler = lambda one: [one._replace(least=one.least - 1)]
    >>> simplified(Candidate((), least=9), lambda one: 1.0 if one.least > 6 else 2.0, simpler).least
    7
  """
  for one in simpler(candidate):
    if worth(one) <= worth(candidate) * (1 + _ALIKE):
      return simplified(one, worth, simpler)
  return candidate


def _kicked(
  candidate: Candidate,
  coordinates: Callable[[Candidate], list[list[Candidate]]],
  chance: random.Random,
) -> Candidate:
  for _ in range(_KICKS):
    changes = [change for change in coordinates(candidate) if change]
    candidate = chance.choice(chance.choice(changes)) if changes else candidate
  return candidate
