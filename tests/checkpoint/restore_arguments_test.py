"""Arguments of restore that apply to nothing, or contradict each other; and random keys saved by plain Orbax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

import flax_spmd as spmd
from flax_spmd import checkpoint, errors
from flax_spmd.checkpoint import Changes


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


def refused(path, *arguments, **options):
  with pytest.raises(errors.CheckpointError) as caught:
    checkpoint.restore(path, *arguments, **options)
  return str(caught.value).splitlines()


def test_changes_that_apply_to_nothing_are_reported_with_other_differences(layout, path):
  changes = Changes(stacks={'blocks': 'blocks_{}'}, moved='layer', axes={'embd': 'embed'})
  checkpoint.restore(path, layout.abstract(create), changes=changes)  # no difference, so no error

  def other():
    return {'layers': {'v': create()['layers']['w']}}

  assert refused(path, layout.abstract(other), changes=changes)[3:6] == [
    "stacks: no path contains 'blocks' or 'blocks_{}'.",
    "moved: no dimension is named 'layer'. Did you mean 'layers'?",
    "axes: no dimension is named 'embd'. Did you mean 'embed'?",
  ]


def test_a_mesh_and_a_target_are_refused(layout, path):
  assert refused(path, layout.abstract(create), mesh=spmd.make_mesh({'data': 8})) == [
    'layout=, mesh= and rules= are for a restore without a target; a target has its own shardings.',
    'Fix: leave them out, leave the target out, or plan the target with that layout.',
  ]


@pytest.mark.parametrize(
  'wrong', [spmd.make_mesh({'data': 8}), (('embed', 'data'),), 'layout.toml', {}, 0]
)
def test_something_in_place_of_a_layout(path, wrong):
  expected = [
    f'layout={wrong!r} is no layout.',
    'Fix: pass a Layout; a mesh is passed as mesh=, a table as rules=, and a plan as the target.',
  ]
  assert refused(path, layout=wrong) == expected
  with pytest.raises(errors.TargetError) as caught:
    checkpoint.preflight(path, layout=wrong)
  assert str(caught.value).splitlines() == expected


def test_sizes_that_are_no_numbers_of_bytes(layout, path, tmp_path):
  def expected(name):
    return [f'{name}=-1 is not a number of bytes.', 'Fix: pass 0 or more.']

  for name in ('limit', 'memory'):
    assert refused(path, **{name: -1}) == expected(name)
  state = layout.init(create)
  for name in ('pack', 'memory'):
    with pytest.raises(errors.CheckpointError) as caught:
      checkpoint.save(tmp_path / 'b', state, layout, **{name: -1})
    assert str(caught.value).splitlines() == expected(name)
  with pytest.raises(errors.CheckpointError) as caught:
    checkpoint.Manager(tmp_path / 'b', layout, memory=-1)
  assert str(caught.value).splitlines() == expected('memory')
  assert not (tmp_path / 'b').exists()
  checkpoint.save(tmp_path / 'c', state, layout, memory=1e9, pack=np.int32(100))
  checkpoint.restore(tmp_path / 'c', layout.abstract(create), memory=np.float32(1e9), limit=1e9)


def test_boxes_saved_by_plain_orbax(layout, tmp_path):
  ocp.save(tmp_path / 'plain', {'layers': {'w': {'value': jnp.ones((2, 8))}}})
  lines = refused(tmp_path / 'plain', layout.abstract(create))
  assert lines[-1] == (
    "Fix: the checkpoint was saved with its boxes: pass Changes(renames={'/value$': ''})."
  )
  restored = checkpoint.restore(
    tmp_path / 'plain', layout.abstract(create), changes=Changes(renames={'/value$': ''})
  )
  np.testing.assert_array_equal(restored['layers']['w'].value, np.ones((2, 8)))


def test_a_plan_has_the_names_of_a_target_without_boxes(layout, path):
  def other():
    return {'layers': {'w': spmd.LogicallyPartitioned(jnp.ones((2, 8)), ('layers', 'mlp'))}}

  fits = checkpoint.restore(path, layout.plan(create, boxed=False))
  assert fits['layers']['w'].shape == (2, 8)
  lines = refused(path, layout.replace(rules=(('layers', None),)).plan(other, boxed=False))
  assert lines[1] == (
    'layers/w: float32[layers=2, embed=8] in the checkpoint, float32[layers=2, mlp=8] in the target.'
  )


@pytest.mark.parametrize('implementation', ['threefry2x32', 'rbg'])
def test_random_keys_saved_by_plain_orbax(layout, tmp_path, implementation):
  def make():
    return {'w': jnp.ones(8), 'rng': jax.random.split(jax.random.key(3, impl=implementation), 2)}

  ocp.save(tmp_path / 'plain', make())
  for restored in (
    checkpoint.restore(tmp_path / 'plain', layout.abstract(make)),
    checkpoint.restore(tmp_path / 'plain', layout=layout),
  ):
    assert restored['rng'].dtype == make()['rng'].dtype
    np.testing.assert_array_equal(*(jax.random.key_data(tree['rng']) for tree in (restored, make())))


def test_logical_names_are_not_compared_with_mesh_axes(layout, path, tmp_path):
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
