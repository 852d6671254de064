"""Balancing: where stages end in a model that does not say it.

A stage may end after any Linen module. The body is cut at all these places, the work between them is
counted, and of the places those are taken that make the largest stage the smallest; of several such
choices, the one that sends the least from stage to stage.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from flax_spmd._src import compat
from flax_spmd._src.pipeline.cut.equations import Equation, Value
from flax_spmd._src.pipeline.cut.stage_assignment import Body, Line, paired, placed_at
from flax_spmd._src.pipeline.cut.stage_marks import may_end_p, stage_end_p
from flax_spmd.errors import PipelineError

FLOPS_PER_BYTE = 250
"""What an accelerator computes while it moves a byte: 295 on an H100 (989e12 bf16 FLOP/s, 3.35e12 B/s,
NVIDIA's data sheet), 240 on a TPU v5e (197e12, 0.819e12, Google Cloud's)."""

_SLACK = 1.02  # stages that are larger than they had to be, to send less


def with_ends(body: Body, stages: int) -> Body:
  """A body that ends so many stages, which are as equal as they can be.

  Raises:
    PipelineError: it has fewer places where a stage may end.
  """
  marks = _both_ways(paired(body.equations, may_end_p))
  count = sum(way == 'forward' for way, _ in marks.values())
  if count < stages - 1:
    raise PipelineError(
      f'stages={stages}, but there are {count} places in the model where a stage may end: after each Linen '
      'module that is called outside of scans and branches.\n'
      f'Fix: use {count + 1} stages or fewer, or end stages by flax_spmd.pipeline.stage_end.'
    )
  line = Line(count + 1, any(way == 'backward' for way, _ in marks.values()), False)
  position = placed_at(body, line, marks)
  costs = [0.0] * (count + 1)
  for one in body.equations:
    if one.primitive is not may_end_p:
      costs[line.stage(position[one])] += cost(one)
  chosen = choose(costs, _crossing(body, line, position), stages)
  return dataclasses.replace(
    body,
    equations=[
      dataclasses.replace(one, primitive=stage_end_p)
      if one in marks and marks[one][1] in chosen
      else one
      for one in body.equations
    ],
  )


def _both_ways(marks: dict[Equation, tuple[str, int]]) -> dict[Equation, tuple[str, int]]:
  """The marks that are passed backwards too, if any are, counted anew.

  Inside of what is computed again for gradients (`nn.remat`) the way back cannot be cut.
  """
  back = {number for way, number in marks.values() if way == 'backward'}
  there = sorted(back or {number for _, number in marks.values()})
  return {one: (way, there.index(number)) for one, (way, number) in marks.items() if number in there}


def choose(costs: Sequence[float], sent: Sequence[float], stages: int) -> set[int]:
  """The pieces after which stages end.

  Args:
    costs: of each piece of the model, in order.
    sent: per piece, the bytes that go on from it or from pieces before it.
    stages: how many, at most as many as pieces.

  Example:
    >>> choose([1, 1, 2, 1, 1, 2], [9, 9, 9, 9, 9, 0], stages=2)
    {2}
    >>> choose([4, 4, 4], [5, 1, 0], stages=2)  # one of them has two in either case
    {1}
  """
  sums = [0, *itertools.accumulate(costs)]
  best = _parts(sums, [0] * len(costs), stages, math.inf)
  largest = max(sums[end] - sums[start] for start, end in itertools.pairwise([0, *best, len(costs)]))
  ends = _parts(sums, sent, stages, largest * _SLACK)
  return {end - 1 for end in ends}


def _parts(sums: Sequence[float], sent: Sequence[float], stages: int, limit: float) -> list[int]:
  """Where parts begin, but for the first, so that none is larger than a limit and the least is sent;
  without a limit, so that the largest is the smallest.
  """
  size = len(sums) - 1
  found: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
  for part in range(1, stages + 1):
    after: dict[int, tuple[float, list[int]]] = {}
    for end in range(part, size - (stages - part) + 1):
      if part == stages and end != size:
        continue
      options = []
      for start, (worst, starts) in found.items():
        own = sums[end] - sums[start]
        if start >= end or own > limit:
          continue
        value = worst + (sent[start - 1] if start else 0) if limit < math.inf else max(worst, own)
        options.append((value, [*starts, start] if start else starts))
      if options:
        after[end] = min(options, key=lambda option: option[0])
    found = after
  return found[size][1]


def _crossing(body: Body, line: Line, position: dict[Equation, int]) -> list[float]:
  """Per piece, the bytes that its forward, or an earlier one, sends to later ones."""
  made: dict[Value, int] = {}
  last: dict[Value, int] = {}
  for one in body.equations:
    if position[one] < line.stages:
      made.update(dict.fromkeys(one.outputs, position[one]))
      for value in one.values:
        last[value] = max(last.get(value, 0), position[one])
  sent: dict[int, float] = defaultdict(float)
  for value, start in made.items():
    for piece in range(start, last.get(value, start)):
      sent[piece] += value.bytes
  return [sent[piece] for piece in range(line.stages)]


def cost(equation: Any) -> float:
  """What an operation costs, in FLOPs: as many as it does, or could be done while its operands are read.

  Products count, and what reads a table; the rest is fused with these, or small.
  """
  inside = [_inside(jaxpr) for jaxpr in compat.jaxprs_in(equation.params)]
  name = equation.primitive.name
  if inside:
    times = equation.params['length'] if name == 'scan' else 1
    return times * (max(inside) if name == 'cond' else sum(inside))
  flops = _PRODUCTS[name](equation) if name in _PRODUCTS else 0
  if not flops and name not in _READS:
    return 0
  return max(flops, FLOPS_PER_BYTE * sum(_bytes(one.aval) for one in _operands(equation)))


def _inside(jaxpr: Any) -> float:
  return sum(map(cost, compat.opened(jaxpr).equations))


def _operands(equation: Any) -> Iterable[Any]:
  """Inputs and outputs, of an equation of ours or of JAX's; of a table only what is read of it."""
  own = isinstance(equation, Equation)
  outputs = equation.outputs if own else equation.outvars
  if equation.primitive.name in _READS:
    return [*outputs, *outputs]
  return [*(equation.inputs if own else equation.invars), *outputs]


def _bytes(aval: Any) -> float:
  return math.prod(aval.shape) * aval.dtype.itemsize


def _shape(equation: Any, number: int) -> tuple[int, ...]:
  own = isinstance(equation, Equation)
  operand: Any = (equation.inputs if own else equation.invars)[number]
  return operand.aval.shape


def _results(equation: Any) -> int:
  own = isinstance(equation, Equation)
  return math.prod((equation.outputs if own else equation.outvars)[0].aval.shape)


def _dot(equation: Any) -> float:
  (contracted, _), _ = equation.params['dimension_numbers']
  return 2 * _results(equation) * math.prod(_shape(equation, 0)[axis] for axis in contracted)


def _convolution(equation: Any) -> float:
  kernel = _shape(equation, 1)
  features = kernel[equation.params['dimension_numbers'].rhs_spec[0]]
  return 2 * _results(equation) * math.prod(kernel) / features


_PRODUCTS = {'dot_general': _dot, 'conv_general_dilated': _convolution}
_READS = frozenset({'gather', 'scatter-add', 'scatter_add'})
