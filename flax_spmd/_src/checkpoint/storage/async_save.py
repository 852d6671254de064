"""Asynchronous saves: one at a time, in the background, with errors that cannot go unnoticed.

The next save or restore waits for the save in progress. Its error, if `result` has not raised it yet, is
raised there, or else at the end of the program.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # registers its exit hook, which must come before ours below
import contextlib
import contextvars
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import jax
from etils import epath

from flax_spmd import errors
from flax_spmd._src.checkpoint.storage.byte_progress import ByteProgress
from flax_spmd._src.checkpoint.storage.calls_in_flight import end_calls, in_flight
from flax_spmd._src.checkpoint.storage.contents import PendingRecord
from flax_spmd._src.checkpoint.storage.disk_space import space_in_errors
from flax_spmd._src.checkpoint.storage.generations import Claim
from flax_spmd._src.checkpoint.storage.heartbeat import SILENCE, Heartbeat
from flax_spmd._src.checkpoint.storage.record import Record
from flax_spmd._src.checkpoint.storage.store import open_store
from flax_spmd._src.joint_call import Failure, first_line, in_front
from flax_spmd._src.multihost import CALLS, exchange, named
from flax_spmd._src.public import public
from flax_spmd.errors import CheckpointError

_POLL = 0.5  # seconds
_SETTLE = 5.0  # seconds; a call in an exchange ends sooner, one in the storage may not
_COMMIT = 'commit'  # topic of the exchanges in the background, beside those of the main thread


class Response(Protocol):
  """Orbax's handle of a save in the background."""

  def result(self, timeout: float | None = None) -> Any:
    """Waits for the save; raises its error."""
    ...


