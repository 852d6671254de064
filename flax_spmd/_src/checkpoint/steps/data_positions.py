"""Data positions: where each process's data iterator was when a step was saved, stored with the step.

A position is one of the data that its process reads, and another mesh may give these data to another process. So the
rows of each process are stored too, and a process gets the position of one that read its rows.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from flax_spmd._src.data.data_shard import rows_of_processes
from flax_spmd._src.data.prefetch import reader_of
from flax_spmd._src.layout import Layout
from flax_spmd._src.mesh import describe
from flax_spmd._src.multihost import exchange, ranges
from flax_spmd._src.text import with_article
from flax_spmd.errors import CheckpointError

_DATA = 'flax_spmd_data'
_ROWS = 'flax_spmd_data_rows'

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
  if data is None:
    return None
  reader = reader_of(data)
  if not hasattr(reader, 'get_state'):
    raise CheckpointError(
      f'data is {with_article(type(reader).__name__)}, without a position to save.\n'
      'Fix: pass an iterator with get_state and set_state, as those of Grain, or leave data out.'
    )
  return _to_text(reader.get_state())


def positions_metadata(position: str | None, layout: Layout) -> dict[str, Any]:
  """The positions of all processes, and their rows, to store with a step. Every process calls this."""
  if position is None:
    return {}
  rows = _rows(layout)
  groups = exchange('data', position)
  by_process = {process: text for processes, text in groups for process in processes}
  return {_DATA: [by_process[process] for process in sorted(by_process)], _ROWS: rows}


def _rows(layout: Layout) -> list[str]:
  """The rows of a batch that each process reads, as text: those of the name 'batch'.

  A table without this name leaves them open. Processes then read the same rows if they have the same devices of the
  same mesh.
  """
  mesh, count = layout.mesh, jax.process_count()
  if count == 1:
    return ['rows 0-1']
  if not isinstance(mesh, Mesh):
    return []
  if 'batch' in layout.rules.by_name:
    batch = jax.ShapeDtypeStruct((mesh.size,), np.float32)
    return [f'rows {rows}' for rows in rows_of_processes(layout.sharding(batch, ('batch',)))]
  owners = [device.process_index for device in mesh.devices.flat]
  return [
    f'the rows of devices {ranges([index for index, owner in enumerate(owners) if owner == process])} of {describe(mesh)}'
    for process in range(count)
  ]


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
  data: DataIterator,
  stored: Mapping[str, Any],
  path: epath.Path,
  merged: MergedPositions | None,
  layout: Layout,
) -> None:
  """Moves an iterator to this process's position.

  Args:
    data: the iterator.
    stored: the JSON values that were stored with a step.
    path: path of the step, for error texts.
    merged: function from the positions of all processes that saved to the one of this process, if none of them
      read its rows.
    layout: layout of this job.
  """
  saved = stored.get(_DATA)
  if saved is None:
    raise CheckpointError(
      f'Checkpoint {path} has no position of a data iterator.\n'
      'Fix: pass data= to every save; or leave it out here, and set the iterator yourself.'
    )
  states, me = list(map(_from_text, saved)), jax.process_index()
  read, mine = stored.get(_ROWS), _rows(layout)[me : me + 1]
  if read is None:  # written by an earlier version
    readers = [me] if len(states) == jax.process_count() else []
  else:
    readers = [process for process, rows in enumerate(read) if [rows] == mine]
  if readers:
    state = states[me if me in readers else readers[0]]
  elif merged is not None:
    state = merged(states)
  else:
    raise CheckpointError(f'{_difference(path, len(states), read, mine)}\n{_FIX}')
  reader_of(data).set_state(state)


def _difference(path: epath.Path, saved: int, read: list[str] | None, mine: list[str]) -> str:
  if saved != jax.process_count() or read is None:
    return (
      f'The number of processes differs: checkpoint {path} has data iterator positions for {saved}, '
      f'this job has {jax.process_count()}, which read other parts of the data.'
    )
  return (
    f'Processes read other parts of the data than those that wrote checkpoint {path}: '
    f'process {jax.process_index()} reads {"".join(mine) or "no rows"}; '
    f'{"; ".join(f"process {process} read {rows}" for process, rows in enumerate(read))}.'
  )


_FIX = (
  'Fix: pass data_from=, a function from the list of their positions to the one of this process; '
  'lambda states: states[0] where a position counts global batches.'
)


def _from_text(text: str) -> Any:
  state = json.loads(text)
  return base64.b64decode(state['bytes']) if 'bytes' in state else state['json']
