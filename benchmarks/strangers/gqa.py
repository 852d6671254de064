"""A Llama: grouped queries, rotary positions, gated MLP, scanned layers with remat, AdamW with clipping."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

VOCAB, EMBED, HEADS, GROUPS, HEAD, MLP, LAYERS, LENGTH = 32000, 1024, 16, 4, 64, 2816, 4, 512
BATCH = {'tokens': jax.ShapeDtypeStruct((64, LENGTH + 1), jnp.int32)}


def dense(features, axes, name, axis=-1):
  init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), axes)
  return nn.DenseGeneral(
    features, axis=axis, use_bias=False, kernel_init=init, dtype=jnp.bfloat16, name=name
  )


def rotate(x):
  frequencies = 1e4 ** (-jnp.arange(0, HEAD, 2) / HEAD)
  angles = jnp.arange(x.shape[1])[:, None] * frequencies
  sin, cos = jnp.sin(angles)[:, None, :], jnp.cos(angles)[:, None, :]
  left, right = jnp.split(x.astype(jnp.float32), 2, -1)
  turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)
  return turned.astype(x.dtype)


class Attention(nn.Module):
  @nn.compact
  def __call__(self, x):
    q = rotate(dense((HEADS, HEAD), ('embed', 'heads', 'head'), 'q')(x))
    k = rotate(dense((GROUPS, HEAD), ('embed', 'kv_heads', 'head'), 'k')(x))
    v = dense((GROUPS, HEAD), ('embed', 'kv_heads', 'head'), 'v')(x)
    q = nn.with_logical_constraint(q, ('batch', 'length', 'heads', 'head'))
    grouped = q.reshape(*q.shape[:2], GROUPS, HEADS // GROUPS, HEAD)
    scores = jnp.einsum('bqgrd,bkgd->bgrqk', grouped, k).astype(jnp.float32) * HEAD**-0.5
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    shares = jax.nn.softmax(jnp.where(causal, scores, -1e30)).astype(x.dtype)
    mixed = jnp.einsum('bgrqk,bkgd->bqgrd', shares, v).reshape(q.shape)
    return dense(EMBED, ('heads', 'head', 'embed'), 'out', axis=(-2, -1))(mixed)


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    x = nn.with_logical_constraint(x, ('batch', 'length', 'act_embed'))
    x = x + Attention(name='attention')(nn.RMSNorm(dtype=jnp.bfloat16)(x))
    y = nn.RMSNorm(dtype=jnp.bfloat16)(x)
    y = nn.silu(dense(MLP, ('embed', 'mlp'), 'gate')(y)) * dense(MLP, ('embed', 'mlp'), 'up')(y)
    y = nn.with_logical_constraint(y, ('batch', 'length', 'mlp'))
    return x + dense(EMBED, ('mlp', 'embed'), 'down')(y), None


class Llama(nn.Module):
  @nn.compact
  def __call__(self, tokens):
    init = nn.with_logical_partitioning(nn.initializers.normal(0.02), ('vocab', 'embed'))
    x = nn.Embed(VOCAB, EMBED, embedding_init=init, dtype=jnp.bfloat16)(tokens)
    layers = nn.scan(
      nn.remat(Block, prevent_cse=False),
      variable_axes={'params': 0},
      split_rngs={'params': True},
      length=LAYERS,
      metadata_params={nn.PARTITION_NAME: 'layers'},
    )
    x, _ = layers(name='layers')(x, None)
    logits = dense(VOCAB, ('embed', 'vocab'), 'logits')(nn.RMSNorm(dtype=jnp.bfloat16)(x))
    return nn.with_logical_constraint(logits, ('batch', 'length', 'vocab'))


def create():
  model = Llama()
  params = model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))['params']
  rate = optax.warmup_cosine_decay_schedule(0.0, 3e-4, 100, 10000)
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.1))
  return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def step(state, batch):
  inputs, labels = batch['tokens'][:, :-1], batch['tokens'][:, 1:]

  def loss_fn(params):
    logits = state.apply_fn({'params': params}, inputs).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

  loss, grads = jax.value_and_grad(loss_fn)(state.params)
  return state.apply_gradients(grads=grads), {'loss': loss, 'norm': optax.global_norm(grads)}
