"""Folding: arrays that differ in nothing but layer numbers, or in being an optimizer's copies, as one row.

    for fold in fold_rows(rows):
      fold.path     # params/layers_{0..31}/wi
      fold.copies   # opt_state/0/{mu,nu}/layers_{0..31}/wi
      fold.count    # 96

Patterns are written as in a shell, and stand for the paths of their arrays and no others: if layer 5 of 32
differs, the others are `layers_{0..4,6..31}`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from flax_spmd._src.plan.rows import Row

_NUMBER = re.compile('([0-9]+)')


@dataclasses.dataclass(frozen=True)
class FoldedRow:
  """Arrays with equal shape, dtype, names, decisions and stored sharding.

  Attributes:
    path: pattern of their paths, such as `params/layers_{0..31}/wi`; the path itself of a single array.
    copies: pattern of the paths of an optimizer's copies of them, which are among the rows; '' without any.
    rows: their rows, parameters before copies.
  """

  path: str
  copies: str
  rows: tuple[Row, ...]

  @property
  def name(self) -> str:
    """The path, with ` and opt_state/0/{mu,nu}/...` if there are copies."""
    if not self.copies:
      return self.path
    keys, fields = self.path.split('/'), self.copies.split('/')
    while keys and keys[-1] == fields[-1]:
      del keys[-1], fields[-1]
    return f'{self.path} and {"/".join(fields)}/...'

  @property
  def count(self) -> int:
    """Number of arrays."""
    return len(self.rows)

  @property
  def row(self) -> Row:
    """The first of the rows, which stands for all."""
    return self.rows[0]

  @property
  def bytes(self) -> int:
    """Size of all of them."""
    return self.count * self.row.bytes

  @property
  def bytes_per_device(self) -> int:
    """Bytes of their shards on one device."""
    return self.count * self.row.bytes_per_device


def fold_rows(rows: Sequence[Row]) -> tuple[FoldedRow, ...]:
  """Folds rows; a fold has the position of its first row."""
  parts = sorted(_fold_copies(_fold_numbers(rows)), key=lambda part: min(part.indices))
  return tuple(
    FoldedRow(part.path, part.copies, tuple(rows[index] for index in part.indices)) for part in parts
  )


class _PathPart(NamedTuple):
  """Arrays of one kind: their pattern, their indices, and the number of keys up to an optimizer's field."""

  path: str
  indices: tuple[int, ...]
  kind: int
  depth: int
  copies: str = ''


def _fold_numbers(rows: Sequence[Row]) -> Iterator[_PathPart]:
  """Arrays of one kind whose paths differ in numbers only."""
  kinds = _Kinds()
  groups: dict[Any, dict[tuple[str, ...], int]] = defaultdict(dict)
  for index, row in enumerate(rows):
    depth = 0 if row.field in (None, row.path) else row.field.count('/') + 1
    pieces = _NUMBER.split(row.path)
    group, numbers = (kinds.of(row), depth, *pieces[::2]), tuple(pieces[1::2])
    while numbers in groups[group]:  # two keys with one text
      group = (*group, '')
    groups[group][numbers] = index
  for (kind, depth, *texts), by_numbers in groups.items():
    for box in _boxes(list(by_numbers)):
      indices = map(by_numbers.__getitem__, itertools.product(*box))
      numbers = itertools.chain(map(_numbers_text, box), itertools.repeat(''))
      path = ''.join(itertools.chain.from_iterable(zip(texts, numbers, strict=False)))
      yield _PathPart(path, tuple(sorted(indices)), kind, depth)


class _Kinds:
  """Numbers for kinds of arrays: equal for rows that may be folded.

  Rows of one plan share most of their columns, so their ids are compared before their values.
  """

  def __init__(self):
    self._by_ids: dict[Any, int] = {}
    self._by_values: dict[Any, int] = {}

  def of(self, row: Row) -> int:
    """The number of a row's kind."""
    ids = tuple(map(id, _compared(row)))
    kind = self._by_ids.get(ids)
    if kind is None:
      kind = self._by_ids[ids] = self._by_values.setdefault(_columns(row), len(self._by_values))
    return kind


_compared = operator.itemgetter(
  *map(Row._fields.index, [*Row._fields[1:9], 'inference', 'unnamed', 'stored', 'deviation', 'memory'])
)


