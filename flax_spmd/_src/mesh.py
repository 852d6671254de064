"""Meshes: devices in a grid with named axes.

A mesh is either *concrete* (`jax.sharding.Mesh`: it holds devices, and programs run on it) or *abstract*
(`jax.sharding.AbstractMesh`: names and sizes only, enough to plan, trace and lower). Functions that run
nothing accept both.

    mesh = make_mesh({'data': 2, 'model': -1})          # 8 devices: data 2, model 4
    mesh = make_mesh({'fsdp': -1}, dcn={'replica': 2})  # 2 slices of 4 devices: replica 2, fsdp 4
    mesh = abstract_mesh({'data': 64, 'model': 8})      # needs no devices

JAX cannot pickle a concrete mesh. `PortableMesh` describes its devices, and finds them in another process.

Axis types are always passed to JAX explicitly, since its defaults differ between versions. The default of
this package is `AxisType.Auto`.
"""

from __future__ import annotations

import math
import numbers
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeAlias

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from flax_spmd._src.public import public
from flax_spmd._src.text import plain_strings, plural, shown, value_text
from flax_spmd.errors import MeshError

MeshLike: TypeAlias = Mesh | AbstractMesh

MOST_DEVICES = 2**31 - 1


@public('flax_spmd')
def make_mesh(
  axes: Mapping[str, int],
  *,
  dcn: Mapping[str, int] | None = None,
  devices: Sequence[Any] | None = None,
  axis_types: AxisType | Mapping[str, AxisType] | Sequence[AxisType] = AxisType.Auto,
  split_physical_axes: bool | None = None,
) -> Mesh:
  """A concrete mesh over the first available devices, in an order that suits their interconnect.

  Args:
    axes: size per axis name, in order. One size may be -1: the number of devices divided by the other
      sizes.
    dcn: size per axis name over the slow network (DCN) between slices or hosts, for hybrid meshes. The
      size of an axis that is also in `axes` is the product of both, with the slices outermost; other axes
      come first. One size may be -1: the number of slices (of processes, where devices have no slices)
      divided by the other sizes. By default, slices are along the first axes. Devices of a single process and slice are split into equal groups, for
      experiments.
    devices: devices to use; default `jax.devices()`. Surplus devices are ignored.
    axis_types: one `AxisType` for all axes, one per axis name (default Auto), or one per axis in order, as for
      `jax.make_mesh`.
    split_physical_axes: whether several mesh axes may share one physical axis of a torus. Default: if the sizes require
      it.

  Returns:
    A `jax.sharding.Mesh`.

  Raises:
    MeshError: a size is invalid, -1 cannot be filled in, there are too few devices or slices, the first axes do not divide
      into slices of TPUs, or an axis type is invalid or names an unknown axis.

  Example:
    >>> dict(make_mesh({'data': 2, 'model': -1}).shape)
    {'data': 2, 'model': 4}
    >>> dict(make_mesh({'fsdp': -1}, dcn={'replica': 2}).shape)
    {'replica': 2, 'fsdp': 4}
  """
  devices = jax.devices() if devices is None else _listed(devices)
  if not dcn:
    axes, dcn, devices = _along_slices(_sizes(axes, 'The mesh'), devices)
  outer = _dcn_sizes(devices, _sizes(dcn, 'dcn'))
  slices = _slices(devices, outer)
  inner = _fill_in(_sizes(axes, 'The mesh'), min(map(len, slices)))
  needed = math.prod(inner.values())
  names = [*(name for name in outer if name not in inner), *inner]
  sizes = {name: inner.get(name, 1) * outer.get(name, 1) for name in names}
  if needed > min(map(len, slices)):
    raise MeshError(
      f'The mesh {sizes} needs {needed * len(slices)} devices, but {_count(devices)} available.\n'
      f'Fix: choose sizes whose product is at most {len(devices)}, emulate devices with '
      f"jax.config.update('jax_num_cpu_devices', {needed * len(slices)}) before JAX is first used, or plan "
      f'without devices: flax_spmd.abstract_mesh({sizes}).'
    )
  types = _types(sizes, axis_types)
  shape = [inner.get(name, 1) for name in names]
  try:
    if not outer and not split_physical_axes and len(_by_slice(devices[:needed])) == 1:
      return jax.make_mesh(tuple(shape), tuple(sizes), axis_types=types, devices=devices[:needed])
    grids = [_grid(shape, each[:needed], bool(split_physical_axes)) for each in slices]
  except NotImplementedError as error:
    if split_physical_axes is not None:
      raise MeshError(
        f'The mesh {sizes} has axes that are no products of those of the torus of its devices, which JAX does not split.\n'
        'Fix: omit split_physical_axes, or choose other sizes.'
      ) from error
    grids = [_grid(shape, each[:needed], True) for each in slices]
  return Mesh(hybrid_grid(grids, [outer.get(name, 1) for name in names]), tuple(sizes), axis_types=types)


