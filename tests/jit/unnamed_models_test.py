"""Models without axis names: sharded by `fsdp`, paths or functions, with results pinned to the plan."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P
from jax_resnet import resnet

import flax_spmd as spmd

DATA = spmd.fsdp('data', min_size=1)
BOTH = {'data': 2, 'model': 4}
ADAFACTOR = optax.adafactor(1e-3, min_dim_size_to_factor=8)
X, Y = np.ones((16, 16, 16, 3), np.float32), np.zeros(16, int)


def on(rules, mesh=None, **policies):
  return spmd.Layout(spmd.make_mesh(mesh or {'data': 8}), rules, **policies)


class State(TrainState):
  batch_stats: dict


def create_resnet(key, x):
  """A ResNet of the package jax-resnet, with one block a stage; it has neither meshes nor names."""
  model = resnet.ResNet(resnet.ResNetBlock, stage_sizes=[1, 1, 1, 1], n_classes=10)
  variables = model.init(key, x)
  return State.create(
    apply_fn=model.apply,
    params=variables['params'],
    batch_stats=variables['batch_stats'],
    tx=optax.sgd(0.1, 0.9),
  )


def train_step(state, batch):
  def loss_of(params):
    variables = {'params': params, 'batch_stats': state.batch_stats}
    logits, updates = state.apply_fn(variables, batch[0], mutable=['batch_stats'])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean(), updates[
      'batch_stats'
    ]

  (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
  return state.apply_gradients(grads=grads, batch_stats=stats), loss


@pytest.mark.slow
def test_a_public_model_without_names():
  layout = spmd.Layout({'data': 8}, (('batch', 'data'), spmd.fsdp('data', min_size=2**12)))
  state = layout.init(create_resnet, jax.random.key(0), X)
  step = layout.jit(train_step, donate_argnums=0)

  batch = layout.shard((X, Y), (('batch', None, None, None), ('batch',)))
  before = jax.tree.map(lambda x: x.sharding, state)
  losses = []
  for _ in range(3):
    state, loss = step(state, batch)
    losses.append(float(loss))
  assert losses[2] < losses[0]
  assert jax.tree.map(lambda x: x.sharding, state) == before
  assert len(step.functions) == 1

  explanation = spmd.explain(layout, state)
  whole, mine = explanation.bytes, explanation.bytes_per_device
  assert whole / 8 < mine < 1.1 * whole / 8
  conv = explanation.row('params/layers_5/ConvBlock_0/Conv_0/kernel')
  assert (
    conv.spec
    == P(None, None, None, 'data')
    == explanation.row(f'opt_state/0/trace/{conv.path[7:]}').spec
  )

  alone = spmd.Layout(spmd.make_mesh({'data': 1}), (('batch', 'data'),))
  other = alone.init(create_resnet, jax.random.key(0), X)
  _, loss = alone.jit(train_step)(other, (X, Y))
  np.testing.assert_allclose(losses[0], loss, rtol=1e-5)


class Mlp(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(8)(nn.relu(nn.Dense(64)(x)))


def create_mlp(key, x):
  model = Mlp()
  return TrainState.create(
    apply_fn=model.apply, params=model.init(key, x)['params'], tx=optax.adam(1e-2)
  )


def mlp_step(state, x):
  loss, grads = jax.value_and_grad(lambda p: jnp.mean(state.apply_fn({'params': p}, x) ** 2))(
    state.params
  )
  return state.apply_gradients(grads=grads), loss


TABLES = {
  'fsdp': spmd.fsdp('data', min_size=64),
  'paths': (
    ('Dense_0/kernel$', P('data', 'model')),
    ('Dense_1/kernel$', P('model', 'data')),
    ('bias$', P()),
  ),
  'policy': lambda leaf: P(None, 'data') if leaf.path.endswith('kernel') else None,
  'zero1': spmd.presets.zero1(min_size=64),
}


@pytest.mark.parametrize('table', TABLES)
def test_states_without_names_keep_their_shardings(table):
  """A result of `layout.jit` with the structure of a state of `layout.init` is pinned, with or without names."""
  layout = spmd.Layout({'data': 2, 'model': 4}, TABLES[table])
  x = np.ones((4, 16), np.float32)
  state = layout.init(create_mlp, jax.random.key(0), x)
  before = jax.tree.map(lambda x: x.sharding.spec, state)
  assert any('data' in str(spec) for spec in jax.tree.leaves(before))
  step = layout.jit(mlp_step)
  for _ in range(2):
    state, _ = step(state, x)
    assert jax.tree.map(lambda x: x.sharding.spec, state) == before
  restored = spmd.Layout({'data': 2, 'model': 4}, TABLES[table]).abstract(
    create_mlp, jax.random.key(0), x
  )
  assert [x.sharding.spec for x in jax.tree.leaves(restored)] == jax.tree.leaves(before)


def test_zero2_replicates_parameters_and_shards_optimizer_state():
  layout = spmd.Layout({'data': 8}, spmd.presets.zero2(min_size=64))

  @functools.partial(layout.jit, donate_argnums=0)
  def step(state, x):
    _, grads = jax.value_and_grad(lambda p: jnp.mean(state.apply_fn({'params': p}, x) ** 2))(
      state.params
    )
    grads = spmd.with_sharding_annotation(grads, 'gradients')
    return state.apply_gradients(grads=grads)

  x = np.ones((8, 16), np.float32)
  state = step(layout.init(create_mlp, jax.random.key(0), x), layout.shard(x, ('batch', None)))
  assert state.params['Dense_0']['kernel'].sharding.spec == P()
  assert state.opt_state[0].mu['Dense_0']['kernel'].sharding.spec == P('data', None)
  text = step.lower(state, layout.shard(x, ('batch', None))).as_text()
  assert 'sharding_constraint' in text


def test_a_state_in_two_results_keeps_its_shardings():
  """Parameters and optimizer state as two results, distinguished by path rules."""
  for rules in ((('^1/', spmd.Rules(DATA)),), (('kernel', P('data', 'model')),)):
    layout = on(rules, BOTH)

    def create():
      params = {'kernel': jnp.ones((16, 32))}
      return params, ADAFACTOR.init(params)

    params, opt_state = layout.init(create)
    before = jax.tree.map(lambda x: x.sharding, (params, opt_state))
    step = layout.jit(lambda params, opt_state: (params, opt_state, 0.0))
    params, opt_state, _ = step(params, opt_state)
    assert jax.tree.map(lambda x: x.sharding, (params, opt_state)) == before
