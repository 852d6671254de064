"""Orbax's context: the options of every read and write, set in one place."""

from __future__ import annotations

import os

import jax
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint.options import AtomicityMode

from flax_spmd._src.checkpoint.storage import buckets
from flax_spmd._src.compat import orbax_operation, store_absent_arrays
from flax_spmd._src.multihost import exchange

_FILE_SIZE = 64 << 20  # bytes of a file with arrays: one is synced or read while another one is written
_OBJECT_SIZE = 400 << 20  # bytes of an object with arrays, sent in one request; Orbax's for GCS


def context(
  path: str | os.PathLike[str] | None = None,
  *,
  compress: bool = False,
  memory: int | None = None,
  largest: int = 0,
  of_stages: bool = False,
  whole: bool = False,
) -> ocp.Context:
  """Orbax's context for the reads and writes of `flax_spmd.checkpoint`.

  Args:
    path: folder to read or write, if it may be in a bucket.
    compress: whether to compress the data.
    memory: most bytes in flight between devices and storage.
    largest: bytes of the largest array. Orbax requires `memory` to be larger, so it is raised if needed.
    of_stages: whether arrays are on devices of one process of several.
    whole: whether the first copy of each array is written; else each copy writes a part. So it is with `of_stages`.
  """
  options = ocp.Context()
  options.array.saving.use_compression = compress
  options.array.saving.ocdbt_target_data_file_size = _FILE_SIZE
  if of_stages:
    store_absent_arrays()
  if of_stages or whole:
    options.array.saving.use_replica_parallel = False
  # In the background, a folder that cannot be made leaves threads waiting for it for minutes.
  options.asynchronous.create_directories_asynchronously = False
  if path is not None and '://' in os.fspath(path):
    buckets.reach(os.fspath(path))
    options.atomicity.mode = AtomicityMode.COMMIT_FILE
    options.array.saving.ocdbt_target_data_file_size = _OBJECT_SIZE
  if memory is not None:
    memory = max(memory, largest + 1)
    options.memory.write_concurrent_bytes = memory
    options.memory.read_concurrent_bytes = memory
  return options


def local_context(path: str | os.PathLike[str], memory: int, lacks_zeros: bool = False) -> ocp.Context:
  """Orbax's context for reads of one process. It does not wait for the other processes of the job.

  So an error in one process cannot leave the others waiting.

  Args:
    path, memory: as for `context`.
    lacks_zeros: whether missing data is zeros, and no error.
  """
  options = context(path, memory=memory)
  options.array.loading.raise_array_data_missing_error = not lacks_zeros
  options.multiprocessing.active_processes = {jax.process_index()}
  options.multiprocessing.primary_host = jax.process_index()
  return options


def align_operations() -> None:
  """Makes all processes number Orbax's next operation alike.

  Otherwise, after a read in only one of them, or one that failed in only one, they would wait for each other at barriers
  of different names.
  """
  if jax.process_count() > 1:
    numbers = exchange('operations', str(orbax_operation()))
    orbax_operation(at_least=max(int(number) for _, number in numbers))
