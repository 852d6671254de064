"""Mixed sums, of earlier versions: the same on host and devices, under every layout; and a change of any word is detected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_spmd._src.data.mixed_sums import mixed_sums, on_devices
from tests.data.random_arrays import DTYPES, SHAPES, SPECS, WIDE, drawn, numbers, wide_numbers


def on_device(array) -> str:
  return f'{int(on_devices(array)):08x}'


def the_sum(array) -> str:
  return mixed_sums([array], 'sums')[0]


@settings(max_examples=60)
@given(shape=drawn(*SHAPES), dtype=drawn(*DTYPES), spec=drawn(*SPECS), seed=st.integers(0, 99))
def test_the_same_on_host_and_devices_under_every_layout(mesh, shape, dtype, spec, seed):
  x = numbers(shape, dtype, seed)
  placed = jax.device_put(x, NamedSharding(mesh, spec))
  assert the_sum(x) == the_sum(placed) == on_device(jnp.asarray(x)) == on_device(placed)


@pytest.mark.parametrize('dtype', WIDE)
def test_wide_types(mesh, dtype):
  with jax.enable_x64(True):
    for spec in SPECS:
      x = wide_numbers((16, 8), dtype)
      placed = jax.device_put(x, NamedSharding(mesh, spec))
      assert placed.dtype == dtype
      assert the_sum(x) == the_sum(placed)
      if dtype != 'complex128':
        assert the_sum(x) == on_device(placed)


@settings(max_examples=60)
@given(
  shape=st.lists(st.integers(0, 9), max_size=4).map(tuple), dtype=drawn(*DTYPES), seed=st.integers(0, 9)
)
def test_every_shape(shape, dtype, seed):
  x = numbers(shape, dtype, seed)
  assert the_sum(x) == the_sum(jnp.asarray(x)) == on_device(jnp.asarray(x))
  assert the_sum(np.asfortranarray(x)) == the_sum(x)


def test_large_arrays_in_blocks(mesh):
  """Arrays larger than a block, with rows longer and shorter than one."""
  for shape in ((3, 1 << 18), (1 << 18, 8), (8, 3, 1 << 15), (1 << 20,)):
    x = numbers(shape, 'float32')
    spec = P('model') if shape[0] % 4 == 0 else P(None, 'data')
    placed = jax.device_put(x, NamedSharding(mesh, P() if len(shape) < 2 else spec))
    assert the_sum(x) == the_sum(placed) == on_device(placed)
