"""Microbatch loop: splits a traced step into its loop over microbatches and the equations around it.

The loop is the `scan` that has marks inside; the rest of the step is the optimizer, the learning rate
and other code that runs once. Equations that give the same result in every pass are hoisted out of the
loop. A function without a loop (inference, evaluation) is treated as a loop over a single microbatch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.pipeline.cut import equations as eq
from flax_spmd._src.pipeline.cut import residuals
from flax_spmd._src.pipeline.cut.batch_rows import constrained_batch
from flax_spmd._src.pipeline.cut.equations import Atom, Constant, Equation, Value
from flax_spmd._src.pipeline.cut.stage_assignment import Body, check_outside, ends_among, source_lines
from flax_spmd._src.pipeline.cut.stage_marks import (
  MARKS,
  marks_inside,
  may_end_p,
  microbatch_p,
  stage_end_p,
)
from flax_spmd._src.pipeline.schedules.schedule import Schedule
from flax_spmd._src.text import first_lines
from flax_spmd.errors import PipelineError


@dataclasses.dataclass
class Loop:
  """The microbatch loop.

  Attributes:
    body: one pass of the loop; its other inputs are values of the step.
    count: number of microbatches.
    starts: initial values of `body.carried`.
    finals: final values of `body.updated`.
    stacks: the values of `body.kept` of all microbatches, stacked.
    schedule: the schedule given to `accumulate`, if any.
    once: whether this is a function without a loop; then `stacks` equal `body.kept`.
    source_line: the line of the loop in the user's program.
    is_clear: whether it is that of `accumulate`, or takes gradients; otherwise a schedule makes it a microbatch loop.
    whole: the values of the user's loop that `body.carried` has in parts, by their number.
  """

  body: Body
  count: int
  starts: list[Atom]
  finals: list[Value]
  stacks: list[Value]
  schedule: Schedule | None
  once: bool = False
  source_line: str = eq.UNKNOWN_LINE
  is_clear: bool = True
  whole: dict[int, Value] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class StepParts:
  """A traced step, divided at its microbatch loop.

  Attributes:
    arguments: its inputs.
    before: its equations before the loop, and those that are the same in every pass.
    loop: the loop.
    after: its other equations; some need no result of the loop.
    results: its outputs.
  """

  arguments: list[Value]
  before: list[Equation]
  loop: Loop
  after: list[Equation]
  results: list[Value]

  @functools.cached_property
  def batch(self) -> set[Value]:
    """The values that microbatches depend on; all inputs of a function without a loop."""
    if self.loop.once:
      return set(self.arguments)
    rows = self.loop.body.rows.values()
    own = {atom for atom in rows if isinstance(atom, Value)}
    return own.union(*(one.values for one in eq.needed(self.before, rows)))


def read_step(
  jaxpr: Any, mesh: AbstractMesh, specs: Sequence[PartitionSpec], batch_axes: tuple[str, ...] = ()
) -> StepParts:
  """Splits a step's jaxpr into the microbatch loop and the rest.

  Args:
    jaxpr: the step.
    mesh: the mesh of a stage.
    specs: the spec of each input.
    batch_axes: the mesh axes that a batch is sharded over if its own arrays are not sharded.

  Raises:
    PipelineError: there are no stage ends, or several loops with stage ends, or the loop is inside
      another operation.
  """
  arguments = [Value(variable.aval) for variable in compat.jaxpr_parts(jaxpr).inputs]

  def opens(one: Any) -> bool:
    if one.primitive.name in compat.JITS:
      return True
    return bool(marks_inside(one, stage_end_p)) and not marks_inside(one, microbatch_p)

  equations, results = eq.flatten(jaxpr, arguments, opens)
  within = [one for one in equations if marks_inside(one, stage_end_p, microbatch_p)]
  within = within or list(filter(_takes_gradients, equations))
  loops = [one for one in within if one.name == 'scan']
  scans = [one for one in equations if one.name == 'scan']
  _check_gradients_inside(loops or scans, scans)
  loop = next(filter(_has_microbatches, loops), None)
  kinds = (stage_end_p, may_end_p) if loop is None else (stage_end_p,)
  ends = [one for one in equations if one.primitive in kinds]
  if ends and loop is not None:
    raise PipelineError(
      f'Stages end outside the microbatch loop, which is at {loop.source_line}:\n{source_lines(ends)}\n'
      'Fix: call the model only inside the function that is passed to accumulate.'
    )
  if ends:
    return _once(arguments, equations, results)
  _check_loops(equations, within, loops)
  [loop] = loops
  if mesh.size > 1:
    at = equations.index(loop)
    given = dict(zip(arguments, specs, strict=True))
    equations[at:at] = constrained_batch(loop, equations[:at], mesh, given, batch_axes)
  return _looped(arguments, equations, results, loop)


def _takes_gradients(scan: Equation) -> bool:
  """Whether it is a loop, with or without `accumulate`, over forward and backward passes of a model."""
  return scan.name == 'scan' and all(_ends_inside(scan, each) for each in ('forward', 'backward'))


def _has_microbatches(scan: Equation) -> bool:
  """Whether the marks in a scan are those of a microbatch loop. Other scans belong to the model."""
  return bool(marks_inside(scan, microbatch_p)) or _takes_gradients(scan)


def _check_gradients_inside(loops: Sequence[Equation], scans: Sequence[Equation]) -> None:
  """Raises if a scan has the forward passes of marks, and another one the backward passes, and one of the two is a loop."""
  backward = {one: _ends_inside(one, 'backward') for one in scans}
  for one in scans:
    alone = _ends_inside(one, 'forward') - backward[one]
    if any(alone & backward[other] for other in scans if one in loops or other in loops):
      raise PipelineError(
        f'Gradients are taken of the microbatch loop at {one.source_line}, and a pipeline takes them '
        'inside the loop.\nFix: pass accumulate a function that takes gradients: jax.value_and_grad(loss).'
      )


def _ends_inside(equation: Equation, direction: str) -> set[int]:
  """The numbers of the stage ends inside an equation, and of the possible ones, of one direction."""
  return {
    mark.params['number']
    for mark in marks_inside(equation, stage_end_p, may_end_p)
    if mark.params['direction'] == direction
  }


def _check_loops(
  equations: Sequence[Equation], within: Sequence[Equation], loops: Sequence[Equation]
) -> None:
  """Raises unless exactly one equation has marks inside, and it is a loop."""
  if len(loops) == 1 == len(within):
    return
  around = [one for one in equations if marks_inside(one, may_end_p)]
  if around and not within:
    raise PipelineError(
      'All modules after which a stage may end are inside operations that cannot be cut:\n'
      + first_lines([f'  {eq.operation_text(one)}' for one in around])
      + '\nFix: call the model outside of them. A loop over microbatches is flax_spmd.pipeline.accumulate, with '
      'gradients or without; one over steps or tokens is a Python loop around the function.'
    )
  if not within:
    raise PipelineError(
      'No stage ends in this function.\nFix: write x = flax_spmd.pipeline.stage_end(x) in the model, '
      'between two stages.'
    )
  around = [one for one in within if one.name != 'scan' and marks_inside(one, microbatch_p)]
  if around:
    raise PipelineError(
      'The microbatch loop is inside another operation, where it cannot be run as a pipeline:\n'
      + first_lines([f'  {eq.operation_text(one)}' for one in around])
      + '\nFix: call accumulate at the top level of the step, outside branches, loops and remat.'
    )
  if not loops or len(loops) < len(within):
    check_outside([one for one in within if one not in loops])
  raise PipelineError(
    f'A pipeline has one microbatch loop, and this function has {len(loops)}:\n{source_lines(loops)}\n'
    'Fix: call accumulate once, or make a separate pipeline_jit for each loop.'
  )


def _once(arguments, equations, results) -> StepParts:
  """A function without a loop, as a loop over one microbatch."""
  back = [
    one
    for one in equations
    if one.primitive in (stage_end_p, may_end_p) and one.params['direction'] == 'backward'
  ]
  if back:
    own = [one for one in back if one.primitive is stage_end_p]
    through = f'through stage ends outside a microbatch loop:\n{source_lines(own)}'
    raise PipelineError(
      f'Gradients are taken {through if own else "outside a microbatch loop."}\n'
      'Fix: take them inside flax_spmd.pipeline.accumulate, with microbatches=1 to keep the batch whole.'
    )
  constants = [value for value in eq.free_values(equations) if isinstance(value, Constant)]
  inputs = {*arguments, *constants}
  kept = [atom for atom in dict.fromkeys(results) if isinstance(atom, Value) and atom not in inputs]
  body = Body(equations, None, {}, [], [], kept)
  loop = Loop(body, 1, [], [], kept, None, once=True)
  return StepParts(arguments, [], loop, [], results)


def _looped(arguments, equations, results, scan: Equation) -> StepParts:
  if scan.params['reverse']:
    raise PipelineError(
      f'The microbatch loop at {scan.source_line} runs in reverse, from the last microbatch to the first.\n'
      'Fix: let it run forwards, as accumulate does.'
    )
  constants, carried = compat.scan_counts(scan.params)
  inner = compat.jaxpr_parts(scan.params['jaxpr'])
  starts, batch = scan.inputs[constants : constants + carried], scan.inputs[constants + carried :]
  variables = [Value(variable.aval) for variable in inner.inputs[constants:]]
  before, slices = variables[:carried], variables[carried:]
  inside, outputs = _opened(scan.params['jaxpr'], [*scan.inputs[:constants], *variables])
  nested = next((one for one in inside if marks_inside(one, microbatch_p)), None)
  if nested is not None:
    raise PipelineError(
      f'The microbatch loop at {nested.source_line} is inside another loop, at {scan.source_line}.\n'
      'Fix: call accumulate at the top level of the step, and loop over steps in Python.'
    )
  # a value that every pass hands on unchanged is one of the step
  same = {old: start for old, new, start in zip(before, outputs, starts) if old is new}
  inside = [one.renamed(same) for one in inside]
  outputs = [
    one if number < carried and one is before[number] else eq.resolved(same, [one])[0]
    for number, one in enumerate(outputs)
  ]
  ends, inside = ends_among(inside), _needed(inside, outputs)
  live = set(inside)
  idle = [one for one in ends if one not in live]
  schedule = next((one.params['schedule'] for one in inside if one.primitive is microbatch_p), None)
  hoisted, inside = _hoisted(inside, {*before, *slices})
  rows, index = dict(zip(slices, batch, strict=True)), Value(jax.typeof(np.uint32(0)))
  inside = [*_rows_taken(rows, index), *inside]
  kept, any_order = outputs[carried:], any(one.primitive is microbatch_p for one in inside)
  body = Body(inside, index, rows, before, outputs[:carried], kept, idle, any_order)
  at = equations.index(scan)
  loop = Loop(
    body,
    scan.params['length'],
    starts,
    scan.outputs[:carried],
    scan.outputs[carried:],
    schedule,
    source_line=scan.source_line,
    is_clear=_has_microbatches(scan),
  )
  return StepParts(arguments, [*equations[:at], *hoisted], loop, equations[at + 1 :], results)


def _rows_taken(rows: Mapping[Value, Atom], index: Value) -> list[Equation]:
  """The equations that take the rows of a microbatch from the arrays of the batch, by its number.

  So each task takes its own rows, and no program has a result per microbatch.
  """
  taken: list[Equation] = []
  traces: dict[Any, Any] = {}
  row = functools.partial(lax.dynamic_index_in_dim, keepdims=False)
  for value, whole in rows.items():
    equations, _ = eq.traced(row, whole, index, known=traces)
    equations[-1].outputs = [value]
    taken += equations
  return taken


def _opened(jaxpr: Any, inputs: Sequence[Atom]) -> tuple[list[Equation], list[Value]]:
  """The equations of a pass, with some calls inlined.

  These are jitted blocks with marks, and small ones (gelu, where), so that they can be recomputed.
  """

  def opens(one: Any) -> bool:
    may_end = one.primitive.name in compat.JITS and marks_inside(one, may_end_p)
    ends = marks_inside(one, stage_end_p) and not _repeats(one)
    return bool(may_end or ends) or is_small(one)

  equations, outputs = eq.flatten(jaxpr, inputs, opens)
  opened: list[Equation] = []
  known: dict[Value, Atom] = {}
  recomputed: list[Equation] = []
  for one in equations:
    one.inputs = [eq.lookup(known, atom) for atom in one.inputs]
    if _repeats(one) and marks_inside(one, stage_end_p):
      inside, replacements = eq.opened(
        one, lambda inner: bool(marks_inside(inner, stage_end_p)) or is_small(inner)
      )
      opened += inside
      known.update(replacements)
      recomputed += ends_among(inside)
    else:
      opened.append(one)
  outputs = eq.resolved(known, outputs)
  _check_recomputed(recomputed, opened, outputs)
  return opened, outputs


def _repeats(equation: Any) -> bool:
  """Whether it is a remat in the backward pass, which recomputes its forward."""
  return equation.primitive.name in compat.REMATS and bool(equation.params.get('differentiated'))


def _check_recomputed(
  recomputed: Sequence[Equation], equations: Sequence[Equation], outputs: Sequence[Atom]
) -> None:
  """Raises if a needed mark is recomputed: one stage's recomputation would then run other stages."""
  live = set(recomputed) & set(eq.needed(equations, outputs)) if recomputed else ()
  if live:
    raise PipelineError(
      'Stages end inside nn.remat (jax.checkpoint), which recomputes them for gradients:\n'
      f'{source_lines([one for one in recomputed if one in live])}\n'
      'Fix: put nn.remat inside a stage, not around its end.'
    )


