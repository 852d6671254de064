"""`save_safetensors` to buckets: the bytes of a save to disk, whole or not at all, and never in the place of another."""

import gc
import random
from textwrap import dedent

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd._src.checkpoint.storage import safetensors_upload
from flax_spmd._src.checkpoint.storage.store import open_store
from flax_spmd.checkpoint import Changes
from tests.processes import run_process, run_processes

# gcsfs sends bytes, for which aiohttp would like to have a file.
pytestmark = pytest.mark.filterwarnings('ignore:Sending a large body directly:ResourceWarning')
LAYOUT = spmd.Layout({'data': 2, 'model': 4}, (('embed', 'data'), ('mlp', 'model')))
DTYPES = ('float32', 'bfloat16', 'float8_e4m3fn', 'int8', 'int32', 'bool', 'float64', 'uint16')


def random_state(rng):
  """Arrays of all widths, stacked or not, in any order, some of them empty."""
  state = {}
  for number in range(rng.randint(1, 6)):
    shape = [rng.choice([0, 1, 2, 4, 8]) for _ in range(rng.randint(0, 3))]
    values = np.random.default_rng(number).integers(0, 2, [3, *shape]).astype(rng.choice(DTYPES))
    state[f'm{number}'] = {'layers': {'w': values}} if rng.random() < 0.5 else {'v': values}
  return state


@pytest.mark.parametrize('seed', range(12))
def test_the_bytes_are_those_of_a_save_to_disk(server, tmp_path, seed):
  rng = random.Random(seed)
  state = random_state(rng)
  stacked = any('layers' in module for module in state.values())
  options = {
    'changes': Changes(stacks={'layers': 'layers/{}'} if stacked else None),
    'max_shard_bytes': rng.choice([None, 1, 64, 300]),
  }
  checkpoint.save_safetensors(tmp_path / 'x', state, **options)
  checkpoint.save_safetensors(f'{server.bucket}/x', state, **options)
  store = open_store(f'{server.bucket}/x')
  expected = {file.name: file.read_bytes() for file in (tmp_path / 'x').iterdir()}
  assert {name: store.read(name)[0] for name in store.children()} == expected


def test_one_file_of_a_sharded_state_is_restored(server):
  up = np.random.default_rng(0).standard_normal((3, 8, 16), np.float32)
  state = LAYOUT.shard(
    {
      'layers': {'up': spmd.LogicallyPartitioned(jnp.asarray(up), ('layers', 'embed', 'mlp'))},
      'half': jnp.arange(8, dtype=jnp.bfloat16),
    }
  )
  url = f'{server.bucket}/deep/x.safetensors'
  checkpoint.save_safetensors(url, state)
  restored = checkpoint.restore(url, LAYOUT.abstract(lambda: state))
  np.testing.assert_array_equal(restored['layers']['up'].value, up)
  np.testing.assert_array_equal(restored['half'], state['half'])
  assert restored['layers']['up'].value.sharding == state['layers']['up'].value.sharding
  assert open_store(f'{server.bucket}/deep').children() == ['x.safetensors']


def test_parts_of_an_object(server, monkeypatch):
  """5 MiB is the least that S3 takes."""
  monkeypatch.setattr(safetensors_upload, '_PART', 5 << 20)
  state = {str(n): np.random.default_rng(n).standard_normal((1 << 20) + n, np.float32) for n in range(5)}
  checkpoint.save_safetensors(f'{server.bucket}/x', state)
  restored = checkpoint.restore(f'{server.bucket}/x', jax.tree.map(np.zeros_like, state))
  jax.tree.map(np.testing.assert_array_equal, restored, state)


@pytest.mark.parametrize('file', ['', '/model.safetensors'])
def test_nothing_is_replaced(server, file):
  url = f'{server.bucket}/x{file}'
  checkpoint.save_safetensors(url, {'w': np.ones(8, 'float32')})
  with pytest.raises(errors.CheckpointExistsError) as caught:
    checkpoint.save_safetensors(url, {'w': np.zeros(8, 'float32')})
  what = 'exists' if file else 'holds safetensors'
  assert str(caught.value) == f'{url} {what} already.\nFix: save to another path, or remove it first.'
  np.testing.assert_array_equal(checkpoint.restore(url, layout=LAYOUT)['w'], np.ones(8, 'float32'))


