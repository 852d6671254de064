"""Operation costs: the work of a program that consists of one operation, by operand and result.

    costs = operation_costs(text, mesh, ('dot',))       # of a partitioned product
    costs.operands[1], costs.result, costs.flops

A collective belongs to an operand if only that operand is in its array; otherwise it belongs to the result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from flax_spmd._src.hlo.collectives import Collective, collective, kind_of
from flax_spmd._src.hlo.counts import count_module
from flax_spmd._src.hlo.parser import HloModule, parse

_RESULT = -1  # stands for the result among the numbers of parameters


class OperationCosts(NamedTuple):
  """The work of one operation on each device.

  Attributes:
    operands: collectives of each parameter of the program, by its number, in order.
    result: collectives of the result, in order.
    flops: FLOPs of matrix products and convolutions.
  """

  operands: Mapping[int, tuple[Collective, ...]]
  result: tuple[Collective, ...]
  flops: float


def operation_costs(text: str, mesh: Mapping[str, int], opcodes: Collection[str]) -> OperationCosts:
  """The work of a partitioned program.

  Args:
    text: text of the HLO module.
    mesh: size per mesh axis, in order.
    opcodes: opcodes of the operation; what follows it belongs to the result. Without any, everything does.

  Raises:
    ValueError: the text is not an HLO module, or it has collectives in a loop.

  Example:
    >>> costs = operation_costs('''
    ... HloModule m, num_partitions=4
    ...
    ... ENTRY %main (x: f32[8,16], y: f32[4,4]) -> f32[8,4] {
    ...   %x = f32[8,16]{1,0} parameter(0)
    ...   %y = f32[4,4]{1,0} parameter(1)
    ...   %all = f32[16,4]{1,0} all-gather(%y), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
    ...   ROOT %dot = f32[8,4]{1,0} dot(%x, %all), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    ... }''', {'data': 4}, ('dot',))
    >>> [one.kind for one in costs.operands[1]], costs.result, int(costs.flops)
    (['all-gather'], (), 1024)
  """
  module = parse(text)
  counts = count_module(module, mesh)
  operands: dict[int, list[Collective]] = {}
  result: list[Collective] = []
  for number, one in _collectives(module, mesh, opcodes):
    (operands.setdefault(number, []) if opcodes and number != _RESULT else result).append(one)
  if len(counts.collectives) != len(result) + sum(map(len, operands.values())):
    raise ValueError('A loop of this module has collectives.')
  return OperationCosts(
    {key: tuple(ones) for key, ones in operands.items()}, tuple(result), counts.flops
  )


def _collectives(
  module: HloModule, mesh: Mapping[str, int], opcodes: Collection[str]
) -> list[tuple[int, Collective]]:
  """The collectives of the entry computation in order, each with its parameter's number or `_RESULT`."""
  found, sources = [], dict[str, frozenset[int]]()
  for one in module.main.instructions.values():
    own = frozenset[int]().union(*(sources.get(name, frozenset()) for name in one.operands))
    if one.op == 'parameter':
      own = frozenset((int(one.inner),))
    elif one.op in opcodes:
      own = frozenset((_RESULT,))
    sources[one.name] = own
    if kind_of(one) and (counted := collective(one, module.main, module, mesh, False)):
      found.append((next(iter(own)) if len(own) == 1 else _RESULT, counted))
  return found
