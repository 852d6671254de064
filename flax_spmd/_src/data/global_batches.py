"""Batches: global arrays from the part that each process of a job has loaded.

    batch = local_to_global(batch, shardings)

**A process's part** of an array is what its devices hold: along each dimension the pieces that its
devices have, each once, in the order of the *global* array. If the devices of process 0 hold rows
4-5 and 0-1, in whatever order the mesh has them, its part is rows 0, 1, 4, 5. A dimension that every
process holds all of (it is not sharded, or sharded within processes only) is whole in every part;
there the processes must pass equal values, which is not checked.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.tree_util import KeyPath

from flax_spmd._src.mesh import describe
from flax_spmd._src.multihost import CALLS, TIMEOUT, differ, exchange, named, processes_of, ranges
from flax_spmd._src.tree_paths import path_string
from flax_spmd.errors import LayoutError, Problem, raise_problems

Check: TypeAlias = Literal['new', 'always', 'never']


def local_to_global(tree: Any, shardings: Any, *, check: Check = 'new', timeout: float = TIMEOUT) -> Any:
  """Global arrays from the part that each process has; the module says what a part is.

  Args:
    tree: this process's part of a batch: numpy arrays, or JAX arrays of this process.
    shardings: a `NamedSharding` for each leaf, in a tree of the same form.
    check: when the processes compare what they pass, which costs some milliseconds on the host.
      'new': when the form of a batch (paths, shapes, dtypes, shardings) is new. Where one process
      has a new form and another a known one (its data end early), only the first asks, and fails
      once `timeout` has passed. 'always': for every batch; all processes fail at once. 'never':
      a process sees its own mistakes only.
    timeout: seconds to wait for the other processes when they compare.

  Returns:
    The tree with global arrays, each sharded as asked. One process: as `jax.device_put`.

  Raises:
    LayoutError: a leaf without a sharding, or one that it does not fit; processes whose batches
      differ in paths, dtypes, sizes or shardings; a process that does not come. On every process
      that compares, with all offenders, before anything is transferred.

  Example:
    >>> sharding = NamedSharding(jax.make_mesh((8,), ('data',)), PartitionSpec('data'))
    >>> local_to_global({'x': np.ones((16, 4))}, {'x': sharding})['x'].sharding.spec
    P('data',)
  """
  if check not in ('new', 'always', 'never'):
    raise LayoutError(f"check={check!r} is no such choice.\nFix: 'new', 'always' or 'never'.")
  batch, arrays = _read(tree, shardings)
  agree = _agree if check == 'always' else _agree_once
  shapes = agree(batch, check != 'never', timeout)
  to = [part.sharding for part in batch.parts]
  if jax.process_count() == 1:
    whole = jax.device_put(arrays, to)
  else:
    # With the global shape given, JAX finds each device's piece by its place in the global array,
    # and also takes meshes of which the processes have different shares.
    whole = list(map(jax.make_array_from_process_local_data, to, arrays, shapes))
  return jax.tree.structure(tree).unflatten(whole)


def local_indices(shape: Sequence[int], sharding: Sharding) -> tuple[np.ndarray, ...]:
  """A process's part of an array: for each dimension the indices that this process's devices hold, in order.

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


class _Part(NamedTuple):
  """One leaf of a batch on this process; the shape is the part's, the dtype the global array's."""

  path: KeyPath
  shape: tuple[int, ...]
  dtype: Any
  sharding: NamedSharding


class _Batch(NamedTuple):
  """All that can be said of a batch without its values: what is asked about once, and remembered."""

  parts: tuple[_Part, ...]
  shardings: tuple[NamedSharding, ...]
  problems: tuple[Problem, ...]


def _read(tree: Any, shardings: Any) -> tuple[_Batch, list[Any]]:
  """A batch and its arrays. Raises nothing: the other processes wait to hear of problems."""
  by_path = dict(jax.tree_util.tree_flatten_with_path(shardings)[0])
  given = tuple(one for one in by_path.values() if isinstance(one, NamedSharding))
  parts, arrays, problems = [], [], []
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    array = leaf if isinstance(leaf, (jax.Array, np.ndarray)) else np.asarray(leaf)
    sharding = by_path.pop(path, None)
    found = _wrong_leaf(array, sharding)
    problems += [problem.at(path_string(path)) for problem in found]
    if not found:
      parts.append(_Part(path, array.shape, _dtype_on_device(array), sharding))
      arrays.append(array)
  problems += [
    Problem('it has a sharding, but is not in the batch.', _SAME_FORM).at(path_string(path))
    for path in by_path
  ]
  return _Batch(tuple(parts), given, tuple(problems)), arrays


