"""A transformer with named dimensions, for `layouts.py` and `search.py`, and the FLOPs of its step.

Parameters have the names `embed`, `heads`, `kv_heads`, `head`, `mlp`, `vocab`, `norm` and `layers`.
Activations have `batch`, `length` (between blocks), `query` and `key` (inside them), and names that begin
with `act_`, so that a table can shard them differently from the parameters.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import flax_spmd as spmd

CrossEntropy: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]  # logits and labels to losses


class Config(NamedTuple):
  """Sizes of a model; the defaults are those of the table of layouts.

  `kv_heads=0` means as many as `heads`. `chunk` splits the attention's queries; 0 does not split them.
  """

  layers: int = 4
  embed: int = 512
  heads: int = 8
  head: int = 64
  kv_heads: int = 0
  mlp: int = 2048
  gated: bool = False
  vocab: int = 4096
  batch: int = 16
  length: int = 256
  remat: bool = False
  chunk: int = 0

  @property
  def tokens(self) -> int:
    return self.batch * self.length

  @property
  def products(self) -> dict[str, float]:
    """FLOPs of one training step over all devices, by matrix product.

    Each weight has three products: the forward result, the gradient of the input, and that of the weight.
    `scores` are both products of the attention, including the masked half. Recomputation by remat is not
    counted.
    """
    heads, kv_heads = self.heads * self.head, (self.kv_heads or self.heads) * self.head
    wide = {'q': heads, 'k': kv_heads, 'v': kv_heads, 'out': heads, 'up': self.mlp, 'down': self.mlp}
    wide |= {'gate': self.mlp} if self.gated else {}
    once = {name: 2.0 * self.tokens * self.layers * self.embed * width for name, width in wide.items()}
    once['scores'] = 4.0 * self.tokens * self.layers * self.length * heads
    once['logits'] = 2.0 * self.tokens * self.embed * self.vocab
    parts = 'forward', 'inputs', 'weights'
    return {f'{name} {part}': work for name, work in once.items() for part in parts}


LLAMA_8B = Config(32, 4096, 32, 128, 8, 14336, True, 128256, 128, 4096, True, 1024)
LLAMA_70B = LLAMA_8B._replace(layers=80, embed=8192, heads=64, mlp=28672)


def table(rules: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
  """A rule table; heads, MLP and vocabulary of activations default to the rules of the parameters."""
  defaults = {'act_heads': 'heads', 'act_mlp': 'mlp', 'act_vocab': 'vocab', 'kv_heads': 'heads'}
  names = 'batch length query key act_embed act_heads act_mlp act_vocab embed heads kv_heads mlp vocab'
  unnamed = ('head', 'act_head', 'norm', 'layers')
  named = ((name, rules.get(name, rules.get(defaults.get(name, '')))) for name in names.split())
  return (*named, *((name, None) for name in unnamed))


class Part(nn.Module):
  """Base of the model's modules: weights and norms."""

  config: Config

  def weight(self, name: str, *names: str) -> jax.Array:
    sizes = self.config._asdict() | {'kv_heads': self.config.kv_heads or self.config.heads}
    init = spmd.with_logical_partitioning(nn.initializers.normal(0.02), names)
    return self.param(name, init, tuple(sizes[axis] for axis in names)).astype(jnp.bfloat16)

  def norm(self, name: str, x: jax.Array) -> jax.Array:
    init = spmd.with_logical_partitioning(nn.initializers.ones, ('norm',))
    scale = self.param(name, init, (x.shape[-1],))
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * scale).astype(jnp.bfloat16)


