"""Optimizer state: the names inferred for its arrays from their shapes and paths."""

import cProfile
from collections import namedtuple

import jax
import jax.numpy as jnp
import pytest
from flax.training.train_state import TrainState
from hypothesis import example, given
from jax.sharding import PartitionSpec as P
from jax.tree_util import GetAttrKey

import flax_spmd as spmd
from flax_spmd._src.names.box_trees import is_axis_metadata
from flax_spmd._src.names.optimizer_state import infer
from flax_spmd._src.names.tree_names import TreeNames
from flax_spmd._src.names.unit_paths import UnitPaths
from flax_spmd._src.tree_paths import path_string
from tests import strategies

NAMES = ('embed', 'mlp')


@pytest.mark.parametrize(
  'full, shape, names, how',
  [
    ((16, 32), (16, 32), NAMES, 'same'),
    ((16, 32), (), (), 'single'),
    ((16, 32), (1,), (None,), 'single'),
    ((16, 32), (1, 1), (None, None), 'single'),
    ((1, 1), (1, 1), NAMES, 'same'),
    ((16, 32), (16,), ('embed',), 'subset'),
    ((16, 32), (32,), ('mlp',), 'subset'),
    ((16, 32), (16, 1), ('embed', None), 'subset'),
    ((16, 32), (1, 32), (None, 'mlp'), 'subset'),
    ((16, 32), (8, 16, 32), (None, *NAMES), 'stacked'),
    ((16, 32), (2, 8, 16, 32), (None, None, *NAMES), 'stacked'),
    ((16, 16), (16,), None, 'ambiguous'),
    ((16, 32), (7,), None, 'unrelated'),
    ((16, 32), (2, 256), None, 'unrelated'),
    ((16, 32), (16, 32, 8), None, 'unrelated'),
  ],
)
def test_names_follow_from_the_shapes(full, shape, names, how):
  inference = infer(NAMES, full, shape, 'anything', 'params/w')
  assert (inference.names, inference.how) == (names, how)


@pytest.mark.parametrize(
  'full, field, names',
  [
    ((16, 16), 'v_row', ('a',)),
    ((16, 16), 'v_col', ('b',)),
    ((4, 16, 16), 'v_row', ('n', 'a')),
    ((4, 16, 16), 'v_col', ('n', 'b')),
    ((16, 16, 16), 'v_row', ('n', 'a')),
  ],
)
def test_adafactors_fields_decide_between_two_equal_dimensions(full, field, names):
  """Checked against Optax: it averages the largest dimension away for the rows."""
  own = ('a', 'b') if len(full) == 2 else ('n', 'a', 'b')
  shape = tuple(16 if name != 'n' or full[0] == 16 else full[0] for name in names)
  assert infer(own, full, shape, field, 'w').names == names


def test_adafactor_square_kernels_against_optax():
  """Gradients that vary along a single dimension show which one v_row keeps."""
  import optax

  tx = optax.adafactor(1e-3, min_dim_size_to_factor=4)
  params = {'w': jnp.ones((4, 4))}
  grads = {'w': jnp.arange(1.0, 5)[:, None] * jnp.ones((4, 4))}
  _, state = tx.update(grads, tx.init(params), params)
  varies = {
    field: bool(jnp.ptp(getattr(state[0], field)['w']) > 1e-6 * jnp.max(getattr(state[0], field)['w']))
    for field in ('v_row', 'v_col')
  }
  kept = {field: infer(('rows', 'columns'), (4, 4), (4,), field, 'w').names[0] for field in varies}
  assert {kept[field] for field, does in varies.items() if does} == {'rows'}
  assert {kept[field] for field, does in varies.items() if not does} == {'columns'}


Moments = namedtuple('Moments', ['mu', 'rest'])


def box(shape, names=NAMES):
  return spmd.LogicallyPartitioned(jax.ShapeDtypeStruct(shape, jnp.float32), names)


def test_state_is_matched_to_its_parameter_by_the_end_of_its_path():
  tree = {
    'params': {'a': {'w': box((16, 32))}, 'b': {'w': box((8, 4))}},
    'opt_state': (Moments({'a': {'w': box((16,))}, 'b': {'w': box((4,))}}, None),),
  }
  layout = spmd.Layout({'data': 2, 'model': 4}, (('embed', 'data'), ('mlp', 'model')))
  specs = layout.spec(tree)
  assert specs['opt_state'][0].mu == {'a': {'w': P('data')}, 'b': {'w': P('model')}}
  row = next(row for row in layout.rows(tree) if row.path == 'opt_state/0/mu/b/w')
  assert (row.inference.how, row.inference.parameter, row.names) == ('subset', 'params/b/w', ('mlp',))


