"""Named axes: the axis name that a step for `jax.pmap` reduces over, bound to groups of devices under a layout.

    step = layout.jit(train_step, axis_name='batch', in_axes=(None, 0))

The rules give the axis name mesh axes, as they do for the name of a dimension. Each index along these mesh axes is a
group of devices, as one device is under `jax.pmap`. A batch is split into one part per group, and the function gets
the part. One `vmap` computes all parts, with its dimension sharded over the mesh axes. So XLA computes each part on
its group, and reductions over the axis are its collectives. Products of the parts with arrays that all groups have whole
are constrained to the groups (`compat`), so that parts stay there under FSDP too. Other mesh axes shard states and parts
as without groups.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec
from jax.tree_util import KeyPath, tree_leaves_with_path

from flax_spmd._src import compat
from flax_spmd._src.active_layout import report_names
from flax_spmd._src.constraints import constrain_on
from flax_spmd._src.jit.arguments import Arguments
from flax_spmd._src.jit.program_arrays import result_path
from flax_spmd._src.mesh import MeshLike, axis_sizes, describe
from flax_spmd._src.names.nnx_variables import check_functional
from flax_spmd._src.rules.decisions import UNCONSTRAINED, axis_names
from flax_spmd._src.rules.table import Rules
from flax_spmd._src.text import plain_strings, value_text
from flax_spmd._src.tree_paths import path_string
from flax_spmd.errors import (
  LayoutError,
  MeshError,
  Problem,
  UnmatchedNameError,
  did_you_mean,
  raise_problems,
)


class NamedAxis(NamedTuple):
  """An axis name, and the dimensions along which arguments are split and results joined.

  Attributes:
    name: the axis name.
    in_axes: as in `Layout.jit`.
    out_axes: as in `Layout.jit`.
  """

  name: str
  in_axes: Any = None
  out_axes: Any = None

  @classmethod
  def of(cls, name: str | None, in_axes: Any, out_axes: Any) -> NamedAxis | None:
    """The axis of a call of `jit`; None if there is none.

    Raises:
      LayoutError: the name is not a string, or missing beside `in_axes` or `out_axes`.
    """
    if name is None and in_axes is None and out_axes is None:
      return None
    if not isinstance(name, str):
      raise LayoutError(
        f'axis_name is {value_text(name)}, which is not the name of an axis.\n'
        "Fix: pass the name that the function reduces over, such as axis_name='batch'."
      )
    return cls(name, in_axes, out_axes)

  def bound(
    self, fn: Callable[..., Any], arguments: Arguments, mesh: MeshLike, rules: Rules
  ) -> Callable[..., Any]:
    """The function of whole batches that `fn`, a function of one group's parts, makes.

    It raises `UnmatchedNameError` if neither a rule nor the mesh has the name, `MeshError` if the mesh has Explicit
    axes, and `LayoutError` if an argument cannot be split, or a result differs between groups.
    """

    @functools.wraps(fn)
    def on_all_groups(*args, **kwargs):
      groups = _Groups.of(self.name, mesh, rules)
      dynamic = arguments.dynamic(args, kwargs)
      check_functional(dynamic, 'axis_name')
      leaves, treedef = jax.tree.flatten(dynamic)
      axes = self._split_axes(arguments, dynamic, groups)

      def on_group(parts):
        remaining = iter(parts)
        each = [
          leaf if axis is None else next(remaining) for leaf, axis in zip(leaves, axes, strict=True)
        ]
        inner_args, inner_kwargs = arguments.filled(jax.tree.unflatten(treedef, each), args, kwargs)
        return fn(*inner_args, **inner_kwargs)

      parts = [
        groups.split(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True) if axis is not None
      ]
      return self._joined(groups, on_group, parts, [axis for axis in axes if axis is not None])

    return on_all_groups

  def _split_axes(self, arguments: Arguments, dynamic: Any, groups: _Groups) -> list[int | None]:
    """The dimension to split of each leaf of the arguments; None for one that every group gets whole."""
    of_arguments = arguments.by_argument(self._in_axes(dynamic), dynamic)
    axes = _of_leaves(of_arguments, dynamic, 'in_axes', 'the arguments')
    found, problems = [], []
    for (path, leaf), axis in zip(tree_leaves_with_path(dynamic), axes, strict=True):
      found.append(_dimension(axis, np.ndim(leaf)))
      if problem := groups.problem_of(np.shape(leaf), axis):
        problems.append(problem.at(path_string(arguments.named_path(path))))
    raise_problems(problems)
    return found

  def _in_axes(self, dynamic: tuple[tuple, dict[str, Any]]) -> Any:
    if self.in_axes is not None:
      return self.in_axes
    count = len(dynamic[0]) + len(dynamic[1])
    if count != 2:
      raise LayoutError(
        f'axis_name={value_text(self.name)} without in_axes is for a function of a state and a batch, but this call has {count} '
        f'argument{"" if count == 1 else "s"}.\n'
        'Fix: pass in_axes with an entry per argument: 0 to split its arrays along dimension 0, None to pass it whole.'
      )
    return None, 0

  def _joined(
    self, groups: _Groups, on_group: Callable[..., Any], parts: list[Any], axes: list[int]
  ) -> Any:
    """The result of all groups: arrays equal in all of them once, others joined along their dimension."""
    structure: list[Any] = []

    def separated(parts):
      result = on_group(parts)
      out_axes = _of_leaves(self.out_axes, result, 'out_axes', 'the result')
      leaves = tree_leaves_with_path(result)
      raise_problems(list(groups.problems_of_results(leaves, out_axes)))
      structure.extend((jax.tree.structure(result), out_axes))
      pairs = [(leaf, axis) for (_, leaf), axis in zip(leaves, out_axes, strict=True)]
      return (
        [leaf for leaf, axis in pairs if axis is None],
        [leaf for leaf, axis in pairs if axis is not None],
      )

    mapped = jax.vmap(
      separated,
      in_axes=(axes,),
      out_axes=(None, 0),
      axis_name=compat.GroupAxisName(self.name),
      axis_size=groups.number,
      spmd_axis_name=groups.axes if groups.number > 1 else None,
    )
    whole, split = map(iter, mapped(parts))
    treedef, out_axes = structure
    return jax.tree.unflatten(
      treedef, [next(whole) if axis is None else _merged(next(split), axis) for axis in out_axes]
    )


def number_of_groups(name: str, mesh: MeshLike, rules: Rules) -> int:
  """The number of groups of devices along an axis name, and so the number of parts of a batch.

  Raises:
    MeshError: the mesh has Explicit axes.
    UnmatchedNameError: the name has no rule, and is no axis of the mesh.
  """
  return _Groups.of(name, mesh, rules).number


class _Groups(NamedTuple):
  """The groups of devices along an axis.

  Attributes:
    name: the axis name.
    axes: its mesh axes.
    number: number of groups.
    mesh: the mesh.
  """

  name: str
  axes: tuple[str, ...]
  number: int
  mesh: MeshLike

  @classmethod
  def of(cls, name: str, mesh: MeshLike, rules: Rules) -> _Groups:
    sizes = axis_sizes(mesh)
    if AxisType.Explicit in mesh.axis_types:
      raise MeshError(
        f'axis_name={value_text(name)} is not supported on the mesh {describe(mesh)}, which has Explicit axes: JAX cannot reduce '
        'over an axis name there.\nFix: make the mesh with Auto axes.'
      )
    report_names((name,))
    if name in rules.by_name:
      resolution = rules.resolve((name,), None, sizes)
      raise_problems([problem.at('axis_name') for problem in resolution.problems])
      axes = axis_names(resolution.spec[0])
    elif name in sizes:
      axes = (name,)
    else:
      raise UnmatchedNameError(
        f'axis_name {value_text(name)} has no rule, and is no axis of the mesh {describe(mesh)}.'
        + did_you_mean(name, [*rules.by_name, *sizes])
        + f'\nFix: add a rule with the mesh axes of the batch, such as ({value_text(name)}, {plain_strings(mesh.axis_names[0])!r}).'
      )
    return cls(name, axes, math.prod(sizes[axis] for axis in axes), mesh)

  def __str__(self) -> str:
    return f'the {self.number} groups of axis {self.name!r}'

  def split(self, leaf: Any, axis: int) -> Any:
    """An array with one dimension more, before the one that is split: the groups, sharded over their mesh axes."""
    shape = np.shape(leaf)
    parts = jnp.reshape(
      leaf, (*shape[:axis], self.number, shape[axis] // self.number, *shape[axis + 1 :])
    )
    if self.number == 1:
      return parts
    spec: list[Any] = [UNCONSTRAINED] * parts.ndim
    spec[axis] = self.axes
    return constrain_on(self.mesh, parts, PartitionSpec(*spec))

  def problem_of(self, shape: Sequence[int], axis: int | None) -> Problem | None:
    """The reason why an array cannot be split."""
    if axis is None:
      return None
    if not -len(shape) <= axis < len(shape):
      return Problem(
        f'in_axes has {axis}, but its rank is {len(shape)}.',
        'pass None in in_axes for an array that every group gets whole.',
      )
    size = shape[axis]
    if size % self.number == 0:
      return None
    return Problem(
      f'dim {axis}: size {size} is not divisible by {self} ({self._axes_text()}).',
      'pad or drop rows of the batch, or pass None in in_axes for an array that every group gets whole.',
    )

  def problems_of_results(
    self, leaves: Iterable[tuple[KeyPath, Any]], out_axes: Sequence[int | None]
  ) -> Iterable[Problem]:
    for (path, leaf), axis in zip(leaves, out_axes, strict=True):
      rank = max(1, np.ndim(leaf))
      if axis is None and compat.is_mapped(leaf):
        yield Problem(
          f'{result_path(path)} differs between the groups of axis {self.name!r}.',
          f'reduce it in the function, lax.pmean(x, {value_text(self.name)}), or pass out_axes: 0 joins the parts of all groups '
          'along dimension 0.',
        )
      elif axis is not None and not -rank <= axis < rank:
        yield Problem(
          f'{result_path(path)}: out_axes has {axis}, but its rank is {np.ndim(leaf)}.',
          'pass 0 in out_axes, or None for a result that is equal in all groups.',
        )

  def _axes_text(self) -> str:
    sizes = axis_sizes(self.mesh)
    return ', '.join(f'mesh axis {axis!r} of size {sizes[axis]}' for axis in self.axes)


def _of_leaves(axes: Any, tree: Any, option: str, of: str) -> list[int | None]:
  """The entry of each leaf of a tree, from a tree of entries that is a prefix of it."""
  entries, prefix = jax.tree.flatten(axes, is_leaf=lambda entry: entry is None)
  wrong = [entry for entry in entries if not (entry is None or type(entry) is int)]
  try:
    if wrong:
      raise ValueError(f'{value_text(wrong[0])} is neither a dimension nor None.')
    parts = prefix.flatten_up_to(tree)
  except (ValueError, TypeError) as error:
    raise LayoutError(
      f'{option}={value_text(axes)} is not a prefix of {of}: {error}\n'
      f'Fix: pass a dimension or None for each of {of}, or a tree of these that is a prefix of it.'
    ) from None
  return [axis for axis, part in zip(entries, parts, strict=True) for _ in jax.tree.leaves(part)]


def _dimension(axis: int | None, rank: int) -> int | None:
  return axis if axis is None or axis >= 0 else axis + rank


def _merged(parts: Any, axis: int) -> Any:
  """The parts of a result, stacked along dimension 0, joined along a dimension; single numbers stay stacked."""
  if parts.ndim == 1:
    return parts
  axis = axis % (parts.ndim - 1)
  moved = jnp.moveaxis(parts, 0, axis)
  return jnp.reshape(moved, (*moved.shape[:axis], -1, *moved.shape[axis + 2 :]))
