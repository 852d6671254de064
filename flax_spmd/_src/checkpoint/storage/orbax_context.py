"""How Orbax is asked to write and read, in one place."""

from __future__ import annotations

from orbax.checkpoint import v1 as ocp


def context(*, compress: bool = False, memory: int | None = None, largest: int = 0) -> ocp.Context:
  """Orbax's context for what `flax_spmd.checkpoint` does.

  Args:
    compress: whether data are compressed.
    memory: bytes that may be under way between devices and storage at once.
    largest: bytes of the largest array, which Orbax wants to have room for in them.
  """
  made = ocp.Context()
  made.array.saving.use_compression = compress
  # in the background, a folder that cannot be made leaves threads waiting for it for minutes
  made.asynchronous.create_directories_asynchronously = False
  if memory is not None:
    memory = max(memory, largest + 1)
    made.memory.write_concurrent_bytes = memory
    made.memory.read_concurrent_bytes = memory
  return made
