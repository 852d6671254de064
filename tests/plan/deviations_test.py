"""Deviations: compared by the slices that shardings place, on meshes with and without devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd

SIZES = {'data': 2, 'model': 4}
MESH = spmd.make_mesh(SIZES)
SPECS = [
  P(),
  P('data'),
  P(None),
  P('data', None),
  P(None, 'model'),
  P('data', 'model'),
  P(('data', 'model')),
]


def planned(spec, mesh=MESH):
  return spmd.Layout(mesh, (('^w$', spec),))


def deviation(layout, w):
  [row] = layout.rows({'w': w})
  return row.deviation


def abstract(sharding):
  return jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=sharding)


@given(st.sampled_from(SPECS), st.sampled_from(SPECS))
def test_shardings_are_compared_as_jax_compares_them(plan, own):
  """An array, an abstract one, and abstract meshes on one side or both."""
  equal = NamedSharding(MESH, plan).is_equivalent_to(NamedSharding(MESH, own), 2)
  without_devices = spmd.abstract_mesh(SIZES)
  for mesh in (MESH, without_devices):
    for own_mesh in (MESH, without_devices):
      found = deviation(planned(plan, mesh), abstract(NamedSharding(own_mesh, own)))
      assert found == (None if equal else ('spec', f'stored as {own}'))
    array = jax.device_put(np.ones((8, 16)), NamedSharding(MESH, own))
    assert (deviation(planned(plan, mesh), array) is None) == equal


@pytest.mark.parametrize(
  'w', [np.ones((8, 16)), jnp.ones((8, 16)), jax.ShapeDtypeStruct((8, 16), jnp.float32)]
)
def test_arrays_without_a_sharding_of_their_own_deviate_from_nothing(w):
  layout = planned(P('data', 'model'))
  [row] = layout.rows({'w': w})
  assert row.stored is None and row.deviation is None and not layout.check({'w': w}).suspicious


def test_traced_arrays_have_no_sharding_yet():
  layout = planned(P('data', 'model'))
  rows = []
  jax.jit(lambda w: rows.extend(layout.rows({'w': w})))(jnp.ones((8, 16)))
  assert rows[0].stored is None and rows[0].dtype == jnp.float32


def test_another_mesh_with_the_same_slices_is_as_planned():
  flat = NamedSharding(spmd.make_mesh({'all': 8}), P('all'))
  assert deviation(planned(P(('data', 'model'))), jax.device_put(np.ones((8, 16)), flat)) is None


def test_other_devices_are_named():
  reverse = spmd.make_mesh(SIZES, devices=jax.devices()[::-1])
  w = jax.device_put(np.ones((8, 16)), NamedSharding(reverse, P('data')))
  text = "stored as P('data',) on {'data': 2, 'model': 4} of devices 7, 6, 5, 4, 3, 2, 1, 0"
  assert deviation(planned(P('data')), w) == ('mesh', text)


def test_one_device():
  w = jax.device_put(np.ones((8, 16)), jax.devices()[3])
  assert deviation(planned(P()), w) == ('mesh', 'stored as P() on device 3')


def test_another_memory():
  host = NamedSharding(MESH, P('data'), memory_kind='pinned_host')
  w = jax.device_put(np.ones((8, 16)), host)
  assert deviation(planned(P('data')), w) == (
    'memory',
    "stored as P('data',) in memory 'pinned_host'",
  )
  assert deviation(planned(P('model')), w) == (
    'spec',
    "stored as P('data',) in memory 'pinned_host'",
  )
  [finding] = planned(P('data')).check({'w': w}).of('not as planned')
  assert finding.text == (
    "1 array not in the planned memory (w: planned P('data', None), stored as P('data',) in memory 'pinned_host'). "
    'Fix: move them with layout.shard(tree), or plan an abstract tree with this layout.'
  )


def test_a_plan_for_other_devices_is_not_compared_with_arrays_but_with_other_plans():
  big = planned(P('data'), spmd.abstract_mesh({'data': 64, 'model': 8}))
  array = jax.device_put(np.ones((64, 16)), NamedSharding(MESH, P()))
  assert deviation(big, array) is None
  own = NamedSharding(spmd.abstract_mesh(SIZES), P())
  own = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=own)
  assert deviation(big, own) == ('mesh', "stored as P() on {'data': 2, 'model': 4}")


def test_an_array_with_a_problem_is_not_compared():
  layout = spmd.Layout(MESH, (('^w$', P('data', None, None)),))
  assert deviation(layout, jax.device_put(np.ones((8, 16)), NamedSharding(MESH, P()))) is None


def test_keys_are_compared():
  layout = planned(P('data'))
  keys = jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(MESH, P()))
  assert deviation(layout, keys).kind == 'spec'
  assert deviation(layout, layout.shard({'w': keys})['w']) is None
