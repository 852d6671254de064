"""Targets: what a checkpoint is restored into, given or made up from the checkpoint's own record."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from flax_spmd._src.checkpoint.matching.allowed_changes import Conversion
from flax_spmd._src.checkpoint.matching.layer_stacks import restacked
from flax_spmd._src.checkpoint.matching.routes import Side
from flax_spmd._src.checkpoint.storage import record as records
from flax_spmd._src.checkpoint.storage import skeleton
from flax_spmd._src.checkpoint.storage.record import NUMBERS, Leaf, Record, dtype_of
from flax_spmd._src.checkpoint.storage.skeleton import Skeleton
from flax_spmd._src.layout import Layout
from flax_spmd._src.mesh import make_mesh
from flax_spmd._src.names import box_trees as trees
from flax_spmd._src.names.boxes import LogicallyPartitioned, Partitioned
from flax_spmd._src.plan.planner import leaf_names
from flax_spmd._src.plan.unboxed_states import recalled
from flax_spmd._src.rules import toml_format as toml
from flax_spmd._src.tree_paths import key_value
from flax_spmd.errors import (
  CheckpointDamagedError,
  CheckpointError,
  FlaxSpmdError,
  MeshError,
  Problem,
  TargetError,
  did_you_mean,
  problems_text,
)


class Target(NamedTuple):
  """What is wanted.

  Attributes:
    values: per path, as the checkpoint calls it, what says where it goes: an array, abstract or
      not, a numpy array, or a Python number.
    side: what is to be matched with the checkpoint.
    build: makes the result of the leaves, which have the order of `values`.
  """

  values: dict[str, Any]
  side: Side
  build: Callable[[Sequence[Any]], Any]


def of_tree(tree: Any, layout: Layout | None, only: str | None) -> Target:
  """The target that a tree is.

  Args:
    tree: `layout.abstract(...)`, or a state that exists.
    layout: the layout that planned it, which knows the names of a state without boxes.
    only: the part of the checkpoint that is wanted: the tree's own part of that path, or if it has
      none, the tree.

  Raises:
    TargetError: leaves do not say where they go (all of them).
  """
  inner = _part(tree, only)
  apart = skeleton.take_apart(trees.unbox(inner, apply_constraint=False))
  paths = [_below(only, path) for path in skeleton.paths(apart.skeleton)]
  values = records.by_path(paths, apart.leaves)
  _check(values)
  names = _names(tree, inner, only, layout)
  leaves = {
    path: records.describe(value, given)  # names of mesh axes say nothing of what a dimension means
    for (path, value), given in zip(values.items(), names, strict=True)
  }
  kinds = {_below(only, path): kind for path, kind in apart.kinds.items()}
  return Target(values, Side(leaves, kinds), jax.tree.structure(inner).unflatten)


def _below(only: str | None, path: str) -> str:
  """A path within the part that is wanted, as one of the whole."""
  if not only:
    return path
  return only if path == skeleton.ROOT else f'{only}/{path}'


def _names(tree: Any, inner: Any, only: str | None, layout: Layout | None) -> list[Any]:
  """The names of the leaves of a part; a layout knows a state without boxes as a whole only."""
  numbered = jax.tree.structure(tree).unflatten(range(len(jax.tree.leaves(tree))))
  if layout is None:
    names = leaf_names(recalled(tree), logical_only=True)
  else:
    names = layout.names(tree, logical_only=True)
  return [names[number] for number in jax.tree.leaves(_part(numbered, only))]


def _part(tree: Any, only: str | None) -> Any:
  """The part of a tree at a path; the tree, if it has no such part."""
  node = tree
  for name in (only or '').split('/') if only else ():
    children = jax.tree_util.tree_flatten_with_path(
      node, is_leaf=lambda inner, node=node: inner is not node
    )[0]
    found = [child for keys, child in children if keys and str(key_value(keys[0])) == name]
    if not found:
      return tree
    node = found[0]
  return node


def _check(values: Mapping[str, Any]) -> None:
  problems = [
    Problem(
      f'{path} {wrong}.',
      'build the target with layout.abstract(...), which knows shapes, dtypes and where everything goes.',
    )
    for path, value in values.items()
    if (wrong := _says_too_little(value))
  ]
  if problems:
    raise TargetError(problems_text(problems))


def _says_too_little(value: Any) -> str | None:
  if isinstance(value, (jax.sharding.Sharding, jax.sharding.PartitionSpec)):
    return f'is a {type(value).__name__}, without shape and dtype'
  if isinstance(value, (np.ndarray, np.generic, bool, int, float)):
    return None
  if not hasattr(value, 'dtype'):
    return f'is a {type(value).__name__}'
  if getattr(value, 'sharding', None) is None:
    return f'({value.dtype}[{",".join(map(str, value.shape))}]) has no sharding'
  return None


# -- from the record


def layout_of(record: Record, layout: Layout | None, mesh: Any, rules: Any) -> Layout:
  """The layout to restore under where no target says it: as given, and as recorded for the rest.

  Raises:
    CheckpointError: nothing was given, and nothing is recorded.
    MeshError: there are not enough devices for the recorded mesh.
    RulesError: the rules do not fit the mesh.
  """
  if layout is not None:
    return layout
  if mesh is not None and rules is not None:
    return Layout(mesh, rules)
  if record.layout is None:
    raise CheckpointError(
      'The checkpoint says nothing of its layout.\n'
      'Fix: pass a target, layout.abstract(...), or layout=, or both mesh= and rules=.'
    )
  parsed = _parsed(record.layout)
  if mesh is None:
    mesh = _made(parsed)
  return Layout(mesh, parsed.rules if rules is None else rules)


def _parsed(text: str) -> Any:
  try:
    return toml.read(text)
  except (FlaxSpmdError, ValueError, TypeError, RecursionError) as error:
    raise CheckpointDamagedError(
      f'The layout that the checkpoint was saved under cannot be read: {error}\n{_OTHER_MESH}'
    ) from error


def _made(parsed: Any) -> Any:
  """The recorded mesh, of all devices that there are."""
  size = math.prod(parsed.axes.values())
  if size != jax.device_count():
    axes = ', '.join(f'{name!r}: {size}' for name, size in parsed.axes.items())
    raise MeshError(
      f'The checkpoint was saved on a mesh of {size} devices, {{{axes}}}; there are {jax.device_count()}.\n'
      f'{_OTHER_MESH}'
    )
  return make_mesh(parsed.axes, axis_types=parsed.types)


_OTHER_MESH = 'Fix: pass mesh=, make_mesh(...) of the devices to use, and rules= if they are others.'


def of_record(record: Record, layout: Layout, conversion: Conversion, boxed: bool) -> Target:
  """The target that a checkpoint's own record makes under a layout: a tree of dicts and lists.

  Args:
    record: what the checkpoint says.
    layout: where everything goes.
    conversion: its renames, stacks and dtypes change the tree; `only` is the part that is wanted.
    boxed: whether the result has boxes around what has names.

  Raises:
    LayoutError, MeshAxisError, UnmatchedNameError, ConflictError: all leaves that do not fit.
  """
  leaves = _converted(record, conversion)
  _warn_of_typos(leaves.values(), layout)
  tree = _nested({path: _box(leaf) for path, leaf in leaves.items()}, _list_lengths(record.skeleton))
  apart = skeleton.take_apart(trees.unbox(tree, apply_constraint=False))
  shardings = jax.tree.leaves(layout.sharding(tree))
  placed = {
    path: value if leaves[path].is_number else _placed(value, sharding)
    for path, value, sharding in zip(
      skeleton.paths(apart.skeleton), apart.leaves, shardings, strict=True
    )
  }
  part = _part(tree, conversion.only)
  form = jax.tree.structure(part if boxed else trees.unbox(part, apply_constraint=False))
  values = {path: value for path, value in placed.items() if conversion.wants(path)}
  described = {
    path: records.describe(value, None if leaves[path].on_mesh else leaves[path].names)
    for path, value in values.items()
  }
  return Target(values, Side(described, record.kinds), form.unflatten)


def _warn_of_typos(leaves: Iterable[Leaf], layout: Layout) -> None:
  """Nobody else tells of a name that is nearly one with a rule: there is no tree that `check` could see."""
  known = layout.rules.by_name
  for name in dict.fromkeys(name for leaf in leaves for name in leaf.names or ()):
    meant = did_you_mean(name, known) if isinstance(name, str) and name not in known else ''
    if meant:
      warnings.warn(f'{name!r}: no rule for this logical name; it is replicated.{meant}', stacklevel=5)


def _placed(value: Any, sharding: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)


def _box(leaf: Leaf) -> Any:
  """A leaf as it would be in a model's variables, without its values."""
  if leaf.is_number:
    return leaf.value if leaf.value is not None else NUMBERS[leaf.dtype]()
  value = jax.ShapeDtypeStruct(leaf.shape, dtype_of(leaf.dtype))
  if leaf.names is None:
    return value
  return (Partitioned if leaf.on_mesh else LogicallyPartitioned)(value, leaf.names)


