"""Paddings that XLA may compute wrongly where only the result is sharded: `layout.jit` names each."""

import random
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import pipeline
from flax_spmd._src.jit.sharded_pads import SHARDED_PADS
from flax_spmd._src.pipeline.run.stage_lowering import LoweredStages

LAYOUT = spmd.Layout({'data': 4, 'model': 2}, (('batch', 'data'), ('seq', 'model')))
NUMBERS = np.random.default_rng(0)
X = NUMBERS.normal(size=(4, 8, 8)).astype(np.float32)
WEIGHTS = NUMBERS.normal(size=(4, 3, 8)).astype(np.float32)


def gradient(slice_names, by_reshape=False):
  def loss(x):
    x = jnp.tanh(spmd.with_logical_constraint(x, ('batch', 'seq', None)))
    sliced = (
      jnp.pad(x, ((0, 0), (0, 1), (0, 0))).reshape(4, 3, 3, 8)[:, :, 0] if by_reshape else x[:, ::3]
    )
    return jnp.sum(spmd.with_logical_constraint(sliced, slice_names) ** 2 * WEIGHTS)

  return jax.grad(loss)


def sharded_call(function):
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    found = LAYOUT.jit(function)(LAYOUT.shard(X, ('batch', 'seq', None)))
  return found, [str(one.message) for one in caught]


def test_the_gradient_of_a_strided_slice_is_named():
  function = gradient(('batch', None, None))
  found, [text] = sharded_call(function)
  assert re.sub(r':\d+\n', ':LINE\n', text) == (
    'loss: XLA may return wrong values for these paddings, or fail with other shapes: they are between elements or remove '
    'some, and the result alone is sharded, as in gradients of x[:, ::2], of jnp.pad and of associative scans:\n'
    "  (4, 3, 8) to (4, 8, 8) with dim 1 over 'model' at sharded_pads_test.py:LINE\n"
    'Fix: shard operand and result alike: constrain the result of the slice, the padding or the scan with the names of its '
    'array.'
  )
  assert not np.allclose(found, function(X), atol=1e-3)  # if XLA has mended this, it can go


@pytest.mark.parametrize(
  'function', [gradient(('batch', 'seq', None)), gradient(('batch', None, None), by_reshape=True)]
)
def test_the_fixes_give_the_right_gradient_without_a_warning(function):
  found, texts = sharded_call(function)
  assert texts == []
  np.testing.assert_allclose(found, function(X), atol=1e-4)


@pytest.mark.parametrize('is_named', [True, False])
def test_the_gradient_of_an_associative_scan_over_a_sharded_dimension(is_named):
  def combine(one, other):
    return one[0] * other[0], other[0] * one[1] + other[1]

  def loss(x):
    x = spmd.with_logical_constraint(x, ('batch', 'seq', None))
    y = jax.lax.associative_scan(combine, (jax.nn.sigmoid(x), x), axis=1)[1]
    y = spmd.with_logical_constraint(y, (None, None, None) if is_named else ('batch', 'seq', None))
    return jnp.sum(y * jnp.arange(256.0).reshape(y.shape))

  found, texts = sharded_call(jax.grad(loss))
  assert any(SHARDED_PADS in text for text in texts) == is_named == (len(texts) > 0)
  is_right = np.allclose(found, jax.grad(loss)(X), rtol=1e-4, atol=1e-3)
  assert is_right != is_named  # if XLA has mended this, it can go


def test_a_stage_is_named_before_xla_may_fail_to_compile_it(monkeypatch):
  layout = spmd.Layout({'stage': 2, 'data': 2, 'model': 2}, (('batch', 'data'), ('seq', 'model')))

  def step(weight, batch):
    def loss(weight, x):
      x = spmd.with_logical_constraint(pipeline.stage_end(jnp.tanh(x * weight)), ('batch', 'seq', None))
      return jnp.sum(spmd.with_logical_constraint(x[:, ::3], ('batch', None, None)) ** 2 * WEIGHTS)

    return pipeline.accumulate(lambda x: jax.grad(loss)(weight, x), batch, pipeline.GPipe(2))

  def failing(stages):
    raise RuntimeError('XLA fails')

  monkeypatch.setattr(LoweredStages, 'compile', failing)
  with (
    pytest.warns(UserWarning, match=re.escape(SHARDED_PADS)),
    pytest.raises(RuntimeError, match='XLA fails'),
  ):
    layout.pipeline_jit(step)(np.float32(2), np.stack([X, -X]))


def test_every_random_padding_that_xla_computes_wrongly_is_named():
  draw, outcomes = random.Random(0), set()
  specs = [P(), P('data'), P('model'), P(('data', 'model')), P(('model', 'data'))]
  for _ in range(80):
    low, high, between = draw.choice([0, 1, 2]), draw.choice([0, 1, 2]), draw.choice([0, 0, 1, 2])
    if not between:  # XLA ends the process for some paddings of both kinds
      low, high = draw.choice([(-1, 1), (1, -1), (-2, 2), (-8, 0), (0, -8), (-1, 9)])
    size = draw.choice([8, 9, 16])
    numbers = np.arange(1.0, size + 1, dtype=np.float32)
    to_size = size + (size - 1) * between + low + high
    config = ((low, high, between),)
    try:
      of_operand, of_result = (NamedSharding(LAYOUT.mesh, draw.choice(specs)) for _ in range(2))
      of_operand.shard_shape((size,)), of_result.shard_shape((to_size,))
    except ValueError:
      continue  # a size that the axes do not divide
    step = LAYOUT.jit(lambda x, config=config: jax.lax.pad(x, 0.0, config), out_rules=of_result.spec)
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter('always')
      try:
        found = np.asarray(step(jax.device_put(numbers, of_operand)))
      except jax.errors.JaxRuntimeError:
        found = None  # XLA made other shapes
    right = np.asarray(jax.lax.pad(numbers, 0.0, config))
    is_right = found is not None and np.array_equal(found, right)
    is_named = any(SHARDED_PADS in str(one.message) for one in caught)
    assert is_right or is_named, (config, of_operand, of_result)
    outcomes.add((is_right, is_named))
  assert outcomes >= {(True, False), (False, True)}
