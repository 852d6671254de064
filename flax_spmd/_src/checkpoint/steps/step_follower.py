"""Step follower: watches the folder of a run for steps that another process completes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from flax_spmd._src.checkpoint.steps.step_folder import StepFolder
from flax_spmd._src.checkpoint.storage.async_save import in_first
from flax_spmd._src.checkpoint.storage.calls_in_flight import in_flight

_LONGEST_PAUSE = 60.0  # seconds; the other processes of the job wait this long


class StepFollower:
  """Yields each step once; the first process watches for all.

  Args:
    folder: folder of the run.
    after: only steps after this one.
    timeout: most seconds to wait for a step.
    every: seconds between two looks at the folder.
    closed: ends the iteration when it is set.
  """

  def __init__(
    self,
    folder: StepFolder,
    after: int,
    timeout: float | None,
    every: float,
    closed: threading.Event,
  ):
    self._folder, self._after, self._closed = folder, after, closed
    self._timeout, self._every = timeout, every
    self._seen: set[int] = set()
    self._since = time.monotonic()

  def __iter__(self) -> Iterator[int]:
    while True:
      step, is_over = in_first(self._look, 'follow')
      if is_over:
        return
      if step is not None:
        self._seen.add(step)
        yield step
        self._since = time.monotonic()

  def _look(self) -> tuple[int | None, bool]:
    """The next step, after a pause if there is none yet; and whether the iteration is over."""
    with in_flight():
      if self._closed.is_set():
        return None, True
      steps = self._folder.steps()
      self._seen.intersection_update(steps)  # a step that is removed and saved again is new
      new = [step for step in steps if step > self._after and step not in self._seen]
      if new:
        return new[-1], False
      pause = self._every
      if self._timeout is not None:
        pause = min(pause, self._since + self._timeout - time.monotonic())
      if pause > 0:
        self._closed.wait(min(pause, _LONGEST_PAUSE))
      return None, pause <= 0
