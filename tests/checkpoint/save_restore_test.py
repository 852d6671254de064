"""Checkpoints saved under one layout and restored under others, bit-equal; and restores that are refused."""

import itertools
from textwrap import dedent

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd._src.checkpoint.storage.readers import open_checkpoint
from tests.checkpoint.states import LAYOUTS, OPTIMIZERS, Model, State, assert_equal, create


@pytest.fixture(scope='module', params=itertools.product(('adamw', 'adafactor'), (True, False)))
def saved(request, tmp_path_factory):
  name, boxed = request.param
  tx = OPTIMIZERS[name]
  layout = LAYOUTS['two_by_four']()
  plan = layout.plan(create, tx, boxed=boxed)
  state = plan.init()
  path = tmp_path_factory.mktemp('checkpoints') / name
  checkpoint.save(path, state, plan)
  return tx, state, path


def test_training_continues_from_the_restored_state(tmp_path):
  tx = OPTIMIZERS['adamw']
  layout, other = LAYOUTS['two_by_four'](), LAYOUTS['other_rules']()
  x = jnp.ones((8, 16))

  def create():
    params = Model().init(jax.random.key(0), x)['params']
    return State.create(apply_fn=None, params=params, tx=tx, rng=jax.random.key(7))

  def step(state, x):
    grads = jax.grad(lambda p: jnp.mean(Model().apply({'params': p}, x) ** 2))(state.params)
    return state.apply_gradients(grads=grads)

  state = layout.init(create)
  checkpoint.save(tmp_path / 'a', state, layout=layout)
  restored = checkpoint.restore(tmp_path / 'a', other.abstract(create))
  one, two = layout.jit(step)(state, x), other.jit(step, donate_argnums=0)(restored, x)
  for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(two.params), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-6)


def test_an_existing_state_as_target(saved):
  tx, state, path = saved
  there = LAYOUTS['eight']().init(create, tx)
  restored = checkpoint.restore(path, there)
  assert_equal(state, restored)
  assert restored.params['blocks']['Dense_0']['kernel'].value.sharding.spec == P(None, 'data', None)


def test_names_and_layout_are_in_the_checkpoint(saved):
  tx, _, path = saved
  record = open_checkpoint(path).record
  assert record.leaves['params/blocks/Dense_0/kernel'].names == ('layers', 'embed', 'mlp')
  assert record.leaves['params/blocks/Dense_0/bias'].names is None
  assert spmd.Layout.from_toml(record.layout) == LAYOUTS['two_by_four']()
  if tx is OPTIMIZERS['adafactor']:
    assert record.leaves['opt_state/0/v_row/blocks/Dense_0/kernel'].names == ('layers', 'embed')


def test_python_numbers_none_and_empty_states(tmp_path):
  layout = LAYOUTS['eight']()
  tree = {'n': 3, 'f': 1.5, 'none': None, 'empty': optax.EmptyState(), 'a': layout.shard(jnp.arange(8))}
  checkpoint.save(tmp_path / 'a', tree, layout=layout)
  restored = checkpoint.restore(tmp_path / 'a', tree)
  assert (restored['n'], restored['f'], restored['none']) == (3, 1.5, None)
  assert type(restored['n']) is int and type(restored['f']) is float
  assert jax.tree.structure(restored) == jax.tree.structure(tree)


def test_weak_types_are_those_of_the_target(tmp_path):
  """A train state counts its steps from a number of Python; a step that is compiled for it is not compiled again."""
  layout = spmd.Layout({'data': 8})
  sharded = layout.jit(lambda x: jnp.broadcast_to(x, 8), out_rules=P('data'))
  state = {'step': layout.shard(jnp.asarray(3)), 'weak': sharded(0.5), 'strong': sharded(np.float32(2))}
  checkpoint.save(tmp_path / 'a', state, layout)
  abstract = {
    key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.weak_type)
    for key, leaf in state.items()
  }
  for target in (state, abstract):
    restored = checkpoint.restore(tmp_path / 'a', target)
    assert [key for key, leaf in restored.items() if not leaf.weak_type] == ['strong']
    assert_equal(restored, state)


def test_a_python_number_is_restored_into_an_array_of_its_kind(tmp_path):
  layout = LAYOUTS['eight']()
  checkpoint.save(tmp_path / 'a', {'step': 3}, layout=layout)
  restored = checkpoint.restore(tmp_path / 'a', layout.abstract(lambda: {'step': jnp.int32(0)}))
  assert restored['step'].dtype == jnp.int32 and int(restored['step']) == 3


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16', 'int8', 'uint8', 'bool', 'float8_e4m3fn'])
def test_dtypes_are_kept(tmp_path, dtype):
  layout = LAYOUTS['eight']()
  w = layout.shard(spmd.LogicallyPartitioned(jnp.arange(16).astype(dtype), ('embed',)))
  checkpoint.save(tmp_path / 'a', {'w': w}, layout=layout)
  restored = checkpoint.restore(tmp_path / 'a', layout.abstract(lambda: {'w': w}))['w']
  assert restored.dtype == w.dtype
  np.testing.assert_array_equal(np.asarray(restored.value), np.asarray(w.value))


