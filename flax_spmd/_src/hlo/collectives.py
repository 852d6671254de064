"""Collectives: what devices send each other in a step.

Of an instruction come the kind, the bytes and the groups; `wire` says what a device then sends. One thing
is not what it looks like: where a TPU's program needs only a device's part of a sum, it has a fusion of an
all-reduce and a slice, which runs as a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flax_spmd._src.hlo.device_groups import axes_of, axes_of_pairs, connected, read_groups, read_pairs
from flax_spmd._src.hlo.flops import target
from flax_spmd._src.hlo.parser import Computation, Instruction, Module
from flax_spmd._src.hlo.source_frames import origin

KINDS = (
  'all-gather',
  'reduce-scatter',
  'all-reduce',
  'all-to-all',
  'collective-permute',
  'ragged-all-to-all',
  'collective-broadcast',
)
_SENT = '_xla_send_recv_source_target_pairs'  # a GPU's permute may be split into sends and receives


class Collective(NamedTuple):
  """One collective of a step.

  Attributes:
    kind: one of `KINDS`.
    axes: the mesh axes that it goes over; `'model[2/4]'` for a part of one; () if unknown.
    group: devices in one group; of a permute, those that it connects.
    bytes: of its operands on one device, once.
    times: how often it runs in a step.
    wire: bytes that a device sends over its links in a step.
    dtype: of what is sent; of several, the one with the most bytes.
    op: the name of the operation that it comes from.
    source: the line that it comes from, as `model.py:31`; '' if unknown.
  """

  kind: str
  axes: tuple[str, ...]
  group: int
  bytes: float
  times: int
  wire: float
  dtype: str
  op: str
  source: str


def wire(kind: str, size: float, group: int) -> float:
  """The bytes that a device sends in one collective, by ring algorithms.

  With n devices, a gather sends what a device has n - 1 times; a reduce-scatter all but its own part; an
  all-reduce is a reduce-scatter and the gather of what that leaves; an all-to-all keeps its own part. From
  "How to Scale Your Model", https://jax-ml.github.io/scaling-book/sharding/.

  Args:
    kind: one of `KINDS`.
    size: bytes of its operands on one device.
    group: devices in one group, n.

  Example:
    >>> wire('all-gather', 100, 4), wire('all-reduce', 100, 4), wire('collective-permute', 100, 4)
    (300, 150.0, 100)
  """
  if kind == 'all-gather':
    return size * (group - 1)
  if kind == 'all-reduce':
    return 2 * size * (group - 1) / group
  if kind in ('reduce-scatter', 'all-to-all', 'ragged-all-to-all'):
    return size * (group - 1) / group
  return size  # a permute sends what a device has; a broadcast hands it on


def kind_of(instruction: Instruction) -> str:
  """The kind of collective that an instruction runs or starts; '' if none.

  Example:
    >>> from flax_spmd._src.hlo.parser import Instruction
    >>> kind_of(Instruction('a', 'all-gather-start', 'f32[8]', ('x',), '%x', ''))
    'all-gather'
  """
  op = instruction.op.removesuffix('-start')
  if op == 'send' and _SENT in instruction.rest:
    return 'collective-permute'
  return op if op in KINDS else ''


def collective(
  instruction: Instruction, inside: Computation, module: Module, mesh: Mapping[str, int], fused: bool
) -> Collective | None:
  """What a collective instruction is, run once; None if it goes over one device, and so moves nothing.

  Args:
    instruction: `kind_of` says that it is one.
    inside: the computation that it is in.
    module: has the frames that it comes from.
    mesh: size per axis, in order.
    fused: whether the computation is a fusion's.
  """
  kind = kind_of(instruction)
  if kind == 'all-reduce' and fused and _keeps_part(instruction, inside):
    kind = 'reduce-scatter'
  group, axes = _group(kind, instruction, module, mesh)
  if group < 2:
    return None
  arrays = [shape for operand in inside.operands(instruction) for shape in operand.shapes]
  if kind == 'ragged-all-to-all':  # operand, output, and where what goes
    arrays = arrays[:1]
  size = sum(shape.bytes for shape in arrays)
  dtype = max(arrays, key=lambda shape: shape.bytes).dtype if arrays else ''
  op, source = origin(instruction.attributes.get('metadata', ''), module.frames)
  return Collective(kind, axes, group, size, 1, wire(kind, size, group), dtype, op, source)


def started(module: Module) -> frozenset[tuple[str, str]]:
  """The collectives that fusions start, by kind and channel.

  TPUs spread one collective over several fusions, between the steps of which other work runs: one that
  starts it, others that go on with it, one that ends it. Each has a copy of the instruction.
  """
  return frozenset(
    _key(instruction)
    for computation in module.computations.values()
    if _starts(computation)
    for instruction in computation.instructions.values()
    if kind_of(instruction)
  )


def continues(instruction: Instruction, inside: Computation, begun: frozenset[tuple[str, str]]) -> bool:
  """Whether a collective in a fusion is a copy of one of those in `begun`."""
  if _key(instruction) not in begun or _starts(inside):
    return False
  return 'async_collective_fusion_config' in instruction.attributes.get('backend_config', '')


def _key(instruction: Instruction) -> tuple[str, str]:
  """What the copies of one collective have in common."""
  return kind_of(instruction), instruction.attributes.get('channel_id', '')


def _starts(computation: Computation) -> bool:
  """Whether a fusion starts a collective that other fusions go on with."""
  last = computation.result
  return last is not None and last.op == 'custom-call' and target(last) == 'AsyncCollectiveStart'


def _keeps_part(instruction: Instruction, inside: Computation) -> bool:
  """Whether a fusion goes on only with slices of a result."""
  users = inside.users.get(instruction.name, [])
  return bool(users) and all(
    user.op == 'dynamic-slice'
    or (user.op in ('get-tuple-element', 'bitcast') and _keeps_part(user, inside))
    for user in users
  )


def _group(
  kind: str, instruction: Instruction, module: Module, mesh: Mapping[str, int]
) -> tuple[int, tuple[str, ...]]:
  """How many devices are in one group, and the axes that they are along."""
  attributes = instruction.attributes
  if kind == 'collective-permute':
    pairs = read_pairs(attributes.get('source_target_pairs', '') or _sent_pairs(attributes))
    return connected(pairs).shape[1], axes_of_pairs(pairs, mesh)
  # The comma before device_ids makes it look like an attribute of its own.
  text = ' '.join(attributes.get(key, '') for key in ('replica_groups', 'device_ids'))
  groups = read_groups(text, max(module.devices, 1))
  if (
    'channel_id' in attributes and 'use_global_device_ids' not in attributes and groups.tolist() == [[0]]
  ):
    groups = read_groups('', max(module.devices, 1))  # the one replica, over all of its partitions
  return groups.shape[1], axes_of(groups, mesh)


def _sent_pairs(attributes: Mapping[str, str]) -> str:
  """The pairs of a permute that is split into sends and receives."""
  return attributes.get('frontend_attributes', '').partition(_SENT + '=')[2].partition('}}')[0] + '}'
