"""Contents: the tree of arrays that Orbax writes for a state, and the record beside it.

The tree is the state without its boxes. If small leaves are packed, the tree is flat: each large leaf by its
index, and one array per dtype that concatenates the small leaves.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from jax.core import Tracer

from flax_spmd._src.checkpoint.storage import skeleton
from flax_spmd._src.checkpoint.storage.host_shards import is_elsewhere, with_copy_elsewhere
from flax_spmd._src.checkpoint.storage.record import (
  LeafRecord,
  Record,
  by_path,
  describe,
  dtype_name,
  dtype_of,
  is_key,
  is_unsafe_name,
)
from flax_spmd._src.data.checksums import PendingChecksums, own_checksums
from flax_spmd._src.data.gather import gather
from flax_spmd._src.layout import Layout
from flax_spmd._src.multihost import differing_parts, named, processes_of
from flax_spmd._src.names import box_trees
from flax_spmd._src.rules.path_patterns import problem_of, searcher
from flax_spmd._src.state_plan import Plan
from flax_spmd._src.text import value_text, with_article
from flax_spmd.errors import CheckpointError, Problem, RulesError, problems_text

LEAVES, PACKED = 'leaves', 'packed'  # the two parts of a packed tree
_MOST_COMMON = 1 << 12  # elements
ROOT_NAME = 'root'  # of a state that is one array
_LONG = {np.dtype(name) for name in (np.longdouble, np.clongdouble)} - {
  np.dtype(float),
  np.dtype(complex),
}


class Contents(NamedTuple):
  """The contents of a checkpoint.

  Attributes:
    leaves: arrays and numbers to write, by path.
    record: their description.
  """

  leaves: dict[str, Any]
  record: Record

  @property
  def tree(self) -> Any:
    """The tree that Orbax writes."""
    values = [_written(leaf) for leaf in self.leaves.values()]
    if any(leaf.packed for leaf in self.record.leaves.values()):
      return _packed_tree(values, list(self.record.leaves.values()))
    return disk_tree(self.record, values.__getitem__)


def _written(leaf: Any) -> Any:
  """The value that Orbax writes for a leaf; None for an empty array, of which the record has all."""
  if 0 in np.shape(leaf):
    return None
  is_own = is_of_one_process(leaf) and leaf.is_fully_addressable
  return with_copy_elsewhere(leaf) if is_own else leaf


class PendingRecord:
  """The record of contents whose leaves may be changed or donated from now on. Every process makes one.

  Args:
    contents: contents that are being saved.
  """

  def __init__(self, contents: Contents):
    self._record = contents.record
    self._checksums = PendingChecksums(list(contents.leaves.values()), 'saved sums')
    self._common = _common_sums(contents.leaves) if jax.process_count() > 1 else {}

  def compute(self) -> None:
    """Does the work of this process, in any thread, while the storage writes."""
    self._checksums.compute()

  def complete(self) -> Record:
    """The record with checksums, in any thread. Every process calls this."""
    _check_common(self._common)
    records = {
      path: leaf._replace(checksum=total)
      for (path, leaf), total in zip(
        self._record.leaves.items(), self._checksums.complete(), strict=True
      )
    }
    return dataclasses.replace(self._record, leaves=records)


def _common_sums(leaves: Mapping[str, Any]) -> dict[str, str]:
  """A text for each number and each small array of which every process has a copy: step counters, say."""
  texts = {path: repr(leaf) for path, leaf in leaves.items() if not hasattr(leaf, 'dtype')}
  copies = [path for path, leaf in leaves.items() if path not in texts and _is_common(leaf)]
  return texts | dict(zip(copies, own_checksums([leaves[path] for path in copies]), strict=True))


def _is_common(leaf: Any) -> bool:
  """Whether every process has the whole of an array, and reads it in no time."""
  is_small = math.prod(leaf.shape) <= _MOST_COMMON
  if isinstance(leaf, np.ndarray):
    return is_small
  owners = {device.process_index for device in leaf.sharding.device_set}
  return is_small and leaf.is_fully_replicated and len(owners) == jax.process_count()


def _check_common(texts: Mapping[str, str]) -> None:
  """Raises if copies differ between processes: their shards would be of different steps, too."""
  differing = differing_parts('common', texts)
  if differing:
    fix = 'save the same state on every process; one of them may have made a call more than the others.'
    problems = [
      Problem(f'{path} differs between {" and ".join(named(members) for members, _ in groups)}.', fix)
      for path, groups in differing.items()
    ]
    raise CheckpointError(problems_text(problems))


def check_is_layout(layout: Any) -> None:
  """Raises `CheckpointError` if this is neither a layout nor a plan."""
  if not isinstance(layout, (Layout, Plan)):
    raise CheckpointError(
      f'{value_text(layout)} is neither a Layout nor a Plan.\nFix: pass the layout or the plan of the states.'
    )


def check_bytes(**sizes: Any) -> None:
  """Raises `CheckpointError`, listing every argument that is neither None nor a number of bytes."""
  problems = [
    Problem(f'{name}={value_text(size)} is not a number of bytes.', 'pass 0 or more.')
    for name, size in sizes.items()
    if size is not None and not size >= 0
  ]
  if problems:
    raise CheckpointError(problems_text(problems))


def contents_of(state: Any, layout: Layout | Plan, where: str | None = None, pack: int = 0) -> Contents:
  """The contents of a checkpoint of a state, still without checksums.

  Args:
    state, layout, where, pack: see `save`.

  Raises:
    LayoutError: the state is not one of the plan, or contains itself.
    CheckpointError: there are no leaves to save, or some cannot be saved (lists all of them); or they are nested too
      deeply.
  """
  check_is_layout(layout)
  try:
    return _contents_of(state, layout, where, pack)
  except RecursionError as error:
    raise CheckpointError(
      'The state is nested too deeply, or contains itself.\n'
      f'Fix: save a flatter one; Python allows {sys.getrecursionlimit()} nested calls.'
    ) from error


def _contents_of(state: Any, layout: Layout | Plan, where: str | None, pack: int) -> Contents:
  if isinstance(layout, Plan):
    state, layout = layout.box(state), layout.layout
  flat = skeleton.flatten(box_trees.plain(state))
  paths = skeleton.paths(flat.skeleton)
  leaves = by_path(paths, [_array(leaf) for leaf in flat.leaves])
  _check(leaves)
  indices = _selected(paths, where)
  rows = dict(zip(paths, layout.rows(state), strict=True))
  records = {
    path: describe(leaves[path], rows[path].names, on_mesh=not rows[path].logical) for path in indices
  }
  kept = {index: indices[path] for index, path in enumerate(paths) if path in indices}
  record = Record(skeleton.unflatten(flat.skeleton, kept.get), records, flat.kinds, _toml(layout))
  contents = _packed(Contents({path: leaves[path] for path in indices}, record), pack)
  _check_processes(contents)
  return contents


def disk_tree(record: Record, leaf: Any) -> Any:
  """The tree stored on disk, with `leaf(index)` as its leaves. Orbax requires a container at its root."""
  tree = skeleton.unflatten(record.skeleton, leaf)
  return tree if isinstance(tree, (dict, list)) else {ROOT_NAME: tree}


def disk_leaves(record: Record, tree: Any) -> dict[str, Any]:
  """The leaves of a tree that was read from disk, by path."""
  if isinstance(record.skeleton, int):
    return dict(zip(record.leaves, tree.values(), strict=True))
  leaves: dict[str, Any] = {}
  paths = list(record.leaves)

  def collect(structure: Any, node: Any) -> None:
    if isinstance(structure, int):
      leaves[paths[structure]] = node
    elif structure is not None:
      items = structure.items() if isinstance(structure, dict) else enumerate(structure)
      for key, child in items:
        collect(child, node[key])

  collect(record.skeleton, tree)
  return leaves


def _array(leaf: Any) -> Any:
  return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf


def _check(leaves: Mapping[str, Any]) -> None:
  problems = []
  for path, leaf in leaves.items():
    without_values = value_problem(path, leaf)
    if without_values is not None:
      problems.append(without_values)
    elif not isinstance(leaf, (jax.Array, np.ndarray, bool, int, float)) or _is_unsupported(leaf):
      dtype = getattr(leaf, 'dtype', None)
      kind = with_article(type(leaf).__name__) if dtype is None else f'an array of dtype {dtype}'
      problems.append(Problem(f'{path} is {kind}.', _fix_of(dtype)))
    elif type(leaf) is int and not -(1 << 63) <= leaf < 1 << 64:
      problems.append(
        Problem(f'{path} is an integer of more than 64 bits.', 'split it into numbers of 64 bits.')
      )
  problems += _name_problems(leaves)
  if not leaves:
    problems = [Problem('The state has no leaves.', 'save a state that contains arrays.')]
  if problems:
    raise CheckpointError(problems_text(problems))


def value_problem(path: str, leaf: Any) -> Problem | None:
  """The problem of an array that has no values; None for any other leaf."""
  if isinstance(leaf, Tracer):
    fix = 'call save outside of the function that JAX traces, with the state that it returns.'
    return Problem(f'{path} is traced: it has no values.', fix)
  if isinstance(leaf, jax.ShapeDtypeStruct):
    fix = 'save a state with values, as layout.init returns; layout.abstract only plans one.'
    return Problem(f'{path} is abstract: it has the shape {leaf.shape} but no values.', fix)
  if isinstance(leaf, jax.Array) and leaf.is_deleted():
    fix = 'save the state that the step returned, not the one that was donated to it.'
    return Problem(f'{path} has been deleted, or donated to a jitted function.', fix)
  return None


def is_of_one_process(leaf: Any) -> bool:
  """Whether a leaf is on devices of one process of several: that of a pipeline's stage, say."""
  several = jax.process_count() > 1 and isinstance(leaf, jax.Array)
  return several and len(processes_of([leaf.sharding])) == 1


