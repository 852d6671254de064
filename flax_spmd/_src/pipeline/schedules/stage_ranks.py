"""Placing: which rank a stage is on.

    loop     0 1 2 3 0 1 2 3     around the ranks, as interleaved schedules have it
    v        0 1 2 3 3 2 1 0     there and back: the first rank has the first stage and the last

In a V the loss is computed where the model begins, and results change ranks less often.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Literal, TypeAlias

from flax_spmd.errors import PipelineError, did_you_mean

Placement: TypeAlias = Literal['loop', 'v'] | Sequence[int]


def placed(ranks: int, chunks: int, placement: Placement) -> tuple[int, ...]:
  """Per stage, the rank that it is on.

  Raises:
    PipelineError: there is no such placement, or it names a rank that is not there.

  Example:
    >>> placed(3, 2, 'loop'), placed(3, 2, 'v')
    ((0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0))
  """
  if isinstance(placement, str):
    if placement not in ('loop', 'v'):
      guess = did_you_mean(placement, ('loop', 'v'))
      raise PipelineError(
        f"placement={placement!r} is unknown.{guess}\nFix: use 'loop', 'v', or the rank of every stage."
      )
    there = tuple(range(ranks))
    back = there[::-1] if placement == 'v' else there
    return tuple(rank for chunk in range(chunks) for rank in (back if chunk % 2 else there))
  idle = sorted(set(range(ranks)) - set(placement))
  strange = sorted(set(placement) - set(range(ranks)))
  if idle or strange:
    what = f'has no stage on rank {idle[0]}' if idle else f'names rank {strange[0]}'
    raise PipelineError(
      f'placement={tuple(placement)} {what}, and there are {ranks} ranks.\n'
      f'Fix: name every rank from 0 to {ranks - 1}.'
    )
  return tuple(placement)


def at_least_one(number: int, what: str) -> int:
  """The number, if it is one and no smaller than 1.

  Raises:
    PipelineError: it is not.
  """
  try:
    if operator.index(number) >= 1 and not isinstance(number, bool):
      return number
  except TypeError:
    pass
  raise PipelineError(f'{what} is {number!r}.\nFix: pass a whole number from 1 up.')
