"""Root writer: one manager at a time writes to the root of a run; any number read it."""

from __future__ import annotations

import errno

import filelock
from etils import epath

from flax_spmd._src.checkpoint.storage.first_process import in_first
from flax_spmd._src.checkpoint.storage.folders import is_remote, locked
from flax_spmd.errors import CheckpointBusyError, CheckpointError

_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)


class RootWriter:
  """The exclusive right to write to a root, taken by the first process for the whole job.

  Args:
    root: folder of the run; created if needed.

  Attributes:
    obstacle: the reason why nobody can write to the root, such as "Read-only file system"; '' if one can.

  Raises:
    CheckpointBusyError: another manager writes to the root.
    CheckpointError: the root does not exist, and cannot be created.
  """

  def __init__(self, root: epath.Path):
    self._lock: filelock.BaseFileLock | None = None
    self.obstacle = in_first(lambda: self._take(root))

  def _take(self, root: epath.Path) -> str:
    if is_remote(root):
      return ''
    try:
      root.mkdir(parents=True, exist_ok=True)
      self._lock = locked(root / 'steps')
    except CheckpointBusyError:
      raise CheckpointBusyError(
        f'Another manager has {root} open.\n'
        'Fix: close it, wait for the other job, use another folder, or pass read_only=True.'
      ) from None
    except OSError as error:
      if error.errno in _UNWRITABLE and root.is_dir():
        return error.strerror or str(error)
      raise CheckpointError(
        f'{root} cannot be used for checkpoints: {error.strerror}.\nFix: pass a folder that can be created and written to.'
      ) from error
    return ''

  def release(self) -> None:
    """Lets another manager write."""
    if self._lock is not None:
      self._lock.release()
