"""Batch names: the logical names that a step gives to the dimension of its examples, by the operations that it comes from.

    batch_names(jaxpr, {(0, 0)}, frozenset({'batch'}))   # {'B'}, if the step constrains activations by ('B', 'L', 'D')

Dimension 0 of a batch's arrays is followed through the operations of the step, into loops and calls, up to its constraints.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax.extend.core import Literal
from jax.sharding import NamedSharding

from flax_spmd._src import compat
from flax_spmd._src.operand_dimensions import Dimension, operand_dimensions
from flax_spmd._src.rules.decisions import axis_names

_Names = tuple[str | None, ...]
_Known = dict[Any, set[int]]  # dimensions of variables that come from the batch


def batch_names(jaxpr: Any, batch: Collection[Dimension], known: Collection[str]) -> frozenset[str]:
  """The names of dimensions that come from the batch, except for names beside one of the batch on the same array.

  Args:
    jaxpr: the step, traced on a mesh whose axes are its names.
    batch: its inputs of the batch, with their dimension of examples.
    known: names of the batch that are known already.
  """
  found = dict[_Names, int]()  # the names of a constraint, and the first dimension of the batch
  _follow(jaxpr, [{dim for i, dim in batch if i == number} for number in range(_inputs(jaxpr))], found)
  names = {constraint[dim] for constraint, dim in found.items()}
  beside = {name for each in found if not {*known}.isdisjoint(each) for name in each}
  return frozenset(name for name in names - beside if name)


def _follow(jaxpr: Any, inputs: Sequence[set[int]], found: dict[_Names, int]) -> list[set[int]]:
  """The dimensions of a program's results that come from the batch, of which these dimensions of its inputs are."""
  parts = compat.jaxpr_parts(jaxpr)
  known: _Known = dict(zip(parts.inputs, inputs, strict=True))
  of = lambda atom: set() if isinstance(atom, Literal) else known.get(atom, set())
  for equation in parts.equations:
    operands = [of(each) for each in equation.invars]
    if not any(operands):
      continue
    if equation.primitive.name == 'sharding_constraint':
      names = _names(equation)
      found |= {names: min(dims)} if (dims := {d for d in operands[0] if names[d : d + 1]}) else {}
    results = _results(equation, operands, found)
    known |= dict(zip(equation.outvars, results, strict=True))
  return [of(each) for each in parts.outputs]


def _results(equation: Any, operands: list[set[int]], found: dict[_Names, int]) -> list[set[int]]:
  name, params = equation.primitive.name, equation.params
  if name == 'scan':
    return _of_scan(params, operands, found)
  if name == 'while':
    skipped = params['cond_nconsts']
    carried = operands[skipped + params['body_nconsts'] :]
    return _of_loop(params['body_jaxpr'], operands[skipped:], len(carried), found)
  if name == 'cond':
    each = [_follow(branch, operands[1:], found) for branch in params['branches']]
    return [set().union(*same) for same in zip(*each, strict=True)]
  if name in compat.CALLS:
    return _follow(next(compat.jaxprs_in(params)), operands, found)
  return [
    {
      dim
      for dim in range(len(variable.aval.shape))
      if any(of in operands[i] for i, of in operand_dimensions(equation, number, dim))
    }
    for number, variable in enumerate(equation.outvars)
  ]


def _of_scan(
  params: Mapping[str, Any], operands: list[set[int]], found: dict[_Names, int]
) -> list[set[int]]:
  """A turn has the inputs without the dimension of turns; its other results are stacked again."""
  constants, carried = compat.scan_counts(params)
  first = constants + carried
  inputs = [*operands[:first], *({dim - 1 for dim in dims if dim} for dims in operands[first:])]
  results = _of_loop(params['jaxpr'], inputs, carried, found, constants)
  is_of_turns = any(0 in dims for dims in operands[first:])
  stacked = ({dim + 1 for dim in dims} | ({0} if is_of_turns else set()) for dims in results[carried:])
  return [*results[:carried], *stacked]


def _of_loop(
  body: Any,
  inputs: list[set[int]],
  carried: int,
  found: dict[_Names, int],
  constants: int | None = None,
) -> list[set[int]]:
  """The results of a loop's body, whose carried inputs are the results of the turn before."""
  at = len(inputs) - carried if constants is None else constants
  while True:
    results = _follow(body, inputs, found)
    wider = [
      one | other for one, other in zip(inputs[at : at + carried], results[:carried], strict=True)
    ]
    if wider == inputs[at : at + carried]:
      return results
    inputs = [*inputs[:at], *wider, *inputs[at + carried :]]


def _inputs(jaxpr: Any) -> int:
  return len(compat.jaxpr_parts(jaxpr).inputs)


def _names(equation: Any) -> _Names:
  """The name of each dimension of a constraint; None where it has none, or several."""
  sharding = equation.params['sharding']
  spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
  return tuple(names[0] if len(names := axis_names(entry)) == 1 else None for entry in spec)
