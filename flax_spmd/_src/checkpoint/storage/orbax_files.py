"""Orbax files: the files that belong to a checkpoint of Orbax, or of this package's format 1, in a folder.

A save may replace those. Any other file is somebody's data, and is never removed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from flax_spmd._src.checkpoint.storage.store import Store

_RECORD = '_CHECKPOINT_METADATA'
_MARKS = {_RECORD, '_METADATA', 'orbax.checkpoint'}
_NAMES = {'_sharding', 'array_metadatas', 'checkpoint', 'commit_success.txt', 'd', 'descriptor'}
_NAMES |= {'manifest.ocdbt', 'MANIFEST'}  # the second is ours, in a copy of a generation
_OF_PROCESS = re.compile(r'ocdbt\.process_\d+')
_IN_PARTS = {'_METADATA', 'manifest.ocdbt', 'commit_success.txt'}
_IN_ARRAYS = {'.zarray', 'zarr.json'}  # that have a folder each


def orbax_names(store: Store, folder: str, names: Sequence[str]) -> list[str]:
  """Those names in a folder that belong to a checkpoint of Orbax.

  The files that mark a checkpoint come last, so that a removal which is interrupted can be continued.

  Args:
    store: store of the folder.
    folder: name of the folder.
    names: names in it.
  """
  marks = sorted(_MARKS & set(names))
  if not marks:
    return []
  known = _NAMES | (_parts(store, folder) if _RECORD in names else set())
  others = sorted(set(names) - _MARKS)
  return [name for name in others if name in known or _is_part(store, folder, name)] + marks


def _parts(store: Store, folder: str) -> set[str]:
  """The names of a checkpoint's parts, as Orbax has recorded them."""
  stored = store.read(f'{folder}/{_RECORD}')
  try:
    content: Any = json.loads(stored[0]) if stored else {}
    return set(dict(content['item_handlers']))
  except (ValueError, KeyError, TypeError, RecursionError):
    return set()


def _is_part(store: Store, folder: str, name: str) -> bool:
  """Whether a name is that of a folder which Orbax has written."""
  if _OF_PROCESS.fullmatch(name):
    return True
  return bool((_IN_PARTS | _IN_ARRAYS) & set(store.children(f'{folder}/{name}')))
