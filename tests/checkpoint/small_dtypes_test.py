"""Every dtype of ml_dtypes and of JAX is saved and restored bit by bit, or refused before anything is written."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import flax_spmd as spmd
from flax_spmd import checkpoint
from flax_spmd.checkpoint import Changes
from flax_spmd.errors import CheckpointError

OWN = ('bool', 'int8', 'uint8', 'int16', 'uint16', 'int32', 'uint32', 'float16', 'float32', 'complex64')
WIDE = ('int64', 'uint64', 'float64', 'complex128')  # of numpy arrays; JAX narrows them
SMALL = sorted(
  name
  for name, kind in vars(ml_dtypes).items()
  if isinstance(kind, type) and issubclass(kind, np.generic)
)
IN_SAFETENSORS = {'float8_e5m2', 'float8_e4m3fn', 'float8_e8m0fnu', 'float8_e4m3fnuz', 'float8_e5m2fnuz'}
IN_SAFETENSORS |= {*OWN, *WIDE, 'bfloat16'} - {'complex128'}
SPECS = PartitionSpec('data', 'model'), PartitionSpec('data'), PartitionSpec()


def is_stored(name):
  """Whether TensorStore has the dtype, and JAX does."""
  try:
    tensorstore.dtype(np.dtype(name))
    return bool(jnp.issubdtype(np.dtype(name), jnp.number)) or name == 'bool'
  except (TypeError, ValueError):
    return False


def random_bits(name, shape, seed):
  """Any values of a dtype: NaNs and infinities, too."""
  generator = np.random.default_rng(seed)
  dtype = np.dtype(name)
  if name == 'bool' or 'int' in name:
    return generator.integers(0, 2 if '1' in name[-1:] or name == 'bool' else 100, shape).astype(dtype)
  if dtype.itemsize == 1 and name.startswith(('float4', 'float6')):
    return generator.standard_normal(shape).astype(np.float32).astype(dtype)
  data = generator.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
  return data.view(dtype).reshape(shape)


def is_equal(one, other):
  one, other = np.asarray(one), np.asarray(other)
  return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


@settings(max_examples=40)
@given(st.sampled_from((*OWN, *WIDE, *SMALL)), st.booleans(), st.integers(0, 999), st.data())
def test_every_dtype_on_every_route(tmp_path_factory, mesh, name, on_devices, seed, data):
  route = data.draw(st.sampled_from(('plain', 'packed', 'compressed', 'safetensors')))
  path = tmp_path_factory.mktemp('of') / name
  values = random_bits(name, data.draw(st.sampled_from(((8, 4), (8, 4), (0, 4), (8, 0)))), seed)
  state = target = {'w': values}
  if on_devices and name not in WIDE and not name.startswith(('complex32', 'bcomplex32', 'float6')):
    sharding = NamedSharding(mesh, data.draw(st.sampled_from(SPECS)))
    state = {'w': jax.device_put(values, sharding)}
    target = {'w': jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=sharding)}
  if route == 'safetensors':
    saved, known = lambda: checkpoint.save_safetensors(path, state), name in IN_SAFETENSORS
  else:
    options = {'pack': 1000 * (route == 'packed'), 'compress': route == 'compressed'}
    saved, known = lambda: checkpoint.save(path, state, spmd.Layout(mesh), **options), is_stored(name)
  if known:
    saved()
    assert is_equal(checkpoint.restore(path, target)['w'], values)
    return
  with pytest.raises(CheckpointError, match=rf'w is (an array of dtype )?{name}.*\nFix: '):
    saved()
  assert not path.exists()


def test_nans_of_copies(tmp_path, mesh):
  """Each copy would write a part, and XLA would make one NaN of all where it cuts that part out."""
  nans = jnp.array([jnp.nan, -jnp.nan] * 8, jnp.float8_e5m2)
  checkpoint.save(
    tmp_path / 'a', {'w': jax.device_put(nans, NamedSharding(mesh, PartitionSpec()))}, spmd.Layout(mesh)
  )
  assert is_equal(checkpoint.restore(tmp_path / 'a')['w'], nans)


def test_dtypes_that_no_store_has(tmp_path, mesh):
  layout = spmd.Layout(mesh)
  state = {
    'a': jnp.arange(8).astype('uint4'),
    'b': np.ones(4, ml_dtypes.float6_e2m3fn),
    'c': jnp.ones(2),
  }
  with pytest.raises(CheckpointError) as raised:
    checkpoint.save(tmp_path / 'a', state, layout)
  how = 'restore it with Changes(dtypes='
  why = 'TensorStore, which writes the arrays, has no'
  assert str(raised.value) == (
    f"""a is an array of dtype uint4.
b is an array of dtype float6_e2m3fn.
Fix: save x.astype('uint8'), and {how}{{'uint8': 'uint4'}}); {why} uint4.
Fix: save x.astype('bfloat16'), and {how}{{'bfloat16': 'float6_e2m3fn'}}); {why} float6_e2m3fn."""
  )
  wide = {'a': state['a'].astype('uint8'), 'b': state['b'].astype('bfloat16'), 'c': state['c']}
  checkpoint.save(tmp_path / 'a', wide, layout)
  changes = Changes(dtypes={'uint8': 'uint4', 'bfloat16': 'float6_e2m3fn'})
  restored = checkpoint.restore(tmp_path / 'a', state, changes=changes)
  assert all(is_equal(restored[name], state[name]) for name in state)
