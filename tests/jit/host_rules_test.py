"""Steps under layouts with `host`: equal losses, arrays that return to the host, donation, checkpoints, NNX, checks."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import checkpoint, fsdp, host, optimizer_over

NAMES = (('batch', 'data'), ('mlp', 'model'))
OFFLOADED = (('^opt_state/', host(spmd.Rules(*NAMES, fsdp('data', min_size=1)))), *NAMES)
X = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)


class Mlp(nn.Module):
  @nn.compact
  def __call__(self, x):
    init = spmd.with_logical_partitioning(nn.initializers.lecun_normal(), ('embed', 'mlp'))
    return nn.Dense(8)(nn.relu(nn.Dense(64, kernel_init=init)(x)))


def create(key, x):
  params = Mlp().init(key, x)['params']
  return TrainState.create(apply_fn=Mlp().apply, params=params, tx=optax.adamw(1e-2))


def train_step(state, x):
  loss, grads = jax.value_and_grad(lambda p: jnp.mean(state.apply_fn({'params': p}, x) ** 2))(
    state.params
  )
  return state.apply_gradients(grads=grads), loss


def on(rules):
  return spmd.Layout({'data': 2, 'model': 4}, rules)


def kinds(tree):
  return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.size > 1}


def trained(layout, boxed=True):
  state = layout.init(create, jax.random.key(0), X, boxed=boxed)
  step, losses = layout.jit(train_step, donate_argnums=0), []
  for _ in range(3):
    old, (state, loss) = state, step(state, layout.shard(X, ('batch', None)))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((old.params, old.opt_state)))
    losses.append(float(loss))
  return state, losses


@pytest.mark.parametrize('boxed', [True, False])
@pytest.mark.parametrize(
  'rules', [OFFLOADED, (host(optimizer_over('data', min_size=1)), *NAMES)], ids=['path', 'widened']
)
def test_a_step_keeps_its_losses_and_the_state_its_memory(rules, boxed):
  layout = on(rules)
  state, losses = trained(layout, boxed)
  same, expected = trained(on(NAMES), boxed)
  assert losses == expected
  jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(state), jax.tree.leaves(same))
  assert kinds(state.opt_state) == {'pinned_host'} and kinds(state.params) == {'device'}
  assert not layout.check(layout.plan(create, jax.random.key(0), X, boxed=boxed).box(state)).suspicious


@pytest.mark.parametrize('types', ['Auto', 'Explicit'])
@pytest.mark.parametrize('spec', [P('model'), P(None, 'model')])
def test_a_constraint_decides_the_sharding_of_an_array_and_no_memory(types, spec):
  mesh = jax.make_mesh(
    (2, 4), ('data', 'model'), axis_types=2 * (getattr(jax.sharding.AxisType, types),)
  )
  layout = spmd.Layout(mesh, (host(fsdp('data', min_size=1)),))

  @layout.jit(donate_argnums=0)
  def step(moment):
    fresh = TrainState.create(apply_fn=None, params={}, tx=optax.sgd(0.1))  # equal to no other
    return spmd.constrain(2 * moment, spec) + 1, (moment.sum(), fresh)

  expected = NamedSharding(mesh, spec, memory_kind='pinned_host')
  moment = layout.shard(np.arange(64.0).reshape(8, 8), expected)
  for _ in range(3):
    before, (moment, _) = moment, step(moment)
    assert moment.sharding.is_equivalent_to(expected, 2)
  assert before.is_deleted()
  np.testing.assert_array_equal(moment, 8 * np.arange(64.0).reshape(8, 8) + 7)


def test_a_result_of_two_arrays_on_the_host_that_are_sharded_differently():
  layout = on((host(fsdp('model', min_size=1)),))
  one, two = layout.shard(np.ones((8, 8)), P('data')), layout.shard(np.ones((8, 8)), P('model'))
  hosted = [jax.device_put(each, each.sharding.with_memory_kind('pinned_host')) for each in (one, two)]
  add = layout.jit(lambda x, y: x + y)
  assert add(*hosted).sharding.memory_kind == 'pinned_host'
  assert add(hosted[0], two).sharding.memory_kind == 'device'


def test_bytes_of_device_and_host_are_apart():
  layout = on(OFFLOADED)
  state = layout.init(create, jax.random.key(0), X)
  total = spmd.explain(layout, state)
  held = lambda tree: sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
  moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.size > 1]
  assert total.host_bytes_per_device == held(moments)
  assert total.bytes_per_device == held(state) - held(moments)


def test_checkpoints_restore_into_the_memory_of_the_target(tmp_path):
  layout, plain = on(OFFLOADED), on(NAMES)
  state, _ = trained(layout)
  checkpoint.save(tmp_path / 'c', state, layout=layout)
  for target, memory in ((layout, 'pinned_host'), (plain, 'device')):
    restored = checkpoint.restore(tmp_path / 'c', target.plan(create, jax.random.key(0), X))
    assert kinds(restored.opt_state) == {memory} and kinds(restored.params) == {'device'}
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(restored), jax.tree.leaves(state))
  again, loss = layout.jit(train_step)(
    checkpoint.restore(tmp_path / 'c', layout.plan(create, jax.random.key(0), X)), X
  )
  assert kinds(again.opt_state) == {'pinned_host'} and float(loss) > 0


def test_an_array_in_the_other_memory_is_reported():
  layout = on((host(fsdp('data', min_size=1)),))
  w = on((fsdp('data', min_size=1),)).shard({'w': np.ones((8, 8))})
  assert str(layout.check(w)).startswith(
    "1 array not in the planned memory (w: planned P('data', None), stored as P('data', None) in memory 'device')"
  )


def test_a_program_that_moves_its_state_itself_keeps_its_results():
  """As in the layouts without `host`: arrays that the program moves are moved once."""
  layout = on((host(fsdp('data', min_size=1)),))
  state = layout.init(lambda: {'w': jnp.ones((8, 8)), 'n': jnp.zeros(())})

  @layout.jit
  def step(state):
    w = jax.device_put(state['w'], jax.memory.Space.Device) + 1
    return {'w': jax.device_put(w, jax.memory.Space.Host), 'n': state['n'] + 1}

  state = step(step(state))
  assert kinds(state) == {'pinned_host'} and state['n'] == 2
  np.testing.assert_array_equal(state['w'], np.full((8, 8), 3))


@pytest.mark.parametrize('types', [('Explicit', 'Explicit'), ('Auto', 'Explicit'), ('Explicit', 'Auto')])
def test_explicit_axes(types):
  """Types decide the specs of results there, and have no memory."""
  axis_types = tuple(getattr(jax.sharding.AxisType, name) for name in types)
  mesh = jax.make_mesh((2, 4), ('data', 'model'), axis_types=axis_types)
  ended = []
  for rule in (host(fsdp('model', min_size=1)), fsdp('model', min_size=1)):
    layout = spmd.Layout(mesh, (('batch', 'data'), ('^mu', spmd.Rules(rule)), fsdp('model', min_size=1)))
    make = lambda: {'mu': jnp.zeros((32, 64)), 'w': jnp.ones((32, 64))}
    state, x = layout.init(make), layout.shard(X, ('batch', None))

    @layout.jit(donate_argnums=0)
    def step(state, x):
      gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state['w'])
      mu = 0.9 * state['mu'] + gradient
      return {'mu': mu, 'w': state['w'] - 0.1 * mu}

    for _ in range(3):
      state = step(state, x)
    ended.append(state)
  hosted, kept = ended
  assert hosted['mu'].sharding.memory_kind == 'pinned_host' and kinds(kept) == {'device'}
  assert hosted['mu'].sharding.spec == kept['mu'].sharding.spec
  jax.tree.map(np.testing.assert_array_equal, hosted, kept)


def test_an_array_in_another_memory_than_required():
  layout = on((host(fsdp('data', min_size=1)),))
  with pytest.raises(spmd.errors.LayoutError) as caught:
    layout.jit(lambda w: w + 1, in_rules=(P('data'),))(layout.shard(np.ones((8, 8))))
  mesh = "on {'data': 2, 'model': 4} in"
  assert str(caught.value).splitlines()[0] == (
    f"argument w is sharded as P('data', None) {mesh} pinned_host, but in_rules require P('data',) {mesh} device."
  )


def test_modules_of_nnx():
  layout = spmd.Layout({'data': 8}, (('(^|/)opt_state/', host(fsdp('data', min_size=1))),))
  plain = spmd.Layout({'data': 8}, (('(^|/)opt_state/', spmd.Rules(fsdp('data', min_size=1))),))

  def make():
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

  def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss

  losses = []
  for each in (layout, plain):
    model, optimizer = each.init(make)
    jitted = each.jit(step)
    losses.append([float(jitted(model, optimizer, np.ones((8, 16)))) for _ in range(3)])
    moments = nnx.state(optimizer, nnx.optimizer.OptState)
    memory = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(moments) if leaf.size > 1}
    assert memory == ({'pinned_host'} if each is layout else {'device'})
  assert losses[0] == losses[1]


def test_estimates_count_the_host_and_its_transfers_apart():
  batch = jax.ShapeDtypeStruct((1024, 32), X.dtype)  # so long that its activations decide the peak
  estimator = spmd.explore.Estimator(
    spmd.explore.TrainStep(train_step, create, batch, (jax.random.key(0), X))
  )
  target = spmd.explore.parse_target('h100:8')
  plain = (('^opt_state/', spmd.Rules(*NAMES, fsdp('data', min_size=1))), *NAMES)
  mesh = spmd.abstract_mesh({'data': 2, 'model': 4})
  offloaded, kept = (
    estimator.estimate(spmd.Layout(mesh, rules), target, partition=False) for rules in (OFFLOADED, plain)
  )
  layout = spmd.Layout(spmd.abstract_mesh({'data': 2, 'model': 4}), OFFLOADED)
  moments = spmd.explain(layout, layout.abstract(create, jax.random.key(0), X)).host_bytes_per_device
  assert kept.memory.host == 0 and offloaded.memory.host == moments > 0
  assert kept.memory.optimizer - offloaded.memory.optimizer == moments
  assert kept.memory.peak - offloaded.memory.peak == moments
  assert offloaded.cost.links.pop(('host memory',)) == 2 * moments / 6.4e10
  assert offloaded.cost.links == kept.cost.links and offloaded.cost.high > kept.cost.high
