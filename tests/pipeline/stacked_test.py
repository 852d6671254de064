"""Stacked stages: results equal those of the stages in sequence, and each stage is on its own devices."""

from textwrap import dedent

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flax_spmd as spmd
from flax_spmd.errors import PipelineError
from flax_spmd.pipeline import stacked
from tests.texts import text_of

WIDTH, ROWS = 16, 16
X = np.asarray(jax.random.normal(jax.random.key(1), (ROWS, WIDTH)))
OPTIMIZER = optax.adam(1e-2)


class Block(nn.Module):
  """A block whose gradient would be NaN where its input is zero."""

  @nn.compact
  def __call__(self, x):
    def param(name, *names):
      init = spmd.with_logical_partitioning(nn.initializers.lecun_normal(), names)
      return spmd.unbox(self.param(name, init, (WIDTH, WIDTH)))

    x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    h = spmd.with_logical_constraint(jnp.tanh(x @ param('up', 'embed', 'mlp')), ('batch', 'mlp'))
    return x + h @ param('down', 'mlp', 'embed')


class Model(nn.Module):
  """Stages between an embedding and a head; in sequence if `microbatches` is None."""

  stages: int
  microbatches: int | None = None

  @nn.compact
  def __call__(self, x):
    x = nn.Dense(WIDTH, name='embedding')(x)
    if self.microbatches:
      x = stacked(nn.remat(Block), self.stages, self.microbatches)(name='blocks')(x)
    else:
      x = _Sequence(self.stages, name='blocks')(x)
    return nn.Dense(1, name='head')(x)


class _Sequence(nn.Module):
  """The same parameters, applied in a Python loop."""

  stages: int

  @nn.compact
  def __call__(self, x):
    for stage in range(self.stages):
      x = Block().apply({'params': jax.tree.map(lambda w: w[stage], self.variables['params'])}, x)  # noqa: B023
    return x


def step_of(model):
  def step(state, x):
    params, moments = state
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((model.apply({'params': p}, x) - 1) ** 2))(
      params
    )
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), loss, grads

  return step


def create(model):
  params = model.init(jax.random.key(0), X[:1])['params']
  return params, OPTIMIZER.init(params)


def layout(stages):
  rules = (('stage', 'stage'), ('batch', 'data'), ('mlp', 'model'))
  return spmd.Layout({'stage': stages, 'data': 2, 'model': 4 // stages}, rules)


@pytest.mark.parametrize(('stages', 'microbatches'), [(2, 8), (4, 4)])
def test_equals_the_stages_in_sequence(stages, microbatches):
  """Losses, gradients and parameters for two steps; every device has its stage's parameters only."""
  on = layout(stages)
  state = on.init(create, Model(stages, microbatches))
  plain = jax.device_get(spmd.unbox(state))
  batch = on.shard(X, ('batch', None))
  step = on.jit(step_of(Model(stages, microbatches))).lower(state, batch).compile()
  plain_step = jax.jit(step_of(Model(stages)))
  for _ in range(2):
    state, loss, grads = step(state, batch)
    plain, plain_loss, plain_grads = plain_step(plain, X)
    np.testing.assert_allclose(loss, plain_loss, rtol=1e-5)
    jax.tree.map(
      lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6),
      spmd.unbox((state, grads)),
      (plain, plain_grads),
    )
  up = state[0]['blocks']['up']
  assert up.names == ('stage', 'embed', 'mlp')
  piece = (1, WIDTH, WIDTH * stages // 4)
  assert up.value.addressable_shards[0].data.shape == piece
  check_traffic(step.as_text(), (1, ROWS // microbatches // 2, WIDTH), (stages, *piece[1:]))


def check_traffic(text, moved, gathered):
  """Microbatches move between neighbours, forward and backward; parameters are never gathered."""
  permutes = [line for line in text.splitlines() if ' collective-permute(' in line]
  assert len(permutes) >= 2
  assert all(str(list(moved)).replace(' ', '') in line for line in permutes)
  assert str(list(gathered)).replace(' ', '') not in text


class Masked(nn.Module):
  """A stage on a tree, with a mask that is passed along, and a random key per stage and microbatch."""

  @nn.compact
  def __call__(self, inputs):
    x = nn.Dropout(0.5, deterministic=False)(inputs['x'])
    return inputs | {'x': nn.Dense(WIDTH, use_bias=False)(x) * inputs['mask'][:, None]}


def test_stages_pass_a_tree_along_and_split_random_keys():
  mask = np.arange(ROWS) % 3 > 0
  module = stacked(Masked, 2, 4, names={'x': ('batch', None), 'mask': ('batch',)})()
  keys = {'params': jax.random.key(0), 'dropout': jax.random.key(1)}
  variables = jax.jit(module.init)(keys, {'x': X, 'mask': mask})
  inputs = {'x': np.ones((ROWS, WIDTH), np.float32), 'mask': mask}
  results = jax.jit(module.apply)(variables, inputs, rngs={'dropout': jax.random.key(2)})
  np.testing.assert_array_equal(results['mask'], mask)
  assert not np.asarray(results['x'])[~mask].any()
  rows = np.asarray(results['x'])[mask]
  assert len(np.unique(rows.round(6), axis=0)) == len(rows)


# -- bad input


def test_a_batch_that_does_not_divide():
  variables = {'params': jax.eval_shape(lambda: create(Model(2, 8)))[0]}
  assert text_of(PipelineError, lambda: jax.eval_shape(Model(2, 8).apply, variables, X[:12])) == dedent("""\
    stacked: a batch of 12 cannot be split into 8 equal microbatches.
    Fix: use 6 or 12 microbatches, or another batch size.""")


def test_scalar_input():
  module = stacked(Masked, 2, 4)()
  inputs = {'x': X, 'mask': np.float32(1)}
  assert text_of(PipelineError, lambda: module.init(jax.random.key(0), inputs)) == dedent("""\
    stacked: the inputs of a stage need the same number of examples in their first dimension:
      mask: float32[]
      x: float32[16, 16]
    Fix: give each array a first dimension of examples, or close over it in the stage.""")


def test_a_stage_that_changes_the_shape():
  module = stacked(nn.Dense, 2, 4)(8)
  assert text_of(PipelineError, lambda: module.init(jax.random.key(0), X)) == dedent("""\
    stacked: the result of a stage differs from its input, so the next stage cannot take it:
      (root): float32[4, 8] instead of float32[4, 16]
    Fix: return arrays of the same shapes and dtypes; change shapes before or after the stages.""")


def test_zero_stages_or_microbatches():
  assert text_of(PipelineError, lambda: stacked(Block, 0, 4)).startswith('stacked: stages')
  assert text_of(PipelineError, lambda: stacked(Block, 2, 0)).startswith('stacked: microbatches')
