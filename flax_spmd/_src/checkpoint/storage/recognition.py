"""Recognition: whether a path holds a checkpoint, of which kind, with which metadata; and the reason if it holds none."""

from __future__ import annotations

import contextlib
import datetime
import re
from decimal import Decimal
from typing import Any

from etils import epath
from orbax.checkpoint import v1 as ocp

from flax_spmd._src.checkpoint.storage.head import HEAD, read_head
from flax_spmd._src.checkpoint.storage.manifest import whole_generations
from flax_spmd._src.checkpoint.storage.orbax_folders import (
  INDICATOR,
  METADATA,
  TREE_METADATA,
  UNFINISHED,
  parts_of,
  read_metadata,
)
from flax_spmd._src.checkpoint.storage.record import (
  KEY,
)
from flax_spmd._src.checkpoint.storage.refused_reads import refusals
from flax_spmd._src.checkpoint.storage.safetensors_files import is_safetensors
from flax_spmd._src.checkpoint.storage.source import Source, current_source
from flax_spmd._src.checkpoint.storage.store import open_store
from flax_spmd.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError

MSGPACK = 'checkpoint'  # the file of flax and T5X in a folder
_WHOLE_FILES = ('.msgpack', '.npz')  # of flax and numpy
_NUMBER = re.compile(r'(\d+(?:\.\d+)?)')
_FLAX_FILE = re.compile(r'.*_\d+(\.\d+)?\Z')


def is_checkpoint(path: epath.Path) -> bool:
  """Whether a path holds a complete checkpoint of this package or of Orbax."""
  if has_generation(path):
    return True
  with refusals(path), contextlib.suppress(FileNotFoundError):  # it is being removed
    if not path.is_dir() or UNFINISHED in path.name:
      return False
    is_marked = any((path / mark).exists() for mark in (METADATA, INDICATOR, TREE_METADATA))
    if not is_marked and not parts_of(path):
      return False
    return (path / METADATA).exists() or ocp.is_orbax_checkpoint(path)
  return False


def has_generation(path: epath.Path) -> bool:
  """Whether a path has a head that names a generation, or one that is lost or cannot be read."""
  store = open_store(path.parent)
  try:
    found = read_head(store, path)
    if found.tag is None:
      return bool(whole_generations(store, path.name))
    return found.head.generation is not None
  except CheckpointError:
    return True


def custom_metadata(path: epath.Path) -> dict[str, Any]:
  """The JSON values stored with a checkpoint; raises as `open_checkpoint`."""
  return metadata_of(path, current_source(path))


def metadata_of(path: epath.Path, source: Source | None) -> dict[str, Any]:
  """The JSON values stored with a generation; with the path itself if it has none."""
  if source is not None:
    return source.manifest.metadata
  custom = read_metadata(path / METADATA, path).get('custom_metadata')
  return custom if isinstance(custom, dict) else {}


def has_metadata(path: epath.Path) -> bool:
  """Whether a checkpoint has the file that holds its record. Only old versions of Orbax write none."""
  return has_generation(path) or (path / METADATA).exists()


def has_record(path: epath.Path) -> bool:
  """Whether a checkpoint has a record of this package."""
  return has_generation(path) or KEY in custom_metadata(path)


def saved_at(path: epath.Path, source: Source | None) -> datetime.datetime | None:
  """The time at which a generation, or the path itself if it has none, was saved; None if it is not recorded."""
  if source is not None:
    return datetime.datetime.fromtimestamp(source.manifest.saved / 1e9)
  stamp = read_metadata(path / METADATA, path).get('commit_timestamp_nsecs') if path.is_dir() else None
  return datetime.datetime.fromtimestamp(stamp / 1e9) if isinstance(stamp, int) else None


def checkpoints_in(folder: epath.Path) -> list[str]:
  """The names of the checkpoints in a folder, in order: numbers first, and `checkpoint_9` before `checkpoint_10`."""
  names = sorted(open_store(folder).children(), key=_order)
  return [name for name in names if not name.startswith('.') and _may_be_checkpoint(folder / name)]


def _order(name: str) -> tuple[bool, list[Any], str]:
  """A key that sorts numbers in names by value, as `flax.training.checkpoints` does."""
  parts = [Decimal(part) if number % 2 else part for number, part in enumerate(_NUMBER.split(name))]
  return not name.isdecimal(), parts, name


def _may_be_checkpoint(path: epath.Path) -> bool:
  """Whether a path is a checkpoint of any kind, or may not be looked at; whoever opens it gets the reason."""
  try:
    with refusals(path):
      return is_checkpoint(path) or _is_flax_file(path) or holds_msgpack(path) or is_safetensors(path)
  except CheckpointError:
    return True


def holds_msgpack(path: epath.Path) -> bool:
  """Whether a folder is a checkpoint of flax or T5X. Orbax wrote such a file too, beside its description."""
  return path.is_dir() and (path / MSGPACK).is_file() and not (path / TREE_METADATA).exists()


def _is_flax_file(path: epath.Path) -> bool:
  """Whether a path looks like a file of `flax.training.checkpoints`."""
  return path.is_file() and _FLAX_FILE.match(path.name) is not None


def check_head(path: epath.Path) -> None:
  """Raises CheckpointDamagedError for generations without a head, which is written first and removed last."""
  store = open_store(path.parent)
  names = whole_generations(store, path.name) if read_head(store, path).tag is None else []
  if names:
    raise CheckpointDamagedError(
      f'Checkpoint {path} has lost its HEAD, so the current one of its generations is unknown: {", ".join(names)}.\n'
      f'Fix: restore another checkpoint; or a generation, by its path: {path / names[-1]}.'
    )


def no_checkpoint(path: epath.Path) -> CheckpointNotFoundError:
  """The error for a path without a checkpoint; it lists those in the folder, or beside it."""
  found: list[epath.Path] = []
  if path.is_dir():
    hint, found = _contents(path)
  elif not path.parent.is_dir():
    hint = f'; {path.parent} does not exist either'
  else:
    beside = checkpoints_in(path.parent)
    found = [path.parent / name for name in beside]
    hint = f'; beside it are {", ".join(beside)}' if beside else ''
  right = (
    f'of a checkpoint, such as {found[-1]}' if found else 'that was given to flax_spmd.checkpoint.save'
  )
  return CheckpointNotFoundError(f'There is no checkpoint at {path}{hint}.\nFix: pass the path {right}.')


def _contents(path: epath.Path) -> tuple[str, list[epath.Path]]:
  """A text on the contents of a folder that is no checkpoint, and the checkpoints in it."""
  if UNFINISHED in path.name or (path / HEAD).exists():  # generations that are not committed
    return ' (an unfinished save)', []
  if inside := checkpoints_in(path):
    return f'; it holds the checkpoints {", ".join(inside)}', [path / name for name in inside]
  names = sorted(child.name for child in path.iterdir())
  unfinished = [name for name in names if UNFINISHED in name]
  if unfinished:
    return f'; the save of {unfinished[0]} is unfinished', []
  files = [name for name in names if name.endswith(_WHOLE_FILES)]
  if not files:
    return ' (a folder without a checkpoint)', []
  return f'; it holds {", ".join(files)}', [path / name for name in files]
