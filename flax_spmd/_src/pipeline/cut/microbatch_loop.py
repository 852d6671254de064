"""Reading: a traced step as a microbatch loop, and what comes before and after it.

A function without a loop (inference, evaluation) is all loop, of one microbatch.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from flax_spmd._src import compat
from flax_spmd._src.pipeline.cut import equations as eq
from flax_spmd._src.pipeline.cut import residuals
from flax_spmd._src.pipeline.cut.equations import Atom, Constant, Equation, Value
from flax_spmd._src.pipeline.cut.stage_assignment import Body, check_outside, places
from flax_spmd._src.pipeline.cut.stage_marks import may_end_p, microbatch_p, stage_end_p
from flax_spmd._src.pipeline.schedules.schedule import Schedule
from flax_spmd._src.text import few
from flax_spmd.errors import PipelineError


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
    place: the line that it is at.
  """

  body: Body
  count: int
  batch: list[Atom]
  starts: list[Atom]
  finals: list[Value]
  stacks: list[Value]
  schedule: Schedule | None
  once: bool = False
  place: str = 'an unknown place'


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
  results: list[Value]


def read(jaxpr: Any) -> Step:
  """The step that was traced.

  Raises:
    PipelineError: it has no stage ends, several loops with stage ends, or a loop where it cannot be seen.
  """
  arguments = [Value(variable.aval) for variable in compat.opened(jaxpr).inputs]
  marked, passes = eq.finder(stage_end_p), eq.finder(microbatch_p)

  def opens(one: Any) -> bool:
    inside = list(compat.jaxprs_in(one.params))
    return one.primitive.name in eq.JITS or (any(map(marked, inside)) and not any(map(passes, inside)))

  equations, results = eq.flatten(jaxpr, arguments, opens)
  within = [one for one in equations if any(map(marked, one.jaxprs)) or any(map(passes, one.jaxprs))]
  loops = [one for one in within if one.name == 'scan']
  ends = [one for one in equations if one.primitive in (stage_end_p, may_end_p)]
  ends = (
    ends
    if not any(map(_has_microbatches, loops))
    else [one for one in ends if one.primitive is stage_end_p]
  )
  if ends and any(map(_has_microbatches, loops)):
    loop = next(filter(_has_microbatches, loops))
    raise PipelineError(
      f'Stages end outside of the microbatch loop, which is at {loop.place}:\n{places(ends)}\n'
      'Fix: compute what needs the model inside of the function that accumulate gets.'
    )
  if ends:
    return _once(arguments, equations, results)
  _check_loops(within, loops)
  [loop] = loops
  return _looped(arguments, equations, results, loop, marked, passes)


def _has_microbatches(scan: Equation) -> bool:
  """Whether it is a loop over microbatches, by what is in it; another may be the model's own."""
  ways = _ways(scan)
  return 'backward' in ways or 'microbatch' in ways


def _ways(equation: Equation) -> set[str]:
  """Which kinds of marks are in an equation."""
  found = {one.params['way'] for one in eq.found_in(equation.jaxprs, stage_end_p)}
  return found | {'microbatch' for _ in eq.found_in(equation.jaxprs, microbatch_p)}


def _check_loops(within: Sequence[Equation], loops: Sequence[Equation]) -> None:
  """Raises unless there is one loop, and nothing else, with marks in it."""
  if len(loops) == 1 == len(within):
    return
  if not within:
    raise PipelineError(
      'No stage ends in this function.\nFix: write x = flax_spmd.pipeline.stage_end(x) in the model, '
      'between two stages.'
    )
  around = [one for one in within if one.name != 'scan' and 'microbatch' in _ways(one)]
  if around:
    raise PipelineError(
      'The microbatch loop is inside of another operation, where it cannot be run as a pipeline:\n'
      + few([f'  {eq.called(one)}' for one in around])
      + '\nFix: call accumulate at the top of the step, outside of branches, loops and remat.'
    )
  if not loops or len(loops) < len(within):
    check_outside([one for one in within if one not in loops])
  ways = list(map(_ways, loops))
  if any('backward' in each and 'forward' not in each for each in ways):
    raise PipelineError(
      f'Gradients are taken of the microbatch loop at {loops[0].place}, and a pipeline takes them in it.\n'
      'Fix: give accumulate the function with its gradients, jax.value_and_grad(loss).'
    )
  raise PipelineError(
    f'A pipeline has one microbatch loop, and this function has {len(loops)}:\n{places(loops)}\n'
    'Fix: call accumulate once, or make a pipeline_jit of each part that has a loop of its own.'
  )


def _once(arguments, equations, results) -> Step:
  """A function without a loop."""
  ends = [one for one in equations if one.primitive in (stage_end_p, may_end_p)]
  back = [one for one in ends if one.params['way'] == 'backward']
  if back:
    raise PipelineError(
      f'Gradients are taken through stage ends outside of a microbatch loop:\n{places(back)}\n'
      'Fix: take them by flax_spmd.pipeline.accumulate, with microbatches=1 if the batch is to stay whole.'
    )
  constants = [value for value in eq.free_values(equations) if isinstance(value, Constant)]
  given = {*arguments, *constants}
  kept = [atom for atom in dict.fromkeys(results) if isinstance(atom, Value) and atom not in given]
  body = Body(equations, [*arguments, *constants], [], [], [], kept)
  loop = Loop(body, 1, [], [], [], kept, None, once=True)
  return Step(arguments, [], loop, results)


