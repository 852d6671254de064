"""Damage of every kind: verify and restore agree, name the array and the file, and salvage what is whole."""

import functools
import itertools
import random
import shutil

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd._src.checkpoint.storage import verification
from tests.checkpoint.states import assert_equal

LAYOUT = spmd.Layout({'data': 8}, (('rows', 'data'),))
VALUES = {f'w{i}': np.arange(8000.0, dtype=np.float32) + i / 8 for i in range(6)} | {
  'step': np.int32(7),
  'keys': jax.random.split(jax.random.key(5), 8),
  'small': {'a': [np.arange(3.0, dtype=np.float32), np.ones((2, 2), bool)], 'rate': 0.25},
}
ARRAYS = VALUES.keys() - {'keys', 'small'}
KINDS = ('flipped', 'halved', 'emptied', 'removed')


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  """A function that writes the values, in a new folder."""

  def write(**options):
    path = tmp_path_factory.mktemp('whole') / 'state'
    arrays = {
      name: spmd.LogicallyPartitioned(jax.numpy.asarray(value), ('rows',))
      if np.ndim(value) and name != 'small'
      else value
      for name, value in VALUES.items()
    }
    state = LAYOUT.shard(arrays)
    state['small']['rate'] = VALUES['small']['rate']  # a number of Python, as whole as the record
    checkpoint.save(path, state, LAYOUT, **options)
    return path

  return write


@pytest.fixture(scope='module')
def whole(written):
  return written()


OPTIONS = {'plain': {}, 'packed': {'pack': 4096}, 'compressed': {'compress': True}}
QUICK = [('plain', 'removed'), ('packed', 'flipped'), ('compressed', 'halved')]


@pytest.fixture(scope='module')
def wholes(written):
  """A function that returns the checkpoint that was written with some options."""
  return functools.cache(lambda name: written(**OPTIONS[name]))


PAIRS = [
  pytest.param(*pair, marks=[] if pair in QUICK else pytest.mark.exhaustive)
  for pair in itertools.product(OPTIONS, KINDS)
]


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


@pytest.fixture
def in_groups(monkeypatch):
  """Large checkpoints are verified in groups."""
  monkeypatch.setattr(verification, 'GROUP_BYTES', 20000)


@pytest.mark.parametrize(('options', 'kind'), PAIRS)
@pytest.mark.usefixtures('in_groups')
def test_verify_and_restore_agree(wholes, tmp_path, options, kind):
  """Only an array whose own bytes are damaged is lost: Orbax's descriptions and indexes of them are dispensable."""
  each_whole, generator = wholes(options), random.Random(kind)
  for index, original in enumerate(files_of(each_whole)):
    path = tmp_path / str(index)
    shutil.copytree(each_whole, path)
    file = path / original.relative_to(each_whole)
    damage(file, kind, generator)
    changed = not file.exists() or file.read_bytes() != original.read_bytes()
    verified, restored = (
      outcome(lambda p=path: checkpoint.verify(p)),
      outcome(lambda p=path: checkpoint.restore(p)),
    )
    assert isinstance(restored, errors.CheckpointError) == changed, (file, restored)
    if isinstance(verified, errors.CheckpointError):
      assert file.name in ('HEAD', 'MANIFEST') and type(verified) is type(restored)
      continue
    salvaged = checkpoint.restore(path, salvage=True)
    assert verified == [*salvaged.damaged, *salvaged.files]
    assert list(salvaged.files) == ([str(file.relative_to(path))] if changed else [])
    assert all(name in str(restored) for name in verified)
    if not salvaged.damaged.keys() <= _with_data_in(original):
      raise AssertionError((file, salvaged.damaged))
    for name, value in _by_path(VALUES).items():
      if name not in salvaged.damaged:
        assert_equal(_by_path(salvaged.state)[name], value)


def _by_path(tree):
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
  }


def _with_data_in(file):
  """The arrays too large for an index, if the file is one of those with bytes of arrays."""
  is_data = file.parent.name == 'd' and file.parent.parent.name.startswith('ocdbt.process_')
  return {name for name in VALUES if name.startswith('w')} if is_data else set()


