"""Batch leaves: the arrays of a call that are a batch, in a step whose model has no names.

    batch = batch_leaves(dynamic, returned, jaxpr, mesh, rules)
    batch.leaves, batch.axes                # (8, 9), ('data',)

Nothing marks an argument as a batch, so this is a deduction, and None unless all of it holds:

* no array of the arguments has names, and nothing in the step is constrained;
* the arrays of one argument have dimension 0 in common, sharded over the same mesh axes and nothing else. Arrays
  that are on no mesh yet count too, with the axes of the rule for `batch`;
* the axes split it into several parts, all of one size;
* the step does not return that argument;
* another argument, the state, is sharded over some of these axes. Without that, nothing is at stake.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, NamedSharding

from flax_spmd._src.jit.constrained_results import has_constraints
from flax_spmd._src.mesh import MeshLike, axis_sizes, placed_sharding
from flax_spmd._src.names.tree_names import TreeNames
from flax_spmd._src.rules.decisions import axis_names
from flax_spmd._src.rules.table import Rules


class BatchLeaves(NamedTuple):
  """The arrays of a call that are a batch.

  Attributes:
    leaves: their positions among the leaves of `(args, kwargs)`.
    axes: the mesh axes of their dimension 0.
  """

  leaves: tuple[int, ...]
  axes: tuple[str, ...]


class _ArgumentArray(NamedTuple):
  """An array of an argument: its position, shape and, if it is on the mesh, sharding."""

  position: int
  shape: tuple[int, ...]
  sharding: NamedSharding | None


def batch_leaves(
  dynamic: tuple[tuple, dict[str, Any]],
  returned: Callable[[], Collection[int]],
  jaxpr: Any,
  mesh: MeshLike,
  rules: Rules,
) -> BatchLeaves | None:
  """The batch of a call; None if it has names, or if no batch can be told from a state.

  Args:
    dynamic: the arguments `(args, kwargs)`, with their shardings.
    returned: function that returns the positions of the leaves of `(args, kwargs)` that the result contains.
    jaxpr: the program, as traced.
    mesh, rules: those of the layout.
  """
  if AxisType.Explicit in mesh.axis_types or has_constraints(jaxpr):
    return None
  arguments = list(_arguments(dynamic, mesh))
  if not any(_axes_of(leaf) for argument in arguments for leaf in argument):
    return None
  out, default = returned(), _axes_of_batches(mesh, rules)
  found = [
    (axes, argument)
    for argument in arguments
    if (axes := _batch_axes(argument, default)) and not any(leaf.position in out for leaf in argument)
  ]
  chosen = {(axes, argument[0].shape[0]) for axes, argument in _placed_first(found)}
  if len(chosen) != 1 or any(TreeNames(dynamic).statics):
    return None
  [(axes, size)] = chosen
  if shards(mesh, axes) == 1 or size % shards(mesh, axes):
    return None
  batch = {
    leaf.position
    for each, argument in found
    for leaf in argument
    if each == axes and leaf.shape and leaf.shape[0] == size
  }
  state = [leaf for argument in arguments for leaf in argument if leaf.position not in batch]
  at_stake = any(set(_axes_of(leaf)).intersection(axes) for leaf in state)
  return BatchLeaves(tuple(sorted(batch)), axes) if at_stake else None


def _arguments(dynamic: tuple[tuple, dict[str, Any]], mesh: MeshLike) -> Iterator[list[_ArgumentArray]]:
  """The arrays of each argument, in the order of the leaves of `(args, kwargs)`; those with a dimension first."""
  args, kwargs = dynamic
  position = 0
  for argument in [*args, *(kwargs[name] for name in sorted(kwargs))]:
    leaves = jax.tree.leaves(argument)
    shapes = (tuple(getattr(leaf, 'shape', ())) for leaf in leaves)
    each = [
      _ArgumentArray(position + offset, shape, placed_sharding(leaf, mesh))
      for offset, (leaf, shape) in enumerate(zip(leaves, shapes, strict=True))
    ]
    position += len(leaves)
    yield sorted(each, key=lambda leaf: not leaf.shape)


def _batch_axes(argument: Sequence[_ArgumentArray], default: tuple[str, ...]) -> tuple[str, ...]:
  """The mesh axes of an argument's dimension 0, if all of its arrays may be a batch; else ()."""
  arrays = [leaf for leaf in argument if leaf.shape]
  placed = {_axes_of(leaf) if _is_by_rows(leaf) else () for leaf in arrays if leaf.sharding is not None}
  axes = next(iter(placed)) if placed else default
  alike = len(placed) <= 1 and len({leaf.shape[0] for leaf in arrays}) == 1
  return axes if alike else ()


def _placed_first(found: Sequence[tuple[tuple[str, ...], Sequence[_ArgumentArray]]]) -> Sequence[Any]:
  """The arguments that are on the mesh, if there are any: they are certain."""
  placed = [one for one in found if any(leaf.sharding is not None for leaf in one[1])]
  return placed or found


def _axes_of_batches(mesh: MeshLike, rules: Rules) -> tuple[str, ...]:
  """The mesh axes of the rule for `batch`; () without one."""
  spec = rules.spec(('batch',)) if 'batch' in rules.by_name else None
  sizes = axis_sizes(mesh)
  return tuple(axis for entry in spec or () for axis in axis_names(entry) if axis in sizes)


def _axes_of(leaf: _ArgumentArray) -> tuple[str, ...]:
  """The mesh axes that an array is sharded over."""
  spec = () if leaf.sharding is None else leaf.sharding.spec
  return tuple(axis for entry in spec for axis in axis_names(entry))


def _is_by_rows(leaf: _ArgumentArray) -> bool:
  """Whether an array on the mesh is sharded over dimension 0, and no other."""
  entries = () if leaf.sharding is None else tuple(leaf.sharding.spec)
  return bool(entries) and bool(axis_names(entries[0])) and not any(map(axis_names, entries[1:]))


def shards(mesh: MeshLike, axes: Sequence[str]) -> int:
  """The number of parts that mesh axes split a dimension into."""
  sizes = axis_sizes(mesh)
  return math.prod(sizes[axis] for axis in axes)
