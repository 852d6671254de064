"""Searching: which rule table and mesh are best for a model, a machine and a budget of memory.

    found = search(train_step, create_state, batch, target='h100:64', memory='60GiB')
    found.to_toml('layout.toml')

The step is lowered once and estimated under many layouts (`flax_spmd.estimate`), from the presets on, one
change at a time (`descent`). The best of them, those that are doubtful among the good ones, and the best of
each preset are then compiled by the target's own compiler, and what that says decides.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from flax_spmd.errors import InfeasibleError, SearchError
from flax_spmd.explore.compiling import check_compiler
from flax_spmd.explore.hardware import parse
from flax_spmd.explore.outcome import Outcome, time_text
from flax_spmd.report import size_text
from flax_spmd.searching.buys import buys_of
from flax_spmd.searching.candidate import Candidate
from flax_spmd.searching.descent import Enough, descend, simplified
from flax_spmd.searching.found import Found
from flax_spmd.searching.progress import progress
from flax_spmd.searching.seeds import seeds
from flax_spmd.searching.space import Space
from flax_spmd.searching.trials import (
  Task,
  Trials,
  as_choices,
  chunks,
  fits,
  program_of,
  seconds,
  worth,
)
from flax_spmd.searching.wishes import wishes_of

_SEEDS = 0.4  # of the candidates, those that it begins with at most
_FEW = 24  # candidates, where each has to be compiled
_SLACK = 0.1  # of the budget: what an estimate says of memory may be so far off
_PREFERRED = 0.9  # how much faster a doubtful candidate counts when it is decided what to compile
_SHOWN = 3  # estimates, where nothing is compiled
_ESTIMATING = 0.6  # of the time


def search(
  step: Callable[..., Any],
  create: Callable[..., Any],
  batch: Any,
  target: str,
  *,
  memory: int | str | None = None,
  args: Sequence[Any] = (),
  places: Any = None,
  donate: bool = True,
  choices: Mapping[str, Sequence[Any]] | None = None,
  mesh: Mapping[str, int] | None = None,
  pin: Mapping[str, Any] | None = None,
  forbid: Mapping[str, Any] | Sequence[str] = (),
  batch_only: str | Sequence[str] = (),
  tensor: int | None = None,
  candidates: int = 1000,
  time_limit: float | None = None,
  top: int = 8,
  seed: int = 0,
  fresh: bool = False,
  hardware: str | os.PathLike[str] | None = None,
  jobs: int | None = None,
  show: bool = False,
) -> Found:
  """Searches for the layout under which a training step is fastest and fits.

  Nothing is allocated, nothing runs. Estimates are kept beside what was compiled (`FLAX_SPMD_CACHE`), so
  that a search that was killed goes on where it was, and ends with the same answer. Ctrl-C ends it with the
  best so far.

  Args:
    step: `step(state, batch)`; anything that can be jitted.
    create: makes a state, of `args`; is traced only.
    batch: the step's second argument in full size: arrays, or `jax.ShapeDtypeStruct`s.
    target: `'h100:64'`, `'v5e:16x16'`, `'cpu:8'`; see `flax-spmd targets`.
    memory: what a device may need, in bytes or as `'60GiB'`; default: what a program may use there.
    args: arguments of `create`.
    places: where the batch goes, as of `Layout.shard`; default: each first dimension is named `batch`.
    donate: whether the state is donated.
    choices: arguments of the step that are tried too, such as `{'remat': ('none', 'full')}`; `create` gets
      those that it has parameters for.
    mesh: size per mesh axis, if that is decided; one may be -1.
    pin: the mesh axes that names have to lie over; None is nowhere. An axis that is named here is part of
      every mesh.
    forbid: names that are never split; or, per name, the axes that it must not lie over.
    batch_only: mesh axes that nothing but the batch lies over.
    tensor: over how many devices products of matrices may be cut; default: those of a node.
    candidates: how many are estimated; a few more come from making the best ones simpler.
    time_limit: seconds, for all of it; then the answer depends on how fast this machine is.
    top: how many of the best are compiled, the best of each preset aside; 0 is nothing.
    seed: of what is random.
    fresh: whether what was estimated before is thrown away.
    hardware: a TOML file with chips of one's own.
    jobs: how many compilers run at once; default: one for two cores.
    show: whether progress is shown.

  Returns:
    The best layout, what its rules buy, the runners-up. Of all that was compiled it is the best, and the
    best layout of each preset that fits was compiled.

  Raises:
    SearchError: wishes that cannot be met; names all of them.
    InfeasibleError: no layout that was tried fits; names the nearest, and by how much it misses.
    TargetDeviceError: an unknown target, or one that cannot be compiled for here.
    Exception: whatever the step raises when it is traced.

  Example:
    >>> def create():
    ...   return {'w': LogicallyPartitioned(jnp.ones((64, 256)), ('embed', 'mlp'))}
    >>> def step(state, x):
    ...   return jax.tree.map(lambda w: w - 0.1, state), jnp.sum((x @ state['w'].unbox()) ** 2)
    >>> batch = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    >>> found = search(step, create, batch, 'cpu:8', candidates=20, top=1, pin={'batch': 'data'})
    >>> found.layout.rules.pairs[0]
    ('batch', 'data')
  """
  aim = parse(target, hardware)
  tried = {name: tuple(values) for name, values in (choices or {}).items()}
  _check(aim, top, candidates, tried)
  task = Task(step, create, batch, aim, args, places, donate, hardware, jobs, fresh)
  first = program_of(task, as_choices(tried))
  wishes = wishes_of(aim, first.facts, memory, mesh, pin, forbid, batch_only, tensor)
  space = Space(first.facts, wishes, aim, tried)
  trials = Trials(task, wishes.memory, first, as_choices(tried))
  limits = _Limits(min(candidates, _FEW) if first.reason else candidates, time_limit, top, seed)
  return _Search(space, trials, limits, show).run()


def _check(aim: Any, top: int, candidates: int, choices: Mapping[str, tuple[Any, ...]]) -> None:
  empty = [name for name, values in choices.items() if not values]
  if empty or candidates < 1 or top < 0:
    raise SearchError(
      f'There is nothing to search: candidates={candidates}, top={top}'
      + ''.join(f', choices[{name!r}] is empty' for name in empty)
      + '.\nFix: try at least one candidate, and give every choice a value.'
    )
  if top:
    check_compiler(aim)


class _Limits(NamedTuple):
  candidates: int
  time: float | None
  top: int
  seed: int


class _Search:
  """One search on its way."""

  def __init__(self, space: Space, trials: Trials, limits: _Limits, show: bool):
    self.space, self.trials, self.limits, self.show = space, trials, limits, show
    self.begin = time.monotonic()
    self.presets: dict[Candidate, str] = {}
    self.compiled: dict[Candidate, Outcome] = {}
    self.notes: list[str] = []

  def run(self) -> Found:
    self._note()
    try:
      self._estimate()
      self._compile()
    except KeyboardInterrupt:
      if not self.trials.estimated:
        raise
      self.notes.append(
        f'Interrupted: the best of {len(self.trials.estimated)} candidates, of which '
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
    begun = seeds(self.space, max(1, int(_SEEDS * self.limits.candidates)))
    self.presets = {one.candidate: one.preset for one in begun if one.preset}
    starts = [one.candidate for one in begun] or self._bare()
    with progress(self.show, self.limits.candidates) as say:
      descend(
        starts,
        lambda candidate: self._worth(candidate, say),
        self.space.coordinates,
        self.limits.seed,
      )
    if not self.trials.estimated:
      raise SearchError(
        f'There is no layout that is as wished on {self.space.target.text}.\n'
        'Fix: take back a pin, a forbidden name, or a fixed mesh.'
      )

  def _bare(self) -> list[Candidate]:
    """Meshes with nothing but the pinned names on them."""
    bare = (self.space.legal(Candidate(axes)) for axes in self.space.meshes())
    return [one for one in bare if one is not None]

  def _worth(self, candidate: Candidate, say: Callable[[int, str], None]) -> float:
    tried = self.trials.estimated
    if candidate not in tried:
      late = self.limits.time is not None and self._spent() > _ESTIMATING * self.limits.time
      if len(tried) >= self.limits.candidates or (late and tried):
        raise Enough
      self.trials.outcome(candidate)
      say(len(tried), self._best_so_far(candidate))
    return self.trials.worth(candidate)

  def _best_so_far(self, candidate: Candidate) -> str:
    if not self.show:
      return ''
    best = min(self.trials.estimated, key=self.trials.worth)
    outcome = self.trials.estimated[best]
    peak = size_text(outcome.memory.peak) if outcome.memory else '?'
    return f'{time_text(seconds(outcome))}, {peak}: {outcome.name}' if best == candidate else ''

  def _spent(self) -> float:
    return time.monotonic() - self.begin

  # -- compiling

  def _compile(self) -> None:
    if self.trials.reason:
      self.compiled = dict(self.trials.estimated)
      return
    if not self.limits.top:
      return
    wanted = [*self._ranked(_SLACK), *self._ranked(0.0)[:1], *self._best_presets()]
    for slack in (0.0, -_SLACK, None):
      self._compile_all([one for one in dict.fromkeys(wanted) if one not in self.compiled])
      if any(self._fits(one) for one in self.compiled.values()):
        return
      wanted = self._smallest() if slack is None else self._ranked(slack)
    self._compile_all([one for one in wanted if one not in self.compiled])

  def _compile_all(self, wanted: Sequence[Candidate]) -> None:
    """Some at a time, so that what is there is kept when it is interrupted, or late."""
    at_once = self.trials.task.jobs or max(1, (os.cpu_count() or 2) // 2)
    with progress(self.show, len(wanted), 'compiling') as say:
      for number, group in enumerate(chunks(wanted, at_once)):
        if number and self.limits.time is not None and self._spent() > self.limits.time:
          self.notes.append('The time was up before everything was compiled that should have been.')
          return
        self.compiled |= dict(zip(group, self.trials.compiled(group), strict=True))
        say(min(len(wanted), (number + 1) * at_once), '')

  def _ranked(self, slack: float) -> list[Candidate]:
    """The best of what may fit, made simpler."""
    best = self._distinct(slack, _priority)[: self.limits.top]
    plain = (simplified(one, self.trials.worth, self.space.simpler) for one in best)
    return list(dict.fromkeys(plain))

  def _distinct(self, slack: float, order: Callable[[Outcome], float]) -> list[Candidate]:
    """What may fit, the best first; of candidates that come out alike, one."""
    alike: dict[Any, Candidate] = {}
    for candidate, one in self.trials.estimated.items():
      if one.counts and one.cost and fits(one, self.trials.memory, slack):
        alike.setdefault((one.memory, one.cost.low, one.cost.high), candidate)
    return sorted(alike.values(), key=lambda candidate: order(self.trials.estimated[candidate]))

  def _smallest(self) -> list[Candidate]:
    """The one that needs the least memory."""
    needs = {key: one.memory.peak for key, one in self.trials.estimated.items() if one.memory}
    return [min(needs, key=lambda key: needs[key])] if needs else []

  def _best_presets(self) -> list[Candidate]:
    """Of each preset the best mesh, if it may fit."""
    best: dict[str, Candidate] = {}
    for candidate, name in self.presets.items():
      one = self.trials.estimated.get(candidate)
      if one is None or one.cost is None or not fits(one, self.trials.memory, _SLACK):
        continue
      if name not in best or seconds(one) < seconds(self.trials.estimated[best[name]]):
        best[name] = candidate
    return list(best.values())

  def _fits(self, outcome: Outcome) -> bool:
    return outcome.error is None and fits(outcome, self.trials.memory)

  # -- the answer

  def _found(self) -> Found:
    outcomes = self._sorted(self.compiled)
    if not outcomes or not self._fits(outcomes[0][1]):
      outcomes = [] if self.compiled else self._sorted(self._shown())
    if not outcomes or not self._fits(outcomes[0][1]):
      raise InfeasibleError(self._nearest())
    candidate, _ = outcomes[0]
    return Found(
      self.space.target,
      self.trials.memory,
      [one for _, one in outcomes],
      list(self.trials.estimated.values()),
      dict(candidate.choices),
      {one.name: self.presets[key] for key, one in outcomes if key in self.presets},
      buys_of(candidate, self.trials),
      self.notes,
    )

  def _shown(self) -> dict[Candidate, Outcome]:
    """Where nothing was compiled: the best estimates, and the best of each preset."""
    best, *others = self._distinct(0.0, seconds)[: max(self.limits.top, _SHOWN)] or [None]
    plain = [] if best is None else [simplified(best, self.trials.worth, self.space.simpler)]
    return {one: self.trials.outcome(one) for one in [*plain, *others, *self._best_presets()]}

  def _sorted(self, outcomes: Mapping[Candidate, Outcome]) -> list[tuple[Candidate, Outcome]]:
    """Those that fit first, the fastest first."""
    rank = lambda item: (not self._fits(item[1]), worth(item[1], self.trials.memory))
    return sorted(outcomes.items(), key=rank)

  def _nearest(self) -> str:
    known = self.compiled if any(one.memory for one in self.compiled.values()) else self.trials.estimated
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
