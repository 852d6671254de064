"""Initialization of a state on its stages: each array is created on the ranks that use it.

Arrays of the same ranks form a group. Each group is created by one program, from which XLA removes the
computation of all other arrays. Several processes compare the programs of all groups, and their arguments, before.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from flax_spmd._src import compat
from flax_spmd._src.jit.arguments import closed_over, is_array
from flax_spmd._src.multihost import joint, ranges
from flax_spmd._src.names.nnx_variables import is_module
from flax_spmd._src.pipeline.argument_checks import differences, named_arguments, named_leaves
from flax_spmd._src.pipeline.run.agreement import check_same_state
from flax_spmd._src.pipeline.run.request import Setting
from flax_spmd._src.source_lines import warn
from flax_spmd.errors import PipelineError


def init_on_stages(
  create: Callable[..., Any],
  args: Sequence[Any],
  kwargs: Mapping[str, Any],
  shardings: Any,
  setting: Setting,
) -> Any:
  """The tree that `create` returns, its arrays with the shardings given, which may be on different devices.

  Constraints inside `create` follow the rules of the pipeline's setting.

  Raises:
    PipelineError: the paths of the tree and of `shardings` differ.
    LayoutError: processes create other states.

  Warns:
    UserWarning: the paths are the same, and something else of their structures differs.
  """
  fn, arrays = closed_over(create, args, kwargs)
  with joint('pipeline state', f'The state of {setting.name}', setting.processes, PipelineError):
    with compat.without_mesh():  # a block around the call may have set one of another size
      groups, treedef = _groups(fn, arrays, shardings, setting)
    if len(setting.processes) > 1:
      named = named_arguments((tuple(args), dict(kwargs)))
      texts = [(f'arrays {ranges(numbers)}', lowered) for numbers, lowered in groups]
      check_same_state(setting, [each for each in named if is_array(each[1])], texts)
  created: list[Any] = [None] * treedef.num_leaves
  for numbers, lowered in groups:
    for number, array in zip(numbers, lowered.compile()(arrays), strict=True):
      created[number] = array
  return jax.tree.unflatten(treedef, created)


def _groups(
  fn: Callable[..., Any], arrays: dict[str, Any], shardings: Any, setting: Setting
) -> tuple[list[tuple[list[int], Any]], Any]:
  """The numbers of the leaves of each group, with its lowered program; and the tree structure of the state."""

  def within(mesh: Any, arrays: dict[str, Any]) -> Any:
    with setting.trace_scope(mesh):
      return fn(**arrays)

  leaf_shardings, expected = jax.tree.flatten(shardings)
  any_mesh = leaf_shardings[0].mesh.abstract_mesh
  made = jax.eval_shape(functools.partial(within, any_mesh), arrays)
  treedef = jax.tree.structure(made)
  if _without_metadata(made) == _without_metadata(shardings):
    treedef = expected
  else:
    _check_paths(shardings, made)
  groups: dict[Any, list[int]] = defaultdict(list)
  for number, sharding in enumerate(leaf_shardings):
    groups[sharding.mesh].append(number)
  programs = []
  for mesh, numbers in groups.items():

    def create_group(arrays, mesh=mesh, numbers=numbers):
      leaves = jax.tree.leaves(within(mesh.abstract_mesh, arrays))
      return [leaves[number] for number in numbers]

    jitted = jax.jit(create_group, out_shardings=[leaf_shardings[number] for number in numbers])
    programs.append((numbers, jitted.lower(arrays)))
  return programs, treedef


def _without_metadata(tree: Any) -> Any:
  """The structure of a tree, in which a variable of NNX is its type: its metadata has settings of the trace that made it."""
  variables, treedef = jax.tree.flatten(tree, is_leaf=is_module)
  return treedef, [type(one) if is_module(one) else None for one in variables]


def _check_paths(shardings: Any, made: Any) -> None:
  """Raises unless a state has the expected paths in the same order; warns if only other objects in it differ."""
  expected, actual = ([(name, '') for name, _ in named_leaves(tree)] for tree in (shardings, made))
  if actual != expected:
    raise PipelineError(
      'create returns a state of another structure than the pipeline was compiled for:\n'
      f'{differences(expected, actual, "the order of the leaves differs")}\n'
      'Fix: pass the function that creates the state that the pipeline was compiled for.'
    )
  warn(
    'create returns the arrays that the pipeline was compiled for, in a state of another structure: an object in it that '
    'is no array differs, such as an optimizer that each call of create makes anew. The pipeline compiles anew for this '
    'state.\nFix: make such objects once, outside of create.'
  )
