"""Stores: the disk of this machine, and emulations of GCS and S3 that run in this process for the time of the campaigns."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

from faults.places import BucketPlace, DiskPlace, Place
from tests.object_stores import Answer, GcsServer, Request, S3Server

BUCKET = 'faults'
_PACKAGES = {'disk': (), 'gcs': ('gcsfs',), 's3': ('s3fs', 'moto')}

Harass = Callable[[Request], Answer | None]


class Server(Protocol):
  """An emulation that can be made to fail.

  Attributes:
    url: where it listens.
    intercept: called before each request; an answer of it replaces the server's own, which then does nothing.
    lose: called after each request, which has been done; an answer of it replaces the server's own.
  """

  url: str
  intercept: Harass
  lose: Harass

  def refusal(self, status: int, code: str) -> Answer:
    """An error as this server answers it."""
    ...

  def close(self) -> None: ...


def _nothing(request: Request) -> None:
  del request


class _Gcs(GcsServer):
  """GCS, whose answers can be lost."""

  lose: Harass = staticmethod(_nothing)

  def answer(self, request: Request, body: bytes) -> Answer:
    answer = super().answer(request, body)
    return self.lose(request) or answer


class _S3(S3Server):
  """S3, whose answers can be lost."""

  lose: Harass = staticmethod(_nothing)

  def _wsgi(self, environ: dict[str, Any], start_response: Any) -> Any:
    begun: list[tuple[Any, ...]] = []
    body = b''.join(super()._wsgi(environ, lambda *arguments: begun.append(arguments)))
    lost = self.lose(_request(environ))
    if lost is None:
      start_response(*begun[0])
      return [body]
    start_response(f'{lost.status} X', list(lost.headers.items()))
    return [lost.body]


def _request(environ: dict[str, Any]) -> Request:
  return Request(environ['REQUEST_METHOD'], environ['PATH_INFO'], {}, {})


class ServedPlace(BucketPlace):
  """A bucket of an emulation in this process.

  Attributes:
    server: the emulation.
  """

  def __init__(self, store: str, bucket: str, keys: dict[str, Any], server: Server):
    super().__init__(store, bucket, keys)
    self.server = server


@contextlib.contextmanager
def opened(store: str, folder: Path) -> Iterator[Place | None]:
  """A place in a store; None if a package that its emulation needs is not installed."""
  if any(importlib.util.find_spec(name) is None for name in _PACKAGES[store]):
    yield None
  elif store == 'disk':
    yield DiskPlace(folder)
  else:
    with {'gcs': _gcs, 's3': _s3}[store]() as place:
      yield place


@contextlib.contextmanager
def _gcs() -> Iterator[Place]:
  server = _Gcs().with_bucket(BUCKET)
  environment = {
    'STORAGE_EMULATOR_HOST': server.url,
    'TENSORSTORE_GCS_HTTP_URL': server.url,
    'GCE_METADATA_ROOT': '127.0.0.1:1',
    'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false',
  }
  with contextlib.closing(server), mock.patch.dict(os.environ, environment):
    yield ServedPlace('gcs', server.bucket, {'driver': 'gcs', 'bucket': BUCKET}, server)


@contextlib.contextmanager
def _s3() -> Iterator[Place]:
  server = _S3().with_bucket(BUCKET)
  environment = {
    'AWS_ENDPOINT_URL': server.url,
    'AWS_ACCESS_KEY_ID': 'key',
    'AWS_SECRET_ACCESS_KEY': 'secret',
    'AWS_DEFAULT_REGION': 'us-east-1',
    'AWS_EC2_METADATA_DISABLED': 'true',
    'AWS_CONFIG_FILE': os.devnull,
    'AWS_SHARED_CREDENTIALS_FILE': os.devnull,
  }
  keys = {'driver': 's3', 'bucket': BUCKET, 'endpoint': server.url, 'aws_region': 'us-east-1'}
  with contextlib.closing(server), mock.patch.dict(os.environ, environment):
    yield ServedPlace('s3', server.bucket, keys, server)
