"""Context values: variables of a task, and of threads with its context, that have a value in a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

_Value = TypeVar('_Value')


@contextlib.contextmanager
def assigned(variable: ContextVar[_Value], value: _Value) -> Iterator[None]:
  """A block in which a variable has this value.

  Example:
    >>> depth = ContextVar('depth', default=0)
    >>> with assigned(depth, 1):
    ...   depth.get()
    1
  """
  token = variable.set(value)
  try:
    yield
  finally:
    variable.reset(token)
