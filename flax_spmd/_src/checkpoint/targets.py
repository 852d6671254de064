"""Restore targets: the leaves to restore, from a given tree or from the checkpoint's own record."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from flax_spmd._src import compat
from flax_spmd._src.checkpoint.matching.allowed_changes import (
  Changes,
  arrangement_of,
  check_selection,
  is_selected,
  renamed,
  stacks_of,
)
from flax_spmd._src.checkpoint.matching.layer_stacks import restacked
from flax_spmd._src.checkpoint.matching.moved_axes import folders
from flax_spmd._src.checkpoint.matching.routes import Route, Side, after
from flax_spmd._src.checkpoint.storage import skeleton
from flax_spmd._src.checkpoint.storage.record import (
  NUMBERS,
  LeafRecord,
  Record,
  by_path,
  describe,
  dtype_of,
)
from flax_spmd._src.checkpoint.storage.skeleton import Skeleton
from flax_spmd._src.host_memory import check_memories
from flax_spmd._src.layout import Layout
from flax_spmd._src.mesh import make_mesh
from flax_spmd._src.names import box_trees
from flax_spmd._src.names.boxes import LogicallyPartitioned, Partitioned
from flax_spmd._src.names.tree_names import leaf_names
from flax_spmd._src.rules import toml_format
from flax_spmd._src.source_lines import warn
from flax_spmd._src.state_plan import Plan
from flax_spmd._src.text import array_text, with_article
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


class RestoreTarget(NamedTuple):
  """The leaves to restore, and how to build the result.

  Attributes:
    values: target leaf by path in the checkpoint: an abstract or concrete jax.Array, a numpy array, or a
      Python number.
    side: records of the leaves, to match with the checkpoint's.
    build: function from the restored leaves, in the order of `values`, to the result.
  """

  values: dict[str, Any]
  side: Side
  build: Callable[[Sequence[Any]], Any]


def of_tree(tree: Any, changes: Changes, saved: Iterable[str]) -> RestoreTarget:
  """The target for a tree.

  Args:
    tree: a plan, the result of `layout.abstract(...)`, or an existing state.
    changes: if they select a part of the checkpoint, the target is the tree's own part at that path; a tree without that
      path is itself the part.
    saved: paths in the checkpoint. If its part has such a part in turn (`params/params`), so has the tree's.

  Raises:
    TargetError: leaves have no shape, dtype or sharding (lists all of them).
  """
  named = tree
  if isinstance(tree, Plan):
    tree = tree.abstract()
    named = named.box(tree)
  only = changes.only
  part = functools.partial(_part, only=only, is_nested=_is_nested(changes, saved))
  inner = part(tree)
  flat = skeleton.flatten(box_trees.plain(inner))
  paths = [_below(only, path) for path in skeleton.paths(flat.skeleton)]
  values = by_path(paths, flat.leaves)
  _check(values)
  leaves = {
    path: describe(value, given)
    for (path, value), given in zip(values.items(), _names(named, part), strict=True)
  }
  kinds = {_below(only, path): kind for path, kind in flat.kinds.items()}
  return RestoreTarget(values, Side(leaves, kinds), functools.partial(box_trees.rebuilt, inner))


def variables_of(tree: Any, changes: Changes, saved: Iterable[str]) -> dict[str, Any]:
  """The variable of NNX around each leaf of a target that has one, by path; see `of_tree`."""
  only, is_nested = changes.only, _is_nested(changes, saved)
  inner = _part(tree.abstract() if isinstance(tree, Plan) else tree, only, is_nested)
  units = jax.tree.leaves(inner, is_leaf=box_trees.is_unit)
  flat = skeleton.flatten(box_trees.plain(inner))
  around = [unit for unit in units for _ in jax.tree.leaves(unit)]
  paths = (_below(only, path) for path in skeleton.paths(flat.skeleton))
  pairs = zip(paths, around, strict=True)
  return {path: unit for path, unit in pairs if compat.is_variable_type(type(unit))}


def _names(tree: Any, part: Callable[[Any], Any]) -> list[Any]:
  """The logical names of each leaf of a part of a tree: mesh axes do not give a dimension its meaning.

  They are those in the whole tree, since an array may get its names from another part.
  """
  named = jax.tree.unflatten(jax.tree.structure(tree), map(_Names, leaf_names(tree, logical_only=True)))
  return [leaf.names for leaf in jax.tree.leaves(part(named))]


class _Names:
  """The names of an array, as a leaf of a tree."""

  def __init__(self, names: Any):
    self.names = names


def _below(only: str | None, path: str) -> str:
  """The path in the whole checkpoint of a path in the part to restore."""
  if not only:
    return path
  return only if path == skeleton.ROOT else f'{only}/{path}'


def _is_nested(changes: Changes, saved: Iterable[str]) -> bool:
  """Whether the part of a checkpoint to restore has a part at the same path in turn."""
  inner = f'{changes.only}/{changes.only}/'
  return changes.only is not None and any(
    f'{new}/'.startswith(inner) for path in saved for new in renamed(changes, path)
  )


def _part(tree: Any, only: str | None, is_nested: bool = False) -> Any:
  """The part of a tree at a path; the whole tree if it has no such part, or should have one in it and has none."""
  part = _at(tree, only)
  return tree if part is None or (is_nested and _at(part, only) is None) else part


def _at(tree: Any, only: str | None) -> Any:
  """The part of a tree at a path; None if it has none."""
  node = tree
  for name in (only or '').split('/') if only else ():
    children = skeleton.one_level(node)
    matches = [child for keys, child in children if keys and str(key_value(keys[0])) == name]
    if not matches:
      return None
    node = matches[0]
  return node


def _check(values: Mapping[str, Any]) -> None:
  problems = [
    Problem(
      f'{path} {reason}.',
      'build the target with layout.abstract(...), which sets shapes, dtypes and shardings.',
    )
    for path, value in values.items()
    if (reason := _incomplete(value))
  ]
  if problems:
    raise TargetError(problems_text(problems))


def _incomplete(value: Any) -> str | None:
  """Why a leaf cannot be a target; None if it can."""
  if isinstance(value, (jax.sharding.Sharding, jax.sharding.PartitionSpec)):
    return f'is {with_article(type(value).__name__)}, without shape and dtype'
  if isinstance(value, np.ndarray) and not value.dtype.isnative:
    return f'has the byte order of another machine ({value.dtype.str})'
  if isinstance(value, (np.ndarray, np.generic, bool, int, float)):
    return None
  if not hasattr(value, 'dtype'):
    return f'is {with_article(type(value).__name__)}'
  sharding = getattr(value, 'sharding', None)
  if sharding is not None and _divides(sharding, tuple(value.shape)):
    return None
  described = f'({array_text(value.dtype, value.shape)})'
  if sharding is None:
    return f'{described} has no sharding'
  return f'{described} does not divide into the shards of {sharding}'


@functools.lru_cache(maxsize=1024)
def _divides(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> bool:
  try:
    sharding.shard_shape(shape)
  except ValueError:
    return False
  return True


# -- from the record


def layout_of(record: Record, layout: Layout | None, mesh: Any, rules: Any) -> Layout:
  """The layout of a restore without a target: the arguments, completed by the recorded layout.

  Args:
    record: record of the checkpoint.
    layout, mesh, rules: see `restore`.

  Raises:
    CheckpointError: the arguments are incomplete, and no layout is recorded.
    MeshError: the number of devices is not that of the recorded mesh, or its rules need a memory that they lack.
    RulesError: the rules do not match the mesh.
  """
  if layout is not None:
    return layout
  if mesh is not None and rules is not None:
    return Layout(mesh, rules)
  if record.layout is None:
    raise CheckpointError(
      'The checkpoint has no recorded layout.\n'
      'Fix: pass a target, layout.abstract(...), or layout=, or both mesh= and rules=.'
    )
  parsed = _parsed(record.layout)
  if mesh is None:
    mesh = _recorded_mesh(parsed)
  if rules is None:
    check_memories(mesh, parsed.rules, without=_WITHOUT_HOST)
  return Layout(mesh, parsed.rules if rules is None else rules, strict=parsed.strict)


def _parsed(text: str) -> Any:
  try:
    return toml_format.read(text)
  except (FlaxSpmdError, ValueError, TypeError, RecursionError) as error:
    raise CheckpointDamagedError(
      f'The recorded layout of the checkpoint cannot be read: {error}\n{_OTHER_MESH}'
    ) from error


def _recorded_mesh(parsed: Any) -> Any:
  """The recorded mesh, over all devices of this job."""
  size = math.prod(parsed.axes.values())
  if size != jax.device_count():
    axes = ', '.join(f'{name!r}: {size}' for name, size in parsed.axes.items())
    raise MeshError(
      f'The checkpoint was saved on a mesh of {size} devices, {{{axes}}}; this job has '
      f'{jax.device_count()}.\n{_OTHER_MESH}'
    )
  return make_mesh(parsed.axes, axis_types=parsed.types)


_WITHOUT_HOST = 'these are the recorded rules; pass layout=, rules= or a target without host(...)'
_OTHER_MESH = 'Fix: pass mesh=make_mesh(...) over the devices to use, and rules= for other mesh axes.'


def of_record(record: Record, layout: Layout, changes: Changes, boxed: bool) -> RestoreTarget:
  """The target for a checkpoint's own record under a layout: a tree of dicts and lists.

  Args:
    record: record of the checkpoint.
    layout: layout that shards the leaves.
    changes: renames, stacks and dtypes to apply to the tree, and the part to restore.
    boxed: whether to box leaves that have names.

  Raises:
    LayoutError, MeshAxisError, UnmatchedNameError, ConflictError: leaves cannot be sharded by the layout
      (lists all of them).
  """
  leaves = changed_leaves(record, changes)
  _warn_of_typos(leaves.values(), layout)
  boxes = {_keys_of(path): _box(leaf) for path, leaf in leaves.items()}
  tree = _nested(boxes, _list_lengths(record.skeleton))
  flat = skeleton.flatten(box_trees.plain(tree))
  shardings = jax.tree.leaves(layout.sharding(tree))
  sharded = {
    path: value if leaves[path].is_number else _with_sharding(value, sharding)
    for path, value, sharding in zip(skeleton.paths(flat.skeleton), flat.leaves, shardings, strict=True)
  }
  part = _part(tree, changes.only)
  structure = jax.tree.structure(part if boxed else box_trees.unbox(part, apply_constraint=False))
  values = {path: value for path, value in sharded.items() if is_selected(changes, path)}
  records = {
    path: describe(value, None if leaves[path].on_mesh else leaves[path].names)
    for path, value in values.items()
  }
  return RestoreTarget(
    values, Side(records, record.kinds), functools.partial(jax.tree.unflatten, structure)
  )


def _warn_of_typos(leaves: Iterable[LeafRecord], layout: Layout) -> None:
  """Warns of names that nearly match a rule. Without a target, no `layout.check` can report them."""
  known = layout.rules.by_name
  for name in dict.fromkeys(name for leaf in leaves for name in leaf.names or ()):
    meant = '' if name in known else did_you_mean(name, known)
    if meant:
      warn(f'{name!r}: no rule for this logical name; it is replicated.{meant}')


def _with_sharding(value: Any, sharding: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)


def _box(leaf: LeafRecord) -> Any:
  """An abstract leaf as in a model's variables, boxed if it has names; a Python number as itself."""
  if leaf.is_number:
    return leaf.value if leaf.value is not None else NUMBERS[leaf.dtype]()
  value = jax.ShapeDtypeStruct(leaf.shape, dtype_of(leaf.dtype))
  if leaf.names is None:
    return value
  return (Partitioned if leaf.on_mesh else LogicallyPartitioned)(value, leaf.names)


