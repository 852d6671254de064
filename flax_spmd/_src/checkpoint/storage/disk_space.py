"""Disk space: how much a save needs, and how much is free, in the error of a save to a full disk."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator

from etils import epath

from flax_spmd.errors import CheckpointError

_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


@contextlib.contextmanager
def space_in_errors(path: epath.Path, needed: int) -> Iterator[None]:
  """Adds the space that a save needs to the error of a full disk, or of a quota that is used up.

  Args:
    path: path of the checkpoint.
    needed: bytes of the state.
  """
  try:
    yield
  except (CheckpointError, OSError) as error:
    if '://' in str(path) or not any(reason in str(error) for reason in _FULL):
      raise
    text = (str(error).rpartition('\nFix: ')[0] or str(error)).rstrip('.')
    start = '' if isinstance(error, CheckpointError) else f'The save to {path} failed: '
    folder = next(folder for folder in path.parents if folder.exists())
    raise CheckpointError(
      f'{start}{text}. The state has {needed:,} bytes; {shutil.disk_usage(folder).free:,} are free in {folder}.\n'
      'Fix: free some space, and save again; the path keeps its previous contents.'
    ) from error
