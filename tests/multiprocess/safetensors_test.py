"""Safetensors in two real processes: each reads the bytes of its own shards, and the first one writes."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.processes import run_processes

PRELUDE = """
import jax.numpy as jnp
import flax_spmd as spmd
from flax_spmd import checkpoint
from jax.sharding import NamedSharding, PartitionSpec as P
from tests.checkpoint.hugging_face_models import MODELS, FOLDER

folder = {folder!r}
mesh = spmd.make_mesh({{'data': 2, 'model': 4}})  # a process is a row

def bytes_read():
  return int(open('/proc/self/io').read().split('rchar: ')[1].split()[0])

def shards(array):
  return [[[[part.start, part.stop] for part in shard.index], np.asarray(shard.data).tolist()] for shard in array.addressable_shards]

def text_of(call):
  try:
    call()
  except Exception as error:
    return [type(error).__name__, str(error)]
  return ['nothing was raised', '']
"""


def run(folder, source, **options):
  source = PRELUDE.format(folder=str(folder)) + source
  return [result.value for result in run_processes(source, processes=2, devices=4, **options)]


def test_each_process_reads_its_own_bytes(tmp_path):
  size = 1024
  arrays = {
    name: np.random.default_rng(number).standard_normal((size, size), np.float32)
    for number, name in enumerate(('rows', 'columns', 'both', 'deep'))
  }
  wide = {'wide': np.arange(64 * 65536, dtype=np.float32).reshape(64, 65536)}
  save_file(arrays | wide, tmp_path / 'model.safetensors')
  values = run(
    tmp_path,
    """
specs = dict(rows=P('data'), columns=P(None, 'model'), both=P('data', 'model'), deep=P(('data', 'model')), wide=P(None, 'data'))
shapes = {path: leaf.shape for path, leaf in checkpoint.show(folder).record.leaves.items()}
reads, equal = {}, True
for name, spec in specs.items():
  target = jax.ShapeDtypeStruct(shapes[name], np.float32, sharding=NamedSharding(mesh, spec))
  before = bytes_read()
  array = checkpoint.restore(folder, {name: target}, changes=checkpoint.Changes(unused=f'^(?!{name}$)'))[name]
  reads[name] = bytes_read() - before
  from safetensors.numpy import load_file
  whole = load_file(folder + '/model.safetensors')[name]
  equal &= all(np.array_equal(shard.data, whole[shard.index]) for shard in array.addressable_shards)
report([reads, bool(equal)])
""",
  )
  whole = 4 * size * size
  for reads, equal in values:
    assert equal
    for name, share in {'rows': 0.5, 'columns': 1, 'both': 0.5, 'deep': 0.5}.items():
      assert share * whole <= reads[name] <= share * whole + (1 << 16), name
    assert reads['wide'] <= 2 * whole + (1 << 17)  # half of 64 rows of 256 KiB


def test_layers_of_which_each_is_on_one_process(tmp_path):
  layers = np.arange(2 * 4 * 8, dtype=np.float32).reshape(2, 4, 8)
  save_file({f'layers.{i}.w': layer for i, layer in enumerate(layers)}, tmp_path / 'model.safetensors')
  values = run(
    tmp_path,
    """
rows = [jax.sharding.Mesh(mesh.devices[process], ('model',)) for process in range(2)]
target = {'layers': [
  {'w': jax.ShapeDtypeStruct((4, 8), np.float32, sharding=NamedSharding(row, P('model')))} for row in rows
]}
report([shards(layer['w']) for layer in checkpoint.restore(folder, target)['layers']])
""",
  )
  for process, restored in enumerate(values):
    expected = [[[[i, i + 1], [None, None]], layers[process, i : i + 1].tolist()] for i in range(4)]
    assert restored == [expected if layer == process else [] for layer in range(2)]


@pytest.mark.parametrize('name', ['llama', 'gpt2'])
def test_models_of_transformers(name, tmp_path):
  values = run(
    tmp_path,
    f"""
rules = (('vocab', 'model'), ('embed', 'data'), ('heads', 'model'), ('kv_heads', 'model'), ('mlp', 'model'), ('batch', 'data'))
layout = spmd.Layout(mesh, rules)
make, batch, changes = MODELS[{name!r}]
model = make()
target = layout.abstract(model.init, jax.random.key(0), batch)
params = checkpoint.restore(FOLDER / {name!r}, target, changes=changes)
with layout:
  logits = jax.jit(model.apply, out_shardings=NamedSharding(mesh, P()))(spmd.unbox(params), batch)
expected = np.load(FOLDER / {name!r} / 'logits.npy')
report(float(np.abs(np.asarray(logits.addressable_data(0)) - expected).max()))
""",
  )
  assert max(values) < 2e-3


def test_saved_by_the_first_process(tmp_path):
  values = run(
    tmp_path,
    """
layout = spmd.Layout(mesh, (('embed', 'data'), ('mlp', 'model')))
kernel = np.arange(3 * 8 * 16, dtype=np.float32).reshape(3, 8, 16)
state = layout.shard({'layers': {'up': spmd.LogicallyPartitioned(kernel, ('layers', 'embed', 'mlp'))}, 'step': jnp.ones(())})
changes = checkpoint.Changes(rearranged={'up': '... a b -> ... b a'}, stacks={'layers': 'layers/{}'})
checkpoint.save_safetensors(folder + '/a', state, changes=changes, max_shard_bytes=1100)
report(text_of(lambda: checkpoint.save_safetensors(folder + '/a', state)))
""",
  )
  text = f'{tmp_path}/a holds safetensors already.\nFix: save to another path, or remove it first.'
  assert values == [['CheckpointExistsError', text]] * 2
  index = json.loads((tmp_path / 'a' / 'model.safetensors.index.json').read_text())['weight_map']
  kernel = np.arange(3 * 8 * 16, dtype=np.float32).reshape(3, 8, 16)
  for number in range(3):
    name = f'layers.{number}.up'
    assert np.array_equal(load_file(tmp_path / 'a' / index[name])[name], kernel[number].T)


def test_a_disk_that_refuses_is_an_error_of_every_process(tmp_path):
  values = run(
    tmp_path,
    """
import resource, signal
if jax.process_index() == 0:
  signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
state = {name: jax.device_put(np.ones((8, 4096), np.float32), NamedSharding(mesh, P('data'))) for name in 'ab'}
report(text_of(lambda: checkpoint.save_safetensors(folder + '/b', state)))
""",
  )
  text = (
    f'Cannot write {tmp_path}/b: File too large (EFBIG).\n'
    'Fix: raise the limit of file sizes (ulimit -f), or use a file system with larger files.'
  )
  assert values == [['CheckpointError', text]] * 2
  assert not (tmp_path / 'b').exists()
