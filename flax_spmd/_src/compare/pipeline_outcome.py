"""Staging: what comes of a pipeline, from what comes of the programs of its tasks.

Memory is that of `pipeline.footprint`: what is alive on a rank at each of its calls, and what the program
that runs there needs besides. The time of a program is bracketed as that of a step is (`costs`); with these
times the schedule is simulated, and what ranks do before and after the loop is added. A result goes to
another rank beside the tasks; each takes as long as the slowest of the loop.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from flax_spmd._src.compare.compilation import Compiled
from flax_spmd._src.compare.costs import Cost, between, cost
from flax_spmd._src.compare.hardware import Target
from flax_spmd._src.compare.outcome import Memory, Outcome, Rank, Stages
from flax_spmd._src.compare.pipeline_lowering import Staged
from flax_spmd._src.hlo.counts import Collective, Counts
from flax_spmd._src.mesh import axis_sizes
from flax_spmd._src.pipeline.run.call_list import Call, Send, Unit
from flax_spmd._src.pipeline.schedules.tasks import Task

_SHORT = {'float32': 'f32', 'bfloat16': 'bf16', 'float16': 'f16', 'int32': 's32'}  # as programs have it


def outcome_of(name: str, staged: Staged, compiled: Sequence[Compiled], target: Target) -> Outcome:
  """A row of the comparison.

  Args:
    name: its name.
    staged: the pipeline.
    compiled: of each of `staged.distinct`, what its compiler made of it.
    target: all devices.
  """
  by_identity = dict(zip((one.identity for one in staged.distinct), compiled, strict=True))
  found = {unit: by_identity[program.identity] for unit, program in staged.tasks.items()}
  joined = _joined(compiled)
  wrong = {unit: one for unit, one in found.items() if one.counts is None}
  if wrong:
    used = max(one.used or 0 for one in wrong.values())
    texts = (f'{unit.name} on rank {unit.rank}: {one.error}' for unit, one in wrong.items())
    return Outcome.failed(name, staged.layout, '\n'.join(texts))._replace(
      memory=Memory(0, 0, 0, 0, used, used) if used else None, program=staged.whole, compiled=joined
    )
  return _Staging(staged, found, target).outcome(name)._replace(compiled=joined)


def _joined(compiled: Sequence[Compiled]) -> Compiled:
  """What compiling took in all, and what the compiler said."""
  return Compiled(
    None,
    {},
    None,
    None,
    list(dict.fromkeys(text for one in compiled for text in one.warnings)),
    sum(one.seconds for one in compiled),
    sum(one.cpu_seconds for one in compiled),
    max(one.rss for one in compiled),
    all(one.cached for one in compiled),
    None,
  )


class _Sent(NamedTuple):
  """A transfer: from a rank to another, of so many bytes of each device, in so many seconds."""

  source: int
  to: int
  bytes: int
  dtype: str
  seconds: float


class _Staging:
  """What is known of a pipeline whose programs are compiled."""

  def __init__(self, staged: Staged, compiled: Mapping[Unit, Compiled], target: Target):
    self._staged, self._compiled, self._target = staged, compiled, target
    self._mesh = axis_sizes(staged.layout.mesh)
    self._ranks = range(staged.plan.ranks)
    self._footprint = staged.plan.footprint
    self._costs = {
      unit: cost(_counts(one), target, self._mesh, staged.tasks[unit].dtype)
      for unit, one in compiled.items()
    }
    calls = staged.plan.linked.calls
    self._calls = [one for one in calls if isinstance(one, Call)]
    self._sends = [(one, self._sent(one)) for one in calls if isinstance(one, Send)]

  def outcome(self, name: str) -> Outcome:
    """The row: memory of the rank that needs most, work of the one that takes longest."""
    stages = self._stages()
    memory = max((rank.memory for rank in stages.ranks), key=lambda one: one.peak)
    counts = [self._counts_of(rank) for rank in self._ranks]
    costs = [self._cost_of(rank, stages) for rank in self._ranks]
    busiest = max(self._ranks, key=lambda rank: sum(self._time(rank, 'low')))
    return Outcome(
      name,
      self._staged.layout,
      memory,
      counts[busiest],
      costs[busiest],
      memory.peak <= self._target.chip.memory,
      None,
      self._staged.whole,
      None,
      stages=stages,
    )

  # -- memory

  def _memory(self) -> list[Memory]:
    staged, footprint = self._staged, self._footprint
    parts = dict(zip(staged.plan.arguments, map(_part, staged.names), strict=True))
    held = [Counter[str]() for _ in self._ranks]
    for place in footprint.held:
      held[place[2]][parts[place[0]]] += footprint.sizes[place]
    peaks = footprint.peaks(
      {unit: one.donated for unit, one in staged.plan.programs.items()},
      {unit: one.memory['temporaries'] for unit, one in self._compiled.items()},
    )
    return [
      Memory(each['params'], each['opt_state'], each[''], each['batch'], peak - each.total(), peak)
      for each, peak in zip(held, peaks, strict=True)
    ]

  # -- time

  def _stages(self) -> Stages:
    staged, owners = self._staged, self._staged.schedule.owners
    within = [sent.seconds for send, sent in self._sends if _of_loop(send)]
    low, high = (
      staged.schedule.simulate(
        staged.microbatches, self._seconds(which).__getitem__, 1e3 * max(within, default=0.0)
      )
      for which in ('low', 'high')
    )
    sent = Counter[int]()
    for _, one in self._sends:
      sent[one.source] += one.bytes
    ranks = [
      Rank(
        tuple(stage for stage, owner in enumerate(owners) if owner == rank),
        memory,
        sent[rank],
        low.bubbles[rank],
      )
      for rank, memory in enumerate(self._memory())
    ]
    return Stages(tuple(ranks), low, high)

  def _seconds(self, which: str) -> Mapping[Task, float]:
    """Milliseconds of each task; of those that are a part of another one, none."""
    found: dict[Task, float] = defaultdict(float)
    for call in self._calls:
      if call.when is not None:
        tasks = call.when.step.tasks
        seconds: float = getattr(self._costs[call.unit], which)
        found.update((task, 1e3 * seconds / len(tasks)) for task in tasks)
    return found

  def _time(self, rank: int, which: str) -> tuple[float, float]:
    """How many seconds a rank's programs take in the loop, and outside of it."""
    times = [0.0, 0.0]
    for call in self._calls:
      if call.unit.rank == rank:
        times[call.when is None] += getattr(self._costs[call.unit], which)
    return times[0], times[1]

  def _cost_of(self, rank: int, stages: Stages) -> Cost:
    """What a rank's programs take, and how long the step takes from its first program to its last."""
    costs = [self._costs[call.unit] for call in self._calls if call.unit.rank == rank]
    links: dict[tuple[str, ...], float] = defaultdict(float)
    for axes, seconds in (pair for one in costs for pair in one.links.items()):
      links[axes] += seconds
    moved = sum(sent.seconds for _, sent in self._sends if sent.source == rank)
    if moved:
      links[self._staged.axis,] += moved
    outside = sum(sent.seconds for send, sent in self._sends if not _of_loop(send))
    low, high = (
      simulation.makespan / 1e3 + outside + max(self._time(each, which)[1] for each in self._ranks)
      for which, simulation in (('low', stages.low), ('high', stages.high))
    )
    parts = {
      'compute': sum(one.compute for one in costs),
      'memory': sum(one.memory for one in costs),
      **{'+'.join(axes) or 'communication': seconds for axes, seconds in links.items()},
      'bubble': stages.low.makespan / 1e3 * stages.low.bubbles[rank],
    }
    bound = max(parts, key=lambda part: parts[part])
    return Cost(parts['compute'], parts['memory'], dict(links), low, high, bound)

  # -- work

  def _counts_of(self, rank: int) -> Counts:
    """What a device of a rank does in a step."""
    runs = Counter(call.unit for call in self._calls if call.unit.rank == rank)
    each = [(_counts(self._compiled[unit]), times) for unit, times in runs.items()]
    collectives = [
      one._replace(times=one.times * times, wire=one.wire * times)
      for counts, times in each
      for one in counts.collectives
    ]
    opaque = Counter[str]()
    for counts, times in each:
      opaque.update({name: number * times for name, number in counts.opaque})
    return Counts(
      sum(counts.flops * times for counts, times in each),
      sum(counts.hbm_bytes * times for counts, times in each),
      tuple(sorted([*collectives, *self._permutes(rank)], key=lambda one: -one.wire)),
      tuple(opaque.items()),
      tuple(loop for counts, _ in each for loop in counts.loops),
    )

  def _permutes(self, rank: int) -> Iterable[Collective]:
    """What a rank sends to others, as if these were collectives."""
    alike = Counter((one.to, one.bytes, one.dtype) for _, one in self._sends if one.source == rank)
    for (to, size, dtype), times in alike.items():
      yield Collective(
        'collective-permute',
        (self._staged.axis,),
        self._mesh[self._staged.axis],
        size,
        times,
        size * times,
        dtype,
        f'rank {rank} to rank {to}',
        '',
      )

  def _sent(self, send: Send) -> _Sent:
    source = send.places[0][2]
    sizes = Counter[str]()
    for place in send.places:
      dtype: str = place[0].aval.dtype.name
      sizes[_SHORT.get(dtype, dtype)] += self._footprint.sizes[place]
    speed = between(self._target, self._mesh, self._staged.axis, source, send.rank)
    seconds = sizes.total() / speed + self._target.chip.hop
    return _Sent(source, send.rank, sizes.total(), max(sizes, key=lambda name: sizes[name]), seconds)


def _part(name: str) -> str:
  """Which part of memory an argument is: the state is the first one."""
  if not name.startswith('0/') and name != '0':
    return 'batch'
  return next((key for key in name.split('/') if key in ('params', 'opt_state')), '')


def _of_loop(send: Send) -> bool:
  return any(microbatch is not None for _, microbatch, _ in send.places)


def _counts(compiled: Compiled) -> Counts:
  return compiled.counts or Counts(0, 0, (), (), ())
