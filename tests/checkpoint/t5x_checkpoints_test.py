"""Checkpoints of T5X's own Checkpointer: msgpack beside zarr arrays."""

import json
import shutil
from textwrap import dedent
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd.checkpoint import Changes
from tests.checkpoint.others import arrays, assert_bits, bfloat16, bytes_read, extract, flat_of, tree_of

LAYOUT = spmd.Layout({'data': 2, 'model': 4}, [('embed', 'data'), ('vocab', 'model'), ('mlp', 'model')])
BY_PATH = spmd.Layout(
  LAYOUT.mesh, [('embedding$', P('model', 'data')), ('layers_[01]$', P('data', 'model'))]
)
STEPS = {'adafactor': 1, 'adafactor_on_host': 1, 'adamw_bfloat16': 1, 'inference': 0}
FIX = (
  'Fix: restore another checkpoint; files of this one are missing, or have changed since it was written.'
)
SALVAGE = 'Fix: restore another checkpoint, or the undamaged leaves of this one with salvage=True.'


@pytest.fixture(scope='module')
def there(tmp_path_factory):
  return extract('t5x', tmp_path_factory.mktemp('t5x'))


def saved_arrays(there, name):
  """The arrays as saved: T5X casts the parameters."""
  saved = arrays(there / name)
  saved = {path: x.astype(np.int32) if x.dtype == np.int64 else x for path, x in saved.items()}
  if name.endswith('bfloat16'):
    saved = {path: bfloat16(x) if path.startswith('target/') else x for path, x in saved.items()}
  return saved


def path_of(there, name):
  return there / name / f'checkpoint_{STEPS[name]}'


@pytest.fixture
def changed(there, tmp_path):
  """Copies a checkpoint, and edits the content of its msgpack file."""

  def change(edit=lambda content: None, name='adamw_bfloat16'):
    path = tmp_path / 'a'
    shutil.copytree(path_of(there, name), path)
    content = serialization.msgpack_restore((path / 'checkpoint').read_bytes())
    edit(content)
    (path / 'checkpoint').write_bytes(serialization.msgpack_serialize(content))
    return path

  return change


def specs(node):
  """The specs of TensorStore in the content of a msgpack file."""
  if 'kvstore' in node:
    yield node
  else:
    for child in node.values():
      yield from specs(child) if isinstance(child, dict) else ()


@pytest.mark.parametrize('name', STEPS)
def test_every_leaf(there, name):
  saved = saved_arrays(there, name)
  restored = flat_of(checkpoint.restore(path_of(there, name), layout=BY_PATH))
  assert_bits(restored, saved)
  assert restored['target/embedding'].sharding.spec == P('model', 'data')
  assert checkpoint.show(path_of(there, name)).title.endswith(' by t5x')
  numpy = tree_of({path: np.zeros_like(x) for path, x in saved.items()})
  assert_bits(flat_of(checkpoint.restore(path_of(there, name), numpy)), saved)


class Optimizer(flax.struct.PyTreeNode):
  state: Any
  target: Any


class OptimizerTrainState(flax.struct.PyTreeNode):
  """As T5X's own state holds its arrays."""

  _optimizer: Optimizer


def test_into_the_state_of_t5x(there):
  saved = saved_arrays(there, 'adafactor')
  tree = jax.tree.map(jnp.zeros_like, tree_of(saved))
  state = OptimizerTrainState(Optimizer(tree['state'], tree['target']))
  target = BY_PATH.shard(state)
  restored = checkpoint.restore(
    path_of(there, 'adafactor'), target, changes=Changes(renames={'^': '_optimizer/'})
  )
  assert_bits(flat_of(restored), {f'_optimizer/{path}': x for path, x in saved.items()})


