"""Safetensors files: those that make up one checkpoint.

A checkpoint is one file, or several with an index, which names the file of each tensor:

    {"metadata": {"total_size": 16060522496},
     "weight_map": {"model.embed_tokens.weight": "model-00001-of-00004.safetensors", ...}}

A folder holds the one or the other. The index is the table of contents: tensors that it does not name are not part
of the checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from flax_spmd._src.checkpoint.storage.byte_ranges import RangeFile, stamp
from flax_spmd._src.checkpoint.storage.safetensors_header import (
  TensorEntry,
  listed_problems,
  name_problems,
  read_header,
  without_duplicates,
)
from flax_spmd.errors import CheckpointDamagedError, CheckpointError

SUFFIX, INDEX_SUFFIX = '.safetensors', '.safetensors.index.json'
MODEL = 'model'  # the stem that Hugging Face's libraries give
_SHARD = re.compile(r'(.*)-(\d{5})-of-(\d{5})\.safetensors\Z')
_MOST_INDEX_BYTES = 512 << 20

Located = tuple[epath.Path, TensorEntry]


def is_safetensors(path: epath.Path) -> bool:
  """Whether a path is a file of this format, an index, or a folder with such files."""
  if path.is_dir():
    return any(_is_visible(child) for child in path.iterdir())
  return _is_visible(path)


def _is_visible(path: epath.Path) -> bool:
  """Whether a path is a file or an index that is complete."""
  named = path.name.endswith((SUFFIX, INDEX_SUFFIX)) and not path.name.startswith('.')
  return named and path.is_file()


def shard_name(stem: str, number: int, count: int) -> str:
  """The name of a file, as Hugging Face's libraries give it.

  Example:
    >>> shard_name('model', 2, 4), shard_name('model', 1, 1)
    ('model-00002-of-00004.safetensors', 'model.safetensors')
  """
  return f'{stem}{SUFFIX}' if count == 1 else f'{stem}-{number:05}-of-{count:05}{SUFFIX}'


def located_tensors(path: epath.Path, before: Callable[[epath.Path], None]) -> dict[str, Located]:
  """The file and the entry of each tensor of a checkpoint, by name.

  Args:
    path: file, index or folder.
    before: called with each file before its header is read.

  Raises:
    CheckpointDamagedError: a file or the index is invalid, or they contradict each other.
    CheckpointError: the folder holds several checkpoints, or a part of one.
  """
  file = _chosen(path) if path.is_dir() else path
  if not file.name.endswith(INDEX_SUFFIX):
    before(file)
    return {name: (file, entry) for name, entry in read_header(file).items()}
  weight_map = _weight_map(file)
  headers: dict[str, Mapping[str, TensorEntry]] = {}
  for name in dict.fromkeys(weight_map.values()):
    before(file.parent / name)
    headers[name] = read_header(file.parent / name)
  lacking = [
    f'{tensor!r} is not in {name}.' for tensor, name in weight_map.items() if tensor not in headers[name]
  ]
  problems = lacking or list(name_problems(weight_map))
  if problems:
    raise _contradicted(file, problems)
  return {tensor: (file.parent / name, headers[name][tensor]) for tensor, name in weight_map.items()}


def _files_in(folder: epath.Path, suffix: str) -> list[epath.Path]:
  return sorted(
    child for child in folder.iterdir() if child.name.endswith(suffix) and _is_visible(child)
  )


def _chosen(folder: epath.Path) -> epath.Path:
  """The file or index to read in a folder; `model` before others, as in Hugging Face's libraries."""
  files, indices = _files_in(folder, SUFFIX), _files_in(folder, INDEX_SUFFIX)
  named = {file.name: file for file in (*files, *indices)}
  for name in (f'{MODEL}{SUFFIX}', f'{MODEL}{INDEX_SUFFIX}'):
    if name in named:
      return named[name]
  if len(indices) == 1:
    return indices[0]
  candidates = indices or files
  if len(candidates) > 1:
    raise CheckpointError(
      f'The folder {folder} holds {len(candidates)} safetensors files{"" if indices else " and no index"}: '
      f'{", ".join(file.name for file in candidates)}.\n'
      'Fix: pass the path of one of them'
      f'{"" if indices else "; if they are parts of one checkpoint, add its index"}.'
    )
  _check_is_whole(candidates[0])
  return candidates[0]


def _check_is_whole(file: epath.Path) -> None:
  """Raises if the only file of a folder is one of several parts."""
  part = _SHARD.match(file.name)
  if part and int(part[3]) > 1:
    raise CheckpointDamagedError(
      f'The folder {file.parent} holds part {int(part[2])} of {int(part[3])} of a checkpoint, and no index: '
      f'{file.name}.\n'
      'Fix: copy or download the others and the index; to restore this part alone, pass its own path.'
    )


def _weight_map(index: epath.Path) -> Mapping[str, str]:
  """The file name of each tensor, from an index; the files exist."""
  try:
    size = stamp(index)[0]
    if size > _MOST_INDEX_BYTES:
      raise ValueError(f'it has {size:,} bytes')
    with contextlib.closing(RangeFile(index)) as opened:
      content = json.loads(opened.read(0, size).decode(), object_pairs_hook=without_duplicates)
    weight_map = content.get('weight_map') if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
      raise ValueError('it has no object "weight_map"')
  except CheckpointError:  # of a bucket
    raise
  except (ValueError, EOFError, RecursionError) as error:
    reason = 'it is nested too deeply' if isinstance(error, RecursionError) else str(error).rstrip('.')
    raise _contradicted(index, [f'it cannot be read: {reason}.']) from error
  problems = [
    f'{tensor!r} is in {file!r}, which is not the name of a safetensors file.'
    for tensor, file in weight_map.items()
    if not _is_file_name(file)
  ]
  if problems:
    raise _contradicted(index, problems)
  files = dict.fromkeys(weight_map.values())
  lacking = [file for file in files if not (index.parent / file).is_file()]
  if lacking:
    raise _contradicted(index, [f'{file} does not exist.' for file in lacking])
  return weight_map


def _is_file_name(file: Any) -> bool:
  """Whether a text is the name of a file in the index's own folder."""
  is_name = isinstance(file, str) and file.endswith(SUFFIX) and file.isprintable()
  return is_name and not set(file) & set('/\\:') and not file.startswith('.')


def _contradicted(index: epath.Path, problems: list[str]) -> CheckpointDamagedError:
  return listed_problems(f'The index {index} does not describe a checkpoint:', problems, _FIX)


_FIX = 'Fix: copy or download the checkpoint again, the index and every file that it names.'
