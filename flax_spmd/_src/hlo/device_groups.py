"""Device groups: the devices that take part in a collective together, and the mesh axes that they span.

HLO has four notations. All number the devices in the mesh's row-major order:

    replica_groups={{0,1},{2,3}}                         lists
    replica_groups=[2,4]<=[4,2]T(1,0)                    iota: 0..7 as 4x2, transposed, as 2 groups of 4
    replica_groups=mesh['a'=2,'b'=4] {'b'}               axes of a mesh, with XLA's own axis names
    source_target_pairs={{0,1},{1,0}}                    pairs: a group is a connected component

Groups are an array with one row per group, padded with -1 if their sizes differ. Axis names come from the
mesh: they follow from the device numbers, not from the names in the text.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from flax_spmd._src.draw.slices import positions_of

_IOTA = re.compile(r'\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?')
_MESH = re.compile(r'mesh\[([^\]]*)\](.*?)\{([^{}]*)\}')
_RESHAPED = re.compile(r'\[([\d,]+)\](?:T\(([\d,]+)\))?')
_AXIS = re.compile(r"['\"]?([^'\",:=]+)['\"]?(?::\((\d+)\)(\d+)|=(\d+))?")
_LIST = re.compile(r'\{([\d,\s]*)\}')


@functools.lru_cache(maxsize=512)
def read_groups(text: str, devices: int) -> np.ndarray:
  """The groups in a `replica_groups` attribute.

  Args:
    text: text of the attribute, in any notation; empty (or `{}`) means one group of all devices.
    devices: number of devices.

  Returns:
    Device numbers of shape [groups, size].

  Example:
    >>> read_groups('[2,4]<=[4,2]T(1,0)', 8).tolist()
    [[0, 2, 4, 6], [1, 3, 5, 7]]
    >>> read_groups("mesh['x'=2,'y'=4] {'x'}", 8).tolist()
    [[0, 4], [1, 5], [2, 6], [3, 7]]
  """
  if match := _MESH.search(text):
    return _by_axes(match[1], match[2], match[3])
  if match := _IOTA.search(text):
    return _iota(match[2], match[3]).reshape(_numbers(match[1]))
  groups = [_numbers(group) for group in _LIST.findall(text) if group.strip()]
  return _padded(groups) if groups else np.arange(devices)[None]


@functools.lru_cache(maxsize=512)
def read_pairs(text: str) -> np.ndarray:
  """The (source, target) pairs in a `source_target_pairs` attribute, of shape [pairs, 2].

  Pairs from a device to itself are left out.

  Example:
    >>> read_pairs('{{0,1},{1,0},{2,2}}').tolist()
    [[0, 1], [1, 0]]
  """
  pairs = np.array([_numbers(pair) for pair in _LIST.findall(text)], int).reshape(-1, 2)
  return pairs[pairs[:, 0] != pairs[:, 1]]


def connected(pairs: np.ndarray) -> np.ndarray:
  """The groups of devices that are connected by pairs, such as all devices of a ring.

  Example:
    >>> connected(np.array([[0, 2], [2, 4], [1, 3]])).tolist()
    [[0, 2, 4], [1, 3, -1]]
  """
  leader: dict[int, int] = {}

  def find(device: int) -> int:
    while leader.setdefault(device, device) != device:
      leader[device] = leader[leader[device]]
      device = leader[device]
    return device

  for source, target in pairs.tolist():
    first, second = sorted((find(source), find(target)))
    leader[second] = first
  groups: dict[int, list[int]] = {}
  for device in sorted(leader):
    groups.setdefault(find(device), []).append(device)
  return _padded(list(groups.values()))


def axes_of(groups: np.ndarray, mesh: Mapping[str, int]) -> tuple[str, ...]:
  """The mesh axes that groups span.

  Args:
    groups: device numbers of shape [groups, size], as from `read_groups`.
    mesh: size per mesh axis, in order.

  Returns:
    Names of axes; `'model[2/4]'` if a group has 2 of the 4 devices along an axis. Empty if every group is a
    single device, or if the groups do not follow the axes of the mesh (diagonals, or groups of another
    mesh).

  Example:
    >>> axes_of(read_groups('{{0,1},{2,3},{4,5},{6,7}}', 8), {'data': 2, 'model': 4})
    ('model[2/4]',)
  """
  sizes = list(mesh.values())
  if groups.size == 0 or int(groups.min()) < 0 or int(groups.max()) >= math.prod(sizes):
    return ()
  counts = []
  for positions in positions_of(groups, sizes):
    per_group = 1 + np.count_nonzero(np.diff(np.sort(positions, axis=1), axis=1), axis=1)
    if (per_group != per_group[0]).any():
      return ()
    counts.append(int(per_group[0]))
  if math.prod(counts) != groups.shape[1]:
    return ()
  return tuple(_named(axis, count, mesh[axis]) for axis, count in zip(mesh, counts) if count > 1)


def axes_of_pairs(pairs: np.ndarray, mesh: Mapping[str, int]) -> tuple[str, ...]:
  """The mesh axes that pairs span: those of the connected groups, or else all along which a pair moves.

  Example:
    >>> axes_of_pairs(read_pairs('{{0,1},{1,2},{2,3},{3,0}}'), {'data': 2, 'model': 4})
    ('model',)
  """
  if pairs.size == 0 or int(pairs.max()) >= math.prod(mesh.values()):
    return ()
  moved = [(at[:, 0] != at[:, 1]).any() for at in positions_of(pairs, list(mesh.values()))]
  return axes_of(connected(pairs), mesh) or tuple(axis for axis, moves in zip(mesh, moved) if moves)


def stride_of(groups: np.ndarray, mesh: Mapping[str, int]) -> int:
  """The distance, along the mesh axis of which groups have a part, from one device of a group to the next; 1 without such an axis.

  Example:
    >>> [stride_of(read_groups(text, 8), {'data': 8}) for text in ('{{0,4},{1,5},{2,6},{3,7}}', '[2,4]<=[8]')]
    [4, 1]
  """
  if not any(one.endswith(']') for one in axes_of(groups, mesh)):
    return 1
  strides = set[int]()
  for positions, size in zip(positions_of(groups, [*mesh.values()]), mesh.values()):
    steps = np.diff(np.sort(positions, axis=1), axis=1)
    if 0 < np.count_nonzero(steps[0]) < size - 1:
      strides.update(step for step in steps.ravel().tolist() if step)
  return strides.pop() if len(strides) == 1 else 1


def _named(axis: str, count: int, size: int) -> str:
  """The name of an axis, with `[count/size]` for a part of it."""
  return axis if count == size else f'{axis}[{count}/{size}]'


def _by_axes(sizes: str, order: str, over: str) -> np.ndarray:
  """The groups along axes, or parts of axes, of the mesh that is described in the text.

  `'b':(2)4` is the part of axis b with size 4, inside a part of size 2.
  """
  mesh = {axis[1]: int(axis[4]) for axis in _AXIS.finditer(sizes)}
  devices = _device_order(order, math.prod(mesh.values()))
  parts = [_part(axis, mesh) for axis in _AXIS.finditer(over)]
  cuts = {axis: sorted({1, size, *_edges(parts, axis)}) for axis, size in mesh.items()}
  # Each axis is split at the edges of its parts, so every piece is either in the group or outside it.
  pieces = [(axis, low, high) for axis, edges in cuts.items() for low, high in itertools.pairwise(edges)]
  inside = [
    any(axis == name and a <= low and high <= b for name, a, b in parts) for axis, low, high in pieces
  ]
  shaped = devices.reshape([high // low for _, low, high in pieces])
  front = [dim for dim, chosen in enumerate(inside) if not chosen]
  back = [dim for dim, chosen in enumerate(inside) if chosen]
  size = math.prod(shaped.shape[dim] for dim in back)
  return shaped.transpose(front + back).reshape(-1, size)


def _part(axis: re.Match[str], mesh: Mapping[str, int]) -> tuple[str, int, int]:
  """An axis, and the products of the sizes before and up to the end of its part."""
  before = int(axis[2] or 1)
  return axis[1], before, before * int(axis[3] or mesh[axis[1]])


def _edges(parts: Sequence[tuple[str, int, int]], axis: str) -> list[int]:
  """The edges of all parts of an axis."""
  return [edge for name, low, high in parts if name == axis for edge in (low, high)]


def _device_order(text: str, devices: int) -> np.ndarray:
  """The device order of a mesh in the text: `device_ids=([2,4]T(1,0))`, a list, or ascending."""
  if match := _RESHAPED.search(text):
    return _iota(match[1], match[2]).reshape(-1)
  listed = re.search(r'\(([\d,\s]+)\)', text)
  return np.array(_numbers(listed[1])) if listed else np.arange(devices)


def _iota(shape: str, order: str | None) -> np.ndarray:
  """0, 1, 2, ... reshaped and transposed."""
  sizes = _numbers(shape)
  counted = np.arange(math.prod(sizes)).reshape(sizes)
  return counted.transpose(_numbers(order)) if order else counted


def _padded(groups: Sequence[Sequence[int]]) -> np.ndarray:
  """Groups as one array, padded with -1."""
  size = max(map(len, groups), default=0)
  return np.array([[*group, *[-1] * (size - len(group))] for group in groups], int).reshape(
    len(groups), size
  )


def _numbers(text: str) -> list[int]:
  """The numbers in `1,2`."""
  return [int(number) for number in text.split(',') if number.strip()]
