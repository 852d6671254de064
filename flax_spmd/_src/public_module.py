"""The public module of a public object, which `repr`, `help` and tracebacks then show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar('T', bound=Callable[..., Any])


def set_module(name: str) -> Callable[[T], T]:
  """Decorates a class or a function that users import from `name`.

  Example:
    >>> Layout.__module__, Layout.init.__qualname__
    ('flax_spmd', 'Layout.init')
  """

  def decorate(public: T) -> T:
    public.__module__ = name
    return public

  return decorate
