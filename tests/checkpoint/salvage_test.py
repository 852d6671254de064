"""Damage of every kind: verify and restore agree, name the array and the file, and salvage what is whole."""

import random
import shutil

import jax
import numpy as np
import pytest

import flax_spmd as spmd
from flax_spmd import checkpoint, errors

LAYOUT = spmd.Layout({'data': 8}, (('rows', 'data'),))
VALUES = {f'w{i}': np.arange(8000.0, dtype=np.float32) + i / 8 for i in range(6)} | {'step': np.int32(7)}
KINDS = ('flipped', 'halved', 'emptied', 'removed')


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  path = tmp_path_factory.mktemp('whole') / 'state'
  arrays = {
    name: spmd.LogicallyPartitioned(jax.numpy.asarray(value), ('rows',)) if value.ndim else value
    for name, value in VALUES.items()
  }
  checkpoint.save(path, LAYOUT.shard(arrays), LAYOUT)
  return path


def files_of(path):
  return sorted(file for file in path.rglob('*') if file.is_file())


def damage(file, kind, generator):
  content = bytearray(file.read_bytes())
  if kind == 'removed':
    file.unlink()
    return
  if kind == 'flipped' and content:
    content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
  file.write_bytes({'halved': content[: len(content) // 2], 'emptied': b''}.get(kind, content))


def outcome(call):
  try:
    return call()
  except errors.CheckpointError as error:
    return error


@pytest.mark.parametrize('kind', KINDS)
def test_verify_and_restore_agree(whole, tmp_path, kind):
  generator = random.Random(kind)
  for index, original in enumerate(files_of(whole)):
    path = tmp_path / str(index)
    shutil.copytree(whole, path)
    file = path / original.relative_to(whole)
    damage(file, kind, generator)
    changed = not file.exists() or file.read_bytes() != original.read_bytes()
    verified, restored = (
      outcome(lambda p=path: checkpoint.verify(p)),
      outcome(lambda p=path: checkpoint.restore(p)),
    )
    assert isinstance(restored, errors.CheckpointError) == changed, (file, restored)
    assert (verified != []) == changed, (file, verified)
    if not isinstance(verified, list):
      assert type(verified) is type(restored)
    elif changed:
      assert str(file.relative_to(path)) in verified
      assert str(file.relative_to(path)) in str(restored)
    salvaged = outcome(lambda p=path: checkpoint.restore(p, salvage=True))
    if not isinstance(salvaged, errors.CheckpointError):
      for name in VALUES.keys() - salvaged.damaged.keys():
        np.testing.assert_array_equal(salvaged.state[name], VALUES[name])


def damaged_copy(whole, path):
  """A copy in which one bit of `w3` is flipped, and the file with it."""
  shutil.copytree(whole, path)
  begin = VALUES['w3'].tobytes()[:100]
  file = next(file for file in files_of(path) if begin in file.read_bytes())
  content = bytearray(file.read_bytes())
  content[content.index(begin)] ^= 1
  file.write_bytes(content)
  return file


@pytest.mark.filterwarnings('ignore:Every device will hold')
def test_a_damaged_array_is_salvaged_as_the_target_itself(whole, tmp_path):
  path = tmp_path / 'state'
  file = damaged_copy(whole, path)
  target = {name: jax.numpy.zeros(value.shape, value.dtype) - 1 for name, value in VALUES.items()}
  name = str(file.relative_to(path))
  with pytest.raises(errors.CheckpointDamagedError) as caught:
    checkpoint.restore(path, target)
  lines = str(caught.value).splitlines()
  assert lines[0] == f'Checkpoint {path} is damaged in 1 leaf and 1 file:'
  assert lines[1] == 'w3: its content has changed'
  assert lines[2].startswith(f'{name}: its checksum is crc32:')
  assert lines[3] == (
    'Fix: restore another checkpoint, or the undamaged leaves of this one with salvage=True.'
  )
  salvaged = checkpoint.restore(path, target, salvage=True)
  assert salvaged.damaged == {'w3': 'its content has changed'}
  assert list(salvaged.files) == [name]
  np.testing.assert_array_equal(salvaged.state['w3'], target['w3'])
  for other in VALUES.keys() - {'w3'}:
    np.testing.assert_array_equal(salvaged.state[other], VALUES[other])


def test_a_lost_head(whole, tmp_path):
  path = tmp_path / 'state'
  shutil.copytree(whole, path)
  (path / 'HEAD').unlink()
  generation = next(path.glob('gen-*'))
  with pytest.raises(errors.CheckpointDamagedError) as caught:
    checkpoint.restore(path)
  assert str(caught.value) == (
    f'Checkpoint {path} has lost its HEAD, so the current one of its generations is unknown: {generation.name}.\n'
    f'Fix: restore another checkpoint; or a generation, by its path: {generation}.'
  )
  np.testing.assert_array_equal(checkpoint.restore(generation)['w1'], VALUES['w1'])


def test_a_whole_checkpoint_has_nothing_to_salvage(whole):
  salvaged = checkpoint.restore(whole, salvage=True)
  assert (salvaged.damaged, salvaged.files) == ({}, {})
  np.testing.assert_array_equal(salvaged.state['w1'], VALUES['w1'])


@pytest.mark.filterwarnings('ignore:Every device will hold')
def test_a_part_is_restored_beside_damaged_data(whole, tmp_path):
  damaged_copy(whole, tmp_path / 'state')
  changes = checkpoint.Changes(unused='')
  part = checkpoint.restore(tmp_path / 'state', {'w1': VALUES['w1']}, changes=changes)
  np.testing.assert_array_equal(part['w1'], VALUES['w1'])
