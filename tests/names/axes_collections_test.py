"""Axes collections: the names of `flax.linen.partitioning`, wherever they are in a state; Flax's functions are the reference."""

import functools
import textwrap
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen import partitioning
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import checkpoint, explore
from flax_spmd._src.tree_paths import path_string
from tests.names.flax_differences_test import OPTIMIZERS as EVERY_OPTIMIZER

RULES = (('batch', 'data'), ('vocab', 'model'), ('mlp', 'model'), ('embed', 'data'), ('layers', None))
X = jnp.ones((8, 32))
KEY = jax.random.key(0)


@pytest.fixture(scope='module')
def layout():
  return spmd.Layout({'data': 2, 'model': 4}, RULES)


class Block(nn.Module):
  @nn.compact
  def __call__(self, x):
    init = nn.initializers.lecun_normal()
    wi = partitioning.param_with_axes('wi', init, (32, 64), axes=('embed', 'mlp'))
    wo = partitioning.param_with_axes('wo', init, (64, 32), axes=('mlp', 'embed'))
    scale = partitioning.param_with_axes('scale', nn.initializers.ones, (32,), axes=('embed',))
    h = partitioning.with_sharding_constraint(nn.gelu(x @ wi), ('batch', 'mlp'))
    return x + h @ wo * scale[None], None


class Model(nn.Module):
  """A named stack of layers, a block with the same names outside of it, and a named cache."""

  @nn.compact
  def __call__(self, x):
    stacked = partitioning.scan_with_axes(
      Block, variable_axes={'params': 0}, split_rngs={'params': True}, length=4, axis_name='layers'
    )
    x, _ = stacked(name='layers')(x)
    x, _ = Block(name='last')(x)
    seen = partitioning.variable_with_axes('cache', 'seen', jnp.zeros, (8, 32), axes=('batch', 'embed'))
    seen.value += jax.lax.stop_gradient(x)
    return x


class State(TrainState):
  params_axes: Any = None
  cache: Any = None
  cache_axes: Any = None


@flax.struct.dataclass
class OptimizerState:
  step: Any
  param_states: Any


@flax.struct.dataclass
class Optimizer:
  state: OptimizerState
  target: Any


@flax.struct.dataclass
class Factored:
  v_row: Any
  v: Any


@flax.struct.dataclass
class OptimizerTrainState:
  """The form of T5X's FlaxOptimTrainState: `params` is no field, but `params_axes` is."""

  optimizer: Optimizer
  params_axes: Any
  flax_mutables: Any
  flax_mutables_axes: Any


def variables():
  return flax.core.unfreeze(Model().init(KEY, X))


def as_dict(tx):
  return {**(made := variables()), 'opt_state': tx.init(made['params'])}


def as_train_state(tx):
  return State.create(apply_fn=Model().apply, tx=tx, **variables())


def as_train_state_of_variables(tx):
  made = variables()
  return TrainState.create(
    apply_fn=Model().apply, tx=tx, params={key: made[key] for key in ('params', 'params_axes')}
  )


def asoptimizer(tx):
  made = flax.core.freeze(variables())
  optimizer = Optimizer(OptimizerState(0, tx.init(made['params'])), made['params'])
  cache = flax.core.freeze({'cache': made['cache']}), flax.core.freeze({'cache': made['cache_axes']})
  return OptimizerTrainState(optimizer, made['params_axes'], *cache)


def as_pair(tx):
  made = variables()
  axes = made.pop('params_axes')
  return TrainState.create(apply_fn=None, tx=tx, params=made['params']), axes


def by_table(tx):
  state, axes = as_pair(tx)
  return spmd.with_names(state, axes)


def by_function(tx):
  state, axes = as_pair(tx)
  flat = flax.traverse_util.flatten_dict(partitioning.get_axis_names(axes).unfreeze(), sep='/')
  names = {f'params/{path}': tuple(spec) for path, spec in flat.items()}
  return spmd.with_names(state, lambda leaf: names.get(leaf.path))


