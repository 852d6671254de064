"""Heartbeats: finds processes of a job that have died or failed, while a save is in progress.

JAX ends the surviving processes some time after one has died (`heartbeat_timeout_seconds`, by default 100).
A process that waits for the others in a save should report sooner what it means for the checkpoint. So during a save each process writes
a heartbeat to JAX's coordination service twice a second, or once the error that ended its part, and reads
those of the others.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time

import jax

from flax_spmd._src.compat import coordination_service

_EVERY = 0.5  # seconds
_FAILED = 'failed: '
SILENCE = 15.0  # seconds after which a process is taken for dead


class Heartbeat:
  """Exchanges heartbeats until it is stopped; does nothing in a job of one process.

  Messages of an earlier save remain in the coordination service. They are recorded first and then ignored.

  Attributes:
    lost_service: whether the coordination service is unreachable. It runs in the first process.
  """

  def __init__(self) -> None:
    self._received: dict[int, tuple[str, float]] = {}
    self._before: dict[int, str] = {}
    self._writing = threading.Lock()
    self._stopped = threading.Event()
    self.lost_service = False
    if jax.process_count() > 1:
      service = coordination_service()
      others = [p for p in range(jax.process_count()) if p != jax.process_index()]
      self._before = {process: _read(service, process) or '' for process in others}
      self._received = {process: (text, time.monotonic()) for process, text in self._before.items()}
      threading.Thread(target=self._run, name='flax_spmd heartbeat', daemon=True).start()

  def silent(self) -> list[int]:
    """The processes whose last heartbeat is more than `SILENCE` seconds old."""
    now = time.monotonic()
    return [process for process, (_, when) in self._received.items() if now - when > SILENCE]

  def failed(self) -> tuple[int, str] | None:
    """A process that has reported a failure, and its error; None if none has."""
    for process, (text, _) in self._received.items():
      if text.startswith(_FAILED) and text != self._before[process]:
        return process, text.removeprefix(_FAILED).partition(' ')[2]
    return None

  def stop(self, error: BaseException | None = None) -> None:
    """Stops; reports `error` to the other processes as the last message."""
    with self._writing:
      self._stopped.set()
    if error is not None and self._received and not self.lost_service:
      with contextlib.suppress(jax.errors.JaxRuntimeError):
        _write(coordination_service(), f'{_FAILED}{time.time()} {first_line(error.__cause__ or error)}')

  def _run(self) -> None:
    service = coordination_service()
    for beat in itertools.count():
      if self._stopped.wait(_EVERY) or service is None:
        return
      try:
        with self._writing:
          if self._stopped.is_set():
            return
          _write(service, f'{beat} {time.time()}')
      except jax.errors.JaxRuntimeError:  # the service runs in the first process
        self.lost_service = True
        return
      for process, (before, _) in list(self._received.items()):
        text = _read(service, process)
        if text not in (None, before):
          self._received[process] = (text, time.monotonic())


def first_line(error: BaseException) -> str:
  """The first line of an error's text, or its class name."""
  return (str(error).splitlines() or [type(error).__name__])[0].rstrip('.')[:500]


def _write(service, text: str) -> None:
  service.key_value_set(_key(jax.process_index()), text, allow_overwrite=True)


def _key(process: int) -> str:
  return f'flax_spmd/heartbeat/{process}'


def _read(service, process: int) -> str | None:
  try:
    return service.key_value_try_get(_key(process))
  except jax.errors.JaxRuntimeError:  # no message yet
    return None
