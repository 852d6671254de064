"""Stores in buckets: what is sent, what is refused, and errors that name bucket, server and remedy."""

import logging
import re
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from textwrap import dedent

import pytest

import flax_spmd as spmd
from flax_spmd import checkpoint
from flax_spmd._src.checkpoint.storage import buckets
from flax_spmd._src.checkpoint.storage.store import FileRecord, open_store
from flax_spmd.errors import CheckpointError, CheckpointReadOnlyError
from tests.object_stores import Answer
from tests.processes import run_process

CONDITIONS = ('ifGenerationMatch', 'if-match', 'if-none-match')
QUICK = {'max_retries': 1, 'initial_delay': '1ms', 'max_delay': '1ms'}


def writes(server):
  """The conditions of all writes that a server was asked for."""
  return [
    {name for name in CONDITIONS if name in {**request.query, **request.headers}}
    for request in server.requests
    if request.method in ('PUT', 'POST') and 'HEAD' in request.path + request.query.get('name', '')
  ]


def test_conditions_are_sent_to_the_server(server):
  """Not checked by a request before: another writer could come between the two."""
  store = open_store(f'{server.bucket}/run')
  tag = store.write('HEAD', b'1', expected=None)
  store.write('HEAD', b'2', expected=tag)
  store.write('HEAD', b'3')
  first, second, third = writes(server)
  assert first == ({'if-none-match'} if 's3' in server.bucket else {'ifGenerationMatch'})
  assert second == ({'if-match'} if 's3' in server.bucket else {'ifGenerationMatch'})
  assert third == set()


def test_conditions_of_removals_are_sent_to_the_server(server):
  store = open_store(f'{server.bucket}/run')
  tag = store.write('HEAD', b'1', expected=None)
  assert store.remove_if('HEAD', tag)
  (removal,) = [r for r in server.requests if r.method == 'DELETE' and r.path.endswith('run/HEAD')]
  assert {'ifGenerationMatch', 'if-match'} & {*removal.query, *removal.headers}


def test_a_server_that_ignores_conditions(s3):
  s3.obeys = False
  store = open_store(f'{s3.bucket}/run')
  with pytest.raises(CheckpointError) as caught:
    store.write('HEAD', b'1', expected=None)
  assert str(caught.value) == dedent(f"""\
    {s3.bucket}/run: the server {s3.url} does not obey conditions of writes (If-Match, If-None-Match), so two writers could damage each other.
    Fix: save to a bucket of GCS or Amazon S3, or to a server with conditional writes.""")
  assert store.write('x', b'1')
  assert store.read('HEAD') is None
  assert list(store.files()) == ['x']


def test_a_server_that_rejects_conditions(s3):
  s3.intercept = lambda request: (
    s3.refusal(501, 'NotImplemented') if {'if-match', 'if-none-match'} & set(request.headers) else None
  )
  store = open_store(f'{s3.bucket}/run')
  with pytest.raises(CheckpointError, match='does not obey conditions of writes'):
    store.write('HEAD', b'1', expected=None)


def test_conditions_are_tried_once(server):
  assert open_store(f'{server.bucket}/run').write('x', b'1', expected=None)
  count = len(server.requests)
  assert open_store(f'{server.bucket}/other').write('x', b'1', expected=None)
  assert len(server.requests) == count + 1
  assert list(open_store(server.bucket).files()) == ['other/x', 'run/x']


def test_a_write_whose_answer_is_lost(server):
  """It is repeated; the repetition fails since the first one succeeded; the content shows it."""
  store = open_store(f'{server.bucket}/run')
  tag = store.write('HEAD', b'1', expected=None)
  lost = []

  def lose(request):
    if request.method in ('PUT', 'POST') and not lost:
      lost.append(request)
      server.put(f'{server.bucket}/run/HEAD', b'2')
      return server.refusal(503, 'ServiceUnavailable')
    return None

  server.intercept = lose
  assert store.write('HEAD', b'2', expected=tag) is not None
  assert len(lost) == 1
  assert store.read('HEAD')[0] == b'2'


