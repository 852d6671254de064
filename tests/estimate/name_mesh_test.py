"""The logical names of a step: recorded in a trace, whoever resolves them."""

import random
import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import flax_spmd as spmd
from flax_spmd._src import compat
from flax_spmd._src.active_layout import record_names
from flax_spmd._src.estimate.name_mesh import lower_on_names
from flax_spmd.errors import EstimatorError
from flax_spmd.explore import Estimator, TrainStep
from tests.estimate.partitioners import replace_partitioner

X = jax.ShapeDtypeStruct((8, 16), jnp.float32)


class ManyWays(nn.Module):
  """Names in boxes and constraints, of Flax and of this package."""

  @nn.compact
  def __call__(self, x):
    init = nn.initializers.ones
    w = self.param('w', nn.with_logical_partitioning(init, ('flax_in', 'flax_out')), (16, 16))
    v = self.param('v', spmd.with_logical_partitioning(init, ('in', 'out')), (16, 16))
    x = nn.with_logical_constraint(x @ w, ('flax_batch', 'flax_hidden'))
    x = spmd.with_logical_constraint(x @ v, ('batch', 'hidden'))
    x = spmd.with_sharding_constraint({'x': x}, {'x': ('tree_batch', None)})['x']
    x = spmd.constrain(x, spmd.logical_to_mesh_axes(('spec_batch', None)))
    return spmd.constrain(x, nn.logical_to_mesh_axes(('flax_spec_batch', None)))


NAMES = {
  *('flax_in', 'flax_out', 'in', 'out', 'flax_batch', 'flax_hidden', 'batch', 'hidden'),
  *('tree_batch', 'spec_batch', 'flax_spec_batch'),
}


def create():
  return ManyWays().init(jax.random.key(0), jnp.ones((8, 16)))


@pytest.mark.parametrize('wrap', [lambda apply: apply, jax.jit, jax.checkpoint])
def test_every_name_of_a_model_is_recorded(wrap):
  apply = wrap(ManyWays().apply)
  train_step = TrainStep(lambda state, x: (state, jnp.sum(apply(state, x))), create, X)
  first = Estimator(train_step)
  assert first.names.keys() == NAMES
  assert first.parameter_names == {'flax_in', 'flax_out', 'in', 'out'}
  assert Estimator(train_step).names == first.names  # although JAX has cached the inner trace


def test_names_of_results_and_of_placements_are_recorded():
  def step(state, x):
    return state, spmd.LogicallyPartitioned(x, ('result_batch', None))

  train_step = TrainStep(step, lambda: {'w': jnp.ones(8)}, X, placements=('rows', 'columns'))
  lowering = lower_on_names(train_step, 'cuda')
  mesh = lowering.state['w'].sharding.mesh
  assert {'result_batch', 'rows', 'columns'} <= set(mesh.axis_names)


def test_nothing_is_recorded_after_the_block():
  with record_names() as names:
    nn.logical_to_mesh_axes(('inside', None), ())
  with pytest.raises(ZeroDivisionError), record_names() as others:
    raise ZeroDivisionError
  nn.logical_to_mesh_axes(('outside',), ())
  spmd.logical_to_mesh_axes(('outside',), ())
  assert (names, others) == ({'inside'}, set())


def test_other_threads_are_not_recorded():
  def resolve():
    nn.logical_to_mesh_axes(('elsewhere',), ())
    spmd.logical_to_mesh_axes(('elsewhere',), ())

  with record_names() as names:
    thread = threading.Thread(target=resolve)
    thread.start()
    thread.join()
  assert names == set()


def test_inner_recorders_take_over():
  with record_names() as outer:
    with record_names() as inner:
      spmd.logical_to_mesh_axes(('inner',), ())
    nn.logical_to_mesh_axes(('outer',), ())
  assert (outer, inner) == ({'outer'}, {'inner'})


