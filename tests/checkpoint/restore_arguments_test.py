"""Arguments of restore that are about nothing, or say things twice, are told; and keys that plain Orbax wrote."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

import flax_spmd as spmd
from flax_spmd import checkpoint, errors


@pytest.fixture(scope='module')
def layout():
  return spmd.Layout({'data': 8}, (('embed', 'data'),))


def create():
  return {'layers': {'w': spmd.LogicallyPartitioned(jnp.ones((2, 8)), ('layers', 'embed'))}}


@pytest.fixture(scope='module')
def path(layout, tmp_path_factory):
  path = tmp_path_factory.mktemp('idle') / 'a'
  checkpoint.save(path, layout.init(create), layout=layout)
  return path


def refused(path, *arguments, **how):
  with pytest.raises(errors.CheckpointError) as caught:
    checkpoint.restore(path, *arguments, **how)
  return str(caught.value).splitlines()


def test_arguments_that_are_about_nothing(layout, path):
  how = {'stacks': {'blocks': 'blocks_{}'}, 'moved': 'layer', 'axes': {'embd': 'embed'}}
  checkpoint.restore(path, layout.abstract(create), **how)  # where all fits, nothing was meant

  def other():
    return {'layers': {'v': create()['layers']['w']}}

  assert refused(path, layout.abstract(other), **how)[3:6] == [
    "stacks: no path has 'blocks' in it, nor 'blocks_{}'.",
    "moved: no dimension is called 'layer'. Did you mean 'layers'?",
    "axes: no dimension is called 'embd'. Did you mean 'embed'?",
  ]


def test_a_mesh_beside_a_target(layout, path):
  assert refused(path, layout.abstract(create), mesh=spmd.make_mesh({'data': 8})) == [
    'mesh= and rules= say where everything goes without a target; here the target says it.',
    'Fix: leave them out, or leave the target out, or plan the target by that mesh and those rules.',
  ]


def test_boxes_that_others_saved(layout, tmp_path):
  ocp.save(tmp_path / 'plain', {'layers': {'w': {'value': jnp.ones((2, 8))}}})
  lines = refused(tmp_path / 'plain', layout.abstract(create))
  assert lines[-1] == (
    "Fix: the checkpoint was saved with its boxes; to look into them, pass renames={'/value$': ''}."
  )
  restored = checkpoint.restore(tmp_path / 'plain', layout.abstract(create), renames={'/value$': ''})
  np.testing.assert_array_equal(restored['layers']['w'].value, np.ones((2, 8)))


def test_names_of_a_state_without_boxes_are_known_from_its_layout(layout, path):
  def other():
    return {'layers': {'w': spmd.LogicallyPartitioned(jnp.ones((2, 8)), ('layers', 'mlp'))}}

  fits = checkpoint.restore(path, layout.abstract(create, boxed=False))
  assert fits['layers']['w'].shape == (2, 8)
  lines = refused(path, layout.replace(rules=(('layers', None),)).abstract(other, boxed=False))
  assert lines[1] == (
    'layers/w: float32[layers=2, embed=8] in the checkpoint, float32[layers=2, mlp=8] in the target.'
  )


@pytest.mark.parametrize('implementation', ['threefry2x32', 'rbg'])
def test_keys_that_plain_orbax_wrote(layout, tmp_path, implementation):
  def make():
    return {'w': jnp.ones(8), 'rng': jax.random.split(jax.random.key(3, impl=implementation), 2)}

  ocp.save(tmp_path / 'plain', make())
  for target in (layout.abstract(make), None):
    restored = checkpoint.restore(tmp_path / 'plain', target, layout=layout)
    assert restored['rng'].dtype == make()['rng'].dtype
    np.testing.assert_array_equal(*(jax.random.key_data(tree['rng']) for tree in (restored, make())))


def test_logical_names_and_those_of_mesh_axes_are_not_compared(layout, path, tmp_path):
  def by_axes():
    return {'layers': {'w': spmd.Partitioned(jnp.ones((2, 8)), (None, 'data'))}}

  restored = checkpoint.restore(path, layout.abstract(by_axes))
  assert restored['layers']['w'].names == (None, 'data')
  checkpoint.save(tmp_path / 'a', layout.init(by_axes), layout=layout)
  assert checkpoint.restore(tmp_path / 'a', layout.abstract(create))['layers']['w'].names == (
    'layers',
    'embed',
  )
  assert checkpoint.restore(tmp_path / 'a', layout=layout)['layers']['w'].sharding.spec == P(
    None, 'data'
  )
