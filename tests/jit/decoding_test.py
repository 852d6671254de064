"""Decoding with Flax's own attention caches: sharded by names from their creation through prefill and every step."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd

LAYOUT = spmd.Layout({'data': 2, 'model': 4}, spmd.presets.tensor_parallel())
PROMPT = np.random.default_rng(0).integers(0, 64, (4, 5))
LENGTH, STEPS = 16, 4


class Decoder(nn.Module):
  @nn.compact
  def __call__(self, tokens):
    embed = nn.Embed(64, 32)
    x = embed(tokens)
    return embed.attend(x + nn.MultiHeadDotProductAttention(4, decode=True)(x))


MODEL = Decoder()


def prefill(params, cache, prompt):
  """The cache after a prompt, and the first new token; `decode=True` takes one token at a time."""

  def one(cache, token):
    token, cache = decode(params, cache, token[:, None])
    return cache, token

  cache, tokens = jax.lax.scan(one, cache, prompt.T)
  return tokens[-1], cache


def decode(params, cache, token):
  logits, changed = MODEL.apply({'params': params, 'cache': cache}, token, mutable=['cache'])
  return jnp.argmax(logits[:, -1:], -1), changed['cache']


def generated(variables, prompt, jit):
  """The tokens after a prompt, and the caches at every step."""
  params, cache = variables['params'], variables['cache']
  run = jit(decode, donate_argnums=1)
  token, cache = jit(prefill, donate_argnums=1)(params, cache, prompt)
  tokens, caches = [token], [cache]
  for _ in range(STEPS):
    token, cache = run(params, cache, token)
    tokens.append(token)
    caches.append(cache)
  return np.concatenate(tokens, 1), caches, run


def test_the_caches_of_linen_are_sharded_from_their_creation_through_every_step():
  create = lambda: MODEL.init(jax.random.key(0), jnp.zeros((4, LENGTH), int))
  variables = LAYOUT.init(spmd.names_for(create), boxed=False)
  born = jax.tree.map(lambda array: array.sharding, variables['cache'])
  assert sum(each.spec == P('data', None, 'model', None) for each in jax.tree.leaves(born)) == 2
  expected, _, _ = generated(jax.jit(create)(), PROMPT, jax.jit)
  first = variables['cache']
  tokens, caches, run = generated(variables, LAYOUT.shard(PROMPT, ('batch', None)), LAYOUT.jit)
  np.testing.assert_array_equal(tokens, expected)
  for cache in caches:
    assert jax.tree.map(lambda array: array.sharding, cache) == born
  assert all(leaf.is_deleted() for cache in (first, *caches[:-1]) for leaf in jax.tree.leaves(cache))
  [compiled] = run.functions.values()
  assert compiled._cache_size() == 1


class NnxDecoder(nnx.Module):
  def __init__(self, rngs):
    self.embed = nnx.Embed(64, 32, rngs=rngs)
    self.attention = nnx.MultiHeadAttention(4, 32, decode=True, rngs=rngs)

  def __call__(self, token):
    x = self.embed(token)
    return jnp.argmax(self.embed.attend(x + self.attention(x)), -1)


def test_the_cache_of_nnx():
  def create():
    model = NnxDecoder(nnx.Rngs(0))
    model.attention.init_cache((4, LENGTH, 32))
    return model

  def run(model, jitted, token):
    tokens = []
    for _ in range(STEPS):
      token = jitted(model, token)
      tokens.append(np.asarray(token))
    return np.concatenate(tokens, 1)

  call = lambda model, token: model(token)
  model = LAYOUT.init(spmd.names_for(create))
  step = LAYOUT.jit(call)
  born = model.attention.cached_key[...].sharding
  tokens = run(model, step, LAYOUT.shard(PROMPT[:, :1], ('batch', None)))
  np.testing.assert_array_equal(tokens, run(create(), nnx.jit(call), PROMPT[:, :1]))
  assert born.spec == P('data', None, 'model', None)
  assert born == model.attention.cached_key[...].sharding == model.attention.cached_value[...].sharding
