"""Composite checkpoints of Orbax: several items with arrays, restored as one tree."""

import json
import shutil
from textwrap import dedent

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as v0
import pytest
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd.checkpoint import Changes

LAYOUT = spmd.Layout({'data': 2, 'model': 4}, [('embed', 'data'), ('mlp', 'model')])
BY_PATH = spmd.Layout(LAYOUT.mesh, [('kernel$', P('data', 'model'))])


def create():
  kernel = jax.random.normal(jax.random.key(0), (8, 4))
  params = {'kernel': spmd.LogicallyPartitioned(kernel, ('embed', 'mlp'))}
  return {'params': params, 'opt_state': optax.adam(1e-3).init(params)}


class Iterator:
  """The position of a data iterator, as MaxText and grain save it."""

  async def save(self, directory):
    async def write():
      (await directory.await_creation() / 'process_0-of-1.json').write_text('{"next": 3}')

    return write()

  async def load(self, directory):
    raise NotImplementedError


def by_manager(path, state):
  args = v0.args
  with v0.CheckpointManager(path) as manager:
    items = args.Composite(
      params=args.StandardSave(state['params']),
      opt_state=args.PyTreeSave(state['opt_state']),
      data=args.JsonSave({'position': 3}),
      key=args.JaxRandomKeySave(jax.random.key(1)),
    )
    manager.save(7, args=items)
    manager.wait_until_finished()
  return path / '7'


def by_checkpointer(path, state):
  with v1.training.Checkpointer(path) as checkpointer:
    checkpointer.save_checkpointables(
      7, {**state, 'data': {'position': 3, 'name': 'c4'}, 'iter': Iterator()}
    )
  return path / '7'


def by_function(path, state):
  v1.save_checkpointables(path / 'a', {**state, 'iter': Iterator()})
  return path / 'a'


WRITERS = {
  by_manager: ('data', 'key'),
  by_checkpointer: ('data', 'iter'),
  by_function: ('iter',),
}


@pytest.fixture(scope='module', params=WRITERS, ids=lambda writer: writer.__name__)
def written(request, tmp_path_factory):
  state = spmd.unbox(LAYOUT.init(create))
  return request.param, state, request.param(tmp_path_factory.mktemp('composite') / 'run', state)


def assert_same(one, two):
  assert jax.tree.structure(one) == jax.tree.structure(two)
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
    np.testing.assert_array_equal(a, b)


def test_items_are_the_top_level_keys(written):
  _, state, path = written
  target = LAYOUT.abstract(create)
  restored = checkpoint.restore(path, target)
  assert_same(state, spmd.unbox(restored))
  assert restored['opt_state'][0].mu['kernel'].names == ('embed', 'mlp')
  assert restored['params']['kernel'].value.sharding.spec == P('data', 'model')
  tree = checkpoint.restore(path, layout=BY_PATH)
  np.testing.assert_array_equal(tree['opt_state'][0]['nu']['kernel'], state['opt_state'][0].nu['kernel'])
  assert tree['opt_state'][0]['mu']['kernel'].sharding.spec == P('data', 'model')


def test_items_without_arrays_are_named(written):
  writer, _, path = written
  summary = checkpoint.show(path)
  assert summary.record.skipped == WRITERS[writer]
  assert f'parts without arrays: {", ".join(WRITERS[writer])}' in str(summary).splitlines()
  assert list(summary.record.leaves) == [
    'opt_state/0/count',
    'opt_state/0/mu/kernel',
    'opt_state/0/nu/kernel',
    'params/kernel',
  ]


def test_one_item(written):
  """By its path, or as a part of the whole: the two agree."""
  _, state, path = written
  part = checkpoint.restore(path / 'params', {'kernel': state['params']['kernel']})
  assert_same(state['params'], part)
  assert checkpoint.show(path / 'params').record.skipped == ()
  assert_same(part, checkpoint.restore(path, state, changes=Changes(only='params')))
  renamed = checkpoint.restore(
    path,
    {'weights': state['params']},
    changes=Changes(renames={'^params': 'weights'}, unused='^opt_state'),
  )
  assert_same(state['params'], renamed['weights'])


def test_differences_name_the_item(written):
  _, state, path = written
  target = {**state, 'params': {'kernel': jnp.ones((8, 8))}, 'ema': {'kernel': jnp.ones(2)}}
  with pytest.raises(errors.CheckpointMismatchError) as caught:
    checkpoint.restore(path, target)
  assert str(caught.value).splitlines()[:3] == [
    f'Checkpoint {path} does not match the target:',
    'ema/kernel: in the target (float32[2]), not in the checkpoint.',
    'params/kernel: float32[8,4] in the checkpoint, float32[8,8] in the target.',
  ]


def test_the_folder_of_steps(written):
  writer, state, path = written
  if writer is by_function:
    return
  with pytest.raises(errors.CheckpointNotFoundError) as caught:
    checkpoint.restore(path.parent, state)
  assert str(caught.value) == dedent(f"""\
    There is no checkpoint at {path.parent}; it holds the checkpoints 7.
    Fix: pass the path of a checkpoint, such as {path.parent / '7'}.""")


