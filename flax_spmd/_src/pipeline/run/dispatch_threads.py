"""Dispatch threads: one thread for each rank, so that ranks overlap on the CPU.

GPUs and TPUs run programs asynchronously, so one thread can dispatch for all ranks. On the CPU,
dispatching a small program runs it, and so does dispatching one with Python callbacks. There, ranks
overlap only if each has its own thread. A thread waits for transfers from other ranks before it
dispatches their reader.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from flax_spmd._src import compat


class DispatchThreads:
  """The dispatching threads of a pipeline.

  Args:
    code: instructions of all ranks, each after those that it depends on.
  """

  def __init__(self, code: Sequence[Any]):
    self._parts: dict[int, list[Any]] = {}  # by rank
    for one in code:
      self._parts.setdefault(one.rank, []).append(one)
    self._sent = [number for one in code if one.sends for number in one.outputs]
    self._pool = ThreadPoolExecutor(len(self._parts), thread_name_prefix='pipeline')

  def run(self, registers: list[Any]) -> None:
    """Runs all instructions once.

    Raises:
      Exception: the first one raised in any thread.
    """
    arrived = {number: threading.Event() for number in self._sent}
    failed: list[BaseException] = []

    def work(part: Sequence[Any]) -> None:
      try:
        for instruction in part:
          for number in arrived.keys() & instruction.inputs:
            arrived[number].wait()
          if failed:
            return
          instruction.run(registers)
          for number in arrived.keys() & instruction.outputs:
            arrived[number].set()
      except BaseException as error:
        failed.append(error)
      finally:
        if failed:
          for one in arrived.values():
            one.set()

    with_settings = compat.with_settings(work)
    for future in [self._pool.submit(with_settings, part) for part in self._parts.values()]:
      future.result()
    if failed:
      raise failed[0]
