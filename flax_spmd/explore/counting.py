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

from flax_spmd.explore.flops import flops, target
from flax_spmd.explore.frames import origin
from flax_spmd.explore.groups import axes_of, axes_of_pairs, connected, read_groups, read_pairs
from flax_spmd.explore.hlo import Computation, Instruction, Module, parse
from flax_spmd.explore.loops import State, entering, trips, unchanging
from flax_spmd.explore.traffic import traffic

KINDS = (
  'all-gather',
  'reduce-scatter',
  'all-reduce',
  'all-to-all',
  'collective-permute',
  'ragged-all-to-all',
  'collective-broadcast',
)


class Collective(NamedTuple):
  """One collective of a step.

  Attributes:
    kind: one of `KINDS`.
    axes: the mesh axes that it goes over; `'model[2/4]'` for a part of one; () if unknown.
    group: devices in one group.
    bytes: of its operands on one device, once.
    times: how often it runs in a step.
    wire: bytes that a device sends over its links in a step.
    dtype: of what is sent; of several, the one with the most bytes.
    op: the name of the operation that it comes from.
    source: the line that it comes from, as `model.py:31`; '' if unknown.
  """

  kind: str
  axes: tuple[str, ...]
  group: int
  bytes: float
  times: int
  wire: float
  dtype: str
  op: str
  source: str


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
  devices = max(module.devices, 1)
  counter = _Counter(module, mesh, devices, _started(module))
  return counter.computation(module.main, {}).counts()


def wire(kind: str, size: float, group: int) -> float:
  """The bytes that a device sends in one collective, by ring algorithms.

  A gather sends what it has n - 1 times; a reduce-scatter all but its own part; an all-reduce is a
  reduce-scatter and a gather of what that leaves; an all-to-all keeps its own part. From "How to Scale
  Your Model", https://jax-ml.github.io/scaling-book/sharding/.

  Args:
    kind: one of `KINDS`.
    size: bytes of its operands on one device.
    group: devices in one group, n.

  Example:
    >>> wire('all-gather', 100, 4), wire('all-reduce', 100, 4), wire('collective-permute', 100, 4)
    (300, 150.0, 100)
  """
  if kind == 'all-gather':
    return size * (group - 1)
  if kind == 'all-reduce':
    return 2 * size * (group - 1) / group
  if kind in ('reduce-scatter', 'all-to-all', 'ragged-all-to-all'):
    return size * (group - 1) / group
  return size  # permutes and broadcasts: a device hands on what it has


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
  """Walks a module.

  `started` are the collectives that some fusion starts, by kind and channel: TPUs spread one collective
  over several fusions, each of which has a copy of it, and only that which starts it counts.
  """

  module: Module
  mesh: Mapping[str, int]
  devices: int
  started: frozenset[tuple[str, str]]

  def computation(self, running: Computation, state: State, fused: bool = False) -> _Tally:
    """What a computation does; `state` is what is known of its argument, if it is a loop's body."""
    return _total(self._instruction(one, running, state, fused) for one in running.instructions.values())

  def _instruction(self, one: Instruction, inside: Computation, state: State, fused: bool) -> _Tally:
    """What an instruction does, with all that it calls."""
    if one.op == 'while':
      return self._loop(one, inside, state)
    if one.op == 'conditional':
      branches = one.called('branch_computations', 'true_computation', 'false_computation')
      return max(self._called(branches, fused), key=lambda branch: branch.size, default=_Tally())
    if kind := _kind(one):
      return self._collective(kind, one, inside, fused)
    hbm = 0 if fused else traffic(one, inside, self.module)
    if one.op in ('fusion', 'fusion-start'):
      return _total([_Tally(hbm=hbm), *self._called(one.called('calls'), True)])
    if one.op in ('call', 'async-start'):
      return _total(self._called(one.called('to_apply', 'calls'), fused))
    return _worked(one, inside, hbm)

  def _called(self, names: Iterable[str], fused: bool) -> list[_Tally]:
    """What each of some computations does."""
    found = (self.module.computations.get(name) for name in names)
    return [self.computation(called, {}, fused) for called in found if called]

  def _loop(self, loop: Instruction, inside: Computation, state: State) -> _Tally:
    """What a loop does: its body, as often as it runs."""
    found = trips(loop, inside, self.module, state)
    kept = unchanging(loop, self.module, entering(loop, inside, self.module, state))
    bodies = [
      self.module.computations[name] for name in loop.called('body') if name in self.module.computations
    ]
    body = _total(self.computation(called, kept) for called in bodies)
    return _total([_Tally(loops=((loop.name, *found),)), body.times(found.count)])

  def _collective(self, kind: str, one: Instruction, inside: Computation, fused: bool) -> _Tally:
    """A collective; nothing if it goes over one device, or if it is the copy of another."""
    if fused and _continues(kind, one, inside, self.started):
      return _Tally()
    hbm = 0 if fused else traffic(one, inside, self.module)
    if kind == 'all-reduce' and fused and _keeps_part(one, inside):
      kind = 'reduce-scatter'
    group, axes = self._group(kind, one)
    if group < 2:
      return _Tally(hbm=hbm)
    arrays = [shape for operand in inside.operands(one) for shape in operand.shapes]
    size = sum(shape.bytes for shape in arrays)
    dtype = max(arrays, key=lambda shape: shape.bytes).dtype if arrays else ''
    found = origin(one.attributes.get('metadata', ''), self.module.frames)
    return _Tally(
      hbm=hbm,
      collectives=(Collective(kind, axes, group, size, 1, wire(kind, size, group), dtype, *found),),
    )

  def _group(self, kind: str, one: Instruction) -> tuple[int, tuple[str, ...]]:
    """The devices in one group of a collective, and the axes that they are along."""
    attributes = one.attributes
    if kind == 'collective-permute':
      pairs = read_pairs(attributes.get('source_target_pairs', ''))
      return connected(pairs).shape[1], axes_of_pairs(pairs, self.mesh)
    # A comma before device_ids makes it look like an attribute of its own.
    text = ' '.join(attributes.get(key, '') for key in ('replica_groups', 'device_ids'))
    groups = read_groups(text, self.devices)
    across = 'channel_id' in attributes and 'use_global_device_ids' not in attributes
    if across and groups.tolist() == [[0]]:  # the one replica, on all partitions
      groups = read_groups('', self.devices)
    return groups.shape[1], axes_of(groups, self.mesh)


