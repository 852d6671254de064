"""Even batches: batches of one size, equally many on every process, from loaders that end unevenly.

    for batch, mask in even_batches(loader, shard.local_size(256)):
      loss = step(state, layout.local_to_global((batch, mask), ('batch',)))

The last batch of a data set is short, and processes may end at different batches; a collective step would then
wait for ever. The processes agree before each batch, through the coordination service, in some milliseconds.
"""

from __future__ import annotations

import base64
import itertools
import pickle
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from flax_spmd._src.cycles import check_no_cycles
from flax_spmd._src.data.batch_source import NO_BATCH, check_batches, has_positions
from flax_spmd._src.multihost import CALLS, TIMEOUT, exchange, named
from flax_spmd._src.public import public
from flax_spmd._src.text import value_text
from flax_spmd._src.tree_paths import path_string
from flax_spmd.errors import LayoutError, Problem, raise_problems


@public('flax_spmd')
class EvenBatch(NamedTuple):
  """A batch of full size.

  Attributes:
    batch: tree of arrays with `size` rows each.
    mask: bool array of shape `(size,)`; False for rows that were added.

  Example:
    >>> [(x.tolist(), mask.tolist()) for x, mask in even_batches([np.array([1, 2]), np.array([3])], 2)]
    [([1, 2], [True, True]), ([3, 0], [True, False])]
  """

  batch: Any
  mask: np.ndarray


@public('flax_spmd')
def even_batches(
  batches: Iterable[Any], size: int, last: Literal['pad', 'drop'] = 'pad', timeout: float = TIMEOUT
) -> EvenBatches:
  """Batches of one size, equally many on every process. Every process calls it, with batches of the same structure.

  Args:
    batches: this process's batches: trees of arrays with up to `size` rows (the first dimension) each. Numbers are
      passed on as they are.
    size: number of rows per batch and process; see `DataShard.local_size`.
    last: 'pad': a short batch is filled up with zeros, and a process that ends earlier than others yields
      batches of zeros; the mask marks these rows. 'drop': all processes end where one has no full batch.
    timeout: seconds to wait for the other processes.

  Returns:
    An iterator over `EvenBatch`es. It has the positions of `batches`, if that is an iterator with `get_state`
    and `set_state`, so `prefetch` and `checkpoint.Manager` accept it.

  Raises:
    LayoutError: an argument is invalid, a batch has more rows or arrays of different lengths, or the batches of a process
      raise an error. Every process raises it.

  Example:
    >>> rows = [np.ones((4, 2)), np.ones((3, 2))]
    >>> [int(mask.sum()) for _, mask in even_batches(rows, 4)]
    [4, 3]
    >>> [int(mask.sum()) for _, mask in even_batches(rows, 4, last='drop')]
    [4]
  """
  if last not in ('pad', 'drop'):
    raise LayoutError(f"last={value_text(last)} is not a choice.\nFix: pass 'pad' or 'drop'.")
  check_batches(batches, 'even_batches')
  if size < 1:
    raise LayoutError(
      f'even_batches cannot make batches of {value_text(size)} rows.\nFix: pass a whole number of 1 or more.'
    )
  return EvenBatches(batches, int(size), last, timeout)


_FULL, _SHORT, _END, _NONE, _FAILED = 'full', 'short', 'end', 'end without a batch', 'failed: '
_numbers = itertools.count()  # of the iterators: equal on every process that makes them in one order


