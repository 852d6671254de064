"""Managers that only read: beside a writer, on file systems that cannot be written to, and following a run."""

import itertools
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from textwrap import dedent

import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from tests.processes import ROOT

LAYOUT = spmd.Layout({'data': 8}, (('embed', 'data'),))
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason='mounts and other users need root')


def state(step):
  return {'w': jnp.full(8, float(step))}


def writer(root, **options):
  return checkpoint.Manager(root, LAYOUT, every=1, durable=False, **options)


def reader(root, **options):
  return checkpoint.Manager(root, LAYOUT, read_only=True, **options)


def run(root, steps, **options):
  with writer(root, **options) as manager:
    for step in steps:
      manager.save(step, state(step))


def value(manager, step=None):
  restored = manager.restore(LAYOUT.abstract(lambda: state(0)), step=step)
  assert np.unique(restored.state['w']).size == 1
  return restored.step, float(restored.state['w'][0])


class Batches:
  """A data iterator at a position."""

  def __init__(self, position):
    self.position = position

  def get_state(self):
    return self.position

  def set_state(self, state):
    self.position = state


def test_the_position_of_the_data_is_that_of_the_state(tmp_path, monkeypatch):
  """Another job replaces the step, without a position, while its arrays are read."""
  with writer(tmp_path) as manager:
    manager.save(1, state(1), data=Batches(7))
  load, data = ocp.load, Batches(0)

  def late(*args, **kwargs):
    monkeypatch.setattr(ocp, 'load', load)
    checkpoint.save(tmp_path / '1', state(2), LAYOUT, overwrite=True)
    return load(*args, **kwargs)

  with reader(tmp_path) as manager:
    monkeypatch.setattr(ocp, 'load', late)
    restored = manager.restore(step=1, data=data)
  assert (float(restored.state['w'][0]), data.position) == (1.0, 7)


def test_readers_beside_a_writer(tmp_path):
  with writer(tmp_path) as manager, reader(tmp_path) as one, reader(tmp_path) as two:
    assert [one.steps, two.steps] == [[], []]
    for step in (1, 2):
      manager.save(step, state(step))
      manager.wait()
      assert [one.steps, two.steps] == [manager.steps] * 2
      assert value(one) == value(two) == (step, float(step))
    assert (manager.read_only, one.read_only) == (False, True)
    start, resumed = one.resume(lambda: state(0))
    assert (start, float(resumed['w'][0])) == (2, 2.0)


def test_a_reader_cannot_save(tmp_path):
  run(tmp_path, [1])
  before = sorted(tmp_path.rglob('*'))
  with reader(tmp_path) as manager:
    with pytest.raises(errors.CheckpointError) as caught:
      manager.save(2, state(2), force=True)
    assert not manager.preempted
  assert str(caught.value) == dedent(f"""\
    The manager of {tmp_path} cannot save: it was opened with read_only=True.
    Fix: save with the manager of the training job, or to a folder that this job can write to.""")
  assert sorted(tmp_path.rglob('*')) == before


def test_a_reader_of_a_root_that_does_not_exist_yet(tmp_path):
  with reader(tmp_path / 'run') as manager:
    assert manager.steps == []
    assert list(manager.follow(timeout=0)) == []
    run(tmp_path / 'run', [1])
    assert value(manager) == (1, 1.0)


@contextmanager
def mounted_read_only(folder, at=None):
  at = at or folder
  subprocess.run(['mount', '--bind', folder, at], check=True)
  try:
    subprocess.run(['mount', '-o', 'remount,bind,ro', at], check=True)
    yield
  finally:
    subprocess.run(['umount', at], check=True)


