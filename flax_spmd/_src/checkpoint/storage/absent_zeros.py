"""Absent zeros: earlier versions of Orbax wrote no chunk of zarr3 whose elements are all zero."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

from etils import epath

from flax_spmd._src.checkpoint.storage.orbax_folders import TREE_METADATA, array_kvstore, read_metadata
from flax_spmd._src.checkpoint.storage.tensorstore_slices import opened
from flax_spmd._src.source_lines import warn

_ALL_ARE_WRITTEN = 'store_array_data_equal_to_fill_value'  # Orbax's mark of those that write zeros


def may_lack_zeros(folder: epath.Path) -> bool:
  """Whether chunks of zeros may be missing in a folder of arrays."""
  content = read_metadata(folder / TREE_METADATA, folder)
  return content.get('use_zarr3') is True and content.get(_ALL_ARE_WRITTEN) is not True


def warn_of_absent(
  path: epath.Path, folder: epath.Path, names: Mapping[str, str], wanted: Iterable[str]
) -> None:
  """Warns of arrays that lack chunks: zeros that were not written, or damage that looks the same.

  Args:
    path: path of the checkpoint.
    folder: folder of the arrays.
    names: Orbax's name of each array, by path.
    wanted: paths of the arrays that are read.
  """
  lacking = [leaf for leaf in wanted if not _is_complete(folder, names[leaf])]
  if lacking:
    warn(
      f'Checkpoint {path} lacks data of {", ".join(lacking)}, which is read as zeros: the version of Orbax that wrote it '
      'left zeros out. Lost data would look the same.\n'
      'Fix: compare these arrays with what you expect, and convert the checkpoint with flax-spmd checkpoint convert, '
      'which writes zeros and checksums.'
    )


def _is_complete(folder: epath.Path, name: str) -> bool:
  """Whether all chunks of an array are stored; also if it cannot be opened, which its read reports."""
  with contextlib.suppress(ValueError, OSError):
    store = opened('zarr3', array_kvstore(folder, name)).result()
    return bool(store.storage_statistics(query_fully_stored=True).result().fully_stored)
  return True
