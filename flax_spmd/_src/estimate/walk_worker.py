"""Walk worker: a process that finds the costs of step programs, until its connection is closed.

    python -m flax_spmd._src.estimate.walk_worker DESCRIPTOR

First it sends None, as it has started. Then it answers each `WalkTask` by its costs, or by None if there are none to find, or
they cannot be found.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from flax_spmd._src.compare.partitioner import can_partition, partitioner
from flax_spmd._src.estimate.step_program import Costs, StepProgram
from flax_spmd._src.estimate.walk_workers import WalkTask


def main(descriptor: int) -> None:
  """Answers tasks on a connection, by its file descriptor."""
  connection = Connection(descriptor)
  connection.send(None)
  programs: dict[int, StepProgram] = {}
  while True:
    try:
      task = connection.recv()
    except EOFError:
      return
    connection.send(_costs(task, programs))


def _costs(task: WalkTask, programs: dict[int, StepProgram]) -> Costs | None:
  try:
    if task.code is not None:
      programs[task.program] = StepProgram(task.code, task.platform)
    if task.request is not None:
      return programs[task.program].costs(task.request)
    if can_partition(task.platform):
      partitioner(task.platform).start()
  except Exception:  # the process that asks finds the same error, and raises it
    pass
  return None


if __name__ == '__main__':
  main(int(sys.argv[1]))
