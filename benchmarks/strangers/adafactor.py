"""A BERT with Adafactor: masked positions gathered before the logits; the optimizer's state has placeholders of size 1."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

BATCH = {
  'tokens': jax.ShapeDtypeStruct((64, 256), jnp.int32),
  'segments': jax.ShapeDtypeStruct((64, 256), jnp.int32),
  'positions': jax.ShapeDtypeStruct((64, 40), jnp.int32),
  'labels': jax.ShapeDtypeStruct((64, 40), jnp.int32),
}


def named(*names):
  return nn.with_logical_partitioning(nn.initializers.truncated_normal(0.02), names)


class Layer(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    attention = nn.MultiHeadDotProductAttention(
      16,
      dtype=jnp.bfloat16,
      kernel_init=named('embed', 'heads', 'kv'),
      out_kernel_init=named('heads', 'kv', 'embed'),
    )
    x = nn.LayerNorm(dtype=jnp.bfloat16)(x + attention(x))
    y = nn.gelu(nn.Dense(4096, dtype=jnp.bfloat16, kernel_init=named('embed', 'mlp'))(x))
    y = nn.Dense(x.shape[-1], dtype=jnp.bfloat16, kernel_init=named('mlp', 'embed'))(y)
    return nn.LayerNorm(dtype=jnp.bfloat16)(x + y), None


class Bert(nn.Module):
  vocab: int = 30522
  embed: int = 1024
  layers: int = 2

  @nn.compact
  def __call__(self, tokens, segments, positions):
    table = nn.Embed(self.vocab, self.embed, embedding_init=named('vocab', 'embed'), name='words')
    x = table(tokens) + nn.Embed(2, self.embed, name='segments')(segments)
    x = x + self.param('positions', named(None, 'embed'), (512, self.embed))[: tokens.shape[1]]
    x = nn.with_logical_constraint(x.astype(jnp.bfloat16), ('batch', 'length', 'embed'))
    layers = nn.scan(
      Layer,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      length=self.layers,
      metadata_params={nn.PARTITION_NAME: 'layers'},
    )
    x, _ = layers(name='layers')(x, None)
    masked = jnp.take_along_axis(x, positions[..., None], axis=1)
    masked = nn.gelu(nn.Dense(self.embed, kernel_init=named('embed', None))(masked))
    return table.attend(nn.LayerNorm()(masked))


def create():
  model = Bert()
  one = jnp.zeros((1, 8), jnp.int32)
  params = model.init(jax.random.key(0), one, one, one)['params']
  tx = optax.adafactor(1e-3, min_dim_size_to_factor=128)
  return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def step(state, batch):
  def loss_fn(params):
    logits = state.apply_fn({'params': params}, batch['tokens'], batch['segments'], batch['positions'])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch['labels']).mean()

  loss, grads = jax.value_and_grad(loss_fn)(state.params)
  return state.apply_gradients(grads=grads), loss
