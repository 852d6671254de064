"""Common values: arrays, or pieces of them, that several processes hold, compared by hash.

All processes run one program. Nothing in JAX checks that a key, a number or a host array is the same on all
of them, or that a shard is the same on those processes that hold it. With other values on each, a program
still runs, and computes something that no single process would.

A piece is compared between the processes that hold it, through the coordination service. All pieces
together are one exchange, and all processes raise together. An array that is committed to devices of one
process is that process's own, and is not compared.
"""

from __future__ import annotations

import enum
import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from flax_spmd._src.array_boxes import Box, boxes_of, volume
from flax_spmd._src.data.digests import digests
from flax_spmd._src.data.words import array_of
from flax_spmd._src.multihost import CALLS, differ, differing_parts, ranges, text_problems
from flax_spmd._src.text import value_text
from flax_spmd._src.tree_paths import path_string
from flax_spmd.errors import LayoutError, Problem, raise_problems

_SHOWN = 4  # elements of an array that a message shows as they are
_STUCK = f'{CALLS}, and check which of them is stuck or has exited.'
_EQUAL_ARGUMENTS = 'pass equal values on every process: a key of the same seed, arrays of the same file.'
_EQUAL_VALUES = 'restore a checkpoint from before on all processes, and pass equal keys, numbers and common rows on each.'


class CommonPiece(NamedTuple):
  """A piece of an array that several processes hold.

  Attributes:
    array: path of the array, with its dtype and shape, as in a message.
    bounds: first index and end of the piece in each dimension; empty for a value that is not sharded.
    holders: the processes that hold it, in order.
    value: this process's copy: a numpy array, a JAX array on one device, or another value.
  """

  array: str
  bounds: Box
  holders: tuple[int, ...]
  value: Any


def check_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], members: tuple[int, ...]) -> None:
  """Raises on every process unless the arguments of a function are equal on all of them.

  Arrays, keys, numbers, texts and enums are compared by value, other objects by their class. Does nothing
  without processes.

  Args:
    args, kwargs: the arguments: trees of any objects, with global arrays or arrays of this process.
    members: the processes that compare, in order; see `processes_that_compare`.

  Raises:
    LayoutError: arguments differ (the message names all of them, and the processes), or a process does not
      arrive in time.

  Example:
    >>> check_arguments((jax.random.key(0),), {'train': False}, members=())
  """
  if members:
    leaves = jax.tree_util.tree_leaves_with_path((tuple(args), dict(kwargs)))
    named = [(f'argument {path_string(path[1:])}', leaf) for path, leaf in leaves]
    differing = _exchange('arguments', named, {}, members)
    raise_problems(_value_problems_of(differing, _EQUAL_ARGUMENTS))


def check_choice(values: Any) -> None:
  """Raises `LayoutError` unless `values` is an argument of `Layout.check_processes`."""
  if values not in (True, False, 'part'):
    raise LayoutError(f"values={value_text(values)} is not a choice.\nFix: pass True, False or 'part'.")


def check_values(
  leaves: Sequence[tuple[str, Any]],
  subject: str,
  text: str,
  members: tuple[int, ...],
  *,
  in_turns: bool = False,
) -> None:
  """Raises on every process unless a text is equal on all of them, and values on all that hold them.

  Args:
    leaves: paths and values, such as those of a training state.
    subject: the object that the text describes, as in `check_same_on_every_process`.
    text: the text to compare.
    members: the processes that compare, in order.
    in_turns: whether to compare, of the pieces of more than 4 KiB, only a sixteenth, others at each call.

  Raises:
    LayoutError: the text or values differ, or a process does not arrive in time.
  """
  turn = next(_turns.setdefault(members, itertools.count())) if in_turns else None
  differing = _exchange('values', leaves, {_TEXT: f'{subject}\n{text}'}, members, turn)
  problems = text_problems(differing.get(_TEXT, ()))
  raise_problems(problems or _value_problems_of(differing, _EQUAL_VALUES))


_turns: dict[
  tuple[int, ...], Iterator[int]
] = {}  # by the processes that compare: they call equally often
_TURNS = 16
_LARGE = 1 << 12  # bytes of a piece; one of more is compared in its turn only

