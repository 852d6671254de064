"""Heads: the one small object that decides which generation a checkpoint is, and who may replace it.

    {"format": 2, "generation": "gen-000002-5f1c22a0", "manifest": "<digest>", "epoch": 2,
     "lease": {"holder": ["host", "<namespace>", 4711, "<start>"], "token": "9c41...", "beat": 3}}

`generation` is null while nothing has been saved. `lease` is null while nobody writes. A head is only ever
replaced under the condition that it is unchanged, so every new lease invalidates all older writers.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from etils import epath

from flax_spmd._src.checkpoint.storage.process_identity import ProcessIdentity, parsed_identity
from flax_spmd._src.checkpoint.storage.store import Store, Tag
from flax_spmd.errors import CheckpointDamagedError, CheckpointError

HEAD = 'HEAD'
FORMAT = 2
GENERATION = 'gen-'


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
    if content['format'] != FORMAT:
      raise _newer(path, content['format'])
    lease = content['lease']
    head = Head(
      content['generation'],
      content['manifest'],
      content['epoch'],
      None if lease is None else _lease(lease),
    )
    _check(head)
    return head
  except (ValueError, KeyError, TypeError, RecursionError) as error:
    if isinstance(error, CheckpointError):
      raise
    raise CheckpointDamagedError(
      f'Checkpoint {path} cannot be read, because of {HEAD}: {_reason(error)}.\n'
      'Fix: restore another checkpoint; this one was changed after it was written.'
    ) from error


def is_generation(name: str) -> bool:
  """Whether a name is that of a generation's folder."""
  return name.startswith(GENERATION) and '/' not in name and '\\' not in name


def _newer(path: Any, found: Any) -> CheckpointError:
  return CheckpointError(
    f'Checkpoint {path} has format {found!r}, but this version reads formats up to {FORMAT}.\n'
    'Fix: restore it with the version of flax_spmd that wrote it, or a newer one.'
  )


def _lease(content: Any) -> Lease:
  lease = Lease(parsed_identity(content['holder']), content['token'], content['beat'])
  if not (isinstance(lease.token, str) and isinstance(lease.beat, int)):
    raise ValueError('its lease has no token, or no number of beats')
  return lease


def _check(head: Head) -> None:
  named = head.generation is not None
  if named and not (isinstance(head.generation, str) and is_generation(head.generation)):
    raise ValueError(f'its generation is {head.generation!r}')
  if named and not isinstance(head.manifest, str):
    raise ValueError('it has no digest of a manifest')
  if not isinstance(head.epoch, int):
    raise ValueError(f'its epoch is {head.epoch!r}')


def _reason(error: Exception) -> str:
  if isinstance(error, KeyError):
    return f'{error} is missing'
  return 'it is nested too deeply' if isinstance(error, RecursionError) else str(error)
