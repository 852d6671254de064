"""Walk workers: processes that find the costs of a step under several layouts at the same time.

    workers = WalkWorkers(4)
    workers.start(program)          # returns at once
    if workers.ready():
      costs = workers.costs([(program, request), ...])
    workers.close()

A process takes seconds to start and to prepare its first program, in which this one goes on. Propagation and walk run under
Python's lock, so threads would take turns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import NamedTuple

from flax_spmd._src.compare.hardware import user_flags
from flax_spmd._src.estimate.cost_walk import WalkResult
from flax_spmd._src.estimate.step_program import CostRequest, Costs, StepProgram
from flax_spmd._src.worker_process import WorkerProcess

_MODULE = 'flax_spmd._src.estimate.walk_worker'
_TIMEOUT = 1200  # seconds, for one request


class WalkTask(NamedTuple):
  """A request, as it is sent.

  Attributes:
    program: number of the program.
    platform: platform that it is lowered for.
    code: its MLIR bytecode; None if the process has it.
    request: the request; None to prepare the program.
  """

  program: int
  platform: str
  code: bytes | None
  request: CostRequest | None


class WalkWorkers:
  """Processes that find costs. One that ends is not replaced.

  Args:
    count: number of processes.
  """

  def __init__(self, count: int):
    self.count = count
    self._idle: list[WorkerProcess] = []
    self._starting: dict[WorkerProcess, StepProgram | None] = {}  # with the program to prepare first
    self._numbers: dict[StepProgram, int] = {}
    self._sent: set[tuple[WorkerProcess, int]] = set()
    self._flags: tuple[str, ...] | None = None  # of the processes; None before they are started

  def close(self) -> None:
    """Ends the processes; no others are started."""
    self.count = 0
    self._end()

  def _end(self) -> None:
    for worker in (*self._idle, *self._starting):
      worker.end()
    self._idle.clear()
    self._starting.clear()
    self._sent.clear()
    self._flags = None

  def start(self, program: StepProgram) -> None:
    """Starts the processes, and others after the user has set other flags for compilers; each prepares a program first."""
    if self._flags == user_flags():
      return
    self._end()
    self._flags = user_flags()
    environment = {'JAX_PLATFORMS': 'cpu'}
    workers = [WorkerProcess(_MODULE, environment=environment) for _ in range(self.count)]
    self._starting = dict.fromkeys(workers, program)

  def ready(self) -> list[WorkerProcess]:
    """The processes that have started, and so can find costs."""
    for worker, program in list(self._starting.items()):
      if worker.connection.poll():
        del self._starting[worker]
        is_running = bool(self._received(worker))
        if is_running and program is not None:
          self._send(worker, program, None)
          self._starting[worker] = None
        elif is_running:
          self._idle.append(worker)
    self._idle = [worker for worker in self._idle if worker.is_running]
    return [*self._idle]

  def costs(self, requests: Sequence[tuple[StepProgram, CostRequest]]) -> list[Costs | None]:
    """The costs of each request, in order; None where a process has found none, as with an error.

    Args:
      requests: programs, and the requests to them. A request that is there twice, or that its program knows, is not sent.
    """
    keys = [each if each[1].target is None else number for number, each in enumerate(requests)]
    new = {
      key: (program, request)
      for key, (program, request) in zip(keys, requests)
      if request.target or not program.is_known(request)
    }
    found = dict(zip(new, self._found([*new.values()]), strict=True))
    for (program, request), costs in zip(new.values(), found.values()):
      if request.target is None and isinstance(costs, WalkResult):
        program.remember(request, costs)
    return [found[key] if key in found else each[0].costs(each[1]) for key, each in zip(keys, requests)]

  def _found(self, requests: Sequence[tuple[StepProgram, CostRequest]]) -> list[Costs | None]:
    found: list[Costs | None] = [None] * len(requests)
    waiting = list(reversed(range(len(requests))))
    busy: dict[WorkerProcess, int] = {}
    try:
      while busy or (waiting and self._idle):
        while waiting and self._idle:
          worker, number = self._idle.pop(), waiting.pop()
          busy[worker] = number
          self._send(worker, *requests[number])
        ready = wait([worker.connection for worker in busy], _TIMEOUT)
        for worker in [one for one in busy if one.connection in ready or not ready]:
          number = busy.pop(worker)
          if replies := self._received(worker):
            [found[number]] = replies
            self._idle.append(worker)
    except BaseException:  # an interruption: the next requests would get these replies
      for worker in busy:
        worker.end()
      self._end()
      raise
    return found

  def _received(self, worker: WorkerProcess) -> list[Costs | None]:
    """The reply of a worker in a list; of one that has not replied, none, and it is ended."""
    try:
      return [worker.received(0)]
    except (EOFError, OSError, TimeoutError):
      worker.end()
      return []

  def _send(self, worker: WorkerProcess, program: StepProgram, request: CostRequest | None) -> None:
    number = self._numbers.setdefault(program, len(self._numbers))
    code = None if (worker, number) in self._sent else program.code
    self._sent.add((worker, number))
    with contextlib.suppress(OSError):  # it has ended, and there will be no reply
      worker.send(WalkTask(number, program.platform, code, request))
