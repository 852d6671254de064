"""Partitioner: XLA's partitioners for GPUs and TPUs, each in a process of its own, without a device.

    text = partitioner('cuda').partition(code, (4, 2))                   # a single operation, in milliseconds
    program = partitioner('cuda').with_memory(code, (4, 2), target)      # a whole step, with its memory, in a second or two

The process starts with the first program, and ends with this one.
"""

from __future__ import annotations

import functools
import subprocess
import threading
from typing import NamedTuple

from flax_spmd._src.compare.compilation import has_wheel
from flax_spmd._src.compare.hardware import Target, compiler_environment, parse_target, user_flags
from flax_spmd._src.worker_process import WorkerProcess

_TIMEOUT, _LONG = 60, 600  # seconds, for one operation or the start of the process, and for a whole step
_MODULE = 'flax_spmd._src.compare.partition_worker'
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
    self._running: WorkerProcess | None = None
    self._flags, self._is_able = user_flags(), True

  @property
  def process(self) -> subprocess.Popen[bytes] | None:
    """The process, while it runs."""
    return self._running and self._running.process

  def start(self) -> None:
    """Starts the process, unless it runs."""
    with self._lock:
      self._ready()

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
      running = self._ready()
      if running is None:
        return None
      try:
        running.send(request)
        return running.received(timeout)
      except (EOFError, OSError, TimeoutError):  # the program has ended it, or does not end
        self._end()
        return None
      except BaseException:  # an interruption: the next request would get this one's reply
        self._end()
        raise

  def _ready(self) -> WorkerProcess | None:
    """The process, started anew if it has ended, or the flags are others; None if it cannot partition anything."""
    if self._flags != user_flags():
      self._end()
      self._flags, self._is_able = user_flags(), True
    running = self._running
    if running is None or not running.is_running:
      running = self._running = self._started() if self._is_able else None
    return running

  def _end(self) -> None:
    if self._running is not None:
      self._running.end()
    self._running = None

  def _started(self) -> WorkerProcess | None:
    """A new process; None, from then on, if it cannot partition anything."""
    environment = compiler_environment(parse_target(f'{GPU}:1'))
    process = WorkerProcess(_MODULE, self.platform, environment=environment)
    try:
      self._is_able = process.received(_TIMEOUT)
    except (EOFError, OSError, TimeoutError):
      self._is_able = False
    if self._is_able:
      return process
    process.end()
    return None


def can_partition(platform: str) -> bool:
  """Whether there is a partitioner for a platform: those for GPUs and TPUs, if their compilers are installed."""
  return platform in ('cuda', 'tpu') and has_wheel(platform)


@functools.cache
def partitioner(platform: str) -> Partitioner:
  """The partitioner of this process for a platform."""
  return Partitioner(platform)
