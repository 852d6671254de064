"""Possible sizes: arrays that neither the files of a checkpoint nor this process could hold.

Shapes are data: a description may be damaged, or written to do harm, with a digest that matches. The files
alone bound nothing: arrays of zeros take next to no space when they are compressed, and none at all in stores
that leave out chunks of the fill value. So sizes are impossible only if they exceed all that this process
could ever hold, *and* the files a thousandfold. No restore that could succeed is refused; the check replaces a
bare MemoryError, or a process that the system ends, by an error that names the arrays.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath

from flax_spmd._src.checkpoint.storage.record import LeafRecord
from flax_spmd._src.text import size_text
from flax_spmd.errors import CheckpointDamagedError, Problem

_COMPRESSION = 1000  # arrays of a state are never compressed as much
_SHOWN = 5
_UNKNOWN = 1 << 50  # bytes of memory, where the system reports none
_FIX = 'restore another checkpoint; the shapes of this one were changed after it was written.'
_MEMORY = re.compile(r'^(?:MemTotal|SwapTotal):\s+(\d+) kB$', re.MULTILINE)


def impossible(
  path: epath.Path, leaves: Mapping[str, LeafRecord], shardings: Mapping[str, Any]
) -> list[Problem]:
  """The problem of leaves that need more bytes than files and process could hold; empty for all others.

  Args:
    path: the checkpoint, a folder or a file.
    leaves: record of each leaf to read, by path.
    shardings: sharding of each leaf, by path. A leaf without one is read into host memory.
  """
  here = {name: _bytes_here(leaf, shardings.get(name)) for name, leaf in leaves.items()}
  needed, memory = sum(here.values()), _memory()
  if needed <= memory:
    return []
  files = _file_bytes(path)
  if needed <= files * _COMPRESSION:
    return []
  largest = sorted(here, key=lambda name: here[name], reverse=True)
  lines = [
    f'The arrays of checkpoint {path} would take {size_text(needed)} in this process, which can hold '
    f'{size_text(memory)}; the files have {size_text(files)} together.'
  ]
  lines += [
    f'{name}: {leaves[name]} takes {size_text(leaves[name].bytes)}.' for name in largest[:_SHOWN]
  ]
  return [Problem('\n'.join(lines), _FIX, CheckpointDamagedError)]


def impossible_leaves(
  path: epath.Path, leaves: Mapping[str, LeafRecord], together: bool = False
) -> dict[str, str]:
  """The reason for each leaf that needs more bytes than files and process could hold.

  Args:
    path: the checkpoint, a folder or a file.
    leaves: record of each leaf, by path.
    together: whether all of them are read at once. Then the largest ones are impossible, until the rest is possible.
  """
  memory = _memory()
  sizes = {name: leaf.bytes for name, leaf in leaves.items()}
  total = sum(sizes.values()) if together else max(sizes.values(), default=0)
  most = max(memory, _file_bytes(path) * _COMPRESSION) if total > memory else memory
  found: dict[str, str] = {}
  for name in sorted(sizes, key=lambda name: sizes[name], reverse=True):
    if (total if together else sizes[name]) <= most:
      break
    total -= sizes[name]
    others = ' with the others' if together and sizes[name] <= most else ''
    found[name] = (
      f'{leaves[name]} takes {size_text(sizes[name])}, more than files and process could hold{others}'
    )
  return found


def _bytes_here(leaf: LeafRecord, sharding: Any) -> int:
  """Bytes of a leaf in this process, at least: padded shards take more."""
  if sharding is None:
    return leaf.bytes
  return leaf.bytes * len(sharding.addressable_devices) // len(sharding.device_set)


def _memory() -> int:
  """Bytes that this process could hold: memory and swap space of the host, and memory of its accelerators."""
  stats = [device.memory_stats() for device in jax.local_devices() if device.platform != 'cpu']
  return _host_memory() + sum((each or {}).get('bytes_limit', 0) for each in stats)


def _host_memory() -> int:
  known = pathlib.Path('/proc/meminfo')
  if known.exists():
    return sum(1024 * int(size) for size in _MEMORY.findall(known.read_text()))
  try:
    return 2 * os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')  # swap space is unknown
  except (AttributeError, ValueError, OSError):  # Windows has no sysconf
    return _UNKNOWN


def _file_bytes(path: epath.Path) -> int:
  try:
    return sum(map(_file_bytes, path.iterdir())) if path.is_dir() else path.stat().length
  except FileNotFoundError:  # removed since it was listed, as other readers remove their pins
    return 0
