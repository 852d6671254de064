"""Checkpoints of plain Orbax (v0, v1) and flax.training.checkpoints; and ours, read by plain Orbax."""

import warnings
from textwrap import dedent
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as v0
import pytest
from flax.training import checkpoints as flax_checkpoints
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd.checkpoint import Changes
from tests.checkpoint.states import (
  LAYOUTS,
  OPTIMIZERS,
  Model,
  assert_equal,
  assert_matches_target,
  create,
  one_by_one,
)

LAYOUT, OTHER = LAYOUTS['two_by_four'](), LAYOUTS['eight']()
TX = OPTIMIZERS['adamw']
BY_PATH = spmd.Layout({'data': 2, 'model': 4}, [('Dense_0/kernel$', P(None, 'data', 'model'))])


class Opt(NamedTuple):
  count: Any
  mu: Any


def odd(like=lambda x: x):
  """Python numbers, empties and None, in every kind of node."""
  return {
    'opt': (Opt(like(np.int32(3)), {'w': like(np.arange(8, dtype=np.float32))}), optax.EmptyState()),
    'list': [like(np.ones(4, np.float16)), {'deep': like(np.ones((2, 2), np.int8))}],
    'step': 7,
    'rate': 0.25,
    'is_frozen': True,
    'none': None,
    'empty': {},
    'nothing': (),
  }


def by_manager(path, state):
  with v0.CheckpointManager(path / 'run') as manager:
    manager.save(4, args=v0.args.StandardSave(state))
    manager.wait_until_finished()
  return path / 'run' / '4'


def by_composite(path, state):
  with v0.CheckpointManager(path / 'run') as manager:
    extra = v0.args.StandardSave({'x': np.ones(2, np.float32)})
    manager.save(
      0,
      args=v0.args.Composite(
        model=v0.args.StandardSave(state), extra=extra, note=v0.args.JsonSave({'a': 1})
      ),
    )
    manager.wait_until_finished()
  return path / 'run' / '0' / 'model'


def by_standard(path, state):
  with v0.StandardCheckpointer() as checkpointer:
    checkpointer.save(path / 'a', state)
  return path / 'a'


def by_pytree(path, state):
  with v0.PyTreeCheckpointer() as checkpointer:
    checkpointer.save(path / 'a', state)
  return path / 'a'


def by_v1(path, state):
  v1.save(path / 'a', state, custom_metadata={'note': 1})
  return path / 'a'


def by_v1_part(path, state):
  v1.save_checkpointables(path / 'a', {'model': state, 'extra': {'x': np.ones(2, np.float32)}})
  return path / 'a' / 'model'


def by_flax(path, state, use_orbax):
  before = flax.config.flax_use_orbax_checkpointing
  flax.config.update('flax_use_orbax_checkpointing', use_orbax)
  try:
    with warnings.catch_warnings(action='ignore', category=DeprecationWarning):
      flax_checkpoints.save_checkpoint(path, state, step=2)
  finally:
    flax.config.update('flax_use_orbax_checkpointing', before)
  return path / 'checkpoint_2'


WRITERS = {
  'v0 StandardCheckpointer': by_standard,
  'v0 PyTreeCheckpointer': by_pytree,
  'v0 CheckpointManager': by_manager,
  'v0 Composite': by_composite,
  'v1': by_v1,
  'v1 checkpointables': by_v1_part,
  'flax msgpack': lambda path, state: by_flax(path, state, False),
  'flax orbax': lambda path, state: by_flax(path, state, True),
}


def plain_state(layout=LAYOUT):
  """A TrainState of a user without this package: no boxes, and the key as its data."""
  state = layout.init(create, TX)
  state = state.replace(rng=jax.random.key_data(state.rng))
  return spmd.unbox(state)


@pytest.fixture(scope='module', params=WRITERS)
def written(request, tmp_path_factory):
  state = plain_state()
  folder = tmp_path_factory.mktemp('foreign')
  return request.param, state, WRITERS[request.param](folder, state)


def with_names():
  state = create(TX)
  return state.replace(rng=jax.random.key_data(state.rng))


def test_into_a_target_with_boxes(written):
  _, state, path = written
  target = OTHER.abstract(with_names)
  restored = checkpoint.restore(path, target)
  assert_equal(state, restored)
  assert_matches_target(restored, target)
  assert restored.opt_state[0].mu['blocks']['Dense_0']['kernel'].names == ('layers', 'embed', 'mlp')


