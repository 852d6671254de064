"""Listing: what a cut step runs and sends, as text: one line for each program that is called and each transfer.

    rank 0: fwd_0__0          5 arrays -> 3 arrays
    rank 0 -> rank 1          float32[4,32,64] of microbatch 0

It is what `Lowered.as_text` returns; the order is that in which one process would start them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flax_spmd._src.pipeline.run.call_list import Call, Linked, Place, Send

_WIDTH = 28  # of the column that says where


def listing(linked: Linked) -> str:
  """The calls and sends of a step, a line each."""
  return '\n'.join(_lines(linked.calls))


def _lines(calls: Iterable[Call | Send]) -> Iterator[str]:
  for one in calls:
    if isinstance(one, Call):
      name = one.unit.name if one.when is None else str(one.when.step)
      where = f'rank {one.unit.rank}: {name}'
      what = f'{_count(len(one.inputs))} -> {_count(len(one.outputs))}'
    else:
      where = f'rank {one.places[0][2]} -> rank {one.rank}'
      what = ', '.join(map(_text, one.places))
    yield f'{where:{_WIDTH}}{what}'


def _count(number: int) -> str:
  return f'{number} array{"s" * (number != 1)}'


def _text(place: Place) -> str:
  value, microbatch, _ = place
  return value.aval.str_short() + ('' if microbatch is None else f' of microbatch {microbatch}')
