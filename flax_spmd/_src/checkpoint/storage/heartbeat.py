"""Heartbeats: finds processes of a job that have died or failed, while a save is in progress.

JAX ends the surviving processes some time after one has died (`heartbeat_timeout_seconds`, by default 100).
A process that waits for the others in a save should report sooner what it means for the checkpoint. So during a save each process writes
a heartbeat to JAX's coordination service twice a second, or once the error that ended its part, and reads
those of the others.
"""

from __future__ import annotations

import itertools
import threading
import time

import jax

from flax_spmd._src.compat import coordination_service

_EVERY = 0.5  # seconds
_FAILED = 'failed: '
SILENCE = 12.0  # seconds after which a process is taken for dead; others notice within 15 s
_numbers = itertools.count()


class Heartbeat:
  """Exchanges heartbeats until it is stopped; does nothing in a job of one process.

  Every process makes one at the beginning of each save. Messages of other saves are told apart by the number
  of the save. A process that has not begun this save yet is not silent: it may still be training.

  Attributes:
    lost_service: whether the coordination service is unreachable. It runs in the first process.
  """

  def __init__(self) -> None:
    self._number = next(_numbers)
    self._received: dict[int, tuple[str, float]] = {}
    self._writing = threading.Lock()
    self._stopped = threading.Event()
    self.lost_service = False
    if jax.process_count() > 1:
      self._write('0')
      threading.Thread(target=self._run, name='flax_spmd heartbeat', daemon=True).start()

  def silent(self) -> list[int]:
    """The processes whose last heartbeat is more than `SILENCE` seconds old."""
    now = time.monotonic()
    return [process for process, (_, when) in self._received.items() if now - when > SILENCE]

  def failed(self) -> tuple[int, str] | None:
    """A process that has reported a failure, and its error; None if none has."""
    for process, (text, _) in self._received.items():
      if text.startswith(_FAILED):
        return process, text.removeprefix(_FAILED)
    return None

  def stop(self, error: BaseException | None = None) -> None:
    """Stops; reports `error` to the other processes as the last message."""
    if jax.process_count() > 1 and not self._stopped.is_set():
      with self._writing:
        self._stopped.set()
      if error is not None and not self.lost_service:
        self._write(f'{_FAILED}{first_line(error.__cause__ or error)}')

  def _run(self) -> None:
    others = [p for p in range(jax.process_count()) if p != jax.process_index()]
    for beat in itertools.count(1):
      if self._stopped.wait(_EVERY):
        return
      with self._writing:
        if not self._stopped.is_set():
          self._write(str(beat))
      if self.lost_service:
        return
      for process in others:
        text = self._read(process)
        if text not in (None, self._received.get(process, ('', 0))[0]):
          self._received[process] = (text, time.monotonic())

  def _write(self, text: str) -> None:
    try:
      coordination_service().key_value_set(
        _key(jax.process_index()), f'{self._number} {text}', allow_overwrite=True
      )
    except jax.errors.JaxRuntimeError:  # the service runs in the first process
      self.lost_service = True

  def _read(self, process: int) -> str | None:
    """The last message of a process in this save; None if there is none."""
    try:
      stored = coordination_service().key_value_try_get(_key(process))
    except jax.errors.JaxRuntimeError:  # no message yet
      return None
    number, _, text = stored.partition(' ')
    return text if number == str(self._number) else None


def first_line(error: BaseException) -> str:
  """The first line of an error's text, or its class name."""
  return (str(error).splitlines() or [type(error).__name__])[0].rstrip('.')[:500]


def _key(process: int) -> str:
  return f'flax_spmd/heartbeat/{process}'
