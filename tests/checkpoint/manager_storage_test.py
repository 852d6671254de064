"""What the manager keeps when the storage fails: full disks, damaged and lost records, interrupted removals."""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from tests.processes import ROOT, run_process

LAYOUT = spmd.Layout({'data': 8}, (('embed', 'data'),))
FORMAT_1 = Path(__file__).parent / 'format_1' / 'run'  # steps 1 and 2, by the last version that wrote it
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason='mounts need root')


def state(step, side=8):
  return {'w': jnp.full(side, float(step))}


def manager_of(root, **options):
  return checkpoint.Manager(root, LAYOUT, **{'every': 1, 'durable': False} | options)


def value(manager, step=None):
  restored = manager.restore(step=step)
  (number,) = np.unique(restored.state['w'])
  return restored.step, float(number)


def files(root):
  return sorted(str(child.relative_to(root)) for child in root.rglob('*') if child.is_file())


# -- a full disk


@contextmanager
def small_disk(folder, size):
  folder.mkdir()
  subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', folder], check=True)
  try:
    yield lambda size: subprocess.run(
      ['mount', '-o', f'remount,size={size}', 'tmpfs', folder], check=True
    )
  finally:
    subprocess.run(['umount', '-l', folder], check=True)


@needs_root
@pytest.mark.parametrize('keep', [1, 3])
def test_a_full_disk_loses_no_step(tmp_path, keep):
  disk, side = tmp_path / 'disk', 1 << 19
  with small_disk(disk, '3900k') as resize:
    with manager_of(disk / 'run', keep=keep) as manager:
      manager.save(1, state(1, side))
      manager.wait()
      written = files(disk)
      for step in (2, 3):
        manager.save(step, state(step, side))
        with pytest.raises(errors.CheckpointError) as caught:
          manager.wait()
        assert re.fullmatch(
          rf'The save to {disk}/run/{step} failed: .*No space left on device.*\. '
          rf'The state has 2,097,152 bytes; 1,\d{{3}},\d{{3}} are free in {disk}/run\.\n'
          'Fix: free some space, and save again; the path keeps its previous contents.',
          str(caught.value),
        )
        assert manager.steps == [1] and value(manager) == (1, 1.0)
        assert files(disk) == written
      resize('30m')
      for step in (4, 5):
        assert manager.save(step, state(step, side))
      manager.wait()
      assert manager.steps == [1, 4, 5][-keep:]
    with manager_of(disk / 'run', keep=keep) as manager:
      assert manager.steps == [1, 4, 5][-keep:]
      assert value(manager) == (5, 5.0)


@needs_root
def test_a_disk_without_a_byte_left_can_be_restored_from(tmp_path):
  with small_disk(tmp_path / 'disk', '1m'):
    root = tmp_path / 'disk' / 'run'
    with manager_of(root) as manager:
      manager.save(1, state(1))
    with open(tmp_path / 'disk' / 'rest', 'wb', buffering=0) as rest, pytest.raises(OSError):
      while True:
        rest.write(bytes(4096))
    with manager_of(root, read_only=True) as manager:
      assert value(manager) == (1, 1.0)
    with pytest.raises(errors.CheckpointError, match=r'No space left on device \(ENOSPC\)\.\nFix: free'):
      manager_of(root)
    (tmp_path / 'disk' / 'rest').unlink()
    with manager_of(root) as manager:
      manager.save(2, state(2))
      manager.wait()
      assert manager.steps == [1, 2]


# -- steps that others wrote


def test_steps_of_earlier_versions(tmp_path):
  root = tmp_path / 'run'
  shutil.copytree(FORMAT_1, root)
  best = ocp.training.preservation_policies.BestN(
    get_metric_fn=lambda metrics: metrics['loss'], reverse=True, n=2
  )
  with manager_of(root, keep=best) as manager:
    assert manager.steps == [1, 2]
    assert value(manager) == (2, 2.0) and value(manager, 1) == (1, 1.0)
    manager.save(3, state(3), metrics={'loss': np.float32(0.75)})
    manager.wait()
    assert manager.steps == [2, 3]  # the losses are 1, 0.5 and 0.75
  with manager_of(root, keep=1) as manager:
    manager.save(4, state(4))
    manager.wait()
    assert manager.steps == [4]
  assert not list(root.glob('[123]'))


