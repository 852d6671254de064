"""Heartbeats: finds processes of a job that have died or failed, while a save is in progress.

JAX ends the surviving processes some time after one has died (`heartbeat_timeout_seconds`, by default 100).
A process that waits for the others in a save should report sooner what it means for the checkpoint. So during a save
each process writes a heartbeat to JAX's coordination service twice a second, and reads those of the others.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time

import jax

from flax_spmd._src.compat import coordination_service
from flax_spmd._src.joint_call import Failure, JointCall
from flax_spmd._src.periodic_calls import start_periodic_calls
from flax_spmd._src.whereabouts import values_by_process

_EVERY = 0.5  # seconds
SILENCE = 12.0  # seconds after which a process is taken for dead; others notice within 15 s


class Heartbeat:
  """Exchanges heartbeats until it is stopped; does nothing in a job of one process.

  A process that has not begun this save yet is not silent: it may still be training.

  Args:
    call: the save, which every process makes.

  Attributes:
    call: the save.
    failure: error that another process has published; None if there is none.
  """

  def __init__(self, call: JointCall) -> None:
    self.call = call
    self.failure: Failure | None = None
    self._received: dict[int, tuple[str, float]] = {}
    self._answered = time.monotonic()  # when the service last answered; a host without power never does
    self._looked = self._answered
    self._stopped = threading.Event()
    self._beats = itertools.count()
    if jax.process_count() > 1:
      self._beating = start_periodic_calls(
        self._beat, _EVERY, 'flax_spmd heartbeat', self._stopped, at_once=True
      )

  def gone(self) -> list[int]:
    """The processes whose last heartbeat is more than `SILENCE` seconds old; none in a job of one process.

    The coordination service runs in the first process. If it does not answer, nothing is known of the others.
    A process that was suspended, or got no time of a processor, starts to wait anew.
    """
    if jax.process_count() == 1:
      return []
    now = time.monotonic()
    if now - self._looked > SILENCE / 2:
      self._answered = now
      self._received = {process: (text, now) for process, (text, _) in self._received.items()}
    self._looked = now
    if now - self._answered > SILENCE:
      return [0]
    return [process for process, (_, when) in self._received.items() if self._answered - when > SILENCE]

  def stop(self, error: BaseException | None = None) -> None:
    """Stops; publishes `error` to the other processes."""
    if jax.process_count() > 1 and not self._stopped.is_set():
      self._stopped.set()
      if error is not None and self.gone() != [0]:
        publishing = threading.Thread(target=self._fail, args=(error,), daemon=True)
        publishing.start()
        publishing.join(SILENCE)

  def _fail(self, error: BaseException) -> None:
    self.call.fail(error)
    self._beating.join()
    self.call.leave()

  def _beat(self) -> None:
    folder, me, text = f'{self.call.folder}/heartbeat', jax.process_index(), str(next(self._beats))
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the next beat may succeed
      coordination_service().key_value_set(f'{folder}/{me}', text, allow_overwrite=True)
      for process, received in values_by_process(folder).items():
        if process != me and received != self._received.get(process, ('', 0))[0]:
          self._received[process] = (received, time.monotonic())
      self.failure = self.call.failure()
      self._answered = time.monotonic()
