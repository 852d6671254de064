"""Shared objects: equal arguments give one object for as long as it is used, also in several threads.

    @shared
    def planner_for(mesh, rules): ...

In contrast to `functools.lru_cache`, nothing is kept that nobody else holds, so rules and what their functions
close over are freed with the last layout that has them.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

_Maker = TypeVar('_Maker', bound=Callable[..., Any])

_making = threading.RLock()  # one for all, since making one object may make another


def shared(make: _Maker) -> _Maker:
  """Decorates a function of hashable positional arguments whose results can be referenced weakly.

  Example:
    >>> @shared
    ... def table_of(names):
    ...   return Rules(*((name, None) for name in names))
    >>> table_of(('batch', 'embed')) is table_of(('batch', 'embed'))
    True
  """
  made: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()

  @functools.wraps(make)
  def shared_object(*content: Any) -> Any:
    found = made.get(content)
    return _made(content) if found is None else found

  def _made(content: tuple[Any, ...]) -> Any:
    with _making:
      found = made.get(content)
      if found is None:
        found = made[content] = make(*content)
      return found

  return cast(Any, shared_object)