_TEXT, _KINDS, _VALUES = 'text', 'kinds', 'values of '  # the parts of an exchange


def _exchange(
  topic: str,
  leaves: Sequence[tuple[str, Any]],
  parts: Mapping[str, str],
  members: tuple[int, ...],
  turn: int | None = None,
) -> dict[str, list[tuple[list[int], str]]]:
  """The parts that differ: those given, the kinds of all leaves, and their values."""
  kinds = [(path, _kind(leaf)) for path, leaf in leaves]
  pieces = [
    piece
    for at, ((path, kind), (_, leaf)) in enumerate(zip(kinds, leaves, strict=True))
    for piece in _pieces(f'{path} ({kind})', leaf, members, None if turn is None else turn + at)
  ]
  parts = {**parts, _KINDS: json.dumps(kinds), **value_parts(pieces)}
  return differing_parts(topic, parts, members, fix=_STUCK)


def _value_problems_of(differing: Mapping[str, Any], fix: str) -> list[Problem]:
  """The differences in kind or, if there are none, in value."""
  return _kinds_differ(differing.get(_KINDS, ()), fix) or value_problems(differing, fix)


def _kinds_differ(texts: Sequence[tuple[list[int], str]], fix: str) -> list[Problem]:
  """The leaves that only some processes have, or whose dtypes, shapes or specs differ."""
  kinds = {process: dict(json.loads(text)) for processes, text in texts for process in processes}
  paths = dict.fromkeys(path for one in kinds.values() for path in one)
  return [
    problem
    for path in paths
    for problem in differ(path, {p: one.get(path, 'missing') for p, one in kinds.items()}, fix)
  ]


def value_parts(pieces: Iterable[CommonPiece]) -> dict[str, str]:
  """The values of pieces as parts of an exchange: one per set of processes that hold the same pieces."""
  pieces = list(pieces)
  by_holders: dict[tuple[int, ...], list[Any]] = {}
  for piece, text in zip(pieces, _value_texts([piece.value for piece in pieces]), strict=True):
    by_holders.setdefault(piece.holders, []).append((piece.array, piece.bounds, text))
  return {_VALUES + ranges(holders): json.dumps(each) for holders, each in by_holders.items()}


def value_problems(differing: Mapping[str, Any], fix: str) -> list[Problem]:
  """The arrays whose values differ, with the rows and the processes."""
  problems = []
  for name, texts in differing.items():
    if name.startswith(_VALUES):
      values = {process: _by_array(text) for processes, text in texts for process in processes}
      arrays = dict.fromkeys(array for one in values.values() for array in one)
      for array in arrays:
        problems += _values_differ(array, {p: one.get(array, {}) for p, one in values.items()}, fix)
  return problems


_ValueTexts: TypeAlias = dict[Box, str]  # of the pieces of one array


def _by_array(text: str) -> dict[str, _ValueTexts]:
  by_array: dict[str, _ValueTexts] = {}
  for array, bounds, value in json.loads(text):
    by_array.setdefault(array, {})[tuple(map(tuple, bounds))] = value
  return by_array


def _values_differ(array: str, values: Mapping[int, _ValueTexts], fix: str) -> list[Problem]:
  every = sorted({bounds for one in values.values() for bounds in one})
  different = [bounds for bounds in every if len({one.get(bounds) for one in values.values()}) > 1]
  rows = sorted({row for bounds in different for row in range(*(bounds or [(0, 0)])[0])})
  where = f'{array}, rows {ranges(rows)}' if rows else array
  texts = {p: [one.get(bounds, 'missing') for bounds in different] for p, one in values.items()}
  shown = {p: one[0] if len(one) == 1 else f'digest {_joined(one)}' for p, one in texts.items()}
  return differ(where, shown, fix)


def _joined(texts: Iterable[str]) -> str:
  [digest] = digests([np.frombuffer('\n'.join(texts).encode(), np.uint8)])
  return digest


# -- the pieces of an array


