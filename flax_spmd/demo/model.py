"""The model: a byte-level transformer with named axes, independent of any mesh.

Its layers are scanned, so every parameter of a block has an additional axis, `'layers'`. Besides bytes, it
embeds the pairs and triples that end at each byte, hashed into a table. Most parameters are in these tables,
and they let it learn to spell within a minute.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import flax_spmd as spmd
from flax_spmd.demo.text import VOCAB


class Sizes(nn.Module):
  """The sizes that all parts of the model share."""

  embed: int = 128
  heads: int = 4
  mlp: int = 512
  layers: int = 4
  ngrams: int = 8192


class TransformerBlock(Sizes):
  """One layer: attention and MLP with pre-normalisation; called by `nn.scan`."""

  @nn.compact
  def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
    """The layer's output, of the same shape as its input: (batch, length, embed)."""
    x = x + self.attention(_norm(self, 'norm_attention', x))
    x = x + self.feed_forward(_norm(self, 'norm_mlp', x))
    return spmd.with_logical_constraint(x, ('batch', 'length', 'embed')), None

  def attention(self, x: jax.Array) -> jax.Array:
    """Causal self-attention, sharded over heads."""
    size = self.embed // self.heads
    qkv = _weight(self, 'qkv', ('embed', 'three', 'heads', 'head'), (self.embed, 3, self.heads, size))
    out = _weight(
      self, 'out', ('heads', 'head', 'embed'), (self.heads, size, self.embed), fan=self.embed
    )
    q, k, v = jnp.moveaxis(jnp.einsum('ble,ethd->blthd', x, qkv), 2, 0)
    y = jax.nn.dot_product_attention(_rotate(q), _rotate(k), v, is_causal=True)
    y = spmd.with_logical_constraint(y, ('batch', 'length', 'heads', 'head'))
    return jnp.einsum('blhd,hde->ble', y, out)

  def feed_forward(self, x: jax.Array) -> jax.Array:
    """The MLP, sharded over its hidden dimension."""
    up = _weight(self, 'up', ('embed', 'mlp'), (self.embed, self.mlp))
    down = _weight(self, 'down', ('mlp', 'embed'), (self.mlp, self.embed))
    y = spmd.with_logical_constraint(nn.gelu(x @ up), ('batch', 'length', 'mlp'))
    return y @ down


class Transformer(Sizes):
  """A language model over bytes: int32 (batch, length) to float32 logits (batch, length, vocab)."""

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    """The logits of the next byte at every position."""
    table = _table(self, 'bytes', ('vocab', 'embed'), (VOCAB, self.embed))
    x = table[tokens]
    for n in (2, 3):
      ngrams = _table(self, f'ngrams_{n}', ('ngram', 'embed'), (self.ngrams, self.embed))
      x = x + ngrams[_hashes(tokens, n, self.ngrams)]
    x = spmd.with_logical_constraint(x, ('batch', 'length', 'embed'))
    stack = nn.scan(
      TransformerBlock,
      length=self.layers,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      metadata_params={nn.PARTITION_NAME: 'layers'},
    )
    x, _ = stack(self.embed, self.heads, self.mlp, self.layers, name='blocks')(x, None)
    logits = _norm(self, 'norm', x) @ _weight(self, 'logits', ('embed', 'vocab'), (self.embed, VOCAB))
    return spmd.with_logical_constraint(logits, ('batch', 'length', 'vocab'))


def _weight(module: nn.Module, name: str, names: tuple, shape: tuple, fan: int | None = None) -> Any:
  init = nn.initializers.normal((fan or shape[0]) ** -0.5)
  return module.param(name, spmd.with_logical_partitioning(init, names), shape)


def _table(module: nn.Module, name: str, names: tuple, shape: tuple) -> Any:
  return module.param(name, spmd.with_logical_partitioning(nn.initializers.normal(0.5), names), shape)


def _norm(module, name, x):
  scale = module.param(
    name, spmd.with_logical_partitioning(nn.initializers.ones, ('embed',)), (x.shape[-1],)
  )
  return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def _hashes(tokens, n, size):
  """For each position, the row of the `n` bytes that end there."""
  code = tokens
  for back in range(1, n):
    earlier = jnp.pad(tokens, ((0, 0), (back, 0)))[:, : tokens.shape[1]]
    code = code * 1009 + earlier
  return (code * 40503 >> 3) % size


def _rotate(x):
  """Rotary position embedding of (batch, length, heads, head), arXiv:2104.09864."""
  length, half = x.shape[1], x.shape[-1] // 2
  angles = jnp.arange(length)[:, None] * 10000.0 ** (-jnp.arange(half) / half)
  sin, cos = jnp.sin(angles)[:, None, :], jnp.cos(angles)[:, None, :]
  a, b = x[..., :half], x[..., half:]
  return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)
