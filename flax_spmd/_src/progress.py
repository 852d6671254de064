"""Progress bars for long commands and loops, on one line of the terminal (stderr), or as a widget of a notebook.

A notebook without ipywidgets shows a bar as text, once, when it ends.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from rich.console import Console
  from rich.progress import Progress


@contextlib.contextmanager
def progress(show: bool, total: int, title: str) -> Iterator[Callable[[int, str], None]]:
  """A bar of `total` steps; yields a function to call with the number of finished steps and a remark."""
  if not show or not total:
    yield lambda done, text: None
    return
  from rich.markup import escape
  from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

  columns = BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn('{task.description}')
  with Progress(*columns, console=_console()) as bars:
    task = bars.add_task(title, total=total)

    def update(done: int, text: str) -> None:
      bars.update(task, completed=done, description=f'{title}: {escape(text)}' if text else None)

    yield update


BatchProgress = contextlib.AbstractContextManager[Callable[[], None]]


def batch_progress(progress: bool | str | Progress | None, total: int | None) -> BatchProgress:
  """A context that shows a bar of batches; yields a function that advances it by one."""
  if progress is None or progress is False:
    return contextlib.nullcontext(lambda: None)
  return _shown(progress, total)


@contextlib.contextmanager
def _shown(progress: Any, total: int | None) -> Iterator[Callable[[], None]]:
  if not isinstance(progress, (bool, str)):
    yield _task(progress, 'batches', total)
    return
  with _own_progress() as bars:
    yield _task(bars, progress if isinstance(progress, str) else 'batches', total)


def _own_progress() -> Progress:
  from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

  return Progress(
    TextColumn('{task.description}'),
    BarColumn(),
    MofNCompleteColumn(),
    TextColumn('{task.fields[rate]:,.1f}/s'),
    TimeRemainingColumn(),
    console=_console(),
  )


def _console() -> Console:
  """The console of a bar: not where results are printed; text where rich would warn of the lack of ipywidgets at every step."""
  from rich.console import Console

  return Console(stderr=True, force_jupyter=None if importlib.util.find_spec('ipywidgets') else False)


def _task(bars: Progress, title: str, total: int | None) -> Callable[[], None]:
  """Adds a task to `bars`; returns the function that advances it."""
  task = bars.add_task(title, total=total, rate=0.0)
  done, begin = 0, 0.0

  def advance() -> None:
    nonlocal done, begin
    if not done:  # the rate excludes the start of the data source
      begin = time.perf_counter()
    passed = time.perf_counter() - begin
    bars.update(task, advance=1, rate=done / passed if passed else 0.0)
    done += 1

  return advance
