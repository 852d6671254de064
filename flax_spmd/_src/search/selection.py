"""Choosing: which of the candidates that were estimated are compiled, and which are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flax_spmd._src.compare.outcome import Outcome
from flax_spmd._src.search.candidate import Candidate
from flax_spmd._src.search.descent import simplified
from flax_spmd._src.search.space import Space
from flax_spmd._src.search.trials import Trials, fits, seconds, worth
from flax_spmd._src.text import size_text

SLACK = 0.1  # of the budget: what an estimate says of memory may be so far off
_PREFERRED = 0.9  # how much faster a doubtful candidate counts when it is decided what to compile
_HOPELESS = 2.0  # how many times slower than the best a preset is that is not compiled
_SHOWN = 3  # estimates, where nothing is compiled


class Choice(NamedTuple):
  """What to choose from.

  Attributes:
    space: where simpler candidates are from.
    trials: everything that was estimated.
    presets: the candidates that are presets.
    top: how many are wanted.
  """

  space: Space
  trials: Trials
  presets: Mapping[Candidate, str]
  top: int

  def ranked(self, slack: float) -> list[Candidate]:
    """The best of what may fit, made simpler."""
    best = self.distinct(slack, _priority)[: self.top]
    plain = (simplified(one, self.trials.worth, self.space.simpler) for one in best)
    return list(dict.fromkeys(plain))

  def distinct(self, slack: float, order: Callable[[Outcome], float]) -> list[Candidate]:
    """What may fit, the best first; of candidates that come out alike, one."""
    alike: dict[Any, Candidate] = {}
    for candidate, one in self.trials.estimated.items():
      if one.counts and one.cost and fits(one, self.trials.memory, slack):
        alike.setdefault(_figures(one), candidate)
    return sorted(alike.values(), key=lambda candidate: order(self.trials.estimated[candidate]))

  def smallest(self) -> list[Candidate]:
    """The one that needs the least memory."""
    needs = {key: one.memory.peak for key, one in self.trials.estimated.items() if one.memory}
    return [min(needs, key=lambda key: needs[key])] if needs else []

  def best_presets(self) -> list[Candidate]:
    """Of each preset the best mesh, if it may fit, and may be the fastest of all."""
    best: dict[str, Candidate] = {}
    fitting = self._fitting
    shortest = min((seconds(one) for one in fitting.values()), default=0.0)
    for candidate, name in self.presets.items():
      one = fitting.get(candidate)
      if one is None:
        continue
      if not one.doubts and seconds(one) > _HOPELESS * shortest:
        continue
      if name not in best or seconds(one) < seconds(fitting[best[name]]):
        best[name] = candidate
    alike = {_figures(fitting[candidate]): candidate for candidate in reversed(best.values())}
    return list(reversed(alike.values()))

  @property
  def _fitting(self) -> dict[Candidate, Outcome]:
    """What may fit."""
    known = self.trials.estimated.items()
    return {key: one for key, one in known if one.cost and fits(one, self.trials.memory, SLACK)}

  def fits(self, outcome: Outcome) -> bool:
    """Whether it works, and a device has room for it."""
    return outcome.error is None and fits(outcome, self.trials.memory)

  def shown(self) -> dict[Candidate, Outcome]:
    """Where nothing was compiled: the best estimates, and the best of each preset."""
    best, *others = self.distinct(0.0, seconds)[: max(self.top, _SHOWN)] or [None]
    plain = [] if best is None else [simplified(best, self.trials.worth, self.space.simpler)]
    return {one: self.trials.outcome(one) for one in [*plain, *others, *self.best_presets()]}

  def sorted(self, outcomes: Mapping[Any, Outcome]) -> list[tuple[Any, Outcome]]:
    """Those that fit first, the fastest first."""
    rank = lambda item: (not self.fits(item[1]), worth(item[1], self.trials.memory))
    return sorted(outcomes.items(), key=rank)

  def nearest(self, compiled: Mapping[Any, Outcome]) -> str:
    """What is said where nothing fits."""
    known = compiled if any(one.memory for one in compiled.values()) else self.trials.estimated
    needing = [one for one in known.values() if one.memory is not None]
    if not needing:
      error = next((one.error for one in known.values() if one.error), 'nothing was tried')
      return (
        f'Of {len(self.trials.estimated)} layouts, none can be used.\n{error.splitlines()[0]}\n'
        'Fix: see the error of the first one.'
      )
    nearest = min(needing, key=lambda one: one.memory.peak if one.memory else 0)
    peak = nearest.memory.peak if nearest.memory else 0
    over = peak - self.trials.memory
    return (
      f'Of {len(self.trials.estimated)} layouts, none fits into {size_text(self.trials.memory)} on {self.space.target.text}.\n'
      f'The nearest needs {size_text(peak)}, {size_text(over)} ({over} bytes) too much ({nearest.source}): '
      f'{nearest.name}.\n'
      'Fix: use more devices, a smaller batch, or remat (let the step take it as an argument, and pass choices).'
    )


def _priority(outcome: Outcome) -> float:
  """By which it is decided what to compile: the fast ones, and those that may well be faster."""
  return seconds(outcome) * (_PREFERRED if outcome.doubts else 1.0)


def _figures(outcome: Outcome) -> Any:
  """What is the same of programs that are the same."""
  return outcome.memory, outcome.cost and (outcome.cost.low, outcome.cost.high)
