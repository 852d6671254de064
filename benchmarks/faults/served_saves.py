"""Served saves: a save or a restore while something disturbs its server, and what has to hold afterwards.

A save returns with a CheckpointError or has worked; the old checkpoint stays whole; as soon as the server is back, the next
save works. A manager restores the newest step, or reports an error: a server that is away is no reason for an older one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from faults.examinations import expect, expect_agreement, expect_room
from faults.places import Place
from faults.tally import Harm
from faults.workers import Worker
from flax_spmd import checkpoint

MODES = ('new path', 'overwrite', 'manager')
LIMIT = 170.0  # seconds for a save that fails; both clients try again for a while


def restore_trial(place: Place, root: str, worker: Worker, fault: AbstractContextManager[Any]) -> str:
  """Restores the newest step of a root, which is step 2, under a fault."""
  with fault:
    answer = worker.call('newest', LIMIT, root=root, size=place.size)
  if not answer['ok'] and not answer['clear']:
    raise Harm(f'{answer["error"]}: {answer["text"]}')
  if answer['ok'] and answer['result'] != 2:
    raise Harm(f'step {answer["result"]} is restored, and step 2 is whole')
  expect(f'{root}/2', place.size, {2})
  return 'restored' if answer['ok'] else answer['error']


def prepared_root(place: Place, mode: str, worker: Worker) -> str:
  """A root with state 1 in it, by a manager that stays open or by a save."""
  root = place.new('server')
  if mode == 'manager':
    worker.done('open', root=root, keep=1)
    worker.done('step', number=1, size=place.size)
  else:
    worker.done('save', path=f'{root}/1', number=1, size=place.size)
  return root


def saved_in(place: Place, worker: Worker, mode: str, root: str, number: int) -> dict[str, Any]:
  """The worker's answer to a save."""
  if mode == 'manager':
    return worker.call('step', LIMIT, number=number, size=place.size)
  path, again = f'{root}/1' if mode == 'overwrite' else f'{root}/2', mode == 'overwrite' or number == 3
  return worker.call('save', LIMIT, path=path, number=number, size=place.size, overwrite=again)


def save_trial(place: Place, mode: str, worker: Worker, fault: AbstractContextManager[Any]) -> str:
  """Saves state 2 under a fault, and state 3 after it."""
  root, size = prepared_root(place, mode, worker), place.size
  try:
    with fault:
      answer = saved_in(place, worker, mode, root, 2)
    if not answer['ok'] and not answer['clear']:
      raise Harm(f'{answer["error"]}: {answer["text"]}')
    _examine(place, mode, root, answer['ok'])
    again = saved_in(place, worker, mode, root, 3)
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
