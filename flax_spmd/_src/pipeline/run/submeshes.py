"""Submeshes: the meshes of a pipeline's ranks.

A rank's mesh has the axes of the whole mesh, with the stage axis at size 1. So a spec means the same on
every rank. A value of several ranks is on their joint mesh, and replicated over the stage axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from flax_spmd._src.compat import from_shards, trimmed_spec
from flax_spmd._src.mesh import MeshLike, abstract_mesh, axis_sizes, axis_types, describe
from flax_spmd._src.rules.decisions import axis_names, rule_text
from flax_spmd._src.rules.table import Rules
from flax_spmd._src.text import first_lines
from flax_spmd.errors import PipelineError, did_you_mean

AnyMesh = TypeVar('AnyMesh', bound=MeshLike)


def submesh(mesh: AnyMesh, axis: str, ranks: Sequence[int]) -> AnyMesh:
  """The mesh of some ranks; abstract if the whole mesh is."""
  if isinstance(mesh, AbstractMesh):
    sizes = axis_sizes(mesh) | {axis: len(ranks)}
    return cast(Any, abstract_mesh(sizes, axis_types=axis_types(mesh)))
  devices = np.take(mesh.devices, list(ranks), mesh.axis_names.index(axis))
  return cast(Any, Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types))


def processes_of(mesh: Mesh) -> set[int]:
  """The processes that own devices of a mesh."""
  return {device.process_index for device in mesh.devices.flat}


def is_local(mesh: Mesh) -> bool:
  """Whether this process owns devices of a mesh."""
  return jax.process_index() in processes_of(mesh)


def check_concrete(mesh: MeshLike) -> Mesh:
  """The mesh; raises PipelineError if it is abstract."""
  if not isinstance(mesh, Mesh):
    raise PipelineError(
      f'The mesh {describe(mesh)} is abstract: there are no devices to run stages on.\n'
      'Fix: use a layout over a concrete mesh.'
    )
  return mesh


def check_axis(mesh: MeshLike, rules: Rules, axis: str) -> None:
  """Raises PipelineError if the mesh lacks the axis of the stages, or rules use it."""
  sizes = axis_sizes(mesh)
  if axis not in sizes:
    raise PipelineError(
      f'The mesh {describe(mesh)} has no axis {axis!r}.{did_you_mean(str(axis), sizes)}\n'
      "Fix: make a mesh with an axis for the stages, such as Layout({'stage': 4, ...}, rules), or pass the "
      'name of that axis as axis=.'
    )
  offenders = [
    f'  rule {rule_text(rule)} {clause!r}'
    for rule, clause in rules.all_rules(annotations=True)
    if axis in clause.mesh_axes
  ]
  if offenders:
    _refuse('Rules shard dimensions', axis, '\n'.join(offenders))


def _refuse(sharded: str, axis: str, lines: str) -> NoReturn:
  raise PipelineError(
    f'{sharded} over {axis!r}, the axis of the stages, which has size 1 within a stage:\n{lines}\n'
    'Fix: shard them over other axes; the stage of an array follows from its use.'
  )


def check_shardings(
  named: Sequence[tuple[str, Any]], shardings: Sequence[Any], mesh: MeshLike, axis: str, noun: str
) -> None:
  """Raises PipelineError with the paths of arrays whose requested shardings use the stage axis, or other devices."""
  requested = [
    (name, sharding) for (name, _), sharding in zip(named, shardings, strict=True) if sharding
  ]
  foreign = [
    f'  {name}: {sharding}'
    for name, sharding in requested
    if not isinstance(sharding, NamedSharding) or not set(sharding.mesh.axis_names) <= set(mesh.shape)
  ]
  if foreign:
    raise PipelineError(
      f'{noun} are given shardings that are not on the mesh {describe(mesh)}:\n'
      + first_lines(foreign)
      + '\nFix: give a PartitionSpec, or a NamedSharding on a mesh with the same axes.'
    )
  staged = [
    f'  {name}: {sharding.spec}'
    for name, sharding in requested
    if axis in axis_names(tuple(sharding.spec))
  ]
  if staged:
    _refuse(f'{noun} are sharded', axis, first_lines(staged))


def spec_of(array: Any, axis: str, sizes: Any) -> PartitionSpec:
  """The spec of an array within a stage; replicated for an array on another mesh or on the host."""
  sharding = getattr(array, 'sharding', None)
  if not isinstance(sharding, NamedSharding):
    return PartitionSpec()
  return without(sharding.spec, axis) if set(sharding.mesh.axis_names) <= set(sizes) else PartitionSpec()


def without(spec: PartitionSpec, axis: str) -> PartitionSpec:
  """A spec without the stage axis."""

  def entry(axes: Any) -> Any:
    if isinstance(axes, tuple):
      return tuple(one for one in axes if one != axis)
    return None if axes == axis else axes

  return trimmed_spec(map(entry, spec))


def view(array: jax.Array, sharding: NamedSharding) -> jax.Array | None:
  """The same array on fewer of its devices, without a copy; None if its shards there do not match."""
  current = getattr(array, 'sharding', None)
  if not isinstance(current, NamedSharding) or not current.device_set >= sharding.device_set:
    return None
  current_indices = current.devices_indices_map(array.shape)
  indices = sharding.devices_indices_map(array.shape)
  if any(current_indices[device] != index for device, index in indices.items()):
    return None
  shards = {shard.device: shard.data for shard in array.addressable_shards}
  return from_shards(array, sharding, [shards[device] for device in indices if device in shards])


def union(parts: Sequence[jax.Array], sharding: NamedSharding, like: Any) -> jax.Array:
  """One array of its copies on this process's ranks, without copying data."""
  shards = [shard.data for part in parts for shard in part.addressable_shards]
  return from_shards(like, sharding, shards)
