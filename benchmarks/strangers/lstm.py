"""Two LSTMs over time, in float32 and without names: gradients of the weights are summed in the loop."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

LENGTH = 64
BATCH = {
  'tokens': jax.ShapeDtypeStruct((128, LENGTH), jnp.int32),
  'labels': jax.ShapeDtypeStruct((128, LENGTH), jnp.int32),
}


class Recurrent(nn.Module):
  features: int

  @nn.compact
  def __call__(self, x):
    over_time = nn.scan(
      nn.OptimizedLSTMCell,
      variable_broadcast='params',
      split_rngs={'params': False},
      in_axes=1,
      out_axes=1,
    )
    cell = over_time(self.features)
    _, y = cell(cell.initialize_carry(jax.random.key(0), x[:, 0].shape), x)
    return y


class Model(nn.Module):
  @nn.compact
  def __call__(self, tokens):
    x = nn.Embed(32000, 1024)(tokens)
    for _ in range(2):
      x = nn.LayerNorm()(Recurrent(1024)(x))
    return nn.Dense(32000)(x)


def create():
  model = Model()
  params = model.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))['params']
  tx = optax.chain(optax.clip(1.0), optax.sgd(0.5, momentum=0.9))
  return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def step(state, batch):
  def loss_fn(params):
    logits = state.apply_fn({'params': params}, batch['tokens'])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch['labels']).mean()

  loss, grads = jax.value_and_grad(loss_fn)(state.params)
  return state.apply_gradients(grads=grads), loss