class EvenBatches(Iterator[EvenBatch]):
  """The iterator of `even_batches`."""

  def __init__(self, batches: Iterable[Any], size: int, last: str, timeout: float):
    self._batches, self._size, self._last, self._timeout = batches, size, last, timeout
    self._iterator: Any = None
    self._topic = f'even batches {next(_numbers)}'
    self._previous: Any = NO_BATCH
    self._ended = False

  def __next__(self) -> EvenBatch:
    if self._ended:
      raise StopIteration
    self._ended = True  # after an error, too
    batch, rows = self._read()
    state = _FULL if rows == self._size else _SHORT
    if batch is NO_BATCH:
      state = _NONE if self._previous is NO_BATCH else _END
    of_all = self._agreed(state)
    if set(of_all) <= {_END, _NONE} or (self._last == 'drop' and set(of_all) != {_FULL}):
      raise StopIteration
    self._previous = self._previous if batch is NO_BATCH else batch
    if _NONE in of_all:
      self._receive_structure(of_all[_NONE])
    self._ended = False
    filled = jax.tree.map(lambda leaf: _filled(leaf, rows, self._size), self._previous)
    return EvenBatch(filled, np.arange(self._size) < rows)

  @property
  def has_positions(self) -> bool:
    """Whether the iterator over the batches has `get_state` and `set_state`."""
    return has_positions(self._source())

  def get_state(self) -> Any:
    """Returns the position of the batches."""
    return self._source().get_state()

  def set_state(self, state: Any) -> None:
    """Moves the batches to a position."""
    self._source().set_state(state)
    self._ended = False

  def reads_from(self, iterator: object) -> bool:
    """Whether the batches come from this very iterator."""
    return self._batches is iterator

  def _source(self) -> Any:
    if self._iterator is None:
      self._iterator = iter(self._batches)
    return self._iterator

  def _read(self) -> tuple[Any, int]:
    """The next batch and its number of rows; `NO_BATCH` and 0 at the end. The other processes receive its error."""
    try:
      batch = next(self._source(), NO_BATCH)
      return batch, 0 if batch is NO_BATCH else _rows(batch, self._size)
    except Exception as error:
      self._exchanged(f'{_FAILED}{type(error).__name__}: {error}')
      raise

  def _agreed(self, state: str) -> dict[str, list[int]]:
    """The states of all processes, each with its processes.

    Raises:
      LayoutError: the batches of a process raise an error.
    """
    of_all = self._exchanged(state)
    raise_problems(
      [
        Problem(f'The batches of {named(processes)} raised {text.removeprefix(_FAILED)}', _SEE)
        for text, processes in of_all.items()
        if text.startswith(_FAILED)
      ]
    )
    return of_all

  def _receive_structure(self, without: list[int]) -> None:
    """Gives processes that have had no batch, since a resume say, an empty one of another process.

    Raises:
      LayoutError: batches of the others are objects that cannot be pickled.
    """
    texts = [text for text in self._exchanged(_empty_text(self._previous)) if text]
    if not texts:
      text = f'{named(without)}: no batch at all, and those of the other processes cannot be sent.'
      raise_problems([Problem(text, 'use batches of types that pickle supports.')])
    if self._previous is NO_BATCH:
      self._previous = pickle.loads(base64.b64decode(texts[0]))

  def _exchanged(self, state: str) -> dict[str, list[int]]:
    fix = f'{CALLS}, and check which of them is stuck or has exited.'
    groups = exchange(self._topic, state, fix=fix, timeout=self._timeout)
    return {text: processes for processes, text in groups}


_SEE = 'mend the batches of that process; its own error has the traceback.'


def _empty_text(batch: Any) -> str:
  """A batch without its rows, as text; '' if there is none, or if it cannot be pickled."""
  if batch is NO_BATCH:
    return ''
  empty = jax.tree.map(lambda leaf: np.asarray(leaf)[:0] if np.ndim(leaf) else leaf, batch)
  try:
    return base64.b64encode(pickle.dumps(empty)).decode()
  except Exception:  # pickle raises many kinds
    return ''


def _rows(batch: Any, size: int) -> int:
  """The number of rows of a batch.

  Raises:
    LayoutError: its arrays differ in length, or have more than `size` rows.
  """
  check_no_cycles(batch)
  leaves = jax.tree_util.tree_leaves_with_path(batch)
  rows = {path_string(path): np.shape(leaf)[0] for path, leaf in leaves if np.ndim(leaf)}
  fix = 'pass batches whose arrays have one number of rows each, the first dimension.'
  if not rows:
    raise LayoutError(f'A batch has no array with rows.\nFix: {fix}')
  if len(set(rows.values())) > 1:
    raise_problems([Problem(f'{path}: {count} rows.', fix) for path, count in rows.items()])
  count = next(iter(rows.values()))
  if count > size:
    raise LayoutError(
      f'A batch has {count} rows, more than the size of {size}.\n'
      f'Fix: pass size={count}, or let the loader make batches of {size} rows.'
    )
  return count


def _filled(leaf: Any, rows: int, size: int) -> Any:
  """The first rows of an array, and zeros for the others. Numbers as they are."""
  if not np.ndim(leaf) or (rows == size):
    return leaf
  array = np.asarray(leaf)
  filled = np.zeros((size, *array.shape[1:]), array.dtype)
  filled[:rows] = array[:rows]
  return filled
