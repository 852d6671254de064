"""HeadLease: the exclusive right to replace a head, renewed until it is released or lost."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from etils import epath

from flax_spmd._src.checkpoint.storage.head import (
  HEAD,
  Head,
  Lease,
  StoredHead,
  is_generation,
  read_head,
)
from flax_spmd._src.checkpoint.storage.liveness import (
  BEAT,
  LEASE,
  drop,
  has_ended,
  new_token,
  stays_silent,
)
from flax_spmd._src.checkpoint.storage.process_identity import ProcessIdentity, this_process
from flax_spmd._src.checkpoint.storage.store import Store, Tag
from flax_spmd._src.periodic_calls import start_periodic_calls
from flax_spmd.errors import CheckpointBusyError, CheckpointDamagedError, CheckpointError


def idle_head(store: Store, path: epath.Path, overwrite: bool = False) -> StoredHead:
  """The head of a path that no living process writes to.

  Args:
    store: store of the folder that holds the path.
    path: path of the checkpoint.
    overwrite: whether a damaged head is to be replaced.

  Raises:
    CheckpointBusyError: a living process has the lease. To find that out takes seconds if it runs on
      another machine, and `LEASE` seconds if it is dead.
    CheckpointDamagedError: the head is damaged.
  """
  name = f'{path.name}/{HEAD}'
  try:
    found = read_head(store, path)
  except CheckpointDamagedError:
    stored = store.read(name)
    if not overwrite or stored is None:
      raise
    return StoredHead(Head(epoch=_highest_epoch(store, path)), stored[1])
  lease = found.head.lease
  if lease is None or has_ended(lease.holder, lease.token):
    return found
  if lease.holder.is_local or not stays_silent(store, name, found.tag):
    raise busy(path, lease.holder)
  return found


def _highest_epoch(store: Store, path: epath.Path) -> int:
  """The number of leases so far, from the names of generations."""
  numbers = [name.split('-')[1] for name in store.children(path.name) if is_generation(name)]
  return max((int(number) for number in numbers if number.isdecimal()), default=0)


def busy(path: epath.Path, holder: ProcessIdentity | None = None) -> CheckpointBusyError:
  """The error for a path that another process writes to."""
  by = f', by {holder}' if holder else ''
  return CheckpointBusyError(
    f'Checkpoint {path} is being written{by}.\nFix: wait for it, or save to another path.'
  )


class HeadLease:
  """The lease of a path's head.

  Args:
    store: store of the folder that holds the path.
    path: path of the checkpoint.
    before: the head, as `idle_head` returned it.
    durable: whether the lease must survive a power cut, as before the removal of what the head has named.

  Attributes:
    head: the head as this process last wrote it.
    tag: version of that object.

  Raises:
    CheckpointBusyError: another process has replaced the head since.
  """

  def __init__(self, store: Store, path: epath.Path, before: StoredHead, durable: bool = False):
    self._store, self._path = store, path
    self._token = new_token()
    self._writing, self._stopped = threading.RLock(), threading.Event()
    self._lost, self._renewed = False, time.monotonic()
    self._successor: ProcessIdentity | None = None
    self.tag: Tag | None = before.tag
    epoch = before.head.epoch + 1
    me = this_process()
    self.head = before.head._replace(epoch=epoch, lease=Lease(me, self._token), writer=me)
    try:
      if not self.put(self.head, durable):
        raise busy(path)
      start_periodic_calls(self._renew, BEAT, f'flax_spmd lease {path.name}', self._stopped)
    except BaseException:  # the put may have been applied, or be applied later
      with contextlib.suppress(OSError, CheckpointError):
        self.release()
      raise

  def require(self, name: str) -> None:
    """Raises CheckpointBusyError, with the process, if another one has taken the lease over.

    Args:
      name: beginning of the error text.
    """
    if time.monotonic() - self._renewed > LEASE:
      with contextlib.suppress(OSError, CheckpointError):
        self.renew()
    if self._lost:
      raise CheckpointBusyError(
        f'{name} was taken over by {self._successor or "another process"}, since this process was suspended, or cut '
        'off from the storage, for a while.\nFix: end this job, or save to another path.'
      )

  def put(self, head: Head, durable: bool = False) -> bool:
    """Replaces the head; returns False, for good, if it no longer is this lease's.

    Raises:
      CheckpointError: the store failed. Whether the head has been replaced is then unknown.
    """
    name = f'{self._path.name}/{HEAD}'
    with self._writing:
      if self._lost:
        return False
      tag = self._store.write(name, head.to_bytes(), expected=self.tag, durable=durable)
      if tag is None:
        # Another process has put it, or an attempt of ours whose answer was lost, which need not be durable.
        stored = read_head(self._store, self._path)
        if stored.tag is not None and (stored.head == head or self._is_ours(stored.head)):
          tag = self._store.write(name, head.to_bytes(), expected=stored.tag, durable=durable)
        else:
          self._successor = stored.head.lease.holder if stored.head.lease else stored.head.writer
      self._lost = tag is None
      if tag is not None:
        self.tag, self.head, self._renewed = tag, head, time.monotonic()
      return not self._lost

  def commit(self, head: Head, durable: bool = False) -> bool:
    """Puts the last head of this lease; returns False if the lease has been lost.

    After an error, the head may be there, but not durable: it is put again. No renewal comes between, since
    it would take that head for one of another process.

    Raises:
      CheckpointError: the store failed, and the head is not there.
    """
    with self._writing:
      try:
        return self.put(head, durable)
      except (OSError, CheckpointError):
        if read_head(self._store, self._path).head != head:
          raise
        return self.put(head, durable)

  def _is_ours(self, head: Head) -> bool:
    return head.lease is not None and head.lease.token == self._token

  def renew(self) -> bool:
    """Puts the head with one more beat; returns False if the lease has been lost.

    Raises:
      CheckpointError: the store failed.
    """
    with self._writing:
      lease = self.head.lease
      return lease is not None and self.put(
        self.head._replace(lease=lease._replace(beat=lease.beat + 1))
      )

  def _renew(self) -> bool:
    with self._writing, contextlib.suppress(OSError, CheckpointError):  # the next beat tries again
      return not self._stopped.is_set() and self.renew()
    return True

  def end(self) -> None:
    """Stops renewing the lease. The head keeps it until it is replaced."""
    self._stopped.set()
    with self._writing:
      drop(self._token)

  def release(self, **changes: Any) -> bool:
    """Ends the lease, and puts the head without it; returns False if it was lost.

    Args:
      **changes: further fields of the head to replace.
    """
    self._stopped.set()
    try:
      with self._writing:
        released = self.put(self.head._replace(lease=None, **changes))
        self._lost = True  # for a commit in another thread
        return released
    finally:
      drop(self._token)
