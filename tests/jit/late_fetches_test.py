"""Late fetches: what is on the host is fetched after the values that it is computed with, and programs compute the same."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd._src import compat
from flax_spmd.explore import TrainStep, compare

ON_HOST = spmd.Layout({'data': 8}, (spmd.host(('^(opt_state|h\\d)', P())), ('batch', 'data')))
ON_DEVICE = spmd.Layout({'data': 8}, (('batch', 'data'),))


def names_of(program):
  """The names of all operations, in order; those of inner programs in their places."""
  for one in program.eqns:
    inner = [value for value in one.params.values() if compat.is_jaxpr(value)]
    for each in inner:
      yield from names_of(getattr(each, 'jaxpr', each))
    if not inner:
      yield one.primitive.name


def order_of(step, *args):
  return [*names_of(ON_HOST.jit(step).trace(*args).jaxpr.jaxpr)]


def test_moments_are_fetched_after_the_gradients():
  def step(state, x):
    grads = jax.grad(lambda params: jnp.sum(jnp.tanh(x @ params['w']) ** 2))(state.params)
    return state.apply_gradients(grads=grads)

  def create():
    return TrainState.create(apply_fn=None, params={'w': jnp.ones((8, 8))}, tx=optax.adamw(1e-2))

  names = order_of(step, ON_HOST.init(create), jnp.ones((16, 8)))
  fetches = [at for at, name in enumerate(names) if name == 'device_put']
  assert len(fetches) == 2  # those of two moments
  assert names.count('dot_general') == 2 and fetches[0] > names.index(
    'dot_general', names.index('dot_general') + 1
  )
  assert 'optimization_barrier' in names[: fetches[0]]


def test_weights_are_fetched_one_after_another():
  def step(state, x):
    for name in sorted(state):
      x = jnp.tanh(x @ state[name])
    return x

  state = ON_HOST.init(lambda: {f'h{i}': jnp.eye(8) for i in range(3)})
  names = [
    name for name in order_of(step, state, jnp.ones((8, 8))) if name in ('device_put', 'dot_general')
  ]
  assert names == ['device_put', 'dot_general'] * 3


def test_constants_keys_and_references_beside_the_host():
  def step(state):
    fixed = jax.device_put(2.0, jax.memory.Space.Device)
    noise = jax.random.normal(jax.random.fold_in(state['d_key'], 3), (8,))
    kept = jax.random.wrap_key_data(jax.random.key_data(state['h0_key']))
    counter = jax.new_ref(jnp.zeros(8))
    counter[...] += state['h1'] * noise
    mixed = jax.jit(lambda key, h: jax.random.uniform(key, (8,)) + h)(
      jax.random.fold_in(state['d_key'], 4), state['h1']
    )
    return fixed * state['h1'] + noise, counter[...] + mixed, jax.random.uniform(kept, (4,))

  create = lambda: {'d_key': jax.random.key(0), 'h0_key': jax.random.key(1), 'h1': jnp.arange(8.0)}
  results = [layout.jit(step)(layout.init(create)) for layout in (ON_HOST, ON_DEVICE)]
  jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6), *results)


@pytest.mark.parametrize('types', ['Auto', 'Explicit'])
def test_meshes_of_other_layouts_leave_no_trace(types):
  axis_type = getattr(jax.sharding.AxisType, types)
  step = lambda state, x: state['h0'] + jnp.tanh(x @ state['d0'])
  for sizes in ({'data': 8}, {'data': 4, 'model': 2}, {'rows': 2, 'data': 2, 'model': 2}):
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(axis_type,) * len(sizes))
    layout = ON_HOST.replace(mesh=mesh)
    state = layout.init(lambda: {'d0': jnp.eye(8), 'h0': jnp.ones((8, 8))})
    result = layout.jit(step)(state, layout.shard(jnp.ones((8, 8)), (None, None)))
    np.testing.assert_allclose(result, 1 + np.tanh(np.ones((8, 8))), rtol=1e-6)
    assert result.sharding.mesh.shape == sizes


@pytest.mark.parametrize('seed', range(20))
def test_random_programs_compute_the_same(seed):
  """Of values from the host, from the device, and of both, some in programs of their own; and with results of both."""
  rng = random.Random(seed)
  binary = [jnp.add, jnp.multiply, jnp.maximum, lambda x, y: x @ y, jax.jit(lambda x, y: x - 2 * y)]
  unary = [jnp.tanh, lambda x: 0.5 * x, jnp.transpose, jax.jit(jnp.cos), lambda x: jnp.cumsum(x, 0)]
  loop = lambda x, y: jax.lax.fori_loop(0, 3, lambda i, z: jnp.tanh(z + i * y), x)
  plan = [
    (rng.choice(unary),) if rng.random() < 0.4 else (rng.choice([*binary, loop]), None)
    for _ in range(rng.randint(1, 14))
  ]
  places = [[rng.random() for _ in each] for each in plan]
  kept = [rng.random() < 0.4 for _ in range(5 + len(plan))]

  def step(state):
    values = [state[name] for name in sorted(state)]
    for each, at in zip(plan, places, strict=True):
      values.append(each[0](*(values[int(one * len(values))] for one in at)))
    return [value for value, is_kept in zip(values, kept, strict=True) if is_kept]

  start = np.random.default_rng(seed).normal(size=(5, 8, 8)).astype(np.float32) / 4
  create = lambda: dict(zip(('d0', 'd1', 'h0', 'h1', 'h2'), map(jnp.asarray, start)))
  results = [layout.jit(step)(layout.init(create)) for layout in (ON_HOST, ON_DEVICE)]
  assert len(results[0]) == sum(kept)
  for one, other in zip(*results, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.compiler
def test_moments_occupy_no_memory_beside_the_activations(gpu_compiler, tmp_path, monkeypatch):
  monkeypatch.setenv('FLAX_SPMD_CACHE', str(tmp_path))

  def create():
    params = {'w': jnp.ones((4, 1024, 1024))}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2))

  def step(state, x):
    layer = lambda x, w: (jax.nn.gelu(x @ w), None)
    loss = lambda params: jnp.sum(jax.lax.scan(layer, x, params['w'])[0] ** 2)
    return state.apply_gradients(grads=jax.grad(loss)(state.params)), ()

  train_step = TrainStep(step, create, jax.ShapeDtypeStruct((2**16, 1024), jnp.float32))
  mesh = spmd.abstract_mesh({'data': 8})
  layouts = {'host': ON_HOST.replace(mesh=mesh), 'device': ON_DEVICE.replace(mesh=mesh)}
  found = compare(train_step, layouts, 'h100:8')
  host, device = (found[name].memory for name in layouts)
  assert host.host == device.optimizer - host.optimizer == 2 * 4 * 1024 * 1024 * 4
  assert device.peak - host.peak == pytest.approx(host.host, rel=0.01)
