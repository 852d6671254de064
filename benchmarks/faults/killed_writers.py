"""Killed writers: a process dies at a random moment of a save; the next save works at once, and removes what it left."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Iterator
from typing import Any

from faults.examinations import expect, expect_agreement, expect_room, save_next
from faults.known_states import layout, state_of, target_of
from faults.places import Place
from faults.tally import Harm, Outcome, Tally
from faults.workers import Victims, Worker
from flax_spmd import checkpoint

STORES = ('disk', 'gcs', 's3')
RUNS = {'disk': 30, 'gcs': 8, 's3': 8}
MODES = ('new path', 'async', 'overwrite', 'packed', 'manager')
SAVES = {
  'new path': ('save', {}),
  'async': ('save_async', {}),
  'overwrite': ('save', {'overwrite': True}),
  'packed': ('save', {'overwrite': True, 'pack': 1 << 16}),
}
LIMIT = 10.0  # seconds for a save of 25 MB after the kill of a process of this machine


def run(place: Place, runs: int) -> Iterator[Outcome]:
  for mode in MODES:
    tally, drawn = Tally(f'killed writer: {mode}', place.store), random.Random(mode)
    with Victims() as victims:
      seconds = _unharmed(place, mode, victims.take())
      for _ in range(runs):
        after = drawn.uniform(0, 1.15) * seconds
        tally.trial(
          f'after {after:.2f} s', functools.partial(_trial, place, mode, victims.take(), after)
        )
    yield tally.outcome()


def _prepared(place: Place, mode: str, worker: Worker) -> str:
  """A root with state 1, in which the worker is ready to save state 2."""
  root, size = place.new(f'killed {mode}'), place.size
  worker.done('make', numbers=[1, 2], size=size)
  if mode == 'manager':
    worker.done('open', root=root, keep=1)
    worker.done('step', number=1, size=size)
  else:
    worker.done('save', path=f'{root}/1', number=1, size=size)
  return root


def _begin(mode: str, root: str, worker: Worker, size: Any) -> None:
  if mode == 'manager':
    worker.ask('step', number=2, size=size)
    return
  do, options = SAVES[mode]
  path = f'{root}/1' if options else f'{root}/2'
  worker.ask(do, path=path, number=2, size=size, **options)


def _unharmed(place: Place, mode: str, worker: Worker) -> float:
  """The seconds that a save takes."""
  root = _prepared(place, mode, worker)
  _begin(mode, root, worker, place.size)
  seconds = worker.answer()['seconds']
  worker.kill()
  place.clear(root)
  return seconds


def _trial(place: Place, mode: str, worker: Worker, after: float) -> str:
  root = _prepared(place, mode, worker)
  _begin(mode, root, worker, place.size)
  time.sleep(after)
  saved = any(answer['ok'] for answer in worker.kill())
  {'manager': _examine_run}.get(mode, _examine_paths)(place, mode, root, saved)
  place.clear(root)
  return 'saved before the kill' if saved else 'killed'


def _examine_paths(place: Place, mode: str, root: str, saved: bool) -> None:
  size, new = place.size, '1' if SAVES[mode][1] else '2'
  if new == '2':
    expect(f'{root}/1', size, {1})
  old = {'1': 1, '2': None}[new]
  if expect(f'{root}/{new}', size, {2} if saved else {old, 2}) is not None:
    _expect_whole(f'{root}/{new}', size)
  for summary in checkpoint.ls(root):
    if summary.error:
      raise Harm(f'ls: {summary.title}')
  save_next(f'{root}/{new}', 3, size, LIMIT)
  expect_room(place, root, size, 2 if new == '2' else 1)


def _examine_run(place: Place, mode: str, root: str, saved: bool) -> None:
  del mode
  size, begin = place.size, time.monotonic()
  with checkpoint.Manager(root, layout(), every=1, keep=1) as manager:
    step, restored = manager.restore(target_of(size))
    if step not in (1, 2) or (saved and step != 2):
      raise Harm(f'resumed from step {step}')
    expect(f'{root}/{step}', size, {step})
    del restored
    manager.save(3, state_of(3, size))
    manager.wait()
    if manager.steps != [3]:
      raise Harm(f'steps after the next save: {manager.steps}')
  if time.monotonic() - begin > LIMIT + 5:
    raise Harm(f'opening, restoring and saving take {time.monotonic() - begin:.1f} s')
  expect(f'{root}/3', size, {3})
  expect_room(place, root, size, 1)


def _expect_whole(path: str, size: Any) -> None:
  reading = expect_agreement(path, size)
  if reading.found:
    raise Harm(f'verify: {reading.found}')
