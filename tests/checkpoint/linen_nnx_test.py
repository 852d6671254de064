"""The changes between Linen and NNX, derived: every layer of Flax computes the same after a restore, and is the same after one back."""

import itertools
import textwrap

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import flax_spmd as spmd
from flax_spmd import checkpoint
from flax_spmd.checkpoint import Changes
from flax_spmd.errors import CheckpointMismatchError

MESH = spmd.make_mesh({'data': 2}, devices=jax.devices()[:2])
LAYOUT = spmd.Layout(MESH, (spmd.fsdp('data', min_size=1),), indivisible='replicate')
X = np.random.default_rng(0).normal(size=(4, 6, 8)).astype('float32')
TX = {
  'adam': optax.adam(1e-2),
  'chain': optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
  'adafactor': optax.adafactor(1e-2, min_dim_size_to_factor=4),
}
init = nn.initializers.normal()  # biases and scales of ones and zeros would hide a wrong pair
biased = {'bias_init': init}
scaled = {'bias_init': init, 'scale_init': init}


def cell(kind, **options):
  return lambda rngs: nnx.RNN(kind(8, 16, rngs=rngs, **options), rngs=rngs)


LAYERS = {
  'Dense': (nn.Dense(16, **biased), lambda rngs: nnx.Linear(8, 16, rngs=rngs)),
  'DenseGeneral': (
    nn.DenseGeneral((4, 4), axis=(-2, -1), **biased),
    lambda rngs: nnx.LinearGeneral((6, 8), (4, 4), axis=(-2, -1), rngs=rngs),
  ),
  'Einsum': (
    nn.Einsum((8, 16), 'ble,ef->blf', **biased),
    lambda rngs: nnx.Einsum('ble,ef->blf', (8, 16), (16,), rngs=rngs),
  ),
  'Conv': (nn.Conv(16, (3,), **biased), lambda rngs: nnx.Conv(8, 16, (3,), rngs=rngs)),
  'ConvTranspose': (
    nn.ConvTranspose(16, (3,), **biased),
    lambda rngs: nnx.ConvTranspose(8, 16, (3,), rngs=rngs),
  ),
  'LayerNorm': (nn.LayerNorm(**scaled), lambda rngs: nnx.LayerNorm(8, rngs=rngs)),
  'RMSNorm': (nn.RMSNorm(scale_init=init), lambda rngs: nnx.RMSNorm(8, rngs=rngs)),
  'GroupNorm': (nn.GroupNorm(4, **scaled), lambda rngs: nnx.GroupNorm(8, 4, rngs=rngs)),
  'BatchNorm': (
    nn.BatchNorm(use_running_average=True, **scaled),
    lambda rngs: nnx.BatchNorm(8, use_running_average=True, rngs=rngs),
  ),
  'MultiHeadDotProductAttention': (
    nn.MultiHeadDotProductAttention(4, qkv_features=16, normalize_qk=True, **biased),
    lambda rngs: nnx.MultiHeadAttention(4, 8, 16, normalize_qk=True, decode=False, rngs=rngs),
  ),
  'LSTMCell': (nn.RNN(nn.LSTMCell(16, **biased)), cell(nnx.LSTMCell)),
  'OptimizedLSTMCell': (
    nn.RNN(nn.OptimizedLSTMCell(16, **biased)),
    cell(nnx.OptimizedLSTMCell),
  ),
  'SimpleCell': (nn.RNN(nn.SimpleCell(16, **biased)), cell(nnx.SimpleCell)),
  'Sequential': (
    nn.Sequential([nn.Dense(16), jnp.sin, nn.Sequential([nn.Dense(8, **biased)])]),
    lambda rngs: nnx.Sequential(
      nnx.Linear(8, 16, rngs=rngs), jnp.sin, nnx.Sequential(nnx.Linear(16, 8, rngs=rngs))
    ),
  ),
}


def assert_equal(one, other):
  for (path, a), b in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True):
    np.testing.assert_array_equal(a, b, err_msg=str(path))


def linen_state(model, x, tx, *, whole=False):
  """A state of training; `whole`: its parameters are all variables."""
  variables = jax.jit(model.init)(jax.random.key(0), x)
  params = variables if whole else variables['params']
  others = {} if whole else {name: each for name, each in variables.items() if name != 'params'}
  opt_state = jax.tree.map(
    lambda leaf: (
      jax.random.normal(jax.random.key(leaf.size), leaf.shape, leaf.dtype)
      if jnp.issubdtype(leaf.dtype, jnp.floating)
      else leaf + 3
    ),
    tx.init(params),
  )
  return {'step': 3, 'params': params, 'opt_state': opt_state, **others}


def nnx_state(create, tx):
  model = create(nnx.Rngs(7))
  return nnx.Dict(model=model, optimizer=nnx.Optimizer(model, tx, wrt=nnx.Param))


