"""Gathering: whole arrays on the host, from wherever they lie.

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

from flax_spmd._src.multihost import named, processes_of
from flax_spmd._src.public_module import set_module
from flax_spmd._src.tree_paths import path_string
from flax_spmd.errors import Problem, raise_problems


@set_module('flax_spmd')
def gather(tree: Any) -> Any:
  """Every array of a tree as a whole numpy array, on every process.

  All copies from the devices are started before the first is waited for. Where processes hold parts
  only, one program makes all arrays of a mesh whole first: for that moment each device holds all of
  them, so this is for what fits on one device; save a checkpoint of what does not.

  Args:
    tree: any tree. Leaves that are no JAX arrays (numpy arrays, numbers) stay as they are, and so do
      nodes, boxes among them.

  Returns:
    The tree with numpy arrays of the same shapes and dtypes, read-only. PRNG key arrays stay key
    arrays, on this process's default device.

  Raises:
    LayoutError: an array is traced, or lies on other processes' devices only; names all of them.

  Example:
    >>> sharding = NamedSharding(jax.make_mesh((8,), ('data',)), PartitionSpec('data'))
    >>> gather({'step': 3, 'w': jax.device_put(np.arange(8), sharding)})
    {'step': 3, 'w': array([0, 1, 2, 3, 4, 5, 6, 7]...)}
  """
  leaves, treedef = jax.tree.flatten(tree)
  places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
  found = [leaves[place] for place in places]
  if jax.process_count() > 1 or any(isinstance(array, Tracer) for array in found):
    raise_problems(_out_of_reach(tree))
  arrays = [jax.random.key_data(array) if _is_key(array) else array for array in found]
  if jax.process_count() > 1:
    arrays = _made_whole(arrays)
  for place, array, value in zip(places, found, jax.device_get(arrays), strict=True):
    leaves[place] = _key_again(value, array) if _is_key(array) else value
  return treedef.unflatten(leaves)


def _out_of_reach(tree: Any) -> list[Problem]:
  """Arrays that have no value here."""
  problems = []
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    if isinstance(leaf, Tracer):
      text, fix = 'it is being traced and has no value yet.', 'gather the results of a jitted function.'
      problems.append(Problem(text, fix).at(path_string(path)))
    elif isinstance(leaf, jax.Array) and not leaf.sharding.addressable_devices:
      owners = named(processes_of([leaf.sharding]))
      text = f'it lies on devices of {owners} only, process {jax.process_index()} has none of it.'
      fix = f'call gather on {owners} only, or place the array on a mesh with devices of all processes.'
      problems.append(Problem(text, fix).at(path_string(path)))
  return problems


def _made_whole(arrays: list[Any]) -> list[Any]:
  """The arrays, with those replicated of which a process holds parts only."""
  arrays = list(arrays)
  by_mesh: dict[Any, list[int]] = {}
  for place, array in enumerate(arrays):
    if array.is_fully_addressable or array.is_fully_replicated:
      continue
    if isinstance(array.sharding, NamedSharding):
      by_mesh.setdefault(array.sharding.mesh, []).append(place)
    else:  # a sharding that the compiler made: its devices' order is known to JAX only
      arrays[place] = multihost_utils.process_allgather(array, tiled=True)
  for mesh, places in by_mesh.items():
    with jax.set_mesh(mesh):  # another mesh may be in force
      whole = _replicate(mesh)([arrays[place] for place in places])
    for place, array in zip(places, whole, strict=True):
      arrays[place] = array
  return arrays


@functools.lru_cache(maxsize=64)
def _replicate(mesh: Mesh) -> Any:
  return jax.jit(lambda arrays: arrays, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _is_key(array: jax.Array) -> bool:
  return not isinstance(array.dtype, np.dtype) and jax.dtypes.issubdtype(
    array.dtype, jax.dtypes.prng_key
  )


def _key_again(data: Any, key: jax.Array) -> jax.Array:
  return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))
