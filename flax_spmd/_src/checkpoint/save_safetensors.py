"""Saving as safetensors: a state in the format of Hugging Face, under the names and shapes of another library.

The state is the saved side of the same `Changes` that a restore takes, without a target. One array at a time is
converted, copied to the host, and written by the first process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from flax_spmd._src.checkpoint.leaf_conversion import converted_leaves, converted_together
from flax_spmd._src.checkpoint.matching.allowed_changes import (
  NO_CHANGES,
  Changes,
  check_without_target,
  is_selected,
  may_be_unused,
)
from flax_spmd._src.checkpoint.matching.differences import differences
from flax_spmd._src.checkpoint.matching.matcher import match
from flax_spmd._src.checkpoint.matching.routes import Route, Side
from flax_spmd._src.checkpoint.storage import skeleton
from flax_spmd._src.checkpoint.storage.async_save import in_first
from flax_spmd._src.checkpoint.storage.contents import NAMES_FIX, value_problem
from flax_spmd._src.checkpoint.storage.disk_store import explained
from flax_spmd._src.checkpoint.storage.record import (
  LeafRecord,
  Record,
  by_path,
  describe,
  dtype_of,
  is_unsafe_name,
)
from flax_spmd._src.checkpoint.storage.safetensors_files import INDEX_SUFFIX, SUFFIX, is_safetensors
from flax_spmd._src.checkpoint.storage.safetensors_header import METADATA, tensor_path
from flax_spmd._src.checkpoint.storage.safetensors_upload import SafetensorsUpload
from flax_spmd._src.checkpoint.storage.safetensors_writer import (
  FORMAT_NAMES,
  PlannedFile,
  SafetensorsWriter,
  planned_files,
)
from flax_spmd._src.checkpoint.storage.store import as_path, open_store
from flax_spmd._src.checkpoint.targets import changed_leaves
from flax_spmd._src.data.gather import gather
from flax_spmd._src.names import box_trees
from flax_spmd._src.public import public
from flax_spmd._src.text import size_text, value_text, with_article
from flax_spmd.errors import CheckpointError, CheckpointExistsError, Problem, problems_text

_SHARD_BYTES = 5_000_000_000  # of a folder's files, as in Hugging Face's libraries


@public('flax_spmd.checkpoint')
def save_safetensors(
  path: str | os.PathLike[str],
  state: Any,
  *,
  changes: Changes = NO_CHANGES,
  max_shard_bytes: int | None = None,
  metadata: Mapping[str, str] | None = None,
) -> None:
  """Writes a state as safetensors, for Hugging Face's libraries.

  The name of a tensor is the path of its array, joined by dots. Optimizer states, structure and logical names are not
  recorded: use `save` for checkpoints to resume from. In a job of several processes, every process calls this.

  Args:
    path: file to write (`.safetensors`), or folder for `model.safetensors`; a URL of a bucket too. The folder may exist and
      hold other files.
    state: tree of arrays and numbers, with or without boxes, sharded or not.
    changes: changes from the state to the file, as in `restore`: `renames`, `rearranged`, `stacks`, `dtypes`, `only`;
      `unused` leaves arrays out.
    max_shard_bytes: bytes of data per file, in a folder: more are written to several files with an index. Default: 5 GB.
    metadata: texts to store in the header; default: `{'format': 'pt'}`, which `transformers` requires.

  Raises:
    CheckpointExistsError: `path` exists, or the folder holds safetensors already. It is left unchanged.
    CheckpointError: the state has leaves that the format cannot hold (lists all of them); `changes` does not fit; or
      the disk or the bucket refuses.

  Example:
    >>> layout = Layout({'data': 2, 'model': 4}, (('embed', 'data'), ('mlp', 'model')))
    >>> kernels = layout.shard(LogicallyPartitioned(np.ones((2, 8, 16), 'float32'), ('layers', 'embed', 'mlp')))
    >>> changes = checkpoint.Changes(
    ...   renames={'kernel$': 'weight'}, rearranged={'weight$': '... in out -> ... out in'}, stacks={'layers': 'layers/{}'}
    ... )
    >>> checkpoint.save_safetensors(tmp / 'hf', {'layers': {'up': {'kernel': kernels}}}, changes=changes)
    >>> checkpoint.show(tmp / 'hf').record.leaves['layers/1/up/weight'].shape
    (16, 8)
    >>> target = layout.abstract(lambda: {'up': {'weight': jnp.zeros((16, 8))}})
    >>> checkpoint.restore(tmp / 'hf', target, changes=checkpoint.Changes(only='layers/1'))['up']['weight'].shape
    (16, 8)
  """
  leaves = _leaves(state, changes)
  routes, records = _routes(leaves, changes)
  _check_tensors(records)
  routes = dict(sorted(routes.items(), key=lambda item: -dtype_of(records[item[0]].dtype).itemsize))
  paths = [path for together in converted_together(routes) for path in together]
  tensors = {path.replace('/', '.'): records[path] for path in paths}
  url = as_path(path)
  folder, files = _planned(url, tensors, max_shard_bytes, metadata)
  in_first(lambda: _check_free(url, folder))
  targets = {path: _abstract(record) for path, record in records.items()}
  arrays = ((path.replace('/', '.'), leaf) for path, leaf in converted_leaves(targets, routes, leaves))
  _write(url, folder, files, arrays)


def _leaves(state: Any, changes: Changes) -> dict[str, Any]:
  """The arrays to save, by path; numbers as arrays of rank 0.

  Raises:
    CheckpointError: `changes` has entries that need a target, or the state has no leaves to save.
  """
  taken = 'renames', 'rearranged', 'stacks', 'dtypes', 'only', 'unused'
  check_without_target(changes, 'save_safetensors', *taken)
  flat = skeleton.flatten(box_trees.plain(state))
  leaves = by_path(skeleton.paths(flat.skeleton), flat.leaves)
  kept = {path: leaf for path, leaf in leaves.items() if not may_be_unused(changes, path)}
  if not kept:
    raise CheckpointError(
      'The state has no leaves to save.\nFix: pass a state that contains arrays, and unused= that leaves some.'
    )
  problems = [problem for path, leaf in kept.items() for problem in _leaf_problems(path, leaf)]
  if problems:
    raise CheckpointError(problems_text(problems))
  return {path: leaf if isinstance(leaf, jax.Array) else np.asarray(leaf) for path, leaf in kept.items()}


def _leaf_problems(path: str, leaf: Any) -> Iterator[Problem]:
  without_values = value_problem(path, leaf)
  if without_values is not None:
    yield without_values
  elif not isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float)):
    yield Problem(
      f'{path} is {with_article(type(leaf).__name__)}.', 'keep only numbers and arrays in the state.'
    )


def _routes(
  leaves: Mapping[str, Any], changes: Changes
) -> tuple[dict[str, Route], dict[str, LeafRecord]]:
  """The route and the record of each array to write, by path.

  Raises:
    CheckpointError: the changes do not fit the state.
  """
  saved = {path: describe(leaf) for path, leaf in leaves.items()}
  record = Record({path: number for number, path in enumerate(saved)}, saved, {})
  results = {
    path: leaf for path, leaf in changed_leaves(record, changes).items() if is_selected(changes, path)
  }
  selected = Side(saved, {})
  target = Side(results, {})
  matched = match(selected, target, changes)
  if changes.only is not None:
    matched = matched._replace(unused=[])
  problems = differences(selected, target, matched, changes)
  if problems:
    raise CheckpointError(problems_text(problems))
  return matched.routes, results


def _check_tensors(records: Mapping[str, LeafRecord]) -> None:
  """Raises CheckpointError unless the format can hold every array under its name."""
  problems = []
  by_name: dict[str, str] = {}
  for path, leaf in records.items():
    other = by_name.setdefault(tensor_path(path), path)
    if other != path:
      problems.append(Problem(f'{path} and {other} would be one tensor.', NAMES_FIX))
    if any(map(is_unsafe_name, tensor_path(path).split('/'))) or path == METADATA:
      problems.append(Problem(f'{value_text(path)} is not safe as a name.', NAMES_FIX))
    if leaf.dtype not in FORMAT_NAMES:
      fix = "keep it out, with Changes(unused='regex'), or save its data: jax.random.key_data(key), or another dtype."
      problems.append(Problem(f'{path} is {leaf}, which safetensors cannot hold.', fix))
  if problems:
    raise CheckpointError(problems_text(problems))


def _planned(
  path: Any, tensors: Mapping[str, LeafRecord], most: int | None, metadata: Mapping[str, str] | None
) -> tuple[epath.Path, list[PlannedFile]]:
  """The folder and the files to write.

  Raises:
    CheckpointError: an argument does not fit.
  """
  texts = {'format': 'pt'} if metadata is None else dict(metadata)
  if not all(isinstance(text, str) for pair in texts.items() for text in pair):
    raise CheckpointError(
      f'metadata={value_text(metadata)} holds more than strings.\nFix: pass a dict of strings.'
    )
  if most is not None and (type(most) is not int or most < 1):
    raise CheckpointError(
      f'max_shard_bytes={value_text(most)} is not a number of bytes.\nFix: pass 5_000_000_000.'
    )
  if path.name.endswith(SUFFIX):
    files = planned_files(tensors, most, texts, path.name)
    if len(files) > 1:
      size = size_text(sum(file.bytes for file in files))
      raise CheckpointError(
        f'{path} is one file, and {size} do not fit into max_shard_bytes={most}.\n'
        'Fix: pass a folder, which can hold several files.'
      )
    return path.parent, files
  return path, planned_files(tensors, most or _SHARD_BYTES, texts, None)


def _check_free(path: epath.Path, folder: epath.Path) -> None:
  """Raises CheckpointExistsError if something would be replaced."""
  is_file = path != folder
  if '://' in str(path):
    names = open_store(folder).children()
    held = [name for name in names if name.endswith((SUFFIX, INDEX_SUFFIX)) and name[0] != '.']
    exists, is_folder = path.name in names if is_file else bool(held), not is_file
  else:
    is_folder = path.is_dir()
    exists = path.exists() if is_file or not is_folder else is_safetensors(path)
  if exists:
    raise CheckpointExistsError(
      f'{path} {"holds safetensors" if is_folder else "exists"} already.\n'
      'Fix: save to another path, or remove it first.'
    )


def _abstract(record: LeafRecord) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(record.shape, dtype_of(record.dtype))


# -- writing


def _write(
  path: epath.Path, folder: epath.Path, files: list[PlannedFile], arrays: Iterator[tuple[str, Any]]
) -> None:
  """Writes the arrays. The first process writes; the others help to gather."""
  if jax.process_index() != 0:
    for _, array in arrays:
      _to_host(array)
    in_first(lambda: None)
    return
  failure: Exception | None = None
  try:
    with _writer(folder, files) as writer:
      for name, array in arrays:
        writer.write(name, _to_host(array))
      writer.commit()
  except (OSError, CheckpointError) as error:
    failure = error
  for _, array in arrays:  # the other processes go on gathering
    _to_host(array)
  in_first(lambda: _raise(path, failure))


def _writer(folder: epath.Path, files: list[PlannedFile]) -> SafetensorsWriter | SafetensorsUpload:
  if '://' in str(folder):
    return SafetensorsUpload(folder, files)
  return SafetensorsWriter(Path(folder), files)


def _raise(path: Any, failure: Exception | None) -> None:
  if isinstance(failure, OSError) and not isinstance(failure, CheckpointError):
    raise explained(failure, 'write', failure.filename2 or failure.filename or path) from failure
  if failure is not None:  # of a bucket
    raise failure


def _to_host(array: Any) -> np.ndarray:
  """A whole array in host memory, of which JAX keeps no copy."""
  if isinstance(array, np.ndarray):
    return array
  if not array.is_fully_addressable and not array.is_fully_replicated:
    return gather([array])[0]
  shards = array.addressable_shards
  if array.is_fully_replicated:
    return _shard_to_host(shards[0].data)
  whole = np.empty(array.shape, array.dtype)
  for shard in shards:
    if shard.replica_id == 0:
      whole[shard.index] = _shard_to_host(shard.data)
  return whole


def _shard_to_host(shard: jax.Array) -> np.ndarray:
  """The values of a shard. An array keeps the copy that is made of it; so a copy on the device is asked."""
  on_cpu = all(device.platform == 'cpu' for device in shard.devices())
  return np.asarray(shard if on_cpu else jnp.copy(shard))
