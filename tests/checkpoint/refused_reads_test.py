"""Refused reads: storage that refuses is an error of its own, never damage, absence, or a raw error of a client."""

import os
import re
import tempfile
from pathlib import Path
from textwrap import dedent

import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd._src.checkpoint.storage import buckets, refused_reads
from tests.processes import as_another_user

LAYOUT = spmd.Layout({'data': 8})
STATE = {'w': np.ones(8, np.float32)}
GRANT = 'Fix: let an owner of the bucket grant these credentials the right to {} there.'
LOGIN = {
  'gs': 'Fix: run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS.',
  's3': 'Fix: set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN), to valid ones.',
}


def reader(root):
  return checkpoint.Manager(root, LAYOUT, read_only=True)


WRITES = {
  'save': lambda url, own: checkpoint.save(f'{url}/a', STATE, LAYOUT),
  'overwrite': lambda url, own: checkpoint.save(f'{url}/a', STATE, LAYOUT, overwrite=True),
  'save_async': lambda url, own: checkpoint.save_async(f'{url}/a', STATE, LAYOUT).result(),
  'Manager': lambda url, own: checkpoint.Manager(f'{url}/run', LAYOUT),
  'convert': lambda url, own: checkpoint.convert(own, f'{url}/b'),
}
READS = {
  'restore': lambda url, own: checkpoint.restore(f'{url}/a', layout=LAYOUT),
  'salvage': lambda url, own: checkpoint.restore(f'{url}/a', layout=LAYOUT, salvage=True),
  'safetensors': lambda url, own: checkpoint.restore(f'{url}/m.safetensors', layout=LAYOUT),
  'verify': lambda url, own: checkpoint.verify(f'{url}/a'),
  'preflight': lambda url, own: checkpoint.preflight(f'{url}/a', layout=LAYOUT),
  'show': lambda url, own: checkpoint.show(f'{url}/a'),
  'diff': lambda url, own: checkpoint.diff(own, f'{url}/a'),
  'ls': lambda url, own: checkpoint.ls(url),
  'ls of a folder': lambda url, own: checkpoint.ls(f'{url}/run'),
  'steps': lambda url, own: reader(f'{url}/run').steps,
  'follow': lambda url, own: list(reader(f'{url}/run').follow(timeout=0)),
  'restore of a run': lambda url, own: reader(f'{url}/run').restore(),
  'resume': lambda url, own: reader(f'{url}/run').resume(lambda: STATE),
}


@pytest.fixture(scope='module')
def own(tmp_path_factory):
  path = tmp_path_factory.mktemp('own') / 'a'
  checkpoint.save(path, STATE, LAYOUT)
  return path


def texts_of(calls, url, own):
  """The error of each call, by its name."""
  texts = {}
  for name, call in calls.items():
    with pytest.raises(errors.CheckpointError) as caught:
      call(url, own)
    assert not isinstance(caught.value, errors.CheckpointDamagedError), name
    texts[name] = str(caught.value)
  return texts


def test_a_bucket_that_is_not_there(server, own):
  url = f'{server.bucket}-not'
  expected = f'There is no bucket {url} ({server.url}).\nFix: create it, or correct its name.'
  for name, text in texts_of(WRITES | READS, url, own).items():
    assert text == expected, name


def test_no_credentials(server, own, monkeypatch):
  scheme = server.bucket[:2]
  if scheme == 's3':
    monkeypatch.delenv('AWS_ACCESS_KEY_ID')
    monkeypatch.delenv('AWS_SECRET_ACCESS_KEY')
    monkeypatch.setenv('AWS_REGION', 'elsewhere')  # another connection than that of other tests
  server.intercept = lambda request: (
    None if 'authorization' in request.headers else server.refusal(401, 'Unauthorized')
  )
  for name, text in texts_of(WRITES | READS, server.bucket, own).items():
    first, fix = text.splitlines()
    assert re.fullmatch(rf'Cannot (read|list) {server.bucket}\S* \({server.url}\): .*\.', first), name
    assert fix == LOGIN[scheme], name


def test_a_store_without_conditional_writes(s3, own):
  """Nothing is written. Reading needs no conditions."""
  s3.obeys = False
  for name, text in texts_of(WRITES, s3.bucket, own).items():
    where = f'{s3.bucket}/run' if name == 'Manager' else s3.bucket
    assert text == dedent(f"""\
      {where}: the server {s3.url} does not obey conditions of writes (If-Match, If-None-Match), so two writers could damage each other.
      Fix: save to a bucket of GCS or Amazon S3, or to a server with conditional writes.""")
  assert reader(f'{s3.bucket}/run').steps == [] and checkpoint.ls(s3.bucket) == []


# -- arrays that may not be read now


def saved_run(root, steps=(1, 2)):
  with checkpoint.Manager(root, LAYOUT, every=1) as manager:
    for step in steps:
      manager.save(step, {'w': jnp.full(8, float(step))})
  return root