@pytest.mark.parametrize('most', [None, 32])
def test_nor_is_what_another_process_writes_meanwhile(server, most):
  """It writes when the first part is sent: after the list of the folder."""
  name = 'model.safetensors' if most is None else 'model-00002-of-00003.safetensors'
  other = f'{server.bucket}/x/{name}'
  done = []

  def write(request):
    if not done and request.method in ('POST', 'PUT') and 'probe' not in request.path:
      done.append(True)
      server.put(other, b'other')

  server.intercept = write
  with pytest.raises(errors.CheckpointExistsError) as caught:
    checkpoint.save_safetensors(
      f'{server.bucket}/x', {n: np.ones(8, 'float32') for n in 'abc'}, max_shard_bytes=most
    )
  assert str(caught.value) == f'{other} exists already.\nFix: save to another path, or remove it first.'
  store = open_store(f'{server.bucket}/x')
  assert {n: store.read(n)[0] for n in store.children()} == {name: b'other'}


@pytest.mark.usefixtures('new_objects_only')
def test_a_bucket_that_refuses_any_request_keeps_nothing(server, monkeypatch):
  monkeypatch.setattr(safetensors_upload, '_PART', 5 << 20)
  state = {name: np.ones(3 << 20, np.float32) for name in 'ab'}
  writes = []

  def save(url, refused):
    writes.clear()
    server.intercept = lambda request: refuse(request, refused)
    try:
      checkpoint.save_safetensors(url, state, max_shard_bytes=12 << 20)
    finally:
      server.intercept = lambda request: None

  def refuse(request, refused):
    if request.method in ('POST', 'PUT'):
      writes.append(request)
      if len(writes) == refused:
        return server.refusal(403, 'AccessDenied')
    return None

  save(f'{server.bucket}/all', 0)
  assert len(open_store(f'{server.bucket}/all').children()) == 3
  assert len(writes) >= 7
  for number in range(1, len(writes) + 1):
    url = f'{server.bucket}/without-{number}'
    with pytest.raises(errors.CheckpointReadOnlyError) as caught:
      save(url, number)
    assert str(caught.value).startswith(f'Cannot write {url} (http://')
    gc.collect()  # an upload that is left open would be completed now
    assert open_store(url).children() == []


MEMORY = """
import resource, warnings
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from flax_spmd import checkpoint
warnings.simplefilter('ignore', ResourceWarning)  # as above
checkpoint.save_safetensors(URL + '/tiny', {'w': jnp.ones(1 << 24)})
arrays = jax.block_until_ready({str(n): jnp.full(1 << 24, n, jnp.float32) for n in range(6)})
Path('/proc/self/clear_refs').write_text('5')
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
checkpoint.save_safetensors(URL + '/all', arrays)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)
"""


def test_memory_of_a_save_is_that_of_one_array(server):
  done = run_process(MEMORY.replace('URL', repr(server.bucket)))
  assert int(done.stdout) < 2 * (64 << 20), done.stderr


PROCESSES = dedent("""
  from flax_spmd import checkpoint
  import flax_spmd as spmd
  mesh = spmd.make_mesh({{'data': 2, 'model': 4}})
  values = np.arange(64 * 32, dtype='float32').reshape(64, 32)
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data', 'model'))
  w = jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])
  checkpoint.save_safetensors({url!r}, {{'w': w, 'v': w}}, max_shard_bytes=9000)
  try:
    checkpoint.save_safetensors({url!r}, {{'w': w}})
  except Exception as error:
    report(str(error))
""")


@pytest.mark.slow
def test_two_processes_write_one_checkpoint(server):
  url = f'{server.bucket}/x'
  results = run_processes(PROCESSES.format(url=url), processes=2, devices=4)
  text = f'{url} holds safetensors already.\nFix: save to another path, or remove it first.'
  assert [result.value for result in results] == [text, text]
  restored = checkpoint.restore(url, layout=LAYOUT)
  for name in ('v', 'w'):
    np.testing.assert_array_equal(restored[name], np.arange(64 * 32, dtype=np.float32).reshape(64, 32))
