"""Data positions: where each process's data iterator was when a step was saved, stored with the step."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import jax
from etils import epath

from flax_spmd._src.data.prefetch import reader_of
from flax_spmd._src.multihost import CALLS, TIMEOUT, exchange
from flax_spmd.errors import CheckpointError

_DATA = 'flax_spmd_data'

MergedPositions: TypeAlias = Callable[[list[Any]], Any]


class DataIterator(Protocol):
  """An iterator over data whose position can be saved, as those of Grain."""

  def get_state(self) -> Any:
    """Returns the iterator's position, as bytes or a JSON value."""
    ...

  def set_state(self, state: Any) -> None:
    """Moves the iterator to a position."""
    ...


def position_of(data: DataIterator | None) -> str | None:
  """The position of this process's iterator, as text."""
  return None if data is None else _to_text(reader_of(data).get_state())


def positions_metadata(position: str | None) -> dict[str, Any]:
  """The positions of all processes, to store with a step. Every process calls this."""
  if position is None:
    return {}
  if jax.process_count() == 1:
    return {_DATA: [position]}
  groups = exchange('data', tuple(range(jax.process_count())), position, CALLS, TIMEOUT)
  by_process = {process: text for processes, text in groups for process in processes}
  return {_DATA: [by_process[process] for process in sorted(by_process)]}


def _to_text(state: Any) -> str:
  if isinstance(state, bytes):
    return json.dumps({'bytes': base64.b64encode(state).decode()})
  try:
    return json.dumps({'json': state})
  except TypeError as error:
    raise CheckpointError(
      f'The state of the data iterator cannot be saved: {error}.\n'
      'Fix: let get_state return bytes or a JSON value.'
    ) from error


def move(
  data: DataIterator, stored: Mapping[str, Any], path: epath.Path, merged: MergedPositions | None
) -> None:
  """Moves an iterator to this process's position.

  Args:
    data: the iterator.
    stored: the JSON values that were stored with a step.
    path: path of the step, for error texts.
    merged: function from the positions of all processes that saved to the one of this process, for jobs of
      another number of processes.
  """
  saved = stored.get(_DATA)
  if saved is None:
    raise CheckpointError(
      f'Checkpoint {path} has no position of a data iterator.\n'
      'Fix: pass data= to every save; or leave it out here, and set the iterator yourself.'
    )
  states = list(map(_from_text, saved))
  if len(states) == jax.process_count():
    state = states[jax.process_index()]
  elif merged is not None:
    state = merged(states)
  else:
    raise CheckpointError(
      f'The number of processes differs: checkpoint {path} has data iterator positions for {len(saved)}, '
      f'this job has {jax.process_count()}, which read other parts of the data.\n'
      'Fix: pass data_from=, a function from the list of their positions to the one of this process; '
      'lambda states: states[0] where a position counts global batches.'
    )
  reader_of(data).set_state(state)


def _from_text(text: str) -> Any:
  state = json.loads(text)
  return base64.b64decode(state['bytes']) if 'bytes' in state else state['json']
