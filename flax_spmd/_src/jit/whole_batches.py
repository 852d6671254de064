"""Whole batches: arrays of the host that `layout.jit` would shard as a batch, but for their dimension 0.

    layout = Layout({'data': 8}, presets.data_parallel())
    layout.jit(step)(state, images)    # a NumPy array of 12 images: every device computes all 12

The partitioner has no uneven parts, so nothing can be sharded, and nothing fails: the step is slow. That is worth a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import jax

from flax_spmd._src import compat
from flax_spmd._src.jit.batch_leaves import (
  ArgumentArray,
  argument_arrays,
  axes_of_batches,
  batch_axes,
  is_placed,
  shapes_of_boxes,
  shards,
)
from flax_spmd._src.jit.constrained_results import is_constrained_over
from flax_spmd._src.mesh import MeshLike
from flax_spmd._src.rules.table import Rules
from flax_spmd._src.source_lines import warn
from flax_spmd._src.tree_paths import path_string


def warn_of_whole_batches(
  name: str,
  named_path: Callable[[Any], Any],
  dynamic: tuple[tuple, dict[str, Any]],
  jaxpr: Any,
  mesh: MeshLike,
  rules: Rules,
  reported: set[str],
) -> None:
  """Warns once of arguments that seem to be a batch, and that every device computes as a whole.

  Those are arrays on no mesh beside some on it, with two dimensions or more in one of them, and at least one example for
  each device; nothing like them is returned, and nothing in the call is sharded over the batch's axes by examples.

  Args:
    name: the function.
    named_path: function from the path of a leaf of the arguments to one that begins with the parameter.
    dynamic: the arguments `(args, kwargs)`, with their shardings.
    jaxpr: the program, as traced.
    mesh, rules: those of the layout.
    reported: the kinds of warnings already issued.

  Warns:
    UserWarning: lists the arrays of every such argument, with a fix.
  """
  axes = axes_of_batches(mesh, rules)
  count = shards(mesh, axes)
  if 'whole batches' in reported or count == 1:
    return
  arguments = list(argument_arrays(dynamic, mesh))
  if not any(map(is_placed, arguments)) or any(
    is_placed(each) and batch_axes(each, ()) for each in arguments
  ):
    return
  paths = [path_string(named_path(path)) for path, _ in jax.tree_util.tree_leaves_with_path(dynamic)]
  results = {tuple(each.aval.shape) for each in compat.jaxpr_parts(jaxpr).outputs}
  whole = [each for each in arguments if not is_placed(each) and _is_whole(each, count, results)]
  lines = [f'  {paths[leaf.position]}: {leaf.shape}' for each in whole for leaf in _with_rows(each)]
  state = [leaf.shape for each in arguments if each not in whole for leaf in each]
  if lines and not is_constrained_over(jaxpr, axes, shapes_of_boxes(state)):
    reported.add('whole batches')
    warn(
      f'{name}: each of {count} devices computes all examples of these arrays, since dimension 0 is not the same multiple '
      f'of {count}, the size of mesh axis {" x ".join(map(repr, axes))}, in all arrays of an argument:\n'
      + '\n'.join(lines)
      + f'\nFix: pass a multiple of {count} examples, and arrays of another length as arguments of their own; or shard the '
      "arrays with examples before the call, by layout.shard(array, ('batch',)); or constrain_batch=False, if this is no batch."
    )


def _with_rows(argument: Sequence[ArgumentArray]) -> list[ArgumentArray]:
  """The arrays of an argument that may have examples, in its own order."""
  arrays = (leaf for leaf in argument if leaf.shape and not leaf.is_key)
  return sorted(arrays, key=lambda leaf: leaf.position)


def _is_whole(
  argument: Sequence[ArgumentArray], count: int, results: Container[tuple[int, ...]]
) -> bool:
  """Whether an argument seems to be a batch, but for its dimension 0."""
  arrays = _with_rows(argument)
  sizes = {leaf.shape[0] for leaf in arrays}
  if not arrays or max(len(leaf.shape) for leaf in arrays) < 2 or max(sizes) < count:
    return False
  is_sharded = len(sizes) == 1 and not any(size % count for size in sizes)
  return not is_sharded and not any(leaf.shape in results for leaf in arrays)
