"""Batch rows: the arrays of a batch that a microbatch loop takes its rows from, and the constraints that keep them sharded.

Each has microbatches in dimension 0, and in dimension 1 their examples. Random keys have no examples.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax import lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.jit.batch_leaves import BatchLeaves, is_raw_key, shards
from flax_spmd._src.mesh import MeshLike
from flax_spmd._src.pipeline.cut import equations as eq
from flax_spmd._src.pipeline.cut.equations import Atom, Equation, Value
from flax_spmd._src.rules.decisions import axis_names
from flax_spmd._src.source_lines import warn
from flax_spmd._src.text import first_lines


def constrained_batch(
  loop: Equation,
  before: Sequence[Equation],
  mesh: AbstractMesh,
  specs: Mapping[Value, PartitionSpec],
  batch_axes: tuple[str, ...],
) -> list[Equation]:
  """Replaces the arrays of the batch of a loop by constrained ones.

  They are not sharded over microbatches: a program that takes one microbatch from an array would otherwise move all
  of it. If no argument that they come from is sharded, as on the host, the examples of each microbatch are: every
  device would otherwise compute all of them.

  Args:
    loop: the scan; its inputs are replaced.
    before: the equations before it.
    mesh: the mesh of a stage.
    specs: the spec of each argument of the step.
    batch_axes: the mesh axes of the rule for `batch`.

  Returns:
    The equations of the constraints.
  """
  numbers = range(sum(compat.scan_counts(loop.params)), len(loop.inputs))
  arrays: list[Any] = [loop.inputs[number] for number in numbers]
  sources = {*arrays}.union(*(one.values for one in eq.needed(before, arrays)))
  is_sharded = any(any(specs.get(value, ())) for value in sources)
  axes = () if is_sharded or not _divide(examples(arrays), mesh, batch_axes) else batch_axes
  constraints: list[Equation] = []
  for number, array in zip(numbers, arrays, strict=True):
    entries: list[Any] = [None, *[PartitionSpec.UNCONSTRAINED] * (len(array.aval.shape) - 1)]
    if axes and examples([array]):
      entries[1] = axes
    elif array in specs and not any(specs[array][:1]):
      continue
    sharding = NamedSharding(mesh, PartitionSpec(*entries))
    new, [loop.inputs[number]] = eq.traced(
      lambda x: lax.with_sharding_constraint(x, sharding),  # noqa: B023
      array,
    )
    constraints += new
  return constraints


def sources_of_rows(
  rows: Sequence[Atom],
  count: int,
  batch: Collection[Value],
  specs: Mapping[Value, PartitionSpec],
  mesh: MeshLike,
  batch_axes: tuple[str, ...],
) -> BatchLeaves | None:
  """The arguments that the rows come from, with the dimension and the mesh axes of their examples.

  Args:
    rows: the arrays of the batch.
    count: the number of microbatches.
    batch: the values that microbatches depend on.
    specs: the spec of each argument of the step, in order.
    mesh, batch_axes: as of `constrained_batch`.

  Returns:
    None unless all microbatches have one number of examples, in one dimension of all arguments, and the axes divide it.
  """
  sizes = examples(rows)
  found: dict[int, tuple[int, tuple[str, ...]]] = {}
  for position, (argument, spec) in enumerate(specs.items()):
    dimension = _dimension(argument.aval.shape, count, sizes) if argument in batch else None
    if dimension is not None:
      axes = axis_names(spec[dimension]) if len(spec) > dimension else ()
      found[position] = dimension, axes if any(spec) else batch_axes
  if len({*found.values()}) != 1:
    return None
  [(dimension, axes)] = {*found.values()}
  return BatchLeaves(tuple(found), axes, dimension=dimension) if _divide(sizes, mesh, axes) else None


def warn_of_whole_rows(
  name: str,
  rows: Sequence[Atom],
  given: Sequence[tuple[str, Any, PartitionSpec]],
  mesh: MeshLike,
  batch_axes: tuple[str, ...],
  reported: set[str],
) -> None:
  """Warns once of a batch on no mesh whose microbatches every device of a stage computes as a whole.

  Args:
    name: the function.
    rows: the arrays of the batch.
    given: the path, type and spec of each argument that the rows come from.
    mesh, batch_axes: as of `constrained_batch`.
    reported: the kinds of warnings already issued.

  Warns:
    UserWarning: lists the arrays, with a fix.
  """
  count, sizes = shards(mesh, batch_axes), examples(rows)
  is_small = max(sizes, default=0) < count or count == 1
  if is_small or 'whole batches' in reported or _divide(sizes, mesh, batch_axes):
    return
  if any(any(spec) for _, _, spec in given):
    return
  reported.add('whole batches')
  lines = [f'  {path}: {aval.dtype}{list(aval.shape)}' for path, aval, _ in given if aval.shape]
  axes = ' x '.join(map(repr, batch_axes))
  warn(
    f'{name}: each of {count} devices of a stage computes all examples of a microbatch, since their number is not the '
    f'same multiple of {count}, the size of mesh axis {axes}, in all arrays of the batch:\n'
    + first_lines(lines)
    + f'\nFix: pass microbatches of a multiple of {count} examples, and close over arrays without examples; or '
    'constrain_batch=False, if this is no batch.'
  )


def _dimension(shape: tuple[int, ...], count: int, sizes: set[int]) -> int | None:
  """The dimension of an argument that has the examples: the first, or the second, after that of microbatches."""
  for size in sizes:
    if shape[:2] == (count, size):
      return 1
    if shape[:1] == (count * size,):
      return 0
  return None


def examples(arrays: Sequence[Any]) -> set[int]:
  """The numbers of examples of the microbatches of some arrays."""
  shapes = [(array.aval.shape, array.aval.dtype) for array in arrays]
  return {shape[1] for shape, dtype in shapes if len(shape) > 1 and not is_raw_key(shape[1:], dtype)}


def _divide(sizes: set[int], mesh: MeshLike, axes: tuple[str, ...]) -> bool:
  """Whether all microbatches have one number of examples, which mesh axes divide into several equal parts."""
  parts = shards(mesh, axes)
  return parts > 1 and len(sizes) == 1 and not any(size % parts for size in sizes)
