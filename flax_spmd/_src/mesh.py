"""The mesh: devices in a grid whose axes have names and sizes.

A mesh is either *concrete* (`jax.sharding.Mesh`: it holds devices, programs run on it) or *abstract*
(`jax.sharding.AbstractMesh`: names and sizes only, enough to plan, trace and lower). Everything here
that does not run anything takes both.

    mesh = make_mesh({'data': 2, 'model': -1})     # 8 devices: data 2, model 4
    mesh = make_mesh({'fsdp': -1}, dcn={'replica': 2})  # 2 slices side by side: replica 2, fsdp 4
    mesh = abstract_mesh({'data': 64, 'model': 8})  # no device needed

Axis types are always passed on explicitly, because JAX's defaults differ between its versions;
ours is `AxisType.Auto` everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from flax_spmd._src.public_module import set_module
from flax_spmd.errors import MeshError

MeshLike: TypeAlias = Mesh | AbstractMesh


@set_module('flax_spmd')
def make_mesh(
  axes: Mapping[str, int],
  *,
  dcn: Mapping[str, int] | None = None,
  devices: Sequence[Any] | None = None,
  axis_types: AxisType | Mapping[str, AxisType] = AxisType.Auto,
  split_physical_axes: bool = False,
) -> Mesh:
  """A concrete mesh over the first devices at hand, in an order that suits their interconnect.

  Args:
    axes: size per axis name, in order. One size may be -1: it takes what the others leave.
    dcn: size per axis name over the slow network between slices (or hosts), for hybrid meshes. An axis
      that is in `axes` too gets the product, its slices outermost; one that is not comes first.
      Devices that are all in one process and slice are cut into equal groups, to try it out.
    devices: the devices to use; default `jax.devices()`. More devices than the mesh needs is fine.
    axis_types: one `AxisType` for all axes, or one per axis name (the others are Auto).
    split_physical_axes: whether a physical axis of a torus may be cut for several axes of the mesh.

  Returns:
    A `jax.sharding.Mesh`.

  Raises:
    MeshError: the sizes are no sizes, ask for more devices than there are, or for another number of
      slices; an axis type is none, or that of no axis.

  Example:
    >>> dict(make_mesh({'data': 2, 'model': -1}).shape)
    {'data': 2, 'model': 4}
    >>> dict(make_mesh({'fsdp': -1}, dcn={'replica': 2}).shape)
    {'replica': 2, 'fsdp': 4}
  """
  devices = list(jax.devices() if devices is None else devices)
  slices = _slices(devices, dict(dcn or {}))
  inner = _fill_in(dict(axes), min(map(len, slices)))
  needed = math.prod(inner.values())
  outer = dict(dcn or {})
  names = [*(name for name in outer if name not in inner), *inner]
  sizes = {name: inner.get(name, 1) * outer.get(name, 1) for name in names}
  if needed > min(map(len, slices)):
    raise MeshError(
      f'The mesh {sizes} needs {needed * len(slices)} devices, but {_count(devices)} at hand.\n'
      f'Fix: choose sizes whose product is at most {len(devices)}, emulate devices with '
      f"jax.config.update('jax_num_cpu_devices', {needed * len(slices)}) before JAX is first used, or plan "
      f'without devices: flax_spmd.abstract_mesh({sizes}).'
    )
  types = _types(sizes, axis_types)
  if not dcn and not split_physical_axes:
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices[:needed])
  shape = [inner.get(name, 1) for name in names]
  grids = [
    mesh_utils.create_device_mesh(shape, each[:needed], allow_split_physical_axes=split_physical_axes)
    for each in slices
  ]
  return Mesh(
    _side_by_side(grids, [outer.get(name, 1) for name in names]), tuple(sizes), axis_types=types
  )


@set_module('flax_spmd')
def abstract_mesh(
  axes: Mapping[str, int],
  *,
  devices: int | None = None,
  axis_types: AxisType | Mapping[str, AxisType] = AxisType.Auto,
) -> AbstractMesh:
  """A mesh of names and sizes only: plan, trace and lower for devices that are not here.

  Args:
    axes: size per axis name, in order; all of them positive. With `devices`, one may be -1: it takes what
      the others leave.
    devices: how many devices there are to be.
    axis_types: one `AxisType` for all axes, or one per axis name (the others are Auto).

  Raises:
    MeshError: a size is not a positive integer, or -1 cannot be filled in; an axis type is none, or that of no
      axis.

  Example:
    >>> abstract_mesh({'data': 64, 'model': 8}).size
    512
    >>> dict(abstract_mesh({'data': -1, 'model': 8}, devices=256).shape)
    {'data': 32, 'model': 8}
  """
  sizes = dict(axes) if devices is None else _fill_in(dict(axes), devices)
  _check_sizes(sizes, allow_fill=False)
  return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=_types(sizes, axis_types))


def axis_sizes(mesh: MeshLike) -> dict[str, int]:
  """Size per axis name, in the mesh's order.

  Example:
    >>> axis_sizes(abstract_mesh({'data': 2, 'model': 4}))
    {'data': 2, 'model': 4}
  """
  return dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))


def axis_types(mesh: MeshLike) -> dict[str, AxisType]:
  """`AxisType` per axis name, in the mesh's order."""
  return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def current_mesh() -> AbstractMesh | None:
  """The mesh that JAX has in context (`jax.set_mesh`, a layout, `shard_map`), or None.

  A bare `with mesh:` is not such a context any more: JAX keeps it for its own old code only.
  """
  mesh = jax.sharding.get_abstract_mesh()
  return None if mesh.empty else mesh


