"""Lost servers: an object store refuses, fails, is slow, breaks connections or loses its answers during a save or a restore.

See `served_saves` for what has to hold. A server that has done what it was asked, and whose answer is lost, must not make a
save report what is not so.
"""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable, Iterator

from faults.places import Place
from faults.served_saves import MODES, prepared_root, restore_trial, save_trial, saved_in
from faults.stores import ServedPlace, Server
from faults.tally import Outcome, Tally
from faults.workers import Worker, workers
from tests.object_stores import Answer, Request

STORES = ('gcs', 's3')
RUNS = {'gcs': 3, 's3': 3}
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
          functools.partial(save_trial, place, mode, worker, fault),
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
        trial = functools.partial(restore_trial, place, root, worker, fault)
        tally.trial(f'from request {first} of {requests} on', trial)
      yield tally.outcome()
  place.clear(root)


def _calls(place: ServedPlace, mode: str, worker: Worker, where: str) -> int:
  """The number of requests of a save."""
  root = prepared_root(place, mode, worker)
  with Fault(place.server, where, _slow, 1, 0) as fault:
    answer = saved_in(place, worker, mode, root, 2)
  worker.call('close')
  place.clear(root)
  if not answer['ok']:
    raise RuntimeError(answer['text'])
  return max(fault.seen, 1)
