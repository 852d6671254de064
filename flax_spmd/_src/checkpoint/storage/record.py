"""Records: the description of a checkpoint's arrays, stored beside them as one JSON object.

The object is in the manifest of a generation; in the former format, in Orbax's custom metadata under `flax_spmd`:

    {"format": 1, "layout": "<TOML>",
     "tree": {"params": {"w": 0}, ...},
     "leaves": [{"shape": [8, 16], "dtype": "float32", "names": ["embed", "mlp"], "spec": [null, "model"],
                 "checksum": "crc32c:5f1c22a0"}, ...],
     "kinds": {"opt_state/0": "ScaleByAdamState"},
     "digest": "<hash of the above>"}

Anyone may have written or damaged the file. So every field is validated before it is used, nothing in a
record is executed, and no file path is built from it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from flax_spmd._src.checkpoint.storage import skeleton
from flax_spmd._src.checkpoint.storage.parsed_json import check_format, expect, reason_of
from flax_spmd._src.checkpoint.storage.skeleton import Skeleton
from flax_spmd._src.data.checksums import is_checksum
from flax_spmd._src.text import array_text, value_text
from flax_spmd.errors import CheckpointDamagedError, CheckpointError

KEY = 'flax_spmd'
FORMAT = 1
NUMBERS = {'python.bool': bool, 'python.int': int, 'python.float': float}  # not array dtypes
_PYTHON = 'python.'  # other Python values, such as strings, occur in checkpoints of plain Orbax only
_KEY_DTYPES = {'key<fry>': 'threefry2x32', 'key<rbg>': 'rbg', 'key<urbg>': 'unsafe_rbg'}
_DTYPE = re.compile(r'[a-z][a-z0-9_]*\Z')
_SURROGATE = re.compile('[\ud800-\udfff]')  # half a character, which no file name can have


class LeafRecord(NamedTuple):
  """The description of one leaf. Its fields are the keys of the JSON object.

  Attributes:
    shape: shape of the whole array.
    dtype: name of the dtype; for a Python number, `python.` and its type.
    names: logical name per dimension, None for an unnamed one; None for a leaf without names.
    spec: mesh axes per dimension, of its sharding when it was saved.
    checksum: checksum of its content, independent of the layout; see `own_checksums`.
    value: value of a Python number.
    on_mesh: True if its names are names of mesh axes, not logical names.
    packed: for a small leaf stored in a packed array, the array's dtype and the offset in elements.
  """

  shape: tuple[int, ...]
  dtype: str
  names: tuple[Any, ...] | None = None
  spec: tuple[Any, ...] | None = None
  checksum: str | None = None
  value: bool | int | float | None = None
  on_mesh: bool | None = None
  packed: tuple[str, int] | None = None

  def __str__(self) -> str:
    if self.is_number:
      return f'a Python {self.dtype.removeprefix("python.")}'
    return array_text(self.dtype, self.shape)

  @property
  def named(self) -> str:
    """`float32[embed=8, mlp=16]`."""
    if self.names is None:
      return str(self)
    names = ('+'.join(name) if isinstance(name, tuple) else name for name in self.names)
    sizes = (
      f'{name}={size}' if name else str(size) for name, size in zip(names, self.shape, strict=True)
    )
    return f'{self.dtype}[{", ".join(sizes)}]'

  @property
  def is_number(self) -> bool:
    """Whether the leaf is a Python value and not an array."""
    return self.dtype.startswith(_PYTHON)

  @property
  def is_empty(self) -> bool:
    """Whether the leaf is an array without elements. Orbax cannot store one: it is in the record alone."""
    return 0 in self.shape

  @property
  def bytes(self) -> int:
    """Bytes of the whole array; 0 for a Python value."""
    return 0 if self.is_number else math.prod(self.shape) * dtype_of(self.dtype).itemsize


def key_dtype(implementation: Any) -> str | None:
  """The dtype name of an array of random keys; None for an unknown implementation.

  Args:
    implementation: name of an implementation of `jax.random`, such as `'threefry2x32'`.
  """
  return next((name for name, known in _KEY_DTYPES.items() if known == implementation), None)


def is_key(leaf: LeafRecord) -> bool:
  """Whether a leaf is an array of random keys."""
  return leaf.dtype in _KEY_DTYPES


def ends_of_packs(leaves: Iterable[LeafRecord]) -> tuple[dict[str, int], set[str]]:
  """The end of each packed array, in elements, and the names of those in which leaves do not follow one another."""
  ends: dict[str, int] = {}
  wrong = set()
  for leaf in leaves:
    if leaf.packed is not None:
      name, offset = leaf.packed
      if offset != ends.get(name, 0) or leaf.dtype != name:
        wrong.add(name)
      ends[name] = max(offset, 0) + math.prod(leaf.shape)
  return ends, wrong


def raw_keys(leaf: LeafRecord) -> LeafRecord:
  """The record of an array of random keys as numbers, which have one more dimension."""
  names = None if leaf.names is None else (*leaf.names, None)
  return leaf._replace(shape=(*leaf.shape, *_key_shape(leaf.dtype)), dtype='uint32', names=names)


def typed_keys(leaf: LeafRecord, dtype: str) -> LeafRecord | None:
  """The record of numbers as an array of random keys; None if keys of this dtype have another last dimension."""
  if leaf.dtype != 'uint32' or leaf.shape[-1:] != _key_shape(dtype):
    return None
  names = None if leaf.names is None else leaf.names[:-1]
  return leaf._replace(shape=leaf.shape[:-1], dtype=dtype, names=names)


def key_implementation(dtype: str) -> str:
  """The implementation of `jax.random` of a dtype of keys.

  Example:
    >>> key_implementation('key<fry>')
    'threefry2x32'
  """
  return _KEY_DTYPES[dtype]


@functools.cache
def _key_shape(dtype: str) -> tuple[int, ...]:
  return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=_KEY_DTYPES[dtype]))).shape


def device_dtype(dtype: str) -> str:
  """The dtype that an array of this dtype gets on a device: half as wide for 64 bits, unless JAX has them enabled."""
  if dtype in _KEY_DTYPES or dtype.startswith(_PYTHON):
    return dtype
  return _dtype_text(jax.dtypes.canonicalize_dtype(dtype_of(dtype)))


@functools.cache
def dtype_of(name: str) -> Any:
  """The dtype of this name.

  Raises:
    TypeError: no array dtype has this name.
  """
  if name in _KEY_DTYPES:
    return jax.eval_shape(lambda: jax.random.key(0, impl=_KEY_DTYPES[name])).dtype
  dtype = jnp.dtype(name) if _DTYPE.match(name) else None
  if dtype is None or not (dtype.kind == 'b' or jnp.issubdtype(dtype, jnp.number)):
    raise TypeError(f'{value_text(name)} is not an array dtype')
  return dtype


@dataclasses.dataclass(frozen=True)
class Record:
  """The description of a whole checkpoint.

  Attributes:
    skeleton: structure of the state.
    leaves: record of each leaf by path, in the order of the skeleton's indices.
    kinds: class name of each optimizer state, by path.
    layout: layout that the state was saved under, as TOML; None if it has no text form.
    written_by: `flax_spmd`, `orbax`, `flax`, `t5x` or `safetensors`. Checkpoints of others have shapes and dtypes only.
    skipped: names of the parts of a Composite checkpoint that hold neither arrays nor numbers.
    unreadable: the reason for each part of a Composite checkpoint whose description is damaged, by its name.
  """

  skeleton: Skeleton
  leaves: dict[str, LeafRecord]
  kinds: dict[str, str]
  layout: str | None = None
  written_by: str = 'flax_spmd'
  skipped: tuple[str, ...] = ()
  unreadable: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @property
  def bytes(self) -> int:
    """Bytes of all arrays."""
    return sum(leaf.bytes for leaf in self.leaves.values())

  @property
  def largest(self) -> int:
    """Bytes of the largest stored array, counting all packed leaves as one."""
    packed = sum(leaf.bytes for leaf in self.leaves.values() if leaf.packed)
    return max(packed, *(leaf.bytes for leaf in self.leaves.values()))


def dtype_name(leaf: Any) -> str:
  """The dtype name of a leaf of a state."""
  dtype = getattr(leaf, 'dtype', None)
  return f'python.{type(leaf).__name__}' if dtype is None else _dtype_text(dtype)


_dtype_text = functools.lru_cache(maxsize=256)(str)  # numpy takes microseconds to format a dtype


def describe(leaf: Any, names: Any = None, on_mesh: bool = False) -> LeafRecord:
  """The record of a leaf, without a checksum.

  Args:
    leaf: leaf of a state, abstract or concrete.
    names: name per dimension; ignored if their number is not the leaf's rank.
    on_mesh: whether the names are names of mesh axes.
  """
  shape = tuple(np.shape(leaf)) if not hasattr(leaf, 'shape') else tuple(leaf.shape)
  dtype = dtype_name(leaf)
  spec = getattr(getattr(leaf, 'sharding', None), 'spec', None)
  named = _plain(names)
  if named is not None and len(named) != len(shape):
    named = None
  value = leaf if dtype in NUMBERS else None
  return LeafRecord(
    shape, dtype, named, _plain(spec), value=value, on_mesh=(named is not None and on_mesh) or None
  )


def by_path(paths: Sequence[str], leaves: Sequence[Any]) -> dict[str, Any]:
  """Leaves by path.

  Raises:
    CheckpointError: two leaves have the same path.
  """
  result: dict[str, Any] = {}
  for path, leaf in zip(paths, leaves, strict=True):
    if path in result:
      raise CheckpointError(
        f'Two leaves have the path {path}.\nFix: use no "/" in the keys of the state.'
      )
    result[path] = leaf
  return result


def leaf_count(count: int) -> str:
  """`1 leaf`, `2 leaves`."""
  return f'{count} {"leaf" if count == 1 else "leaves"}'


def _plain(axes: Any) -> tuple[Any, ...] | None:
  """Names or a spec in JSON's terms; entries other than names, such as UNCONSTRAINED, become None."""
  if axes is None or isinstance(axes, str):
    return None
  try:
    return _plain_axes(axes)
  except TypeError:  # unhashable: a list, or one that contains a list
    return tuple(map(_plain_axis, axes))


