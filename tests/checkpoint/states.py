"""States for tests of checkpoints: a small model, scanned or not, with optimizers and layouts."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax.training.train_state import TrainState

import flax_spmd as spmd

RULES = (('embed', 'data'), ('mlp', 'model'))


class Block(nn.Module):
  """Two named kernels, a bias beside one of them, and a scale without names in the block itself."""

  features: int = 32

  @nn.compact
  def __call__(self, x, _=None):
    def dense(features, *names):
      init = spmd.with_logical_partitioning(nn.initializers.normal(), names)
      return nn.Dense(features, kernel_init=init, use_bias=names[0] == 'embed')

    x = x * self.param('scale', nn.initializers.ones, (x.shape[-1],))[None]
    y = nn.relu(dense(self.features, 'embed', 'mlp')(x))
    return dense(x.shape[-1], 'mlp', 'embed')(y), None


class Model(nn.Module):
  """Blocks, scanned along `axis`, or one by one where it is None; a head without names."""

  axis: int | None = 0
  layers: int = 3
  features: int = 32
  width: int = 16

  @nn.compact
  def __call__(self, x):
    if self.axis is None:
      for number in range(self.layers):
        x, _ = Block(self.features, name=f'blocks_{number}')(x)
    else:
      scanned = nn.scan(
        Block,
        length=self.layers,
        variable_axes={'params': self.axis},
        split_rngs={'params': True},
        metadata_params={nn.PARTITION_NAME: 'layers'},
      )
      x = scanned(self.features, name='blocks')(x, None)[0]
    return nn.Dense(4, name='head')(x)


class State(TrainState):
  rng: jax.Array


def create(tx, model=None):
  """A state with distinct values in every leaf, so that swapped leaves are detected."""
  model = model or Model()
  params = model.init(jax.random.key(0), jnp.ones((1, model.width)))['params']
  return distinct(State.create(apply_fn=None, params=params, tx=tx, rng=jax.random.key(7)))


def distinct(state):
  leaves, treedef = jax.tree.flatten(state)
  return treedef.unflatten(_filled(leaf, number) for number, leaf in enumerate(leaves))


def _filled(x, number):
  if not hasattr(x, 'dtype') or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    return x
  if x.shape == (1,):  # adafactor's placeholder, shared by all layers
    return x
  return (jnp.arange(x.size) + 1000 * number).reshape(x.shape).astype(x.dtype)


def muon(dimensions=None):
  return optax.contrib.muon(1e-3, muon_weight_dimension_numbers=dimensions)


def _matrices(params):
  """Muon's dimensions of every kernel: the last two."""

  def dims(path, leaf):
    if 'kernel' not in jax.tree_util.keystr(path):
      return None
    rank = jnp.ndim(leaf)
    return optax.contrib.MuonDimensionNumbers(rank - 2, rank - 1)

  return jax.tree_util.tree_map_with_path(dims, params)


OPTIMIZERS = {
  'adamw': optax.adamw(1e-3),
  'adafactor': optax.adafactor(1e-3, min_dim_size_to_factor=8),
  'muon': muon(_matrices),
}
LAYOUTS = {
  'two_by_four': lambda: spmd.Layout({'data': 2, 'model': 4}, RULES),
  'eight': lambda: spmd.Layout({'data': 8}, RULES[:1]),
  'four_by_two': lambda: spmd.Layout({'data': 4, 'model': 2}, RULES),
  'four_devices': lambda: spmd.Layout(
    spmd.make_mesh({'data': 2, 'model': 2}, devices=jax.devices()[4:]), RULES
  ),
  'one_device': lambda: spmd.Layout(
    spmd.make_mesh({'data': 1, 'model': 1}, devices=jax.devices()[3:4]), RULES
  ),
  'other_rules': lambda: spmd.Layout({'data': 2, 'model': 4}, (('embed', 'model'), ('mlp', 'data'))),
  'other_names': lambda: spmd.Layout({'x': 2, 'y': 2, 'z': 2}, (('mlp', ('z', 'x')), ('embed', 'y'))),
  'replicated': lambda: spmd.Layout({'data': 8}, ()),
}


def plain(leaf):
  """A leaf as a numpy array."""
  if jnp.issubdtype(getattr(leaf, 'dtype', np.dtype(int)), jax.dtypes.prng_key):
    leaf = jax.random.key_data(leaf)
  return np.asarray(leaf)


def assert_equal(a, b):
  """Asserts that two states are bit-equal with equal dtypes, apart from boxes."""
  one, two = jax.tree.leaves(a), jax.tree.leaves(b)
  assert len(one) == len(two)
  for x, y in zip(one, two, strict=True):
    assert getattr(x, 'dtype', type(x)) == getattr(y, 'dtype', type(y))
    assert plain(x).tobytes() == plain(y).tobytes() and np.shape(x) == np.shape(y)


def assert_matches_target(state, target):
  """Asserts that a state has the structure, shapes, dtypes and shardings of a target."""
  assert jax.tree.structure(state) == jax.tree.structure(target)
  for array, leaf in zip(jax.tree.leaves(state), jax.tree.leaves(target), strict=True):
    assert isinstance(array, jax.Array)
    assert (array.shape, array.dtype) == (leaf.shape, leaf.dtype)
    assert array.sharding.is_equivalent_to(leaf.sharding, array.ndim)


def one_by_one(state, layers=3, name='blocks', single='{}_{}'):
  """The state of a scanned model as it would be of single layers, by numpy alone.

  The layers are the dimension of that size, which no other dimension has.
  """

  def split(tree):
    if isinstance(tree, dict):
      made = {key: split(child) for key, child in tree.items() if key != name}
      for number in range(layers if name in tree else 0):
        made[single.format(name, number)] = jax.tree.map(lambda x, n=number: layer(x, n), tree[name])
      return made
    if isinstance(tree, tuple):
      parts = map(split, tree)
      return type(tree)(*parts) if hasattr(tree, '_fields') else tuple(parts)
    if isinstance(tree, TrainState):
      return tree.replace(params=split(tree.params), opt_state=split(tree.opt_state))
    return tree

  def layer(x, number):
    return x if x.shape == (1,) else np.take(np.asarray(x), number, x.shape.index(layers))

  return split(spmd.unbox(state))
