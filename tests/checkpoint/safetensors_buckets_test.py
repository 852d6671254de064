"""Safetensors in buckets: restored by ranges of bytes, each process its own, and never from two versions of a file."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd._src.checkpoint.storage.store import open_store
from flax_spmd.checkpoint import Changes

SIZE = 256
VALUES = {
  f'layers.{i}.{name}.weight': np.random.default_rng(i).standard_normal((SIZE, SIZE), np.float32)
  for i in range(3)
  for name in ('up', 'down')
}
CHANGES = Changes(rearranged={'weight': 'out in -> in out'}, stacks={'layers': 'layers/{}'})
LAYOUT = spmd.Layout({'data': 2, 'model': 4}, [('weight', P('data', 'model'))])
STACKED = spmd.Layout({'data': 2, 'model': 4}, [('weight', P(None, 'data', 'model'))])


@pytest.fixture
def folder(server):
  """A checkpoint of two files and an index, as `huggingface-cli upload` leaves it."""
  store, names = open_store(f'{server.bucket}/model'), list(VALUES)
  weight_map = {}
  for number, part in enumerate((names[:3], names[3:]), start=1):
    file = f'model-0000{number}-of-00002.safetensors'
    store.write(file, save({name: VALUES[name] for name in part}))
    weight_map |= dict.fromkeys(part, file)
  store.write('model.safetensors.index.json', json.dumps({'weight_map': weight_map}).encode())
  server.requests.clear()
  return f'{server.bucket}/model'


def test_as_saved_and_changed(folder):
  restored = checkpoint.restore(folder, layout=LAYOUT)
  for name, value in VALUES.items():
    node = restored
    for key in name.split('.'):
      node = node[int(key)] if isinstance(node, list) else node[key]
    np.testing.assert_array_equal(node, value)
    assert node.sharding.spec == P('data', 'model')
  changed = checkpoint.restore(folder, layout=STACKED, changes=CHANGES)
  for name in ('up', 'down'):
    expected = np.stack([VALUES[f'layers.{i}.{name}.weight'].T for i in range(3)])
    np.testing.assert_array_equal(changed['layers'][name]['weight'], expected)


def test_one_file_by_its_url(folder):
  file = f'{folder}/model-00002-of-00002.safetensors'
  assert len(checkpoint.show(file).record.leaves) == 3
  restored = checkpoint.restore(file, layout=LAYOUT)
  np.testing.assert_array_equal(restored['layers']['2']['up']['weight'], VALUES['layers.2.up.weight'])


def test_only_the_bytes_of_the_shards_are_read(folder, server):
  path = 'layers/1/up/weight'
  half = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:1]), ('all',)), P())
  target = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32, sharding=half)
  restored = checkpoint.restore(folder, _nested(path, target), changes=Changes(unused=''))
  np.testing.assert_array_equal(restored['layers']['1']['up']['weight'], VALUES['layers.1.up.weight'])
  sizes = [size for request in server.requests if (size := _range_size(request.headers))]
  assert 4 * SIZE * SIZE <= sum(sizes) <= 4 * SIZE * SIZE + 4000  # the index and two headers


def _nested(path, leaf):
  for key in reversed(path.split('/')):
    leaf = {key: leaf}
  return leaf


def _range_size(headers):
  text = headers.get('range', '')
  begin, _, end = text.removeprefix('bytes=').partition('-')
  return int(end) - int(begin) + 1 if begin and end else None


def test_a_file_that_is_replaced_while_it_is_read(folder, server):
  """Its header was of another version."""
  store = open_store(folder)
  name = 'model-00001-of-00002.safetensors'
  is_new = []

  def replace(request):
    if name in request.path and (_range_size(request.headers) or 0) > 4000 and not is_new:
      is_new.append(True)
      store.write(name, save({key: value + 1 for key, value in list(VALUES.items())[:3]}))

  server.intercept = replace
  with pytest.raises(errors.CheckpointDamagedError) as caught:
    checkpoint.restore(folder, layout=LAYOUT)
  assert is_new and f'because of {name}: it has been written to' in str(caught.value)


def test_a_bucket_that_refuses(folder, server):
  name = 'model-00001-of-00002.safetensors'
  server.intercept = lambda request: (
    server.refusal(403, 'AccessDenied')
    if name in request.path and request.headers.get('range') and request.method == 'GET'
    else None
  )
  with pytest.raises(errors.CheckpointError) as caught:
    checkpoint.restore(folder, layout=LAYOUT)
  first, fix = str(caught.value).splitlines()
  assert first.startswith(f'Cannot read {folder}/{name} (http://')
  assert fix == ('Fix: let an owner of the bucket grant these credentials the right to read there.')


def test_nothing_there(server):
  with pytest.raises(errors.CheckpointNotFoundError):
    checkpoint.restore(f'{server.bucket}/model.safetensors', layout=LAYOUT)
