"""Checksum: a short text that a changed file would not have, with the name of its algorithm."""

from __future__ import annotations

import hashlib
import io
import os
import zlib
from collections.abc import Iterable, Iterator

from flax_spmd._src.data.crc32c import IS_COMPILED, crc_of
from flax_spmd._src.text import value_text
from flax_spmd.errors import CheckpointDamagedError

_FASTEST = 'crc32c' if IS_COMPILED else 'crc32'
_CHUNK = 1 << 20  # bytes: fits into a cache
_KNOWN = 'crc32c, md5, crc32'  # of our files and GCS, of S3, of earlier versions


def algorithm_of(checksum: str) -> str:
  """The name of the algorithm of a checksum; '' if it has none."""
  return checksum.partition(':')[0]


def checksum(chunks: Iterable[bytes | memoryview], like: str = '') -> str:
  """The checksum of a content, such as `crc32c:1c291ca3`.

  Args:
    chunks: the content.
    like: a checksum with the algorithm to use; '': whichever is fastest.

  Raises:
    CheckpointDamagedError: the algorithm is unknown.
  """
  algorithm = algorithm_of(like) or _FASTEST
  if algorithm in ('crc32c', 'crc32'):
    value, extended = 0, crc_of if algorithm == 'crc32c' else zlib.crc32
    for chunk in chunks:
      value = extended(chunk, value)
    return f'{algorithm}:{value:08x}'
  if algorithm == 'md5':
    md5 = hashlib.md5(usedforsecurity=False)
    for chunk in chunks:
      md5.update(chunk)
    return f'md5:{md5.hexdigest()}'
  raise CheckpointDamagedError(
    f'The checksum {value_text(like)} is of an unknown kind; known: {_KNOWN}.\n'
    'Fix: update flax-spmd, if a newer version wrote the checkpoint; otherwise restore another one.'
  )


def file_checksum(file: str | os.PathLike[str], like: str = '') -> str:
  """The checksum of a file on disk; `like` as in `checksum`.

  Raises:
    OSError: it cannot be read.
  """
  with open(file, 'rb', buffering=0) as opened:
    return checksum(_chunks(opened), like)


def _chunks(file: io.FileIO) -> Iterator[memoryview]:
  """The content of a file, in one buffer that every chunk overwrites: memory for each would take as long as reading."""
  buffer = memoryview(bytearray(_CHUNK))
  while size := file.readinto(buffer):
    yield buffer[:size]
