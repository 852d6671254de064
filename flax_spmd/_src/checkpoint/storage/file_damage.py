"""File damage: the files of a generation that differ from its manifest."""

from __future__ import annotations

import os
from collections.abc import Mapping

from etils import epath

from flax_spmd._src.checkpoint.storage.store import FileRecord, Store, open_store
from flax_spmd._src.worker_threads import map_in_threads
from flax_spmd.errors import CheckpointDamagedError, CheckpointNotFoundError

_THREADS = min(8, os.cpu_count() or 1)  # more than processors take time from those that read arrays
_DATA = 'd'  # the folder that holds the bytes of arrays


def file_damage(
  folder: epath.Path,
  files: Mapping[str, FileRecord],
  *,
  contents: bool = True,
  part: int = 0,
  parts: int = 1,
) -> dict[str, str]:
  """What is wrong with each damaged file, by path below `folder`.

  Args:
    folder: folder of the generation.
    files: the files of its manifest.
    contents: whether to read the files with the bytes of arrays too; their sizes are always compared.
    part: the part of the files whose contents this process compares.
    parts: number of parts.
  """
  store = open_store(folder)
  found = store.files(like=next((file.checksum for file in files.values()), ''))
  wrong = {
    name: text for name, file in files.items() if (text := _wrong_size(found.get(name), file.size))
  }
  names = [
    name
    for name, file in files.items()
    if name not in wrong
    and found[name].checksum != file.checksum
    and (contents or _DATA not in name.split('/'))
  ]
  names = sorted(names)[part::parts]
  changed = map_in_threads(lambda name: _changed(store, name, files[name].checksum), names, _THREADS)
  wrong |= {name: text for name, text in zip(names, changed, strict=True) if text}
  return wrong


def _wrong_size(found: FileRecord | None, recorded: int) -> str:
  if found is None:
    return 'it is missing'
  return '' if found.size == recorded else f'it has {found.size:,} bytes, not {recorded:,}'


def _changed(store: Store, name: str, recorded: str) -> str:
  try:
    found = store.digest(name, recorded)
  except (CheckpointDamagedError, CheckpointNotFoundError) as error:
    return str(error).partition('\n')[0].rstrip('.')
  return '' if found == recorded else f'its checksum is {found}, not {recorded}'
