"""Heads: the one small object that decides which generation a checkpoint is, and who may replace it.

    {"format": 2, "generation": "gen-000002-5f1c22a0", "manifest": "<digest>", "epoch": 2,
     "writer": ["host", "<namespace>", 4711, "<start>"],
     "lease": {"holder": ["host", "<namespace>", 4711, "<start>"], "token": "9c41...", "beat": 3}}

`generation` is null while nothing has been saved. `lease` is null while nobody writes; `writer` is the process
that took the last one. A head is only ever replaced under the condition that it is unchanged, so every new lease
invalidates all older writers.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from etils import epath

from flax_spmd._src.checkpoint.storage.parsed_json import (
  check_format,
  expect,
  is_count,
  json_object,
  parsing,
)
from flax_spmd._src.checkpoint.storage.process_identity import ProcessIdentity, parsed_identity
from flax_spmd._src.checkpoint.storage.store import Store, Tag

HEAD = 'HEAD'
FORMAT = 2
GENERATION = 'gen-'
_LARGEST = 1 << 20  # bytes; a head has 300
_GENERATION = re.compile(GENERATION + r'\d{6,}-[0-9a-f]{8}(\.orbax-checkpoint-tmp.*)?')


class Lease(NamedTuple):
  """The right to write, as long as its holder renews it.

  Attributes:
    holder: process that writes.
    token: unique text of this lease.
    beat: number of renewals.
  """

  holder: ProcessIdentity
  token: str
  beat: int = 0


class Head(NamedTuple):
  """The contents of a `HEAD`.

  Attributes:
    generation: folder of the current generation; None if there is none.
    manifest: digest of its manifest.
    epoch: number of leases so far.
    lease: current lease, or None.
    writer: process that took the last lease; None if an earlier version wrote the head.
  """

  generation: str | None = None
  manifest: str | None = None
  epoch: int = 0
  lease: Lease | None = None
  writer: ProcessIdentity | None = None

  def to_bytes(self) -> bytes:
    """The stored form."""
    content = {'format': FORMAT, **self._asdict()}
    content['lease'] = self.lease and {**self.lease._asdict(), 'holder': list(self.lease.holder)}
    return json.dumps(content).encode()


class StoredHead(NamedTuple):
  """A head as it was read.

  Attributes:
    head: its contents; an empty head if there is none.
    tag: version of the object; None if there is none.
  """

  head: Head
  tag: Tag | None


def read_head(store: Store, path: epath.Path) -> StoredHead:
  """The head of a path, whose folder is the store's root; raises as `parsed_head`."""
  stored = store.read(f'{path.name}/{HEAD}', limit=_LARGEST)
  return (
    StoredHead(Head(), None) if stored is None else StoredHead(parsed_head(stored[0], path), stored[1])
  )


def given_back(store: Store, path: epath.Path, tag: Tag) -> bool:
  """Removes a head that names nothing; returns False if another process has replaced it.

  Some servers have no conditional removals. There it stays.
  """
  name = f'{path.name}/{HEAD}'
  if store.remove_if(name, tag):
    return True
  stored = store.read(name)
  return stored is None or stored[1] == tag


def parsed_head(data: bytes, path: Any) -> Head:
  """The head stored in `data`.

  Args:
    data: contents of a `HEAD`.
    path: path of the checkpoint, for errors.

  Raises:
    CheckpointDamagedError: it is malformed.
    CheckpointError: a newer version wrote it.
  """
  with parsing(path, HEAD):
    content = json_object(data)
    check_format(content, FORMAT, f'{HEAD} of checkpoint {path}')
    return _head(content)


def is_generation(name: str) -> bool:
  """Whether a name is that of a generation's folder, or of one that Orbax has begun."""
  return _GENERATION.fullmatch(name) is not None


def _head(content: dict[str, Any]) -> Head:
  """The validated contents."""
  expect(is_count(content['format']) and content['format'] == FORMAT, 'its format is not a number')
  generation, digest, epoch = content['generation'], content['manifest'], content['epoch']
  expect(
    generation is None or (isinstance(generation, str) and is_generation(generation)),
    f'its generation is {generation!r}',
  )
  expect(
    digest is None if generation is None else isinstance(digest, str), f'its manifest is {digest!r}'
  )
  expect(is_count(epoch), f'its epoch is {epoch!r}')
  lease = content['lease']
  writer = content.get('writer')
  return Head(
    generation,
    digest,
    epoch,
    None if lease is None else _lease(lease),
    None if writer is None else parsed_identity(writer),
  )


def _lease(content: Any) -> Lease:
  expect(isinstance(content, dict), f'its lease is {content!r}')
  lease = Lease(parsed_identity(content['holder']), content['token'], content['beat'])
  expect(
    isinstance(lease.token, str) and is_count(lease.beat),
    'its lease has no token, or no number of beats',
  )
  return lease
