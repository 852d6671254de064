"""The mesh: devices in a grid whose axes have names and sizes.

A mesh is either *concrete* (`jax.sharding.Mesh`: it holds devices, programs run on it) or *abstract*
(`jax.sharding.AbstractMesh`: names and sizes only, enough to plan, trace and lower). Everything here
that does not run anything takes both.

    mesh = make_mesh({'data': 2, 'model': -1})     # 8 devices: data 2, model 4
    mesh = abstract_mesh({'data': 64, 'model': 8})  # no device needed

Axis types are always passed on explicitly, because JAX's defaults differ between its versions;
ours is `AxisType.Auto` everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from flax_spmd.errors import MeshError

MeshLike: TypeAlias = Mesh | AbstractMesh


def make_mesh(
  axes: Mapping[str, int],
  *,
  devices: Sequence[Any] | None = None,
  axis_types: AxisType | Mapping[str, AxisType] = AxisType.Auto,
) -> Mesh:
  """A concrete mesh over the first devices at hand, in an order that suits their interconnect.

  Args:
    axes: size per axis name, in order. One size may be -1: it takes what the others leave.
    devices: the devices to use; default `jax.devices()`. More devices than the mesh needs is fine.
    axis_types: one `AxisType` for all axes, or one per axis name (the others are Auto).

  Returns:
    A `jax.sharding.Mesh`.

  Raises:
    MeshError: the sizes are no sizes, or ask for more devices than there are.

  Example:
    >>> dict(make_mesh({'data': 2, 'model': -1}).shape)
    {'data': 2, 'model': 4}
  """
  devices = list(jax.devices() if devices is None else devices)
  sizes = _fill_in(dict(axes), len(devices))
  needed = math.prod(sizes.values())
  if needed > len(devices):
    raise MeshError(
      f'The mesh {sizes} needs {needed} devices, but {_count(devices)} at hand.\n'
      f'Fix: choose sizes whose product is at most {len(devices)}, emulate devices with '
      f"jax.config.update('jax_num_cpu_devices', {needed}) before JAX is first used, or plan "
      f'without devices: flax_spmd.abstract_mesh({sizes}).'
    )
  return jax.make_mesh(
    tuple(sizes.values()),
    tuple(sizes),
    axis_types=_types(sizes, axis_types),
    devices=devices[:needed],
  )


def abstract_mesh(
  axes: Mapping[str, int], *, axis_types: AxisType | Mapping[str, AxisType] = AxisType.Auto
) -> AbstractMesh:
  """A mesh of names and sizes only: plan, trace and lower for devices that are not here.

  Args:
    axes: size per axis name, in order; all of them positive.
    axis_types: one `AxisType` for all axes, or one per axis name (the others are Auto).

  Raises:
    MeshError: a size is not a positive integer.

  Example:
    >>> abstract_mesh({'data': 64, 'model': 8}).size
    512
  """
  sizes = dict(axes)
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
  if isinstance(types, AxisType):
    return (types,) * len(sizes)
  return tuple(types.get(name, AxisType.Auto) for name in sizes)


def _named(names: Iterable[str]) -> str:
  return ', '.join(map(repr, names))


def _count(devices: Sequence[Any]) -> str:
  kind = devices[0].platform if devices else 'no'
  return f'{len(devices)} ({kind}) {"is" if len(devices) == 1 else "are"}'
