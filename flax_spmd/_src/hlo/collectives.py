"""Collectives: kind, bytes and device groups of each, and the bytes that a device sends for it.

Kind, bytes and groups come from the instruction; `wire` computes the bytes sent. One form is misleading: TPU
programs contain reduce-scatters as a fusion of an all-reduce and a slice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from flax_spmd._src.hlo.device_groups import (
  axes_of,
  axes_of_pairs,
  connected,
  read_groups,
  read_pairs,
  stride_of,
)
from flax_spmd._src.hlo.flops import custom_call_target
from flax_spmd._src.hlo.parser import Computation, HloModule, Instruction
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
_SENT = '_xla_send_recv_source_target_pairs'  # GPU compilers can split a permute into send and receive
# The compiler for TPUs makes a send and a receive of a collective between slices.
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_SLICES = '_xla_megascale_target'


class Collective(NamedTuple):
  """One collective of a step.

  Attributes:
    kind: one of `KINDS`.
    axes: mesh axes that a group spans; `'model[2/4]'` for a part of one; () if unknown.
    group: number of devices in one group; for a permute, the number of devices that it connects.
    bytes: bytes of the operands on one device, for one run.
    times: number of runs in a step.
    wire: bytes that a device sends over its links in a step.
    dtype: dtype of the operands; the one with the most bytes if they differ.
    op: name of the JAX operation.
    source: line of the model, such as `model.py:31`, or '' if unknown.
    name: name of the instruction, or '' if unknown.
    stride: distance of its devices along an axis of which it has a part: 4 for devices 0 and 4 of 8.
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
  name: str = ''
  stride: int = 1


def wire(kind: str, size: float, group: int) -> float:
  """The bytes that a device sends in one collective, with ring algorithms.

  For operands of `size` bytes per device and groups of n devices: an all-gather sends `size * (n - 1)`; a
  reduce-scatter and an all-to-all send `size * (n - 1) / n`; an all-reduce is a reduce-scatter followed by
  an all-gather and sends twice that. From "How to Scale Your Model",
  https://jax-ml.github.io/scaling-book/sharding/.

  Args:
    kind: one of `KINDS`.
    size: bytes of the operands on one device.
    group: number of devices in one group, n.

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
  return size  # a permute or a broadcast


def kind_of(instruction: Instruction) -> str:
  """The kind of collective that an instruction runs or starts, or ''.

  Example:
    >>> from flax_spmd._src.hlo.parser import Instruction
    >>> kind_of(Instruction('a', 'all-gather-start', 'f32[8]', ('x',), '%x', ''))
    'all-gather'
  """
  op = instruction.op.removesuffix('-start')
  if op == 'send' and _SENT in instruction.rest:
    return 'collective-permute'
  if op == 'send' and (between_slices := _BETWEEN_SLICES.search(instruction.rest)):
    kind = between_slices[1].lower().replace('_', '-')
    return kind if kind in KINDS else 'collective-permute'
  return op if op in KINDS else ''


def collective(
  instruction: Instruction, inside: Computation, module: HloModule, mesh: Mapping[str, int], fused: bool
) -> Collective | None:
  """One run of a collective instruction, or None for groups of a single device, which send nothing.

  Args:
    instruction: instruction with a `kind_of`.
    inside: computation that contains it.
    module: module with its stack frames.
    mesh: size per mesh axis, in order.
    fused: whether the computation is the body of a fusion.
  """
  kind = kind_of(instruction)
  if kind == 'all-reduce' and fused and _keeps_part(instruction, inside):
    kind = 'reduce-scatter'
  group, axes, stride = _group(kind, instruction, module, mesh)
  if group < 2:
    return None
  operands = inside.operands(instruction)
  arrays = [shape for operand in operands for shape in operand.shapes if shape.dtype != 'token']
  if kind == 'ragged-all-to-all':  # the others are the output, offsets and sizes
    arrays = arrays[:1]
  size = sum(shape.bytes for shape in arrays)
  dtype = max(arrays, key=lambda shape: shape.bytes).dtype if arrays else ''
  op, source = origin(_metadata(instruction, inside), module.frames)
  sent = wire(kind, size, group)
  return Collective(kind, axes, group, size, 1, sent, dtype, op, source, instruction.name, stride)


def _metadata(instruction: Instruction, inside: Computation) -> str:
  """The metadata of an instruction; a transfer between slices has that of the array which is sent."""
  while instruction.op == 'send' or (
    instruction.op == 'bitcast' and 'metadata' not in instruction.attributes
  ):
    operands = inside.operands(instruction)
    if 'metadata' in instruction.attributes or not operands:
      break
    instruction = operands[0]
  return instruction.attributes.get('metadata', '')


def started(module: HloModule) -> frozenset[tuple[str, str]]:
  """The collectives that are started by fusions, as (kind, channel).

  TPUs spread one collective over several fusions, so that other work can run in between: the first starts
  it, others continue it, and the last completes it. Each contains a copy of the instruction.
  """
  return frozenset(
    _key(instruction)
    for computation in module.computations.values()
    if _starts(computation)
    for instruction in computation.instructions.values()
    if kind_of(instruction)
  )


def continues(instruction: Instruction, inside: Computation, begun: frozenset[tuple[str, str]]) -> bool:
  """Whether a collective in a fusion is a copy of one in `begun`."""
  if _key(instruction) not in begun or _starts(inside):
    return False
  return 'async_collective_fusion_config' in instruction.attributes.get('backend_config', '')


def _key(instruction: Instruction) -> tuple[str, str]:
  """Kind and channel, which are equal for all copies of a collective."""
  return kind_of(instruction), instruction.attributes.get('channel_id', '')


def _starts(computation: Computation) -> bool:
  """Whether a fusion starts a collective that other fusions continue."""
  last = computation.result
  return (
    last is not None and last.op == 'custom-call' and custom_call_target(last) == 'AsyncCollectiveStart'
  )


def _keeps_part(instruction: Instruction, inside: Computation) -> bool:
  """Whether every user of a result takes only slices of it."""
  users = inside.users.get(instruction.name, [])
  return bool(users) and all(
    user.op == 'dynamic-slice'
    or (user.op in ('get-tuple-element', 'bitcast') and _keeps_part(user, inside))
    for user in users
  )


def _group(
  kind: str, instruction: Instruction, module: HloModule, mesh: Mapping[str, int]
) -> tuple[int, tuple[str, ...], int]:
  """Number of devices in one group, the mesh axes that it spans, and its `stride_of`."""
  attributes = instruction.attributes
  sent = attributes.get('frontend_attributes', '') if instruction.op == 'send' else ''
  if kind == 'collective-permute':
    listed = attributes.get('source_target_pairs', '') or _listed(sent, _SENT) or _listed(sent, _SLICES)
    pairs = read_pairs(listed)
    return connected(pairs).shape[1], axes_of_pairs(pairs, mesh), 1
  # HLO separates device_ids with a comma, so it is parsed as a separate attribute.
  text = _listed(sent, _SLICES) or ' '.join(
    attributes.get(key, '') for key in ('replica_groups', 'device_ids')
  )
  groups = read_groups(text, max(module.devices, 1))
  if (
    'channel_id' in attributes and 'use_global_device_ids' not in attributes and groups.tolist() == [[0]]
  ):
    groups = read_groups('', max(module.devices, 1))  # one replica: all partitions
  return groups.shape[1], axes_of(groups, mesh), stride_of(groups, mesh)


def _listed(text: str, attribute: str) -> str:
  """The lists of devices in an attribute of a send, or ''."""
  found = text.partition(f'{attribute}=')[2].partition('}}')
  return found[0] + found[1]
