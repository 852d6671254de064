"""Lost servers: an object store refuses, fails, is slow, breaks connections or loses its answers during a save or a restore.

A save returns with a CheckpointError or has worked; the old checkpoint stays whole; as soon as the server is back, the next
save works. A server that has done what it was asked, and whose answer is lost, must not make a save report what is not so.
A manager restores the newest step, or reports an error: a server that is away is no reason for an older one.
"""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from faults.examinations import expect, expect_agreement, expect_room
from faults.places import Place
from faults.stores import ServedPlace, Server
from faults.tally import Harm, Outcome, Tally
from faults.workers import Worker, workers
from flax_spmd import checkpoint
from tests.object_stores import Answer, Request

STORES = ('gcs', 's3')
RUNS = {'gcs': 3, 's3': 3}
MODES = ('new path', 'overwrite', 'manager')
LIMIT = 170.0  # seconds for a save that fails; both clients try again for a while


Harassment = Callable[[Server], Answer | None]


class Fault:
  """Harasses requests from the `first` one on, until `last` ones have been harassed.

  Args:
    server: the server.
    where: attribute of the server: before a request is done, or after it.
    harass: makes the answer.
    first: number of the first request to harass.
    count: number of requests to harass.
  """

  def __init__(self, server: Server, where: str, harass: Harassment, first: int, count: int):
    self._server, self._where, self._harass = server, where, harass
    self._first, self._last = first, first + count
    self._lock = threading.Lock()
    self.seen = self.harassed = 0

  def __call__(self, request: Request) -> Answer | None:
    if self._where == 'lose' and request.method == 'GET':
      return None
    with self._lock:
      self.seen += 1
      due = self._first <= self.seen < self._last
      self.harassed += due
    return self._harass(self._server) if due else None

  def __enter__(self) -> Fault:
    setattr(self._server, self._where, self)
    return self

  def __exit__(self, *exc: object) -> None:
    setattr(self._server, self._where, lambda request: None)


def _slow(server: Server) -> None:
  del server
  time.sleep(1.0)


def _broken(server: Server) -> Answer:
  raise ConnectionResetError(f'{server.url} dies')


def _refused(status: int, code: str) -> Harassment:
  return lambda server: server.refusal(status, code)


ALL = 1 << 30
FAULTS: dict[str, tuple[str, Harassment, int]] = {
  '403': ('intercept', _refused(403, 'AccessDenied'), ALL),
  '500, three times': ('intercept', _refused(500, 'InternalError'), 3),
  '503': ('intercept', _refused(503, 'ServiceUnavailable'), ALL),
  'slow': ('intercept', _slow, 20),
  'broken connections': ('intercept', _broken, ALL),
  'lost answers': ('lose', _refused(503, 'ServiceUnavailable'), 1),
}


def run(place: Place, runs: int) -> Iterator[Outcome]:
  assert isinstance(place, ServedPlace)
  with workers(1) as (worker,):
    worker.done('make', numbers=[1, 2, 3], size=place.size)
    calls = {
      (where, mode): _calls(place, mode, worker, where)
      for where in ('intercept', 'lose')
      for mode in MODES
    }
    for name, (where, harass, count) in FAULTS.items():
      tally, drawn = Tally(f'server: {name}', place.store), random.Random(name)
      for run_ in range(runs):
        mode = MODES[run_ % len(MODES)]
        first = drawn.randint(1, calls[where, mode])
        fault = Fault(place.server, where, harass, first, count)
        tally.trial(
          f'{mode}, from request {first} of {calls[where, mode]} on',
          functools.partial(_trial, place, mode, worker, fault),
        )
      yield tally.outcome()
    yield from _restores(place, worker, runs)