@pytest.mark.parametrize('mesh', [spmd.make_mesh({'data': 8}), None])
@pytest.mark.parametrize('where', ['state', 'step'])
def test_a_model_with_shard_map_cannot_be_estimated(mesh, where):
  def mapped(here, x):
    if here != where:
      return x
    return jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=jax.P('data'), out_specs=jax.P('data'))(x)

  vector = jax.ShapeDtypeStruct((8,), jnp.float32)
  step = lambda state, x: (state, jnp.sum(mapped('step', x)))
  with pytest.raises(EstimatorError) as error:
    Estimator(TrainStep(step, lambda: {'w': mapped('state', jnp.ones(8))}, vector), platform='cpu')
  assert str(error.value) == (
    'The step uses mesh axes itself, in a shard_map or a constraint, so its logical names alone do not decide its layout.\n'
    'Fix: choose the layouts, and compile them with spmd.compare.'
  )


def test_a_model_that_uses_axes_of_its_layout_cannot_be_estimated():
  def of(layout):
    size = layout.mesh.shape['data']
    return TrainStep(lambda state, x: (state, x / size), lambda: {'w': jnp.ones(8)}, X)

  with pytest.raises(EstimatorError) as error:
    Estimator(of, platform='cpu')
  assert str(error.value) == (
    'The model is built for the axes of a mesh, so its logical names alone do not decide its layout. On a mesh whose '
    "axes are its names, it fails: KeyError: 'data'\n"
    'Fix: choose the layouts, and compile them with spmd.compare.'
  )


@pytest.mark.parametrize('where', ['state', 'step'])
def test_a_model_with_constraints_on_mesh_axes_cannot_be_estimated(where):
  def constrained(here):
    return jax.lax.with_sharding_constraint(jnp.ones(8), jax.P('data')) if here == where else jnp.ones(8)

  vector = jax.ShapeDtypeStruct((8,), jnp.float32)
  step = TrainStep(
    lambda state, x: (state, jnp.sum(x * constrained('step'))),
    lambda: {'w': constrained('state')},
    vector,
  )
  with pytest.raises(EstimatorError) as error:
    Estimator(step, platform='cpu')
  assert str(error.value) == (
    'The step uses mesh axes itself, in a shard_map or a constraint, so its logical names alone do not decide its layout.\n'
    'Fix: choose the layouts, and compile them with spmd.compare.'
  )


def boxed_task(box, names):
  """A step of two products, whose parameters are in boxes with these names."""

  class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
      init = nn.initializers.ones
      v = self.param('v', box(init, names), (16, 64))
      w = self.param('w', box(init, names[::-1]), (64, 16))
      return spmd.with_logical_constraint(jnp.tanh(x @ v) @ w, ('batch', None))

  def step(params, x):
    loss, gradients = jax.value_and_grad(lambda params: jnp.sum(Model().apply(params, x)))(params)
    return jax.tree.map(jnp.subtract, params, gradients), loss

  return TrainStep(step, lambda: Model().init(jax.random.key(0), jnp.ones((8, 16))), X)


@pytest.mark.parametrize('lib', [nn, spmd])
@pytest.mark.parametrize('seed', range(6))
def test_boxes_of_mesh_axes_are_estimated_as_boxes_of_names_with_a_rule_for_each_axis(lib, seed):
  """Logical names and axes in `with_partitioning` refused the estimate of every layout."""
  draw = random.Random(seed)
  names = tuple(draw.sample(['embed', 'hidden', 'model', 'data', None], 2))
  logical, axes = lib.with_logical_partitioning, lib.with_partitioning
  estimators = [Estimator(boxed_task(box, names), platform='cpu') for box in (logical, axes)]
  assert [one.names_as_axes for one in estimators] == [set(), {*names} - {None}]
  assert estimators[0].names == estimators[1].names
  own = [(name, name) for name in names if name in ('model', 'data')]
  mesh = spmd.abstract_mesh({'data': 2, 'model': 4})
  free = [axis for axis in ('data', 'model') if axis not in names]
  for _ in range(4):
    rules = [(name, draw.choice([*free, None])) for name in ('embed', 'hidden') if draw.random() < 0.7]
    rules += [spmd.fsdp('data', min_size=1)] if draw.random() < 0.5 else []
    rules = [*([('batch', 'data')] if draw.random() < 0.8 else []), *rules]
    layouts = [spmd.Layout(mesh, (*extra, *rules), missing_axis='drop') for extra in (own, ())]
    pairs = zip(estimators, layouts, strict=True)
    by_name, by_axis = (one.estimate(layout, 'cpu:8', partition=False) for one, layout in pairs)
    assert by_name._replace(layout=None) == by_axis._replace(layout=None), rules


