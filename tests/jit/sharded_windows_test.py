"""Convolutions that XLA may compute wrongly where spatial dimensions are sharded over a part of the mesh."""

import random
import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import pipeline
from flax_spmd._src import compat
from tests.jit.convolutions import convolved, program_of

LAYOUT = spmd.Layout({'data': 2, 'model': 4}, (('batch', 'data'), ('seq', 'model'), ('embed', 'data')))
NUMBERS = np.random.default_rng(0)
IMAGES = NUMBERS.normal(size=(8, 16, 16, 3)).astype(np.float32)


class Patches(nn.Module):
  """The patches of a vision transformer as tokens, which are sharded by position."""

  whole: bool = False

  @nn.compact
  def __call__(self, x):
    x = nn.Conv(32, (4, 4), strides=(4, 4), use_bias=False)(x)
    if self.whole:
      x = spmd.with_logical_constraint(x, ('batch', None, None, 'embed'))
    x = x.reshape(x.shape[0], -1, 32)
    return jnp.sum(spmd.with_logical_constraint(x, (None, 'seq', 'embed')) ** 2)


def gradient(model, layout=None):
  params = model.init(jax.random.key(0), IMAGES)

  def loss_gradient(params, images):
    return jax.grad(model.apply)(params, images)

  if layout is None:
    return jax.tree.leaves(jax.jit(loss_gradient)(params, IMAGES))[0]
  step = layout.jit(loss_gradient)
  return jax.tree.leaves(step(params, layout.shard(IMAGES, ('batch', None, None, None))))[0]


@pytest.mark.parametrize('kind', [Patches, nn.jit(Patches), nn.remat(Patches)])
def test_convolutions_that_no_result_needs_are_not_lowered(kind, monkeypatch):
  lowered = []
  propagated = compat.propagated_operations
  monkeypatch.setattr(
    compat, 'propagated_operations', lambda *args: lowered.append(1) or propagated(*args)
  )
  model, key = kind(), jax.random.key(0)
  LAYOUT.plan(model.init, key, IMAGES)
  params = LAYOUT.init(model.init, key, IMAGES)
  assert not lowered
  with pytest.warns(UserWarning, match='XLA may return multiples'):
    LAYOUT.jit(model.apply)(params, IMAGES)
  assert lowered


def test_the_sharding_of_an_array_that_a_shard_map_returns_is_read():
  by_position = P(None, 'model')

  def kernel_gradient(images, kernel):
    doubled = jax.shard_map(lambda x: x * 2, in_specs=by_position, out_specs=by_position)(images)
    numbers = ('NHWC', 'HWIO', 'NHWC')
    return jax.grad(
      lambda kernel: jnp.sum(
        jax.lax.conv_general_dilated(doubled, kernel, (4, 4), 'VALID', dimension_numbers=numbers) ** 2
      )
    )(kernel)

  with pytest.warns(UserWarning, match=re.escape("(8, 16, 16, 3) with dim 1 over 'model' at")):
    LAYOUT.jit(kernel_gradient)(IMAGES, np.ones((4, 4, 3, 8), np.float32))


def test_a_gradient_that_xla_multiplies_is_named():
  with pytest.warns(UserWarning) as caught:
    found = gradient(Patches(), LAYOUT)
  [text] = [str(one.message) for one in caught]
  assert re.sub(r':\d+\n', ':LINE\n', text) == (
    'loss_gradient: XLA may return multiples of the right values for these convolutions, of which a spatial '
    'dimension is sharded and arrays are in several copies:\n'
    "  (8, 4, 4, 32) with dim 1 over 'model' at sharded_windows_test.py:LINE\n"
    'Fix: keep the spatial dimensions whole, by with_logical_constraint(x, (batch name, *[None] * spatial '
    'dimensions, feature name)) for the input and the result of the layer; or shard batch and spatial dimensions '
    'over all axes of the mesh.'
  )
  right = gradient(Patches())
  assert not np.allclose(found, right, rtol=0.1)  # if XLA has mended this, the warning can go


class Stages(nn.Module):
  """Patches in the first of two stages."""

  whole: bool = False

  @nn.compact
  def __call__(self, x):
    x = nn.Conv(32, (4, 4), strides=(4, 4), use_bias=False)(x)
    if self.whole:
      x = spmd.with_logical_constraint(x, ('batch', None, None, 'embed'))
    x = spmd.with_logical_constraint(x.reshape(x.shape[0], -1, 32), (None, 'seq', 'embed'))
    return jnp.sum(nn.Dense(8)(pipeline.stage_end(x)) ** 2)


