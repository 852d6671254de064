"""Checkpoints with the checksums of earlier versions (`earlier_sums/write.py`): read, verified, compared, replaced."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd._src.checkpoint.storage.manifest import MANIFEST
from flax_spmd._src.checkpoint.storage.store import open_store
from tests.checkpoint import damage

HERE = Path(__file__).parent / 'earlier_sums'
LAYOUT = spmd.Layout({'data': 2, 'model': 4}, (('embed', 'data'), ('mlp', 'model')))
W = np.arange(8192, dtype=np.float32).reshape(64, 128)


@pytest.fixture
def path(tmp_path):
  return shutil.copytree(HERE / 'state', tmp_path / 'a')


def sums(path):
  record = checkpoint.show(path).record
  return [leaf.checksum for leaf in record.leaves.values()]


def test_read_and_verified(path):
  assert not any(':' in text for text in sums(path))
  assert checkpoint.verify(path) == []
  restored = checkpoint.restore(path)
  np.testing.assert_array_equal(restored['w'], W)
  assert restored['step'] == 3
  expected = jax.random.key_data(jax.random.split(jax.random.key(3), 2))
  np.testing.assert_array_equal(jax.random.key_data(restored['keys']), expected)


def test_a_file_that_changed(path):
  file = damage.largest_file(path)
  content = bytearray(file.read_bytes())
  content[100] ^= 1
  file.write_bytes(content)
  with pytest.raises(errors.CheckpointDamagedError, match='its checksum is crc32:'):
    checkpoint.restore(path)
  assert checkpoint.verify(path)


def test_an_array_whose_sum_differs(path):
  damage.edit_manifest(
    path, damage.signed(lambda record: record['leaves'][3].update(checksum='00000000'))
  )
  assert checkpoint.verify(path) == ['w']
  assert checkpoint.restore(path, salvage=True).damaged == {'w': 'its content has changed'}


def test_replaced(path):
  before = sums(path)
  state = checkpoint.restore(path)
  checkpoint.save(path, state, LAYOUT, overwrite=True)
  assert all(text.startswith('crc32c:') for text in sums(path)) and len(sums(path)) == len(before)
  files = json.loads(next(path.glob(f'gen-*/{MANIFEST}')).read_bytes())['files']
  assert all(text.startswith('crc32c:') for _, text in files.values())


def test_a_difference_is_unknown_where_the_formulas_differ(path, tmp_path):
  checkpoint.save(tmp_path / 'b', checkpoint.restore(path), LAYOUT)
  unknown = 'contents cannot be compared: an earlier version wrote one of them'
  lines = checkpoint.diff(path, tmp_path / 'b')
  assert lines[:3] == [f'{name}: {unknown}' for name in ('b', 'keys', 'step')]


def test_numbers_are_compared_by_their_bits(tmp_path):
  for name, zero in (('a_zero', 0.0), ('minus_zero', -0.0)):
    checkpoint.save(tmp_path / name, {'n': float('nan'), 'z': zero}, LAYOUT)
  assert checkpoint.diff(tmp_path / 'a_zero', tmp_path / 'minus_zero') == ['z: 0.0, then -0.0']
  damage.edit_manifest(
    tmp_path / 'a_zero',
    damage.signed(lambda record: [leaf.update(checksum='00000000') for leaf in record['leaves']]),
  )
  assert checkpoint.diff(tmp_path / 'a_zero', tmp_path / 'minus_zero') == ['z: 0.0, then -0.0']


def test_md5s_of_a_bucket(gcs):
  """As manifests of earlier versions have them. GCS is asked for those, and reads nothing."""
  store = open_store(f'{gcs.bucket}/run')
  store.write('x', b'123')
  assert store.files(like='md5:00')['x'].checksum == 'md5:202cb962ac59075b964b07152d234b70'
  assert (
    store.digest('x', like='md5:202cb962ac59075b964b07152d234b70')
    == 'md5:202cb962ac59075b964b07152d234b70'
  )
  assert not [
    r
    for r in gcs.requests
    if r.method == 'GET' and r.query.get('alt') == 'media' and r.path.endswith('x')
  ]
