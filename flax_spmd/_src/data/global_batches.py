"""Global batches: global arrays from the part of a batch that each process has loaded.

    batch = local_to_global(batch, shardings)

**A process's part** of an array is the union of the slices on its devices: along each dimension every
piece once, in the order of the *global* array. If the devices of process 0 hold rows 4-5 and 0-1, its part
is rows 0, 1, 4, 5, whatever the device order of the mesh. A dimension that is replicated, or sharded only
within processes, is complete in every part. Rows that several processes hold have to be equal on each of
them; where the processes compare their batches, they compare these rows by hash.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.tree_util import KeyPath

from flax_spmd._src.data.common_values import CommonPiece, common_shards, value_parts, value_problems
from flax_spmd._src.data.repeated_rows import ROWS, LoadedPart, repeated_text, rows_digest
from flax_spmd._src.mesh import describe
from flax_spmd._src.multihost import CALLS, TIMEOUT, differ, differing_parts, named, processes_of, ranges
from flax_spmd._src.source_lines import warn
from flax_spmd._src.text import value_text
from flax_spmd._src.tree_paths import path_string
from flax_spmd.errors import LayoutError, Problem, raise_problems

Check: TypeAlias = Literal['new', 'always', 'never']


def local_to_global(tree: Any, shardings: Any, *, check: Check = 'new', timeout: float = TIMEOUT) -> Any:
  """Global arrays from the part of a batch that each process has loaded.

  Args:
    tree: this process's part of a batch: numpy arrays, or JAX arrays of this process.
    shardings: a `NamedSharding` for each leaf, in a tree of the same structure.
    check: when the processes compare the structure of their batches (paths, shapes, dtypes, shardings)
      and, by hash, the values that several processes hold. It takes a few milliseconds on the host.
      'new': for a structure that this process has not compared yet. If only some processes have a new
      structure (because their data end early, say), those wait in vain and raise after `timeout`.
      'always': for every batch; all processes raise together.
      'never': each process checks its own batch only.
    timeout: seconds to wait for the other processes.

  Returns:
    The tree with global arrays, each with its sharding. In a single process: the result of
    `jax.device_put`.

  Warns:
    Several processes loaded equal rows for different parts of the first batch of a structure.

  Raises:
    LayoutError: a leaf has no sharding or does not fit it, the batches of two processes differ in paths,
      dtypes, sizes, shardings or in the values of rows that both hold, or a process does not arrive in time.
      Every process that compares raises it, with all offenders, before anything is transferred.

  Example:
    >>> sharding = NamedSharding(jax.make_mesh((8,), ('data',)), PartitionSpec('data'))
    >>> local_to_global({'x': np.ones((16, 4))}, {'x': sharding})['x'].sharding.spec
    P('data',)
  """
  if check not in ('new', 'always', 'never'):
    raise LayoutError(
      f"check={value_text(check)} is not a choice.\nFix: pass 'new', 'always' or 'never'."
    )
  batch, arrays = _read(tree, shardings)
  shapes = _global_shapes(batch, arrays, check, timeout)
  targets = [array.sharding for array in batch.arrays]
  if jax.process_count() == 1:
    results = jax.device_put(arrays, targets)
  else:
    # With the global shape, JAX finds each device's slice by its position in the global array, and
    # supports meshes with unequal numbers of devices per process.
    results = list(map(jax.make_array_from_process_local_data, targets, arrays, shapes))
  return jax.tree.unflatten(jax.tree.structure(tree), results)


def local_indices(shape: Sequence[int], sharding: Sharding) -> tuple[np.ndarray, ...]:
  """A process's part of an array: per dimension, the sorted indices on the devices of this process.

  Example:
    >>> sharding = NamedSharding(jax.make_mesh((8,), ('data',)), PartitionSpec('data'))
    >>> [len(indices) for indices in local_indices((16, 4), sharding)]
    [16, 4]
  """
  pieces = [index for index in sharding.addressable_devices_indices_map(tuple(shape)).values() if index]
  return tuple(
    np.unique(np.concatenate([np.arange(size)[piece[dim]] for piece in pieces]))
    for dim, size in enumerate(shape)
  )


class _LocalArray(NamedTuple):
  """The part of one array on this process: its shape, with dtype and sharding of the global array."""

  path: KeyPath
  shape: tuple[int, ...]
  dtype: Any
  sharding: NamedSharding


class _BatchStructure(NamedTuple):
  """The structure of a batch on this process: everything but the values. Cache key of a comparison."""

  arrays: tuple[_LocalArray, ...]
  shardings: tuple[NamedSharding, ...]
  problems: tuple[Problem, ...]


def _read(tree: Any, shardings: Any) -> tuple[_BatchStructure, list[Any]]:
  """The structure of a batch, and its arrays. Never raises: the other processes wait for the problems."""
  by_path = dict(jax.tree_util.tree_flatten_with_path(shardings)[0])
  named_shardings = tuple(one for one in by_path.values() if isinstance(one, NamedSharding))
  described, arrays, problems = [], [], []
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    array = leaf if isinstance(leaf, (jax.Array, np.ndarray)) else np.asarray(leaf)
    sharding = by_path.pop(path, None)
    mismatches = _mismatches(array, sharding)
    problems += [problem.at(path_string(path)) for problem in mismatches]
    if not mismatches:
      described.append(_LocalArray(path, array.shape, _dtype_on_device(array), sharding))
      arrays.append(array)
  problems += [
    Problem('it has a sharding, but is not in the batch.', _SAME_STRUCTURE).at(path_string(path))
    for path in by_path
  ]
  return _BatchStructure(tuple(described), named_shardings, tuple(problems)), arrays


_SAME_STRUCTURE = 'pass one sharding for each leaf of the batch, in a tree of the same structure.'


def _mismatches(array: Any, sharding: Any) -> list[Problem]:
  if not isinstance(sharding, NamedSharding):
    text = (
      'it has no sharding.' if sharding is None else f'{value_text(sharding)} is not a NamedSharding.'
    )
    return [Problem(text, _SAME_STRUCTURE)]
  if isinstance(array, jax.Array) and not array.is_fully_addressable:
    text = 'it is a global array already.'
    return [Problem(text, "leave it out, or pass this process's part of it.")]
  if _dtype_on_device(array) is None:
    text = f'devices cannot hold arrays of dtype {array.dtype}.'
    return [Problem(text, 'leave it out, or encode it as numbers.')]
  if len(sharding.spec) > array.ndim:
    text = f'its spec {sharding.spec} has {len(sharding.spec)} entries, its shape is {array.shape}.'
    return [Problem(text, 'pass a spec with at most one entry per dimension.')]
  return _indivisible(array.shape, sharding)


def _dtype_on_device(array: Any) -> Any:
  """The dtype of an array in JAX (float32 for float64), or None if JAX has no such dtype."""
  if isinstance(array, jax.Array):
    return array.dtype
  kinds = np.number, np.bool_
  if any(jax.dtypes.issubdtype(array.dtype, kind) for kind in kinds):
    return jax.dtypes.canonicalize_dtype(array.dtype)
  return None


def _indivisible(shape: tuple[int, ...], sharding: NamedSharding) -> list[Problem]:
  problems = []
  for dim, (size, pieces) in enumerate(zip(shape, _pieces(sharding, len(shape)), strict=True)):
    mine = pieces.of_process.get(jax.process_index(), 1)  # none is an error of its own
    if size % mine:
      text = (
        f'dim {dim}: size {size} is not divisible into the {mine} pieces that the devices of this '
        f'process hold under {sharding.spec} over {describe(sharding.mesh)}.'
      )
      cut = f', or cut it to {size - size % mine}' if size > mine else ''
      problems.append(Problem(text, f'pad it to {size + -size % mine}{cut}.'))
  return problems


class _PieceCounts(NamedTuple):
  """The number of distinct pieces of a dimension, in total and on each process."""

  total: int
  of_process: Mapping[int, int]


@functools.lru_cache(maxsize=4096)
def _pieces(sharding: NamedSharding, rank: int) -> tuple[_PieceCounts, ...]:
  """The piece counts of each dimension of an array of this rank."""
  size = sharding.num_devices  # divisible into any number of pieces on these devices
  indices = sharding.devices_indices_map((size,) * rank)
  return tuple(_pieces_of(dim, indices) for dim in range(rank))


def _pieces_of(dim: int, indices: Mapping[Any, Any]) -> _PieceCounts:
  starts: dict[int, set[int]] = {}
  for device, index in indices.items():
    starts.setdefault(device.process_index, set()).add(index[dim].start or 0)
  counts = {process: len(distinct) for process, distinct in starts.items()}
  return _PieceCounts(len(set().union(*starts.values())), counts)


def _global_shapes(
  batch: _BatchStructure, arrays: Sequence[Any], check: Check, timeout: float
) -> tuple[tuple[int, ...], ...]:
  """The shapes of a batch's global arrays, after a comparison with the other processes.

  Raises:
    LayoutError: the problems of any process, or the differences between processes.
  """
  key = batch, check == 'never'
  shapes = None if check == 'always' else _known_shapes.get(key)
  if shapes is None:
    repeated = _check(batch, arrays, check != 'never', timeout)
    shapes = tuple(map(_global_shape, batch.arrays))
    if check != 'always':
      _known_shapes[key] = shapes
    if repeated:  # at the end: where the warning is an error, this process has compared like the others
      warn(repeated)
  return shapes


# Unbounded: after an eviction on one process, that process would compare alone.
_known_shapes: dict[tuple[_BatchStructure, bool], tuple[tuple[int, ...], ...]] = {}


def _check(batch: _BatchStructure, arrays: Sequence[Any], compare: bool, timeout: float) -> str:
  """Raises the problems of a batch. Returns the text of a warning, or ''."""
  me, members = jax.process_index(), processes_of(batch.shardings)
  if batch.shardings and me not in members:
    raise LayoutError(
      f'Process {me} has no device of the mesh, only {named(members)} {_have(members)}.\n'
      f'Fix: call local_to_global on {named(members)} only, or use a mesh with devices of all '
      'processes.'
    )
  if not compare or members in ((), (me,)):
    raise_problems(batch.problems)
    return ''
  return _compare(batch, arrays, members, timeout)


def _global_shape(array: _LocalArray) -> tuple[int, ...]:
  """The part's shape, with each dimension scaled to the total number of its pieces.

  JAX has no public function for it: https://github.com/jax-ml/jax/issues/38889.
  """
  me = jax.process_index()
  pieces = _pieces(array.sharding, len(array.shape))
  return tuple(
    size // count.of_process[me] * count.total for size, count in zip(array.shape, pieces, strict=True)
  )


def _compare(
  batch: _BatchStructure, arrays: Sequence[Any], members: tuple[int, ...], timeout: float
) -> str:
  """Raises the problems of any process or, if there are none, the differences between processes.

  Returns:
    A warning of equal rows, or ''.
  """
  text = json.dumps(
    {
      'problems': [(problem.text, problem.fix) for problem in batch.problems],
      'arrays': {path_string(array.path): _record(array) for array in batch.arrays},
    }
  )
  fix = (
    f"{CALLS}. With check='new', a process that has compared such a batch before does not compare again "
    "(if its data end early, say): pass check='always'. Otherwise check which of them is stuck or has exited."
  )
  values = {} if batch.problems else value_parts(_common_pieces(batch.arrays, arrays))
  loaded = [] if batch.problems or batch in _compared else _loaded(batch.arrays, arrays)
  parts = {_STRUCTURE: text, **values, **rows_digest(loaded)}
  differing = differing_parts(
    'local_to_global', parts, members, fix=fix, timeout=timeout, grouped=(ROWS,)
  )
  texts = differing.get(_STRUCTURE, [(list(members), text)])
  if len(texts) > 1 or batch.problems:
    reports = [(processes, json.loads(text)) for processes, text in texts]
    raise_problems(_reported_problems(reports) or _differences(reports, batch.arrays))
  raise_problems(value_problems(differing, _EQUAL_ROWS))
  _compared.add(batch)
  return repeated_text(loaded, differing)


_compared: set[_BatchStructure] = set()  # whose rows were compared


_STRUCTURE = 'structure'
_EQUAL_ROWS = (
  'load the rows of layout.local_indices on each process; processes that hold the same rows have to load '
  'them in the same order, with the same random numbers.'
)


def _common_pieces(described: Sequence[_LocalArray], arrays: Sequence[Any]) -> Iterator[CommonPiece]:
  """The pieces of a batch that this process has in common with others, in the dtype of the devices."""
  for one, array in zip(described, arrays, strict=True):
    shape = _global_shape(one)
    common = common_shards(one.sharding, shape)
    if common:
      host, name = _on_host(array, one.dtype), f'{path_string(one.path)} ({one.dtype}{list(shape)})'
      mine = local_indices(shape, one.sharding)
      for shard in common:
        at = tuple(
          slice(*np.searchsorted(rows, limits)) for rows, limits in zip(mine, shard.bounds, strict=True)
        )
        yield CommonPiece(name, shard.bounds, shard.holders, host[at])


def _loaded(described: Sequence[_LocalArray], arrays: Sequence[Any]) -> list[LoadedPart]:
  """The arrays that are sharded between processes, the same list on each, with the part that this one loaded."""
  shapes = map(_global_shape, described)
  return [
    LoadedPart(
      f'{path_string(one.path)} ({one.dtype}{list(shape)})',
      _on_host(array, one.dtype),
      one.sharding,
      shape,
    )
    for one, array, shape in zip(described, arrays, shapes, strict=True)
    if any(min(each.of_process.values()) < each.total for each in _pieces(one.sharding, len(shape)))
  ]


def _on_host(array: Any, dtype: Any) -> np.ndarray:
  if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
    return np.asarray(jax.random.key_data(array))
  return np.asarray(array, dtype)


def _record(array: _LocalArray) -> dict[str, Any]:
  return {
    'sharding': _sharding_text(array.sharding),
    'dtype': str(array.dtype),
    'shape': _global_shape(array),
  }


def _sharding_text(sharding: NamedSharding) -> str:
  mesh: Any = sharding.mesh
  ids = [device.id for device in mesh.devices.flat]
  return f'{sharding.spec} over {describe(sharding.mesh)} (devices {ranges(ids)})'


_Reports: TypeAlias = list[tuple[list[int], dict[str, Any]]]


def _reported_problems(reports: _Reports) -> list[Problem]:
  """The problems of single processes."""
  by_problem: dict[tuple[str, str], list[int]] = {}
  for processes, one in reports:
    for text, fix in one['problems']:
      by_problem.setdefault((text, fix), []).extend(processes)
  return [Problem(f'{named(processes)}: {text}', fix) for (text, fix), processes in by_problem.items()]


def _differences(reports: _Reports, local: Sequence[_LocalArray]) -> list[Problem]:
  """The differences between the processes' batches."""
  mine = {path_string(array.path): array for array in local}
  arrays = {process: one['arrays'] for processes, one in reports for process in processes}
  problems = [
    problem
    for path in dict.fromkeys(path for one in arrays.values() for path in one)
    for problem in _differences_at(path, mine.get(path), {p: arrays[p].get(path) for p in arrays})
  ]
  orders = {process: ', '.join(one) for process, one in arrays.items()}
  return problems or differ('the order of the arrays', orders, _EQUAL_STRUCTURE)


