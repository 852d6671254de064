"""Sources: the generation that a read of a checkpoint reads from, from its first to its last byte."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from etils import epath

from flax_spmd._src.checkpoint.storage.calls_in_flight import in_flight
from flax_spmd._src.checkpoint.storage.head import HEAD, is_generation, read_head
from flax_spmd._src.checkpoint.storage.manifest import (
  MANIFEST,
  Manifest,
  is_manifest,
  manifest_digest,
  parsed_manifest,
)
from flax_spmd._src.checkpoint.storage.parsed_json import damaged_file
from flax_spmd._src.checkpoint.storage.pins import Pin
from flax_spmd._src.checkpoint.storage.refused_reads import refusals
from flax_spmd._src.checkpoint.storage.store import Store, open_store
from flax_spmd._src.multihost import exchange
from flax_spmd.errors import CheckpointDamagedError, CheckpointError

Result = TypeVar('Result')
_ATTEMPTS = 20


class Source(NamedTuple):
  """A generation to read.

  Attributes:
    path: path of the checkpoint.
    folder: folder of the generation, an Orbax checkpoint.
    manifest: its manifest.
  """

  path: epath.Path
  folder: epath.Path
  manifest: Manifest

  @property
  def is_whole(self) -> bool:
    """Whether no save has begun to remove it: the manifest is the first file to go."""
    store = open_store(self.folder.parent)
    return store.read(f'{self.folder.name}/{MANIFEST}') is not None


def current_source(path: epath.Path) -> Source | None:
  """The current generation of a path, or the generation that is the path; None if there is none.

  Raises:
    CheckpointDamagedError: the head or the manifest cannot be read.
    CheckpointError: a newer version wrote them.
  """
  store = open_store(path.parent)
  reason = ''
  for _ in range(_ATTEMPTS):
    head = read_head(store, path).head
    if head.generation is None:
      return _generation_itself(store, path)
    stored = store.read(f'{path.name}/{head.generation}/{MANIFEST}')
    if stored is not None and manifest_digest(stored[0]) == head.manifest:
      return Source(path, path / head.generation, parsed_manifest(stored[0], path))
    reason = 'it is missing' if stored is None else 'its digest is not the one in HEAD'
    if read_head(store, path).head.generation == head.generation:
      break
  raise damaged_file(path, MANIFEST, reason)


def _generation_itself(store: Store, path: epath.Path) -> Source | None:
  """The generation that the path is, or a copy of one under another name; None if it is none."""
  stored = store.read(f'{path.name}/{MANIFEST}')
  if stored is None or not (is_generation(path.name) or is_manifest(stored[0])):
    return None
  return Source(path, path, parsed_manifest(stored[0], path))


def read_whole(path: epath.Path, read: Callable[[Source | None], Result]) -> Result:
  """Calls `read` with the current generation, which stays until it returns.

  In a job of several processes, every process calls this in a joint call, and all of them get the same generation. Where
  pins cannot be written, a save may remove the generation; then the read is repeated. If the checkpoint has been
  removed meanwhile, `read` is called with None.

  Args:
    path: path of the checkpoint.
    read: function of the source, or of None if the path has no generations.
  """
  with in_flight():
    for _ in range(_ATTEMPTS):
      with _pinned(path) as source:
        result, error, is_replaced = _attempted(path, source, read)
        if any(text == str(True) for _, text in exchange('checkpoint', str(is_replaced))):
          continue
        if error is not None:
          raise error
        return result
    raise CheckpointError(
      f'Checkpoint {path} was replaced {_ATTEMPTS} times while it was read.\n'
      'Fix: save less often to this path, or read it from a store that can be written, where reads are protected.'
    )


def _attempted(
  path: epath.Path, source: Source | None, read: Callable[[Source | None], Any]
) -> tuple[Any, CheckpointDamagedError | None, bool]:
  """The result of a read, or its error; and whether the generation was replaced, which may be the cause."""
  try:
    with refusals(path):
      result, error = read(source), None
  except CheckpointDamagedError as damage:
    result, error = None, damage
  if source is None:
    return result, error, False
  if error is None and not source.is_whole:
    error = damaged_file(source.path, MANIFEST, 'it is missing')
  return result, error, error is not None and _was_replaced(source)


def _was_replaced(source: Source) -> bool:
  """Whether the head names another generation now, or none."""
  if source.folder == source.path:  # the generation itself was asked for
    return False
  head = read_head(open_store(source.path.parent), source.path).head
  return head.generation != source.folder.name


@contextlib.contextmanager
def _pinned(path: epath.Path) -> Iterator[Source | None]:
  """The current generation with a pin, the same one in every process."""
  for _ in range(_ATTEMPTS):
    pin = None
    try:
      owner, generation = _generation_to_pin(path)
      if generation is not None:
        pin = Pin(open_store(owner.parent), owner.name, generation)
      source = current_source(path)
      again = source is not None and generation not in (None, source.folder.name)
      answer = {'generation': None if source is None else source.folder.name, 'again': again}
      if len(exchange('checkpoint', json.dumps(answer))) == 1 and not again:
        yield source
        return
    finally:
      if pin is not None:
        pin.close()
  raise CheckpointError(
    f'Checkpoint {path} is replaced so often that the processes do not find the same generation.\n'
    'Fix: save less often to this path, or restore another one.'
  )


def _generation_to_pin(path: epath.Path) -> tuple[epath.Path, str | None]:
  """A checkpoint, and its generation that a path stands for. A copy of a generation has no checkpoint around it."""
  head = read_head(open_store(path.parent), path).head
  is_copy = not is_generation(path.name) or open_store(path.parent).read(HEAD) is None
  return (path, head.generation) if head.generation or is_copy else (path.parent, path.name)
