"""One run of a search, from its first estimate to its result, also after an interruption."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from flax_spmd._src.compare.outcome import Outcome
from flax_spmd._src.estimate.partitioned_step import is_as_slow_as_compilation
from flax_spmd._src.progress import progress
from flax_spmd._src.search.candidate import Candidate
from flax_spmd._src.search.descent import BudgetSpent, descend
from flax_spmd._src.search.estimate_check import check_estimates
from flax_spmd._src.search.pipelines import PipelineCandidate, PipelineSearch
from flax_spmd._src.search.result import SearchResult
from flax_spmd._src.search.rule_effects import rule_effects
from flax_spmd._src.search.selection import SLACK, Selection
from flax_spmd._src.search.space import Space
from flax_spmd._src.search.starts import StartingPoint, starting_points
from flax_spmd._src.search.trials import Trials, chunks, expected_seconds
from flax_spmd._src.text import plural, size_text, time_text
from flax_spmd.errors import InfeasibleError, SearchError

_STARTS = 0.4  # largest share of starting points among the candidates
_ESTIMATING = 0.6  # share of the time limit
_ANCHORS = 2  # layouts compiled before the search, to check its estimates
_PARTITIONED = 0.7  # share of the time limit after which nothing more is partitioned
_ROUNDS = 4  # at most, of partitioning or compiling the best: others may be the best afterwards


class SearchLimits(NamedTuple):
  """Limits of a search.

  Attributes:
    candidates: number of candidates to estimate, and again for each pipeline.
    time: seconds for the whole search, or None.
    top: number of candidates to compile.
    seed: seed of the random number generator.
  """

  candidates: int
  time: float | None
  top: int
  seed: int


class SearchRun:
  """A running search.

  Args:
    space: the candidates.
    trials: their outcomes.
    pipelines: the same for each pipeline.
    limits: limits of the search.
    show: whether to show progress.
  """

  def __init__(
    self,
    space: Space,
    trials: Trials,
    pipelines: Sequence[PipelineSearch],
    limits: SearchLimits,
    show: bool,
  ):
    self.space, self.trials, self.pipelines = space, trials, pipelines
    self.limits, self.show = limits, show
    self.begin = time.monotonic()
    self.presets: dict[Candidate, str] = {}
    self.compiled: dict[Candidate | PipelineCandidate, Outcome] = {}
    self.notes: list[str] = []
    self.is_selected = False  # whether the candidates to choose the result from are being compiled
    self.interrupted = False

  def run(self) -> SearchResult:
    """Estimates candidates and compiles the best. Ctrl-C ends the run with the best result so far.

    Raises:
      SearchError: there is no candidate.
      InfeasibleError: no candidate fits.
    """
    self._add_notes()
    try:
      self._estimate()
      self._note_untried_choices()
      self._partition()
      self._compile()
      self._compile_pipelines()
      self._check()
    except KeyboardInterrupt:
      if not self.trials.estimated:
        raise
      self.interrupted = True
      self.trials.workers.close()
      self.notes.append(
        f'Interrupted after {plural(len(self.estimates), "candidate")}, {len(self.compiled)} of them '
        'compiled. Repeat the call to continue.'
      )
    return self._result()

  def _add_notes(self) -> None:
    if self.trials.outdated:
      self.notes.append(
        f'Cached estimates of another version ({self.trials.outdated}) are computed again.'
      )
    if self.trials.reason:
      self.notes.append(
        f'No estimates ({self.trials.reason}): every candidate is compiled, which takes seconds instead of '
        f'a twentieth of a second; the search tries {self.limits.candidates}.'
      )
    if self.trials.first.partitions_each:
      self.notes.append(
        f'{self.trials.first.partitions_each} The step is lowered and partitioned for each candidate, which takes '
        f'seconds instead of a twentieth of a second; the search tries {self.limits.candidates}.'
      )
    if not self.space.facts.parameters:
      kinds = len(self.space.facts.paths)
      self.notes.append(
        f'The state has no names: the search tries fsdp, and path rules for {kinds} kinds of arrays.'
      )

  # -- estimates

  def _estimate(self) -> None:
    starts = self._starts(self.space)
    self.presets = {start.candidate: start.preset for start in starts if start.preset}
    self._compile_anchors(starts)
    self._explore(self.space, self.trials, starts, 0, 'estimating')
    self._selection.offload()
    if not self.trials.estimated:
      raise SearchError(
        f'No layout on {self.space.target.text} meets the constraints.\n'
        'Fix: relax pin, forbid, batch_only, tensor or mesh.'
      )
    for number, (space, trials) in enumerate(self.pipelines, 1):
      self._explore(space, trials, self._starts(space), number, f'estimating {trials.schedule}')

  def _note_untried_choices(self) -> None:
    tried = {candidate.choices for candidate in self.trials.estimated}
    missing = [one for one in self.space.combinations if one not in tried]
    if missing:
      number = f'{len(missing)} of {len(missing) + len(tried)} combinations of choices'
      self.notes.append(f'{number} were not tried, such as {dict(missing[0])}: raise candidates.')

  def _starts(self, space: Space) -> list[StartingPoint]:
    return starting_points(space, max(1, int(_STARTS * self.limits.candidates)))

  def _explore(
    self, space: Space, trials: Trials, starts: list[StartingPoint], number: int, title: str
  ) -> None:
    """Searches one space; all spaces have equal parts of the time."""
    candidates = [start.candidate for start in starts]
    part = _ESTIMATING * (number + 1) / (1 + len(self.pipelines))
    late = lambda: self._is_late(part)
    limit, seed = self.limits.candidates, self.limits.seed
    estimate(space, trials, candidates, limit, seed, late, self.show, title)

  @property
  def estimates(self) -> list[Outcome]:
    """Every estimated outcome."""
    every = [self.trials, *(one.trials for one in self.pipelines)]
    return [outcome for trials in every for outcome in trials.estimated.values()]

  def _is_late(self, part: float = 1.0) -> bool:
    """Whether a part of the time limit has passed."""
    return self.limits.time is not None and time.monotonic() - self.begin > part * self.limits.time

  def _partition(self) -> None:
    """Partitions the best candidates, until the best of all are among those: their collectives are then exact.

    Not where that takes as long as to compile a step, which follows unless `top` is 0.
    """
    compiled = self.compiled.values() if self.limits.top else ()
    is_slow = any(is_as_slow_as_compilation(self.space.target, one) for one in compiled)
    for _ in range(_ROUNDS if self.trials.has_partitioner and not is_slow else 0):
      selected = self._selected() if self.limits.top else self._selection.shown()
      new = [one for one in selected if one not in self.trials.partitioned]
      with progress(self.show, len(new), 'partitioning') as update:
        for number, candidate in enumerate(new, 1):
          if self._is_late(_PARTITIONED):
            return
          self.trials.prepare(new[number - 1 :], self.trials.task.jobs, partition=True)
          self.trials.partition(candidate)
          update(number, '')
      self._check()

  # -- compilation

  def _compile_anchors(self, starts: Sequence[StartingPoint]) -> None:
    """Compiles one or two of the starting points, and corrects the estimates by them."""
    if self.trials.reason or not self.limits.top:
      return
    for start in starts[: self.limits.candidates]:
      if self._is_late(_STARTS * _ESTIMATING):
        break
      self.trials.outcome(start.candidate)
    if self.trials.estimated:
      self._compile_all(self._selection.anchors(min(_ANCHORS, self.limits.top)))
      self._check()

  def _check(self) -> None:
    """Compares all compiled and partitioned layouts with their estimates, and corrects all estimates by the result."""
    if self.trials.reason:
      return
    compiled = {key: one for key, one in self.compiled.items() if isinstance(key, Candidate)}
    known = self.trials.partitioned | compiled
    pairs = [(self.trials.uncorrected(key), one) for key, one in known.items()]
    check = check_estimates([(estimate, one) for estimate, one in pairs if estimate is not one])
    self.trials.correct_by(check)

  def _selected(self) -> list[Candidate]:
    """The candidates to compile."""
    selection = self._selection
    best = [*selection.ranked(SLACK), *selection.ranked(0.0)[:1], *selection.best_presets()]
    return list(dict.fromkeys(best))

  def _compile(self) -> None:
    self.is_selected = True
    if self.trials.reason:
      self.compiled |= self.trials.estimated
      return
    if not self.limits.top:
      return
    for _ in range(_ROUNDS):
      new = [one for one in self._selected() if one not in self.compiled]
      if not new or (self.compiled and self._is_late()):
        break
      self._compile_all(new)
      self.trials.replace_by(
        {key: one for key, one in self.compiled.items() if isinstance(key, Candidate)}
      )
      self._check()
    selection = self._selection
    for slack in (0.0, -SLACK, None):
      if any(selection.fits(one) for one in self.compiled.values()):
        return
      selected = selection.smallest() if slack is None else selection.ranked(slack)
      self._compile_all([one for one in selected if one not in self.compiled])

  def _compile_pipelines(self) -> None:
    """Compiles the best pipelines, as many of each schedule."""
    each = -(-self.limits.top // max(1, len(self.pipelines)))
    for number, one in enumerate(self.pipelines if each else ()):
      selected = [PipelineCandidate(number, candidate) for candidate in one.selected(each)]
      self._compile_all(selected, one.trials)

  def _compile_all(
    self,
    selected: Sequence[Candidate] | Sequence[PipelineCandidate],
    trials: Trials | None = None,
  ) -> None:
    """Compiles in groups, so that an interruption or the time limit loses one group at most."""
    trials = trials or self.trials
    jobs = trials.task.jobs
    with progress(self.show, len(selected), 'compiling') as update:
      for number, group in enumerate(chunks(selected, jobs)):
        if number and self._is_late():
          self.notes.append('The time limit ended the search before all selected layouts were compiled.')
          return
        plain = [one.candidate if isinstance(one, PipelineCandidate) else one for one in group]
        self.compiled |= dict(zip(group, trials.compile(plain), strict=True))
        update(min(len(selected), (number + 1) * jobs), '')

  # -- the result

  @property
  def _selection(self) -> Selection:
    return Selection(self.space, self.trials, self.presets, self.limits.top)

  def _result(self) -> SearchResult:
    selection = self._selection
    outcomes = selection.sorted(self.compiled if self.is_selected else {})
    if not outcomes or not selection.fits(outcomes[0][1]):
      known = {} if self.compiled and not self.interrupted else {**self._shown(), **self.compiled}
      outcomes = selection.sorted(known)
    if not outcomes or not selection.fits(outcomes[0][1]):
      raise InfeasibleError(selection.infeasible_text(self.compiled))
    best, _ = outcomes[0]
    searched = self.pipelines[best.pipeline] if isinstance(best, PipelineCandidate) else None
    pipeline, space = (searched.trials, searched.space) if searched else (None, self.space)
    candidate = best.candidate if isinstance(best, PipelineCandidate) else best
    return SearchResult(
      target=self.space.target,
      memory=self.trials.memory,
      outcomes=[one for _, one in outcomes],
      estimates=self.estimates,
      choices=dict(candidate.choices),
      presets={one.name: self.presets[key] for key, one in outcomes if key in self.presets},
      effects=rule_effects(candidate, pipeline or self.trials),
      notes=[*self.notes, *self._batch_notes(candidate, space.target.devices)],
      check=self.trials.checked_by,
      schedule=pipeline.schedule if pipeline else None,
    )

  def _batch_notes(self, candidate: Candidate, devices: int) -> list[str]:
    """A note if the devices, those of one rank in a pipeline, cannot share the batch equally."""
    facts = self.trials.variant(candidate.choices).facts
    shares = [n for n in range(1, devices + 1) if devices % n == 0]
    most = max(n for n in shares if n == 1 or any(facts.divides(name, n) for name in facts.batch))
    sizes = sorted({size for name in facts.batch for size in facts.names[name] if size > 1})
    if most == devices or not sizes:
      return []
    names = ' or '.join(map(repr, sorted(facts.batch)))
    return [
      f'{devices} devices cannot share the batch equally, {most} at most: dimensions named {names} have '
      f'{", ".join(map(str, sizes))} elements.'
    ]

  def _shown(self) -> dict[Candidate | PipelineCandidate, Outcome]:
    """What was partitioned, or else the best estimates, if nothing was compiled."""
    partitioned = {key: self.trials.outcome(key) for key in self.trials.partitioned}
    is_enough = any(map(self._selection.fits, partitioned.values()))
    shown: dict[Candidate | PipelineCandidate, Outcome] = {
      **(partitioned if is_enough else self._selection.shown())
    }
    for number, one in enumerate(self.pipelines):
      shown |= {PipelineCandidate(number, key): outcome for key, outcome in one.shown().items()}
    return shown


def estimate(
  space: Space,
  trials: Trials,
  starts: Sequence[Candidate],
  limit: int,
  seed: int,
  late: Callable[[], bool],
  show: bool,
  title: str = 'estimating',
) -> None:
  """Searches a space by descent; the outcomes are in `trials`.

  Args:
    space: the candidates.
    trials: estimates candidates.
    starts: candidates to start from; the bare meshes if there are none.
    limit: number of candidates to try.
    seed: seed of the random number generator.
    late: whether the time limit is reached.
    show: whether to show progress.
    title: title of the progress bar.
  """
  estimated, ahead = trials.estimated, list[Candidate]()
  with progress(show, limit, title) as update:

    def announce(candidates: list[Candidate]) -> None:
      ahead[:] = candidates

    def cost(candidate: Candidate) -> float:
      if candidate not in estimated:
        if len(estimated) >= limit or (late() and estimated):
          raise BudgetSpent
        trials.prepare([candidate, *ahead], limit - len(estimated))
        trials.outcome(candidate)
        update(len(estimated), _text_if_best(candidate, trials) if show else '')
      return trials.cost(candidate)

    descend(starts or bare_meshes(space), cost, space.coordinates, seed, announce)


def bare_meshes(space: Space) -> list[Candidate]:
  """The legal candidates without rules, except for pinned names."""
  legal = (space.legal(Candidate(axes)) for axes in space.meshes())
  return [one for one in legal if one is not None]


def _text_if_best(candidate: Candidate, trials: Trials) -> str:
  """Time, memory and name of a candidate that is the best so far; else ''."""
  if min(trials.estimated, key=trials.cost) != candidate:
    return ''
  outcome = trials.estimated[candidate]
  peak = size_text(outcome.memory.peak) if outcome.memory else '?'
  return f'{time_text(expected_seconds(outcome))}, {peak}: {outcome.name}'
