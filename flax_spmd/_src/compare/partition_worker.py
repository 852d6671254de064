"""Partition worker: a process that partitions programs for GPUs, until its connection is closed.

    python -m flax_spmd._src.compare.partition_worker DESCRIPTOR

First it sends whether it can partition. A request is the shape of the mesh and a program; the reply is the text of the
partitioned program, or None. It is a
separate process because JAX initialises its backends once per process, and because a crash ends the process.
"""

from __future__ import annotations

import functools
import math
import sys
from multiprocessing.connection import Connection
from typing import Any

from flax_spmd._src.compare.compile_worker import devices_of
from flax_spmd._src.compare.hardware import parse_target

GPU = 'h100'  # all GPUs have the same partitioner


def main(descriptor: int) -> None:
  """Answers requests on a connection, by its file descriptor."""
  connection = Connection(descriptor)
  connection.send(_is_able())
  while True:
    try:
      shape, code = connection.recv()
    except EOFError:
      return
    connection.send(_partitioned(shape, code))


def _is_able() -> bool:
  try:
    return _devices((1,)) is not None
  except Exception:  # a compiler of another version, say
    return False


def _partitioned(shape: tuple[int, ...], code: bytes) -> str | None:
  from flax_spmd._src.compat import partition_program

  try:
    return partition_program(code, _devices(shape))
  except Exception:  # the partitioner refuses the program
    return None


@functools.cache
def _devices(shape: tuple[int, ...]) -> Any:
  return devices_of(parse_target(f'{GPU}:{math.prod(shape)}'), shape)


if __name__ == '__main__':
  main(int(sys.argv[1]))
