"""Prefetch: load and transfer the next batches while the devices compute.

JAX dispatches steps asynchronously, so devices are idle only while the host loads, converts and transfers
the next batch. `prefetch` does that ahead of time in one thread.

    for batch in prefetch(batches, lambda batch: layout.shard(batch, ('batch', None))):
      state = step(state, batch)

At most `size` batches are on the devices at any time, besides the one in use.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import inspect
import operator
import queue
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from flax_spmd._src.data.batch_source import NO_BATCH, BatchSource, check_batches
from flax_spmd._src.progress import BatchProgress, batch_progress
from flax_spmd._src.public import public
from flax_spmd._src.text import value_text
from flax_spmd.errors import LayoutError

if TYPE_CHECKING:
  from rich.progress import Progress

Batch = TypeVar('Batch')
Placed = TypeVar('Placed')


@public('flax_spmd')
def prefetch(
  batches: Iterable[Batch],
  place: Callable[[Batch], Placed],
  size: int = 2,
  progress: bool | str | Progress | None = None,
  total: int | None = None,
) -> PrefetchedBatches[Placed]:
  """Yields `place(batch)` for each batch, while a thread prepares the next ones.

  Both `batches` and `place` run in that thread, with a copy of the caller's `contextvars`. Settings that
  JAX stores per thread do not carry over: `jax.set_mesh`, `with layout:`, `jax.default_device`.
  `layout.shard` and functions from `layout.jit` do not depend on them.

  An exception in the thread is raised at the batch that it prevented, with its traceback. Early exit
  (`break`, `close()`, garbage collection) waits for the batch in progress, ends the thread, and closes the
  iterator over `batches` if it has a `close` method.

  An iterator with `get_state` and `set_state`, such as one of Grain, is ahead of the batch in use. Early exit moves
  it back to that batch instead of closing it. The generator has both methods, too: its state is the position after
  the batch in use. `checkpoint.Manager` saves this position for either of them.

  Args:
    batches: iterable of batches, finite or infinite.
    place: function from a batch to the yielded value; starts the transfer to the devices.
    size: number of batches to keep ready.
    progress: progress bar with the batches yielded, their rate, and the total if known. True, a title, or
      a `rich.progress.Progress` to add a task to (its columns may show `task.fields[rate]`), since a
      terminal can show only one live display.
    total: number of batches, for the bar; default: `len(batches)`, if defined.

  Returns:
    A generator, with `get_state` and `set_state`. It loads nothing before the first `next`.

  Raises:
    LayoutError: `batches` cannot be iterated over, `size` is no positive integer, or `place` no function.

  Example:
    >>> from flax_spmd import prefetch
    >>> layout = Layout({'data': 8}, (('batch', 'data'),))
    >>> batches = (np.full((8, 4), step) for step in range(3))
    >>> ready = prefetch(batches, lambda batch: layout.shard(batch, ('batch', None)))
    >>> [(int(batch.sum()), batch.sharding.spec) for batch in ready]
    [(0, P('data', None)), (32, P('data', None)), (64, P('data', None))]
  """
  check_batches(batches, 'prefetch')
  if size < 1:
    raise LayoutError(
      f'prefetch cannot keep {value_text(size)} batches ready.\n'
      'Fix: pass a whole number of 1 or more; with 2, one batch is ready while the next one loads.'
    )
  if not callable(place):
    raise LayoutError(
      f'prefetch has a {type(place).__name__} in place of a function.\n'
      "Fix: pass a function of a batch, such as lambda batch: layout.shard(batch, ('batch', None))."
    )
  if total is None:
    hint = operator.length_hint(batches, -1)
    total = None if hint < 0 else hint
  context = contextvars.copy_context()
  source = BatchSource(batches)

  def start() -> Generator[Placed, None, None]:
    return _ahead(_Worker(source, place, int(size)), context.copy(), batch_progress(progress, total))

  return PrefetchedBatches(source, start)


class PrefetchedBatches(Generator[Placed, None, None]):
  """The generator of `prefetch`, which can be moved to another position.

  Args:
    source: where the batches come from.
    start: function that makes a generator with a new thread.
  """

  def __init__(self, source: BatchSource, start: Callable[[], Generator[Placed, None, None]]):
    self._source = source
    self._start = start
    self._ready = start()
    self.reader: threading.Thread | None = None  # the last one that has read a batch
    _open.add(self)

  def __next__(self) -> Placed:
    self.reader = threading.current_thread()
    return next(self._ready)

  def send(self, value: None) -> Placed:
    """The next batch."""
    self.reader = threading.current_thread()
    return self._ready.send(value)

  def throw(self, *error: Any) -> Placed:
    """Ends the thread, and raises the error."""
    return self._ready.throw(*error)

  def close(self) -> None:
    """Ends the thread."""
    self._ready.close()

  @property
  def has_positions(self) -> bool:
    """Whether the iterator over the batches has `get_state` and `set_state`."""
    return self._source.has_positions

  def get_state(self) -> Any:
    """Returns the position after the batch in use.

    Raises:
      CheckpointError: the iterator over the batches has no positions.
    """
    return self._source.position()

  def set_state(self, state: Any) -> None:
    """Moves to a position, and drops the batches that are ready.

    Raises:
      CheckpointError: the iterator over the batches has no positions.
    """
    self.close()
    self._source.move(state)
    self._ready = self._start()

  def reads_from(self, iterator: object) -> bool:
    """Whether the thread reads from this iterator now."""
    return self._source.is_of(iterator) and inspect.getgeneratorstate(self._ready) in (
      inspect.GEN_SUSPENDED,
      inspect.GEN_RUNNING,
    )


def reader_of(iterator: Any) -> Any:
  """The open `prefetch` that reads from an iterator, through others or not; without one the iterator itself."""
  for ready in list(_open):
    if ready.reads_from(iterator):
      return reader_of(ready)
  return iterator


def _ahead(
  worker: _Worker, context: contextvars.Context, bar: BatchProgress
) -> Generator[Any, None, None]:
  thread = threading.Thread(
    target=context.run, args=(worker.run,), name='flax_spmd.prefetch', daemon=True
  )
  thread.start()
  _running[thread] = worker
  try:
    with bar as advance:
      for placed in worker.results():
        advance()
        yield placed
        del placed  # else it would stay alive while waiting for the next one
  finally:
    worker.stop()
    # A source that blocks forever must not keep the program from exiting.
    exiting = not threading.main_thread().is_alive()
    thread.join(_PATIENCE if exiting else None)
    if not exiting:
      worker.source.end()


_PATIENCE = 1.0  # seconds for a source, at the end of the program
_open: weakref.WeakSet[PrefetchedBatches[Any]] = weakref.WeakSet()
_running: weakref.WeakKeyDictionary[threading.Thread, _Worker] = weakref.WeakKeyDictionary()


@atexit.register
def _close_all() -> None:
  """Closes the generators that a program left open, before JAX and the interpreter shut down.

  Another thread, such as that of an outer `prefetch`, may be inside of a generator. It comes to its end there, and is
  waited for: if it released a batch while the interpreter shuts down, it would end the process with SIGABRT.
  """
  running, deadline = dict(_running), time.monotonic() + _PATIENCE
  for worker in running.values():
    worker.stop()
  threads = set(running)
  for ready in list(_open):
    with contextlib.suppress(ValueError):  # it is already executing
      ready.close()
    if ready.reader is not None:
      threads.add(ready.reader)
  for thread in threads - {threading.current_thread()}:
    thread.join(max(0.0, deadline - time.monotonic()))


class _QueueItem(NamedTuple):
  """An item of the queue between the threads: a batch, or the end, possibly with an error."""

  placed: Any = None
  position: Any = None
  ended: bool = False
  error: BaseException | None = None


class _Worker:
  """Prepares batches in one thread (`run`) for another one (`results`, `stop`)."""

  def __init__(self, source: BatchSource, place: Callable[[Any], Any], size: int):
    self.source = source
    self._place = place
    self._queue: queue.SimpleQueue[_QueueItem] = queue.SimpleQueue()
    # Acquired before a batch is prepared, released when it is handed over. A bounded queue would let the
    # thread prepare, and hold, one more batch while it waits to put it there.
    self._free = threading.Semaphore(size)
    self._stopped = False

  def run(self) -> None:
    """Prepares batches until the source ends, an exception is raised, or `stop` is called."""
    try:
      self._prepare_all()
    except BaseException as error:  # the other thread raises it
      self._queue.put(_QueueItem(ended=True, error=error))
    else:
      self._queue.put(_QueueItem(ended=True))

  def _prepare_all(self) -> None:
    try:
      self.source.begin()
      while self._may_continue():
        batch, position = self.source.read()
        if batch is NO_BATCH:
          return
        self._queue.put(_QueueItem(self._place(batch), position))
        del batch
    finally:
      self.source.close()

  def _may_continue(self) -> bool:
    self._free.acquire()
    return not self._stopped

  def results(self) -> Iterator[Any]:
    """The batches in order; raises the thread's exception at the end, if there was one."""
    while not (item := self._queue.get()).ended:
      self._free.release()
      self.source.use(item.position)
      yield item.placed
      del item
    if item.error is not None:
      try:
        raise item.error
      finally:
        del item  # its traceback refers to this frame; the cycle would keep the batches alive

  def stop(self) -> None:
    """Ends the preparation of batches; may be called again."""
    self._stopped = True
    self._free.release()
