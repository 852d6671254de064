"""Replicated batches: constraints of a step that replicate the batch, as no rule matches its name there.

    x = with_logical_constraint(x, ('act_batch', 'act_embed'))     # under a table with a rule for 'batch' only

Such constraints gather every activation, as in Flax, and each device computes the whole step. Nothing fails, so
`layout.jit` warns, and `compare` lists it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import combinations
from typing import Any

import jax

from flax_spmd._src import compat
from flax_spmd._src.constraint_log import ConstraintRequest
from flax_spmd._src.jit.batch_leaves import (
  ArgumentArray,
  argument_arrays,
  axes_of_batches,
  batch_axes,
  shards,
)
from flax_spmd._src.mesh import MeshLike
from flax_spmd._src.rules.decisions import axis_names
from flax_spmd._src.rules.table import Rules
from flax_spmd._src.source_lines import warn
from flax_spmd._src.text import plural

_KIND = 'replicated batches'


def warn_of_replicated_batches(
  name: str,
  requests: Sequence[ConstraintRequest],
  find: Callable[[], tuple[Mapping[int, tuple[str, ...]], Collection[tuple[int, ...]]]],
  reported: set[str],
) -> None:
  """Warns once of constraints that replicate the batch of a call.

  Args:
    name: the function.
    requests: the constraints of its trace.
    find: returns the batch and the state, as for `replicated_batches`; not called if every name has a rule.
    reported: the kinds of warnings already issued.

  Warns:
    UserWarning: lists the names without a rule, with a fix.
  """
  if _KIND in reported or not any(one.unmatched for one in requests):
    return
  if found := replicated_batches(requests, *find()):
    reported.add(_KIND)
    warn(
      f'{name}: every device computes all examples of the batch:\n'
      + '\n'.join(f'  {each}' for each in found)
    )


def batch_and_state(
  dynamic: tuple[tuple, dict[str, Any]], jaxpr: Any, mesh: MeshLike, rules: Rules
) -> tuple[dict[int, tuple[str, ...]], list[tuple[int, ...]]]:
  """The batch and the state of a call, for `replicated_batches`.

  The batch is those arguments whose arrays are sharded over dimension 0, or are on no mesh and may be sharded as the table
  has it, and of which the result has no array of the same shape, as it has of a state.

  Args:
    dynamic: the arguments `(args, kwargs)`, with their shardings.
    jaxpr: the program, as traced.
    mesh, rules: those of the layout.
  """
  results = {tuple(each.aval.shape) for each in compat.jaxpr_parts(jaxpr).outputs}
  default = axes_of_batches(mesh, rules)
  batch: dict[int, tuple[str, ...]] = {}
  state: list[tuple[int, ...]] = []
  for argument in argument_arrays(dynamic, mesh):
    axes = batch_axes(argument, default)
    count = shards(mesh, axes)
    if count > 1 and argument[0].shape[0] % count == 0 and not _is_returned(argument, results):
      batch[argument[0].shape[0]] = axes
    else:
      state += [leaf.shape for leaf in argument]
  return batch, state


def replicated_batches(
  requests: Sequence[ConstraintRequest],
  batch: Mapping[int, tuple[str, ...]],
  state: Collection[tuple[int, ...]],
) -> list[str]:
  """The constraints of a step that replicate its batch, a line for each name without a rule, with its fix.

  Args:
    requests: the constraints.
    batch: the mesh axes of dimension 0 of the batch's arrays, by its size.
    state: the shapes of the other arguments: their constraints are those of parameters.
  """
  # a loop over layers opens boxes of slices, which lack one dimension; `remat_scan` those that lack more
  parameters = {
    part for shape in {*state} for count in range(len(shape) + 1) for part in combinations(shape, count)
  }
  activations = [one for one in requests if not one.dropped and one.shape not in parameters]
  sharded = {axis for one in activations for axes in one.spec or () for axis in axis_names(axes)}
  found: dict[tuple[str, tuple[str, ...]], list[ConstraintRequest]] = {}
  for one in activations:
    over = _replicated_axes(one, batch)
    # where other constraints shard it, the name may be that of another dimension of the same size
    if over and ('batch' in one.names[0] or sharded.isdisjoint(over)):
      found.setdefault((one.names[0], over), []).append(one)
  return [
    f'constraints replicate the batch, which is sharded over {"+".join(over)}: no rule for {name!r} in '
    f'{plural(len({one.source for one in same}), "constraint")}, such as {same[0].names} at {same[0].source}. '
    f'Fix: add the rule ({name!r}, {(over[0] if len(over) == 1 else over)!r}).'
    for (name, over), same in found.items()
  ]


def batch_sizes(batch: Any) -> dict[int, tuple[str, ...]]:
  """The mesh axes of dimension 0 of a batch's arrays that are sharded over it, by its size."""
  leaves = (leaf for leaf in jax.tree.leaves(batch) if leaf.shape and leaf.sharding.spec)
  return {leaf.shape[0]: axes for leaf in leaves if (axes := axis_names(leaf.sharding.spec[0]))}


def _replicated_axes(
  request: ConstraintRequest, batch: Mapping[int, tuple[str, ...]]
) -> tuple[str, ...]:
  """The mesh axes of the batch that a constraint replicates over, as dimension 0 has a name without a rule; or ()."""
  if not isinstance(request.names, tuple) or not request.names or not request.shape:
    return ()
  over = batch.get(request.shape[0], ())
  used = {axis for axes in request.spec or () for axis in axis_names(axes)}
  return over if request.names[0] in request.unmatched and used.isdisjoint(over) else ()


def _is_returned(argument: Sequence[ArgumentArray], results: Collection[tuple[int, ...]]) -> bool:
  """Whether a result has the shape of an array of the argument, as one of a state has."""
  return any(leaf.shape in results for leaf in argument if leaf.shape and not leaf.is_key)
