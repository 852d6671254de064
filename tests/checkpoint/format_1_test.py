"""Checkpoints of format 1, written by the last version that wrote it (`format_1/write.py`): read, and replaced."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from tests.checkpoint import damage
from tests.checkpoint.states import assert_equal
from tests.processes import run_process

HERE = Path(__file__).parent / 'format_1'
KINDS = ['plain', 'packed', 'compressed']
LAYOUT = spmd.Layout({'data': 2, 'model': 4}, (('embed', 'data'), ('mlp', 'model')))
CHANGED = 'Fix: restore another checkpoint; this one was changed after it was written.'


def expected(step=3):
  """The state that `write.py` saved, without boxes."""
  return {
    'params': {
      'w': jnp.asarray((np.arange(32, dtype=np.float32) + step).reshape(8, 4)),
      'b': jnp.arange(4, dtype=jnp.bfloat16),
      'scale': jnp.ones((4,), jnp.int8),
    },
    'keys': jax.random.split(jax.random.key(3), 2),
    'lr': 0.25,
    'on': True,
    'step': step,
  }


@pytest.fixture(params=KINDS)
def path(request, tmp_path):
  return shutil.copytree(HERE / request.param, tmp_path / 'a')


@pytest.fixture
def plain(tmp_path):
  return shutil.copytree(HERE / 'plain', tmp_path / 'a')


def files_of(path):
  return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob('*') if file.is_file()}


def test_restore(path):
  before = files_of(path)
  restored = checkpoint.restore(path)
  assert_equal(restored, expected())
  assert restored['params']['w'].sharding.spec == jax.sharding.PartitionSpec('data', 'model')
  boxed = checkpoint.restore(path, boxed=True)['params']
  assert (boxed['w'].names, boxed['b'].names) == (('embed', 'mlp'), ('mlp',))
  other = spmd.Layout({'data': 8}, (('embed', 'data'),))
  into = checkpoint.restore(path, layout=other)
  assert_equal(into, expected())
  assert_equal(checkpoint.restore(path, into), expected())
  assert files_of(path) == before  # a read leaves nothing


def test_inspection(path):
  assert checkpoint.verify(path) == []
  shown = checkpoint.show(path)
  assert shown.record.leaves['params/w'].names == ('embed', 'mlp')
  assert (shown.record.leaves['keys'].dtype, shown.record.leaves['lr'].value) == ('key<fry>', 0.25)
  assert shown.saved.year >= 2026 and shown.folder == str(path)
  (listed,) = checkpoint.ls(path.parent)
  assert listed == shown
  assert checkpoint.recorded_layout(path).rules == LAYOUT.rules
  plan = checkpoint.preflight(path, layout=LAYOUT)
  assert not plan.problems and plan.bytes_read > 128


def test_all_kinds_and_both_formats_are_equal(tmp_path):
  state = checkpoint.restore(HERE / 'plain', boxed=True)
  for kind, options in (
    ('plain', {}),
    ('packed', {'pack': 1 << 10}),
    ('compressed', {'compress': True}),
  ):
    checkpoint.save(tmp_path / kind, state, LAYOUT, **options)
    differences = checkpoint.diff(HERE / kind, tmp_path / kind)
    unknown = 'contents cannot be compared: an earlier version wrote one of them'
    assert {line.partition(': ')[2] for line in differences if 'saved as' not in line} == {unknown}
    assert checkpoint.diff(tmp_path / 'plain', tmp_path / kind) == []
  assert checkpoint.diff(HERE / 'plain', HERE / 'packed') == []


def test_convert(path, tmp_path):
  checkpoint.convert(path, tmp_path / 'b', changes=checkpoint.Changes(renames={'^params/w': 'params/v'}))
  restored = checkpoint.restore(tmp_path / 'b')
  assert_equal(restored['params']['v'], expected()['params']['w'])
  assert damage.head_of(tmp_path / 'b')['format'] == 2


def test_it_exists(path):
  before = files_of(path)
  with pytest.raises(errors.CheckpointExistsError) as caught:
    checkpoint.save(path, {'w': jnp.ones(8)}, LAYOUT)
  assert str(caught.value) == (
    f'{path} exists already.\nFix: save to another path, remove it first, or pass overwrite=True.'
  )
  assert files_of(path) == before


def test_an_overwrite_replaces_it(path):
  checkpoint.save(path, {'w': jnp.ones(8)}, LAYOUT, overwrite=True)
  assert_equal(checkpoint.restore(path), {'w': np.ones(8, np.float32)})
  assert sorted(child.name for child in path.iterdir()) == ['HEAD', damage.generation_of(path).name]


def test_a_failed_overwrite_keeps_it(path, monkeypatch):
  before = files_of(path)
  with monkeypatch.context() as patched, pytest.raises(errors.CheckpointError, match='failed: full'):
    patched.setattr(ocp, 'save_async', lambda *_: (_ for _ in ()).throw(OSError('full')))
    checkpoint.save(path, {'w': jnp.ones(8)}, LAYOUT, overwrite=True)
  assert files_of(path) == before
  assert_equal(checkpoint.restore(path), expected())


def test_it_is_readable_while_it_is_overwritten(plain, monkeypatch):
  begun, seen = ocp.save_async, []

  def slow(*args, **kwargs):
    seen.append(checkpoint.show(plain).record.leaves['step'].value)
    return begun(*args, **kwargs)

  monkeypatch.setattr(ocp, 'save_async', slow)
  checkpoint.save(plain, {'w': jnp.ones(8)}, LAYOUT, overwrite=True)
  assert seen == [3]


def test_an_overwrite_that_was_killed_keeps_it(plain):
  """The head of the killed writer names nothing yet, and its lease is that of a process that has ended."""
  (plain / 'gen-000001-01234567').mkdir()
  (plain / 'gen-000001-01234567' / 'half').write_text('half')
  (plain / 'HEAD').write_text(
    '{"format": 2, "generation": null, "manifest": null, "epoch": 1, "lease": '
    '{"holder": ["host", "boot/1", 7, "1"], "token": "0123456789abcdef", "beat": 3}}'
  )
  assert_equal(checkpoint.restore(plain), expected())
  assert checkpoint.verify(plain) == []
  (listed,) = checkpoint.ls(plain.parent)
  assert listed.error is None and 'params/w' in listed.record.leaves


def test_an_overwrite_that_was_killed_while_it_removed_the_old_files(plain):
  """The new checkpoint is there; the next save removes what is left of the old one."""
  source = f"""
