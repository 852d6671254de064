"""Restoring: everything is compared first, then read once, straight to where it belongs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from etils import epath
from orbax.checkpoint import v1 as ocp

from flax_spmd import trees
from flax_spmd.checkpoint import record
from flax_spmd.errors import (
  CheckpointError,
  CheckpointMismatchError,
  Problem,
  TargetError,
  did_you_mean,
  problems_text,
)
from flax_spmd.naming import path_string


def restore(path: str | os.PathLike[str], target: Any) -> Any:
  """Reads a checkpoint into the shapes, dtypes, shardings and boxes of `target`.

  Each device reads its own pieces only. In a program of several processes, every process calls this.

  Args:
    path: a folder that `save` wrote.
    target: what is wanted: `layout.abstract(...)`, or a state that exists (its values do not
      matter). The mesh, the rules, and whether there are boxes may all differ from what was saved.

  Returns:
    A tree like `target`, its arrays read from the checkpoint, laid out as `target` says.

  Raises:
    CheckpointNotFoundError: there is no checkpoint at `path`.
    TargetError: leaves of the target do not say where they go (lists all of them).
    CheckpointMismatchError: tree, shapes or dtypes differ (lists every difference).
    CheckpointError: the checkpoint was not written by `save`, or by a newer version.

  Example: see `save`.
  """
  path = record.as_path(path)
  plain = trees.unbox(target, apply_constraint=False)
  _check_target(plain)
  saved = record.load(path)
  problems = list(_differences(saved.leaves, record.describe(plain)))
  if problems:
    raise CheckpointMismatchError(
      f'The checkpoint {path} differs from the target:\n{problems_text(problems)}'
    )
  restored = ocp.load(path, jax.tree.map(_abstract, plain))
  _check_restored(path, restored, plain)
  return jax.tree.structure(target).unflatten(jax.tree.leaves(restored))


def _check_target(plain: Any) -> None:
  problems = [
    Problem(
      f'{path_string(where)} {wrong}.',
      'build the target with layout.abstract(...), which knows shapes, dtypes and where everything goes.',
    )
    for where, leaf in jax.tree_util.tree_leaves_with_path(plain)
    if (wrong := _says_too_little(leaf))
  ]
  if problems:
    raise TargetError(problems_text(problems))


def _says_too_little(leaf: Any) -> str | None:
  if isinstance(leaf, (jax.sharding.Sharding, jax.sharding.PartitionSpec)):
    return f'is a {type(leaf).__name__}, without shape and dtype'
  if hasattr(leaf, 'dtype') and getattr(leaf, 'sharding', None) is None:
    return f'({leaf.dtype}[{",".join(map(str, leaf.shape))}]) has no sharding'
  return None


def _differences(
  saved: Mapping[str, record.Leaf], wanted: Mapping[str, record.Leaf]
) -> Iterator[Problem]:
  """Every difference: leaves on one side only, then other shapes and dtypes."""
  extra = [path for path in saved if path not in wanted]
  for path in wanted:
    if path not in saved:
      text = f'{path}: in the target ({wanted[path]}), not in the checkpoint.'
      yield Problem(text + did_you_mean(path, extra), _TREE_FIX)
  for path in extra:
    yield Problem(f'{path}: in the checkpoint ({saved[path]}), not in the target.', _TREE_FIX)
  for path, leaf in wanted.items():
    there = saved.get(path)
    if there is not None and not _same(there, leaf):
      yield Problem(f'{path}: {there} in the checkpoint, {leaf} in the target.', _LEAF_FIX)


def _same(saved: record.Leaf, wanted: record.Leaf) -> bool:
  """Equal shape and dtype; a Python number also fits an array of its kind, and the other way round."""
  if saved == wanted:
    return True
  names = [leaf.dtype.rstrip('0123456789') for leaf in (saved, wanted)]
  kinds = {_KINDS.get(name, name) for name in names}
  python = any(leaf.dtype in ('bool', 'int', 'float') for leaf in (saved, wanted))
  return python and len(kinds) == 1 and saved.shape == wanted.shape == ()


_KINDS = {'uint': 'int', 'bfloat': 'float'}
_TREE_FIX = 'restore into a state of the same model and optimizer as was saved.'
_LEAF_FIX = 'give the model the sizes and dtypes that it was saved with.'


def _abstract(leaf: Any) -> Any:
  if not hasattr(leaf, 'dtype'):
    return leaf
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _check_restored(path: epath.Path, restored: Any, plain: Any) -> None:
  """What Orbax returned is what was asked for, leaf by leaf."""
  wrong = [
    path_string(where)
    for (where, leaf), got in zip(
      jax.tree_util.tree_leaves_with_path(plain), jax.tree.leaves(restored), strict=True
    )
    if hasattr(leaf, 'dtype') and not _as_asked(got, leaf)
  ]
  if wrong:
    raise CheckpointError(
      f'The checkpoint {path} was read, but these leaves are not as asked for: {", ".join(wrong)}.\n'
      'Fix: please report this; the state was not handed out.'
    )


def _as_asked(got: Any, leaf: Any) -> bool:
  return (
    isinstance(got, jax.Array)
    and got.shape == leaf.shape
    and got.dtype == leaf.dtype
    and got.sharding.is_equivalent_to(leaf.sharding, got.ndim)
  )
