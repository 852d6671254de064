"""Manifests: the description of one generation: its record, and the size and checksum of every file.

A manifest is the last file of its generation. The head names its digest, so a manifest that has changed
since the save, or belongs to another generation, is never read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from etils import epath

from flax_spmd._src.checkpoint.storage.head import is_generation
from flax_spmd._src.checkpoint.storage.orbax_folders import METADATA
from flax_spmd._src.checkpoint.storage.parsed_json import (
  expect,
  is_count,
  json_object,
  parsing,
)
from flax_spmd._src.checkpoint.storage.record import (
  KEY,
  Record,
  check_record_format,
  from_json,
  to_json,
)
from flax_spmd._src.checkpoint.storage.store import FileRecord, Store
from flax_spmd.errors import CheckpointDamagedError

MANIFEST = 'MANIFEST'


class Manifest(NamedTuple):
  """The contents of a `MANIFEST`.

  Attributes:
    record: description of the arrays.
    files: every other file of the generation, by path below its folder.
    metadata: further JSON values, such as metrics.
    saved: time of the save in nanoseconds since 1970; for information only.
  """

  record: Record
  files: dict[str, FileRecord]
  metadata: dict[str, Any]
  saved: int

  def to_bytes(self) -> bytes:
    """The stored form."""
    return json.dumps(
      {
        **to_json(self.record),
        'files': self.files,
        'metadata': self.metadata,
        'saved': self.saved,
      }
    ).encode()


def new_manifest(record: Record, files: dict[str, FileRecord], metadata: dict[str, Any]) -> Manifest:
  """A manifest of a generation that is saved now."""
  return Manifest(record, files, metadata, time.time_ns())


def whole_generations(store: Store, name: str, listed: Sequence[str] | None = None) -> list[str]:
  """The complete generations of a path. Those of a path without a head have lost it: it is removed last.

  Args:
    store: store of the folder that holds the path.
    name: name of the path.
    listed: files and folders of the path, if they have been listed.
  """
  children = store.children(name) if listed is None else listed
  generations = [child for child in children if is_generation(child)]
  return [child for child in generations if store.read(f'{name}/{child}/{MANIFEST}') is not None]


def is_manifest(data: bytes) -> bool:
  """Whether a file of this name is of this package. Others have such files, too."""
  return data.startswith(f'{{"{KEY}":'.encode())


def manifest_digest(data: bytes) -> str:
  """The digest of a stored manifest, for the head."""
  return hashlib.blake2b(data, digest_size=16).hexdigest()


def parsed_manifest(data: bytes, path: Any) -> Manifest:
  """The manifest stored in `data`.

  Args:
    data: contents of a `MANIFEST`.
    path: path of the checkpoint, for errors.

  Raises:
    CheckpointDamagedError: it is malformed.
    CheckpointError: a newer version wrote it.
  """
  with parsing(path, MANIFEST):
    content = json_object(data)
    record = content[KEY]
    check_record_format(record, path)
    expect(isinstance(content['files'], dict), f'its files are {content["files"]!r}')
    files = {name: _file(entry) for name, entry in content['files'].items()}
    metadata, saved = content['metadata'], content['saved']
    expect(isinstance(metadata, dict), f'its metadata is {metadata!r}')
    expect(isinstance(saved, int), f'its time is {saved!r}')
  return Manifest(from_json(record, str(path)), files, metadata, saved)


def check_replaceable(store: Store, path: epath.Path, names: Sequence[str]) -> None:
  """Raises CheckpointError if a newer version wrote what a save or removal replaces. What is damaged may go.

  Args:
    store: store of the folder that holds the path.
    path: path of the checkpoint.
    names: names in it that go: generations, and files of Orbax or of format 1.
  """
  files = [f'{name}/{MANIFEST}' for name in names if is_generation(name)]
  for file in (*files, *({MANIFEST, METADATA} & set(names))):
    with contextlib.suppress(CheckpointDamagedError), parsing(path, file):
      stored = store.read(f'{path.name}/{file}')
      content = {} if stored is None else json_object(stored[0])
      for holder in (content, content.get('custom_metadata')):
        check_record_format(holder.get(KEY) if isinstance(holder, dict) else None, path)


def _file(entry: Any) -> FileRecord:
  expect(isinstance(entry, list) and len(entry) == 2, f'a file is {entry!r}')
  size, checksum = entry
  expect(
    is_count(size) and isinstance(checksum, str),
    f'a file has the size {size!r} and the checksum {checksum!r}',
  )
  return FileRecord(size, checksum)