def test_a_name_that_is_both_an_axis_of_a_box_and_a_logical_name_cannot_be_estimated():
  estimator = Estimator(boxed_task(nn.with_partitioning, ('data', None)), platform='cpu')
  layout = spmd.Layout(spmd.abstract_mesh({'data': 8}), (('data', None),))
  with pytest.raises(EstimatorError, match=r'^The state has mesh axes among its names, '):
    estimator.estimate(layout, 'cpu:8')


@pytest.mark.parametrize(
  'box',
  [
    spmd.Partitioned(jnp.ones((8, 8)), (('data',), 'embed')),
    spmd.LogicallyPartitioned(jnp.ones((8, 8)), (('data',), 'mlp')),
  ],
)
def test_a_state_with_tuples_of_mesh_axes_among_its_names_cannot_be_estimated(box):
  with pytest.raises(EstimatorError) as error:
    Estimator(TrainStep(lambda state, x: (state, x), lambda: {'w': box}, X), platform='cpu')
  assert str(error.value) == (
    'The state has mesh axes among its names, so its logical names alone do not decide its layout.\n'
    'Fix: give each dimension one logical name, or choose the layouts, and compile them with spmd.compare.'
  )


@pytest.mark.parametrize('placements', [jax.P('data'), {'x': ('batch', None), 'y': jax.P(None, 'data')}])
def test_placements_of_a_batch_in_mesh_axes_cannot_be_estimated(placements):
  batch = {'x': X, 'y': X}
  train = TrainStep(
    lambda state, batch: (state, batch['x'] + batch['y']),
    lambda: {'w': jnp.ones(8)},
    batch,
    placements=placements,
  )
  with pytest.raises(EstimatorError) as error:
    Estimator(train, platform='cpu')
  assert str(error.value) == (
    'The placements of the batch have mesh axes, so its logical names alone do not decide its layout.\n'
    "Fix: give its dimensions logical names, such as ('batch', None), or choose the layouts, and compile them with "
    'spmd.compare.'
  )


def test_a_step_with_mesh_axes_needs_the_compiler_of_its_platform(monkeypatch):
  replace_partitioner(monkeypatch, can_partition=lambda platform: False)
  doubled = lambda x: jax.lax.with_sharding_constraint(2 * x, jax.P('data'))
  train = TrainStep(lambda w, x: (w, jnp.sum(x @ doubled(w))), lambda: jnp.ones((8, 8)), X)
  with pytest.raises(EstimatorError) as error:
    Estimator(train, platform='cuda')
  assert str(error.value) == (
    'The step uses mesh axes itself, in a shard_map or a constraint, so its logical names alone do not decide its layout.\n'
    "Fix: pip install 'flax-spmd[cuda]', whose compiler partitions the step for each layout."
  )


def mapped_constraint(draw):
  """A constraint with names under `vmap`s along random dimensions, its shape, and each dimension's name, None for a mapped one."""
  names = ['a', *draw.sample(['b', 'c', None, None], draw.randint(0, 2))]
  draw.shuffle(names)
  function = lambda x: spmd.with_logical_constraint(x, tuple(names))
  dims = list(names)
  for _ in range(draw.randint(1, 2)):
    place = draw.randint(0, len(dims))
    dims.insert(place, 'mapped')
    function = jax.vmap(function, place, place)
  return function, tuple(range(2, 2 + len(dims))), dims


@pytest.mark.parametrize('seed', range(12))
def test_names_stay_at_their_dimensions_in_mapped_functions(seed):
  """JAX leaves a constraint over axes of size 1 at the dimensions that it had before `vmap`."""
  function, shape, dims = mapped_constraint(random.Random(seed))
  x = jax.ShapeDtypeStruct(shape, jnp.float32)
  train_step = TrainStep(
    lambda state, x: (state, function(x)), lambda: jnp.zeros(2), x, placements=(None,)
  )
  equations = compat.equations_in(lower_on_names(train_step, 'cuda').jaxpr, lambda _: True)
  [spec] = [one.params['sharding'].spec for one in equations if 'sharding' in one.params]
  wanted = [PartitionSpec.UNCONSTRAINED if name == 'mapped' else name for name in dims]
  assert [*spec, *[None] * (len(dims) - len(spec))] == wanted
