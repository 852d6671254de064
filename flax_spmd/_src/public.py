"""Public module names: the module that `repr`, `help` and tracebacks show for a public object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar('T', bound=Callable[..., Any])


def set_module(name: str) -> Callable[[T], T]:
  """A decorator for a class or function that users import from the module `name`.

  Example:
    >>> Layout.__module__, Layout.init.__qualname__
    ('flax_spmd', 'Layout.init')
  """

  def decorate(public: T) -> T:
    public.__module__ = name
    return public

  return decorate
