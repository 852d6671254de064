"""Digests of arrays on one process: equal for equal bits, dtype and shape, and for nothing else that occurs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flax_spmd._src.data.digests import digests

DTYPES = (
  'bool',
  'int4',
  'int8',
  'uint16',
  'bfloat16',
  'float8_e4m3fn',
  'float32',
  'int64',
  'complex128',
)
SHAPES = ((), (0,), (1,), (3, 5), (4097,), (300, 129), (70_000,))


def digest(array):
  [one] = digests([array])
  return one


def numbers(shape, dtype):
  bits = np.random.default_rng(0).integers(0, 2, (*shape, 8), dtype=np.int8)
  return bits.sum(-1).astype(dtype)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('shape', SHAPES)
def test_equal_arrays_have_equal_digests(dtype, shape):
  array = numbers(shape, dtype)
  assert digest(array) == digest(array.copy()) == digest(np.array(array, order='F'))
  assert digest(np.stack([array, array], -1)[..., 0]) == digest(array)  # not contiguous


def test_arrays_on_a_device_have_the_digest_of_their_values():
  for array in (
    np.arange(3, dtype=np.int32),
    numbers((300, 129), 'float32'),
    numbers((7,), jnp.bfloat16),
  ):
    assert digest(jax.device_put(array, jax.devices()[1])) == digest(array)


def test_digests_are_those_of_each_array():
  arrays = [numbers(shape, dtype) for shape in SHAPES for dtype in ('int8', 'float32')]
  together = digests(arrays)
  assert together == [digest(array) for array in arrays]
  assert len(set(together)) == len(arrays)


def test_dtype_and_shape_are_part_of_a_digest():
  zeros = np.zeros(6_000, np.float32)
  different = [
    zeros,
    zeros.view(np.int32),
    zeros.reshape(2, -1),
    zeros[:-1],
    np.zeros(12_000, np.float16),
  ]
  assert len(set(digests(different))) == len(different)


@given(st.integers(1, 50_000), st.data())
def test_a_change_of_any_bit_changes_the_digest(size, data):
  array = np.zeros(size, np.uint8)
  changed = array.copy()
  changed[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
  assert digest(array) != digest(changed)


@given(st.sampled_from(['float32', 'float64', 'bfloat16']), st.data())
def test_two_changed_signs_or_exchanged_numbers_change_the_digest(dtype, data):
  array = np.random.default_rng(0).standard_normal(40_000).astype(dtype)
  one, other = data.draw(st.lists(st.integers(0, 39_999), min_size=2, max_size=2, unique=True))
  signs, exchanged = array.copy(), array.copy()
  signs[[one, other]] *= -1
  exchanged[[one, other]] = array[[other, one]]
  assert digest(array) != digest(signs) != digest(-array) != digest(array)
  assert digest(array) != digest(exchanged) or array[one] == array[other]


def test_digests_stay_the_same():
  """Processes with different numpy versions have to agree."""
  assert digests([np.arange(3), np.arange(20_000, dtype=np.float32)]) == [
    'ce0618b9f29b48dd',
    'cd1d6926423153d5',
  ]