@public('flax_spmd.checkpoint')
class AsyncSave:
  """A save in progress in the background, as returned by `save_async`.

  Attributes:
    path: path of the checkpoint.

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
    self._reported = False
    self._ended = threading.Event()
    self._thread = threading.Thread(
      target=self._run, args=(work,), name=f'flax_spmd save {path.name}', daemon=False
    )
    self._thread.start()

  def _run(self, work: Any) -> None:
    try:
      work()
    except BaseException as error:
      self._error = error
    finally:
      self._ended.set()

  def done(self) -> bool:
    """Whether the save has ended, successfully or not."""
    return self._ended.is_set()

  def error(self) -> BaseException | None:
    """The error of a save that has ended, without raising it; None if there was none."""
    return self._error if self.done() else None

  def result(self, timeout: float | None = None) -> None:
    """Waits until the checkpoint is complete.

    Args:
      timeout: most seconds to wait; default: no limit.

    Raises:
      TimeoutError: the save is still in progress.
      CheckpointError: the save failed. The path keeps its previous contents.
    """
    with in_flight():
      if not self._ended.wait(timeout):
        raise TimeoutError(f'The save to {self.path} is still in progress.')
      self._thread.join()
    self._reported = True
    if self._error is not None:
      raise self._error


_last: AsyncSave | None = None


def finish() -> None:
  """Waits for the save in progress; raises the error of the last save unless `result` has done so."""
  global _last
  saving = _last
  if saving is None:
    return
  try:
    if not saving._reported:
      saving.result()
  finally:
    if saving.done() and _last is saving:  # else the wait was interrupted, and the save goes on
      _last = None


def claim(path: epath.Path, overwrite: bool, durable: bool) -> Claim | NonWriter:
  """The right to write to a path. The first process takes it for all processes of the job.

  Raises:
    CheckpointError: the first process cannot take it, or the processes pass different paths. Every process raises the error.
  """
  if jax.process_count() == 1:
    return Claim(path, overwrite, durable)
  _check_same_path(path)
  held: list[Claim] = []

  def claimed() -> str:
    held.append(Claim(path, overwrite, durable))
    return os.fspath(held[0].new)

  try:
    new = in_first(claimed)
  except BaseException:  # another process has not arrived
    for taken in held:
      taken.release()
    raise
  return held[0] if held else NonWriter(path, epath.Path(new), durable)


def _check_same_path(path: epath.Path) -> None:
  """Raises if processes save to different paths: the first one's would be written, and the others' would not."""
  groups = exchange('path', os.fspath(path))
  if len(groups) > 1:
    each = ', '.join(f'{text} in {named(processes)}' for processes, text in groups)
    raise CheckpointError(
      f'The processes save to different paths: {each}.\n'
      f'Fix: pass the same path on every process; {CALLS}.'
    )


class NonWriter:
  """Stands in for the claim in processes other than the first, which commits and releases for all.

  Attributes:
    path: path of the checkpoint.
    new: folder of the generation to write.
  """

  def __init__(self, path: epath.Path, new: epath.Path, durable: bool):
    self.path, self.new, self._durable = path, new, durable

  def sync(self) -> None:
    """Makes the files that this process has written durable."""
    if self._durable:
      store = open_store(self.new)
      folders = {_own_folder(name, jax.process_index()) for name in store.files()}
      for folder in filter(None, folders):
        store.sync(folder)

  def follow(self) -> None:
    """Does nothing: the first process takes digests."""

  def require_lease(self) -> None:
    """Does nothing: the first process has the lease."""

  def commit(self, record: Record, metadata: Mapping[str, Any]) -> None:
    """Does nothing: the first process commits."""

  def release(self) -> None:
    """Does nothing: the first process releases the path."""


def _own_folder(name: str, process: int) -> str | None:
  """The folder with a file that Orbax wrote in this process; None for a file of another one.

  Such files are in folders `ocdbt.process_1`, or are named `process_1`.
  """
  *folders, file = name.split('/')
  for depth, folder in enumerate(folders, start=1):
    if folder.endswith(f'process_{process}'):
      return '/'.join(folders[:depth])
  return '/'.join(folders) if file == f'process_{process}' else None


def in_first(call: Callable[[], Any], topic: str = 'checkpoint') -> Any:
  """Calls a function in the first process, and returns its JSON value on every process.

  Args:
    call: function to call.
    topic: the key of this kind of call. Threads that run at the same time need one each.

  Raises:
    CheckpointError: the call failed. Every process raises the error.
  """
  if jax.process_count() == 1:
    return call()
  message: dict[str, Any] = {}
  if jax.process_index() == 0:
    try:
      message = {'value': call()}
    except Exception as error:
      message = {'error': type(error).__name__, 'text': str(error)}
  groups = exchange(topic, json.dumps(message))
  received = json.loads(next(text for processes, text in groups if 0 in processes))
  _raise_error(received)
  return received['value']


def _raise_error(message: dict[str, str]) -> None:
  if 'error' in message:
    raise getattr(errors, message['error'], CheckpointError)(message['text'])


Result = TypeVar('Result')


def watched(call: Callable[[], Result], path: epath.Path, heartbeat: Heartbeat) -> Result:
  """Calls a function that waits for other processes; raises an error as soon as one of them has died.

  In a job of several processes, it runs in a thread, since what it waits for may never come.

  Args:
    call: function to call.
    path: path of the checkpoint that is being saved.
    heartbeat: heartbeat of the save; stopped if there is an error.

  Raises:
    CheckpointError: another process has died, or failed; or the call did.
  """
  if jax.process_count() == 1:
    try:
      return call()
    except CheckpointError:
      raise
    except (OSError, RuntimeError) as error:
      if isinstance(error, RuntimeError) and not _NO_THREAD.search(str(error)):
        raise
      failure = save_error(error, path)
      raise failure from failure.__cause__
  results: list[Result] = []
  with heartbeat.call.entered(), in_front():
    background = _in_background(lambda: results.append(call()))
  try:
    wait_for(background, path, heartbeat)
  except BaseException as error:
    heartbeat.stop(error)
    if not heartbeat.gone():  # it has nothing to wait for any more, and has to hold no path
      concurrent.futures.wait([background], _SETTLE)
    raise
  heartbeat.call.leave()
  return results[0]


def start(
  response: Response,
  held: Claim | NonWriter,
  progress: ByteProgress,
  size: int,
  heartbeat: Heartbeat,
  record: PendingRecord,
  metadata: Mapping[str, Any],
  after: Callable[[], object],
) -> AsyncSave:
  """Continues a save in the background: waits for Orbax, completes the record, and commits the checkpoint.

  Args:
    response: Orbax's handle of the save.
    held: right to write to the path; released at the end of a save that has started.
    progress: progress bar; closed at the end.
    size: bytes of the state.
    heartbeat: heartbeat of the save; stopped at the end.
    record: record of the contents, whose checksums are computed while Orbax writes.
    metadata: JSON values to store beside the record.
    after: function called after the commit, in the first process.
  """
  global _last

  def work() -> None:
    failure: BaseException | None = None
    try:
      wait_for(response, held.path, heartbeat)
      wait_for(computing, held.path, heartbeat)
      with heartbeat.call.entered():
        committed = _committed(lambda: commit(held, record, metadata, after))
      wait_for(committed, held.path, heartbeat)
      heartbeat.call.forget_earlier()
    except BaseException as error:
      failure = error
      held.require_lease()
      if isinstance(error, RuntimeError):
        failure = save_error(error, held.path)
        raise failure from failure.__cause__
      raise
    finally:
      heartbeat.stop(failure)
      progress.close(complete=failure is None)
      held.release()

  def explained() -> None:
    with space_in_errors(held.path, size):
      work()

  try:
    computing = _in_background(record.compute)
    _last = AsyncSave(held.path, explained)
  except BaseException:  # there may be no thread left
    with contextlib.suppress(Exception):
      response.result()  # the caller releases the path, to which nothing may be written then
    raise
  return _last


def _in_background(call: Callable[[], object]) -> concurrent.futures.Future[object]:
  """The future of a call in a daemon thread."""
  future: concurrent.futures.Future[object] = concurrent.futures.Future()

  def run() -> None:
    try:
      future.set_result(call())
    except BaseException as error:
      future.set_exception(error)

  context = contextvars.copy_context()
  threading.Thread(target=context.run, args=(run,), name='flax_spmd call', daemon=True).start()
  return future


def _committed(call: Callable[[], None]) -> Response:
  """Commits a save. In a job of several processes, one may have died: a daemon thread does it."""
  if jax.process_count() > 1:
    with contextlib.suppress(RuntimeError):  # no thread can be started
      return _in_background(call)
  done: concurrent.futures.Future[None] = concurrent.futures.Future()
  done.set_result(call())
  return done


def commit(
  held: Claim | NonWriter,
  record: PendingRecord,
  metadata: Mapping[str, Any],
  after: Callable[[], object],
) -> None:
  """Makes the new checkpoint current, and calls `after`. No process returns before that is done."""
  completed = record.complete()
  _in_all(held.sync)

  def committed() -> None:
    held.commit(completed, metadata)
    after()

  in_first(committed, _COMMIT)


def _in_all(call: Callable[[], None]) -> None:
  """Waits until `call` has returned in every process; if it raises in one, all of them raise the error."""
  if jax.process_count() == 1:
    call()
    return
  message = {}
  try:
    call()
  except Exception as error:
    message = {'error': type(error).__name__, 'text': str(error)}
  for _, text in exchange(_COMMIT, json.dumps(message)):
    _raise_error(json.loads(text))


_UNCHANGED = 'the path keeps its previous contents'


def wait_for(response: Response, path: epath.Path, heartbeat: Heartbeat) -> None:
  """Waits for a response while all processes are alive.

  Raises:
    CheckpointError: the save failed here or in another process, or another process died.
  """
  failed_before = None
  while True:
    began = time.monotonic()
    try:
      response.result(timeout=_POLL)
      return
    except TimeoutError as error:
      if time.monotonic() - began < _POLL / 2:  # of the storage: a call that has ended raises at once
        raise save_error(error, path) from error
      # an error of another process is raised at the second look: this process's own may be about to come
      failed, failed_before = failed_before, heartbeat.failure
      if failed:
        raise error_elsewhere(path, failed) from error
      gone = heartbeat.gone()
      if gone:
        raise CheckpointError(
          f'{named(gone).capitalize()} sent no heartbeat for {SILENCE:g} s while {path} was being saved. '
          'A checkpoint at the path is complete: it is the previous one or this one.\n'
          'Fix: start the job again from the last checkpoint.'
        ) from error
    except errors.FlaxSpmdError:
      raise
    except Exception as error:  # clients of buckets have their own classes
      failure = save_error(error, path)
      raise failure from failure.__cause__


def error_elsewhere(path: Any, failure: Failure) -> CheckpointError:
  """The error of a save that failed in another process."""
  return CheckpointError(
    f'The save to {path} failed in process {failure.process}: {failure.reason}.\n'
    f'Fix: see the error of that process; {_UNCHANGED}.'
  )


def save_error(error: Exception, path: epath.Path) -> CheckpointError:
  """The error of a save, for one of Orbax or of a client of a bucket, or of Python, which starts no threads at its end.

  It has that error as its cause, except at the end of the program, which is cause enough.
  """
  if isinstance(error, RuntimeError) and 'shutdown' in str(error):
    return CheckpointError(
      f'The program ended before {path} was saved.\n'
      f'Fix: call result() of the last save before the program ends; {_UNCHANGED}.'
    )
  failure = CheckpointError(
    f'The save to {path} failed: {first_line(error)}.\nFix: see the error above; {_UNCHANGED}.'
  )
  failure.__cause__ = error
  return failure


_NO_THREAD = re.compile('new thread|shutdown')


def _before_shutdown() -> None:
  """Waits for the save in progress while Orbax can still continue it, and lets no daemon thread begin another.

  Python 3.12.0 and 3.12.1 start no threads while a program ends. If Orbax needs one, the save fails, and `_at_exit` reports
  it.
  """
  end_calls()
  if _last is not None:
    _last._ended.wait()


def _forget() -> None:
  """Forgets the save in progress, in a forked process, which has none of the threads that go on with it."""
  global _last
  _last = None


if hasattr(os, 'register_at_fork'):
  os.register_at_fork(after_in_child=_forget)

# Hooks of `atexit` run too late: by then executors accept no work. Those that concurrent.futures uses run
# earlier, the last registered one first.
getattr(threading, '_register_atexit', atexit.register)(_before_shutdown)


@atexit.register
def _at_exit() -> None:
  """Ends the program with exit code 1 if a save failed and its error was never raised."""
  try:
    finish()
  except BaseException:
    traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # an exception here would not change Python's exit code
