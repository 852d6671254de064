"""A byte-level decoder of Flax's own layers, which knows nothing of meshes and rules.

`NAMES` has the logical names of the feed-forward layers, for `names_for`; the library has those of attention, embeddings and norms.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

LENGTH = 64  # tokens that the model sees
LAYERS, EMBED, HEADS, MLP = 2, 96, 4, 384
DROPOUT = 0.1


class Block(nn.Module):
  """One layer."""

  decode: bool
  dtype: Any

  @nn.compact
  def __call__(self, x, mask, train):
    """Attention, then the feed-forward layers, each added to its input: (batch, length, embed)."""
    kinds = {'dtype': self.dtype, 'param_dtype': self.dtype}
    drop = nn.Dropout(DROPOUT, deterministic=not train)
    y = nn.LayerNorm(name='norm_attention', **kinds)(x)
    y = nn.MultiHeadDotProductAttention(HEADS, decode=self.decode, name='attention', **kinds)(
      y, mask=mask
    )
    x = x + drop(y)
    y = nn.LayerNorm(name='norm_mlp', **kinds)(x)
    y = nn.gelu(nn.Dense(MLP, name='widen', **kinds)(y))
    return x + drop(nn.Dense(EMBED, name='narrow', **kinds)(y))


NAMES = {
  Block: {'widen/kernel': ('embed', 'mlp'), 'widen/bias': ('mlp',), 'narrow/kernel': ('mlp', 'embed')}
}


class Decoder(nn.Module):
  """A stack of layers between an embedding and the same one as logits."""

  decode: bool = False
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, tokens, train=False):
    """The logits of every next byte: int32 (batch, length) to (batch, length, 256); with `decode`, length is 1."""
    kinds = {'dtype': self.dtype, 'param_dtype': self.dtype}
    embed = nn.Embed(256, EMBED, name='embed', **kinds)
    x = embed(tokens) + nn.Embed(LENGTH, EMBED, name='positions', **kinds)(self._positions(tokens))
    mask = None if self.decode else nn.make_causal_mask(tokens)
    for number in range(LAYERS):
      x = Block(self.decode, self.dtype, name=f'block_{number}')(x, mask, train)
    return embed.attend(nn.LayerNorm(name='norm', **kinds)(x))

  def _positions(self, tokens):
    """The positions of the tokens; decoding counts them in the cache, as Flax's attention does."""
    if not self.decode:
      return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    is_new = not self.has_variable('cache', 'position')
    position = self.variable('cache', 'position', jnp.zeros, (), jnp.int32)
    now = position.value
    if not is_new:
      position.value = now + 1
    return jnp.broadcast_to(now, tokens.shape)


def create_params(dtype=jnp.float32):
  """Fresh parameters."""
  tokens = jnp.zeros((1, LENGTH), jnp.int32)
  return Decoder(dtype=dtype).init(jax.random.key(0), tokens)['params']


def loss_of(params, tokens, key=None):
  """The loss in nats per byte of int32 (batch, length + 1); with a key, under dropout."""
  dropout = None if key is None else {'dropout': key}
  logits = Decoder().apply({'params': params}, tokens[:, :-1], train=key is not None, rngs=dropout)
  return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
