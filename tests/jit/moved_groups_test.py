"""Convolutions that XLA computes wrongly where it shards their groups: `layout.jit` names each."""

import random
import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd

LAYOUT = spmd.Layout({'data': 8}, (('batch', 'data'),))
IMAGES = np.random.default_rng(0).normal(size=(16, 8, 8, 4)).astype(np.float32)


class ConvolutionalNet(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.Conv(8, (3, 3))(x))
    return nn.Dense(4)(x.reshape(x.shape[0], -1))


MODEL = ConvolutionalNet()


def by_example(params, images):
  def loss(params, image):
    return jnp.sum(MODEL.apply(params, image[None]) ** 2)

  return jax.vmap(jax.grad(loss), (None, 0))(params, images)


@pytest.fixture(scope='module')
def params():
  return MODEL.init(jax.random.key(0), IMAGES)


def sharded(params):
  return LAYOUT.replicate(params), LAYOUT.shard(IMAGES, ('batch', None, None, None))


def test_gradients_of_kernels_by_example_are_named_once(params):
  step = LAYOUT.jit(by_example)
  with pytest.warns(UserWarning) as caught:
    step(*sharded(params))
    step.lower(*sharded(params))
  [text] = [str(one.message) for one in caught if 'convolutions' in str(one.message)]
  assert re.sub(r':\d+\n', ':LINE\n', text) == (
    'by_example: XLA may return wrong values for these grouped convolutions, whose sharded features are another dimension '
    'of the result than of the input, such as gradients of kernels by example, jax.vmap(jax.grad(...)):\n'
    "  16 groups, (3, 3, 4, 128) with dim 3 over 'data' at moved_groups_test.py:LINE\n"
    "Fix: compute them inside jax.shard_map(..., check_vma=False) over the batch's mesh axes, or with features "
    'before the spatial dimensions (NCHW).'
  )


@pytest.mark.usefixtures('forked_compilers')
def test_compare_lists_them(params):
  def step(params, images):
    return jax.tree.map(lambda p, g: p - jnp.mean(g, 0), params, by_example(params, images))

  images = jax.ShapeDtypeStruct(IMAGES.shape, IMAGES.dtype)
  [outcome] = spmd.compare(spmd.explore.TrainStep(step, lambda: params, images), {'': LAYOUT}, 'cpu:8')
  assert any('gradients of kernels by example' in finding for finding in outcome.program.findings)


@pytest.mark.parametrize(('window', 'is_named'), [(1, True), (3, False)])
def test_gradients_by_microbatch_are_named_where_the_window_is_of_size_1(window, is_named):
  kernel = np.random.default_rng(1).normal(size=(window, window, 4, 8)).astype(np.float32)

  def by_microbatch(kernel, images):
    def loss(kernel, images):
      order = ('NHWC', 'HWIO', 'NHWC')
      y = jax.lax.conv_general_dilated(images, kernel, (1, 1), 'SAME', dimension_numbers=order)
      return jnp.sum(y**2)

    return jax.vmap(jax.grad(loss), (None, 0))(kernel, images.reshape(8, 2, 8, 8, 4))

  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    result = LAYOUT.jit(by_microbatch)(*sharded(kernel))
  is_right = np.allclose(result, by_microbatch(kernel, IMAGES), rtol=1e-3, atol=1e-3)
  assert any('wrong values' in str(one.message) for one in caught) == is_named
  assert is_right or is_named


def test_the_fix_has_the_values_of_one_device(params):
  def step(params, images):
    specs = {'in_specs': (P(), P('data')), 'out_specs': P('data')}
    return jax.shard_map(by_example, mesh=LAYOUT.mesh, check_vma=False, **specs)(params, images)

  with warnings.catch_warnings():
    warnings.simplefilter('error')
    result = LAYOUT.jit(step)(*sharded(params))
  jax.tree.map(
    lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4),
    result,
    by_example(params, IMAGES),
  )


@pytest.mark.parametrize(
  'seed', [*range(4), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(4, 80))]
)
def test_every_convolution_with_wrong_values_is_named(seed):
  """Sharded over the groups, in any order of dimensions; the same on one device is the oracle."""
  rng = random.Random(seed)
  lhs, out = (rng.choice(('NHWC', 'NCHW', 'CNHW', 'CHWN', 'HWNC')) for _ in range(2))
  rhs, per, times = rng.choice(('HWIO', 'OIHW', 'OHWI', 'IHWO')), rng.choice((1, 2)), rng.choice((1, 2))
  sizes = {'N': 4, 'H': 6, 'W': 6, 'C': 16, 'I': per, 'O': 16 // per * times}
  kernel_sizes = {**sizes, 'H': 3, 'W': 3}
  values = np.random.default_rng(seed)
  x = values.normal(size=[sizes[dim] for dim in lhs]).astype(np.float32)
  kernel = values.normal(size=[kernel_sizes[dim] for dim in rhs]).astype(np.float32)

  def convolved(x, kernel):
    order = (lhs, rhs, out)
    return jax.lax.conv_general_dilated(
      x, kernel, (1, 1), 'SAME', dimension_numbers=order, feature_group_count=16 // per
    )

  def spec(dims, name):
    return P(*('data' if dim == name else None for dim in dims))

  step = LAYOUT.jit(convolved, in_rules=(spec(lhs, 'C'), spec(rhs, 'O')), out_rules=spec(out, 'C'))
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    result = step(x, kernel)
  is_right = np.allclose(result, convolved(x, kernel), rtol=1e-4, atol=1e-4)
  assert is_right or any('wrong values' in str(one.message) for one in caught)