FORMS = [
  as_dict, as_train_state, as_train_state_of_variables, asoptimizer, as_pair, by_table, by_function,
]  # fmt: skip
OPTIMIZERS = {
  'adam': optax.adam(1e-3),
  'momentum': optax.sgd(1e-3, momentum=0.9),
  'steps': optax.MultiSteps(
    optax.chain(optax.clip(1.0), optax.adamw(1e-3)), 2
  ).gradient_transformation(),
  'masked': optax.masked(optax.adam(1e-3), lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)),
}


def specs_of_flax():
  """The spec of each parameter by its path below `params`, from Flax's own functions."""
  axes = jax.eval_shape(variables)['params_axes']
  specs = nn.logical_to_mesh(partitioning.get_axis_names(axes), RULES)
  flat = jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda leaf: isinstance(leaf, P))
  return {path_string(path): spec for path, spec in flat}


def specs_by_path(layout, tree):
  flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=spmd.is_axis_metadata)
  shardings = jax.tree.leaves(layout.sharding(tree))
  return {path_string(path): each.spec for (path, _), each in zip(flat, shardings, strict=True)}


@pytest.mark.parametrize('optimizer', OPTIMIZERS)
@pytest.mark.parametrize('form', FORMS, ids=lambda form: form.__name__)
def test_parameters_and_their_moments_are_sharded_as_flax_says(layout, form, optimizer):
  found = specs_by_path(layout, jax.eval_shape(functools.partial(form, OPTIMIZERS[optimizer])))
  expected = specs_of_flax()
  for path, spec in expected.items():
    copies = [at for at in found if at.endswith(f'/{path}')]
    assert len(copies) >= (1 if optimizer == 'masked' and len(spec) == 1 else 2)
    assert {found[at] for at in copies} == {spec}, path
  rest = [at for at in found if not any(at.endswith(f'/{path}') for path in expected)]
  assert {found[at] for at in rest} <= {P(), P('data', None)}  # counters, and the cache
  if form in (as_dict, as_train_state, asoptimizer):
    assert [found[at] for at in rest if at.endswith('cache/seen')] == [P('data', None)]


NAMES = {'w': ('embed', 'mlp'), 'v': ('mlp', 'embed'), 'b': ('embed',)}
SHAPES = {'w': (8, 16), 'v': (16, 16), 'b': (16,)}


def boxed(tx):
  params = {
    name: spmd.LogicallyPartitioned(jnp.ones(shape), NAMES[name]) for name, shape in SHAPES.items()
  }
  return State.create(apply_fn=None, tx=tx, params=params)


def beside(tx):
  params = {name: jnp.ones(shape) for name, shape in SHAPES.items()}
  axes = {f'{name}_axes': partitioning.AxisMetadata(each) for name, each in NAMES.items()}
  return State.create(apply_fn=None, tx=tx, params=params, params_axes=axes)


@pytest.mark.parametrize('name', EVERY_OPTIMIZER)
def test_state_of_every_optimizer_is_sharded_as_with_boxes(layout, name):
  states = (layout.abstract(create, EVERY_OPTIMIZER[name]) for create in (boxed, beside))
  leaves = zip(*map(jax.tree.leaves, states), strict=True)
  assert all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in leaves)


def test_state_of_another_shape_at_the_place_of_a_parameter_has_the_names_that_are_left(layout):
  """As T5X's Adafactor keeps it: a dataclass for each parameter."""

  def factored(leaf):
    return Factored(leaf.mean(-1) if leaf.ndim == 2 else None, jnp.zeros_like(leaf))

  def create():
    made = variables()
    optimizer = Optimizer(OptimizerState(0, jax.tree.map(factored, made['params'])), made['params'])
    return OptimizerTrainState(optimizer, made['params_axes'], {}, {})

  abstract = jax.eval_shape(create)
  states = layout.spec(abstract).optimizer.state.param_states
  assert states['last']['wi'] == Factored(P('data'), P('data', 'model'))
  assert states['layers']['wo'] == Factored(None, P(None, 'model', 'data'))
  row = next(row for row in layout.rows(abstract) if row.path.endswith('last/wi/v_row'))
  assert (row.names, row.inference.parameter) == (('embed',), 'optimizer/target/last/wi')


