"""Every layer of Flax that has arrays is in `presets.layer_names`, or here with the reason.

Each public class of modules has a recipe or a reason, so a layer of a new Flax fails a test, rather than goes unnamed.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import flax_spmd as spmd

KEY, X = jax.random.key(0), jnp.ones((2, 6, 8))
IDS = jnp.ones((2, 6), int)


def scanned(cell):
  return lambda: (nn.RNN(cell(8)), X)


LINEN = {
  'BatchNorm': lambda: (nn.BatchNorm(use_running_average=False), X),
  'Bidirectional': lambda: (nn.Bidirectional(nn.RNN(nn.GRUCell(8)), nn.RNN(nn.LSTMCell(8))), X),
  'Conv': lambda: (nn.Conv(8, (3,)), X),
  'ConvLSTMCell': lambda: (nn.RNN(nn.ConvLSTMCell(8, (3,))), jnp.ones((2, 6, 4, 8))),
  'ConvLocal': lambda: (nn.ConvLocal(8, (3,)), X),
  'ConvTranspose': lambda: (nn.ConvTranspose(8, (3,)), X),
  'Dense': lambda: (nn.Dense(8), X),
  'DenseGeneral': lambda: (nn.DenseGeneral((2, 4)), X),
  'Dropout': lambda: (nn.Dropout(0.5, deterministic=True), X),
  'Einsum': lambda: (nn.Einsum((8, 4), 'bld,de->ble'), X),
  'Embed': lambda: (nn.Embed(8, 8), IDS),
  'GRUCell': scanned(nn.GRUCell),
  'GroupNorm': lambda: (nn.GroupNorm(4), X),
  'InstanceNorm': lambda: (nn.InstanceNorm(), X),
  'LSTMCell': scanned(nn.LSTMCell),
  'LayerNorm': lambda: (nn.LayerNorm(), X),
  'MGUCell': scanned(nn.MGUCell),
  'MultiHeadAttention': lambda: (nn.MultiHeadAttention(2, normalize_qk=True, decode=True), X),
  'MultiHeadDotProductAttention': lambda: (nn.MultiHeadDotProductAttention(2), X),
  'OptimizedLSTMCell': scanned(nn.OptimizedLSTMCell),
  'PReLU': lambda: (nn.PReLU(), X),
  'RMSNorm': lambda: (nn.RMSNorm(), X),
  'RNN': scanned(nn.SimpleCell),
  'SelfAttention': lambda: (nn.SelfAttention(2), X),
  'Sequential': lambda: (nn.Sequential([nn.Dense(8)]), X),
  'SimpleCell': scanned(nn.SimpleCell),
  'SpectralNorm': lambda: (nn.SpectralNorm(nn.Dense(8)), X),
  'WeightNorm': lambda: (nn.WeightNorm(nn.Dense(8)), X),
}
NNX = {
  'BatchNorm': lambda r: nnx.BatchNorm(8, rngs=r),
  'Bidirectional': lambda r: nnx.Bidirectional(
    nnx.RNN(nnx.GRUCell(8, 8, rngs=r)), nnx.RNN(nnx.LSTMCell(8, 8, rngs=r)), rngs=r
  ),
  'Conv': lambda r: nnx.Conv(8, 8, (3,), rngs=r),
  'ConvTranspose': lambda r: nnx.ConvTranspose(8, 8, (3,), rngs=r),
  'Dict': lambda r: nnx.Dict(a=nnx.Linear(8, 8, rngs=r)),
  'Dropout': lambda r: nnx.Dropout(0.5),
  'Einsum': lambda r: nnx.Einsum('bld,de->ble', (8, 4), (4,), rngs=r),
  'Embed': lambda r: nnx.Embed(8, 8, rngs=r),
  'GRUCell': lambda r: nnx.GRUCell(8, 8, rngs=r),
  'GroupNorm': lambda r: nnx.GroupNorm(8, 4, rngs=r),
  'InstanceNorm': lambda r: nnx.InstanceNorm(8, rngs=r),
  'LSTMCell': lambda r: nnx.LSTMCell(8, 8, rngs=r),
  'LayerNorm': lambda r: nnx.LayerNorm(8, rngs=r),
  'Linear': lambda r: nnx.Linear(8, 8, rngs=r),
  'LinearGeneral': lambda r: nnx.LinearGeneral(8, (2, 4), rngs=r),
  'List': lambda r: nnx.List([nnx.Linear(8, 8, rngs=r)]),
  'LoRA': lambda r: nnx.LoRA(8, 2, 8, rngs=r),
  'LoRALinear': lambda r: nnx.LoRALinear(8, 8, lora_rank=2, rngs=r),
  'MultiHeadAttention': lambda r: nnx.MultiHeadAttention(2, 8, normalize_qk=True, decode=False, rngs=r),
  'OptimizedLSTMCell': lambda r: nnx.OptimizedLSTMCell(8, 8, rngs=r),
  'PReLU': lambda r: nnx.PReLU(),
  'RMSNorm': lambda r: nnx.RMSNorm(8, rngs=r),
  'RNN': lambda r: nnx.RNN(nnx.SimpleCell(8, 8, rngs=r)),
  'Sequential': lambda r: nnx.Sequential(nnx.Linear(8, 8, rngs=r)),
  'SimpleCell': lambda r: nnx.SimpleCell(8, 8, rngs=r),
  'SpectralNorm': lambda r: nnx.SpectralNorm(nnx.Linear(8, 8, rngs=r), rngs=r),
  'WeightNorm': lambda r: nnx.WeightNorm(nnx.Linear(8, 8, rngs=r), rngs=r),
}
WITHOUT_ARRAYS = {
  'Module': 'the base class of all',
  'RNNCellBase': 'the base class of cells',
  'RoPE': 'rotates its argument',
  **dict.fromkeys(
    ('Fp8DirectDotGeneralOp', 'Fp8DotGeneral', 'Fp8DotGeneralOp', 'Fp8Einsum', 'NANOOFp8DotGeneralOp'),
    'has scales and histories of one dimension, which all devices need',
  ),
}
NAMELESS = {
  'SpectralNorm': 'its vectors and norms are of the layer inside, which has no type there',
  'WeightNorm': 'its scales are of the layer inside, which has no type there',
}


def public(module, base):
  """The names of all public classes of modules."""
  each = ((name, getattr(module, name)) for name in dir(module) if not name.startswith('_'))
  return {name for name, cls in each if isinstance(cls, type) and issubclass(cls, base)}


@pytest.mark.parametrize('module, base, recipes', [(nn, nn.Module, LINEN), (nnx, nnx.Module, NNX)])
def test_every_layer_is_known(module, base, recipes):
  assert public(module, base) - {*recipes, *WITHOUT_ARRAYS} == set()


@pytest.mark.filterwarnings('ignore:SelfAttention')
@pytest.mark.parametrize('name', sorted(set(LINEN) - set(NAMELESS)))
def test_every_array_of_a_linen_layer_has_names(name):
  model, x = LINEN[name]()
  variables = jax.eval_shape(spmd.names_for(model.init), KEY, x)
  flat = jax.tree_util.tree_leaves_with_path(variables, is_leaf=spmd.is_axis_metadata)
  bare = {
    jax.tree_util.keystr(path) for path, leaf in flat if not spmd.is_axis_metadata(leaf) and leaf.ndim
  }
  assert bare == set()


@pytest.mark.parametrize('name', sorted((set(NNX) & public(nnx, nnx.Module)) - set(NAMELESS)))
def test_every_array_of_a_layer_of_nnx_has_names(name):
  with nnx.use_eager_sharding(False):
    model = nnx.eval_shape(spmd.names_for(lambda: NNX[name](nnx.Rngs(0))))
  flat = nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.RngState)))
  assert {
    path for path, each in flat if each.ndim and not each.get_metadata().get('out_sharding')
  } == set()
