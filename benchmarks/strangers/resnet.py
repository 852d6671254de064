"""A ResNet without names: convolutions, batch norm with running statistics, SGD with momentum, label smoothing."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

BATCH = {
  'image': jax.ShapeDtypeStruct((128, 224, 224, 3), jnp.bfloat16),
  'label': jax.ShapeDtypeStruct((128,), jnp.int32),
}


class TrainState(train_state.TrainState):
  batch_stats: Any


class Bottleneck(nn.Module):
  filters: int
  strides: int
  conv: Any
  norm: Any

  @nn.compact
  def __call__(self, x):
    y = nn.relu(self.norm()(self.conv(self.filters, (1, 1))(x)))
    y = nn.relu(self.norm()(self.conv(self.filters, (3, 3), self.strides)(y)))
    y = self.norm(scale_init=nn.initializers.zeros)(self.conv(4 * self.filters, (1, 1))(y))
    if x.shape != y.shape:
      x = self.norm(name='norm_proj')(
        self.conv(4 * self.filters, (1, 1), self.strides, name='conv_proj')(x)
      )
    return nn.relu(x + y)


class ResNet(nn.Module):
  stages: tuple = (1, 1, 1)

  @nn.compact
  def __call__(self, x, train=True):
    conv = partial(nn.Conv, use_bias=False, dtype=jnp.bfloat16)
    norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, dtype=jnp.bfloat16)
    x = conv(64, (7, 7), (2, 2), padding=[(3, 3), (3, 3)], name='conv_init')(x)
    x = nn.max_pool(nn.relu(norm(name='bn_init')(x)), (3, 3), (2, 2), padding='SAME')
    for stage, blocks in enumerate(self.stages):
      for block in range(blocks):
        strides = 2 if stage and not block else 1
        x = Bottleneck(64 * 2**stage, strides, conv, norm)(x)
    return nn.Dense(1000, dtype=jnp.float32)(jnp.mean(x, (1, 2)))


def create():
  model = ResNet()
  variables = model.init(jax.random.key(0), jnp.ones((1, 224, 224, 3)))
  return TrainState.create(
    apply_fn=model.apply,
    params=variables['params'],
    batch_stats=variables['batch_stats'],
    tx=optax.sgd(optax.cosine_decay_schedule(0.1, 1000), momentum=0.9, nesterov=True),
  )


def step(state, batch):
  def loss_fn(params):
    logits, new = state.apply_fn(
      {'params': params, 'batch_stats': state.batch_stats}, batch['image'], mutable=['batch_stats']
    )
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch['label']).mean()
    decay = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params) if leaf.ndim > 1)
    return loss + 1e-4 * 0.5 * decay, (new, logits)

  (loss, (new, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
  accuracy = jnp.mean(jnp.argmax(logits, -1) == batch['label'])
  state = state.apply_gradients(grads=grads, batch_stats=new['batch_stats'])
  return state, {'loss': loss, 'accuracy': accuracy}
