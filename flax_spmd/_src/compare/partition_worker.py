"""Partition worker: a process that partitions programs for GPUs or TPUs, until its connection is closed.

    python -m flax_spmd._src.compare.partition_worker DESCRIPTOR PLATFORM

First it sends whether it can partition. Then it answers each `PartitionRequest` by a `PartitionedProgram`, or None. It is a
separate process because JAX initialises its backends once per process, and because a crash ends the process.
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flax_spmd._src.compare.compile_worker import ASSIGNED, compile_program, devices_of, without_passes
from flax_spmd._src.compare.hardware import Target, compiler_environment, parse_target
from flax_spmd._src.compare.partitioner import GPU, PartitionedProgram, PartitionRequest
from flax_spmd._src.hlo.buffer_assignment import read_dump

_SOFTMAX = 'triton-softmax-rewriter'  # XLA's pass that fuses each softmax into one kernel


def main(descriptor: int, platform: str) -> None:
  """Answers requests for a platform on a connection, by its file descriptor."""
  connection = Connection(descriptor)
  connection.send(_is_able(platform))
  while True:
    try:
      request = connection.recv()
    except EOFError:
      return
    connection.send(_partitioned(request))


def _is_able(platform: str) -> bool:
  try:
    import flax_spmd._src.compat  # noqa: F401  # once, for all forks

    return platform == 'tpu' or _devices((1,)) is not None
  except Exception:  # a compiler of another version, say
    return False


def _partitioned(request: PartitionRequest) -> PartitionedProgram | None:
  from flax_spmd._src.compat import partition_program

  try:
    target = request.target
    if target is None:
      return PartitionedProgram(partition_program(request.code, _devices(request.shape)))
    if target.chip.platform == 'tpu':
      return _of_fork(request, target)
    return _with_memory(request, devices_of(target, request.shape))
  except Exception:  # the partitioner refuses the program
    return None


def _with_memory(request: PartitionRequest, devices: Any) -> PartitionedProgram | None:
  """The program with its buffers assigned; None if the compiler refuses it.

  The compiler then reads a cache of kernels, fails to, and so generates no code.
  """
  from flax_spmd._src.compat import dump_program, hlo_text

  flags = without_passes() if request.fuse_softmax else without_passes(_SOFTMAX)
  with tempfile.TemporaryDirectory() as path:
    folder = Path(path)
    cache = folder / 'kernels'
    cache.write_bytes(b'none')
    flags['xla_gpu_kernel_cache_file'] = str(cache)
    with contextlib.suppress(Exception):
      dump_program(request.code, devices, folder, flags)
    for file in folder.glob(ASSIGNED):
      if found := read_dump(file.read_bytes()):
        return PartitionedProgram(hlo_text(found.module, devices.size), found.memory)
  return None


def _of_fork(request: PartitionRequest, target: Target) -> PartitionedProgram | None:
  """The program as the compiler for TPUs compiles it, which only ends with its process; None if that refuses it."""
  receiving, sending = multiprocessing.Pipe(duplex=False)
  with tempfile.TemporaryDirectory() as folder:
    arguments = Path(folder), request, target, sending
    fork = multiprocessing.get_context('fork').Process(target=_send_compiled, args=arguments)
    fork.start()
    sending.close()
    try:
      return receiving.recv()
    except EOFError:
      return None
    finally:
      fork.join()


def _send_compiled(folder: Path, request: PartitionRequest, target: Target, sending: Connection) -> None:
  os.environ.update(compiler_environment(target))
  (folder / 'program.mlir').write_bytes(request.code)
  found = compile_program(folder, target, request.shape)
  sending.send(PartitionedProgram((folder / 'hlo.txt').read_text(), found['memory']))


@functools.cache
def _devices(shape: tuple[int, ...]) -> Any:
  return devices_of(parse_target(f'{GPU}:{math.prod(shape)}'), shape)


if __name__ == '__main__':
  main(int(sys.argv[1]), sys.argv[2])
