"""Constrained results: the results of a program whose shardings, or memories, the program itself decides.

A function that ends with a sharding constraint has decided the sharding of that result. A constraint on a value of
a result's shape, anywhere in the function, is likely to reach it: the compiler propagates it.
"""

from __future__ import annotations

from collections.abc import Collection, Container
from typing import Any

import jax
from jax.sharding import NamedSharding

from flax_spmd._src import compat
from flax_spmd._src.rules.decisions import axis_names

_PASSED_THROUGH = ('convert_element_type', 'copy', 'copy_p')


def constrained_results(jaxpr: Any, known: dict[int, list[bool]] | None = None) -> list[bool]:
  """For each result of a program, whether it is the value of a sharding constraint, or a cast of one.

  Args:
    jaxpr: the program; functions that it calls, such as jitted ones, are looked into.
    known: results of the programs inside it, by identity.
  """
  known = {} if known is None else known
  if id(jaxpr) not in known:
    parts = compat.jaxpr_parts(jaxpr)
    made_by = {variable: equation for equation in parts.equations for variable in equation.outvars}
    known[id(jaxpr)] = [_is_constrained(variable, made_by, known) for variable in parts.outputs]
  return known[id(jaxpr)]


def results_of_constrained_shapes(jaxpr: Any) -> list[bool]:
  """For each result of a program, whether the program constrains any value of its shape."""
  shapes = {
    tuple(equation.outvars[0].aval.shape)
    for equation in compat.equations_in(jaxpr)
    if equation.primitive.name in ('sharding_constraint', 'reshard') and names_axes(equation)
  }
  return [tuple(variable.aval.shape) in shapes for variable in compat.jaxpr_parts(jaxpr).outputs]


def result_memories(jaxpr: Any) -> list[str]:
  """For each result of a program, the memory that it is in: 'device' or 'pinned_host'."""
  spaces = [getattr(each.aval, 'memory_space', None) for each in compat.jaxpr_parts(jaxpr).outputs]
  return ['pinned_host' if space is jax.memory.Space.Host else 'device' for space in spaces]


def has_constraints(jaxpr: Any, shapes: Container[tuple[int, ...]] = ()) -> bool:
  """Whether anything in a program names mesh axes: a constraint that is not open in every dimension, or a `shard_map`.

  Args:
    jaxpr: the program.
    shapes: constraints of values of these shapes do not count.
  """
  return any(
    equation.primitive.name != 'sharding_constraint' or equation.outvars[0].aval.shape not in shapes
    for equation in filter(names_axes, compat.equations_in(jaxpr))
  )


def is_constrained_over(
  jaxpr: Any, axes: Collection[str], shapes: Container[tuple[int, ...]] = ()
) -> bool:
  """Whether a constraint in a program shards a dimension over some mesh axes, or anything in it but constraints names axes.

  Args:
    jaxpr: the program.
    axes: the mesh axes.
    shapes: constraints of values of these shapes do not count.
  """
  for equation in filter(names_axes, compat.equations_in(jaxpr)):
    sharding = equation.params.get('sharding')
    if equation.primitive.name != 'sharding_constraint' or not isinstance(sharding, NamedSharding):
      return True
    is_over = any(axis in axes for entry in sharding.spec for axis in axis_names(entry))
    if is_over and equation.outvars[0].aval.shape not in shapes:
      return True
  return False


def names_axes(equation: Any) -> bool:
  """Whether an operation is a constraint that is not open in every dimension, or a `shard_map`."""
  name = equation.primitive.name
  if name == 'reshard':  # JAX leaves some onto Auto axes or no mesh, without effect
    return bool(equation.params['dst_sharding'].mesh.explicit_axes)
  if name != 'sharding_constraint':
    return name == 'shard_map'
  return len(equation.params['unconstrained_dims']) < len(equation.outvars[0].aval.shape)


def _is_constrained(variable: Any, made_by: dict[Any, Any], known: dict[int, list[bool]]) -> bool:
  equation = None if hasattr(variable, 'val') else made_by.get(variable)
  if equation is None:  # a literal or an input
    return False
  name = equation.primitive.name
  if name in ('sharding_constraint', 'reshard') and names_axes(equation):
    return True
  if name in (*_PASSED_THROUGH, 'sharding_constraint'):
    return _is_constrained(equation.invars[0], made_by, known)
  position = list(equation.outvars).index(variable)
  return any(
    constrained_results(inner, known)[position]
    for inner in compat.jaxprs_in(equation.params)
    if len(compat.jaxpr_parts(inner).outputs) == len(equation.outvars)
  )
