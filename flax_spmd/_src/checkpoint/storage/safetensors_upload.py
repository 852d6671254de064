"""The writer of safetensors to a bucket: objects that are sent in parts, and complete or absent.

The parts of an object are sent in order, while its arrays come. The service shows it when the last part has arrived, and
only where there is no object of its name. The index comes last. A process that is killed leaves parts that nobody
sees, which a rule of the bucket may remove after a day (`AbortIncompleteMultipartUpload`).
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from etils import epath

from flax_spmd._src.checkpoint.storage.bucket_errors import explained
from flax_spmd._src.checkpoint.storage.buckets import Location, filesystem, forget_clients
from flax_spmd._src.checkpoint.storage.safetensors_writer import INDEX, PlannedFile, index_bytes
from flax_spmd.errors import CheckpointError, CheckpointExistsError

_PART = 32 << 20  # bytes, of which a client holds two copies
_MOST_PARTS = 9_000  # S3 takes 10,000
_CHUNK = 1 << 20


class SafetensorsUpload:
  """Writes planned files to a bucket; a context that removes them if it ends with an error.

  Args:
    folder: URL of the folder.
    files: files to write.
  """

  def __init__(self, folder: epath.Path, files: Sequence[PlannedFile]):
    self._location = Location.of(str(folder))
    self._store = filesystem(self._location.scheme)
    self._files = files
    self._current = files[0]
    self._open: Any = None
    self._name = ''
    self._made: list[str] = []

  def __enter__(self) -> SafetensorsUpload:
    return self

  def __exit__(self, kind: Any, *_: Any) -> None:
    if kind is not None:
      self._abandon()

  def write(self, tensor: str, array: np.ndarray) -> None:
    """Sends the data of the next tensor.

    Raises:
      CheckpointError: the bucket refuses it, or it is not the next one of the plan.
    """
    with self._calls():
      if tensor not in self._current.places:
        self._complete()
        self._current = self._files[len(self._made)]
      if self._open is None:
        self._begin(self._current.name, self._current.header, self._current.bytes)
      opened: Any = self._open
      if opened.tell() != self._current.places[tensor]:
        raise ValueError(f'{tensor} comes at byte {opened.tell():,}, out of turn')
      data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
      for begin in range(0, data.size, _CHUNK):
        opened.write(data[begin : begin + _CHUNK].data)

  def commit(self) -> None:
    """Completes the last file, and writes the index.

    Raises:
      CheckpointError: the bucket refuses it.
    """
    with self._calls():
      self._complete()
      if len(self._files) > 1:
        self._begin(INDEX, index_bytes(self._files))
        self._complete()

  def _begin(self, name: str, content: bytes, size: int = 0) -> None:
    self._name = '/'.join(filter(None, (self._location.bucket, self._location.path, name)))
    self._open = self._store.open(self._name, 'xb', block_size=max(_PART, size // _MOST_PARTS))
    self._open.write(content)

  def _complete(self) -> None:
    self._open.close()
    self._open = None
    self._made.append(self._name)

  def _abandon(self) -> None:
    """Removes what has been written. A file that is not closed here would be completed when it is collected."""
    with contextlib.suppress(Exception):  # the error that is being raised comes first
      if self._open is not None:
        opened, self._open = self._open, None
        opened.closed = True
        opened.discard()
    for path in reversed(self._made):  # the index first: without it, the others are no checkpoint
      with contextlib.suppress(Exception):
        self._store.rm_file(path)

  @contextlib.contextmanager
  def _calls(self) -> Iterator[None]:
    try:
      yield
    except CheckpointError:
      raise
    except Exception as error:  # of many kinds
      # Python 3.12 crashes when it collects a buffer of gcsfs together with a view of it, which a frame holds.
      traceback.clear_frames(error.__traceback__)
      forget_clients()
      raise self._explained(error) from None

  def _explained(self, error: Exception) -> CheckpointError:
    if not isinstance(error, FileExistsError):
      return explained(error, 'write', self._location)
    return CheckpointExistsError(
      f'{self._location.scheme}://{self._name} exists already.\n'
      'Fix: save to another path, or remove it first.'
    )
