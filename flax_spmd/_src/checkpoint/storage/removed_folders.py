"""Removed folders, whose names go at once and whose space is freed in the background.

A file system takes about 0.15 s to free a gigabyte, and does so when the last name and the last descriptor of a file are
gone. So the large files are opened before the folder is removed, and closed in a thread. The end of the process closes
them too, and after a power cut the file system frees files without names.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

_LARGE = 1 << 20  # bytes
_MOST = 128  # descriptors; further files are freed at once
_removing = threading.RLock()
_freeing: list[threading.Thread] = []


def remove_folder(folder: Path) -> None:
  """Removes a folder with everything below; links are not followed.

  Raises:
    OSError: something stays. Nothing is held open then: a file server keeps the names of open files.
  """
  with _removing, contextlib.ExitStack() as held:
    try:
      for file in itertools.islice(_large_files(folder), _MOST):
        held.callback(_close, os.open(file, os.O_RDONLY))
    except OSError:  # too many are open, say; the removal needs some, too
      held.close()
    shutil.rmtree(folder)
    freeing = held.pop_all()
    try:
      thread = threading.Thread(target=freeing.close, name='flax_spmd removal', daemon=True)
      thread.start()
      _freeing.append(thread)
    except RuntimeError:  # there may be no thread left
      freeing.close()


def settle() -> None:
  """Waits until the space of all folders that this process has removed is free."""
  with _removing:
    while _freeing:
      _freeing.pop().join()


def _large_files(folder: Path) -> Iterator[str]:
  for parent, _, names in os.walk(folder):
    for file in (os.path.join(parent, name) for name in names):
      with contextlib.suppress(OSError):
        found = os.lstat(file)
        if stat.S_ISREG(found.st_mode) and found.st_size >= _LARGE:
          yield file


def _close(descriptor: int) -> None:
  with contextlib.suppress(OSError):
    os.close(descriptor)


def _before_fork() -> None:
  """Waits: a copy of the process would keep the files open, and their space, for as long as it lives."""
  _removing.acquire()
  settle()


if hasattr(os, 'register_at_fork'):
  os.register_at_fork(
    before=_before_fork, after_in_parent=_removing.release, after_in_child=_removing.release
  )
