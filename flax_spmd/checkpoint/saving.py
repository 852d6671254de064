"""Saving: the state without its boxes, and the record of what they said."""

from __future__ import annotations

import os
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from flax_spmd import trees
from flax_spmd.checkpoint import record
from flax_spmd.errors import CheckpointError, CheckpointExistsError, Problem, problems_text
from flax_spmd.layout import Layout
from flax_spmd.naming import path_string


def save(path: str | os.PathLike[str], state: Any, *, layout: Layout) -> None:
  """Writes a state, sharded as it is, together with its names and its layout.

  In a program of several processes, every process calls this.

  Args:
    path: a folder that does not exist yet.
    state: any tree of arrays and numbers, boxed or not. The names of a state without boxes are
      those that `layout` planned it by.
    layout: the layout that the state lives under.

  Raises:
    CheckpointExistsError: there is something at `path`; it is left alone.
    CheckpointError: the state has abstract leaves, or leaves that are neither array nor number.

  Example:
    >>> layout = Layout({'data': 2, 'model': 4}, (('mlp', 'model'),))
    >>> w = layout.shard(LogicallyPartitioned(jnp.ones((8, 16)), ('embed', 'mlp')))
    >>> checkpoint.save(tmp / 'step_1', {'w': w}, layout=layout)
    >>> other = Layout({'data': 8}, (('embed', 'data'),))
    >>> restored = checkpoint.restore(tmp / 'step_1', other.abstract(lambda: {'w': w}))
    >>> restored['w'].value.sharding.spec
    P('data', None)
  """
  path = record.as_path(path)
  if path.exists():
    raise CheckpointExistsError(
      f'There is something at {path} already.\nFix: save to another path, or remove it first.'
    )
  plain = trees.unbox(state, apply_constraint=False)
  _check_leaves(plain)
  leaves = record.describe(plain)
  names = dict(zip(leaves, map(_json_names, layout.names(state)), strict=True))
  about = record.to_json(record.Record(leaves, names, layout.to_toml()))
  ocp.save(path, plain, custom_metadata=about)


def _check_leaves(plain: Any) -> None:
  problems = []
  for where, leaf in jax.tree_util.tree_leaves_with_path(plain):
    if isinstance(leaf, jax.ShapeDtypeStruct):
      fix = 'save a state that was made by layout.init, not one that was only planned.'
      problems.append(
        Problem(f'{path_string(where)} is abstract: it has a shape, {leaf.shape}, and no values.', fix)
      )
    elif not hasattr(leaf, 'dtype') and not isinstance(leaf, (bool, int, float)):
      fix = 'keep only arrays and numbers in the state.'
      problems.append(Problem(f'{path_string(where)} is a {type(leaf).__name__}.', fix))
  if problems:
    raise CheckpointError(problems_text(problems))


def _json_names(names: Any) -> list[Any] | None:
  """Names as JSON has them; what is no name (UNCONSTRAINED) is None."""
  if names is None:
    return None
  return [
    list(name) if isinstance(name, tuple) else name if isinstance(name, str) else None for name in names
  ]