def test_parameters_with_names(there):
  saved = saved_arrays(there, 'adafactor')

  def params():
    names = {'embedding': ('vocab', 'embed'), 'layers_0': ('embed', 'mlp'), 'layers_1': ('embed', 'mlp')}
    box = lambda name, x: spmd.LogicallyPartitioned(x, names[name]) if name in names else x
    target = tree_of(saved)['target']
    return {name: box(name, jnp.zeros_like(x)) for name, x in target.items()}

  inner = {path.removeprefix('target/'): x for path, x in saved.items() if path.startswith('target/')}
  path = path_of(there, 'adafactor')
  part = checkpoint.restore(path, LAYOUT.abstract(params), changes=Changes(only='target'))
  assert_bits(flat_of(spmd.unbox(part)), inner)
  assert part['layers_0'].value.sharding.spec == P('data', 'model')
  changes = Changes(
    renames={'^target/': 'params/'},
    unused='^state/',
    stacks={'layers': 'layers_{}', 'scale': 'scale_{}'},
  )
  stacked = {
    'params': {
      'embedding': jnp.zeros((16, 8)),
      'layers': jnp.zeros((2, 8, 16)),
      'scale': jnp.zeros((2, 8)),
    }
  }
  restored = checkpoint.restore(path, BY_PATH.shard(stacked), changes=changes)['params']
  np.testing.assert_array_equal(restored['layers'], np.stack([inner['layers_0'], inner['layers_1']]))


def test_the_folder_of_steps(there):
  with pytest.raises(errors.CheckpointNotFoundError) as caught:
    checkpoint.restore(there / 'inference', layout=BY_PATH)
  assert str(caught.value) == dedent(f"""\
    There is no checkpoint at {there / 'inference'}; it holds the checkpoints checkpoint_0.
    Fix: pass the path of a checkpoint, such as {there / 'inference' / 'checkpoint_0'}.""")


# -- other versions


def test_bfloat16_of_version_2(there, changed):
  """Which stores its bits as uint16."""

  def edit(content):
    content['version'] = 2
    for spec in specs(content):
      if spec['dtype'] == 'bfloat16':
        spec['dtype'] = 'uint16'

  path = changed(edit)
  for file in path.glob('target.*/.zarray'):
    file.write_text(file.read_text().replace('"bfloat16"', '"<u2"'))
  restored = checkpoint.restore(path, layout=BY_PATH)
  assert_bits(flat_of(restored), saved_arrays(there, 'adamw_bfloat16'))


@pytest.mark.parametrize('kind', ['gcs', 'gfile', 'outer path'])
def test_specs_of_other_places_and_times(there, changed, kind):
  """Written to a bucket and copied; by T5X at Google; by TensorStore before 0.1.14."""

  def edit(content):
    for spec in specs(content):
      name = spec['kvstore']['path']
      if kind == 'gcs':
        spec['kvstore'] = {'driver': 'gcs', 'bucket': 't5x-dummy-bucket', 'path': name}
      elif kind == 'gfile':
        spec['kvstore'] = {'driver': 'gfile', 'path': name}
      else:
        spec['kvstore'], spec['path'] = {'driver': 'file'}, name.rstrip('/')

  assert_bits(
    flat_of(checkpoint.restore(changed(edit), layout=BY_PATH)), saved_arrays(there, 'adamw_bfloat16')
  )


def test_without_the_version(there, changed):
  """As the first checkpoints: no version, and the state without a key around it."""

  def edit(content):
    state = content.pop('optimizer')
    content.clear()
    content.update(state)

  path = changed(edit, 'adafactor')
  assert_bits(flat_of(checkpoint.restore(path, layout=BY_PATH)), saved_arrays(there, 'adafactor'))


# -- reading


def test_in_a_bucket(there, server):
  path = path_of(there, 'adamw_bfloat16')
  for file in path.rglob('*'):
    if file.is_file():
      server.put(f'{server.bucket}/run/{path.name}/{file.relative_to(path)}', file.read_bytes())
  restored = checkpoint.restore(f'{server.bucket}/run/{path.name}', layout=BY_PATH)
  assert_bits(flat_of(restored), saved_arrays(there, 'adamw_bfloat16'))


