"""Costs: how long a step would take, from what it does and what its target can do.

A bracket, not a prediction. At best everything overlaps, and the slowest of three things is what a step
takes: products (FLOPs over the reachable part of the peak), memory (bytes over the bandwidth of HBM),
links. At worst nothing does, and they add up. The formulas are those of "How to Scale Your Model"
(https://jax-ml.github.io/scaling-book/roofline/ and /sharding/); what a collective sends is counted by
`counting`, where its formulas stand.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flax_spmd._src.compare.hardware import Chip, Target
from flax_spmd._src.hlo.counts import Collective, Counts

_NEXT = {'f8': 'bf16', 'int8': 'bf16', 'f16': 'bf16'}  # where a chip has no faster way
_PART = re.compile(r'(.*)\[(\d+)/(\d+)\]\Z')


class Cost(NamedTuple):
  """Seconds a step takes; `source` says where the figures are from.

  Attributes:
    compute: the matrix products, at the share of the peak that is reached.
    memory: reading and writing HBM.
    links: seconds of communication by mesh axes.
    low: if everything overlaps.
    high: if nothing does.
    bound: what is slowest: `compute`, `memory`, or the mesh axes of the slowest communication.
  """

  compute: float
  memory: float
  links: dict[tuple[str, ...], float]
  low: float
  high: float
  bound: str


def cost(counts: Counts, target: Target, mesh: Mapping[str, int], dtype: str = 'bf16') -> Cost:
  """The time bracket of a step.

  Args:
    counts: what a step does on one device.
    target: the hardware.
    mesh: size per mesh axis, in order; the last one's devices are next to each other.
    dtype: of the operands of the matrix products.
  """
  chip = target.chip
  compute = counts.flops / (peak(chip, dtype) * chip.efficiency)
  memory = counts.hbm_bytes / chip.bandwidth
  links: dict[tuple[str, ...], float] = {}
  for one in counts.collectives:
    links[one.axes] = links.get(one.axes, 0.0) + seconds(one, target, mesh)
  communication = sum(links.values())
  parts = {'compute': compute, 'memory': memory, 'communication': communication}
  slowest = max(parts, key=lambda name: parts[name])
  if slowest == 'communication':
    slowest = '+'.join(max(links, key=lambda axes: links[axes])) or 'communication'
  return Cost(compute, memory, links, max(parts.values()), sum(parts.values()), slowest)


def peak(chip: Chip, dtype: str) -> float:
  """FLOP/s for operands of a dtype; of one that the chip's entry lacks, those of the next that it has."""
  wanted = (dtype, _NEXT.get(dtype, 'f32'), 'f32', 'bf16')
  return next((chip.flops[one] for one in wanted if one in chip.flops), min(chip.flops.values()))


def seconds(one: Collective, target: Target, mesh: Mapping[str, int]) -> float:
  """How long a collective takes in a step: what it sends over the links, and a ring's latency."""
  rounds = {'all-reduce': 2 * (one.group - 1), 'collective-permute': 1}.get(one.kind, one.group - 1)
  return one.wire / _speed(one, target, mesh) + one.times * rounds * target.chip.hop


def between(target: Target, mesh: Mapping[str, int], axis: str, one: int, other: int) -> float:
  """Bytes per second from a device at one position of a mesh axis to its counterpart at another.

  Example:
    >>> target = explore.parse('h100:16')
    >>> mesh = {'stage': 4, 'data': 4}
    >>> [between(target, mesh, 'stage', one, one + 1) / 1e9 for one in range(3)]
    [450.0, 50.0, 450.0]
  """
  chip = target.chip
  if chip.torus:
    return chip.link
  sizes = list(mesh.values())
  inner = math.prod(sizes[list(mesh).index(axis) + 1 :])
  outer = math.prod(sizes) // (inner * mesh[axis])
  nodes = (
    [(start * mesh[axis] + place) * inner + device for start in range(outer) for device in range(inner)]
    for place in (one, other)
  )
  apart = any(here // target.topology[-1] != there // target.topology[-1] for here, there in zip(*nodes))
  return min(chip.link, chip.network) if apart else chip.link


def _speed(one: Collective, target: Target, mesh: Mapping[str, int]) -> float:
  """Bytes per second that a device of a group sends to the others."""
  chip = target.chip
  if chip.torus:
    return chip.link * _torus_axes(one, target, mesh)
  places = _places(one, mesh)
  together = sum(place // target.topology[-1] == places[0] // target.topology[-1] for place in places)
  # A ring that leaves the node: each of its chips there has a port, and the ring is split between them.
  return chip.link if together == len(places) else min(chip.link, together * chip.network)


def _places(one: Collective, mesh: Mapping[str, int]) -> Sequence[int]:
  """The positions of a group's devices among all; of an unknown group, the first ones."""
  sizes = dict(mesh)
  found = [0]
  stride = 1
  wanted = dict(map(_part, one.axes))
  for name in reversed(list(sizes)):
    if name in wanted:
      count = wanted[name] or sizes[name]
      found = [place + step * stride for step in range(count) for place in found]
    stride *= sizes[name]
  return sorted(found) if one.axes else range(one.group)


def _part(axis: str) -> tuple[str, int]:
  """Name and number of devices of `model[2/4]`; 0 for all of an axis."""
  found = _PART.match(axis)
  return (found[1], int(found[2])) if found else (axis, 0)


def _torus_axes(one: Collective, target: Target, mesh: Mapping[str, int]) -> int:
  """Over how many axes of the torus a group extends, if mesh axes follow them in order."""
  covered, torus = 0, list(target.topology)
  for name, size in mesh.items():
    extent, taken = 1, 0
    while torus and extent * torus[0] <= size and size % (extent * torus[0]) == 0:
      extent *= torus.pop(0)
      taken += 1
    if extent < size and torus:
      torus[0] = max(1, torus[0] // math.ceil(size / extent))
    if name in dict(map(_part, one.axes)):
      covered += max(taken, 1)
  return max(1, min(covered, target.chip.torus))
