"""`save_safetensors`: what safetensors' own library and ours read back, whole or not at all."""

import json
import os
import resource
import tempfile
from pathlib import Path
from textwrap import dedent

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P
from safetensors import deserialize, safe_open
from safetensors.numpy import load_file

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd.checkpoint import Changes
from tests.checkpoint.hugging_face_models import FOLDER, HEADS, KV_HEADS, MODELS
from tests.processes import as_another_user, run_process

LAYOUT = spmd.Layout(
  {'data': 2, 'model': 4}, (('embed', 'data'), ('mlp', 'model'), ('heads', 'model'), ('vocab', 'model'))
)


def create():
  generator = np.random.default_rng(0)
  kernel = generator.standard_normal((3, 8, 16), np.float32)
  return {
    'layers': {'up': spmd.LogicallyPartitioned(jnp.asarray(kernel), ('layers', 'embed', 'mlp'))},
    'half': jnp.arange(8, dtype=jnp.bfloat16),
    'eight': jnp.ones((2, 4), jnp.float8_e4m3fn),
    'flag': np.array([True, False]),
    'step': 7,
    'rate': 0.5,
  }


def state():
  return LAYOUT.shard(create())


def refused(call, *arguments, error=errors.CheckpointError, **options):
  with pytest.raises(error) as caught:
    call(*arguments, **options)
  return str(caught.value)


def test_one_file(tmp_path):
  file = tmp_path / 'new' / 'x.safetensors'
  checkpoint.save_safetensors(file, state(), metadata={'format': 'flax', 'note': 'é'})
  up = create()['layers']['up'].value
  loaded = dict(deserialize(file.read_bytes()))
  assert loaded['layers.up']['data'] == up.tobytes() and loaded['layers.up']['shape'] == [3, 8, 16]
  assert {name: tensor['dtype'] for name, tensor in loaded.items()} == {
    'layers.up': 'F32',
    'half': 'BF16',
    'eight': 'F8_E4M3',
    'flag': 'BOOL',
    'step': 'I32',
    'rate': 'F32',
  }
  with safe_open(file, 'np') as opened:
    assert opened.metadata() == {'format': 'flax', 'note': 'é'}
  assert os.listdir(tmp_path / 'new') == ['x.safetensors']
  target = LAYOUT.abstract(create)
  again = checkpoint.restore(file, {**target, 'step': 0, 'rate': 0.0})
  assert again['step'] == 7 and np.array_equal(again['layers']['up'].value, up)
  assert again['layers']['up'].value.sharding.spec == P(None, 'data', 'model')


def test_python_numbers(tmp_path):
  numbers = {'step': 7, 'rate': 0.1, 'done': True}
  checkpoint.save_safetensors(tmp_path / 'x.safetensors', numbers)
  loaded = load_file(tmp_path / 'x.safetensors')
  assert loaded == numbers and loaded['step'].dtype == np.int64 and loaded['rate'].dtype == np.float64
  zeros = {'step': 0, 'rate': 0.0, 'done': False}
  assert checkpoint.restore(tmp_path / 'x.safetensors', zeros) == numbers


def test_a_folder_with_an_index(tmp_path):
  (tmp_path / 'config.json').write_text('{}')
  checkpoint.save_safetensors(tmp_path, state(), max_shard_bytes=600)
  files = sorted(os.listdir(tmp_path))
  assert files == [
    'config.json',
    'model-00001-of-00002.safetensors',
    'model-00002-of-00002.safetensors',
    'model.safetensors.index.json',
  ]
  index = json.loads((tmp_path / files[-1]).read_text())
  assert index['metadata'] == {'total_size': 3 * 8 * 16 * 4 + 16 + 8 + 2 + 4 + 4}
  for tensor, file in index['weight_map'].items():
    with safe_open(tmp_path / file, 'np') as opened:
      assert tensor in opened.keys()  # noqa: SIM118
  with safe_open(tmp_path / files[1], 'np') as opened:
    assert opened.metadata() == {'format': 'pt'}  # transformers refuses files without it
  again = checkpoint.restore(tmp_path, layout=LAYOUT)
  assert np.array_equal(again['layers']['up'], create()['layers']['up'].value)


def test_every_array_is_aligned(tmp_path):
  arrays = {
    'a': np.ones(3, np.int8),
    'b': np.ones(3),
    'c': np.ones(3, np.float16),
    'd': np.ones(3, np.float32),
  }
  checkpoint.save_safetensors(tmp_path / 'x.safetensors', arrays)
  content = (tmp_path / 'x.safetensors').read_bytes()
  length = int.from_bytes(content[:8], 'little')
  assert length % 8 == 0
  for name, entry in json.loads(content[8 : 8 + length]).items():
    if name in arrays:
      assert entry['data_offsets'][0] % arrays[name].dtype.itemsize == 0


