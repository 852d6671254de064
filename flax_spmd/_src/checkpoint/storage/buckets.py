"""Buckets: how TensorStore, fsspec and Orbax reach a bucket of GCS or S3.

TensorStore reads and writes arrays and small files, fsspec lists. Orbax writes its arrays through TensorStore
and its small files through etils and fsspec. All of them take credentials, region and endpoint from the
usual places (`AWS_*`, `AWS_ENDPOINT_URL`, `GOOGLE_APPLICATION_CREDENTIALS`, `STORAGE_EMULATOR_HOST`). None
is stored, printed or passed on here: a TensorStore spec names where credentials are, and does not hold them.

fsspec remembers lists, so that a process does not see what others, or TensorStore, have written since. Here it
remembers nothing, for paths that `reach` has been called with; other users of fsspec notice no difference.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import os
import re
import threading
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from flax_spmd._src.checkpoint.storage import listed_folder
from flax_spmd._src.compat import orbax_kvstore, redirect_orbax
from flax_spmd.errors import CheckpointError

_PACKAGES = {'gs': ('gcsfs', 'gcs'), 's3': ('s3fs', 's3')}
_EMULATOR = ('STORAGE_EMULATOR_HOST', 'TENSORSTORE_GCS_HTTP_URL')
_SETTINGS = ('AWS_', 'GOOGLE_', 'GCE_', 'CLOUDSDK_', *_EMULATOR)  # begin the names of clients' variables
RETRIES = {'max_retries': 5, 'initial_delay': '200ms', 'max_delay': '4s'}  # 12 seconds in all
PATIENT = {'max_retries': 10, 'initial_delay': '1s', 'max_delay': '16s'}  # of arrays: 2 minutes
_reached: set[str] = set()
_reaching = threading.Lock()


class Location(NamedTuple):
  """A place in a bucket.

  Attributes:
    scheme: `'gs'` or `'s3'`.
    bucket: name of the bucket.
    path: the rest of the URL, without slashes around it.
  """

  scheme: str
  bucket: str
  path: str

  @classmethod
  def of(cls, url: str) -> Location:
    """The location of a URL such as `gs://bucket/run/step_1`."""
    scheme, _, rest = url.partition('://')
    bucket, _, path = rest.partition('/')
    return cls(scheme, bucket, path.strip('/'))

  @property
  def endpoint(self) -> str:
    """The server, without anything secret."""
    if self.scheme == 's3':
      url = s3_server().endpoint or 'Amazon S3'
    else:
      url = os.environ.get(_EMULATOR[1]) or 'Google Cloud Storage'
    return re.sub('//[^/@]*@', '//', url)

  @property
  def is_anonymous(self) -> bool:
    """Whether there are no credentials for S3 in any of the usual places."""
    if self.scheme != 's3':
      return False
    session = importlib.import_module('botocore.session').get_session()
    return session.get_credentials() is None

  def kvstore(self, retries: dict[str, Any] | None = None) -> dict[str, Any]:
    """TensorStore's spec of the location, as of a folder."""
    spec: dict[str, Any] = {'bucket': self.bucket, 'path': f'{self.path}/' if self.path else ''}
    if self.scheme == 'gs':
      return {'driver': 'gcs', **spec, 'gcs_request_retries': retries or RETRIES}
    server = s3_server()
    spec.update(driver='s3', use_conditional_write=True, s3_request_retries=retries or RETRIES)
    if server.endpoint:
      spec.update(endpoint=server.endpoint, aws_region=server.region)
    return spec


class S3Server(NamedTuple):
  """An S3-compatible server.

  Attributes:
    endpoint: its URL; None for Amazon's own, which TensorStore finds by the bucket's region.
    region: its region.
  """

  endpoint: str | None
  region: str


def s3_server() -> S3Server:
  """The server that botocore finds in the environment and in AWS's configuration files.

  Raises:
    CheckpointError: they contradict each other.
  """
  try:
    meta = filesystem('s3').connect().meta
  except CheckpointError:
    raise
  except Exception as error:  # of many kinds
    raise CheckpointError(
      f'The configuration of AWS cannot be used: {str(error).rstrip(".")}.\n'
      'Fix: correct the AWS_* variables, or the files in ~/.aws.'
    ) from error
  amazon = '.amazonaws.com' in meta.endpoint_url
  return S3Server(None if amazon else meta.endpoint_url, meta.region_name or 'us-east-1')


