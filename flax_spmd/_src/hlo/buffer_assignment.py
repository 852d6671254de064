"""Buffer assignments: the memory of a compiled program, as XLA's dump of it describes.

    module, memory = read_dump(file.read_bytes())    # both None while the compiler still writes

XLA assigns buffers after all of its passes over the HLO, and before it generates code. The messages are those of XLA's
`hlo.proto`, with the fields that are read here.
"""

from __future__ import annotations

import functools
from typing import Any

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
  'Buffer': {'id': (1, _Field.TYPE_INT64), 'size': (2, _Field.TYPE_INT64)},
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
  'Event': {'kind': (1, _Field.TYPE_INT64), 'buffer': (2, _Field.TYPE_INT64)},
}
_FREE = 1  # kind of an event; the others bring a buffer to life


def read_dump(content: bytes, space: int | None = None) -> tuple[bytes, dict[str, int]] | None:
  """The module and the memory of a program that XLA dumped as an `HloProto`.

  Args:
    content: content of the file, possibly without its end.
    space: number of the memory space that counts; None for all but the host's.

  Returns:
    The serialized HLO module, and bytes as in the compiler's memory statistics: `arguments`, `results`, `shared`
    (results in the memory of donated arguments), `temporaries`, and `peak`, the most that is alive at a time. None
    if the file has no complete buffer assignment.
  """
  try:
    dump = _message('Dump').FromString(content)
  except DecodeError:
    return None
  if not dump.HasField('assignment'):
    return None
  return dump.module, _memory(dump.assignment, space)


def _memory(assignment: Any, space: int | None) -> dict[str, int]:
  peaks = _peaks(assignment)
  total = {'arguments': 0, 'results': 0, 'shared': 0, 'temporaries': 0}
  peak = 0
  for one in assignment.allocations:
    if one.thread_local or one.space == _HOST or space not in (None, one.space):
      continue
    kinds = {'arguments': one.argument, 'results': one.result, 'shared': one.argument and one.result}
    kinds['temporaries'] = not (one.argument or one.result or one.constant)
    for kind, counts in kinds.items():
      total[kind] += one.size if counts else 0
    peak += peaks[one.index] if kinds['temporaries'] and one.index in peaks else one.size
  return {**total, 'peak': peak}


def _peaks(assignment: Any) -> dict[int, int]:
  """The bytes that are alive at a time at most, per allocation that buffers share in turn."""
  sizes = {buffer.id: buffer.size for buffer in assignment.buffers}
  peaks: dict[int, int] = {}
  for trace in assignment.traces:
    alive = 0
    for event in trace.events:
      alive += -sizes[event.buffer] if event.kind == _FREE else sizes[event.buffer]
      peaks[trace.allocation] = max(peaks.get(trace.allocation, 0), alive)
  return peaks


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
      field.type, field.type_name = _Field.TYPE_MESSAGE, f'.flax_spmd.{kind.strip("[]")}'
      if kind.startswith('['):
        field.label = _Field.LABEL_REPEATED
  pool = descriptor_pool.DescriptorPool()
  pool.Add(file)
  return message_factory.GetMessageClass(pool.FindMessageTypeByName(f'flax_spmd.{name}'))