def changed_leaves(record: Record, changes: Changes) -> dict[str, LeafRecord]:
  """The recorded leaves after renaming, rearranging, stacking or unstacking, and casting."""
  leaves: dict[str, LeafRecord] = {}
  for path, leaf in record.leaves.items():
    if leaf.is_number and leaf.dtype not in NUMBERS:  # a string, as in checkpoints of plain Orbax
      continue
    for to in renamed(changes, path):
      if to != path or path not in leaves:
        leaves[to] = leaf
  check_selection(changes, record.leaves)
  leaves = {path: _rearranged(path, leaf, changes) for path, leaf in leaves.items()}
  for stack in stacks_of(changes):
    leaves = restacked(leaves, record.kinds, stack)
  _check_tree(leaves)
  return {path: _recast(leaf, changes) for path, leaf in leaves.items()}


def _rearranged(path: str, leaf: LeafRecord, changes: Changes) -> LeafRecord:
  """The record of a leaf after its arrangement; the leaf itself if that does not fit, which `match` reports."""
  arrangement = arrangement_of(changes, path)
  try:
    rearrangement = arrangement.of_shape(leaf.shape) if arrangement else None
  except ValueError:
    rearrangement = None
  return leaf if rearrangement is None else after(leaf, Route((), rearrangement=rearrangement), 1)


