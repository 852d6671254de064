"""Outside the loop: which rank runs the equations before and after the microbatch loop.

An equation that depends on the loop runs on the rank of its operands: a parameter is updated on the
rank of its gradient. If its operands are on several ranks, it runs on the rank of the largest, and the
others (norms, flags) are sent there. An equation that depends on arguments alone (learning rates, casts,
masks) runs on every rank that reads its results. One that reduces parameters (a weight penalty, a norm) runs on the
rank that uses them: other ranks get the result, not the parameters.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from flax_spmd._src import compat
from flax_spmd._src.pipeline.cut import equations as eq
from flax_spmd._src.pipeline.cut.equations import Atom, Constant, Equation, Value
from flax_spmd._src.pipeline.cut.microbatch_loop import Loop, StepParts
from flax_spmd._src.pipeline.cut.stage_assignment import Body
from flax_spmd._src.pipeline.cut.stage_marks import place_with_p
from flax_spmd._src.pipeline.cut.task_programs import Accumulator, TaskPrograms
from flax_spmd.errors import PipelineError


class JoinedStep(NamedTuple):
  """A step with its loop replaced by task programs, and the values that connect these to the rest.

  Attributes:
    equations: the equations outside the loop, in a valid order.
    bound: those that depend on the loop, by level and rank. A level reads values that other ranks computed in the
      levels before.
    free: those that depend on arguments alone, which any rank can run.
    reduced: what a rank computes of its arguments for other ranks: the equations, and the results that are sent.
    rank_of: the rank of every value that depends on the loop.
    indices: the number of each microbatch, as arrays.
    start: the initial value of each accumulator.
    kept: for each result of a function without a loop, its value outside.
    stacks: for each result of a microbatch, the array with a row for each microbatch.
    results: outputs of the step.
  """

  equations: list[Equation]
  bound: dict[tuple[int, int], list[Equation]]
  free: list[Equation]
  reduced: dict[int, tuple[list[Equation], list[Value]]]
  rank_of: dict[Value, int]
  indices: list[Constant]
  start: dict[Accumulator, Value]
  kept: dict[Value, Value]
  stacks: dict[Value, Value]
  results: list[Value]

  def closure(self, values: Iterable[Atom]) -> list[Equation]:
    """The free equations that values depend on, in order."""
    return eq.needed(self.free, values)


def join(step: StepParts, programs: TaskPrograms, stage_ranks: Sequence[int]) -> JoinedStep:
  """Connects the equations outside the loop to its task programs, and assigns them to ranks."""
  loop, body, producer = step.loop, programs.body, programs.producers()
  before: list[Equation] = []
  traces: dict[Any, Any] = {}
  known: dict[Value, Atom] = {}
  after: list[Equation] = []
  rank_of: dict[Value, int] = {}
  start: dict[Accumulator, Value] = {}
  parts: dict[int, list[Value]] = defaultdict(list)  # of each value that the loop carries
  for one in programs.accumulators:
    is_first = one.before is loop.body.carried[one.origin]  # of the sums of several stages
    initial = jnp.copy if is_first else jnp.zeros_like  # a copy, since the first update overwrites it
    computed, [start[one]] = eq.traced(initial, loop.starts[one.origin], known=traces)
    before += computed
    parts[one.origin].append(one.final)
    rank_of[one.final] = stage_ranks[one.task[1]]
  for origin, whole in enumerate(loop.finals):
    if origin not in parts:
      known[whole] = _unchanged(loop, body, origin)
      continue
    added, [known[whole]] = eq.traced(_total, *parts[origin], known=traces)
    after += added
  outside: dict[Value, Value] = {}
  for value, stack in zip(body.kept, loop.stacks, strict=True):
    if value in producer:
      known[stack] = outside.setdefault(value, Value(stack.aval))
      rank_of[outside[value]] = stage_ranks[producer[value][1]]
    elif not loop.once:
      known[stack] = _unprocessed(loop, body, value, before)
    elif stack is not value:  # a closed-over array is both
      known[stack] = value
  kept, stacks = (outside, {}) if loop.once else ({}, outside)
  indices = [] if loop.once else [Constant(np.uint32(number)) for number in range(loop.count)]
  equations = [*step.before, *before, *after, *(one.renamed(known) for one in step.after)]
  results = eq.resolved(known, step.results)
  live = eq.needed(equations, [*results, *body.inputs, *start.values()])
  bound, free = _assigned(live, rank_of)
  read = {rank: list[Value]() for rank in stage_ranks}
  for (_, stage), task in programs.tasks.items():
    read[stage_ranks[stage]] += task.inputs
  for one, initial in start.items():
    read[rank_of[one.final]].append(initial)
  for (_, rank), each in bound.items():
    read[rank] += eq.free_values(each)
  free, reduced = _reduced_apart(free, read, results)
  return JoinedStep(equations, bound, free, reduced, rank_of, indices, start, kept, stacks, results)


def _total(*parts: Any) -> Any:
  """The total of the sums of several stages."""
  return functools.reduce(lax.add, parts)


def _unchanged(loop: Loop, body: Body, origin: int) -> Atom:
  """The final value of a carried value that no task updates: its initial value, or an invariant."""
  before = loop.body.carried[origin]
  after = body.updated[body.carried.index(before)]
  return loop.starts[origin] if after is before else after


def _unprocessed(loop: Loop, body: Body, value: Value, equations: list[Equation]) -> Atom:
  """A stacked result that no task computes: the batch itself, or an invariant, broadcast."""
  if value in body.rows:
    return body.rows[value]
  repeating, [stack] = eq.traced(lambda x: jnp.broadcast_to(x, (loop.count, *jnp.shape(x))), value)
  equations += repeating
  return stack


# -- ranks


def _assigned(
  equations: list[Equation], rank_of: dict[Value, int]
) -> tuple[dict[tuple[int, int], list[Equation]], list[Equation]]:
  """The equations that depend on the loop, by level and rank, and the others; adds the ranks of their results."""
  level: dict[Value, int] = {}
  bound: dict[tuple[int, int], list[Equation]] = defaultdict(list)
  free: list[Equation] = []
  pending = equations[::-1]
  split: set[Equation] = set()
  while pending:
    equation = pending.pop()
    operands = [value for value in equation.values if value in rank_of]
    if not operands and not equation.has_effects and equation.primitive is not place_with_p:
      free.append(equation)
      continue
    deciding = _anchor(equation, operands) if equation.primitive is place_with_p else operands
    ranks = {rank_of[value] for value in operands}
    if equation.name == 'cond' and equation not in split and len(ranks) > 1:
      parts = _branch_per_rank(equation, rank_of)
      split.update(parts)
      pending += parts[::-1]
      continue
    rank = rank_of[max(deciding, key=lambda value: value.bytes)] if deciding else 0
    at = max((level.get(value, 0) + (rank_of[value] != rank) for value in operands), default=0)
    bound[at, rank].append(equation)
    rank_of.update(dict.fromkeys(equation.outputs, rank))
    level.update(dict.fromkeys(equation.outputs, at))
  return dict(sorted(bound.items(), key=lambda item: item[0])), free


def _reduced_apart(
  free: list[Equation], read: Mapping[int, Iterable[Value]], results: Iterable[Value]
) -> tuple[list[Equation], dict[int, tuple[list[Equation], list[Value]]]]:
  """The free equations without those that reduce arrays of a rank for others; and for each rank, its `reduced`.

  Args:
    free: the equations that depend on arguments alone.
    read: the values that each rank reads.
    results: the results of the step.
  """
  producer = {value: one for one in free for value in one.outputs}
  arrays: dict[Value, frozenset[Value]] = {}  # the arguments that a value depends on, without scalars
  reductions: dict[Equation, frozenset[Value]] = {}
  for one in free:
    operands = [
      arrays.get(value, frozenset({value} if value.aval.shape else ())) for value in one.values
    ]
    found = frozenset[Value]().union(*operands)
    arrays.update(dict.fromkeys(one.outputs, found))
    if found and _REDUCED * sum(value.bytes for value in one.outputs) <= sum(
      x.bytes for x in one.values
    ):
      reductions[one] = found
  used: dict[int | None, set[Value]] = defaultdict(set)

  def use(rank: int | None, values: Iterable[Value]) -> None:
    """Adds values that a rank uses (None: the results), with those that they come from, up to reductions."""
    pending = [*values]
    while pending:
      value = pending.pop()
      if value not in used[rank]:
        used[rank].add(value)
        one = producer.get(value)
        pending += [] if one is None or one in reductions else one.values

  for rank, values in read.items():
    use(rank, values)
  use(None, results)
  sent: dict[int, list[Value]] = defaultdict(list)
  for one, found in reversed(reductions.items()):
    readers = [rank for rank, values in used.items() if not values.isdisjoint(one.outputs)]
    home = max(read, key=lambda rank: sum(value.bytes for value in found & used[rank]))
    if not found.isdisjoint(used[home]) and any(not found <= used[rank] for rank in readers):
      sent[home] += one.outputs
      used[home] |= found
    else:
      for rank in readers:
        use(rank, one.values)
  apart = {value for values in sent.values() for value in values}
  reduced = {rank: (eq.needed(free, values), values) for rank, values in sorted(sent.items())}
  return [one for one in free if apart.isdisjoint(one.outputs)], reduced


_REDUCED = 8  # the operands of a reduction have at least so many times the bytes of its results


def _anchor(equation: Equation, operands: Sequence[Value]) -> list[Value]:
  """The value whose rank runs a `place_with`, among the operands that have a rank.

  Raises:
    PipelineError: it does not depend on the loop.
  """
  anchor = equation.inputs[1]
  if not isinstance(anchor, Value) or anchor not in operands:
    raise PipelineError(
      f'place_with at {equation.source_line}: the anchor does not depend on the microbatch loop, so it is '
      'on no particular rank.\nFix: pass a result of the loop, such as the gradient of a parameter.'
    )
  return [anchor]


def result_sources(equation: Equation, given: Sequence[int]) -> list[int]:
  """The inputs that each result of an equation depends on, as bits of a number; `given` has those of its operands."""
  if equation.name != 'cond':
    return [functools.reduce(operator.or_, given, 0)] * len(equation.outputs)
  index, *others = given
  branches = [_sources_within(branch, others) for branch in equation.params['branches']]
  return [functools.reduce(operator.or_, each, index) for each in zip(*branches, strict=True)]


def _sources_within(jaxpr: Any, given: Sequence[int]) -> list[int]:
  inputs = [Value(variable.aval) for variable in compat.jaxpr_parts(jaxpr).inputs]
  equations, outputs = eq.flatten(jaxpr, inputs, lambda _: True)
  known = dict(zip(inputs, given, strict=True))
  for one in equations:
    read = [known.get(atom, 0) if isinstance(atom, Value) else 0 for atom in one.inputs]
    known.update(zip(one.outputs, result_sources(one, read), strict=True))
  return [known.get(value, 0) for value in outputs]


def _branch_per_rank(equation: Equation, rank_of: Mapping[Value, int]) -> list[Equation]:
  """A branch over a whole state (`optax.MultiSteps`, `apply_if_finite`), as one branch for each rank."""
  avals = [eq.abstract(atom) for atom in equation.inputs]
  operands = equation.inputs

  def alone(*values):
    return compat.bind(equation.primitive, equation.params, None, values)

  def only(outputs: list[int]) -> tuple[Any, list[Atom]]:
    selected = [number in outputs for number in range(len(equation.outputs))]
    jaxpr, used = compat.pruned(alone, avals, selected)
    return jaxpr, [atom for atom, keep in zip(operands, used, strict=True) if keep]

  by_rank: dict[int | None, list[int]] = defaultdict(list)
  for number, bits in enumerate(result_sources(equation, [1 << at for at in range(len(operands))])):
    read = [atom for at, atom in enumerate(operands) if bits >> at & 1]
    loop_values = [atom for atom in read if isinstance(atom, Value) and atom in rank_of]
    rank = rank_of[max(loop_values, key=lambda value: value.bytes)] if loop_values else None
    by_rank[rank].append(number)
  if len(by_rank) < 2:
    return [equation]
  parts = []
  for outputs in by_rank.values():
    jaxpr, inputs = only(outputs)
    equations, results = eq.flatten(jaxpr, inputs, lambda _: False)
    names = dict(zip(results, (equation.outputs[number] for number in outputs), strict=True))
    parts += [one.renamed(names) for one in equations]
  return parts
