"""Dimensions of another size: the part that checkpoint and target both have, and the target's own values of the rest."""

from textwrap import dedent

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd.checkpoint import Changes
from tests.checkpoint.states import LAYOUTS, OPTIMIZERS, Model, assert_matches_target, create, plain

LAYOUT = LAYOUTS['two_by_four']()


def expected(saved, own):
  """The oracle, in numpy alone: each leaf of `own`, with as much of the saved one as it has room for."""

  def leaf(old, new):
    old, new = plain(old), plain(new).copy()
    both = tuple(slice(min(sizes)) for sizes in zip(old.shape, new.shape, strict=True))
    new[both] = old[both]
    return new

  return jax.tree.map(leaf, spmd.unbox(saved), spmd.unbox(own))


def assert_resized(restored, saved, own):
  for one, two in zip(jax.tree.leaves(restored), jax.tree.leaves(expected(saved, own)), strict=True):
    np.testing.assert_array_equal(plain(one), two)


def other_values(state):
  return jax.tree.map(
    lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or x.shape == (1,) else x + 5000, state
  )


@pytest.mark.parametrize(
  'seed', [pytest.param(n, marks=[] if n < 8 else [pytest.mark.exhaustive]) for n in range(12)]
)
def test_a_model_that_grows_or_shrinks(tmp_path, seed):
  """Layers of a scan along either axis, and features, with the optimizer's state and leaves without names."""
  random = np.random.default_rng(seed)
  tx = OPTIMIZERS[['adamw', 'muon', 'adafactor'][seed % 3]]
  axis, pack = int(random.integers(2)), int(random.integers(2)) << 20
  is_factored = seed % 3 == 2  # by the largest dimensions, which have to stay
  layers, more = random.choice([2, 3, 5] if is_factored else [2, 3, 5, 8], 2, replace=False)
  features, others = (32, 32) if is_factored else random.choice([32, 40, 64], 2)
  under = [LAYOUTS[name]() for name in random.choice(list(LAYOUTS), 2)]
  models = [Model(axis, int(n), int(f)) for n, f in ((layers, features), (more, others))]
  saved = under[0].init(create, tx, models[0])
  own = other_values(under[1].init(create, tx, models[1]))
  checkpoint.save(tmp_path / 'a', saved, under[0], pack=pack)
  changes = Changes(resized=('layers', 'mlp'))
  restored = checkpoint.restore(tmp_path / 'a', own, changes=changes)
  assert_matches_target(restored, own)
  assert_resized(restored, saved, own)
  on_host = jax.tree.map(lambda x: x if x.dtype == own.rng.dtype else np.asarray(x), own)
  assert_resized(checkpoint.restore(tmp_path / 'a', on_host, changes=changes), saved, own)
  assert_resized(own, own, own)  # the target keeps its own


def test_a_larger_vocabulary(tmp_path):
  """Beside the named dimension, that of the bias in the same module follows; the size of no other does."""

  def state(size, other=8):
    return {
      'embedding': {'w': spmd.LogicallyPartitioned(jnp.full((size, 4), size), ('vocab', 'embed'))},
      'head': {
        'kernel': spmd.LogicallyPartitioned(jnp.full((4, size), size), ('embed', 'vocab')),
        'bias': jnp.full(size, size),
      },
      'other': {'w': jnp.full(other, size)},
    }

  saved = LAYOUT.init(lambda: state(8))
  checkpoint.save(tmp_path / 'a', saved, LAYOUT)
  for size in (12, 4):
    own, changes = LAYOUT.init(lambda size=size: state(size)), Changes(resized='vocab')
    assert_resized(checkpoint.restore(tmp_path / 'a', own, changes=changes), saved, own)
  with pytest.raises(errors.CheckpointMismatchError) as caught:
    checkpoint.restore(tmp_path / 'a', LAYOUT.init(lambda: state(12, 12)), changes=changes)
  assert (
    str(caught.value)
    == dedent(f"""\
    Checkpoint {tmp_path / 'a'} does not match the target:
    other/w: int32[8] in the checkpoint, int32[12] in the target.
    Fix: give the model the sizes and dtypes that it was saved with; or keep the target's value of another shape: Changes(missing='regex', unused='regex').""")
  )


def test_casts_and_stacks(tmp_path):
  """The stacked dimension of layers that are single on one side may have another size, too."""

  def stacked(count, dtype=jnp.float32):
    w = jnp.arange(8 * count, dtype=dtype).reshape(count, 8)
    return {'layers': {'w': spmd.LogicallyPartitioned(w, ('layers', 'embed')), 'b': w[:, 0]}}

  def single(count):
    both = spmd.unbox(stacked(count))['layers']
    return {
      f'layers_{i}': {'w': spmd.LogicallyPartitioned(both['w'][i], ('embed',)), 'b': both['b'][i]}
      for i in range(count)
    }

  changes = Changes(stacks={'layers': 'layers_{}'}, resized='layers', missing='layers_[67]')
  for count, other in ((4, 6), (6, 4), (6, 8)):
    checkpoint.save(tmp_path / f'stack{count}', LAYOUT.shard(stacked(count)), LAYOUT, overwrite=True)
    checkpoint.save(tmp_path / f'single{count}', LAYOUT.shard(single(count)), LAYOUT, overwrite=True)
    own = other_values(LAYOUT.shard(stacked(other, jnp.bfloat16)))
    casts = Changes(stacks={'layers': 'layers_{}'}, resized='layers', dtypes={'float32': 'bfloat16'})
    for name in ('stack', 'single'):
      restored = checkpoint.restore(tmp_path / f'{name}{count}', own, changes=casts)
      assert_resized(restored, stacked(count), own)
    own = other_values(LAYOUT.shard(single(other)))
    if count == 4:
      continue  # layers 4 and 5 may not be missing: see below
    restored = checkpoint.restore(tmp_path / f'stack{count}', own, changes=changes)
    whole = single(max(count, other))
    saved = {name: whole[name] if int(name[-1]) < count else own[name] for name in own}
    assert_resized(restored, saved, own)
  with pytest.raises(errors.CheckpointMismatchError, match='layers_4/w: in the target'):
    checkpoint.restore(tmp_path / 'stack4', LAYOUT.shard(single(6)), changes=changes)


