"""The record: what a checkpoint says about its arrays, beside the arrays.

One JSON object in Orbax's custom metadata, under the key `flax_spmd`:

    {"format": 1, "layout": "<TOML>",
     "tree": {"params": {"w": 0}, ...},
     "leaves": [{"shape": [8, 16], "dtype": "float32", "names": ["embed", "mlp"], "spec": [null, "model"],
                 "checksum": "5f1c22a0"}, ...],
     "kinds": {"opt_state/0": "ScaleByAdamState"},
     "digest": "<of all that>"}

A record is read from files that anybody may have written or damaged, so nothing of it is trusted before
it has been checked, and nothing in it is ever run or taken for a path of a file.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from flax_spmd._src.checkpoint.storage import skeleton as skeletons
from flax_spmd._src.checkpoint.storage.skeleton import Skeleton
from flax_spmd.errors import CheckpointDamagedError, CheckpointError

KEY = 'flax_spmd'
FORMAT = 1
NUMBERS = {'python.bool': bool, 'python.int': int, 'python.float': float}  # not the dtype of an array
_PYTHON = 'python.'  # others of its kinds, such as texts, are in checkpoints of plain Orbax only
_KEY_DTYPES = {'key<fry>': 'threefry2x32', 'key<rbg>': 'rbg', 'key<urbg>': 'unsafe_rbg'}
_DTYPE = re.compile(r'[a-z][a-z0-9_]*\Z')


class Leaf(NamedTuple):
  """What is said of one leaf.

  Attributes:
    shape: of the whole array.
    dtype: its dtype's name; of a Python number, its type's.
    names: logical name per dimension, None for one without; None: the leaf has none.
    spec: mesh axes per dimension, as it lay when it was saved.
    checksum: of its content, whatever its layout (`flax_spmd.checkpoint.checksums`).
    value: of a Python number, itself.
    on_mesh: True if its names are those of mesh axes, not logical ones.
    packed: where it is among the small leaves that lie together: their array, and the offset in it.
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
    return f'{self.dtype}[{",".join(map(str, self.shape))}]'

  @property
  def is_number(self) -> bool:
    """Whether it is a Python number, not an array."""
    return self.dtype.startswith(_PYTHON)

  @property
  def bytes(self) -> int:
    """The bytes of the whole array."""
    return 0 if self.is_number else math.prod(self.shape) * dtype_of(self.dtype).itemsize


def key_dtype(implementation: Any) -> str | None:
  """What a record calls the dtype of keys of an implementation of `jax.random`; None for an unknown one."""
  return next((name for name, known in _KEY_DTYPES.items() if known == implementation), None)


def is_key(leaf: Leaf) -> bool:
  """Whether it is an array of random keys."""
  return leaf.dtype in _KEY_DTYPES


@functools.cache
def dtype_of(name: str) -> Any:
  """The dtype that a record calls so.

  Raises:
    TypeError: there is none.
  """
  if name in _KEY_DTYPES:
    return jax.eval_shape(lambda: jax.random.key(0, impl=_KEY_DTYPES[name])).dtype
  dtype = jnp.dtype(name) if _DTYPE.match(name) else None
  if dtype is None or not (dtype.kind == 'b' or jnp.issubdtype(dtype, jnp.number)):
    raise TypeError(f'{name!r} is no dtype of an array')
  return dtype


@dataclasses.dataclass(frozen=True)
class Record:
  """What is said of a whole checkpoint.

  Attributes:
    skeleton: its structure.
    leaves: every leaf, by path, in the order of the skeleton's numbers.
    kinds: the class of each state of an optimizer, by path.
    layout: the layout that it was saved under, as TOML; None where that has no text.
    written_by: `flax_spmd`, `orbax` or `flax`; the latter two know of shapes and dtypes only.
  """

  skeleton: Skeleton
  leaves: dict[str, Leaf]
  kinds: dict[str, str]
  layout: str | None = None
  written_by: str = 'flax_spmd'

  @property
  def bytes(self) -> int:
    """The bytes of all arrays."""
    return sum(leaf.bytes for leaf in self.leaves.values())

  @property
  def largest(self) -> int:
    """The bytes of the largest array as it is stored, small ones that are packed being one."""
    packed = sum(leaf.bytes for leaf in self.leaves.values() if leaf.packed)
    return max(packed, *(leaf.bytes for leaf in self.leaves.values()))


