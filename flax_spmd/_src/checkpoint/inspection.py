"""Inspection: lists, shows, compares and verifies checkpoints. Only `verify` reads arrays."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from etils import epath

from flax_spmd._src.checkpoint.storage import verification
from flax_spmd._src.checkpoint.storage.readers import CheckpointReader, open_checkpoint, reader_of
from flax_spmd._src.checkpoint.storage.recognition import checkpoints_in, saved_at
from flax_spmd._src.checkpoint.storage.record import LeafRecord, Record, leaf_count
from flax_spmd._src.checkpoint.storage.refused_reads import refusals
from flax_spmd._src.checkpoint.storage.source import current_source, read_whole
from flax_spmd._src.checkpoint.storage.store import as_path, open_store, path_text
from flax_spmd._src.data.checksums import formula_of
from flax_spmd._src.multihost import joint
from flax_spmd._src.notebook_html import (
  MOST_ROWS,
  bullets,
  collapsed,
  plain_table,
  preformatted,
  safe,
)
from flax_spmd._src.public import public
from flax_spmd._src.text import size_text
from flax_spmd._src.text_table import plain_text
from flax_spmd.errors import CheckpointError

if TYPE_CHECKING:
  from rich.console import RenderableType


class CheckpointSummary(NamedTuple):
  """A summary of a checkpoint; print it for a table of its leaves.

  Attributes:
    path: path of the checkpoint.
    record: description of its arrays; empty if it cannot be read.
    saved: time of the save; None if it is not recorded.
    error: error text if the checkpoint cannot be read.
    folder: folder of the arrays, an Orbax checkpoint: `orbax.checkpoint.v1.load(summary.folder)` reads it.
      The next save to the path replaces it by another folder. None if the checkpoint cannot be read.
  """

  path: str
  record: Record
  saved: datetime.datetime | None
  error: str | None = None
  folder: str | None = None

  def records(self) -> list[dict[str, Any]]:
    """One row per leaf, for a data frame or JSON: its path, its size in bytes and the fields of its record."""
    return [
      {'path': path, **leaf._asdict(), 'bytes': leaf.bytes} for path, leaf in self.record.leaves.items()
    ]

  @property
  def title(self) -> str:
    """`run/100: 12 leaves, 3 MiB, saved 2026-05-01 10:00:00 by flax_spmd`."""
    if self.error:
      return f'{self.path}: cannot be read. {self.error.splitlines()[0]}'
    content = f'{leaf_count(len(self.record.leaves))}, {size_text(self.record.bytes)}'
    when = f', saved {self.saved:%Y-%m-%d %H:%M:%S}' if self.saved else ''
    return f'{self.path}: {content}{when} by {self.record.written_by}'

  def __rich__(self) -> RenderableType:
    from rich.console import Group
    from rich.table import Table

    table = Table(box=None, header_style='bold')
    for title in _TITLES:
      table.add_column(title, overflow='fold')
    for row in self._rows():
      table.add_row(*row)
    return Group(self.title, table, *self._remarks(), (self.record.layout or '').rstrip())

  def _rows(self) -> Iterator[tuple[str, ...]]:
    for path, leaf in self.record.leaves.items():
      array = str(leaf.value) if leaf.value is not None else leaf.named
      yield path, array, _spec_text(leaf), size_text(leaf.bytes), leaf.checksum or ''

  def _remarks(self) -> list[str]:
    """The kinds of nodes, the parts without arrays, and those that cannot be read."""
    kinds = [f'{path}: {kind}' for path, kind in self.record.kinds.items()]
    if self.record.skipped:
      kinds.append(f'parts without arrays: {", ".join(self.record.skipped)}')
    return [*kinds, *self.record.unreadable.values()]

  def _repr_html_(self) -> str:
    rows = [tuple(map(safe, row[:4])) for row in self._rows()]
    layout = collapsed('layout', preformatted(self.record.layout.rstrip())) if self.record.layout else ''
    table = plain_table(_TITLES[:4], rows) if rows else ''
    return f'<p>{safe(self.title)}</p>{table}{bullets(self._remarks())}{layout}'

  def __str__(self) -> str:
    return plain_text(self, 160, soft_wrap=True)


_TITLES = ('path', 'array', 'saved spec', 'bytes', 'checksum')


class CheckpointList(list[CheckpointSummary]):
  """The checkpoints in a folder; a notebook shows one a line, which unfolds if there are few arrays."""

  def _repr_html_(self) -> str:
    if sum(len(each.record.leaves) for each in self) > MOST_ROWS:
      return bullets(each.title for each in self)
    return ''.join(collapsed(each.title, each._repr_html_()) for each in self) or 'No checkpoints.'


class CheckpointDifferences(list[str]):
  """The differences between two checkpoints; a notebook shows one a line."""

  def _repr_html_(self) -> str:
    return bullets(self) or 'No differences.'


def _spec_text(leaf: LeafRecord) -> str:
  if leaf.spec is None:
    return ''
  entries = ('+'.join(axis) if isinstance(axis, tuple) else axis or '-' for axis in leaf.spec)
  return f'({", ".join(entries)})'


@public('flax_spmd.checkpoint')
def show(path: str | os.PathLike[str]) -> CheckpointSummary:
  """Summarizes a checkpoint: names, shape, dtype, bytes and saved spec of every leaf. Reads no arrays.

  Args:
    path: checkpoint of this package, plain Orbax, `flax.training.checkpoints`, or `safetensors`.

  Raises:
    CheckpointError: there is no checkpoint at `path`, or its record is damaged.

  Example:
    >>> layout = Layout({'data': 8}, (('embed', 'data'),))
    >>> w = layout.shard(LogicallyPartitioned(np.ones((8, 16), 'float32'), ('embed', 'mlp')))
    >>> checkpoint.save(tmp / 'step_5', {'w': w}, layout=layout)
    >>> summary = checkpoint.show(tmp / 'step_5')
    >>> summary.record.leaves['w'].names, summary.record.bytes
    (('embed', 'mlp'), 512)
  """
  with refusals(path):
    source = current_source(as_path(path))
    reader = reader_of(path, source)
    saved = saved_at(reader.path, source)
  return CheckpointSummary(
    os.fspath(as_path(path)), reader.record, saved, folder=os.fspath(reader.folder)
  )


@public('flax_spmd.checkpoint')
def ls(root: str | os.PathLike[str]) -> CheckpointList:
  """Summarizes the checkpoints in a folder, sorted by name, numbers in names by value.

  A checkpoint that cannot be read is listed with its error.

  Args:
    root: folder to search.

  Raises:
    CheckpointError: the folder does not exist.

  Example:
    >>> layout = Layout({'data': 8})
    >>> for step in ('10', '9'):
    ...   checkpoint.save(tmp / 'steps' / step, layout.shard({'w': np.ones(8)}), layout=layout)
    >>> [summary.path.rsplit('/', 1)[1] for summary in checkpoint.ls(tmp / 'steps')]
    ['9', '10']
  """
  folder = as_path(root)
  with refusals(folder):
    is_folder = folder.is_dir()
  if not is_folder:
    if '://' in str(folder):
      open_store(folder).children()  # raises if there is no bucket
    raise CheckpointError(f'There is no folder {folder}.\nFix: pass a folder that contains checkpoints.')
  return CheckpointList(_summary(folder / name) for name in checkpoints_in(folder))


def _summary(path: epath.Path) -> CheckpointSummary:
  try:
    return show(path)
  except CheckpointError as error:
    return CheckpointSummary(os.fspath(path), Record(None, {}, {}), None, str(error))


@public('flax_spmd.checkpoint')
def diff(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> CheckpointDifferences:
  """Compares two checkpoints by their records, contents by their checksums. Reads no arrays.

  Args:
    one, other: checkpoints to compare.

  Returns:
    A line per difference; empty for equal checkpoints.

  Raises:
    CheckpointError: one of them does not exist, or its record is damaged.

  Example:
    >>> layout = Layout({'data': 8})
    >>> for name, value in (('a', 1), ('b', 2)):
    ...   checkpoint.save(tmp / name, layout.shard({'w': np.full(8, value), 'v': np.ones(8)}), layout=layout)
    >>> checkpoint.diff(tmp / 'a', tmp / 'b')
    ['w: contents differ']
  """
  a, b = open_checkpoint(one).record, open_checkpoint(other).record
  lines = [
    f'{path}: only in {one}, {leaf.named}' for path, leaf in a.leaves.items() if path not in b.leaves
  ]
  lines += [
    f'{path}: only in {other}, {leaf.named}' for path, leaf in b.leaves.items() if path not in a.leaves
  ]
  for path, leaf in a.leaves.items():
    if path in b.leaves:
      lines += (f'{path}: {text}' for text in _leaf_differences(leaf, b.leaves[path]))
  lines += [
    f'{path}: {a.kinds.get(path, "no optimizer state")}, then {b.kinds.get(path, "no optimizer state")}'
    for path in dict.fromkeys((*a.kinds, *b.kinds))
    if a.kinds.get(path) != b.kinds.get(path)
  ]
  if a.layout != b.layout:
    lines.append('the layouts differ')
  return CheckpointDifferences(lines)


def _leaf_differences(one: LeafRecord, two: LeafRecord) -> Iterator[str]:
  if (one.shape, one.dtype, one.names) != (two.shape, two.dtype, two.names):
    yield f'{one.named}, then {two.named}'
  elif one.checksum is not None and two.checksum is not None and one.checksum != two.checksum:
    alike = formula_of(one.checksum) == formula_of(two.checksum)
    same = (
      'contents differ' if alike else 'contents cannot be compared: an earlier version wrote one of them'
    )
    if repr(one.value) != repr(two.value):  # NaNs are unequal, and zeros of both signs equal
      yield f'{one.value}, then {two.value}'
    elif alike or one.value is None:
      yield same
  if one.spec != two.spec:
    yield f'saved as {_spec_text(one) or "()"}, then as {_spec_text(two) or "()"}'


@public('flax_spmd.checkpoint')
def verify(path: str | os.PathLike[str]) -> list[str]:
  """Reads a whole checkpoint and compares every array and file with its checksum, about 1 GiB at a time.

  In a job of several processes, every process calls this.

  Args:
    path: checkpoint that `save` wrote.

  Returns:
    The paths of the damaged leaves, then those of the damaged files, below the checkpoint; empty for an
    undamaged checkpoint, which `restore` accepts.

  Raises:
    CheckpointDamagedError: the checkpoint cannot be read at all.
    CheckpointError: there is no checkpoint at `path`, or it has no checksums.

  Example:
    >>> layout = Layout({'data': 8})
    >>> checkpoint.save(tmp / 'step_6', layout.shard({'w': np.ones(8)}), layout=layout)
    >>> checkpoint.verify(tmp / 'step_6')
    []
  """
  with joint('verify', f'The verification of {path_text(path)}'):
    return read_whole(as_path(path), lambda source: _verified(reader_of(path, source)))


def _verified(reader: CheckpointReader) -> list[str]:
  if not any(leaf.checksum for leaf in reader.record.leaves.values()):
    raise CheckpointError(
      f'Checkpoint {reader.path} has no checksums: {reader.record.written_by} wrote it.\n'
      'Fix: convert it with flax-spmd checkpoint convert, which adds them.'
    )
  return verification.verify(reader).names