def test_each_slice_is_read_once(there):
  """Also where several devices hold it: a replicated array is read once, not eight times."""
  path = path_of(there, 'inference')
  sizes = sum(file.stat().st_size for file in path.glob('target.*/*'))
  before = bytes_read()
  checkpoint.restore(path, layout=spmd.Layout(LAYOUT.mesh, []))
  assert bytes_read() - before == sizes


def test_little_memory(there):
  """In several groups, down to one array at a time."""
  path, saved = path_of(there, 'adafactor'), saved_arrays(there, 'adafactor')
  for memory in (1, 600):
    assert_bits(flat_of(checkpoint.restore(path, layout=BY_PATH, memory=memory)), saved)


# -- damage


def error_of(path, **options):
  with pytest.raises(errors.CheckpointDamagedError) as caught:
    checkpoint.restore(path, **(options or {'layout': BY_PATH}))
  return str(caught.value)


@pytest.mark.parametrize('file', ['0.0', '.zarray'])
def test_a_missing_file(changed, file):
  """A missing chunk is not read as zeros."""
  path = changed()
  (path / 'target.embedding' / file).unlink()
  text = error_of(path)
  assert text.startswith(f'Checkpoint {path} is damaged in 1 leaf:\ntarget/embedding: ')
  assert text.endswith(f'\n{SALVAGE}')
  whole = checkpoint.restore(path, layout=BY_PATH, changes=Changes(only='state/param_states'))
  assert flat_of(whole)


def test_a_changed_chunk(changed):
  path = changed()
  chunk = path / 'target.embedding' / '0.0'
  chunk.write_bytes(chunk.read_bytes()[:-3])
  assert error_of(path).startswith(f'Checkpoint {path} is damaged in 1 leaf:\ntarget/embedding: ')


def test_an_array_of_another_shape(changed):
  path = changed()
  file = path / 'target.embedding' / '.zarray'
  file.write_text(json.dumps({**json.loads(file.read_text()), 'shape': [16, 9]}))
  assert error_of(path) == (
    f'Checkpoint {path} is damaged in 1 leaf:\ntarget/embedding: its description is bfloat16[16, 8], and '
    f'target.embedding has bfloat16[16, 9].\n{SALVAGE}'
  )


def test_a_shape_that_nothing_could_hold(changed):
  def edit(content):
    content['optimizer']['target']['embedding']['metadata']['shape'] = [2**59, 8]

  text = error_of(changed(edit))
  assert text.splitlines()[1] == 'target/embedding: bfloat16[576460752303423488,8] takes 8 EiB.'


@pytest.mark.parametrize('name', ['../secret/', '/etc/', 'a/../../b', 'target\0'])
def test_a_name_that_leads_out(changed, name):
  def edit(content):
    content['optimizer']['target']['embedding']['kvstore']['path'] = name

  assert 'leads' in error_of(changed(edit))


@pytest.mark.parametrize(
  ('key', 'value'),
  [
    ('driver', 'json'),
    ('driver', 3),
    ('dtype', 'object'),
    ('dtype', None),
    ('dtype', 'f4,('),
    ('metadata', {}),
    ('metadata', {'shape': [-1, 8]}),
    ('metadata', {'shape': ['8', 8]}),
    ('metadata', {'shape': 8}),
    ('kvstore', {}),
    ('kvstore', 'file:///etc'),
    ('kvstore', {'path': 3}),
  ],
)
def test_an_invalid_description(changed, key, value):
  def edit(content):
    content['optimizer']['target']['embedding'][key] = value

  path = changed(edit)
  text = error_of(path)
  assert text.startswith(f'Checkpoint {path} cannot be read: the description {{') and text.endswith(
    f'\n{FIX}'
  )


@pytest.mark.parametrize('state', [None, {}])
def test_a_state_without_arrays(changed, state):
  path = changed(lambda content: content.update(optimizer=state))
  assert error_of(path) == f'Checkpoint {path} cannot be read: checkpoint has no arrays.\n{FIX}'


def test_a_state_of_another_type(changed):
  path = changed(lambda content: content.update(optimizer='x'))
  with pytest.raises(errors.FlaxSpmdError):
    checkpoint.restore(path, layout=BY_PATH)
