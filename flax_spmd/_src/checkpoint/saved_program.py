"""Saved programs: a step under a layout, exported by `jax.export`, in one file that needs no code of the model.

    checkpoint.save_program('run/decode.program', decode, params, cache, token)
    decode = checkpoint.load_program('run/decode.program')
    token, cache = decode(params, cache, token)   # trees as `checkpoint.restore` returns them without a target

The file is a line of JSON, then the export. The line has the trees of arguments and results as skeletons, as a record has that of
a state, since `jax.export` stores no classes of the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flax_spmd._src.checkpoint.matching.allowed_changes import is_strings
from flax_spmd._src.checkpoint.storage import skeleton
from flax_spmd._src.checkpoint.storage.store import as_path, open_store, path_text
from flax_spmd._src.jit.jitted import Jitted
from flax_spmd._src.joint_call import first_line
from flax_spmd._src.mesh import MeshLike, axis_sizes, axis_types, check_mesh, describe, make_mesh
from flax_spmd._src.multihost import joint
from flax_spmd._src.names.box_trees import plain
from flax_spmd._src.names.nnx_variables import has_modules
from flax_spmd._src.plan.placement_shardings import check_concrete
from flax_spmd._src.public import public
from flax_spmd._src.text import array_text, plural, value_text
from flax_spmd.errors import (
  CheckpointDamagedError,
  CheckpointError,
  CheckpointNotFoundError,
  LayoutError,
  MeshError,
  Problem,
  raise_problems,
)

_FORMAT = 1
_JAX = metadata.version('jax')
Folder = str | os.PathLike[str]


@public('flax_spmd.checkpoint')
class SavedProgram:
  """A program that `save_program` has written; call it with the arguments of the step, by position.

  Arguments are trees of any classes, whose arrays have the paths of the step's arguments; boxes do not count. They are
  transferred to the shardings of the program, and donated as those of the step. Results are trees of dicts and lists.

  Attributes:
    mesh: the mesh that it runs on.
    arguments: text of every array of the arguments, by its path, such as `float32[8,16]`.
    jax_version: the version of JAX that exported it.

  Example:
    >>> layout = Layout({'data': 2, 'model': 4}, (('mlp', 'model'),))
    >>> w, x = layout.shard(np.ones((8, 16), 'float32'), (None, 'mlp')), np.ones((4, 8), 'float32')
    >>> checkpoint.save_program(tmp / 'matmul', layout.jit(lambda params, x: x @ params['w']), {'w': w}, x)
    >>> program = checkpoint.load_program(tmp / 'matmul')
    >>> program.arguments
    {'0/w': 'float32[8,16]', '1': 'float32[4,8]'}
    >>> program({'w': w}, x).sharding.spec
    P(None, 'model')
  """

  def __init__(self, path: Any, head: Mapping[str, Any], exported: export.Exported, mesh: Mesh):
    self.mesh = mesh
    self.jax_version: str = head['jax']
    self._path, self._result = path, head['result']
    paths = skeleton.paths(head['arguments'])
    self.arguments = dict(zip(paths, map(_text, exported.in_avals), strict=True))
    self._shardings = [_on(mesh, each) for each in cast(Any, exported).in_shardings_jax(None)]
    self._dtypes = [each.dtype for each in exported.in_avals]
    self._run = jax.jit(exported.call, donate_argnums=tuple(head['donated']))
    abstract = [
      jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding)
      for each, sharding in zip(exported.in_avals, self._shardings, strict=True)
    ]
    self._run.lower(*abstract)

  def __repr__(self) -> str:
    return f'<program {self._path} of {plural(len(self.arguments), "array")} on {describe(self.mesh)}>'

  def __call__(self, *args: Any) -> Any:
    """Runs the program.

    Raises:
      LayoutError: the arguments are not those of the step (lists every array that differs).
    """
    flat = skeleton.flatten(plain(list(args)))
    given = dict(zip(skeleton.paths(flat.skeleton), flat.leaves, strict=True)) if flat.leaves else {}
    raise_problems(list(_differences(self.arguments, given)))
    leaves = [given[path] for path in self.arguments]
    leaves = [
      leaf if isinstance(leaf, jax.Array) else np.asarray(leaf, dtype)
      for leaf, dtype in zip(leaves, self._dtypes, strict=True)
    ]
    results = self._run(*jax.device_put(leaves, self._shardings))
    return skeleton.unflatten(self._result, results.__getitem__)


@public('flax_spmd.checkpoint')
def save_program(path: Folder, step: Any, *args: Any, platforms: Sequence[str] | None = None) -> None:
  """Exports a step under its layout, with its shardings, to a file that runs without the code of the model.

  The file is written in one step, and replaces an older one. Store it beside a checkpoint, not in its folder: for example
  `run/decode.program` beside `run/1000`. Parameters are arguments of the step, and no part of the file. Needs
  `pip install 'flax-spmd[export]'`.

  Args:
    path: the file; a URL of a bucket too.
    step: function of `layout.jit`.
    *args: its arguments, by position; arrays may be abstract, with shardings. Without one, an array is replicated.
    platforms: platforms that it is to run on, such as `('cpu', 'tpu')`; default: the present one.

  Raises:
    CheckpointError: `step` is no function of `layout.jit`; it takes or returns modules of NNX, or static arguments; it
      has no arguments; or it cannot be exported, because of a host callback for example.

  Example:
    >>> layout = Layout({'data': 8}, (('batch', 'data'),))
    >>> double = layout.jit(lambda x: 2 * x)
    >>> checkpoint.save_program(tmp / 'double', double, layout.shard(np.ones(8, 'float32'), ('batch',)))
    >>> checkpoint.load_program(tmp / 'double')(np.arange(8, dtype='float32')).sharding.spec
    P('data',)
  """
  path = as_path(path)
  with joint('save_program', f'The export to {path_text(path)}'):
    content = _exported(path, step, args, platforms)
    if jax.process_index() == 0:
      open_store(path.parent).write(path.name, content)


@public('flax_spmd.checkpoint')
def load_program(path: Folder, mesh: Mesh | None = None) -> SavedProgram:
  """A program that `save_program` has written.

  Args:
    path: the file.
    mesh: mesh with the axes of the layout that it was saved under; default: one over the first devices.

  Raises:
    CheckpointNotFoundError: there is no such file.
    CheckpointDamagedError: the file is no program, or has changed since it was written.
    CheckpointError: this version of JAX cannot run it, or this platform.
    MeshError: there are too few devices, or `mesh` has other axes, or the same in another order.

  Example:
    >>> layout = Layout({'data': 8}, (('batch', 'data'),))
    >>> checkpoint.save_program(tmp / 'sum', layout.jit(jnp.sum), layout.shard(np.ones(8, 'float32'), ('batch',)))
    >>> float(checkpoint.load_program(tmp / 'sum')(np.arange(8, dtype='float32')))
    28.0
  """
  path = as_path(path)
  found = open_store(path.parent).read(path.name)
  if found is None:
    raise CheckpointNotFoundError(
      f'There is no program at {path}.\nFix: pass the file that save_program has written.'
    )
  head, payload = _read(path, found[0])
  mesh = _mesh_of(path, head, mesh)
  _check_platform(path, head, mesh)
  _check_package()
  try:
    exported = export.deserialize(bytearray(payload))
    _check_convention(exported.calling_convention_version)
    return SavedProgram(path, head, exported, mesh)
  except Exception as error:
    raise CheckpointError(
      f'JAX {_JAX} cannot run {path}, which JAX {head["jax"]} has exported: {first_line(error)}.\n'
      'Fix: save it with this version of JAX; an export serves newer versions for six months.'
    ) from error


def _exported(path: Any, step: Any, args: Any, platforms: Sequence[str] | None) -> bytes:
  """The content of the file."""
  if not isinstance(step, Jitted):
    raise CheckpointError(
      f'A {type(step).__name__} is no function of layout.jit, so it has no shardings to export.\n'
      'Fix: pass layout.jit(step).'
    )
  if has_modules(args):
    raise CheckpointError(
      'The arguments have modules of NNX, which are code of the model.\n'
      'Fix: nnx.split them, and merge them in the step.'
    )
  if isinstance(platforms, str) or not (platforms is None or is_strings(platforms)):
    raise CheckpointError(
      f"platforms={value_text(platforms)} is no list of names.\nFix: pass platforms=('cpu', 'tpu')."
    )
  _check_package()
  arguments, mesh = skeleton.flatten(plain(list(args))), cast(MeshLike, step.in_force.mesh)
  try:
    exported = _for_mesh(export.export(step, platforms=platforms), args, mesh)
    donated = [each.donated for each in _infos(step.lower(*args).args_info)]
  except Exception as error:
    raise CheckpointError(
      f'The step cannot be exported to {path}: {first_line(error)}.\n'
      'Fix: jax.export has to support everything in it; pass its arguments by position, as arrays.'
    ) from error
  count, results = len(exported.in_avals), len(exported.out_avals)
  _check_count(count, len(arguments.leaves))
  result = skeleton.flatten(plain(jax.tree.unflatten(exported.out_tree, range(results)))).skeleton
  flat = dataclasses.replace(
    exported,
    in_tree=jax.tree.structure((tuple(range(count)), {})),
    out_tree=jax.tree.structure(tuple(range(results))),
  )
  payload = bytes(flat.serialize())
  head = {
    'flax_spmd_program': _FORMAT,
    'jax': _JAX,
    'platforms': list(exported.platforms),
    'axes': axis_sizes(mesh),
    'types': {name: kind.name for name, kind in axis_types(mesh).items()},
    'arguments': arguments.skeleton,
    'result': result,
    'donated': [index for index, one in enumerate(donated) if one],
  }
  return json.dumps(head | {'sha256': _digest(head, payload)}).encode() + b'\n' + payload


def _check_count(count: int, leaves: int) -> None:
  """Checks the number of a program's arguments against that of the leaves that were passed."""
  if count != leaves:
    raise CheckpointError(
      f'The step has {plural(count, "array")} as arguments, but {leaves} leaves: the others are static.\n'
      'Fix: bind static arguments with functools.partial before layout.jit.'
    )
  if not count:
    raise CheckpointError(
      'The step has no arguments, which give a program its devices.\nFix: pass it an array, such as a random key.'
    )