def both_ways(tmp_path, linen, nnx_target, **given):
  """The changes there and back, with the NNX state; the state that comes back is the first one."""
  checkpoint.save(tmp_path / 'linen', linen, LAYOUT)
  there = checkpoint.linen_nnx_changes(tmp_path / 'linen', nnx_target, **given)
  restored = checkpoint.restore(tmp_path / 'linen', nnx_target, changes=there)
  checkpoint.save(tmp_path / 'nnx', restored, LAYOUT)
  back = checkpoint.linen_nnx_changes(tmp_path / 'nnx', linen)
  assert_equal(checkpoint.restore(tmp_path / 'nnx', linen, changes=back), linen)
  return there, back, restored


class LinenLayers(nn.Module):
  """All of them, each with the same input."""

  def setup(self):
    self.layers = {name: linen for name, (linen, _) in LAYERS.items()}

  def __call__(self, x):
    return {name: layer(x) for name, layer in self.layers.items()}


def nnx_layers(rngs):
  return nnx.Dict({f'layers_{name}': create(rngs) for name, (_, create) in LAYERS.items()})


@pytest.fixture(scope='module')
def layers():
  linen = linen_state(LinenLayers(), X, TX['adam'])
  return linen, LAYOUT.init(lambda: nnx_state(nnx_layers, TX['adam']))


def test_every_layer_computes_the_same_and_comes_back(layers, tmp_path):
  linen, target = layers
  changes, _, restored = both_ways(tmp_path, LAYOUT.shard(linen), target)
  variables = {key: linen[key] for key in ('params', 'batch_stats')}
  expected = jax.jit(LinenLayers().apply)(variables, X)
  ours = LAYOUT.jit(lambda model, x: {name: layer(x) for name, layer in model.items()})(
    restored.model, X
  )
  for name, each in expected.items():
    np.testing.assert_allclose(ours[f'layers_{name}'], each, rtol=2e-4, atol=1e-5, err_msg=name)
  assert int(restored.optimizer.step[...]) == 3
  placed = dict(nnx.to_flat_state(nnx.state(target)))
  for path, variable in nnx.to_flat_state(nnx.state(restored)):
    assert variable.sharding == placed[path].sharding, path


# -- modules in lists and stacks


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, _=None):
    h = nn.Dense(16, name='up')(nn.LayerNorm(name='norm')(x))
    return x + nn.Dense(8, name='down')(nn.gelu(h)), None


class LinenList(nn.Module):
  def setup(self):
    self.blocks = [Block() for _ in range(3)]
    self.last = nn.BatchNorm(use_running_average=True)

  def __call__(self, x):
    for block in self.blocks:
      x, _ = block(x)
    return self.last(x)


class LinenScan(nn.Module):
  axis: int = 0

  @nn.compact
  def __call__(self, x):
    scanned = nn.scan(Block, length=3, variable_axes={'params': self.axis}, split_rngs={'params': True})
    x, _ = scanned(name='blocks')(x, None)
    return nn.BatchNorm(use_running_average=True, name='last')(x)


class NnxBlock(nnx.Module):
  def __init__(self, rngs):
    self.norm = nnx.LayerNorm(8, rngs=rngs)
    self.up = nnx.Linear(8, 16, rngs=rngs)
    self.down = nnx.Linear(16, 8, rngs=rngs)
    self.drop = nnx.Dropout(0.0, rngs=rngs)

  def __call__(self, x):
    return x + self.down(self.drop(nnx.gelu(self.up(self.norm(x)))))


class NnxList(nnx.Module):
  def __init__(self, rngs):
    self.blocks = nnx.List([NnxBlock(rngs) for _ in range(3)])
    self.last = nnx.BatchNorm(8, use_running_average=True, rngs=rngs)

  def __call__(self, x):
    for block in self.blocks:
      x = block(x)
    return self.last(x)


class NnxScan(nnx.Module):
  def __init__(self, rngs):
    create = nnx.split_rngs(splits=3)(nnx.vmap(NnxBlock, in_axes=0, out_axes=0))
    self.blocks = create(rngs)
    self.last = nnx.BatchNorm(8, use_running_average=True, rngs=rngs)

  def __call__(self, x):
    step = nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    return self.last(step(self.blocks, x))


QUICK = {(LinenScan, NnxList, 'adafactor'), (LinenList, NnxScan, 'chain')}
CASES = [
  case if case in QUICK else pytest.param(*case, marks=pytest.mark.exhaustive)
  for case in itertools.product((LinenList, LinenScan), (NnxList, NnxScan), TX)
]


