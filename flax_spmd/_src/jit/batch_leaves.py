"""Batch leaves: the arrays of a call that are a batch, in a step that does not constrain it.

    batch = batch_leaves(dynamic, returned, jaxpr, mesh, rules)
    batch.leaves, batch.axes                # (8, 9), ('data',)

Nothing marks an argument as a batch, so this is a deduction, and None unless all of it holds:

* nothing in the step is constrained over the axes of the batch;
* the arrays of one argument have dimension 0 in common, sharded over the same mesh axes and nothing else. Arrays
  that are on no mesh yet count too, with the axes of the rule for `batch`. Raw random keys beside them do not count;
* the axes split it into several parts, all of one size;
* the step returns no array like one of that argument, as it does of a state, unless it is as long as another argument for
  which this holds, or there is none;
* another argument, the state, is on the mesh.

If that state is sharded over some of the batch's axes (FSDP) and nothing is constrained, the batch has to stay sharded
throughout the step; see `is_decided_by_author`. If the state is not, or such arguments differ in size or may be a state,
those that are on no mesh yet are sharded as the step begins: every device would compute all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence, Set
from itertools import combinations
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.jit.constrained_results import has_constraints, is_constrained_over
from flax_spmd._src.mesh import MeshLike, axis_sizes, placed_sharding
from flax_spmd._src.names.tree_names import TreeNames
from flax_spmd._src.rules.decisions import axis_names
from flax_spmd._src.rules.table import Rules


class BatchLeaves(NamedTuple):
  """The arrays of a call that are a batch.

  Attributes:
    leaves: their positions among the leaves of `(args, kwargs)`.
    axes: the mesh axes of the examples.
    is_throughout: whether values that are computed from them have to be constrained, too.
    dimension: the dimension of the examples.
    is_named: whether arrays of the state have names.
  """

  leaves: tuple[int, ...]
  axes: tuple[str, ...]
  is_throughout: bool = True
  dimension: int = 0
  is_named: bool = False


class ArgumentArray(NamedTuple):
  """An array of an argument: its position, shape and, if it is on the mesh, sharding; whether it is a raw random key."""

  position: int
  shape: tuple[int, ...]
  sharding: NamedSharding | None
  is_key: bool


_Found = tuple[tuple[str, ...], Sequence[ArgumentArray]]  # axes of dimension 0, and the argument


def batch_leaves(
  dynamic: tuple[tuple, dict[str, Any]],
  returned: Callable[[], Set[int]],
  jaxpr: Any,
  mesh: MeshLike,
  rules: Rules,
  is_named: bool | None = None,
) -> BatchLeaves | None:
  """The batch of a call; None if the step needs no constraints, or if no batch can be told from a state.

  Args:
    dynamic: the arguments `(args, kwargs)`, with their shardings.
    returned: function that returns the positions of the leaves of `(args, kwargs)` that the result contains.
    jaxpr: the program, as traced.
    mesh, rules: those of the layout.
    is_named: whether arrays of the arguments have names. None: as found in them.
  """
  if AxisType.Explicit in mesh.axis_types:
    return None
  arguments = list(argument_arrays(dynamic, mesh))
  placed = [leaf for argument in arguments for leaf in argument if leaf.sharding is not None]
  is_all_placed = all(leaf.sharding is not None for each in arguments for leaf in each if leaf.shape)
  is_named = any(TreeNames(dynamic).statics) if is_named is None else is_named
  has_sharded = any(map(_axes_of, placed))
  is_settled = not has_sharded or (not is_named and has_constraints(jaxpr))
  if not placed or (is_all_placed and is_settled):
    return None
  out, default = returned(), axes_of_batches(mesh, rules)
  possible = [
    (axes, argument)
    for argument in arguments
    if (axes := batch_axes(argument, default))
    and shards(mesh, axes) > 1
    and argument[0].shape[0] % shards(mesh, axes) == 0
  ]
  unlike = [one for one in possible if not any(leaf.position in out for leaf in one[1])]
  found = [one for one in possible if one in unlike or not is_placed(one[1])]
  chosen = _placed_first(unlike or found)
  sizes = {argument[0].shape[0] for _, argument in chosen}
  if len({axes for axes, _ in chosen}) != 1 or (len(sizes) > 1 and not unlike):
    return None
  axes = chosen[0][0]
  batch = {
    leaf.position: leaf
    for each, argument in found
    for leaf in argument
    if each == axes and leaf.shape and leaf.shape[0] in sizes
  }
  state = [leaf for argument in arguments for leaf in argument if leaf.position not in batch]
  over_axes = {
    leaf.position: over
    for leaf in state
    if leaf.sharding is not None and (over := sizes_over(leaf.shape, leaf.sharding.spec, axes))
  }
  is_throughout = bool(over_axes and unlike) and len(sizes) == 1
  if is_throughout:
    shapes, over = [leaf.shape for leaf in state], set().union(*over_axes.values())
    is_decided = is_decided_by_author(jaxpr, is_named, shapes, over, out >= over_axes.keys())
  else:
    is_decided = is_placed([*batch.values()]) or is_constrained_over(jaxpr, axes)
  if is_decided:
    return None
  return BatchLeaves(tuple(sorted(batch)), axes, is_throughout, is_named=is_named)


def sizes_over(shape: Sequence[int], spec: Iterable[Any], axes: Collection[str]) -> set[int]:
  """The sizes of an array's dimensions that are sharded over some of these mesh axes."""
  return {size for size, entry in zip(shape, spec) if not {*axis_names(entry)}.isdisjoint(axes)}


