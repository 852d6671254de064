"""Progress: how far a search is, and the best so far, in a line of the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(show: bool, total: int, title: str = 'estimating') -> Iterator[Callable[[int, str], None]]:
  """A bar with the best so far."""
  if not show or not total:
    yield lambda done, text: None
    return
  from rich.markup import escape
  from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

  columns = BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn('{task.description}')
  with Progress(*columns) as bars:
    task = bars.add_task(title, total=total)

    def say(done: int, text: str) -> None:
      bars.update(task, completed=done, description=f'{title}: {escape(text)}' if text else None)

    yield say