def test_a_memory_limit_is_raised_to_the_largest_array(tmp_path):
  layout = LAYOUTS['eight']()
  state = layout.shard({'large': np.ones((64, 1024), np.float32), 'small': np.arange(8)})
  for number, options in enumerate(({}, {'compress': True}, {'pack': 100})):
    path = tmp_path / str(number)
    checkpoint.save(path, state, layout=layout, memory=1000, **options)
    assert_equal(state, checkpoint.restore(path, state, memory=1000))
  with checkpoint.Manager(tmp_path / 'run', layout, every=1, memory=1000) as manager:
    manager.save(1, state)
  assert_equal(state, checkpoint.restore(tmp_path / 'run' / '1', state))


# -- bad input


def text_of(kind, f, *args, **kwargs):
  with pytest.raises(kind) as caught:
    f(*args, **kwargs)
  assert isinstance(caught.value, errors.CheckpointError)
  return str(caught.value)


@pytest.fixture(scope='module')
def small(tmp_path_factory):
  layout = LAYOUTS['eight']()
  state = {
    'w': spmd.LogicallyPartitioned(jnp.ones((8, 4)), ('embed', None)),
    'b': jnp.ones(4),
    'n': jnp.int32(1),
  }
  folder = tmp_path_factory.mktemp('small')
  for name in ('one', 'two'):
    checkpoint.save(folder / name, layout.shard(state), layout=layout)
  return layout, state, folder


def target(layout, **changes):
  tree = {'w': jnp.ones((8, 4)), 'b': jnp.ones(4), 'n': jnp.int32(1), **changes}
  return layout.abstract(lambda: {k: v for k, v in tree.items() if v is not None})


def test_a_missing_checkpoint(small):
  layout, _, folder = small
  assert text_of(FileNotFoundError, checkpoint.restore, folder / 'three', target(layout)) == dedent(f"""\
    There is no checkpoint at {folder / 'three'}; beside it are one, two.
    Fix: pass the path of a checkpoint, such as {folder / 'two'}.""")
  assert text_of(FileNotFoundError, checkpoint.restore, folder, target(layout)) == dedent(f"""\
    There is no checkpoint at {folder}; it holds the checkpoints one, two.
    Fix: pass the path of a checkpoint, such as {folder / 'two'}.""")
  nowhere = folder / 'no' / 'where'
  assert text_of(FileNotFoundError, checkpoint.restore, nowhere, target(layout)) == dedent(f"""\
    There is no checkpoint at {nowhere}; {folder / 'no'} does not exist either.
    Fix: pass the path that was given to flax_spmd.checkpoint.save.""")


def test_every_difference_at_once(small):
  layout, _, folder = small
  different = target(layout, w=jnp.ones((8, 6)), b=None, n=jnp.float32(1), bias=jnp.ones(4))
  text = text_of(errors.CheckpointMismatchError, checkpoint.restore, folder / 'one', different)
  assert (
    text
    == dedent(f"""\
    Checkpoint {folder / 'one'} does not match the target:
    bias: in the target (float32[4]), not in the checkpoint.
    b: in the checkpoint (float32[4]), not in the target.
    n: int32[] in the checkpoint, float32[] in the target.
    w: float32[8,4] in the checkpoint, float32[8,6] in the target.
    Fix: restore into a state of the model and optimizer that was saved; for renamed leaves, pass Changes(renames={{'old': 'new'}}); to keep the target's values of leaves that were not saved, pass Changes(missing='regex'); to leave saved leaves out, pass Changes(unused='regex').
    Fix: this cast can lose digits; to allow it, pass Changes(dtypes={{'int32': 'float32'}}).
    Fix: give the model the sizes and dtypes that it was saved with; or keep the target's value of another shape: Changes(missing='regex', unused='regex').""")
  )


