"""Praxis: `tensor_split_dims_mapping`, the mesh axis of each dimension of a weight."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from flax_spmd._src.public import public
from flax_spmd._src.rules.table import Rules
from flax_spmd._src.text import value_text
from flax_spmd._src.tree_paths import path_string
from flax_spmd.errors import Problem, RulesError, raise_problems


@public('flax_spmd.translate')
def from_praxis(weights: Any, mesh_axes: Sequence[str]) -> Rules:
  """A path rule for each weight of a Praxis model; its moments follow it.

  Args:
    weights: tree of `WeightHParams`, as `abstract_init_with_metadata` of a layer returns. Of each,
      `full_split_dims_mapping`, or else `tensor_split_dims_mapping`, is read: per dimension the index or the name of a
      mesh axis, -1 or None for a replicated dimension, or a list of these; None for a replicated weight.
    mesh_axes: names of the mesh axes, in the order of the mesh.

  Raises:
    RulesError: a mapping has an index or a name that is no mesh axis, or `weights` has no mapping.

  Example:
    >>> import types
    >>> weight = types.SimpleNamespace(tensor_split_dims_mapping=[-1, ['data', 'mdl']])
    >>> translate.from_praxis({'params': {'w': weight}}, ('replica', 'data', 'mdl'))
    Rules(('(^|/)params/w$', P(None, ('data', 'mdl'))))
  """
  flat = jax.tree_util.tree_leaves_with_path(weights, is_leaf=_is_weight)
  mappings = {path_string(path): _mapping(weight) for path, weight in flat if _is_weight(weight)}
  if not mappings:
    raise RulesError(
      'The tree has no weight with a tensor_split_dims_mapping.\n'
      'Fix: pass the WeightHParams of a model, as layer.abstract_init_with_metadata(...) returns them.'
    )
  raise_problems(
    [problem.at(path) for path, mapping in mappings.items() for problem in _problems(mapping, mesh_axes)]
  )
  return Rules(
    *(
      (f'(^|/){re.escape(path)}$', PartitionSpec(*_entries(mapping, mesh_axes)))
      for path, mapping in sorted(mappings.items(), key=lambda each: -each[0].count('/'))
    )  # longer paths first: an expression is found in paths that end alike
  )


def _is_weight(node: Any) -> bool:
  return hasattr(node, 'tensor_split_dims_mapping')


def _mapping(weight: Any) -> Sequence[Any]:
  return getattr(weight, 'full_split_dims_mapping', weight.tensor_split_dims_mapping) or ()


def _problems(mapping: Any, mesh_axes: Sequence[str]) -> Iterator[Problem]:
  for entry in jax.tree.leaves(list(mapping)):
    if entry not in mesh_axes and not (isinstance(entry, int) and entry < len(mesh_axes)):
      yield Problem(
        f'its split_dims_mapping {list(mapping)!r} has {value_text(entry)}, which is no mesh axis of {tuple(mesh_axes)!r}.',
        'pass the axes of the mesh that the model is written for, in their order.',
        RulesError,
      )


def _entries(mapping: Sequence[Any], mesh_axes: Sequence[str]) -> Iterator[Any]:
  for entry in mapping:
    if isinstance(entry, (tuple, list)):
      yield tuple(axis for axis in _entries(entry, mesh_axes) if axis is not None)
    elif isinstance(entry, int):
      yield mesh_axes[entry] if entry >= 0 else None
    else:
      yield entry