def _for_mesh(exporting: Any, args: Any, mesh: MeshLike) -> export.Exported:
  """The export for a mesh. Scalars are replicated on it, since JAX gives them a mesh without axes if nothing else has one."""
  exported = exporting(*args)
  with contextlib.suppress(ValueError):
    exported.in_shardings_jax(mesh)
    return exported
  everywhere = NamedSharding(mesh, PartitionSpec())
  leaves, treedef = jax.tree.flatten(args)
  if len(leaves) != len(exported.in_avals):  # some are static
    return exported
  leaves = [
    jax.ShapeDtypeStruct((), aval.dtype, weak_type=aval.weak_type, sharding=everywhere)
    if aval.shape == ()
    else leaf
    for leaf, aval in zip(leaves, exported.in_avals, strict=True)
  ]
  exported = exporting(*jax.tree.unflatten(treedef, leaves))
  exported.in_shardings_jax(mesh)
  return exported


def _digest(head: Mapping[str, Any], payload: bytes) -> str:
  """The digest of everything in a file but itself."""
  rest = {name: value for name, value in head.items() if name != 'sha256'}
  return hashlib.sha256(json.dumps(rest).encode() + b'\n' + payload).hexdigest()


def _infos(tree: Any) -> list[Any]:
  return jax.tree.leaves(tree, is_leaf=lambda node: hasattr(node, 'donated'))


