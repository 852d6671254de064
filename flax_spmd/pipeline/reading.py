"""Reading: a traced step as a microbatch loop, and what comes before and after it.

A function without a loop (inference, evaluation) is all loop, of one microbatch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from flax_spmd import compat
from flax_spmd.errors import PipelineError
from flax_spmd.pipeline import equations as eq
from flax_spmd.pipeline import residuals
from flax_spmd.pipeline.cutting import Body, stage_ends
from flax_spmd.pipeline.equations import Atom, Constant, Equation, Value
from flax_spmd.pipeline.marks import microbatch_p, stage_end_p
from flax_spmd.pipeline.schedules import Schedule


@dataclasses.dataclass
class Loop:
  """The microbatch loop.

  Attributes:
    body: a pass of it; its invariants are values of the step.
    count: how many microbatches there are.
    batch: what `body.slices` are slices of.
    starts: what `body.carried` begin as.
    finals: what `body.updated` are in the end.
    stacks: what `body.kept` are, of all microbatches.
    schedule: as given to `accumulate`, if it was.
    once: whether it is no loop, but a function that runs once: then `stacks` are as `body.kept`.
  """

  body: Body
  count: int
  batch: list[Atom]
  starts: list[Atom]
  finals: list[Value]
  stacks: list[Value]
  schedule: Schedule | None
  once: bool = False


@dataclasses.dataclass
class Step:
  """A traced step.

  Attributes:
    arguments: its inputs.
    equations: all but the loop, in an order in which they can run.
    loop: the loop.
    results: its outputs.
  """

  arguments: list[Value]
  equations: list[Equation]
  loop: Loop
  results: list[Atom]


def read(jaxpr: Any) -> Step:
  """The step that was traced.

  Raises:
    PipelineError: it has no stage ends, several loops with stage ends, or a loop where it cannot be seen.
  """
  arguments = [Value(variable.aval) for variable in compat.opened(jaxpr).inputs]
  marked, passes = eq.finder(stage_end_p), eq.finder(microbatch_p)
  equations, results = eq.flatten(jaxpr, arguments, lambda one: one.primitive.name in eq.JITS)
  within = [one for one in equations if any(map(marked, one.jaxprs)) or any(map(passes, one.jaxprs))]
  loops = [one for one in within if one.name == 'scan']
  if stage_ends(equations):
    if loops:
      raise PipelineError(
        f'Stages end outside of the microbatch loop too, which is at {loops[0].place}.\n'
        'Fix: compute what needs the model inside of the function that accumulate gets.'
      )
    return _once(arguments, equations, results)
  _check_loops(within, loops)
  [loop] = loops
  return _looped(arguments, equations, results, loop, marked)


def _check_loops(within: Sequence[Equation], loops: Sequence[Equation]) -> None:
  if len(loops) == 1 == len(within):
    return
  if not within:
    raise PipelineError(
      'No stage ends in this function.\nFix: write x = flax_spmd.pipeline.stage_end(x) in the model, '
      'between two stages.'
    )
  places = ''.join(f'\n  `{one.name}` at {one.place}' for one in within)
  why = 'several microbatch loops' if len(loops) > 1 else 'inside of another operation'
  raise PipelineError(
    f'A pipeline has one microbatch loop, at the top of the step; here there are {why}:{places}\n'
    'Fix: call accumulate once, outside of branches and loops; make steps with several a pipeline each.'
  )


def _once(arguments, equations, results) -> Step:
  """A function without a loop."""
  if any(one.primitive is stage_end_p and one.params['way'] != 'forward' for one in equations):
    raise PipelineError(
      'This step takes gradients through stages outside of a microbatch loop.\n'
      'Fix: take them by flax_spmd.pipeline.accumulate, with microbatches=1 if the batch is to stay whole.'
    )
  constants = [value for value in eq.free_values(equations) if isinstance(value, Constant)]
  given = {*arguments, *constants}
  kept = [atom for atom in dict.fromkeys(results) if isinstance(atom, Value) and atom not in given]
  body = Body(equations, [*arguments, *constants], [], [], [], kept)
  loop = Loop(body, 1, [], [], [], kept, None, once=True)
  return Step(arguments, [], loop, results)


def _looped(arguments, equations, results, scan: Equation, marked) -> Step:
  constants, carried = compat.scan_counts(scan.params)
  inner = compat.opened(scan.params['jaxpr'])
  starts, batch = scan.inputs[constants : constants + carried], scan.inputs[constants + carried :]
  variables = [Value(variable.aval) for variable in inner.inputs[constants:]]
  before, slices = variables[:carried], variables[carried:]
  # a stage can end inside of a jitted block; small blocks (gelu, where) are opened to be seen through
  inside, outputs = eq.flatten(
    scan.params['jaxpr'],
    [*scan.inputs[:constants], *variables],
    lambda one: any(map(marked, compat.jaxprs_in(one.params))) or _is_small(one),
  )
  inside = eq.needed(inside, outputs)
  schedule = next((one.params['schedule'] for one in inside if one.primitive is microbatch_p), None)
  hoisted, inside = _hoisted(inside, {*before, *slices})
  body = Body(inside, [], slices, before, outputs[:carried], outputs[carried:])
  own = {*before, *slices}.union(*(one.outputs for one in inside))
  body.invariants = [value for value in eq.free_values(inside) if value not in own]
  index = equations.index(scan)
  loop = Loop(
    body,
    scan.params['length'],
    batch,
    starts,
    scan.outputs[:carried],
    scan.outputs[carried:],
    schedule,
  )
  if scan.params['reverse']:
    raise PipelineError(
      f'The microbatch loop at {scan.place} runs in reverse.\nFix: let it run forwards.'
    )
  rest = [*equations[:index], *hoisted, *equations[index + 1 :]]
  return Step(arguments, rest, loop, results)


def _is_small(equation: Any) -> bool:
  """Whether a jitted block has nothing in it but cheap operations on elements."""
  return equation.primitive.name in eq.JITS and all(
    one.primitive.name in residuals.CHEAP or _is_small(one)
    for inside in compat.jaxprs_in(equation.params)
    for one in compat.opened(inside).equations
  )


def _hoisted(equations: Sequence[Equation], own: set[Value]) -> tuple[list[Equation], list[Equation]]:
  """What is the same in every pass, to be done once before; and the rest.

  What costs nothing to compute stays, unless the former needs it.
  """
  varying = set(own)
  for one in equations:
    fixed = one.primitive in (stage_end_p, microbatch_p) or one.has_effects
    if fixed or not varying.isdisjoint(one.values):
      varying.update(one.outputs)
  same = [one for one in equations if not varying.intersection(one.outputs) and one.outputs]
  worth = [one for one in same if one.name not in residuals.VIEWS]
  hoisted = eq.needed(same, [value for one in worth for value in one.outputs])
  gone = set(worth)
  return hoisted, [one for one in equations if one not in gone]