def _converted(record: Record, conversion: Conversion) -> dict[str, Leaf]:
  """The leaves as they are wanted: under their new names, stacked or not, of other dtypes."""
  leaves: dict[str, Leaf] = {}
  for path, leaf in record.leaves.items():
    if leaf.is_number and leaf.dtype not in NUMBERS:  # a text, which no state has
      continue
    to = conversion.renamed(path)
    if to != path or path not in leaves:
      leaves[to] = leaf
  conversion.check_part(record.leaves)
  for stack in conversion.stacks:
    leaves = restacked(leaves, record.kinds, stack)
  return {path: _recast(leaf, conversion) for path, leaf in leaves.items()}


def _recast(leaf: Leaf, conversion: Conversion) -> Leaf:
  if isinstance(conversion.dtypes, tuple):
    return leaf._replace(dtype=dict(conversion.dtypes).get(leaf.dtype, leaf.dtype))
  return leaf


def _list_lengths(structure: Skeleton, path: str = '') -> dict[str, int]:
  """The length of each list of a skeleton, by path."""
  found = {path: len(structure)} if isinstance(structure, list) else {}
  for name, child in skeleton.children(structure):
    found |= _list_lengths(child, f'{path}/{name}' if path else name)
  return found


def _nested(boxes: Mapping[str, Any], lengths: Mapping[str, int], path: str = '') -> Any:
  """A tree of dicts and lists out of leaves by path."""
  if path in boxes or skeleton.ROOT in boxes:
    return boxes.get(path, boxes.get(skeleton.ROOT))
  groups: dict[str, dict[str, Any]] = {}
  start = len(path) + 1 if path else 0
  for leaf_path, box in boxes.items():
    groups.setdefault(leaf_path[start:].partition('/')[0], {})[leaf_path] = box
  made = {
    name: _nested(inner, lengths, f'{path}/{name}' if path else name) for name, inner in groups.items()
  }
  length = lengths.get(path)
  if length is None or not all(name.isdecimal() and int(name) < length for name in made):
    return made
  return [made.get(str(index)) for index in range(length)]
