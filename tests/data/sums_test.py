"""What the sums of both formulas have in common: the checksums, and the mixed sums of earlier versions."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_spmd as spmd
from flax_spmd._src.data.checksums import PendingChecksums
from flax_spmd._src.data.mixed_sums import mixed_sums
from tests.data.random_arrays import DTYPES, SHAPES, SPECS, drawn, numbers


def checksums(arrays):
  return PendingChecksums(arrays).complete()


def of_earlier_versions(arrays):
  return mixed_sums(arrays, 'sums')


EITHER = pytest.mark.parametrize('sums', [checksums, of_earlier_versions])


def the_sum(sums, array) -> str:
  return sums([array])[0]


@EITHER
@settings(max_examples=40)
@given(st.lists(st.tuples(drawn(*SHAPES, (0, 3), ()), drawn(*DTYPES)), max_size=20), drawn(*SPECS[:2]))
def test_sums_of_many_arrays_equal_those_of_each(sums, mesh, described, spec):
  arrays = [numbers(shape, dtype, seed) for seed, (shape, dtype) in enumerate(described)]
  placed = [
    jax.device_put(x, NamedSharding(mesh, spec if x.shape and x.shape[0] else P())) if i % 3 else x
    for i, x in enumerate(arrays)
  ]
  assert sums(placed) == [the_sum(sums, x) for x in arrays]


@EITHER
def test_replicas_count_once(sums, mesh):
  x = numbers((16, 8), 'float32')
  one = jax.device_put(x, jax.devices()[5])
  twice = jax.device_put(x, NamedSharding(mesh, P('model')))  # each part on two devices
  everywhere = jax.device_put(x, NamedSharding(mesh, P()))
  assert len({the_sum(sums, array) for array in (x, one, twice, everywhere)}) == 1


@EITHER
def test_the_order_of_devices_is_irrelevant(sums):
  x = numbers((64, 512), 'float32')
  backwards = spmd.make_mesh({'data': 8}, devices=jax.devices()[::-1])
  forwards = spmd.make_mesh({'data': 8})
  found = {the_sum(sums, jax.device_put(x, NamedSharding(m, P('data')))) for m in (backwards, forwards)}
  assert found == {the_sum(sums, x)}


@EITHER
@given(
  dtype=drawn(*DTYPES),
  size=drawn(1, 7, 100, 5000, 40000),
  place=st.integers(0, 2**31),
  bit=st.integers(0, 63),
)
def test_any_change_of_one_word_is_detected(sums, dtype, size, place, bit):
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
  assert the_sum(sums, changed) != the_sum(sums, x)


@EITHER
@given(
  first=st.integers(0, 999), second=st.integers(0, 999), dtype=drawn('float32', 'bfloat16', 'int32')
)
def test_swaps_are_detected(sums, first, second, dtype):
  """Also swaps of x and -x, whose only different bit must not cancel after mixing."""
  for x in (numbers((1000,), dtype), _opposites(1000, dtype)):
    if x[first] != x[second]:
      changed = x.copy()
      changed[[first, second]] = changed[[second, first]]
      assert the_sum(sums, changed) != the_sum(sums, x)


def _opposites(size, dtype):
  half = numbers((size // 2,), dtype)
  return np.concatenate([half, -half])


@EITHER
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_moved_sign_is_detected_at_every_position(sums, dtype):
  """Each position has its own sum; without the mixer's first shift, two of 1,024 had the same."""
  arrays = np.ones((1024, 1024), dtype)
  arrays[np.arange(1024), np.arange(1024)] = -1
  assert len(set(sums(list(arrays)))) == 1024


@EITHER
def test_two_sign_flips_are_detected(sums):
  """A mixer that leaves the highest bit in place would miss every pair of flips."""
  x = numbers((256,), 'float32')
  for distance in (1, 2, 64, 128, 255):
    changed = x.copy()
    changed[0], changed[distance] = -changed[0], -changed[distance]
    assert the_sum(sums, changed) != the_sum(sums, x)


@EITHER
def test_shifts_are_detected(sums):
  x = numbers((512, 8), 'float32')
  assert (
    len(
      {the_sum(sums, np.roll(x, shift, axis)) for shift in range(1, 8) for axis in (0, 1)}
      | {the_sum(sums, x)}
    )
    == 15
  )