@public('flax_spmd', unchecked=['devices'])
def abstract_mesh(
  axes: Mapping[str, int],
  *,
  devices: int | None = None,
  axis_types: AxisType | Mapping[str, AxisType] | Sequence[AxisType] = AxisType.Auto,
) -> AbstractMesh:
  """A mesh without devices, for planning, tracing and lowering on hardware you don't have.

  Args:
    axes: positive size per axis name, in order. With `devices`, one size may be -1: the number of devices
      divided by the other sizes.
    devices: number of devices.
    axis_types: one `AxisType` for all axes, one per axis name (default Auto), or one per axis in order, as for
      `jax.make_mesh`.

  Raises:
    MeshError: a size is invalid, -1 cannot be filled in, there are too few devices, or an axis type is invalid
      or names an unknown axis.

  Example:
    >>> abstract_mesh({'data': 64, 'model': 8}).size
    512
    >>> dict(abstract_mesh({'data': -1, 'model': 8}, devices=256).shape)
    {'data': 32, 'model': 8}
  """
  sizes = _sizes(axes, 'The mesh')
  if not isinstance(devices, numbers.Integral | None) or isinstance(devices, bool):
    raise MeshError(
      f'devices={value_text(devices)} is no number of devices.\n'
      'Fix: pass their number, such as devices=64; make_mesh takes devices of JAX.'
    )
  sizes = sizes if devices is None else _fill_in(sizes, int(devices))
  _check_sizes(sizes, f'The mesh {value_text(sizes)}', allow_fill=False)
  if devices is not None and math.prod(sizes.values()) > devices:
    raise MeshError(
      f'The mesh {sizes} needs {math.prod(sizes.values())} devices, but is given devices={devices}.\n'
      f'Fix: choose sizes whose product is at most {devices}; one may be -1.'
    )
  return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=_types(sizes, axis_types))


class PortableMesh(NamedTuple):
  """A mesh as a value that can be pickled.

  Attributes:
    axes: size per axis name, in order.
    types: `AxisType` per axis.
    devices: platform and id of each device, in the order of the mesh; None for an abstract mesh.

  Example:
    >>> portable = PortableMesh.of(make_mesh({'data': 8}))
    >>> portable.devices[0], portable.here() == make_mesh({'data': 8})
    (('cpu', 0), True)
  """

  axes: dict[Any, int]
  types: tuple[AxisType, ...]
  devices: tuple[tuple[str, int], ...] | None

  @classmethod
  def of(cls, mesh: MeshLike) -> Self:
    """The description of a mesh."""
    devices = None
    if isinstance(mesh, Mesh):
      devices = tuple((device.platform, device.id) for device in mesh.devices.flat)
    return cls(axis_sizes(mesh), tuple(mesh.axis_types), devices)

  def here(self) -> MeshLike:
    """The mesh on this process's devices; an abstract one if the process lacks some of them."""
    return self.on_devices() or AbstractMesh(
      tuple(self.axes.values()), tuple(self.axes), axis_types=self.types
    )

  def on_devices(self) -> Mesh | None:
    """The mesh on this process's devices; None if it has none, or if the process lacks some of them.

    This starts JAX's backend, which a data-loading process may have to avoid.
    """
    known = {} if self.devices is None else _devices_of({platform for platform, _ in self.devices})
    devices = [known.get(device) for device in self.devices or ()]
    if not devices or None in devices:
      return None
    grid = np.array(devices, object).reshape(tuple(self.axes.values()))
    return Mesh(grid, tuple(self.axes), axis_types=self.types)


