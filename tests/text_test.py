"""Bytes and values as text."""

from flax_spmd._src.text import size_text, value_text


def test_large_sizes():
  assert [size_text(5 * 2**exponent) for exponent in (30, 40, 50, 60, 70)] == [
    '5 GiB',
    '5 TiB',
    '5 PiB',
    '5 EiB',
    '5.12e+03 EiB',
  ]


class Unprintable:
  def __repr__(self):
    raise KeyError('no repr')


def test_values_of_callers_have_a_short_text_whatever_they_are():
  nested: list = []
  for _ in range(3000):
    nested = [nested]
  assert value_text(nested) == '<list whose repr raises RecursionError>'
  assert value_text({'a': Unprintable()}) == '<dict whose repr raises KeyError>'
  assert value_text([*range(9)]) == repr([*range(9)])
  assert value_text('x' * 10**6) == "'" + 'x' * 999 + ' ...'