_SAME_FORM = 'give a sharding for each leaf of the batch, in a tree of the same form.'


def _wrong_leaf(array: Any, sharding: Any) -> list[Problem]:
  if not isinstance(sharding, NamedSharding):
    missing = 'it has no sharding.' if sharding is None else f'{sharding!r} is no NamedSharding.'
    return [Problem(missing, _SAME_FORM)]
  if isinstance(array, jax.Array) and not array.is_fully_addressable:
    text = 'it is a global array already.'
    return [Problem(text, "leave it out, or pass this process's part of it.")]
  if _dtype_on_device(array) is None:
    text = f'{array.dtype} is no dtype of arrays on devices.'
    return [Problem(text, 'leave it out, or encode it as numbers.')]
  if len(sharding.spec) > array.ndim:
    text = f'its spec {sharding.spec} has {len(sharding.spec)} entries, its shape is {array.shape}.'
    return [Problem(text, 'give a spec with at most one entry per dimension.')]
  return _indivisible(array.shape, sharding)


def _dtype_on_device(array: Any) -> Any:
  """The dtype that JAX gives an array (float32 for float64), or None if it cannot take it."""
  if isinstance(array, jax.Array):
    return array.dtype
  kinds = np.number, np.bool_
  if any(jax.dtypes.issubdtype(array.dtype, kind) for kind in kinds):
    return jax.dtypes.canonicalize_dtype(array.dtype)
  return None


def _indivisible(shape: tuple[int, ...], sharding: NamedSharding) -> list[Problem]:
  problems = []
  for dim, (size, pieces) in enumerate(zip(shape, _pieces(sharding, len(shape)), strict=True)):
    mine = pieces.of_process.get(jax.process_index(), 1)  # having none is another problem
    if size % mine:
      text = (
        f'dim {dim}: size {size} does not divide into the {mine} pieces that the devices of this '
        f'process hold under {sharding.spec} over {describe(sharding.mesh)}.'
      )
      cut = f', or cut it to {size - size % mine}' if size > mine else ''
      problems.append(Problem(text, f'pad it to {size + -size % mine}{cut}.'))
  return problems


class _Pieces(NamedTuple):
  """How many different pieces a dimension has, in all and on each process's devices."""

  total: int
  of_process: Mapping[int, int]


@functools.lru_cache(maxsize=4096)
def _pieces(sharding: NamedSharding, rank: int) -> tuple[_Pieces, ...]:
  """The pieces of each dimension of an array of this rank."""
  size = sharding.num_devices  # divides into any number of pieces that these devices can make
  indices = sharding.devices_indices_map((size,) * rank)
  return tuple(_pieces_of(dim, indices) for dim in range(rank))


def _pieces_of(dim: int, indices: Mapping[Any, Any]) -> _Pieces:
  starts: dict[int, set[int]] = {}
  for device, index in indices.items():
    starts.setdefault(device.process_index, set()).add(index[dim].start or 0)
  counts = {process: len(found) for process, found in starts.items()}
  return _Pieces(len(set().union(*starts.values())), counts)


def _agree(batch: _Batch, ask: bool, timeout: float) -> tuple[tuple[int, ...], ...]:
  """The shapes of a batch's global arrays, once all processes are known to mean the same.

  Raises:
    LayoutError: what is wrong on any process, or differs between them.
  """
  me, members = jax.process_index(), processes_of(batch.shardings)
  if batch.shardings and me not in members:
    raise LayoutError(
      f'Process {me} has no device of the mesh, only {named(members)} {_have(members)}.\n'
      f'Fix: call local_to_global on {named(members)} only, or use a mesh with devices of all '
      'processes.'
    )
  if not ask or members in ((), (me,)):
    raise_problems(batch.problems)
  else:
    _compare(batch, members, timeout)
  return tuple(_global_shape(part) for part in batch.parts)


# No limit: what one process had forgotten, and another had not, only one of them would ask about.
_agree_once = functools.cache(_agree)


