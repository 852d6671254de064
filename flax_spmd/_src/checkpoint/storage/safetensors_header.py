"""Safetensors headers: the table of contents of one file, checked before any of its data is used.

A file is the length of its header (8 bytes, little-endian), the header, and the data. The header is a JSON object
with the dtype, the shape and the place of each tensor, in bytes from the end of the header:

    {"__metadata__": {"format": "pt"},
     "model.norm.weight": {"dtype": "BF16", "shape": [4096], "data_offsets": [0, 8192]}, ...}

As in the format's own library, the tensors cover the data without overlaps and without holes. Anyone may have written
the file, so a header that claims anything else is refused with every such claim.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from flax_spmd._src.checkpoint.storage.byte_ranges import RangeFile, stamp
from flax_spmd._src.checkpoint.storage.parsed_json import expect
from flax_spmd._src.checkpoint.storage.record import dtype_of, is_unsafe_name
from flax_spmd._src.text import value_text
from flax_spmd.errors import CheckpointDamagedError, CheckpointError

METADATA = '__metadata__'
LENGTH_BYTES = 8
MOST_HEADER_BYTES = 100_000_000  # the limit of the format's own library
DTYPES = {  # https://github.com/huggingface/safetensors, `Dtype`
  'BOOL': 'bool',
  'U8': 'uint8',
  'I8': 'int8',
  'F8_E5M2': 'float8_e5m2',
  'F8_E4M3': 'float8_e4m3fn',
  'F8_E8M0': 'float8_e8m0fnu',
  'F8_E4M3FNUZ': 'float8_e4m3fnuz',
  'F8_E5M2FNUZ': 'float8_e5m2fnuz',
  'U16': 'uint16',
  'I16': 'int16',
  'F16': 'float16',
  'BF16': 'bfloat16',
  'U32': 'uint32',
  'I32': 'int32',
  'F32': 'float32',
  'U64': 'uint64',
  'I64': 'int64',
  'F64': 'float64',
  'C64': 'complex64',
}
_PACKED = ('F4', 'F6_E2M3', 'F6_E3M2')  # several elements share a byte
_LARGEST = 2**62  # bytes of an array that numpy can describe
_SHOWN = 30


class TensorEntry(NamedTuple):
  """One tensor of a file.

  Attributes:
    name: name in the header.
    shape: shape of the array.
    dtype: numpy's name of its dtype.
    begin, end: bytes of its data, from the start of the file.
  """

  name: str
  shape: tuple[int, ...]
  dtype: str
  begin: int
  end: int


def tensor_path(name: str) -> str:
  """The path of a tensor: its name, whose dots separate modules.

  Example:
    >>> tensor_path('model.layers.3.mlp.up_proj.weight')
    'model/layers/3/mlp/up_proj/weight'
  """
  return name.replace('.', '/')


def read_header(file: epath.Path) -> dict[str, TensorEntry]:
  """The tensors of a file, by name.

  Raises:
    CheckpointDamagedError: the file is not a valid safetensors file (lists every problem).
  """
  size = stamp(file)[0]
  try:
    length, text = _length_and_text(file, size)
    content = _parsed(text)
  except CheckpointError:  # of a bucket
    raise
  except (ValueError, EOFError) as error:
    raise invalid(file, [str(error)]) from error
  start = LENGTH_BYTES + length
  problems = list(name_problems(name for name in content if name != METADATA))
  entries: dict[str, TensorEntry] = {}
  for name, described in content.items():
    try:
      if name == METADATA:
        _check_metadata(described)
      else:
        entries[name] = _entry(name, described, start, size)
    except ValueError as error:
      problems.append(str(error))
  problems += _layout_problems(list(entries.values()), start, size) if not problems else []
  if problems:
    raise invalid(file, problems)
  return entries


def _length_and_text(file: epath.Path, size: int) -> tuple[int, bytes]:
  """The length of a header, and the header. No other byte of the file is read."""
  expect(size >= LENGTH_BYTES, f'it has {size} bytes, too few for a header.')
  with contextlib.closing(RangeFile(file)) as opened:
    length = int.from_bytes(opened.read(0, LENGTH_BYTES), 'little')
    expect(
      length <= size - LENGTH_BYTES,
      f'its header has {length:,} bytes, and the file {size - LENGTH_BYTES:,} after the length.',
    )
    expect(
      length <= MOST_HEADER_BYTES,
      f'its header has {length:,} bytes; the format allows {MOST_HEADER_BYTES:,}.',
    )
    return length, opened.read(LENGTH_BYTES, length)


def invalid(file: epath.Path, problems: Sequence[str]) -> CheckpointDamagedError:
  """The error for a file whose header does not fit its contents."""
  return listed_problems(f'The file {file} is not a valid safetensors file:', problems, _FIX)


def listed_problems(text: str, problems: Sequence[str], fix: str) -> CheckpointDamagedError:
  """The error of a file with problems, of which it lists the first."""
  more = [f'and {len(problems) - _SHOWN} more.'] if len(problems) > _SHOWN else []
  return CheckpointDamagedError('\n'.join([text, *problems[:_SHOWN], *more, fix]))


_FIX = 'Fix: copy or download it again; it is incomplete, or was changed after it was written.'


def _parsed(data: bytes) -> dict[str, Any]:
  """The JSON object of a header."""
  try:
    expect(data[:1] == b'{', 'it does not begin with {')
    content = json.loads(data.decode(), object_pairs_hook=without_duplicates)
  except (ValueError, RecursionError) as error:
    reason = 'it is nested too deeply' if isinstance(error, RecursionError) else str(error).rstrip('.')
    raise ValueError(f'its header is not a JSON object: {reason}.') from error
  return content


def without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
  """An object of JSON, which has no key twice."""
  result: dict[str, Any] = {}
  for name, value in pairs:
    if name in result:
      raise ValueError(f'it has {value_text(name)} twice')
    result[name] = value
  return result


def _check_metadata(content: Any) -> None:
  is_texts = isinstance(content, dict) and all(isinstance(text, str) for text in content.values())
  expect(is_texts, f'{METADATA}: it is not an object of strings.')


def _entry(name: str, content: Any, start: int, size: int) -> TensorEntry:
  """A checked tensor.

  Args:
    name: its name.
    content: its JSON value.
    start: first byte of the data.
    size: bytes of the file.
  """
  text = repr(name)
  expect(isinstance(content, dict), f'{text}: it is not an object.')
  missing = [field for field in ('dtype', 'shape', 'data_offsets') if field not in content]
  expect(not missing, f'{text}: it has no {" and no ".join(missing)}.')
  dtype, shape, offsets = content['dtype'], content['shape'], content['data_offsets']
  expect(dtype not in _PACKED, f'{text}: arrays of {dtype} share bytes, which is not supported.')
  known = isinstance(dtype, str) and dtype in DTYPES
  expect(known, f'{text}: its dtype {_short(dtype)} is unknown.')
  itemsize = dtype_of(DTYPES[dtype]).itemsize
  expect(_is_sizes(shape), f'{text}: its shape {_short(shape)} is not a list of sizes.')
  fits = math.prod(max(length, 1) for length in shape) * itemsize < _LARGEST
  expect(fits, f'{text}: its shape {_short(shape)} is too large.')
  is_pair = _is_sizes(offsets) and len(offsets) == 2
  expect(is_pair, f'{text}: its data_offsets {_short(offsets)} are not two positions.')
  begin, end = offsets
  expect(begin <= end, f'{text}: its data_offsets {offsets} run backwards.')
  expect(
    end <= size - start,
    f'{text}: its data end at byte {end:,}, and the file has {size - start:,} of data.',
  )
  needed = math.prod(shape) * itemsize
  expect(
    end - begin == needed,
    f'{text}: {dtype}{shape} has {needed:,} bytes, and its data_offsets {end - begin:,}.',
  )
  return TensorEntry(name, tuple(shape), DTYPES[dtype], start + begin, start + end)


def _is_sizes(content: Any) -> bool:
  return isinstance(content, list) and all(type(size) is int and size >= 0 for size in content)


def _short(value: Any) -> str:
  """A value of a header for an error text."""
  text = repr(value)
  return text if len(text) <= 80 else f'{text[:77]}...'


def _layout_problems(entries: Sequence[TensorEntry], start: int, size: int) -> Iterator[str]:
  """Overlaps of tensors, and bytes of no tensor."""
  end, before = start, ''
  for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
    if entry.begin < end:
      yield f'{entry.name!r} and {before!r} overlap, from byte {entry.begin - start:,} of the data.'
    elif entry.begin > end:
      yield _hole(end - start, entry.begin - start)
    if entry.end >= end:
      end, before = entry.end, entry.name
  if end < size:
    yield _hole(end - start, size - start)


def _hole(begin: int, end: int) -> str:
  return f'bytes {begin:,} to {end:,} of the data belong to no tensor.'


def name_problems(names: Iterable[str]) -> Iterator[str]:
  """Names that are unsafe as paths, and names with one path."""
  by_path: dict[str, str] = {}
  for name in names:
    if any(map(is_unsafe_name, tensor_path(name).split('/'))) or not _is_text(name):
      yield f'{name!r} is not safe as a path.'
    other = by_path.setdefault(tensor_path(name), name)
    if other != name:
      yield f'{other!r} and {name!r} have one path, {tensor_path(name)}.'


def _is_text(name: str) -> bool:
  """Whether a name can be written: JSON can hold half a character."""
  try:
    return bool(name.encode())
  except UnicodeEncodeError:
    return False


def header_bytes(entries: Mapping[str, Mapping[str, Any]], metadata: Mapping[str, str]) -> bytes:
  """The length and the header of a file, padded so that its data are aligned to 8 bytes."""
  content = {METADATA: dict(metadata), **entries} if metadata else dict(entries)
  text = json.dumps(content, separators=(',', ':')).encode()
  text += b' ' * (-len(text) % LENGTH_BYTES)
  return len(text).to_bytes(LENGTH_BYTES, 'little') + text