def dtype_name(leaf: Any) -> str:
  """What a record calls the dtype of a leaf of a state."""
  dtype = getattr(leaf, 'dtype', None)
  return f'python.{type(leaf).__name__}' if dtype is None else _dtype_text(dtype)


_dtype_text = functools.lru_cache(maxsize=256)(str)  # numpy takes microseconds to say it


def describe(leaf: Any, names: Any = None, on_mesh: bool = False) -> Leaf:
  """A leaf of a state, abstract or not, without its checksum; names of another rank are left out."""
  shape = tuple(np.shape(leaf)) if not hasattr(leaf, 'shape') else tuple(leaf.shape)
  dtype = dtype_name(leaf)
  spec = getattr(getattr(leaf, 'sharding', None), 'spec', None)
  named = _plain(names)
  if named is not None and len(named) != len(shape):
    named = None
  value = leaf if dtype in NUMBERS else None
  return Leaf(
    shape, dtype, named, _plain(spec), value=value, on_mesh=(named is not None and on_mesh) or None
  )


def by_path(paths: Sequence[str], leaves: Sequence[Any]) -> dict[str, Any]:
  """Leaves by path.

  Raises:
    CheckpointError: two leaves have the same path.
  """
  found: dict[str, Any] = {}
  for path, leaf in zip(paths, leaves, strict=True):
    if path in found:
      raise CheckpointError(
        f'Two leaves have the path {path}.\nFix: use no "/" in the keys of the state.'
      )
    found[path] = leaf
  return found


def _plain(axes: Any) -> tuple[Any, ...] | None:
  """Names or a spec as JSON has them; what is no name (UNCONSTRAINED) is None."""
  if axes is None or isinstance(axes, str):
    return None
  try:
    return _plain_axes(axes)
  except TypeError:  # a list, or one in it
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
  """The record as it is stored."""
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
  return {KEY: content | {'digest': _digest(content)}}


def _digest(content: Mapping[str, Any]) -> str:
  text = json.dumps({key: content[key] for key in sorted(content) if key != 'digest'}, sort_keys=True)
  return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def from_json(content: Any, where: str) -> Record:
  """The record that was stored.

  Args:
    content: what stands under the key `flax_spmd`.
    where: the checkpoint, for messages.

  Raises:
    CheckpointError: a newer version wrote it.
    CheckpointDamagedError: it is no record, or not as it was written.
  """
  if isinstance(content, dict) and isinstance(content.get('format'), int) and content['format'] > FORMAT:
    raise CheckpointError(
      f'The checkpoint {where} has format {content["format"]}, this version reads up to {FORMAT}.\n'
      'Fix: upgrade flax_spmd.'
    )
  try:
    _expect(
      isinstance(content, dict) and content['digest'] == _digest(content),
      'its digest is not that of its content',
    )
    _expect(content['format'] == FORMAT and _is_int(content['format']), 'its format is no number')
    skeleton = _skeleton(content['tree'])
    _expect(isinstance(content['leaves'], list), 'its leaves are no list')
    forms: dict[str, Any] = {}
    leaves = [_leaf(leaf, forms) for leaf in content['leaves']]
    _check_packed(leaves)
    paths = skeletons.paths(skeleton)
    _expect(len(paths) == len(leaves) == len(set(paths)), 'its tree does not fit its leaves')
    kinds = content['kinds']
    _expect(isinstance(kinds, dict), 'its kinds are no texts')
    _expect(
      all(isinstance(text, str) for pair in kinds.items() for text in pair), 'its kinds are no texts'
    )
    layout = content['layout']
    _expect(layout is None or isinstance(layout, str), 'its layout is no text')
  except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
    raise CheckpointDamagedError(
      f'The record of the checkpoint {where} is damaged: {_reason(error)}.\n'
      'Fix: restore another checkpoint; this one was changed after it was written.'
    ) from error
  return Record(skeleton, dict(zip(paths, leaves, strict=True)), dict(kinds), layout)


