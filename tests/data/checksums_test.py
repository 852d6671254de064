"""Checksums: the CRC-32C of the bytes, on host and devices, under every layout, whoever computes it."""

import contextlib
import sys
import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_spmd._src.data import checksums as checksums_module
from flax_spmd._src.data import crc32c
from flax_spmd._src.data.checksums import PendingChecksums, is_checksum
from tests.data.random_arrays import DTYPES, SHAPES, SPECS, WIDE, drawn, numbers, wide_numbers

with warnings.catch_warnings():
  warnings.simplefilter('ignore', RuntimeWarning)
  import google_crc32c


def expected(array) -> str:
  """The CRC-32C of all bytes, by google-crc32c alone."""
  return f'crc32c:{google_crc32c.value(np.asarray(array).tobytes()):08x}'


def checksums(arrays, likes=()) -> list[str]:
  return PendingChecksums(arrays, likes=likes).complete()


def the_sum(array) -> str:
  return checksums([array])[0]


@contextlib.contextmanager
def on_accelerators():
  """Arrays of JAX are taken up on their devices, as on accelerators, also small ones."""
  with (
    mock.patch.object(checksums_module, 'is_on_host', lambda array: isinstance(array, np.ndarray)),
    mock.patch.object(checksums_module, '_SMALL', 0),
  ):
    yield


NARROW = ('int4', 'uint4')  # numpy has a byte for each, whose upper half may be anything


@settings(max_examples=60)
@given(shape=drawn(*SHAPES), dtype=drawn(*DTYPES), spec=drawn(*SPECS), seed=st.integers(0, 99))
def test_the_same_under_every_layout(mesh, shape, dtype, spec, seed):
  x = numbers(shape, dtype, seed)
  placed = jax.device_put(x, NamedSharding(mesh, spec))
  assert the_sum(placed) == the_sum(x)
  if dtype not in NARROW:
    assert the_sum(x) == expected(x)


@settings(max_examples=8)
@given(shape=drawn(*SHAPES[:5]), dtype=drawn(*DTYPES), spec=drawn(*SPECS), seed=st.integers(0, 99))
def test_the_same_on_accelerators(mesh, shape, dtype, spec, seed):
  x = numbers(shape, dtype, seed)
  placed = jax.device_put(x, NamedSharding(mesh, spec))
  alone = jax.device_put(x, jax.devices()[3])
  with on_accelerators():
    assert checksums([placed, alone]) == 2 * [the_sum(x)]


@pytest.mark.parametrize('dtype', WIDE)
def test_wide_types(mesh, dtype):
  with jax.enable_x64(True):
    for spec in SPECS:
      x = wide_numbers((16, 8), dtype)
      placed = jax.device_put(x, NamedSharding(mesh, spec))
      assert placed.dtype == dtype
      assert the_sum(x) == the_sum(placed) == expected(x)
      with on_accelerators():
        assert the_sum(placed) == expected(x)


@settings(max_examples=60)
@given(
  shape=st.lists(st.integers(0, 9), max_size=4).map(tuple), dtype=drawn(*DTYPES), seed=st.integers(0, 9)
)
def test_every_shape(shape, dtype, seed):
  x = numbers(shape, dtype, seed)
  assert the_sum(x) == the_sum(jnp.asarray(x))
  assert the_sum(np.asfortranarray(x)) == the_sum(x)
  if dtype not in NARROW:
    assert the_sum(x) == expected(x)
  if seed == 0 and not shape:
    with on_accelerators():
      assert the_sum(jnp.asarray(x)) == the_sum(x)


def test_large_arrays_in_blocks(mesh):
  """Arrays larger than a block, with rows longer and shorter than one."""
  for shape in ((3, 1 << 18), (1 << 18, 8), (8, 3, 1 << 15), (1 << 20,), (4, 2, 1 << 17)):
    x = numbers(shape, 'float32')
    for spec in (P('model') if shape[0] % 4 == 0 else P(), P(*[None] * (len(shape) - 1), 'data')):
      placed = jax.device_put(x, NamedSharding(mesh, spec))
      assert the_sum(placed) == expected(x)
      assert the_sum(np.asfortranarray(x)) == expected(x)
  with on_accelerators():
    assert the_sum(placed) == expected(x)


