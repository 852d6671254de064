"""Checkpoints of old versions of Orbax and Flax: zarr3 without zeros, and leaves that are aggregated in a msgpack file."""

import shutil
import warnings
from textwrap import dedent

import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from tests.checkpoint.others import arrays, assert_bits, extract, flat_of

LAYOUT = spmd.Layout({'data': 2, 'model': 4}, [('w$|zeros$|half$', P('data', 'model')), ('.*', P())])
ZARR3 = [(version, f'zarr3_{kind}') for version in ('0_5', '0_9') for kind in ('ocdbt', 'files')]
AGGREGATED = (
  'aggregated_ocdbt',
  'aggregated_files',
  'flax_host/checkpoint_2',
  'flax_sharded/checkpoint_2',
  'run/4',
  'run/4/default',
)


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
  return {
    version: extract(f'orbax_{version}', tmp_path_factory.mktemp(version)) for version in ('0_5', '0_9')
  }


def saved_in(folder):
  """The arrays that were saved, by path; numpy has no name for bfloat16."""
  return {
    path: array.view(jnp.bfloat16) if array.dtype == 'V2' else array
    for path, array in arrays(folder).items()
  }


def assert_as_saved(restored, folder):
  """Every array has the bits that were saved; the number is one."""
  flat, saved = flat_of(restored), saved_in(folder)
  assert flat.pop('list/1/number') == saved.pop('list/1/number') == 3
  assert_bits(flat, saved)
  assert restored['params']['w'].sharding.spec == P('data', 'model')


def target_of(folder):
  """The abstract state that was saved, in another layout."""
  saved = saved_in(folder)

  def make():
    leaf = lambda path: jnp.zeros(saved[path].shape, saved[path].dtype)
    return {
      'params': {
        'w': spmd.LogicallyPartitioned(leaf('params/w'), ('embed', 'mlp')),
        'b': leaf('params/b'),
      },
      'zeros': leaf('zeros'),
      'half': leaf('half'),
      'list': [leaf('list/0'), {name: leaf(f'list/1/{name}') for name in ('step', 'zero')}],
      'empty': {},
      'none': None,
    }

  layout = spmd.Layout({'data': 2, 'model': 4}, (('embed', 'data'), ('mlp', 'model')))
  target = layout.abstract(make)
  target['list'][1]['number'] = 0
  return target


@pytest.mark.parametrize('name', AGGREGATED)
def test_aggregated_leaves(name, folders):
  folder = folders['0_5']
  assert_as_saved(checkpoint.restore(folder / name, layout=LAYOUT), folder)
  restored = checkpoint.restore(folder / name, target_of(folder))
  assert restored['none'] is None and restored['empty'] == {}
  assert_as_saved(spmd.unbox(restored), folder)
  assert checkpoint.show(folder / name).record.written_by == 'orbax'


def absent_zeros(path, names):
  return dedent(f"""\
    Checkpoint {path} lacks data of {names}, which is read as zeros: the version of Orbax that wrote it left zeros out. Lost data would look the same.
    Fix: compare these arrays with what you expect, and convert the checkpoint with flax-spmd checkpoint convert, which writes zeros and checksums.""")


def restored_with_warning(path, *arguments, **options):
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    restored = checkpoint.restore(path, *arguments, **options)
  return restored, [str(each.message) for each in caught]


@pytest.mark.parametrize(('version', 'name'), ZARR3)
def test_zeros_that_were_not_written(version, name, folders):
  folder = folders[version]
  text = absent_zeros(folder / name, 'half, list/1/zero')
  restored, told = restored_with_warning(folder / name, layout=LAYOUT)
  assert_as_saved(restored, folder)
  assert told == [text]
  restored, told = restored_with_warning(folder / name, target_of(folder))
  assert_as_saved(spmd.unbox(restored), folder)
  assert told == [text]
  params = checkpoint.restore(folder / name, layout=LAYOUT, changes=checkpoint.Changes(only='params'))
  assert np.array_equal(params['w'], saved_in(folder)['params/w'])  # without a warning


def test_lost_data_is_named(folders, tmp_path):
  path = shutil.copytree(folders['0_9'] / 'zarr3_files', tmp_path / 'a')
  shutil.rmtree(path / 'params.w' / 'c' / '0')
  restored, told = restored_with_warning(path, layout=LAYOUT)
  assert told == [absent_zeros(path, 'half, list/1/zero, params/w')]
  assert not np.asarray(restored['params']['w']).all()


def test_converted_zeros_are_written(folders, tmp_path):
  with pytest.warns(UserWarning, match='lacks data of half, list/1/zero, which is read as zeros'):
    checkpoint.convert(folders['0_9'] / 'zarr3_ocdbt', tmp_path / 'a', layout=LAYOUT)
  assert checkpoint.verify(tmp_path / 'a') == []
  assert_as_saved(checkpoint.restore(tmp_path / 'a'), folders['0_9'])


def refusal_of(path):
  with pytest.raises(errors.CheckpointDamagedError) as caught:
    checkpoint.restore(path, layout=LAYOUT)
  return str(caught.value)


def test_a_file_without_its_arrays(folders, tmp_path):
  path = shutil.copytree(folders['0_5'] / 'aggregated_files', tmp_path / 'a')
  shutil.rmtree(path / 'params.w')
  text = refusal_of(path)
  assert text.startswith(f'Checkpoint {path} cannot be read: NOT_FOUND: Error opening "zarr" driver: ')
  assert 'params.w' in text and '\nFix: ' in text
  (path / 'checkpoint').write_bytes(b'\x81')
  assert refusal_of(path).startswith(f'The file {path}/checkpoint is not a checkpoint of flax.training')


def test_a_name_that_leads_out(folders, tmp_path):
  path = shutil.copytree(folders['0_5'] / 'aggregated_files', tmp_path / 'a')
  tree = serialization.msgpack_restore((path / 'checkpoint').read_bytes())
  tree['params']['w'] = 'PLACEHOLDER://../b'
  (path / 'checkpoint').write_bytes(serialization.msgpack_serialize(tree))
  shutil.copytree(folders['0_5'] / 'aggregated_files' / 'params.w', tmp_path / 'b')
  assert '../b' in refusal_of(path)


def test_arrays_without_a_description(folders, tmp_path):
  """Before Orbax described its trees, the file alone did."""
  path = shutil.copytree(folders['0_5'] / 'aggregated_files', tmp_path / 'a')
  tree = serialization.msgpack_restore((path / 'checkpoint').read_bytes())
  del tree['empty'], tree['none']
  (path / 'checkpoint').write_bytes(serialization.msgpack_serialize(tree))
  (path / '_METADATA').unlink()
  restored = checkpoint.restore(path, layout=LAYOUT)
  assert_as_saved(restored, folders['0_5'])
