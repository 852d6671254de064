"""The changes between Linen and NNX, derived: every layer of Flax computes the same after a restore, and is the same after one back."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import flax_spmd as spmd
from flax_spmd import checkpoint

LAYOUT = spmd.Layout({'data': 8}, (spmd.fsdp('data', min_size=1),), indivisible='replicate')
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
