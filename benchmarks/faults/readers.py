"""Readers: processes restore from a path while another one overwrites it without a pause; nobody disturbs them."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator

from faults.examinations import expect_room, number_at, save_next
from faults.known_states import Size, layout, state_of, target_of
from faults.places import Place
from faults.tally import Harm, Outcome, Tally
from faults.workers import workers
from flax_spmd import checkpoint

STORES = ('disk', 'gcs', 's3')
RUNS = {'disk': 120, 'gcs': 20, 's3': 20}
READS = ('restore, verified', 'restore, not verified', 'restore by the record', 'verify', 'show')
LIMIT = 300.0  # seconds


def run(place: Place, runs: int) -> Iterator[Outcome]:
  size = Size(8, 256, 4) if place.store == 'disk' else place.size
  path, tally = place.new('read'), Tally('reader during overwrites', place.store)
  checkpoint.save(path, state_of(1, size), layout=layout())
  seen: list[int] = []
  with workers(1) as (writer,):
    writer.done('make', numbers=[1, 2], size=size)
    writer.done('save', path=path, number=1, size=size, overwrite=True)
    end = time.monotonic() + LIMIT
    writer.ask('loop_until_told', path=path, numbers=[2, 1], size=size)
    for read, _ in zip(itertools.cycle(READS), range(runs), strict=False):
      tally.trial(read, functools.partial(_read, read, path, size, seen))
      if time.monotonic() > end:
        break
    tally.trial('the writer', lambda: _writer_went_on(writer.call('told')))
  tally.trial('afterwards', lambda: _afterwards(place, path, size))
  yield tally.outcome()


def _read(read: str, path: str, size: Size, seen: list[int]) -> str:
  if read == 'verify':
    if findings := checkpoint.verify(path):
      raise Harm(f'verify: {findings}')
  elif read == 'show':
    if len(checkpoint.show(path).record.leaves) != size.leaves + size.small + 1:
      raise Harm('show lists other leaves')
  else:
    target = None if read == 'restore by the record' else target_of(size)
    seen.append(number_at(path, size, target, verify=read != 'restore, not verified'))
  return read


def _writer_went_on(answer: dict) -> str:
  if not answer['ok']:
    raise Harm(f'{answer["error"]}: {answer["text"]}')
  return 'the writer went on'


def _afterwards(place: Place, path: str, size: Size) -> str:
  save_next(path, 3, size)
  expect_room(place, path, size, 1)
  return 'litter removed'