def _check_tree(paths: Iterable[str]) -> None:
  """Raises CheckpointError if a leaf is at the path of a node."""
  known = set(paths)
  if skeleton.ROOT in known and len(known) > 1:
    others = ', '.join(sorted(known - {skeleton.ROOT}))
    raise CheckpointError(
      f'A rename leaves no name of a path, which makes it the whole tree, beside {others}.\n'
      "Fix: give it a name, with Changes(renames={'old': 'new'})."
    )
  problems = [
    Problem(
      f'{folder} is a leaf, and {path} is below it.', "rename one, with Changes(renames={'old': 'new'})."
    )
    for path in known
    if (folder := next((f for f in folders(path) if f in known), None))
  ]
  if problems:
    raise CheckpointError(problems_text(sorted(problems)))


def _recast(leaf: LeafRecord, changes: Changes) -> LeafRecord:
  if isinstance(changes.dtypes, tuple):
    return leaf._replace(dtype=dict(changes.dtypes).get(leaf.dtype, leaf.dtype))
  return leaf


def _keys_of(path: str) -> tuple[str, ...]:
  return () if path == skeleton.ROOT else tuple(path.split('/'))


def _list_lengths(structure: Skeleton, keys: tuple[str, ...] = ()) -> dict[tuple[str, ...], int]:
  """The length of each list of a skeleton, by its keys."""
  lengths = {keys: len(structure)} if isinstance(structure, list) else {}
  for name, child in skeleton.children(structure):
    lengths |= _list_lengths(child, (*keys, name))
  return lengths


def _nested(
  boxes: Mapping[tuple[str, ...], Any],
  lengths: Mapping[tuple[str, ...], int],
  keys: tuple[str, ...] = (),
) -> Any:
  """A tree of dicts and lists from leaves by their keys, which may be empty.

  Args:
    boxes: leaves below `keys`, by their keys.
    lengths: length of each list, by its keys.
    keys: keys of the tree's root.
  """
  if keys in boxes:
    return boxes[keys]
  groups: dict[str, dict[tuple[str, ...], Any]] = {}
  for leaf_keys, box in boxes.items():
    groups.setdefault(leaf_keys[len(keys)], {})[leaf_keys] = box
  children = {name: _nested(inner, lengths, (*keys, name)) for name, inner in groups.items()}
  length = lengths.get(keys)
  if length is None or not all(name.isdecimal() and int(name) < length for name in children):
    return children
  return [children.get(str(index)) for index in range(length)]
