"""The manager on disk, GCS and S3: one writer, readers that follow, retention, and a damaged newest step."""

import signal

import jax.numpy as jnp
import numpy as np
import pytest

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd._src.checkpoint.storage.store import open_store
from tests.processes import run_process

LAYOUT = spmd.Layout({'data': 8})


def value(manager, step=None):
  restored = manager.restore(step=step)
  (number,) = np.unique(restored.state['w'])
  return restored.step, float(number)


def save(manager, *steps, offset=0):
  for step in steps:
    manager.save(step, {'w': jnp.full(8, float(step + offset))}, force=True)
  manager.wait()


def test_a_run_with_readers(root):
  with (
    checkpoint.Manager(root, LAYOUT, keep=2) as manager,
    checkpoint.Manager(root, LAYOUT, read_only=True) as reader,
  ):
    save(manager, 1, 2, 3)
    assert manager.steps == reader.steps == [2, 3]
    steps = reader.follow(timeout=0)
    assert [next(steps), next(steps)] == [3, 2]
    save(manager, 4)
    assert list(steps) == [4]
    assert value(reader) == (4, 4.0)
    with pytest.raises(errors.CheckpointBusyError):
      checkpoint.Manager(root, LAYOUT)
  assert {name for name in open_store(root).children() if name.isdecimal()} == {'3', '4'}
  with checkpoint.Manager(root, LAYOUT) as manager:
    assert value(manager) == (4, 4.0)


def test_a_bucket_without_the_right_to_write_is_read_while_another_manager_writes(server, monkeypatch):
  root = f'{server.bucket}/run'
  with checkpoint.Manager(root, LAYOUT) as manager:
    save(manager, 1)
    refusing = []
    server.intercept = lambda request: (
      server.refusal(403, 'AccessDenied') if refusing and request.method != 'GET' else None
    )
    monkeypatch.setattr('flax_spmd._src.checkpoint.storage.object_store._abilities', {})
    refusing.append(True)
    with checkpoint.Manager(root, LAYOUT) as other:
      assert other.read_only and value(other) == (1, 1.0)
    refusing.clear()
    save(manager, 2)
    with pytest.raises(errors.CheckpointBusyError):
      checkpoint.Manager(root, LAYOUT)


def test_a_damaged_newest_step_is_replaced(root):
  """A bucket has no renames: the damaged step stays until training saves it again."""
  with checkpoint.Manager(root, LAYOUT) as manager:
    save(manager, 1, 2)
  store = open_store(root)
  (generation,) = [name for name in store.children('2') if name.startswith('gen-')]
  store.write(f'2/{generation}/MANIFEST', b'{}')
  with checkpoint.Manager(root, LAYOUT) as manager:
    with pytest.warns(UserWarning, match='It is (skipped|kept as .2.damaged); restoring the checkpoint'):
      assert value(manager) == (1, 1.0)
    assert manager.steps == [1]
    save(manager, 2, offset=10)
    assert manager.steps == [1, 2] and value(manager) == (2, 12.0)


KILLED = """
import os, signal
import signal

import jax.numpy as jnp
import flax_spmd as spmd
from flax_spmd import checkpoint
from flax_spmd._src.checkpoint.storage.head_lease import HeadLease

HeadLease.commit = lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL)
checkpoint.save({url!r}, {{'w': jnp.full(8, 1.0)}}, spmd.Layout({{'data': 8}}))
"""


@pytest.mark.exhaustive
def test_a_killed_save_in_a_bucket(server):
  """It blocks neither its path nor others, and a later save beside it removes what it left."""
  store, state = open_store(f'{server.bucket}/run'), {'w': jnp.full(8, 2.0)}
  for path in ('a', 'b'):
    url = f'{server.bucket}/run/{path}'
    assert run_process(KILLED.format(url=url), check=False).returncode == -signal.SIGKILL
    assert [name for name in store.files(path) if name.endswith('MANIFEST')]
    with pytest.raises(errors.CheckpointNotFoundError, match='an unfinished save'):
      checkpoint.restore(url, layout=LAYOUT)
    assert checkpoint.ls(f'{server.bucket}/run') == []
  checkpoint.save(f'{server.bucket}/run/a', state, LAYOUT)
  assert store.children() == ['a'] and len(store.children('a')) == 2
  assert float(checkpoint.restore(f'{server.bucket}/run/a', layout=LAYOUT)['w'][0]) == 2
