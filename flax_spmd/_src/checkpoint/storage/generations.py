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

Time decides only how soon a dead process is noticed, never whether data are safe. `docs/crash_consistency.md`
has the argument, and `tests/checkpoint/protocol_model.py` checks it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from etils import epath

from flax_spmd._src.checkpoint.storage.early_digests import EarlyDigests
from flax_spmd._src.checkpoint.storage.head import (
  GENERATION,
  HEAD,
  Head,
  StoredHead,
  given_back,
  is_generation,
)
from flax_spmd._src.checkpoint.storage.head_lease import HeadLease, busy, idle_head
from flax_spmd._src.checkpoint.storage.killed_saves import Intent, remove_generation, remove_killed_saves
from flax_spmd._src.checkpoint.storage.manifest import (
  MANIFEST,
  check_replaceable,
  manifest_digest,
  new_manifest,
  whole_generations,
)
from flax_spmd._src.checkpoint.storage.orbax_files import orbax_names
from flax_spmd._src.checkpoint.storage.orbax_folders import PART
from flax_spmd._src.checkpoint.storage.pins import is_pin, pinned_generations
from flax_spmd._src.checkpoint.storage.record import Record
from flax_spmd._src.checkpoint.storage.removed_folders import settle
from flax_spmd._src.checkpoint.storage.store import FileRecord, Store, open_store
from flax_spmd._src.worker_threads import map_in_threads
from flax_spmd.errors import CheckpointBusyError, CheckpointError, CheckpointExistsError

_THREADS = 8
_NOT_IN_PATHS = (
  ('*?[', '*, ? and [', 'Orbax takes for a pattern of file names'),
  ('\\', '\\', 'TensorStore takes for the end of a folder'),
)
_SHOWN = 5
_RETRIES = (0.0, 0.05, 0.1, 0.2, 0.4)  # seconds


