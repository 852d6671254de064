"""Pending: saves that go on in the background, and their errors, which nobody may miss.

One save is under way at a time. Who starts the next one, or a restore, waits for it first; an error
that was not asked for is raised there, or at the end of the program.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # registers what ends all executors, before ours below
import json
import os
import sys
import threading
import traceback
from typing import Any, Protocol

import jax
from etils import epath

from flax_spmd import errors
from flax_spmd._src.checkpoint.storage.byte_progress import Bar
from flax_spmd._src.checkpoint.storage.folders import Claim
from flax_spmd._src.checkpoint.storage.heartbeat import SILENCE, Alive, first_line
from flax_spmd._src.multihost import CALLS, TIMEOUT, exchange, named
from flax_spmd._src.public_module import set_module
from flax_spmd.errors import CheckpointError

_POLL = 0.5  # seconds


class Response(Protocol):
  """What Orbax gives for a save in the background."""

  def result(self, timeout: float | None = None) -> Any:
    """Waits for the end of it; raises its error."""
    ...


@set_module('flax_spmd.checkpoint')
class Saving:
  """A save that goes on in the background.

  Attributes:
    path: where the checkpoint will be.

  Example:
    >>> layout = Layout({'data': 8})
    >>> saving = checkpoint.save_async(tmp / 'in_background', layout.shard({'w': np.ones(8)}), layout=layout)
    >>> saving.path.name
    'in_background'
    >>> saving.result(timeout=60)
  """

  def __init__(self, path: epath.Path, work: Any):
    self.path = path
    self._error: BaseException | None = None
    self._told = False
    self._ended = threading.Event()
    self._thread = threading.Thread(target=self._run, args=(work,), name=f'flax_spmd save {path.name}')
    self._thread.start()

  def _run(self, work: Any) -> None:
    try:
      work()
    except BaseException as error:
      self._error = error
    finally:
      self._ended.set()

  def done(self) -> bool:
    """Whether it has ended, well or not."""
    return self._ended.is_set()

  def result(self, timeout: float | None = None) -> None:
    """Waits until the checkpoint is there.

    Args:
      timeout: seconds to wait at most.

    Raises:
      TimeoutError: it goes on still.
      CheckpointError: it failed; what was at the path before is there still.
    """
    if not self._ended.wait(timeout):
      raise TimeoutError(f'The save to {self.path} goes on still.')
    self._thread.join()
    self._told = True
    if self._error is not None:
      raise self._error


_last: Saving | None = None


def finish() -> None:
  """Waits for the save that is under way, if one is; raises the error of the last one."""
  global _last
  saving, _last = _last, None
  if saving is not None and not saving._told:
    saving.result()


def claim(path: epath.Path, overwrite: bool) -> Claim | Follower:
  """The right to write at a path; the first process of a job asks for it, and tells the others.

  Raises:
    CheckpointError: it cannot be had, on every process.
  """
  if jax.process_count() == 1:
    return Claim(path, overwrite)
  held, said = None, {}
  if jax.process_index() == 0:
    try:
      held = Claim(path, overwrite)
      said = {'new': os.fspath(held.new)}
    except Exception as error:
      said = _as_text(error)
  heard = _from_first_or_raise(said)
  return held or Follower(path, epath.Path(heard['new']))


class Follower:
  """A claim that the first process holds for this one."""

  def __init__(self, path: epath.Path, new: epath.Path):
    self.path, self.new = path, new

  def commit(self) -> None:
    """The first process does it."""

  def release(self) -> None:
    """The first process does it."""


def from_first(said: Any) -> Any:
  """What the first process says, on all of them."""
  everyone = tuple(range(jax.process_count()))
  text = json.dumps(said) if jax.process_index() == 0 else ''
  groups = exchange('checkpoint', everyone, text, CALLS, TIMEOUT)
  return json.loads(next(text for processes, text in groups if 0 in processes))


def _as_text(error: Exception) -> dict[str, str]:
  """An error, to be said to the other processes."""
  return {'error': type(error).__name__, 'text': str(error)}


def _from_first_or_raise(said: Any) -> Any:
  """What the first process says; if that is an error, all of them raise it."""
  heard = from_first(said)
  if 'error' in heard:
    raise getattr(errors, heard['error'], CheckpointError)(heard['text'])
  return heard


def start(response: Response, held: Claim | Follower, bar: Bar, check: Any) -> Saving:
  """Goes on with a save in the background: waits for Orbax, checks, and commits.

  Args:
    response: Orbax's.
    held: the right to write.
    bar: is moved while it goes on.
    check: called when everything is written, before it takes its place; raises if it is wrong.
  """
  global _last
  alive = Alive()

  def work() -> None:
    wrong: BaseException | None = None
    try:
      _wait(response, held.path, alive)
      _wait(_checked_and_committed(check, held), held.path, alive)
    except BaseException as error:
      wrong = error
      raise
    finally:
      alive.stop(wrong)
      bar.close(whole=wrong is None)
      held.release()

  _last = Saving(held.path, work)
  return _last


class _InThread:
  """A call in a thread of its own, to be waited for as for Orbax; nobody waits for it in the end."""

  def __init__(self, call: Any):
    self._future: concurrent.futures.Future[None] = concurrent.futures.Future()
    threading.Thread(target=self._run, args=(call,), name='flax_spmd commit', daemon=True).start()

  def _run(self, call: Any) -> None:
    try:
      self._future.set_result(call())
    except BaseException as error:
      self._future.set_exception(error)

  def result(self, timeout: float | None = None) -> None:
    """Raises the call's error, or TimeoutError."""
    self._future.result(timeout)


