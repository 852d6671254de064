"""Heads: the one small object that decides which generation a checkpoint is, and who may replace it.

    {"format": 2, "generation": "gen-000002-5f1c22a0", "manifest": "<digest>", "epoch": 2,
     "lease": {"holder": ["host", "<namespace>", 4711, "<start>"], "token": "9c41...", "beat": 3}}

`generation` is null while nothing has been saved. `lease` is null while nobody writes. A head is only ever
replaced under the condition that it is unchanged, so every new lease invalidates all older writers.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from etils import epath

from flax_spmd._src.checkpoint.storage.process_identity import ProcessIdentity, parsed_identity
from flax_spmd._src.checkpoint.storage.store import Store, Tag
from flax_spmd.errors import CheckpointDamagedError, CheckpointError

HEAD = 'HEAD'
FORMAT = 2
GENERATION = 'gen-'
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
  """

  generation: str | None = None
  manifest: str | None = None
  epoch: int = 0
  lease: Lease | None = None

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
  stored = store.read(f'{path.name}/{HEAD}')
  return (
    StoredHead(Head(), None) if stored is None else StoredHead(parsed_head(stored[0], path), stored[1])
  )


def parsed_head(data: bytes, path: Any) -> Head:
  """The head stored in `data`.

  Args:
    data: contents of a `HEAD`.
    path: path of the checkpoint, for errors.

  Raises:
    CheckpointDamagedError: it is malformed.
    CheckpointError: a newer version wrote it.
  """
  try:
    content = json.loads(data)
    _expect(isinstance(content, dict), 'it is not a JSON object')
    found = content['format']
    head = None if _is_count(found) and found > FORMAT else _head(content)
  except (ValueError, KeyError, TypeError, RecursionError) as error:
    raise CheckpointDamagedError(
      f'Checkpoint {path} cannot be read, because of {HEAD}: {_reason(error)}.\n'
      'Fix: restore another checkpoint; this one was changed after it was written.'
    ) from error
  if head is None:
    raise CheckpointError(
      f'Checkpoint {path} has format {found}, but this version reads formats up to {FORMAT}.\n'
      'Fix: restore it with the version of flax_spmd that wrote it, or a newer one.'
    )
  return head


def is_generation(name: str) -> bool:
  """Whether a name is that of a generation's folder, or of one that Orbax has begun."""
  return _GENERATION.fullmatch(name) is not None


def _head(content: dict[str, Any]) -> Head:
  """The validated contents."""
  generation, digest, epoch = content['generation'], content['manifest'], content['epoch']
  _expect(_is_count(content['format']) and content['format'] == FORMAT, 'its format is not a number')
  _expect(
    generation is None or (isinstance(generation, str) and is_generation(generation)),
    f'its generation is {generation!r}',
  )
  _expect(
    digest is None if generation is None else isinstance(digest, str), f'its manifest is {digest!r}'
  )
  _expect(_is_count(epoch), f'its epoch is {epoch!r}')
  lease = content['lease']
  return Head(generation, digest, epoch, None if lease is None else _lease(lease))


def _lease(content: Any) -> Lease:
  _expect(isinstance(content, dict), f'its lease is {content!r}')
  lease = Lease(parsed_identity(content['holder']), content['token'], content['beat'])
  _expect(
    isinstance(lease.token, str) and _is_count(lease.beat),
    'its lease has no token, or no number of beats',
  )
  return lease


def _is_count(content: Any) -> bool:
  return type(content) is int and 0 <= content < 2**53  # isinstance would accept a bool


def _expect(holds: bool, reason: str) -> None:
  if not holds:
    raise ValueError(reason)


def _reason(error: Exception) -> str:
  if isinstance(error, KeyError):
    return f'{error} is missing'
  return 'it is nested too deeply' if isinstance(error, RecursionError) else str(error)[:200]
