"""Worker processes: Python processes that answer requests over a connection, until it is closed.

    worker = WorkerProcess('flax_spmd._src.estimate.walk_worker')
    worker.send(request)
    worker.received(60)

The module gets the file descriptor of its end of the connection as its first argument.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import Any


class WorkerProcess:
  """A process that runs a module of this package, and the connection to it. It ends with this object, or with this process.

  Args:
    module: name of the module.
    *arguments: its arguments after the file descriptor.
    environment: environment variables that the process has besides those of this one.

  Attributes:
    owner: number of the process that has started it; a fork of that one starts its own.
    process: the worker process.
    connection: this end of the connection.
    end: ends the process.
  """

  def __init__(
    self, module: str, *arguments: str, environment: Mapping[str, str] = MappingProxyType({})
  ) -> None:
    self.owner = os.getpid()
    self.connection, theirs = multiprocessing.Pipe()
    self.process = subprocess.Popen(
      [sys.executable, '-m', module, str(theirs.fileno()), *arguments],
      env=os.environ | environment,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
      pass_fds=[theirs.fileno()],
    )
    theirs.close()
    self.end = weakref.finalize(self, _end, self.connection, self.process, self.owner)

  @property
  def is_running(self) -> bool:
    """Whether this process can use it: not after it has ended, and not in a fork."""
    return self.owner == os.getpid() and self.process.poll() is None

  def send(self, request: object) -> None:
    """Sends a request; raises OSError if the process has ended."""
    self.connection.send(request)

  def received(self, timeout: float) -> Any:
    """The next object that the process sends.

    Args:
      timeout: seconds to wait.

    Raises:
      EOFError, OSError: the process has ended.
      TimeoutError: nothing comes in time.
    """
    if not self.connection.poll(timeout):
      raise TimeoutError
    return self.connection.recv()


def _end(connection: Connection, process: subprocess.Popen[bytes], owner: int) -> None:
  connection.close()
  if owner == os.getpid():
    process.kill()
    process.wait()
