"""Bytes as text."""

from flax_spmd._src.text import size_text


def test_large_sizes():
  assert [size_text(5 * 2**exponent) for exponent in (30, 40, 50, 60, 70)] == [
    '5 GiB',
    '5 TiB',
    '5 PiB',
    '5 EiB',
    '5.12e+03 EiB',
  ]
