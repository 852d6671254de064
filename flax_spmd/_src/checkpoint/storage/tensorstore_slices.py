"""Slices: the parts of an array that a process reads with TensorStore, each once, and the array made of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from flax_spmd._src.checkpoint.storage.buckets import PATIENT, Location
from flax_spmd._src.checkpoint.storage.host_shards import from_callback

Index = tuple[tuple[int, int], ...]  # start and stop of each dimension

_MIN_IN_FLIGHT = 64 << 20  # bytes


def kvstore_of(folder: os.PathLike[str]) -> dict[str, Any]:
  """TensorStore's spec of a folder, on disk or in a bucket."""
  url = os.fspath(folder)
  return Location.of(url).kvstore(PATIENT) if '://' in url else {'driver': 'file', 'path': f'{url}/'}


def opened(driver: str, kvstore: Mapping[str, Any]) -> Any:
  """TensorStore's future of an array. A missing chunk is an error, not zeros."""
  spec = {'driver': driver, 'kvstore': kvstore, 'fill_missing_data_reads': False}
  return ts.open(spec, read=True, open=True)


def in_flight(size: int) -> int:
  """The bytes that may be in flight by default, of reads of a size. Without a limit, the host would hold up to twice the state."""
  return max(_MIN_IN_FLIGHT, size // 8)


def batches(requests: Mapping[str, Any], memory: int | None) -> Iterator[dict[str, Any]]:
  """Requests that may be in flight together, one at least.

  Args:
    requests, memory: see `CheckpointReader.read`.
  """
  sizes = {path: _bytes(request) for path, request in requests.items()}
  limit = memory or in_flight(sum(sizes.values()))
  group: dict[str, Any] = {}
  total = 0
  for path, request in requests.items():
    if group and total + sizes[path] > limit:
      yield group
      group, total = {}, 0
    group[path], total = request, total + sizes[path]
  if group:
    yield group


def _bytes(request: Any) -> int:
  """Bytes that this process reads of an array."""
  elements = sum(int(np.prod([stop - start for start, stop in index])) for index in _indices(request))
  return elements * request.dtype.itemsize


def started(store: Any, request: Any) -> dict[Index, Any]:
  """TensorStore's future of each slice that a request needs of an opened array."""
  return {index: store[tuple(slice(*each) for each in index)].read() for index in _indices(request)}


def assembled(request: Any, slices: Mapping[Index, np.ndarray]) -> Any:
  """The array that was requested, from its slices."""
  shape = tuple(request.shape)
  if request.sharding is None:
    return slices[_whole(shape)]
  return from_callback(
    shape, request.dtype, request.sharding, lambda index: slices[_plain(index or (), shape)]
  )


def _indices(request: Any) -> list[Index]:
  if request.sharding is None:
    return [_whole(request.shape)]
  indices = request.sharding.addressable_devices_indices_map(request.shape).values()
  return list(dict.fromkeys(_plain(index, request.shape) for index in indices))


def _whole(shape: tuple[int, ...]) -> Index:
  return tuple((0, size) for size in shape)


def _plain(index: Sequence[slice], shape: tuple[int, ...]) -> Index:
  return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))