def _looped(arguments, equations, results, scan: Equation, marked, passes) -> Step:
  if scan.params['reverse']:
    raise PipelineError(
      f'The microbatch loop at {scan.place} runs in reverse, from the last microbatch to the first.\n'
      'Fix: let it run forwards, as accumulate does.'
    )
  constants, carried = compat.scan_counts(scan.params)
  inner = compat.opened(scan.params['jaxpr'])
  starts, batch = scan.inputs[constants : constants + carried], scan.inputs[constants + carried :]
  variables = [Value(variable.aval) for variable in inner.inputs[constants:]]
  before, slices = variables[:carried], variables[carried:]
  # a stage can end inside of a jitted block; small blocks (gelu, where) are opened to be seen through
  inside, outputs = _opened(scan.params['jaxpr'], [*scan.inputs[:constants], *variables], marked)
  _check_nested(scan, [one for one in inside if any(map(passes, one.jaxprs))])
  whole, inside = inside, _needed(inside, outputs)
  idle = [one for one in whole if _is_end(one) and one not in set(inside)]
  schedule = next((one.params['schedule'] for one in inside if one.primitive is microbatch_p), None)
  hoisted, inside = _hoisted(inside, {*before, *slices})
  body = Body(inside, [], slices, before, outputs[:carried], outputs[carried:], idle)
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
    place=scan.place,
  )
  rest = [*equations[:index], *hoisted, *equations[index + 1 :]]
  return Step(arguments, rest, loop, results)


def _opened(jaxpr: Any, inputs: Sequence[Atom], marked) -> tuple[list[Equation], list[Value]]:
  """The equations of a pass, with calls opened that have marks in them.

  A stage can end inside of a jitted block; small blocks (gelu, where) are opened to be seen through.
  """

  def has_marks(one: Any) -> bool:
    return any(map(marked, compat.jaxprs_in(one.params)))

  proposed = eq.finder(may_end_p)

  def opens(one: Any) -> bool:
    may = one.primitive.name in eq.JITS and any(map(proposed, compat.jaxprs_in(one.params)))
    return may or (has_marks(one) and not _repeats(one)) or _is_small(one)

  equations, outputs = eq.flatten(jaxpr, inputs, opens)
  opened: list[Equation] = []
  known: dict[Value, Atom] = {}
  again: list[Equation] = []
  for one in equations:
    one.inputs = [eq.lookup(known, atom) for atom in one.inputs]
    if has_marks(one) and _repeats(one):
      inside, found = eq.opened(one, lambda inner: has_marks(inner) or _is_small(inner))
      opened += inside
      known.update(found)
      again += filter(_is_end, inside)
    else:
      opened.append(one)
  outputs = eq.resolved(known, outputs)
  _check_again(again, opened, outputs)
  return opened, outputs


def _repeats(equation: Any) -> bool:
  """Whether it is a remat on the way back, which computes again what it did on the way forward."""
  return equation.primitive.name in eq.REMATS and bool(equation.params.get('differentiated'))


def _check_again(
  again: Sequence[Equation], equations: Sequence[Equation], outputs: Sequence[Atom]
) -> None:
  """Raises if marks are among what is computed again: a stage would have to run before others do."""
  found = set(again) & set(eq.needed(equations, outputs)) if again else ()
  if found:
    raise PipelineError(
      'Stages end inside of nn.remat (jax.checkpoint), which computes them again for gradients:\n'
      f'{places([one for one in again if one in found])}\n'
      'Fix: put nn.remat inside of a stage, not around its end.'
    )


def _check_nested(scan: Equation, inner: Sequence[Equation]) -> None:
  if inner:
    raise PipelineError(
      f'The microbatch loop at {inner[0].place} is inside of another loop, at {scan.place}.\n'
      'Fix: call accumulate at the top of the step, and loop over steps in Python.'
    )


def _is_end(equation: Equation) -> bool:
  return equation.primitive is stage_end_p and equation.params['way'] == 'forward'


def _needed(equations: Sequence[Equation], outputs: Sequence[Atom]) -> list[Equation]:
  """What outputs depend on, and marks that are passed backwards.

  The forward of the last stage may have no use (gradients alone, of a loss that is linear); a mark before it
  has to be there all the same, for its number.
  """
  kept = eq.needed(equations, outputs)
  back = Counter(
    one.params['number']
    for one in kept
    if one.primitive is stage_end_p and one.params['way'] == 'backward'
  )
  back.subtract(one.params['number'] for one in kept if _is_end(one))
  short = [one for one in equations if _is_end(one) and back[one.params['number']] > 0]
  if not short:
    return kept
  return eq.needed(equations, [*outputs, *(value for one in short for value in one.outputs)])


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
    fixed = one.primitive in (stage_end_p, may_end_p, microbatch_p) or one.has_effects
    if fixed or not varying.isdisjoint(one.values):
      varying.update(one.outputs)
  same = [one for one in equations if not varying.intersection(one.outputs) and one.outputs]
  worth = [one for one in same if one.name not in residuals.VIEWS]
  hoisted = eq.needed(same, [value for one in worth for value in one.outputs])
  gone = set(worth)
  return hoisted, [one for one in equations if one not in gone]
