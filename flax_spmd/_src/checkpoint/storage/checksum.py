"""Checksum: a short text that a changed file would not have, with the name of its algorithm."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable

from flax_spmd.errors import CheckpointDamagedError

ALGORITHMS = ('crc32', 'md5')  # the first is the fastest, the second is stored by buckets


def checksum(chunks: Iterable[bytes], like: str = '') -> str:
  """The checksum of a content, such as `crc32:1c291ca3`.

  Args:
    chunks: the content.
    like: a checksum with the algorithm to use; '': CRC-32.

  Raises:
    CheckpointDamagedError: the algorithm is unknown.
  """
  algorithm = like.partition(':')[0] or ALGORITHMS[0]
  if algorithm == 'crc32':
    value = 0
    for chunk in chunks:
      value = zlib.crc32(chunk, value)
    return f'crc32:{value:08x}'
  if algorithm == 'md5':
    md5 = hashlib.md5(usedforsecurity=False)
    for chunk in chunks:
      md5.update(chunk)
    return f'md5:{md5.hexdigest()}'
  raise CheckpointDamagedError(
    f'The checksum {like!r} is of an unknown kind; known: {", ".join(ALGORITHMS)}.\n'
    'Fix: update flax-spmd, if a newer version wrote the checkpoint; otherwise restore another one.'
  )