def test_a_plain_dictionary_of_moments_follows_its_parameters_if_the_shapes_are_theirs(layout):
  made = jax.eval_shape(variables)
  other = jax.ShapeDtypeStruct((7, 7), jnp.float32)
  state = {**made, 'mu': made['params'], 'sums': {**made['params'], 'last': {'wi': other}}}
  specs = layout.spec(state)
  assert specs['mu'] == specs['params']
  assert specs['sums']['last']['wi'] == P()
  assert specs['sums']['layers'] == specs['params']['layers']


def test_moments_without_boxes_follow_parameters_in_boxes(layout):
  params = {'w': spmd.LogicallyPartitioned(jnp.ones((32, 64)), ('embed', 'mlp'))}
  state = TrainState.create(apply_fn=None, tx=optax.identity(), params=params)
  state = state.replace(opt_state=optax.adam(1e-3).init(spmd.unbox(params)))
  assert layout.spec(state).opt_state[0].mu['w'] == P('data', 'model')


@pytest.mark.parametrize('boxed', [True, False])
def test_moments_of_a_parameter_without_names_do_not_get_those_of_another(layout, boxed):
  w = jnp.ones((8, 8))
  bare = {'kernel': w, 'dense': {'kernel': w}}
  if boxed:
    params = {**bare, 'kernel': spmd.LogicallyPartitioned(w, ('embed', 'mlp'))}
    state = {'params': params}
  else:
    params = bare
    axes = {'kernel_axes': partitioning.AxisMetadata(('embed', 'mlp'))}
    state = {'params': params, 'params_axes': axes, 'average': params}
  spec = layout.spec({**state, 'opt_state': optax.trace(0.9).init(params)})
  assert spec['params'] == {'kernel': P('data', 'model'), 'dense': {'kernel': P()}}
  assert spec['opt_state'].trace == spec.get('average', spec['params']) == spec['params']


@pytest.mark.parametrize('width', [8, 16])
def test_moments_that_repeat_the_paths_of_two_models_follow_the_one_with_their_shape(layout, width):
  def model(width, *names):
    axes = {'w_axes': partitioning.AxisMetadata(names)}
    return {'params': {'w': jnp.ones((8, width))}, 'params_axes': axes}

  first, second = model(8, 'embed', 'mlp'), model(width, 'mlp', 'embed')
  init = optax.trace(0.9).init
  states = {'m': init(first['params']), 'n': init(second['params'])}
  spec = layout.spec({'first': first, 'second': second, **states})
  found = [spec[key].trace['w'] for key in 'mn']
  assert found == ([P(), P()] if width == 8 else [P('data', 'model'), P('model', 'data')])


def test_names_in_a_list_are_those_in_a_tuple_and_a_bare_string_is_an_error(layout):
  def state(names):
    return {
      'params': {'w': jnp.ones((8, 8))},
      'params_axes': {'w_axes': partitioning.AxisMetadata(names)},
    }

  assert layout.spec(state(['embed', 'mlp']))['params'] == {'w': P('data', 'model')}
  with pytest.raises(spmd.errors.LayoutError) as error:
    layout.spec(state('mlp'))
  assert str(error.value) == (
    "params/w: its names are the bare string 'mlp', which would be read letter by letter.\n"
    "Fix: write them as a tuple, ('mlp',)."
  )


def test_an_entry_of_a_collection_alone_names_nothing(layout):
  entry = partitioning.AxisMetadata(('embed',))
  assert layout.spec(entry) == entry


