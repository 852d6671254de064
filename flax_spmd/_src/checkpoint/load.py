"""Loading: reads the saved leaves of a set of routes, verifies them, and converts them to the target's leaves.

Saved leaves are read directly into the shardings of the result: a stacked leaf that is to be unstacked is read
with the sharding of its layers. Conversions run on the devices; those of safetensors that only move elements are made
by reading each saved leaf into its place in the result.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.checkpoint.leaf_conversion import converted_leaves, device_order
from flax_spmd._src.checkpoint.matching.placements_of_routes import moves_only, placements
from flax_spmd._src.checkpoint.matching.routes import Route, record_of
from flax_spmd._src.checkpoint.storage.readers import CheckpointReader
from flax_spmd._src.checkpoint.storage.record import NUMBERS, LeafRecord, device_dtype, dtype_of
from flax_spmd._src.checkpoint.storage.safetensors_reader import (
  Arranged,
  SafetensorsReader,
  is_in_boxes,
)
from flax_spmd._src.checkpoint.storage.verification import (
  Damage,
  read_arranged,
  read_verified,
  wrong_numbers,
)
from flax_spmd.errors import CheckpointError

_NONE: Mapping[str, str] = {}


def load(
  reader: CheckpointReader,
  values: Mapping[str, Any],
  routes: Mapping[str, Route],
  *,
  verify: bool = True,
  memory: int | None = None,
  salvage: bool = False,
  lost: Mapping[str, str] = _NONE,
) -> tuple[list[Any], Damage]:
  """Reads the target's leaves, in the order of `values`.

  Args:
    reader: checkpoint to read.
    values: target leaves by path, as in `RestoreTarget`.
    routes: route of each target leaf, by path.
    verify: whether to compare checksums.
    memory: most bytes in flight from storage.
    salvage: whether to return the target's own leaf for each one that is damaged.
    lost: reason for each saved leaf that is known to be damaged, and of no route.

  Returns:
    The leaves, and the damage.

  Raises:
    CheckpointDamagedError: without `salvage`, the checkpoint cannot be read, or its checksums differ.
    CheckpointError: a leaf that was read does not match its target.
  """
  records = reader.record.leaves
  results = _arranged(reader, values, routes, memory)
  requests: dict[str, Any] = {}
  others = {path: route for path, route in routes.items() if path not in results}
  on_hosts = _read_on_hosts(others, values)
  for path, route in others.items():
    for saved, request in _requests(records, route, values[path]):
      if saved in on_hosts and hasattr(request, 'sharding'):
        request = request.update(sharding=None)
      if records[saved].value is None:
        requests.setdefault(saved, request)
  leaves, damage = read_verified(reader, requests, verify=verify, memory=memory, lost=lost)
  used = [source for route in routes.values() for source in route.sources]
  wrong = wrong_numbers(reader, used) if verify else {}
  damage = damage._replace(leaves={**lost, **wrong, **damage.leaves})
  if damage.names and not salvage:
    raise damage.error(reader.path)
  leaves |= {path: record.value for path, record in records.items() if record.value is not None}
  whole = {
    path: route for path, route in others.items() if not damage.leaves.keys() & set(route.sources)
  }
  results |= converted_leaves(values, whole, leaves)
  _check(reader, {path: values[path] for path in routes if path in whole or path in results}, results)
  results = {path: _with_weak_type(result, values[path]) for path, result in results.items()}
  return [results.get(path, values[path]) for path in values], damage


def _with_weak_type(result: Any, target: Any) -> Any:
  """A result with the weak type of its target, as of a number of steps: a step that is compiled for it is not compiled anew."""
  if not getattr(target, 'weak_type', False) or not isinstance(result, jax.Array):
    return result
  return compat.from_shards(target, result.sharding, [each.data for each in result.addressable_shards])


def _read_on_hosts(routes: Mapping[str, Route], values: Mapping[str, Any]) -> set[str]:
  """The saved leaves that every process of several reads as a whole, since their targets are on different devices.

  No process could slice an array on the devices of one target for another. All sources of a leaf are read alike.
  """
  if jax.process_count() == 1:
    return set()
  orders: dict[str, set[Any]] = {}
  for path, route in routes.items():
    sharding = getattr(values[path], 'sharding', None)
    for source in route.sources if sharding is not None else ():
      orders.setdefault(source, set()).add(device_order(sharding))
  found = {source for source, each in orders.items() if len(each) > 1}
  before = -1
  while before < len(found):
    before = len(found)
    found |= {each for route in routes.values() if found & set(route.sources) for each in route.sources}
  return found


def _arranged(
  reader: CheckpointReader, values: Mapping[str, Any], routes: Mapping[str, Route], memory: int | None
) -> dict[str, Any]:
  """The target leaves that can be read into place; none if a file cannot be read, which is then looked into."""
  if not isinstance(reader, SafetensorsReader):
    return {}
  records = reader.record.leaves
  uses = Counter(source for route in routes.values() for source in route.sources)
  requests: dict[str, Arranged] = {}
  for path, route in routes.items():
    dtypes = {records[source].dtype for source in route.sources}
    is_alone = all(uses[source] == 1 for source in route.sources)
    if route.step in ('same', 'keep') or not is_alone or dtypes != {_array_dtype(values[path])}:
      continue
    request = _request_of(values[path])
    arranged = Arranged(request, functools.partial(placements, route, records))
    if moves_only(route) and is_in_boxes(arranged):
      requests[path] = arranged
  return read_arranged(reader, requests, memory)


def _array_dtype(target: Any) -> str | None:
  """The dtype of a target leaf, if it gets the bits of a saved leaf; None for Python numbers."""
  dtype = str(getattr(target, 'dtype', None))
  on_device = getattr(target, 'sharding', None) is not None
  return None if dtype == 'None' or (on_device and device_dtype(dtype) != dtype) else dtype


def _request_of(target: Any) -> Any:
  return jax.ShapeDtypeStruct(target.shape, target.dtype, sharding=getattr(target, 'sharding', None))


def _requests(records: Mapping[str, LeafRecord], route: Route, target: Any) -> Iterator[tuple[str, Any]]:
  """The request for each saved leaf of a route: its stored shape and dtype, sharded for the target."""
  sharding = getattr(target, 'sharding', None)
  specs: Iterator[tuple[str, Any]] = ((saved, None) for saved in route.sources)
  if isinstance(sharding, NamedSharding) and route.step not in ('same', 'keep'):
    rank = len(record_of(route, records).shape)
    entries = [*sharding.spec, *[None] * (rank - len(sharding.spec))]
    specs = _specs_before(entries, route, records, dict(sharding.mesh.shape))
  for saved, spec in specs:
    record, placed = records[saved], sharding
    if record.dtype in NUMBERS:
      yield saved, NUMBERS[record.dtype]
      continue
    if spec is not None and isinstance(sharding, NamedSharding):
      placed = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    if device_dtype(record.dtype) != record.dtype:
      placed = None  # a device would change the bits before their checksum; the cast is on the host
    yield saved, jax.ShapeDtypeStruct(record.shape, dtype_of(record.dtype), sharding=placed)


def _specs_before(
  entries: list[Any], route: Route, records: Mapping[str, LeafRecord], sizes: dict[Any, int]
) -> Iterator[tuple[str, PartitionSpec]]:
  """The spec of each saved leaf of a route, from the entries of its result's.

  Args:
    entries: mesh axes of each dimension of the result.
    route: its route.
    records: record of each saved leaf, by path.
    sizes: size of each mesh axis.
  """
  if route.is_source:
    yield from ((source, PartitionSpec(*entries)) for source in route.sources)
    return
  before = _entries_before(entries, route, sizes)
  if route.step == 'resize':
    shape = record_of(route.operands[0], records).shape
    before = [
      each if _divides(each, size, sizes) else None for each, size in zip(before, shape, strict=True)
    ]
  for operand in route.operands:
    yield from _specs_before(before, operand, records, sizes)


def _divides(entry: Any, size: int, sizes: Mapping[Any, int]) -> bool:
  """Whether the mesh axes of a dimension divide its size."""
  axes = entry if isinstance(entry, tuple) else (entry,)
  return size % math.prod(sizes.get(axis, 1) for axis in axes) == 0


def _entries_before(entries: list[Any], route: Route, sizes: dict[Any, int]) -> list[Any]:
  """The mesh axes of the dimensions of a route's operands. A stacked dimension is not sharded."""
  if route.step == 'unstack':
    return [*entries[: route.axis], None, *entries[route.axis :]]
  if route.step == 'stack':
    return [*entries[: route.axis], *entries[route.axis + 1 :]]
  if route.step == 'move':
    return [entries[route.order.index(dim)] for dim in range(len(entries))]
  if route.step == 'keys':
    return entries[:-1] if route.dtype == 'uint32' else [*entries, None]
  return entries if route.rearrangement is None else route.rearrangement.spec_before(entries, sizes)


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
