"""Crew: one dispatching thread for each rank.

Where a device runs programs as soon as they are dispatched, and the dispatcher goes on meanwhile (GPUs,
TPUs), one thread feeds all ranks. The CPU runs small programs while they are dispatched, and what calls
back into Python: there ranks work at the same time only if each has a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple


class Part(NamedTuple):
  """An instruction as a thread sees it.

  Attributes:
    instruction: what to do.
    waits: the transfers of other ranks that have to be done before.
    signals: the transfer that it is, or None.
  """

  instruction: Any
  waits: tuple[int, ...]
  signals: int | None


class Crew:
  """The threads of a pipeline.

  Args:
    code: the instructions of all ranks in an order in which they can run.
  """

  def __init__(self, code: Sequence[Any]):
    self._parts: dict[int, list[Part]] = {}
    self._transfers = 0
    sent: dict[int, tuple[int, int]] = {}  # by register: who sent it, in which transfer
    for one in code:
      here = {sent[number] for number in one.inputs if number in sent}
      waits = tuple(sorted({transfer for rank, transfer in here if rank != one.rank}))
      signals = None
      if one.sends:
        signals, self._transfers = self._transfers, self._transfers + 1
        sent.update(dict.fromkeys(one.outputs, (one.rank, signals)))
      self._parts.setdefault(one.rank, []).append(Part(one, waits, signals))
    self._pool = ThreadPoolExecutor(len(self._parts), thread_name_prefix='pipeline')

  def run(self, registers: list[Any]) -> None:
    """Runs all instructions once.

    Raises:
      Exception: the first that any thread met.
    """
    arrived = [threading.Event() for _ in range(self._transfers)]
    failed: list[BaseException] = []

    def work(parts: Sequence[Part]) -> None:
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

    for future in [self._pool.submit(work, parts) for parts in self._parts.values()]:
      future.result()
    if failed:
      raise failed[0]
