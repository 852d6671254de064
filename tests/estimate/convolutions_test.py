"""The memory and FLOPs of convolutions: estimates against figures that XLA compiled for eight H100s."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import flax_spmd as spmd
from flax_spmd.explore import Estimator, TrainStep, compare, parse_target
from tests.estimate.doubts import doubts_of

IMAGES, SIDE, CHANNELS = 64, 32, 128
LAYOUT = spmd.Layout(spmd.abstract_mesh({'data': 8}), (('batch', 'data'),))


def convolved(x, kernel):
  numbers = ('NHWC', 'HWIO', 'NHWC')
  return jax.lax.conv_general_dilated(x, kernel, (1, 1), 'SAME', dimension_numbers=numbers)


def estimate(step, create, batch):
  return Estimator(TrainStep(step, create, batch)).estimate(LAYOUT, parse_target('h100:8'))


def descent(loss):
  def step(weights, x):
    value, gradients = jax.value_and_grad(loss)(weights, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

  return step


def four_layers(window, dtype, function):
  """Layers `x + down(function(up(norm(x)) + bias)) + bias`."""

  def create():
    wide, rows = 4 * CHANNELS, (window, window)
    one = {
      'up': jnp.ones((*rows, CHANNELS, wide)),
      'down': jnp.ones((*rows, wide, CHANNELS)),
      'biases': (jnp.ones(wide), jnp.ones(CHANNELS)),
      'scale': jnp.ones(CHANNELS),
    }
    return [one] * 4

  def loss(weights, x):
    for one in weights:
      y = x.astype(jnp.float32)
      y = y * (jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * one['scale'][None, None, None])
      up, down, first, second = (
        value.astype(dtype) for value in (one['up'], one['down'], *one['biases'])
      )
      x = x + convolved(function(convolved(y.astype(dtype), up) + first[None, None, None]), down)
      x = x + second[None, None, None]
    return jnp.mean(x.astype(jnp.float32) ** 2)

  return estimate(descent(loss), create, jax.ShapeDtypeStruct((IMAGES, SIDE, SIDE, CHANNELS), dtype))


@pytest.mark.parametrize(
  ('window', 'dtype', 'function', 'compiled'),
  [
    (3, 'float32', jax.nn.relu, 200.9),  # of which 18 MiB are filters in cuDNN's layout
    (1, 'bfloat16', jax.nn.sigmoid, 56.6),  # gradients of filters wait for nothing, which is in doubt
  ],
)
def test_layers_of_convolutions_agree_with_compiled_ones(window, dtype, function, compiled):
  found = four_layers(window, dtype, function)
  assert found.memory.temporaries / 2**20 == pytest.approx(compiled, rel=0.02)
  reason = 'gradients: the order of those of filters, by about 24.9 MiB of memory'
  assert doubts_of(found) == ((reason,) if dtype == 'bfloat16' else ())


def test_the_operand_of_a_maximum_over_windows_is_stored_twice_for_its_gradient():
  array = IMAGES * SIDE * SIDE * CHANNELS * 4 / 8

  def temporaries(pool):
    def loss(kernel, x):
      return jnp.sum(pool(jax.nn.relu(convolved(x, kernel))) ** 2)

    shape = (IMAGES, SIDE, SIDE, CHANNELS)
    found = estimate(
      descent(loss), lambda: jnp.ones((1, 1, CHANNELS, CHANNELS)), jax.ShapeDtypeStruct(shape, 'float32')
    )
    return found.memory.temporaries / array

  def pooled(x):
    return nn.max_pool(x, (3, 3), (2, 2), 'SAME')

  assert temporaries(pooled) - temporaries(lambda x: x) >= 1.5


def test_a_replicated_optimizer_of_large_filters_is_in_doubt():
  """Each of its arrays can have a copy in another layout, as in a U-Net of 24 million parameters: 217 MiB, not 151."""

  def create():
    return {name: jnp.ones((3, 3, 512, 512)) for name in ('params', 'first', 'second')}

  def loss(params, x):
    return jnp.sum(convolved(x, params.astype(x.dtype)).astype(jnp.float32) ** 2)

  def step(state, x):
    gradient = jax.grad(loss)(state['params'], x)
    first = 0.9 * state['first'] + gradient
    second = 0.9 * state['second'] + gradient**2
    params = state['params'] - first * jax.lax.rsqrt(second)
    return {'params': params, 'first': first, 'second': second}, gradient.sum()

  batch = jax.ShapeDtypeStruct((8, 8, 8, 512), 'bfloat16')
  doubts = estimate(step, create, batch).doubts
  reason = 'gradients: copies of filters in another layout as they are updated'
  assert any(doubt.startswith(reason) for doubt in doubts)


def strided(window, padding, stride, layout):
  """A step with a convolution whose input has a gradient too."""

  def create():
    return {'kernel': jnp.ones((window, window, 64, 64)), 'scale': jnp.ones((16, 16, 64))}

  def loss(weights, x):
    x = jnp.tanh(x * weights['scale'].astype(x.dtype)[None])
    kernel, numbers = weights['kernel'].astype(x.dtype), ('NHWC', 'HWIO', 'NHWC')
    x = jax.lax.conv_general_dilated(x, kernel, (stride, stride), padding, dimension_numbers=numbers)
    return jnp.sum(jnp.tanh(x).astype(jnp.float32) ** 2)

  return TrainStep(descent(loss), create, jax.ShapeDtypeStruct((16, 16, 16, 64), 'bfloat16')), layout


FSDP = spmd.Layout(LAYOUT.mesh, (('batch', 'data'), spmd.fsdp('data', min_size=1)))


@pytest.mark.parametrize(
  ('window', 'padding', 'stride', 'layout', 'megaflops'),
  [
    (3, 'SAME', 2, LAYOUT, 28.311552),
    (3, 'SAME', 2, FSDP, 56.623104),
    (1, 'VALID', 2, FSDP, 3.145728),
    (3, 'SAME', 1, FSDP, 104.005632),
    (5, 'VALID', 2, FSDP, 134.3488),
  ],
)
def test_filters_that_are_gathered_have_gradients_over_holes(window, padding, stride, layout, megaflops):
  """A gather is then between a filter's reversal and the gradient of the input, which is no gradient to cuDNN."""
  train_step, layout = strided(window, padding, stride, layout)
  found = Estimator(train_step).estimate(layout, parse_target('h100:8'))
  assert found.counts.flops / 1e6 == pytest.approx(megaflops)


