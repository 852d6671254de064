"""Pipeline outcome: memory, bubble and time of a pipeline, from its compiled programs.

The memory of a rank is the peak over its calls: the live buffers plus the temporaries of the running
program. The time of each program is a bracket, as that of a whole step (`costs`). The schedule is simulated
with these times, and the time of the programs outside the loop is added. Transfers between ranks overlap with
tasks; each takes as long as the slowest one in the loop. Transfers to and from the host overlap with everything at the
low end, and with nothing at the high end.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from flax_spmd._src.compare.compilation import CompileResult
from flax_spmd._src.compare.costs import HOST_LINK, Cost, between, cost
from flax_spmd._src.compare.hardware import Target
from flax_spmd._src.compare.outcome import Memory, Outcome, PipelineRanks, RankOutcome
from flax_spmd._src.compare.pipeline_lowering import LoweredPipeline
from flax_spmd._src.hlo.counts import Collective, Counts, scaled
from flax_spmd._src.mesh import axis_sizes
from flax_spmd._src.pipeline.run import memory as footprint
from flax_spmd._src.pipeline.run.call_list import Buffer, Call, Send, StageProgram
from flax_spmd._src.pipeline.schedules.tasks import Task

_HLO_DTYPES = {'float32': 'f32', 'bfloat16': 'bf16', 'float16': 'f16', 'int32': 's32'}


def pipeline_outcome(
  name: str, lowered: LoweredPipeline, results: Sequence[CompileResult], target: Target
) -> Outcome:
  """The outcome of a pipeline.

  Args:
    name: name of the row.
    lowered: the pipeline.
    results: result for each of `lowered.distinct`.
    target: the devices of all ranks.
  """
  by_identity = dict(zip((one.identity for one in lowered.distinct), results, strict=True))
  by_program = {program: by_identity[one.identity] for program, one in lowered.programs.items()}
  combined = _combined(results)
  failed = {program: one for program, one in by_program.items() if one.counts is None}
  if failed:
    used = max(one.used or 0 for one in failed.values())
    texts = (f'{program.name} on rank {program.rank}: {one.error}' for program, one in failed.items())
    return Outcome.failed(name, lowered.layout, '\n'.join(texts))._replace(
      memory=Memory(0, 0, 0, 0, used, used) if used else None, program=lowered.on_rank, compiled=combined
    )
  return _PipelineAnalysis(lowered, by_program, target).outcome(name)._replace(compiled=combined)


def _combined(results: Sequence[CompileResult]) -> CompileResult:
  """The total time, largest memory and all warnings of several compilations."""
  return CompileResult(
    None,
    {},
    None,
    None,
    list(dict.fromkeys(text for one in results for text in one.warnings)),
    sum(one.seconds for one in results),
    sum(one.cpu_seconds for one in results),
    max(one.rss for one in results),
    all(one.cached for one in results),
    None,
  )


class Transfer(NamedTuple):
  """A transfer from one rank to another.

  Attributes:
    source: rank that sends.
    to: rank that receives.
    bytes: bytes that each device sends.
    dtype: HLO's name of the dtype; the one with the most bytes if there are several.
    seconds: duration.
  """

  source: int
  to: int
  bytes: int
  dtype: str
  seconds: float


def program_costs(
  lowered: LoweredPipeline, results: Mapping[StageProgram, CompileResult], target: Target
) -> dict[StageProgram, Cost]:
  """The time bracket of each program of a pipeline."""
  mesh = axis_sizes(lowered.layout.mesh)
  return {
    program: cost(_counts(result), target, mesh, lowered.programs[program].dtype)
    for program, result in results.items()
  }


def transfers(lowered: LoweredPipeline, target: Target) -> list[tuple[Send, Transfer]]:
  """The transfers of a step between ranks, in order."""
  mesh, sizes = axis_sizes(lowered.layout.mesh), footprint.sizes(lowered.plan)
  sends = (one for one in lowered.plan.call_list.calls if isinstance(one, Send))
  between_ranks = (one for one in sends if one.ranks[0] != one.ranks[1])
  return [(send, _transfer(send, sizes, lowered.axis, mesh, target)) for send in between_ranks]


def _transfer(
  send: Send, sizes: Mapping[Buffer, int], axis: str, mesh: Mapping[str, int], target: Target
) -> Transfer:
  source, to = send.ranks
  by_dtype = Counter[str]()
  for buffer in send.inputs:
    dtype: str = buffer.value.aval.dtype.name
    by_dtype[_HLO_DTYPES.get(dtype, dtype)] += sizes[buffer]
  total = by_dtype.total()
  seconds = total / between(target, mesh, axis, source, to) + target.chip.hop
  return Transfer(source, to, total, max(by_dtype, key=lambda name: by_dtype[name]), seconds)


class _PipelineAnalysis:
  """Memory, time and work of each rank of a compiled pipeline.

  Args:
    lowered: the pipeline.
    results: compiled result of each program.
    target: the devices of all ranks.
  """

  def __init__(
    self, lowered: LoweredPipeline, results: Mapping[StageProgram, CompileResult], target: Target
  ):
    self._lowered, self._results, self._target = lowered, results, target
    self._mesh = axis_sizes(lowered.layout.mesh)
    self._ranks = range(len(lowered.plan.meshes))
    self._costs = program_costs(lowered, results, target)
    self._calls = [one for one in lowered.plan.call_list.calls if isinstance(one, Call)]
    self._transfers = transfers(lowered, target)
    self._host_seconds = self._times_of_host_copies()

  def outcome(self, name: str) -> Outcome:
    """The outcome: memory of the rank that needs most, work and time of the busiest one."""
    pipeline = self._pipeline_ranks()
    memory = max((rank.memory for rank in pipeline.ranks), key=lambda one: one.peak)
    busiest = max(self._ranks, key=lambda rank: sum(self._seconds(rank, 'low')))
    doubts = dict.fromkeys(text for one in self._results.values() for text in _counts(one).doubts())
    return Outcome(
      name,
      self._lowered.layout,
      memory,
      self._rank_counts(busiest),
      self._rank_cost(busiest, pipeline),
      memory.peak <= self._target.chip.memory,
      None,
      self._lowered.on_rank,
      None,
      doubts=tuple(doubts),
      pipeline=pipeline,
    )

  # -- memory

  def _memory(self) -> list[Memory]:
    plan = self._lowered.plan
    parts = dict(zip(plan.arguments, self._lowered.parts, strict=True))
    held = [Counter[str]() for _ in self._ranks]
    for buffer, size in footprint.sizes(plan).items():
      if buffer.value in parts:
        held[buffer.rank][parts[buffer.value]] += size
    temporaries = {program: one.memory['temporaries'] for program, one in self._results.items()}
    device, host = footprint.peaks(plan, temporaries)
    return [
      Memory(
        each['params'], each['opt_state'], each[''], each['batch'], peak - each.total(), peak, on_host
      )
      for each, peak, on_host in zip(held, device, host, strict=True)
    ]

  # -- time

  def _pipeline_ranks(self) -> PipelineRanks:
    schedule = self._lowered.schedule
    slowest = max((one.seconds for send, one in self._transfers if _in_loop(send)), default=0.0)
    low, high = (
      schedule.simulate(
        self._lowered.microbatches, self._task_milliseconds(end).__getitem__, 1e3 * slowest
      )
      for end in ('low', 'high')
    )
    sent = Counter[int]()
    for _, one in self._transfers:
      sent[one.source] += one.bytes
    ranks = [
      RankOutcome(
        tuple(stage for stage, of in enumerate(schedule.stage_ranks) if of == rank),
        memory,
        sent[rank],
        low.bubbles[rank],
      )
      for rank, memory in enumerate(self._memory())
    ]
    return PipelineRanks(tuple(ranks), low, high)

  def _times_of_host_copies(self) -> dict[int, float]:
    """The seconds that each rank's transfers to and from the memory of the host take."""
    sizes, seconds = footprint.sizes(self._lowered.plan), defaultdict[int, float](float)
    for one in self._lowered.plan.call_list.calls:
      if isinstance(one, Send) and one.ranks[0] == one.ranks[1]:
        seconds[one.ranks[0]] += sum(map(sizes.__getitem__, one.inputs)) / self._target.chip.host
    return seconds

  def _task_milliseconds(self, end: str) -> Mapping[Task, float]:
    """The milliseconds of each task at the `low` or `high` end; 0 for one without its own program."""
    milliseconds: dict[Task, float] = defaultdict(float)
    for call in self._calls:
      if call.step is not None:
        tasks = call.step.tasks
        seconds: float = getattr(self._costs[call.program], end)
        milliseconds.update((task, 1e3 * seconds / len(tasks)) for task in tasks)
    return milliseconds

  def _seconds(self, rank: int, end: str) -> tuple[float, float]:
    """The seconds of a rank's programs inside and outside the loop, at the `low` or `high` end."""
    times = [0.0, 0.0]
    for call in self._calls:
      if call.program.rank == rank:
        times[call.when is None] += getattr(self._costs[call.program], end)
    return times[0], times[1]

  def _rank_cost(self, rank: int, pipeline: PipelineRanks) -> Cost:
    """The cost of a rank's programs; its bracket is that of the whole step."""
    costs = [self._costs[call.program] for call in self._calls if call.program.rank == rank]
    links: dict[tuple[str, ...], float] = defaultdict(float)
    for axes, seconds in (pair for one in costs for pair in one.links.items()):
      links[axes] += seconds
    moved = sum(one.seconds for _, one in self._transfers if one.source == rank)
    if moved:
      links[self._lowered.axis,] += moved
    outside = sum(one.seconds for send, one in self._transfers if not _in_loop(send))
    low, high = (
      simulation.makespan / 1e3 + outside + max(self._seconds(each, end)[1] for each in self._ranks)
      for end, simulation in (('low', pipeline.low), ('high', pipeline.high))
    )
    if self._host_seconds:
      links[HOST_LINK] = self._host_seconds[rank]
      slowest = max(self._host_seconds.values())
      low, high = max(low, slowest), high + slowest
    parts = {
      'compute': sum(one.compute for one in costs),
      'memory': sum(one.memory for one in costs),
      **{'+'.join(axes) or 'communication': seconds for axes, seconds in links.items()},
      'bubble': pipeline.low.makespan / 1e3 * pipeline.low.bubbles[rank],
    }
    bound = max(parts, key=lambda part: parts[part])
    middle = math.sqrt(low * high)
    return Cost(parts['compute'], parts['memory'], dict(links), low, middle, high, bound)

  # -- work

  def _rank_counts(self, rank: int) -> Counts:
    """The work of a rank's device in a step."""
    runs = Counter(call.program for call in self._calls if call.program.rank == rank)
    each = [(_counts(self._results[program]), times) for program, times in runs.items()]
    collectives = [
      one._replace(times=one.times * times, wire=one.wire * times)
      for counts, times in each
      for one in counts.collectives
    ]
    opaque = Counter[str]()
    for counts, times in each:
      opaque.update({name: number * times for name, number in counts.opaque})
    work = [scaled(counts, runs=times) for counts, times in each]
    return Counts(
      sum(counts.flops for counts in work),
      sum(counts.hbm_bytes for counts in work),
      tuple(sorted([*collectives, *self._permutes(rank)], key=lambda one: -one.wire)),
      tuple(opaque.items()),
      tuple(loop for counts in work for loop in counts.loops),
      tuple(product for counts in work for product in counts.products),
      sum(counts.kernels for counts in work),
    )

  def _permutes(self, rank: int) -> Iterable[Collective]:
    """A rank's transfers to other ranks, as collectives."""
    axis = self._lowered.axis
    alike = Counter((one.to, one.bytes, one.dtype) for _, one in self._transfers if one.source == rank)
    for (to, size, dtype), times in alike.items():
      yield Collective(
        'collective-permute',
        (axis,),
        self._mesh[axis],
        size,
        times,
        size * times,
        dtype,
        f'rank {rank} to rank {to}',
        '',
      )


def _in_loop(send: Send) -> bool:
  return any(buffer.microbatch is not None for buffer in send.inputs)


def _counts(result: CompileResult) -> Counts:
  return result.counts or Counts(0, 0, (), (), ())