@pytest.mark.parametrize('linen_model, nnx_model, tx', CASES)
def test_lists_and_stacks_with_their_optimizers(linen_model, nnx_model, tx, tmp_path):
  linen = linen_state(linen_model(), X, TX[tx])
  target = LAYOUT.init(lambda: nnx_state(nnx_model, TX[tx]))
  there, back, restored = both_ways(tmp_path, LAYOUT.shard(linen), target)
  variables = {key: linen[key] for key in ('params', 'batch_stats')}
  expected = jax.jit(linen_model().apply)(variables, X)
  np.testing.assert_allclose(
    LAYOUT.jit(lambda m, x: m(x))(restored.model, X), expected, rtol=1e-4, atol=1e-5
  )
  is_stacked = linen_model is LinenScan, nnx_model is NnxScan
  assert dict(there.stacks) == ({'blocks': 'blocks/{}'} if is_stacked[0] != is_stacked[1] else {})


# -- the changes themselves


def array(*shape):
  return np.arange(np.prod(shape, dtype=int), dtype='float32').reshape(shape)


MODULES = st.lists(
  st.sampled_from(['x', 'y', 'if', 'a_0', 'a_1', 'b_10', 'layers_2', 'a0', 'opt']),
  min_size=1,
  max_size=3,
)


@given(
  st.lists(MODULES, min_size=1, max_size=8, unique_by=tuple),
  st.sampled_from([(), ('model',), ('0', 'net')]),
)
@settings(max_examples=8, deadline=None)
def test_every_leaf_of_any_modules_goes_to_its_partner(tmp_path_factory, modules, root):
  """Arrays of one shape, which only paths distinguish; some are statistics, and all parameters have moments."""
  linen, nnx_leaves = {'params': {}, 'batch_stats': {}, 'opt_state': {'mu': {}}}, {}
  for number, names in enumerate(modules):
    path = [name for part in names for name in nnx_names(part)]
    leaf = 'mean' if number % 3 == 2 else 'w'
    put(linen['batch_stats' if leaf == 'mean' else 'params'], [*names, leaf], number)
    nnx_leaves[(*root, *path, leaf)] = nnx.Param(jnp.float32(-1))
    if leaf == 'w':
      put(linen['opt_state']['mu'], [*names, leaf], 100 + number)
      nnx_leaves[('optimizer', 'opt_state', 'mu', *path, leaf)] = nnx.Param(jnp.float32(-1))
  folder = tmp_path_factory.mktemp('state')
  checkpoint.save(folder / 'linen', linen, LAYOUT)
  target = LAYOUT.shard(nnx.from_flat_state(nnx_leaves))
  changes = checkpoint.linen_nnx_changes(folder / 'linen', target)
  restored = dict(nnx.to_flat_state(checkpoint.restore(folder / 'linen', target, changes=changes)))
  for number, names in enumerate(modules):
    path = [name for part in names for name in nnx_names(part)]
    leaf = 'mean' if number % 3 == 2 else 'w'
    assert restored[(*root, *path, leaf)][...] == number
    if leaf == 'w':
      assert restored[('optimizer', 'opt_state', 'mu', *path, leaf)][...] == 100 + number


def nnx_names(name):
  base, _, number = name.rpartition('_')
  return [base, int(number)] if base else ['if_' if name == 'if' else name]


def put(tree, path, value):
  for name in path[:-1]:
    tree = tree.setdefault(name, {})
  tree[path[-1]] = np.float32(value)


class Pair(nnx.Module):
  def __init__(self):
    self.up = nnx.Dict(kernel=nnx.Param(jnp.zeros((8, 16))))
    self.blocks = nnx.List([nnx.Dict(scale=nnx.Param(jnp.zeros(8))) for _ in range(2)])


PAIR = {
  'params': {
    'up': {'kernel': array(8, 16)},
    'blocks_0': {'scale': array(8)},
    'blocks_1': {'scale': array(8) + 1},
  }
}


def named(x, *names):
  return spmd.LogicallyPartitioned(x, names)


def derived(tmp_path, saved, target, **given):
  checkpoint.save(tmp_path / 'saved', LAYOUT.shard(saved), LAYOUT)
  return checkpoint.linen_nnx_changes(tmp_path / 'saved', LAYOUT.shard(target), **given)


def error_of(tmp_path, saved, target, **given):
  with pytest.raises(CheckpointMismatchError) as error:
    derived(tmp_path, saved, target, **given)
  return str(error.value).replace(str(tmp_path), '...')


@pytest.mark.parametrize(
  'target, renames',
  [
    (lambda: Pair(), {r'^params/blocks_(\d+)/': r'blocks/\1/', '^params/': ''}),
    (lambda: nnx.state(Pair()), {r'^params/blocks_(\d+)/': r'blocks/\1/', '^params/': ''}),
    (lambda: {'params': Pair()}, {r'^params/blocks_(\d+)/': r'params/blocks/\1/'}),
    (lambda: (Pair(), 1), {r'^params/blocks_(\d+)/': r'0/blocks/\1/', '^params/': '0/'}),
  ],
)
def test_a_model_may_be_anywhere_in_a_state(target, renames, tmp_path):
  given = {'changes': Changes(missing='^1$')} if isinstance(target(), tuple) else {}
  changes = derived(tmp_path, PAIR, target(), **given)
  assert changes == Changes(renames=renames, missing='^1$' if given else None)