def _check_processes(contents: Contents) -> None:
  """Raises for arrays of which each process has its own, on its own devices: which one is meant is unknown."""
  if jax.process_count() == 1:
    return
  owners = {
    path: named(processes_of([leaf.sharding]))
    for path, leaf in contents.leaves.items()
    if isinstance(leaf, jax.Array) and contents.record.leaves[path].packed is None
  }
  differing = differing_parts('owners', owners)
  if differing:
    fix = 'shard it over devices of all processes, as layout.shard does; or pass numpy arrays, equal in all of them.'
    problems = [
      Problem(f'{path} is on devices of {owners.get(path) or groups[0][1]} alone.', fix)
      for path, groups in differing.items()
    ]
    raise CheckpointError(problems_text(problems))


def _name_problems(paths: Iterable[str]) -> Iterator[Problem]:
  """Paths with names that are unsafe as file names, and paths that Orbax, which joins by dots, merges."""
  by_name: dict[str, str] = {}
  for path in paths:
    if path != skeleton.ROOT and any(map(is_unsafe_name, path.split('/'))):
      yield Problem(f'{value_text(path)} is not safe as a file path.', NAMES_FIX)
    other = by_name.setdefault(path.replace('/', '.'), path)
    if other != path:
      yield Problem(f'{path} and {other} would be one file.', NAMES_FIX)


