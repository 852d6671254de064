"""Readers: the formats that can be restored, each with a record and a way to read its arrays.

`OrbaxReader` reads the checkpoints of Orbax, with a record of ours or without; `WholeFileReader` reads the files
of `flax.training.checkpoints`, EasyLM and numpy, `StoredArraysReader` those with arrays beside them, of T5X and of Orbax before
0.6, and `SafetensorsReader` those of Hugging Face.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from etils import epath

from flax_spmd._src.checkpoint.storage.aggregated_file import (
  aggregated_reader,
  has_placeholders,
  is_aggregated,
)
from flax_spmd._src.checkpoint.storage.orbax_folders import PART, folder_and_part, parts_with_arrays
from flax_spmd._src.checkpoint.storage.orbax_reader import OrbaxReader, foreign_record
from flax_spmd._src.checkpoint.storage.parts_reader import PartsReader, is_state, with_others
from flax_spmd._src.checkpoint.storage.recognition import (
  MSGPACK,
  check_head,
  custom_metadata,
  holds_msgpack,
  is_checkpoint,
  no_checkpoint,
)
from flax_spmd._src.checkpoint.storage.record import (
  KEY,
  Record,
  from_json,
)
from flax_spmd._src.checkpoint.storage.refused_reads import refusals
from flax_spmd._src.checkpoint.storage.safetensors_files import is_safetensors
from flax_spmd._src.checkpoint.storage.safetensors_reader import SafetensorsReader
from flax_spmd._src.checkpoint.storage.source import Source, current_source
from flax_spmd._src.checkpoint.storage.store import as_path
from flax_spmd._src.checkpoint.storage.stored_arrays import StoredArraysReader
from flax_spmd._src.checkpoint.storage.t5x_reader import T5xReader, is_t5x
from flax_spmd._src.checkpoint.storage.whole_file_reader import (
  WholeFileReader,
  flax_tree,
  is_npz,
  not_flax,
  npz_tree,
)
from flax_spmd.errors import CheckpointDamagedError, CheckpointError


class CheckpointReader(Protocol):
  """A checkpoint that can be read.

  Attributes:
    path: folder or file of the checkpoint.
    record: description of its arrays.
    folder: folder or file that the library whose format it has can read.
  """

  path: epath.Path
  record: Record
  folder: epath.Path

  def read(self, requests: Mapping[str, Any], memory: int | None = None) -> dict[str, Any]:
    """Reads leaves by path.

    Args:
      requests: per path, a `jax.ShapeDtypeStruct` of the stored shape and dtype. With a sharding, the
        leaf is returned as a jax.Array, without one as a numpy array. Python numbers cannot be requested.
      memory: most bytes in flight from storage.
    """
    ...


def open_checkpoint(path: str | os.PathLike[str]) -> CheckpointReader:
  """Opens the checkpoint at a path, in any supported format.

  Raises:
    CheckpointNotFoundError: there is no checkpoint at the path.
    CheckpointDamagedError: the checkpoint cannot be read.
    CheckpointError: a newer version wrote the checkpoint.
  """
  with refusals(path):
    return reader_of(path, current_source(as_path(path)))


def reader_of(path: str | os.PathLike[str], source: Source | None) -> CheckpointReader:
  """A reader of a generation; of the path itself if it has none."""
  if source is None:
    return _foreign_reader(as_path(path))
  return OrbaxReader(
    source.path, source.manifest.record, folder=source.folder, files=source.manifest.files
  )


def _foreign_reader(given: epath.Path) -> CheckpointReader:
  """A reader of a path without generations: of another library, or of an earlier version of this one."""
  folder = given
  if holds_msgpack(folder):
    return _msgpack_reader(folder / MSGPACK)
  if is_safetensors(folder) and not is_checkpoint(folder):
    return SafetensorsReader(folder)
  if folder.is_file():
    return (
      WholeFileReader(folder, npz_tree(folder), 'numpy') if is_npz(folder) else _msgpack_reader(folder)
    )
  check_head(given)
  folder, part = folder_and_part(folder)
  if not is_checkpoint(folder):
    raise no_checkpoint(given)
  custom = custom_metadata(folder)
  if KEY in custom and part in (None, PART):
    return OrbaxReader(folder, from_json(custom[KEY], os.fspath(given)))
  if part is not None:
    return _reader_of_part(folder, part)
  return _reader_of_parts(folder, parts_with_arrays(folder))


def _msgpack_reader(file: epath.Path) -> CheckpointReader:
  content = flax_tree(file)
  try:
    if has_placeholders(content):
      return aggregated_reader(file.parent, file.parent)
    return T5xReader(file, content) if is_t5x(content) else WholeFileReader(file, content)
  except CheckpointError:
    raise
  except (ValueError, TypeError, RecursionError) as error:  # JAX refuses keys of different types
    raise not_flax(file, error) from error


def _reader_of_part(folder: epath.Path, name: str | None) -> OrbaxReader | StoredArraysReader:
  """The reader of a part of a checkpoint of Orbax; raises as `_reader_of_parts`."""
  inner = folder / name if name else folder
  if is_aggregated(inner):
    return aggregated_reader(folder, inner)
  return OrbaxReader(folder, foreign_record(folder, name), name)


def _reader_of_parts(folder: epath.Path, names: Sequence[str | None]) -> CheckpointReader:
  """The reader of a checkpoint without a record of ours: of its only part with arrays, or of all of them.

  A part whose description is damaged leaves the others readable; it is an error for those who ask for it.

  Raises:
    CheckpointDamagedError: no part can be read.
  """
  readers: dict[str | None, OrbaxReader | StoredArraysReader] = {}
  damage: dict[str, CheckpointDamagedError] = {}
  for name in names:
    try:
      readers[name] = _reader_of_part(folder, name)
    except CheckpointDamagedError as error:
      damage[str(name)] = error
  if not readers:
    raise next(iter(damage.values()))
  readers = {name: each for name, each in readers.items() if is_state(each.record)} or readers
  if len(readers) == 1 and not damage:
    (reader,) = readers.values()
  else:
    reader = PartsReader(folder, {str(name): each for name, each in readers.items()})
  others = {child.name for child in folder.iterdir() if child.is_dir()} if None not in names else set()
  skipped = [name for name in others if name not in readers and name not in damage]
  reasons = {name: str(error).partition('\n')[0] for name, error in damage.items()}
  reader.record = with_others(reader.record, skipped, reasons)
  return reader
