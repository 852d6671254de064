"""Safetensors that others wrote: found in files and folders, described, and read in any layout, each its own bytes."""

import json
import os
import shutil
import subprocess
import sys
from textwrap import dedent

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd.cli import main
from tests.checkpoint.hugging_face_models import FOLDER
from tests.processes import ROOT

DTYPES = {
  'bool': np.bool_,
  'uint8': np.uint8,
  'int8': np.int8,
  'uint16': np.uint16,
  'int16': np.int16,
  'float16': np.float16,
  'bfloat16': ml_dtypes.bfloat16,
  'uint32': np.uint32,
  'int32': np.int32,
  'float32': np.float32,
  'complex64': np.complex64,
  'float8_e4m3fn': ml_dtypes.float8_e4m3fn,
  'float8_e5m2': ml_dtypes.float8_e5m2,
  'float8_e8m0fnu': ml_dtypes.float8_e8m0fnu,
  'float8_e4m3fnuz': ml_dtypes.float8_e4m3fnuz,
  'float8_e5m2fnuz': ml_dtypes.float8_e5m2fnuz,
}
LAYOUT = spmd.Layout({'data': 2, 'model': 4}, [('w$', P('data', 'model'))])


def array(dtype, *shape):
  words = np.random.default_rng(0).integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
  return (words & 1 if dtype is np.bool_ else words).reshape(-1).view(dtype).reshape(shape)


def bits(value):
  return np.asarray(value).tobytes()


def refused(call, *arguments, error=errors.CheckpointError, **options):
  with pytest.raises(error) as caught:
    call(*arguments, **options)
  return str(caught.value)


@pytest.mark.parametrize('name', list(DTYPES))
def test_every_dtype(name, tmp_path):
  whole = array(DTYPES[name], 8, 16)
  save_file({'a.w': whole}, tmp_path / 'x.safetensors')
  assert checkpoint.show(tmp_path).record.leaves['a/w'].dtype == name
  w = checkpoint.restore(tmp_path, layout=LAYOUT)['a']['w']
  assert w.sharding.spec == P('data', 'model') and w.dtype == DTYPES[name]
  assert bits(w) == bits(whole)
  on_host = checkpoint.restore(tmp_path, {'a': {'w': np.zeros((8, 16), DTYPES[name])}})['a']['w']
  assert isinstance(on_host, np.ndarray) and bits(on_host) == bits(whole)


def test_scalars_and_empty_arrays(tmp_path):
  save_file(
    {'s': np.asarray(3.5, np.float32), 'e': np.zeros((0, 8), np.int8)}, tmp_path / 'x.safetensors'
  )
  state = checkpoint.restore(tmp_path, layout=LAYOUT)
  assert state['s'] == 3.5 and state['s'].shape == () and state['e'].shape == (0, 8)
  number = checkpoint.restore(tmp_path, {'s': 0.0}, changes=checkpoint.Changes(unused='e'))
  assert number == {'s': 3.5}


SPECS = st.lists(st.sampled_from([None, 'data', 'model']), min_size=3, max_size=3).filter(
  lambda axes: axes.count('data') < 2 and axes.count('model') < 2
)


@settings(max_examples=60)
@given(
  shape=st.tuples(*[st.integers(1, 6)] * 3),
  spec=st.one_of(SPECS, st.permutations([('data', 'model'), None, None])),
  dtype=st.sampled_from([np.int8, ml_dtypes.bfloat16, np.float32, np.complex64]),
  devices=st.sampled_from([(2, 4), (4, 2), (8, 1)]),
)
def test_any_sharding_of_any_shape(shape, spec, dtype, devices, tmp_path_factory):
  folder = tmp_path_factory.mktemp('any')
  whole = array(dtype, *(8 * size for size in shape))
  save_file({'before': np.zeros(3, np.int8), 'w': whole}, folder / 'x.safetensors')
  mesh = spmd.make_mesh(dict(zip(('data', 'model'), devices, strict=True)))
  target = jax.ShapeDtypeStruct(whole.shape, dtype, sharding=NamedSharding(mesh, P(*spec)))
  w = checkpoint.restore(folder, {'w': target}, changes=checkpoint.Changes(unused='before'))['w']
  assert bits(w) == bits(whole)
  shutil.rmtree(folder)


