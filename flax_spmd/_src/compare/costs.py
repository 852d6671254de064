"""Costs: a bracket for the time of a step, from its counts and the target's figures (roofline).

A product takes the longer of two times: its FLOPs over the reachable share of the peak, and its bytes over that of the
bandwidth of HBM. Other operations take the time of their bytes. A GPU runs one after another, and each takes a
constant time to start; a TPU reads ahead, so that all products together, or all that waits for memory, decide. The time of
communication is added: its bytes over the bandwidth of the links, transfers to and from host memory included.

The reachable shares and the width of the bracket are fitted to published step times of JAX programs, and to steps that
were measured on one GPU (`benchmarks/published_steps.py`), each predicted by the others. Where communication or memory
takes longer than in most of them, the bracket is wider. The formulas of the parts are from "How to Scale Your Model"
(https://jax-ml.github.io/scaling-book/roofline/ and /sharding/); the bytes that a collective sends are computed by
`hlo.collectives.wire`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flax_spmd._src.compare.hardware import Chip, Target
from flax_spmd._src.hlo.counts import Collective, Counts
from flax_spmd._src.mesh import within_slice
from flax_spmd._src.text import time_text

_FALLBACK = {'f8': 'bf16', 'int8': 'bf16', 'f16': 'bf16'}  # dtype used by chips without the faster one
_PART = re.compile(r'(.*)\[(\d+)/(\d+)\]\Z')
HOST_LINK = ('host memory',)  # beside the tuples of mesh axes
BANDWIDTH = 0.7  # reachable share of the bandwidth of HBM; fitted to published step times (`benchmarks/published_steps.py`)
START, _GPUS = 1.5e-6, ('cuda', 'rocm')  # seconds of the least operations of a GPU, as profiled
PUBLISHED, INSIDE = 52, 50  # steps, and those in the bracket that is fitted to the others
_MANY, _LARGE = 1000, 0.25  # operations in loops, and their share of a step, that are worth a line
# Communication up to this part of the rest is not hidden in published steps, which have no more.
_SHOWN = 0.5
# Factors at both ends on the time of memory: none below the first ratio of it to the time of products, all from the second.
_MEMORY, _WAITING = (0.85, 1.2), (0.4, 1.0)


class Cost(NamedTuple):
  """The time of a step, in seconds.

  Attributes:
    compute: time of the FLOPs, at the reachable share of the peak.
    memory: time to read and write HBM, but for what products hide, and to start operations.
    links: time of communication per tuple of mesh axes; of arrays that are in the host's memory between steps, under
      `HOST_LINK`.
    low: least time of the step; no published step is faster.
    expected: most likely time of the step, by which layouts are ranked.
    high: longest time of the step.
    bound: slowest part: `compute`, `memory`, or the mesh axes of the slowest communication.
  """

  compute: float
  memory: float
  links: dict[tuple[str, ...], float]
  low: float
  expected: float
  high: float
  bound: str


def cost(
  counts: Counts, target: Target, mesh: Mapping[str, int], dtype: str = 'bf16', host_bytes: int = 0
) -> Cost:
  """The time bracket of a step.

  Args:
    counts: work of the step on one device.
    target: the hardware.
    mesh: size per mesh axis, in order; devices along the last axis are adjacent.
    dtype: dtype of the operands of the matrix products.
    host_bytes: bytes that the step reads from the host's memory, and writes back to it.
  """
  chip = target.chip
  compute, memory = local_seconds(counts, chip, peak(chip, dtype))
  links: dict[tuple[str, ...], float] = {}
  for one in counts.collectives:
    links[one.axes] = links.get(one.axes, 0.0) + seconds(one, target, mesh)
  if host_bytes:
    links[HOST_LINK] = 2 * host_bytes / chip.host
  communication = sum(links.values())
  parts = {'compute': compute, 'memory': memory, 'communication': communication}
  slowest = max(parts, key=lambda name: parts[name])
  if slowest == 'communication':
    slowest = '+'.join(max(links, key=lambda axes: links[axes])) or 'communication'
  low, high = (
    chip.pace * factor * end
    for factor, end in zip(chip.spread, ends(compute, memory, communication, chip.platform), strict=True)
  )
  middle = expected(compute, memory, communication, chip)
  return Cost(compute, memory, links, low, middle, high, slowest)


def local_seconds(counts: Counts, chip: Chip, flops: float) -> tuple[float, float]:
  """The time of the FLOPs of a device, and what its operations take longer to read, write and start.

  Args:
    counts: work of the step on one device.
    chip: the device.
    flops: its peak FLOP/s.
  """
  reach, bandwidth = flops * chip.efficiency, BANDWIDTH * chip.bandwidth
  memory = START * counts.kernels if chip.platform in _GPUS else 0.0
  moved = counts.hbm_bytes
  for product in counts.products:
    memory += product.runs * max(0.0, product.hbm_bytes / bandwidth - product.flops / reach)
    moved -= product.runs * product.hbm_bytes
  return counts.flops / reach, memory + max(0.0, moved) / bandwidth


def slow_loops(counts: Counts, cost: Cost, chip: Chip) -> list[str]:
  """A line for the loops at each line of Python whose many small operations take a GPU a large part of the step to start."""
  kernels: dict[str, float] = {}
  for one in counts.loops if chip.platform in _GPUS else ():
    kernels[one.source] = kernels.get(one.source, 0.0) + one.kernels
  return [
    f'{number:.0f} small kernels in loops: at least {time_text(START * number)} to start them, {source}'
    for source, number in kernels.items()
    if number >= _MANY and START * number > _LARGE * cost.expected
  ]


def local(compute: float, memory: float, platform: str) -> float:
  """The time of the operations of a device."""
  return max(compute, memory) if platform == 'tpu' else compute + memory


def expected(compute: float, memory: float, communication: float, chip: Chip) -> float:
  """The expected time of a step, from the times of the three parts."""
  return chip.pace * (local(compute, memory, chip.platform) + communication)


def ends(compute: float, memory: float, communication: float, platform: str) -> tuple[float, float]:
  """The ends of a bracket of spread (1, 1), from the times of the three parts.

  It is wider where communication or memory takes longer, beside products, than in most published steps.
  """
  least, most = _WAITING
  waits = min(1.0, max(0.0, (memory / compute - least) / (most - least))) if compute else 1.0
  quick, late = (local(compute, memory * (1 + waits * (factor - 1)), platform) for factor in _MEMORY)
  hidden = min(quick, max(0.0, communication - _SHOWN * quick))
  return quick + communication - hidden, late + communication


def coverage(chip: Chip) -> str:
  """A sentence on how far the time brackets of a chip can be trusted."""
  if chip.pace != 1.0:
    return (
      f'Time brackets: calibrated by measured steps, which take {chip.pace:.2f} x the expected time.'
    )
  if chip.spread == Chip._field_defaults['spread']:
    return f'Time brackets: a guess, since no published step of {chip.name} was compared.'
  return (
    f'Time brackets: of {PUBLISHED} published or measured steps, {INSIDE} lie in their bracket when it is fitted to the others, '
    'and none is faster.'
  )


def peak(chip: Chip, dtype: str) -> float:
  """Peak FLOP/s for operands of a dtype, or of a fallback dtype if the chip has no entry for it."""
  candidates = (dtype, _FALLBACK.get(dtype, 'f32'), 'f32', 'bf16')
  return next((chip.flops[one] for one in candidates if one in chip.flops), min(chip.flops.values()))


def seconds(one: Collective, target: Target, mesh: Mapping[str, int]) -> float:
  """The time of a collective in a step: bytes over bandwidth, plus the latency of a ring."""
  rounds = {'all-reduce': 2 * (one.group - 1), 'collective-permute': 1}.get(one.kind, one.group - 1)
  return one.wire / _speed(one, target, mesh) + one.times * rounds * target.chip.hop


def between(target: Target, mesh: Mapping[str, int], axis: str, one: int, other: int) -> float:
  """Bytes per second from a device at one position of a mesh axis to its counterpart at another.

  Example:
    >>> target = explore.parse_target('h100:16')
    >>> mesh = {'stage': 4, 'data': 4}
    >>> [between(target, mesh, 'stage', one, one + 1) / 1e9 for one in range(3)]
    [450.0, 50.0, 450.0]
  """
  chip = target.chip
  sizes = list(mesh.values())
  inner = math.prod(sizes[list(mesh).index(axis) + 1 :])
  outer = math.prod(sizes) // (inner * mesh[axis])
  senders, receivers = (
    [(start * mesh[axis] + index) * inner + device for start in range(outer) for device in range(inner)]
    for index in (one, other)
  )
  per_node = target.per_node
  apart = any(a // per_node != b // per_node for a, b in zip(senders, receivers))
  return min(chip.link, chip.network) if apart else chip.link


def _speed(one: Collective, target: Target, mesh: Mapping[str, int]) -> float:
  """Bytes per second that a device of a group can send to the others."""
  chip = target.chip
  devices, per_node = _first_group(one, mesh), target.per_node
  together = sum(device // per_node == devices[0] // per_node for device in devices)
  ports = 1 if one.kind == 'collective-permute' else together  # of the chips that send out of their node
  link = chip.link * (_torus_axes(one, target, mesh) if chip.torus else 1)
  # A ring that leaves the node is split over the network ports of the group's chips in that node.
  return link if together == len(devices) else min(link, ports * chip.network)


def _first_group(one: Collective, mesh: Mapping[str, int]) -> Sequence[int]:
  """The device numbers of a collective's first group; consecutive devices if its axes are unknown."""
  devices, stride, parts = [0], 1, dict(map(_part, one.axes))
  for name, size in reversed(list(mesh.items())):
    if name in parts:
      count, apart = (parts[name], one.stride) if parts[name] else (size, 1)
      devices = [device + step * apart * stride for step in range(count) for device in devices]
    stride *= size
  return sorted(devices) if one.axes else range(one.group)


def _part(axis: str) -> tuple[str, int]:
  """Name and number of devices of `model[2/4]`; 0 for a whole axis."""
  match = _PART.match(axis)
  return (match[1], int(match[2])) if match else (axis, 0)


def _torus_axes(one: Collective, target: Target, mesh: Mapping[str, int]) -> int:
  """The number of torus axes that a group spans, if the mesh axes are assigned to them in order."""
  covered, torus = 0, list(target.topology)
  torus[-1] *= target.chip.cores  # the devices of a chip are adjacent
  sizes = within_slice(tuple(mesh.values()), target.slices) or mesh.values()
  for name, size in zip(mesh, sizes, strict=True):
    extent, taken = 1, 0
    while torus and extent * torus[0] <= size and size % (extent * torus[0]) == 0:
      extent *= torus.pop(0)
      taken += 1
    if extent < size and torus:
      torus[0] = max(1, torus[0] // math.ceil(size / extent))
    if name in dict(map(_part, one.axes)):
      covered += max(taken, 1)
  return max(1, min(covered, target.chip.torus))
