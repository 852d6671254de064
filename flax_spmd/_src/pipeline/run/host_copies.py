"""Host copies: arrays of microbatches that wait in the memory of the host.

A rank keeps the residuals of a microbatch from its forward to its backward; the schedule decides for how many
tasks. Between two uses that are far apart, a copy on the host takes the place of the buffer. It is copied back
before the task that precedes the next use, so that the transfer overlaps with this task. The programs are the
same, and so are the numbers.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

from flax_spmd._src.pipeline.cut import equations as eq
from flax_spmd._src.pipeline.cut.equations import Value
from flax_spmd._src.pipeline.run.call_list import Buffer, Call, CallList, Send

_KEPT = 1 << 8  # bytes; arrays up to this size stay on the device


class BufferUse(NamedTuple):
  """A use of a buffer.

  Attributes:
    call: index of the call or send in the call list.
    begun: number of tasks that its rank has begun, with the task that uses it.
    next: number of the task that uses it, or of the next one, from 1.
  """

  call: int
  begun: int
  next: int


def with_host_copies(call_list: CallList, values: Collection[Value], after: int) -> CallList:
  """The call list, in which buffers are in the memory of the host between two uses that are far apart.

  Args:
    call_list: the step.
    values: the values of microbatches, without sums and stacks.
    after: largest number of tasks of the rank between two uses for which a buffer stays on the device, at least 1.
  """
  tasks, uses = _tasks_and_uses(call_list, values)
  out: dict[tuple[int, int], list[Buffer]] = defaultdict(list)  # by index of the use before, and rank
  back: dict[int, list[Buffer]] = defaultdict(list)  # by index of the task before the next use
  renamed: dict[int, dict[Buffer, Buffer]] = defaultdict(dict)
  for buffer, each in uses.items():
    current = buffer
    for one, other in itertools.pairwise(each):
      if other.next - one.begun - 1 > after:
        if current is buffer:
          out[one.call, buffer.rank].append(buffer)
        current = buffer._replace(copy=max(current.copy, 1) + 1)
        back[tasks[buffer.rank][other.next - 2]].append(current)
      renamed[other.call][buffer] = current
  calls: list[Call | Send] = []
  for index, one in enumerate(call_list.calls):
    if index in back:
      calls.append(Send([each._replace(copy=1) for each in back[index]], back[index]))
    calls.append(one._replace(inputs=[renamed[index].get(each, each) for each in one.inputs]))
    for rank in {each.rank: None for each in (*one.inputs, *one.outputs)}:
      if buffers := out.get((index, rank)):
        calls.append(Send(buffers, [each._replace(copy=1) for each in buffers]))
  return CallList(calls, call_list.results)


def _tasks_and_uses(
  call_list: CallList, values: Collection[Value]
) -> tuple[dict[int, list[int]], dict[Buffer, list[BufferUse]]]:
  """The indices of each rank's tasks in the call list, and the uses of each buffer that may be moved."""
  tasks: dict[int, list[int]] = defaultdict(list)
  uses: dict[Buffer, list[BufferUse]] = defaultdict(list)
  movable = {value for value in values if value.bytes > _KEPT and not eq.is_key(value.aval)}
  for index, one in enumerate(call_list.calls):
    is_task = False
    if isinstance(one, Call) and one.step is not None:
      is_task = True
      tasks[one.program.rank].append(index)
    for buffer in dict.fromkeys((*one.inputs, *one.outputs)):
      if buffer.value in movable and buffer.microbatch is not None:
        begun = len(tasks[buffer.rank])
        uses[buffer].append(BufferUse(index, begun, begun + (not is_task)))
  return tasks, uses
