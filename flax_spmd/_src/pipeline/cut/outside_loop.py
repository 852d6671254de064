"""Outside: where the rest of a step runs, before and after the microbatch loop.

What depends on the loop goes to the rank that has its operands: the update of a parameter to where its
gradient is. Of operands on several ranks the largest stays, and the others (norms, flags) are sent to it.
What depends on arguments only (learning rates, casts, masks) is computed by every rank that needs it.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from flax_spmd._src import compat
from flax_spmd._src.pipeline.cut import equations as eq
from flax_spmd._src.pipeline.cut.equations import Atom, Equation, Value
from flax_spmd._src.pipeline.cut.microbatch_loop import Loop, Step
from flax_spmd._src.pipeline.cut.stage_assignment import Body
from flax_spmd._src.pipeline.cut.task_programs import Accumulator, Programs
from flax_spmd.errors import PipelineError


class Joined(NamedTuple):
  """A step whose loop is programs of tasks, joined to the rest by values.

  Attributes:
    equations: the rest of the step.
    slices: per slice of the batch, its value for each microbatch.
    start, final: per accumulator, what it begins with and what it is in the end.
    kept: per result of every microbatch, its value for each microbatch.
    results: the outputs of the step.
    invariants: what every pass of the loop uses.
    home: the rank that makes a value, for those that come from the loop.
  """

  equations: list[Equation]
  slices: dict[Value, list[Value]]
  start: dict[Accumulator, Value]
  final: dict[Accumulator, Value]
  kept: dict[Value, list[Value]]
  results: list[Value]
  invariants: list[Value]
  home: dict[Value, int]

  @property
  def wanted(self) -> list[Value]:
    """What the equations are for."""
    slices = [value for values in self.slices.values() for value in values]
    return [*self.results, *self.invariants, *slices, *self.start.values()]


def join(step: Step, programs: Programs, rank_of: Callable[[int], int]) -> Joined:
  """Joins the rest of a step to the programs of its loop."""
  loop, body, maker = step.loop, programs.body, programs.made_by()
  before: list[Equation] = []
  traces: dict[Any, Any] = {}
  slices = {}
  for value, whole in zip(body.slices, loop.batch, strict=True):
    cuts, slices[value] = eq.traced(lambda x: [x[i] for i in range(loop.count)], whole)
    before += cuts
  known: dict[Value, Atom] = {}
  after: list[Equation] = []
  home: dict[Value, int] = {}
  start: dict[Accumulator, Value] = {}
  final: dict[Accumulator, Value] = {}
  for accumulator in programs.accumulators:
    begin = _copied if accumulator.first else _zeros  # its memory is used again, so it is its own
    made, [start[accumulator]] = eq.traced(begin, loop.starts[accumulator.origin], known=traces)
    before += made
    final[accumulator] = Value(accumulator.before.aval)
    home[final[accumulator]] = rank_of(accumulator.task[1])
  for origin, whole in enumerate(loop.finals):
    parts = [final[one] for one in programs.accumulators if one.origin == origin]
    known[whole] = _total(parts, after) if parts else _unchanged(loop, programs, origin)
  kept: dict[Value, list[Value]] = {}
  for value, stack in zip(body.kept, loop.stacks, strict=True):
    if value in maker:
      if value not in kept:
        kept[value] = [Value(value.aval) for _ in range(loop.count)]
        home.update(dict.fromkeys(kept[value], rank_of(maker[value][1])))
      known[stack] = kept[value][0] if loop.once else _stacked(kept[value], after)
    else:
      known[stack] = _same_each_time(loop, body, value, before)
  rest = [one.replaced(known) for one in step.equations]
  results = eq.resolved(known, step.results)
  return Joined([*before, *after, *rest], slices, start, final, kept, results, body.invariants, home)


def _copied(x: Any) -> list[Any]:
  return [jnp.copy(x)]


def _zeros(x: Any) -> list[Any]:
  return [jnp.zeros_like(x)]


def _added(a: Any, b: Any) -> list[Any]:
  return [lax.add(a, b)]


def _rows(*rows: Any) -> list[Any]:
  return [jnp.stack(rows)]


def _total(parts: list[Value], equations: list[Equation]) -> Value:
  """The sum of what stages have added up, each for itself."""
  total = parts[0]
  for part in parts[1:]:
    added, [total] = eq.traced(_added, total, part)
    equations += added
  return total


def _unchanged(loop: Loop, programs: Programs, origin: int) -> Atom:
  """A carried value that no task updates: as it came in, or what every pass sets it to."""
  number = programs.origins.index(origin)
  before, after = programs.body.carried[number], programs.body.updated[number]
  return loop.starts[origin] if after is before else after


def _stacked(values: list[Value], equations: list[Equation]) -> Value:
  made, [stack] = eq.traced(_rows, *values)
  equations += made
  return stack


def _same_each_time(loop: Loop, body: Body, value: Value, equations: list[Equation]) -> Atom:
  """A result of every pass that no task computes: the batch itself, or the same each time."""
  if value in body.slices:
    return loop.batch[body.slices.index(value)]
  if value in body.carried:
    raise PipelineError(
      f'The microbatch loop at {loop.place} returns a value of every pass that it carries: '
      f'{value.aval.str_short()}.\nFix: return it after the last pass only.'
    )
  made, [stack] = eq.traced(lambda x: [jnp.broadcast_to(x, (loop.count, *jnp.shape(x)))], value)
  equations += made
  return stack


# -- which rank runs what


@dataclasses.dataclass
class Placed:
  """Where the rest of a step runs.

  Attributes:
    bound: the equations that depend on the loop, by level and rank: a level waits for what ranks send
      each other after the level before.
    free: the equations that depend on arguments only, which any rank can run.
    home: the rank of every value that depends on the loop.
  """

  bound: dict[tuple[int, int], list[Equation]]
  free: list[Equation]
  home: dict[Value, int]

  def closure(self, values: Iterable[Atom]) -> list[Equation]:
    """The free equations that values depend on, in order."""
    return eq.needed(self.free, values)


def place(joined: Joined) -> Placed:
  """Places the equations outside of the loop."""
  home = dict(joined.home)
  level: dict[Value, int] = {}
  bound: dict[tuple[int, int], list[Equation]] = defaultdict(list)
  free: list[Equation] = []
  open_ = eq.needed(_in_order(joined.equations), joined.wanted)[::-1]
  whole: set[Equation] = set()
  while open_:
    equation = open_.pop()
    there = [value for value in equation.values if value in home]
    if not there and not equation.has_effects:
      free.append(equation)
      continue
    if equation.name == 'cond' and equation not in whole and len({home[value] for value in there}) > 1:
      parts = _branch_per_rank(equation, home)
      whole.update(parts)
      open_ += parts[::-1]
      continue
    rank = home[max(there, key=lambda value: value.bytes)] if there else 0
    at = max((level.get(value, 0) + (home[value] != rank) for value in there), default=0)
    bound[at, rank].append(equation)
    home.update(dict.fromkeys(equation.outputs, rank))
    level.update(dict.fromkeys(equation.outputs, at))
  return Placed(dict(sorted(bound.items(), key=lambda item: item[0])), free, home)


def _in_order(equations: Sequence[Equation]) -> list[Equation]:
  """Equations in an order in which each comes after those that it needs, else as they are."""
  maker = {value: number for number, one in enumerate(equations) for value in one.outputs}
  users: dict[int, list[int]] = defaultdict(list)
  missing: dict[int, int] = {}
  for number, one in enumerate(equations):
    needs = {maker[value] for value in one.values if value in maker}
    missing[number] = len(needs)
    for need in needs:
      users[need].append(number)
  ready = [number for number, count in missing.items() if not count]  # sorted, so it is a heap
  ordered = []
  while ready:
    number = heapq.heappop(ready)
    ordered.append(equations[number])
    for user in users[number]:
      missing[user] -= 1
      if not missing[user]:
        heapq.heappush(ready, user)
  return ordered


def _branch_per_rank(equation: Equation, home: Mapping[Value, int]) -> list[Equation]:
  """A branch over a whole state (`optax.MultiSteps`, `apply_if_finite`) as one branch for each rank."""
  avals = [eq.abstract(atom) for atom in equation.inputs]
  operands = equation.inputs

  def alone(*values):
    return compat.bind(equation.primitive, equation.params, None, values)

  def only(outputs: list[int]) -> tuple[Any, list[Atom]]:
    wanted = [number in outputs for number in range(len(equation.outputs))]
    jaxpr, used = compat.pruned(alone, avals, wanted)
    return jaxpr, [atom for atom, keep in zip(operands, used, strict=True) if keep]

  by_rank: dict[int | None, list[int]] = defaultdict(list)
  for number in range(len(equation.outputs)):
    there = [value for value in only([number])[1] if isinstance(value, Value) and value in home]
    rank = home[max(there, key=lambda value: value.bytes)] if there else None
    by_rank[rank].append(number)
  if len(by_rank) < 2:
    return [equation]
  parts = []
  for outputs in by_rank.values():
    jaxpr, inputs = only(outputs)
    equations, results = eq.flatten(jaxpr, inputs, lambda _: False)
    names = dict(zip(results, (equation.outputs[number] for number in outputs), strict=True))
    for one in equations:
      one.outputs = [names.get(value, value) for value in one.outputs]
    parts += equations
  return parts
