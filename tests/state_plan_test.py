"""Plans: the value that has a state's names where the state itself has none."""

from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd._src.checkpoint.storage.readers import open_checkpoint

LAYOUT = spmd.Layout({'data': 2, 'model': 4}, (('batch', 'data'), ('hidden', 'model')))
WHERE = {'b': NamedSharding(LAYOUT.mesh, P()), 'w': NamedSharding(LAYOUT.mesh, P(None, 'model'))}


def create(scale=1.0):
  w = spmd.LogicallyPartitioned(scale * jnp.ones((8, 16)), ('embed', 'hidden'))
  return {'w': w, 'b': jnp.ones(16)}


@pytest.fixture
def plan():
  return LAYOUT.plan(create, boxed=False)


def test_a_plan_has_names_and_shardings(plan):
  assert plan.names == [None, ('embed', 'hidden')]
  assert plan.shardings == WHERE
  assert repr(plan) == "<plan of a state of 2 arrays on {'data': 2, 'model': 4}>"


def test_a_plan_creates_describes_and_shards_its_state(plan):
  state, abstract = plan.init(), plan.abstract()
  host = {'w': np.zeros((8, 16)), 'b': np.zeros(16)}
  for tree in (state, abstract, plan.shard(host), plan.shard(plan.box(host))):
    assert {name: leaf.sharding for name, leaf in tree.items()} == WHERE
  assert isinstance(abstract['w'], jax.ShapeDtypeStruct)
  assert plan.box(state)['w'].names == ('embed', 'hidden')


def test_a_boxed_plan_gives_boxed_states():
  plan = LAYOUT.plan(create)
  for tree in (plan.init(), plan.abstract(), plan.shard({'w': np.zeros((8, 16)), 'b': np.zeros(16)})):
    assert tree['w'].names == ('embed', 'hidden')


def test_a_plan_explains_a_state_without_boxes(plan):
  for explanation in (plan.explain(), plan.explain(plan.init())):
    row = explanation.row('w')
    assert (row.names, row.spec, row.bytes_per_device) == (('embed', 'hidden'), P(None, 'model'), 128)


def test_a_checkpoint_of_a_planned_state_has_its_names(plan, tmp_path):
  checkpoint.save(tmp_path / 'a', plan.init(), plan)
  leaves = open_checkpoint(tmp_path / 'a').record.leaves
  assert {path: leaf.names for path, leaf in leaves.items()} == {'b': None, 'w': ('embed', 'hidden')}
  other = spmd.Layout({'data': 8}, (('embed', 'data'),)).plan(create, boxed=False)
  restored = checkpoint.restore(tmp_path / 'a', other)
  assert restored['w'].sharding.spec == P('data', None)
  assert isinstance(
    checkpoint.restore(tmp_path / 'a', LAYOUT.plan(create))['w'], spmd.LogicallyPartitioned
  )


def test_a_manager_saves_the_names_of_the_state_that_it_resumed(tmp_path):
  with checkpoint.Manager(tmp_path, LAYOUT, every=1) as manager:
    start, state = manager.resume(create, boxed=False)
    manager.save(start + 1, state)
  assert open_checkpoint(tmp_path / '1').record.leaves['w'].names == ('embed', 'hidden')
  plan = LAYOUT.plan(create, boxed=False)
  with checkpoint.Manager(tmp_path, plan, every=1) as manager:
    start, state = manager.resume(plan)
    manager.save(start + 1, state)
  assert start == 1
  assert open_checkpoint(tmp_path / '2').record.leaves['w'].names == ('embed', 'hidden')


def test_a_manager_refuses_a_plan_of_another_layout(tmp_path):
  other = spmd.Layout({'data': 8}, ())
  with checkpoint.Manager(tmp_path, LAYOUT) as manager:
    for use in (manager.resume, manager.restore):
      with pytest.raises(errors.LayoutError) as caught:
        use(other.plan(create))
      assert str(caught.value) == (
        "The plan is one of Layout({'data': 8}, Rules()), but the manager has "
        "Layout({'data': 2, 'model': 4}, Rules(('batch', 'data'), ('hidden', 'model'))).\n"
        'Fix: plan the state with the layout of the manager.'
      )


