"""ObjectStore: a prefix of a bucket of GCS or S3, with the conditional writes of the service itself."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import tensorstore as ts
from etils import epath

from flax_spmd._src.checkpoint.storage import bucket_errors, buckets
from flax_spmd._src.checkpoint.storage.buckets import Location
from flax_spmd._src.checkpoint.storage.checksum import algorithm_of, checksum
from flax_spmd._src.checkpoint.storage.store import (
  ANY,
  LARGEST,
  FileRecord,
  Tag,
  checked,
  removable,
  too_large,
)
from flax_spmd.errors import CheckpointError

_PROBE = '.flax_spmd.probe-'
_CHUNK = 1 << 25
_MD5 = re.compile(r'"([0-9a-f]{32})"')
_REJECTS_CONDITIONS = {'NotImplemented', 'InvalidArgument', 'InvalidRequest'}
_DIFFERS = {'PreconditionFailed', 'NoSuchKey', '404', '412'}
_ABSENT = b'\x02'  # TensorStore's generation of no object


class Abilities(NamedTuple):
  """What a bucket was found to do, by writing a small object to it.

  Attributes:
    compares: whether the server obeys conditions of writes.
    compares_removals: whether it obeys conditions of removals.
    tags_are_md5: whether the tag of an object is the MD5 of its content; not if the bucket encrypts with a key.
  """

  compares: bool
  compares_removals: bool
  tags_are_md5: bool


_abilities: dict[tuple[str, str, str], Abilities] = {}
_found: set[tuple[str, str, str]] = set()  # buckets that are there


class ObjectStore:
  """See `Store`. TensorStore reads and writes small files, fsspec lists them without its caches.

  The first call checks that the bucket is there and may be listed. The first write with a condition checks that
  the server obeys conditions: some that speak the S3 protocol ignore them.

  Args:
    root: URL of the prefix.
  """

  def __init__(self, root: epath.Path):
    self.root = root
    self._location = Location.of(str(root))
    buckets.reach(str(root))

  def read(self, name: str, limit: int = LARGEST) -> tuple[bytes, Tag] | None:
    """See `Store`."""
    with self._calls('read', name):
      result = self._kv.read(checked(name, self.root)).result()
    if len(result.value or b'') > limit:
      raise too_large(self.root, name, limit)
    return None if result.state == 'missing' else (bytes(result.value), _tag(result.stamp.generation))

  def write(
    self, name: str, data: bytes, *, expected: Tag | None = ANY, durable: bool = True
  ) -> Tag | None:
    """See `Store`. What a server has accepted is durable."""
    del durable
    key = checked(name, self.root)
    with self._calls('write', name):
      if expected == ANY:
        return _tag(self._kv.write(key, data).result().generation)
      self._require_comparison()
      return self._compare_and_set(key, data, expected)

  def remove_if(self, name: str, expected: Tag) -> bool:
    """See `Store`. Some servers obey conditions of writes, and not those of removals."""
    key = checked(name, self.root)
    with self._calls('remove', name):
      if not self._tried().compares_removals:
        return False
      return self._compare_and_remove(key, bytes.fromhex(expected))

  def children(self, folder: str = '') -> list[str]:
    """See `Store`."""
    path = self._path(folder)
    with self._calls('list', folder):
      try:
        entries = _children(self._files, self._location.scheme, path)
      except FileNotFoundError:
        return []
    names = {entry.strip('/').removeprefix(f'{path}/') for entry in entries}
    return sorted(name for name in names if name and '/' not in name and not name.startswith(_PROBE))

  def files(self, folder: str = '', *, like: str = '') -> dict[str, FileRecord]:
    """See `Store`."""
    path = self._path(folder)
    with self._calls('list', folder):
      entries = self._files.find(path, detail=True)
    found = {name.removeprefix(f'{path}/'): entry for name, entry in entries.items() if name != path}
    return {
      name: FileRecord(entry['size'], self._checksum_of(entry, like) or '')
      for name, entry in found.items()
      if not name.startswith(_PROBE)
    }

  def digest(self, name: str, like: str = '') -> str:
    """See `Store`. The server's own checksum, where it has one; otherwise the content is read."""
    with self._calls('read', name):
      own = self._checksum_of(self._files.info(self._path(name)), like)
      return own if own and like in ('', own) else checksum(self._chunks(name), like)

  def remove(self, folder_or_file: str, *, is_file: bool = False) -> None:
    """See `Store`."""
    name = removable(folder_or_file, self.root)
    with self._calls('remove', name):
      self._kv.write(name, None).result()
      if not is_file:
        self._kv.delete_range(ts.KvStore.KeyRange(f'{name}/', f'{name}0')).result()

  def sync(self, folder_or_file: str = '') -> None:
    """See `Store`. What a server has accepted is durable."""

  @property
  def _bucket(self) -> tuple[str, str, str]:
    return (self._location.scheme, self._location.bucket, self._location.endpoint)

  @functools.cached_property
  def _kv(self) -> Any:
    return ts.KvStore.open(self._location.kvstore()).result()

  @property
  def _files(self) -> Any:
    return buckets.filesystem(self._location.scheme)

  def _path(self, name: str) -> str:
    """The path of a file or folder, for fsspec."""
    return '/'.join(filter(None, (self._location.bucket, self._location.path, checked(name, self.root))))

  def _compare_and_set(self, key: str, data: bytes, expected: Tag | None) -> Tag | None:
    generation = _ABSENT if expected is None else bytes.fromhex(expected)
    written = self._kv.write(key, data, if_equal=generation).result().generation
    if written:
      return _tag(written)
    # A write whose answer was lost is repeated, and its repetition fails since the first one succeeded.
    now = self._kv.read(key).result()
    return _tag(now.stamp.generation) if now.state == 'value' and now.value == data else None

  def _compare_and_remove(self, key: str, generation: bytes) -> bool:
    """Removes an object of this generation. On S3, TensorStore compares in one request and removes in another."""
    if self._location.scheme == 'gs':
      return bool(self._kv.write(key, None, if_equal=generation).result().generation)
    path = '/'.join(filter(None, (self._location.path, key)))
    tag = generation[1:].decode()
    try:
      self._files.call_s3('delete_object', Bucket=self._location.bucket, Key=path, IfMatch=tag)
    except Exception as error:  # of many kinds
      if bucket_errors.cause_of(error).code not in _DIFFERS:
        raise
      return False
    return True

  def _require_comparison(self) -> None:
    if not self._tried().compares:
      raise CheckpointError(
        f'{self.root}: the server {self._location.endpoint} does not obey conditions of writes (If-Match, '
        'If-None-Match), so two writers could damage each other.\n'
        'Fix: save to a bucket of GCS or Amazon S3, or to a server with conditional writes.'
      )

  def _require_bucket(self) -> None:
    """Raises if the bucket is not there: a read finds nothing then, as in one without the object.

    TensorStore comes first: it asks again for seconds if nobody answers, and fsspec for a minute.
    """
    self._kv.read(_PROBE).result()
    try:
      _list_one(self._files, self._location)
    except FileNotFoundError:
      raise bucket_errors.no_bucket(self._location) from None

  def _tried(self) -> Abilities:
    """What the bucket is able to do, found once per process by writing a small object, which is removed."""
    if self._bucket not in _abilities:
      key = f'{_PROBE}{secrets.token_hex(8)}'
      try:
        _abilities[self._bucket] = self._try(key, b'1', b'2')
      finally:
        self._kv.write(key, None).result()
    return _abilities[self._bucket]

  def _try(self, key: str, first: bytes, second: bytes) -> Abilities:
    """Writes an object twice, and writes and removes it with tags that it does not have."""
    try:
      made = self._kv.write(key, first, if_equal=_ABSENT).result().generation
      again = self._kv.write(key, second, if_equal=_ABSENT).result().generation
      changed = self._kv.write(key, second, if_equal=made).result().generation
      stale = self._kv.write(key, first, if_equal=made).result().generation
    except Exception as error:  # of many kinds
      if bucket_errors.cause_of(error).code not in _REJECTS_CONDITIONS:
        raise
      return Abilities(False, False, False)
    compares = bool(made and not again and changed and not stale)
    md5 = hashlib.md5(first, usedforsecurity=False).hexdigest().encode()
    return Abilities(compares, compares and self._keeps(key, made), md5 in made)

  def _keeps(self, key: str, stale: bytes) -> bool:
    """Whether a removal with an old tag leaves the object."""
    try:
      return not self._compare_and_remove(key, stale)
    except Exception:  # of many kinds: a server or botocore without conditions of removals
      return False

  def _checksum_of(self, entry: Mapping[str, Any], like: str) -> str | None:
    """The server's own checksum of an object, from its description by fsspec; None if it has none.

    GCS has a CRC-32C of every object, and the MD5 of most. S3 has the MD5 as a tag that some buckets have other things
    in. It is taken if the bucket's are known to be MD5s, or if it is only compared: another content does not have the
    tag that is expected.
    """
    if self._location.scheme == 'gs':
      name, field = ('md5', 'md5Hash') if algorithm_of(like) == 'md5' else ('crc32c', 'crc32c')
      return f'{name}:{base64.b64decode(entry[field]).hex()}' if entry.get(field) else None
    tag = _MD5.fullmatch(entry['ETag'])
    trusted = bool(like) or (self._bucket in _abilities and _abilities[self._bucket].tags_are_md5)
    return f'md5:{tag[1]}' if tag and trusted else None

  def _chunks(self, name: str) -> Iterator[bytes]:
    path = self._path(name)
    for start in range(0, self._files.size(path), _CHUNK):
      yield self._files.cat_file(path, start=start, end=start + _CHUNK)

  @contextlib.contextmanager
  def _calls(self, verb: str, name: str) -> Iterator[None]:
    """Raises the errors of TensorStore and fsspec as errors of the checkpoint."""
    try:
      if self._bucket not in _found:
        self._require_bucket()
        _found.add(self._bucket)
      yield
    except CheckpointError:
      raise
    except Exception as error:  # of many kinds
      buckets.forget_clients()
      raise bucket_errors.explained(error, verb, self._location, name) from None


def _children(files: Any, scheme: str, path: str) -> list[str]:
  """The paths of objects and folders in a folder. Where there is none, s3fs would list the folder above too."""
  if scheme == 'gs':
    return files.ls(path, detail=False)
  bucket, _, folder = path.partition('/')
  request = {'Bucket': bucket, 'Prefix': f'{folder}/' if folder else '', 'Delimiter': '/'}
  keys: list[str] = []
  while True:
    page = files.call_s3('list_objects_v2', **request)
    keys += [entry['Key'] for entry in page.get('Contents', ())]
    keys += [entry['Prefix'] for entry in page.get('CommonPrefixes', ())]
    if not page.get('IsTruncated'):
      return [f'{bucket}/{key}' for key in keys if key != request['Prefix']]
    request['ContinuationToken'] = page['NextContinuationToken']


def _list_one(files: Any, location: Location) -> None:
  """Lists one object below a location, or none; raises FileNotFoundError if there is no bucket."""
  if location.scheme == 'gs':
    files.ls(location.bucket, prefix=location.path, max_results=1)
  else:
    files.call_s3('list_objects_v2', Bucket=location.bucket, Prefix=location.path, MaxKeys=1)


def _tag(generation: bytes) -> Tag:
  return Tag(generation.hex())
