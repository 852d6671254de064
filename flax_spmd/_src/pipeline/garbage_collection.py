"""Garbage collection while a step is traced and planned: only young objects are looked through.

Planning makes many objects, so Python's collector runs, and looks through all objects of the process now and then, of
which JAX alone has hundreds of thousands. That took two thirds of the time to plan.
"""

import contextlib
import gc
from collections.abc import Iterator

_NEVER = 1 << 30


@contextlib.contextmanager
def of_young_objects() -> Iterator[None]:
  """A block, or by decoration a function, without collections of the oldest generation."""
  first, second, oldest = gc.get_threshold()
  gc.set_threshold(first, second, _NEVER)
  try:
    yield
  finally:
    if oldest != _NEVER:  # another thread plans, too
      gc.set_threshold(first, second, oldest)
