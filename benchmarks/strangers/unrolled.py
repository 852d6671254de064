"""A decoder with unrolled layers and dropout, `nn.Dense` with Flax's names, bf16 weights beside a float32 copy of them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct

LENGTH = 256
BATCH = {'text': jax.ShapeDtypeStruct((64, LENGTH + 1), jnp.int32)}
init = nn.initializers.xavier_uniform()
TX = optax.adamw(2e-4, b1=0.9, b2=0.95)


class Decoder(nn.Module):
  layers: int = 3
  embed: int = 1536
  heads: int = 12

  def dense(self, features, *axes, name):
    kernel_init = nn.with_logical_partitioning(init, axes)
    bias_init = nn.with_logical_partitioning(nn.initializers.zeros, axes[1:])
    return nn.Dense(
      features, kernel_init=kernel_init, bias_init=bias_init, dtype=jnp.bfloat16, name=name
    )

  @nn.compact
  def __call__(self, tokens, train=True):
    table_init = nn.with_logical_partitioning(nn.initializers.normal(0.02), ('vocab', 'embed'))
    x = nn.Embed(50304, self.embed, embedding_init=table_init, dtype=jnp.bfloat16)(tokens)
    positions = self.param(
      'positions',
      nn.with_logical_partitioning(nn.initializers.normal(0.02), ('length', 'embed')),
      (LENGTH, self.embed),
    )
    x = x + positions[: tokens.shape[1]].astype(x.dtype)
    causal = nn.make_causal_mask(tokens)
    for layer in range(self.layers):
      y = nn.LayerNorm(dtype=jnp.bfloat16, name=f'norm_{layer}')(x)
      q, k, v = (
        self.dense(self.embed, 'embed', 'heads', name=f'{part}_{layer}')(y).reshape(
          *y.shape[:2], self.heads, -1
        )
        for part in 'qkv'
      )
      y = nn.dot_product_attention(q, k, v, mask=causal).reshape(x.shape)
      x = x + self.dense(self.embed, 'heads', 'embed', name=f'out_{layer}')(y)
      y = nn.LayerNorm(dtype=jnp.bfloat16, name=f'norm_mlp_{layer}')(x)
      y = nn.gelu(self.dense(4 * self.embed, 'embed', 'mlp', name=f'up_{layer}')(y))
      y = self.dense(self.embed, 'mlp', 'embed', name=f'down_{layer}')(y)
      x = x + nn.Dropout(0.1, deterministic=not train)(y)
    return self.dense(50304, 'embed', 'vocab', name='logits')(nn.LayerNorm(dtype=jnp.bfloat16)(x))


@struct.dataclass
class State:
  step: jax.Array
  params: dict
  opt_state: tuple
  key: jax.Array


def create():
  params = Decoder().init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32), train=False)['params']
  return State(jnp.zeros((), jnp.int32), params, TX.init(params), jax.random.key(1))


def step(state, batch):
  key = jax.random.fold_in(state.key, state.step)

  def loss_fn(params):
    logits = Decoder().apply({'params': params}, batch['text'][:, :-1], rngs={'dropout': key})
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch['text'][:, 1:]).mean()

  loss, grads = jax.value_and_grad(loss_fn)(state.params)
  updates, opt_state = TX.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  return state.replace(step=state.step + 1, params=params, opt_state=opt_state), loss