def describe(mesh: MeshLike | Mapping[str, int]) -> str:
  """How messages write a mesh: `{'data': 2, 'model': 4}`."""
  return repr(dict(mesh) if isinstance(mesh, Mapping) else axis_sizes(mesh))


def _slices(devices: Sequence[Any], dcn: dict[str, int]) -> list[list[Any]]:
  """The devices of each slice; without a hybrid mesh, all of them are one."""
  _check_sizes(dcn, allow_fill=False)
  wanted = math.prod(dcn.values())
  if wanted == 1:
    return [list(devices)]
  groups: dict[Any, list[Any]] = {}
  for device in devices:
    groups.setdefault((getattr(device, 'slice_index', 0), device.process_index), []).append(device)
  by_slice = {
    key: [d for (at, _), group in groups.items() if at == key for d in group] for key, _ in groups
  }
  found = next((found for found in (by_slice, groups) if len(found) == wanted), None)
  if found is not None:
    return list(found.values())
  if len(groups) == 1 and len(devices) % wanted == 0:
    each = len(devices) // wanted
    return [list(devices[i * each : (i + 1) * each]) for i in range(wanted)]
  raise MeshError(
    f'The mesh asks for {wanted} slices (dcn={dcn}), but the {_count(devices)} at hand in '
    f'{len(by_slice)} slice(s) and {len(groups)} process(es).\n'
    'Fix: choose dcn sizes whose product is the number of slices, or of processes.'
  )


def _side_by_side(grids: Sequence[np.ndarray], outer: Sequence[int]) -> np.ndarray:
  """One grid of the grids of all slices, which change slowest along every axis."""
  rank = len(outer)
  stacked = np.stack([np.asarray(grid, object) for grid in grids]).reshape(*outer, *grids[0].shape)
  order = [axis for dim in range(rank) for axis in (dim, rank + dim)]
  return stacked.transpose(order).reshape([a * b for a, b in zip(outer, grids[0].shape, strict=True)])


def _fill_in(sizes: dict[str, int], available: int) -> dict[str, int]:
  """`sizes` with its -1, if there is one, replaced by what `available` devices leave."""
  _check_sizes(sizes, allow_fill=True)
  unknown = [name for name, size in sizes.items() if size == -1]
  if not unknown:
    return sizes
  known = math.prod(size for size in sizes.values() if size != -1)
  if available % known or available < known:
    raise MeshError(
      f'Axis {unknown[0]!r} of the mesh {sizes} cannot be filled in: {available} devices do not '
      f'divide into groups of {known}.\n'
      f'Fix: give {unknown[0]!r} a size, or choose other sizes that divide {available}.'
    )
  return {name: available // known if size == -1 else size for name, size in sizes.items()}


def _check_sizes(sizes: dict[str, int], *, allow_fill: bool) -> None:
  wrong = [
    name
    for name, size in sizes.items()
    if not isinstance(size, int)
    or isinstance(size, bool)
    or size < (-1 if allow_fill else 1)
    or size == 0
  ]
  if wrong:
    raise MeshError(
      f'The mesh {sizes} has sizes that are no sizes: {_named(wrong)}.\n'
      'Fix: every size is a positive integer' + (', and one may be -1.' if allow_fill else '.')
    )
  fills = [name for name, size in sizes.items() if size == -1]
  if len(fills) > 1:
    raise MeshError(
      f'The mesh {sizes} leaves more than one axis to be filled in: {_named(fills)}.\n'
      'Fix: write -1 for one axis only.'
    )


def _types(sizes: Mapping[str, int], types: AxisType | Mapping[str, AxisType]) -> tuple[AxisType, ...]:
  if isinstance(types, AxisType) and types is not AxisType.Manual:
    return (types,) * len(sizes)
  given = types if isinstance(types, Mapping) else {}
  wrong = [f'{name!r} is no axis' for name in given if name not in sizes]
  kinds = given.values() if isinstance(types, Mapping) else [types]
  known = AxisType.Auto, AxisType.Explicit  # Manual is what shard_map makes of them
  wrong += [f'{kind!r} is neither AxisType.Auto nor Explicit' for kind in kinds if kind not in known]
  if wrong:
    raise MeshError(
      f'axis_types={types!r} for the mesh {describe(sizes)}: {", ".join(wrong)}.\n'
      'Fix: give jax.sharding.AxisType.Auto or Explicit for all axes, or a dict of them by axis name.'
    )
  return tuple(given.get(name, AxisType.Auto) for name in sizes)


def _named(names: Iterable[str]) -> str:
  return ', '.join(map(repr, names))


def _count(devices: Sequence[Any]) -> str:
  kind = devices[0].platform if devices else 'no'
  return f'{len(devices)} ({kind}) {"is" if len(devices) == 1 else "are"}'
