"""Selection: the estimated candidates to compile, and the ones to show."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flax_spmd._src.compare.outcome import Outcome
from flax_spmd._src.search.candidate import Candidate
from flax_spmd._src.search.estimate_check import traffic
from flax_spmd._src.search.space import Space
from flax_spmd._src.search.trials import Trials, expected_seconds, fits, penalized_seconds
from flax_spmd._src.text import size_text

SLACK = 0.1  # relative error of estimated memory to allow for
_DOUBT_BONUS = 0.9  # factor on the time of a doubtful estimate, so that it is compiled earlier
_HOPELESS = 2.0  # a preset this many times slower than the best estimate is not compiled
_ANCHOR_POOL = 12  # of the best candidates, those to choose anchors from
_OFFLOADED = 8  # of the smallest candidates, those to try in the host's memory at the end
_SHOWN = 3  # estimates to show if nothing is compiled


class Selection(NamedTuple):
  """Selects among the estimated candidates.

  Attributes:
    space: the space of the candidates.
    trials: the estimates.
    presets: names of the candidates that are presets.
    top: number of candidates to select.
  """

  space: Space
  trials: Trials
  presets: Mapping[Candidate, str]
  top: int

  def ranked(self, slack: float) -> list[Candidate]:
    """The best candidates within the budget plus a slack, without rules that have no effect."""
    useful = (one for one in self.distinct(slack, _priority) if not self._offloads_in_vain(one))
    best = itertools.islice(useful, self.top)  # lazily: each check may estimate a layout
    plain = [self.trials.simplified(one, self.space.simpler) for one in best]
    return list(dict.fromkeys(plain))

  def _offloads_in_vain(self, candidate: Candidate) -> bool:
    """Whether arrays are in the host's memory that certainly fit into the device's."""
    if not candidate.on_host:
      return False
    return fits(self.trials.outcome(candidate._replace(on_host=())), self.trials.memory, -SLACK)

  def distinct(self, slack: float, order: Callable[[Outcome], float]) -> list[Candidate]:
    """Candidates within the budget plus a slack, best first; one of several with equal estimates."""
    distinct: dict[Any, Candidate] = {}
    for candidate, one in self.trials.estimated.items():
      if one.counts and one.cost and fits(one, self.trials.memory, slack):
        distinct.setdefault(_figures(one), candidate)
    return sorted(distinct.values(), key=lambda candidate: order(self.trials.estimated[candidate]))

  def anchors(self, count: int) -> list[Candidate]:
    """Candidates whose compiled programs check the estimates: the best one, and one with other operations.

    Args:
      count: number of candidates.
    """
    pool = (self.distinct(SLACK, _priority) or self.smallest())[:_ANCHOR_POOL]
    chosen: list[Candidate] = []
    while pool and len(chosen) < count:
      seen = {name for one in chosen for name in self._classes(one)}
      pool.remove(best := max(pool, key=lambda one: self._unseen(one, seen) if seen else 0.0))
      plain = self.trials.simplified(best, self.space.simpler)
      chosen += [plain] if plain not in chosen else []
    return chosen

  def _unseen(self, candidate: Candidate, seen: set[str]) -> float:
    """The share of a candidate's traffic in classes of operations that are not seen yet; of equals, the first."""
    sizes = self._classes(candidate)
    return round(sum(sizes[name] for name in sizes.keys() - seen) / (sum(sizes.values()) or 1.0), 1)

  def _classes(self, candidate: Candidate) -> dict[str, float]:
    return traffic(self.trials.outcome(candidate))

  def smallest(self, count: int = 1) -> list[Candidate]:
    """The candidates with the lowest peak memory."""
    peaks = {key: one.memory.peak for key, one in self.trials.estimated.items() if one.memory}
    return sorted(peaks, key=lambda key: peaks[key])[:count]

  def offload(self) -> None:
    """Estimates the smallest candidates with all arrays in the host's memory that may be there, if none fits."""
    paths = self.space.constraints.host
    if paths and not self.distinct(0.0, expected_seconds):
      for one in self.smallest(_OFFLOADED):
        self.trials.outcome(one._replace(on_host=paths))

  def best_presets(self) -> list[Candidate]:
    """The best mesh of each preset, unless it does not fit or is certainly far slower than the best."""
    best: dict[str, Candidate] = {}
    fitting = self._fitting
    shortest = min((expected_seconds(one) for one in fitting.values()), default=0.0)
    for candidate, name in self.presets.items():
      one = fitting.get(candidate)
      if one is None:
        continue
      if not one.doubts and expected_seconds(one) > _HOPELESS * shortest:
        continue
      if name not in best or expected_seconds(one) < expected_seconds(fitting[best[name]]):
        best[name] = candidate
    distinct = {_figures(fitting[candidate]): candidate for candidate in reversed(best.values())}
    return list(reversed(distinct.values()))

  @property
  def _fitting(self) -> dict[Candidate, Outcome]:
    """The estimates within the budget plus `SLACK`."""
    estimated = self.trials.estimated.items()
    return {key: one for key, one in estimated if one.cost and fits(one, self.trials.memory, SLACK)}

  def fits(self, outcome: Outcome) -> bool:
    """Whether an outcome has no error and is within the budget."""
    return outcome.fits

  def shown(self) -> dict[Candidate, Outcome]:
    """The outcomes to show if nothing was compiled: the best estimates, and the best of each preset."""
    best = self.distinct(0.0, expected_seconds)[: max(self.top, _SHOWN)]
    plain = [self.trials.simplified(one, self.space.simpler) for one in best]
    return {one: self.trials.outcome(one) for one in [*plain, *self.best_presets()]}

  def sorted(self, outcomes: Mapping[Any, Outcome]) -> list[tuple[Any, Outcome]]:
    """The outcomes with their keys: those that fit first, then by time."""
    rank = lambda item: (not self.fits(item[1]), penalized_seconds(item[1], self.trials.memory))
    return sorted(outcomes.items(), key=rank)

  def infeasible_text(self, compiled: Mapping[Any, Outcome]) -> str:
    """The error text for a search in which no layout fits."""
    known = compiled or self.trials.estimated
    sized = [one for one in known.values() if one.memory is not None]
    if not sized:
      error = next((one.error for one in known.values() if one.error), 'nothing was tried')
      return (
        f'None of the {len(self.trials.estimated)} layouts can be used.\n{error.splitlines()[0]}\n'
        'Fix: correct the cause of this error, which is that of the first layout.'
      )
    smallest = min(sized, key=lambda one: one.memory.peak if one.memory else 0)
    peak = smallest.memory.peak if smallest.memory else 0
    excess = peak - self.trials.memory
    remedies = 'or remat' if self.space.constraints.host else "host='^opt_state/', or remat"
    return (
      f'None of the {len(self.trials.estimated)} layouts fits into {size_text(self.trials.memory)} per '
      f'device on {self.space.target.text}.\n'
      f'The smallest needs {size_text(peak)}, {size_text(excess)} ({excess} bytes) over the budget '
      f'({smallest.source}): {smallest.name}.\n'
      f'Fix: use more devices, a smaller batch, {remedies} (as an argument of the step, passed in choices).'
    )


def _priority(outcome: Outcome) -> float:
  """Sort key of the candidates to compile: time, with a bonus for doubtful estimates."""
  return expected_seconds(outcome) * (_DOUBT_BONUS if outcome.doubts else 1.0)


def _figures(outcome: Outcome) -> Any:
  """Memory and time, which are equal for equal programs."""
  return outcome.memory, outcome.batch, outcome.cost and (outcome.cost.low, outcome.cost.high)
