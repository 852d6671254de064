"""Random arrays of many dtypes and shapes, and shardings of them on a mesh of data x model."""

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

DTYPES = (
  *('bool', 'int8', 'uint8', 'int16', 'uint16', 'int32', 'uint32', 'float16', 'bfloat16', 'float32'),
  *('complex64', 'int4', 'uint4', 'float8_e4m3fn', 'float8_e5m2'),
)
WIDE = ('int64', 'uint64', 'float64', 'complex128')
SPECS = (P(), P('data'), P(None, 'model'), P('model', 'data'), P(('data', 'model')), P(None, ('model',)))
SHAPES = ((8, 8), (16, 8, 3), (64, 128), (8, 4096), (4096, 8), (8, 8, 5, 2), (16, 24, 100), (8, 3000, 8))


def numbers(shape, dtype, seed=0):
  """Random bits; for floats random numbers, since NaNs need not keep their bits."""
  generator = np.random.default_rng(seed)
  if dtype == 'bool':
    return generator.integers(0, 2, shape).astype(bool)
  if jnp.issubdtype(dtype, jnp.integer):
    info = jnp.iinfo(dtype)
    return generator.integers(int(info.min), int(info.max), shape, endpoint=True, dtype=np.int64).astype(
      dtype
    )
  real = generator.standard_normal(shape)
  return (
    (real + 1j * generator.standard_normal(shape)).astype(dtype)
    if 'complex' in dtype
    else real.astype(dtype)
  )


def wide_numbers(shape, dtype, seed=0):
  generator = np.random.default_rng(seed)
  bits = generator.integers(0, 2**63, (*shape, 2 if dtype == 'complex128' else 1), dtype=np.uint64)
  if 'int' in dtype:
    return bits[..., 0].astype(dtype)
  return numbers(shape, dtype, seed)


def drawn(*options):
  return st.sampled_from(options)
