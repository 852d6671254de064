"""A mixture of experts as in Mesh TensorFlow: the two best experts of each token, one-hot dispatch by einsum, capacity."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import flax_spmd as spmd

EXPERTS, CAPACITY, LENGTH = 16, 2.0, 512
BATCH = {
  'x': jax.ShapeDtypeStruct((64, LENGTH), jnp.int32),
  'y': jax.ShapeDtypeStruct((64, LENGTH), jnp.int32),
}


def kernel(module, name, shape, *names):
  init = spmd.with_logical_partitioning(nn.initializers.normal(0.02), names)
  return module.param(name, init, shape).astype(jnp.bfloat16)


def constrain(x, *names):
  return spmd.with_logical_constraint(x, names)


def routing(gates, capacity):
  """Dispatch mask and combination weights, (batch, length, expert, place), of the two best experts."""
  first = jax.nn.one_hot(jnp.argmax(gates, -1), EXPERTS)
  second = jax.nn.one_hot(jnp.argmax(gates * (1 - first), -1), EXPERTS)
  place_first = jnp.cumsum(first, 1) * first - first
  place_second = (jnp.cumsum(second, 1) + first.sum(1, keepdims=True)) * second - second
  combined = 0.0
  for chosen, place in ((first, place_first), (second, place_second)):
    kept = chosen * (place < capacity)
    weight = (gates * kept).sum(-1)
    places = jax.nn.one_hot((place * kept).sum(-1).astype(jnp.int32), capacity)
    combined += weight[..., None, None] * kept[..., None] * places[..., None, :]
  return (combined > 0).astype(jnp.bfloat16), combined.astype(jnp.bfloat16), first


class Experts(nn.Module):
  mlp: int = 2048

  @nn.compact
  def __call__(self, x):
    embed = x.shape[-1]
    router = kernel(self, 'router', (embed, EXPERTS), 'embed', 'unsharded')
    gates = jax.nn.softmax((x @ router).astype(jnp.float32))
    dispatch, combine, first = routing(gates, int(CAPACITY * x.shape[1] / EXPERTS))
    inputs = jnp.einsum('blec,bld->ebcd', dispatch, x)
    inputs = constrain(inputs, 'expert', 'expert_batch', None, 'act_embed')
    hidden = jnp.einsum(
      'ebcd,edf->ebcf', inputs, kernel(self, 'up', (EXPERTS, embed, self.mlp), 'expert', 'embed', 'mlp')
    )
    hidden = constrain(nn.gelu(hidden), 'expert', 'expert_batch', None, 'mlp')
    down = kernel(self, 'down', (EXPERTS, self.mlp, embed), 'expert', 'mlp', 'embed')
    outputs = jnp.einsum('ebcf,efd->ebcd', hidden, down)
    outputs = constrain(outputs, 'expert', 'expert_batch', None, 'act_embed')
    balance = EXPERTS * jnp.mean(gates.mean(1) * first.mean(1))
    return jnp.einsum('blec,ebcd->bld', combine, outputs), balance


class Attention(nn.Module):
  heads: int = 16

  @nn.compact
  def __call__(self, x):
    embed = x.shape[-1]
    shape = (embed, self.heads, embed // self.heads)
    q, k, v = (
      jnp.einsum('bld,dhe->blhe', x, kernel(self, name, shape, 'embed', 'heads', 'head'))
      for name in 'qkv'
    )
    y = nn.dot_product_attention(q, k, v, mask=nn.make_causal_mask(x[..., 0]))
    return jnp.einsum(
      'blhe,hed->bld', y, kernel(self, 'o', (*shape[1:], embed), 'heads', 'head', 'embed')
    )


class Model(nn.Module):
  vocab: int = 32000
  embed: int = 1024
  layers: int = 2

  @nn.compact
  def __call__(self, tokens):
    table = kernel(self, 'table', (self.vocab, self.embed), 'vocab', 'embed')
    x, balance = jnp.take(table, tokens, axis=0), 0.0
    for layer in range(self.layers):
      x = constrain(x, 'batch', 'length', 'act_embed')
      x = x + Attention(name=f'attention_{layer}')(nn.RMSNorm(dtype=jnp.bfloat16)(x))
      y, extra = Experts(name=f'experts_{layer}')(nn.RMSNorm(dtype=jnp.bfloat16)(x))
      x, balance = x + y, balance + extra
    return constrain(x @ table.T, 'batch', 'length', 'vocab'), balance


def create():
  model = Model()
  params = model.init(jax.random.key(0), jnp.zeros((1, 16), jnp.int32))['params']
  return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-4))


def step(state, batch):
  def loss_fn(params):
    logits, balance = state.apply_fn({'params': params}, batch['x'])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch['y'])
    return losses.mean() + 0.01 * balance

  loss, grads = jax.value_and_grad(loss_fn)(state.params)
  return state.apply_gradients(grads=grads), loss