@pytest.mark.parametrize('api', ['Checkpointer', 'CheckpointManager'])
def test_steps_of_orbax(tmp_path, api):
  import orbax.checkpoint as ocp_0

  if api == 'Checkpointer':
    with ocp.training.Checkpointer(tmp_path) as orbax:
      for step in (1, 2):
        orbax.save(step, state(step), metrics={'loss': float(step)})
  else:
    with ocp_0.CheckpointManager(tmp_path) as orbax:
      for step in (1, 2):
        orbax.save(step, args=ocp_0.args.StandardSave(state(step)))
  with manager_of(tmp_path, keep=2) as manager:
    assert manager.steps == [1, 2]
    assert value(manager) == (2, 2.0) and value(manager, 1) == (1, 1.0)
    manager.save(3, state(3))
    manager.wait()
    assert manager.steps == [2, 3] and value(manager, 2) == (2, 2.0)


def test_an_unfinished_step_of_orbax_is_removed_at_opening(tmp_path):
  (tmp_path / '7.orbax-checkpoint-tmp-123').mkdir()
  (tmp_path / '7.orbax-checkpoint-tmp-123' / 'd').write_text('x')
  (tmp_path / 'notes').mkdir()
  with manager_of(tmp_path) as manager:
    assert manager.steps == []
    assert not list(tmp_path.glob('7*')) and (tmp_path / 'notes').is_dir()


# -- lost records


def test_a_step_whose_record_is_lost_is_damaged(tmp_path):
  """Without the file that holds its record, a step of format 1 looks like one of an old version of Orbax."""
  shutil.copytree(FORMAT_1, tmp_path / 'run')
  (tmp_path / 'run' / '2' / '_CHECKPOINT_METADATA').unlink()
  text = (
    f'Checkpoint {tmp_path / "run" / "2"} has lost its record of names and checksums; earlier steps have theirs.\n'
    'Fix: restore another step; or restore this one unverified, with flax_spmd.checkpoint.restore.'
  )
  with manager_of(tmp_path / 'run') as manager:
    with pytest.raises(errors.CheckpointDamagedError) as caught:
      manager.restore(step=2)
    assert str(caught.value) == text
    with pytest.warns(UserWarning) as warnings:
      assert value(manager) == (1, 1.0)
    assert [str(warning.message) for warning in warnings] == [
      f'{text}\nIt is kept as .2.damaged; restoring the checkpoint before it.'
    ]


def test_a_step_without_a_record_and_without_others_before_it_is_restored_with_a_warning(tmp_path):
  shutil.copytree(FORMAT_1, tmp_path / 'run')
  (tmp_path / 'run' / '1' / '_CHECKPOINT_METADATA').unlink()
  with manager_of(tmp_path / 'run') as manager:
    with pytest.warns(UserWarning) as warnings:
      assert value(manager, 1) == (1, 1.0)
    assert [str(warning.message) for warning in warnings] == [
      f'{tmp_path / "run" / "1"} has no record of names and checksums: an old version of Orbax wrote it, '
      'or the record is lost. It is restored unverified.'
    ]


@pytest.mark.parametrize('lost', ['MANIFEST', 'HEAD'])
def test_a_step_that_lost_its_manifest_or_its_head(tmp_path, lost):
  with manager_of(tmp_path) as manager:
    for step in (1, 2):
      manager.save(step, state(step))
  next((tmp_path / '2').rglob(lost)).unlink()
  with manager_of(tmp_path) as manager:
    text = 'has lost its HEAD' if lost == 'HEAD' else 'because of MANIFEST: it is missing'
    with pytest.warns(UserWarning, match=text):
      assert value(manager) == (1, 1.0)
    manager.save(2, state(20), force=True)
    manager.wait()
    assert manager.steps == [1, 2] and value(manager) == (2, 20.0)