@given(size=st.integers(0, 700_000), cut=st.integers(0, 700_000), seed=st.integers(0, 9))
@settings(max_examples=10)
def test_with_and_without_the_lock_and_the_compiled_extension(size, cut, seed):
  data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
  for unlocked in (crc32c.UNLOCKED, None):
    with mock.patch.object(crc32c, 'UNLOCKED', unlocked):
      assert crc32c.crc_of(data[cut:], crc32c.crc_of(data[:cut])) == google_crc32c.value(data)
      compiled = crc32c.extended(seed, data, compiled=True)
  assert crc32c.extended(seed, data, compiled=False) == compiled


@pytest.mark.skipif(
  sys.platform != 'linux' or not crc32c.IS_COMPILED,
  reason='the library may be linked into the extension',
)
def test_the_library_without_the_lock_is_found():
  assert crc32c.UNLOCKED is not None


def test_under_a_mesh_with_explicit_axes():
  """The mesh of the arrays, or another one, may be in force."""
  explicit = jax.make_mesh((4, 2), ('a', 'b'), axis_types=2 * (jax.sharding.AxisType.Explicit,))
  x = numbers((64, 512), 'float32')
  with jax.set_mesh(explicit), on_accelerators():
    placed = jax.device_put(x, NamedSharding(explicit, P('b', 'a')))
    assert checksums([placed, jnp.asarray(x)]) == 2 * [expected(x)]


def test_a_mesh_of_one_device_stays_whole():
  """The set of devices belongs to the sharding of the caller's array."""
  x = numbers((64, 512), 'float32')
  alone = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[2:3]), 'a'), P())
  made = jax.jit(lambda y: y, out_shardings=alone)(x)
  with on_accelerators():
    assert checksums([made]) == checksums([made]) == [expected(x)]
  assert made.sharding.device_set == {jax.devices()[2]}


def test_an_array_may_be_donated_or_changed_before_the_sums_are_complete(mesh):
  x = numbers((64, 512), 'float32')
  changed, placed = x.copy(), jax.device_put(x, NamedSharding(mesh, P('data')))
  for place in (contextlib.nullcontext, on_accelerators):
    with place():
      complete = PendingChecksums([changed, placed]).complete
    changed[:] = 0
    placed = jax.jit(lambda y: y + 0, donate_argnums=0)(placed)
    assert complete() == 2 * [expected(x)]
    changed[:] = x


def test_recorded_sums_of_both_kinds_are_compared(mesh):
  x, y = numbers((64, 128), 'float32'), numbers((7,), 'int8')
  arrays = [x, y, jax.device_put(x, NamedSharding(mesh, P('data')))]
  old, new = checksums(arrays, 3 * ['00000000']), checksums(arrays)
  assert old[0] == old[2] and new[0] == new[2] == expected(x) and ':' not in old[1]
  assert checksums(arrays, [old[0], new[1], old[2]]) == [old[0], new[1], old[2]]
  assert all(map(is_checksum, old + new))
  assert not any(map(is_checksum, ('', 'crc32c:', 'md5:00000000', 'crc32c:0000000g', 7, None)))


def test_keys_and_python_numbers():
  keys = jax.random.split(jax.random.key(3), 8)
  assert the_sum(keys) == the_sum(np.asarray(jax.random.key_data(keys)))
  assert the_sum(3) == the_sum(np.int64(3)) != the_sum(4)
  assert the_sum(True) != the_sum(False)
  assert the_sum(0.5) != the_sum(-0.5)


def test_bits_of_equal_numbers_differ():
  """0.0 and -0.0, and NaNs with different bits: a checksum is of bits, not of values."""
  assert the_sum(np.zeros(3, np.float32)) != the_sum(-np.zeros(3, np.float32))
  nan = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
  assert the_sum(nan[:1]) != the_sum(nan[1:])
