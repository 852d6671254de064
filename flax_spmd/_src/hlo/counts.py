"""Counting: what one training step computes, moves and communicates, per device.

`count` walks the compiled program in the order in which it runs. What a loop's body does counts as often
as the loop runs, of a conditional the larger branch counts, and what is split into a start and a done
counts once.

    counts = count(compiled.as_text(), {'data': 8, 'model': 4})
    counts.flops, counts.by_axis()

Everything is read off the text, nothing is measured; that the program does this work is certain, how
long it takes is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from flax_spmd._src.hlo.collectives import Collective as Collective
from flax_spmd._src.hlo.collectives import collective, continues, kind_of, started
from flax_spmd._src.hlo.flops import flops, target
from flax_spmd._src.hlo.hbm_traffic import traffic
from flax_spmd._src.hlo.parser import Computation, Instruction, Module, parse
from flax_spmd._src.hlo.trip_counts import State, entering, trips, unchanging


class Counts(NamedTuple):
  """What a step does on each device.

  Attributes:
    flops: of matrix products and convolutions.
    hbm_bytes: read from and written to the device's main memory.
    collectives: the largest wire first.
    opaque: the custom calls whose work is not in here, and how often they run.
    loops: name, trips, and how these are known, as in `loops.Trips`.
  """

  flops: float
  hbm_bytes: float
  collectives: tuple[Collective, ...]
  opaque: tuple[tuple[str, int], ...]
  loops: tuple[tuple[str, int, str], ...]

  def by_axis(self) -> dict[tuple[str, ...], float]:
    """Wire bytes per mesh axes, the most first."""
    return _summed((one.axes, one.wire) for one in self.collectives)

  def by_kind(self) -> dict[str, float]:
    """Wire bytes per kind of collective, the most first."""
    return _summed((one.kind, one.wire) for one in self.collectives)


def count(text: str, mesh: Mapping[str, int]) -> Counts:
  """Counts what a compiled program does.

  Args:
    text: of the optimised HLO module, as `jax.stages.Compiled.as_text` gives it.
    mesh: size per axis, in order. Device i is at the i-th position in row-major order.

  Returns:
    Per device and step. Collectives among one device are left out: they move nothing.

  Raises:
    ValueError: the text is no HLO module.

  Example:
    >>> counts = count('''
    ... HloModule jit_f, num_partitions=8
    ...
    ... ENTRY %main (x: bf16[64,512]) -> bf16[256,512] {
    ...   %x = bf16[64,512]{1,0} parameter(0)
    ...   ROOT %all = bf16[256,512]{1,0} all-gather(%x), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
    ... }''', {'data': 2, 'model': 4})
    >>> counts.by_axis(), counts.collectives[0].group
    ({('model',): 196608.0}, 4)
  """
  module = parse(text)
  return _Counter(module, mesh, started(module)).computation(module.main, {}).counts()


class _Tally(NamedTuple):
  """What a part of a program does, run once."""

  flops: float = 0
  hbm: float = 0
  collectives: tuple[Collective, ...] = ()
  opaque: tuple[tuple[str, int], ...] = ()
  loops: tuple[tuple[str, int, str], ...] = ()

  def times(self, number: int) -> _Tally:
    """The same, run several times."""
    collectives = [
      one._replace(times=one.times * number, wire=one.wire * number) for one in self.collectives
    ]
    opaque = [(name, runs * number) for name, runs in self.opaque]
    return _Tally(self.flops * number, self.hbm * number, tuple(collectives), tuple(opaque), self.loops)

  @property
  def size(self) -> tuple[float, float, float]:
    """What makes one branch larger than another."""
    return self.flops, sum(one.wire for one in self.collectives), self.hbm

  def counts(self) -> Counts:
    """As the result, with what never runs left out."""
    collectives = sorted((one for one in self.collectives if one.times), key=lambda one: -one.wire)
    opaque = {name: int(runs) for name, runs in _summed(self.opaque).items() if runs}
    return Counts(self.flops, self.hbm, tuple(collectives), tuple(opaque.items()), self.loops)


def _total(tallies: Iterable[_Tally]) -> _Tally:
  """Several parts, one after the other."""
  flops, hbm, collectives, opaque, loops = 0.0, 0.0, [], [], []
  for tally in tallies:
    flops += tally.flops
    hbm += tally.hbm
    collectives += tally.collectives
    opaque += tally.opaque
    loops += tally.loops
  return _Tally(flops, hbm, tuple(collectives), tuple(opaque), tuple(loops))


class _Counter(NamedTuple):
  """Walks a module; `begun` are the collectives that fusions start, of which there are copies in others."""

  module: Module
  mesh: Mapping[str, int]
  begun: frozenset[tuple[str, str]]

  def computation(self, running: Computation, state: State, fused: bool = False) -> _Tally:
    """What a computation does; `state` is what is known of its argument, if it is a loop's body."""
    return _total(self._instruction(one, running, state, fused) for one in running.instructions.values())

  def _instruction(self, one: Instruction, inside: Computation, state: State, fused: bool) -> _Tally:
    """What an instruction does, with all that it calls."""
    op = one.op.removesuffix('-start')
    if op == 'while':
      return self._loop(one, inside, state)
    if op == 'conditional':
      branches = one.called('branch_computations', 'true_computation', 'false_computation')
      return max(self._called(branches, fused), key=lambda branch: branch.size, default=_Tally())
    moved = _Tally(hbm=0 if fused else traffic(one, inside, self.module))
    if kind_of(one):
      return _total([moved, self._collective(one, inside, fused)])
    if op in ('fusion', 'call', 'async'):
      called = one.called('calls', 'to_apply')[:1]
      return _total([moved, *self._called(called, fused or op == 'fusion')])
    return _total([moved, _worked(one, inside)])

  def _called(self, names: Iterable[str], fused: bool) -> list[_Tally]:
    """What each of some computations does."""
    found = (self.module.computations.get(name) for name in names)
    return [self.computation(called, {}, fused) for called in found if called]

  def _loop(self, loop: Instruction, inside: Computation, state: State) -> _Tally:
    """What a loop does: its body, as often as it runs."""
    found = trips(loop, inside, self.module, state)
    kept = unchanging(loop, self.module, entering(loop, inside, self.module, state))
    body = self.module.computations.get(loop.computation('body'))
    inner = self.computation(body, kept) if body else _Tally()
    return _total([_Tally(loops=((loop.name, found.number, found.how),)), inner.times(found.number)])

  def _collective(self, one: Instruction, inside: Computation, fused: bool) -> _Tally:
    """A collective; nothing if it is the copy of another, or goes over one device."""
    if fused and continues(one, inside, self.begun):
      return _Tally()
    found = collective(one, inside, self.module, self.mesh, fused)
    return _Tally(collectives=(found,)) if found else _Tally()


def _worked(one: Instruction, inside: Computation) -> _Tally:
  """What an instruction computes that calls nothing."""
  work = flops(one, inside)
  return _Tally(work) if work is not None else _Tally(opaque=((target(one) or one.op, 1),))


def _summed(pairs: Iterable[tuple]) -> dict:
  """The sum per key, the largest first."""
  sums: dict = {}
  for key, number in pairs:
    sums[key] = sums.get(key, 0) + number
  return dict(sorted(sums.items(), key=lambda item: -item[1]))
