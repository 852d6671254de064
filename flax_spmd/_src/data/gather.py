"""Gather: full numpy arrays on the host from arrays with any sharding.

state = gather(state)    # numpy arrays, on every process, in one transfer
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_spmd._src.cycles import check_no_cycles
from flax_spmd._src.data.unusable_leaves import unusable
from flax_spmd._src.multihost import named, processes_of
from flax_spmd._src.public import public
from flax_spmd._src.tree_paths import path_string
from flax_spmd.errors import Problem, raise_problems


@public('flax_spmd')
def gather(tree: Any) -> Any:
  """Every array of a tree as a full numpy array, on every process.

  All device-to-host copies start before the first is awaited. If an array is sharded across processes, one
  program per mesh replicates such arrays first. Each device then holds all of them for a moment, so they
  have to fit on one device; save a checkpoint if they do not.

  Args:
    tree: any tree. Other leaves (numpy arrays, numbers) and all nodes, boxes included, are unchanged.

  Returns:
    The tree with read-only numpy arrays of the same shapes and dtypes. PRNG key arrays remain key arrays,
    on the default device of this process.

  Raises:
    LayoutError: an array is being traced, deleted, or only on devices of other processes (the message lists all of
      them), or a module contains itself.

  Example:
    >>> sharding = NamedSharding(jax.make_mesh((8,), ('data',)), PartitionSpec('data'))
    >>> gather({'step': 3, 'w': jax.device_put(np.arange(8), sharding)})
    {'step': 3, 'w': array([0, 1, 2, 3, 4, 5, 6, 7]...)}
  """
  check_no_cycles(tree)
  leaves, treedef = jax.tree.flatten(tree)
  indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
  originals = [leaves[index] for index in indices]
  if jax.process_count() > 1 or any(isinstance(each, Tracer) or each.is_deleted() for each in originals):
    raise_problems(_unavailable(tree))
  arrays = [jax.random.key_data(array) if _is_key(array) else array for array in originals]
  if jax.process_count() > 1:
    arrays = _replicated(arrays)
  for index, original, value in zip(indices, originals, jax.device_get(arrays), strict=True):
    leaves[index] = _as_key(value, original) if _is_key(original) else value
  return jax.tree.unflatten(treedef, leaves)


def _unavailable(tree: Any) -> list[Problem]:
  """The arrays without a value on this process."""
  problems = []
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    if isinstance(leaf, Tracer):
      text, fix = 'it is being traced and has no value yet.', 'gather the results of a jitted function.'
      problems.append(Problem(text, fix).at(path_string(path)))
    elif isinstance(leaf, jax.Array) and leaf.is_deleted():
      problems += filter(None, [unusable(path_string(path), leaf)])
    elif isinstance(leaf, jax.Array) and not leaf.sharding.addressable_devices:
      owners = named(processes_of([leaf.sharding]))
      text = f'it is only on devices of {owners}; process {jax.process_index()} holds no part of it.'
      fix = f'call gather on {owners} only, or reshard it over a mesh with devices of all processes.'
      problems.append(Problem(text, fix).at(path_string(path)))
  return problems


def _replicated(arrays: list[Any]) -> list[Any]:
  """The arrays, with those that are sharded across processes replicated."""
  arrays = list(arrays)
  by_mesh: dict[Any, list[int]] = {}
  for index, array in enumerate(arrays):
    if array.is_fully_addressable or array.is_fully_replicated:
      continue
    if isinstance(array.sharding, NamedSharding):
      by_mesh.setdefault(array.sharding.mesh, []).append(index)
    else:  # such as a GSPMDSharding from the compiler: only JAX knows its device order
      arrays[index] = multihost_utils.process_allgather(array, tiled=True)
  for mesh, indices in by_mesh.items():
    with jax.set_mesh(mesh):  # another mesh may be in force
      results = _replicate(mesh)([arrays[index] for index in indices])
    for index, array in zip(indices, results, strict=True):
      arrays[index] = array
  return arrays


@functools.lru_cache(maxsize=64)
def _replicate(mesh: Mesh) -> Any:
  return jax.jit(lambda arrays: arrays, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _is_key(array: jax.Array) -> bool:
  return not isinstance(array.dtype, np.dtype) and jax.dtypes.issubdtype(
    array.dtype, jax.dtypes.prng_key
  )


def _as_key(data: Any, key: jax.Array) -> jax.Array:
  return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))
