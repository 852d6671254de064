"""Folders: where a checkpoint is stored, and how one replaces another without a gap.

A checkpoint is written beside its path under a unique name, and moved to the path once it is complete.
Until then the path keeps its previous contents:

    .step_9.<host>-<process>-<digits>.new   being written, or about to move to the path
    .step_9.<host>-<process>-<digits>.old   the previous contents, until the new checkpoint is in place
    .step_9.lock                            held by the writer

The operating system releases a lock when its process dies. If the lock can be taken, its owner is dead,
and files left under it are removed. Cloud storage (`gs://...`) has neither locks nor moves: there Orbax
writes to the path itself, which it marks as complete at the end, and nothing can be replaced.
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
SWAP_SECONDS = 2.0  # two renames take far less


def as_path(path: str | os.PathLike[str]) -> epath.Path:
  """A path made absolute; a cloud storage URL (`gs://...`) stays as it is."""
  text = os.fspath(path)
  return epath.Path(text if '://' in text else os.path.abspath(text))


def is_remote(path: epath.Path) -> bool:
  """Whether a path is in cloud storage."""
  return '://' in os.fspath(path)


class Claim:
  """The exclusive right to write to a path, held by one process of one job.

  Args:
    path: path of the checkpoint.
    overwrite: whether existing contents may be replaced.

  Attributes:
    path: path of the checkpoint.
    new: folder to write to, until `commit`.
    lock: lock of the path; None in cloud storage.

  Raises:
    CheckpointExistsError: the path exists, and `overwrite` is False.
    CheckpointBusyError: another process is writing to the path.
    CheckpointError: the path is in cloud storage, where nothing can be replaced in one step.
  """

  def __init__(self, path: epath.Path, overwrite: bool):
    self.path = path
    self.new = path
    self.lock: filelock.BaseFileLock | None = None
    if is_remote(path):
      _check_remote(path, overwrite)
      return
    path.parent.mkdir(parents=True, exist_ok=True)
    self.lock = locked(path)
    try:
      recover(path)
      if path.exists() and not overwrite:
        raise CheckpointExistsError(
          f'{path} exists already.\nFix: save to another path, remove it first, or pass overwrite=True.'
        )
      for leftover in _beside(path, ''):
        _remove(leftover)
    except BaseException:
      self.lock.release()
      raise
    self.new = path.parent / f'.{path.name}.{_unique()}{_NEW}'

  def commit(self) -> None:
    """Moves the new checkpoint to the path, and removes the previous contents."""
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
    """Releases the path; removes an uncommitted checkpoint."""
    if self.lock is not None:
      try:
        for leftover in _beside(self.path, _NEW):
          _remove(leftover)
      finally:
        self.lock.release()


def _settle(folder: epath.Path) -> None:
  """Flushes a folder to disk, since the checkpoint that it replaces is removed next."""
  for inner, _, files in os.walk(folder):
    for name in files:
      _sync(os.path.join(inner, name))
    _sync(inner)


def _sync(path: str | os.PathLike[str]) -> None:
  with contextlib.suppress(OSError):  # some file systems cannot sync folders
    descriptor = os.open(path, os.O_RDONLY)
    try:
      os.fsync(descriptor)
    finally:
      os.close(descriptor)


def _remove(leftover: epath.Path) -> None:
  """Removes a leftover folder. Threads of a failed save may still be writing to it, so it retries.

  A folder that remains does no harm; the next save to the path tries again.
  """
  for pause in (0.0, 0.05, 0.1, 0.2, 0.4):
    time.sleep(pause)
    shutil.rmtree(leftover, ignore_errors=True)
    if not leftover.exists():
      return


def _check_remote(path: epath.Path, overwrite: bool) -> None:
  if overwrite:
    raise CheckpointError(
      f'{path} is in cloud storage, where a checkpoint cannot be replaced in one step.\n'
      'Fix: save to a new path, and delete the old one afterwards.'
    )
  if path.exists():
    raise CheckpointExistsError(
      f'{path} exists already.\nFix: save to another path, or remove it first.'
    )


def locked(path: epath.Path) -> filelock.BaseFileLock:
  """Takes the lock of a path; raises CheckpointBusyError if another process holds it."""
  lock = filelock.FileLock(path.parent / f'.{path.name}.lock', blocking=False, thread_local=False)
  try:
    lock.acquire()
  except filelock.Timeout:
    writers = {_writer(beside) for beside in _beside(path, _NEW)}
    by = f', by {" and ".join(sorted(writers))}' if writers else ''
    raise CheckpointBusyError(
      f'Checkpoint {path} is being written{by}.\nFix: wait for it, or save to another path.'
    ) from None
  return lock


def _unique() -> str:
  host = socket.gethostname().replace('.', '-')
  return f'{host}-{os.getpid()}-{secrets.token_hex(4)}'


def _writer(beside: epath.Path) -> str:
  host, process, _ = beside.name.split('.')[-2 if beside.name.endswith(_NEW) else -3].rsplit('-', 2)
  return f'process {process} on {host}'


def _beside(path: epath.Path, ending: str) -> Iterator[epath.Path]:
  """Folders beside `path` that its saves are writing or have left; Orbax appends its own suffix."""
  ours = re.compile(
    re.escape(f'.{path.name}.') + r'[^.]+-\d+-[0-9a-f]{8}(\.new|\.old)'
  )  # not those of `name.x`
  for beside in list(path.parent.iterdir()) if path.parent.is_dir() else ():
    match = ours.match(beside.name)
    if match and ending in ('', match[1]):
      yield beside


def recover(path: epath.Path) -> None:
  """Completes a replacement that was interrupted between its two moves. The caller holds the path's lock."""
  if not path.exists():
    complete = stand_in(path)
    if complete is not None:
      os.rename(complete, path)


def stand_in(path: epath.Path) -> epath.Path | None:
  """The complete checkpoint beside an empty path, left by an interrupted or current replacement."""
  for old in _beside(path, _OLD):
    new = old.with_suffix(_NEW)
    return new if ocp.is_orbax_checkpoint(new) else old
  return None


def existing(path: epath.Path) -> epath.Path:
  """The folder to read the checkpoint of a path from; the path itself if there is no checkpoint."""
  if is_remote(path) or path.exists() or stand_in(path) is None:
    return path
  end = time.monotonic() + SWAP_SECONDS
  while time.monotonic() < end:  # a replacement may be about to finish
    time.sleep(0.05)
    if path.exists():
      return path
  return stand_in(path) or path
