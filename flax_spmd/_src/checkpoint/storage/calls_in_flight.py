"""Calls in flight: checkpoint calls in daemon threads of the caller, which the end of the process waits for.

Until Python 3.14, a daemon thread that returns from native code while the interpreter shuts down ends the process with
SIGABRT. So no such call begins then, and those that have begun are waited for, while thread pools still accept work.
(Python 3.12.0 and 3.12.1 start no threads by then: a call that needs another one fails.)
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # whose hook ends thread pools: it has to be registered before
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator

_PATIENCE = 30.0  # seconds; a call may wait for another process, or for a storage that does not answer


@contextlib.contextmanager
def in_flight() -> Iterator[None]:
  """A block that the end of the process waits for. In a daemon thread, it does not begin after that."""
  thread = threading.current_thread()
  if not thread.daemon:
    yield
    return
  with _changed:
    is_late = _ending.is_set() and not _calls[thread]
    if not is_late:
      _calls[thread] += 1
  if is_late:
    threading.Event().wait()  # the process ends meanwhile
  try:
    yield
  finally:
    with _changed:
      _calls[thread] -= 1
      if not _calls[thread]:
        del _calls[thread]
      _changed.notify_all()


_calls: Counter[threading.Thread] = Counter()  # blocks that each daemon thread is in
_changed = threading.Condition()
_ending = threading.Event()


def end_calls() -> None:
  """Lets no call begin, and waits for those in flight."""
  deadline = time.monotonic() + _PATIENCE
  with _changed:
    _ending.set()
    while _calls and _changed.wait(max(0.0, deadline - time.monotonic())):
      pass


# `atexit` is too late: hooks of threads run before, in the reverse order of their registration.
getattr(threading, '_register_atexit', atexit.register)(end_calls)