_EQUAL_STRUCTURE = 'pass a batch of the same structure on every process.'


def _differences_at(path: str, array: _LocalArray | None, reports: Mapping[int, Any]) -> list[Problem]:
  """The differences at one array: in the first property that differs, but in every dimension."""
  presence = {process: 'missing' if one is None else 'present' for process, one in reports.items()}
  problems = differ(path, presence, _EQUAL_STRUCTURE)
  if problems or array is None:
    return problems
  shardings = {process: one['sharding'] for process, one in reports.items()}
  ranks = {process: f'rank {len(one["shape"])}' for process, one in reports.items()}
  dtypes = {process: one['dtype'] for process, one in reports.items()}
  problems = (
    differ(path, shardings, 'create the mesh and the shardings in the same way on every process.')
    or differ(path, ranks, 'pass arrays of the same rank on every process.')
    or differ(path, dtypes, 'pass arrays of the same dtype on every process.')
  )
  return problems or _sizes_differ(path, array, {p: one['shape'] for p, one in reports.items()})


def _sizes_differ(path: str, array: _LocalArray, shapes: Mapping[int, Sequence[int]]) -> list[Problem]:
  problems = []
  for dim, pieces in enumerate(_pieces(array.sharding, len(array.shape))):
    sizes = {
      process: f'{shape[dim] // pieces.total * pieces.of_process[process]} of {shape[dim]}'
      for process, shape in shapes.items()
    }
    if len({shape[dim] for shape in shapes.values()}) > 1:
      fix = 'pass on every process as much as its devices hold: pad or drop the remainder at the end.'
      problems += differ(f'{path}, dim {dim}', sizes, fix)
  return problems


def _have(processes: Sequence[int]) -> str:
  return 'has' if len(processes) == 1 else 'have'