def test_names_without_a_path_are_for_a_tree_that_is_one_array():
  assert spmd.with_names(jnp.ones((8, 8)), ('embed', 'mlp')).names == ('embed', 'mlp')
  with pytest.raises(
    spmd.errors.LayoutError, match=r"names \('embed', 'mlp'\), but the tree has no such"
  ):
    spmd.with_names({'a': jnp.ones((8, 8)), 'b': jnp.ones((8, 8))}, ('embed', 'mlp'))


@pytest.mark.parametrize('names', [('embed', 'mlp'), P('embed', 'mlp')])
def test_names_may_be_a_tuple_or_a_spec(layout, names):
  tree = {'params': {'w': jnp.ones((8, 8))}, 'params_axes': {'w_axes': partitioning.AxisMetadata(names)}}
  assert layout.spec(tree)['params']['w'] == P('data', 'model')


def test_the_names_of_a_variable_that_is_a_tree(layout):
  names = {'a': ('embed', 'mlp'), 'b': None}
  tree = {
    'params': {'w': {'a': jnp.ones((8, 8)), 'b': jnp.ones(8)}},
    'params_axes': {'w_axes': partitioning.AxisMetadata(names)},
  }
  assert layout.spec(tree)['params']['w'] == {'a': P('data', 'model'), 'b': P()}


def test_the_drop_in_functions_return_what_flax_returns():
  """Flax's specs do not read collections."""
  tree = jax.eval_shape(functools.partial(as_train_state, optax.adam(1e-3)))
  ours, flaxs = spmd.get_partition_spec(tree), nn.get_partition_spec(tree)
  assert jax.tree.leaves(ours) == jax.tree.leaves(flaxs)


def test_a_state_is_trained_explained_and_checkpointed(layout, tmp_path):
  def step(state, x):
    def loss(params):
      return (state.apply_fn({'params': params, 'cache': state.cache}, x) ** 2).mean()

    return state.apply_gradients(grads=jax.grad(loss)(state.params))

  class Fixed(Model):
    __call__ = nn.compact(lambda self, x: Block(name='last')(x)[0])

  def create():
    made = Fixed().init(KEY, X)
    return State.create(apply_fn=Fixed().apply, tx=OPTIMIZERS['adam'], **made, cache={})

  state = layout.init(create)
  assert not layout.check(state)
  before = jax.tree.map(lambda leaf: leaf.sharding, state)
  expected = jax.jit(step)(create(), X)
  trained = layout.jit(step, donate_argnums=0)(state, layout.shard(X, ('batch', None)))
  assert jax.tree.map(lambda leaf: leaf.sharding, trained) == before
  np.testing.assert_allclose(trained.params['last']['wi'], expected.params['last']['wi'], rtol=1e-4)
  assert trained.opt_state[0].mu['last']['wi'].sharding.spec == P('data', 'model')

  checkpoint.save(tmp_path / 'state', trained, layout)
  leaves = checkpoint.show(tmp_path / 'state').record.leaves
  assert leaves['opt_state/0/nu/last/wo'].names == ('mlp', 'embed')
  other = spmd.Layout({'data': 4, 'model': 2}, RULES)
  restored = checkpoint.restore(tmp_path / 'state', other.abstract(create))
  assert restored.params['last']['wi'].sharding.shard_shape((32, 64)) == (8, 32)
  np.testing.assert_array_equal(restored.params['last']['wi'], trained.params['last']['wi'])

  def renamed():
    axes = {'last': {'wi_axes': partitioning.AxisMetadata(('embed', 'heads'))}}
    return create().replace(params_axes=axes)

  only = checkpoint.Changes(only='params')
  with pytest.raises(spmd.errors.CheckpointMismatchError, match='embed=32, heads=64'):
    checkpoint.restore(tmp_path / 'state', other.abstract(renamed), changes=only)

  assert explore.Estimator(explore.TrainStep(step, create, X)).parameter_names == {'embed', 'mlp'}