def test_lists_are_never_remembered(server):
  store = open_store(f'{server.bucket}/run')
  for number in range(3):
    server.put(f'{server.bucket}/run/step_{number}/x', b'1')
    assert store.children() == [f'step_{n}' for n in range(number + 1)]
    assert list(store.files()) == [f'step_{n}/x' for n in range(number + 1)]
    assert (store.root / f'step_{number}').exists()
    assert sorted(child.name for child in store.root.iterdir()) == store.children()


def test_a_list_does_not_go_through_what_is_below(server):
  store = open_store(f'{server.bucket}/run')
  for number in range(60):
    server.put(f'{server.bucket}/run/gen-1/d/{number}', b'1')
  server.put(f'{server.bucket}/run/HEAD', b'1')
  store.read('HEAD')
  server.requests.clear()
  assert store.children() == ['HEAD', 'gen-1']
  assert len(server.requests) == 1


def test_long_lists(server):
  store = open_store(f'{server.bucket}/run')
  names = [f'{number:02}' for number in range(50)]
  for name in names:
    server.put(f'{server.bucket}/run/gen-1/{name}', b'1')
  assert store.children('gen-1') == names
  assert {name: file.size for name, file in store.files('gen-1').items()} == dict.fromkeys(names, 1)
  store.remove('gen-1')
  assert store.children() == []


def test_a_whole_bucket_is_no_path_of_a_checkpoint(server):
  server.put(f'{server.bucket}/mine', b'1')
  with pytest.raises(CheckpointError) as caught:
    checkpoint.save(server.bucket, {'w': 1}, spmd.Layout({'data': 8}), overwrite=True)
  assert str(caught.value) == (
    f'{server.bucket} is a whole bucket.\nFix: save to a path in it, such as {server.bucket}/checkpoint.'
  )
  assert open_store(server.bucket).children() == ['mine']


def test_checksums_are_those_of_the_server(server):
  store = open_store(f'{server.bucket}/run')
  assert store.write('x', b'123', expected=None)
  server.requests.clear()
  md5 = 'md5:202cb962ac59075b964b07152d234b70'
  digest = 'crc32c:107b2fb2' if server.bucket.startswith('gs://') else md5
  assert store.files() == store.files(like=digest) == {'x': FileRecord(3, digest)}
  assert len(server.requests) == 2
  assert store.digest('x') == store.digest('x', like=digest) == digest
  assert not [r for r in server.requests if r.method == 'GET' and r.query.get('alt') == 'media']
  assert store.digest('x', like='md5:00') == md5
  assert store.digest('x', like='crc32:00') == 'crc32:884863d2'


def test_an_answer_that_lacks_its_end(server):
  """As of a connection that broke after the first line: whether the object was written is unknown."""
  store = open_store(f'{server.bucket}/run')
  store.read('HEAD')
  server.intercept = lambda request: Answer(200) if request.method in ('PUT', 'POST') else None
  with pytest.raises(CheckpointError, match=r'check the network.*, and repeat the call'):
    store.write('HEAD', b'1')


def test_credentials_that_are_set_after_an_error(s3, monkeypatch):
  """As in a notebook: the next call finds them, and no secret is kept."""
  for name in ('AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY'):
    monkeypatch.delenv(name)
  with pytest.raises(CheckpointError, match='set AWS_PROFILE, or AWS_ACCESS_KEY_ID'):
    open_store(f'{s3.bucket}/run').read('HEAD')
  s3.requests.clear()
  monkeypatch.setenv('AWS_ACCESS_KEY_ID', 'AKIDLATER')
  monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', 'SECRETLATER')
  store = open_store(f'{s3.bucket}/run')
  assert store.write('HEAD', b'1') and store.children() == ['HEAD']
  (authorization,) = {request.headers['authorization'].split('/')[0] for request in s3.requests}
  assert authorization.endswith('AKIDLATER')


