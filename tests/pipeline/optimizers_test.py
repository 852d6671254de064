"""Optimizers and layouts of pipelined steps, compared with `jax.jit`."""

import functools

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from jax.sharding import PartitionSpec

import flax_spmd as spmd
from flax_spmd._src import compat
from flax_spmd._src.pipeline.cut import equations, outside_loop
from flax_spmd.pipeline import (
  Mean,
  OneFOneB,
  accumulate,
  stage_end,
)
from tests.pipeline.cases import (
  LAYOUT,
  OPTIMIZERS,
  PARAMS,
  STAGES,
  WIDTH,
  Network,
  X,
  Y,
  assert_same,
  check,
  check_each,
  descend,
  optimizing,
  squared,
  training,
)

# -- updates


def test_loss_scaling(schedule):
  """A scale used in the loop and after it, and one flag for all gradients."""

  def step(state, x, y):
    params, scale = state
    grad = jax.value_and_grad(lambda params, x, y: scale * squared(params, x, y))
    loss, grads = accumulate(lambda one: grad(params, *one), (x, y), schedule, Mean)
    grads = jax.tree.map(lambda g: g / scale, grads)
    finite = jnp.all(jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
    new = jax.tree.map(lambda new, old: jnp.where(finite, new, old), descend(params, grads), params)
    return (new, jnp.where(finite, scale * 2, scale / 2)), loss / scale

  state = PARAMS, jnp.float32(8)
  check_each(step, state, [(X, Y), (X.at[0, 0, 0].set(np.nan), Y), (X, Y)])


def test_learning_rate_schedule(schedule):
  tx = optax.sgd(optax.warmup_cosine_decay_schedule(0.01, 0.1, 2, 10), momentum=0.9)
  check(optimizing(tx, schedule), (PARAMS, tx.init(PARAMS)), X, Y, steps=3)


def test_injected_hyperparameters(schedule):
  tx = optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(0.1, 0.0, 10))
  check(optimizing(tx, schedule), (PARAMS, tx.init(PARAMS)), X, Y)


def test_moving_average(schedule):
  def step(state, x, y):
    params, average = state
    params, loss = training(squared, schedule)(params, x, y)
    return (params, optax.incremental_update(params, average, 0.1)), loss

  check(step, (PARAMS, jax.tree.map(jnp.zeros_like, PARAMS)), X, Y)


# Others are made of the same operations as these; `nox -s exhaustive` runs them.
QUICK = ('momentum', 'adafactor', 'lamb', 'clipped MultiSteps')


@pytest.mark.parametrize(
  'name',
  [pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive) for name in OPTIMIZERS],
)
def test_optimizer(schedule, name):
  tx = OPTIMIZERS[name]
  check(optimizing(tx, schedule), (PARAMS, tx.init(PARAMS)), X, Y, steps=3)


@pytest.mark.parametrize('name', ['adam', 'clipped'])
def test_apply_if_finite(schedule, name):
  tx = optax.apply_if_finite(OPTIMIZERS[name], max_consecutive_errors=3)
  calls = [(X, Y), (X.at[1, 0, 0].set(np.inf), Y), (X, Y)]

  def step(state, x, y):
    state, loss = optimizing(tx, schedule)(state, x, y)
    return state, jnp.nan_to_num(loss)

  check_each(step, (PARAMS, tx.init(PARAMS)), calls)


def test_a_branch_over_many_arrays_is_planned_in_one_pass(monkeypatch):
  """Planning traced the branch anew for each array: minutes for a thousand of them."""
  tx = optax.apply_if_finite(optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(), 3)
  layout = spmd.Layout({'stage': 2}, ())
  traced, pruned = [], compat.pruned
  monkeypatch.setattr(compat, 'pruned', lambda *arguments: traced.append(1) or pruned(*arguments))
  for copies in (1, 20):
    params = {'a': [jnp.eye(8)] * copies, 'b': [jnp.eye(8)] * copies}

    def step(state, x):
      def loss(params, x):
        return (stage_end(jnp.tanh(x @ sum(params['a']))) @ sum(params['b'])).mean()

      params, moments = state
      grads = accumulate(lambda x: jax.grad(loss)(params, x), x, OneFOneB(2))
      updates, moments = tx.update(grads, moments, params)
      return optax.apply_updates(params, updates), moments

    layout.pipeline_jit(step).lower((params, tx.init(params)), jnp.ones((2, 4, 8)))
  assert len(traced) == 2 * 2  # once for each rank


