"""The decoder of the published steps: Llama's or GPT's layers, with attention in a kernel and a choice of kept values.

A layer keeps its input, and the values that the published configuration keeps: `query`, `key`, `value`, `context` (the
result of the attention), `out`, `up`, `gate`, `down`. The backward pass computes the others again.
"""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.ad_checkpoint import checkpoint_name

import flax_spmd as spmd
from flax_spmd.explore import TrainStep

RULES = {
  'batch': ('data', 'fsdp'),
  'embed': 'fsdp',
  'heads': 'tensor',
  'kv_heads': 'tensor',
  'mlp': 'tensor',
  'vocab': 'tensor',
}


class Decoder(NamedTuple):
  """Sizes of a model, and whether its kernel for attention skips masked scores."""

  layers: int
  embed: int
  heads: int
  kv_heads: int
  head: int
  mlp: int
  gated: bool
  vocab: int
  keep: tuple[str, ...] | None = ()
  skips: bool = True

  @property
  def parameters(self) -> float:
    """Number of parameters, with one table for the embedding and the logits."""
    attention = 2 * (self.heads + self.kv_heads) * self.head
    layer = self.embed * (attention + (2 + self.gated) * self.mlp)
    return self.layers * layer + self.vocab * self.embed

  def published_flops(self, tokens: int, length: int, is_causal: bool) -> float:
    """FLOPs of a step as sources count them: recomputation is left out, and of causal scores the masked half."""
    scores = 12 * self.layers * self.heads * self.head * length / (2 if is_causal else 1)
    return tokens * (6 * self.parameters + scores)


def _weight(module: nn.Module, name: str, names: tuple[str, ...], shape: tuple[int, ...]) -> jax.Array:
  init = spmd.with_logical_partitioning(nn.initializers.normal(0.02), names)
  return module.param(name, init, shape).astype(jnp.bfloat16)


def _norm(module: nn.Module, name: str, x: jax.Array) -> jax.Array:
  scale = module.param(
    name, spmd.with_logical_partitioning(nn.initializers.ones, ('norm',)), x.shape[-1:]
  )
  y = x.astype(jnp.float32)
  return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * scale).astype(jnp.bfloat16)


def _constrain(x: jax.Array, *names: str | None) -> jax.Array:
  return spmd.with_logical_constraint(x, names)


class Layer(nn.Module):
  """Attention and MLP, one layer of `nn.scan`."""

  config: Decoder

  @nn.compact
  def __call__(self, x, _=None):
    x = _constrain(x, 'batch', None, None)
    x = x + self.attention(_norm(self, 'norm_attention', x))
    x = x + self.feed_forward(_norm(self, 'norm_mlp', x))
    return _constrain(x, 'batch', None, None), None

  def attention(self, x):
    c = self.config
    q, k, v = (
      checkpoint_name(
        _constrain(
          jnp.einsum(
            'bse,ehd->bshd', x, _weight(self, name, ('embed', axis, 'head'), (c.embed, number, c.head))
          ),
          'batch',
          None,
          axis,
          None,
        ),
        name,
      )
      for name, axis, number in (
        ('query', 'heads', c.heads),
        ('key', 'kv_heads', c.kv_heads),
        ('value', 'kv_heads', c.kv_heads),
      )
    )
    y = jax.nn.dot_product_attention(q, k, v, is_causal=c.skips, implementation='cudnn')
    y = checkpoint_name(_constrain(y, 'batch', None, 'heads', None), 'context')
    out = _weight(self, 'out', ('heads', 'head', 'embed'), (c.heads, c.head, c.embed))
    return checkpoint_name(_constrain(jnp.einsum('bshd,hde->bse', y, out), 'batch', None, None), 'out')

  def feed_forward(self, x):
    c = self.config
    up = _weight(self, 'up', ('embed', 'mlp'), (c.embed, c.mlp))
    y = checkpoint_name(_constrain(x @ up, 'batch', None, 'mlp'), 'up')
    if c.gated:
      gate = _weight(self, 'gate', ('embed', 'mlp'), (c.embed, c.mlp))
      y = nn.silu(checkpoint_name(_constrain(x @ gate, 'batch', None, 'mlp'), 'gate')) * y
    else:
      y = nn.gelu(y)
    down = _weight(self, 'down', ('mlp', 'embed'), (c.mlp, c.embed))
    return checkpoint_name(_constrain(y @ down, 'batch', None, None), 'down')


class Transformer(nn.Module):
  """Tokens, int32 (batch, length), to logits, bf16 (batch, length, vocab)."""

  config: Decoder

  @nn.compact
  def __call__(self, tokens):
    c = self.config
    x = jnp.take(_weight(self, 'embedding', ('vocab', 'embed'), (c.vocab, c.embed)), tokens, axis=0)
    layer = Layer
    if c.keep is not None:
      policy = jax.checkpoint_policies.save_only_these_names(*c.keep)
      layer = nn.remat(Layer, policy=policy, prevent_cse=False)
    stack = nn.scan(
      layer,
      length=c.layers,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      metadata_params={nn.PARTITION_NAME: 'layers'},
    )
    x, _ = stack(c, name='layers')(_constrain(x, 'batch', None, None), None)
    logits = _norm(self, 'norm', x) @ _weight(self, 'logits', ('embed', 'vocab'), (c.embed, c.vocab))
    return _constrain(logits, 'batch', None, 'vocab')


def create(config: Decoder, length: int) -> TrainState:
  """A TrainState of AdamW, in float32."""
  model = Transformer(config)
  params = model.init(jax.random.key(0), jnp.zeros((1, length), jnp.int32))['params']
  return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))


def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
  """A training step on int32 tokens (batch, length + 1)."""

  def loss_fn(params):
    logits = state.apply_fn({'params': params}, tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

  loss, grads = jax.value_and_grad(loss_fn)(state.params)
  return state.apply_gradients(grads=grads), loss


def train_step(config: Decoder, sequences: int, length: int) -> TrainStep:
  """The step on a global batch of `sequences`."""
  tokens = jax.ShapeDtypeStruct((sequences, length + 1), jnp.int32)
  return TrainStep(step, functools.partial(create, config, length), tokens)


def rules_for(mesh: dict[str, int]) -> tuple[tuple[str, Any], ...]:
  """The rule table for those axes that a mesh has; scanned layers and heads' sizes are never sharded."""
  kept = {}
  for name, axes in RULES.items():
    axes = tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes) if axis in mesh)
    kept[name] = axes or None
  return (*kept.items(), *((name, None) for name in ('head', 'norm', 'layers')))
