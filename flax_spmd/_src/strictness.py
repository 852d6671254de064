"""Strictness: the surprises that a strict layout turns into errors before anything runs.

    check_state(planner, state)      # before a state is created or transferred
    check_call(call, mesh=mesh)      # after a call is compiled, before it runs

A surprise is a sharding that nobody asked for: neither names, nor rules, nor an argument, nor a constraint, nor a
placement.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import Sharding

from flax_spmd._src.jit.compiled_program import CompiledCall
from flax_spmd._src.jit.constrained_results import constrained_results, has_constraints
from flax_spmd._src.jit.program_arrays import ProgramArray, sharding_text
from flax_spmd._src.mesh import MeshLike, describe
from flax_spmd._src.plan.findings import NOTICEABLE
from flax_spmd._src.plan.planner import Planner
from flax_spmd._src.plan.result_shardings import same_forms
from flax_spmd._src.plan.rows import Row
from flax_spmd._src.text import array_text, size_text
from flax_spmd.errors import Problem, raise_problems


def check_state(planner: Planner, tree: Any) -> None:
  """Checks that every large array of a state has names, or a rule that applies to it.

  Raises:
    LayoutError: lists every array that has neither.
  """
  if planner.mesh.size == 1:
    return
  raise_problems(
    [
      Problem(
        f'{_text(row)} has no names, and no rule applies to it, so all {planner.mesh.size} devices would hold a copy.',
        "name its dimensions, or add a rule for its path; ('PATH', PartitionSpec()) replicates it.",
      )
      for row in planner.rows(tree)
      if row.bytes >= NOTICEABLE and _is_unnamed(row)
    ]
  )


def _text(row: Row | ProgramArray) -> str:
  """`params/w: float32[512,1024] (2 MiB)`."""
  return f'{row.path}: {array_text(row.dtype, row.shape)} ({size_text(math.prod(row.shape) * row.dtype.itemsize)})'


def _is_unnamed(row: Row) -> bool:
  """Whether neither names nor a rule are about an array. A rule that skips it for its size is about it."""
  small = any(skip.reason == 'small' for skip in row.skipped)
  return row.names is None and row.owner is None and not row.decisions and not small


def check_call(call: CompiledCall, *, mesh: MeshLike) -> None:
  """Checks that a program is one for the mesh, and that the sharding of each of its results was asked for.

  Raises:
    LayoutError: lists every result that is large and replicated, or that has the form of an argument but another
      sharding; or nothing puts the program on the mesh.
  """
  if not _is_on_mesh(call):
    raise_problems([_off_mesh(call, mesh)])
  constrained = constrained_results(call.jaxpr)
  forms = same_forms(call.result, call.dynamic, mesh)
  problems = [
    _problem(row, [call.arguments[number] for number in numbers])
    for row, is_constrained, numbers in zip(call.results, constrained, forms, strict=True)
    if row.source in _REASONS and not (row.source == 'compiler' and is_constrained)
  ]
  raise_problems([problem for problem in problems if problem is not None])


def _problem(row: ProgramArray, like: Iterable[ProgramArray]) -> Problem | None:
  """The problem with the sharding of a result, whose form is that of some arguments."""
  passed = [(each.path, each.planned) for each in like if each.planned and _has_devices(each.planned)]
  if row.actual is None or any(_is_same(row, sharding) for _, sharding in passed):
    return None
  return _drift(row, passed) if passed else _replicated(row)


def _is_same(row: ProgramArray, sharding: Any) -> bool:
  return row.actual is not None and row.actual.is_equivalent_to(sharding, len(row.shape))


def _is_on_mesh(call: CompiledCall) -> bool:
  """Whether an argument, a closed-over array, a planned result or a constraint puts the program on the mesh."""
  closed_over = [getattr(array, 'sharding', None) for array in getattr(call.jaxpr, 'consts', ())]
  return (
    any(_has_devices(sharding) for sharding in (*(row.planned for row in call.arguments), *closed_over))
    or any(row.pinned for row in call.results)
    or has_constraints(call.jaxpr)
  )


def _has_devices(sharding: Any) -> bool:
  return isinstance(sharding, Sharding) and sharding.num_devices > 1


def _off_mesh(call: CompiledCall, mesh: MeshLike) -> Problem:
  alone = not any(_has_devices(row.actual) for row in (*call.arguments, *call.results))
  effect = 'it runs on one device' if alone else 'every device computes the same'
  return Problem(
    f'{call.name}: no argument, result or constraint is on the mesh {describe(mesh)}, so {effect}.',
    'pass arguments from layout.shard or layout.init, or give in_rules; or use jax.jit.',
  )


def _drift(row: ProgramArray, passed: Sequence[tuple[str, Sharding]]) -> Problem:
  """The problem with a result that has the form of arguments, but the sharding of none of them."""
  inputs = ', '.join(f'{path} came in as {sharding_text(sharding)}' for path, sharding in passed)
  return Problem(
    f'{_text(row)} comes out as {sharding_text(row.actual)}, by {_REASONS[row.source]}, but {inputs}.',
    'move the argument there before the call, with layout.shard, or give the sharding of the result in out_rules.',
  )


def _replicated(row: ProgramArray) -> Problem | None:
  """The problem with a large result that the compiler has replicated."""
  is_whole = row.actual is not None and row.actual.is_fully_replicated
  if row.pinned or not is_whole or row.bytes_per_device < NOTICEABLE:
    return None
  return Problem(
    f"{_text(row)} is replicated on all devices, by the compiler's choice.",
    'constrain it where it is computed, or give its sharding in out_rules; PartitionSpec() replicates it.',
  )


_REASONS = {'names': 'its names', 'compiler': "the compiler's choice"}
