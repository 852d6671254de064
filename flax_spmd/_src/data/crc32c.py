"""CRC-32C (Castagnoli) of bytes, and the polynomials over GF(2) by which CRCs of parts make that of the whole.

A CRC is the remainder of the content, read as a polynomial with a bit per coefficient. Remainders add up by
exclusive or, and a part that `n` bits follow counts times x**n. So the parts of an array may be taken up on
different devices, in any order. Here a *state* is a remainder: a CRC without its initial and final inversion.
Bit 31 of a state is the coefficient of x**0, as everywhere where bits are reflected.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

with warnings.catch_warnings():  # where it has no compiled extension, it warns; see `extended`
  warnings.simplefilter('ignore', RuntimeWarning)
  import google_crc32c

_POLYNOMIAL = 0x82F63B78
_ONE = 1 << 31  # x**0
_ONES = 0xFFFFFFFF
_WIDTH = 1 << 10  # words that are contracted at a time
_CHUNK = 1 << 18  # bytes: the interpreter lock is held for 0.02 ms
IS_COMPILED = google_crc32c.implementation == 'c'


def _unlocked_function() -> Any:
  """`crc32c_extend` of google-crc32c's C library, which ctypes calls without the interpreter lock; None if it is not found.

  The extension keeps the lock: threads take up one chunk after another, and Orbax's wait.
  """
  try:
    function = ctypes.CDLL(vars(google_crc32c)['_crc32c'].__file__).crc32c_extend
  except (KeyError, AttributeError, OSError):  # not compiled, or linked in another way
    return None
  function.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)
  function.restype = ctypes.c_uint32
  return function


UNLOCKED = _unlocked_function()


def crc_of(data: Any, crc: int = 0) -> int:
  """The CRC-32C of bytes.

  Args:
    data: bytes, or a buffer of them.
    crc: CRC of the bytes before them.

  Example:
    >>> f'{crc_of(b"123456789"):08x}', f'{crc_of(b"6789", crc_of(b"12345")):08x}'
    ('e3069283', 'e3069283')
  """
  return extended(crc ^ _ONES, data) ^ _ONES


def extended(state: int, data: Any, compiled: bool = IS_COMPILED) -> int:
  """The state after further bytes.

  Args:
    state: state before them.
    data: bytes, or a buffer of them.
    compiled: whether google-crc32c has its compiled extension. Its Python code takes a second per MB; without the
      extension, numpy computes the same, at about 0.1 GB/s.
  """
  view = np.frombuffer(data, np.uint8)
  if compiled and UNLOCKED is not None and view.size > _CHUNK:
    return UNLOCKED(state ^ _ONES, view.ctypes.data, view.size) ^ _ONES
  for begin in range(0, view.size, _CHUNK):
    chunk = view[begin : begin + _CHUNK]
    if compiled:
      state = google_crc32c.extend(state ^ _ONES, chunk) ^ _ONES
    else:
      added = int(contracted(chunk.astype(np.uint32), 8, 8, np))
      state = followed(state, 8 * chunk.size) ^ followed(added, 8)
  return state


def followed(state: int, bits: int) -> int:
  """The state after a number of zero bits: the product with x**bits."""
  return _product(state, _power(bits)) if state and bits else state


def contracted(words: Any, step: int, bits: int, xp: Any) -> Any:
  """The sum of states along the last dimension, where each of `n` states is followed by `step` bits per later one.

  Args:
    words: states, as uint32[..., n].
    step: number of bits.
    bits: number of low bits of a state that may not be zero.
    xp: numpy or jax.numpy.

  Returns:
    uint32[...].
  """
  size = words.shape[-1]
  if size > _WIDTH:
    lead = [(0, 0)] * (words.ndim - 1)  # leading zeros add nothing
    padded = xp.pad(words, [*lead, (-size % _WIDTH, 0)])
    inner = contracted(padded.reshape(*words.shape[:-1], -1, _WIDTH), step, bits, xp)
    return contracted(inner, step * _WIDTH, 32, xp)
  products = _products(step, size)[:bits]
  if xp is np:
    total = np.zeros_like(words)
    for bit in range(bits):
      total ^= (words >> np.uint32(bit) & np.uint32(1)) * products[bit]
    return np.bitwise_xor.reduce(total, axis=-1)
  shape = (*words.shape[:-1], bits, size)  # in one loop, which the compiler fuses with the reduction
  places = jax.lax.broadcasted_iota(np.uint32, shape, len(shape) - 2)
  ones = jnp.broadcast_to(words[..., None, :], shape) >> places & np.uint32(1)
  terms = ones * jnp.broadcast_to(products, shape)
  return jax.lax.reduce(terms, np.uint32(0), jax.lax.bitwise_xor, (len(shape) - 2, len(shape) - 1))


@functools.lru_cache(maxsize=256)
def _products(step: int, size: int) -> np.ndarray:
  """The product of each bit of a word with x**(step * later), where `later` words follow it: uint32[32, size]."""
  powers = np.array([_ONE], np.uint32)
  while powers.size < size:
    powers = np.concatenate([_products_with(powers, _power(step * powers.size)), powers])
  rows = [powers[powers.size - size :]]
  for _ in range(31):
    rows.insert(0, _times_x(rows[0]))
  return np.stack(rows)


def _products_with(states: np.ndarray, factor: int) -> np.ndarray:
  total = np.zeros_like(states)
  for bit in range(31, -1, -1):
    total ^= (states >> np.uint32(bit) & np.uint32(1)) * np.uint32(factor)
    factor = _times_x(factor)
  return total


def _times_x(states: Any) -> Any:
  return states >> 1 ^ (states & 1) * _POLYNOMIAL


def _product(one: int, two: int) -> int:
  total = 0
  for bit in range(31, -1, -1):
    if one >> bit & 1:
      total ^= two
    two = _times_x(two)
  return total


@functools.lru_cache(maxsize=4096)
def _power(exponent: int) -> int:
  """x**exponent."""
  total = _ONE
  for place in range(exponent.bit_length()):
    if exponent >> place & 1:
      total = _product(total, _square(place))
  return total


@functools.cache
def _square(times: int) -> int:
  """x, squared a number of times."""
  return _product(_square(times - 1), _square(times - 1)) if times else _ONE >> 1
