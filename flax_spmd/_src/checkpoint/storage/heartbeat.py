"""Alive: which processes of a job have not been heard of for a while.

JAX ends the processes that are left some minutes after one has died. Who waits for the others in a save
wants to know sooner, and to say what it means for the checkpoint. So for as long as a save goes on, each
process says twice a second that it lives, or once that it has failed, and listens to the others.
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


class Alive:
  """Speaks and listens until it is stopped; in a job of one process it does nothing.

  What others said in an earlier save is there still when the next begins, and is no news.
  """

  def __init__(self) -> None:
    self._heard: dict[int, tuple[str, float]] = {}
    self._before: dict[int, str] = {}
    self._speaks = threading.Lock()
    self._stopped = threading.Event()
    self.lost_service = False
    if jax.process_count() > 1:
      service = coordination_service()
      others = [p for p in range(jax.process_count()) if p != jax.process_index()]
      self._before = {process: _said_by(service, process) or '' for process in others}  # of another save
      self._heard = {process: (said, time.monotonic()) for process, said in self._before.items()}
      threading.Thread(target=self._run, name='flax_spmd alive', daemon=True).start()

  def silent(self) -> list[int]:
    """The processes that have said nothing for too long."""
    now = time.monotonic()
    return [process for process, (_, when) in self._heard.items() if now - when > SILENCE]

  def failed(self) -> tuple[int, str] | None:
    """A process that has said that its part failed, and why."""
    for process, (said, _) in self._heard.items():
      if said.startswith(_FAILED) and said != self._before[process]:
        return process, said.removeprefix(_FAILED).partition(' ')[2]
    return None

  def stop(self, error: BaseException | None = None) -> None:
    """Says and hears nothing more; says last what has failed here, if something has."""
    with self._speaks:
      self._stopped.set()
    if error is not None and self._heard and not self.lost_service:
      with contextlib.suppress(jax.errors.JaxRuntimeError):
        _say(coordination_service(), f'{_FAILED}{time.time()} {first_line(error.__cause__ or error)}')

  def _run(self) -> None:
    service = coordination_service()
    for beat in itertools.count():
      if self._stopped.wait(_EVERY) or service is None:
        return
      try:
        with self._speaks:
          if self._stopped.is_set():
            return
          _say(service, f'{beat} {time.time()}')
      except jax.errors.JaxRuntimeError:  # the service lives in the first process
        self.lost_service = True
        return
      for process, (said, _) in list(self._heard.items()):
        now_said = _said_by(service, process)
        if now_said not in (None, said):
          self._heard[process] = (now_said, time.monotonic())


def first_line(error: BaseException) -> str:
  """What an error says first."""
  return (str(error).splitlines() or [type(error).__name__])[0].rstrip('.')[:500]


def _say(service, text: str) -> None:
  service.key_value_set(_key(jax.process_index()), text, allow_overwrite=True)


def _key(process: int) -> str:
  return f'flax_spmd/alive/{process}'


def _said_by(service, process: int) -> str | None:
  try:
    return service.key_value_try_get(_key(process))
  except jax.errors.JaxRuntimeError:  # it has not said anything yet
    return None