NAMES_FIX = (
  'use no empty keys, no "/", "." or "\\" in the keys of the state, and no null or half characters.'
)


def _is_unsupported(leaf: Any) -> bool:
  """Whether a leaf is an array of something else than numbers, or of numbers that no store has a type for."""
  dtype = getattr(leaf, 'dtype', None)
  if dtype is None:
    return False
  try:
    dtype_of(dtype_name(leaf))
  except TypeError:
    return True
  return dtype in _LONG or (dtype_name(leaf) != 'bool' and _has_no_store(dtype))


def _has_no_store(dtype: Any) -> bool:
  """Whether TensorStore, which writes the arrays, lacks a dtype of numbers: some of less than a byte, say."""
  if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
    return False
  try:
    ts.dtype(dtype)
  except (TypeError, ValueError):
    return True
  return False


def _fix_of(dtype: Any) -> str:
  if dtype in _LONG:
    return 'convert it to float64 or complex128; no longer numbers can be stored.'
  if (
    isinstance(dtype, np.dtype) and not dtype.isnative and dtype.fields is None and dtype.kind in 'iufc'
  ):
    return 'convert it to the byte order of this machine, with x.astype(x.dtype.newbyteorder("=")).'
  if dtype is not None and jnp.issubdtype(dtype, jnp.number) and _has_no_store(dtype):
    is_float = jnp.issubdtype(dtype, jnp.floating)
    wide = 'bfloat16' if is_float else 'uint8' if str(dtype).startswith('u') else 'int8'
    cast = f"x.astype('{wide}'), and restore it with Changes(dtypes={{'{wide}': '{dtype}'}})"
    return f'save {cast}; TensorStore, which writes the arrays, has no {dtype}.'
  return 'keep only numbers, numeric arrays and random keys in the state.'


