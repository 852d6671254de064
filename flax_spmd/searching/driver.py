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
from flax_spmd.searching.choosing import SLACK, Choice
from flax_spmd.searching.descent import Enough, descend
from flax_spmd.searching.found import Found
from flax_spmd.searching.progress import progress
from flax_spmd.searching.seeds import seeds
from flax_spmd.searching.space import Space
from flax_spmd.searching.trials import (
  Task,
  Trials,
  as_choices,
  chunks,
  program_of,
  seconds,
)
from flax_spmd.searching.wishes import wishes_of

_SEEDS = 0.4  # of the candidates, those that it begins with at most
_FEW = 24  # candidates, where each has to be compiled
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
    The best layout, what its rules buy, the runners-up. It is the best of all that was compiled. Of each
    preset the best mesh was, unless it needs too much memory, or twice the time, by an estimate without
    doubts: so the layout is no worse than the presets.

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
    self.interrupted = False

  def run(self) -> Found:
    self._note()
    try:
      self._estimate()
      self._compile()
    except KeyboardInterrupt:
      if not self.trials.estimated:
        raise
      self.interrupted = True
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
    choice = self._choice
    wanted = [*choice.ranked(SLACK), *choice.ranked(0.0)[:1], *choice.best_presets()]
    for slack in (0.0, -SLACK, None):
      self._compile_all([one for one in dict.fromkeys(wanted) if one not in self.compiled])
      if any(choice.fits(one) for one in self.compiled.values()):
        return
      wanted = choice.smallest() if slack is None else choice.ranked(slack)
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

  # -- the answer

  @property
  def _choice(self) -> Choice:
    return Choice(self.space, self.trials, self.presets, self.limits.top)

  def _found(self) -> Found:
    choice = self._choice
    outcomes = choice.sorted(self.compiled)
    if not outcomes or not choice.fits(outcomes[0][1]):
      shown = {} if self.compiled and not self.interrupted else choice.shown()
      outcomes = choice.sorted(shown)
    if not outcomes or not choice.fits(outcomes[0][1]):
      raise InfeasibleError(choice.nearest(self.compiled))
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
