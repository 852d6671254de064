"""Estimating: the way through a space, as far as it is wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flax_spmd._src.progress import progress
from flax_spmd._src.search.candidate import Candidate
from flax_spmd._src.search.descent import Enough, descend
from flax_spmd._src.search.space import Space
from flax_spmd._src.search.trials import Trials, seconds
from flax_spmd._src.text import size_text, time_text


def estimate(
  space: Space,
  trials: Trials,
  starts: Sequence[Candidate],
  most: int,
  seed: int,
  late: Callable[[], bool],
  show: bool,
  title: str = 'estimating',
) -> None:
  """Tries candidates, the good ones first; what came of them is in the trials.

  Args:
    space: where candidates are from.
    trials: tries them.
    starts: those to begin with.
    most: how many are tried.
    seed: of what is random.
    late: whether the time is up.
    show, title: whether progress is shown, and what is said to go on.
  """
  tried = trials.estimated
  with progress(show, most, title) as say:

    def worth(candidate: Candidate) -> float:
      if candidate not in tried:
        if len(tried) >= most or (late() and tried):
          raise Enough
        trials.outcome(candidate)
        say(len(tried), _if_best(candidate, trials) if show else '')
      return trials.worth(candidate)

    descend(starts or bare(space), worth, space.coordinates, seed)


def bare(space: Space) -> list[Candidate]:
  """Meshes with nothing but the pinned names on them."""
  found = (space.legal(Candidate(axes)) for axes in space.meshes())
  return [one for one in found if one is not None]


def _if_best(candidate: Candidate, trials: Trials) -> str:
  """What there is to say of a candidate that is the best so far."""
  if min(trials.estimated, key=trials.worth) != candidate:
    return ''
  outcome = trials.estimated[candidate]
  peak = size_text(outcome.memory.peak) if outcome.memory else '?'
  return f'{time_text(seconds(outcome))}, {peak}: {outcome.name}'
