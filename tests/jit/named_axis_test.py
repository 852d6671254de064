"""Steps that were written for `jax.pmap`: under a layout they compute what `jax.pmap` computes."""

import functools
import inspect
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd.errors import AxisNameError, LayoutError, MeshError, UnmatchedNameError
from tests.texts import text_of

KEY = jax.random.key(0)
TX = optax.sgd(0.1, momentum=0.9)
DATA = spmd.Layout({'data': 8}, (('batch', 'data'),))


class State(TrainState):
  batch_stats: Any


class Net(nn.Module):
  """A convolutional network as it is written for `jax.pmap`."""

  @nn.compact
  def __call__(self, x, train):
    x = nn.Conv(8, (3, 3))(x)
    x = nn.BatchNorm(use_running_average=not train, axis_name='batch')(x)
    x = nn.Dropout(0.5, deterministic=not train)(nn.relu(x))
    return nn.Dense(4)(x.reshape(len(x), -1))


MODEL = Net()


def create():
  variables = MODEL.init(KEY, jnp.ones((1, 4, 4, 3)), False)
  return State.create(apply_fn=MODEL.apply, tx=TX, **variables)


def train_step(state, batch, key):
  key = jax.random.fold_in(key, lax.axis_index('batch'))

  def loss_fn(params):
    logits, new = state.apply_fn(
      {'params': params, 'batch_stats': state.batch_stats},
      batch['x'],
      True,
      rngs={'dropout': key},
      mutable=['batch_stats'],
    )
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch['y']).mean(), new

  (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
  state = state.apply_gradients(grads=lax.pmean(grads, 'batch'), **new)
  return state, {'loss': lax.pmean(loss, 'batch'), 'examples': lax.psum(len(batch['y']), 'batch')}


def batches(steps=2):
  for number in range(steps):
    x = jax.random.normal(jax.random.key(number), (16, 4, 4, 3))
    yield {'x': np.asarray(x), 'y': np.arange(16) % 4}


def by_device(tree, devices=8):
  """A batch with the dimension of devices that `jax.pmap` takes."""
  return jax.tree.map(lambda x: x.reshape(devices, len(x) // devices, *x.shape[1:]), tree)


def check_close(actual, expected):
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), actual, expected)


@functools.cache
def trained_by_pmap(devices):
  step = jax.pmap(
    train_step, axis_name='batch', in_axes=(None, 0, None), devices=jax.devices()[:devices]
  )
  state, losses = create(), []
  for batch in batches():
    state, metrics = step(state, by_device(batch, devices), KEY)
    state = jax.tree.map(lambda x: np.asarray(x)[0], state)
    losses.append(metrics['loss'][0])
  return state, losses


SLOW = pytest.mark.slow
FSDP = spmd.fsdp('fsdp', min_size=1)
LAYOUTS = [
  pytest.param(DATA, 8, id='data', marks=pytest.mark.exhaustive),
  pytest.param(
    spmd.Layout({'fsdp': 8}, (('batch', 'fsdp'), FSDP)), 8, id='fsdp', marks=pytest.mark.exhaustive
  ),
  pytest.param(
    spmd.Layout({'data': 2, 'fsdp': 4}, (('batch', ('data', 'fsdp')), FSDP)),
    8,
    id='two axes',
    marks=SLOW,
  ),
  pytest.param(
    spmd.Layout({'data': 4, 'model': 2}, (('batch', 'data'), ('Dense_0/kernel$', P('model', None)))),
    4,
    id='tensor',
    marks=SLOW,
  ),
  pytest.param(spmd.Layout({'data': 8}, (('batch', None),)), 1, id='one group', marks=SLOW),
]


@pytest.mark.parametrize(('layout', 'groups'), LAYOUTS)
def test_states_and_metrics_are_those_of_pmap_under_any_layout(layout, groups):
  step = layout.jit(train_step, axis_name='batch', in_axes=(None, 0, None), donate_argnums=0)
  state, losses = layout.init(create), []
  shardings = jax.tree.map(lambda x: x.sharding, state)
  for batch in batches():
    state, metrics = step(state, layout.shard(batch, P(layout.rules.spec(('batch',))[0])), KEY)
    losses.append(metrics['loss'])
    assert metrics['examples'] == 16
  expected, expected_losses = trained_by_pmap(groups)
  np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
  check_close(state, expected)
  assert jax.tree.map(lambda x: x.sharding, state) == shardings


def test_gradients_cost_one_reduction_each_and_convolutions_gather_nothing():
  def step(state, batch, *, reduce):
    def loss_fn(params):
      variables = {'params': params, 'batch_stats': state.batch_stats}
      logits = state.apply_fn(variables, batch['x'], False)
      return optax.softmax_cross_entropy_with_integer_labels(logits, batch['y']).mean()

    loss, grads = reduce(jax.value_and_grad(loss_fn)(state.params))
    return state.apply_gradients(grads=grads), loss

  grouped = functools.partial(step, reduce=lambda x: lax.pmean(x, 'batch'))
  jitted = [DATA.jit(functools.partial(step, reduce=lambda x: x)), DATA.jit(grouped, axis_name='batch')]
  arguments = DATA.init(create), DATA.shard(next(batches()), P('data'))
  plain, in_groups = (
    [one.collective.kind for one in each.explain(*arguments).collectives] for each in jitted
  )
  assert plain == in_groups
  assert set(plain) == {'all-reduce'}


REDUCTIONS = {
  'psum': lambda x: lax.psum(x, 'batch'),
  'pmean': lambda x: lax.pmean(x, 'batch'),
  'pmax': lambda x: lax.pmax(x, 'batch'),
  'pmin': lambda x: lax.pmin(x, 'batch'),
  'all_gather': lambda x: lax.all_gather(x, 'batch'),
  'tiled all_gather': lambda x: lax.all_gather(x, 'batch', axis=1, tiled=True),
  'axis_size': lambda x: jnp.float32(lax.axis_size('batch')),
  'psum of 1': lambda x: jnp.float32(lax.psum(1, 'batch')),
  'softmax over all': lambda x: lax.psum(jnp.exp(x - lax.pmax(x, 'batch')), 'batch'),
  'grad of a sum': lambda x: lax.psum(jax.grad(lambda x: jnp.sum(lax.psum(x**2, 'batch')))(x), 'batch'),
  'grad of a mean': lambda x: lax.psum(
    jax.grad(lambda x: jnp.sum(lax.pmean(x, 'batch') ** 2))(x), 'batch'
  ),
}
BY_DEVICE = {
  'axis_index': lambda x: x + lax.axis_index('batch'),
  'ppermute': lambda x: lax.ppermute(x, 'batch', [(i, (i + 1) % 8) for i in range(8)]),
  'all_to_all': lambda x: lax.all_to_all(x, 'batch', 1, 1, tiled=True),
  'psum_scatter': lambda x: lax.psum_scatter(x, 'batch', scatter_dimension=1, tiled=True),
  'folded key': lambda x: jax.random.normal(jax.random.fold_in(KEY, lax.axis_index('batch')), x.shape),
  'cumsum': lambda x: jnp.cumsum(x, axis=0),
  'sort': lambda x: jnp.sort(x, axis=0),
  'without reduction': lambda x: x - x.mean(0, keepdims=True),
  'grad without reduction': jax.grad(lambda x: jnp.sum(lax.pmean(x, 'batch') * x)),
}


@pytest.mark.parametrize('name', REDUCTIONS)
def test_equal_results_are_returned_once(name):
  x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
  fn = REDUCTIONS[name]
  expected = jax.pmap(fn, axis_name='batch')(by_device(x))
  actual = DATA.jit(fn, axis_name='batch', in_axes=0)(DATA.shard(x, P('data')))
  assert actual.shape == expected.shape[1:]
  for each in np.asarray(expected):
    np.testing.assert_allclose(actual, each, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('name', BY_DEVICE)
def test_results_of_groups_are_joined_along_out_axes(name):
  x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
  fn = BY_DEVICE[name]
  expected = np.asarray(jax.pmap(fn, axis_name='batch')(by_device(x)))
  actual = DATA.jit(fn, axis_name='batch', in_axes=0, out_axes=0)(DATA.shard(x, P('data')))
  np.testing.assert_allclose(actual, np.concatenate(list(expected)), rtol=1e-5, atol=1e-6)


def test_in_axes_and_out_axes_are_prefix_trees():
  def fn(state, batch, *, scale):
    y = batch['x'] * scale + state
    return {'sum': lax.psum(y.sum(), 'batch'), 'rows': y.T, 'largest': y.max()}

  x = np.arange(32.0, dtype=np.float32).reshape(2, 16)
  jitted = DATA.jit(
    fn,
    axis_name='batch',
    in_axes={'state': None, 'batch': {'x': -1, 'offset': None}, 'scale': None},
    out_axes={'sum': None, 'rows': 0, 'largest': 0},
  )
  result = jitted(1.0, {'x': x, 'offset': 3.0}, scale=2.0)
  y = x * 2 + 1
  assert result['sum'] == y.sum()
  np.testing.assert_array_equal(result['rows'], y.T)
  np.testing.assert_array_equal(result['largest'], y.reshape(2, 8, 2).max((0, 2)))


def test_the_decorator_takes_axes_too():
  @DATA.jit(axis_name='batch', static_argnames='scale')
  def step(state, batch, scale=1):
    return state + lax.pmean(batch.mean(), 'batch') * scale

  assert step(1.0, np.arange(16.0)) == 8.5
  assert step(1.0, np.arange(16.0), scale=2) == 16


def test_objects_that_are_no_arrays_are_passed_whole():
  step = DATA.jit(
    lambda state, batch, function: function(state, lax.pmean(batch.mean(), 'batch')),
    axis_name='batch',
    in_axes=(None, 0, None),
  )
  assert step(2.0, np.arange(16.0), jnp.maximum) == 7.5


def test_an_axis_of_the_mesh_needs_no_rule():
  layout = spmd.Layout({'data': 4, 'model': 2})
  assert (
    layout.jit(lambda x: lax.psum(1, 'data') * lax.psum(x.sum(), 'data'), axis_name='data', in_axes=0)(
      np.ones(8)
    )
    == 32
  )


class Annotated(nn.Module):
  @nn.compact
  def __call__(self, x):
    init = nn.initializers.lecun_normal()
    w = self.param('w', nn.with_logical_partitioning(init, ('embed', 'mlp')), (8, 8))
    v = self.param('v', spmd.with_logical_partitioning(init, ('mlp', 'embed')), (8, 8))
    x = nn.with_logical_constraint(x @ w, ('batch', 'mlp'))
    return spmd.with_logical_constraint(x @ v, ('batch', 'embed'))


@pytest.mark.parametrize('embed', ['data', None])
def test_constraints_and_boxes_inside_leave_the_axes_of_the_groups_out(embed):
  layout = spmd.Layout({'data': 4, 'model': 2}, (('batch', 'data'), ('mlp', 'model'), ('embed', embed)))
  x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
  variables = layout.init(Annotated().init, KEY, x)

  def grads_of(variables, x):
    return jax.grad(lambda v: jnp.mean(jnp.asarray(Annotated().apply(v, x)) ** 2))(variables)

  def step(variables, x):
    return lax.pmean(grads_of(variables, x), 'batch')

  plain = layout.jit(grads_of)
  batch = layout.shard(x, ('batch', None))
  grads = layout.jit(step, axis_name='batch')(variables, batch)
  check_close(grads, plain(variables, batch))
  assert jax.tree.map(lambda x: x.sharding, grads) == jax.tree.map(lambda x: x.sharding, variables)


def test_a_strict_layout_and_explain_accept_it():
  layout = DATA.replace(strict=True)
  step = layout.jit(train_step, axis_name='batch', in_axes=(None, 0, None))
  arguments = layout.init(create), layout.shard(next(batches()), P('data')), KEY
  step(*arguments)
  assert not step.explain(*arguments).second_call.compiles


def test_keys_of_devices_are_parts_of_one_key():
  keys = jax.random.split(KEY, 8)
  draw = DATA.jit(
    lambda keys: jax.random.normal(keys[0], (2,)), axis_name='batch', in_axes=0, out_axes=0
  )
  expected = jax.pmap(lambda key: jax.random.normal(key, (2,)), axis_name='batch')(keys)
  np.testing.assert_array_equal(draw(keys), np.concatenate(list(np.asarray(expected))))


@pytest.mark.parametrize(
  'of_state',
  [
    lambda w: jnp.arange(16.0)[jax.random.randint(KEY, w.shape[:1], 0, 16) + jnp.argmax(w)],
    lambda w: w @ w,
    lambda w: lax.conv(w[None, None], w[None, None], (1, 1), 'SAME'),
  ],
)
def test_operands_that_every_group_has_whole(of_state):
  """A table at random steps, say, or an optimizer that multiplies matrices."""
  w, x = jnp.ones((4, 4)), np.arange(16.0, dtype=np.float32)

  def step(w, x):
    return lax.pmean(of_state(w).sum() * x.mean(), 'batch')

  expected = jax.pmap(step, axis_name='batch', in_axes=(None, 0))(w, x.reshape(8, 2))[0]
  result = DATA.jit(step, axis_name='batch', in_axes=(None, 0))(DATA.replicate(w), x)
  np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.parametrize('impl', ['rbg', 'unsafe_rbg'])
def test_rbg_keys_draw_different_numbers_in_each_part(impl):
  def draw(key, x):
    return jax.random.uniform(jax.random.fold_in(key, lax.axis_index('batch')), x.shape)

  drawn = DATA.jit(draw, axis_name='batch', out_axes=0)(jax.random.key(0, impl=impl), np.ones((16, 4)))
  assert len(np.unique(drawn)) == 16 * 4


X = np.ones((16, 4), np.float32)


def test_results_that_differ_are_all_named():
  step = DATA.jit(lambda w, x: {'loss': x.mean(), 'rows': x, 'w': w}, axis_name='batch')
  assert text_of(LayoutError, step, 1.0, X) == (
    "result loss differs between the groups of axis 'batch'.\n"
    "result rows differs between the groups of axis 'batch'.\n"
    "Fix: reduce it in the function, lax.pmean(x, 'batch'), or pass out_axes: 0 joins the parts of all groups along "
    'dimension 0.'
  )


def test_arguments_that_cannot_be_split_are_all_named():
  step = DATA.jit(lambda state, batch: lax.pmean(1.0, 'batch'), axis_name='batch')
  assert text_of(LayoutError, step, 1.0, {'x': np.ones((12, 4)), 'lr': 0.1}) == (
    'argument batch/lr: in_axes has 0, but its rank is 0.\n'
    "argument batch/x, dim 0: size 12 is not divisible by the 8 groups of axis 'batch' (mesh axis 'data' of size 8).\n"
    'Fix: pass None in in_axes for an array that every group gets whole.\n'
    'Fix: pad or drop rows of the batch, or pass None in in_axes for an array that every group gets whole.'
  )


def test_only_a_state_and_a_batch_need_no_in_axes():
  step = DATA.jit(lambda state, batch, key: state, axis_name='batch')
  assert text_of(LayoutError, step, 1.0, X, KEY) == (
    "axis_name='batch' without in_axes is for a function of a state and a batch, but this call has 3 arguments.\n"
    'Fix: pass in_axes with an entry per argument: 0 to split its arrays along dimension 0, None to pass it whole.'
  )


@pytest.mark.parametrize('in_axes', [(None, 0), (None, 0, None, 0), {'state': None, 'batch': 0}])
def test_every_argument_has_an_entry(in_axes):
  step = DATA.jit(lambda state, batch, key: state, axis_name='batch', in_axes=in_axes)
  text = text_of(LayoutError, step, 1.0, X, KEY)
  assert "but the call passes 'state', 'batch', 'key'.\nFix: give one entry per argument" in text


def test_entries_are_dimensions():
  step = DATA.jit(lambda state, batch: state, axis_name='batch', in_axes=(None, P('data')))
  assert text_of(LayoutError, step, 1.0, X) == (
    "in_axes=((None, P('data',)), {}) is not a prefix of the arguments: P('data',) is neither a dimension nor None.\n"
    'Fix: pass a dimension or None for each of the arguments, or a tree of these that is a prefix of it.'
  )


def test_out_axes_fit_the_result():
  step = DATA.jit(lambda state, batch: (state, batch), axis_name='batch', out_axes=(None, 2))
  assert text_of(LayoutError, step, 1.0, X) == (
    'result 1: out_axes has 2, but its rank is 2.\n'
    'Fix: pass 0 in out_axes, or None for a result that is equal in all groups.'
  )
  step = DATA.jit(lambda state, batch: state, axis_name='batch', out_axes=(None, 0))
  assert 'out_axes=(None, 0) is not a prefix of the result: ' in text_of(LayoutError, step, 1.0, X)


def test_a_name_without_mesh_axes_is_an_error():
  assert text_of(UnmatchedNameError, DATA.jit(lambda w, x: w, axis_name='btch'), 1.0, X) == (
    "axis_name 'btch' has no rule, and is no axis of the mesh {'data': 8}. Did you mean 'batch'?\n"
    "Fix: add a rule with the mesh axes of the batch, such as ('btch', 'data')."
  )


def test_a_mesh_with_explicit_axes_is_refused():
  mesh = spmd.make_mesh({'data': 8}, axis_types=AxisType.Explicit)
  step = spmd.Layout(mesh).jit(lambda s, x: lax.pmean(s * x, 'data'), axis_name='data')
  assert text_of(MeshError, step, 2.0, X) == (
    "axis_name='data' is not supported on the mesh {'data': 8}, which has Explicit axes: JAX cannot reduce over an "
    'axis name there.\nFix: make the mesh with Auto axes.'
  )


def test_axes_need_a_name():
  assert text_of(LayoutError, DATA.jit, lambda w, x: w, in_axes=(None, 0)) == (
    'axis_name is None, which is not the name of an axis.\n'
    "Fix: pass the name that the function reduces over, such as axis_name='batch'."
  )


def line_of(fn, text):
  lines, first = inspect.getsourcelines(fn)
  return first + next(number for number, line in enumerate(lines) if text in line)


UNBOUND_FIX = (
  "\nFix: for a step that was written for jax.pmap, pass axis_name='batch' to layout.jit or TrainStep. In a function "
  'that creates a state, or under pipeline_jit, omit the axis name: the function computes the whole batch.'
)


def test_an_axis_name_that_is_not_bound_is_an_error_with_module_and_line():
  state, batch = DATA.init(create), next(batches())
  line = line_of(Net, 'nn.BatchNorm')

  def step(state, batch):
    def loss(params):
      variables = {'params': params, 'batch_stats': state.batch_stats}
      return Net().apply(variables, batch['x'], True, rngs={'dropout': KEY}, mutable=True)[0].sum()

    return jax.grad(loss)(state.params)

  assert text_of(AxisNameError, DATA.jit(step), state, batch) == (
    f"The axis name 'batch' is not bound, but module BatchNorm_0 at named_axis_test.py:{line} uses it."
    + UNBOUND_FIX
  )


@pytest.mark.parametrize('call', ['jit', 'init', 'plan', 'abstract', 'pipeline_jit'])
def test_an_axis_name_that_is_not_bound_is_an_error_everywhere(call):
  def mean(x):
    return lax.pmean(x, 'batch')

  layout = spmd.Layout({'stage': 2, 'data': 4}, (('batch', 'data'),))
  line = line_of(mean, 'lax.pmean')
  run = getattr(layout, call)
  run = run(mean) if 'jit' in call else functools.partial(run, mean)
  assert text_of(AxisNameError, run, X) == (
    f"The axis name 'batch' is not bound, but named_axis_test.py:{line} uses it." + UNBOUND_FIX
  )


def test_other_name_errors_are_the_functions_own():
  with pytest.raises(NameError, match='undefined_name') as caught:
    DATA.jit(lambda x: undefined_name)(X)  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
  assert not isinstance(caught.value, AxisNameError)


def test_parts_of_an_axis_are_refused():
  def fn(x):
    return lax.psum(x, 'batch', axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]])

  line = line_of(fn, 'lax.psum')
  assert text_of(LayoutError, DATA.jit(fn, axis_name='batch', in_axes=0), X) == (
    f'axis_index_groups is not supported under axis_name, but named_axis_test.py:{line} uses it.\n'
    'Fix: omit it, to reduce over the whole axis.'
  )


