"""The arrays that a layer keeps for its backward pass, in compiled programs for an H100 and for a TPU v5e.

`benchmarks/search.py --only activations` measures them, and more functions, against the compiler.
"""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import flax_spmd as spmd
from flax_spmd.explore import Estimator, TrainStep, parse_target
from tests.estimate.doubts import doubts_of

ROWS, WIDTH = 2**20, 64
LAYOUT = spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'),))
EXACT = functools.partial(jax.nn.gelu, approximate=False)


def mish(x):
  return x * jnp.tanh(jax.nn.softplus(x))


def dropout(function):
  def dropped(x, number):
    key = jax.random.fold_in(jax.random.key(0), number)
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), function(x) / 0.9, 0)

  return dropped


def temporaries(function, dtype, layers, biased=False, target='h100:8', platform=None):
  """Of layers `x + function(x @ up) @ down`, in arrays of the shape of `x @ up`."""

  def create():
    return [(jnp.ones((WIDTH, 4 * WIDTH)), jnp.ones((4 * WIDTH, WIDTH))) for _ in range(layers)]

  def loss(weights, x):
    for number, (up, down) in enumerate(weights):
      h = x @ up.astype(dtype)
      h = h + up[:1].astype(dtype) if biased else h
      x = x + function(h, number) @ down.astype(dtype)
    return jnp.sum(x.astype(jnp.float32) ** 2)

  train_step = TrainStep(
    lambda weights, x: jax.grad(loss)(weights, x), create, jax.ShapeDtypeStruct((ROWS, WIDTH), dtype)
  )
  aim = parse_target(target)
  outcome = Estimator(train_step, platform=platform or aim.chip.platform).estimate(LAYOUT, aim)
  return outcome.memory.temporaries / (ROWS * 4 * WIDTH * jnp.dtype(dtype).itemsize / 8)


def kept_per_layer(function, dtype, **options):
  first, second = (temporaries(function, dtype, layers, **options) for layers in (2, 3))
  return second - first - 1 / 4  # the sum that the next layer reads


@pytest.mark.parametrize(
  ('function', 'dtype', 'arrays'),
  [
    (jax.nn.relu, 'bfloat16', 1),  # computed again as the products read it
    (jax.nn.silu, 'bfloat16', 2),
    (jax.nn.gelu, 'bfloat16', 3),  # its tanh too
    (jax.nn.gelu, 'float32', 2),  # which is computed again in 32 bits
    (EXACT, 'bfloat16', 3),
    (EXACT, 'float32', 3),
    (mish, 'float32', 3),
    (mish, 'bfloat16', 4),  # its softplus too
    (lambda x: x + jnp.sin(x) ** 2, 'float32', 3),
  ],
)
def test_arrays_that_a_layer_keeps(function, dtype, arrays):
  assert kept_per_layer(lambda x, _: function(x), dtype) == pytest.approx(arrays, abs=0.01)


def test_with_a_bias_the_sum_is_stored_alone():
  assert kept_per_layer(lambda x, _: jax.nn.relu(x), 'bfloat16', biased=True) == pytest.approx(
    1, abs=0.01
  )


@pytest.mark.parametrize(('dtype', 'arrays'), [('bfloat16', 2.5), ('float32', 2.25)])
def test_dropout_keeps_one_byte_an_element(dtype, arrays):
  assert kept_per_layer(dropout(jax.nn.relu), dtype) == pytest.approx(arrays, abs=0.01)


def normed(function):
  """Of a norm without parameters, as XLA compiled them between two products."""

  def result(x, _):
    y = x.astype(jnp.float32)
    mean = y.mean(-1, keepdims=True)
    y = (y - mean) * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) - mean * mean + 1e-6)
    return function((y * 1.5 + 0.5).astype(x.dtype))

  return result


@pytest.mark.parametrize(('dtype', 'arrays'), [('float32', 2.25), ('bfloat16', 2)])
def test_the_mask_of_a_norm_is_stored_in_32_bits(dtype, arrays):
  assert kept_per_layer(normed(jax.nn.leaky_relu), dtype) == pytest.approx(arrays, abs=0.02)


def test_a_function_whose_cost_is_near_the_limit_is_in_doubt():
  """XLA stored the `tanh` of a `gelu` after a norm of large arrays, and not that of small ones."""

  def doubts(function):
    def loss(weight, x):
      return jnp.sum((function(x @ weight, 0) @ weight.T) ** 2)

    def step(weight, x):
      return weight - jax.grad(loss)(weight, x), 0.0

    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), 'float32')
    train_step = TrainStep(step, lambda: jnp.ones((WIDTH, 4 * WIDTH)), batch)
    return doubts_of(Estimator(train_step).estimate(LAYOUT, parse_target('h100:8')))

  [doubt] = doubts(normed(jax.nn.gelu))
  assert 'a function that takes long to compute again, by about 128 MiB of memory' in doubt
  assert doubts(lambda x, _: jax.nn.gelu(x)) == ()


