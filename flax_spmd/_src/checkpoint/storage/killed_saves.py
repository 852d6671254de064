"""Killed saves: removes what they left behind at paths that nobody will save to again.

A save to a path whose head names nothing, and a removal, first put `.flax_spmd/<name>-<token>` beside the
path, and remove it at their end. Every other save in that folder looks through them.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from flax_spmd._src.checkpoint.storage.head import (
  HEAD,
  Head,
  StoredHead,
  given_back,
  is_generation,
  read_head,
)
from flax_spmd._src.checkpoint.storage.liveness import drop, is_dead, new_token
from flax_spmd._src.checkpoint.storage.manifest import MANIFEST, whole_generations
from flax_spmd._src.checkpoint.storage.pins import pinned_generations
from flax_spmd._src.checkpoint.storage.process_identity import parsed_identity, this_process
from flax_spmd._src.checkpoint.storage.store import Store
from flax_spmd.errors import CheckpointError

FOLDER = '.flax_spmd'


class Intent:
  """The mark of a save in progress to a path without a head.

  Args:
    store: store of the folder that holds the path.
    name: name of the path.
  """

  def __init__(self, store: Store, name: str):
    self._store, self._token = store, new_token()
    self._file = f'{FOLDER}/{name}-{self._token}'
    self._content = json.dumps({'name': name, 'holder': this_process()}).encode()
    self._put()

  def _put(self) -> None:
    self._store.write(self._file, self._content, durable=False)

  def put_again(self) -> None:
    """Writes the mark if somebody has removed it. No other process writes this file."""
    if self._store.read(self._file) is None:
      self._put()

  def remove(self) -> None:
    """Removes the mark."""
    self._store.remove(self._file, is_file=True)
    self.leave()

  def leave(self) -> None:
    """Leaves the mark to the next save in the folder: something of this one may still be there, or come late."""
    drop(self._token)


def remove_generation(store: Store, folder: str) -> None:
  """Removes a generation, its manifest first: a reader of it then notices."""
  store.remove(f'{folder}/{MANIFEST}', is_file=True)
  store.remove(folder)


def remove_killed_saves(store: Store) -> None:
  """Removes what killed saves to new paths have left in a folder."""
  for name in store.children(FOLDER):
    with contextlib.suppress(CheckpointError, OSError):  # the next save tries again
      _examine(store, f'{FOLDER}/{name}')


def _examine(store: Store, file: str) -> None:
  stored = store.read(file)
  if stored is None:
    return
  try:
    content = json.loads(stored[0])
    name, holder = str(content['name']), parsed_identity(content['holder'])
  except (ValueError, KeyError, TypeError):
    store.remove(file, is_file=True)
    return
  path: Any = store.root / name
  found = read_head(store, path)
  if found.head.generation is None:
    lease = found.head.lease
    if lease is None:
      is_over = is_dead(store, file, holder, file.rpartition('-')[2], stored[1])
    else:
      is_over = is_dead(store, f'{name}/{HEAD}', lease.holder, lease.token, found.tag)
    if not is_over or not _removed(store, path, found):
      return
  store.remove(file, is_file=True)


def _removed(store: Store, path: Any, found: StoredHead) -> bool:
  """Removes the generations and the head of a dead writer that has committed nothing, unless a reader is left."""
  names = store.children(path.name)
  generations = [name for name in names if is_generation(name)]
  is_empty = not generations and (names or not path.is_dir())
  if found.tag is None and (is_empty or whole_generations(store, path.name, generations)):
    return True  # nothing of ours is there, or a checkpoint that has lost its head
  # no older writer can commit after this
  fence = Head(epoch=found.head.epoch + 1, writer=this_process())
  tag = store.write(
    f'{path.name}/{HEAD}', fence.to_bytes(), expected=found.tag, durable=bool(generations)
  )
  if tag is None or pinned_generations(store, path.name):  # a reader, of what a killed removal has left
    return False
  for name in generations:
    remove_generation(store, f'{path.name}/{name}')
  return given_back(store, path, tag)  # else it is a newer writer's, who may have no mark of its own
