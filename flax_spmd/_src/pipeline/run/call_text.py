"""Text of a call list, as `LoweredPipelineStep.as_text` returns it: one line per call or transfer.

    rank 0: fwd_0__0          5 arrays -> 3 arrays
    rank 0 -> rank 1          float32[4,32,64] of microbatch 0

The lines are in the order in which a single process would dispatch them.
"""

from __future__ import annotations

from collections.abc import Iterable

from flax_spmd._src.pipeline.run.call_list import Buffer, Call, CallList, Send
from flax_spmd._src.text import plural

_WIDTH = 28  # of the first column


def listing(call_list: CallList) -> str:
  """The calls and sends of a step, one per line."""
  return '\n'.join(map(_line, call_list.calls))


def _line(one: Call | Send) -> str:
  if isinstance(one, Call):
    inputs, outputs = plural(len(one.inputs), 'array'), plural(len(one.outputs), 'array')
    return f'{f"rank {one.program.rank}: {one}":{_WIDTH}}{inputs} -> {outputs}'
  return f'{_ends(one):{_WIDTH}}{arrays_text(one.inputs)}'


def send_text(send: Send) -> str:
  """`rank 0 -> rank 1: float32[8,4] of microbatch 0`."""
  return f'{_ends(send)}: {arrays_text(send.inputs)}'


def _ends(send: Send) -> str:
  ends = (send.inputs[0].memory, send.outputs[0].memory)
  return ' -> '.join(f'{"host of " if on_host else ""}rank {rank}' for rank, on_host in ends)


def arrays_text(buffers: Iterable[Buffer]) -> str:
  """`float32[8,4] of microbatch 0, float32[8]`."""
  return ', '.join(map(_text, buffers))


def _text(buffer: Buffer) -> str:
  text = buffer.value.aval.str_short()
  return text if buffer.microbatch is None else f'{text} of microbatch {buffer.microbatch}'
