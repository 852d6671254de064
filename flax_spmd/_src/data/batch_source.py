"""Batch source: an iterator over batches that a thread reads ahead from, and the position of the batches in use."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable
from typing import Any

from flax_spmd._src.text import with_article
from flax_spmd.errors import CheckpointError, LayoutError

NO_BATCH = object()
_OF_ITERATOR = object()


def check_batches(batches: Any, by: str) -> None:
  """Raises `LayoutError` for batches that cannot be iterated over, such as a function that makes them."""
  if not (hasattr(batches, '__iter__') or hasattr(batches, '__getitem__')):
    raise LayoutError(
      f'{by} has {with_article(type(batches).__name__)} in place of batches.\n'
      'Fix: pass an iterable, such as a list, a generator, or a data loader.'
    )


class BatchSource:
  """The iterator over some batches; made once, when it is first needed.

  An iterator with `get_state` and `set_state` has positions. One that the caller made stays the caller's: it is not
  closed, but moved back to the batches in use.
  """

  def __init__(self, batches: Iterable[Any]):
    self._batches = batches
    self._made: Any = None
    self._position: Any = _OF_ITERATOR  # after the last batch in use, while a thread reads ahead
    self._unused = 0

  @property
  def has_positions(self) -> bool:
    """Whether the iterator has positions."""
    return has_positions(self._iterator())

  def is_of(self, iterator: object) -> bool:
    """Whether the batches come from this very iterator, through `even_batches` or not."""
    reads_from = getattr(self._batches, 'reads_from', None)
    return self._batches is iterator or (callable(reads_from) and bool(reads_from(iterator)))

  def begin(self) -> None:
    """Remembers the position where the thread begins to read."""
    self._position = self._own_position()

  def read(self) -> tuple[Any, Any]:
    """The next batch and the position after it; `NO_BATCH` at the end."""
    batch = next(self._iterator(), NO_BATCH)
    if batch is NO_BATCH:
      return NO_BATCH, None
    self._unused += 1
    return batch, self._own_position()

  def use(self, position: Any) -> None:
    """Remembers the position after the batch that is in use now."""
    self._position = position
    self._unused -= 1

  def close(self) -> None:
    """Closes the iterator, unless it is the caller's and has positions."""
    close = getattr(self._made, 'close', None)
    if callable(close) and (isinstance(self._made, Generator) or not self._is_of_the_caller()):
      close()

  def end(self) -> None:
    """Moves an iterator of the caller back to the batches in use, after the thread has ended."""
    if self._is_of_the_caller():
      position, self._position = self._position, _OF_ITERATOR
      if self._unused:
        self._batches.set_state(position)  # pyright: ignore[reportAttributeAccessIssue]
    self._unused = 0

  def position(self) -> Any:
    """The position after the last batch in use.

    Raises:
      CheckpointError: the iterator has no positions.
    """
    self._check_positions()
    return self._own_position() if self._position is _OF_ITERATOR else self._position

  def move(self, position: Any) -> None:
    """Moves the iterator to a position.

    Raises:
      CheckpointError: the iterator has no positions.
    """
    self._check_positions()
    self._position = _OF_ITERATOR
    self._iterator().set_state(position)

  def _iterator(self) -> Any:
    if self._made is None:
      self._made = iter(self._batches)
    return self._made

  def _own_position(self) -> Any:
    """The position of the iterator itself; a copy, which reading does not change. None without positions."""
    return copy.deepcopy(self._iterator().get_state()) if self.has_positions else None

  def _is_of_the_caller(self) -> bool:
    return self._made is self._batches and has_positions(self._batches)

  def _check_positions(self) -> None:
    if not self.has_positions:
      raise CheckpointError(
        f'The batches of prefetch have no position: they come from a {type(self._made).__name__}, which has no '
        'get_state and set_state.\n'
        'Fix: give prefetch an iterator that has both, as those of Grain have, and do all else in place.'
      )


def has_positions(iterator: Any) -> bool:
  """Whether an iterator has `get_state` and `set_state`; for a `prefetch`, whether its source has."""
  methods = (getattr(iterator, name, None) for name in ('get_state', 'set_state'))
  return all(map(callable, methods)) and getattr(iterator, 'has_positions', True)
