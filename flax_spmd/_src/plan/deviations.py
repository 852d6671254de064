"""Deviations: arrays whose own sharding differs from their planned one.

    stored = stored_sharding(array, True)            # None for an uncommitted array
    deviation_of(planned, stored, array.ndim, True)  # None if both place the same slices on the same devices

An abstract array with a sharding is compared like an array that exists: its sharding is another plan. Two
shardings are compared by the slices that they place, not by their text.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from flax_spmd._src.mesh import MeshLike, axis_sizes, describe
from flax_spmd._src.rules.decisions import UNCONSTRAINED


class Deviation(NamedTuple):
  """A difference between an array's planned and its own sharding.

  Attributes:
    kind: 'spec' (other slices on the planned mesh), 'mesh' (another mesh, or one device), 'memory' (the
      planned slices in another memory).
    text: the array's own sharding, such as `stored as P('data', None)`.
  """

  kind: Literal['spec', 'mesh', 'memory']
  text: str


def stored_sharding(leaf: Any, exists: bool) -> Sharding | None:
  """The sharding of a committed array, or of an abstract array with one; None for any other leaf.

  JAX moves an uncommitted array to wherever a program needs it, so its device means nothing.

  Args:
    leaf: the array.
    exists: whether it is a `jax.Array`, and not traced.
  """
  if exists and not leaf.committed:
    return None
  sharding = getattr(leaf, 'sharding', None)
  return sharding if isinstance(sharding, Sharding) else None


def planned_memory(leaf: Any) -> str | None:
  """The memory of an abstract array with a sharding, which is part of its plan; rules decide no memory."""
  sharding = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None
  kind = None if sharding is None else sharding.memory_kind
  return None if kind == 'device' else kind


def deviation_of(planned: NamedSharding, stored: Sharding, ndim: int, exists: bool) -> Deviation | None:
  """The difference between the planned sharding of an array and its own; None if there is none.

  Args:
    planned, stored: the two shardings.
    ndim: rank of the array.
    exists: whether the array is stored on devices. It is not compared with a plan for an abstract mesh of
      other sizes, which is a plan for other devices.
  """
  same_mesh = _is_same_mesh(planned.mesh, stored)
  if UNCONSTRAINED in planned.spec or (
    exists and not same_mesh and isinstance(planned.mesh, AbstractMesh)
  ):
    return None
  kinds = planned.memory_kind, stored.memory_kind
  same_memory = None in kinds or kinds[0] == kinds[1]
  placed: Any = stored if same_memory else stored.with_memory_kind(str(planned.memory_kind))
  if same_mesh and isinstance(stored, NamedSharding):  # one of them may have no devices
    placed = NamedSharding(planned.mesh, stored.spec, memory_kind=planned.memory_kind)
  text = f'stored as {sharding_text(stored, planned.mesh)}'
  text = text if same_memory else f'{text} in memory {stored.memory_kind!r}'
  if placed.is_equivalent_to(planned, ndim):
    return None if same_memory else Deviation('memory', text)
  return Deviation('spec' if same_mesh else 'mesh', text)


def _is_same_mesh(mesh: MeshLike, stored: Sharding) -> bool:
  """Whether a sharding is on a mesh; meshes without devices are compared by their axes."""
  if not isinstance(stored, NamedSharding):
    return False
  if isinstance(mesh, AbstractMesh) or isinstance(stored.mesh, AbstractMesh):
    return list(axis_sizes(mesh).items()) == list(axis_sizes(stored.mesh).items())
  return mesh == stored.mesh


def sharding_text(sharding: Sharding, mesh: MeshLike) -> str:
  """A sharding as text: `P('data')` if it is on a mesh, else `P() on {'data': 8}` or `P() on device 0`."""
  if isinstance(sharding, NamedSharding):
    on_mesh = _is_same_mesh(mesh, sharding)
    return f'{sharding.spec}' if on_mesh else f'{sharding.spec} on {_other(sharding.mesh, mesh)}'
  if isinstance(sharding, SingleDeviceSharding):
    [device] = sharding.device_set
    return f'{PartitionSpec()} on device {device.id}'
  return str(sharding)


def _other(mesh: MeshLike, than: MeshLike) -> str:
  """A mesh as text, with its devices if they are the difference from another."""
  text = describe(mesh)
  if text != describe(than) or not isinstance(mesh, Mesh):
    return text
  return f'{text} of devices {_ids(mesh)}'


def _ids(mesh: Mesh) -> str:
  return ', '.join(str(device.id) for device in mesh.devices.flat[:_SHOWN_DEVICES]) + (
    ', ...' if mesh.size > _SHOWN_DEVICES else ''
  )


_SHOWN_DEVICES = 8