@pytest.mark.parametrize('seed', range(4))
def test_results_of_a_branch_depend_on_what_jax_keeps(seed):
  rng = np.random.default_rng(seed)

  def function(depth):
    picks = rng.integers(0, 6, (6, 2))
    others = [function(depth - 1) for _ in range(2 * (depth > 0))]
    at = rng.integers(0, 6)

    def run(values):
      values = [values[one] * values[other] if one != other else values[one] for one, other in picks]
      if depth:
        branches = [jax.jit(others[0]), others[1]]
        values[1:4] = jax.lax.cond(values[at] > 0, *branches, values)[1:4]
      return values

    return run

  branches = [function(2), function(2)]
  closed = jax.make_jaxpr(lambda *values: jax.lax.cond(values[0] > 0, *branches, list(values)))(
    *range(6)
  )
  [*_, one], _ = equations.flatten(
    closed, [equations.Value(x) for x in closed.in_avals], lambda _: False
  )
  found = outside_loop.result_sources(one, [1 << at for at in range(len(one.inputs))])
  bind = functools.partial(compat.bind, one.primitive, one.params, None)
  avals = list(map(equations.abstract, one.inputs))
  for number, bits in enumerate(found):
    selected = [number == other for other in range(len(found))]
    _, used = compat.pruned(lambda *values: bind(values), avals, selected)
    assert [bool(bits >> at & 1) for at in range(len(used))] == list(used)


def test_update_by_sums_over_all_stages(schedule):
  """A hand-written update with sums over the parameters of all stages."""

  def step(params, x, y):
    loss, grads = accumulate(
      lambda one: jax.value_and_grad(squared)(params, *one), (x, y), schedule, Mean
    )
    size = sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))
    along = sum(jnp.vdot(p, g) for p, g in zip(jax.tree.leaves(params), jax.tree.leaves(grads)))
    rate = 0.1 / (1 + jnp.sqrt(size)) + 0.01 * jnp.tanh(along)
    new = descend(params, grads, rate)
    moved = sum(jnp.sum(jnp.abs(n - p)) for n, p in zip(jax.tree.leaves(new), jax.tree.leaves(params)))
    return new, loss, {'size': size, 'along': along, 'moved': moved}

  check(step, PARAMS, X, Y)


