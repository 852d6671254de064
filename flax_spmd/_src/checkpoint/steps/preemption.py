"""Preemption: how a training run learns that its job is about to be ended, and saves its last step."""

from __future__ import annotations

import signal
import threading
from typing import Any

import jax
from jax.experimental import multihost_utils


class Preemption:
  """Detects preemption.

  A single process catches SIGTERM. In a job of several processes, JAX does, and makes all of them agree
  on the step.

  Attributes:
    saved: whether a state was saved after the signal.
  """

  def __init__(self) -> None:
    self.saved = False
    self._signalled = False
    self._before: Any = None
    if jax.process_count() == 1 and threading.current_thread() is threading.main_thread():
      self._before = signal.signal(signal.SIGTERM, self._on_signal)

  def _on_signal(self, number: int, frame: Any) -> None:
    self._signalled = True

  def reached(self, step: int) -> bool:
    """Whether to save this step and stop. Every process calls this at every step."""
    if jax.process_count() == 1:
      return self._signalled
    try:
      return multihost_utils.reached_preemption_sync_point(step)
    except RuntimeError:  # the service is switched off
      return False

  def close(self) -> None:
    """Restores the previous handler of SIGTERM."""
    if self._before is not None:
      signal.signal(signal.SIGTERM, self._before)
      self._before = None
