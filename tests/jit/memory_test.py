"""Memories: arrays that a program itself puts into the memory of the host stay there, as under `jax.jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st

import flax_spmd as spmd
from flax_spmd import explore

LAYOUT = spmd.Layout({'data': 2, 'model': 4}, (('batch', 'data'), ('embed', 'data'), ('mlp', 'model')))
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
NAMES = [('embed', 'mlp'), ('mlp', None), None]


def moved(tree, space):
  return jax.tree.map(lambda leaf: jax.device_put(leaf, space), tree)


def kinds(tree):
  return [leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)]


def leaf(name, value):
  return value if name is None else spmd.LogicallyPartitioned(value, name)


@settings(max_examples=12, deadline=None)
@given(
  st.lists(st.tuples(st.sampled_from(NAMES), st.booleans(), st.booleans()), min_size=1, max_size=4),
  st.sampled_from([dict, tuple]),
)
def test_memories_are_those_of_jax(leaves, container):
  """Whatever the names and the container, before and after a step that changes some memories."""

  def build(values):
    named = {
      f'w{index}': leaf(name, value) for index, ((name, *_), value) in enumerate(zip(leaves, values))
    }
    return named if container is dict else tuple(named.values())

  def create():
    return build(
      [
        moved(jnp.full((8, 16), 1.0 + i), HOST if before else DEVICE)
        for i, (_, before, _) in enumerate(leaves)
      ]
    )

  def step(state):
    values = [moved(value, DEVICE) + 1 for value in jax.tree.leaves(state)]
    return build([moved(value, HOST if after else DEVICE) for value, (*_, after) in zip(values, leaves)])

  state = LAYOUT.init(create)
  assert kinds(state) == kinds(jax.jit(create)())
  with jax.set_mesh(LAYOUT.mesh):
    expected = jax.jit(step)(state)
  stepped = LAYOUT.jit(step)(state)
  assert kinds(stepped) == kinds(expected)
  for one, other in zip(jax.tree.leaves(stepped), jax.tree.leaves(expected), strict=True):
    np.testing.assert_array_equal(one, other)
  assert [one.sharding.spec for one in jax.tree.leaves(stepped)] == [
    LAYOUT.rules.spec(name) if name else jax.sharding.PartitionSpec() for name, *_ in leaves
  ]


DENSE = nn.Dense(
  16, use_bias=False, kernel_init=spmd.with_logical_partitioning(nn.initializers.ones, ('embed', 'mlp'))
)


def create():
  params = DENSE.init(jax.random.key(0), jnp.ones((8, 8)))['params']
  state = TrainState.create(apply_fn=DENSE.apply, params=params, tx=optax.trace(0.9))
  return state.replace(opt_state=moved(state.opt_state, HOST))


def step(state, x):
  loss, grads = jax.value_and_grad(lambda p: jnp.mean(DENSE.apply({'params': p}, x) ** 2))(state.params)
  state = state.replace(opt_state=moved(state.opt_state, DEVICE)).apply_gradients(grads=grads)
  return state.replace(opt_state=moved(state.opt_state, HOST)), loss


def test_a_plan_has_the_memory_of_an_offloaded_optimizer():
  plan = LAYOUT.plan(create)
  state = plan.init()
  assert kinds(state.params) == ['device'] and kinds(state.opt_state) == ['pinned_host']
  assert kinds(plan.abstract().opt_state) == ['pinned_host']
  assert kinds(plan.shard(jax.device_get(state)).opt_state) == ['pinned_host']
  explanation = plan.explain(state)
  assert not explanation.findings.of('not as planned')
  assert (explanation.bytes_per_device, explanation.host_bytes_per_device) == (68, 64)
  text = explanation.why('opt_state/trace/kernel')
  assert text.startswith(
    "opt_state/trace/kernel: float32[8,16] as P('data', 'model') in pinned_host, 64 B per device\n"
  )
  assert '68 B and 64 B in host memory per device' in str(explanation)


def test_an_offloaded_optimizer_keeps_its_memory_and_the_losses():
  x = LAYOUT.shard(jnp.ones((8, 8)), ('batch', None))
  on_host, on_device = LAYOUT.init(create), moved(jax.jit(create)(), DEVICE)
  offloaded = LAYOUT.jit(step, donate_argnums=0)
  plain = jax.jit(lambda state, x: moved(step(state, x), DEVICE))
  for _ in range(3):
    on_host, loss = offloaded(on_host, x)
    on_device, expected = plain(on_device, jnp.ones((8, 8)))
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert kinds(on_host.opt_state) == ['pinned_host'] and kinds(on_host.params) == ['device']


def test_compare_counts_the_memory_of_the_host_apart():
  batch = jax.ShapeDtypeStruct((8, 8), jnp.float32)
  memory = explore.compare(explore.TrainStep(step, create, batch), {'a': LAYOUT}, 'cpu:8')['a'].memory
  assert (memory.parameters, memory.optimizer, memory.host) == (64, 0, 64)