def test_clients_that_are_forgotten_while_threads_use_them(server):
  """An error in one thread makes all later calls find new clients; calls in progress keep theirs."""
  store = open_store(f'{server.bucket}/run')
  names = ['a', 'b', 'c']
  for name in names:
    store.write(name, name.encode(), expected=None)

  def use(name):
    for _ in range(2):
      assert store.children() == names and store.files()[name].size == 1
      buckets.forget_clients()
      assert store.digest(name, 'crc32:') == f'crc32:{zlib.crc32(name.encode()):08x}'

  with ThreadPoolExecutor(len(names)) as threads:
    list(threads.map(use, names))


def test_tags_that_are_no_checksums(s3):
  """As those of a bucket that encrypts with a key: then the content is read."""
  s3.encrypts = True
  store = open_store(f'{s3.bucket}/run')
  assert store.write('x', b'123', expected=None)
  assert store.files() == {'x': FileRecord(3, '')}
  assert store.digest('x') == store.digest('x', like='crc32c:00') == 'crc32c:107b2fb2'
  assert store.digest('x', like='md5:00') == 'md5:202cb962ac59075b964b07152d234b70'


ERRORS = [
  (403, 'AccessDenied', CheckpointReadOnlyError, 'let an owner of the bucket grant these credentials'),
  (401, 'Unauthorized', CheckpointError, 'run `gcloud auth|set AWS_PROFILE'),
  (403, 'SignatureDoesNotMatch', CheckpointError, 'run `gcloud auth|set AWS_PROFILE'),
  (400, 'ExpiredToken', CheckpointError, 'run `gcloud auth|set AWS_PROFILE'),
  (400, 'AuthorizationHeaderMalformed', CheckpointError, 'set AWS_DEFAULT_REGION'),
  (503, 'SlowDown', CheckpointError, 'check the network'),
  (418, 'Teapot', CheckpointError, 'check the path and the settings of the bucket'),
]


@pytest.mark.parametrize(('status', 'code', 'kind', 'fix'), ERRORS, ids=[error[1] for error in ERRORS])
def test_refusals(server, status, code, kind, fix, monkeypatch):
  monkeypatch.setattr(buckets, 'RETRIES', QUICK)
  store = open_store(f'{server.bucket}/run')
  store.read('HEAD')
  server.intercept = lambda request: server.refusal(status, code)
  with pytest.raises(CheckpointError) as caught:
    store.write('HEAD', b'1')
  assert type(caught.value) is kind
  lines = str(caught.value).splitlines()
  assert lines[0].startswith(f'Cannot write {server.bucket}/run/HEAD ({server.url}): {code}')
  assert re.match(f'Fix: ({fix})', lines[1])
  assert len(lines) == 2


def test_text_of_a_refusal(s3):
  store = open_store(f'{s3.bucket}/run')
  s3.intercept = lambda request: s3.refusal(403, 'AccessDenied')
  with pytest.raises(CheckpointError) as caught:
    store.read('HEAD')
  assert str(caught.value) == dedent(f"""\
    Cannot read {s3.bucket}/run/HEAD ({s3.url}): AccessDenied: No.
    Fix: let an owner of the bucket grant these credentials the right to read there.""")


@pytest.mark.parametrize('scheme', ['gs', 's3'])
def test_a_server_that_does_not_answer(scheme, gcs, s3, monkeypatch):
  monkeypatch.setattr(buckets, 'RETRIES', QUICK)
  for name in ('AWS_ENDPOINT_URL', 'STORAGE_EMULATOR_HOST', 'TENSORSTORE_GCS_HTTP_URL'):
    monkeypatch.setenv(name, 'http://127.0.0.1:1')
  with pytest.raises(CheckpointError, match=r'connect to server.*\nFix: check the network'):
    open_store(f'{scheme}://bucket-x/run').read('HEAD')


