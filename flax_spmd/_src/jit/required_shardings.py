"""Required shardings: those that the leaves of a call's arguments must have, or are given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, Sharding

from flax_spmd._src.data.unusable_leaves import unusable
from flax_spmd._src.jit.arguments import Arguments
from flax_spmd._src.mesh import MeshLike, axis_sizes, describe
from flax_spmd._src.text import array_text
from flax_spmd._src.tree_paths import path_string
from flax_spmd.errors import Problem, raise_problems


class LeafShardings(NamedTuple):
  """The structure of a tree, and the sharding of each leaf (None: unspecified)."""

  treedef: Any
  shardings: tuple[Sharding | None, ...]

  def tree(self) -> Any:
    """The shardings as a tree."""
    return jax.tree.unflatten(self.treedef, self.shardings)


def check_required(dynamic: Any, shardings: Sequence[Sharding | None], arguments: Arguments) -> None:
  """Checks that every committed array among the dynamic arguments has its required sharding.

  Raises:
    LayoutError: names every array that has another, with both shardings.
  """
  problems = [
    Problem(
      '{} is sharded as {}, but in_rules require {}.'.format(
        path_string(arguments.named_path(path)), *_texts(leaf.sharding, sharding)
      ),
      'reshard it with layout.shard before the call, or pass the rules as in_constraints, which accept '
      'any sharding.',
    )
    for (path, leaf), sharding in zip(
      jax.tree_util.tree_leaves_with_path(dynamic), shardings, strict=True
    )
    if sharding is not None
    and isinstance(leaf, jax.Array)
    and not isinstance(leaf, Tracer)
    and leaf.committed
    and not leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
  ]
  raise_problems(problems)


@contextlib.contextmanager
def explained_arguments(arguments: Arguments, args: Any, kwargs: Any, mesh: MeshLike) -> Iterator[None]:
  """A block in which JAX's errors about arguments on other devices, deleted and abstract ones are explained.

  Raises:
    LayoutError: names every array that is committed to other devices than those of the mesh, deleted or abstract.
  """
  try:
    yield
    return
  except (ValueError, RuntimeError, TypeError) as error:
    text = str(error)
    named = [
      (path_string(arguments.named_path(path)), leaf)
      for path, leaf in jax.tree_util.tree_leaves_with_path(arguments.dynamic(args, kwargs))
    ]
    leaves = [
      (path, leaf)
      for path, leaf in named
      if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    ]
    problems = _on_other_devices(leaves, mesh) if 'incompatible devices' in text else []
    if 'is incompatible with mesh_shape' in text or 'context mesh' in text.lower():
      problems += _on_other_meshes(leaves, mesh)
    if 'has been deleted' in text:
      problems += [problem for path, leaf in leaves if (problem := unusable(path, leaf))]
    if 'not a valid JAX type' in text:
      problems += _abstract(named)
    if not problems:
      raise
  raise_problems(problems)


def _abstract(leaves: Sequence[tuple[str, Any]]) -> list[Problem]:
  return [
    Problem(
      f'{path} is abstract, {array_text(leaf.dtype, leaf.shape)}.',
      'pass arrays, as layout.init creates them; .lower, .trace, .eval_shape and .explain accept abstract arguments.',
    )
    for path, leaf in leaves
    if isinstance(leaf, jax.ShapeDtypeStruct)
  ]


def _on_other_devices(leaves: Sequence[tuple[str, jax.Array]], mesh: MeshLike) -> list[Problem]:
  """The arrays on devices other than those of a mesh, or on the same devices in another order."""
  if not isinstance(mesh, Mesh):
    return []
  wanted = [device.id for device in mesh.devices.flat]
  problems = []
  for path, leaf in leaves:
    own = getattr(leaf.sharding, 'mesh', None)
    ids = [
      device.id for device in (own.devices.flat if isinstance(own, Mesh) else leaf.sharding.device_set)
    ]
    text = None
    if leaf.committed and sorted(ids) != sorted(wanted):
      text = f'{path} is on devices {sorted(ids)}, but the layout is on {sorted(wanted)}.'
    elif isinstance(own, Mesh) and ids != wanted:
      text = f'{path} is on devices in the order {ids}, but the layout has the order {wanted}.'
    if text is not None:
      fix = 'transfer it with layout.shard, or with reshard of the layout that it is stored by.'
      problems.append(Problem(text, fix))
  return problems


def _on_other_meshes(leaves: Sequence[tuple[str, jax.Array]], mesh: MeshLike) -> list[Problem]:
  """The arrays whose mesh JAX cannot describe the program's shardings on, or whose types have shardings on another mesh."""
  others = [
    (path, leaf.sharding.mesh)
    for path, leaf in leaves
    if isinstance(leaf.sharding, NamedSharding) and _form(leaf.sharding.mesh) != _form(mesh)
  ]
  return [
    Problem(
      f'{path} is on the mesh {_described(other, mesh)}, but the layout is on {_described(mesh, other)}.',
      'transfer it with layout.shard, or with reshard of the layout that it is stored by.',
    )
    for path, other in others
  ]


def _form(mesh: MeshLike) -> Any:
  return axis_sizes(mesh), mesh.axis_types


def _described(mesh: MeshLike, other: MeshLike) -> str:
  """`{'data': 8}`, and the types of its axes if they are others than in another mesh."""
  types = sorted({axis_type.name for axis_type in mesh.axis_types})
  alike = {*mesh.axis_types} == {*other.axis_types}
  return describe(mesh) if alike else f'{describe(mesh)} of {" and ".join(types)} axes'


def _texts(one: Any, other: Any) -> tuple[str, str]:
  """Two shardings as text: specs and meshes, memories if they differ, and the device order if only that differs."""
  texts = _text(one), _text(other)
  if one.memory_kind != other.memory_kind:
    return f'{texts[0]} in {one.memory_kind}', f'{texts[1]} in {other.memory_kind or "device"}'
  if texts[0] != texts[1]:
    return texts
  ids = ([device.id for device in each.mesh.devices.flat] for each in (one, other))
  first, second = (f'{text} with devices {order}' for text, order in zip(texts, ids, strict=True))
  return first, second


def _text(sharding: Any) -> str:
  """`P('data',) on {'data': 8}`, or the `repr` of another kind of sharding."""
  if not isinstance(sharding, NamedSharding):
    return repr(sharding)
  return f'{sharding.spec} on {describe(sharding.mesh)}'


def put(leaf: Any, sharding: Sharding | None) -> Any:
  """A leaf with its required sharding; an abstract one only records it."""
  if sharding is None:
    return leaf
  if isinstance(leaf, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
  return jax.device_put(leaf, sharding)


def with_shardings(tree: Any, shardings: Sequence[Sharding | None]) -> Any:
  """The tree with abstract leaves in place of those that have a required sharding."""
  leaves, treedef = jax.tree.flatten(tree)
  return jax.tree.unflatten(
    treedef,
    [
      leaf
      if sharding is None
      else jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf), sharding=sharding)
      for leaf, sharding in zip(leaves, shardings, strict=True)
    ],
  )