@functools.lru_cache(maxsize=1024)
def _plain_axes(axes: tuple[Any, ...] | PartitionSpec) -> tuple[Any, ...]:
  return tuple(map(_plain_axis, tuple(axes)))


def _plain_axis(axis: Any) -> Any:
  if isinstance(axis, (tuple, list)):
    return tuple(map(str, axis))
  return axis if isinstance(axis, str) else None


# -- to JSON and back


def to_json(record: Record) -> dict[str, Any]:
  """The stored form of a record."""
  leaves = [
    {field: value for field, value in leaf._asdict().items() if value is not None}
    for leaf in record.leaves.values()
  ]
  content = {
    'format': FORMAT,
    'layout': record.layout,
    'tree': record.skeleton,
    'leaves': leaves,
    'kinds': record.kinds,
  }
  return {KEY: content | {'digest': digest(content)}}


def digest(content: Mapping[str, Any]) -> str:
  """A hash of a stored record without its own `digest` field."""
  text = json.dumps({key: content[key] for key in sorted(content) if key != 'digest'}, sort_keys=True)
  return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def from_json(content: Any, checkpoint: str) -> Record:
  """Validates and parses a stored record.

  Args:
    content: JSON value stored under the key `flax_spmd`.
    checkpoint: path of the checkpoint, for error texts.

  Raises:
    CheckpointError: a newer version wrote the record.
    CheckpointDamagedError: the content is not a record, or has changed since it was written.
  """
  check_record_format(content, checkpoint)
  try:
    expect(
      isinstance(content, dict) and content['digest'] == digest(content),
      'its digest does not match its content',
    )
    expect(content['format'] == FORMAT and _is_int(content['format']), 'its format is not a number')
    structure = _skeleton(content['tree'])
    expect(isinstance(content['leaves'], list), 'its leaves are not a list')
    validated: dict[str, Any] = {}
    leaves = [_leaf(leaf, validated) for leaf in content['leaves']]
    paths = skeleton.paths(structure)
    expect(len(paths) == len(leaves) == len(set(paths)), 'its tree does not match its leaves')
    kinds = content['kinds']
    expect(isinstance(kinds, dict), 'its kinds are not strings')
    expect(
      all(isinstance(text, str) for pair in kinds.items() for text in pair), 'its kinds are not strings'
    )
    layout = content['layout']
    expect(layout is None or isinstance(layout, str), 'its layout is not a string')
  except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
    raise CheckpointDamagedError(
      f'The record of checkpoint {checkpoint} is damaged: {reason_of(error)}.\n'
      'Fix: restore another checkpoint; this one was changed after it was written.'
    ) from error
  return Record(structure, dict(zip(paths, leaves, strict=True)), dict(kinds), layout)


