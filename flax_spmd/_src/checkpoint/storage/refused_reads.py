"""Refused reads: reads that fail because of the storage, and not because of the content that is stored there.

A missing permission, a server that does not answer, or a process without free file descriptors is no damage. It is
an error of the call, so that no other checkpoint is restored instead of a whole one.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from flax_spmd._src.checkpoint.storage.bucket_errors import cause_of, explained
from flax_spmd._src.checkpoint.storage.buckets import Location
from flax_spmd._src.checkpoint.storage.disk_store import READ_FIXES
from flax_spmd.errors import CheckpointError, FlaxSpmdError


def refusal(error: BaseException, path: str | os.PathLike[str]) -> CheckpointError | None:
  """The error to raise for a read that the storage refused; None for any other.

  Args:
    error: error of Orbax, TensorStore, fsspec or the operating system.
    path: checkpoint, folder or file that was read.
  """
  if isinstance(error, FlaxSpmdError):
    return None
  url = os.fspath(path)
  if '://' in url:
    return explained(error, 'read', Location.of(url)) if cause_of(error).is_refusal else None
  text = str(error)
  for code, fix in READ_FIXES.items():
    if getattr(error, 'errno', None) == code or os.strerror(code) in text:
      file = getattr(error, 'filename', None) or url
      return CheckpointError(
        f'Cannot read {file}: {os.strerror(code)} ({errno.errorcode[code]}).\nFix: {fix}'
      )
  return None


@contextlib.contextmanager
def refusals(path: str | os.PathLike[str]) -> Iterator[None]:
  """A block in which a refused read is an error of the checkpoint."""
  try:
    yield
  except (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
  ):  # of no client, or one that is recognised where it is called
    raise
  except Exception as error:  # of many kinds
    refused = refusal(error, path)
    if refused is None:
      raise
    raise refused from None
