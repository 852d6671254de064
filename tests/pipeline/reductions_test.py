"""Operations of `accumulate`: stacks, operations of the caller's own, other axes; names of stages and `place_with`."""

from textwrap import dedent

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_spmd.errors import PipelineError
from flax_spmd.pipeline import (
  Add,
  Concat,
  Max,
  Mean,
  OneFOneB,
  Stack,
  ZeroBubbleH1,
  accumulate,
  place_with,
  stage_end,
)
from tests.pipeline.cases import (
  LAYOUT,
  MICROBATCHES,
  PARAMS,
  STAGES,
  WIDTH,
  X,
  Y,
  check,
  descend,
  mlp,
  squared,
)
from tests.texts import text_of


class Min:
  """An operation of JaxPP's form."""

  def state(self, count, result):
    return jnp.full(result.shape, jnp.inf)

  def update(self, state, result, index):
    return jnp.minimum(state, result)


class Weighted:
  """The sum of all results, each times the square of its index."""

  def state(self, count, result):
    return jnp.full(result.shape, 0.5 * count)

  def update(self, state, result, index):
    return state + result * index**2


class Reversed:
  """The results, stacked along the last dimension, the last microbatch first."""

  def state(self, count, result):
    return jnp.zeros((*result.shape, count))

  def update(self, state, result, index):
    return state.at[..., state.shape[-1] - 1 - index].set(result)


def with_activations(params, x, y):
  h = mlp(params, x)
  return jnp.mean((h - y) ** 2), h


@pytest.mark.parametrize('schedule', [OneFOneB(STAGES), ZeroBubbleH1(STAGES)], ids=str)
def test_operations_combine_results_of_every_stage(schedule):
  """Losses, gradients and activations, each by several operations, as under `jax.jit`."""
  ops = [Add, Mean(), Max, Stack(-1), Stack(1), Concat(), Min(), Weighted, Reversed()]

  def step(params, x, y):
    def of_microbatch(one):
      (loss, activations), grads = jax.value_and_grad(with_activations, has_aux=True)(params, *one)
      return [(loss * jnp.ones(3), grads['w0'], grads[f'w{STAGES - 1}'], activations)] * len(ops), grads

    results, grads = accumulate(of_microbatch, (x, y), schedule, (ops, Mean))
    return descend(params, grads), results

  check(step, PARAMS, X, Y)


@pytest.mark.parametrize('dtype', [bool, 'int8', 'uint8', 'int32', 'float16', 'bfloat16', 'float32'])
@pytest.mark.parametrize('lowest', [False, True])
def test_the_maximum_of_every_dtype(dtype, lowest):
  x = jnp.asarray(np.random.default_rng(0).integers(0, 2, (4, 16)), dtype)
  x = jnp.zeros_like(x) if lowest else x
  found = accumulate(lambda row: row, x, op=Max)
  assert found.dtype == x.dtype
  np.testing.assert_array_equal(found, x.max(0))


def test_stack_is_the_default_of_jaxpp_for_losses():
  losses, grads = accumulate(jax.value_and_grad(lambda x: jnp.sum(x**2)), X, op=(Stack(), Add))
  np.testing.assert_allclose(losses, jax.vmap(lambda x: jnp.sum(x**2))(X), rtol=1e-6)
  np.testing.assert_allclose(grads, jnp.sum(2 * X, 0), rtol=1e-6)
  assert accumulate(lambda x: x, X, op=Stack(2)).shape == (*X.shape[1:], MICROBATCHES)


@pytest.mark.parametrize('axis', [0, 1, 2, -1, -2, -3])
def test_the_batch_is_split_along_an_axis(axis):
  """Without a number of microbatches, the dimension counts them; with one, every other row is in the same microbatch."""
  x = np.arange(2 * 4 * 6 * 3.0).reshape(2, 4, 6, 3)
  rows = np.moveaxis(x, axis, 0)
  np.testing.assert_array_equal(accumulate(lambda x: x, x, op=Stack(), axis=axis), rows)
  count = x.shape[axis] // (2 if x.shape[axis] % 2 == 0 else 3)
  split = accumulate(lambda x: x, {'x': x}, op=Stack(), axis=axis, microbatches=count)['x']
  expected = np.stack([np.take(x, range(k, x.shape[axis], count), axis) for k in range(count)])
  np.testing.assert_array_equal(split, expected)
  whole = accumulate(lambda x: x, x, op=Concat(axis), axis=axis, microbatches=count)
  np.testing.assert_array_equal(whole, x)


def test_an_axis_in_a_pipeline():
  def step(params, x, y):
    grad = jax.value_and_grad(squared)
    loss, grads = accumulate(
      lambda one: grad(params, *one), (x, y), OneFOneB(STAGES), (Stack(), Mean), microbatches=4, axis=1
    )
    return descend(params, grads), loss

  check(step, PARAMS, X, Y)


