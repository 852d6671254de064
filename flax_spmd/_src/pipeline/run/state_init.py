"""Birth: a state made where its stages are.

Each group of arrays that lie on the same ranks is made by a program of its own, which the compiler frees
of everything that the group does not need.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from flax_spmd._src.active_layout import InForce, scope
from flax_spmd._src.compat import mesh_scope
from flax_spmd._src.jit.arguments import closed_over
from flax_spmd._src.rules.table import Rules
from flax_spmd.errors import PipelineError


def born(
  create: Callable[..., Any],
  args: Sequence[Any],
  kwargs: Mapping[str, Any],
  shardings: Any,
  rules: Rules,
) -> Any:
  """What `create` makes, with the shardings given.

  Args:
    create: makes a tree.
    args, kwargs: its arguments.
    shardings: a tree of NamedShardings of the same structure, possibly of different devices.
    rules: what constraints follow.

  Raises:
    PipelineError: the structures differ.
  """
  fn, arrays = closed_over(create, args, kwargs)

  def within(mesh: Any, arrays: list[Any]) -> Any:
    with scope(InForce(mesh, rules)), mesh_scope(mesh):
      return fn(arrays)

  wanted, expected = jax.tree.flatten(shardings)
  any_mesh = wanted[0].mesh.abstract_mesh
  treedef = jax.tree.structure(jax.eval_shape(functools.partial(within, any_mesh), arrays))
  if treedef != expected:
    raise PipelineError(
      f'The pipeline was compiled for a state of another form.\n  made:     {treedef}\n'
      f'  expected: {expected}\nFix: pass what makes the very state that the pipeline was compiled for.'
    )
  groups: dict[Any, list[int]] = defaultdict(list)
  for number, sharding in enumerate(wanted):
    groups[sharding.mesh].append(number)
  found: list[Any] = [None] * len(wanted)
  for mesh, numbers in groups.items():

    def some(arrays, mesh=mesh, numbers=numbers):
      leaves = jax.tree.leaves(within(mesh.abstract_mesh, arrays))
      return [leaves[number] for number in numbers]

    made = jax.jit(some, out_shardings=[wanted[number] for number in numbers])(arrays)
    for number, array in zip(numbers, made, strict=True):
      found[number] = array
  return treedef.unflatten(found)
