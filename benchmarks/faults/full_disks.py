"""Full disks: a save for which there is no room fails with a CheckpointError, and the old checkpoint stays whole.

A tmpfs and an ext4 of a few MB (which need root) and a limit on the size of files stand for the disk.
"""

from __future__ import annotations

import contextlib
import functools
import random
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from faults.examinations import expect, expect_room, save_next
from faults.known_states import Size, layout, state_of
from faults.places import DiskPlace, Place
from faults.tally import Harm, Outcome, Tally
from flax_spmd import checkpoint, errors

STORES = ('disk',)
RUNS = {'disk': 12}
SIZE = Size(4, 256)  # 1 MB
MODES = ('new path', 'overwrite', 'async', 'manager')
LIMIT = 30.0  # seconds for a save that fails

Scarcity = Callable[[Path, int], AbstractContextManager[Callable[[bool], None]]]


def run(place: Place, runs: int) -> Iterator[Outcome]:
  if not isinstance(place, DiskPlace):
    return
  for campaign, scarcity in SCARCITIES.items():
    if scarcity is not _small_files and not _can_mount(place):
      print(f'{campaign}: left out, as mounting is not permitted')
      continue
    tally, drawn = Tally(campaign, place.store), random.Random(campaign)
    for run_ in range(runs):
      mode, room = MODES[run_ % len(MODES)], drawn.randrange(64 << 10, 900 << 10)
      tally.trial(f'{mode}, {room} bytes', functools.partial(_trial, place, mode, room, scarcity))
    yield tally.outcome()


def _trial(place: DiskPlace, mode: str, room: int, scarcity: Scarcity) -> str:
  folder = Path(place.new('full'))
  folder.mkdir()
  with scarcity(folder, room) as make_scarce:
    root = folder / 'root'
    trial = _run_of_steps if mode == 'manager' else _paths
    trial(place, mode, root, make_scarce)
  return mode


def _paths(place: DiskPlace, mode: str, root: Path, make_scarce: Callable[[bool], None]) -> None:
  path = root / ('1' if mode == 'overwrite' else '2')
  checkpoint.save(root / '1', state_of(1, SIZE), layout=layout())
  save = checkpoint.save_async if mode == 'async' else checkpoint.save
  make_scarce(True)
  try:
    _expect_failure(
      lambda: save(path, state_of(2, SIZE), layout=layout(), overwrite=mode == 'overwrite')
    )
  finally:
    make_scarce(False)
  expect(str(root / '1'), SIZE, {1})
  if mode != 'overwrite':
    expect(str(path), SIZE, {None})
  save_next(str(path), 3, SIZE, LIMIT)
  expect_room(place, str(root), SIZE, 1 if mode == 'overwrite' else 2)


def _run_of_steps(place: DiskPlace, mode: str, root: Path, make_scarce: Callable[[bool], None]) -> None:
  """The manager goes on: it lists what is whole, and saves again when there is room."""
  del mode
  with checkpoint.Manager(root, layout(), every=1, keep=1) as manager:
    manager.save(1, state_of(1, SIZE))
    manager.wait()
    make_scarce(True)
    try:
      _expect_failure(lambda: manager.save(2, state_of(2, SIZE)) and manager.wait())
    finally:
      make_scarce(False)
    if manager.steps != [1]:
      raise Harm(f'steps after the failure: {manager.steps}')
    expect(str(root / '1'), SIZE, {1})
    manager.save(3, state_of(3, SIZE))
    manager.wait()
    if manager.steps != [3]:
      raise Harm(f'steps after the next save: {manager.steps}')
  expect(str(root / '3'), SIZE, {3})
  expect_room(place, str(root), SIZE, 1)


def _expect_failure(save: Callable[[], object]) -> None:
  begin = time.monotonic()
  try:
    saving = save()
    if isinstance(saving, checkpoint.AsyncSave):
      saving.result()
  except errors.CheckpointError:
    if time.monotonic() - begin > LIMIT:
      raise Harm(f'fails after {time.monotonic() - begin:.0f} s') from None
    return
  raise Harm('saved without enough room')


@contextlib.contextmanager
def _small_files(folder: Path, room: int) -> Iterator[Callable[[bool], None]]:
  """Limits the size of files; Python ignores the signal, so that writing fails."""
  del folder
  before = resource.getrlimit(resource.RLIMIT_FSIZE)

  def make_scarce(scarce: bool) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]) if scarce else before)

  yield make_scarce


@contextlib.contextmanager
def _small_tmpfs(folder: Path, room: int) -> Iterator[Callable[[bool], None]]:
  """A file system in memory with room for a state and part of another one; it grows afterwards."""
  one = SIZE.bytes + (192 << 10)
  _run('mount', '-t', 'tmpfs', '-o', f'size={one + room}', 'tmpfs', folder)

  def make_scarce(scarce: bool) -> None:
    if not scarce:
      _run('mount', '-o', 'remount,size=32m', folder)

  try:
    yield make_scarce
  finally:
    _run('umount', folder)


@contextlib.contextmanager
def _small_ext4(folder: Path, room: int) -> Iterator[Callable[[bool], None]]:
  """A disk that another file fills."""
  image, filler = folder.with_suffix('.image'), folder / 'filler'
  _run('truncate', '-s', '16M', image)
  _run('mkfs.ext4', '-q', '-m', '0', image)
  _run('mount', '-o', 'loop', image, folder)

  def make_scarce(scarce: bool) -> None:
    if scarce:
      with contextlib.suppress(OSError), open(filler, 'wb', buffering=0) as file:
        while file.write(b'\0' * 4096):
          pass
      with open(filler, 'r+b') as file:
        file.truncate(max(0, filler.stat().st_size - room))
    else:
      filler.unlink()

  try:
    yield make_scarce
  finally:
    _run('umount', folder)
    image.unlink()


def _run(*command: object) -> None:
  subprocess.run([*map(str, command)], check=True, capture_output=True)


def _can_mount(place: DiskPlace) -> bool:
  probe = Path(place.new('probe'))
  probe.mkdir()
  try:
    _run('mount', '-t', 'tmpfs', '-o', 'size=64k', 'tmpfs', probe)
    _run('umount', probe)
  except (OSError, subprocess.CalledProcessError):
    return False
  return True


SCARCITIES: dict[str, Scarcity] = {
  'files may not grow': _small_files,
  'full tmpfs': _small_tmpfs,
  'full ext4': _small_ext4,
}