def test_without_a_target_by_rules_for_paths(written):
  name, state, path = written
  restored = checkpoint.restore(path, layout=BY_PATH)
  assert_equal(state.params, restored['params'])
  moments = restored['opt_state']
  moments = moments['0'] if name == 'flax msgpack' else moments[0]  # which writes lists as dicts
  assert_equal(state.opt_state[0].nu, moments['nu'])
  for tree in (restored['params'], moments['mu']):
    assert tree['blocks']['Dense_0']['kernel'].sharding.spec == P(None, 'data', 'model')
    assert tree['blocks']['Dense_1']['kernel'].sharding.spec == P()
  part = checkpoint.restore(path, layout=BY_PATH, changes=Changes(only='params/blocks'))
  assert_equal(state.params['blocks'], part)


def test_differences_are_reported_before_reading(written, monkeypatch):
  _, _, path = written
  monkeypatch.setattr(v1, 'load', None)
  state = LAYOUT.abstract(with_names)
  wrong = state.replace(params={**state.params, 'head': {'kernel': state.params['head']['kernel']}})
  with pytest.raises(errors.CheckpointMismatchError) as caught:
    checkpoint.restore(path, wrong)
  assert (
    str(caught.value)
    == dedent(f"""\
    Checkpoint {path if path.name in ('a', 'checkpoint_2') or path.name.isdecimal() else path.parent} does not match the target:
    params/head/bias: in the checkpoint (float32[4]), not in the target.
    Fix: restore into a state of the model and optimizer that was saved; to leave saved leaves out, pass Changes(unused='regex').""")
  )


@pytest.mark.parametrize('writer', [name for name in WRITERS if name != 'flax msgpack'])
def test_numbers_and_empties(tmp_path, writer):
  state = odd(jnp.asarray)
  path = WRITERS[writer](tmp_path, state)
  restored = checkpoint.restore(path, odd())
  assert jax.tree.structure(restored) == jax.tree.structure(state)
  assert (restored['step'], restored['rate']) == (7, 0.25) and type(restored['step']) is int
  assert restored['is_frozen'] is True
  assert_equal(jax.tree.map(np.asarray, odd()), jax.tree.map(np.asarray, restored))
  arrays = OTHER.abstract(lambda: jax.tree.map(jnp.asarray, odd()))
  assert int(checkpoint.restore(path, arrays)['step']) == 7
  assert checkpoint.restore(path, arrays)['is_frozen'].dtype == bool
  tree = checkpoint.restore(path, layout=OTHER)
  assert (tree['step'], tree['rate']) == (7, 0.25)
  assert tree['opt'][0]['mu']['w'].tolist() == list(range(8))


def test_a_save_that_casts_numbers_too(tmp_path):
  state = {'step': 7, 'w': jnp.arange(8.0)}
  half = jax.tree.map(lambda x: v0.SaveArgs(dtype=jnp.dtype('bfloat16')), state)
  v0.PyTreeCheckpointer().save(tmp_path / 'a', state, save_args=half)
  restored = checkpoint.restore(tmp_path / 'a', layout=OTHER)
  assert restored['step'] == 7.0 and restored['w'].dtype == jnp.bfloat16


@pytest.mark.parametrize('writer', [by_standard, by_pytree, by_v1])
def test_one_array_without_a_container(tmp_path, writer):
  path = writer(tmp_path, np.arange(8, dtype=np.float32))
  restored = checkpoint.restore(path, OTHER.abstract(lambda: jnp.arange(8.0)))
  for array in (restored, checkpoint.restore(path, layout=OTHER)):
    np.testing.assert_array_equal(array, np.arange(8))


STRANGE_KEYS = ('', '\u200bx', "it's", '"', 'a\\b', 'a\nb', '\xad', 'é')


@pytest.mark.parametrize('writer', [by_standard, by_pytree])
def test_strange_keys(tmp_path, writer):
  state = {key: np.arange(8, dtype=np.float32) + number for number, key in enumerate(STRANGE_KEYS)}
  state = {
    '': {**state, '': dict(state)},
    'list': [{'': state['é']}, state['é'] + 1],
    **dict(list(state.items())[1:]),
  }
  path = writer(tmp_path, state)
  for restored in (
    checkpoint.restore(path, layout=OTHER),
    checkpoint.restore(path, OTHER.abstract(lambda: state)),
  ):
    assert_equal(restored, state)