class Claim:
  """The exclusive right to write to a path, held by one process of one job.

  Args:
    path: path of the checkpoint.
    overwrite: whether a checkpoint at the path may be replaced.
    durable: whether `commit` returns only when the checkpoint survives a power cut.

  Attributes:
    path: path of the checkpoint.
    new: folder of the generation to write.

  Raises:
    CheckpointExistsError: the path exists, and `overwrite` is False; or it holds files of others.
    CheckpointBusyError: another process is writing to the path.
    CheckpointError: the store cannot be reached or written; or the path is in a generation, or is a whole bucket.
  """

  def __init__(self, path: epath.Path, overwrite: bool, durable: bool = True):
    _check_place(path)
    self.path, self._durable = path, durable
    self._store = open_store(path.parent)
    before = idle_head(self._store, path, overwrite)
    self._previous = before.head
    listed = self._store.children(path.name)  # before the lease: see above
    others = [name for name in listed if not _is_ours(name)]
    self._legacy = orbax_names(
      self._store, path.name, others
    )  # beside a generation: the rest of an older one
    self._garbage = [name for name in listed if is_generation(name) and name != before.head.generation]
    self._found = [] if before.head.generation or not self._garbage else self._unnamed(before)
    self._check_free(overwrite, is_new=before.tag is None)
    current = [] if before.head.generation is None else [before.head.generation]
    check_replaceable(self._store, path, [*current, *self._found, *self._legacy])
    if not (before.head.generation or self._garbage):
      _check_foreign(path, [name for name in others if name not in self._legacy])
    self._lease, self._intent = self._taken(before)
    self._generation = f'{GENERATION}{self._lease.head.epoch:06d}-{secrets.token_hex(4)}'
    self.new = path / self._generation
    self._early: EarlyDigests | None = None
    self._attempted = self._committed = False
    try:
      garbage = [name for name in self._garbage if name not in self._found]
      if garbage or any(is_pin(name) for name in listed):
        self._remove_unpinned(garbage)
      settle()
    except BaseException:
      self.release()
      raise

  def _unnamed(self, before: StoredHead) -> list[str]:
    """The whole generations where no head names one. A lost or damaged head may have: they are kept until the commit.

    They are no others' only if the head is unchanged after they were listed.
    """
    stored = self._store.read(f'{self.path.name}/{HEAD}')
    if (None if stored is None else stored[1]) != before.tag:
      raise busy(self.path)
    return whole_generations(self._store, self.path.name, self._garbage)

  def _check_free(self, overwrite: bool, is_new: bool) -> None:
    is_file = '://' not in str(self.path) and self.path.is_file()
    exists = self._previous.generation or self._legacy or (is_new and self._found)
    if is_file or (exists and not overwrite):
      fix = 'or remove it first' if is_file else 'remove it first, or pass overwrite=True'
      raise CheckpointExistsError(f'{self.path} exists already.\nFix: save to another path, {fix}.')

  def _taken(self, before: StoredHead) -> tuple[HeadLease, Intent | None]:
    # A first head has to be whole after a power cut, and one before the removal of garbage has to be there.
    durable = bool(self._garbage) or before.tag is None
    if before.head.generation is not None or self._found:
      return HeadLease(self._store, self.path, before, durable), None
    intent = Intent(self._store, self.path.name)
    try:
      lease = HeadLease(self._store, self.path, before, durable)
    except CheckpointBusyError:
      intent.remove()
      raise
    except BaseException:  # the put may come late
      intent.leave()
      raise
    try:
      intent.put_again()  # a writer that was slow may have been taken for dead
    except BaseException:
      lease.end()
      raise
    return lease, intent

  def follow(self) -> None:
    """Begins to take digests of the files that this process writes on disk from now on; `commit` takes the others."""
    if '://' not in str(self.path):
      own = f'{self._generation}*/{PART}/ocdbt.process_{jax.process_index()}/d/*'
      self._early = EarlyDigests(Path(self.path), own)

  def require_lease(self) -> None:
    """Raises CheckpointBusyError if another process has taken the lease over."""
    self._lease.require(f'Checkpoint {self.path}')

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
    if self._early is not None:
      self._early.close()
    data = new_manifest(record, self._file_records(), dict(metadata)).to_bytes()
    self._store.write(f'{folder}/{MANIFEST}', data, expected=None, durable=False)
    if self._durable:
      self._store.sync(folder)
    self.require_lease()
    self._attempted = True
    new = self._lease.head._replace(
      generation=self._generation, manifest=manifest_digest(data), lease=None
    )
    if not self._lease.commit(new, durable=self._durable):
      self.require_lease()
    self._committed = True
    with contextlib.suppress(OSError, CheckpointError):  # the next save removes what stays
      self._clean_up()

  def _file_records(self) -> dict[str, FileRecord]:
    """Size and checksum of every file of the generation, except its manifest."""
    files = self._store.files(f'{self.path.name}/{self._generation}')
    files.pop(MANIFEST, None)
    unknown = [name for name, file in files.items() if not file.checksum]
    found = dict(zip(unknown, map_in_threads(self._digest, unknown, _THREADS), strict=True))
    return {name: FileRecord(file.size, found.get(name, file.checksum)) for name, file in files.items()}

  def _digest(self, name: str) -> str:
    early = None if self._early is None else self._early.of(Path(self.new, name))
    return early or self._store.digest(f'{self.path.name}/{self._generation}/{name}')

  def _clean_up(self) -> None:
    previous = [self._previous.generation] if self._previous.generation else []
    if self._garbage or previous:
      self._remove_unpinned(self._garbage + previous)
    for name in self._legacy:
      self._store.remove(f'{self.path.name}/{name}')
    if self._intent is not None:
      self._intent.remove()
    remove_killed_saves(self._store)

  def _remove_unpinned(self, generations: Sequence[str]) -> None:
    for generation in set(generations) - pinned_generations(self._store, self.path.name):
      remove_generation(self._store, f'{self.path.name}/{generation}')

  def release(self) -> None:
    """Releases the path; removes an uncommitted generation."""
    try:
      if self._early is not None:
        self._early.close()
      if not self._committed:
        with contextlib.suppress(OSError, CheckpointError):
          self._abandon()
    finally:
      self._lease.end()
      if self._intent is not None:
        self._intent.leave()

  def _abandon(self) -> None:
    """Gives the path back as it was. The head goes first: no late commit can then name the generation.

    After an attempt to commit, a head that is not durable may name it; then only a released head is proof.
    """
    released = self._lease.release()
    if self._lease.head.generation == self._generation or (self._attempted and not released):
      return
    is_gone = self._remove_own_generation()
    stays = self._previous.generation or (
      self._found and self._previous.lease
    )  # not lost: see `check_head`
    if released and not stays and self._lease.tag is not None:
      is_gone &= given_back(self._store, self.path, self._lease.tag)
    if self._intent is not None and is_gone:
      self._intent.remove()

  def _remove_own_generation(self) -> bool:
    """Removes what this writer has written. Threads of a failed save may still be writing it, so it retries.

    Returns:
      Whether nothing of it is left.
    """
    for pause in _RETRIES:
      time.sleep(pause)
      with contextlib.suppress(OSError, CheckpointError):
        left = [n for n in self._store.children(self.path.name) if n.startswith(self._generation)]
        for name in left:  # the generation, or the folder that Orbax renames to it
          remove_generation(self._store, f'{self.path.name}/{name}')
        if not left:
          return True
    return False


