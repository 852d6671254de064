"""Early digests: checksums of a generation's large files on disk, taken while others of its files are still written.

TensorStore writes a file, and waits until the disk has confirmed it; meanwhile the processor is free. Each write to a file
changes its time, if a tick of the file system's clock has passed since the last one. So a file is read once it has not
changed for longer than a tick; the digest is that of its last content if size and time are the same at the end. After each
digest, the next one of the same file waits for twice as long, so that a slow disk does not cause many of them.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

from flax_spmd._src.checkpoint.storage.checksum import file_checksum

_LARGE = 1 << 20  # bytes
_QUIET = 0.02  # seconds; clocks of file systems tick every 0.01 s or more often


class _Stamp(NamedTuple):
  """What changes with every write to a file."""

  device: int
  inode: int
  size: int
  changed: int


class EarlyDigests:
  """Takes digests of files in a thread, until it is closed.

  Args:
    folder: a folder.
    pattern: pattern of the files below it, which need not exist yet. Only this process writes to them.
  """

  def __init__(self, folder: Path, pattern: str):
    self._folder, self._pattern = folder, pattern
    self._seen: dict[_Stamp, float] = {}  # the time of each
    self._quiet: dict[tuple[int, int], float] = {}  # the seconds to wait, by device and inode
    self._digests: dict[_Stamp, str] = {}
    self._closed = threading.Event()
    self._thread = threading.Thread(target=self._run, name='flax_spmd digests', daemon=True)
    self._thread.start()

  def close(self) -> None:
    """Ends the thread, which completes the digest that it is taking."""
    self._closed.set()
    self._thread.join()

  def of(self, file: Path) -> str | None:
    """The digest of a file; None if there is none of its present content."""
    with contextlib.suppress(OSError):
      return self._digests.get(_stamp(file))
    return None

  def _run(self) -> None:
    while not self._closed.wait(_QUIET):
      while not self._closed.is_set() and self._took_one():
        pass

  def _took_one(self) -> bool:
    """Takes the digest of one file that has not changed for a while; returns whether there was one."""
    with contextlib.suppress(OSError):  # the commit reads the file too, and reports the error
      for file in self._folder.glob(self._pattern):
        stamp, now = _stamp(file), time.monotonic()
        key = stamp.device, stamp.inode
        quiet = self._quiet.setdefault(key, _QUIET)
        if now - self._seen.setdefault(stamp, now) > quiet and stamp.size >= _LARGE:
          self._seen[stamp] = math.inf
          self._quiet[key] = 2 * quiet
          self._digests[stamp] = file_checksum(file)
          return True
    return False


def _stamp(file: Path) -> _Stamp:
  found = os.stat(file)
  return _Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