def filesystem(scheme: str) -> Any:
  """The fsspec file system of a kind of bucket: one of our own, which remembers no list.

  Raises:
    CheckpointError: the package for it is not installed; or only one of GCS's two emulator variables is set.
  """
  servers = [os.environ.get(name) for name in _EMULATOR]
  if scheme == 'gs' and any(servers) and not all(servers):
    raise CheckpointError(
      f'{" and ".join(_EMULATOR)} must both be set, or neither: '
      'arrays and small files would go to different servers.\n'
      f'Fix: set {_EMULATOR[servers.index(next(s for s in servers if not s))]} too.'
    )
  settings = sorted((key, value) for key, value in os.environ.items() if key.startswith(_SETTINGS))
  return _filesystem(scheme, hashlib.blake2b(repr(settings).encode()).digest())


def forget_clients() -> None:
  """Makes the next call find the credentials anew: after an error, a user may have logged in."""
  _filesystem.cache_clear()


@functools.lru_cache(maxsize=8)
def _filesystem(scheme: str, settings: bytes) -> Any:
  import fsspec

  options: dict[str, Any] = {'skip_instance_cache': True, 'use_listings_cache': False}
  if scheme == 'gs':
    options.update(finalize_on_close=True)  # as etils
  else:
    options.update(
      config_kwargs={'connect_timeout': 10, 'read_timeout': 60, 'retries': {'max_attempts': 2}}
    )
  try:
    files = fsspec.filesystem(scheme, **options)
    if scheme == 'gs':
      files.isdir = functools.partial(_is_folder, files)
    return files
  except ImportError as error:
    package, extra = _PACKAGES[scheme]
    raise CheckpointError(
      f"Checkpoints at {scheme}:// need the package {package}.\nFix: pip install 'flax-spmd[{extra}]'"
    ) from error


def _is_folder(files: Any, path: str) -> bool:
  """Whether a path is a folder. gcsfs takes a refusal for absence."""
  try:
    return files.info(path)['type'] == 'directory'
  except FileNotFoundError:
    return False


def listed_once(path: str | os.PathLike[str]) -> AbstractContextManager[None]:
  """A block in which Orbax and etils take answers about a folder from one list of it; see `listed_folder`."""
  url = os.fspath(path)
  if '://' not in url:
    return contextlib.nullcontext()
  reach(url)
  return listed_folder.listed_once(filesystem(Location.of(url).scheme), url)


def reach(url: str) -> None:
  """Makes Orbax reach a URL and everything below it, past every cache, for the rest of the program.

  Raises:
    CheckpointError: a package is missing, or the installed Orbax has another structure.
  """
  filesystem(Location.of(url).scheme)
  with _reaching:
    if not _is_reached(url):
      _reached.add(url)
      try:
        _redirect(url)
      except BaseException:
        _reached.discard(url)
        raise


def _redirect(url: str) -> None:
  """Makes Orbax ask here, and checks with one URL that it does."""
  try:
    redirect_orbax(_kvstore, _files)
    expected, cause = _kvstore(url), None
    if expected in (None, orbax_kvstore(url)):
      return
  except CheckpointError:
    raise
  except (AttributeError, ImportError, ValueError) as error:
    cause = error
  versions = [f'{name} {importlib.metadata.version(name)}' for name in ('orbax-checkpoint', 'etils')]
  raise CheckpointError(
    f'{url} cannot be reached with {" and ".join(versions)}: their structure has changed.\n'
    'Fix: pip install orbax-checkpoint==0.12.8 etils==1.15.0'
  ) from cause


def _is_reached(url: str) -> bool:
  """Whether a URL, or one above it, has been reached."""
  return any(each in _reached for each in listed_folder.lineage(url))


def _kvstore(url: str) -> dict[str, Any] | None:
  """TensorStore's spec of an array or a folder of arrays, for Orbax; None for a path of others."""
  other = os.environ.get('TENSORSTORE_GCS_BACKEND', 'gcs') != 'gcs'  # Orbax's own choice
  if not _is_reached(url) or (other and url.startswith('gs://')):
    return None
  spec = Location.of(url).kvstore(PATIENT)
  return {**spec, 'path': spec['path'].rstrip('/')}  # as Orbax, which adds the slash


def _files(path: str) -> Any:
  """The file system of a path, for etils; None for a path of others."""
  if not _is_reached(path):
    return None
  return listed_folder.listed(path) or filesystem(Location.of(path).scheme)
