"""Steady calls: those of a jitted function that JAX's own dispatch has taken over.

A `jax.jit` object has one cache entry per combination of shapes, dtypes, shardings and settings. So a call that adds no
entry repeats a planned one, and JAX's own dispatch does all the work. This holds in one thread: of an entry that another
call is adding, it is not certain yet whether it is planned. Where several `jax.jit` objects alternate, the structure of
the arguments selects one; if it is the wrong one, the call adds an entry.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from threading import get_ident
from typing import Any

_REPEATED_ENOUGH = 8  # calls in a row that need the same function, where several have been compiled


class SteadyCall:
  """A function whose calls JAX's own dispatch has taken over, in one thread.

  Attributes:
    call: the function, with all that its calls need.
    function: the `jax.jit` object.
    thread: identifies the thread.
  """

  __slots__ = ('call', 'function', 'thread')

  def __init__(self, call: Callable[..., Any], function: Any, thread: int):
    self.call, self.function, self.thread = call, function, thread


class SteadyCalls:
  """The steady calls of a function.

  Args:
    prepared: function from a `jax.jit` object to that object with all that its calls need.

  Attributes:
    of_all: the steady call for any arguments; None if there is none.
    by_structure: those by the structure of the arguments, if several `jax.jit` objects alternate.
  """

  def __init__(self, prepared: Callable[[Any], Callable[..., Any]]):
    self._prepared = prepared
    self.of_all: SteadyCall | None = None
    self.by_structure: dict[Any, SteadyCall] = {}
    self._claiming = threading.RLock()  # a signal handler may call the function again
    self._thread: int | None = None  # the thread whose calls JAX dispatches
    self._repeated: dict[Any, tuple[Any, int]] = {}  # the function of the last calls, and their number
    self._alternates = False  # whether the function depends on the structure of the arguments
    self._varied = False  # whether a call needed another function than the steady one

  def add(self, function: Any, structure_of_call: Callable[[], Any], is_only: bool) -> None:
    """Counts a call, and lets JAX's dispatch take over those of its function if others are unlikely to be needed.

    Other functions may be needed for arguments of another structure. A call that needs another one is noticed,
    but only after JAX has compiled this one for it.

    Args:
      function: the `jax.jit` object.
      structure_of_call: returns the structure of the arguments.
      is_only: whether no other `jax.jit` object exists so far.
    """
    if self._varied:
      return
    structure = structure_of_call() if self._alternates else None
    last, count = self._repeated.get(structure, (function, 0))
    self._repeated[structure] = function, count + 1 if last is function else 1
    if last is not function:
      self._alternates = True
      self._forget(structure)
    elif is_only or count + 1 >= _REPEATED_ENOUGH:
      self._let_dispatch(structure, function)

  def end_other(self, function: Any) -> None:
    """Ends the steady call for any arguments, if it is that of another function."""
    if self.of_all is not None and self.of_all.function is not function:
      self.of_all = None

  def end(self) -> None:
    """Ends all for good: JAX has, or may have, an entry of a call that needs another function."""
    self.of_all, self._varied = None, True
    self.by_structure.clear()

  def _let_dispatch(self, structure: Any, function: Any) -> None:
    """Lets JAX dispatch the calls with arguments of a structure (None: of any), if they are in the right thread."""
    if self._thread != get_ident() and not self._claimed():
      return
    steady = SteadyCall(self._prepared(function), function, get_ident())
    if structure is None:
      self.of_all = steady
    else:
      self.by_structure[structure] = steady

  def _forget(self, structure: Any) -> None:
    """Ends the dispatch by JAX of calls with arguments of a structure (None: of any)."""
    if structure is None:
      self.of_all = None
    else:
      self.by_structure.pop(structure, None)

  def _claimed(self) -> bool:
    """Whether this thread is now the one whose calls JAX may dispatch: the first, or the first after it has ended."""
    with self._claiming:
      if self._thread in [thread.ident for thread in threading.enumerate()]:
        return False
      self.of_all, self._thread = None, get_ident()
      self.by_structure.clear()
      return True