def check_mesh(mesh: Any) -> None:
  """Raises `MeshError` for a value that is no mesh, such as a layout or the sizes of one."""
  if not isinstance(mesh, (Mesh, AbstractMesh)):
    raise MeshError(
      f'{shown(value_text(mesh))} is no mesh.\n'
      'Fix: pass a mesh, such as layout.mesh, make_mesh({...}) or abstract_mesh({...}).'
    )


def axis_sizes(mesh: MeshLike) -> dict[str, int]:
  """Size per axis name, in the mesh's order.

  Raises:
    MeshError: it is no mesh, but a layout, say.

  Example:
    >>> axis_sizes(abstract_mesh({'data': 2, 'model': 4}))
    {'data': 2, 'model': 4}
  """
  check_mesh(mesh)
  return dict(zip(map(plain_strings, mesh.axis_names), mesh.axis_sizes, strict=True))


def with_auto_axes(mesh: MeshLike) -> MeshLike:
  """The mesh of the same devices whose axes are all Auto; the mesh itself if they are."""
  if set(mesh.axis_types) <= {AxisType.Auto}:
    return mesh
  auto = (AxisType.Auto,) * len(mesh.axis_names)
  if isinstance(mesh, AbstractMesh):
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=auto)
  return Mesh(mesh.devices, mesh.axis_names, axis_types=auto)


def axis_types(mesh: MeshLike) -> dict[str, AxisType]:
  """`AxisType` per axis name, in the mesh's order."""
  return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def current_mesh() -> AbstractMesh | None:
  """JAX's current mesh (from `jax.set_mesh`, a layout, or `shard_map`), or None.

  A bare `with mesh:` does not set it; JAX keeps that form for legacy code only.
  """
  mesh = jax.sharding.get_abstract_mesh()
  return None if mesh.empty else mesh


def placed_sharding(leaf: Any, mesh: MeshLike) -> NamedSharding | None:
  """The sharding of an argument on the devices of a mesh; None for one that JAX may place anywhere.

  Args:
    leaf: an argument of a function: an array, concrete or abstract, or anything else.
    mesh: a mesh, concrete or abstract.
  """
  sharding = getattr(leaf, 'sharding', None)
  if not isinstance(sharding, NamedSharding) or isinstance(leaf, Tracer):
    return None
  if isinstance(leaf, jax.Array) and not leaf.committed:
    return None
  same = sharding.mesh is mesh or sharding.mesh == mesh
  return sharding if same or _have_same_devices(sharding.mesh, mesh) else None


def _have_same_devices(one: MeshLike, other: MeshLike) -> bool:
  if not (isinstance(one, Mesh) and isinstance(other, Mesh)):
    return False
  return set(one.devices.flat) == set(other.devices.flat)


def describe(mesh: MeshLike | Mapping[str, int]) -> str:
  """A mesh as text for messages: `{'data': 2, 'model': 4}`."""
  return repr(dict(mesh) if isinstance(mesh, Mapping) else axis_sizes(mesh))


def _devices_of(platforms: Iterable[str]) -> dict[tuple[str, int], Any]:
  """The devices of some platforms, by platform and id; none for a platform that JAX does not have here."""
  found = {}
  for platform in platforms:
    try:
      found.update({(platform, device.id): device for device in jax.devices(platform)})
    except RuntimeError:
      continue
  return found


def _dcn_sizes(devices: Sequence[Any], dcn: dict[str, int]) -> dict[str, int]:
  """The sizes between slices, with a -1 replaced by the number of slices divided by the other sizes."""
  _check_sizes(dcn, f'dcn={dcn}', allow_fill=True)
  indices = {getattr(device, 'slice_index', None) for device in devices}
  kind = 'slice(s)' if indices != {None} else 'process(es)'
  count = len(indices if indices != {None} else {device.process_index for device in devices})
  known = math.prod(size for size in dcn.values() if size != -1)
  if -1 in dcn.values() and count % known:
    name = next(name for name, size in dcn.items() if size == -1)
    raise MeshError(
      f'The size of axis {value_text(name)} of dcn={dcn} cannot be computed: the {_count(devices)} in {count} {kind}, '
      f'which is not divisible by {known}.\n'
      f'Fix: pass a size for {value_text(name)}, or choose other sizes that divide {count}.'
    )
  return {name: count // known if size == -1 else size for name, size in dcn.items()}


def _grid(shape: Sequence[int], devices: Sequence[Any], split: bool) -> np.ndarray:
  """Devices in an order that suits their interconnect; NotImplementedError if axes of a torus have to be split."""
  return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=split)


