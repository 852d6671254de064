"""Foreign meshes: constraints and `shard_map`s of a program on another mesh than its layout's.

    layout = Layout({'data': 8, 'model': 1}, rules)
    jax.lax.with_sharding_constraint(x, NamedSharding(model.mesh, P('data', 'model')))   # {'data': 1, 'model': 8}

JAX accepts this: the program then moves `x` between two shardings that nobody has chosen together. A model that
holds a mesh of its own, made for another layout, is the usual cause.

A mesh with other axis names is a view of the same devices, and legitimate in a program for these devices. An axis
of the same name has to be the same axis. A program for a target's devices has no devices that a view could be of.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator
from typing import Any

from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.mesh import MeshLike, abstract_mesh, axis_sizes, axis_types, describe
from flax_spmd._src.rules.decisions import UNCONSTRAINED
from flax_spmd._src.source_lines import line_text, source_line, user_frame
from flax_spmd.errors import MeshError, Problem, problems_text, raise_problems

LAYOUTS_MESH, STAGES_MESH = "the layout's mesh", 'the mesh of a stage'
_FIXES = {
  LAYOUTS_MESH: "build the model on the layout's mesh, layout.mesh. For compare, search and Estimator, pass a function "
  'that builds it for a layout: lambda layout: TrainStep(...).',
  STAGES_MESH: "build the model on the layout's mesh, layout.mesh, and shard nothing over its axis of stages; or give a "
  'constraint a PartitionSpec alone, and a shard_map no mesh: each stage is a program on a mesh of its own.',
}
_KINDS = {'sharding_constraint': 'constraint', 'pjit': 'jit'} | {
  name: name for name in ('jit', 'shard_map', 'reshard', 'device_put')
}  # other equations repeat the sharding of an operand
_OF_SHARD_MAP = re.compile(
  r'The context mesh .* should match the mesh passed to shard_map (.*)', re.DOTALL
)
_OF_SIZE = re.compile(
  r'use_abstract_mesh cannot change the size of the mesh. Got new mesh: (.*?\)) with size=', re.DOTALL
)
_OF_ABSTRACT = re.compile(r'AbstractMesh does not implement (\w+)')
_AXIS = re.compile(r"'([^']*)': (\d+)")
_TYPE = re.compile(r'\b(Auto|Explicit|Manual)\b')


def check_meshes(
  jaxpr: Any, mesh: MeshLike, owner: str = LAYOUTS_MESH, several_ranks: bool = False
) -> None:
  """Checks that the constraints of a traced program are on the mesh of its layout.

  Args:
    jaxpr: the program; programs inside it are looked into.
    mesh: the layout's mesh, or that of a stage.
    owner: the name of that mesh, for the error text.
    several_ranks: whether the program is to run on the devices of several ranks, so that no mesh with devices fits.

  Raises:
    MeshError: some are not; lists all of them.
  """
  problems = dict.fromkeys(
    _problem(
      _KINDS[equation.primitive.name], spec, source_line(equation.source_info), other, mesh, owner
    )
    for equation in compat.equations_in(jaxpr)
    for spec, other in _meshes_of(equation)
    if _is_foreign(other, mesh) or (several_ranks and isinstance(other, Mesh))
  )
  raise_problems(list(problems))


def _meshes_of(equation: Any) -> Iterator[tuple[Any, MeshLike]]:
  """The meshes that the user has chosen in an equation, each with its spec."""
  name = equation.primitive.name
  if name == 'shard_map':
    yield None, equation.params['mesh']
  if name not in _KINDS:
    return
  for param in equation.params.values():
    for each in param if isinstance(param, (tuple, list)) else (param,):
      if isinstance(each, NamedSharding) and not each.mesh.empty and not _is_open(each.spec):
        yield each.spec, each.mesh


def _is_open(spec: PartitionSpec) -> bool:
  """Whether a constraint leaves every dimension to the compiler."""
  return len(spec) > 0 and all(axes is UNCONSTRAINED for axes in spec)


def _is_foreign(other: MeshLike, mesh: MeshLike) -> bool:
  if other is mesh:
    return False
  one, two = _axes(mesh), _axes(other)
  if isinstance(mesh, AbstractMesh):
    return one != two
  if isinstance(other, Mesh) and list(other.devices.flat) != list(mesh.devices.flat):
    return True
  shared = set(mesh.axis_names) & set(other.axis_names)
  return mesh.size != other.size or any(one.get(axis) != two.get(axis) for axis in shared)


def _axes(mesh: MeshLike) -> dict[str, tuple[int, int]]:
  """Size and stride of every axis of more than one device. The others have no effect."""
  axes, stride = {}, mesh.size
  for axis, size in axis_sizes(mesh).items():
    stride //= size
    if size > 1:
      axes[axis] = size, stride
  return axes


def _problem(kind: str, spec: Any, line: str, other: MeshLike, mesh: MeshLike, owner: str) -> Problem:
  spec = '' if spec is None else f' {spec}'
  sizes, others = axis_sizes(mesh), axis_sizes(other)
  is_alike = sizes == others or _axes(mesh) == _axes(other)
  difference = _difference(other, mesh, owner) if is_alike else ''
  idle = [axis for axis in sizes if sizes[axis] == others.get(axis, 1) == 1]
  one, two = (
    {axis: size for axis, size in each.items() if axis not in idle} or each for each in (others, sizes)
  )
  return Problem(
    f'The {kind}{spec} at {line} is on the mesh {one}{difference}; {owner} is {two}.',
    _FIXES[owner],
    MeshError,
  )


def _difference(other: MeshLike, mesh: MeshLike, owner: str) -> str:
  """The difference between two meshes with the same axes."""
  types = axis_types(other)
  if types != axis_types(mesh) and types.keys() == axis_types(mesh).keys():
    return f' with axis types {", ".join(type_.name for type_ in types.values())}'
  if owner == STAGES_MESH and isinstance(other, Mesh):
    return ' of given devices, not of those of each rank'
  if isinstance(mesh, AbstractMesh):
    return ' of the devices of this machine, not of a target'
  return ' of other devices, or of the same in another order'


@contextlib.contextmanager
def explained_mesh_errors(mesh: MeshLike, owner: str = LAYOUTS_MESH) -> Iterator[None]:
  """Replaces JAX's errors about meshes in a trace by ones that name the user's line, both meshes and a fix.

  Args:
    mesh, owner: as for `check_meshes`.

  Raises:
    MeshError: a `shard_map` or an operation is on another mesh, or an abstract mesh is asked for its devices.
  """
  try:
    yield
  except ValueError as error:
    problem = _explained(error, mesh, owner)
    if problem is None:
      raise
    raise MeshError(problems_text([problem])) from error


def _explained(error: ValueError, mesh: MeshLike, owner: str) -> Problem | None:
  of_shard_map = _OF_SHARD_MAP.match(str(error))
  if match := of_shard_map or _OF_SIZE.match(str(error)):
    kind = 'shard_map' if of_shard_map else 'operation'
    sizes = {axis: int(size) for axis, size in _AXIS.findall(match[1])}
    types = dict(zip(sizes, map(AxisType.__getitem__, _TYPE.findall(match[1])), strict=False))
    other = abstract_mesh(sizes, axis_types=types)
    return _problem(kind, None, _line(error), other, mesh, owner)
  if match := _OF_ABSTRACT.match(str(error)):
    return Problem(
      f'The program at {_line(error)} uses {match[1]} of the mesh {describe(mesh)}, which is abstract: it has '
      'axes, and no devices.',
      'use the axes (mesh.shape, mesh.size, mesh.axis_names), or a layout on concrete devices.',
    )
  return None


def _line(error: ValueError) -> str:
  """The user's line that has caused an error."""
  frames = [
    (frame.filename, frame.lineno or 0) for frame in reversed(traceback.extract_tb(error.__traceback__))
  ]
  return line_text(*frames[user_frame([file for file, _ in frames])])
