"""Counts: FLOPs, HBM traffic and collectives of a compiled training step, per device.

`count` walks the compiled program in execution order. A loop's body counts once per trip, a conditional
counts as its larger branch, and an operation split into start and done counts once.

    counts = count(compiled.as_text(), {'data': 8, 'model': 4})
    counts.flops, counts.by_axis()

All figures are derived from the text; nothing is measured. The work is certain, the time it takes is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from flax_spmd._src.hlo.collectives import Collective as Collective
from flax_spmd._src.hlo.collectives import collective, continues, kind_of, started
from flax_spmd._src.hlo.flops import custom_call_target, flops
from flax_spmd._src.hlo.hbm_traffic import traffic
from flax_spmd._src.hlo.parser import Computation, HloModule, Instruction, parse
from flax_spmd._src.hlo.source_frames import Frames, origin
from flax_spmd._src.hlo.splash_attention import splash_flops
from flax_spmd._src.hlo.trip_counts import State, Trips, entering, trips, unchanging, unsure_text
from flax_spmd._src.hlo.work import Product, Work


class CountedLoop(NamedTuple):
  """A loop of a compiled program.

  Attributes:
    name: name of the instruction.
    trips: number of trips.
    how: `trip_counts.Trips.how`.
    kernels: number of operations that its body runs in a step and that write to main memory, without those of loops in it.
    source: `file.py:line`, or the name of an operation in its body.
  """

  name: str
  trips: int
  how: str
  kernels: float
  source: str


class Counts(NamedTuple):
  """The work of one step on each device.

  Attributes:
    flops: FLOPs of matrix products and convolutions.
    hbm_bytes: bytes read from and written to the device's main memory.
    collectives: collectives, those with the most bytes on the wire first.
    opaque: name and number of runs of each custom call whose work is not counted.
    loops: the loops.
    products: FLOPs and traffic of each product; those of a whole step are among `flops` and `hbm_bytes`.
    kernels: number of operations that run and write to main memory.
  """

  flops: float
  hbm_bytes: float
  collectives: tuple[Collective, ...]
  opaque: tuple[tuple[str, int], ...]
  loops: tuple[CountedLoop, ...]
  products: tuple[Product, ...] = ()
  kernels: float = 0.0

  def by_axis(self) -> dict[tuple[str, ...], float]:
    """Bytes on the wire per tuple of mesh axes, in descending order."""
    return _summed((one.axes, one.wire) for one in self.collectives)

  def by_kind(self) -> dict[str, float]:
    """Bytes on the wire per kind of collective, in descending order."""
    return _summed((one.kind, one.wire) for one in self.collectives)

  def doubts(self) -> tuple[str, ...]:
    """One line for each loop whose number of trips depends on values."""
    texts = ((one.source, unsure_text(Trips(one.trips, one.how))) for one in self.loops)
    return tuple(dict.fromkeys(f'{source}: {text}' for source, text in texts if text))


def count(text: str, mesh: Mapping[str, int]) -> Counts:
  """Counts the work of a compiled program.

  Args:
    text: text of the optimised HLO module, as from `jax.stages.Compiled.as_text`.
    mesh: size per mesh axis, in order. Device i is at the i-th position in row-major order.

  Returns:
    The work per device and step. Collectives within a single device are left out: they send nothing.

  Raises:
    ValueError: the text is not an HLO module.

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
  return count_module(parse(text), mesh)


def count_module(module: HloModule, mesh: Mapping[str, int]) -> Counts:
  """Counts the work of a compiled program that is parsed already; see `count`."""
  return _Counter(module, mesh, started(module)).computation(module.main, {}).counts()


def scaled(counts: Counts, flops: float = 1.0, hbm_bytes: float = 1.0, runs: float = 1.0) -> Counts:
  """Counts with factors on the FLOPs and the traffic of every operation, and on the number of its runs."""
  products = [
    Product(one.flops * flops, one.hbm_bytes * hbm_bytes, one.runs * runs) for one in counts.products
  ]
  return counts._replace(
    flops=counts.flops * flops * runs,
    hbm_bytes=counts.hbm_bytes * hbm_bytes * runs,
    loops=tuple(one._replace(kernels=one.kernels * runs) for one in counts.loops),
    products=tuple(products),
    kernels=counts.kernels * runs,
  )


