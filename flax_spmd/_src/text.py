"""Text: bytes, seconds, counts and lists as people read them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any


def size_text(count: float) -> str:
  """Bytes in binary units, with three significant digits.

  Example:
    >>> size_text(3 * 2**20)
    '3 MiB'
    >>> size_text(1000 * 2**20)
    '1000 MiB'
  """
  for unit in ('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'):
    if count < 1024:
      return f'{count:.0f} {unit}' if count >= 999.5 else f'{count:.3g} {unit}'
    count /= 1024
  return f'{count:.3g} EiB'


def time_text(seconds: float) -> str:
  """Seconds in a suitable unit, with three significant digits.

  Example:
    >>> time_text(0.0123), time_text(4.5e-5)
    ('12.3 ms', '45 us')
  """
  for size, unit in ((1.0, 's'), (1e-3, 'ms')):
    if seconds >= size:
      return f'{seconds / size:.3g} {unit}'
  return f'{seconds / 1e-6:.3g} us'


def plain_strings(value: Any, depth: int = 4) -> Any:
  """A value whose strings are plain: those of an Enum are formatted with its class, those of NumPy shown as such.

  Args:
    value: anything; looked into if it is a tuple or a list. JAX keeps one object for equal PartitionSpecs: pass a tuple.
    depth: the number of tuples and lists, one in another, that are looked into; names and rules have fewer.

  Example:
    >>> plain_strings((np.str_('embed'), ('data', None)))
    ('embed', ('data', None))
  """
  if type(value) is str:
    return value
  if isinstance(value, str):
    return str.__str__(value)
  if type(value) not in (tuple, list) or not depth:
    return value
  return type(value)(plain_strings(entry, depth - 1) for entry in value)


_SHOWN = 8  # lines of one message


def first_lines(lines: Sequence[str]) -> str:
  """The first lines, and the number of the others.

  Example:
    >>> print(first_lines([f'  w{i}' for i in range(10)]).splitlines()[-1])
      … and 2 more
  """
  more = [f'  … and {len(lines) - _SHOWN} more'] if len(lines) > _SHOWN else []
  return '\n'.join([*lines[:_SHOWN], *more])


def shown(value: object) -> str:
  r"""A value in an error text: on one line, and no longer than a line.

  Example:
    >>> shown(ValueError('Expected dict, got array([[1.,\n  2.]])'))
    'Expected dict, got array([[1., 2.]])'
  """
  text = ' '.join(str(value).split())
  return text if len(text) <= _LONGEST else f'{text[:_LONGEST]} ...'


_LONGEST = 120  # characters


def value_text(value: object) -> str:
  """The repr of a value of a caller in an error text: one that is never too long, and always there.

  Example:
    >>> value_text(['a', 1]), len(value_text('x' * 9000))
    ("['a', 1]", 1004)
  """
  try:
    text = repr(value)
  except Exception as error:  # of a class of the caller; or the value is nested too deeply
    text = f'<{type(value).__name__} whose repr raises {type(error).__name__}>'
  return text if len(text) <= _LONGEST_VALUE else f'{text[:_LONGEST_VALUE]} ...'


_LONGEST_VALUE = 1000  # characters


def array_text(dtype: object, shape: Sequence[int]) -> str:
  """An array as JAX shows its type: `float32[8,16]`."""
  return f'{dtype}[{",".join(map(str, shape))}]'


def rank_text(shape: Sequence[int]) -> str:
  """The rank of an array, and its shape, unless its sizes are unknown, which are zeros.

  Example:
    >>> rank_text((8, 16)), rank_text((0, 0))
    ('rank 2, shape (8, 16)', 'rank 2')
  """
  sizes = '' if shape and not any(shape) else f', shape {tuple(shape)}'
  return f'rank {len(shape)}{sizes}'


def plural(count: int, noun: str) -> str:
  """`1 device`, `2 devices`."""
  return f'{count} {noun}{"" if count == 1 else "s"}'


def listed_paths(paths: Sequence[str]) -> str:
  """`3 arrays: a, b, ...`."""
  return f'{plural(len(paths), "array")}: {", ".join(paths[:2])}{", ..." if len(paths) > 2 else ""}'


def with_article(noun: str) -> str:
  """A noun after its article.

  Example:
    >>> with_article('str'), with_article('object')
    ('a str', 'an object')
  """
  return f'{"an" if noun[:1].lower() in tuple("aeiou") else "a"} {noun}'


_UNITS = {'': 1, 'B': 1, 'KiB': 2**10, 'MiB': 2**20, 'GiB': 2**30, 'TiB': 2**40}


def parse_size(size: int | str) -> int:
  """Parses a size such as `'14GiB'` as bytes; a number passes through.

  Raises:
    ValueError: the text is not a size.

  Example:
    >>> parse_size('14GiB'), parse_size(100)
    (15032385536, 100)
  """
  match = re.fullmatch(r'(\d+(?:\.\d+)?) ?(B|[KMGT]iB)?', str(size))
  if not match:
    raise ValueError(f'{size!r} is not a size; write it as 14GiB')
  return int(float(match[1]) * _UNITS[match[2] or ''])


def without_addresses(text: str) -> str:
  """A repr without addresses of objects, which differ between processes.

  Example:
    >>> without_addresses('<function f at 0x7f3a>')
    '<function f>'
  """
  return _ADDRESS.sub('', text)


_ADDRESS = re.compile(' at 0x[0-9a-f]+')
