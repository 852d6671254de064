"""Garbage collection while a step is traced and planned: only young objects are looked through.

Planning makes many objects, so Python's collector runs, and looks through all objects of the process now and then, of
which JAX alone has hundreds of thousands. That took two thirds of the time to plan.
"""

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec('P')
Result = TypeVar('Result')
_NEVER = 1 << 30


def of_young_objects(function: Callable[P, Result]) -> Callable[P, Result]:
  """The function, without collections of the oldest generation while it runs."""

  @functools.wraps(function)
  def within(*args: P.args, **kwargs: P.kwargs) -> Result:
    first, second, oldest = gc.get_threshold()
    gc.set_threshold(first, second, _NEVER)
    try:
      return function(*args, **kwargs)
    finally:
      if oldest != _NEVER:  # another thread plans, too
        gc.set_threshold(first, second, oldest)

  return within
