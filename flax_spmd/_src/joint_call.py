"""Joint calls: calls that every process of a job makes, and whose errors reach all of them.

A process that fails between two exchanges would leave the others waiting in the next one. So it publishes its error
under the number of the call, and whoever waits in an exchange of that call looks for it.

    call = JointCall('save', 'The save to /run/1')
    with call.entered():
      ...                  # exchanges have keys of their own, and end when a process has failed
    call.fail(error)       # in the process that fails

All processes make the calls of a kind in the same order. Processes that wait for each other in different calls get an
error that names both; a process that waits for one that has ended gets an error at once. An exchange that was left
halfway does not disturb a later call.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax

from flax_spmd import errors
from flax_spmd._src.context_values import assigned
from flax_spmd._src.whereabouts import (
  Question,
  forget,
  is_main_thread,
  programs,
  publish,
  start_answering,
  stored,
  values_by_process,
)

_PREFIX, _WAITING, _ENDED = 'flax_spmd/calls', 'flax_spmd/waiting', 'flax_spmd/ended'
_LONGEST = 500  # characters of a reason


class Failure(NamedTuple):
  """The error that ended a call in another process.

  Attributes:
    process: index of the process.
    kind: name of the error's class.
    text: its text.
    reason: first line of the error that caused it, or of its own.
  """

  process: int
  kind: str
  text: str
  reason: str


class JointCall:
  """One call of every process.

  Args:
    kind: name of the function that is called.
    subject: name of the call in errors, such as `'The save to /run/1'`.
    error_of: the error to raise here for the failure of another process; default: the same error.
    members: the processes that make the call, in order; default: all.
    other_error: class of the error here for an error of another process that is not of this package.

  Attributes:
    number: its number among the calls of its kind, equal on all members.
    folder: key of everything that the processes exchange in this call.
  """

  def __init__(
    self,
    kind: str,
    subject: str,
    error_of: Callable[[Failure], Exception] | None = None,
    members: Sequence[int] | None = None,
    other_error: type[errors.FlaxSpmdError] = errors.CheckpointError,
  ):
    self._error_of, self._other_error = error_of or self._same_error, other_error
    self._members = list(range(jax.process_count()) if members is None else members)
    self._kind, self.number = kind, next(_numbers(kind))
    _made[kind] = self.number + 1
    self._has_announced = self._is_undone = self._is_abandoned = False
    self._question = Question()
    self._subject, self._outer = subject, _current.get()
    self._counts: dict[Any, Iterator[int]] = {}
    self.folder = f'{_PREFIX}/{kind}/{self.number}'

  @contextlib.contextmanager
  def entered(self) -> Iterator[None]:
    """Makes this the call that exchanges belong to, in this thread and those that copy its context."""
    try:
      with assigned(_current, self):
        yield
    finally:
      self.leave()

  def leave(self) -> None:
    """Takes back what this process has published of a call that it does not wait in any more."""
    if self._is_abandoned:
      return
    if self._has_announced:
      self._announce('')
    if self._is_undone:
      forget(self.folder)

  def counts(self, key: Any) -> Iterator[int]:
    """The numbers of the exchanges of a kind in this call."""
    return self._counts.setdefault(key, itertools.count())

  def fail(self, error: BaseException) -> None:
    """Publishes an error to the other processes, unless another one has done so."""
    if jax.process_count() > 1 and not (self._is_undone or self._is_abandoned):
      self._publish(self.folder, error)

  def abandon(self) -> None:
    """Publishes nothing from now on, as the coordination service does not answer."""
    self._is_abandoned = True

  def _publish(self, folder: str, error: BaseException) -> None:
    failure = Failure(
      jax.process_index(), type(error).__name__, str(error), first_line(error.__cause__ or error)
    )
    publish(f'{folder}/failed', json.dumps(failure), replaces=False)

  def failure(self) -> Failure | None:
    """The error of the first process that has published one; None if there is none."""
    text = stored(f'{self.folder}/failed')
    return Failure(*json.loads(text)) if text else None

  def error(self) -> Exception | None:
    """The error to raise here because of another process, in this call or one around it."""
    failure = self.failure()
    if failure is not None:
      other = stored(f'{self.folder}/crossed')
      if other:
        _count(*json.loads(other))
      return self._error_of(failure)
    alone = self._left_alone() or self._crossed() or self._passed()
    return alone or (self._outer and self._outer.error())

  def _left_alone(self) -> errors.LayoutError | None:
    """The error for processes that have ended without this call."""
    for process, text in sorted(values_by_process(_ENDED).items()):
      calls = json.loads(text).get(self._kind, 0)
      if process in self._members and calls <= self.number:
        return errors.LayoutError(
          f'{self._subject} is call {self.number + 1} of {self._kind!r} in process {jax.process_index()}, and process '
          f'{process} has ended after {calls}.\n'
          'Fix: make the same calls on every process, equally often and in the same order.'
        )
    return None

  def _crossed(self) -> errors.LayoutError | None:
    """The error for a process that waits in another call, which this one has not made, as it has not made this one.

    Only calls that main threads wait for are compared: other threads may still make the one that is waited for.
    """
    if not _is_in_front():
      return None
    me = jax.process_index()
    members = None if len(self._members) == jax.process_count() else self._members
    self._announce(json.dumps([self._kind, self.number, self._subject, _made, members]))
    for process, text in sorted(values_by_process(_WAITING).items()):
      if process not in self._members or not text:
        continue
      kind, number, subject, made, others = json.loads(text)
      if (
        me not in (others or [me])
        or number < _made.get(kind, 0)
        or made.get(self._kind, 0) > self.number
      ):
        continue
      here, there = (each[:1].lower() + each[1:] for each in (self._subject, subject))
      error = errors.LayoutError(
        f'Process {me} waits in {here}, and process {process} in {there}: '
        'neither makes the call of the other.\n'
        'Fix: make the same calls on every process, equally often and in the same order.'
      )
      _count(kind, number)
      folder = f'{_PREFIX}/{kind}/{number}'
      publish(f'{folder}/crossed', json.dumps([self._kind, self.number]), replaces=False)
      self._publish(folder, error)
      return error
    return None

  def _passed(self) -> errors.LayoutError | None:
    """The error for a process that has begun a program of all processes instead of this call.

    The call does not count then: the next one of its kind is that of the other processes.
    """
    if not _is_in_front():
      return None
    for process, other in self._question.answers(self._members).items():
      if other.calls.get(self._kind, 0) <= self.number and other.programs > programs():
        self._undo()
        subject = self._subject[:1].lower() + self._subject[1:]
        return errors.LayoutError(
          f'Process {process} has gone past {subject}: it has begun {other.programs} programs of layout.jit, and process '
          f'{jax.process_index()} has begun {programs()}. It is in {other.line}.\n'
          'Fix: make the same calls on every process, equally often and in the same order.'
        )
    return None

  def lines_of(self, processes: list[int]) -> dict[int, str]:
    """The user's line that each of these processes was in when it last answered a question of this call."""
    return {process: other.line for process, other in self._question.answers(processes).items()}

  def _undo(self) -> None:
    """Takes the call back, and those around it."""
    self._is_undone = True
    if _made.get(self._kind) == self.number + 1:
      _made[self._kind], _counters[self._kind] = self.number, itertools.count(self.number)
    if self._outer is not None:
      self._outer._undo()

  def _announce(self, text: str) -> None:
    """Publishes the call in which this process waits; an empty text once it does not."""
    self._has_announced = bool(text)
    publish(f'{_WAITING}/{jax.process_index()}', text)

  def _same_error(self, failure: Failure) -> Exception:
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, errors.FlaxSpmdError):
      return kind(failure.text)
    return self._other_error(
      f'{self._subject} failed in process {failure.process}: {failure.reason}.\n'
      'Fix: see the error of that process.'
    )

  def forget_earlier(self) -> None:
    """Removes what earlier calls have left. The first process calls this when all others are in this call."""
    if jax.process_count() > 1 and jax.process_index() == self._members[0]:
      for number in range(_forgotten.get(self._kind, 0), self.number):
        forget(f'{_PREFIX}/{self._kind}/{number}')
      _forgotten[self._kind] = self.number