def _read(path: Any, content: bytes) -> tuple[dict[str, Any], bytes]:
  """The first line of a file, and the export."""
  line, _, payload = content.partition(b'\n')
  try:
    head = json.loads(line)
    version = head['flax_spmd_program']
  except (ValueError, KeyError, TypeError):
    raise CheckpointDamagedError(
      f'{path} is no program of save_program.\nFix: pass the file that save_program has written.'
    ) from None
  if version != _FORMAT:
    raise CheckpointError(
      f'A newer version of flax_spmd wrote {path} (format {version}).\nFix: upgrade flax_spmd.'
    )
  if _digest(head, payload) != head.get('sha256'):
    raise CheckpointDamagedError(
      f'{path} has changed since it was written.\nFix: save the program again.'
    )
  return head, payload


def _mesh_of(path: Any, head: Mapping[str, Any], mesh: Mesh | None) -> Mesh:
  """The mesh that a program runs on."""
  axes = head['axes']
  needed = int(np.prod(list(axes.values()), dtype=int))
  fix = f'save it under a layout on these devices, or load it on {plural(needed, "device")}.'
  types = {name: AxisType[kind] for name, kind in head['types'].items()}
  if mesh is not None:
    check_mesh(mesh)
    check_concrete(mesh)
  if mesh is not None and list(axis_sizes(mesh).items()) != list(axes.items()):
    raise MeshError(f'{path} is a program for the mesh {axes}, not for {describe(mesh)}.\nFix: {fix}')
  if mesh is not None and axis_types(mesh) != types:
    own, other = (
      ', '.join(f'{name}: {kind.name}' for name, kind in each.items())
      for each in (types, axis_types(mesh))
    )
    raise MeshError(
      f'{path} is a program for a mesh with axes of types {own}, not {other}.\n'
      'Fix: pass those to make_mesh as axis_types, or pass no mesh.'
    )
  if mesh is None and jax.device_count() < needed:
    raise MeshError(
      f'{path} is a program for the mesh {axes}, but there are only {plural(jax.device_count(), "device")}.\nFix: {fix}'
    )
  return mesh or make_mesh(axes, devices=jax.devices()[:needed], axis_types=types)


