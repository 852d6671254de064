"""A mixture of experts by sort: tokens ordered by expert, gathered into buffers, and scattered back; a layer in a dict."""

import jax
import jax.numpy as jnp
import optax

import flax_spmd as spmd

VOCAB, EMBED, MLP, EXPERTS, CHOSEN, LENGTH = 32000, 1024, 2048, 8, 2, 256
BATCH = jax.ShapeDtypeStruct((64, LENGTH + 1), jnp.int32)
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-4))


def create():
  def weight(number, shape, *names):
    value = 0.02 * jax.random.normal(jax.random.key(number), shape)
    return spmd.LogicallyPartitioned(value, names)

  params = {
    'table': weight(0, (VOCAB, EMBED), 'vocab', 'embed'),
    'router': weight(1, (EMBED, EXPERTS), 'embed', None),
    'up': weight(2, (EXPERTS, EMBED, MLP), 'expert', 'embed', 'mlp'),
    'down': weight(3, (EXPERTS, MLP, EMBED), 'expert', 'mlp', 'embed'),
    'out': weight(4, (EMBED, VOCAB), 'embed', 'vocab'),
  }
  return {'params': params, 'opt_state': TX.init(params), 'step': jnp.zeros((), jnp.int32)}


def experts(p, x):
  """The two best experts of each token of one sequence, (length, embed)."""
  scores, chosen = jax.lax.top_k(jax.nn.softmax((x @ p['router']).astype(jnp.float32)), CHOSEN)
  expert = chosen.reshape(-1)
  order = jnp.argsort(expert)
  token = order // CHOSEN
  counts = jnp.bincount(expert, length=EXPERTS)
  place = jnp.arange(expert.size) - (jnp.cumsum(counts) - counts)[expert[order]]
  capacity = 2 * CHOSEN * x.shape[0] // EXPERTS
  buffers = jnp.zeros((EXPERTS, capacity, x.shape[1]), x.dtype)
  buffers = buffers.at[expert[order], place].set(x[token], mode='drop')
  hidden = jax.nn.gelu(jnp.einsum('ecd,edf->ecf', buffers, p['up']))
  outputs = jnp.einsum('ecf,efd->ecd', hidden, p['down'])
  weights = (scores / scores.sum(-1, keepdims=True)).reshape(-1)[order].astype(x.dtype)
  back = outputs.at[expert[order], place].get(mode='fill', fill_value=0)
  return jnp.zeros_like(x).at[token].add(back * weights[:, None])


def loss_fn(params, tokens):
  p = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), spmd.unbox(params))
  x = p['table'][tokens[:, :-1]]
  x = spmd.with_logical_constraint(x, ('batch', 'length', 'act_embed'))
  x = x + jax.vmap(experts, (None, 0))(p, x)
  logits = (x @ p['out']).astype(jnp.float32)
  chances = jax.nn.log_softmax(logits)
  return -jnp.take_along_axis(chances, tokens[:, 1:, None], -1).mean()


def step(state, tokens):
  loss, grads = jax.value_and_grad(loss_fn)(state['params'], tokens)
  updates, opt_state = TX.update(grads, state['opt_state'], state['params'])
  params = optax.apply_updates(state['params'], updates)
  return {'params': params, 'opt_state': opt_state, 'step': state['step'] + 1}, loss