def test_two_carriers_that_name_an_array_differently_are_an_error(layout):
  axes = partitioning.AxisMetadata
  box = spmd.LogicallyPartitioned(jnp.ones((8, 8)), ('embed', 'mlp'))
  tree = {
    'params': {'w': box, 'v': jnp.ones(8), 'same': box},
    'params_axes': {
      'w_axes': axes(('embed', 'heads')),
      'v_axes': axes(('embed',)),
      'v': axes(('mlp',)),
      'same_axes': axes(('embed', 'mlp')),
    },
  }
  with pytest.raises(spmd.errors.LayoutError) as error:
    layout.spec(tree)
  assert str(error.value) == textwrap.dedent("""\
    params/v: its names differ: params_axes/v has ('mlp',), params_axes/v_axes has ('embed',).
    params/w: its names differ: its box has ('embed', 'mlp'), params_axes/w_axes has ('embed', 'heads').
    Fix: name the array once, or alike everywhere.""")


def test_names_for_arrays_that_are_not_there_are_an_error():
  tree = {'w': spmd.LogicallyPartitioned(jnp.ones((2, 2)), ('a', 'b')), 'v': jnp.ones(2)}
  with pytest.raises(spmd.errors.LayoutError) as error:
    spmd.with_names(tree, {'v': ('c',), 'u': ('x',), 'deep': {'t': ('y',)}})
  assert str(error.value) == textwrap.dedent("""\
    deep/t has names ('y',), but the tree has no such array.
    u has names ('x',), but the tree has no such array.
    Fix: give names to arrays of the tree, by their paths in the tree or in a part of it.""")


def test_names_that_are_none_or_differ_from_a_box_are_an_error():
  tree = {'w': spmd.LogicallyPartitioned(jnp.ones((2, 2)), ('a', 'b')), 'v': jnp.ones(2)}
  with pytest.raises(spmd.errors.LayoutError) as error:
    spmd.with_names(tree, lambda leaf: ('a', 'c') if leaf.path == 'w' else 'embed')
  assert str(error.value) == textwrap.dedent("""\
    v: its names are 'embed', a str.
    w: its names differ: ('a', 'b'), ('a', 'c').
    Fix: give a tuple of logical names, a PartitionSpec of mesh axes, or None.
    Fix: name the array once, or alike everywhere.""")


@settings(max_examples=30)
@given(st.data())
def test_names_beside_boxes_and_collections_agree(data):
  """Random modules: a box, a collection and a table with the same names have the same specs."""
  layout = spmd.Layout(spmd.abstract_mesh({'data': 2, 'model': 4}), RULES)
  names = st.lists(st.sampled_from(['embed', 'mlp', 'vocab', None]), max_size=3).map(tuple)
  unique = names.filter(lambda each: len({*each} - {None}) == len(each) - each.count(None))
  keys = st.sampled_from(['a', 'b', 'c'])
  table = data.draw(st.dictionaries(st.tuples(keys, keys), unique, min_size=1))
  tree = flax.traverse_util.unflatten_dict
  plain = tree(
    {path: jax.ShapeDtypeStruct((8,) * len(each), jnp.float32) for path, each in table.items()}
  )
  boxed = spmd.with_names(plain, lambda leaf: table[tuple(leaf.path.split('/'))])
  axes = {
    (*path[:-1], f'{path[-1]}_axes'): partitioning.AxisMetadata(each) for path, each in table.items()
  }
  init = functools.partial(jax.eval_shape, OPTIMIZERS['momentum'].init)
  beside = {'params': plain, 'params_axes': tree(axes), 'opt_state': init(plain)}
  inside = {'params': boxed, 'opt_state': init(boxed)}
  assert jax.tree.leaves(layout.spec(beside)) == jax.tree.leaves(layout.spec(inside))