def test_the_old_path_of_a_renamed_leaf_is_suggested(small):
  layout, _, folder = small
  tree = {'kernel': layout.shard(jnp.ones((8, 4)))}
  checkpoint.save(folder / 'renamed', tree, layout=layout)
  text = text_of(
    ValueError,
    checkpoint.restore,
    folder / 'renamed',
    layout.abstract(lambda: {'kernel_0': tree['kernel']}),
  )
  assert (
    text
    == dedent(f"""\
    Checkpoint {folder / 'renamed'} does not match the target:
    kernel_0: in the target (float32[8,4]), not in the checkpoint. Did you mean 'kernel'?
    kernel: in the checkpoint (float32[8,4]), not in the target.
    Fix: restore into a state of the model and optimizer that was saved; for renamed leaves, pass Changes(renames={{'old': 'new'}}); to keep the target's values of leaves that were not saved, pass Changes(missing='regex'); to leave saved leaves out, pass Changes(unused='regex').""")
  )


def test_a_target_without_shardings(small):
  layout, state, folder = small
  assert text_of(TypeError, checkpoint.restore, folder / 'one', jax.eval_shape(lambda: state)) == dedent("""\
    b (float32[4]) has no sharding.
    n (int32[]) has no sharding.
    w (float32[8,4]) has no sharding.
    Fix: build the target with layout.abstract(...), which sets shapes, dtypes and shardings.""")


def test_targets_that_no_array_can_match(small):
  _, _, folder = small
  sharding = jax.NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), 'd'), P('d'))
  target = {
    'b': jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding),
    'w': np.zeros((8, 4), '>f4'),
  }
  assert text_of(TypeError, checkpoint.restore, folder / 'one', target) == dedent(f"""\
    b (float32[4]) does not divide into the shards of {sharding}.
    w has the byte order of another machine (>f4).
    Fix: build the target with layout.abstract(...), which sets shapes, dtypes and shardings.""")


def test_a_target_of_numpy_arrays(small):
  _, state, folder = small
  numpy = jax.tree.map(np.asarray, spmd.unbox(state))
  restored = checkpoint.restore(folder / 'one', numpy)
  assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(restored))
  assert_equal(numpy, restored)


def test_a_target_of_shardings_only(small):
  layout, state, folder = small
  text = text_of(TypeError, checkpoint.restore, folder / 'one', layout.sharding(state))
  assert 'w is a NamedSharding, without shape and dtype.' in text.splitlines()


def test_an_existing_path(small):
  layout, state, folder = small
  before = sorted(path.name for path in (folder / 'one').rglob('*'))
  assert text_of(FileExistsError, checkpoint.save, folder / 'one', state, layout=layout) == dedent(f"""\
    {folder / 'one'} exists already.
    Fix: save to another path, remove it first, or pass overwrite=True.""")
  assert sorted(path.name for path in (folder / 'one').rglob('*')) == before


def test_leaves_that_cannot_be_saved(small):
  layout, _, folder = small
  tree = {'w': jax.ShapeDtypeStruct((8,), jnp.float32), 's': 'text', 'ok': jnp.ones(3)}
  assert text_of(ValueError, checkpoint.save, folder / 'new', tree, layout=layout) == dedent("""\
    s is a str.
    w is abstract: it has the shape (8,) but no values.
    Fix: keep only numbers, numeric arrays and random keys in the state.
    Fix: save a state with values, as layout.init returns; layout.abstract only plans one.""")
  assert not (folder / 'new').exists()


def test_dtypes_that_cannot_be_saved(small):
  layout, _, folder = small
  tree = {
    'big': {'float': np.ones(3, '>f4'), 'int': np.ones(3, '>i8')},
    'long': np.ones(3, np.longdouble),
    'objects': np.array([None]),
    'ok': np.ones(3, 'float32'),
    'raw': np.zeros(3, 'V4'),
    'structured': np.zeros(3, [('a', '>f4')]),
    'text': np.array(['a']),
  }
  assert text_of(ValueError, checkpoint.save, folder / 'new', tree, layout=layout) == dedent(f"""\
    big/float is an array of dtype >f4.
    big/int is an array of dtype >i8.
    long is an array of dtype {np.dtype(np.longdouble)}.
    objects is an array of dtype object.
    raw is an array of dtype |V4.
    structured is an array of dtype [('a', '>f4')].
    text is an array of dtype <U1.
    Fix: convert it to the byte order of this machine, with x.astype(x.dtype.newbyteorder("=")).
    Fix: convert it to float64 or complex128; no longer numbers can be stored.
    Fix: keep only numbers, numeric arrays and random keys in the state.""")
  assert not (folder / 'new').exists()


def test_two_leaves_with_one_path(small):
  layout, _, folder = small
  tree = {'a/b': jnp.ones(1), 'a': {'b': jnp.ones(1)}}
  assert text_of(ValueError, checkpoint.save, folder / 'new', tree, layout=layout) == dedent("""\
    Two leaves have the path a/b.
    Fix: use no "/" in the keys of the state.""")