def test_one_item_with_arrays_is_the_tree(tmp_path):
  """`state` beside JSON, as many trainers write it."""
  args = v0.args
  with v0.CheckpointManager(tmp_path / 'run') as manager:
    state = {'w': jnp.ones(8)}
    manager.save(1, args=args.Composite(state=args.StandardSave(state), data=args.JsonSave({'a': 1})))
    manager.wait_until_finished()
  assert_same(checkpoint.restore(tmp_path / 'run' / '1', state), state)
  assert checkpoint.show(tmp_path / 'run' / '1').record.skipped == ('data',)


def test_an_item_named_state_does_not_hide_the_others(tmp_path):
  tree = {'state': {'w': np.ones(8, np.float32)}, 'ema': {'w': np.zeros(8, np.float32)}}
  v1.save_checkpointables(tmp_path / 'a', tree)
  assert_same(checkpoint.restore(tmp_path / 'a', tree), tree)
  assert_same(checkpoint.restore(tmp_path / 'a' / 'state', tree['state']), tree['state'])


def test_numbers_are_a_part_and_descriptions_are_not(tmp_path):
  tree = {'params': {'w': np.ones(8, np.float32)}, 'step': {'n': 7}}
  v1.save_checkpointables(tmp_path / 'a', {**tree, 'config': {'n': 7, 'name': 'x'}})
  restored = checkpoint.restore(tmp_path / 'a', tree)
  assert restored['step'] == {'n': 7}
  assert checkpoint.show(tmp_path / 'a').record.skipped == ('config',)


def test_a_damaged_item(written, tmp_path):
  """An item whose arrays are gone is an error, which names it, and the others can be read."""
  _, state, path = written
  gone = tmp_path / 'a'
  gone.mkdir()
  for child in path.rglob('*'):
    if child.is_file() and not ('opt_state' in child.parts and child.name == 'manifest.ocdbt'):
      copy = gone / child.relative_to(path)
      copy.parent.mkdir(parents=True, exist_ok=True)
      copy.write_bytes(child.read_bytes())
  with pytest.raises(errors.CheckpointDamagedError, match=r'cannot be read: .*\nFix: restore another'):
    checkpoint.restore(gone, state)
  assert_same(checkpoint.restore(gone / 'params', state['params']), state['params'])


def test_shapes_that_nothing_could_hold(tmp_path):
  """In the array's own description, without a record."""
  v0.PyTreeCheckpointer(use_ocdbt=False).save(tmp_path / 'a', {'w': np.ones(8, np.float32)})
  file = tmp_path / 'a' / 'w' / '.zarray'
  file.write_text(json.dumps({**json.loads(file.read_text()), 'shape': [2**59], 'chunks': [2**20]}))
  with pytest.raises(errors.CheckpointDamagedError) as caught:
    checkpoint.restore(tmp_path / 'a', layout=LAYOUT)
  assert str(caught.value).splitlines()[1:] == [
    'w: float32[576460752303423488] takes 2 EiB.',
    'Fix: restore another checkpoint; the shapes of this one were changed after it was written.',
  ]


# -- 64 bits


def test_arrays_of_64_bits(tmp_path):
  """JAX makes arrays of 32 bits of them, so their checksums are compared on the host."""
  saved = {'w': np.arange(8) / 3, 'n': np.arange(8)}
  checkpoint.save(tmp_path / 'ours', saved, layout=LAYOUT)
  v1.save(tmp_path / 'plain', saved)
  casts = Changes(dtypes={'float64': 'float32', 'int64': 'int32'})
  for name in ('ours', 'plain'):
    path = tmp_path / name
    assert_same(checkpoint.restore(path, saved), saved)
    cast = checkpoint.restore(path, layout=LAYOUT, changes=casts)
    assert_same(cast, {'w': saved['w'].astype(np.float32), 'n': saved['n'].astype(np.int32)})
    with pytest.raises(errors.CheckpointMismatchError) as caught:
      checkpoint.restore(path, layout=LAYOUT)
    assert (
      str(caught.value)
      == dedent(f"""\
      Checkpoint {path} does not match the target:
      n: int64[8] in the target, but JAX makes arrays of int32 of it.
      w: float64[8] in the target, but JAX makes arrays of float32 of it.
      Fix: call jax.config.update("jax_enable_x64", True), or restore into numpy arrays, or pass Changes(dtypes={{'int64': 'int32'}}) and a target of the narrower dtype.
      Fix: call jax.config.update("jax_enable_x64", True), or restore into numpy arrays, or pass Changes(dtypes={{'float64': 'float32'}}) and a target of the narrower dtype.""")
    )
    with jax.enable_x64(True), pytest.raises(errors.CheckpointError) as caught:
      checkpoint.restore(path, layout=LAYOUT)
    assert str(caught.value) == dedent(f"""\
      Checkpoint {path} was read with 64 bits disabled:
      n: int64 became int32.
      w: float64 became float32.
      Fix: enable them for all threads, with jax.config.update("jax_enable_x64", True).""")
    jax.config.update('jax_enable_x64', True)
    try:
      assert_same(checkpoint.restore(path, layout=LAYOUT), saved)
    finally:
      jax.config.update('jax_enable_x64', False)