def test_place_with_decides_the_rank_after_the_loop():
  """A sum of a large and a small gradient is computed on the rank of the anchor, and its result stays there."""

  def step(params, x, y, anchor):
    grad = jax.value_and_grad(squared)
    _, grads = accumulate(lambda one: grad(params, *one), (x, y), OneFOneB(STAGES), Mean)
    first, last = grads['w0'], grads[f'w{STAGES - 1}']
    small = last[0] * 2
    if anchor:
      small = place_with(small, first)
    return params, small + 1

  for anchor, rank in ((False, STAGES - 1), (True, 0)):
    _, small = LAYOUT.pipeline_jit(step, static_argnums=3)(PARAMS, X, Y, anchor)
    _, expected = jax.jit(step, static_argnums=3)(PARAMS, X, Y, anchor)
    np.testing.assert_allclose(small, expected, rtol=1e-5, atol=1e-6)
    assert small.devices() == set(LAYOUT.mesh.devices[rank].flat)


def test_place_with_is_the_identity():
  x = {'a': jnp.arange(3.0), 'b': jnp.ones((2, WIDTH))}
  result = jax.jit(lambda x: place_with(x, jnp.zeros(2)))(x)
  jax.tree.map(np.testing.assert_array_equal, result, x)
  assert jax.grad(lambda x, y: place_with(x, y) ** 2, (0, 1))(3.0, 2.0) == (6.0, 0.0)
  np.testing.assert_array_equal(jax.vmap(lambda x: place_with(x, 1.0))(x['a']), x['a'])


# -- bad input


class Growing:
  def state(self, count, result):
    return jnp.zeros(2)

  def update(self, state, result, index):
    return jnp.append(state, result)


class Pair(Growing):
  def state(self, count, result):
    return result, result


class Silent(Growing):
  def update(self, state, result, index):
    return None


def test_operations_whose_states_change_form():
  ops = {'a': Growing, 'b': Pair(), 'c': Silent(), 'd': Stack(2)}
  assert text_of(
    PipelineError, lambda: accumulate(lambda x: dict.fromkeys('abcd', x.sum()), X, op=ops)
  ) == dedent("""\
    accumulate: results that cannot be combined:
      result a: update of Growing returns float32[3], and its state is float32[2].
      result b: the state of Pair is not an array, but a tuple.
      result c: update of Silent returns no array, but a NoneType.
      result d: float32[] has no axis 2 to Stack along.
    Fix: choose an op that supports each result, or cast the result inside the function.""")


def test_axes_that_a_batch_lacks():
  batch = {'x': np.ones((4, 2)), 'y': np.ones(4), 'z': 1.0}
  assert text_of(PipelineError, lambda: accumulate(lambda x: 0.0, batch, axis=1)) == dedent("""\
    accumulate: a batch is split along its dimension 1, but these leaves have no such dimension: y: float32[4], z.
    Fix: close over values that are not split into microbatches.""")
  assert (
    text_of(PipelineError, lambda: accumulate(lambda x: 0.0, {'x': X, 'y': X[0]}, axis=1))
    == dedent("""\
    accumulate: the arrays of a batch need the same dimension 1, of size 1 or more:
      x: float32[4, 8, 16]
      y: float32[8, 16]
    Fix: give every array the same number of microbatches or examples; close over values that are not split.""")
  )


def test_an_axis_may_be_a_number_of_numpy():
  one = np.int64(1)
  found = accumulate(lambda x: 2 * x, X, op=Stack(one), axis=one)
  np.testing.assert_array_equal(found, 2 * X)


def test_names_of_stages():
  def step(params, x):
    def loss(params, x):
      for number in range(2):
        x = stage_end(jnp.tanh(x @ params[f'w{number}']), name=f'layer {number}')
      return x.mean()

    return accumulate(lambda x: jax.value_and_grad(loss)(params, x), x, OneFOneB(STAGES))

  text = text_of(PipelineError, lambda: LAYOUT.pipeline_jit(step).lower(PARAMS, X))
  assert '(layer 0)' in text and '(layer 1)' in text
  assert text_of(PipelineError, lambda: stage_end(jnp.ones(2), jnp.ones(2))) == dedent("""\
    stage_end: the name Array([1., 1.], dtype=float32) is not a string.
    Fix: pass all arrays as one tree, stage_end((x, y)), and the name as a string.""")


def test_anchors_that_are_on_no_rank():
  def step(params, x, y):
    grad = jax.value_and_grad(squared)
    _, grads = accumulate(lambda one: grad(params, *one), (x, y), OneFOneB(STAGES), Mean)
    return place_with(grads['w0'], params['w1'])

  text = text_of(PipelineError, lambda: LAYOUT.pipeline_jit(step).lower(PARAMS, X, Y))
  line = text.split(':')[1]
  assert text == (
    f'place_with at reductions_test.py:{line}: the anchor does not depend on the microbatch loop, so it is on no '
    'particular rank.\nFix: pass a result of the loop, such as the gradient of a parameter.'
  )
  assert text_of(PipelineError, lambda: place_with(1.0, {})) == (
    'place_with: the anchor {} has no array.\nFix: pass an array of the rank, such as a gradient.'
  )
