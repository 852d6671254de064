"""Models of packages that pip installs: brax, jax-resnet, flaxmodels."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from case import Case, entry

DRAW = np.random.default_rng(0)
IMAGES = {'image': DRAW.normal(size=(16, 32, 32, 3)).astype('float32'), 'label': np.arange(16) % 8}


@entry('brax PPO', 'brax')
def brax_ppo() -> Case:
  from brax.training.agents.ppo import losses, networks
  from brax.training.types import Transition

  tx = optax.adam(3e-4)
  network = networks.make_ppo_networks(
    8, 2, policy_hidden_layer_sizes=(32, 32), value_hidden_layer_sizes=(32, 32)
  )

  def normal(*shape):
    return DRAW.normal(size=(16, 5, *shape)).astype('float32')

  batch = Transition(
    observation=normal(8),
    action=normal(2),
    reward=normal(),
    discount=np.ones((16, 5), 'float32'),
    next_observation=normal(8),
    extras={
      'state_extras': {'truncation': np.zeros((16, 5), 'float32')},
      'policy_extras': {'raw_action': normal(2), 'log_prob': normal(), 'distribution_params': normal(4)},
    },
  )

  def create(key):
    policy, value = jax.random.split(key)
    params = losses.PPONetworkParams(
      network.policy_network.init(policy), network.value_network.init(value)
    )
    return {'params': params, 'optimizer': tx.init(params), 'step': jnp.int32(0)}

  def gradients(state, batch):
    key = jax.random.fold_in(jax.random.PRNGKey(1), state['step'])

    def loss_fn(params):
      return losses.compute_ppo_loss(params, None, batch, key, network)

    (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(state['params'])
    return loss, grads

  def update(state, grads):
    updates, optimizer = tx.update(grads, state['optimizer'])
    params = optax.apply_updates(state['params'], updates)
    return {'params': params, 'optimizer': optimizer, 'step': state['step'] + 1}

  return Case(create, None, batch, (jax.random.PRNGKey(0),), halves=(gradients, update))


def classifier(model: Any, logits_of: Callable[..., Any]) -> Case:
  """A classifier with batch statistics."""
  from flax.training.train_state import TrainState

  tx = optax.sgd(0.01, momentum=0.9)

  def create(key):
    variables = model.init(key, jnp.ones((1, 32, 32, 3)))
    state = TrainState.create(apply_fn=None, params=variables['params'], tx=tx)
    return {'train': state, 'batch_stats': variables['batch_stats']}

  def gradients(state, batch):
    def loss_fn(params):
      variables = {'params': params, 'batch_stats': state['batch_stats']}
      logits, updated = logits_of(variables, batch['image'])
      loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch['label']).mean()
      return loss, updated['batch_stats']

    (loss, statistics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state['train'].params)
    return loss, (grads, statistics)

  def update(state, updates):
    grads, statistics = updates
    return {'train': state['train'].apply_gradients(grads=grads), 'batch_stats': statistics}

  return Case(create, None, IMAGES, (jax.random.key(0),), halves=(gradients, update))


@entry('jax-resnet ResNet', 'jax-resnet')
def jax_resnet() -> Case:
  from jax_resnet import resnet

  model = resnet.ResNet(
    block_cls=resnet.ResNetBlock,
    stage_sizes=[1, 1],
    n_classes=8,
    hidden_sizes=(16, 32),
    stem_cls=resnet.ResNetStem,
  )
  return classifier(model, lambda variables, x: model.apply(variables, x, mutable=['batch_stats']))


@entry('flaxmodels ResNet', 'flaxmodels')
def flaxmodels_resnet() -> Case:
  import flaxmodels

  model = flaxmodels.ResNet18(output='logits', pretrained=None, num_classes=8)
  return classifier(
    model, lambda variables, x: model.apply(variables, x, train=True, mutable=['batch_stats'])
  )