def check_record_format(content: Any, checkpoint: Any) -> None:
  """Raises CheckpointError if a newer version wrote a stored record."""
  check_format(content, FORMAT, f'The record of checkpoint {checkpoint}')


def _skeleton(content: Any) -> Skeleton:
  """A validated skeleton."""
  if content is None or (_is_int(content) and content >= 0):
    return content
  if isinstance(content, list):
    return [_skeleton(child) for child in content]
  expect(isinstance(content, dict), f'its tree contains a value of type {type(content).__name__}')
  for name in content:
    expect(not is_unsafe_name(name), f'it has a leaf named {name!r}')
  return {name: _skeleton(child) for name, child in content.items()}


def is_unsafe_name(name: Any) -> bool:
  """Whether a leaf name is invalid, or could be read as a path that leads out of a folder."""
  if isinstance(name, str) and name.isidentifier():
    return False
  if not isinstance(name, str) or '\0' in name or name in ('', '.', '..') or _SURROGATE.search(name):
    return True
  parts = name.replace('\\', '/').split('/')
  return '..' in parts or not parts[0]


def _is_int(content: Any) -> bool:
  return type(content) is int  # isinstance would accept a bool


_FIELDS = frozenset(LeafRecord._fields)


def _leaf(content: Any, validated: dict[str, Any]) -> LeafRecord:
  """A validated leaf.

  Args:
    content: stored form of the leaf.
    validated: shape, names and spec of earlier leaves, by their stored form. Most leaves repeat some.
  """
  expect(
    isinstance(content, dict) and content.keys() <= _FIELDS,
    'a leaf is not an object with the known fields',
  )
  shape, dtype = content['shape'], content['dtype']
  stored = dtype, shape, content.get('names'), content.get('spec')
  key = repr(stored)
  if key not in validated:
    validated[key] = _shape_names_spec(*stored)
  shape, names, spec = validated[key]
  checksum, value, on_mesh = (content.get(key) for key in ('checksum', 'value', 'on_mesh'))
  if checksum is not None and not is_checksum(checksum):
    raise ValueError(f'a leaf has the checksum {checksum!r}')
  if type(value) is not NUMBERS.get(dtype, type(None)):
    raise ValueError(f'a leaf of dtype {dtype} has the value {value!r}')
  if on_mesh is not None and on_mesh is not True:
    raise ValueError(f'on_mesh is {on_mesh!r}')
  packed = _packed(content.get('packed'), dtype)
  return LeafRecord(shape, dtype, names, spec, checksum, value, on_mesh, packed)


