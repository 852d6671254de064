"""What a matrix product computes of its operands: not stored, but for the array that it is computed from."""

import jax
import jax.numpy as jnp
import pytest

import flax_spmd as spmd
from flax_spmd.explore import Estimator, TrainStep, parse_target

ROWS, WIDTH = 2**20, 64
LAYOUT = spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'),))


def arrays(function, dtype='float32', target='h100:8'):
  """Temporaries of `function(x @ up, bias) @ down`, in arrays of the shape of `x @ up`, which is read again later."""

  def create():
    return jnp.ones((WIDTH, 4 * WIDTH)), jnp.ones(4 * WIDTH), jnp.ones((4 * WIDTH, 1))

  def step(weights, x):
    up, bias, down = weights
    hidden = x @ up.astype(dtype)
    result = function(hidden, bias.astype(dtype)) @ down.astype(dtype)
    return weights, jnp.sum(result.astype(jnp.float32)) + jnp.sum(hidden.astype(jnp.float32))

  train_step = TrainStep(step, create, jax.ShapeDtypeStruct((ROWS, WIDTH), dtype))
  aim = parse_target(target)
  outcome = Estimator(train_step, platform=aim.chip.platform).estimate(LAYOUT, aim)
  return outcome.memory.temporaries / (ROWS * 4 * WIDTH * jnp.dtype(dtype).itemsize / 8)


@pytest.mark.parametrize(
  'function',
  [
    lambda h, b: jax.nn.relu(h),
    lambda h, b: jnp.tanh(0.5 * h),
    lambda h, b: jax.nn.relu(h + b[None]),  # an argument of the step
    lambda h, b: jax.nn.sigmoid(h.reshape(ROWS // 2, 2, 4 * WIDTH)).reshape(ROWS, 4 * WIDTH),
  ],
)
def test_functions_of_one_array_are_not_stored(function):
  assert arrays(function) == pytest.approx(1, abs=0.05)


def test_a_function_of_two_arrays_is_stored():
  assert arrays(lambda h, b: jax.nn.silu(h)) == pytest.approx(2, abs=0.05)


def test_the_argument_of_a_function_is_stored_whatever_computes_it():
  """The bias is converted, which the product's kernel does not do: the sum is stored, and its relu is not."""
  assert arrays(lambda h, b: jax.nn.relu(h + b[None]), 'bfloat16') == pytest.approx(2, abs=0.05)


def test_a_narrowing_conversion_is_stored():
  stored = arrays(lambda h, b: jax.nn.relu(h.astype(jnp.float32)).astype(jnp.bfloat16), 'bfloat16')
  assert stored == pytest.approx(2, abs=0.05)


def test_a_function_may_be_a_long_chain():
  def function(x, _):
    for _ in range(500):
      x = jnp.tanh(x)
    return x

  assert arrays(function) == pytest.approx(1, abs=0.05)
