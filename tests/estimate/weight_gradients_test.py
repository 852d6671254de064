"""Weight gradients wait for other reductions; estimates are compared with figures that XLA compiled for eight H100s."""

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

import flax_spmd as spmd
from flax_spmd._src.estimate.weight_gradients import WeightGradients
from flax_spmd._src.text import parse_size
from flax_spmd.explore import Estimator, TrainStep, compare, parse_target
from tests.estimate.doubts import doubts_of
from tests.versions import needs_gpu_compiler

WIDTH, LAYERS = 512, 4
LAYOUT = spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'),))


def estimate(scaled, dtype, rows=65536):
  """The estimate of layers `x + sigmoid(norm(x) @ up + bias) @ down`, with a scale after the norm or without one."""

  def create():
    up, down = jnp.ones((WIDTH, 4 * WIDTH)), jnp.ones((4 * WIDTH, WIDTH))
    return [(up, jnp.ones(4 * WIDTH), down, jnp.ones(WIDTH)) for _ in range(LAYERS)]

  def loss(weights, x):
    for up, bias, down, scale in weights:
      y = x.astype(jnp.float32)
      y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)
      y = (y * scale[None] if scaled else y).astype(dtype)
      x = x + jax.nn.sigmoid(y @ up.astype(dtype) + bias.astype(dtype)[None]) @ down.astype(dtype)
    return jnp.mean(x.astype(jnp.float32) ** 2)

  def step(weights, x):
    value, gradients = jax.value_and_grad(loss)(weights, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

  train_step = TrainStep(step, create, jax.ShapeDtypeStruct((rows, WIDTH), dtype))
  return Estimator(train_step).estimate(LAYOUT, parse_target('h100:8'))


def temporaries(*args):
  """In MiB."""
  return estimate(*args).memory.temporaries / 2**20


def test_gradients_of_norms_are_reduced_before_those_of_matrices_are_computed():
  """So the gradients of the activations of all layers are in memory together; the figures are XLA's, compiled."""
  assert temporaries(True, 'bfloat16') == pytest.approx(347, rel=0.06)
  assert temporaries(False, 'bfloat16') == pytest.approx(244, rel=0.06)


@pytest.mark.parametrize(('rows', 'compiled'), [(65536, 526), (32768, 284)])
def test_several_groups_of_gradients_are_in_doubt_by_as_much_as_the_compiler_differs(rows, compiled):
  """XLA delays all, some or none of the products; the figures are its own, compiled."""
  found = estimate(True, 'float32', rows)
  [doubt] = doubts_of(found)
  assert doubt.startswith('gradients: the order of their products and reductions, by about ')
  spread = parse_size(doubt.removesuffix(' of memory').rpartition(' by about ')[2])
  assert abs(found.memory.temporaries / 2**20 - compiled) <= spread / 2**20 * 1.05


@pytest.mark.parametrize('function', [jax.nn.relu, jnp.tanh])
def test_matrices_in_32_bits_wait_for_the_sums_of_biases_that_are_reduced_with_them(function):
  """XLA computes their gradients after those of all activations; the figure is its own, compiled."""

  def create():
    return [(jnp.ones((WIDTH, WIDTH)), jnp.ones(WIDTH)) for _ in range(6)]

  def loss(weights, x):
    for matrix, bias in weights:
      x = function(x @ matrix + bias[None])
    return jnp.mean(x**2)

  def step(weights, x):
    value, gradients = jax.value_and_grad(loss)(weights, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

  train_step = TrainStep(step, create, jax.ShapeDtypeStruct((32768, WIDTH), jnp.float32))
  found = Estimator(train_step).estimate(LAYOUT, 'h100:8')
  assert found.memory.peak / 2**20 == pytest.approx(110, rel=0.08)


def schedule(*reductions, needed=0, size=2**20):
  """Ten operations, of which each but the first reads an array of 1 byte that ends there, and writes nothing."""
  gradients = WeightGradients()
  for index in range(10):
    gradients.add_step(2.0, {index: 1.0}, [index], 0.0)
  gradients.add_product(needed)
  for group, made, kind in reductions:
    gradients.add_reduction(group, kind, made, kind, size)
  return gradients.peak()


def test_one_group_of_products_is_computed_as_written():
  assert schedule((0, 2, 'dot_general'), (0, 8, 'dot_general')) == 2


def test_products_wait_for_the_last_sum_of_another_group():
  assert schedule((0, 2, 'dot_general'), (0, 4, 'dot_general'), (1, 9, 'reduce')) == 2 + 2


def test_a_sum_that_is_known_early_delays_no_product_before_it():
  assert schedule((0, 5, 'dot_general'), (0, 8, 'dot_general'), (1, 1, 'reduce')) == 2 + 1


def test_a_second_group_of_products_waits_until_its_last_one():
  """Groups are filled from the end: the first one is computed as written."""
  products = [(0, made, 'dot_general') for made in (1, 3, 5, 6, 9)]
  assert schedule(*products, size=10 * 2**20) == 2 + 2


def filters(is_narrow):
  """Ten operations, of which each reads an array of 1 byte that ends there; three are gradients of filters."""
  gradients = WeightGradients()
  for index in range(10):
    gradients.add_step(2.0, {index: 1.0}, [index], 0.0)
  gradients.add_product(0)
  for made in (2, 4, 6):
    gradients.add_reduction(0, 'sum', made, 'convolution', 2**20, is_narrow)
  return gradients


def test_gradients_of_filters_in_32_bits_wait_for_the_next_one_and_may_wait_for_more():
  assert filters(is_narrow=False).peak() == 2 + 1
  assert filters(is_narrow=False).filter_spread() == 1
  assert filters(is_narrow=True).peak() == 2
  assert (
    filters(is_narrow=True).filter_spread() == 2
  )  # as matrices that wait for a further group: seen in a U-Net


def test_products_in_loops_are_not_delayed():
  assert schedule((0, -1, 'dot_general'), (1, -1, 'reduce')) == 2
  gradients = WeightGradients()
  for written in (5.0, 1.0):
    gradients.add_step(5.0, {}, [], written)
  for group, kind in enumerate(('dot_general', 'reduce')):
    gradients.add_reduction(group, kind, -1, kind, 2**20)
  assert gradients.peak() == 5


def test_a_backward_pass_with_collectives_delays_nothing():
  sums = [(0, 2, 'dot_general'), (0, 8, 'dot_general'), (1, 9, 'reduce'), (2, 5, 'dot_general')]
  assert schedule(*sums, needed=1 << 2) == 2


def memory(train, layout):
  """The memory of temporaries, estimated and compiled."""
  needs_gpu_compiler()
  estimated = Estimator(train).estimate(layout, parse_target('h100:8'))
  return estimated.memory.temporaries, compare(train, [layout], 'h100:8')['layout 0'].memory.temporaries


@pytest.mark.usefixtures('gpu_compiler')
@pytest.mark.parametrize('is_sharded', [True, False])
def test_the_gradient_of_a_tied_table_that_nothing_reduces_waits_for_the_loop_over_layers(
  monkeypatch, is_sharded
):
  """It hides the gather of what the loop has computed, and the gradient of the logits is in memory with the loop."""
  vocab, width, tokens = 16384, 256, (64, 128)

  def create():
    boxed = lambda shape, *names: spmd.LogicallyPartitioned(jnp.ones(shape), names)
    return boxed((vocab, width), 'vocab', None), boxed((4, width, 64 * width), None, None, None)

  def loss(weights, ids):
    table, stack = (box.unbox() for box in weights)

    def layer(x, w):
      return spmd.with_logical_constraint(x @ w @ w.T, ('batch', None, None)), None

    x = spmd.with_logical_constraint(table[ids], ('batch', None, None))
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, stack)
    return optax.softmax_cross_entropy_with_integer_labels(x @ table.T, ids).mean()

  def step(weights, ids):
    value, gradients = jax.value_and_grad(loss)(weights, ids)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

  train = TrainStep(step, create, jax.ShapeDtypeStruct(tokens, jnp.int32))
  rules = (('batch', 'data'), ('vocab', 'data' if is_sharded else None))
  layout, target = spmd.Layout(LAYOUT.mesh, rules), 'h100:8'
  logits = 4 * tokens[0] * tokens[1] * vocab // 8
  live = compare(train, [layout], target)['layout 0'].live
  assert any(one.bytes == logits and 'scatter-add' in one.op for one in live) == is_sharded
  estimate = lambda: Estimator(train).estimate(layout, parse_target(target)).memory.temporaries
  waiting = estimate()
  monkeypatch.setattr(WeightGradients, 'add_hiding', lambda *_: False)
  gathered, own = 4 * tokens[0] * tokens[1] * width, 4 * vocab * width // 8
  added = logits + gathered - own if is_sharded else 0
  assert waiting - estimate() == pytest.approx(added, rel=0.03)


@pytest.mark.parametrize(
  ('is_reduced', 'is_long', 'peak'), [(False, False, 6), (True, False, 3), (True, True, 6)]
)
def test_products_hide_exchanges_unless_their_own_reductions_hide_behind_the_loop(
  is_reduced, is_long, peak
):
  gradients = WeightGradients()
  gradients.add_step(3.0, {0: 3.0}, [0], 0.0)
  gradients.add_step(3.0, {}, [], 0.0)
  gradients.add_step(1.0, {}, [], 0.0)
  if is_reduced:
    gradients.add_reduction(0, 'sum', 0, 'dot_general', 2**20)
  assert gradients.add_hiding(0, 2, is_long) == (peak == 6)
  assert gradients.peak() == peak


def test_gradients_of_filters_wait_for_the_next_reduction_of_the_backward_pass():
  """The channels of the second filter are sharded, so the gradient of its input is reduced."""
  side, channels = 32, [128, 128, 512, 128, 128, 128, 128]

  def create():
    names = lambda number: (None, None, None, 'out' if number == 1 else None)
    return [
      spmd.LogicallyPartitioned(jnp.ones((3, 3, *sizes)), names(number))
      for number, sizes in enumerate(itertools.pairwise(channels))
    ]

  def loss(kernels, x):
    for box in kernels:
      kernel = box.unbox().astype(x.dtype)
      y = jax.lax.conv_general_dilated(
        x, kernel, (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
      )
      x = spmd.with_logical_constraint(jax.nn.relu(y), ('batch', None, None, None))
    return jnp.mean(x.astype(jnp.float32) ** 2)

  def step(kernels, x):
    value, gradients = jax.value_and_grad(loss)(kernels, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, kernels, gradients), value

  x = jax.ShapeDtypeStruct((64, side, side, channels[0]), jnp.bfloat16)
  layout = spmd.Layout(
    spmd.abstract_mesh({'data': 2, 'model': 4}), (('batch', 'data'), ('out', 'model'))
  )
  estimated, compiled = memory(TrainStep(step, create, x), layout)
  assert estimated == pytest.approx(compiled, rel=0.06)