def test_a_gradient_that_xla_multiplies_in_a_stage_is_named(monkeypatch):
  """Where devices add up gradients in each microbatch: a sum in parts is of convolutions of own examples."""

  def gradients(whole):
    model, batch = Stages(whole), np.stack([IMAGES, -IMAGES])
    params = Stages().init(jax.random.key(0), IMAGES)

    def step(params, batch):
      return pipeline.accumulate(lambda x: jax.grad(model.apply)(params, x), batch, pipeline.GPipe(2))

    layout = spmd.Layout({'stage': 2, 'data': 2, 'model': 2}, LAYOUT.rules)
    found = layout.pipeline_jit(step)(params, layout.shard(batch, (None, 'batch', None, None, None)))
    return jax.tree.leaves(found)[0], jax.tree.leaves(jax.jit(step)(params, batch))[0]

  text = r"\(8, 4, 4, 32\) with dim 1 over 'model' at sharded_windows_test.py:\d+"
  with monkeypatch.context() as patch:
    patch.setattr('flax_spmd._src.pipeline.pipelined.defer_sums', lambda *_: {})
    with pytest.warns(UserWarning, match=text):
      found, right = gradients(whole=False)
  assert not np.allclose(found, right, rtol=0.1)
  with pytest.warns(UserWarning, match=text):
    found, right = gradients(whole=False)
  np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-4)
  found, right = gradients(whole=True)
  np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-4)


def test_the_fix_of_the_warning_gives_the_right_gradient():
  np.testing.assert_allclose(
    gradient(Patches(whole=True), LAYOUT), gradient(Patches()), rtol=1e-4, atol=1e-4
  )


@pytest.mark.parametrize(
  'spec', [P('data'), P('data', 'model'), P(('data', 'model')), P(None, ('data', 'model'))]
)
def test_images_over_the_whole_mesh_or_by_batch_are_right_without_a_warning(spec):
  images = jax.device_put(
    NUMBERS.integers(-3, 4, (8, 16, 16, 4)).astype(np.float32), NamedSharding(LAYOUT.mesh, spec)
  )
  kernel = NUMBERS.integers(-3, 4, (3, 3, 4, 8)).astype(np.float32)

  def both(kernel, images):
    return jax.value_and_grad(lambda kernel: jnp.sum(convolved(images, kernel, 1) ** 2) / 1024)(kernel)

  for found, right in zip(LAYOUT.jit(both)(kernel, images), jax.jit(both)(kernel, np.asarray(images))):
    np.testing.assert_allclose(found, right, rtol=1e-5)


def layers(kind):
  """The sum of squares of two layers whose results are sharded by rows, over one of two axes."""

  def layer(x, kernel):
    rows = NamedSharding(LAYOUT.mesh, P(None, 'data'))
    return jax.lax.with_sharding_constraint(jnp.sin(convolved(x, kernel, 1)), rows)

  def of_kernels(kernels, images):
    if kind == 'scan':
      return jnp.sum(jax.lax.scan(lambda x, kernel: (layer(x, kernel), None), images, kernels)[0] ** 2)
    each = {
      'remat': jax.checkpoint(layer),
      'jit': jax.jit(layer),
      'cond': lambda x, kernel: jax.lax.cond(
        x[0, 0, 0, 0] > 0, layer, lambda x, kernel: x + layer(x, kernel), x, kernel
      ),
    }[kind]
    return jnp.sum(each(each(images, kernels[0]), kernels[1]) ** 2)

  return jax.grad(of_kernels)


@pytest.mark.parametrize('kind', ['scan', 'remat', 'jit', 'cond'])
def test_convolutions_inside_other_programs_are_named(kind):
  kernels = NUMBERS.normal(size=(2, 3, 3, 8, 8)).astype(np.float32) / 8
  images = NUMBERS.normal(size=(8, 16, 16, 8)).astype(np.float32)
  with pytest.warns(UserWarning, match=r"with dim 1 over 'data' at convolutions.py:\d+"):
    LAYOUT.jit(layers(kind))(kernels, images)


def drawn_spec(chance):
  entries = [()] * 4
  for axis in ('data', 'model'):
    if chance.random() < 0.7:
      entries[chance.randrange(4)] += (axis,)
  return P(*entries)


def drawn_program(chance):
  size, stride = chance.choice([(4, 4), (3, 1), (3, 2), (1, 1), (1, 2), (2, 2)])
  kind = chance.choice(['result', 'kernel', 'kernel', 'images'])
  return program_of(kind, (8, 16, 16, 8), (size, size, 8, 16), stride, 1, NUMBERS)


@pytest.mark.slow
@pytest.mark.parametrize(
  'part', [0, *(pytest.param(part, marks=pytest.mark.exhaustive) for part in range(1, 10))]
)
def test_every_random_convolution_that_xla_computes_wrongly_is_named(part):
  chance, wrong = random.Random(part), 0
  for _ in range(80):
    program, args = drawn_program(chance)
    of_args, of_result = [drawn_spec(chance) for _ in args], drawn_spec(chance)
    try:
      sharded = [jax.device_put(x, NamedSharding(LAYOUT.mesh, s)) for x, s in zip(args, of_args)]
      NamedSharding(LAYOUT.mesh, of_result).shard_shape(jax.eval_shape(program, *args).shape)
    except ValueError:
      continue  # a size that the axes do not divide
    step = LAYOUT.jit(program, out_rules=of_result)
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter('always')
      found = step(*sharded)
    if not np.array_equal(found, jax.jit(program)(*args)):
      wrong += 1
      assert any('XLA may return multiples' in str(one.message) for one in caught), (of_args, of_result)
  assert wrong