@pytest.mark.usefixtures('in_groups')
@pytest.mark.parametrize('options', OPTIONS)
def test_groups_are_read_once(wholes, monkeypatch, options):
  """Packed arrays, too, which are read as a whole."""
  loaded, load = [], ocp.load

  def logged(folder, target, **options):
    loaded.append(sum(leaf.size for leaf in jax.tree.leaves(target) if hasattr(leaf, 'size')))
    return load(folder, target, **options)

  monkeypatch.setattr(ocp, 'load', logged)
  assert checkpoint.verify(wholes(options)) == []
  assert len(loaded) > 2 and sum(loaded) == sum(np.size(leaf) for leaf in jax.tree.leaves(VALUES)) - 1


def test_what_cannot_be_salvaged_says_why(whole, tmp_path):
  """The bytes of an array are in one file only; without both indexes, they cannot be found."""
  shutil.copytree(whole, tmp_path / 'a')
  (state,) = (tmp_path / 'a').glob('gen-*/state')
  for index in state.rglob('manifest.ocdbt'):
    index.unlink()
  salvaged = checkpoint.restore(tmp_path / 'a', salvage=True)
  assert set(salvaged.damaged) == set(_by_path(VALUES)) - {'small/rate'}  # which is in the record
  assert set(salvaged.damaged.values()) == {'its bytes are in no index that can be read'}
  assert salvaged.state['small']['rate'] == 0.25


def test_another_array_in_the_place_of_one(whole, tmp_path):
  """Orbax's description is changed, with one bit, so that it reads `w1` twice. The record has the right names."""
  shutil.copytree(whole, tmp_path / 'a')
  (file,) = (tmp_path / 'a').glob('gen-*/state/_METADATA')
  text = file.read_text()
  assert text.count('"key": "w0"') == 1
  file.write_text(text.replace('"key": "w0"', '"key": "w1"'))
  salvaged = checkpoint.restore(tmp_path / 'a', salvage=True)
  assert salvaged.damaged == {}
  np.testing.assert_array_equal(salvaged.state['w0'], VALUES['w0'])


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
  target = VALUES | {name: jax.numpy.zeros_like(VALUES[name]) - 1 for name in ARRAYS}
  name = str(file.relative_to(path))
  with pytest.raises(errors.CheckpointDamagedError) as caught:
    checkpoint.restore(path, target)
  lines = str(caught.value).splitlines()
  assert lines[0] == f'Checkpoint {path} is damaged in 1 leaf and 1 file:'
  assert lines[1] == 'w3: its content has changed'
  assert lines[2].startswith(f'{name}: its checksum is crc32c:')
  assert lines[3] == (
    'Fix: restore another checkpoint, or the undamaged leaves of this one with salvage=True.'
  )
  salvaged = checkpoint.restore(path, target, salvage=True)
  assert salvaged.damaged == {'w3': 'its content has changed'}
  assert list(salvaged.files) == [name]
  np.testing.assert_array_equal(salvaged.state['w3'], target['w3'])
  for other in ARRAYS - {'w3'}:
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


@pytest.mark.parametrize('options', [{}, {'pack': 64}])
def test_keys_with_slashes_and_dots(tmp_path, options):
  """Orbax names an array by its keys, joined by dots."""
  big = np.arange(64, dtype=np.float32)
  state = {'a/b': {'c.d': big, 'e': np.int8(3)}, 'zeros': np.zeros(64, np.float32), 'li/st': [big + 1]}
  checkpoint.save(tmp_path / 'a', state, LAYOUT, **options)
  (file,) = (tmp_path / 'a').glob('gen-*/state/_METADATA')
  file.unlink()
  salvaged = checkpoint.restore(tmp_path / 'a', state, salvage=True)
  assert not salvaged.damaged and list(salvaged.files) == [str(file.relative_to(tmp_path / 'a'))]
  assert_equal(salvaged.state, state)
