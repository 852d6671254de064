"""Reshard: equal to the bit to `jax.device_put` of the host's array, between any two shardings, dtypes and memories."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from tests.strategies import examples

DTYPES = ('float32', 'bfloat16', 'float16', 'int8', 'bool', 'int4', 'float8_e5m2')
AXES = ('x', 'y', 'z')


@st.composite
def layouts(draw):
  """A layout on any devices in any order, of 1 to 3 axes; names 'a', 'b' and 'c' over any axes, some arrays on the host."""
  shape = draw(st.sampled_from([(1,), (2,), (8,), (2, 4), (4, 2), (3,), (2, 2, 2), (2, 1, 2)]))
  devices = draw(st.permutations(jax.devices()))[: int(np.prod(shape))]
  types = (draw(st.sampled_from([AxisType.Auto, AxisType.Explicit])),) * len(shape)
  mesh = Mesh(np.array(devices, object).reshape(shape), AXES[: len(shape)], axis_types=types)
  axes = draw(st.permutations(mesh.axis_names))
  cuts = sorted(draw(st.lists(st.integers(0, len(axes)), min_size=2, max_size=2)))
  parts = (axes[: cuts[0]], axes[cuts[0] : cuts[1]], axes[cuts[1] :])
  on_host = draw(st.sampled_from([None, None, 'w', 'v']))
  names = [(name, tuple(part)) for name, part in zip('abc', parts)]
  return spmd.Layout(
    mesh, [*([(f'^{on_host}', spmd.host(spmd.Rules(*names)))] if on_host else []), *names]
  )


@st.composite
def states(draw):
  """Two arrays of 0 to 3 dimensions, some of them empty, of any values."""
  rng = np.random.default_rng(draw(st.integers(0, 99)))
  state = {}
  for key in 'vw':
    names = draw(st.permutations('abc'))[: draw(st.integers(0, 3))]
    shape = [draw(st.sampled_from([24, 24, 48, 48, 0])) for _ in names]
    numbers = rng.integers(0, 256, (*shape, 4), dtype=np.uint8)
    dtype = draw(st.sampled_from(DTYPES))
    values = numbers.view(np.float32)[..., 0] if dtype != 'bool' else numbers[..., 0] > 128
    most = 7 if 'int' in dtype else 6e4  # within int4, and float16
    values = np.clip(np.nan_to_num(values), -most, most)
    state[key] = spmd.LogicallyPartitioned(values.astype(jnp.dtype(dtype)), tuple(names))
  return state


@settings(max_examples=examples(15), deadline=None)
@given(states(), layouts(), layouts(), st.sampled_from([None, 'bfloat16', 'float32']), st.booleans())
def test_a_reshard_is_a_device_put(state, layout, to, dtype, donate):
  before = layout.shard(state)
  plan = layout.plan_reshard(before, to, dtype=dtype, donate=donate)
  after = layout.reshard(before, to, dtype=dtype, donate=donate)
  for key, leaf in state.items():
    made, wanted = after[key].value, to.sharding(state)[key]
    is_cast = dtype is not None and jnp.issubdtype(leaf.value.dtype, jnp.floating)
    expected = jax.device_put(leaf.value.astype(dtype) if is_cast else leaf.value, wanted)
    assert (after[key].names, made.dtype, made.sharding) == (leaf.names, expected.dtype, wanted)
    assert np.asarray(made).tobytes() == np.asarray(expected).tobytes()
    if not donate:
      assert not pointers(made) & pointers(before[key].value)
      np.testing.assert_array_equal(before[key].value, leaf.value)
  stays = {row.path for row in plan.rows if row.way == 'stays'}
  assert not donate or all(before[key].value.is_deleted() for key in {*state} - stays)
  assert sum(row.wire_bytes for row in plan.rows) == plan.wire_bytes
  larger = max(*plan.source_bytes.values(), *plan.target_bytes.values(), 0)
  result = max((row.bytes_per_device for row in plan.rows), default=0)
  assert not donate or max(plan.peak_bytes.values(), default=0) <= larger + 2 * result + plan.chunk


@pytest.mark.parametrize(
  ('dtype', 'shape'), [('int4', (16, 32)), ('float8_e5m2', (16, 32)), ('int8', (16, 0))]
)
def test_small_numbers_and_empty_arrays(dtype, shape):
  values = (np.arange(np.prod(shape)) % 7).reshape(shape).astype(jnp.dtype(dtype))
  w = spmd.LogicallyPartitioned(values, ('rows', 'columns'))
  layout = spmd.Layout({'data': 8}, (('rows', 'data'),))
  to = spmd.Layout({'data': 2, 'model': 4}, (('rows', 'data'), ('columns', 'model')))
  made = layout.reshard({'w': layout.shard(w)}, to)['w'].value
  assert np.asarray(made).tobytes() == values.tobytes() and made.sharding == to.sharding(w)


def pointers(array):
  return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards if shard.data.size}


def test_keys_numbers_and_arrays_of_numpy():
  layout = spmd.Layout({'data': 8}, (('rows', 'data'),))
  few = spmd.Layout(Mesh(np.array(jax.devices()[4:]), ('data',)), (('rows', 'data'),))
  keys = spmd.LogicallyPartitioned(jax.random.split(jax.random.key(3), 8), ('rows',))
  state = {**layout.shard({'keys': keys}), 'n': 3, 'host': np.arange(4.0)}
  expected = np.asarray(jax.random.key_data(keys.value))
  after = layout.reshard(state, few, donate=True)
  assert after['keys'].value.sharding == few.sharding({'keys': keys})['keys']
  np.testing.assert_array_equal(jax.random.key_data(after['keys'].value), expected)
  np.testing.assert_array_equal(after['host'], np.arange(4.0))
  assert after['n'] == 3 and after['n'].sharding == after['host'].sharding == NamedSharding(
    few.mesh, P()
  )


def test_modules_of_nnx_and_shared_variables():
  layout, to = (
    spmd.Layout({'data': 8}, (('embed', 'data'),)),
    spmd.Layout({'model': 4}, (('mlp', 'model'),)),
  )
  init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ('embed', 'mlp'))

  class Tied(nnx.Module):
    def __init__(self):
      self.one = nnx.Linear(16, 32, kernel_init=init, rngs=nnx.Rngs(0))
      self.same = self.one

  model = layout.init(Tied)
  kernel = np.asarray(model.one.kernel[...])
  served = layout.reshard(model, to, dtype='bfloat16', donate=True)
  assert served.one is served.same and served.one.kernel[...].sharding.spec == P(None, 'model')
  np.testing.assert_array_equal(served.one.kernel[...], kernel.astype('bfloat16'))


def test_an_array_that_occurs_twice_moves_once():
  layout, to = spmd.Layout({'data': 8}), spmd.Layout({'data': 4, 'model': 2}, (('mlp', 'model'),))
  w = layout.shard(np.arange(64.0).reshape(8, 8))
  state = {
    'a': spmd.LogicallyPartitioned(w, (None, 'mlp')),
    'b': spmd.LogicallyPartitioned(w, (None, 'mlp')),
  }
  plan = layout.plan_reshard(state, to, donate=True)
  after = layout.reshard(state, to, donate=True)
  assert after['a'].value is after['b'].value and w.is_deleted()
  assert max(plan.source_bytes.values()) == 256 and max(plan.target_bytes.values()) == 128


def test_weak_types_stay():
  layout = spmd.Layout({'data': 8})
  weak = jnp.asarray(2.0)
  state = {'one': weak, 'all': layout.shard(jnp.asarray(3.0)), 'number': 4, 'strong': np.float32(5)}
  for to in (layout, spmd.Layout({'model': 8}), spmd.Layout({'model': 3})):
    for donate in (False, True):
      given = {**state, 'one': weak + 0, 'all': state['all'] + 0}
      after = layout.reshard(given, to, donate=donate)
      assert {key: leaf.weak_type for key, leaf in after.items()} == {
        'one': True, 'all': True, 'number': True, 'strong': False
      }  # fmt: skip
      assert [float(after[key]) for key in sorted(after)] == [3, 4, 2, 5]
      assert all(leaf.sharding == NamedSharding(to.mesh, P()) for leaf in after.values())
  assert not layout.reshard(state, layout, dtype='bfloat16')['one'].weak_type


def test_donated_arrays_that_share_memory():
  """`jax.device_put` shares buffers with its argument: all of them, or those of some devices."""
  layout, to = spmd.Layout({'data': 8}), spmd.Layout({'model': 4}, (('mlp', 'model'),))
  for names in ((None, 'mlp'), ()):
    one = jax.device_put(np.arange(64.0, dtype=np.float32).reshape(8, 8), jax.devices()[0])
    every = layout.shard(one)
    same = spmd.Layout({'other': 8}).shard(every)
    arrays = {'b': same, 'a': every, 'c': one}
    shared = [array.addressable_shards[0].data.unsafe_buffer_pointer() for array in arrays.values()]
    assert len(set(shared)) == 1
    state = {key: spmd.LogicallyPartitioned(array, names) for key, array in arrays.items()}
    after = layout.reshard(state, to, donate=True)
    for key, array in arrays.items():
      np.testing.assert_array_equal(after[key].value, np.arange(64.0).reshape(8, 8))
      assert array.is_deleted()