def _global_shape(part: _Part) -> tuple[int, ...]:
  """The part's shape, with each dimension as long as all of its pieces."""
  me = jax.process_index()
  pieces = _pieces(part.sharding, len(part.shape))
  return tuple(size // of.of_process[me] * of.total for size, of in zip(part.shape, pieces, strict=True))


def _compare(batch: _Batch, members: tuple[int, ...], timeout: float) -> None:
  """Raises what is wrong on any process, or else what differs between them."""
  text = json.dumps(
    {
      'problems': [(problem.text, problem.fix) for problem in batch.problems],
      'arrays': {path_string(part.path): _said_of(part) for part in batch.parts},
    }
  )
  fix = (
    f"{CALLS}. With check='new' a process does not come that has seen such a batch before (its data "
    "end early, say): check='always' makes it come; else see which of them is stuck or has ended."
  )
  said = exchange('local_to_global', members, text, fix, timeout)
  if len(said) > 1 or batch.problems:
    spoken = [(processes, json.loads(text)) for processes, text in said]
    raise_problems(_elsewhere(spoken) or _differences(spoken, batch.parts))


def _said_of(part: _Part) -> dict[str, Any]:
  return {
    'sharding': _where(part.sharding),
    'dtype': str(part.dtype),
    'shape': _global_shape(part),
  }


def _where(sharding: NamedSharding) -> str:
  mesh: Any = sharding.mesh
  ids = [device.id for device in mesh.devices.flat]
  return f'{sharding.spec} over {describe(sharding.mesh)} (devices {ranges(ids)})'


_Said: TypeAlias = list[tuple[list[int], dict[str, Any]]]


def _elsewhere(said: _Said) -> list[Problem]:
  """The problems that single processes have."""
  by_problem: dict[tuple[str, str], list[int]] = {}
  for processes, one in said:
    for text, fix in one['problems']:
      by_problem.setdefault((text, fix), []).extend(processes)
  return [Problem(f'{named(processes)}: {text}', fix) for (text, fix), processes in by_problem.items()]


def _differences(said: _Said, parts: Sequence[_Part]) -> list[Problem]:
  """Where the processes' batches are not alike."""
  mine = {path_string(part.path): part for part in parts}
  arrays = {process: one['arrays'] for processes, one in said for process in processes}
  problems = [
    problem
    for path in dict.fromkeys(path for one in arrays.values() for path in one)
    for problem in _differences_at(path, mine.get(path), {p: arrays[p].get(path) for p in arrays})
  ]
  orders = {process: ', '.join(one) for process, one in arrays.items()}
  fix = 'give every process a batch of the same form.'
  return problems or differ('the order of the arrays', orders, fix)


def _differences_at(path: str, part: _Part | None, said: Mapping[int, Any]) -> list[Problem]:
  """Where the processes differ on one array: the first of its properties, but every dimension."""
  there = {process: 'missing' if one is None else 'present' for process, one in said.items()}
  problems = differ(path, there, 'give every process a batch of the same form.')
  if problems or part is None:
    return problems
  where = {process: one['sharding'] for process, one in said.items()}
  ranks = {process: f'rank {len(one["shape"])}' for process, one in said.items()}
  dtypes = {process: one['dtype'] for process, one in said.items()}
  problems = (
    differ(path, where, 'make the mesh and the shardings in the same way on every process.')
    or differ(path, ranks, 'give every process arrays of the same rank.')
    or differ(path, dtypes, 'give every process arrays of the same dtypes.')
  )
  return problems or _sizes_differ(path, part, {p: one['shape'] for p, one in said.items()})


def _sizes_differ(path: str, part: _Part, shapes: Mapping[int, Sequence[int]]) -> list[Problem]:
  problems = []
  for dim, pieces in enumerate(_pieces(part.sharding, len(part.shape))):
    sizes = {
      process: f'{shape[dim] // pieces.total * pieces.of_process[process]} of {shape[dim]}'
      for process, shape in shapes.items()
    }
    if len({shape[dim] for shape in shapes.values()}) > 1:
      fix = 'give every process as much as its devices hold: pad or drop what is left over at the end.'
      problems += differ(f'{path}, dim {dim}', sizes, fix)
  return problems


def _have(processes: Sequence[int]) -> str:
  return 'has' if len(processes) == 1 else 'have'
