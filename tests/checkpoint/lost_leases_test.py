"""A manager whose process is stopped for longer than its lease, while another one takes over, on every store.

The writer that comes back ends with an error that names the other one, and changes nothing of it.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import flax_spmd as spmd
from flax_spmd import checkpoint
from flax_spmd._src.checkpoint.storage import liveness
from flax_spmd._src.checkpoint.storage.store import as_path, open_store
from tests.processes import ROOT

LAYOUT = spmd.Layout({'data': 8})

# It runs as on another machine, and stops itself in its third save.
VICTIM = """
import json, os, signal, sys, time
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp
import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd._src.checkpoint.steps.step_folder import StepFolder
from flax_spmd._src.checkpoint.storage import async_save, generations, head_lease, process_identity
process_identity._namespace = lambda: 'elsewhere'
head_lease.LEASE = 1.0

def stop():
  os.kill(os.getpid(), signal.SIGSTOP)
  time.sleep(1)  # if another thread takes the signal, this one could go on

def stopping(owner, name, after=False):
  original = getattr(owner, name)
  def stopped(*arguments, **options):
    setattr(owner, name, original)
    if not after:
      stop()
    result = original(*arguments, **options)
    if after:
      stop()
    return result
  setattr(owner, name, stopped)

points = {
  'idle': stop,
  'before the lease': lambda: stopping(async_save, 'claim'),
  'before the arrays': lambda: stopping(ocp, 'save_async'),
  'before the manifest': lambda: stopping(generations, 'new_manifest'),
  'before the commit': lambda: stopping(head_lease.HeadLease, 'commit'),
  'after the commit': lambda: stopping(head_lease.HeadLease, 'commit', after=True),
  'before a removal': lambda: stopping(StepFolder, 'remove'),
  'in a removal': lambda: stopping(generations, '_removed'),
}
for line in sys.stdin:
  root, point = json.loads(line)
  manager = checkpoint.Manager(root, spmd.Layout({'data': 8}), every=1, keep=2)
  for step in (1, 2):
    manager.save(step, {'w': jnp.full(8, float(step))})
  manager.wait()
  points[point]()
  texts = []
  for step in (3, 4):
    try:
      manager.save(step, {'w': jnp.full(8, -1.0 * step)})
      manager.wait()
    except errors.CheckpointBusyError as error:
      texts.append(str(error))
  manager.close()
  print(json.dumps(texts), flush=True)
"""
POINTS = {  # the steps that its successor finds
  'idle': [1, 2],
  'before the lease': [1, 2],
  'before the arrays': [1, 2],
  'before the manifest': [1, 2],
  'before the commit': [1, 2],
  'after the commit': [1, 2, 3],
  'before a removal': [1, 2, 3],
  'in a removal': [1, 2, 3],
}


def contents_of(root):
  """Every file below a root; of a HEAD its generation, and nothing of the lease of the manager."""
  store = open_store(as_path(root))
  names = [name for name in store.files() if not name.startswith('.flax_spmd_manager/')]
  contents = {name: store.read(name)[0] for name in names}
  heads = {name: json.loads(data)['generation'] for name, data in contents.items() if '/HEAD' in name}
  return contents | heads


@pytest.fixture
def victim(root):
  with subprocess.Popen(
    [sys.executable, '-c', VICTIM],
    env=os.environ | {'PYTHONPATH': str(ROOT)},
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  ) as process:
    yield process
    process.kill()


LEFT = {  # for the next save to the path, or beside it
  'before the commit': {'3'},
  'before a removal': {'.flax_spmd'},
  'in a removal': {'.flax_spmd'},
}


def wait_until_stopped(process):
  while Path(f'/proc/{process.pid}/stat').read_text().rpartition(')')[2].split()[0] != 'T':
    assert process.poll() is None
    time.sleep(0.01)


def run_on(manager, step):
  manager.save(step, {'w': jnp.full(8, 10.0 * step)})
  manager.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
  ('root', 'first'),
  [
    ('disk', 0),
    ('disk', 1),
    ('gcs', 0),
    ('s3', 1),
    pytest.param('gcs', 1, marks=pytest.mark.exhaustive),
    pytest.param('s3', 0, marks=pytest.mark.exhaustive),
  ],
  indirect=['root'],
)
def test_a_manager_that_is_stopped_for_longer_than_its_lease(root, first, victim, monkeypatch):
  monkeypatch.setattr(liveness, 'LEASE', 1.0)
  monkeypatch.setattr(liveness, 'BEAT', 0.3)
  me = f'process {os.getpid()} on {socket.gethostname()}'
  for number, (point, there) in enumerate(list(POINTS.items())[first::2]):
    run = f'{root}/{number}'
    victim.stdin.write(json.dumps([run, point]) + '\n')
    victim.stdin.flush()
    wait_until_stopped(victim)
    manager = checkpoint.Manager(run, LAYOUT, every=1, keep=9)
    assert manager.steps == there, point
    assert manager.restore().step == there[-1]
    new = there[-1] + 1
    run_on(manager, new)
    if number % 2:  # it has ended before the other one comes back
      manager.close()
    before = contents_of(run)
    os.kill(victim.pid, signal.SIGCONT)
    texts = json.loads(victim.stdout.readline())
    assert texts and {text.partition(' was ')[0] for text in texts} <= {run, f'Checkpoint {run}/3'}
    for text in texts:
      assert text.partition(' was ')[2] == (
        f'taken over by {me}, since this process was suspended, or cut off from the storage, for a while.\n'
        'Fix: end this job, or save to another path.'
      ), point
    after = contents_of(run)
    changed = {name for name in before if after.get(name) != before[name]}
    left = {name.split('/')[0] for name in set(after) - set(before)}
    assert not changed, point
    assert left <= LEFT.get(point, set()), point
    if not number % 2:
      run_on(manager, new + 1)
      manager.close()
    with checkpoint.Manager(run, LAYOUT, read_only=True) as reader:
      for step in reader.steps:
        value = 10.0 * step if step >= new else -float(step) if step == 3 else float(step)
        np.testing.assert_array_equal(reader.restore(step=step).state['w'], np.full(8, value))
        assert checkpoint.verify(f'{run}/{step}') == []
