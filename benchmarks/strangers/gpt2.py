"""A GPT-2 as on Hugging Face: no names, fused projections, learned positions, tied logits, padding mask; adamw with a mask."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

BATCH = {
  'input_ids': jax.ShapeDtypeStruct((64, 512), jnp.int32),
  'attention_mask': jax.ShapeDtypeStruct((64, 512), jnp.int32),
  'labels': jax.ShapeDtypeStruct((64, 512), jnp.int32),
}


class Conv1D(nn.Module):
  features: int

  @nn.compact
  def __call__(self, inputs):
    inputs = jnp.asarray(inputs, jnp.bfloat16)
    shape = (self.features, inputs.shape[-1])
    kernel = self.param('kernel', nn.initializers.normal(0.02), shape).transpose()
    bias = self.param('bias', nn.initializers.zeros, (self.features,))
    dims = (((inputs.ndim - 1,), (0,)), ((), ()))
    return jax.lax.dot_general(inputs, kernel.astype(jnp.bfloat16), dims) + bias.astype(jnp.bfloat16)


class Attention(nn.Module):
  heads: int = 12

  @nn.compact
  def __call__(self, hidden, mask):
    q, k, v = jnp.split(Conv1D(3 * hidden.shape[-1], name='c_attn')(hidden), 3, axis=2)
    q, k, v = (y.reshape(*y.shape[:2], self.heads, -1) for y in (q, k, v))
    causal = nn.make_causal_mask(jnp.ones((1, hidden.shape[1]), bool), dtype=bool)
    causal = jnp.broadcast_to(causal, (hidden.shape[0], *causal.shape[1:]))
    both = nn.combine_masks(jnp.broadcast_to(mask[:, None, None], causal.shape), causal)
    bias = jax.lax.select(both > 0, jnp.full(both.shape, 0.0), jnp.full(both.shape, -1e9))
    shares = nn.attention.dot_product_attention_weights(q, k, bias=bias, dtype=jnp.bfloat16)
    mixed = jnp.einsum('...hqk,...khd->...qhd', shares, v).reshape(hidden.shape)
    return Conv1D(hidden.shape[-1], name='c_proj')(mixed)


class Block(nn.Module):
  @nn.compact
  def __call__(self, hidden, mask):
    norm = nn.LayerNorm(epsilon=1e-5, dtype=jnp.bfloat16, name='ln_1')
    hidden = hidden + Attention(name='attn')(norm(hidden), mask)
    y = nn.LayerNorm(epsilon=1e-5, dtype=jnp.bfloat16, name='ln_2')(hidden)
    y = nn.gelu(Conv1D(4 * hidden.shape[-1], name='c_fc')(y))
    return hidden + Conv1D(hidden.shape[-1], name='c_proj')(y)


class LMHead(nn.Module):
  layers: int = 2
  embed: int = 768
  vocab: int = 50257

  @nn.compact
  def __call__(self, input_ids, mask):
    wte = nn.Embed(self.vocab, self.embed, dtype=jnp.bfloat16, name='wte')
    wpe = nn.Embed(1024, self.embed, dtype=jnp.bfloat16, name='wpe')
    positions = jnp.broadcast_to(jnp.arange(input_ids.shape[-1])[None], input_ids.shape)
    hidden = wte(input_ids.astype('i4')) + wpe(positions.astype('i4'))
    for layer in range(self.layers):
      hidden = Block(name=str(layer))(hidden, mask)
    hidden = nn.LayerNorm(epsilon=1e-5, dtype=jnp.bfloat16, name='ln_f')(hidden)
    return hidden @ wte.embedding.T.astype(jnp.bfloat16)


def decayed(params):
  return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in ('bias', 'scale'), params)


def create():
  model = LMHead()
  one = jnp.ones((1, 8), jnp.int32)
  params = model.init(jax.random.key(0), one, one)['params']
  tx = optax.adamw(5e-5, b2=0.98, weight_decay=0.01, mask=decayed)
  return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def step(state, batch):
  def loss_fn(params):
    logits = state.apply_fn({'params': params}, batch['input_ids'], batch['attention_mask'])
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits[..., :-1, :].astype(jnp.float32), batch['labels'][..., 1:]
    )
    weights = batch['attention_mask'][..., 1:]
    return (losses * weights).sum() / weights.sum()

  loss, grads = jax.value_and_grad(loss_fn)(state.params)
  return state.apply_gradients(grads=grads), {'loss': loss}