LLAMA_BACK = Changes(
  renames={
    '^params/embedding$': 'model/embed_tokens/weight',
    '^params/norm$': 'model/norm/weight',
    '^params/logits$': 'lm_head/weight',
    '^params/blocks/(q|k|v)$': r'model/layers/self_attn/\1_proj/weight',
    '^params/blocks/out$': 'model/layers/self_attn/o_proj/weight',
    '^params/blocks/(gate|up|down)$': r'model/layers/mlp/\1_proj/weight',
    '^params/blocks/norm_attention$': 'model/layers/input_layernorm/weight',
    '^params/blocks/norm_mlp$': 'model/layers/post_attention_layernorm/weight',
  },
  rearranged={
    '[qkv]_proj': '... embed heads head -> ... (heads head) embed',
    'o_proj': '... heads head embed -> ... embed (heads head)',
    '(gate|up|down)_proj|lm_head': '... in out -> ... out in',
  },
  stacks={'model/layers': 'model/layers/{}'},
)


@pytest.mark.parametrize('most', [None, 30_000])
def test_llama_there_and_back_is_equal_byte_for_byte(most, tmp_path):
  make, batch, changes = MODELS['llama']
  variables = LAYOUT.abstract(make().init, jax.random.key(0), batch)
  params = checkpoint.restore(FOLDER / 'llama', variables, changes=changes)
  checkpoint.save_safetensors(tmp_path / 'hf', params, changes=LLAMA_BACK, max_shard_bytes=most)
  theirs, ours = (
    {tensor: array for file in folder.glob('*.safetensors') for tensor, array in load_file(file).items()}
    for folder in (FOLDER / 'llama', tmp_path / 'hf')
  )
  assert theirs.keys() == ours.keys()
  assert all(theirs[name].tobytes() == ours[name].tobytes() for name in theirs)
  assert len(list((tmp_path / 'hf').glob('*.json'))) == (most is not None)
  assert ours['model.layers.0.self_attn.k_proj.weight'].shape == (KV_HEADS * 4, 32) and HEADS == 8


def test_parameters_of_a_train_state_in_half_precision(tmp_path):
  trained = TrainState.create(apply_fn=None, params={'w': jnp.ones((8, 8))}, tx=optax.adamw(1e-3))
  changes = Changes(unused='^(?!params/)', renames={'^params/': ''}, dtypes={'float32': 'bfloat16'})
  checkpoint.save_safetensors(tmp_path / 'hf', trained, changes=changes)
  assert load_file(tmp_path / 'hf' / 'model.safetensors')['w'].dtype == jnp.bfloat16
  checkpoint.save_safetensors(tmp_path / 'part', trained, changes=Changes(only='params'))
  assert list(load_file(tmp_path / 'part' / 'model.safetensors')) == ['params.w']


def test_parts_are_fused(tmp_path):
  parts = {name: np.full((4, 2), number, np.float32) for number, name in enumerate('qkv')}
  changes = Changes(stacks={'attn/qkv': ('attn/{q,k,v}', 1)})
  checkpoint.save_safetensors(tmp_path / 'x.safetensors', {'attn': parts}, changes=changes)
  fused = load_file(tmp_path / 'x.safetensors')['attn.qkv']
  assert fused.shape == (4, 3, 2) and np.array_equal(fused[:, 2], parts['v'])


# -- refused


def test_nothing_is_replaced(tmp_path):
  checkpoint.save_safetensors(tmp_path / 'x.safetensors', {'w': np.ones(2)})
  before = (tmp_path / 'x.safetensors').read_bytes()
  for path, text in ((tmp_path / 'x.safetensors', 'exists'), (tmp_path, 'holds safetensors')):
    message = refused(
      checkpoint.save_safetensors, path, {'w': np.zeros(2)}, error=errors.CheckpointExistsError
    )
    assert message == f'{path} {text} already.\nFix: save to another path, or remove it first.'
  assert (tmp_path / 'x.safetensors').read_bytes() == before


def test_leaves_that_the_format_cannot_hold(tmp_path):
  bad = {
    'key': jax.random.key(0),
    'four': jnp.ones(2, jnp.int4),
    'wide': np.ones(2, np.complex128),
    'a.b': np.ones(1),
    'a': {'b': np.ones(1)},
  }
  assert (
    refused(checkpoint.save_safetensors, tmp_path / 'x', bad)
    == dedent("""\
    a.b and a/b would be one tensor.
    four is int4[2], which safetensors cannot hold.
    key is key<fry>[], which safetensors cannot hold.
    wide is complex128[2], which safetensors cannot hold.
    Fix: use no empty keys, no "/", "." or "\\" in the keys of the state, and no null or half characters.
    Fix: keep it out, with Changes(unused='regex'), or save its data: jax.random.key_data(key), or another dtype.""")
  )
  assert refused(checkpoint.save_safetensors, tmp_path / 'x', {'s': 'text', 't': object()}) == dedent("""\
    s is a str.
    t is an object.
    Fix: keep only numbers and arrays in the state.""")
  save = jax.jit(lambda w: checkpoint.save_safetensors(tmp_path / 'x', {'w': w}))
  assert 'w is traced: it has no values.' in refused(save, jnp.ones(2))
  abstract = jax.ShapeDtypeStruct((2,), np.float32)
  assert 'w is abstract: it has the shape (2,) but no values.' in refused(
    checkpoint.save_safetensors, tmp_path / 'x', {'w': abstract}
  )
  assert not (tmp_path / 'x').exists()