def is_decided_by_author(
  jaxpr: Any,
  is_named: bool,
  shapes: Iterable[tuple[int, ...]],
  over: Container[int] = (),
  is_updated: bool = True,
) -> bool:
  """Whether the author of a step has decided about activations, where its state is sharded over the batch's axes.

  With names, that is by a constraint of anything but arrays of the state, which boxes constrain as they are opened; by
  experts over these axes, as tokens move to them; or by a step that does not train: one for inference may well leave
  weights where they are.

  Args:
    jaxpr: the program.
    is_named: whether arrays of the state have names.
    shapes: the shapes of the state.
    over: the sizes of the state's dimensions over the batch's axes.
    is_updated: whether the step returns all arrays that are sharded over the batch's axes.
  """
  if not is_named:
    return has_constraints(jaxpr)
  slices = shapes_of_boxes(shapes)
  if not is_updated or has_constraints(jaxpr, slices):
    return True
  return any(_is_of_experts(equation, over, slices) for equation in compat.equations_in(jaxpr))


def shapes_of_boxes(shapes: Iterable[tuple[int, ...]]) -> set[tuple[int, ...]]:
  """The shapes of values that are constrained as the boxes of a state are opened, of arrays of these shapes.

  A loop over layers opens boxes of slices, which lack one dimension; `remat_scan` those that lack more.
  """
  return {
    part for shape in shapes for count in range(len(shape) + 1) for part in combinations(shape, count)
  }


def _is_of_experts(equation: Any, over: Container[int], slices: Container[tuple[int, ...]]) -> bool:
  """Whether an operation multiplies parts of a batch by weights of their own, which a dimension of one of these sizes counts."""
  shapes = [tuple(each.aval.shape) for each in equation.invars]
  if equation.primitive.name.startswith('ragged_dot'):
    return shapes[1][0] in over
  if equation.primitive.name != 'dot_general':
    return False
  _, (groups, _) = equation.params['dimension_numbers']
  return any(shapes[0][at] in over for at in groups) and any(shape in slices for shape in shapes)


def argument_arrays(
  dynamic: tuple[tuple, dict[str, Any]], mesh: MeshLike
) -> Iterator[list[ArgumentArray]]:
  """The arrays of each argument, in the order of the leaves of `(args, kwargs)`; those that may be of a batch first."""
  args, kwargs = dynamic
  position = 0
  for argument in [*args, *(kwargs[name] for name in sorted(kwargs))]:
    leaves = jax.tree.leaves(argument)
    shapes = (tuple(getattr(leaf, 'shape', ())) for leaf in leaves)
    each = [
      ArgumentArray(
        position + offset,
        shape,
        _over_axes_of(placed_sharding(leaf, mesh), mesh),
        is_raw_key(shape, getattr(leaf, 'dtype', None)),
      )
      for offset, (leaf, shape) in enumerate(zip(leaves, shapes, strict=True))
    ]
    position += len(leaves)
    yield sorted(each, key=lambda leaf: not leaf.shape or leaf.is_key)


def _over_axes_of(sharding: NamedSharding | None, mesh: MeshLike) -> NamedSharding | None:
  """A sharding over axes of a mesh. An array on the same devices may be on another mesh, whose axes are none of this one."""
  if (
    sharding is None
    or {axis for entry in sharding.spec for axis in axis_names(entry)} <= axis_sizes(mesh).keys()
  ):
    return sharding
  return NamedSharding(mesh, PartitionSpec())


def is_raw_key(shape: tuple[int, ...], dtype: Any) -> bool:
  """Whether an array has the type of a key of `jax.random.PRNGKey`."""
  return shape in ((2,), (4,)) and dtype == np.uint32


def batch_axes(argument: Sequence[ArgumentArray], default: tuple[str, ...]) -> tuple[str, ...]:
  """The mesh axes of an argument's dimension 0, if all of its arrays may be a batch; else ()."""
  arrays = [leaf for leaf in argument if leaf.shape and not leaf.is_key]
  placed = {_axes_of(leaf) if _is_by_rows(leaf) else () for leaf in arrays if leaf.sharding is not None}
  axes = next(iter(placed)) if placed else default
  alike = len(placed) <= 1 and len({leaf.shape[0] for leaf in arrays}) == 1
  return axes if alike else ()


def _placed_first(found: Sequence[_Found]) -> Sequence[_Found]:
  """The arguments that are on the mesh, if there are any: they are certain."""
  return [one for one in found if is_placed(one[1])] or found


def is_placed(argument: Sequence[ArgumentArray]) -> bool:
  return any(leaf.sharding is not None for leaf in argument)


def axes_of_batches(mesh: MeshLike, rules: Rules) -> tuple[str, ...]:
  """The axes of a mesh in the rule for `batch`; () without one."""
  spec = rules.spec(('batch',)) if 'batch' in rules.by_name else None
  sizes = axis_sizes(mesh)
  return tuple(axis for entry in spec or () for axis in axis_names(entry) if axis in sizes)


def _axes_of(leaf: ArgumentArray) -> tuple[str, ...]:
  """The mesh axes that an array is sharded over."""
  spec = () if leaf.sharding is None else leaf.sharding.spec
  return tuple(axis for entry in spec for axis in axis_names(entry))


def _is_by_rows(leaf: ArgumentArray) -> bool:
  """Whether an array on the mesh is sharded over dimension 0, and no other."""
  entries = () if leaf.sharding is None else tuple(leaf.sharding.spec)
  return bool(entries) and bool(axis_names(entries[0])) and not any(map(axis_names, entries[1:]))


def shards(mesh: MeshLike, axes: Sequence[str]) -> int:
  """The number of parts that mesh axes split a dimension into."""
  sizes = axis_sizes(mesh)
  return math.prod(sizes[axis] for axis in axes)
