"""Examinations: what a checkpoint holds after a fault, by restores that are compared with the saved arrays."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np

import flax_spmd as spmd
from faults.known_states import Size, is_state, layout, state_of, target_of
from faults.places import Place
from faults.tally import Harm
from flax_spmd import checkpoint, errors

SLACK = 64 << 10  # bytes of records and heads, beside the arrays


def number_at(path: str, size: Size, target: Any = None, **options: Any) -> int:
  """The number of the state at a path.

  Raises:
    Harm: the restored arrays are those of no state.
    CheckpointError: it cannot be restored.
  """
  if target is None:
    options['layout'] = layout()
  restored = checkpoint.restore(path, target, **options)
  number = int(np.asarray(spmd.unbox(restored)['step']))
  if not is_state(restored, number, size):
    raise Harm(f'SILENTLY WRONG: {path} is restored, but is not state {number}')
  return number


def number_or_none(path: str, size: Size) -> int | None:
  """The number of the state at a path; None if there is no checkpoint.

  Raises:
    Harm: as `number_at`.
    CheckpointError: there is one, which cannot be restored.
  """
  try:
    return number_at(path, size)
  except errors.CheckpointNotFoundError:
    return None


def expect(path: str, size: Size, numbers: Collection[int | None]) -> int | None:
  """The number of the state at a path, one of those given; None stands for no checkpoint.

  Raises:
    Harm: it is another state, or there is an error.
  """
  try:
    number = number_or_none(path, size)
  except errors.CheckpointError as error:
    raise Harm(f'{path} should be one of {list(numbers)}, but: {error}') from error
  if number not in numbers:
    raise Harm(f'{path} should be one of {list(numbers)}, but is {number}')
  return number


class Reading(NamedTuple):
  """What `verify` and `restore` return or report for a checkpoint."""

  found: str | None  # text of the findings or the error of `verify`
  refused: str | None  # text of the error of `restore`


def readings(path: str, size: Size) -> Reading:
  """Verifies a checkpoint and restores it, into a target and by its record alone.

  Raises:
    Harm: a restored state is wrong, or an error is not a CheckpointError.
  """
  found = _text(lambda: '\n'.join(map(str, checkpoint.verify(path))))
  refusals = [
    _text(lambda target=target: number_at(path, size, target) and '')
    for target in (target_of(size), None)
  ]
  if len({refused is None for refused in refusals}) > 1:
    raise Harm(f'with and without a target: {refusals}')
  return Reading(found or None, refusals[0])


def _text(call: Callable[[], Any]) -> str | None:
  try:
    return call() or None
  except errors.CheckpointError as error:
    return str(error)
  except Harm:
    raise
  except Exception as error:
    raise Harm(f'unclear: {type(error).__name__}: {str(error)[:300]}') from error


def expect_agreement(path: str, size: Size) -> Reading:
  """Verifies and restores, which have to agree.

  Raises:
    Harm: they don't, or as `readings`.
  """
  reading = readings(path, size)
  if (reading.found is None) != (reading.refused is None):
    raise Harm(f'verify finds {reading.found!r}, restore refuses with {reading.refused!r}')
  return reading


def save_next(path: str, number: int, size: Size, limit: float = 30.0, **options: Any) -> float:
  """Saves to a path after a fault and restores it; returns the seconds that the save took.

  Raises:
    Harm: it takes longer than the limit, or does not work.
  """
  state, begin = state_of(number, size), time.monotonic()
  try:
    checkpoint.save(path, state, layout=layout(), overwrite=True, **options)
  except errors.CheckpointError as error:
    raise Harm(f'the next save fails: {type(error).__name__}: {error}') from error
  seconds = time.monotonic() - begin
  if seconds > limit:
    raise Harm(f'the next save takes {seconds:.1f} s')
  expect(path, size, {number})
  return seconds


def expect_room(place: Place, path: str, size: Size, states: int) -> None:
  """Compares the bytes below a path with those of some states: litter has to be removed.

  Raises:
    Harm: there are more.
  """
  files = place.files(path)
  room = states * (1.2 * size.bytes + SLACK)
  if sum(files.values()) > room:
    raise Harm(f'{sum(files.values())} bytes are left below {path}, of {states} states: {list(files)}')
