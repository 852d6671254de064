"""A T5: encoder and decoder, relative position bias, one embedding for inputs, targets and logits; padding is masked."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

BUCKETS, LENGTH, TARGETS = 32, 256, 64
BATCH = {
  'inputs': jax.ShapeDtypeStruct((64, LENGTH), jnp.int32),
  'targets': jax.ShapeDtypeStruct((64, TARGETS), jnp.int32),
}
param = nn.with_logical_partitioning


def buckets(distance, both):
  """Exact distances up to half of the buckets, logarithmic ones beyond."""
  count, offset = BUCKETS, 0
  if both:
    count //= 2
    offset = (distance > 0) * count
    distance = jnp.abs(distance)
  else:
    distance = -jnp.minimum(distance, 0)
  exact = count // 2
  large = exact + (
    jnp.log(jnp.maximum(distance, 1) / exact) / jnp.log(128 / exact) * (count - exact)
  ).astype(jnp.int32)
  return offset + jnp.where(distance < exact, distance, jnp.minimum(large, count - 1))


class Bias(nn.Module):
  heads: int
  both: bool

  @nn.compact
  def __call__(self, queries, keys):
    init = param(nn.initializers.normal(1.0), ('heads', 'relpos_buckets'))
    table = self.param('rel_embedding', init, (self.heads, BUCKETS))
    distance = jnp.arange(keys)[None] - jnp.arange(queries)[:, None]
    return jnp.take(table, buckets(distance, self.both), axis=1)[None].astype(jnp.bfloat16)


class Attention(nn.Module):
  heads: int = 16
  head: int = 64

  @nn.compact
  def __call__(self, x, y, mask, bias=None):
    def project(name, value):
      init = param(nn.initializers.normal(0.03), ('embed', 'joined_kv'))
      kernel = self.param(name, init, (value.shape[-1], self.heads * self.head))
      out = value @ kernel.astype(jnp.bfloat16)
      return out.reshape(*value.shape[:2], self.heads, self.head)

    q, k, v = project('q', x), project('k', y), project('v', y)
    scores = jnp.einsum('bqhd,bkhd->bhqk', q, k)
    scores = scores if bias is None else scores + bias
    shares = nn.softmax(jnp.where(mask, scores.astype(jnp.float32), -1e9)).astype(x.dtype)
    mixed = jnp.einsum('bhqk,bkhd->bqhd', shares, v).reshape(*x.shape[:2], -1)
    init = param(nn.initializers.normal(0.03), ('joined_kv', 'embed'))
    return mixed @ self.param('o', init, (mixed.shape[-1], x.shape[-1])).astype(jnp.bfloat16)


class Mlp(nn.Module):
  @nn.compact
  def __call__(self, x):
    wi = self.param('wi', param(nn.initializers.normal(0.03), ('embed', 'mlp')), (x.shape[-1], 4096))
    wo = self.param('wo', param(nn.initializers.normal(0.03), ('mlp', 'embed')), (4096, x.shape[-1]))
    hidden = nn.with_logical_constraint(nn.relu(x @ wi.astype(x.dtype)), ('batch', 'length', 'mlp'))
    return hidden @ wo.astype(x.dtype)


def norm(name):
  init = param(nn.initializers.ones, ('embed',))
  return nn.RMSNorm(scale_init=init, dtype=jnp.bfloat16, name=name)


class T5(nn.Module):
  layers: int = 2
  embed: int = 1024
  vocab: int = 32128

  @nn.compact
  def __call__(self, inputs, targets):
    init = param(nn.initializers.normal(1.0), ('vocab', 'embed'))
    shared = nn.Embed(self.vocab, self.embed, embedding_init=init, dtype=jnp.bfloat16, name='shared')
    x, present = shared(inputs), (inputs > 0)[:, None, None]
    bias = Bias(16, True, name='encoder_bias')(inputs.shape[1], inputs.shape[1])
    for layer in range(self.layers):
      y = norm(f'encoder_norm_{layer}')(x)
      x = x + Attention(name=f'encoder_self_{layer}')(y, y, present, bias)
      x = x + Mlp(name=f'encoder_mlp_{layer}')(norm(f'encoder_norm_mlp_{layer}')(x))
      x = nn.with_logical_constraint(x, ('batch', 'length', 'embed'))
    encoded = norm('encoder_norm')(x)
    x = shared(jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1])
    bias = Bias(16, False, name='decoder_bias')(targets.shape[1], targets.shape[1])
    causal = nn.make_causal_mask(targets, dtype=bool)
    for layer in range(self.layers):
      y = norm(f'decoder_norm_{layer}')(x)
      x = x + Attention(name=f'decoder_self_{layer}')(y, y, causal, bias)
      y = norm(f'cross_norm_{layer}')(x)
      x = x + Attention(name=f'cross_{layer}')(y, encoded, present)
      x = x + Mlp(name=f'decoder_mlp_{layer}')(norm(f'decoder_norm_mlp_{layer}')(x))
    return shared.attend(norm('decoder_norm')(x) * self.embed**-0.5)


def create():
  model = T5()
  one = jnp.ones((1, 8), jnp.int32)
  params = model.init(jax.random.key(0), one, one)['params']
  return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))


def step(state, batch):
  def loss_fn(params):
    logits = state.apply_fn({'params': params}, batch['inputs'], batch['targets'])
    weights = batch['targets'] > 0
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits.astype(jnp.float32), batch['targets']
    )
    return jnp.sum(losses * weights) / jnp.maximum(weights.sum(), 1)

  loss, grads = jax.value_and_grad(loss_fn)(state.params)
  return state.apply_gradients(grads=grads), loss
