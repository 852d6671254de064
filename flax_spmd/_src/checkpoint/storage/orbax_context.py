"""Orbax's context: the options of every read and write, set in one place."""

from __future__ import annotations

import jax
from orbax.checkpoint import v1 as ocp


def context(*, compress: bool = False, memory: int | None = None, largest: int = 0) -> ocp.Context:
  """Orbax's context for the reads and writes of `flax_spmd.checkpoint`.

  Args:
    compress: whether to compress the data.
    memory: most bytes in flight between devices and storage.
    largest: bytes of the largest array. Orbax requires `memory` to be larger, so it is raised if needed.
  """
  options = ocp.Context()
  options.array.saving.use_compression = compress
  # In the background, a folder that cannot be made leaves threads waiting for it for minutes.
  options.asynchronous.create_directories_asynchronously = False
  if memory is not None:
    memory = max(memory, largest + 1)
    options.memory.write_concurrent_bytes = memory
    options.memory.read_concurrent_bytes = memory
  return options


def local_context(memory: int) -> ocp.Context:
  """Orbax's context for reads of one process. It does not wait for the other processes of the job.

  So an error in one process cannot leave the others waiting.
  """
  options = context(memory=memory)
  options.multiprocessing.active_processes = {jax.process_index()}
  options.multiprocessing.primary_host = jax.process_index()
  return options