@pytest.mark.parametrize('wrap', [lambda fn: fn, lambda fn: functools.partial(fn, 1.0)])
@pytest.mark.parametrize('way', ['jit', 'pipeline_jit', 'TrainStep'])
def test_a_function_of_pmap_is_an_error_with_the_function_to_pass(way, wrap):
  def step(state, x):
    return state, jax.lax.pmean(jnp.mean(x), 'batch')

  layout = spmd.Layout({'data': 8}, (('batch', 'data'),))
  mapped = wrap(jax.pmap(step, axis_name='batch', donate_argnums=0))
  train = spmd.explore.TrainStep(
    mapped, lambda: jnp.ones(8), jax.ShapeDtypeStruct((8,), jnp.float32), axis_name='batch'
  )
  run = {
    'jit': lambda: layout.jit(mapped, axis_name='batch'),
    'pipeline_jit': lambda: layout.pipeline_jit(mapped),
  }
  with pytest.raises(spmd.errors.LayoutError) as error:
    run.get(way, lambda: train.jitted(layout))()
  assert str(error.value) == (
    'step is a function of jax.pmap, which has a dimension of devices on every argument.\n'
    'Fix: pass the function itself, step.__wrapped__, with axis_name and in_axes as of jax.pmap, and arguments '
    'without this dimension.'
  )
  state, mean = layout.jit(step, axis_name='batch')(jnp.ones(8), jnp.arange(8.0))
  assert mean == 3.5 and (state == 1).all()
