"""Root writer: one manager at a time writes to the root of a run; any number read it."""

from __future__ import annotations

import contextlib

from etils import epath

from flax_spmd._src.checkpoint.storage.async_save import in_first
from flax_spmd._src.checkpoint.storage.head import HEAD, Head, read_head
from flax_spmd._src.checkpoint.storage.head_lease import HeadLease, idle_head
from flax_spmd._src.checkpoint.storage.liveness import has_ended
from flax_spmd._src.checkpoint.storage.store import open_store
from flax_spmd.errors import (
  CheckpointBusyError,
  CheckpointError,
  CheckpointNotFoundError,
  CheckpointReadOnlyError,
)

_NAME = '.flax_spmd_manager'  # of the folder whose head carries the lease


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
    self._lease: HeadLease | None = None
    self._stays = False
    self._store = open_store(root)
    self.obstacle = in_first(lambda: self._take(root))

  def _take(self, root: epath.Path) -> str:
    path = root / _NAME
    try:
      try:
        before = idle_head(self._store, path, overwrite=True)
        lease = before.head.lease
        self._stays = before.tag is not None and not (lease and has_ended(lease.holder, lease.token))
        self._lease = HeadLease(self._store, path, before)
      except CheckpointBusyError:
        # Where nothing can be written, there is no need to wait: this put is refused for another reason than the lease.
        self._store.write(f'{_NAME}/{HEAD}', Head().to_bytes(), expected=None)
        raise CheckpointBusyError(
          f'Another manager has {root} open.\n'
          'Fix: close it, wait for the other job, use another folder, or pass read_only=True.'
        ) from None
    except CheckpointReadOnlyError as error:
      if '://' not in str(root) and not root.is_dir():
        raise
      return str(error).splitlines()[0].rstrip('.')
    return ''

  def check(self) -> None:
    """Raises unless this manager may still write to the root.

    Raises:
      CheckpointNotFoundError: the root is gone.
      CheckpointBusyError: another manager has taken this one for dead, and writes to the root.
    """
    if self._lease is None:
      return
    failure: CheckpointError | None = None
    try:
      if self._lease.renew():
        return
    except CheckpointError as error:
      failure = error
    root = self._store.root
    if read_head(self._store, root / _NAME).tag is None:
      raise CheckpointNotFoundError(
        f'{root} was removed, moved or unmounted while this manager had it open; or only {root / _NAME} was.\n'
        'Fix: put it back and repeat the call, or open a new manager.'
      ) from failure
    if failure is not None:
      raise failure
    self._lease.require(str(root))

  def release(self) -> None:
    """Lets another manager write. The head stays if a process that was taken for dead may come back: it names this one."""
    if self._lease is not None:
      with contextlib.suppress(OSError, CheckpointError):  # it expires
        if self._lease.release() and self._lease.tag is not None and not self._stays:
          self._store.remove_if(f'{_NAME}/{HEAD}', self._lease.tag)