def _columns(row: Row) -> tuple[Any, ...]:
  """The columns in which folded rows agree; all spellings of the planned sharding are equal."""
  inference = row.inference
  inferred = inference and (inference.names, inference.how, _NUMBER.sub('0', inference.parameter or ''))
  placed = row.stored is None or (row.deviation is not None and row.stored)
  return (*row[1:9], inferred, row.unnamed, placed, row.memory)


def _boxes(tuples: list[tuple[str, ...]]) -> Iterator[tuple[tuple[str, ...], ...]]:
  """Distinct tuples as products of sets: `(0, 0), (0, 1), (1, 0), (1, 1)` as `(0, 1) x (0, 1)`."""
  columns = [tuple(dict.fromkeys(column)) for column in zip(*tuples, strict=True)]
  if math.prod(map(len, columns)) == len(tuples):
    yield tuple(columns)
    return
  by_first: dict[str, list[tuple[str, ...]]] = defaultdict(list)
  for numbers in tuples:
    by_first[numbers[0]].append(numbers[1:])
  by_rest: dict[tuple[tuple[str, ...], ...], list[str]] = defaultdict(list)
  for first, rests in by_first.items():
    by_rest[tuple(sorted(rests))].append(first)
  for rests, firsts in by_rest.items():
    for box in _boxes(list(rests)):
      yield tuple(firsts), *box


def _numbers_text(numbers: Sequence[str]) -> str:
  """Numbers as a pattern: `7`, `{0..31}` or `{0,2,4..7}`."""
  runs: list[list[str]] = []
  for number in sorted(numbers, key=int):
    if runs and _follows(number, runs[-1][-1]):
      runs[-1].append(number)
    else:
      runs.append([number])
  texts = [f'{run[0]}..{run[-1]}' if len(run) > 2 else ','.join(run) for run in runs]
  return texts[0] if len(numbers) == 1 else f'{{{",".join(texts)}}}'


def _follows(number: str, last: str) -> bool:
  """Whether a number is the next one in the same spelling: `10` after `9` or `09`, not `010`."""
  same_spelling = len(number) == len(last) or not any(re.match('0.', each) for each in (number, last))
  return same_spelling and int(number) == int(last) + 1


def _fold_copies(parts: Iterable[_PathPart]) -> Iterator[_PathPart]:
  """Joins parameters and their copies in an optimizer's fields: arrays of one kind below equal keys."""
  copies: dict[Any, list[_PathPart]] = defaultdict(list)
  parameters: dict[Any, list[_PathPart]] = defaultdict(list)
  others = []
  for part in parts:
    (copies[part.kind, _below(part.path, part.depth)] if part.depth else others).append(part)
  for part in others:
    tails = ((part.kind, _below(part.path, depth)) for depth in _depths(part.path))
    parameters[next((tail for tail in tails if tail in copies), None)].append(part)
  yield from parameters.pop(None, [])
  for tail, found in copies.items():
    joined, owners = _joined(found, tail[1]), parameters.pop(tail, [])
    if len(owners) == 1:
      joined = owners[0]._replace(copies=joined.path, indices=(*owners.pop().indices, *joined.indices))
    yield from (joined, *owners)


def _below(path: str, depth: int) -> str:
  """A path without its first keys."""
  return path.split('/', depth)[depth]


def _depths(path: str) -> range:
  """The numbers of first keys that the copies of a parameter may omit: `params` and the key above it."""
  keys = path.split('/')
  return range(min(2 if 'params' in keys[:2] else 1, len(keys) - 1) + 1)


def _joined(parts: Sequence[_PathPart], tail: str) -> _PathPart:
  """The copies in several fields, whose paths end with the same keys, as one part."""
  heads = [tuple(part.path[: -len(tail)].split('/')[:-1]) for part in parts]
  indices = itertools.chain.from_iterable(part.indices for part in parts)
  return parts[0]._replace(path=_alternatives(heads) + tail, indices=tuple(indices))


def _alternatives(heads: Iterable[tuple[str, ...]]) -> str:
  """Beginnings of paths, given as keys, as a pattern: `opt_state/0/{mu,nu}/`."""
  by_key: dict[tuple[str, ...], list[tuple[str, ...]]] = defaultdict(list)
  for head in heads:
    by_key[head[:1]].append(head[1:])
  texts = [f'{key[0]}/{_alternatives(rests)}' if key else '' for key, rests in by_key.items()]
  if len(texts) == 1:
    return texts[0]
  if all(text.endswith('/') for text in texts):
    return f'{{{",".join(text[:-1] for text in texts)}}}/'
  return f'{{{",".join(texts)}}}'
