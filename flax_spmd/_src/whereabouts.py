"""Whereabouts: the programs that the main thread of a process has begun, for processes that wait for it in a joint call.

A process that waits asks for the whereabouts of the others. A thread of each of them answers, also while its main
thread waits in a program on the devices.

All processes begin the programs of `layout.jit` and make their joint calls in one order. So a process that has begun
more programs than one that waits in a call, and has not made that call, has gone past it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from flax_spmd._src.compat import coordination_service
from flax_spmd._src.periodic_calls import start_periodic_calls
from flax_spmd._src.source_lines import line_text, user_frame

_ASKED, _ANSWERS = 'flax_spmd/asked', 'flax_spmd/whereabouts'
_EVERY = 2.0  # seconds between two looks at whether somebody asks
_ASK_AGAIN = 3.0  # seconds


class Whereabouts(NamedTuple):
  """Where a process was when it was asked.

  Attributes:
    programs: number of programs of all processes that its main thread has begun.
    calls: number of joint calls that it has made, by kind.
    line: user's line that its main thread was in.
  """

  programs: int
  calls: dict[str, int]
  line: str


_begun = 0  # programs; changed by the main thread only
_starting = threading.Lock()
_answering: threading.Thread | None = None
_answered: str | None = None  # the last question
_questions = itertools.count()


def is_main_thread() -> bool:
  """Whether this is the main thread."""
  return threading.current_thread() is threading.main_thread()


def programs() -> int:
  """The number of programs of all processes that the main thread has begun."""
  return _begun


def counted(mesh: Any, call: Callable[..., Any]) -> Callable[..., Any]:
  """The call of a program, counted if all processes run it, and this is the main thread."""
  if not (isinstance(mesh, Mesh) and is_main_thread() and _is_of_all(mesh)):
    return call

  def counts(*args: Any, **kwargs: Any) -> Any:
    global _begun
    _begun += 1
    try:
      return call(*args, **kwargs)
    except BaseException:  # it has not begun, and may be called again
      _begun -= 1
      raise

  return counts


@functools.lru_cache(maxsize=16)
def _is_of_all(mesh: Mesh) -> bool:
  """Whether a mesh has devices of every process of a job of several."""
  return jax.process_count() == len({device.process_index for device in mesh.devices.flat}) > 1


class Question:
  """Asks the other processes for their whereabouts, again and again, while this one waits.

  The first question comes after some seconds: most waits are shorter.
  """

  def __init__(self) -> None:
    self._asked = time.monotonic()

  def answers(self, processes: list[int]) -> dict[int, Whereabouts]:
    """The latest whereabouts of processes that have answered since the first question."""
    me = jax.process_index()
    if time.monotonic() - self._asked >= _ASK_AGAIN:
      self._asked = time.monotonic()
      publish(_ASKED, f'{me}/{next(_questions)}')
    answers = values_by_process(_ANSWERS)
    return {
      process: Whereabouts(*json.loads(answers[process])) for process in processes if process in answers
    }


def start_answering(calls: Mapping[str, int]) -> None:
  """Starts the thread that answers for this process, once.

  Args:
    calls: numbers of joint calls that it has made, by kind; changes later.
  """
  global _answering
  with _starting:
    if _answering is None:
      _answering = start_periodic_calls(
        functools.partial(_answer, calls), _EVERY, 'flax_spmd whereabouts', threading.Event()
      )


def _answer(calls: Mapping[str, int]) -> None:
  global _answered
  asked = stored(_ASKED)
  if asked not in (None, _answered):
    _answered = asked
    publish(f'{_ANSWERS}/{jax.process_index()}', json.dumps(Whereabouts(_begun, dict(calls), _line())))


def _line() -> str:
  """The user's line that the main thread is in."""
  frame = sys._current_frames().get(threading.main_thread().ident or 0)
  stack = []
  while frame is not None:
    stack.append((frame.f_code.co_filename, frame.f_lineno))
    frame = frame.f_back
  return line_text(*stack[user_frame([file for file, _ in stack])]) if stack else ''


def values_by_process(folder: str) -> dict[int, str]:
  """The values below a key, by the process that their own keys end in. It is one request for any number of processes."""
  try:
    found = service.key_value_dir_get(folder) if (service := coordination_service()) else []
  except jax.errors.JaxRuntimeError:
    return {}
  return {int(key.rpartition('/')[2]): text for key, text in found}


def stored(key: str) -> str | None:
  """The value that a process has published, or None."""
  try:
    return service.key_value_try_get(key) if (service := coordination_service()) else None
  except jax.errors.JaxRuntimeError:
    return None


def publish(key: str, text: str, *, replaces: bool = True) -> None:
  """Publishes a value to the other processes, if they can be reached; not if there is one that it does not replace."""
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    if service := coordination_service():  # None in a single process, and once JAX has shut down
      service.key_value_set(key, text, allow_overwrite=replaces)


def forget(key: str) -> None:
  """Removes the values at and below a key, if the service can be reached."""
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    if service := coordination_service():
      service.key_value_delete(key)
