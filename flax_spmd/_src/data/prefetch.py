"""Prefetch: the next batches are loaded and placed while the devices are at work on this one.

A step is dispatched and returns at once; what makes devices wait is the host, which loads, converts
and transfers a batch only when it is asked for. Here one thread does that ahead of time.

    for batch in prefetch(batches, lambda batch: layout.shard(batch, ('batch', None))):
      state = step(state, batch)

At any time at most `size` batches lie ready on the devices, besides the one that was handed out.
"""

from __future__ import annotations

import atexit
import contextvars
import operator
import queue
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from flax_spmd._src.progress import BatchProgress, batch_progress
from flax_spmd._src.public_module import set_module
from flax_spmd.errors import LayoutError

if TYPE_CHECKING:
  from rich.progress import Progress

Batch = TypeVar('Batch')
Placed = TypeVar('Placed')


@set_module('flax_spmd')
def prefetch(
  batches: Iterable[Batch],
  place: Callable[[Batch], Placed],
  size: int = 2,
  progress: bool | str | Progress | None = None,
  total: int | None = None,
) -> Generator[Placed, None, None]:
  """Yields `place(batch)` for each batch, and prepares the next ones in a thread meanwhile.

  Both `batches` and `place` run in that thread, in a copy of the caller's context: values of
  `contextvars` are as they were at the call. What JAX keeps per thread is not: `jax.set_mesh`,
  `with layout:`, `jax.default_device`. `layout.shard` and functions made by `layout.jit` need none
  of it.

  An exception reaches the caller in the place of the batch that it prevented, with its traceback.
  Leaving early (`break`, `close()`, garbage collection) waits for the batch that is being made,
  ends the thread, and closes the iterator over `batches` if it can be closed.

  Args:
    batches: any iterable, finite or not.
    place: makes of a batch what is yielded, and starts its transfer.
    size: how many batches to keep ready.
    progress: shows a bar with the batches handed out, their rate since the first, and the total if
      it is known. True, or a title; or a `rich.progress.Progress` of your own that gets a task (its
      columns may show `task.fields[rate]`), as only one of these can be live on a terminal.
    total: the number of batches, for the bar; default: `len(batches)`, if it has one.

  Returns:
    A generator. Nothing is loaded before its first batch is asked for.

  Raises:
    LayoutError: `size` is no positive integer.

  Example:
    >>> from flax_spmd import prefetch
    >>> layout = Layout({'data': 8}, (('batch', 'data'),))
    >>> batches = (np.full((8, 4), step) for step in range(3))
    >>> ready = prefetch(batches, lambda batch: layout.shard(batch, ('batch', None)))
    >>> [(int(batch.sum()), batch.sharding.spec) for batch in ready]
    [(0, P('data', None)), (32, P('data', None)), (64, P('data', None))]
  """
  if not isinstance(size, int) or isinstance(size, bool) or size < 1:
    raise LayoutError(
      f'prefetch cannot keep {size!r} batches ready.\n'
      'Fix: give a size of 1 or more; 2 lets one be made while another one waits.'
    )
  if total is None:
    hint = operator.length_hint(batches, -1)
    total = None if hint < 0 else hint
  ready = _ahead(
    _Worker(batches, place, size), contextvars.copy_context(), batch_progress(progress, total)
  )
  _open.add(ready)
  return ready


def _ahead(
  worker: _Worker, context: contextvars.Context, bar: BatchProgress
) -> Generator[Any, None, None]:
  thread = threading.Thread(
    target=context.run, args=(worker.run,), name='flax_spmd.prefetch', daemon=True
  )
  thread.start()
  try:
    with bar as advance:
      for placed in worker.results():
        advance()
        yield placed
        del placed  # or it would be kept while the next one is waited for
  finally:
    worker.stop()
    # At the program's end a source that never comes back must not keep it from ending.
    thread.join(None if threading.main_thread().is_alive() else 1.0)


_open: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
  """Ends what a program left open while JAX and the interpreter still work: later is too late."""
  for ready in list(_open):
    ready.close()


class _Made(NamedTuple):
  """What the thread hands over: a batch, or at the end nothing or an error."""

  placed: Any = None
  ended: bool = False
  error: BaseException | None = None


_NO_BATCH = object()


class _Worker:
  """Makes batches in one thread (`run`) that are used in another one (`results`, `stop`)."""

  def __init__(self, batches: Iterable[Any], place: Callable[[Any], Any], size: int):
    self._batches = batches
    self._place = place
    self._made: queue.SimpleQueue[_Made] = queue.SimpleQueue()
    # Taken before a batch is made and given back when it is handed out. A bounded queue would let
    # one more be made, and held, while the thread waits to put it there.
    self._free = threading.Semaphore(size)
    self._stopped = False

  def run(self) -> None:
    """Makes batches until there are no more, something fails, or `stop` is called."""
    try:
      self._make_all()
    except BaseException as error:  # the other thread raises it
      self._made.put(_Made(ended=True, error=error))
    else:
      self._made.put(_Made(ended=True))

  def _make_all(self) -> None:
    iterator = iter(self._batches)
    try:
      while self._wanted():
        batch = next(iterator, _NO_BATCH)
        if batch is _NO_BATCH:
          return
        self._made.put(_Made(self._place(batch)))
    finally:
      close = getattr(iterator, 'close', None)
      if callable(close):
        close()

  def _wanted(self) -> bool:
    self._free.acquire()
    return not self._stopped

  def results(self) -> Iterator[Any]:
    """The batches in order, then the end: an exception, if there was one."""
    while not (made := self._made.get()).ended:
      self._free.release()
      yield made.placed
      del made
    if made.error is not None:
      try:
        raise made.error
      finally:
        del made  # its traceback has this frame in it: a cycle would keep the batches

  def stop(self) -> None:
    """Makes no more batches; may be called again."""
    self._stopped = True
    self._free.release()


# -- the bar