@pytest.mark.parametrize(
  ('function', 'is_computed', 'is_doubted'),
  [(jax.nn.gelu, True, True), (jax.nn.gelu, False, False), (jax.nn.silu, True, False)],
)
def test_a_tanh_in_32_bits_is_in_doubt_after_a_bias_that_the_step_computes(
  function, is_computed, is_doubted
):
  """XLA has been seen to store it then, as in the second gradient of a sharpness-aware step (2-layer ViT: 16 % more)."""

  def create():
    return jnp.ones((WIDTH, 4 * WIDTH)), jnp.ones(4 * WIDTH), jnp.ones((4 * WIDTH, WIDTH))

  def loss(weights, x):
    up, bias, down = jax.tree.map(jnp.sin, weights) if is_computed else weights
    return jnp.sum((x + function(x @ up + bias[None]) @ down) ** 2)

  batch = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
  step = TrainStep(lambda weights, x: jax.grad(loss)(weights, x), create, batch)
  doubts = Estimator(step).estimate(LAYOUT, parse_target('h100:8')).doubts
  assert any('takes long to compute again' in doubt for doubt in doubts) == is_doubted


def test_without_dropout_in_the_backward_pass_nothing_of_it_is_kept():
  def noisy(x, number):
    return jax.nn.relu(x) + jax.lax.stop_gradient(dropout(jnp.ones_like)(x, number))

  assert kept_per_layer(noisy, 'bfloat16') == pytest.approx(2, abs=0.01)


@pytest.mark.parametrize(
  'function', [lambda x, _: jax.nn.relu(x), lambda x, _: EXACT(x), dropout(jax.nn.gelu)]
)
def test_tpus_compute_every_function_again_as_the_products_read_it(function):
  assert kept_per_layer(function, 'bfloat16', target='v5e:2x4') == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(('target', 'arrays'), [('h100:8', 3), ('v5e:2x4', 1)])
def test_the_target_decides_whatever_platform_the_step_is_lowered_for(target, arrays):
  """One estimator may estimate for several targets."""
  for platform in ('cuda', 'tpu'):
    kept = kept_per_layer(lambda x, _: jax.nn.gelu(x), 'bfloat16', target=target, platform=platform)
    assert kept == pytest.approx(arrays, abs=0.01)


def test_the_operands_of_frozen_weights_are_freed():
  """The gradient of the input reads the weights again, and not what they were multiplied with."""

  def temporaries(layers):
    def step(weights, x):
      def loss(x):
        for up, down in weights:
          x = x + jax.nn.silu(x @ up) @ down
        return jnp.sum(x**2)

      return weights, jax.grad(loss)(x)

    def create():
      return [(jnp.ones((WIDTH, 4 * WIDTH)), jnp.ones((4 * WIDTH, WIDTH))) for _ in range(layers)]

    train_step = TrainStep(step, create, jax.ShapeDtypeStruct((ROWS, WIDTH), 'float32'))
    outcome = Estimator(train_step).estimate(LAYOUT, parse_target('h100:8'))
    return outcome.memory.temporaries / (ROWS * 4 * WIDTH * 4 / 8)

  assert temporaries(4) - temporaries(3) < 1.5  # the argument of silu, and the sum; not its result


def one_hot(logits, ids):
  return optax.softmax_cross_entropy(logits, jax.nn.one_hot(ids, logits.shape[-1])).mean()


def picked(logits, ids):
  return -jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, None], -1).mean()


@pytest.mark.parametrize(
  ('loss', 'rows', 'words', 'compiled'),
  [
    (one_hot, 16384, 4096, 68),
    (one_hot, 8192, 16384, 130),
    (picked, 16384, 4096, 100),
    (picked, 8192, 12288, 146),
    (picked, 8192, 13312, 106),
  ],
)
def test_kernels_that_read_rows_of_logits_several_times_do_not_write_over_them(
  loss, rows, words, compiled
):
  """The logits less their maximum are beside the logits; up to 48 KiB a row, their gradient is beside both of its operands."""

  def step(weights, batch):
    def mean(weights):
      x, ids = batch
      return loss(jnp.tanh(x @ weights[0]) @ weights[1], ids)

    value, gradients = jax.value_and_grad(mean)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

  create = lambda: [jnp.ones((256, 512)), jnp.ones((512, words))]
  batch = jax.ShapeDtypeStruct((rows, 256), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)
  estimator = Estimator(TrainStep(step, create, batch))
  memory = estimator.estimate(LAYOUT, parse_target('h100:8'), partition=False).memory
  assert memory.temporaries / 2**20 == pytest.approx(compiled, rel=0.01)
