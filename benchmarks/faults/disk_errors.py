"""Disk errors: calls to the disk fail during a save, one of them or all from some moment on. Needs a C compiler.

Every error is raised as a CheckpointError, the old checkpoint stays whole, and the next save of the same process works.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import mmap
import random
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from faults.examinations import expect, expect_agreement, expect_room
from faults.known_states import Size
from faults.places import DiskPlace, Place
from faults.tally import Harm, Outcome, Tally
from faults.workers import Worker
from flax_spmd import checkpoint

STORES = ('disk',)
RUNS = {'disk': 12}
SIZE = Size(3, 256)
SYNC, WRITE, RENAME, CREATE, FOLDER = 1, 2, 4, 8, 16
FAULTS = {
  'EIO of fsync': (SYNC, errno.EIO),
  'EIO of write': (WRITE, errno.EIO),
  'ENOSPC of write': (WRITE, errno.ENOSPC),
  'EDQUOT of write': (WRITE, errno.EDQUOT),
  'EIO of rename': (RENAME, errno.EIO),
  'ENOSPC of a new file': (CREATE, errno.ENOSPC),
  'ENOSPC of a new folder': (FOLDER, errno.ENOSPC),
}
MODES = ('new path', 'overwrite', 'async', 'manager')
LIMIT = 60.0  # seconds for a save that fails
NEVER = 2**31 - 1


def run(place: Place, runs: int) -> Iterator[Outcome]:
  compiler = shutil.which('cc')
  if compiler is None or not isinstance(place, DiskPlace):
    print('disk errors: left out, as there is no C compiler (cc)')
    return
  library, source = place.folder / 'failing_calls.so', Path(__file__).with_name('failing_calls.c')
  subprocess.run([compiler, '-O1', '-shared', '-fPIC', '-o', library, source, '-ldl'], check=True)
  with _disturbed_worker(place.folder, library) as (worker, control):
    worker.done('make', numbers=[1, 2, 3], size=SIZE)
    for fault, (kind, number) in FAULTS.items():
      tally, drawn = Tally(fault, place.store), random.Random(fault)
      calls = {mode: _calls(place, mode, worker, control, kind) for mode in MODES}
      for run_ in range(runs):
        mode = MODES[run_ % len(MODES)]
        first = drawn.randint(1, calls[mode])
        last = first if drawn.random() < 0.5 else NEVER
        text = f'{mode}, call {first} of {calls[mode]}{"" if first == last else " and all later ones"}'
        tally.trial(
          text, functools.partial(_trial, place, mode, worker, control, (kind, number, first, last))
        )
      yield tally.outcome()


class _Control:
  """The memory that a process with the library shares with this one."""

  LAYOUT = struct.Struct('7i')

  def __init__(self, file: Path):
    file.write_bytes(bytes(mmap.PAGESIZE))
    with open(file, 'r+b') as opened:
      self._memory = mmap.mmap(opened.fileno(), 0)

  def arm(self, kinds: int, error: int, first: int, last: int) -> None:
    self.LAYOUT.pack_into(self._memory, 0, 0, kinds, error, first, last, 0, 0)
    self.LAYOUT.pack_into(self._memory, 0, 1, kinds, error, first, last, 0, 0)

  def disarm(self) -> tuple[int, int]:
    """Returns the number of calls, and how many of them have failed."""
    *_, count, failed = self.LAYOUT.unpack_from(self._memory, 0)
    self.LAYOUT.pack_into(self._memory, 0, *[0] * 7)
    return count, failed


@contextlib.contextmanager
def _disturbed_worker(folder: Path, library: Path) -> Iterator[tuple[Worker, _Control]]:
  file = folder / 'control'
  control = _Control(file)
  environment = {'LD_PRELOAD': str(library), 'FAULT_CONTROL': str(file), 'FAULT_UNDER': '/errors_'}
  worker = Worker(environment)
  try:
    yield worker, control
  finally:
    worker.end()


def _prepared(place: Place, mode: str, worker: Worker) -> str:
  root = place.new('errors')
  if mode == 'manager':
    worker.done('open', root=root, keep=1)
    worker.done('step', number=1, size=SIZE)
  else:
    worker.done('save', path=f'{root}/1', number=1, size=SIZE)
  return root


def _save(worker: Worker, mode: str, root: str, number: int) -> dict[str, Any]:
  if mode == 'manager':
    return worker.call('step', LIMIT, number=number, size=SIZE)
  do = 'save_async' if mode == 'async' else 'save'
  path = f'{root}/1' if mode == 'overwrite' else f'{root}/2'
  # the third save replaces what the second one may have left
  return worker.call(
    do, LIMIT, path=path, number=number, size=SIZE, overwrite=mode == 'overwrite' or number == 3
  )


def _calls(place: Place, mode: str, worker: Worker, control: _Control, kind: int) -> int:
  """The number of calls of a kind that a save makes."""
  root = _prepared(place, mode, worker)
  control.arm(kind, 0, NEVER, NEVER)
  answer = _save(worker, mode, root, 2)
  count, _ = control.disarm()
  worker.call('close')
  place.clear(root)
  if not answer['ok']:
    raise RuntimeError(answer['text'])
  return max(count, 1)


def _trial(place: Place, mode: str, worker: Worker, control: _Control, fault: tuple[int, ...]) -> str:
  root = _prepared(place, mode, worker)
  try:
    control.arm(*fault)
    answer = _save(worker, mode, root, 2)
    _, failed = control.disarm()
    seen = _judged(answer, failed, fault[0])
    _examine(place, mode, root, answer['ok'])
    again = _save(worker, mode, root, 3)
    if not again['ok']:
      raise Harm(f'{seen}, the next save fails: {again["error"]}: {again["text"]}')
    _examine_next(place, mode, root)
  finally:
    control.disarm()
    worker.call('close')
  place.clear(root)
  return seen


def _judged(answer: dict[str, Any], failed: int, kind: int) -> str:
  if not answer['ok'] and not answer['clear']:
    raise Harm(f'{answer["error"]}: {answer["text"]}')
  if not answer['ok']:
    return 'CheckpointError'
  if failed and kind in (SYNC, WRITE):
    raise Harm(f'saved, though {failed} calls failed')
  return 'saved all the same' if failed else 'no such call'


def _examine(place: Place, mode: str, root: str, saved: bool) -> None:
  """The old state is whole, the new one whole or absent."""
  if mode == 'overwrite':
    expect(f'{root}/1', SIZE, {2} if saved else {1, 2})
    expect_agreement(f'{root}/1', SIZE)
    return
  new = expect(f'{root}/2', SIZE, {2} if saved else {None, 2})
  if mode != 'manager' or new is None:
    expect(f'{root}/1', SIZE, {1})
  for summary in checkpoint.ls(root):
    if summary.error:
      raise Harm(f'ls: {summary.title}')


def _examine_next(place: Place, mode: str, root: str) -> None:
  name = {'overwrite': '1', 'manager': '3'}.get(mode, '2')
  expect(f'{root}/{name}', SIZE, {3})
  expect_room(place, root, SIZE, {'overwrite': 1, 'manager': 1}.get(mode, 2))
