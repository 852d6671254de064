"""Partitioner: XLA's partitioners for GPUs and TPUs, each in a process of its own, without a device.

    text = partitioner('cuda').partition(code, (4, 2))                   # a single operation, in milliseconds
    program = partitioner('cuda').with_memory(code, (4, 2), target)      # a whole step, with its memory, in a second or two

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
from typing import Any, NamedTuple

from flax_spmd._src.compare.compilation import has_wheel
from flax_spmd._src.compare.hardware import Target, compiler_environment, parse_target, user_flags

_TIMEOUT, _LONG = 60, 600  # seconds, for one operation or the start of the process, and for a whole step
GPU = 'h100'  # all GPUs have the same partitioner


class PartitionRequest(NamedTuple):
  """A program to partition.

  Attributes:
    code: MLIR bytecode.
    shape: shape of the mesh.
    target: hardware to assign buffers for; None to only partition.
    fuse_softmax: whether to fuse each softmax into one kernel.
  """

  code: bytes
  shape: tuple[int, ...]
  target: Target | None = None
  fuse_softmax: bool = False


class PartitionedProgram(NamedTuple):
  """A program as XLA partitions it.

  Attributes:
    text: HLO text of one device's program.
    memory: bytes as of `Dump.memory`; None of a program that is only partitioned.
  """

  text: str
  memory: dict[str, int] | None = None


class Partitioner:
  """A process that partitions one program at a time, for all threads.

  A program that ends the process has no partition; the next one has a new process. So has the next one after the user has
  set other flags.

  Args:
    platform: platform of the programs, 'cuda' or 'tpu'.
  """

  def __init__(self, platform: str) -> None:
    self.platform = platform
    self._lock = threading.Lock()
    self._running: _PartitionProcess | None = None
    self._flags, self._is_able = user_flags(), True

  @property
  def process(self) -> subprocess.Popen[bytes] | None:
    """The process, while it runs."""
    return self._running and self._running.process

  def close(self) -> None:
    """Ends the process; the next program starts another one."""
    with self._lock:
      self._end()

  def partition(self, code: bytes, shape: tuple[int, ...]) -> str | None:
    """The HLO text of one device's program, before layouts are assigned; None if it cannot be partitioned.

    Args:
      code: MLIR bytecode.
      shape: shape of the mesh.
    """
    program = self._reply(PartitionRequest(code, shape), _TIMEOUT)
    return program and program.text

  def with_memory(
    self, code: bytes, shape: tuple[int, ...], target: Target, *, fuse_softmax: bool = False
  ) -> PartitionedProgram | None:
    """One device's program with its operations fused and scheduled, and its memory; None if it cannot be compiled.

    Args:
      code: MLIR bytecode.
      shape: shape of the mesh.
      target: hardware to compile for.
      fuse_softmax: whether to fuse each softmax into one kernel of Triton's, which takes most of the time.
    """
    return self._reply(PartitionRequest(code, shape, target, fuse_softmax), _LONG)

  def _reply(self, request: PartitionRequest, timeout: float) -> PartitionedProgram | None:
    with self._lock:
      if self._flags != user_flags():
        self._end()
        self._flags, self._is_able = user_flags(), True
      running = self._running
      if running is None or running.owner != os.getpid() or running.process.poll() is not None:
        running = self._running = self._started() if self._is_able else None
      if running is None:
        return None
      try:
        return running.reply(request, timeout)
      except (EOFError, OSError, TimeoutError):  # the program has ended it, or does not end
        self._end()
        return None
      except BaseException:  # an interruption: the next request would get this one's reply
        self._end()
        raise

  def _end(self) -> None:
    if self._running is not None:
      self._running.end()
    self._running = None

  def _started(self) -> _PartitionProcess | None:
    """A new process; None, from then on, if it cannot partition anything."""
    process = _PartitionProcess(self.platform)
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

  def __init__(self, platform: str) -> None:
    self.owner = os.getpid()
    self._connection, theirs = multiprocessing.Pipe()
    self.process = subprocess.Popen(
      [
        *(sys.executable, '-m', 'flax_spmd._src.compare.partition_worker'),
        *(str(theirs.fileno()), platform),
      ],
      env=os.environ | compiler_environment(parse_target(f'{GPU}:1')),
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
      pass_fds=[theirs.fileno()],
    )
    theirs.close()
    self.end = weakref.finalize(self, _end, self._connection, self.process, self.owner)

  def reply(self, request: object, timeout: float) -> Any:
    """The reply to a request; raises as `received`."""
    self._connection.send(request)
    return self.received(timeout)

  def received(self, timeout: float = _TIMEOUT) -> Any:
    """What the process sends next.

    Args:
      timeout: seconds to wait.

    Raises:
      EOFError, OSError: the process has ended.
      TimeoutError: nothing comes in time.
    """
    if not self._connection.poll(timeout):
      raise TimeoutError
    return self._connection.recv()


def _end(connection: Connection, process: subprocess.Popen[bytes], owner: int) -> None:
  connection.close()
  if owner == os.getpid():
    process.kill()
    process.wait()


def can_partition(platform: str) -> bool:
  """Whether there is a partitioner for a platform: those for GPUs and TPUs, if their compilers are installed."""
  return platform in ('cuda', 'tpu') and has_wheel(platform)


@functools.cache
def partitioner(platform: str) -> Partitioner:
  """The partitioner of this process for a platform."""
  return Partitioner(platform)