# -- damaged parts


DAMAGES = {
  'description': ('_METADATA', lambda file: file.write_text('{')),
  'no description': ('_METADATA', lambda file: file.unlink()),
  'names': (
    '_METADATA',
    lambda file: file.write_text(file.read_text().replace('"key": "mu"', '"key": "../mu"')),
  ),
}


@pytest.fixture(params=DAMAGES)
def with_damage(request, written, tmp_path):
  _, state, path = written
  shutil.copytree(path, tmp_path / 'a')
  name, damage = DAMAGES[request.param]
  damage(tmp_path / 'a' / 'opt_state' / name)
  return tmp_path / 'a', state


def test_a_damaged_part_leaves_the_others(with_damage):
  path, state = with_damage
  part = {'params': state['params']}
  assert_same(checkpoint.restore(path / 'params', state['params']), state['params'])
  assert_same(checkpoint.restore(path, state, changes=Changes(only='params')), state['params'])
  assert_same(checkpoint.restore(path, layout=BY_PATH, changes=Changes(only='params')), state['params'])
  assert_same(checkpoint.restore(path, part, changes=Changes(unused='^opt_state')), part)
  renamed = Changes(renames={'^params': 'weights'}, unused='^opt_state')
  assert_same(
    checkpoint.restore(path, {'weights': state['params']}, changes=renamed), {'weights': state['params']}
  )


def test_a_damaged_part_is_an_error_for_those_who_ask_for_it(with_damage):
  path, state = with_damage
  every = {
    'part': lambda: checkpoint.restore(path / 'opt_state', state['opt_state']),
    'all': lambda: checkpoint.restore(path, state),
    'record': lambda: checkpoint.restore(path, layout=BY_PATH),
    'only': lambda: checkpoint.restore(path, state, changes=Changes(only='opt_state/0')),
    'only, record': lambda: checkpoint.restore(path, layout=BY_PATH, changes=Changes(only='opt_state')),
    'unused': lambda: checkpoint.restore(path, state, changes=Changes(unused='')),
    'missing': lambda: checkpoint.restore(path, state, changes=Changes(missing='', unused='')),
    'a target without it': lambda: checkpoint.restore(path, {'params': state['params']}),
    'preflight': lambda: checkpoint.preflight(path, state),
  }
  for name, call in every.items():
    with pytest.raises(errors.CheckpointDamagedError) as caught:
      call()
    if name != 'part':
      reason, fix = str(caught.value).splitlines()
      assert reason in str(checkpoint.show(path)).splitlines()
      assert fix == (
        'Fix: restore another checkpoint; or the other parts of this one, without opt_state, with Changes(only=...) or '
        'Changes(unused="^opt_state/") and a target.'
      )


def test_all_parts_are_damaged(written, tmp_path):
  _, state, path = written
  shutil.copytree(path, tmp_path / 'a')
  for part in ('opt_state', 'params'):
    (tmp_path / 'a' / part / '_METADATA').write_text('{')
  with pytest.raises(
    errors.CheckpointDamagedError, match=r'because of _METADATA: .*\nFix: restore another'
  ):
    checkpoint.restore(tmp_path / 'a', state, changes=Changes(only='params'))


def test_a_target_with_the_name_of_the_only_item(tmp_path):
  """A single item with arrays is the tree itself."""
  state, args = {'w': np.ones(4, np.float32), 'b': np.zeros(2, np.float32)}, v0.args
  items = args.Composite(state=args.StandardSave(state), data=args.JsonSave({'position': 3}))
  with v0.CheckpointManager(tmp_path / 'run') as manager:
    manager.save(7, args=items)
    manager.wait_until_finished()
  path, target = (
    tmp_path / 'run' / '7',
    LAYOUT.abstract(lambda: {'state': jax.tree.map(jnp.asarray, state)}),
  )
  assert jax.tree.all(jax.tree.map(np.array_equal, checkpoint.restore(path, target['state']), state))
  with pytest.raises(errors.CheckpointMismatchError) as error:
    checkpoint.restore(path, target)
  assert str(error.value) == dedent(f"""\
    Checkpoint {path} does not match the target:
    state/b: in the target (float32[2]), not in the checkpoint.
    state/w: in the target (float32[4]), not in the checkpoint.
    b: in the checkpoint (float32[2]), not in the target.
    w: in the checkpoint (float32[4]), not in the target.
    Fix: the checkpoint has no level 'state': restore the part of the target that is below it.""")