def test_one_of_the_two_emulator_variables(gcs, monkeypatch):
  monkeypatch.delenv('TENSORSTORE_GCS_HTTP_URL')
  with pytest.raises(CheckpointError) as caught:
    open_store(f'{gcs.bucket}/run')
  assert str(caught.value) == dedent("""\
    STORAGE_EMULATOR_HOST and TENSORSTORE_GCS_HTTP_URL must both be set, or neither: arrays and small files would go to different servers.
    Fix: set TENSORSTORE_GCS_HTTP_URL too.""")


def test_a_package_that_is_missing():
  script = """
    import sys
    from flax_spmd._src.checkpoint.storage.store import FileRecord, open_store
    sys.modules.update(gcsfs=None, s3fs=None)
    for url in ('gs://bucket/run', 's3://bucket/run'):
      try:
        open_store(url)
      except Exception as error:
        print(type(error).__name__, error)
  """
  assert run_process(dedent(script)).stdout.splitlines() == [
    'CheckpointError Checkpoints at gs:// need the package gcsfs.',
    "Fix: pip install 'flax-spmd[gcs]'",
    'CheckpointError Checkpoints at s3:// need the package s3fs.',
    "Fix: pip install 'flax-spmd[s3]'",
  ]


def test_a_profile_that_is_missing(s3, monkeypatch):
  monkeypatch.setenv('AWS_PROFILE', 'nobody')
  with pytest.raises(CheckpointError) as caught:
    open_store(f'{s3.bucket}/run').read('HEAD')
  assert str(caught.value) == dedent("""\
    The configuration of AWS cannot be used: The config profile (nobody) could not be found.
    Fix: correct the AWS_* variables, or the files in ~/.aws.""")


def test_secrets_are_not_shown(s3, caplog):
  """A server repeats what it was sent, in the error of a wrong signature even the session token."""
  store = open_store(f'{s3.bucket}/run')
  with caplog.at_level(logging.INFO):
    store.write('HEAD', b'1', expected=None)
    answer = s3.refusal(403, 'SignatureDoesNotMatch')
    body = answer.body.replace(
      b'</Error>', b'<CanonicalRequest>SECRETTEST AKIDTEST</CanonicalRequest></Error>'
    )
    headers = {**answer.headers, 'Content-Length': str(len(body))}
    s3.intercept = lambda request: answer._replace(body=body, headers=headers)
    for call in (lambda: store.read('HEAD'), store.files):
      with pytest.raises(CheckpointError) as caught:
        call()
      shown = [str(caught.value), str(caught.value.__cause__), repr(store.root), caplog.text]
      assert not [text for text in shown if 'SECRETTEST' in text or 'AKIDTEST' in text]
      assert caught.value.__suppress_context__
  s3.intercept = lambda request: None
  assert b'SECRETTEST' not in store.read('HEAD')[0]


def test_a_password_in_the_url_of_a_server_is_not_shown(s3, monkeypatch):
  monkeypatch.setenv('AWS_ENDPOINT_URL', 'http://me:SECRETTEST@127.0.0.1:1')
  monkeypatch.setattr(buckets, 'RETRIES', QUICK)
  with pytest.raises(CheckpointError) as caught:
    open_store(f'{s3.bucket}/run').read('HEAD')
  assert '(http://127.0.0.1:1)' in str(caught.value)
  assert 'SECRETTEST' not in str(caught.value)


def test_stores_in_many_threads(server):
  results = []

  def work(number):
    store = open_store(f'{server.bucket}/run')
    results.append(store.write(f'pin-{number}', b'1', expected=None))

  threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert all(results)
  assert len(open_store(f'{server.bucket}/run').children()) == 16


def test_a_server_that_ignores_conditions_of_removals(s3):
  """Its files are kept: somebody may have written since."""
  s3.obeys_removals = False
  store = open_store(f'{s3.bucket}/run')
  tag = store.write('HEAD', b'1', expected=None)
  assert not store.remove_if('HEAD', tag)
  assert store.read('HEAD') == (b'1', tag)
