"""Random keys as typed keys on one side of a restore and as their numbers on the other."""

from textwrap import dedent

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from tests.checkpoint.foreign_checkpoints_test import WRITERS
from tests.checkpoint.states import LAYOUTS, OPTIMIZERS, assert_equal, assert_matches_target, create

LAYOUT = LAYOUTS['two_by_four']()
IMPLEMENTATIONS = ('threefry2x32', 'rbg', 'unsafe_rbg')


def keys(implementation, shape=()):
  key = jax.random.key(7, impl=implementation)
  return key if shape == () else jax.random.split(key, shape)


def sharded(x):
  """Sharded along the first dimension, if it has one."""
  spec = P('data') if x.ndim and x.shape[0] % 2 == 0 else P()
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(LAYOUT.mesh, spec))


@pytest.mark.parametrize('shape', [(), (4,), (4, 3)])
@pytest.mark.parametrize('implementation', IMPLEMENTATIONS)
def test_both_ways(tmp_path, implementation, shape):
  pack = 1 << 10 if shape == (4,) else 0
  typed = keys(implementation, shape)
  raw = jax.random.key_data(typed)
  for name, saved, target in (('raw', raw, typed), ('typed', typed, raw)):
    path = tmp_path / name
    checkpoint.save(path, {'rng': saved}, layout=LAYOUT, pack=pack)
    restored = checkpoint.restore(path, {'rng': sharded(target)})['rng']
    assert restored.dtype == target.dtype and restored.shape == target.shape
    if name == 'raw':
      assert jax.random.key_impl(restored) == implementation
    assert_equal(target, restored)
    assert restored.sharding.is_equivalent_to(sharded(target).sharding, target.ndim)


def test_on_the_host(tmp_path):
  typed = keys('threefry2x32', (3,))
  checkpoint.save(tmp_path / 'a', {'rng': typed}, layout=LAYOUT)
  restored = checkpoint.restore(tmp_path / 'a', {'rng': np.zeros((3, 2), np.uint32)})['rng']
  assert isinstance(restored, np.ndarray)
  np.testing.assert_array_equal(restored, jax.random.key_data(typed))


def test_numbers_that_are_sharded_by_themselves(tmp_path):
  """The dimension that keys do not have may be sharded in the target."""
  typed = keys('rbg', (2,))
  checkpoint.save(tmp_path / 'a', {'rng': typed}, layout=LAYOUT)
  sharding = jax.NamedSharding(LAYOUT.mesh, P(None, 'model'))
  target = jax.ShapeDtypeStruct((2, 4), jnp.uint32, sharding=sharding)
  restored = checkpoint.restore(tmp_path / 'a', {'rng': target})['rng']
  assert restored.sharding == sharding
  np.testing.assert_array_equal(restored, jax.random.key_data(typed))


@pytest.fixture(scope='module')
def state():
  return spmd.unbox(LAYOUT.init(create, OPTIMIZERS['adamw']))


@pytest.mark.parametrize('writer', WRITERS)
def test_states_of_others(tmp_path, state, writer):
  """A state whose author kept key data, into a state with a typed key."""
  path = WRITERS[writer](tmp_path, state.replace(rng=jax.random.key_data(state.rng)))
  target = LAYOUT.abstract(create, OPTIMIZERS['adamw'])
  plan = checkpoint.preflight(path, target)
  assert plan.notes == ['rng: uint32[2] in the checkpoint, restored as key<fry>[] with the same bits.']
  assert 'converts 1 of them' in str(plan)
  restored = checkpoint.restore(path, target)
  assert_equal(state, restored)
  assert_matches_target(restored, target)


def test_a_typed_key_below_a_name_with_a_dot(tmp_path):
  v1.save(tmp_path / 'a', {'layers.0': {'rng': keys('rbg', (2,))}})
  restored = checkpoint.restore(tmp_path / 'a', layout=LAYOUT)['layers.0']['rng']
  assert_equal(restored, keys('rbg', (2,)))


def test_keys_that_do_not_fit(tmp_path):
  """uint32[4] is no threefry key; keys of one implementation are none of another."""
  v1.save(tmp_path / 'raw', {'a': np.zeros(4, np.uint32), 'b': np.zeros((2, 3), np.uint32)})
  v1.save(tmp_path / 'typed', {'a': keys('rbg'), 'b': keys('threefry2x32', (3,))})
  target = {'a': keys('threefry2x32'), 'b': keys('threefry2x32', (2,))}
  fix = (
    'Fix: keys of {} are the numbers uint32[{}] each, and keep their bits only in an array of that implementation; '
    'create the key of the target as it was created for the save, with jax.random.key(..., impl=...).'
  )
  with pytest.raises(errors.CheckpointMismatchError) as caught:
    checkpoint.restore(tmp_path / 'raw', target)
  assert str(caught.value) == dedent(f"""\
    Checkpoint {tmp_path / 'raw'} does not match the target:
    a: uint32[4] in the checkpoint, key<fry>[] in the target.
    b: uint32[2,3] in the checkpoint, key<fry>[2] in the target.
    """) + fix.format('threefry2x32', 2)
  raw = {'a': jnp.zeros(2, jnp.uint32), 'b': jnp.zeros((2, 2), jnp.uint32)}
  with pytest.raises(errors.CheckpointMismatchError) as caught:
    checkpoint.restore(tmp_path / 'typed', raw)
  assert str(caught.value).splitlines()[1:] == [
    'a: key<rbg>[] in the checkpoint, uint32[2] in the target.',
    'b: key<fry>[3] in the checkpoint, uint32[2,2] in the target.',
    fix.format('rbg', 4),
    fix.format('threefry2x32', 2),
  ]
  with pytest.raises(errors.CheckpointMismatchError) as caught:
    checkpoint.restore(tmp_path / 'typed', {**target, 'b': keys('threefry2x32', (3,))})
  assert str(caught.value).splitlines()[1:] == [
    'a: key<rbg>[] in the checkpoint, key<fry>[] in the target.',
    "Fix: create the key of the target as that of the save, with jax.random.key(..., impl='rbg').",
  ]


def test_a_float_is_no_key(tmp_path):
  v1.save(tmp_path / 'a', {'rng': np.zeros(2, np.float32)})
  with pytest.raises(
    errors.CheckpointMismatchError, match=r'rng: float32\[2\] in the checkpoint, key<fry>\[\]'
  ):
    checkpoint.restore(tmp_path / 'a', {'rng': jax.random.key(0)})


def test_renamed_keys_and_steps_of_optimizers(tmp_path):
  """The conversion goes with other changes: a rename, and numbers of the same shape that stay numbers."""
  state = {
    'seed': jax.random.key_data(keys('rbg')),
    'opt': optax.adam(1e-3).init(jnp.ones(4)),
    'n': jnp.zeros(4, jnp.uint32),
  }
  v1.save(tmp_path / 'a', state)
  target = {
    'rng': keys('unsafe_rbg'),
    'opt': optax.adam(1e-3).init(jnp.ones(4)),
    'n': jnp.zeros(4, jnp.uint32),
  }
  restored = checkpoint.restore(
    tmp_path / 'a', target, changes=checkpoint.Changes(renames={'^seed$': 'rng'})
  )
  assert jax.random.key_impl(restored['rng']) == 'unsafe_rbg'
  np.testing.assert_array_equal(jax.random.key_data(restored['rng']), state['seed'])
  assert restored['n'].dtype == jnp.uint32