@pytest.mark.parametrize('spec', [P('data'), P(None, 'data'), P('model', 'data'), P(None, None, 'data')])
@pytest.mark.parametrize('shape', [(8, 1 << 19, 8), (64, 40, 8192), (4096, 16, 256), (1 << 17, 8, 16)])
def test_arrays_of_many_pieces(shape, spec, tmp_path):
  whole = array(np.int8, *shape)
  save_file({'w': whole}, tmp_path / 'x.safetensors')
  for count in (8, 2):
    mesh = spmd.make_mesh({'data': count // 2, 'model': 2}, devices=jax.devices()[:count])
    target = jax.ShapeDtypeStruct(shape, np.int8, sharding=NamedSharding(mesh, spec))
    assert np.array_equal(checkpoint.restore(tmp_path, {'w': target})['w'], whole)


def test_memory_kinds_and_explicit_meshes(tmp_path):
  whole = array(np.float32, 8, 16)
  save_file({'w': whole}, tmp_path / 'x.safetensors')
  mesh = jax.make_mesh((8,), ('data',), axis_types=(jax.sharding.AxisType.Explicit,))
  for kind in ('device', 'pinned_host'):
    sharding = NamedSharding(mesh, P('data'), memory_kind=kind)
    target = jax.ShapeDtypeStruct((8, 16), np.float32, sharding=sharding)
    w = checkpoint.restore(tmp_path, {'w': target})['w']
    assert w.sharding.memory_kind == kind and bits(w) == bits(whole)
  turned = jax.ShapeDtypeStruct(
    (4, 2, 16), np.float32, sharding=NamedSharding(mesh, P(None, None, 'data'))
  )
  changes = checkpoint.Changes(rearranged={'w': '(a=2 b) c -> b a c'})
  w = checkpoint.restore(tmp_path, {'w': turned}, changes=changes)['w']
  assert np.array_equal(w, whole.reshape(2, 4, 16).transpose(1, 0, 2))


def test_restored_arrays_can_be_donated(tmp_path):
  save_file({'w': array(np.float32, 8, 16)}, tmp_path / 'x.safetensors')
  before = (tmp_path / 'x.safetensors').read_bytes()
  w = checkpoint.restore(tmp_path, layout=LAYOUT)['w']
  doubled = jax.jit(lambda x: x * 0 + 1, donate_argnums=0)(w)
  assert np.array_equal(doubled, np.ones((8, 16))) or np.isnan(doubled).any()
  assert (tmp_path / 'x.safetensors').read_bytes() == before


# -- files and folders


def by_index(folder, name='model', files=2):
  """Arrays in several files with an index; returns them."""
  arrays = {f'layers.{number}.w': np.full((8, 8), number, np.float32) for number in range(12)}
  weight_map = {}
  for number, tensor in enumerate(arrays):
    weight_map[tensor] = f'{name}-{number % files + 1:05}-of-{files:05}.safetensors'
  for file in set(weight_map.values()):
    save_file({tensor: arrays[tensor] for tensor in arrays if weight_map[tensor] == file}, folder / file)
  (folder / f'{name}.safetensors.index.json').write_text(json.dumps({'weight_map': weight_map}))
  return arrays


@pytest.mark.parametrize('name', ['model', 'diffusion_pytorch_model'])
def test_a_folder_with_an_index(name, tmp_path):
  arrays = by_index(tmp_path, name)
  (tmp_path / 'config.json').write_text('{}')
  for path in (tmp_path, tmp_path / f'{name}.safetensors.index.json'):
    state = checkpoint.restore(path, layout=LAYOUT)
    assert all(np.array_equal(state['layers'][str(n)]['w'], arrays[f'layers.{n}.w']) for n in range(12))
  assert list(checkpoint.show(tmp_path).record.leaves)[1:3] == ['layers/1/w', 'layers/2/w']
  one = checkpoint.show(tmp_path / f'{name}-00001-of-00002.safetensors')
  assert len(one.record.leaves) == 6


def test_model_comes_before_other_files(tmp_path):
  save_file({'a': np.ones(2, np.float32)}, tmp_path / 'adapter.safetensors')
  save_file({'b': np.ones(2, np.float32)}, tmp_path / 'model.safetensors')
  assert list(checkpoint.show(tmp_path).record.leaves) == ['b']


def test_several_files_without_an_index(tmp_path):
  for name in ('a', 'b'):
    save_file({name: np.ones(2, np.float32)}, tmp_path / f'{name}.safetensors')
  assert refused(checkpoint.show, tmp_path) == dedent(f"""\
    The folder {tmp_path} holds 2 safetensors files and no index: a.safetensors, b.safetensors.
    Fix: pass the path of one of them; if they are parts of one checkpoint, add its index.""")
  for name in ('a', 'b'):
    (tmp_path / f'{name}.safetensors.index.json').write_text('{}')
  assert refused(checkpoint.show, tmp_path) == dedent(f"""\
    The folder {tmp_path} holds 2 safetensors files: a.safetensors.index.json, b.safetensors.index.json.
    Fix: pass the path of one of them.""")


def test_a_part_alone(tmp_path):
  by_index(tmp_path)
  (tmp_path / 'model.safetensors.index.json').unlink()
  (tmp_path / 'model-00002-of-00002.safetensors').unlink()
  assert refused(checkpoint.show, tmp_path, error=errors.CheckpointDamagedError) == dedent(f"""\
    The folder {tmp_path} holds part 1 of 2 of a checkpoint, and no index: model-00001-of-00002.safetensors.
    Fix: copy or download the others and the index; to restore this part alone, pass its own path.""")
  assert checkpoint.show(tmp_path / 'model-00001-of-00002.safetensors').record.leaves


def test_an_orbax_checkpoint_comes_first(tmp_path):
  checkpoint.save(tmp_path / 'a', LAYOUT.shard({'v': np.ones(8)}), layout=LAYOUT)
  save_file({'b': np.ones(2, np.float32)}, tmp_path / 'a' / 'extra.safetensors')
  assert checkpoint.show(tmp_path / 'a').record.written_by == 'flax_spmd'


# -- the other verbs


def test_listed_shown_compared_and_not_verified(tmp_path, capsys):
  by_index(tmp_path)
  (tmp_path / 'one').mkdir()
  save_file({'w': np.ones((8, 8), np.float32)}, tmp_path / 'one' / 'model.safetensors')
  save_file({'w': np.ones((8, 4), np.float32)}, tmp_path / 'two.safetensors')
  assert [s.path.rpartition('/')[2] for s in checkpoint.ls(tmp_path)] == [
    'model-00001-of-00002.safetensors',
    'model-00002-of-00002.safetensors',
    'model.safetensors.index.json',
    'one',
    'two.safetensors',
  ]
  one, two = tmp_path / 'one', tmp_path / 'two.safetensors'
  assert checkpoint.show(one).title == f'{one}: 1 leaf, 256 B by safetensors'
  assert checkpoint.diff(one, two) == ['w: float32[8,8], then float32[8,4]']
  assert refused(checkpoint.verify, one) == dedent(f"""\
    Checkpoint {one} has no checksums: safetensors wrote it.
    Fix: convert it with flax-spmd checkpoint convert, which adds them.""")
  assert main(['checkpoint', 'show', str(one)]) == 0
  assert 'float32[8,8]' in capsys.readouterr().out


def test_differences_are_reported_before_anything_is_read(tmp_path):
  save_file({'a.w': array(np.float32, 8, 16)}, tmp_path / 'x.safetensors')
  target = LAYOUT.abstract(lambda: {'a': {'w': jnp.zeros((16, 8), jnp.bfloat16)}})
  assert (
    refused(checkpoint.restore, tmp_path, target)
    == dedent(f"""\
    Checkpoint {tmp_path} does not match the target:
    a/w: float32[8,16] in the checkpoint, bfloat16[16,8] in the target.
    Fix: give the model the sizes that it was saved with; if dimensions are in another order, split or merged, pass Changes(rearranged={{'regex': 'out in -> in out'}}).""")
  )
  changes = checkpoint.Changes(rearranged={'w': 'a b -> b a'}, dtypes={'float32': 'bfloat16'})
  assert 'reads 1 leaf (512 B), converts 1 of them' in str(
    checkpoint.preflight(tmp_path, target, changes=changes)
  )


def test_converted_into_a_checkpoint_with_checksums(tmp_path):
  arguments = [
    *('checkpoint', 'convert', str(FOLDER / 'llama'), str(tmp_path / 'ours')),
    *('--rename', r'^model/layers/(\d+)/mlp/(\w+)_proj/weight=blocks_\1/\2'),
    *('--rearrange', 'blocks_.*/(up|gate|down)$=out in -> in out'),
    *('--stack', 'blocks=blocks_{}'),
  ]
  assert main(arguments) == 0
  leaves = checkpoint.show(tmp_path / 'ours').record.leaves
  assert leaves['blocks/up'].shape == (3, 32, 48) and leaves['blocks/down'].shape == (3, 48, 32)
  assert checkpoint.verify(tmp_path / 'ours') == []


# -- memory

MEASURED = """
import sys
import jax, numpy as np
import jax.numpy as jnp
import flax_spmd as spmd
from flax_spmd import checkpoint
from jax.sharding import PartitionSpec as P

path, number, size, changed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == 'changed'
layout = spmd.Layout({'data': 2, 'model': 4}, [('w', P(None, 'data', 'model') if changed else P('data', 'model'))])

def create():
  if changed:
    return {'layers': {'w': jnp.zeros((number, size, size))}}
  return {'layers': {str(n): {'w': jnp.zeros((size, size))} for n in range(number)}}

target = layout.abstract(create)
if path == 'none':
  fill = lambda leaf: jax.make_array_from_callback(
    leaf.shape, leaf.sharding, lambda index: np.ones(leaf.sharding.shard_shape(leaf.shape), np.float32))
  state = jax.tree.map(fill, target)
else:
  changes = checkpoint.Changes(rearranged={'w': 'out in -> in out'}, stacks={'layers': 'layers/{}'}) if changed else checkpoint.Changes()
  state = checkpoint.restore(path, target, changes=changes)
jax.block_until_ready(state)
print(int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) * 1024)  # not of the process that started it
"""


def peak(*arguments):
  environment = {
    **os.environ,
    'PYTHONPATH': str(ROOT),
    'XLA_FLAGS': '--xla_force_host_platform_device_count=8',
  }
  command = [sys.executable, '-c', MEASURED, *map(str, arguments)]
  run = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
  return int(run.stdout)


@pytest.mark.slow
@pytest.mark.parametrize('kind', [pytest.param('as saved', marks=pytest.mark.exhaustive), 'changed'])
def test_the_host_holds_little_more_than_the_state(kind, tmp_path):
  number, size = 6, 3072
  one = 4 * size * size
  file = {f'layers.{n}.w': np.ones((size, size), np.float32) for n in range(number)}
  save_file(file, tmp_path / 'model.safetensors')
  del file
  excess = peak(tmp_path, number, size, kind) - peak('none', number, size, kind)
  assert excess < (2 if kind == 'as saved' else 2 * number) * one  # a stack is one array
