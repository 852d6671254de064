"""Models, optimizers and steps that the tests of pipelines share, and their comparison with `jax.jit`.

A step runs several times in a row, as a pipeline and by `jax.jit`; both results have to be equal.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import flax_spmd as spmd
from flax_spmd.pipeline import (
  Mean,
  accumulate,
  stage_end,
)

STAGES = MICROBATCHES = 4
ROWS, WIDTH, WORDS = 8, 16, 11
LAYOUT = spmd.Layout({'stage': STAGES, 'data': 2}, (('batch', 'data'),))


def normal(number, *shape):
  return jax.random.normal(jax.random.key(number), shape)


def weight(number, rows=WIDTH, columns=WIDTH):
  return normal(number, rows, columns) / np.sqrt(rows)


PARAMS = {f'w{i}': weight(i) for i in range(STAGES)}
X = normal(100, MICROBATCHES, ROWS, WIDTH)
Y = jnp.sin(3 * X)
TOKENS = jax.random.randint(jax.random.key(101), (MICROBATCHES, ROWS), 0, WORDS)

OPTIMIZERS = {
  'sgd': optax.sgd(0.1),
  'momentum': optax.sgd(0.1, momentum=0.9, nesterov=True),
  'adam': optax.adam(1e-2, eps=1e-3),
  'adamw': optax.adamw(1e-2, eps=1e-3),
  'clipped': optax.chain(optax.clip_by_global_norm(0.01), optax.adam(1e-2, eps=1e-3)),
  'adafactor': optax.adafactor(1e-2, min_dim_size_to_factor=8),
  'lamb': optax.lamb(1e-2, eps=1e-3),
  'lion': optax.lion(1e-3),
  'MultiSteps': optax.MultiSteps(optax.adam(1e-2, eps=1e-3), every_k_schedule=2),
  'clipped MultiSteps': optax.MultiSteps(
    optax.chain(optax.clip_by_global_norm(0.01), optax.adam(1e-2, eps=1e-3)), every_k_schedule=2
  ),
}


# -- comparison


def plain(leaf):
  """A leaf as numpy can compare it."""
  leaf = jnp.asarray(leaf)
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    leaf = jax.random.key_data(leaf)
  return np.asarray(leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf)


def weak(leaf):
  return getattr(leaf, 'weak_type', False)  # keys have none


def assert_same(result, expected, tolerance=1e-5):
  """Asserts that two trees have equal structures and leaf types, and equal numbers up to a tolerance.

  Over several processes, each compares its own shards of the result.
  """
  assert jax.tree.structure(result) == jax.tree.structure(expected)
  pairs = zip(jax.tree_util.tree_leaves_with_path(result), jax.tree.leaves(expected), strict=True)
  for (path, leaf), expected_leaf in pairs:
    where = jax.tree_util.keystr(path)
    assert isinstance(leaf, jax.Array), where
    assert jax.typeof(leaf).str_short() == jax.typeof(expected_leaf).str_short(), where
    assert weak(leaf) == weak(expected_leaf), where
    parts = [(leaf, expected_leaf)]
    if not leaf.is_fully_addressable:
      whole = jnp.asarray(expected_leaf)
      parts = [
        (shard.data, whole[shard.index] if whole.ndim else whole) for shard in leaf.addressable_shards
      ]
    for one, other in parts:
      np.testing.assert_allclose(plain(one), plain(other), tolerance, tolerance, err_msg=where)


def check_each(step, state, calls, layout=LAYOUT, tolerance=1e-5, **options):
  """Compares a step `(state, *args) -> (state, *results)`, called several times in a row.

  Returns the last result.
  """
  statics = {name: value for name, value in options.items() if name.startswith('static')}
  one_by_one, pipelined = jax.jit(step, **statics), layout.pipeline_jit(step, **options)
  expected, result = (state,), (state,)
  for args in calls:
    expected, result = one_by_one(expected[0], *args), pipelined(result[0], *args)
    assert_same(result, expected, tolerance)
  return result


def check(step, state, *args, steps=2, **options):
  return check_each(step, state, [args] * steps, **options)


def check_once(fn, *args, layout=LAYOUT, tolerance=1e-5, **options):
  """Compares a function that is called twice with the same arguments; returns its last result."""
  expected, pipelined = jax.jit(fn)(*args), layout.pipeline_jit(fn, **options)
  for _ in range(2):
    result = pipelined(*args)
    assert_same(result, expected, tolerance)
  return result


# -- training steps


def descend(params, grads, rate=0.1):
  return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def mlp(params, x, ends=STAGES):
  """A layer per stage; `ends` can leave out the last stage's end."""
  for i in range(STAGES):
    x = jnp.tanh(x @ params[f'w{i}'])
    x = stage_end(x) if i < ends else x
  return x


def squared(params, x, y):
  return jnp.mean((mlp(params, x) - y) ** 2)


def cross_entropy(logits, labels):
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def training(loss, schedule, op=Mean, has_aux=False):
  """A step of gradient descent on `loss(params, *microbatch)`."""

  def step(params, *batch):
    grad = jax.value_and_grad(loss, has_aux=has_aux)
    value, grads = accumulate(lambda one: grad(params, *one), batch, schedule, op)
    return descend(params, grads), value

  return step


def optimizing(tx, schedule, loss=squared):
  """A step of an optimizer on a state of parameters and optimizer state."""

  def step(state, *batch):
    params, memory = state
    grad = jax.value_and_grad(loss)
    value, grads = accumulate(lambda one: grad(params, *one), batch, schedule, Mean)
    updates, memory = tx.update(grads, memory, params)
    return (optax.apply_updates(params, updates), memory), value

  return step


class Block(nn.Module):
  """A stage of a residual network."""

  dropout: float = 0.0
  end: bool = True

  @nn.compact
  def __call__(self, x):
    hidden = nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))
    hidden = nn.Dropout(self.dropout, deterministic=not self.dropout)(hidden)
    x = x + nn.Dense(WIDTH)(hidden)
    return stage_end(x) if self.end else x


class Network(nn.Module):
  """A block per stage."""

  block: type[nn.Module] = Block
  dropout: float = 0.0

  @nn.compact
  def __call__(self, x):
    for _ in range(STAGES):
      x = self.block(dropout=self.dropout)(x)
    return x


def fitting(model):
  """The loss of a Linen model without rngs."""
  return lambda variables, x, y: jnp.mean((model.apply(variables, x) - y) ** 2)