def test_arguments(tmp_path):
  save, one = checkpoint.save_safetensors, {'w': np.ones(8)}
  assert refused(save, tmp_path / 'a', {}) == dedent("""\
    The state has no leaves to save.
    Fix: pass a state that contains arrays, and unused= that leaves some.""")
  assert refused(save, tmp_path / 'a', one, max_shard_bytes=0) == dedent("""\
    max_shard_bytes=0 is not a number of bytes.
    Fix: pass 5_000_000_000.""")
  assert refused(save, tmp_path / 'a', one, metadata={'a': 1}) == dedent("""\
    metadata={'a': 1} holds more than strings.
    Fix: pass a dict of strings.""")
  two = {'v': np.ones(8), 'w': np.ones(8)}
  assert refused(save, tmp_path / 'a.safetensors', two, max_shard_bytes=64) == dedent(f"""\
    {tmp_path}/a.safetensors is one file, and 128 B do not fit into max_shard_bytes=64.
    Fix: pass a folder, which can hold several files.""")
  changes = Changes(axes={'a': 'b'}, moved='c', missing='d')
  assert refused(save, tmp_path / 'a', one, changes=changes) == dedent("""\
    save_safetensors has no target, so Changes(axes=..., moved=..., missing=...) cannot apply.
    Fix: pass only renames, rearranged, stacks, dtypes, only and unused.""")
  changes = Changes(renames={'^v$': 'u'}, rearranged={'w': 'a b -> b a'})
  assert refused(save, tmp_path / 'a', one, changes=changes) == dedent("""\
    renames: '^v$' matches no path of the checkpoint.
    w: 'a b -> b a' does not fit float64[8]: it has 2 dimensions.
    Fix: look up paths and names with flax-spmd checkpoint show.
    Fix: correct the arrangement in rearranged; its left side describes the saved dimensions.""")
  assert os.listdir(tmp_path) == []


FULL = """
import resource, signal
import numpy as np
from flax_spmd import checkpoint, errors
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
  checkpoint.save_safetensors(PATH, {'v': np.ones(8), 'w': np.ones(1 << 20)})
except errors.CheckpointError as error:
  print(type(error).__name__, error)
"""


def test_a_full_disk_leaves_nothing(tmp_path):
  full = run_process(FULL.replace('PATH', repr(str(tmp_path / 'a' / 'b'))))
  assert full.stdout == dedent(f"""\
    CheckpointError Cannot write {tmp_path}/a/b: File too large (EFBIG).
    Fix: raise the limit of file sizes (ulimit -f), or use a file system with larger files.
    """)
  assert os.listdir(tmp_path) == []


def test_a_name_that_cannot_be_given_leaves_nothing(tmp_path):
  index = tmp_path / 'a' / 'model.safetensors.index.json'
  index.mkdir(parents=True)
  text = refused(
    checkpoint.save_safetensors, index.parent, {'v': np.ones(8), 'w': np.ones(8)}, max_shard_bytes=64
  )
  assert text == (
    f'Cannot write {index}: Is a directory (EISDIR).\n'
    'Fix: check the path and its file system, and repeat the call.'
  )
  assert os.listdir(index.parent) == [index.name]


def test_memory_of_a_save_is_that_of_one_array(tmp_path):
  size = 16 << 20
  shape = (8, size // 32)
  sharding = LAYOUT.sharding(spmd.LogicallyPartitioned(jnp.zeros(shape), ('embed', 'mlp')))
  arrays = {f'w{n}': jax.device_put(np.ones(shape, np.float32), sharding) for n in range(8)}
  jax.block_until_ready(arrays)
  checkpoint.save_safetensors(tmp_path / 'tiny', {'w': jnp.ones(8)})
  Path('/proc/self/clear_refs').write_text('5')  # forgets the peak
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  checkpoint.save_safetensors(tmp_path / 'all', arrays)
  grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
  assert grown < 2 * size


def test_a_folder_of_another_user():
  with (
    tempfile.TemporaryDirectory() as folder,
    as_another_user(),
  ):  # pytest's own folders are closed to other users
    with pytest.raises(errors.CheckpointReadOnlyError) as caught:
      checkpoint.save_safetensors(f'{folder}/a', {'w': np.ones(8)})
  assert str(caught.value) == (
    f'Cannot write {folder}/a: Permission denied (EACCES).\nFix: pass a path that this process may write to.'
  )