def _by_slice(devices: Sequence[Any]) -> Counter[int | None]:
  """The number of devices of each slice, if they have slices."""
  return Counter(getattr(device, 'slice_index', None) for device in devices)


def _along_slices(
  axes: dict[str, int], devices: Sequence[Any]
) -> tuple[dict[str, int], dict[str, int], Sequence[Any]]:
  """The sizes within and between the slices of a mesh whose first axes are along them, and its devices."""
  sizes = _fill_in(axes, len(devices))
  used = devices[: math.prod(sizes.values())]
  slices = _by_slice(used)
  if len(slices) < 2 or len(used) < math.prod(sizes.values()):
    return axes, {}, devices
  inside = within_slice([*sizes.values()], len(slices)) if len({*slices.values()}) == 1 else None
  if inside is not None:
    outer = {name: size // part for (name, size), part in zip(sizes.items(), inside, strict=True)}
    return dict(zip(sizes, inside, strict=True)), outer, used
  if used[0].platform == 'tpu':
    counts = ' and '.join(map(str, slices.values()))
    raise MeshError(
      f'The first axes of the mesh {sizes} do not divide into the {len(slices)} slices of its devices, which have {counts} of them.\n'
      f'Fix: list an axis first whose size is a multiple of {len(slices)}, or give the sizes between slices, such as '
      f"make_mesh({{'fsdp': -1}}, dcn={{'replica': {len(slices)}}})."
    )
  return axes, {}, devices


def _slices(devices: Sequence[Any], dcn: dict[str, int]) -> list[list[Any]]:
  """The devices of each slice; one group of all devices without a hybrid mesh."""
  count = math.prod(dcn.values())
  if count == 1:
    return [list(devices)]
  groups: dict[Any, list[Any]] = {}
  for device in devices:
    groups.setdefault((getattr(device, 'slice_index', 0), device.process_index), []).append(device)
  by_slice = {
    key: [d for (at, _), group in groups.items() if at == key for d in group] for key, _ in groups
  }
  for slices in (by_slice, groups):
    if len(slices) == count:
      return list(slices.values())
  if len(groups) == 1 and len(devices) % count == 0:
    each = len(devices) // count
    return [list(devices[i * each : (i + 1) * each]) for i in range(count)]
  raise MeshError(
    f'The mesh needs {count} slices (dcn={dcn}), but the {_count(devices)} in {len(by_slice)} slice(s) and '
    f'{len(groups)} process(es).\n'
    'Fix: choose dcn sizes whose product is the number of slices, or of processes.'
  )


def within_slice(shape: Sequence[int], slices: int) -> tuple[int, ...] | None:
  """The part of a mesh's shape in one slice, if the slices are along the first axes; None if they do not divide these.

  Example:
    >>> within_slice((8, 4), 2), within_slice((2, 8), 4), within_slice((3, 4), 2)
    ((4, 4), (1, 4), None)
  """
  inside, left = [], slices
  for size in shape:
    common = math.gcd(size, left)
    if common not in (size, left):
      return None
    inside.append(size // common)
    left //= common
  return tuple(inside)


def hybrid_grid(grids: Sequence[np.ndarray], outer: Sequence[int]) -> np.ndarray:
  """Joins the device grids of all slices into one grid, with the slices outermost along every axis.

  Args:
    grids: one grid of devices per slice, all of one shape.
    outer: number of slices along each axis.
  """
  rank = len(outer)
  stacked = np.stack([np.asarray(grid, object) for grid in grids]).reshape(*outer, *grids[0].shape)
  order = [axis for dim in range(rank) for axis in (dim, rank + dim)]
  return stacked.transpose(order).reshape([a * b for a, b in zip(outer, grids[0].shape, strict=True)])


def _sizes(axes: Any, what: str) -> dict[Any, Any]:
  """The size of each axis; numbers of NumPy as integers. Values that are no size stay, for `_check_sizes`."""
  try:
    sizes = dict(axes)
  except (TypeError, ValueError):
    raise MeshError(
      f'{what} is {value_text(axes)}, where the size of each axis is expected.\n'
      "Fix: give every axis a name, as in {'data': 2, 'model': 4}."
    ) from None
  return {
    plain_strings(name): int(size) if isinstance(size, np.integer) else size
    for name, size in sizes.items()
  }


def _listed(devices: Any) -> list[Any]:
  listed = list(devices) if isinstance(devices, Iterable) else [devices]
  if not all(hasattr(device, 'process_index') for device in listed):
    raise MeshError(
      f'devices={value_text(devices)} are not devices.\n'
      'Fix: pass devices of JAX in one list, such as jax.devices()[:4]; abstract_mesh takes their number.'
    )
  if repeated := [device for device, count in Counter(listed).items() if count > 1]:
    raise MeshError(
      f'devices={value_text(devices)} contain {_named(repeated)} more than once.\n'
      'Fix: pass every device once, such as jax.devices()[:4].'
    )
  return listed


def _fill_in(sizes: dict[str, int], available: int) -> dict[str, int]:
  """`sizes` with a -1 replaced by the number of available devices divided by the other sizes."""
  _check_sizes(sizes, f'The mesh {value_text(sizes)}', allow_fill=True)
  unknown = [name for name, size in sizes.items() if size == -1]
  if not unknown:
    return sizes
  known = math.prod(size for size in sizes.values() if size != -1)
  if available % known or available < known:
    raise MeshError(
      f'The size of axis {value_text(unknown[0])} of the mesh {sizes} cannot be computed: {available} is not '
      f'divisible by {known}.\n'
      f'Fix: pass a size for {value_text(unknown[0])}, or choose other sizes that divide {available}.'
    )
  return {name: available // known if size == -1 else size for name, size in sizes.items()}


def _check_sizes(sizes: dict[str, int], what: str, *, allow_fill: bool) -> None:
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
      f'{what} has invalid sizes: {_named(wrong)}.\n'
      'Fix: pass positive integers' + ('; one size may be -1.' if allow_fill else '.')
    )
  fills = [name for name, size in sizes.items() if size == -1]
  if len(fills) > 1:
    raise MeshError(
      f'{what} has more than one size of -1: {_named(fills)}.\nFix: pass -1 for one axis only.'
    )
  if math.prod(map(abs, sizes.values())) > MOST_DEVICES:
    raise MeshError(
      f'{what} has more than {MOST_DEVICES} devices, which JAX cannot count.\nFix: pass smaller sizes.'
    )


def _types(
  sizes: Mapping[str, int], types: AxisType | Mapping[str, AxisType] | Sequence[AxisType]
) -> tuple[AxisType, ...]:
  if isinstance(types, AxisType) and types is not AxisType.Manual:
    return (types,) * len(sizes)
  given: Mapping[str, AxisType] = {}
  wrong: list[str] = []
  if isinstance(types, Mapping):
    given = types
    wrong = [f'{value_text(name)} is not an axis' for name in given if name not in sizes]
  elif isinstance(types, (tuple, list)):
    given = dict(zip(sizes, types))
    wrong = [f'{plural(len(types), "type")} for {len(sizes)} axes'] * (len(types) != len(sizes))
  known = AxisType.Auto, AxisType.Explicit  # only shard_map creates Manual axes
  kinds = given.values() if isinstance(types, (Mapping, tuple, list)) else [types]
  wrong += [
    f'{value_text(kind)} is neither AxisType.Auto nor Explicit' for kind in kinds if kind not in known
  ]
  if wrong:
    raise MeshError(
      f'axis_types={value_text(types)} for the mesh {describe(sizes)}: {", ".join(wrong)}.\n'
      'Fix: pass jax.sharding.AxisType.Auto or Explicit for all axes, one for each in order, or a dict of them by axis name.'
    )
  return tuple(given.get(name, AxisType.Auto) for name in sizes)


def _named(names: Iterable[str]) -> str:
  return ', '.join(map(value_text, names))


def _count(devices: Sequence[Any]) -> str:
  kind = devices[0].platform if devices else 'no'
  return f'{len(devices)} ({kind}) {"is" if len(devices) == 1 else "are"}'
