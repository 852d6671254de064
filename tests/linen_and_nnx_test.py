"""One model in Linen and in NNX: equal shardings, losses and gradients under one layout, and one checkpoint."""

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import flax_spmd as spmd
from flax_spmd import checkpoint

VOCAB, EMBED, HEADS, MLP, LENGTH, BLOCKS = 64, 32, 4, 64, 8, 1
TX = optax.adam(1e-2)
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (3, 8, LENGTH)).astype('int32')
TABLES = {
  'tensor': (('batch', 'data'), ('mlp', 'model'), ('heads', 'model'), ('vocab', 'model')),
  'fsdp by names': (('batch', 'data'), ('embed', 'data'), ('mlp', 'model'), ('heads', 'model')),
  'fsdp': (('batch', 'data'), spmd.fsdp('data', min_size=1)),
  'paths': (
    ('batch', 'data'),
    ('(up|query|key|value)/kernel$', jax.sharding.PartitionSpec(None, 'model')),
  ),
  'names, then fsdp': (('mlp', 'model'), ('batch', 'data'), spmd.fsdp('data', min_size=64)),
  'optimizer over': (('batch', 'data'), ('mlp', 'model'), spmd.optimizer_over('data')),
}
QUICK = ('optimizer over',)  # the others are `exhaustive`
LINEN_TO_NNX = {r'blocks_(\d+)': r'blocks/\1'}