def test_a_state_of_another_plan_is_refused_before_anything_is_written(plan, tmp_path):
  wrong = {'w': np.zeros((16, 8)), 'c': np.zeros(3)}
  expected = """\
b: planned, but not in the tree.
c: in the tree, but not planned.
w: planned with shape (8, 16), but it has shape (16, 8).
Fix: pass a state of this plan, or plan the function that created this one."""
  uses = (plan.shard, plan.box, plan.explain, lambda tree: checkpoint.save(tmp_path / 'a', tree, plan))
  texts = set()
  for use in uses:
    with pytest.raises(errors.LayoutError) as caught:
      use(wrong)
    texts.add(str(caught.value))
  assert not (tmp_path / 'a').exists()
  assert texts == {expected}


def test_a_plan_of_abstract_arguments_creates_nothing():
  x = jax.ShapeDtypeStruct((1, 8), jnp.float32)
  plan = LAYOUT.plan(nn.Dense(16).init, jax.random.key(0), x)
  assert plan.abstract()['params']['kernel'].shape == (8, 16)
  with pytest.raises(errors.LayoutError) as caught:
    plan.init()
  assert str(caught.value) == (
    'The plan was made with abstract arguments (float32[1,8]), so it cannot create a state.\n'
    'Fix: pass arrays in their place. One that the function takes abstract too, as lazy_init does, goes into it: '
    'lambda key: model.lazy_init(key, x).'
  )
  dense = nn.Dense(16)
  assert LAYOUT.init(lambda key: dense.lazy_init(key, x), jax.random.key(0))['params'][
    'kernel'
  ].shape == (8, 16)


def test_a_state_in_place_of_its_function_and_anything_in_place_of_a_layout(tmp_path):
  for use in (LAYOUT.plan, LAYOUT.init, LAYOUT.abstract):
    with pytest.raises(errors.LayoutError) as caught:
      use({'w': jnp.ones(8)})
    assert str(caught.value) == (
      'A dict is not a function that creates a state.\n'
      'Fix: pass the function and its arguments; layout.shard transfers a state that exists.'
    )
  with pytest.raises(errors.CheckpointError) as wrong:
    checkpoint.save(tmp_path / 'a', {'w': jnp.ones(8)}, 'layout')
  assert str(wrong.value) == (
    "'layout' is neither a Layout nor a Plan.\nFix: pass the layout or the plan of the states."
  )
  assert not (tmp_path / 'a').exists()


def test_arguments_that_are_not_arrays_are_passed_as_they_are():
  class Model(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
      return nn.BatchNorm(use_running_average=not train)(nn.Dense(16)(x))

  variables = LAYOUT.init(Model().init, jax.random.key(0), jnp.ones((4, 8)), train=False)
  assert variables['params']['Dense_0']['kernel'].shape == (8, 16)

  def sized(n, dtype, activation, *, config):
    return {'w': activation(jnp.zeros((n, config['width']), dtype))}

  state = LAYOUT.init(sized, 64, jnp.bfloat16, nn.relu, config={'width': 8, 'name': 'small'})
  assert (state['w'].shape, state['w'].dtype) == ((64, 8), jnp.bfloat16)


def test_a_restore_with_a_plan_takes_no_layout(plan, tmp_path):
  checkpoint.save(tmp_path / 'a', plan.init(), plan)
  with pytest.raises(errors.TargetError) as caught:
    checkpoint.restore(tmp_path / 'a', plan, layout=LAYOUT)
  assert str(caught.value) == (
    'layout=, mesh= and rules= are for a restore without a target; a target has its own shardings.\n'
    'Fix: leave them out, leave the target out, or plan the target with that layout.'
  )


def test_errors_name_the_parameter_and_the_path_of_an_array():
  deleted = jnp.ones((4, 8))
  deleted.delete()
  with pytest.raises(errors.LayoutError) as error:
    LAYOUT.init(lambda source, scale, *, key: source['w'] * scale, {'a': 1, 'w': deleted}, 2, key=None)
  assert str(error.value) == (
    'argument source/w has been deleted, or donated to a jitted function.\n'
    'Fix: pass the state that the step returned, not the one that was donated to it.'
  )


@flax.struct.dataclass
class Source:
  w: Any
  metadata: Any = flax.struct.field(pytree_node=False)


def test_arguments_may_have_metadata_that_jax_cannot_compare():
  source = Source(jnp.ones(4), [2, {'offset': 3}])
  create = lambda source, *rest, **named: source.w * source.metadata[0] + rest[1]['w'] + named['a b'][0]
  made = LAYOUT.init(create, source, 1, {'w': jnp.ones(4)}, **{'a b': (jnp.ones(4), None)})
  np.testing.assert_array_equal(made, np.full(4, 4))
  with pytest.raises(TypeError, match='takes 1 positional argument but 2 were given'):
    LAYOUT.init(lambda source: source.w, source, jnp.ones(4))