def _restores(place: ServedPlace, worker: Worker, runs: int) -> Iterator[Outcome]:
  root = place.new('server')
  worker.done('open', root=root, keep=2)
  for number in (1, 2):
    worker.done('step', number=number, size=place.size)
  worker.done('close')
  with Fault(place.server, 'intercept', _slow, 1, 0) as fault:
    worker.done('newest', root=root, size=place.size)
  requests = fault.seen
  for name, (where, harass, count) in FAULTS.items():
    if where == 'intercept':
      tally, drawn = Tally(f'server, restore: {name}', place.store), random.Random(name)
      for _ in range(runs):
        first = drawn.randint(1, requests)
        fault = Fault(place.server, where, harass, first, count)
        trial = functools.partial(_restore_trial, place, root, worker, fault)
        tally.trial(f'from request {first} of {requests} on', trial)
      yield tally.outcome()
  place.clear(root)


def _restore_trial(place: ServedPlace, root: str, worker: Worker, fault: Fault) -> str:
  with fault:
    answer = worker.call('newest', LIMIT, root=root, size=place.size)
  if not answer['ok'] and not answer['clear']:
    raise Harm(f'{answer["error"]}: {answer["text"]}')
  if answer['ok'] and answer['result'] != 2:
    raise Harm(f'step {answer["result"]} is restored, and step 2 is whole')
  expect(f'{root}/2', place.size, {2})
  return 'restored' if answer['ok'] else answer['error']


def _prepared(place: Place, mode: str, worker: Worker) -> str:
  root = place.new('server')
  if mode == 'manager':
    worker.done('open', root=root, keep=1)
    worker.done('step', number=1, size=place.size)
  else:
    worker.done('save', path=f'{root}/1', number=1, size=place.size)
  return root


def _save(place: Place, worker: Worker, mode: str, root: str, number: int) -> dict[str, Any]:
  if mode == 'manager':
    return worker.call('step', LIMIT, number=number, size=place.size)
  path, again = f'{root}/1' if mode == 'overwrite' else f'{root}/2', mode == 'overwrite' or number == 3
  return worker.call('save', LIMIT, path=path, number=number, size=place.size, overwrite=again)


def _calls(place: ServedPlace, mode: str, worker: Worker, where: str) -> int:
  """The number of requests of a save."""
  root = _prepared(place, mode, worker)
  with Fault(place.server, where, _slow, 1, 0) as fault:
    answer = _save(place, worker, mode, root, 2)
  worker.call('close')
  place.clear(root)
  if not answer['ok']:
    raise RuntimeError(answer['text'])
  return max(fault.seen, 1)


def _trial(place: ServedPlace, mode: str, worker: Worker, fault: Fault) -> str:
  root, size = _prepared(place, mode, worker), place.size
  try:
    with fault:
      answer = _save(place, worker, mode, root, 2)
    if not answer['ok'] and not answer['clear']:
      raise Harm(f'{answer["error"]}: {answer["text"]}')
    _examine(place, mode, root, answer['ok'])
    again = _save(place, worker, mode, root, 3)
    if not again['ok']:
      raise Harm(f'the next save fails: {again["error"]}: {again["text"]}')
    name = {'overwrite': '1', 'manager': '3'}.get(mode, '2')
    expect(f'{root}/{name}', size, {3})
    expect_agreement(f'{root}/{name}', size)
    expect_room(place, root, size, 2 if mode == 'new path' else 1)
  finally:
    worker.call('close')
  place.clear(root)
  return 'saved' if answer['ok'] else answer['error']


def _examine(place: Place, mode: str, root: str, saved: bool) -> None:
  """The old state is whole, the new one whole or absent."""
  size = place.size
  if mode == 'overwrite':
    expect(f'{root}/1', size, {2} if saved else {1, 2})
    return
  new = expect(f'{root}/2', size, {2} if saved else {None, 2})
  if mode != 'manager' or new is None:
    expect(f'{root}/1', size, {1})
  for summary in checkpoint.ls(root):
    if summary.error:
      raise Harm(f'ls: {summary.title}')
