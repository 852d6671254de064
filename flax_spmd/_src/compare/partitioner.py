"""Partitioner: XLA's partitioner for GPUs, for single operations, in a process of its own.

    text = partitioner().partition(code, (4, 2))       # in milliseconds, without a GPU

The process starts with the first program, and ends with this one.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import subprocess
import sys
import threading
import weakref
from multiprocessing.connection import Connection
from typing import Any

from flax_spmd._src.compare.compilation import has_wheel
from flax_spmd._src.compare.hardware import compiler_environment, parse_target
from flax_spmd._src.compare.partition_worker import GPU

_TIMEOUT = 60  # seconds, for one program or the start of the process


class Partitioner:
  """A process that partitions one program at a time, for all threads.

  A program that ends the process has no partition; the next one has a new process.
  """

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._running: _PartitionProcess | None = None
    self._is_able = True

  @property
  def process(self) -> subprocess.Popen[bytes] | None:
    """The process, while it runs."""
    return self._running and self._running.process

  def close(self) -> None:
    """Ends the process; the next program starts another one."""
    with self._lock:
      if self._running is not None:
        self._running.end()
      self._running = None

  def partition(self, code: bytes, shape: tuple[int, ...]) -> str | None:
    """The HLO text of one device's program, before layouts are assigned; None if it cannot be partitioned.

    Args:
      code: MLIR bytecode.
      shape: shape of the mesh.
    """
    with self._lock:
      running = self._running
      if running is None or running.owner != os.getpid() or running.process.poll() is not None:
        running = self._running = self._started() if self._is_able else None
      if running is None:
        return None
      try:
        return running.reply((shape, code))
      except (EOFError, OSError, TimeoutError):  # the program has ended it, or does not end
        running.end()
        self._running = None
        return None

  def _started(self) -> _PartitionProcess | None:
    """A new process; None, from then on, if it cannot partition anything."""
    process = _PartitionProcess()
    try:
      self._is_able = process.received()
    except (EOFError, OSError, TimeoutError):
      self._is_able = False
    if self._is_able:
      return process
    process.end()
    return None


class _PartitionProcess:
  """A worker process and the connection to it.

  Attributes:
    owner: number of the process that has started it; a fork of that one starts its own.
    process: the worker process.
  """

  def __init__(self) -> None:
    self.owner = os.getpid()
    self._connection, theirs = multiprocessing.Pipe()
    self.process = subprocess.Popen(
      [sys.executable, '-m', 'flax_spmd._src.compare.partition_worker', str(theirs.fileno())],
      env=os.environ | compiler_environment(parse_target(f'{GPU}:1')),
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
      pass_fds=[theirs.fileno()],
    )
    theirs.close()
    self.end = weakref.finalize(self, _end, self._connection, self.process, self.owner)

  def reply(self, request: object) -> Any:
    """The reply to a request; raises as `received`."""
    self._connection.send(request)
    return self.received()

  def received(self) -> Any:
    """What the process sends next.

    Raises:
      EOFError, OSError: the process has ended.
      TimeoutError: nothing comes in time.
    """
    if not self._connection.poll(_TIMEOUT):
      raise TimeoutError
    return self._connection.recv()


def _end(connection: Connection, process: subprocess.Popen[bytes], owner: int) -> None:
  connection.close()
  if owner == os.getpid():
    process.kill()
    process.wait()


def can_partition(platform: str) -> bool:
  """Whether there is a partitioner for a platform: that for GPUs, if their compiler is installed."""
  return platform == 'cuda' and has_wheel(platform)


@functools.cache
def partitioner() -> Partitioner:
  """The partitioner of this process."""
  return Partitioner()