def test_moments_of_whole_variables_follow(tmp_path):
  model = Pair()
  linen = {'params': PAIR, 'opt_state': TX['adam'].init(PAIR), 'step': jnp.int32(3)}
  target = nnx.Dict(model=model, optimizer=nnx.Optimizer(model, TX['adam'], wrt=nnx.Param))
  changes = derived(tmp_path, linen, target)
  assert changes.renames == (
    (r'^opt_state/(.+)/params/blocks_(\d+)/', r'optimizer/opt_state/\1/blocks/\2/'),
    (r'^params/params/blocks_(\d+)/', r'model/blocks/\1/'),
    (r'^opt_state/(.+)/params/', r'optimizer/opt_state/\1/'),
    ('^params/params/', 'model/'),
    ('^opt_state/', 'optimizer/opt_state/'),
    ('^step$', 'optimizer/step'),
  )
  assert changes.dtypes == (('int32', 'uint32'),)


def test_a_part_and_a_plan_are_targets(tmp_path):
  checkpoint.save(tmp_path / 'saved', LAYOUT.shard({**PAIR, 'other': {'w': array(8)}}), LAYOUT)
  target = LAYOUT.plan(lambda: {'params': Pair()})
  changes = checkpoint.linen_nnx_changes(tmp_path / 'saved', target, changes=Changes(only='params'))
  restored = checkpoint.restore(tmp_path / 'saved', target, changes=changes)
  np.testing.assert_array_equal(restored.blocks[1].scale[...], array(8) + 1)


def test_dimensions_of_another_size(tmp_path):
  saved = {'params': {**PAIR['params'], 'up': {'kernel': named(array(8, 24), 'embed', 'hidden')}}}
  changes = derived(tmp_path, saved, Pair(), changes=Changes(resized='hidden'))
  restored = checkpoint.restore(tmp_path / 'saved', LAYOUT.shard(Pair()), changes=changes)
  np.testing.assert_array_equal(restored.up.kernel[...], array(8, 24)[:, :16])


def test_shared_variables_and_streams(tmp_path):
  model = Pair()
  model.tied = model.up.kernel
  model.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(5))
  placed = LAYOUT.shard(model)
  changes = derived(tmp_path, PAIR, placed)
  assert dict(changes.renames)['^params/up/kernel$'] == ('up/kernel', 'tied')
  assert changes.missing == '^(drop/rngs/count|drop/rngs/key)$'
  restored = checkpoint.restore(tmp_path / 'saved', placed, changes=changes)
  assert restored.tied is restored.up.kernel and restored.drop.rngs.key == model.drop.rngs.key
  np.testing.assert_array_equal(restored.tied[...], array(8, 16))
  del model.tied
  checkpoint.save(tmp_path / 'nnx', LAYOUT.shard(model), LAYOUT)
  back = checkpoint.linen_nnx_changes(tmp_path / 'nnx', LAYOUT.shard(PAIR))
  assert back.unused == '^(drop/rngs/count|drop/rngs/key)$'
  assert_equal(
    checkpoint.restore(tmp_path / 'nnx', LAYOUT.shard(PAIR), changes=back)['params']['up'],
    {'kernel': jnp.zeros((8, 16))},
  )


def test_modules_with_other_names_are_told_with_the_renames_to_give(tmp_path):
  saved = {
    'params': {
      'Dense_0': {'kernel': array(8, 16)},
      'blocks_0': {'scale': array(8)},
      'blocks_1': {'scale': array(8)},
    }
  }
  assert error_of(tmp_path, saved, Pair()) == textwrap.dedent("""\
    Checkpoint .../saved does not match the target:
    params/Dense_0/kernel (float32[8,16]) in the checkpoint has no partner in the target.
    up/kernel (float32[8,16]) in the target has no partner in the checkpoint.
    Fix: if the modules are the same, pass changes=Changes(renames={'(^|/)Dense_0/': '\\\\1up/'}); to keep the target's \
values, pass Changes(missing='regex'); to leave saved leaves out, pass Changes(unused='regex').""")
  given = Changes(renames={'(^|/)Dense_0/': r'\1up/'})
  changes = checkpoint.linen_nnx_changes(tmp_path / 'saved', LAYOUT.shard(Pair()), changes=given)
  assert dict(changes.renames) == {
    '^params/Dense_0/': 'up/',
    r'^params/blocks_(\d+)/': r'blocks/\1/',
  }
