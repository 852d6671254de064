"""Submeshes: the devices of a pipeline's ranks.

A rank's mesh has the axes of the whole mesh, with the stage axis at size 1, so that specs mean the same on
all of them. A value of several ranks lies on their joint mesh, whole on each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from flax_spmd._src.compat import from_shards
from flax_spmd._src.mesh import MeshLike, abstract_mesh, axis_sizes, axis_types, describe
from flax_spmd._src.rules.decisions import axis_names, rule_text
from flax_spmd._src.rules.table import Rules, axes_of
from flax_spmd._src.text import few
from flax_spmd.errors import PipelineError, did_you_mean

AnyMesh = TypeVar('AnyMesh', bound=MeshLike)


def submesh(mesh: AnyMesh, axis: str, ranks: Sequence[int]) -> AnyMesh:
  """The devices of some ranks; of an abstract mesh, as many of them."""
  if isinstance(mesh, AbstractMesh):
    sizes = axis_sizes(mesh) | {axis: len(ranks)}
    return cast(Any, abstract_mesh(sizes, axis_types=axis_types(mesh)))
  devices = np.take(mesh.devices, list(ranks), mesh.axis_names.index(axis))
  return cast(Any, Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types))


def check_concrete(mesh: MeshLike) -> Mesh:
  """The mesh, if it has devices.

  Raises:
    PipelineError: it is abstract.
  """
  if not isinstance(mesh, Mesh):
    raise PipelineError(
      f'The mesh {describe(mesh)} is abstract: there are no devices to run stages on.\n'
      'Fix: use a layout over a concrete mesh.'
    )
  return mesh


def check_axis(mesh: MeshLike, rules: Rules, axis: str) -> None:
  """Raises unless stages can be laid over an axis of the mesh.

  Raises:
    PipelineError: the mesh lacks the axis, it is an Explicit one, or rules use it.
  """
  sizes = axis_sizes(mesh)
  if not isinstance(axis, str) or axis not in sizes:
    raise PipelineError(
      f'The mesh {describe(mesh)} has no axis {axis!r}.{did_you_mean(str(axis), sizes)}\n'
      "Fix: make a mesh with an axis for the stages, such as Layout({'stage': 4, ...}, rules), or say by "
      'axis=... which one it is.'
    )
  if AxisType.Explicit in mesh.axis_types:
    raise PipelineError(
      f'The mesh {describe(mesh)} has Explicit axes, and stages are cut from programs that have none.\n'
      'Fix: make the mesh with axis_types=AxisType.Auto, which is what make_mesh does.'
    )
  found = [
    f'  rule {rule_text(rule)} {clause!r}'
    for rule, clause in rules.all_rules(annotations=True)
    if axis in axes_of(clause)
  ]
  if found:
    raise PipelineError(
      f'Rules lay dimensions over {axis!r}, the axis of the stages, which a stage has only 1 of:\n'
      + '\n'.join(found)
      + '\nFix: lay them over other axes; which stage an array is on follows from its use.'
    )


def check_places(
  named: Sequence[tuple[str, Any]], shardings: Sequence[Any], mesh: MeshLike, axis: str, what: str
) -> None:
  """Raises if arrays are to lie over the axis of the stages, or on devices that are not the mesh's.

  Raises:
    PipelineError: names every such array.
  """
  found = [(name, sharding) for (name, _), sharding in zip(named, shardings, strict=True) if sharding]
  foreign = [
    f'  {name}: {sharding}'
    for name, sharding in found
    if not isinstance(sharding, NamedSharding) or not set(sharding.mesh.axis_names) <= set(mesh.shape)
  ]
  if foreign:
    raise PipelineError(
      f'{what} are given places that are not on the mesh {describe(mesh)}:\n'
      + few(foreign)
      + '\nFix: give a PartitionSpec, or a NamedSharding on a mesh with the same axes.'
    )
  staged = [
    f'  {name}: {sharding.spec}' for name, sharding in found if axis in axis_names(tuple(sharding.spec))
  ]
  if staged:
    raise PipelineError(
      f'{what} are laid over {axis!r}, the axis of the stages, which a stage has only 1 of:\n'
      + few(staged)
      + '\nFix: lay them over other axes; which stage an array is on follows from its use.'
    )


def spec_of(array: Any, axis: str, sizes: Any) -> PartitionSpec:
  """How an array lies, over the axes that stages have; one of another mesh, or of the host, is whole."""
  sharding = getattr(array, 'sharding', None)
  if not isinstance(sharding, NamedSharding):
    return PartitionSpec()
  return without(sharding.spec, axis) if set(sharding.mesh.axis_names) <= set(sizes) else PartitionSpec()


def without(spec: PartitionSpec, axis: str) -> PartitionSpec:
  """A spec without the stage axis."""

  def entry(axes: Any) -> Any:
    if isinstance(axes, tuple):
      return tuple(one for one in axes if one != axis) or None
    return None if axes == axis else axes

  entries = list(map(entry, spec))
  while entries and entries[-1] is None:
    entries.pop()
  return PartitionSpec(*entries)


def view(array: jax.Array, sharding: NamedSharding) -> jax.Array | None:
  """The part of an array that is on some of its devices, if that is all of it; nothing is copied."""
  held = getattr(array, 'sharding', None)
  if not isinstance(held, NamedSharding) or not held.device_set >= sharding.device_set:
    return None
  here = held.devices_indices_map(array.shape)
  there = sharding.devices_indices_map(array.shape)
  if any(here[device] != index for device, index in there.items()):
    return None
  parts = {shard.device: shard.data for shard in array.addressable_shards}
  return from_shards(array, sharding, [parts[device] for device in there if device in parts])


def union(parts: Sequence[jax.Array], sharding: NamedSharding, like: Any) -> jax.Array:
  """One array of what is the same on several ranks, those that are here; nothing is copied."""
  shards = [shard.data for part in parts for shard in part.addressable_shards]
  return from_shards(like, sharding, shards)