@needs_root
def test_a_read_only_mount_is_opened_read_only(tmp_path):
  run(tmp_path / 'run', [1, 2])
  damage(tmp_path / 'run' / '2')
  with mounted_read_only(tmp_path / 'run'), writer(tmp_path / 'run') as manager:
    assert manager.read_only and manager.steps == [1, 2]
    with pytest.warns(UserWarning, match='It is skipped; restoring the checkpoint before it.'):
      assert value(manager) == (1, 1.0)
    with pytest.raises(errors.CheckpointError) as caught:
      manager.save(3, state(3))
    assert list(manager.follow(timeout=0)) == [2, 1]
  assert str(caught.value).startswith(f'The manager of {tmp_path / "run"} cannot save: Cannot write ')
  assert 'Read-only file system (EROFS).\nFix: save with the manager of the training job' in str(
    caught.value
  )
  assert sorted(child.name for child in (tmp_path / 'run').iterdir() if child.name.isdecimal()) == [
    '1',
    '2',
  ]
  with pytest.raises(errors.CheckpointReadOnlyError, match='Read-only file system'):
    with mounted_read_only(tmp_path / 'run'):
      writer(tmp_path / 'run' / 'new')


@needs_root
def test_a_read_only_mount_is_read_while_another_manager_writes(tmp_path):
  """The evaluation of a run does not wait for its end, nor does it say that it only reads."""
  (tmp_path / 'mount').mkdir()
  run(tmp_path / 'run', [1])
  with writer(tmp_path / 'run') as training, mounted_read_only(tmp_path / 'run', tmp_path / 'mount'):
    with writer(tmp_path / 'mount') as evaluation:
      assert evaluation.read_only and value(evaluation) == (1, 1.0)
      training.save(2, state(2))
      training.wait()
      assert value(evaluation) == (2, 2.0)
    with pytest.raises(errors.CheckpointBusyError):
      writer(tmp_path / 'run')
    training.save(3, state(3))
  assert reader(tmp_path / 'run').steps[-1] == 3


OTHER_USER = """
import os, sys
root = sys.argv[1]
import jax.numpy as jnp
import flax_spmd as spmd
layout = spmd.Layout({'data': 8})
with spmd.checkpoint.Manager(root + '/own', layout, every=1) as manager:  # imports what is needed
  manager.save(1, {'w': jnp.zeros(8)})
  manager.restore()
os.setgid(65534); os.setuid(65534)
with spmd.checkpoint.Manager(root + '/run', layout, every=1) as manager:
  print(manager.steps, manager.read_only, float(manager.restore().state['w'][0]))
  try:
    manager.save(3, {'w': jnp.zeros(8)})
  except spmd.errors.CheckpointError as error:
    print('Permission denied' in str(error))
"""


@needs_root
@pytest.mark.slow
def test_the_root_of_another_user_is_opened_read_only():
  with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to other users
    os.chmod(folder, 0o755)
    run(f'{folder}/run', [1, 2])
    result = subprocess.run(
      [sys.executable, '-c', OTHER_USER, folder],
      env=os.environ | {'PYTHONPATH': str(ROOT), 'HOME': '/nonexistent'},
      cwd='/',
      capture_output=True,
      text=True,
      check=False,
    )
  assert result.stdout == '[1, 2] True 2.0\nTrue\n', result.stderr


def damage(path):
  (manifest,) = path.glob('gen-*/MANIFEST')
  manifest.write_text(manifest.read_text().replace('"tree"', '"trie"'))


def test_a_damaged_newest_step_is_skipped_without_renaming(tmp_path):
  run(tmp_path, [1, 2, 3])
  damage(tmp_path / '3')
  with reader(tmp_path) as manager:
    for _ in range(2):
      with pytest.warns(UserWarning) as caught:
        assert value(manager) == (2, 2.0)
      (warning,) = caught
      assert str(warning.message) == dedent(f"""\
        Checkpoint {tmp_path / '3'} cannot be read, because of MANIFEST: its digest is not the one in HEAD.
        Fix: restore another checkpoint; this one was changed after it was written.
        It is skipped; restoring the checkpoint before it.""")
    assert manager.steps == [1, 2, 3]


def test_a_reader_goes_on_with_the_newer_step_when_its_step_is_removed(tmp_path):
  """The listing names a step that its writer removes before the reader opens it."""
  run(tmp_path, [1])
  with reader(tmp_path) as manager, writer(tmp_path, keep=1) as training:
    restores = []

    def replaced_meanwhile(steps):
      if not restores:
        restores.append(steps)
        training.save(2, state(2))
        training.wait()
      return steps

    with listing(manager, replaced_meanwhile):
      assert value(manager) == (2, 2.0)
  assert restores == [[1]]


