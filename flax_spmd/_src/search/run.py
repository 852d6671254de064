"""Underway: a search from its first estimate to its answer; what is there of it, if it is interrupted."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from flax_spmd._src.compare.outcome import Outcome
from flax_spmd._src.progress import progress
from flax_spmd._src.search.candidate import Candidate
from flax_spmd._src.search.descent import Enough, descend
from flax_spmd._src.search.pipelines import Staged, Staging
from flax_spmd._src.search.result import Found
from flax_spmd._src.search.rule_effects import buys_of
from flax_spmd._src.search.selection import SLACK, Choice
from flax_spmd._src.search.space import Space
from flax_spmd._src.search.starts import Seed, seeds
from flax_spmd._src.search.trials import Trials, chunks, seconds
from flax_spmd._src.text import size_text, time_text
from flax_spmd.errors import InfeasibleError, SearchError

_SEEDS = 0.4  # of the candidates, those that it begins with at most
_ESTIMATING = 0.6  # of the time


class Limits(NamedTuple):
  """How far a search goes; the fields are arguments of `search`."""

  candidates: int
  time: float | None
  top: int
  seed: int


class Search:
  """One search on its way.

  Args:
    space: what may be tried.
    trials: what came of it.
    staged: the same for each pipeline.
    limits: how far it goes.
    show: whether progress is shown.
  """

  def __init__(
    self, space: Space, trials: Trials, staged: Sequence[Staging], limits: Limits, show: bool
  ):
    self.space, self.trials, self.staged = space, trials, staged
    self.limits, self.show = limits, show
    self.begin = time.monotonic()
    self.presets: dict[Candidate, str] = {}
    self.compiled: dict[Candidate | Staged, Outcome] = {}
    self.notes: list[str] = []
    self.interrupted = False

  def run(self) -> Found:
    """Estimates, compiles, and has the answer; what is there of it after Ctrl-C.

    Raises:
      SearchError: there is nothing to try.
      InfeasibleError: nothing that was tried fits.
    """
    self._note()
    try:
      self._estimate()
      self._compile()
      self._compile_staged()
    except KeyboardInterrupt:
      if not self.trials.estimated:
        raise
      self.interrupted = True
      self.notes.append(
        f'Interrupted: the best of {len(self.estimates)} candidates, of which '
        f'{len(self.compiled)} were compiled. The same call goes on from here.'
      )
    return self._found()

  def _note(self) -> None:
    if self.trials.rebuilt:
      self.notes.append(
        f'Estimates that {self.trials.rebuilt} had made were kept, and have been made anew.'
      )
    if self.trials.reason:
      self.notes.append(
        f'Without estimates ({self.trials.reason}) every candidate is compiled, which takes seconds '
        f'where an estimate takes a twentieth of one: {self.limits.candidates} candidates are tried.'
      )
    if not self.space.facts.parameters:
      kinds = len(self.space.facts.paths)
      self.notes.append(
        f'The state has no names: fsdp is searched, and rules for the paths of {kinds} kinds of arrays.'
      )

  # -- estimating

  def _estimate(self) -> None:
    begun = self._seeds(self.space)
    self.presets = {one.candidate: one.preset for one in begun if one.preset}
    self._go(self.space, self.trials, begun, 0, 'estimating')
    if not self.trials.estimated:
      raise SearchError(
        f'There is no layout that is as wished on {self.space.target.text}.\n'
        'Fix: take back a pin, a forbidden name, or a fixed mesh.'
      )
    for number, (space, trials) in enumerate(self.staged, 1):
      self._go(space, trials, self._seeds(space), number, f'estimating {trials.schedule}')

  def _seeds(self, space: Space) -> list[Seed]:
    return seeds(space, max(1, int(_SEEDS * self.limits.candidates)))

  def _go(self, space: Space, trials: Trials, begun: list[Seed], number: int, title: str) -> None:
    """Through a space; each has an equal part of the time."""
    starts = [one.candidate for one in begun]
    part = _ESTIMATING * (number + 1) / (1 + len(self.staged))
    late = lambda: self.limits.time is not None and self._spent() > part * self.limits.time
    most, seed = self.limits.candidates, self.limits.seed
    estimate(space, trials, starts, most, seed, late, self.show, title)

  @property
  def estimates(self) -> list[Outcome]:
    """Of everything that was estimated."""
    every = [self.trials, *(one.trials for one in self.staged)]
    return [outcome for trials in every for outcome in trials.estimated.values()]

  def _spent(self) -> float:
    return time.monotonic() - self.begin

  # -- compiling

  def _compile(self) -> None:
    if self.trials.reason:
      self.compiled |= self.trials.estimated
      return
    if not self.limits.top:
      return
    choice = self._choice
    wanted = [*choice.ranked(SLACK), *choice.ranked(0.0)[:1], *choice.best_presets()]
    for slack in (0.0, -SLACK, None):
      self._compile_all([one for one in dict.fromkeys(wanted) if one not in self.compiled])
      if any(choice.fits(one) for one in self.compiled.values()):
        return
      wanted = choice.smallest() if slack is None else choice.ranked(slack)
    self._compile_all([one for one in wanted if one not in self.compiled])

  def _compile_staged(self) -> None:
    """The best pipelines, dealt out to the schedules."""
    each = -(-self.limits.top // max(1, len(self.staged)))
    for number, one in enumerate(self.staged if each else ()):
      self._compile_all([Staged(number, candidate) for candidate in one.wanted(each)], one.trials)

  def _compile_all(
    self, wanted: Sequence[Candidate] | Sequence[Staged], trials: Trials | None = None
  ) -> None:
    """Some at a time, so that what is there is kept when it is interrupted, or late."""
    trials = trials or self.trials
    at_once = trials.task.jobs or max(1, (os.cpu_count() or 2) // 2)
    with progress(self.show, len(wanted), 'compiling') as say:
      for number, group in enumerate(chunks(wanted, at_once)):
        if number and self.limits.time is not None and self._spent() > self.limits.time:
          self.notes.append('The time was up before everything was compiled that should have been.')
          return
        plain = [one.candidate if isinstance(one, Staged) else one for one in group]
        self.compiled |= dict(zip(group, trials.compiled(plain), strict=True))
        say(min(len(wanted), (number + 1) * at_once), '')

  # -- the answer

  @property
  def _choice(self) -> Choice:
    return Choice(self.space, self.trials, self.presets, self.limits.top)

  def _found(self) -> Found:
    choice = self._choice
    outcomes = choice.sorted(self.compiled)
    if not outcomes or not choice.fits(outcomes[0][1]):
      outcomes = choice.sorted({} if self.compiled and not self.interrupted else self._shown())
    if not outcomes or not choice.fits(outcomes[0][1]):
      raise InfeasibleError(choice.nearest(self.compiled))
    best, _ = outcomes[0]
    staged = self.staged[best.pipeline].trials if isinstance(best, Staged) else None
    candidate = best.candidate if isinstance(best, Staged) else best
    return Found(
      self.space.target,
      self.trials.memory,
      [one for _, one in outcomes],
      self.estimates,
      dict(candidate.choices),
      {one.name: self.presets[key] for key, one in outcomes if key in self.presets},
      buys_of(candidate, staged or self.trials),
      self.notes,
      staged.schedule if staged else None,
    )

  def _shown(self) -> dict[Candidate | Staged, Outcome]:
    """Estimates, where nothing is compiled."""
    found: dict[Candidate | Staged, Outcome] = {**self._choice.shown()}
    for number, one in enumerate(self.staged):
      found |= {Staged(number, candidate): outcome for candidate, outcome in one.shown().items()}
    return found


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