class Block(Part):
  """Attention and MLP: one layer of `nn.scan`."""

  @nn.compact
  def __call__(self, x, _=None):
    x = _between(x)
    x = x + self.attention(_constrain(self.norm('norm_attention', x), 'batch', 'query', 'act_embed'))
    x = x + self.feed_forward(_constrain(self.norm('norm_mlp', x), 'batch', 'query', 'act_embed'))
    return _between(x), None

  def attention(self, x):
    c = self.config
    q = jnp.einsum('bse,ehd->bshd', x, self.weight('q', 'embed', 'heads', 'head'))
    k = jnp.einsum('bse,ehd->bshd', x, self.weight('k', 'embed', 'kv_heads', 'head'))
    v = jnp.einsum('bse,ehd->bshd', x, self.weight('v', 'embed', 'kv_heads', 'head'))
    if c.kv_heads:
      k, v = (jnp.repeat(y, c.heads // c.kv_heads, 2) for y in (k, v))
    q = _constrain(q, 'batch', 'query', 'act_heads', 'act_head')
    k, v = (_constrain(y, 'batch', 'key', 'act_heads', 'act_head') for y in (k, v))
    y = _constrain(_attend(q, k, v, c.chunk), 'batch', 'query', 'act_heads', 'act_head')
    return _between(jnp.einsum('bshd,hde->bse', y, self.weight('out', 'heads', 'head', 'embed')))

  def feed_forward(self, x):
    y = jnp.einsum('bse,ef->bsf', x, self.weight('up', 'embed', 'mlp'))
    if self.config.gated:
      y = nn.silu(jnp.einsum('bse,ef->bsf', x, self.weight('gate', 'embed', 'mlp'))) * y
    else:
      y = nn.gelu(y)
    y = _constrain(y, 'batch', 'query', 'act_mlp')
    return _between(jnp.einsum('bsf,fe->bse', y, self.weight('down', 'mlp', 'embed')))


def _constrain(x, *names):
  return spmd.with_logical_constraint(x, names)


def _between(x):
  return _constrain(x, 'batch', 'length', 'act_embed')


def _attend(q, k, v, chunk):
  """Causal attention; the masked half is computed too."""
  length = q.shape[1]
  if not chunk:
    return _rows(q, k, v, 0)
  part = jax.checkpoint(lambda q, start: _rows(q, k, v, start), prevent_cse=False)
  parts = jnp.moveaxis(q.reshape(q.shape[0], length // chunk, chunk, *q.shape[2:]), 1, 0)
  starts = jnp.arange(0, length, chunk)
  _, y = jax.lax.scan(lambda _, one: (None, part(*one)), None, (parts, starts))
  return jnp.moveaxis(y, 0, 1).reshape(q.shape)


def _rows(q, k, v, start):
  """Attention of the queries from position `start`."""
  scores = jnp.einsum('bqhd,bkhd->bhqk', q, k) / math.sqrt(q.shape[-1])
  seen = start + jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])
  shares = nn.softmax(jnp.where(seen, scores.astype(jnp.float32), -1e9), -1).astype(q.dtype)
  return jnp.einsum('bhqk,bkhd->bqhd', shares, v)


class Transformer(Part):
  """Tokens, int32 (batch, length), to next-token logits, bf16 (batch, length, vocab)."""

  @nn.compact
  def __call__(self, tokens):
    c = self.config
    x = _between(jnp.take(self.weight('embedding', 'vocab', 'embed'), tokens, axis=0))
    stack = nn.scan(
      nn.remat(Block, prevent_cse=False) if c.remat else Block,
      length=c.layers,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      metadata_params={nn.PARTITION_NAME: 'layers'},
    )
    x, _ = stack(c, name='blocks')(x, None)
    logits = self.norm('norm', x) @ self.weight('logits', 'embed', 'vocab')
    return _constrain(logits, 'batch', 'query', 'act_vocab')


def create(config: Config, optimizer: Callable[..., Any] = optax.adamw) -> TrainState:
  """A TrainState in float32."""
  model = Transformer(config)
  params = model.init(jax.random.key(0), jnp.zeros((1, config.length), jnp.int32))['params']
  return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer(1e-3))


def one_hot_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """The cross entropy of each token, float32 (batch, length)."""
  label_logits = jnp.sum(logits * jax.nn.one_hot(labels, logits.shape[-1]), -1)
  return jax.nn.logsumexp(logits, -1) - label_logits


def step(
  state: TrainState, tokens: jax.Array, cross_entropy: CrossEntropy = one_hot_cross_entropy
) -> tuple[TrainState, jax.Array]:
  """A training step; `tokens` are int32 (batch, length + 1)."""
  loss_fn = functools.partial(loss_of, state.apply_fn, tokens, cross_entropy=cross_entropy)
  loss, grads = jax.value_and_grad(loss_fn)(state.params)
  return state.apply_gradients(grads=grads), loss


def loss_of(apply, tokens, params, cross_entropy: CrossEntropy = one_hot_cross_entropy):
  """Mean cross entropy of the next token."""
  logits = apply({'params': params}, tokens[:, :-1]).astype(jnp.float32)
  return jnp.mean(cross_entropy(logits, tokens[:, 1:]))


def batch(config: Config) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct((config.batch, config.length + 1), jnp.int32)
