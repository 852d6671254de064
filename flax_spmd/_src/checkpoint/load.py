"""Loading: reads the saved leaves of a set of routes, verifies them, and converts them to the target's leaves.

Saved leaves are read directly into the shardings of the result: a stacked leaf that is to be unstacked is read
with the sharding of its layers. Conversions run on the devices, one stacked leaf at a time, and free each
saved leaf after its last use.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flax_spmd._src.checkpoint.matching.routes import Route
from flax_spmd._src.checkpoint.storage.readers import CheckpointReader
from flax_spmd._src.checkpoint.storage.record import (
  NUMBERS,
  LeafRecord,
  device_dtype,
  dtype_of,
  key_implementation,
)
from flax_spmd._src.checkpoint.storage.verification import damaged, raise_damaged
from flax_spmd.errors import CheckpointError


def load(
  reader: CheckpointReader,
  values: Mapping[str, Any],
  routes: Mapping[str, Route],
  *,
  verify: bool = True,
  memory: int | None = None,
) -> list[Any]:
  """Reads the target's leaves, in the order of `values`.

  Args:
    reader: checkpoint to read.
    values: target leaves by path, as in `RestoreTarget`.
    routes: route of each target leaf, by path.
    verify: whether to compare checksums.
    memory: most bytes in flight from storage.

  Raises:
    CheckpointDamagedError: the checkpoint cannot be read, or its checksums differ.
    CheckpointError: a leaf that was read does not match its target.
  """
  records = reader.record.leaves
  requests: dict[str, Any] = {}
  for path, route in routes.items():
    for saved in route.sources:
      if records[saved].value is None:
        requests.setdefault(saved, _request(records[saved], route, values[path]))
  leaves = reader.read(requests, memory)
  _check_width(reader, leaves)
  if verify:
    raise_damaged(reader.path, damaged(leaves, records))
  leaves |= {path: record.value for path, record in records.items() if record.value is not None}
  results = _converted(values, routes, leaves)
  _check(reader, values, results)
  return [results[path] for path in values]


def _check_width(reader: CheckpointReader, leaves: Mapping[str, Any]) -> None:
  """Raises if arrays of 64 bits were narrowed: `jax.enable_x64` applies to one thread, and others read."""
  records = reader.record.leaves
  narrow = [
    f'{path}: {records[path].dtype} became {leaf.dtype}.'
    for path, leaf in leaves.items()
    if records[path].dtype.endswith('64') and str(leaf.dtype) == records[path].dtype[:-2] + '32'
  ]
  if narrow:
    raise CheckpointError(
      f'Checkpoint {reader.path} was read with 64 bits disabled:\n'
      + '\n'.join(narrow)
      + '\nFix: enable them for all threads, with jax.config.update("jax_enable_x64", True).'
    )


def _request(record: LeafRecord, route: Route, target: Any) -> Any:
  """The request for a saved leaf: its stored shape and dtype, sharded for the target."""
  if record.dtype in NUMBERS:
    return NUMBERS[record.dtype]
  sharding = getattr(target, 'sharding', None)
  if device_dtype(record.dtype) != record.dtype:
    sharding = None  # a device would change the bits before their checksum; the cast is on the host
  if isinstance(sharding, NamedSharding) and (route.step != 'same' or route.keys):
    sharding = NamedSharding(
      sharding.mesh,
      _spec_before(sharding.spec, route, len(record.shape)),
      memory_kind=sharding.memory_kind,
    )
  return jax.ShapeDtypeStruct(record.shape, dtype_of(record.dtype), sharding=sharding)


def _spec_before(spec: PartitionSpec, route: Route, rank: int) -> PartitionSpec:
  """The spec of a saved leaf, from that of its conversion. The stacked dimension is not sharded."""
  entries = list(spec) + [None] * (rank + 1 - len(spec))
  if route.step == 'unstack':
    entries.insert(route.axis, None)
  elif route.step == 'stack':
    del entries[route.axis]
  elif route.step == 'move':
    entries = [entries[route.order.index(d)] for d in range(rank)]
  return PartitionSpec(*entries[:rank])


def _converted(
  values: Mapping[str, Any], routes: Mapping[str, Route], leaves: dict[str, Any]
) -> dict[str, Any]:
  """The target's leaves, by path. Removes saved leaves from `leaves` after their last use."""
  uses: dict[str, int] = {}
  for route in routes.values():
    for saved in route.sources:
      uses[saved] = uses.get(saved, 0) + 1
  siblings = _siblings(routes)
  results: dict[str, Any] = {}
  for path, route in routes.items():
    if path in results:
      continue
    if route.step == 'keep':
      results[path] = values[path]
      continue
    together = siblings[route[:3]] if route.step == 'unstack' else [path]
    parts = [_unshared(leaves[saved], uses[saved] > len(together)) for saved in route.sources]
    results |= zip(
      together,
      _convert(parts, [routes[p] for p in together], [values[p] for p in together]),
      strict=True,
    )
    for saved in route.sources:
      uses[saved] -= len(together)
      if not uses[saved]:
        del leaves[saved]
  return results