# -- removals


def test_an_old_step_stays_until_the_new_one_is_complete(tmp_path):
  """Looks at the storage at each of its changes: a whole step is there at all times."""
  seen = []
  code = """
import sys
import jax.numpy as jnp
import flax_spmd as spmd
with spmd.checkpoint.Manager(sys.argv[1], spmd.Layout({'data': 8}), every=1, keep=1) as manager:
  for step in range(1, 9):
    manager.save(step, {'w': jnp.full(8, float(step))})
    if step in (1, 5):
      sys.stdin.readline()
"""
  with subprocess.Popen(
    [sys.executable, '-c', code, str(tmp_path)],
    env=os.environ | {'PYTHONPATH': str(ROOT)},
    stdin=subprocess.PIPE,
    text=True,
  ) as training:
    with manager_of(tmp_path, read_only=True) as manager:
      while training.poll() is None:
        steps = manager.steps
        if steps in ([1], [5]) and steps not in seen:  # it goes on once they were seen
          training.stdin.write('\n')
          training.stdin.flush()
        if seen or steps:
          seen.append(steps)
      seen.append(manager.steps)
  assert training.returncode == 0
  assert all(seen) and seen[-1] == [8]
  assert {step for steps in seen for step in steps} >= {1, 5, 8}


def test_notes_in_the_folder_of_a_step_outlive_it(tmp_path):
  with manager_of(tmp_path, keep=1) as manager:
    manager.save(1, state(1))
    manager.wait()
    (tmp_path / '1' / 'notes.txt').write_text('mine')
    manager.save(2, state(2))
    manager.wait()
    assert manager.steps == [2]
  assert [child.name for child in (tmp_path / '1').iterdir()] == ['notes.txt']


def test_an_interrupted_removal_is_completed_at_opening(tmp_path):
  with manager_of(tmp_path) as manager:
    for step in (1, 2):
      manager.save(step, state(step))
  head = json.loads((tmp_path / '1' / 'HEAD').read_text())
  (tmp_path / '1' / 'HEAD').write_text(json.dumps(head | {'generation': None, 'manifest': None}))
  next((tmp_path / '1').rglob('MANIFEST')).unlink()
  with manager_of(tmp_path, read_only=True) as manager:
    assert manager.steps == [2]
  assert (tmp_path / '1').exists()
  with manager_of(tmp_path) as manager:
    assert manager.steps == [2]
    assert not (tmp_path / '1').exists()


def test_a_step_that_is_being_restored_is_removed_later(tmp_path):
  from flax_spmd._src.checkpoint.storage import source

  with manager_of(tmp_path, keep=1) as manager, manager_of(tmp_path, read_only=True) as reader:
    manager.save(1, state(1))
    manager.wait()
    seen = []
    current = source.current_source

    def slow(path):
      found = current(path)
      if not seen and found is not None:  # the generation is pinned now
        seen.append(None)
        manager.save(2, state(2))
        while manager.steps[-1:] != [2] or not manager_is_idle(tmp_path):
          pass
        seen.append(manager.steps)
      return found

    with pytest.MonkeyPatch.context() as patched:
      patched.setattr(source, 'current_source', slow)
      assert value(reader, 1) == (1, 1.0)
    assert seen == [None, [1, 2]]
    manager.save(3, state(3))
    manager.wait()
    assert manager.steps == [3]


def manager_is_idle(root):
  """Whether no head has a lease, except the one of the manager itself."""
  heads = [json.loads(head.read_text()) for head in root.glob('[0-9]*/HEAD')]
  return all(head['lease'] is None for head in heads)


