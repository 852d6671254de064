"""Array moves: each collective of a program, with the arguments that it moves and the results that it feeds.

An array that is stored in one sharding and used in another is gathered or exchanged first. In the compiled
program this is a collective whose operand is a parameter, perhaps cast, transposed or sliced on the way. A
result that is computed in one sharding and stored in another is the reverse.
"""

from __future__ import annotations

from typing import NamedTuple

from flax_spmd._src.hlo.collectives import Collective, kind_of
from flax_spmd._src.hlo.counts import count_module
from flax_spmd._src.hlo.parser import Computation, HloModule, Instruction
from flax_spmd._src.hlo.value_sources import ValueSource, ValueSources


class ArrayMove(NamedTuple):
  """One collective, and the ends of the program that it connects.

  Attributes:
    collective: the collective.
    parameters: numbers of the program's parameters whose values it moves.
    results: numbers of the program's results that it produces.
  """

  collective: Collective
  parameters: tuple[int, ...]
  results: tuple[int, ...]


def array_moves(module: HloModule, mesh: dict[str, int]) -> list[ArrayMove]:
  """The collectives of a program, those with the most bytes on the wire first.

  Args:
    module: a compiled program.
    mesh: size per mesh axis, in order.

  Example:
    >>> from flax_spmd._src.hlo.parser import parse
    >>> module = parse('''
    ... HloModule jit_f, num_partitions=8
    ...
    ... ENTRY %main (x: f32[4,8]) -> f32[32,8] {
    ...   %x = f32[4,8]{1,0} parameter(0)
    ...   ROOT %all = f32[32,8]{1,0} all-gather(%x), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}
    ... }''')
    >>> [(one.collective.axes, one.parameters, one.results) for one in array_moves(module, {'data': 8})]
    [(('data',), (0,), (0,))]
  """
  ends = _ProgramEnds(module)
  collectives = count_module(module, mesh).collectives
  return [ArrayMove(one, ends.parameters(one.name), ends.results(one.name)) for one in collectives]


class _ProgramEnds:
  """The parameters and results of a program that its collectives move."""

  def __init__(self, module: HloModule):
    self._main = module.main
    self._sources = ValueSources(module)
    self._found = {
      instruction.name: (instruction, computation)
      for computation in module.computations.values()
      for instruction in computation.instructions.values()
      if kind_of(instruction)
    }
    self._numbers = {one.name: int(one.inner) for one in self._main.parameters}
    self._fed = self._feeding()

  def parameters(self, name: str) -> tuple[int, ...]:
    """Numbers of the parameters that a collective moves, also those that another one has moved before."""
    return tuple(sorted(self._parameters(*self._found[name], frozenset())))

  def results(self, name: str) -> tuple[int, ...]:
    """Numbers of the results that a collective produces, also those that another one moves afterwards."""
    return tuple(number for number, names in enumerate(self._fed) if name in names)

  def _parameters(self, one: Instruction, inside: Computation, seen: frozenset[str]) -> set[int]:
    """The parameters of all operands that contain nothing else."""
    numbers: set[int] = set()
    for operand in inside.operands(one):
      found = [self._moved(source, seen | {one.name}) for source in self._sources.of(operand, inside)]
      numbers.update(*(found if all(found) else ()))
    return numbers

  def _moved(self, source: ValueSource, seen: frozenset[str]) -> set[int]:
    """The parameters that a source is, or moves; none if it computes something."""
    if source.computation == self._main.name and source.instruction in self._numbers:
      number = self._numbers[source.instruction]  # TPUs take many arguments as one tuple
      return {number if source.element is None else source.element}
    found = self._found.get(source.instruction)
    return self._parameters(*found, seen) if found and source.instruction not in seen else set()

  def _feeding(self) -> list[set[str]]:
    """For each result, the collectives that it passes through last."""
    root = self._main.result
    if root is None:
      return []
    if not root.type.startswith('('):
      return [self._collectives(self._sources.of(root, self._main), frozenset())]
    ends = (self._sources.of_element(root, self._main, index) for index in range(len(root.shapes)))
    return [self._collectives(sources, frozenset()) for sources in ends]

  def _collectives(self, sources: frozenset[ValueSource], seen: frozenset[str]) -> set[str]:
    names = {source.instruction for source in sources} & self._found.keys() - seen
    before = (
      self._sources.of(operand, inside)
      for one, inside in map(self._found.__getitem__, names)
      for operand in inside.operands(one)
    )
    return names.union(*(self._collectives(each, seen | names) for each in before))
