"""Program explanations: the shardings and the communication of a compiled function.

    explanation = layout.jit(step).explain(state, batch)
    print(explanation)                        # arguments, results, collectives, constraints, second call
    explanation.row('result 0/params/w').actual
    explanation.records(), explanation.to_json()

A plan states where arrays are to be stored; this states what the compiler made of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from flax_spmd._src.constraint_log import ConstraintRequest, no_rule
from flax_spmd._src.jit.program_arrays import ProgramArray, ProgramCollective, over, sharding_text
from flax_spmd._src.jit.second_call import SecondCall
from flax_spmd._src.mesh import MeshLike, axis_sizes, describe
from flax_spmd._src.notebook_html import plain_table, preformatted, safe
from flax_spmd._src.public import public
from flax_spmd._src.text import first_lines, plural, size_text, value_text
from flax_spmd._src.text_table import plain_text
from flax_spmd.errors import LayoutError, did_you_mean

if TYPE_CHECKING:
  from rich.console import Group


@public('flax_spmd')
class ProgramExplanation(NamedTuple):
  """The compiled program of one call: `str` returns tables, `rich` prints them in colour.

  Attributes:
    name: name of the function.
    mesh: mesh of the layout.
    devices: number of devices that the program runs on.
    arguments: one row per array of the arguments.
    results: one row per array of the result.
    collectives: the collectives, those with the most bytes sent first.
    constraints: the sharding constraints that the function asks for.
    second_call: whether a call with the result compiles again.

  Example:
    >>> layout = Layout({'data': 8}, (('batch', 'data'),))
    >>> x = layout.shard(jnp.ones((8, 4)), ('batch', None))
    >>> explanation = layout.jit(lambda x: x - x.mean(0, keepdims=True)).explain(x)
    >>> explanation.sent, [one.collective.kind for one in explanation.collectives]
    (28.0, ['all-reduce'])
    >>> print(explanation.second_call)
    second call, with result as argument 0: no compilation
  """

  name: str
  mesh: MeshLike
  devices: int
  arguments: tuple[ProgramArray, ...]
  results: tuple[ProgramArray, ...]
  collectives: tuple[ProgramCollective, ...]
  constraints: tuple[ConstraintRequest, ...]
  second_call: SecondCall

  @property
  def sent(self) -> float:
    """Bytes that one device sends per call."""
    return sum(one.collective.wire for one in self.collectives)

  @property
  def by_kind(self) -> dict[str, float]:
    """Bytes that one device sends, per kind of collective with its mesh axes, in descending order."""
    return _summed((over(one.collective), one.collective.wire) for one in self.collectives)

  @property
  def without_effect(self) -> tuple[ConstraintRequest, ...]:
    """The constraints that are not part of the program."""
    return tuple(one for one in self.constraints if one.dropped)

  @property
  def findings(self) -> tuple[str, ...]:
    """Likely mistakes: one device, constraints without effect, deviations, a second compilation."""
    return (
      *self._device_findings(),
      *(f'without effect: {one} ({one.dropped})' for one in self.without_effect),
      *(
        f'{no_rule(one.unmatched)}, replicated: {one}.{one.hint}'
        for one in self.constraints
        if one.hint and not one.dropped
      ),
      *(f'{row.path} is {row.sharding}' for row in (*self.arguments, *self.results) if row.deviates),
      *(f'{row.path} is donated, but no result reuses it' for row in self.arguments if _is_idle(row)),
      *(f'the second call is an error: {text}' for text in self.second_call.refused),
      *(f'compiles again: {change}' for change in self._changes()),
    )

  def _changes(self) -> tuple[str, ...]:
    return () if self.second_call.refused else self.second_call.changes

  def row(self, path: str) -> ProgramArray:
    """The row of one array.

    Raises:
      LayoutError: there is no array at this path.
    """
    rows = {row.path: row for row in (*self.arguments, *self.results)}
    if path not in rows:
      raise LayoutError(
        f'There is no array {value_text(path)} among the arguments and results of {self.name}.'
        f'{did_you_mean(path, rows)}\nFix: pass a path from the table.'
      )
    return rows[path]

  def moved_by(self, path: str) -> tuple[ProgramCollective, ...]:
    """The collectives between the stored and the used sharding of one array."""
    return tuple(one for one in self.collectives if path in (*one.arguments, *one.results))

  def records(self) -> list[dict[str, Any]]:
    """One flat dict per array, for `pandas.DataFrame` or `polars.DataFrame`.

    Example:
      >>> layout = Layout({'data': 8})
      >>> layout.jit(jnp.sum).explain(layout.shard(jnp.ones(8), PartitionSpec('data'))).records()[0]['actual']
      "P('data',)"
    """
    moved = self._collectives_by_path()
    return [
      {
        'path': row.path,
        'shape': row.shape,
        'dtype': str(row.dtype),
        'planned': None if row.planned is None else sharding_text(row.planned),
        'actual': None if row.actual is None else sharding_text(row.actual),
        'pinned': row.pinned,
        'source': row.source,
        'donated': row.donated,
        'reused': row.reused,
        'bytes_per_device': row.bytes_per_device,
        'collectives': tuple(moved.get(row.path, ())),
      }
      for row in (*self.arguments, *self.results)
    ]

  def to_json(self) -> str:
    """The explanation as one JSON object: arrays, collectives, constraints, second call, findings."""
    described = {
      'name': self.name,
      'mesh': axis_sizes(self.mesh),
      'devices': self.devices,
      'arrays': self.records(),
      'collectives': [
        {**one.collective._asdict(), 'arguments': one.arguments, 'results': one.results}
        for one in self.collectives
      ],
      'by_kind': self.by_kind,
      'constraints': [one._asdict() for one in self.constraints],
      'second_call': {**self.second_call._asdict(), 'compiles': self.second_call.compiles},
      'findings': self.findings,
    }
    return json.dumps(described, default=str)

  def __rich__(self) -> Group:
    from rich.console import Group  # 20 ms to import
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for name in _TITLES[:-1]:
      table.add_column(name, overflow='fold')
    table.add_column(_TITLES[-1], justify='right')
    for cells in self._cells():
      table.add_row(*map(Text, cells))
    return Group(Text(self._head()), table, Text('\n'.join(self._summary())))

  def _repr_html_(self) -> str:
    rows = (tuple(map(safe, cells)) for cells in self._cells())
    summary = preformatted('\n'.join(self._summary()))
    return f'<p>{safe(self._head())}</p>{plain_table(_TITLES, rows)}{summary}'

  def __str__(self) -> str:
    return plain_text(self)

  def _head(self) -> str:
    return f'{self.name} on {self.devices} of {plural(self.mesh.size, "device")}, {describe(self.mesh)}'

  def _cells(self) -> Iterable[tuple[str, ...]]:
    """The cells of each row; many arrays that differ only in numbers of their paths are one row."""
    moved, unchanged = self._collectives_by_path(), self._unchanged()
    omitted = {row.path for rows in unchanged.values() for row in rows}
    alike: dict[tuple[str, ...], list[tuple[ProgramArray, str]]] = {}
    for row in (*self.arguments, *self.results):
      if row.path not in omitted:
        collectives = ', '.join(moved.get(row.path, ()))
        source = f'{row.source}, donated' if row.donated else row.source
        key = _NUMBER.sub('*', f'{row.path} {source}'), row.array, row.sharding, collectives
        alike.setdefault(key, []).append((row, source))
    for (_, array, sharding, collectives), rows in alike.items():
      for path, source, count in _folded(rows):
        size = size_text(sum(row.bytes_per_device for row, _ in rows) * count / len(rows))
        yield path, array, sharding, source, collectives, size
    for (result, argument), rows in unchanged.items():
      size = size_text(sum(row.bytes_per_device for row in rows))
      yield result, plural(len(rows), 'array'), f'as {argument}', '', '', size

  def _unchanged(self) -> dict[tuple[str, str], list[ProgramArray]]:
    """The arrays of each pair of a result and an argument that come out as they came in, if they are many."""
    arguments = {(row.path, row.array, row.sharding) for row in self.arguments}
    moved = self._collectives_by_path()
    found = {
      (result, argument): [
        row
        for row in self.results
        if (below := _below(row.path, result)) is not None
        and row.pinned
        and row.path not in moved
        and (argument + below, row.array, row.sharding) in arguments
      ]
      for result, argument in self.second_call.fed_back
    }
    return {pair: rows for pair, rows in found.items() if len(rows) > _FEW}

  def _collectives_by_path(self) -> dict[str, dict[str, None]]:
    """The distinct collectives that move each array, such as `all-gather over data`."""
    moved: dict[str, dict[str, None]] = {}
    for one in self.collectives:
      for path in (*one.arguments, *one.results):
        moved.setdefault(path, {})[over(one.collective)] = None
    return moved

  def _summary(self) -> list[str]:
    collectives = [f'  {one}' for one in self.collectives]
    kinds = ', '.join(f'{kind}: {size_text(sent)}' for kind, sent in self.by_kind.items())
    asked, idle = sum(one.times for one in self.constraints), self.without_effect
    return [
      f'{plural(len(collectives), "collective")}, {size_text(self.sent)} sent by each device'
      + (f' ({kinds})' if len(self.by_kind) > 1 else ''),
      *first_lines(collectives).splitlines(),
      f'{plural(asked, "constraint")}, {sum(one.times for one in idle)} without effect',
      str(self.second_call),
      *first_lines([f'- {finding}' for finding in self.findings]).splitlines(),
    ]

  def _device_findings(self) -> list[str]:
    if self.devices == self.mesh.size:
      return []
    return [f'the program runs on {plural(self.devices, "device")} of {self.mesh.size}']


_TITLES = ('path', 'array', 'sharding', 'from', 'moved by', 'per device')
_NUMBER = re.compile(r'(\d+)')
_FEW = 3  # arrays alike that have a row each


def _folded(rows: Sequence[tuple[ProgramArray, str]]) -> Iterable[tuple[str, str, int]]:
  """Path, source and number of arrays of each row of a table, for arrays that are alike."""
  if len(rows) <= _FEW:
    return ((row.path, source, 1) for row, source in rows)
  path, source = (_pattern(texts) for texts in zip(*((row.path, source) for row, source in rows)))
  return [(f'{len(rows)} x {path}', source, len(rows))]


def _below(path: str, root: str) -> str | None:
  """The part of a path below a root, with a slash; None if it is elsewhere."""
  rest = path.removeprefix(root)
  if rest == path or (rest and rest[0] not in ' /'):
    return None
  return f'/{rest[1:]}' if rest else ''


def _pattern(texts: Iterable[str]) -> str:
  """Texts that differ in numbers only as one, such as `argument 0/layers_*/w`."""
  columns = zip(*(_NUMBER.split(text) for text in texts))
  return ''.join(column[0] if len(set(column)) == 1 else '*' for column in columns)


def _is_idle(row: ProgramArray) -> bool:
  return row.donated and not row.reused


def _summed(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
  sums: dict[str, float] = {}
  for key, number in pairs:
    sums[key] = sums.get(key, 0) + number
  return dict(sorted(sums.items(), key=lambda item: -item[1]))
