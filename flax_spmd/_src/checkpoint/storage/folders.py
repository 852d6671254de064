"""Folders: where a checkpoint is, and how one takes the place of another without a moment of neither.

A checkpoint is written beside its path, under a name that nobody else uses, and moved there when it is
whole. Until then whatever was at the path stays as it is:

    .step_9.<host>-<process>-<digits>.new   being written, or about to take the path
    .step_9.<host>-<process>-<digits>.old   what was at the path, until the new one is there
    .step_9.lock                            held by whoever writes

The system gives up a lock when its process dies, however it dies, so what is found under a lock that
could be had belongs to nobody and is removed. Cloud storage (`gs://...`) has neither locks nor moves:
there Orbax writes to the path itself, which it marks as complete at the end, and nothing is replaced.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator

import filelock
from etils import epath
from orbax.checkpoint import v1 as ocp

from flax_spmd.errors import CheckpointBusyError, CheckpointError, CheckpointExistsError

_NEW, _OLD = '.new', '.old'
_SWAP_SECONDS = 2.0  # two renames take far less


def as_path(path: str | os.PathLike[str]) -> epath.Path:
  """An absolute path, or a place in cloud storage (`gs://...`), which Orbax reads and writes alike."""
  text = os.fspath(path)
  return epath.Path(text if '://' in text else os.path.abspath(text))


def is_remote(path: epath.Path) -> bool:
  """Whether a path is in cloud storage."""
  return '://' in os.fspath(path)


class Claim:
  """The right to write at a path, held by one process of one job at a time.

  Args:
    path: where the checkpoint is to be.
    overwrite: whether what is there may be replaced.

  Raises:
    CheckpointExistsError: there is something, and it may not be replaced.
    CheckpointBusyError: somebody else is writing there.
    CheckpointError: it may be replaced, but cannot be in one step where it is.
  """

  def __init__(self, path: epath.Path, overwrite: bool):
    self.path = path
    self.new = path
    self._lock: filelock.BaseFileLock | None = None
    if is_remote(path):
      _check_remote(path, overwrite)
      return
    path.parent.mkdir(parents=True, exist_ok=True)
    self._lock = locked(path)
    try:
      recover(path)
      if path.exists() and not overwrite:
        raise CheckpointExistsError(
          f'There is something at {path} already.\n'
          'Fix: save to another path, remove it first, or pass overwrite=True.'
        )
      for leftover in _beside(path, ''):
        _remove(leftover)
    except BaseException:
      self._lock.release()
      raise
    self.new = path.parent / f'.{path.name}.{_unique()}{_NEW}'

  def commit(self) -> None:
    """Puts what was written in its place; what was there goes."""
    if self.new == self.path:
      return
    old = self.new.with_suffix(_OLD)
    if self.path.exists():
      _settle(self.new)
      os.rename(self.path, old)
    os.rename(self.new, self.path)
    if old.exists():
      _sync(self.path.parent)
      _remove(old)

  def release(self) -> None:
    """Lets others write; removes what was not committed."""
    if self._lock is not None:
      try:
        for leftover in _beside(self.path, _NEW):
          _remove(leftover)
      finally:
        self._lock.release()


def _settle(folder: epath.Path) -> None:
  """Waits until the disk has all of a folder: what it replaces is gone afterwards, power cut or not."""
  for inner, _, files in os.walk(folder):
    for name in files:
      _sync(os.path.join(inner, name))
    _sync(inner)


def _sync(path: str | os.PathLike[str]) -> None:
  with contextlib.suppress(OSError):  # not every file system does it for folders
    descriptor = os.open(path, os.O_RDONLY)
    try:
      os.fsync(descriptor)
    finally:
      os.close(descriptor)


def _remove(leftover: epath.Path) -> None:
  """Removes a folder that nobody needs; threads of a save that has failed may be writing there still.

  What cannot be removed now is in nobody's way, and is tried again before the next save to the path.
  """
  for pause in (0.0, 0.05, 0.1, 0.2, 0.4):
    time.sleep(pause)
    shutil.rmtree(leftover, ignore_errors=True)
    if not leftover.exists():
      return


def _check_remote(path: epath.Path, overwrite: bool) -> None:
  if overwrite:
    raise CheckpointError(
      f'{path} is in cloud storage, where one checkpoint cannot take the place of another in one step.\n'
      'Fix: save to a new path, and delete the old one afterwards.'
    )
  if path.exists():
    raise CheckpointExistsError(
      f'There is something at {path} already.\nFix: save to another path, or remove it first.'
    )


def locked(path: epath.Path) -> filelock.BaseFileLock:
  """The lock of a path, held from now on; CheckpointBusyError if somebody else has it."""
  lock = filelock.FileLock(path.parent / f'.{path.name}.lock', blocking=False, thread_local=False)
  try:
    lock.acquire()
  except filelock.Timeout:
    writers = {_writer(beside) for beside in _beside(path, _NEW)}
    by = f', by {" and ".join(sorted(writers))}' if writers else ''
    raise CheckpointBusyError(
      f'The checkpoint {path} is being written{by}.\nFix: wait for it, or save to another path.'
    ) from None
  return lock


def _unique() -> str:
  host = socket.gethostname().replace('.', '-')
  return f'{host}-{os.getpid()}-{secrets.token_hex(4)}'


def _writer(beside: epath.Path) -> str:
  host, process, _ = beside.name.split('.')[-2 if beside.name.endswith(_NEW) else -3].rsplit('-', 2)
  return f'process {process} on {host}'


def _beside(path: epath.Path, ending: str) -> Iterator[epath.Path]:
  """What saves to `path` have left or are writing beside it; Orbax adds an ending of its own."""
  ours = re.compile(
    re.escape(f'.{path.name}.') + r'[^.]+-\d+-[0-9a-f]{8}(\.new|\.old)'
  )  # not those of `name.x`
  for beside in list(path.parent.iterdir()) if path.parent.is_dir() else ():
    found = ours.match(beside.name)
    if found and ending in ('', found[1]):
      yield beside


def recover(path: epath.Path) -> None:
  """Ends a replacement that was cut off between its two moves; only under the path's lock."""
  if not path.exists():
    there = stand_in(path)
    if there is not None:
      os.rename(there, path)


def stand_in(path: epath.Path) -> epath.Path | None:
  """What is whole beside a path at which there is nothing: a replacement was cut off, or is going on."""
  for old in _beside(path, _OLD):
    new = old.with_suffix(_NEW)
    return new if ocp.is_orbax_checkpoint(new) else old
  return None


def existing(path: epath.Path) -> epath.Path:
  """Where the checkpoint of a path is to be read; the path itself if there is none."""
  if is_remote(path) or path.exists() or stand_in(path) is None:
    return path
  end = time.monotonic() + _SWAP_SECONDS
  while time.monotonic() < end:  # somebody may be about to finish
    time.sleep(0.05)
    if path.exists():
      return path
  return stand_in(path) or path