def _check_place(path: epath.Path) -> None:
  """Raises for a path that cannot be a checkpoint: a whole disk or bucket, a part of one, or one that Orbax would not find.

  Orbax looks for files by patterns below a path, and TensorStore writes to another one.
  """
  if path == path.parent or ('://' in str(path) and '/' not in str(path).partition('://')[2]):
    whole = 'bucket' if '://' in str(path) else 'disk'
    raise CheckpointError(
      f'{path} is a whole {whole}.\nFix: save to a path in it, such as {path / "checkpoint"}.'
    )
  for taken, text, meaning in _NOT_IN_PATHS:
    found = [character for character in taken if character in str(path)]
    if found and os.sep not in found:
      raise CheckpointError(
        f'{path} contains {" and ".join(found)}, which {meaning}.\nFix: save to a path without {text}.'
      )
  for folder in (path, *path.parents):
    if is_generation(folder.name) and open_store(folder.parent).read(HEAD) is not None:
      raise CheckpointError(
        f'{path} is {"" if folder == path else "in "}the current contents of a checkpoint, which no save may change.\n'
        f'Fix: save to {folder.parent}, or to another path.'
      )


def remove_checkpoint(path: epath.Path, check: Callable[[], object] = lambda: None) -> bool:
  """Removes a checkpoint, unless a reader or a writer uses it. Files of others beside it stay.

  Args:
    path: path of the checkpoint.
    check: function that raises an error if the caller may not remove it any more. Nobody finds the checkpoint when it is
      called; after an error it is there again.

  Returns:
    Whether it has been removed.
  """
  store = open_store(path.parent)
  try:
    before = idle_head(store, path, overwrite=True)
  except CheckpointBusyError:
    return False
  listed = store.children(path.name)
  intent = Intent(store, path.name)  # a later save completes a removal that is interrupted
  try:
    lease = HeadLease(store, path, before)
  except CheckpointBusyError:
    intent.remove()
    return False
  except BaseException:  # the put may come late
    intent.leave()
    raise
  try:
    return _removed(store, path, lease, intent, before.head, listed, check)
  except BaseException:
    with contextlib.suppress(OSError, CheckpointError):
      lease.release()
    raise
  finally:
    lease.end()
    intent.leave()


def _removed(
  store: Store,
  path: epath.Path,
  lease: HeadLease,
  intent: Intent,
  before: Head,
  listed: Sequence[str],
  check: Callable[[], object],
) -> bool:
  if not lease.put(lease.head._replace(generation=None, manifest=None), durable=True):
    return False
  is_used = True
  try:
    check()
    is_used = bool(pinned_generations(store, path.name))
  finally:
    if is_used:
      lease.release(generation=before.generation, manifest=before.manifest)
  if is_used:
    return False
  for name in filter(is_generation, listed):
    remove_generation(store, f'{path.name}/{name}')
  for name in orbax_names(store, path.name, listed):
    store.remove(f'{path.name}/{name}')
  if lease.release() and lease.tag is not None and given_back(store, path, lease.tag):
    intent.remove()
  return True


def _check_foreign(path: epath.Path, names: Sequence[str]) -> None:
  """Raises for files that belong to no checkpoint: a save would mix with them, and must not remove them."""
  if names:
    more = len(names) - _SHOWN
    listed = ', '.join(names[:_SHOWN]) + (f' and {more} more' if more > 0 else '')
    raise CheckpointExistsError(
      f'{path} holds files that belong to no checkpoint: {listed}.\n'
      'Fix: save to another path, or move them away.'
    )


def _is_ours(name: str) -> bool:
  return name == HEAD or is_generation(name) or is_pin(name) or name.startswith('.')
