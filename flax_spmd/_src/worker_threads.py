"""Calls made in several threads.

The executors of Python fail where no thread can be started: at a limit of the system, and from Python 3.12 on while the
program ends. Here the calling thread takes part, and makes all calls if it is alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Value = TypeVar('Value')
Result = TypeVar('Result')


def map_in_threads(
  call: Callable[[Value], Result], values: Iterable[Value], threads: int
) -> list[Result]:
  """The results of a function, in the order of its arguments.

  Args:
    call: the function.
    values: its arguments.
    threads: most threads, with the calling one.

  Raises:
    BaseException: a call raised it; the first one in order. No further calls are begun then.
  """
  values = list(values)
  results: list[Any] = [None] * len(values)
  errors: dict[int, BaseException] = {}
  numbers = iter(range(len(values)))  # `next` is one step for all threads

  def work() -> None:
    for number in numbers:
      try:
        results[number] = call(values[number])
      except BaseException as error:
        errors[number] = error
      if errors:
        return

  others: list[threading.Thread] = []
  try:
    for number in range(1, min(threads, len(values))):
      other = threading.Thread(target=work, name=f'flax_spmd worker {number}')
      other.start()
      others.append(other)
  except RuntimeError:  # no thread can be started
    pass
  work()
  for other in others:
    other.join()
  if errors:
    raise errors[min(errors)]
  return results
