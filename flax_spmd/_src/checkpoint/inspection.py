"""Inspecting: what a checkpoint is, and how two of them differ, without reading an array."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from etils import epath

from flax_spmd._src.checkpoint.storage import verification as verifying
from flax_spmd._src.checkpoint.storage.folders import as_path
from flax_spmd._src.checkpoint.storage.readers import checkpoints_in, open_source, saved_at
from flax_spmd._src.checkpoint.storage.record import Leaf, Record
from flax_spmd._src.public_module import set_module
from flax_spmd._src.text import size_text
from flax_spmd.errors import CheckpointError

if TYPE_CHECKING:
  from rich.console import RenderableType


class Shown(NamedTuple):
  """A checkpoint; printing it lists its leaves.

  Attributes:
    path: where it is.
    record: what it says of itself.
    saved: when it was, or None.
    error: why it cannot be read, if it cannot; then its record is empty.
  """

  path: str
  record: Record
  saved: datetime.datetime | None
  error: str | None = None

  def records(self) -> list[dict[str, Any]]:
    """A row per leaf, for a data frame or JSON: path, dtype, shape, names, spec, bytes, checksum, value."""
    return [
      {'path': path, **leaf._asdict(), 'bytes': leaf.bytes} for path, leaf in self.record.leaves.items()
    ]

  @property
  def title(self) -> str:
    """`run/100: 12 leaves, 3 MiB, saved 2026-05-01 10:00:00 by flax_spmd`."""
    if self.error:
      return f'{self.path}: cannot be read. {self.error.splitlines()[0]}'
    content = f'{len(self.record.leaves)} leaves, {size_text(self.record.bytes)}'
    when = f', saved {self.saved:%Y-%m-%d %H:%M:%S}' if self.saved else ''
    return f'{self.path}: {content}{when} by {self.record.written_by}'

  def __rich__(self) -> RenderableType:
    from rich.console import Group
    from rich.table import Table

    table = Table(box=None, header_style='bold')
    for title in ('path', 'array', 'lay as', 'bytes', 'checksum'):
      table.add_column(title, overflow='fold')
    for path, leaf in self.record.leaves.items():
      what = str(leaf.value) if leaf.value is not None else named(leaf)
      table.add_row(path, what, _spec_text(leaf), size_text(leaf.bytes), leaf.checksum or '')
    kinds = [f'{path}: {kind}' for path, kind in self.record.kinds.items()]
    return Group(self.title, table, *kinds, (self.record.layout or '').rstrip())

  def __str__(self) -> str:
    from rich.console import Console

    console = Console(width=160, color_system=None, force_terminal=False)
    with console.capture() as captured:
      console.print(self, markup=False, highlight=False, soft_wrap=True)
    return '\n'.join(line.rstrip() for line in captured.get().splitlines())


def named(leaf: Leaf) -> str:
  """`float32[embed=8, mlp=16]`."""
  if leaf.names is None:
    return str(leaf)
  names = ('+'.join(name) if isinstance(name, tuple) else name for name in leaf.names)
  sizes = (f'{name}={size}' if name else str(size) for name, size in zip(names, leaf.shape, strict=True))
  return f'{leaf.dtype}[{", ".join(sizes)}]'


def _spec_text(leaf: Leaf) -> str:
  if leaf.spec is None:
    return ''
  entries = ('+'.join(axis) if isinstance(axis, tuple) else axis or '-' for axis in leaf.spec)
  return f'({", ".join(entries)})'


@set_module('flax_spmd.checkpoint')
def show(path: str | os.PathLike[str]) -> Shown:
  """What a checkpoint holds: every leaf with names, shape, dtype, bytes and how it lay when it was saved.

  Args:
    path: a checkpoint, of this package, plain Orbax, or `flax.training.checkpoints`.

  Raises:
    CheckpointError: there is none, or its record is damaged.

  Example:
    >>> layout = Layout({'data': 8}, (('embed', 'data'),))
    >>> w = layout.shard(LogicallyPartitioned(np.ones((8, 16), 'float32'), ('embed', 'mlp')))
    >>> checkpoint.save(tmp / 'step_5', {'w': w}, layout=layout)
    >>> shown = checkpoint.show(tmp / 'step_5')
    >>> shown.record.leaves['w'].names, shown.record.bytes
    (('embed', 'mlp'), 512)
  """
  source = open_source(path)
  return Shown(os.fspath(as_path(path)), source.record, saved_at(source.path))


@set_module('flax_spmd.checkpoint')
def ls(root: str | os.PathLike[str]) -> list[Shown]:
  """The checkpoints in a folder, in the order of their names, numbers by value.

  One that cannot be read is listed with its error.

  Raises:
    CheckpointError: there is no such folder.

  Example:
    >>> layout = Layout({'data': 8})
    >>> for step in ('10', '9'):
    ...   checkpoint.save(tmp / 'steps' / step, layout.shard({'w': np.ones(8)}), layout=layout)
    >>> [shown.path.rsplit('/', 1)[1] for shown in checkpoint.ls(tmp / 'steps')]
    ['9', '10']
  """
  folder = as_path(root)
  if not folder.is_dir():
    raise CheckpointError(
      f'There is no folder {folder}.\nFix: pass the folder in which checkpoints are.'
    )
  names = sorted(
    checkpoints_in(folder),
    key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name),
  )
  return [_shown(folder / name) for name in names]


def _shown(path: epath.Path) -> Shown:
  try:
    return show(path)
  except CheckpointError as error:
    return Shown(os.fspath(path), Record(None, {}, {}), None, str(error))


@set_module('flax_spmd.checkpoint')
def diff(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> list[str]:
  """How two checkpoints differ, a line for each leaf that does; contents by their checksums.

  Args:
    one, other: two checkpoints.

  Raises:
    CheckpointError: one of them is not there, or its record is damaged.

  Example:
    >>> layout = Layout({'data': 8})
    >>> for name, value in (('a', 1), ('b', 2)):
    ...   checkpoint.save(tmp / name, layout.shard({'w': np.full(8, value), 'v': np.ones(8)}), layout=layout)
    >>> checkpoint.diff(tmp / 'a', tmp / 'b')
    ['w: other content']
  """
  a, b = open_source(one).record, open_source(other).record
  lines = [
    f'{path}: only in {one}, {named(leaf)}' for path, leaf in a.leaves.items() if path not in b.leaves
  ]
  lines += [
    f'{path}: only in {other}, {named(leaf)}' for path, leaf in b.leaves.items() if path not in a.leaves
  ]
  for path, leaf in a.leaves.items():
    if path in b.leaves:
      lines += (f'{path}: {text}' for text in _changes(leaf, b.leaves[path]))
  lines += [
    f'{path}: {a.kinds.get(path, "no state")}, then {b.kinds.get(path, "no state")}'
    for path in dict.fromkeys((*a.kinds, *b.kinds))
    if a.kinds.get(path) != b.kinds.get(path)
  ]
  if a.layout != b.layout:
    lines.append('the layouts differ')
  return lines


def _changes(one: Leaf, two: Leaf) -> Iterator[str]:
  if (one.shape, one.dtype, one.names) != (two.shape, two.dtype, two.names):
    yield f'{named(one)}, then {named(two)}'
  elif one.checksum != two.checksum and None not in (one.checksum, two.checksum):
    yield 'other content' if one.value == two.value else f'{one.value}, then {two.value}'
  if one.spec != two.spec:
    yield f'lay as {_spec_text(one) or "()"}, then as {_spec_text(two) or "()"}'


@set_module('flax_spmd.checkpoint')
def verify(path: str | os.PathLike[str]) -> list[str]:
  """Reads all of a checkpoint and compares it with its checksums, a gigabyte at a time.

  Args:
    path: a checkpoint that `save` wrote.

  Returns:
    The paths of the leaves that are damaged; empty if it is whole.

  Raises:
    CheckpointDamagedError: it cannot be read at all.
    CheckpointError: there is none, or it has no checksums.

  Example:
    >>> layout = Layout({'data': 8})
    >>> checkpoint.save(tmp / 'step_6', layout.shard({'w': np.ones(8)}), layout=layout)
    >>> checkpoint.verify(tmp / 'step_6')
    []
  """
  source = open_source(path)
  if not any(leaf.checksum for leaf in source.record.leaves.values()):
    raise CheckpointError(
      f'The checkpoint {source.path} has no checksums: {source.record.written_by} wrote it.\n'
      'Fix: convert it with flax-spmd checkpoint convert, which adds them.'
    )
  return verifying.verify(source)
