"""Stopped writers: a process stops during a save, one elsewhere takes over, and the first one comes back from the dead.

The two are in PID namespaces of their own (which needs root), as processes of two machines are.

The first one must not report success for data that is not there, nor disturb what the other one has saved. One that stops
within the lock of a disk, which it holds for a put, keeps the others out until it comes back: they report that.
"""

from __future__ import annotations

import functools
import json
import random
import time
from collections.abc import Iterator

from faults.examinations import expect, expect_agreement, expect_room, save_next
from faults.places import Place
from faults.tally import Harm, Outcome, Tally
from faults.workers import Worker, can_be_elsewhere, workers

STORES = ('disk', 'gcs', 's3')
RUNS = {'disk': 5, 'gcs': 3, 's3': 3}
PATIENCE = 40.0  # seconds within which the other one has to get the path
LOCKED = 'has been locked by another process'


def run(place: Place, runs: int) -> Iterator[Outcome]:
  if not can_be_elsewhere():
    print('stopped writers: left out, as PID namespaces are not permitted')
    return
  tally, drawn = Tally('stopped writer', place.store), random.Random(0)
  with workers(2, elsewhere=True) as (first, second):
    for worker in (first, second):
      worker.done('make', numbers=[1, 2, 3], size=place.size)
    seconds = _unharmed(place, first)
    for _ in range(runs):
      after = drawn.uniform(0, 1.0) * seconds
      tally.trial(f'after {after:.2f} s', functools.partial(_trial, place, first, second, after))
  yield tally.outcome()


def _unharmed(place: Place, worker: Worker) -> float:
  """The seconds that a save takes at least."""
  path = place.new('stopped')
  worker.done('save', path=path, number=1, size=place.size)
  options = {'path': path, 'size': place.size, 'overwrite': True}
  seconds = min(worker.call('save', number=number, **options)['seconds'] for number in (2, 1, 2))
  place.clear(path)
  return seconds


def _trial(place: Place, first: Worker, second: Worker, after: float) -> str:
  path, size = place.new('stopped'), place.size
  second.done('save', path=path, number=1, size=size)
  first.ask('save', path=path, number=2, size=size, overwrite=True)
  time.sleep(after)
  first.stop()
  try:
    had_begun = json.loads(place.read(path, 'HEAD'))['lease'] is not None
    is_free = _taken_over(second, path, size)
    expect(path, size, {3} if is_free else {1, 2})
  finally:
    first.resume()
  answer = first.answer()
  if not is_free:
    place.clear(path)
    return 'stopped within the lock: the other one reports it'
  if not answer['ok'] and not answer['clear']:
    raise Harm(f'the first one: {answer["error"]}: {answer["text"]}')
  time.sleep(0.5)
  if had_begun and answer['ok']:
    raise Harm('the first one reports success, although the second one has taken over')
  expect(path, size, {2, 3} if answer['ok'] else {3})
  if (reading := expect_agreement(path, size)).found:
    raise Harm(f'verify: {reading.found}')
  save_next(path, 4, size)
  expect_room(place, path, size, 1)
  place.clear(path)
  return 'one after the other' if answer['ok'] else f'the first one: {answer["error"]}'


def _taken_over(worker: Worker, path: str, size: object) -> bool:
  """Saves state 3 as soon as the path is free; returns False if the stopped process holds the lock of the disk."""
  begin = time.monotonic()
  while time.monotonic() - begin < PATIENCE:
    answer = worker.call('save', path=path, number=3, size=size, overwrite=True)
    if answer['ok']:
      return True
    if LOCKED in answer.get('text', ''):
      return False
    if answer['error'] != 'CheckpointBusyError':
      raise Harm(f'the second one: {answer["error"]}: {answer["text"]}')
    time.sleep(1)
  raise Harm(f'the path is still busy after {PATIENCE:.0f} s')
