"""Power cuts: what is left of a file system if the machine loses power at some moment. Needs root, for loop devices.

The file system is ext4 on a file. A copy of that file, made while the writer is stopped, is what the disk had: what the
kernel still held in memory is not in it. All that was reported as saved must be in the copy, whole.
"""

from __future__ import annotations

import contextlib
import functools
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from faults.examinations import expect_agreement, save_next
from faults.known_states import Size, layout, target_of
from faults.places import DiskPlace, Place
from faults.tally import Harm, Outcome, Tally
from faults.workers import Victims, Worker
from flax_spmd import checkpoint

STORES = ('disk',)
RUNS = {'disk': 9}
SIZE = Size(8, 512)
PACKED = Size(4, 512, 60)
NUMBERS = [1, 2, 3, 4]
MODES = ('new paths', 'save new, delete old', 'async', 'overwrite', 'packed', 'rotation')
LATER = 8.0  # seconds; by then the kernel has written what it delays, in another order than the calls
MOMENTS = ('at some moment', 'when it was saved', f'{LATER:.0f} s after it was saved')


def run(place: Place, runs: int) -> Iterator[Outcome]:
  if not isinstance(place, DiskPlace) or (reason := _hindrance(place.folder)):
    print(f'power cuts: left out, as {reason}')
    return
  for mode in MODES:
    tally, drawn = Tally(f'power cut: {mode}', place.store), random.Random(mode)
    with Victims() as victims:
      for run_ in range(runs):
        moment = MOMENTS[run_ % len(MOMENTS)]
        folder = Path(place.new('power'))
        folder.mkdir()
        tally.trial(moment, functools.partial(_trial, folder, mode, moment, victims.take(), drawn))
        shutil.rmtree(folder)
    yield tally.outcome()


def _hindrance(folder: Path) -> str | None:
  """Why loop devices cannot be used here; None if they can."""
  if missing := [tool for tool in ('mkfs.ext4', 'mount', 'findmnt') if shutil.which(tool) is None]:
    return f'{", ".join(missing)} is missing'
  probe = folder / 'probe'
  probe.mkdir(exist_ok=True)
  try:
    with _file_system(probe):
      return None
  except subprocess.CalledProcessError as error:
    return f'{error.cmd[0]} is not permitted'
  finally:
    shutil.rmtree(probe)


@contextlib.contextmanager
def _file_system(folder: Path) -> Iterator[Path]:
  image, at = folder / 'image', folder / 'at'
  at.mkdir()
  _run('truncate', '-s', '128M', image)
  _run('mkfs.ext4', '-q', '-E', 'lazy_itable_init=0,lazy_journal_init=0', image)
  with _mounted(image, at):
    _run('sync', '-f', at)
    yield at


@contextlib.contextmanager
def _mounted(image: Path, at: Path) -> Iterator[None]:
  _run('mount', '-o', 'loop', image, at)
  try:
    yield
  finally:
    _run('umount', at)


def _run(*command: Any) -> str:
  return subprocess.run([*map(str, command)], check=True, capture_output=True, text=True).stdout


def _trial(folder: Path, mode: str, moment: str, worker: Worker, drawn: random.Random) -> str:
  size = PACKED if mode == 'packed' else SIZE
  worker.done('make', numbers=NUMBERS, size=size)
  with _file_system(folder) as at:
    try:
      saved = _cut(folder, at, mode, moment, worker, drawn, size)
    finally:
      worker.kill()
  after = folder / 'after'
  after.mkdir()
  with _mounted(folder / 'copy', after):
    examine = _examine_run if mode == 'rotation' else _examine_paths
    examine(after / 'root', mode, saved, size)
  return moment


def _cut(
  folder: Path, at: Path, mode: str, moment: str, worker: Worker, drawn: random.Random, size: Size
) -> list[int]:
  """Copies the image at the moment; returns the numbers that had been reported as saved."""
  (at / 'root').mkdir()
  _run('sync', '-f', at)
  last = drawn.choice(NUMBERS[1:])
  pause = last if moment == MOMENTS[2] else 0
  worker.ask('series', mode=mode, root=str(at / 'root'), numbers=NUMBERS, size=size, pause=pause)
  messages: list[dict] = []
  if moment == MOMENTS[0]:
    time.sleep(drawn.uniform(0, 1.5))
  else:
    wanted = {'paused': last} if pause else {'saved': last}
    while wanted.items() - (message := worker.answer()).items():
      _require_going_on(message)
      messages.append(message)
    messages.append({'saved': last})
    time.sleep(LATER if pause else 0)
  worker.stop()
  time.sleep(0.02)  # for the thread that reads messages
  messages += worker.answers()
  for message in messages:
    _require_going_on(message)
  _copy(folder, at)
  return [message['saved'] for message in messages if 'saved' in message]


def _require_going_on(message: dict) -> None:
  if message.get('ok') is False:
    raise Harm(f'{message["error"]}: {message["text"]}')


def _copy(folder: Path, at: Path) -> None:
  """Copies the image between two writes of the kernel."""
  device = _run('findmnt', '-no', 'SOURCE', at).strip()
  counts = Path('/sys/block', Path(device).name, 'stat')
  for _ in range(50):
    before = counts.read_text()
    _run('cp', '--sparse=always', folder / 'image', folder / 'copy')
    if counts.read_text() == before:
      return
  raise RuntimeError('the kernel writes without a pause')


def _examine_paths(root: Path, mode: str, saved: list[int], size: Size) -> None:
  """Restores all that is there; what was reported as saved has to be."""
  names = (
    [path.name for path in root.iterdir() if not path.name.startswith('.')] if root.exists() else []
  )
  whole = {name: number for name in names if (number := _number(root / name, size)) is not None}
  last = max(saved, default=0)
  if mode in ('overwrite', 'packed'):
    if last and whole.get('one', 0) < last:
      raise Harm(f'state {last} was saved, but {whole or "nothing"} is left of {names}')
  else:
    deleted = {n for n in saved if n < last} if mode == 'save new, delete old' else set()
    lost = [n for n in saved if n not in deleted and whole.get(str(n)) != n]
    if lost or any(name != str(number) for name, number in whole.items()):
      raise Harm(f'{saved} were saved, but {whole or "nothing"} is left of {names}')
  save_next(str(root / ('one' if mode in ('overwrite', 'packed') else '9')), 9, size)


def _number(path: Path, size: Size) -> int | None:
  """The number of the state at a path; None if what is there is refused."""
  reading = expect_agreement(str(path), size)
  if reading.refused is not None:
    return None
  return int(checkpoint.restore(path, layout=layout())['step'])


def _examine_run(root: Path, mode: str, saved: list[int], size: Size) -> None:
  del mode
  with checkpoint.Manager(root / 'run', layout(), every=1, keep=1) as manager:
    if not saved and not manager.steps:
      return
    steps = manager.steps
    step, state = manager.restore(target_of(size))
    if step < max(saved, default=0):
      raise Harm(f'step {max(saved)} was saved, but {step} is restored, of {steps}')
    del state
    if bad := [each for each in manager.steps if _number(root / 'run' / str(each), size) != each]:
      raise Harm(f'steps {bad} are listed, but damaged')
