"""Orbax files: the files that belong to a checkpoint of Orbax, or of this package's format 1, in a folder.

A save may replace those. Any other file is somebody's data, and is never removed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any

from flax_spmd._src.checkpoint.storage.orbax_folders import (
  INDICATOR,
  METADATA,
  TREE_METADATA,
  names_of_entries,
)
from flax_spmd._src.checkpoint.storage.parsed_json import json_object
from flax_spmd._src.checkpoint.storage.store import Store

_MARKS = {METADATA, TREE_METADATA, INDICATOR, 'commit_success.txt'}
_FILES = {'_sharding', '_strings.json', 'checkpoint', 'manifest.ocdbt'}
_FILES |= {'MANIFEST'}  # ours, in a copy of a generation
_FOLDERS = {'array_metadatas', 'descriptor'}
_OF_PROCESS = re.compile(r'ocdbt\.process_\d+')
_IN_PARTS = {TREE_METADATA, 'manifest.ocdbt', 'commit_success.txt'}
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
  is_tree = TREE_METADATA in marks
  known = _FOLDERS | ({'d'} if 'manifest.ocdbt' in names else set())
  known |= _parts(store, folder) if METADATA in marks else set()
  arrays = set(names_of_entries(_content(store, f'{folder}/{TREE_METADATA}'))) if is_tree else set()

  def is_known(name: str) -> bool:
    if name in known or _OF_PROCESS.fullmatch(name):
      return True
    inside = set(store.children(f'{folder}/{name}'))
    if name in _FILES and not inside:
      return True
    if is_tree:
      return name in arrays and bool(_IN_ARRAYS & inside)
    return bool(_IN_PARTS & inside) and METADATA not in inside  # which another checkpoint has

  return [name for name in sorted(set(names) - _MARKS) if is_known(name)] + marks


def _parts(store: Store, folder: str) -> set[str]:
  """The names of a checkpoint's parts, as Orbax has recorded them."""
  handlers = _content(store, f'{folder}/{METADATA}').get('item_handlers')
  return set(handlers) if isinstance(handlers, dict) else set()


def _content(store: Store, file: str) -> dict[str, Any]:
  """A metadata file of Orbax; nothing if it is damaged."""
  stored = store.read(file)
  with contextlib.suppress(ValueError, RecursionError):
    return json_object(stored[0]) if stored else {}
  return {}
