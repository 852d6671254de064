"""Progress bars of saves and restores, in bytes and bytes per second.

Orbax reports no progress while it reads. TensorStore, its storage layer, counts every byte that it reads
and writes; a thread polls those counters and advances the bar.
"""

from __future__ import annotations

import threading
from typing import Any, Literal

import jax
import tensorstore

_EVERY = 0.1  # seconds

Direction = Literal['written', 'read']


class ByteProgress:
  """A progress bar that advances until it is closed.

  Args:
    show: whether to show it. Only the first process does.
    title: text beside the bar.
    total: number of bytes at which the bar is full.
    direction: TensorStore counter to follow.
  """

  def __init__(self, show: bool, title: str, total: int, direction: Direction):
    self._closed = threading.Event()
    self._thread: threading.Thread | None = None
    if show and jax.process_index() == 0:
      self._begin, self._total = _counted(direction), total
      self._direction: Direction = direction
      self._bars, self._task = _rich(title, total)
      self._bars.start()
      self._thread = threading.Thread(target=self._follow, name='flax_spmd progress', daemon=True)
      self._thread.start()

  def _follow(self) -> None:
    while not self._closed.wait(_EVERY):
      done = _counted(self._direction) - self._begin
      self._bars.update(self._task, completed=min(done, self._total))

  def close(self, complete: bool = False) -> None:
    """Stops the bar; `complete` fills it first."""
    self._closed.set()
    if self._thread is not None:
      self._thread.join()
      self._thread = None
      if complete:
        self._bars.update(self._task, completed=self._total)
      self._bars.stop()


def _counted(direction: Direction) -> int:
  """Bytes that this process has written to or read from storage so far."""
  metrics = tensorstore.experimental_collect_matching_metrics('/tensorstore/kvstore/')
  return sum(
    int(value.get('value', 0))
    for metric in metrics
    if metric['name'].endswith(f'/bytes_{direction}') and 'ocdbt' not in metric['name']
    for value in metric['values']
  )


def _rich(title: str, total: int) -> tuple[Any, Any]:
  from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

  bars = Progress(TextColumn('{task.description}'), BarColumn(), DownloadColumn(), TransferSpeedColumn())
  return bars, bars.add_task(title, total=total)