@contextmanager
def listing(manager, changed):
  """Calls a function on the result of each listing of one manager."""
  from flax_spmd._src.checkpoint.steps.step_folder import StepFolder

  steps = StepFolder.steps
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(StepFolder, 'steps', lambda self: changed(steps(self)))
    yield


# -- follow


def test_follow_yields_the_newest_first_and_then_those_that_were_missed(tmp_path):
  run(tmp_path, [1, 2, 3])
  with reader(tmp_path) as manager:
    followed = []
    for step in manager.follow(timeout=0):
      followed.append(step)
      if step == 2:  # while 3 and 2 were evaluated
        run(tmp_path, [4, 5], keep=10)
    assert followed == [3, 2, 5, 4, 1]
    assert list(manager.follow(after=3, timeout=0)) == [5, 4]


def test_follow_leaves_out_what_was_removed_and_yields_what_was_saved_again(tmp_path):
  run(tmp_path, [1, 2, 3])
  with reader(tmp_path) as manager:
    steps = manager.follow(timeout=0)
    assert [next(steps), next(steps)] == [3, 2]
    run(tmp_path, [4], keep=1)
    assert next(steps) == 4
    with writer(tmp_path, keep=9) as training:
      training.save(2, state(2), force=True)
    assert list(steps) == [2]


FOLLOWED = """
import sys, time
import jax.numpy as jnp
import flax_spmd as spmd
with spmd.checkpoint.Manager(sys.argv[1], spmd.Layout({'data': 8}), every=1, keep=2) as manager:
  for step in range(1, 6):
    manager.save(step, {'w': jnp.full(8, float(step))})
    manager.wait()
    if step == 1:
      sys.stdin.readline()
    time.sleep(0.2)
"""


@pytest.mark.slow
def test_follow_sees_the_steps_of_another_process(tmp_path):
  with (
    subprocess.Popen(
      [sys.executable, '-c', FOLLOWED, str(tmp_path)],
      env=os.environ | {'PYTHONPATH': str(ROOT)},
      stdin=subprocess.PIPE,
      text=True,
    ) as training,
    reader(tmp_path) as manager,
  ):
    followed = []
    for step in manager.follow(timeout=600, every=0.05):
      try:
        followed.append(value(manager, step))
      except errors.CheckpointNotFoundError:
        continue  # removed since
      if step == 1:  # it goes on once a step has been followed
        training.stdin.write('\n')
        training.stdin.flush()
      if step == 5:
        break
    assert training.wait(600) == 0
  assert followed[-1] == (5, 5.0)
  assert all(step == restored for step, restored in followed)
  assert len({step for step, _ in followed}) == len(followed) >= 2


def test_follow_ends_after_the_timeout_and_when_the_manager_is_closed(tmp_path):
  run(tmp_path, [1])
  with reader(tmp_path) as manager:
    begin = time.monotonic()
    assert list(manager.follow(timeout=0.3, every=0.1)) == [1]
    assert 0.3 <= time.monotonic() - begin < 300
    threading.Timer(0.3, manager.close).start()
    begin = time.monotonic()
    assert list(manager.follow(every=600)) == [1]
    assert time.monotonic() - begin < 300
  assert list(manager.follow(every=60)) == []


@pytest.mark.parametrize('every', [0, -1.0])
def test_follow_without_a_pause_is_refused(tmp_path, every):
  with reader(tmp_path) as manager, pytest.raises(errors.CheckpointError) as caught:
    manager.follow(every=every)
  assert str(caught.value) == dedent(f"""\
    every={every} is not positive.
    Fix: pass the seconds between two looks at the folder.""")


def test_follow_beside_a_save_in_the_same_manager(tmp_path):
  with writer(tmp_path) as manager:
    manager.save(1, state(1))
    steps = manager.follow(timeout=600, every=0.05)
    assert next(steps) == 1
    manager.save(2, state(2))
    assert list(itertools.islice(steps, 1)) == [2]