@pytest.mark.filterwarnings('ignore:.*wrong values')
@pytest.mark.parametrize(('numbers', 'is_exchanged'), [('NHWC HWIO', True), ('NCHW OIHW', False)])
def test_the_gradients_of_a_kernel_by_example_are_in_doubt_where_features_move(
  no_partitioner, numbers, is_exchanged
):
  sizes = {'N': 64, 'H': 16, 'W': 16, 'C': 32}, {'H': 3, 'W': 3, 'I': 32, 'O': 64}
  dims = numbers.split()
  images, kernel = (tuple(size[dim] for dim in one) for one, size in zip(dims, sizes, strict=True))

  def loss(kernel, x):
    layouts = (*dims, dims[0])
    y = jax.lax.conv_general_dilated(x[None], kernel, (1, 1), 'SAME', dimension_numbers=layouts)
    return jnp.sum(y**2)

  def step(kernel, x):
    gradients = jax.vmap(jax.grad(loss), (None, 0))(kernel, x)
    norms = jnp.sum(gradients**2, (1, 2, 3, 4), keepdims=True)
    return kernel - jnp.sum(gradients / (1 + norms), 0), None

  doubts = estimate(step, lambda: jnp.ones(kernel), jax.ShapeDtypeStruct(images, 'float32')).doubts
  reason = 'a convolution with a group for each feature, whose result XLA exchanges'
  assert any(reason in doubt for doubt in doubts) == is_exchanged


def test_the_arrays_of_grouped_convolutions_are_gathered():
  """XLA shards no convolution with groups of several features, and folds padding before one into it."""

  def loss(kernels, x):
    for kernel in kernels:
      x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
      numbers = ('NHWC', 'HWIO', 'NHWC')
      x = jax.lax.conv_general_dilated(
        x, kernel, (2, 2), 'VALID', dimension_numbers=numbers, feature_group_count=8
      )
      x = jax.nn.relu(x)
    return jnp.mean(x**2)

  create = lambda: [jnp.ones((3, 3, 16, 128))] * 2
  found = estimate(descent(loss), create, jax.ShapeDtypeStruct((64, 32, 32, 128), jnp.float32))
  assert sum(found.counts.by_axis().values()) == 38_793_223
  assert found.counts.flops == pytest.approx(1_571_880_960, rel=0.01)
  assert found.memory.temporaries / 2**20 == pytest.approx(40.1, rel=0.02)
  assert not doubts_of(found)


@pytest.mark.usefixtures('gpu_compiler')
@pytest.mark.parametrize('padding', ['CAUSAL', 'SAME'])
def test_filters_with_holes_are_filled_where_an_input_is_padded_on_one_side(padding):
  layer = nn.Conv(CHANNELS, (2,), kernel_dilation=4, padding=padding, use_bias=False)
  x = jax.ShapeDtypeStruct((IMAGES, SIDE, CHANNELS), jnp.float32)
  loss = lambda weights, x: jnp.sum(layer.apply(weights, x) ** 2)
  create = lambda: layer.init(jax.random.key(0), jnp.ones(x.shape))
  train = TrainStep(descent(loss), create, x)
  exact = compare(train, [LAYOUT], 'h100:8')['layout 0'].counts.flops
  assert Estimator(train).estimate(LAYOUT, parse_target('h100:8')).counts.flops == pytest.approx(
    exact, rel=0.001
  )