@pytest.mark.parametrize(
  ('status', 'code'),
  [(403, 'AccessDenied'), pytest.param(503, 'SlowDown', marks=pytest.mark.exhaustive)],
)
def test_a_bucket_that_refuses_the_arrays(server, status, code, monkeypatch):
  """The newest step is whole, so no older one is restored in its place."""
  root = saved_run(f'{server.bucket}/run')
  for name in ('RETRIES', 'PATIENT'):
    monkeypatch.setattr(buckets, name, {'max_retries': 1, 'initial_delay': '1ms', 'max_delay': '1ms'})
  server.intercept = lambda request: (
    server.refusal(status, code) if '/2/gen-' in request.path and '/d/' in request.path else None
  )
  network = 'check the network' + (' and AWS_ENDPOINT_URL' if 's3:' in root else '')
  fix = GRANT.format('read') if status == 403 else f'Fix: {network}, and repeat the call.'
  with checkpoint.Manager(root, LAYOUT) as manager:
    with pytest.raises(errors.CheckpointError) as caught:
      manager.restore()
    assert type(caught.value) is errors.CheckpointError
    first, last = str(caught.value).splitlines()
    assert first.startswith(f'Cannot read {root}/2 ({server.url}): ') and code in first and last == fix
    server.intercept = lambda request: None
    assert manager.steps == [1, 2] and manager.restore().step == 2


def test_files_that_may_not_be_read():
  """The newest step is neither renamed nor left out; its files are those of a job of another user, say."""
  with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to other users
    saved_run(folder)
    checkpoint.restore(f'{folder}/1', layout=LAYOUT)  # imports what is needed
    for path in (Path(folder), *Path(folder).rglob('*')):
      os.chmod(path, 0o777 if path.is_dir() else 0o666)
    closed = [file for file in Path(folder, '2').rglob('*/d/*') if file.is_file()]
    for file in closed:
      os.chmod(file, 0)
    fix = 'Fix: let the owner of the files grant this process the right to read them.'
    with as_another_user(), checkpoint.Manager(folder, LAYOUT) as manager:
      with pytest.raises(errors.CheckpointError) as caught:
        manager.restore()
      with pytest.raises(errors.CheckpointError) as of_verify:
        checkpoint.verify(f'{folder}/2')
      assert manager.steps == [1, 2]
    assert type(caught.value) is type(of_verify.value) is errors.CheckpointError
    assert str(caught.value) == f'Cannot read {folder}/2: Permission denied (EACCES).\n{fix}'
    assert str(of_verify.value) in {
      f'Cannot read {file}: Permission denied (EACCES).\n{fix}' for file in closed
    }


# -- descriptions that may not be read now


def test_a_run_of_orbax_in_a_bucket_that_refuses(server, tmp_path):
  """A step that may not be looked at is not taken for none: training would begin anew."""
  root = f'{server.bucket}/run'
  for step in (1, 2):
    ocp.save(tmp_path / str(step), STATE)
    for file in (tmp_path / str(step)).rglob('*'):
      if file.is_file():
        server.put(f'{root}/{file.relative_to(tmp_path)}', file.read_bytes())
  assert reader(root).steps == [1, 2]
  for refused in (
    lambda request: request.query.get('prefix', '').startswith('run/2'),
    lambda request: 'run/2/' in request.path and 'HEAD' not in request.path,
  ):
    server.intercept = lambda request, refused=refused: (
      server.refusal(403, 'AccessDenied') if refused(request) else None
    )
    for call in (lambda: reader(root).resume(lambda: STATE), lambda: checkpoint.show(f'{root}/2')):
      with pytest.raises(errors.CheckpointError) as caught:
        call()
      first, last = str(caught.value).splitlines()
      places = tuple(f'Cannot read {root}/2{file} ({server.url}): ' for file in ('', '/MANIFEST'))
      assert first.startswith(places) and last == GRANT.format('read')
    one, two = checkpoint.ls(root)
    assert not one.error and two.error == str(caught.value)


def test_metrics_that_may_not_be_read(server):
  """A policy would otherwise decide as if the step had none, and remove it."""
  root = f'{server.bucket}/run'
  best = ocp.training.preservation_policies.BestN(
    get_metric_fn=lambda metrics: metrics['loss'], reverse=True, n=1
  )
  with checkpoint.Manager(root, LAYOUT, every=1, keep=best) as manager:
    manager.save(1, STATE, metrics={'loss': 1.0})
  with checkpoint.Manager(root, LAYOUT, every=1, keep=best) as manager:
    server.intercept = lambda request: (
      server.refusal(403, 'AccessDenied') if 'MANIFEST' in request.path else None
    )
    with pytest.raises(errors.CheckpointError, match=r'MANIFEST .*: AccessDenied'):
      manager.save(2, STATE, metrics={'loss': 2.0})
    server.intercept = lambda request: None
    assert manager.steps == [1]


def test_an_answer_of_a_bucket_that_never_ends():
  """gcsfs raises it for each answer that was cut, once it has tried often enough."""
  aiohttp = pytest.importorskip('aiohttp')  # of gcsfs
  cut = aiohttp.ClientPayloadError(
    "Response payload is not completed: <ContentLengthError: 400, message='x'>"
  )
  with (
    pytest.raises(errors.CheckpointError, match=r'(?s)Cannot read gs://bucket/run .*check the network'),
    refused_reads.refusals('gs://bucket/run'),
  ):
    raise cut