def _needed(equations: Sequence[Equation], outputs: Sequence[Atom]) -> list[Equation]:
  """The equations that outputs depend on, with the forward mark of every backward mark.

  The forward of the last stage may be dead code, if the loss is linear and only gradients are used. The
  mark before it is kept all the same, to pair with the backward mark.
  """
  kept = eq.needed(equations, outputs)
  back = Counter(
    one.params['number']
    for one in kept
    if one.primitive is stage_end_p and one.params['direction'] == 'backward'
  )
  back.subtract(one.params['number'] for one in ends_among(kept))
  short = [one for one in ends_among(equations) if back[one.params['number']] > 0]
  if not short:
    return kept
  return eq.needed(equations, [*outputs, *(value for one in short for value in one.outputs)])


def is_small(equation: Any) -> bool:
  """Whether a jitted block has cheap elementwise operations only."""
  return equation.primitive.name in compat.JITS and all(
    one.primitive.name in _SMALL or is_small(one)
    for inside in compat.jaxprs_in(equation.params)
    for one in compat.jaxpr_parts(inside).equations
  )


_SMALL = residuals.CHEAP | {'reshard'}


def _hoisted(equations: Sequence[Equation], own: set[Value]) -> tuple[list[Equation], list[Equation]]:
  """The loop-invariant equations, to run once before the loop; and the other equations.

  Invariant views stay in the loop; those that hoisted equations need are in both.
  """
  varying = set(own)
  for one in equations:
    fixed = one.primitive in MARKS or one.has_effects
    if fixed or not varying.isdisjoint(one.values):
      varying.update(one.outputs)
  invariant = [one for one in equations if not varying.intersection(one.outputs) and one.outputs]
  moved = [one for one in invariant if one.name not in residuals.VIEWS]
  hoisted = eq.needed(invariant, [value for one in moved for value in one.outputs])
  removed = set(moved)
  return hoisted, [one for one in equations if one not in removed]
