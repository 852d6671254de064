"""Arguments of pipelined functions: frozen, closed-over, donated, static, on other devices, of new shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import flax_spmd as spmd
from flax_spmd.pipeline import (
  Mean,
  accumulate,
  stage_end,
)
from tests.pipeline.cases import (
  LAYOUT,
  MICROBATCHES,
  OPTIMIZERS,
  PARAMS,
  STAGES,
  TOKENS,
  WIDTH,
  X,
  Y,
  assert_same,
  check,
  check_each,
  cross_entropy,
  descend,
  mlp,
  optimizing,
  squared,
  training,
  weight,
)

# -- frozen parameters and closed-over arrays


def test_stop_gradient(schedule):
  def loss(params, x, y):
    return squared({**params, 'w1': lax.stop_gradient(params['w1'])}, x, y)

  params, _ = check(training(loss, schedule), PARAMS, X, Y)
  assert_same(params['w1'], PARAMS['w1'])


def test_stop_gradient_between_stages(schedule):
  def loss(params, x, y):
    h = stage_end(jnp.tanh(x @ params['w0']))
    h = stage_end(lax.stop_gradient(jnp.tanh(h @ params['w1'])))
    h = stage_end(jnp.tanh(h @ params['w2']))
    return jnp.mean((stage_end(jnp.tanh(h @ params['w3'])) - y) ** 2)

  check(training(loss, schedule), PARAMS, X, Y)


def test_gradients_of_some_parameters(schedule):
  """Adapters: the frozen parameters are not arguments of the loss."""

  def step(state, x, y):
    trained, frozen = state
    grad = jax.value_and_grad(lambda trained, x, y: squared({**frozen, **trained}, x, y))
    loss, grads = accumulate(lambda one: grad(trained, *one), (x, y), schedule, Mean)
    return (descend(trained, grads), frozen), loss

  trained = {name: PARAMS[name] for name in ('w0', 'w2')}
  frozen = {name: PARAMS[name] for name in ('w1', 'w3')}
  check(step, (trained, frozen), X, Y)


def test_unused_parameters_and_arrays_passed_through(schedule):
  def step(state, x, y):
    params, kept = state
    params, loss = training(squared, schedule)(params, x, y)
    return (params, kept), loss

  check(step, ({**PARAMS, 'unused': weight(30, 3, 3)}, jnp.arange(3)), X, Y)


@pytest.mark.parametrize('donated', [None, 1])
def test_an_argument_through_stage_ends_of_a_function_without_a_loop(donated):
  """It returns as it came, with its shape and sharding."""

  def predict(params, x, y):
    h, passed = x, y
    for number in range(STAGES):
      h, passed, constant = stage_end((jnp.tanh(h @ params[f'w{number}']), passed, 2.0))
    return h, passed, constant

  batch = LAYOUT.shard((X[0], Y[0]), ('batch', None))
  result = LAYOUT.pipeline_jit(predict, donate_argnums=donated)(PARAMS, *batch)
  assert_same(result, jax.jit(predict)(PARAMS, X[0], Y[0]))
  assert result[1].sharding.spec == batch[1].sharding.spec


def test_a_closed_over_array_is_a_result_of_a_function_without_a_loop():
  closed_over = jnp.arange(5.0)

  def predict(params, x):
    for number in range(STAGES):
      x = stage_end(jnp.tanh(x @ params[f'w{number}']))
    return x, closed_over

  assert_same(LAYOUT.pipeline_jit(predict)(PARAMS, X[0]), jax.jit(predict)(PARAMS, X[0]))


@pytest.mark.parametrize('frozen', ['masked', 'multi_transform'])
def test_optimizer_of_some_parameters(schedule, frozen):
  labels = {'w0': 'train', 'w1': 'freeze', 'w2': 'train', 'w3': 'freeze'}
  adam = optax.adam(1e-2, eps=1e-3)
  if frozen == 'masked':
    tx = optax.chain(
      adam, optax.masked(optax.set_to_zero(), jax.tree.map(lambda label: label == 'freeze', labels))
    )
  else:
    tx = optax.multi_transform({'train': adam, 'freeze': optax.set_to_zero()}, labels)
  (params, _), _ = check(optimizing(tx, schedule), (PARAMS, tx.init(PARAMS)), X, Y)
  assert_same(params['w1'], PARAMS['w1'])


@pytest.mark.parametrize('rows', [1, WIDTH, 100 * WIDTH], ids=['small', 'square', 'large'])
@pytest.mark.parametrize('kind', [np.asarray, jnp.asarray], ids=['numpy', 'jax'])
def test_closed_over_arrays(schedule, rows, kind):
  """Small ones are literals of the program, others its constants; the first and last stages use them."""
  closed = kind(np.random.default_rng(0).normal(size=(rows, WIDTH)).astype(np.float32) / rows)

  def loss(params, x, y):
    return jnp.mean((mlp(params, x + closed.sum(0, keepdims=True)) * closed[:1] - y) ** 2)

  check(training(loss, schedule), PARAMS, X, Y)


def test_closed_over_array_after_the_loop(schedule):
  rates = jnp.linspace(0.1, 0.2, WIDTH)[None]

  def step(params, x, y):
    loss, grads = accumulate(
      lambda one: jax.value_and_grad(squared)(params, *one), (x, y), schedule, Mean
    )
    return jax.tree.map(lambda p, g: p - rates * g, params, grads), loss, rates

  check(step, PARAMS, X, Y)


def test_closed_over_parameters(schedule):
  """Nothing of the model is an argument."""

  def step(count, x, y):
    loss, grads = accumulate(
      lambda one: jax.value_and_grad(squared)(PARAMS, *one), (x, y), schedule, Mean
    )
    return count + 1, loss, grads

  check(step, jnp.int32(0), X, Y)


# -- calls


def copied(tree):
  return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), tree)


@pytest.mark.parametrize('name', ['sgd', 'clipped', 'MultiSteps'])
def test_donated(schedule, name):
  tx = OPTIMIZERS[name]
  step = optimizing(tx, schedule)
  pipelined, one_by_one = LAYOUT.pipeline_jit(step, donate_argnums=0), jax.jit(step)
  expected = PARAMS, tx.init(PARAMS)
  result = copied(expected)
  for number in range(3):
    old = result
    result, loss = pipelined(result, X, Y)
    expected, expected_loss = one_by_one(expected, X, Y)
    assert_same((copied(result), loss), (expected, expected_loss))  # JAX 0.11 keeps what numpy has read
    if number:  # placed by the first call
      own = [leaf for leaf in jax.tree.leaves(old[0]) if leaf.sharding.addressable_devices]
      assert all(leaf.is_deleted() for leaf in own)
  assert not any(leaf.is_deleted() for leaf in (X, Y))


def test_donated_by_name(schedule):
  step = training(squared, schedule)
  named = lambda state, x, y: step(state, x, y)
  pipelined = LAYOUT.pipeline_jit(named, donate_argnames='state')
  expected, result = PARAMS, copied(PARAMS)
  for _ in range(3):
    result, loss = pipelined(state=result, x=X, y=Y)
    expected, expected_loss = jax.jit(named)(expected, X, Y)
    assert_same((result, loss), (expected, expected_loss))


def test_donated_and_passed_through(schedule):
  """A donated argument that is returned unchanged is not overwritten."""

  def step(state, x, y):
    params, _, kept = state
    new, loss = training(squared, schedule)(params, x, y)
    return (new, params, kept), loss

  pipelined = LAYOUT.pipeline_jit(step, donate_argnums=0)
  expected = PARAMS, jax.tree.map(jnp.zeros_like, PARAMS), jnp.arange(3)
  result = copied(expected)
  for _ in range(3):
    result, loss = pipelined(result, X, Y)
    expected, expected_loss = jax.jit(step)(expected, X, Y)
    assert_same((result, loss), (expected, expected_loss))


def test_frozen_arguments(schedule):
  """An argument that is returned unchanged is then on the ranks that use it; one that no rank uses stays where it was."""
  frozen = {name: np.asarray(value) for name, value in PARAMS.items()}  # as a file reader returns them

  def step(state, x, y):
    deltas, frozen, scale, unused = state

    def loss(deltas, x, y):
      return squared(jax.tree.map(lambda w, delta: w + scale * delta, frozen, deltas), x, y)

    deltas, value = training(loss, schedule)(deltas, x, y)
    return (deltas, frozen, scale, unused), value

  state = jax.tree.map(jnp.zeros_like, PARAMS), frozen, 2.0, jnp.arange(3)
  (_, kept, scale, unused), _ = check(step, state, X, Y, donate_argnums=0)
  for stage, name in enumerate(sorted(kept)):
    assert kept[name].sharding.device_set == {*LAYOUT.mesh.devices[stage]}
  assert len(unused.devices()) == 1
  (_, again, _, _), _ = LAYOUT.pipeline_jit(step)((PARAMS, kept, scale, unused), X, Y)
  local = [name for name in kept if kept[name].addressable_shards]
  assert all(again[name] is kept[name] for name in local)  # nothing was moved


def test_donated_and_tied(schedule):
  params = {**PARAMS, 'embedding': weight(9, 64)}

  def loss(params, tokens):
    return cross_entropy(mlp(params, params['embedding'][tokens]) @ params['embedding'].T, tokens)

  step = training(loss, schedule)
  pipelined, expected, result = LAYOUT.pipeline_jit(step, donate_argnums=0), params, copied(params)
  for _ in range(3):
    result, result_loss = pipelined(result, TOKENS)
    expected, expected_loss = jax.jit(step)(expected, TOKENS)
    assert_same((result, result_loss), (expected, expected_loss))


def test_nothing_else_is_donated(schedule):
  """A step does not change a state that is not donated."""
  step = optimizing(OPTIMIZERS['adam'], schedule)
  pipelined = LAYOUT.pipeline_jit(step)
  first, _ = pipelined((PARAMS, OPTIMIZERS['adam'].init(PARAMS)), X, Y)
  before = jax.tree.map(np.array, first)
  again = [pipelined(first, X, Y) for _ in range(2)]
  assert_same(first, jax.tree.map(jnp.asarray, before))
  assert_same(again[1], again[0], 0)


def test_static_arguments(schedule):
  def step(params, x, y, power, *, name='loss'):
    loss = lambda params, x, y: jnp.mean(jnp.abs(mlp(params, x) - y) ** power)
    params, value = training(loss, schedule)(params, x, y)
    return params, {name: value}

  options = dict(static_argnums=3, static_argnames='name')
  one_by_one, pipelined = jax.jit(step, **options), LAYOUT.pipeline_jit(step, **options)
  for power, name in [(2, 'loss'), (3, 'loss'), (2, 'other'), (2, 'loss')]:
    assert_same(pipelined(PARAMS, X, Y, power, name=name), one_by_one(PARAMS, X, Y, power, name=name))
  assert_same(pipelined(PARAMS, X, Y, power=3), one_by_one(PARAMS, X, Y, power=3))


@pytest.mark.exhaustive
def test_keyword_arguments(schedule):
  def step(params, *, batch, rate=0.1, offset=None):
    loss, grads = accumulate(
      lambda one: jax.value_and_grad(squared)(params, *one), batch, schedule, Mean
    )
    return descend(params, grads, rate), loss if offset is None else loss + offset

  one_by_one, pipelined = jax.jit(step), LAYOUT.pipeline_jit(step)
  for kwargs in [{}, {'rate': 0.2}, {'rate': jnp.float32(0.2)}, {'offset': 3}, {}]:
    kwargs = {'batch': (X, Y), **kwargs}
    assert_same(pipelined(PARAMS, **kwargs), one_by_one(PARAMS, **kwargs))


def test_python_numbers(schedule):
  def step(params, x, y, rate):
    loss, grads = accumulate(
      lambda one: jax.value_and_grad(squared)(params, *one), (x, y), schedule, Mean
    )
    return descend(params, grads, rate), loss, rate, 2 * rate

  check_each(step, PARAMS, [(X, Y, 0.1), (X, Y, 0.2), (X, Y, 1)])


def test_results_of_every_kind(schedule):
  """Arguments, constants, numbers, None, and one value twice."""

  def step(params, x, y):
    new, loss = training(squared, schedule)(params, x, y)
    rest = {'old': params, 'x': x, 'number': 3, 'pi': 3.14, 'array': jnp.arange(3), 'numpy': np.ones(2)}
    return new, loss, loss, new['w0'], None, rest, x.shape[0], jnp.sum(x)

  check(step, PARAMS, X, Y)


def test_numpy_arguments(schedule):
  params, x, y = jax.tree.map(np.asarray, (PARAMS, X, Y))

  def step(params, x, y):
    new, loss = training(squared, schedule)(params, x, y)
    return new, loss, x

  check(step, params, x, y)


def test_arguments_on_other_devices(schedule):
  last = jax.device_put((X, Y), jax.devices()[-1])
  step = training(squared, schedule)
  result = LAYOUT.pipeline_jit(step)(jax.device_put(PARAMS, jax.devices()[3]), *last)
  assert_same(result, jax.jit(step)(PARAMS, X, Y))


def test_shapes_change(schedule):
  """Shapes that alternate from call to call."""
  step = training(squared, schedule)
  calls = [(X, Y), (X[:, :4], Y[:, :4]), (X, Y), (X[:2], Y[:2]), (X[:, :4], Y[:, :4])]
  check_each(step, PARAMS, calls)


def test_placement_changes(schedule):
  step = training(squared, schedule)
  whole, apart = LAYOUT.replicate((X, Y)), LAYOUT.shard((X, Y), (None, 'batch', None))
  check_each(step, PARAMS, [(X, Y), apart, whole, apart])


def test_dtypes_change(schedule):
  step = training(squared, schedule)
  check_each(step, PARAMS, [(X, Y), (X.astype(jnp.bfloat16), Y), (X, Y)], tolerance=2e-2)


def test_lowered_from_shapes(schedule):
  """Compiled without arrays, and then called with them."""
  step = training(squared, schedule)
  shapes = jax.eval_shape(lambda: (PARAMS, X, Y))
  compiled = LAYOUT.pipeline_jit(step).lower(*shapes).compile()
  assert_same(compiled(PARAMS, X, Y), jax.jit(step)(PARAMS, X, Y))
  result, seconds = compiled.measure(PARAMS, X, Y)
  assert_same(result, jax.jit(step)(PARAMS, X, Y))
  assert len(seconds) >= 2 * STAGES * MICROBATCHES - MICROBATCHES


def test_decorator(schedule):
  @LAYOUT.pipeline_jit
  def step(params, x, y):
    """Trains."""
    return training(squared, schedule)(params, x, y)

  assert step.__doc__ == 'Trains.'
  assert_same(step(PARAMS, X, Y), jax.jit(training(squared, schedule))(PARAMS, X, Y))


def test_two_pipelines_of_one_function(schedule):
  """JAX caches traces, which must not depend on a layout."""
  step = training(squared, schedule)
  narrow = spmd.Layout(spmd.make_mesh({'stage': STAGES}, devices=jax.devices()[:STAGES]))
  expected = jax.jit(step)(PARAMS, X, Y)
  assert_same(LAYOUT.pipeline_jit(step)(PARAMS, X, Y), expected)
  assert_same(narrow.pipeline_jit(step)(PARAMS, X, Y), expected)
  assert_same(jax.jit(step)(PARAMS, X, Y), expected, 0)


def test_train_then_evaluate(schedule):
  """A state of one pipeline is an argument of another, and of plain functions."""
  params, _ = LAYOUT.pipeline_jit(training(squared, schedule))(PARAMS, X, Y)
  expected, _ = jax.jit(training(squared, schedule))(PARAMS, X, Y)
  assert_same(LAYOUT.pipeline_jit(mlp)(params, X[0]), jax.jit(mlp)(expected, X[0]))
  gathered = spmd.gather(params)
  assert_same(jax.jit(mlp)(gathered, X[0]), jax.jit(mlp)(expected, X[0]))