import os, shutil, signal
import flax_spmd as spmd
from flax_spmd import checkpoint
shutil.rmtree = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
checkpoint.save({str(plain)!r}, {{'w': np.ones(8, 'float32')}}, spmd.Layout({{'data': 8}}), overwrite=True)
"""
  assert run_process(source, check=False).returncode == -9
  assert (plain / 'state').exists()
  assert_equal(checkpoint.restore(plain), {'w': np.ones(8, np.float32)})
  checkpoint.save(plain, {'w': jnp.zeros(8)}, LAYOUT, overwrite=True)
  assert sorted(child.name for child in plain.iterdir()) == ['HEAD', damage.generation_of(plain).name]
  (plain / 'notes.txt').write_text('mine')  # beside a generation, and no part of a checkpoint
  checkpoint.save(plain, {'w': jnp.ones(8)}, LAYOUT, overwrite=True)
  assert (plain / 'notes.txt').read_text() == 'mine'


def test_a_run(tmp_path):
  """A manager goes on with a run of the former format."""
  shutil.copytree(HERE / 'run', tmp_path / 'run')
  create = lambda: {'w': jnp.zeros(8)}
  with checkpoint.Manager(tmp_path / 'run', LAYOUT, every=1, keep=2) as manager:
    assert manager.steps == [1, 2]
    resumed = manager.resume(create)
    assert resumed.step == 2
    np.testing.assert_array_equal(resumed.state['w'], np.full(8, 2.0))
    manager.save(3, {'w': jnp.full(8, 3.0)})
  with checkpoint.Manager(tmp_path / 'run', LAYOUT) as manager:
    assert manager.steps == [2, 3]
    assert manager.resume(create).step == 3
  assert not (tmp_path / 'run' / '1').exists()


# -- damage


def test_a_flipped_bit(path):
  damage.flip(max((path / 'state' / 'd').iterdir(), key=lambda file: file.stat().st_size))
  with pytest.raises(errors.CheckpointDamagedError):
    checkpoint.restore(path)


@pytest.mark.parametrize('file', ['_METADATA', 'manifest.ocdbt', 'd'])
def test_missing_files(plain, file):
  gone = plain / 'state' / file
  shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
  with pytest.raises(
    errors.CheckpointDamagedError,
    match=r'(?s)(cannot be read|has no arrays|damaged in 4 leaves):.*\nFix: ',
  ):
    checkpoint.restore(plain)


def test_a_changed_record(plain):
  def edit(content):
    content['custom_metadata']['flax_spmd']['leaves'][0]['shape'] = [7]

  damage.edit_json(plain / '_CHECKPOINT_METADATA', edit)
  for call in (checkpoint.restore, checkpoint.verify, checkpoint.show):
    with pytest.raises(errors.CheckpointDamagedError) as caught:
      call(plain)
    assert str(caught.value) == (
      f'The record of checkpoint {plain} is damaged: its digest does not match its content.\n{CHANGED}'
    )


@pytest.mark.parametrize('data', [b'', b'null', b'{', b'\0\1'])
def test_malformed_metadata(plain, data):
  (plain / '_CHECKPOINT_METADATA').write_bytes(data)
  with pytest.raises(errors.CheckpointDamagedError) as caught:
    checkpoint.restore(plain)
  start = f'Checkpoint {plain} cannot be read, because of _CHECKPOINT_METADATA: '
  assert str(caught.value).startswith(start) and str(caught.value).endswith(CHANGED)
