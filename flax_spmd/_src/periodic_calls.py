"""Calls that a daemon thread makes again and again.

Until Python 3.14, a daemon thread that returns from native code of JAX or TensorStore while the interpreter shuts down
ends the process with SIGABRT. So the end of the process stops these threads first.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable

_PATIENCE = 2.0  # seconds for the calls that run at the end of the process; one may be blocked


def start_periodic_calls(
  call: Callable[[], bool | None],
  every: float,
  name: str,
  stopped: threading.Event,
  at_once: bool = False,
) -> threading.Thread:
  """Starts a thread that makes a call at intervals until it returns False, or `stopped` is set.

  Args:
    call: the function.
    every: seconds before a call.
    name: name of the thread.
    stopped: event that ends the thread; the end of the process sets it, too.
    at_once: whether the first call is made at once.

  Returns:
    The thread.

  Raises:
    RuntimeError: no thread can be started.
  """

  def run() -> None:
    going_on = not at_once or call() is not False
    while going_on and not stopped.wait(every):
      going_on = call() is not False

  thread = threading.Thread(target=run, name=name, daemon=True)
  thread.start()
  _started[thread] = stopped
  return thread


_started: weakref.WeakKeyDictionary[threading.Thread, threading.Event] = weakref.WeakKeyDictionary()


@atexit.register
def _stop_all() -> None:
  """Ends all threads before the interpreter shuts down."""
  started = dict(_started)
  for stopped in started.values():
    stopped.set()
  deadline = time.monotonic() + _PATIENCE
  for thread in started:
    thread.join(max(0.0, deadline - time.monotonic()))
