"""Mixed sums, of earlier versions: the same on host and devices, under every layout; and a change of any word is detected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
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


@settings(max_examples=40)
@given(st.lists(st.tuples(drawn(*SHAPES, (0, 3), ()), drawn(*DTYPES)), max_size=20), drawn(*SPECS[:2]))
def test_sums_of_many_arrays_equal_those_of_each(mesh, described, spec):
  arrays = [numbers(shape, dtype, seed) for seed, (shape, dtype) in enumerate(described)]
  placed = [
    jax.device_put(x, NamedSharding(mesh, spec if x.shape and x.shape[0] else P())) if i % 3 else x
    for i, x in enumerate(arrays)
  ]
  assert mixed_sums(placed, 'sums') == [the_sum(x) for x in arrays]


def test_large_arrays_in_blocks(mesh):
  """Arrays larger than a block, with rows longer and shorter than one."""
  for shape in ((3, 1 << 18), (1 << 18, 8), (8, 3, 1 << 15), (1 << 20,)):
    x = numbers(shape, 'float32')
    spec = P('model') if shape[0] % 4 == 0 else P(None, 'data')
    placed = jax.device_put(x, NamedSharding(mesh, P() if len(shape) < 2 else spec))
    assert the_sum(x) == the_sum(placed) == on_device(placed)


def test_replicas_count_once(mesh):
  x = numbers((16, 8), 'float32')
  one = jax.device_put(x, jax.devices()[5])
  twice = jax.device_put(x, NamedSharding(mesh, P('model')))  # each part on two devices
  everywhere = jax.device_put(x, NamedSharding(mesh, P()))
  assert len({the_sum(array) for array in (x, one, twice, everywhere)}) == 1


def test_the_order_of_devices_is_irrelevant():
  x = numbers((64, 512), 'float32')
  backwards = spmd.make_mesh({'data': 8}, devices=jax.devices()[::-1])
  forwards = spmd.make_mesh({'data': 8})
  sums = {the_sum(jax.device_put(x, NamedSharding(m, P('data')))) for m in (backwards, forwards)}
  assert sums == {the_sum(x)}


@given(
  dtype=drawn(*DTYPES),
  size=drawn(1, 7, 100, 5000, 40000),
  place=st.integers(0, 2**31),
  bit=st.integers(0, 63),
)
def test_any_change_of_one_word_is_detected(dtype, size, place, bit):
  x = numbers((size,), dtype)
  changed = x.copy()
  if x.dtype.itemsize == 1 and dtype in ('bool', 'int4', 'uint4'):
    other = not changed[place % size] if dtype == 'bool' else (int(changed[place % size]) + 1) % 7
    if other == changed[place % size]:
      return
    changed[place % size] = other
  else:
    bits = changed.view(np.uint8)
    bits[place % bits.size] ^= 1 << (bit % 8)
  assert the_sum(changed) != the_sum(x)


@given(
  first=st.integers(0, 999), second=st.integers(0, 999), dtype=drawn('float32', 'bfloat16', 'int32')
)
def test_swaps_are_detected(first, second, dtype):
  """Also swaps of x and -x, whose only different bit must not cancel after mixing."""
  for x in (numbers((1000,), dtype), _opposites(1000, dtype)):
    if x[first] != x[second]:
      changed = x.copy()
      changed[[first, second]] = changed[[second, first]]
      assert the_sum(changed) != the_sum(x)


def _opposites(size, dtype):
  half = numbers((size // 2,), dtype)
  return np.concatenate([half, -half])


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_moved_sign_is_detected_at_every_position(dtype):
  """Each position has its own sum; without the mixer's first shift, two of 1,024 had the same."""
  arrays = np.ones((1024, 1024), dtype)
  arrays[np.arange(1024), np.arange(1024)] = -1
  assert len(set(mixed_sums(list(arrays), 'sums'))) == 1024


def test_two_sign_flips_are_detected():
  """A mixer that leaves the highest bit in place would miss every pair of flips."""
  x = numbers((256,), 'float32')
  for distance in (1, 2, 64, 128, 255):
    changed = x.copy()
    changed[0], changed[distance] = -changed[0], -changed[distance]
    assert the_sum(changed) != the_sum(x)


def test_shifts_are_detected():
  x = numbers((512, 8), 'float32')
  assert (
    len({the_sum(np.roll(x, shift, axis)) for shift in range(1, 8) for axis in (0, 1)} | {the_sum(x)})
    == 15
  )
