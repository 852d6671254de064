"""Fresh processes: the outcome of a call as the first one of its process.

FreshProcesses().outcomes(calls)   # a dict

Starting Python and importing JAX takes seconds. So one process imports everything, but uses no devices; for each
call it forks one that does, and ends after the call.
"""

import ast
import base64
import collections
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.history.calls import Call, Outcome

_ROOT = Path(__file__).parents[2]
_AT_ONCE = 2


class FreshProcesses:
  """Runs each call in a process of its own, once."""

  def __init__(self) -> None:
    self._known: dict[Call, Outcome] = {}
    self._parent: Any = None

  def outcomes(self, calls: Iterable[Call]) -> dict[Call, Outcome]:
    """The outcome of every call."""
    new = [call for call in dict.fromkeys(calls) if call not in self._known]
    if new:
      parent = self._started()
      parent.stdin.write(repr(new) + '\n')
      parent.stdin.flush()
      for call in new:
        self._known[call] = pickle.loads(base64.b64decode(parent.stdout.readline()))
    return self._known

  def close(self) -> None:
    """Ends the process that forks."""
    if self._parent is not None:
      self._parent.stdin.close()
      self._parent.stdout.close()
      self._parent.wait()

  def _started(self) -> Any:
    if self._parent is None:
      self._parent = subprocess.Popen(
        [sys.executable, '-m', 'tests.history.fresh_processes'],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
      )
    return self._parent


def _fork(call: Call) -> tuple[int, int]:
  """Starts a process for a call; its id, and the pipe that its outcome comes from."""
  reading, writing = os.pipe()
  process = os.fork()
  if process:
    os.close(writing)
    return process, reading
  from tests.history.calls import World, run

  with os.fdopen(writing, 'wb') as pipe:
    pipe.write(pickle.dumps(run(call, World())))
  os._exit(0)


def _finish(process: int, reading: int) -> None:
  with os.fdopen(reading, 'rb') as pipe:
    outcome = pipe.read()
  os.waitpid(process, 0)
  print(base64.b64encode(outcome).decode(), flush=True)


def _serve() -> None:
  import jax

  jax.config.update('jax_numpy_rank_promotion', 'raise')
  warnings.simplefilter('ignore')
  for line in sys.stdin:
    running = collections.deque()
    for call in ast.literal_eval(line):
      running.append(_fork(call))
      if len(running) == _AT_ONCE:
        _finish(*running.popleft())
    while running:
      _finish(*running.popleft())


if __name__ == '__main__':
  _serve()