@pytest.mark.parametrize('axis', [None, 0, 1, 2])
@pytest.mark.parametrize('sizes', [(8, 24), (24, 8)])
@pytest.mark.parametrize('is_stacked', [False, True])
def test_layers_whose_other_dimensions_have_another_size(tmp_path, is_stacked, sizes, axis):
  """Names show the stacked dimension, or it is given."""

  def states(size, value):
    at, w = axis or 0, np.arange(3 * 16 * size, dtype=np.float32).reshape(3, 16, size) + value
    names = ['embed', 'mlp']
    names.insert(at, 'layers')
    stack = spmd.LogicallyPartitioned(jnp.asarray(np.moveaxis(w, 0, at)), tuple(names))
    single = {
      f'layers_{n}': {'w': spmd.LogicallyPartitioned(jnp.asarray(w[n]), ('embed', 'mlp'))}
      for n in range(3)
    }
    return [single, {'layers': {'w': stack}}]

  checkpoint.save(tmp_path / 'a', LAYOUT.shard(states(sizes[0], 0)[not is_stacked]), LAYOUT)
  own = LAYOUT.shard(states(sizes[1], 5000)[is_stacked])
  stack = 'layers_{}' if axis is None else ('layers_{}', axis)
  changes = Changes(stacks={'layers': stack}, resized='mlp')
  restored = checkpoint.restore(tmp_path / 'a', own, changes=changes)
  assert_matches_target(restored, own)
  assert_resized(restored, states(sizes[0], 0)[is_stacked], own)
  with pytest.raises(errors.CheckpointMismatchError, match='not in the checkpoint'):
    checkpoint.restore(tmp_path / 'a', own, changes=Changes(stacks={'layers': stack}, resized='embed'))


def test_an_abstract_target_has_no_values_to_keep(tmp_path):
  def state(count):
    return {'w': spmd.LogicallyPartitioned(jnp.ones((count, 8)), ('layers', 'embed'))}

  checkpoint.save(tmp_path / 'a', LAYOUT.init(state, 4), LAYOUT)
  changes = Changes(resized='layers')
  assert checkpoint.restore(tmp_path / 'a', LAYOUT.abstract(state, 2), changes=changes)['w'].shape == (
    2,
    8,
  )
  with pytest.raises(errors.CheckpointMismatchError) as caught:
    checkpoint.restore(tmp_path / 'a', LAYOUT.abstract(state, 6), changes=changes)
  assert str(caught.value) == dedent(f"""\
    Checkpoint {tmp_path / 'a'} does not match the target:
    w: resized= keeps the rest of its values, but the target is abstract: float32[6,8].
    Fix: pass a target with values, such as the result of layout.init.""")


def test_the_errors_name_it(tmp_path):
  def state(embed, mlp):
    return {'w': spmd.LogicallyPartitioned(jnp.ones((embed, mlp)), ('embed', 'mlp'))}

  checkpoint.save(tmp_path / 'a', LAYOUT.init(state, 8, 8), LAYOUT)
  target = LAYOUT.init(state, 16, 16)
  for changes, more in (
    (Changes(), ''),
    (Changes(resized='mlp'), ''),
    (
      Changes(resized=('mlp', 'embd')),
      "\nresized: no dimension is named 'embd'. Did you mean 'embed'?",
    ),
  ):
    with pytest.raises(errors.CheckpointMismatchError) as caught:
      checkpoint.restore(tmp_path / 'a', target, changes=changes)
    fix = '\nFix: look up paths and names with flax-spmd checkpoint show.' if more else ''
    assert str(caught.value) == (
      f'Checkpoint {tmp_path / "a"} does not match the target:\n'
      f'w: float32[8,8] in the checkpoint, float32[16,16] in the target.{more}\n'
      'Fix: give the model the sizes and dtypes that it was saved with; or restore the part that both have: '
      "Changes(resized=('embed', 'mlp')); or keep the target's value of another shape: "
      f"Changes(missing='regex', unused='regex').{fix}"
    )


def test_on_a_mesh_of_explicit_axes(tmp_path):
  mesh = jax.make_mesh((2, 4), ('data', 'model'), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
  under = spmd.Layout(mesh, (('embed', 'data'), ('mlp', 'model')))

  def state(layers, value):
    w = jnp.full((layers, 8, 8), value)
    return {'w': spmd.LogicallyPartitioned(w, ('layers', 'embed', 'mlp'))}

  saved = under.init(state, 4, 1.0)
  checkpoint.save(tmp_path / 'a', saved, under)
  for layers in (2, 6):
    own = under.init(state, layers, 2.0)
    restored = checkpoint.restore(tmp_path / 'a', own, changes=Changes(resized='layers'))
    assert_matches_target(restored, own)
    assert_resized(restored, saved, own)
