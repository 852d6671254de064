"""Stage ranks: the rank that each stage runs on.

    loop     0 1 2 3 0 1 2 3     round-robin, as in interleaved schedules
    v        0 1 2 3 3 2 1 0     down and up again: rank 0 has the first stage and the last

In a V the loss is computed on the rank of the model's input, and results change ranks less often.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from flax_spmd._src.text import value_text
from flax_spmd.errors import PipelineError, did_you_mean

Placement: TypeAlias = Literal['loop', 'v'] | Sequence[int]


def assign_ranks(ranks: int, chunks: int, placement: Placement) -> tuple[int, ...]:
  """The rank of every stage.

  Raises:
    PipelineError: an unknown placement, a rank out of range, or a rank without a stage.

  Example:
    >>> assign_ranks(3, 2, 'loop'), assign_ranks(3, 2, 'v')
    ((0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0))
  """
  if isinstance(placement, str):
    if placement not in ('loop', 'v'):
      hint = did_you_mean(placement, ('loop', 'v'))
      raise PipelineError(
        f"placement={placement!r} is unknown.{hint}\nFix: use 'loop', 'v', or the rank of every stage."
      )
    down = tuple(range(ranks))
    up = down[::-1] if placement == 'v' else down
    return tuple(rank for chunk in range(chunks) for rank in (up if chunk % 2 else down))
  idle = sorted(set(range(ranks)) - set(placement))
  unknown = sorted(set(placement) - set(range(ranks)))
  if idle or unknown:
    fault = f'has no stage on rank {idle[0]}' if idle else f'names rank {unknown[0]}'
    raise PipelineError(
      f'placement={tuple(placement)} {fault}, and there are {ranks} ranks.\n'
      f'Fix: name every rank from 0 to {ranks - 1}.'
    )
  return tuple(placement)


def check_positive(number: int, name: str) -> int:
  """The number; raises PipelineError unless it is a positive integer."""
  if number >= 1:
    return number
  raise PipelineError(f'{name} is {value_text(number)}.\nFix: pass a positive integer.')