def _on(mesh: Mesh, sharding: Any) -> NamedSharding:
  """An exported sharding on a mesh; numbers and typed keys have one without axes, on no mesh."""
  if sharding is None or not sharding.mesh.axis_names:
    return NamedSharding(mesh, PartitionSpec())
  own, wanted = (
    (each.axis_names, each.axis_sizes, each.axis_types) for each in (mesh.abstract_mesh, sharding.mesh)
  )
  if own != wanted:
    raise ValueError(f'it is a program for the mesh {sharding.mesh}, not for {mesh.abstract_mesh}')
  return sharding.update(mesh=mesh)


def _check_platform(path: Any, head: Mapping[str, Any], mesh: Mesh) -> None:
  platform = mesh.devices.flat[0].platform
  names = {'gpu': ('cuda', 'rocm')}.get(platform, (platform,))
  if not set(names) & set(head['platforms']):
    raise CheckpointError(
      f'{path} is a program for {", ".join(head["platforms"])}, but the devices are of platform {value_text(platform)}.\n'
      f'Fix: save it with platforms=({", ".join(map(repr, [*head["platforms"], names[0]]))}).'
    )


def _check_convention(version: int) -> None:
  """Raises `ValueError` for an export that JAX would run without a look at the version of its form."""
  first = export.minimum_supported_calling_convention_version
  last = export.maximum_supported_calling_convention_version
  if not first <= version <= last:
    raise ValueError(
      f'it has calling convention {version}, and those from {first} to {last} are supported.'
    )


def _check_package() -> None:
  try:
    importlib.import_module('flatbuffers')
  except ImportError:
    raise CheckpointError(
      "jax.export stores programs with flatbuffers, which is not installed.\nFix: pip install 'flax-spmd[export]'."
    ) from None


def _differences(wanted: Mapping[str, str], given: Mapping[str, Any]) -> Iterator[Problem]:
  """The arrays of a call that are not those of the step."""
  fix = 'pass the arguments that the step was saved with; program.arguments lists their arrays.'
  for path, text in wanted.items():
    if path not in given:
      yield Problem(f'{path}: {text} in the program, but not among the arguments.', fix, LayoutError)
    elif _text(given[path]) != text:
      yield Problem(f'{path}: {text} in the program, but {_text(given[path])}.', fix, LayoutError)
  for path in (path for path in given if path not in wanted):
    yield Problem(f'{path}: among the arguments, but not in the program.', fix, LayoutError)


def _text(array: Any) -> str:
  on_host = isinstance(array, (np.ndarray, np.generic)) or not hasattr(array, 'dtype')
  dtype = jnp.result_type(array) if on_host else array.dtype
  return array_text(dtype, np.shape(array))