def _selected(paths: Sequence[str], where: str | None) -> dict[str, int]:
  """The paths to save, with their indices in the checkpoint."""
  problem = None if where is None else problem_of('where', where)
  if problem is not None:
    raise CheckpointError(problems_text([problem]))
  selected = [path for path in paths if where is None or searcher(where)(path)]
  if not selected:
    raise CheckpointError(
      f'where={value_text(where)} matches none of the {len(paths)} paths, such as {paths[0]}.\n'
      'Fix: pass a regular expression that is found in the paths to save.'
    )
  return {path: index for index, path in enumerate(selected)}


def _toml(layout: Layout) -> str | None:
  try:
    return layout.to_toml()
  except RulesError:  # a rule is a function
    return None


# -- packing


def _packed(contents: Contents, pack: int) -> Contents:
  """The contents with all arrays of up to `pack` bytes packed."""
  records = contents.record.leaves
  small = [
    path
    for path, leaf in records.items()
    if _is_separate(leaf) and not is_key(leaf) and leaf.bytes <= pack
  ]
  if not small or not pack:
    return contents
  absent = [path for path in small if is_elsewhere(getattr(contents.leaves[path], 'sharding', None))]
  if absent:
    fix = 'save this state with pack=0: every process stores the packed arrays of all.'
    owners = ((path, named(processes_of([contents.leaves[path].sharding]))) for path in absent)
    problems = [Problem(f'{path} is on devices of {owner} alone.', fix) for path, owner in owners]
    raise CheckpointError(problems_text(problems))
  leaves = dict(contents.leaves)
  leaves.update(zip(small, gather([leaves[path] for path in small]), strict=True))
  sizes: dict[str, int] = {}
  packed = dict(records)
  for path in small:
    leaf = records[path]
    offset = sizes.get(leaf.dtype, 0)
    packed[path] = leaf._replace(packed=(leaf.dtype, offset))
    sizes[leaf.dtype] = offset + leaves[path].size
  return Contents(leaves, dataclasses.replace(contents.record, leaves=packed))


def _packed_tree(values: Sequence[Any], records: Sequence[LeafRecord]) -> Any:
  large = {str(i): values[i] for i, leaf in enumerate(records) if _is_separate(leaf)}
  packed: dict[str, list[Any]] = {}
  for value, leaf in zip(values, records, strict=True):
    if leaf.packed:
      packed.setdefault(leaf.packed[0], []).append(np.ravel(value))
  return {LEAVES: large, PACKED: {dtype: np.concatenate(parts) for dtype, parts in packed.items()}}


def _is_separate(leaf: LeafRecord) -> bool:
  return leaf.packed is None and not leaf.is_number and not leaf.is_empty