def _unshared(leaf: Any, shared: bool) -> Any:
  """A copy of a leaf with further uses: donating one result must not invalidate another."""
  return jnp.copy(leaf) if shared and isinstance(leaf, jax.Array) else leaf


def _siblings(routes: Mapping[str, Route]) -> dict[Any, list[str]]:
  """Target leaves that are slices of one saved leaf along one dimension, by sources, step and axis."""
  siblings: dict[Any, list[str]] = {}
  for path, route in routes.items():
    siblings.setdefault(route[:3], []).append(path)
  return siblings


def _convert(parts: Sequence[Any], routes: Sequence[Route], targets: Sequence[Any]) -> list[Any]:
  """One or several target leaves, from the saved leaves that they share."""
  shardings = tuple(getattr(target, 'sharding', None) for target in targets)
  if _is_unchanged(parts[0], targets[0], routes[0]):
    return [parts[0]]
  if any(sharding is None for sharding in shardings) or not all(isinstance(p, jax.Array) for p in parts):
    return [_on_host(parts, route, target) for route, target in zip(routes, targets, strict=True)]
  dtypes = tuple(str(target.dtype) for target in targets)
  return _program(tuple(_without_sources(routes)), dtypes, shardings)(parts)


def _is_unchanged(part: Any, target: Any, route: Route) -> bool:
  """Whether a leaf needs no conversion, of keys neither: their dtypes differ from those of numbers."""
  dtype = getattr(target, 'dtype', None)
  return route.step == 'same' and dtype is not None and getattr(part, 'dtype', None) == dtype


def _without_sources(routes: Sequence[Route]) -> list[Route]:
  """The conversions without their paths, so that equal ones share a compiled program."""
  return [route._replace(sources=()) for route in routes]


@functools.lru_cache(maxsize=256)
def _program(routes: tuple[Route, ...], dtypes: tuple[str, ...], shardings: tuple[Any, ...]) -> Any:
  def convert(parts: Sequence[jax.Array]) -> list[jax.Array]:
    results = [_keys(_step(parts, route, jnp), route) for route in routes]
    return [
      x if str(x.dtype) == dtype else x.astype(dtype) for x, dtype in zip(results, dtypes, strict=True)
    ]

  return jax.jit(convert, out_shardings=list(shardings))


def _step(parts: Sequence[Any], route: Route, xp: Any) -> Any:
  """Applies a route's conversion, in numpy or JAX."""
  if route.step == 'stack':
    return xp.stack(parts, route.axis)
  if route.step == 'unstack':
    return parts[0][(slice(None),) * route.axis + (route.layer,)]
  return xp.transpose(parts[0], route.order) if route.step == 'move' else parts[0]


def _keys(x: jax.Array, route: Route) -> jax.Array:
  """Typed keys from their numbers, or numbers from typed keys, if the route requires it. No bits change."""
  if route.keys is None:
    return x
  if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
    return jax.random.key_data(x)
  return jax.random.wrap_key_data(x, impl=key_implementation(route.keys))


def _on_host(parts: Sequence[Any], route: Route, target: Any) -> Any:
  """A conversion to or from a numpy array or a Python number."""
  if route.keys == 'uint32':
    parts = [jax.random.key_data(part) for part in parts]
  result = _step([np.asarray(part) for part in parts], route, np)
  if not hasattr(target, 'dtype'):
    return type(target)(result.item())
  result = _cast(result, target.dtype)
  sharding = getattr(target, 'sharding', None)
  return result if sharding is None else jax.device_put(result, sharding)


def _cast(array: np.ndarray, dtype: Any) -> np.ndarray:
  """An array of another dtype. A Python number has to fit; its value may be unknown before the read."""
  cast = array.astype(dtype)
  if array.dtype.kind == 'i' and array.ndim == 0 and int(cast) != int(array):
    raise CheckpointError(
      f'The number {array} does not fit into {dtype}.\nFix: give the target a wider dtype.'
    )
  return cast


def _check(reader: CheckpointReader, values: Mapping[str, Any], results: Mapping[str, Any]) -> None:
  """Raises unless every result has the type, shape, dtype and sharding of its target."""
  wrong = [path for path, target in values.items() if not _matches(results.get(path), target)]
  if wrong:
    raise CheckpointError(
      f'Checkpoint {reader.path} was read, but these leaves do not match their targets: {", ".join(wrong)}.\n'
      'Fix: please report this as a bug; no state was returned.'
    )


def _matches(result: Any, target: Any) -> bool:
  if not hasattr(target, 'dtype'):
    return type(result) is type(target)
  if not hasattr(result, 'dtype') or result.shape != target.shape or result.dtype != target.dtype:
    return False
  sharding = getattr(target, 'sharding', None)
  if sharding is None:
    return isinstance(result, np.ndarray)
  return isinstance(result, jax.Array) and result.sharding.is_equivalent_to(sharding, result.ndim)