def _pieces(
  array: str, leaf: Any, members: tuple[int, ...], turn: int | None = None
) -> Iterator[CommonPiece]:
  """The pieces of a leaf that this process has in common with others; large ones only in their turn."""
  if isinstance(leaf, (Tracer, jax.ShapeDtypeStruct)):
    return
  if not isinstance(leaf, jax.Array) or not leaf.committed:  # JAX takes it for equal on all processes
    if _is_due(getattr(leaf, 'nbytes', 0), turn):
      yield CommonPiece(array, (), members, leaf)
    return
  for shard in common_shards(leaf.sharding, leaf.shape):
    if _is_due(shard.size * leaf.dtype.itemsize, None if turn is None else turn + shard.number):
      yield CommonPiece(array, shard.bounds, shard.holders, leaf.addressable_data(shard.position))


def _is_due(size: int, turn: int | None) -> bool:
  """Whether a piece of so many bytes is compared now."""
  return turn is None or turn % _TURNS == 0 or size <= _LARGE


class CommonShard(NamedTuple):
  """A shard that this process and others hold.

  Attributes:
    number: its number among the distinct shards of the array, equal on all processes.
    position: its position among the shards of this process.
    bounds: first index and end in each dimension.
    holders: the processes that hold it, in order.
    size: its number of elements.
  """

  number: int
  position: int
  bounds: Box
  holders: tuple[int, ...]
  size: int


@functools.lru_cache(maxsize=4096)
def common_shards(sharding: Sharding, shape: tuple[int, ...]) -> tuple[CommonShard, ...]:
  """The distinct shards that this process and others hold."""
  holders: dict[Box, set[int]] = {}
  positions: dict[Box, int] = {}
  mine = itertools.count()
  for device, bounds in boxes_of(sharding, shape).items():
    holders.setdefault(bounds, set()).add(device.process_index)
    if device.process_index == jax.process_index():
      positions.setdefault(bounds, next(mine))
  return tuple(
    CommonShard(number, positions[bounds], bounds, tuple(sorted(processes)), volume(bounds))
    for number, (bounds, processes) in enumerate(holders.items())
    if bounds in positions and len(processes) > 1
  )


# -- texts


def _kind(leaf: Any) -> str:
  """The dtype, shape and spec of an array, or the class of another object."""
  if not hasattr(leaf, 'dtype') or not hasattr(leaf, 'shape'):
    return type(leaf).__name__
  sharding = getattr(leaf, 'sharding', None)
  spec = sharding.spec if isinstance(sharding, NamedSharding) else None
  return _array_kind(leaf.dtype, tuple(leaf.shape), spec)


@functools.lru_cache(maxsize=4096)
def _array_kind(dtype: Any, shape: tuple[int, ...], spec: PartitionSpec | None) -> str:
  return f'{dtype}{list(shape)}' + ('' if spec is None else f' as {spec}')


def _value_texts(values: Sequence[Any]) -> list[str]:
  """Each value as text: whole if it is small, by its digest if it is large."""
  arrays = {at: array_of(value) for at, value in enumerate(values) if _is_array(value)}
  small = [at for at, array in arrays.items() if array.size <= _SHOWN]
  large = [at for at, array in arrays.items() if array.size > _SHOWN]
  texts = {at: _plain_text(value) for at, value in enumerate(values) if at not in arrays}
  wholes = jax.device_get([arrays[at] for at in small])
  texts |= {at: str(np.asarray(whole).tolist()) for at, whole in zip(small, wholes, strict=True)}
  large_digests = digests([arrays[at] for at in large])
  texts |= {at: f'digest {digest}' for at, digest in zip(large, large_digests, strict=True)}
  return [texts[at] for at in range(len(values))]


def _is_array(value: Any) -> bool:
  """Whether a value is an array with bits; numpy arrays of objects have none."""
  is_numpy = isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject
  return is_numpy or isinstance(value, jax.Array)


def _plain_text(value: Any) -> str:
  if isinstance(value, enum.Enum):
    return str(value.name)
  return repr(value) if isinstance(value, (bool, int, float, complex, str, bytes)) else ''