def _checked_and_committed(check: Any, held: Claim | Follower) -> Response:
  """Ends a save; what asks other processes is done aside, as one of them may have died."""

  def call() -> None:
    check()
    _commit(held)

  if jax.process_count() > 1:
    return _InThread(call)
  call()
  return _Done()


class _Done:
  """Nothing that is to be waited for."""

  def result(self, timeout: float | None = None) -> None:
    """It has ended."""


def _commit(held: Claim | Follower) -> None:
  """Puts what was written in its place; no process goes on before it is there."""
  if jax.process_count() == 1:
    held.commit()
    return
  said = {}
  try:
    held.commit()
  except Exception as error:
    said = _as_text(error)
  _from_first_or_raise(said)


def _wait(response: Response, path: epath.Path, alive: Alive) -> None:
  """Waits for Orbax as long as all processes live."""
  while True:
    try:
      response.result(timeout=_POLL)
      return
    except TimeoutError as error:
      if failed := alive.failed():
        process, text = failed
        raise CheckpointError(
          f'The save to {path} failed in process {process}: {text}.\n'
          'Fix: see the error of that process; what was at the path before is there still.'
        ) from error
      gone = alive.silent() or ([0] if alive.lost_service else [])
      if gone:
        raise CheckpointError(
          f'{named(gone).capitalize()} has not been heard of for {SILENCE:g} s while {path} was being saved. '
          'What is there is whole: what was saved before, or this.\n'
          'Fix: start the job again from the last checkpoint.'
        ) from error
    except CheckpointError:
      raise
    except (OSError, ValueError, RuntimeError) as error:
      if 'shutdown' in str(error):
        raise CheckpointError(
          f'The program ended before {path} was saved.\n'
          'Fix: call result() of the last save before the program ends; what was at the path before is there '
          'still.'
        ) from error
      raise CheckpointError(
        f'The save to {path} failed: {first_line(error)}.\n'
        'Fix: see the error above; what was at the path before is there still.'
      ) from error


def _before_shutdown() -> None:
  """Waits for the save that is under way while Orbax can still go on with it.

  From Python 3.12 on no thread can be started any more when a program ends; if Orbax needs one, the save
  fails, and `_at_exit` says so.
  """
  if _last is not None:
    _last._ended.wait()


# What `atexit` calls comes too late: by then no executor takes work any more. What concurrent.futures
# itself uses is called before; the last to be registered is the first to be called.
getattr(threading, '_register_atexit', atexit.register)(_before_shutdown)


@atexit.register
def _at_exit() -> None:
  """A program whose save failed, and that has not been told, ends with 1."""
  try:
    finish()
  except BaseException:
    traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # Python would end with 0 whatever is raised here