def test_a_number_that_does_not_fit(tmp_path):
  path = by_standard(tmp_path, {'step': 300, 'w': np.ones(8, np.float32)})
  target = OTHER.abstract(lambda: {'step': jnp.int8(0), 'w': jnp.ones(8)})
  with pytest.raises(errors.CheckpointError) as caught:
    checkpoint.restore(path, target)
  assert (
    str(caught.value) == 'The number 300 does not fit into int8.\nFix: give the target a wider dtype.'
  )


def test_a_folder_of_steps(tmp_path):
  by_manager(tmp_path, {'w': np.ones(8, np.float32)})
  with pytest.raises(FileNotFoundError) as caught:
    checkpoint.restore(tmp_path / 'run', layout=OTHER)
  assert f'There is no checkpoint at {tmp_path / "run"}; it holds the checkpoints 4.' in str(
    caught.value
  )


def test_a_checkpoint_without_a_layout_needs_one(tmp_path):
  path = by_standard(tmp_path, {'w': np.ones(8, np.float32)})
  with pytest.raises(errors.CheckpointError) as caught:
    checkpoint.restore(path)
  assert str(caught.value) == dedent("""\
    The checkpoint has no recorded layout.
    Fix: pass a target, layout.abstract(...), or layout=, or both mesh= and rules=.""")


def test_layers_and_optimizers_of_foreign_checkpoints(tmp_path):
  """The kinds of their optimizer states are unknown, so states are matched by path."""
  state = plain_state()
  path = by_v1(tmp_path, state)
  single = Model(axis=None)
  make = lambda: (s := create(TX, single)).replace(rng=jax.random.key_data(s.rng))
  restored = checkpoint.restore(
    path, OTHER.abstract(make), changes=Changes(stacks={'blocks': 'blocks_{}'})
  )
  assert_equal(one_by_one(state), restored)


# -- our checkpoints, read by plain Orbax


def test_plain_orbax_loads_ours(tmp_path):
  """Into the state as dicts and lists, by v1 and v0."""
  state = LAYOUT.init(create, TX)
  checkpoint.save(tmp_path / 'a', state, layout=LAYOUT)
  target = OTHER.abstract(create, TX, boxed=False)
  mu, nu = target.opt_state[0].mu, target.opt_state[0].nu
  form = {
    'step': target.step,
    'params': target.params,
    'opt_state': [{'count': target.opt_state[0].count, 'mu': mu, 'nu': nu}, None, None],
    'rng': target.rng,
  }
  folder = checkpoint.show(tmp_path / 'a').folder
  loaded = v1.load(folder, form)
  assert_equal(state.params, loaded['params'])
  assert_equal(state.opt_state[0].nu, loaded['opt_state'][0]['nu'])
  assert_equal(state.rng, loaded['rng'])
  assert_matches_target(loaded['params'], target.params)
  with v0.StandardCheckpointer() as checkpointer:
    again = checkpointer.restore(f'{folder}/state')
  assert_equal(state.params, again['params'])


def test_a_tree_without_leaves(tmp_path):
  path = by_standard(tmp_path, {'empty': {}})
  assert checkpoint.restore(path, layout=LAYOUT) == {}
  assert checkpoint.restore(path, {'empty': {}}) == {'empty': {}}


def test_the_last_listed_is_the_latest_of_flax(tmp_path):
  """The first and the last of each prefix of steps that are saved in order."""
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', DeprecationWarning)
    for prefix, steps in (('checkpoint_', (2, 9, 10, 100)), ('ema_', (0.25, 0.5, 3.0, 20.0))):
      for step in steps:
        flax_checkpoints.save_checkpoint(tmp_path, {'w': np.ones(2)}, step, prefix, keep=9)
    latest = [flax_checkpoints.latest_checkpoint(tmp_path, prefix) for prefix in ('checkpoint_', 'ema_')]
  names = [summary.path.rsplit('/', 1)[1] for summary in checkpoint.ls(tmp_path)]
  assert names == [
    *(f'checkpoint_{step}' for step in (2, 9, 10, 100)),
    *(f'ema_{step}' for step in (0.25, 0.5, 3.0, 20.0)),
  ]
  assert latest == [str(tmp_path / names[3]), str(tmp_path / names[7])]