def _reason(error: Exception) -> str:
  if isinstance(error, RecursionError):
    return 'it is nested too deeply'
  return f'{error} is missing' if isinstance(error, KeyError) else str(error)


def _expect(holds: bool, otherwise: str) -> None:
  if not holds:
    raise ValueError(otherwise)


def _skeleton(content: Any) -> Skeleton:
  """A skeleton, after a look at everything in it."""
  if content is None or (_is_int(content) and content >= 0):
    return content
  if isinstance(content, list):
    return [_skeleton(child) for child in content]
  _expect(isinstance(content, dict), f'a {type(content).__name__} stands in its tree')
  for name in content:
    check_name(name)
  return {name: _skeleton(child) for name, child in content.items()}


def check_name(name: Any) -> None:
  """Raises ValueError for what is no name of a leaf, or could be taken for a way out of a folder."""
  _expect(not is_odd_name(name), f'it has a leaf called {name!r}')


def is_odd_name(name: Any) -> bool:
  """Whether it is no name of a leaf, or could be taken for a way out of a folder."""
  if not isinstance(name, str) or '\0' in name or name in ('', '.', '..'):
    return True
  parts = name.replace('\\', '/').split('/')
  return '..' in parts or not parts[0]


def _is_int(content: Any) -> bool:
  return type(content) is int  # a bool is one too, otherwise


def _leaf(content: Any, forms: dict[str, Any]) -> Leaf:
  """A leaf; `forms` has what was checked already."""
  _expect(isinstance(content, dict) and set(content) <= set(Leaf._fields), 'a leaf is not described')
  shape, dtype = content['shape'], content['dtype']
  asked = dtype, shape, content.get('names'), content.get('spec')
  key = repr(asked)
  if key not in forms:
    forms[key] = _form(*asked)
  shape, names, spec = forms[key]
  checksum, value, on_mesh = (content.get(key) for key in ('checksum', 'value', 'on_mesh'))
  _expect(checksum is None or isinstance(checksum, str), 'it has a checksum that is no text')
  _expect(type(value) is NUMBERS.get(dtype, type(None)), f'a {dtype} has the value {value!r}')
  _expect(on_mesh is None or on_mesh is True, f'it says {on_mesh!r} of whose its names are')
  packed = _place(content.get('packed'), dtype)
  return Leaf(shape, dtype, names, spec, checksum, value, on_mesh, packed)


def _form(dtype: Any, shape: Any, names: Any, spec: Any) -> tuple[Any, Any, Any]:
  """Shape, names and spec of a leaf, checked; most leaves of a state are like another one."""
  _expect(
    isinstance(shape, list) and all(_is_int(size) and 0 <= size < 2**60 for size in shape),
    f'it has the shape {shape!r}',
  )
  _expect(isinstance(dtype, str), 'it has a dtype that is no text')
  if dtype not in NUMBERS:
    dtype_of(dtype)
  _expect(dtype not in NUMBERS or not shape, f'a {dtype} has the shape {shape!r}')
  return tuple(shape), _axes(names, len(shape)), _axes(spec, None)


def _axes(content: Any, rank: int | None) -> tuple[Any, ...] | None:
  if content is None:
    return None
  _expect(isinstance(content, list) and rank in (None, len(content)), 'it has names of another rank')
  for axis in content:
    each = axis if isinstance(axis, list) else [axis]
    _expect(axis is None or all(isinstance(name, str) for name in each), f'it has the name {axis!r}')
  return tuple(_plain_axis(axis) for axis in content)


def _place(content: Any, dtype: str) -> tuple[str, int] | None:
  """Where a packed leaf is."""
  if content is None:
    return None
  fits = isinstance(content, list) and len(content) == 2 and content[0] == dtype
  _expect(fits and _is_int(content[1]), f'a {dtype} is packed at {content!r}')
  return dtype, content[1]


def _check_packed(leaves: Sequence[Leaf]) -> None:
  """Packed leaves lie one after the other."""
  ends: dict[str, int] = {}
  for leaf in leaves:
    if leaf.packed is not None:
      dtype, offset = leaf.packed
      _expect(offset == ends.get(dtype, 0), f'a {dtype} is packed at {offset}')
      ends[dtype] = offset + math.prod(leaf.shape)