class _Tally(NamedTuple):
  """The work of one run of a part of a program."""

  work: Work
  collectives: tuple[Collective, ...] = ()
  opaque: tuple[tuple[str, int], ...] = ()
  loops: tuple[CountedLoop, ...] = ()

  def times(self, number: int) -> _Tally:
    """The work of several runs."""
    collectives = [
      one._replace(times=one.times * number, wire=one.wire * number) for one in self.collectives
    ]
    opaque = [(name, runs * number) for name, runs in self.opaque]
    work = Work()
    work.extend(self.work, number)
    loops = [one._replace(kernels=one.kernels * number) for one in self.loops]
    return _Tally(work, tuple(collectives), tuple(opaque), tuple(loops))

  @property
  def size(self) -> tuple[float, float, float]:
    """Sort key for the branches of a conditional."""
    return self.work.flops, sum(one.wire for one in self.collectives), self.work.hbm_bytes

  def counts(self) -> Counts:
    """The final counts, without operations that never run."""
    collectives = sorted((one for one in self.collectives if one.times), key=lambda one: -one.wire)
    opaque = {name: int(runs) for name, runs in _summed(self.opaque).items() if runs}
    work = self.work
    return Counts(
      work.flops,
      work.hbm_bytes,
      tuple(collectives),
      tuple(opaque.items()),
      self.loops,
      work.products,
      work.kernels,
    )


def _total(tallies: Iterable[_Tally]) -> _Tally:
  """The sum of several parts."""
  work, collectives, opaque, loops = Work(), [], [], []
  for tally in tallies:
    work.extend(tally.work)
    collectives += tally.collectives
    opaque += tally.opaque
    loops += tally.loops
  return _Tally(work, tuple(collectives), tuple(opaque), tuple(loops))


def _of_kernel(flops: float, hbm_bytes: float) -> _Tally:
  """The work of one operation."""
  work = Work()
  work.add(flops, hbm_bytes, 1)
  return _Tally(work)


class _Counter(NamedTuple):
  """Counts the computations of a module.

  Attributes:
    module: the module.
    mesh: size per mesh axis, in order.
    begun: collectives that fusions start; other fusions contain copies of them.
  """

  module: HloModule
  mesh: Mapping[str, int]
  begun: frozenset[tuple[str, str]]

  def computation(self, running: Computation, state: State, fused: bool = False) -> _Tally:
    """The work of a computation; `state` has the known elements of a loop body's parameter."""
    return _total(self._instruction(one, running, state, fused) for one in running.instructions.values())

  def _instruction(self, one: Instruction, inside: Computation, state: State, fused: bool) -> _Tally:
    """The work of an instruction, including the computations that it calls."""
    op = one.op.removesuffix('-start')
    if op == 'while':
      return self._loop(one, inside, state)
    if op == 'conditional':
      branches = one.called('branch_computations', 'true_computation', 'false_computation')
      return max(self._called(branches, fused), key=lambda branch: branch.size, default=_Tally(Work()))
    moved = 0 if fused else traffic(one, inside, self.module)
    if kind_of(one):
      return self._collective(one, inside, fused, moved)
    if op in ('fusion', 'call', 'async'):
      called = _total(self._called(one.called('calls', 'to_apply')[:1], fused or op == 'fusion'))
      if op != 'fusion':
        return called
      return called._replace(work=_of_kernel(called.work.flops, moved).work)
    work = flops(one, inside)
    if work is None and op == 'custom-call':
      work = splash_flops(one, inside, self.module)
    opaque = ((custom_call_target(one) or one.op, 1),) if work is None else ()
    return _of_kernel(work or 0, moved)._replace(opaque=opaque)

  def _called(self, names: Iterable[str], fused: bool) -> list[_Tally]:
    """The work of each of some computations."""
    computations = (self.module.computations.get(name) for name in names)
    return [self.computation(called, {}, fused) for called in computations if called]

  def _loop(self, loop: Instruction, inside: Computation, state: State) -> _Tally:
    """The work of a loop: its body, once per trip."""
    count = trips(loop, inside, self.module, state)
    kept = unchanging(loop, self.module, entering(loop, inside, self.module, state))
    body = self.module.computations.get(loop.computation('body'))
    inner = self.computation(body, kept) if body else _Tally(Work())
    kernels = inner.work.kernels - sum(one.kernels for one in inner.loops)
    source = _source([loop, *(body.instructions.values() if body else ())], self.module.frames)
    own = CountedLoop(loop.name, count.number, count.how, count.number * kernels, source)
    return _total([_Tally(Work(), loops=(own,)), inner.times(count.number)])

  def _collective(self, one: Instruction, inside: Computation, fused: bool, moved: float) -> _Tally:
    """A collective; only its traffic if it is a copy of another one or stays within one device."""
    work = Work()
    work.hbm_bytes = moved
    if fused and continues(one, inside, self.begun):
      return _Tally(work)
    counted = collective(one, inside, self.module, self.mesh, fused)
    return _Tally(work, (counted,) if counted else ())


def _source(instructions: Iterable[Instruction], frames: Frames) -> str:
  """The first line of Python among the origins of instructions, or else the first name of an operation."""
  origins = [origin(one.attributes.get('metadata', ''), frames) for one in instructions]
  return next((one.source for one in origins if one.source), '') or next(
    (one.op for one in origins if one.op), ''
  )


def _summed(pairs: Iterable[tuple]) -> dict:
  """The sum per key, in descending order."""
  sums: dict = {}
  for key, number in pairs:
    sums[key] = sums.get(key, 0) + number
  return dict(sorted(sums.items(), key=lambda item: -item[1]))
