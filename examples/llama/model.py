"""A decoder as LLaMA is one (arXiv:2307.09288): grouped queries, rotary positions, a gated MLP.

Every dimension has a name, and nothing here knows a mesh. `'embed'` is a dimension of parameters,
`'features'` the same one of activations, so a layout can split the one and leave the other.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

import flax_spmd as spmd


@dataclasses.dataclass(frozen=True)
class Sizes:
  """The dimensions of the parameters, by name; and the dtype that is computed in."""

  layers: int
  embed: int
  heads: int
  kv_heads: int
  head: int
  mlp: int
  vocab: int = 256  # bytes
  dtype: str = 'bfloat16'


SIZES = {
  'tiny': Sizes(layers=2, embed=64, heads=4, kv_heads=2, head=16, mlp=192),
  '100m': Sizes(layers=12, embed=768, heads=12, kv_heads=4, head=64, mlp=2048),
  '1b': Sizes(layers=16, embed=2048, heads=32, kv_heads=8, head=64, mlp=8192),
  '8b': Sizes(layers=32, embed=4096, heads=32, kv_heads=8, head=128, mlp=14336),
}


def constrained(x, *names):
  """Names the dimensions of a value; its sharding follows from the rules in force."""
  return spmd.with_logical_constraint(x, names)


class Part(nn.Module):
  """Makes parameters in float32, and gives them in the dtype that is computed in."""

  sizes: Sizes

  def weight(self, name, *names):
    """A matrix, of the sizes that the names have."""
    init = spmd.with_logical_partitioning(nn.initializers.normal(0.02), names)
    shape = tuple(getattr(self.sizes, axis) for axis in names)
    return self.param(name, init, shape).astype(self.sizes.dtype)

  def norm(self, name, x):
    """RMSNorm (arXiv:1910.07467), in float32."""
    init = spmd.with_logical_partitioning(nn.initializers.ones, ('norm',))
    scale = self.param(name, init, (self.sizes.embed,))
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)
    return (y * scale[None, None]).astype(x.dtype)


class Block(Part):
  """One layer."""

  @nn.compact
  def __call__(self, x, _=None):
    """Attention, then the MLP, each added to its input."""
    x = x + self.attention(self.norm('norm_attention', x))
    x = x + self.feed_forward(self.norm('norm_mlp', x))
    return constrained(x, 'batch', 'length', 'features'), None

  def attention(self, x):
    """Causal self-attention of (batch, length, features)."""
    q = jnp.einsum('ble,ehd->blhd', x, self.weight('q', 'embed', 'heads', 'head'))
    k = jnp.einsum('ble,ehd->blhd', x, self.weight('k', 'embed', 'kv_heads', 'head'))
    v = jnp.einsum('ble,ehd->blhd', x, self.weight('v', 'embed', 'kv_heads', 'head'))
    q = constrained(rotate(q), 'batch', 'length', 'heads', 'head')
    k, v = (constrained(y, 'batch', 'length', 'kv_heads', 'head') for y in (rotate(k), v))
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)  # each head of k and v serves several of q
    y = constrained(y, 'batch', 'length', 'heads', 'head')
    return jnp.einsum('blhd,hde->ble', y, self.weight('out', 'heads', 'head', 'embed'))

  def feed_forward(self, x):
    """The gated MLP of (batch, length, features)."""
    y = nn.silu(x @ self.weight('gate', 'embed', 'mlp')) * (x @ self.weight('up', 'embed', 'mlp'))
    return constrained(y, 'batch', 'length', 'mlp') @ self.weight('down', 'mlp', 'embed')


class Llama(Part):
  """A stack of layers between an embedding and logits."""

  @nn.compact
  def __call__(self, tokens):
    """The logits of every next token: int32 (batch, length) to (batch, length, vocab)."""
    # A product: of a lookup in a table that is split twice, XLA would gather the whole batch's gradients.
    x = jax.nn.one_hot(tokens, self.sizes.vocab, dtype=self.sizes.dtype)
    x = x @ self.weight('embedding', 'vocab', 'embed')
    blocks = nn.scan(
      nn.remat(Block, prevent_cse=False),  # the scan's loop keeps recomputation apart by itself
      length=self.sizes.layers,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      metadata_params={nn.PARTITION_NAME: 'layers'},
    )
    x, _ = blocks(self.sizes, name='blocks')(constrained(x, 'batch', 'length', 'features'), None)
    logits = self.norm('norm', x) @ self.weight('logits', 'embed', 'vocab')
    return constrained(logits, 'batch', 'length', 'vocab')


def rotate(x):
  """Rotary positions (arXiv:2104.09864) of (batch, length, heads, head)."""
  length, half = x.shape[1], x.shape[3] // 2
  angles = jnp.arange(length)[:, None] * 500000.0 ** (-jnp.arange(half)[None] / half)
  sin, cos = jnp.sin(angles)[None, :, None], jnp.cos(angles)[None, :, None]
  a, b = jnp.split(x.astype(jnp.float32), 2, -1)
  return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(x.dtype)
