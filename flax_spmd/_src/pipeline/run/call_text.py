"""Text of a call list, as `LoweredPipelineStep.as_text` returns it: one line per call or transfer.

    rank 0: fwd_0__0          5 arrays -> 3 arrays
    rank 0 -> rank 1          float32[4,32,64] of microbatch 0

The lines are in the order in which a single process would dispatch them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flax_spmd._src.pipeline.run.call_list import Buffer, Call, CallList, Send

_WIDTH = 28  # of the first column


def listing(call_list: CallList) -> str:
  """The calls and sends of a step, one per line."""
  return '\n'.join(_lines(call_list.calls))


def _lines(calls: Iterable[Call | Send]) -> Iterator[str]:
  for one in calls:
    if isinstance(one, Call):
      ranks = f'rank {one.program.rank}: {one}'
      arrays = f'{_count(len(one.inputs))} -> {_count(len(one.outputs))}'
    else:
      ranks = f'rank {one.buffers[0].rank} -> rank {one.rank}'
      arrays = arrays_text(one.buffers)
    yield f'{ranks:{_WIDTH}}{arrays}'


def arrays_text(buffers: Iterable[Buffer]) -> str:
  """`float32[8,4] of microbatch 0, float32[8]`."""
  return ', '.join(map(_text, buffers))


def _count(number: int) -> str:
  return f'{number} array{"s" * (number != 1)}'


def _text(buffer: Buffer) -> str:
  value, microbatch, _ = buffer
  return value.aval.str_short() + ('' if microbatch is None else f' of microbatch {microbatch}')