def _shape_names_spec(dtype: Any, shape: Any, names: Any, spec: Any) -> tuple[Any, Any, Any]:
  """The validated shape, names and spec of a leaf; also validates its dtype."""
  expect(
    isinstance(shape, list) and all(_is_int(size) and 0 <= size < 2**60 for size in shape),
    f'a leaf has the shape {shape!r}',
  )
  expect(isinstance(dtype, str), 'a dtype is not a string')
  if dtype not in NUMBERS:
    dtype_of(dtype)
  expect(dtype not in NUMBERS or not shape, f'a leaf of dtype {dtype} has the shape {shape!r}')
  return tuple(shape), _axes(names, len(shape)), _axes(spec, None)


def _axes(content: Any, rank: int | None) -> tuple[Any, ...] | None:
  if content is None:
    return None
  expect(
    isinstance(content, list) and rank in (None, len(content)),
    'names or a spec are not a list of the right length',
  )
  for axis in content:
    each = axis if isinstance(axis, list) else [axis]
    expect(
      axis is None or all(isinstance(name, str) for name in each), f'a dimension has the name {axis!r}'
    )
  return tuple(_plain_axis(axis) for axis in content)


def _packed(content: Any, dtype: str) -> tuple[str, int] | None:
  """The validated position of a leaf in a packed array."""
  if content is None:
    return None
  is_pair = isinstance(content, list) and len(content) == 2 and isinstance(content[0], str)
  if not (is_pair and _is_int(content[1]) and dtype not in NUMBERS):
    raise ValueError(f'a leaf of dtype {dtype} is packed at {content!r}')
  dtype_of(content[0])
  return content[0], content[1]