class LinenBlock(nn.Module):
  def setup(self):
    dense = lambda features, axis, *names: nn.DenseGeneral(
      features, axis=axis, use_bias=False, kernel_init=linen_init(*names)
    )
    self.query = dense((HEADS, EMBED // HEADS), -1, 'embed', 'heads', 'kv')
    self.key = dense((HEADS, EMBED // HEADS), -1, 'embed', 'heads', 'kv')
    self.value = dense((HEADS, EMBED // HEADS), -1, 'embed', 'heads', 'kv')
    self.out = dense(EMBED, (-2, -1), 'heads', 'kv', 'embed')
    self.norm = nn.RMSNorm()
    self.up = dense(MLP, -1, 'embed', 'mlp')
    self.down = dense(EMBED, -1, 'mlp', 'embed')

  __call__ = lambda self, x: block(self, x)


class LinenModel(nn.Module):
  def setup(self):
    self.embed = nn.Embed(VOCAB, EMBED, embedding_init=linen_init('vocab', 'embed'))
    self.blocks = [LinenBlock() for _ in range(BLOCKS)]

  __call__ = lambda self, tokens: logits(self, tokens)


class NnxBlock(nnx.Module):
  def __init__(self, rngs):
    def dense(inputs, features, *names, axis=-1):
      init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
      return nnx.LinearGeneral(inputs, features, axis=axis, use_bias=False, kernel_init=init, rngs=rngs)

    self.query = dense(EMBED, (HEADS, EMBED // HEADS), 'embed', 'heads', 'kv')
    self.key = dense(EMBED, (HEADS, EMBED // HEADS), 'embed', 'heads', 'kv')
    self.value = dense(EMBED, (HEADS, EMBED // HEADS), 'embed', 'heads', 'kv')
    self.out = dense((HEADS, EMBED // HEADS), EMBED, 'heads', 'kv', 'embed', axis=(-2, -1))
    self.norm = nnx.RMSNorm(EMBED, rngs=rngs)
    self.up = dense(EMBED, MLP, 'embed', 'mlp')
    self.down = dense(MLP, EMBED, 'mlp', 'embed')

  __call__ = lambda self, x: block(self, x)


class NnxModel(nnx.Module):
  def __init__(self, rngs):
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ('vocab', 'embed'))
    self.embed = nnx.Embed(VOCAB, EMBED, embedding_init=init, rngs=rngs)
    self.blocks = nnx.List([NnxBlock(rngs) for _ in range(BLOCKS)])

  __call__ = lambda self, tokens: logits(self, tokens)


def linen_init(*names):
  return spmd.with_logical_partitioning(nn.initializers.lecun_normal(), names)


def block(layers, x):
  """One block; the layers are Linen's or NNX's."""
  y = layers.norm(x)
  y = nn.dot_product_attention(layers.query(y), layers.key(y), layers.value(y))
  x = x + layers.out(y)
  h = spmd.with_logical_constraint(nn.gelu(layers.up(layers.norm(x))), ('batch', None, 'mlp'))
  return x + layers.down(h)


def logits(layers, tokens):
  x = layers.embed(tokens)
  for each in layers.blocks:
    x = each(x)
  return layers.embed.attend(x)


def loss_of(outputs, tokens):
  return optax.softmax_cross_entropy_with_integer_labels(outputs[:, :-1], tokens[:, 1:]).mean()


def linen_state():
  model = LinenModel()
  params = model.init(jax.random.key(0), TOKENS[0])['params']
  return TrainState.create(apply_fn=model.apply, params=params, tx=TX)


def linen_step(state, tokens):
  loss = lambda params: loss_of(state.apply_fn({'params': params}, tokens), tokens)
  value, grads = jax.value_and_grad(loss)(state.params)
  return state.apply_gradients(grads=grads), value, grads


def nnx_state():
  model = NnxModel(nnx.Rngs(0))
  return nnx.Dict(params=model, optimizer=nnx.Optimizer(model, TX, wrt=nnx.Param))


def nnx_step(state, tokens):
  loss = lambda model: loss_of(model(tokens), tokens)
  value, grads = nnx.value_and_grad(loss)(state.params)
  state.optimizer.update(state.params, grads)
  return value, grads


def parts(state):
  """The part of an NNX state that a Linen state has too, under the same names."""
  return {'params': state.params, 'opt_state': state.optimizer.opt_state}


def by_path(tree):
  """The arrays of a state of either kind, under the paths of NNX."""
  rows = spmd.Layout(spmd.abstract_mesh({'data': 1})).rows(tree)
  leaves = jax.tree.leaves(tree)
  named = {row.path.replace('blocks_', 'blocks/'): leaf for row, leaf in zip(rows, leaves, strict=True)}
  return {path: leaf for path, leaf in named.items() if not path.endswith('step')}


def assert_close(ours, theirs):
  ours, theirs = by_path(ours), by_path(theirs)
  assert set(ours) == set(theirs)
  for path, array in ours.items():
    np.testing.assert_allclose(array, theirs[path], rtol=1e-3, atol=1e-5, err_msg=path)


def assert_same_places(ours, theirs):
  ours, theirs = by_path(ours), by_path(theirs)
  assert set(ours) == set(theirs)
  for path, array in ours.items():
    assert array.sharding.is_equivalent_to(theirs[path].sharding, array.ndim), path


def continued(layout, path):
  """A checkpoint of Linen as an NNX state under a layout."""
  state = layout.init(nnx_state)
  changes = checkpoint.Changes(renames=LINEN_TO_NNX, unused='^step$')
  restored = checkpoint.restore(path, parts(state), changes=changes)
  state.params = restored['params']
  state.optimizer.opt_state = restored['opt_state']
  return state


@pytest.mark.new_jax
@pytest.mark.parametrize(
  'table',
  [each if each in QUICK else pytest.param(each, marks=pytest.mark.exhaustive) for each in TABLES],
)
def test_shardings_losses_and_gradients_are_equal(table, tmp_path):
  layout = spmd.Layout({'data': 2, 'model': 4}, TABLES[table])
  linen = layout.init(linen_state)
  checkpoint.save(tmp_path / 'linen', linen, layout)
  ours = continued(layout, tmp_path / 'linen')
  assert_same_places(parts(ours), linen)
  steps = layout.jit(linen_step), layout.jit(nnx_step)
  batch = layout.shard(TOKENS[0], ('batch', None))
  linen, linen_loss, linen_grads = steps[0](linen, batch)
  loss, grads = steps[1](ours, batch)
  np.testing.assert_allclose(loss, linen_loss, rtol=1e-5)
  assert_close(grads, linen_grads)
  assert_same_places(parts(ours), linen)


@pytest.mark.old_jax
def test_a_linen_run_goes_on_in_nnx_under_another_mesh(tmp_path):
  first = spmd.Layout({'data': 2, 'model': 4}, TABLES['tensor'])
  other = spmd.Layout({'data': 4, 'model': 2}, TABLES['fsdp by names'])
  state, step = first.init(linen_state), first.jit(linen_step)
  state, _, _ = step(state, TOKENS[0])
  checkpoint.save(tmp_path / 'linen', state, first)
  ours, losses = continued(other, tmp_path / 'linen'), []
  nnx_steps = other.jit(nnx_step)
  for tokens in TOKENS[1:]:
    state, uninterrupted, _ = step(state, tokens)
    losses.append((float(nnx_steps(ours, tokens)[0]), float(uninterrupted)))
  np.testing.assert_allclose(*zip(*losses, strict=True), rtol=1e-4)
  checkpoint.save(tmp_path / 'nnx', parts(ours), other)
  back = checkpoint.Changes(renames={r'blocks/(\d+)': r'blocks_\1'}, missing='^step$')
  linen = checkpoint.restore(tmp_path / 'nnx', state, changes=back)
  assert_close(parts(ours), linen)
  assert_same_places(parts(first.shard(ours)), linen)
