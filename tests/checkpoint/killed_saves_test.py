"""Killed saves: after a kill at any moment, a complete checkpoint can be restored, and the next save goes at once.

A process is killed before or after an operation on files, so that every step of a save is covered; and at
random moments, while Orbax writes.
"""

import random
import shutil
import signal

import jax.numpy as jnp
import numpy as np
import pytest

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd._src.checkpoint.storage import head_lease
from tests.checkpoint import damage
from tests.processes import run_process

VICTIM = """
import os, re, shutil, signal, threading
import flax_spmd as spmd
from flax_spmd import checkpoint
from tests.checkpoint.killed_saves_test import state_of

path, overwrite, when, number, operation = {arguments!r}
layout = spmd.Layout({{'data': 8}}, (('rows', 'data'),))
state = state_of(layout, 2)
seen = 0

def fatal(name, call):
  def counted(*args, **kwargs):
    global seen
    matches = re.search(operation, f'{{name}} {{args[-1] if name == "replace" else args[0]}}')
    seen += bool(matches)
    if matches and seen == number and when == 'before':
      os.kill(os.getpid(), signal.SIGKILL)
    result = call(*args, **kwargs)
    if matches and seen == number and when == 'after':
      os.kill(os.getpid(), signal.SIGKILL)
    return result
  return counted

if when == 'delay':
  threading.Timer(number, os.kill, (os.getpid(), signal.SIGKILL)).start()
for module, name in ((os, 'rename'), (os, 'replace'), (os, 'unlink'), (shutil, 'rmtree')):
  setattr(module, name, fatal(name, getattr(module, name)))
checkpoint.save(path, state, layout, overwrite=overwrite)
"""

# when, the how manieth, and the operation; whether the save has then been committed
MOMENTS = [
  (('before', 1, r'replace .*/HEAD'), False),
  (('after', 1, r'replace .*/HEAD'), False),
  (('before', 1, r'rename .*/gen-'), False),
  (('after', 1, r'rename .*/gen-'), False),
  (('after', 1, r'replace .*/MANIFEST'), False),
  (('before', 2, r'replace .*/HEAD'), False),
  (('after', 2, r'replace .*/HEAD'), True),
]
CLEANUP = [
  (('after', 1, r'unlink .*/MANIFEST'), True),
  (('after', 1, r'rmtree .*/gen-'), True),
]


@pytest.fixture(scope='module')
def layout():
  return spmd.Layout({'data': 8}, (('rows', 'data'),))


def values(number):
  return np.random.default_rng(number).standard_normal((512, 512), np.float32)


def state_of(layout, number):
  boxed = spmd.LogicallyPartitioned(values(number), ('rows', None))
  return layout.shard({'w': boxed, 'step': jnp.int32(number)})


def number_of(path, layout):
  """The number of the restored state, after comparing all of it; None if there is no checkpoint."""
  try:
    restored = checkpoint.restore(path, layout=layout)
  except errors.CheckpointNotFoundError:
    return None
  np.testing.assert_array_equal(restored['w'], values(int(restored['step'])))
  return int(restored['step'])


def victim(path, overwrite, when, number, operation='x^'):
  """Saves in a process that is killed at a moment; returns its exit code."""
  source = VICTIM.format(arguments=(str(path), overwrite, when, number, operation))
  return run_process(source, check=False).returncode


def names_in(folder):
  return {child.name for child in folder.iterdir() if child.name != '.flax_spmd.lock'}


def refuse(*_):
  raise AssertionError('A save waits for a process of this machine that has ended.')


def check_and_save_again(path, layout, allowed):
  """Restores one of the allowed states; then saves again, which leaves no other files."""
  assert number_of(path, layout) in allowed
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(head_lease, 'stays_silent', refuse)
    checkpoint.save(path, state_of(layout, 3), layout=layout, overwrite=True)
  assert number_of(path, layout) == 3
  assert names_in(path) == {'HEAD', damage.generation_of(path).name}


@pytest.mark.slow
def test_killed_at_every_step_of_an_overwrite(tmp_path, layout):
  moments = MOMENTS + CLEANUP
  paths = [tmp_path / str(number) for number in range(len(moments))]
  checkpoint.save(paths[0], state_of(layout, 1), layout=layout)
  for path in paths[1:]:
    shutil.copytree(paths[0], path)
  for path, (moment, is_committed) in zip(paths, moments, strict=True):
    assert victim(path, True, *moment) == -signal.SIGKILL
    check_and_save_again(path, layout, (2,) if is_committed else (1,))
  assert names_in(tmp_path) == {path.name for path in paths}


@pytest.mark.slow
def test_killed_at_every_step_of_a_save_to_a_new_path(tmp_path, layout):
  """The next save to the path goes at once; and the next save beside the paths removes what is incomplete."""
  again, beside = tmp_path / 'again', tmp_path / 'beside'
  paths = [again / str(number) for number in range(len(MOMENTS))]
  for path, (moment, _) in zip(paths, MOMENTS, strict=True):
    assert victim(path, False, *moment) == -signal.SIGKILL
  shutil.copytree(again, beside)
  for path, (_, is_committed) in zip(paths, MOMENTS, strict=True):
    check_and_save_again(path, layout, (2,) if is_committed else (None,))
  assert names_in(again) == {path.name for path in paths}
  checkpoint.save(beside / 'next', state_of(layout, 3), layout=layout)
  complete = {path.name for path, (_, is_committed) in zip(paths, MOMENTS, strict=True) if is_committed}
  assert names_in(beside) == {'next', *complete} and complete
  assert all(number_of(beside / name, layout) == 2 for name in complete)


@pytest.mark.slow
def test_killed_at_random_moments_of_an_overwrite(tmp_path, layout):
  checkpoint.save(tmp_path / 'a', state_of(layout, 1), layout=layout)
  rng = random.Random(0)
  for run in range(6):
    path = shutil.copytree(tmp_path / 'a', tmp_path / str(run))
    done = victim(path, True, 'delay', rng.uniform(0, 0.3)) == 0
    check_and_save_again(path, layout, (2,) if done else (1, 2))