def _kind(one: Instruction) -> str:
  """The kind of collective that an instruction runs or starts; '' if none."""
  op = one.op.removesuffix('-start')
  return op if op in KINDS else ''


def _worked(one: Instruction, inside: Computation, hbm: float) -> _Tally:
  """What an instruction does that calls nothing."""
  work = flops(one, inside)
  if work is not None:
    return _Tally(work, hbm)
  return _Tally(hbm=hbm, opaque=((target(one) or one.op, 1),))


def _started(module: Module) -> frozenset[tuple[str, str]]:
  """The collectives that fusions start, by kind and channel."""
  return frozenset(
    (kind, one.attributes.get('channel_id', ''))
    for computation in module.computations.values()
    if _starts(computation)
    for one in computation.instructions.values()
    if (kind := _kind(one))
  )


def _starts(computation: Computation) -> bool:
  """Whether a fusion starts a collective that other fusions go on with."""
  root = computation.instructions.get(computation.root)
  return root is not None and root.op == 'custom-call' and target(root) == 'AsyncCollectiveStart'


def _continues(
  kind: str, one: Instruction, inside: Computation, started: frozenset[tuple[str, str]]
) -> bool:
  """Whether a collective in a fusion is the copy of one that another fusion started."""
  if (kind, one.attributes.get('channel_id', '')) not in started or _starts(inside):
    return False
  return 'async_collective_fusion_config' in one.attributes.get('backend_config', '')


def _keeps_part(one: Instruction, inside: Computation) -> bool:
  """Whether a fusion takes only a device's own part of an all-reduce: what TPUs have for a reduce-scatter."""
  users = [user for user in inside.instructions.values() if one.name in user.operands]
  return bool(users) and all(
    user.op == 'dynamic-slice'
    or (user.op in ('get-tuple-element', 'bitcast') and _keeps_part(user, inside))
    for user in users
  )


def _summed(pairs: Iterable[tuple]) -> dict:
  """The sum per key, the largest first."""
  sums: dict = {}
  for key, number in pairs:
    sums[key] = sums.get(key, 0) + number
  return dict(sorted(sums.items(), key=lambda item: -item[1]))
