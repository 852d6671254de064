"""Settings of JAX around a call, which JAX stores per thread, hold in the threads of a pipeline; types of mesh axes."""

import gc

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import betainc
from jax.sharding import AxisType

import flax_spmd as spmd
from flax_spmd.pipeline import Mean, OneFOneB, accumulate, stage_end

LAYOUT = spmd.Layout({'stage': 2, 'data': 2}, (('batch', 'data'),))
OTHER = spmd.Layout({'data': 8}, ())
RNG = np.random.default_rng(0)
WEIGHTS = {name: RNG.normal(size=(8, 8)) for name in 'ab'}
BATCH = RNG.normal(size=(16, 8))


def step(w, batch, key):
  """A step whose lowering depends on the settings: of random numbers, and of `betainc`, a loop."""

  def loss(w, x):
    h = stage_end(jnp.tanh(x @ w['a']))
    y = (h + jax.random.normal(key, h.shape, h.dtype)) @ w['b']
    return (betainc(2.0, 3.0, jax.nn.sigmoid(y)) ** 2).mean()

  return accumulate(lambda x: jax.value_and_grad(loss)(w, x), batch, op=Mean, microbatches=4)


@pytest.mark.parametrize(
  'block',
  [
    lambda: jax.enable_x64(True),
    lambda: jax.threefry_partitionable(False),
    lambda: jax.set_mesh(LAYOUT.mesh),
    lambda: LAYOUT,
    lambda: OTHER,
  ],
  ids=['x64', 'threefry', 'set_mesh', 'layout', 'other_layout'],
)
def test_equal_to_jit_in_the_same_block(block):
  pipelined = LAYOUT.pipeline_jit(step, schedule=OneFOneB(2))
  with block():
    arguments = *jax.tree.map(jnp.asarray, (WEIGHTS, BATCH)), jax.random.key(3)
    expected, actual = jax.jit(step)(*arguments), pipelined(*arguments)
    again = pipelined(*arguments)
  for result in (actual, again):
    assert jax.tree.map(jnp.shape, result) == jax.tree.map(jnp.shape, expected)
    for one, other in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
      assert one.dtype == other.dtype
      tolerance = 1e-12 if one.dtype == np.float64 else 1e-5
      np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize('data', [1, 2])
def test_threads_of_ranks_of_several_cpus(data):
  """Before JAX 0.12 their collectives could wait for each other, as in random model 9112."""
  layout = spmd.Layout({'stage': 2, 'data': data}, (('batch', 'data'),))
  arguments = *jax.tree.map(jnp.asarray, (WEIGHTS, BATCH)), jax.random.key(3)
  compiled = layout.pipeline_jit(step, schedule=OneFOneB(2), threads=True).lower(*arguments).compile()
  assert (compiled.machine.threads is None) == (data > 1 and jax.__version_info__ < (0, 12))


@pytest.mark.parametrize('threads', [True, False])
def test_debug_nans_raises(threads):
  def step(w, batch):
    def loss(w, x):
      return jnp.log(stage_end(x @ w['a']) @ w['b'] - 1e6).mean()

    return accumulate(lambda x: jax.value_and_grad(loss)(w, x), batch, op=Mean, microbatches=4)

  pipelined = LAYOUT.pipeline_jit(step, schedule=OneFOneB(2), threads=threads)
  arguments = jax.tree.map(np.float32, (WEIGHTS, BATCH))
  assert np.isnan(pipelined(*arguments)[0])
  with jax.debug_nans(True), pytest.raises(Exception, match='nan'):  # of a private class of JAX
    pipelined(*arguments)


class Tower(nn.Module):
  """Two stages, each a product over a sharded dimension."""

  @nn.compact
  def __call__(self, x):
    for name, names in (('a', ('embed', 'mlp')), ('b', ('mlp', 'embed'))):
      init = spmd.with_logical_partitioning(nn.initializers.lecun_normal(), names)
      x = spmd.with_logical_constraint(
        jnp.tanh(nn.Dense(8, False, kernel_init=init, name=name)(x)), ('batch', None)
      )
      x = stage_end(x) if name == 'a' else x
    return x


@pytest.mark.parametrize('arguments', ['of its mesh', 'on the host'])
def test_a_mesh_with_explicit_axes_trains_as_one_with_auto_axes(arguments):
  def train_step(params, x):
    def loss(params, x):
      return (Tower().apply({'params': params}, x) ** 2).mean()

    value, grads = accumulate(lambda x: jax.value_and_grad(loss)(params, x), x, op=Mean, microbatches=4)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

  def train(types):
    mesh = spmd.make_mesh({'stage': 2, 'data': 2, 'model': 2}, axis_types=types)
    layout = spmd.Layout(mesh, (('batch', 'data'), ('mlp', 'model')))
    params = layout.init(
      lambda key: Tower().init(key, np.ones((2, 8)))['params'], jax.random.key(0), boxed=False
    )
    assert layout.mesh.axis_types == params['a']['kernel'].sharding.mesh.axis_types
    step, x = layout.pipeline_jit(train_step, schedule=OneFOneB(2), donate_argnums=0), BATCH
    if arguments == 'of its mesh':
      x = layout.shard(x, ('batch', None))
    else:
      params = jax.device_get(params)
    losses = []
    for _ in range(3):
      params, value = step(params, x)
      losses.append(float(value))
    return losses, jax.tree.map(lambda leaf: leaf.sharding.spec, params), jax.device_get(params)

  (losses, specs, params), (expected, expected_specs, expected_params) = map(
    train, (AxisType.Explicit, AxisType.Auto)
  )
  assert specs == expected_specs and losses[2] < losses[0]
  np.testing.assert_allclose(losses, expected, rtol=1e-5)
  jax.tree.map(
    lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), params, expected_params
  )


def test_planning_does_not_collect_old_objects():
  """Python's collector is as it was afterwards, after an error too."""
  before, seen = gc.get_threshold(), []

  def traced(w, batch, key):
    seen.append(gc.get_threshold())
    if key is None:
      raise ValueError('in the trace')
    return step(w, batch, key)

  pipelined = LAYOUT.pipeline_jit(traced, schedule=OneFOneB(2))
  pipelined.lower(WEIGHTS, BATCH, jax.random.key(0))
  with pytest.raises(ValueError, match='in the trace'):
    pipelined.trace(WEIGHTS, BATCH, None)
  assert [each[:2] for each in seen] == [before[:2]] * 2 and min(each[2] for each in seen) > before[2]
  assert gc.get_threshold() == before
