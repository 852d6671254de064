"""Buffer assignments: the memory of a compiled program, as XLA's dump of it describes.

    dump = read_dump(file.read_bytes())    # None while the compiler still writes
    dump.memory['peak'], dump.live

XLA assigns buffers after all of its passes over the HLO, and before it generates code. The messages are those of XLA's
`hlo.proto`, with the fields that are read here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

_HOST = 5  # XLA's number of the memory space of the host
_Field = descriptor_pb2.FieldDescriptorProto
_MESSAGES: dict[str, dict[str, tuple[int, int | str]]] = {
  'Dump': {'module': (1, _Field.TYPE_BYTES), 'assignment': (3, 'Assignment')},
  'Assignment': {
    'buffers': (1, '[Buffer]'),
    'allocations': (3, '[Allocation]'),
    'traces': (4, '[Trace]'),
  },
  'Buffer': {
    'id': (1, _Field.TYPE_INT64),
    'size': (2, _Field.TYPE_INT64),
    'defined': (3, 'Location'),
  },
  'Location': {'instruction': (4, _Field.TYPE_INT64)},
  'Allocation': {
    'index': (1, _Field.TYPE_INT64),
    'size': (2, _Field.TYPE_INT64),
    'thread_local': (3, _Field.TYPE_BOOL),
    'argument': (5, _Field.TYPE_BOOL),
    'result': (7, _Field.TYPE_BOOL),
    'space': (8, _Field.TYPE_INT64),
    'constant': (12, _Field.TYPE_BOOL),
  },
  'Trace': {'events': (1, '[Event]'), 'allocation': (3, _Field.TYPE_INT64)},
  'Event': {
    'kind': (1, _Field.TYPE_INT64),
    'buffer': (2, _Field.TYPE_INT64),
    'shared': (5, _Field.TYPE_INT64),
  },
  'Module': {'computations': (3, '[Computation]')},
  'Computation': {'instructions': (2, '[Instruction]'), 'id': (5, _Field.TYPE_INT64)},
  'Instruction': {
    'name': (1, _Field.TYPE_STRING),
    'opcode': (2, _Field.TYPE_STRING),
    'id': (35, _Field.TYPE_INT64),
    'called': (38, '[int64]'),
  },
}
_FREE, _SHARE = 1, 2  # kinds of events; the others bring a buffer to life


class Dump(NamedTuple):
  """A compiled program and its memory.

  Attributes:
    module: the serialized HLO module.
    memory: bytes as in the compiler's memory statistics: `arguments`, `results`, `shared` (results in the memory of
      donated arguments), `temporaries`, and `peak`, the most that is alive at a time; what shares memory counts once.
    live: the temporary buffers that are alive at the peak: the name of the instruction that defines each, and its bytes.
  """

  module: bytes
  memory: dict[str, int]
  live: list[tuple[str, int]]


def read_dump(content: bytes, space: int | None = None) -> Dump | None:
  """The module and the memory of a program that XLA dumped as an `HloProto`.

  Args:
    content: content of the file, possibly without its end.
    space: number of the memory space that counts; None for all but the host's.

  Returns:
    The program; None if the file has no complete buffer assignment.
  """
  try:
    dump = _message('Dump').FromString(content)
  except DecodeError:
    return None
  if not dump.HasField('assignment'):
    return None
  memory, buffers = _memory(dump.assignment, space)
  names = _instruction_names(dump.module) if buffers else {}
  return Dump(
    dump.module, memory, [(names.get(one.defined.instruction, ''), one.size) for one in buffers]
  )


def _instruction_names(module: bytes) -> dict[int, str]:
  """The name of each instruction, by its number in the module: that of its computation in the upper 32 bits.

  What runs asynchronously has the name of its start, in whose line the module's text has it.
  """
  computations = _message('Module').FromString(module).computations
  starts = (one for each in computations for one in each.instructions if one.opcode == 'async-start')
  outside = {number: one.name for one in starts for number in one.called}
  return {
    one.id if one.id >> 32 else each.id << 32 | one.id: outside.get(each.id, one.name)
    for each in computations
    for one in each.instructions
  }


def _memory(assignment: Any, space: int | None) -> tuple[dict[str, int], list[Any]]:
  """The bytes by kind, and the temporary buffers that are alive at the peak."""
  known = {buffer.id: buffer for buffer in assignment.buffers}
  traces: dict[int, list[Any]] = {}
  for trace in assignment.traces:
    traces.setdefault(trace.allocation, []).append(_alive_at_peak(trace, known))
  total = {'arguments': 0, 'results': 0, 'shared': 0, 'temporaries': 0}
  peak, live, untraced = 0, [], []
  for one in assignment.allocations:
    if one.thread_local or one.space == _HOST or space not in (None, one.space):
      continue
    kinds = {'arguments': one.argument, 'results': one.result, 'shared': one.argument and one.result}
    kinds['temporaries'] = not (one.argument or one.result or one.constant)
    for kind, counts in kinds.items():
      total[kind] += one.size if counts else 0
    if kinds['temporaries'] and one.index in traces:
      alive = max(traces.pop(one.index), key=_bytes)
      peak += _bytes(alive)
      live += alive
    else:
      peak += one.size
      untraced += [one] if kinds['temporaries'] else []
  others = [alive for some in traces.values() for alive in some]
  if space is None and len(untraced) == len(others) == 1 and _bytes(others[0]) <= untraced[0].size:
    live += others[0]  # the CPU's compiler of JAX 0.10 misnumbers the allocation of a trace
  return {**total, 'peak': peak}, live


def _bytes(buffers: Iterable[Any]) -> int:
  return sum(buffer.size for buffer in buffers)


def _alive_at_peak(trace: Any, buffers: Mapping[int, Any]) -> list[Any]:
  """The buffers in an allocation when it is fullest; of several in one place, the last."""
  places: dict[int, int] = {}  # the first buffer in the place of each
  alive: dict[int, dict[int, Any]] = {}  # the buffers in each place
  found: list[Any] = []
  total = most = 0
  for event in trace.events:
    if event.kind == _SHARE:
      places[event.buffer] = places.setdefault(event.shared, event.shared)
    place = places.setdefault(event.buffer, event.buffer)
    if event.kind != _FREE:
      total += 0 if place in alive else buffers[place].size
      alive.setdefault(place, {})[event.buffer] = buffers[event.buffer]
    elif place in alive:
      if total > most:
        most, found = total, [next(reversed(some.values())) for some in alive.values()]
      alive[place].pop(event.buffer, None)
      if not alive[place]:
        del alive[place]
        total -= buffers[place].size
  return found if total <= most else [next(reversed(some.values())) for some in alive.values()]


@functools.cache
def _message(name: str) -> Any:
  """The class of a message."""
  file = descriptor_pb2.FileDescriptorProto(
    name='flax_spmd_hlo.proto', package='flax_spmd', syntax='proto2'
  )
  for message, members in _MESSAGES.items():
    described = file.message_type.add(name=message)
    for member, (number, kind) in members.items():
      field: Any = described.field.add(name=member, number=number, label=_Field.LABEL_OPTIONAL)
      if isinstance(kind, int):
        field.type = kind
        continue
      if kind.startswith('['):
        field.label = _Field.LABEL_REPEATED
      if kind == '[int64]':
        field.type = _Field.TYPE_INT64
      else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f'.flax_spmd.{kind.strip("[]")}'
  pool = descriptor_pool.DescriptorPool()
  pool.Add(file)
  return message_factory.GetMessageClass(pool.FindMessageTypeByName(f'flax_spmd.{name}'))
