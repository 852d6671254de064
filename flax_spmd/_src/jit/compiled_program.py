"""Compiled programs: the arguments, the results and the communication of a compiled call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, Sharding
from jax.tree_util import KeyPath

from flax_spmd._src.compat import named_sharding
from flax_spmd._src.constraint_log import ConstraintRequest
from flax_spmd._src.hlo.aliases import reused_parameters
from flax_spmd._src.hlo.array_moves import array_moves
from flax_spmd._src.hlo.parser import HloModule, parse
from flax_spmd._src.jit.program_arrays import (
  ProgramArray,
  ProgramCollective,
  argument_path,
  result_path,
)
from flax_spmd._src.jit.program_explanation import ProgramExplanation
from flax_spmd._src.jit.second_call import second_call
from flax_spmd._src.mesh import axis_sizes
from flax_spmd._src.names.box_trees import is_unit
from flax_spmd._src.rules.decisions import UNCONSTRAINED
from flax_spmd._src.rules.placements import PlannedResult
from flax_spmd._src.rules.table import Rules
from flax_spmd.errors import did_you_mean


class CompiledCall(NamedTuple):
  """A compiled call, before it runs.

  Attributes:
    name: name of the function.
    jaxpr: its program, as traced.
    dynamic: the arguments without the static ones, as `(args, kwargs)`.
    result: the result as a tree of shapes and dtypes.
    arguments: one row per array of the arguments.
    results: one row per array of the result.
  """

  name: str
  jaxpr: Any
  dynamic: tuple[tuple, Mapping[str, Any]]
  result: Any
  arguments: tuple[ProgramArray, ...]
  results: tuple[ProgramArray, ...]

  @classmethod
  def of(
    cls,
    name: str,
    mesh: Mesh,
    traced: Any,
    compiled: Any,
    dynamic: tuple[tuple, Mapping[str, Any]],
    required: Sequence[Sharding | None] | None,
    planned: Sequence[PlannedResult],
  ) -> CompiledCall:
    """The call of a compiled program; the arguments are those of `explain_program`, and a `jax.stages.Traced`."""
    arguments = _with_axes(_arguments(compiled, dynamic, required, []), mesh)
    results = _with_axes(_results(compiled, traced.out_info, planned, arguments), mesh)
    return cls(name, traced.jaxpr, dynamic, traced.out_info, arguments, results)


def explain_program(
  name: str,
  mesh: Mesh,
  rules: Rules,
  compiled: Any,
  dynamic: tuple[tuple, Mapping[str, Any]],
  required: Sequence[Sharding | None] | None,
  result: Any,
  planned: Sequence[PlannedResult],
  constraints: Sequence[ConstraintRequest],
) -> ProgramExplanation:
  """Explains a compiled call.

  Args:
    name: name of the function.
    mesh, rules: mesh and rules of its layout.
    compiled: a `jax.stages.Compiled`.
    dynamic: the call's arguments without the static ones, as `(args, kwargs)`; may be abstract.
    required: sharding that `in_rules` require of each array of the arguments, or None.
    result: the result as a tree of shapes and dtypes.
    planned: plan of each array of the result.
    constraints: the constraints that the function asked for while it was traced.
  """
  text = compiled.as_text()
  module = parse(text)
  numbered = _NumberedArguments.of(compiled, module)
  reused = numbered.of_parameters(reused_parameters(text))
  arguments = _with_axes(_arguments(compiled, dynamic, required, reused), mesh)
  results = _with_axes(_results(compiled, result, planned, arguments), mesh)
  collectives = tuple(
    ProgramCollective(
      one.collective,
      tuple(arguments[number].path for number in numbered.of_parameters(one.parameters)),
      tuple(results[number].path for number in one.results),
    )
    for one in array_moves(module, axis_sizes(mesh))
  )
  devices = max(module.devices, 1)
  again = second_call(_each_argument(dynamic), result, arguments, results)
  effects = tuple(_judged(one, devices, mesh, rules) for one in constraints)
  return ProgramExplanation(name, mesh, devices, arguments, results, collectives, effects, again)


class _NumberedArguments(NamedTuple):
  """The numbers of the arguments that a program uses, in the order of its parameters.

  Attributes:
    used: numbers of the arguments among all.
    first: number of parameters before them, for arrays that the function closes over.
  """

  used: tuple[int, ...]
  first: int

  @classmethod
  def of(cls, compiled: Any, module: HloModule) -> _NumberedArguments:
    used = tuple(number for number, each in enumerate(_input_shardings(compiled)) if each is not None)
    parameters = sum(len(parameter.shapes) for parameter in module.main.parameters)
    return cls(used, parameters - len(used))

  def of_parameters(self, parameters: Iterable[int]) -> list[int]:
    """The numbers of the arguments that are passed as these parameters."""
    return [self.used[number - self.first] for number in sorted(parameters) if number >= self.first]


def _input_shardings(compiled: Any) -> list[Sharding | None]:
  """The sharding of each argument; None for one that the program does not use."""
  return compiled.in_tree.flatten_up_to(compiled.input_shardings)


def _arguments(compiled: Any, dynamic: Any, required: Any, reused: list[int]) -> list[ProgramArray]:
  leaves = _leaves_with_path(dynamic)
  donated = [info.donated for info in jax.tree.leaves(compiled.args_info)]
  required = required or [None] * len(leaves)
  rows = map(_argument, leaves, required, _input_shardings(compiled), donated)
  return [row._replace(reused=number in reused) for number, row in enumerate(rows)]


def _with_axes(rows: Iterable[ProgramArray], mesh: Mesh) -> tuple[ProgramArray, ...]:
  """The rows, with the names of mesh axes in every sharding that the compiler chose."""
  return tuple(
    row._replace(actual=row.actual and named_sharding(row.actual, mesh, len(row.shape))) for row in rows
  )


def _leaves_with_path(tree: Any) -> list[tuple[KeyPath, Any]]:
  """The leaves of a tree; the path of an array in a box is that of the box."""
  units, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_unit)
  return [
    (path if is_unit(unit) else (*path, *inner), leaf)
    for path, unit in units
    for inner, leaf in jax.tree_util.tree_leaves_with_path(unit)
  ]


def _argument(
  leaf: tuple[KeyPath, Any], required: Sharding | None, actual: Sharding | None, donated: bool
) -> ProgramArray:
  path, value = leaf
  passed = _passed(value)
  return ProgramArray(
    argument_path(path[1:]),
    np.shape(value),
    _dtype(value),
    passed if required is None else required,
    actual,
    'in_rules' if required is not None else 'compiler' if passed is None else 'as passed',
    passed,
    donated,
    weak_type=_is_weak(value),
  )


def _passed(value: Any) -> Sharding | None:
  """The sharding that an argument is passed with; None if JAX transfers it."""
  if isinstance(value, jax.Array) and not value.committed:
    return None
  return getattr(value, 'sharding', None)


def _dtype(value: Any) -> Any:
  return value.dtype if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)) else jax.typeof(value).dtype


def _is_weak(value: Any) -> bool:
  known = getattr(value, 'weak_type', None)
  return bool(jax.typeof(value).weak_type if known is None else known)


def _results(
  compiled: Any, result: Any, planned: Sequence[PlannedResult], arguments: Sequence[ProgramArray]
) -> list[ProgramArray]:
  leaves, shardings = _leaves_with_path(result), jax.tree.leaves(compiled.output_shardings)
  return [
    ProgramArray(
      result_path(path),
      leaf.shape,
      leaf.dtype,
      plan.sharding,
      actual,
      _source(plan.source, arguments),
      weak_type=_is_weak(leaf),
    )
    for (path, leaf), plan, actual in zip(leaves, planned, shardings, strict=True)
  ]


def _source(source: str | int | None, arguments: Sequence[ProgramArray]) -> str:
  """The origin of a result's sharding as text: an index is that of an argument."""
  if isinstance(source, int):
    return arguments[source].path
  return {None: 'compiler', 'placement': 'out_rules'}.get(source, str(source))


def _each_argument(dynamic: tuple[tuple, Mapping[str, Any]]) -> list[tuple[str, Any]]:
  """Path and value of each argument, in the order of their leaves."""
  args, kwargs = dynamic
  by_position = [(f'argument {number}', value) for number, value in enumerate(args)]
  return by_position + [(f'argument {name}', kwargs[name]) for name in sorted(kwargs)]


def _judged(one: ConstraintRequest, devices: int, mesh: Mesh, rules: Rules) -> ConstraintRequest:
  """The request with what only the program as a whole, or its layout, can tell."""
  hints = (did_you_mean(name, rules.by_name) for name in one.unmatched)
  one = one._replace(hint=next(filter(None, hints), ''))
  if one.dropped or one.spec is None:
    return one
  if devices == 1 and mesh.size > 1:
    return one._replace(dropped='the program runs on one device')
  if one.spec and all(entry is UNCONSTRAINED for entry in one.spec):
    return one._replace(dropped='it leaves every dimension to the compiler')
  return one