def in_front() -> contextlib.AbstractContextManager[None]:
  """A block whose calls in threads with its context count as calls of this thread, which waits for them."""
  return assigned(_front, _is_in_front())


def _is_in_front() -> bool:
  """Whether the main thread waits for this call."""
  return _front.get() or is_main_thread()


_front: ContextVar[bool] = ContextVar('flax_spmd_in_front', default=False)
_current: ContextVar[JointCall | None] = ContextVar('flax_spmd_joint_call', default=None)
_counters: dict[str, Iterator[int]] = {}  # by kind
_made: dict[str, int] = {}  # by kind: the number of calls of this process
_forgotten: dict[str, int] = {}  # by kind: the first call whose keys may still be there


def _count(kind: str, number: int) -> None:
  """Counts a call that another process has made alone, so that later calls of its kind have one number again."""
  while _made.get(kind, 0) <= number:
    _made[kind] = next(_numbers(kind)) + 1


@atexit.register
def _announce_end() -> None:
  """Publishes the number of calls of each kind that this process has made, and makes no more."""
  if _made and jax.process_count() > 1:
    publish(f'{_ENDED}/{jax.process_index()}', json.dumps(_made))


def answer_others() -> None:
  """Lets the other processes know where this one is, if they wait for it."""
  start_answering(_made)


def current_call() -> JointCall | None:
  """The call in progress in this thread; None in a job of one process, or outside of all calls."""
  return _current.get() if jax.process_count() > 1 else None


def first_line(error: BaseException) -> str:
  """The first line of an error's text, or its class name."""
  return (str(error).splitlines() or [type(error).__name__])[0].rstrip('.')[:_LONGEST]


def _numbers(kind: str) -> Iterator[int]:
  """The numbers of the calls of a kind, the same for all threads."""
  return _counters.setdefault(kind, itertools.count())  # in one step, unlike functools.cache