def test_sums_over_the_parameters_of_all_stages(schedule):
  """A penalty for the distance from old weights, and norms of parameters: each rank sums its own, and keeps no other's."""

  def penalized(params, old, x, y):
    distances = jax.tree.map(lambda w, old: jnp.sum((w - old) ** 2), params, old)
    return squared(params, x, y) + 0.01 * sum(jax.tree.leaves(distances))

  def step(state, x, y):
    params, old = state
    loss, grads = accumulate(
      lambda one: jax.value_and_grad(penalized)(*state, *one), (x, y), schedule, Mean
    )
    norms = jax.tree.map(jnp.linalg.norm, params)
    total = jnp.linalg.norm(jnp.stack(jax.tree.leaves(norms)))
    return (descend(params, grads), old), loss, norms, total

  state = PARAMS, jax.tree.map(jnp.sin, PARAMS)
  check(step, state, X, Y)
  [shardings, *_], _ = LAYOUT.pipeline_jit(step).compile(state, X, Y).input_shardings
  devices = [*LAYOUT.mesh.devices.flat]
  for stage, *each in zip(range(STAGES), *map(dict.values, shardings), strict=True):
    assert [{devices.index(device) // 2 for device in one.device_set} for one in each] == [
      {stage},
      {stage},
    ]


def test_gradient_norms_of_stages(schedule):
  def step(params, x, y):
    loss, grads = accumulate(
      lambda one: jax.value_and_grad(squared)(params, *one), (x, y), schedule, Mean
    )
    norms = jnp.stack([jnp.linalg.norm(g) for g in jax.tree.leaves(grads)])
    return descend(params, grads), loss, norms, jnp.linalg.norm(norms)

  check(step, PARAMS, X, Y)


@pytest.mark.exhaustive
def test_train_state(schedule):
  model = Network()
  state = train_state.TrainState.create(
    apply_fn=model.apply,
    params=model.init(jax.random.key(0), X[0])['params'],
    tx=OPTIMIZERS['clipped'],
  )

  def step(state, x, y):
    def loss(params, x, y):
      return jnp.mean((state.apply_fn({'params': params}, x) - y) ** 2)

    value, grads = accumulate(
      lambda one: jax.value_and_grad(loss)(state.params, *one), (x, y), schedule, Mean
    )
    return state.apply_gradients(grads=grads), value

  state, _ = check(step, state, X, Y)
  assert state.step == 2


def test_frozen_dict(schedule):
  step = training(squared, schedule)
  check(step, flax.core.freeze(PARAMS), X, Y)


# -- layouts


class Named(nn.Module):
  """A network whose parameters and activations have names."""

  @nn.compact
  def __call__(self, x):
    for _ in range(STAGES):
      x = spmd.with_logical_constraint(x, ('batch', 'embed'))
      x = x + self.dense('mlp', 'embed', nn.tanh(self.dense('embed', 'mlp', x)))
      x = stage_end(spmd.with_logical_constraint(x, ('batch', 'embed')))
    return x

  def dense(self, rows, columns, x):
    boxed = functools.partial(spmd.with_logical_partitioning, names=(rows, columns))
    layer = nn.Dense(
      WIDTH,
      kernel_init=boxed(nn.initializers.lecun_normal()),
      bias_init=spmd.with_logical_partitioning(nn.initializers.zeros, (columns,)),
    )
    return layer(x)


RULES = {
  'batch over data': (('batch', 'data'),),
  'mlp over data': (('mlp', 'data'),),
  'both over data': (('batch', 'data'), ('mlp', 'data')),
  'fsdp': (('batch', 'data'), spmd.fsdp('data')),
}


def named_state(tx):
  model = Named()

  def init(key, x):
    variables = model.init(key, x)
    return train_state.TrainState.create(apply_fn=model.apply, params=variables['params'], tx=tx)

  return init


def named_step(schedule):
  def step(state, x, y):
    def loss(params, x, y):
      return jnp.mean((state.apply_fn({'params': params}, x) - y) ** 2)

    value, grads = accumulate(
      lambda one: jax.value_and_grad(loss)(state.params, *one), (x, y), schedule, Mean
    )
    return state.apply_gradients(grads=grads), value

  return step


@pytest.mark.exhaustive
@pytest.mark.parametrize('boxed', [True, False], ids=['boxed', 'unboxed'])
@pytest.mark.parametrize('rules', RULES)
def test_layouts(schedule, rules, boxed):
  layout = spmd.Layout({'stage': STAGES, 'data': 2}, RULES[rules])
  init, key = named_state(OPTIMIZERS['clipped']), jax.random.key(0)
  state = layout.init(init, key, X[0], boxed=boxed)
  batch = layout.shard((X, Y), (None, 'batch', None))
  step = named_step(schedule)
  pipelined, one_by_one = layout.pipeline_jit(step), jax.jit(step)
  expected = jax.jit(init)(key, X[0])
  expected = expected if boxed else spmd.unbox(expected)
  before = [leaf.sharding.spec for leaf in jax.tree.leaves(state.params)]
  for _ in range(2):
    (state, loss), (expected, expected_loss) = pipelined(state, *batch), one_by_one(expected, X, Y)
    assert_same((state, loss), (expected, expected_loss))
  for leaf, spec in zip(jax.tree.leaves(state.params), before, strict=True):
    assert leaf.sharding.is_equivalent_to(
      jax.sharding.NamedSharding(leaf.sharding.mesh, spec), leaf.ndim
    )
    assert len(leaf.devices()) == 2


@pytest.mark.exhaustive
def test_layouts_compile_once(schedule):
  """The second call takes the state as the first returned it."""
  layout = spmd.Layout({'stage': STAGES, 'data': 2}, RULES['both over data'])
  state = layout.init(named_state(OPTIMIZERS['adam']), jax.random.key(0), X[0])
  traces = []

  def step(state, x, y):
    traces.append(None)
    return named_step(schedule)(state, x, y)

  pipelined = layout.pipeline_jit(step)
  for _ in range(3):
    state, _ = pipelined(state, *layout.shard((X, Y), (None, 'batch', None)))
  assert len(traces) == 1


@pytest.mark.exhaustive
def test_layouts_donated(schedule):
  layout = spmd.Layout({'stage': STAGES, 'data': 2}, RULES['both over data'])
  init, key = named_state(OPTIMIZERS['adam']), jax.random.key(0)
  state, expected = layout.init(init, key, X[0]), jax.jit(init)(key, X[0])
  step = named_step(schedule)
  pipelined, one_by_one = layout.pipeline_jit(step, donate_argnums=0), jax.jit(step)
  for _ in range(3):
    state, loss = pipelined(state, *layout.shard((X, Y), (None, 'batch', None)))
    expected, expected_loss = one_by_one(expected, X, Y)
    assert_same((state, loss), (expected, expected_loss))


def test_in_and_out_rules(schedule):
  layout = spmd.Layout({'stage': STAGES, 'data': 2}, (('batch', 'data'),))
  rows = PartitionSpec('data', None)
  pipelined = layout.pipeline_jit(
    training(squared, schedule),
    in_rules=(rows, (None, 'batch', None), (None, 'batch', None)),
    out_rules=(rows, None),
  )
  params, batch = layout.shard(PARAMS, rows), layout.shard((X, Y), (None, 'batch', None))
  expected = PARAMS
  for _ in range(2):
    (params, loss), (expected, expected_loss) = (
      pipelined(params, *batch),
      jax.jit(training(squared, schedule))(expected, X, Y),
    )
    assert_same((params, loss), (expected, expected_loss))
  assert {str(leaf.sharding.spec) for leaf in params.values()} <= {str(rows), str(PartitionSpec('data'))}
