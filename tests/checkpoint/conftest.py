"""Object stores for tests of checkpoints: servers on loopback, started when a test asks for one."""

import os
import secrets

import pytest

from tests.object_stores import GcsServer, S3Server

# gcsfs would ask Google for the kind of each bucket; emulators are never asked.
os.environ['GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT'] = 'false'


@pytest.fixture(scope='session')
def gcs_process():
  server = GcsServer()
  yield server
  server.close()


@pytest.fixture(scope='session')
def s3_process():
  server = S3Server()
  yield server
  server.close()


@pytest.fixture
def gcs(gcs_process, monkeypatch):
  """A server of GCS with a new bucket, `gcs.bucket`, which this process and those it starts use."""
  monkeypatch.setenv('STORAGE_EMULATOR_HOST', gcs_process.url)
  monkeypatch.setenv('TENSORSTORE_GCS_HTTP_URL', gcs_process.url)
  monkeypatch.setenv('GCE_METADATA_ROOT', '127.0.0.1:1')
  return gcs_process.with_bucket(f'bucket-{secrets.token_hex(4)}')


@pytest.fixture
def s3(s3_process, monkeypatch):
  """A server of S3 with a new bucket, `s3.bucket`, which this process and those it starts use."""
  monkeypatch.setenv('AWS_ENDPOINT_URL', s3_process.url)
  monkeypatch.setenv('AWS_ACCESS_KEY_ID', 'AKIDTEST')
  monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', 'SECRETTEST')
  monkeypatch.setenv('AWS_DEFAULT_REGION', 'us-east-1')
  monkeypatch.setenv('AWS_EC2_METADATA_DISABLED', 'true')
  monkeypatch.setenv('AWS_CONFIG_FILE', os.devnull)
  monkeypatch.setenv('AWS_SHARED_CREDENTIALS_FILE', os.devnull)
  return s3_process.with_bucket(f'bucket-{secrets.token_hex(4)}')


@pytest.fixture(params=['gcs', 's3'])
def server(request):
  """A server of each kind of bucket."""
  return request.getfixturevalue(request.param)


@pytest.fixture(params=['disk', 'gcs', 's3'])
def root(request, tmp_path):
  """A place for checkpoints of each kind: a path, or a URL."""
  if request.param == 'disk':
    return str(tmp_path / 'run')
  return f'{request.getfixturevalue(request.param).bucket}/run'
