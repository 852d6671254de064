"""Two writers: processes that save to one path, or have managers of one root, at the same time.

Each of them reports success or is refused, and what is there is a state that was reported as saved.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Iterator
from typing import Any

from faults.examinations import expect, expect_room, save_next
from faults.known_states import Size, layout, state_of
from faults.places import Place
from faults.tally import Harm, Outcome, Tally
from faults.workers import Worker, workers
from flax_spmd import checkpoint

STORES = ('disk', 'gcs', 's3')
RUNS = {'disk': 25, 'gcs': 8, 's3': 8}
MODES = ('new path', 'overwrite', 'managers')
REFUSED = {'CheckpointBusyError', 'CheckpointExistsError'}


def run(place: Place, runs: int) -> Iterator[Outcome]:
  size = Size(4, 512) if place.store == 'disk' else place.size
  with workers(2) as pair:
    for worker in pair:
      worker.done('make', numbers=[1, 2], size=size)
    for mode in MODES:
      tally, drawn = Tally(f'two writers: {mode}', place.store), random.Random(mode)
      trial = _managers if mode == 'managers' else _paths
      for run_ in range(runs):
        tally.trial(f'run {run_}', functools.partial(trial, place, mode, pair, drawn, size))
      yield tally.outcome()


def _paths(place: Place, mode: str, pair: list[Worker], drawn: random.Random, size: Size) -> str:
  path, overwrite = place.new(f'two {mode}'), mode == 'overwrite'
  if overwrite:
    checkpoint.save(path, state_of(0, size), layout=layout())
  for number in drawn.sample((1, 2), 2):
    pair[number - 1].ask('save', path=path, number=number, size=size, overwrite=overwrite)
    time.sleep(drawn.choice((0, 0, drawn.uniform(0, 0.1))))
  answers = [worker.answer() for worker in pair]
  saved = _saved(answers)
  if not saved or (len(saved) > 1 and not overwrite):
    raise Harm(f'{_texts(answers)}')
  expect(path, size, saved)
  save_next(path, 3, size)
  expect_room(place, path, size, 1)
  place.clear(path)
  return _kinds(answers)


def _managers(place: Place, mode: str, pair: list[Worker], drawn: random.Random, size: Size) -> str:
  """Both open the root and save step 1; each saves its own state there."""
  root = place.new(f'two {mode}')
  order = drawn.sample(pair, 2)
  for worker in order:
    worker.ask('open', root=root, keep=2)
  opened = {worker: worker.answer() for worker in order}
  for worker in order:
    if opened[worker]['ok']:
      worker.ask('renamed_step', step=1, number=1 + pair.index(worker), size=size)
  answers = [worker.answer() if opened[worker]['ok'] else opened[worker] for worker in pair]
  for worker in pair:
    worker.call('close')
  saved = _saved(answers)
  if len(saved) != 1:
    raise Harm(f'{_texts(answers)}')
  expect(f'{root}/1', size, saved)
  with checkpoint.Manager(root, layout(), every=1, keep=2) as manager:
    if manager.steps != [1]:
      raise Harm(f'the steps are {manager.steps}')
  place.clear(root)
  return _kinds(answers)


def _saved(answers: list[dict[str, Any]]) -> set[int | None]:
  """The numbers that were reported as saved.

  Raises:
    Harm: another one was not refused, but failed.
  """
  if any(not answer['ok'] and answer['error'] not in REFUSED for answer in answers):
    raise Harm(f'{_texts(answers)}')
  return {number for number, answer in enumerate(answers, 1) if answer['ok']}


def _kinds(answers: list[dict[str, Any]]) -> str:
  return ' and '.join(sorted('saved' if answer['ok'] else answer['error'] for answer in answers))


def _texts(answers: list[dict[str, Any]]) -> list[str]:
  return ['saved' if a['ok'] else f'{a["error"]}: {a["text"][:200]}' for a in answers]
