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
    # by rank: an instruction, the transfers from other ranks to wait for, and its own number if it is a transfer
    self._parts: dict[int, list[tuple[Any, Sequence[int], int | None]]] = {}
    self._transfers = 0
    sent: dict[int, tuple[int, int]] = {}  # by register: the sending rank and the transfer's number
    for one in code:
      received = {sent[number] for number in one.inputs if number in sent}
      waits = sorted({transfer for rank, transfer in received if rank != one.rank})
      signals = None
      if one.sends:
        signals, self._transfers = self._transfers, self._transfers + 1
        sent.update(dict.fromkeys(one.outputs, (one.rank, signals)))
      self._parts.setdefault(one.rank, []).append((one, waits, signals))
    self._pool = ThreadPoolExecutor(len(self._parts), thread_name_prefix='pipeline')

  def run(self, registers: list[Any]) -> None:
    """Runs all instructions once.

    Raises:
      Exception: the first one raised in any thread.
    """
    arrived = [threading.Event() for _ in range(self._transfers)]
    failed: list[BaseException] = []

    def work(parts: Sequence[tuple[Any, Sequence[int], int | None]]) -> None:
      try:
        for instruction, waits, signals in parts:
          for number in waits:
            arrived[number].wait()
          if failed:
            return
          instruction.run(registers)
          if signals is not None:
            arrived[signals].set()
      except BaseException as error:
        failed.append(error)
      finally:
        if failed:
          for one in arrived:
            one.set()

    with_settings = compat.with_settings(work)
    for future in [self._pool.submit(with_settings, parts) for parts in self._parts.values()]:
      future.result()
    if failed:
      raise failed[0]
