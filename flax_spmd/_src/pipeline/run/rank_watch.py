"""Rank watch: ends a step whose rank waits for a rank of another process that is dead or stalled.

A transfer between processes is a collective operation: it blocks the thread that waits for it, and nothing in
Python can interrupt it. So a step of several processes runs in a thread of its own, and the caller's thread
looks at it once a second. It raises

- the error of another process in the same step,
- an error if another process waits in another call, such as a save, that this one never makes,
- an error after `timeout` seconds in one transfer. Each process publishes the transfer that it waits in, so the
  error names the rank at the end of the chain, which waits for nobody; or process 0, if it does not answer.

The thread stays blocked after such an error, as no device program can be cancelled. So later steps of these processes
are an error. The interpreter would wait for the thread at its end, so the process then leaves at once.

On GPUs and TPUs a step returns before its transfers end. Then a thread looks on until they have. It writes an error to
stderr, and the next step raises it. A caller that reads a result of a stalled transfer stays blocked and makes no
step, so the process leaves a few seconds after the timeout.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import contextvars
import functools
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from flax_spmd._src import compat
from flax_spmd._src.joint_call import JointCall, first_line, in_front
from flax_spmd._src.multihost import named, ranges
from flax_spmd.errors import FlaxSpmdError, PipelineError

_LOOK = 1.0  # seconds between two looks at the thread
_ANSWER = 5 * _LOOK  # seconds after the timeout in which process 0 may answer, or a step raise the error
_LEADER_STAYS = 3 * _LOOK
_AHEAD = 2  # steps that may have returned before their transfers have ended
_WAITS = 'flax_spmd/pipeline waits'


class Wait(NamedTuple):
  """A transfer between processes.

  Attributes:
    rank: the rank of another process that takes part.
    processes: its processes.
    text: the transfer, as in the list of calls.
  """

  rank: int
  processes: tuple[int, ...]
  text: str


class TransferProgress:
  """The transfers of a pipeline: those that its threads are in, and those that were dispatched and go on.

  Attributes:
    has_begun: whether the step has dispatched a transfer that goes on.
    failed: the first transfer that raised an error, and the error.
  """

  def __init__(self) -> None:
    self._running: dict[int, tuple[Wait, float]] = {}  # by thread
    self._going: collections.deque[tuple[Wait | None, Any]] = collections.deque()
    self._since = 0.0  # when the first of these became the first
    self._looking = threading.Lock()
    self.has_begun = False
    self.failed: tuple[Wait, BaseException] | None = None

  def add(self, wait: Wait | None, arrival: jax.Array) -> None:
    """Adds a transfer that goes on until an array is ready; None for the programs before all transfers of a step."""
    self.has_begun = True
    with self._looking:
      if not self._going:
        self._since = time.monotonic()
      self._going.append((wait, arrival))

  @property
  def last(self) -> Any:
    """The array that is ready when all transfers have ended that go on; None if there are none."""
    with self._looking:
      return self._going[-1][1] if self._going else None

  @property
  def current(self) -> tuple[Wait, float] | None:
    """The transfer that began first, and when; None between two transfers."""
    self.advance()
    running = list(self._running.values())
    with self._looking:
      if self._going and self._going[0][0] is not None:
        running.append((self._going[0][0], self._since))
    return min(running, key=lambda one: one[1], default=None)

  def advance(self) -> None:
    """Drops the transfers that have ended, and notes whether one has failed."""
    with self._looking:
      while self._going and self._going[0][1].is_ready():
        wait, arrival = self._going.popleft()
        self._since = time.monotonic()
        with contextlib.suppress(Exception), self._noted(wait):
          arrival.block_until_ready()

  @contextlib.contextmanager
  def waiting(self, wait: Wait) -> Iterator[None]:
    """A block that runs a transfer."""
    thread = threading.get_ident()
    self._running[thread] = wait, time.monotonic()
    try:
      with self._noted(wait):
        yield
    finally:
      del self._running[thread]

  @contextlib.contextmanager
  def _noted(self, wait: Wait | None) -> Iterator[None]:
    """A block whose error is that of a transfer; others fail because of the first."""
    try:
      yield
    except BaseException as error:
      if wait is not None and self.failed is None:
        self.failed = wait, error
      raise


_failed: dict[int, BaseException] = {}
"""The error of a failed step, by the other processes that took part in it."""

_raised: list[BaseException | None] = []
"""Those of these errors that a step has raised."""

_keeping = threading.Lock()
_settled = threading.Event()
"""Whether the process ends, and all transfers have ended."""

_watches: weakref.WeakSet[RankWatch] = weakref.WeakSet()
_threads: weakref.WeakSet[_DaemonThread] = weakref.WeakSet()
_blocked: list[Callable[[], bool]] = []
"""Whether what failed steps have left behind would block the end of the process."""


class RankWatch:
  """Runs the steps of one pipeline of several processes, whose transfers may take `timeout` seconds."""

  def __init__(
    self, subject: str, processes: tuple[int, ...], timeout: float, progress: TransferProgress
  ):
    self._subject, self._processes = subject, processes
    self._timeout, self._progress = timeout, progress
    self._published = ''
    self._returned: collections.deque[tuple[JointCall, Any]] = collections.deque()
    self._after: _DaemonThread | None = None  # looks on for the steps that have returned
    self._returning = threading.Lock()
    _watches.add(self)

  def run(self, step: Callable[[], Any], check: Callable[[], None]) -> Any:
    """The result of a step.

    A step that has begun and fails leaves transfers behind that others still wait in. The next step's would be taken
    for these, so every later step of these processes raises an error.

    Args:
      step: runs the step.
      check: raises if the arguments cannot be used; a step after that can run.

    Raises:
      PipelineError: a rank of another process ended or stalled (the message names it and the transfer).
      FlaxSpmdError: another process has raised it in this step.
    """
    kind = f'pipeline step of {ranges(self._processes)}'
    call = JointCall(kind, f'A step of {self._subject}', None, self._processes, PipelineError)
    with call.entered():
      try:
        self._check_earlier_steps()
        check()
        return self._watched(step, call)
      except BaseException as error:
        call.fail(error)
        raise

  @property
  def earlier_failure(self) -> BaseException | None:
    """The error of an earlier step that this process shared with another one of these."""
    return next((_failed[each] for each in self._processes if each in _failed), None)

  def _check_earlier_steps(self) -> None:
    """Raises if a step that this process shares with another one of these has failed."""
    found = self.earlier_failure
    if found is not None and found not in _raised:
      _raised.append(found)
      raise found  # found when its step had returned
    if found is not None:
      raise PipelineError(
        f'{self._subject}: an earlier step of these processes has failed, and transfers between them are unfinished: '
        f'{first_line(found).rstrip(".")}.\nFix: restart all processes from the newest checkpoint.'
      ) from found

  def _watched(self, step: Callable[[], Any], call: JointCall) -> Any:
    with self._returning:
      earlier = self._returned[-_AHEAD][1] if len(self._returned) >= _AHEAD else None
    self._progress.has_begun = False

    def run() -> Any:
      with contextlib.suppress(Exception):  # of a transfer, which the watch looks at
        jax.block_until_ready(earlier)
      return step()

    thread = _DaemonThread('pipeline step', compat.with_settings(run))
    try:
      self._watch(call, thread.done.wait)
      if error := self._explained(thread.error):
        raise error
    except BaseException as error:  # KeyboardInterrupt, too
      self._keep(error, thread)
      _raised.append(self.earlier_failure)
      raise
    last = self._progress.last
    if last is not None:
      with self._returning:
        self._returned.append((call, last))
        self._after = self._after or _DaemonThread('pipeline watch', self._look_on)
    return thread.result

  def _look_on(self) -> None:
    """Looks at the other processes until the transfers of all steps have ended."""
    while True:
      with self._returning:
        if not self._returned:
          self._after = None
          return
        call, last = self._returned[0]
      self._follow(call, last)
      with self._returning:
        self._returned.popleft()

  def _follow(self, call: JointCall, last: Any) -> None:
    """Looks at the other processes until the transfers of a step that has returned have ended."""

    def ended(seconds: float) -> bool:
      if not last.is_ready():
        _settled.wait(seconds)
      return last.is_ready()

    try:
      self._watch(call, ended)
      if error := self._explained(None):
        raise error
    except BaseException as error:
      self._report(error)
      _DaemonThread('pipeline watch', functools.partial(call.fail, error))  # may block
    while not last.is_ready() and self.earlier_failure not in [None, *_raised]:
      time.sleep(_LOOK)
      if self._waited() >= self._timeout + _ANSWER:
        print(
          f'{self._subject}: process {jax.process_index()} leaves, as a transfer is unfinished and no step has '
          'raised the error above.',
          file=sys.stderr,
        )
        _leave()

  def _report(self, error: BaseException) -> None:
    """Writes the error of a step that has returned, and keeps it for the next one."""
    if self._keep(error):
      print(f'{type(error).__name__}: {error}', file=sys.stderr, flush=True)

  def settle(self) -> None:
    """Waits at the end of the process until the transfers have ended, or an error is found; it is written."""
    while self._progress.last is not None and self.earlier_failure is None:
      if error := self._explained(None):
        self._report(error)
      time.sleep(_LOOK / 50)

  def _watch(self, call: JointCall, ended: Callable[[float], bool]) -> None:
    """Looks at the other processes until a step has ended.

    Args:
      call: the step.
      ended: waits for some seconds; returns whether it has ended.

    Raises:
      PipelineError: the step cannot end.
      FlaxSpmdError: another process has raised it.
    """
    look = None
    while not ended(_LOOK):
      look = look or self._look(call)
      if look.done.wait(_LOOK):
        if error := look.error or look.result or self.earlier_failure or self._explained(None):
          raise error
        look = None
      elif self._waited() >= self._timeout + _ANSWER:
        call.abandon()
        raise self._unanswered()
    if look is not None:
      look.done.wait(_LOOK)  # it publishes, too
    if self._progress.current is None:
      self._publish('')

  def _keep(self, error: BaseException, thread: _DaemonThread | None = None) -> bool:
    """Keeps the first error for later steps and for the end of the process; returns whether it is the first."""
    progress = self._progress
    with _keeping:
      first = self.earlier_failure is None
      if first:
        _failed.update((each, error) for each in self._processes if each != jax.process_index())
    _blocked.append(lambda: bool(progress.current or progress.failed or (thread and thread.is_alive())))
    return first

  def _look(self, call: JointCall) -> _DaemonThread:
    """A look at the other processes, which never ends while process 0 is stopped; the result is the error to raise."""
    with in_front():
      context = contextvars.copy_context()
    return _DaemonThread('pipeline watch', lambda: context.run(lambda: call.error() or self._overdue()))

  def _waited(self) -> float:
    """The seconds for which the transfer runs; 0 between two transfers."""
    current = self._progress.current
    return 0 if current is None else time.monotonic() - current[1]

  def _unanswered(self) -> PipelineError:
    current = self._progress.current
    waited = '' if current is None else f', and {self._here(current[0])} for {self._timeout:g} s'
    return PipelineError(
      f'{self._subject}: process 0, which coordinates all processes, does not answer{waited}.\n'
      'Fix: check whether that process is stopped or cannot be reached, and restart all processes from the newest '
      'checkpoint.'
    )

  def _explained(self, error: BaseException | None) -> BaseException | None:
    """The error of a step, if there is one; where a transfer has failed, it names the rank at its other end."""
    self._progress.advance()
    if self._progress.failed is None:
      return error
    wait, cause = self._progress.failed
    is_other = error is not None and not isinstance(error, jax.errors.JaxRuntimeError)
    if isinstance(cause, FlaxSpmdError) or (is_other and error is not cause):
      return error or cause
    explained = PipelineError(
      f'{self._place(wait)} has ended, or the connection to it: {self._here(wait)}, and it failed: '
      f'{first_line(cause)}.\n'
      'Fix: see the end of its output; then restart all processes from the newest checkpoint.'
    )
    explained.__cause__ = cause
    return explained

  def _overdue(self) -> PipelineError | None:
    """The error if the transfer takes too long; publishes it to the others until then."""
    current = self._progress.current
    if current is None:
      return None
    wait, begin = current
    self._publish(json.dumps([wait.rank, wait.processes, wait.text]))
    if time.monotonic() - begin < self._timeout:
      return None
    last, chain = wait, ''
    for _ in self._processes:
      later = _published(last.processes)
      if later is None or jax.process_index() in later.processes:
        break
      chain = (
        f'; {named(last.processes)}, of rank {last.rank}, waits in turn in the transfer "{later.text}"'
      )
      last = later
    return PipelineError(
      f'{self._place(last)} is stalled: {self._here(wait)} for {self._timeout:g} s{chain}.\n'
      'Fix: check whether that process is stuck, stopped or outside of the step (loading data, say), and restart '
      'all processes from the newest checkpoint; pass a longer timeout= to pipeline_jit if it is only slow.'
    )

  def _place(self, wait: Wait) -> str:
    return f'{self._subject}: rank {wait.rank}, of {named(wait.processes)},'

  def _here(self, wait: Wait) -> str:
    return f'process {jax.process_index()} waited in the transfer "{wait.text}"'

  def _publish(self, text: str) -> None:
    """Publishes the transfer that this process waits in, for the errors of others."""
    if text != self._published:
      with contextlib.suppress(jax.errors.JaxRuntimeError):
        key = f'{_WAITS}/{jax.process_index()}'
        compat.coordination_service().key_value_set(key, text, allow_overwrite=True)
    self._published = text


def _published(processes: tuple[int, ...]) -> Wait | None:
  """The transfer that one of some processes waits in; None if they wait in none."""
  for process in processes:
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      text = compat.coordination_service().key_value_try_get(f'{_WAITS}/{process}')
      if text:
        rank, others, transfer = json.loads(text)
        return Wait(rank, tuple(others), transfer)
  return None


class _DaemonThread(threading.Thread):
  """A thread that has begun to run a function, and may stay blocked for ever."""

  def __init__(self, name: str, function: Callable[[], Any]):
    super().__init__(name=name, daemon=True)
    self._function = function
    self.done = threading.Event()
    self.result: Any = None
    self.error: BaseException | None = None
    _threads.add(self)
    self.start()

  def run(self) -> None:
    try:
      self.result = self._function()
    except BaseException as error:
      self.error = error
    finally:
      self.done.set()


@atexit.register
def _leave_if_blocked() -> None:
  """Ends the process without waiting for a thread that is blocked, or for a process that has ended.

  The other threads end first: JAX is about to delete the transfers that they look at, and a thread that returns from
  native code while the interpreter shuts down would end the process with SIGABRT.
  """
  for watch in list(_watches):
    watch.settle()
  if any(is_blocked() for is_blocked in _blocked):
    _leave()
  _settled.set()
  deadline = time.monotonic() + 3 * _LOOK
  for thread in list(_threads):
    thread.join(max(0.0, deadline - time.monotonic()))


def _leave() -> None:
  """Ends the process at once.

  JAX aborts all other processes when process 0 ends, so that one leaves them the time to raise their own errors.
  """
  if jax.process_index() == 0:
    time.sleep(_LEADER_STAYS)
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(1)
