"""Cut connections: they break between two bytes of a request or of an answer, during a save or a restore.

A proxy stands between the worker and the server, and counts bytes. The first cut comes at a random byte of all that pass in the
same operation without cuts; further ones follow. See `served_saves` for what has to hold.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Iterator
from unittest import mock

from faults.places import Place
from faults.served_saves import MODES, prepared_root, restore_trial, save_trial, saved_in
from faults.stores import ServedPlace
from faults.tally import Harm, Outcome, Tally
from faults.workers import Worker, workers
from tests.cutting_proxy import CuttingProxy, Direction, places_of

STORES = ('gcs', 's3')
RUNS = {'gcs': 12, 's3': 12}
KINDS: dict[str, tuple[Direction, int | None]] = {
  'answers cut once': ('answers', 1),
  'answers cut four times': ('answers', 4),
  'answers cut for good': ('answers', None),
  'requests cut once': ('requests', 1),
  'requests cut four times': ('requests', 4),
  'requests cut for good': ('requests', None),
}
_GAP = 300  # bytes from one cut to the next if they do not end: less than most requests and answers
_FOR_GOOD = 4  # runs that share one: clients try again for up to two minutes


class Cuts:
  """Cuts during a block, the first one at a random byte.

  Args:
    proxy: the proxy.
    direction: direction of the bytes.
    count: number of cuts; None: without end.
    total: bytes that pass in this direction without cuts.
    drawn: source of chance.
  """

  def __init__(
    self,
    proxy: CuttingProxy,
    direction: Direction,
    count: int | None,
    total: int,
    drawn: random.Random,
  ):
    self._proxy, self._direction = proxy, direction
    gap = _GAP if count is None else drawn.randint(1, total // 2)
    self._places = places_of(drawn.randint(1, total), count, gap)

  def __enter__(self) -> None:
    self._proxy.cut(self._direction, self._places)

  def __exit__(self, *exc: object) -> None:
    self._proxy.calm()


def run(place: Place, runs: int) -> Iterator[Outcome]:
  assert isinstance(place, ServedPlace)
  with CuttingProxy(place.server.url) as proxy:
    behind = {name: proxy.url for name, value in os.environ.items() if value == place.server.url}
    with mock.patch.dict(os.environ, behind), workers(1) as (worker,):
      worker.done('make', numbers=[1, 2, 3], size=place.size)
      yield from _saves(place, proxy, worker, runs)
      yield from _restores(place, proxy, worker, runs)


def _saves(place: Place, proxy: CuttingProxy, worker: Worker, runs: int) -> Iterator[Outcome]:
  totals = {mode: _bytes_of_save(place, proxy, mode, worker) for mode in MODES}
  for name, (direction, count) in KINDS.items():
    tally, drawn = Tally(f'connections, save: {name}', place.store), random.Random(name)
    for number in range(_runs(runs, count)):
      mode = MODES[number % len(MODES)]
      cuts = Cuts(proxy, direction, count, totals[mode][direction], drawn)
      tally.trial(f'{mode}, trial {number}', functools.partial(save_trial, place, mode, worker, cuts))
    yield tally.outcome()


def _restores(place: Place, proxy: CuttingProxy, worker: Worker, runs: int) -> Iterator[Outcome]:
  root = place.new('server')
  worker.done('open', root=root, keep=2)
  for number in (1, 2):
    worker.done('step', number=number, size=place.size)
  worker.done('close')
  proxy.calm()
  worker.done('newest', root=root, size=place.size)
  totals = dict(proxy.passed)
  for name, (direction, count) in KINDS.items():
    tally, drawn = Tally(f'connections, restore: {name}', place.store), random.Random(name)
    for number in range(_runs(runs, count)):
      cuts = Cuts(proxy, direction, count, totals[direction], drawn)
      tally.trial(f'trial {number}', functools.partial(restore_trial, place, root, worker, cuts))
    yield tally.outcome()
  place.clear(root)


def _runs(runs: int, count: int | None) -> int:
  return runs if count else max(1, runs // _FOR_GOOD)


def _bytes_of_save(place: Place, proxy: CuttingProxy, mode: str, worker: Worker) -> dict[Direction, int]:
  """The bytes that a save without cuts sends and receives."""
  root = prepared_root(place, mode, worker)
  proxy.calm()
  answer = saved_in(place, worker, mode, root, 2)
  totals = dict(proxy.passed)
  worker.call('close')
  place.clear(root)
  if not answer['ok']:
    raise Harm(answer['text'])
  return totals
