"""Places: where the checkpoints of a campaign are stored, with access to their files that goes past the library."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any, Protocol

import tensorstore as ts

from faults.known_states import Size


class Place(Protocol):
  """A store with room for checkpoints; names of files are relative to a path in it."""

  store: str
  size: Size  # of states whose saves take long enough for something to happen

  def new(self, name: str) -> str:
    """A path that nothing has used."""
    ...

  def files(self, path: str) -> dict[str, int]:
    """Every file below a path, with its size in bytes."""
    ...

  def read(self, path: str, name: str) -> bytes: ...

  def write(self, path: str, name: str, data: bytes) -> None: ...

  def remove(self, path: str, name: str) -> None: ...

  def clear(self, path: str) -> None:
    """Removes everything below a path."""
    ...


class DiskPlace:
  """A folder of the machine."""

  store = 'disk'
  size = Size(6, 1024)  # 25 MB

  def __init__(self, folder: Path):
    self.folder = folder
    self._numbers = itertools.count()

  def new(self, name: str) -> str:
    path = self.folder / f'{name}_{next(self._numbers)}'.replace(' ', '_')
    path.parent.mkdir(parents=True, exist_ok=True)
    return str(path)

  def files(self, path: str) -> dict[str, int]:
    return {
      str(file.relative_to(path)): file.stat().st_size
      for file in sorted(Path(path).rglob('*'))
      if file.is_file()
    }

  def read(self, path: str, name: str) -> bytes:
    return (Path(path) / name).read_bytes()

  def write(self, path: str, name: str, data: bytes) -> None:
    """Writes a new file in place of the old one, so that nobody's cache of the old one is believed."""
    self.remove(path, name)
    (Path(path) / name).write_bytes(data)

  def remove(self, path: str, name: str) -> None:
    (Path(path) / name).unlink(missing_ok=True)

  def clear(self, path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)


class BucketPlace:
  """A bucket of an object store.

  Args:
    store: 'gcs' or 's3'.
    bucket: URL of the bucket, such as `gs://name`.
    keys: specification of the bucket's key-value store for TensorStore.
  """

  size = Size(4, 256)  # 1 MB

  def __init__(self, store: str, bucket: str, keys: dict[str, Any]):
    self.store, self._bucket = store, bucket
    self._keys = ts.KvStore.open(keys).result()
    self._numbers = itertools.count()

  def new(self, name: str) -> str:
    return f'{self._bucket}/{name}_{next(self._numbers)}'.replace(' ', '_')

  def _key(self, path: str, name: str = '') -> str:
    return f'{path.removeprefix(self._bucket).strip("/")}/{name}'

  def files(self, path: str) -> dict[str, int]:
    prefix = self._key(path)
    keys = self._keys.list(ts.KvStore.KeyRange(prefix, prefix[:-1] + '0')).result()
    return {
      key.decode().removeprefix(prefix): len(self._keys.read(key).result().value) for key in sorted(keys)
    }

  def read(self, path: str, name: str) -> bytes:
    return self._keys.read(self._key(path, name)).result().value

  def write(self, path: str, name: str, data: bytes) -> None:
    self._keys.write(self._key(path, name), data).result()

  def remove(self, path: str, name: str) -> None:
    self._keys.write(self._key(path, name), None).result()

  def clear(self, path: str) -> None:
    prefix = self._key(path)
    self._keys.delete_range(ts.KvStore.KeyRange(prefix, prefix[:-1] + '0')).result()