def test_a_removal_that_fails_is_reported_and_repeated(tmp_path, monkeypatch):
  from flax_spmd._src.checkpoint.steps import step_folder

  def refused(path, check):
    raise errors.CheckpointReadOnlyError(f'Cannot remove {path}: Permission denied (EACCES).\nFix: no.')

  with manager_of(tmp_path, keep=1) as manager:
    manager.save(1, state(1))
    manager.wait()
    with monkeypatch.context() as patched:
      patched.setattr(step_folder, 'remove_checkpoint', refused)
      manager.save(2, state(2))
      with pytest.raises(errors.CheckpointError) as caught:
        manager.wait()
    assert str(caught.value) == (
      f'Step 2 of {tmp_path} is saved, but step 1 cannot be removed: '
      f'Cannot remove {tmp_path / "1"}: Permission denied (EACCES).\n'
      'Fix: remove it yourself, or make the folder writable; the next save tries again.'
    )
    assert manager.steps == [1, 2] and value(manager) == (2, 2.0)
    assert not manager.save(2, state(2))
    manager.save(3, state(3))
    manager.wait()
    assert manager.steps == [3]


# -- one writer


KILLED = """
import os, signal
import flax_spmd as spmd
manager = spmd.checkpoint.Manager(ROOT, spmd.Layout({'data': 8}))
report('open')
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_the_root_of_a_killed_manager_is_free_at_once(tmp_path):
  result = run_process(KILLED.replace('ROOT', repr(str(tmp_path))), check=False)
  assert (result.returncode, result.value) == (-9, 'open')
  with manager_of(tmp_path) as manager:
    assert manager.save(1, state(1))


def test_a_manager_that_lost_its_root_saves_and_removes_nothing(tmp_path):
  """Another machine took this process for dead while it was suspended: the lease has another holder now."""
  manager = manager_of(tmp_path, keep=1)
  manager.save(1, state(1))
  manager.wait()
  (head,) = tmp_path.glob('.*/HEAD')
  content = json.loads(head.read_text())
  content['lease'] |= {'holder': ['elsewhere', 'boot/1', 7, '8'], 'token': 'other'}
  head.write_text(json.dumps(content | {'epoch': content['epoch'] + 1}))
  for step in (2, 3):
    with pytest.raises(errors.CheckpointBusyError) as caught:
      manager.save(step, state(step))
    assert str(caught.value) == (
      f'{tmp_path} was taken over by process 7 on elsewhere, since this process was suspended, or cut off from the '
      'storage, for a while.\nFix: end this job, or save to another path.'
    )
  assert manager.steps == [1]
  manager.close()
  assert json.loads(head.read_text())['lease']['token'] == 'other'


@pytest.mark.parametrize('what', ['removed', 'moved', 'its mark'])
def test_a_root_that_goes_while_a_manager_has_it_open(tmp_path, what):
  """It is not made again, which might be on the disk below a mount that is gone."""
  root = tmp_path / 'run'
  manager = manager_of(root)
  manager.save(1, state(1))
  manager.wait()
  (mark,) = (folder for folder in root.glob('.*') if folder.is_dir())
  if what == 'moved':
    root.rename(tmp_path / 'other')
  else:
    shutil.rmtree(root if what == 'removed' else mark)
  for step in (2, 3):
    with pytest.raises(errors.CheckpointNotFoundError) as caught:
      manager.save(step, state(step))
    assert str(caught.value) == (
      f'{root} was removed, moved or unmounted while this manager had it open; or only {mark} was.\n'
      'Fix: put it back and repeat the call, or open a new manager.'
    )
    assert root.exists() == (what == 'its mark')
  assert manager.steps == ([1] if what == 'its mark' else [])
  if what == 'moved':
    (tmp_path / 'other').rename(root)
    assert manager.save(3, state(3))
  manager.close()
  assert root.exists() == (what != 'removed')
  with manager_of(root) as again:
    assert again.steps == {'removed': [], 'moved': [1, 3], 'its mark': [1]}[what]
    assert again.save(4, state(4))


def test_a_manager_that_cannot_be_made_does_not_keep_the_folder(tmp_path, monkeypatch):
  def refused(store):
    raise errors.CheckpointError('refused')

  with monkeypatch.context() as patched:
    patched.setattr('flax_spmd._src.checkpoint.steps.step_folder.remove_killed_saves', refused)
    with pytest.raises(errors.CheckpointError, match='refused'):
      manager_of(tmp_path)
  with manager_of(tmp_path) as manager:
    assert manager.save(1, state(1))