def test_parameters_at_another_depth_are_not_state():
  """Two parameters with equal names and last keys, but different shapes."""
  tree = {'params': {'w': box((16, 32)), 'deep': {'w': box((8, 8))}}}
  assert not TreeNames(tree).inferred
  assert spmd.get_partition_spec(tree)['params']['deep']['w'] == P(*NAMES)


def test_state_of_ambiguous_or_unrelated_shape_is_replicated_and_reported():
  tree = {'params': {'w': box((16, 16))}, 'opt_state': (Moments({'w': box((16,))}, {'w': box((3, 5))}),)}
  layout = spmd.Layout({'data': 2, 'model': 4}, (('embed', 'data'), ('mlp', 'model')))
  assert layout.spec(tree)['opt_state'][0] == Moments({'w': P()}, {'w': P()})
  assert [finding.text for finding in layout.check(tree).of('not inferred')] == [
    'opt_state/0/mu/w: shape (16,) follows from the shape of params/w in more than one way; it is replicated.',
    'opt_state/0/rest/w: shape (3, 5) does not follow from the shape of params/w; it is replicated.',
  ]


def test_a_box_of_several_arrays_stays_a_box_of_specs():
  """SM3 keeps a list with one vector per dimension."""
  both = spmd.LogicallyPartitioned([jnp.ones(16), jnp.ones(32)], NAMES)
  tree = {'params': {'w': box((16, 32))}, 'opt_state': (Moments({'w': both}, None),)}
  specs = spmd.get_partition_spec(tree)['opt_state'][0].mu['w']
  assert isinstance(specs, spmd.LogicallyPartitioned)
  assert specs.value == [P('embed'), P('mlp')]


def test_a_dropped_dimension_is_checked_against_the_mesh_like_any_other():
  tree = {'params': {'w': box((6, 32))}, 'opt_state': (Moments({'w': box((6,))}, None),)}
  layout = spmd.Layout({'model': 4, 'data': 2}, (('embed', 'model'),))
  with pytest.raises(spmd.errors.LayoutError, match=r'opt_state/0/mu/w, dim 0'):
    layout.sharding(tree)


def test_paths():
  tree = {'a': [1, Moments(2, {'b': 3})]}
  found = [path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
  assert found == ['a/0', 'a/1/mu', 'a/1/rest/b']
  assert path_string(()) == '(root)'


@given(strategies.trees_of_all_nodes())
@example({'a': 1, strategies.Word('b'): 2, strategies.Word('cd'): 3})
def test_unit_paths_are_those_of_jax(tree):
  with_paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_axis_metadata)
  keys = [path for path, _ in with_paths]
  units = UnitPaths(tree)
  assert units.paths == list(map(path_string, keys))
  assert units.fields == list(map(innermost_field, keys))


def innermost_field(path):
  fields = [end for end in range(2, len(path) + 1) if isinstance(path[end - 1], GetAttrKey)]
  return path_string(path[: fields[-1]]) if fields else None


@pytest.mark.parametrize('tree', [dict, list])
@pytest.mark.parametrize('boxed', [True, False])
@pytest.mark.parametrize('tx', ['adam', 'adafactor'])
def test_the_work_is_linear_in_the_number_of_models(tree, boxed, tx):
  """Counted as calls of functions, which no other program on the machine changes."""
  import optax

  tx = optax.adam(1e-3) if tx == 'adam' else optax.adafactor(1e-3, min_dim_size_to_factor=8)
  kernel = jax.ShapeDtypeStruct((16, 32), jnp.float32)
  kernel = spmd.LogicallyPartitioned(kernel, NAMES) if boxed else kernel
  params = {name: {'kernel': kernel} for name in ('query', 'key', 'out')}
  state = jax.eval_shape(lambda p: TrainState.create(apply_fn=None, params=p, tx=tx), params)
  rules = (('mlp', 'model'), ('key/kernel$', P('model')), spmd.fsdp('data', min_size=1))
  layout = spmd.Layout(spmd.abstract_mesh({'data': 2, 'model': 4}), rules)

  def calls(models):
    states = [state] * models if tree is list else {f'model_{i}': state for i in range(models)}
    counted = cProfile.Profile()
    specs = counted.runcall(layout.spec, states)
    alone = layout.spec({'model_0': state} if tree is dict else [state])
    assert jax.tree.leaves(specs) == jax.tree.leaves(alone) * models
    return sum(entry.callcount for entry in counted.getstats())

  calls(1)  # fills caches
  few, many = calls(10), calls(40)
  assert many < 4.4 * few
