"""Slices: the parts of arrays that a process reads with TensorStore, each once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import tensorstore as ts

from flax_spmd._src.array_boxes import Box, volume
from flax_spmd._src.checkpoint.storage.buckets import PATIENT, Location
from flax_spmd._src.checkpoint.storage.host_shards import own_boxes

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
  return sum(map(volume, own_boxes(request))) * request.dtype.itemsize


def started(store: Any, request: Any) -> dict[Box, Any]:
  """TensorStore's future of each shard that a request needs of an opened array."""
  return {box: store[tuple(slice(*each) for each in box)].read() for box in own_boxes(request)}
