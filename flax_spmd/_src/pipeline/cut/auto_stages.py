"""Automatic stages: balanced stage ends for a model without `stage_end`.

A stage may end after any Linen module. The body is cut into pieces at all of these points, and the cost
of each piece is counted. The chosen points make the most expensive stage as cheap as possible; among
such choices, they send the fewest bytes from stage to stage.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from flax_spmd._src import compat
from flax_spmd._src.pipeline.cut import equations as eq
from flax_spmd._src.pipeline.cut.equations import Equation, Value
from flax_spmd._src.pipeline.cut.stage_assignment import Body, Positions, assign, in_sequence, paired
from flax_spmd._src.pipeline.cut.stage_marks import marks_inside, may_end_p, stage_end_p
from flax_spmd._src.source_lines import warn
from flax_spmd._src.text import plural
from flax_spmd.errors import PipelineError

FLOPS_PER_BYTE = 250
"""FLOPs of an accelerator in the time of one byte from memory: 295 on an H100 (989e12 bf16 FLOP/s,
3.35e12 B/s, NVIDIA's data sheet), 240 on a TPU v5e (197e12, 0.819e12, Google Cloud's)."""

_UNEQUAL = 1.8  # times the mean; a stage that costs more is reported
_SLACK = 1.02  # how much the most expensive stage may grow to send fewer bytes


def with_ends(body: Body, stages: int, name: str, reported: set[str]) -> Body:
  """The body with stage ends for a number of stages of about equal cost.

  Args:
    body, stages: the body, and the number of stages.
    name: the function, for warnings.
    reported: the kinds of warnings already issued.

  Raises:
    PipelineError: the body has fewer points where a stage may end.

  Warns:
    UserWarning: once, if one stage has almost all the cost, with its largest operation and a fix.
  """
  every = _usable_marks(paired(_differentiated_once(body.equations), may_end_p), body)
  marks = _of_one_call(body, every)
  if _count(marks) < stages - 1:
    marks = every
  count = _count(marks)
  if count < stages - 1:
    fewer = f'use {count + 1} stages or fewer, or ' if count else ''
    raise PipelineError(
      f'stages={stages}, but the model has {plural(count, "point")} where a stage may end: after each Linen '
      'module that is called outside scans, branches and nn.remat, and of whose results no gradients of '
      f'gradients or derivatives in forward mode are taken.\nFix: {fewer}end stages by flax_spmd.pipeline.stage_end.'
    )
  positions = Positions(
    count + 1, any(direction == 'backward' for direction, _ in marks.values()), False
  )
  position, _ = assign(body, positions, marks)
  costs = [0.0] * (count + 1)
  for one in body.equations:
    if one.primitive is not may_end_p:
      costs[positions.stage(position[one])] += cost(one)
  forward = sum(cost(one) for one, at in position.items() if at < positions.stages)
  behind = _left_behind(body, positions, position, marks, sum(costs) / max(forward, 1))
  chosen = choose(costs, _bytes_sent(body, positions, position), stages, behind)
  starts = [0, *sorted(each + 1 for each in chosen), count + 1]
  sums = [sum(costs[start:end]) for start, end in itertools.pairwise(starts)]
  if max(sums) * stages > _UNEQUAL * sum(sums) and 'unequal stages' not in reported:
    reported.add('unequal stages')
    of = sums.index(max(sums))
    own = range(starts[of], starts[of + 1])
    _warn_of_unequal(name, sums, of, [one for one in position if positions.stage(position[one]) in own])
  return dataclasses.replace(
    body,
    equations=[
      dataclasses.replace(one, primitive=stage_end_p)
      if one in marks and marks[one][1] in chosen
      else one
      for one in body.equations
    ],
  )


def _warn_of_unequal(
  name: str, sums: Sequence[float], stage: int, equations: Sequence[Equation]
) -> None:
  largest = max(equations, key=cost)
  part, whole = cost(largest), sum(sums)
  warn(
    f'{name}: stage {stage} has {sums[stage] / whole:.0%} of the cost of {len(sums)} stages, since a stage may end only '
    f'after a Linen module that is called outside scans, branches and nn.remat. Its largest operation is '
    f'{eq.operation_text(largest)}, with {part / whole:.0%}.\n'
    'Fix: loop over the layers in Python, with nn.remat and nn.scan around one layer or a few; or use fewer stages.'
  )


def _left_behind(
  body: Body,
  positions: Positions,
  position: Mapping[Equation, int],
  marks: Mapping[Equation, tuple[str, int]],
  times: float,
) -> dict[int, list[float]]:
  """The cost of the layers that a stage end leaves behind, by its piece and the first piece of its stage.

  The end marks no value that they lead to, but later layers read their results: an encoder, if the end is in the first
  layer of the decoder; queries, if it is after the keys. So they or their gradients are in a later stage.

  Args:
    times: the factor from a cost in the forward pass to that in all passes.
  """
  behind: dict[int, list[float]] = defaultdict(lambda: [0.0] * positions.stages)
  leads: dict[Value, int] = defaultdict(int)  # to the marks of these pieces, as bits
  last: dict[Value, int] = defaultdict(int)  # the last piece with a layer that depends on it
  for one in reversed(body.equations):
    if position[one] >= positions.stages:
      continue
    ends = functools.reduce(operator.or_, (leads[value] for value in one.outputs), 0)
    final = max((last[value] for value in one.outputs), default=0)
    if price := cost(one):
      missed = ((1 << final) - 1) >> position[one] << position[one] & ~ends
      while missed:
        behind[(missed & -missed).bit_length() - 1][position[one]] += times * price
        missed &= missed - 1
      final = max(final, position[one])
    ends |= 1 << marks[one][1] if one in marks else 0
    for value in one.values:
      leads[value] |= ends
      last[value] = max(last[value], final)
  return {piece: [*itertools.accumulate(each[::-1])][::-1] for piece, each in behind.items()}


def _differentiated_once(equations: Sequence[Equation]) -> list[Equation]:
  """The possible ends without those of modules under gradients of gradients or in forward mode, whose passes are others."""
  marks = [one for one in equations if one.primitive is may_end_p]
  directions: dict[int, set[str]] = defaultdict(set)
  for one in marks:
    directions[one.params['number']].add(one.params['direction'])
  once = {'forward'}, {'forward', 'backward'}
  return [one for one in marks if directions[one.params['number']] in once]


def _count(marks: Mapping[Equation, tuple[str, int]]) -> int:
  """The number of points where a stage may end."""
  return len({number for _, number in marks.values()})


def _usable_marks(marks: dict[Equation, tuple[str, int]], body: Body) -> dict[Equation, tuple[str, int]]:
  """The marks without those that `nn.remat` recomputes, renumbered: the recomputation cannot be cut.

  A mark without a backward pass that none recomputes is of a frozen model, such as a teacher.
  """
  recomputed = {
    mark.params['number']
    for one in body.equations
    if one.name in compat.REMATS and one.params.get('differentiated')
    for mark in marks_inside(one, may_end_p)
  }
  back = {number for direction, number in marks.values() if direction == 'backward'}
  usable = sorted(
    back | {at for one, (_, at) in marks.items() if one.params['number'] not in recomputed}
  )
  return {
    one: (direction, usable.index(number))
    for one, (direction, number) in marks.items()
    if number in usable
  }


def _of_one_call(body: Body, marks: dict[Equation, tuple[str, int]]) -> dict[Equation, tuple[str, int]]:
  """The marks of a model that is called several times, numbered as in one call: the calls share the stages.

  Calls have marks of the same lines, and the first mark of a call depends on none of another. A call without gradients,
  such as that of a reference, has marks in the forward pass only.
  """
  lines = {one: one.source_line for one, (direction, _) in marks.items() if direction == 'forward'}
  each = [(lines[one], before) for one, before in in_sequence(body.equations, [*lines]).items()]
  counts = (n for n in range(1, len(each)) if len(each) % n == 0)
  count = next((n for n in counts if each == each[:n] * (len(each) // n)), max(len(each), 1))
  place = {marks[one][1]: at % count for at, one in enumerate(lines)}
  return {
    one: (direction, place[number]) for one, (direction, number) in marks.items() if number in place
  }


def choose(
  costs: Sequence[float],
  sent: Sequence[float],
  stages: int,
  behind: Mapping[int, Sequence[float]] = MappingProxyType({}),
) -> set[int]:
  """The pieces that end a stage.

  Args:
    costs: cost of each piece of the model, in order.
    sent: bytes computed up to each piece that later pieces read.
    stages: number of stages, at most the number of pieces.
    behind: for some pieces, the cost that an end after it leaves behind, by the first piece of its stage.

  Example:
    >>> choose([1, 1, 2, 1, 1, 2], [9, 9, 9, 9, 9, 0], stages=2)
    {2}
    >>> choose([4, 4, 4], [5, 1, 0], stages=2)  # one stage has two pieces in either case
    {1}
  """
  sums = [0, *itertools.accumulate(costs)]

  def left(start: int, end: int) -> float:
    return behind[end - 1][start] if end - 1 in behind else 0

  def size(start: int, end: int) -> float:
    return sums[end] - sums[start] + left(start, end)

  def larger(total: float, start: int, end: int) -> float:
    return max(total, size(start, end))

  limit = _divided(len(costs), stages, larger)[0] * _SLACK

  def sent_in_all(total: float, start: int, end: int) -> float:
    more = (sent[start - 1] if start else 0) + left(start, end) / FLOPS_PER_BYTE
    return total + more if size(start, end) <= limit else math.inf

  _, [_, *starts] = _divided(len(costs), stages, sent_in_all)
  return {start - 1 for start in starts}


def _divided(
  pieces: int, stages: int, joined: Callable[[float, int, int], float]
) -> tuple[float, list[int]]:
  """The smallest value of a division into stages, and the first piece of each; by dynamic programming.

  Args:
    pieces: number of pieces.
    stages: number of stages.
    joined: the value of some stages and one more, from that of the former and the first piece and end of the latter.
  """
  best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # by end of the last stage
  for stage in range(1, stages + 1):
    ends = range(stage, pieces - (stages - stage) + 1) if stage < stages else [pieces]
    best = {
      end: min(
        (
          (joined(value, start, end), [*starts, start])
          for start, (value, starts) in best.items()
          if start < end
        ),
        key=operator.itemgetter(0),
      )
      for end in ends
    }
  return best[pieces]


def _bytes_sent(body: Body, positions: Positions, position: dict[Equation, int]) -> list[float]:
  """For each piece, the bytes of all values computed up to it that the forward of later pieces reads."""
  first: dict[Value, int] = {}
  last: dict[Value, int] = {}
  for one in body.equations:
    if position[one] < positions.stages:
      first.update(dict.fromkeys(one.outputs, position[one]))
      for value in one.values:
        last[value] = max(last.get(value, 0), position[one])
  sent: dict[int, float] = defaultdict(float)
  for value, start in first.items():
    for piece in range(start, last.get(value, start)):
      sent[piece] += value.bytes
  return [sent[piece] for piece in range(positions.stages)]


def cost(equation: Any) -> float:
  """The cost of an operation, ours or JAX's, in FLOPs: its own, or as many as fit in the time to read and write, if more.

  Matrix products, convolutions and table look-ups count. Everything else is small, or fused with them.
  """
  jaxprs = map(compat.jaxpr_parts, compat.jaxprs_in(equation.params))
  inside = [sum(map(cost, jaxpr.equations)) for jaxpr in jaxprs]
  name = equation.primitive.name
  if inside:
    times = equation.params['length'] if name == 'scan' else 1
    return times * (max(inside) if name == 'cond' else sum(inside))
  ours = isinstance(equation, Equation)
  operands = [one.aval for one in (equation.inputs if ours else equation.invars)]
  results = [one.aval for one in (equation.outputs if ours else equation.outvars)]
  flops = _PRODUCTS[name](equation.params, operands, results) if name in _PRODUCTS else 0
  if not flops and name not in _READS:
    return 0
  read = results if name in _READS else operands  # a look-up reads as many bytes as it returns
  return max(flops, FLOPS_PER_BYTE * sum(Value(aval).bytes for aval in (*read, *results)))


def _dot(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> float:
  (contracted, _), _ = params['dimension_numbers']
  terms = math.prod(operands[0].shape[axis] for axis in contracted)
  return 2 * math.prod(results[0].shape) * terms


def _convolution(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> float:
  kernel = operands[1].shape
  features = kernel[params['dimension_numbers'].rhs_spec[0]]
  return 2 * math.prod(results[0].shape) * math.prod(kernel) / features


_PRODUCTS = {'dot_general': _dot, 'conv_general_dilated': _convolution}
_READS = frozenset({'gather', 'scatter-add', 'scatter_add'})
