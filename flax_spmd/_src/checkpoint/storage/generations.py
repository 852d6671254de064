"""Generations: how a checkpoint replaces another in one step, on every store.

    step_9/HEAD                      names the current generation; see `head`
    step_9/gen-000002-5f1c22a0/...   a generation: an Orbax checkpoint, and its MANIFEST; never changed
    step_9/pin-...                   a reader of a generation; see `pins`
    .flax_spmd/step_9-...            a save to a path without a head; see `killed_saves`

A writer takes the lease of the head, writes a generation under a new name, makes it durable, and then puts
a head that names it, under the condition that the head is still its own. A later lease changes the head, so
a writer that was taken for dead can no longer commit. A reader pins the generation that it reads.

Generations are removed if neither the head nor a pin names them. A writer lists them *before* it takes the
lease: so those that it may remove belong to older writers, which can no longer commit them.

Time decides only how soon a dead process is noticed, never whether data are safe. `docs/decisions.md` has
the argument, and `tests/checkpoint/protocol_model.py` checks it.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from flax_spmd._src.checkpoint.storage.head import (
  GENERATION,
  HEAD,
  Head,
  StoredHead,
  is_generation,
  read_head,
)
from flax_spmd._src.checkpoint.storage.head_lease import HeadLease, busy, idle_head
from flax_spmd._src.checkpoint.storage.killed_saves import Intent, remove_generation, remove_killed_saves
from flax_spmd._src.checkpoint.storage.manifest import (
  MANIFEST,
  FileRecord,
  manifest_digest,
  new_manifest,
)
from flax_spmd._src.checkpoint.storage.pins import PIN, pinned_generations
from flax_spmd._src.checkpoint.storage.record import Record
from flax_spmd._src.checkpoint.storage.store import Store, open_store
from flax_spmd.errors import CheckpointBusyError, CheckpointError, CheckpointExistsError

_RETRIES = (0.0, 0.05, 0.1, 0.2, 0.4)  # seconds


class Claim:
  """The exclusive right to write to a path, held by one process of one job.

  Args:
    path: path of the checkpoint.
    overwrite: whether existing contents may be replaced.
    durable: whether `commit` returns only when the checkpoint survives a power cut.

  Attributes:
    path: path of the checkpoint.
    new: folder of the generation to write.

  Raises:
    CheckpointExistsError: the path exists, and `overwrite` is False.
    CheckpointBusyError: another process is writing to the path.
    CheckpointError: the store cannot be reached or written.
  """

  def __init__(self, path: epath.Path, overwrite: bool, durable: bool = True):
    self.path, self._durable = path, durable
    self._store = open_store(path.parent)
    before = idle_head(self._store, path, overwrite)
    self._previous = before.head
    listed = self._store.children(path.name)  # before the lease: see above
    self._legacy = [] if before.head.generation else [name for name in listed if not _is_ours(name)]
    self._check_free(overwrite)
    self._lease, self._intent = self._taken(before)
    self._generation = f'{GENERATION}{self._lease.head.epoch:06d}-{secrets.token_hex(4)}'
    self.new = path / self._generation
    self._committed = self._uncertain = False
    self._garbage = [name for name in listed if is_generation(name) and name != before.head.generation]
    try:
      self._remove_unpinned(self._garbage)
    except BaseException:
      self.release()
      raise

  def _check_free(self, overwrite: bool) -> None:
    is_file = '://' not in str(self.path) and self.path.is_file()
    if is_file or (not overwrite and (self._previous.generation or self._legacy)):
      fix = 'or remove it first' if is_file else 'remove it first, or pass overwrite=True'
      raise CheckpointExistsError(f'{self.path} exists already.\nFix: save to another path, {fix}.')

  def _taken(self, before: StoredHead) -> tuple[HeadLease, Intent | None]:
    if before.tag is not None:
      return HeadLease(self._store, self.path, before), None
    intent = Intent(self._store, self.path.name)
    try:
      lease = HeadLease(self._store, self.path, before)
    except BaseException:
      intent.remove()
      raise
    intent.put()  # a writer that was slow may have been taken for dead
    return lease, intent

  def require_lease(self) -> None:
    """Raises CheckpointBusyError if another process has taken the lease over."""
    if self._lease.is_lost:
      raise busy(self.path, reason=' Another process took this one for dead, and replaced it.')

  def sync(self) -> None:
    """Does nothing: `commit` makes every file durable."""

  def commit(self, record: Record, metadata: Mapping[str, Any]) -> None:
    """Makes the new generation durable and current, and removes the previous one.

    Args:
      record: description of the arrays, with checksums.
      metadata: further JSON values for the manifest.

    Raises:
      CheckpointBusyError: the lease was lost; the path keeps its contents.
      CheckpointError: the store failed.
    """
    folder = f'{self.path.name}/{self._generation}'
    if self._durable:
      self._store.sync(folder)
    manifest = new_manifest(record, file_records(self._store, folder), dict(metadata))
    data = manifest.to_bytes()
    self._store.write(f'{folder}/{MANIFEST}', data, expected=None, durable=self._durable)
    self._put_head(Head(self._generation, manifest_digest(data), self._lease.head.epoch))
    self._committed = True
    with contextlib.suppress(OSError, CheckpointError):  # the next save removes what stays
      self._clean_up()

  def _put_head(self, head: Head) -> None:
    """Puts the head that commits. After an error, the head itself decides whether that has happened."""
    try:
      if self._lease.put(head, durable=self._durable):
        return
    except (OSError, CheckpointError):
      self._uncertain = True
      found = read_head(self._store, self.path).head
      self._uncertain = False
      if found.generation != self._generation:
        raise
    else:
      if read_head(self._store, self.path).head.generation != self._generation:
        self.require_lease()

  def _clean_up(self) -> None:
    if self._intent is not None:
      self._intent.remove()
    previous = [self._previous.generation] if self._previous.generation else []
    self._remove_unpinned(self._garbage + previous)
    for name in self._legacy:
      self._store.remove(f'{self.path.name}/{name}')
    remove_killed_saves(self._store)

  def _remove_unpinned(self, generations: Sequence[str]) -> None:
    if generations:
      for generation in set(generations) - pinned_generations(self._store, self.path.name):
        remove_generation(self._store, f'{self.path.name}/{generation}')

  def release(self) -> None:
    """Releases the path; removes an uncommitted generation."""
    try:
      if not self._committed and not self._uncertain:
        with contextlib.suppress(OSError, CheckpointError):
          self._abandon()
    finally:
      self._lease.end()

  def _abandon(self) -> None:
    """Gives the path back as it was. The head goes first: no late commit can then name the generation."""
    released = self._lease.release()
    if self._lease.head.generation == self._generation:
      return  # another thread has committed it
    self._remove_own_generation()
    if released and self._previous.generation is None and self._lease.tag is not None:
      self._store.remove_if(f'{self.path.name}/{HEAD}', self._lease.tag)
    if self._intent is not None:
      self._intent.remove()

  def _remove_own_generation(self) -> None:
    """Removes what this writer has written. Threads of a failed save may still be writing it, so it retries."""
    for pause in _RETRIES:
      time.sleep(pause)
      with contextlib.suppress(OSError, CheckpointError):
        remove_generation(self._store, f'{self.path.name}/{self._generation}')
        if not self._store.children(f'{self.path.name}/{self._generation}'):
          return


def file_records(store: Store, folder: str) -> dict[str, FileRecord]:
  """Size and checksum of every file of a generation, except its manifest."""
  return {
    name: FileRecord(size, store.digest(f'{folder}/{name}'))
    for name, size in store.files(folder).items()
    if name != MANIFEST
  }


def remove_checkpoint(path: epath.Path) -> bool:
  """Removes a checkpoint, unless a reader or a writer uses it.

  Returns:
    Whether it has been removed.
  """
  store = open_store(path.parent)
  try:
    before = idle_head(store, path, overwrite=True)
    listed = store.children(path.name)
    lease = HeadLease(store, path, before)
  except CheckpointBusyError:
    return False
  generation, digest = before.head.generation, before.head.manifest
  if not lease.put(lease.head._replace(generation=None, manifest=None)):
    return False
  if pinned_generations(store, path.name):
    lease.release(generation=generation, manifest=digest)
    return False
  for name in listed:
    if is_generation(name):
      remove_generation(store, f'{path.name}/{name}')
    elif name != HEAD:
      store.remove(f'{path.name}/{name}')
  if lease.release() and lease.tag is not None:
    store.remove_if(f'{path.name}/{HEAD}', lease.tag)
  return True


def _is_ours(name: str) -> bool:
  return name == HEAD or is_generation(name) or name.startswith((PIN, '.'))
