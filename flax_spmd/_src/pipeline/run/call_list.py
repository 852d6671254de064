"""Linking: everything that a step runs, as one list of calls and sends between ranks.

    Call(unit, inputs, outputs)      a program on a rank
    Send(values, rank)               results of one rank to another, right after they were made

A *place* is a value on a rank: `(value, microbatch, rank)`, where values that are not a microbatch's own
have None. Places are what the list is about; each is made once, so the last use of one is known, and with
it when its memory can go.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from flax_spmd._src.pipeline.cut import equations as eq
from flax_spmd._src.pipeline.cut.equations import Constant, Equation, Value
from flax_spmd._src.pipeline.cut.outside_loop import Joined, Placed
from flax_spmd._src.pipeline.cut.task_programs import Accumulator, Programs
from flax_spmd._src.pipeline.schedules.simulation import Run
from flax_spmd._src.pipeline.schedules.tasks import Step as ScheduledStep

Place: TypeAlias = tuple[Value, int | None, int]
Port: TypeAlias = tuple[Value, int]  # a value, and of which of a unit's microbatches
_LARGE_RESULT = (
  1 << 16
)  # bytes; a result that needs no stage is on every rank that could make it up to here
_SMALL_RESULT = 512  # bytes; what every process is told: losses, norms


@dataclasses.dataclass(eq=False)
class Unit:
  """A program of one rank, which can be called for several microbatches.

  Attributes:
    name: what it is called in profiles.
    rank: where it runs.
    equations: what it does.
    inputs, outputs: the values of its equations that are its arguments and results.
    ports: per input and output, what it is for the rest of the step.
  """

  name: str
  rank: int
  equations: list[Equation]
  inputs: list[Value]
  outputs: list[Value]
  ports: dict[Value, Port] = dataclasses.field(default_factory=dict)


class Timed(NamedTuple):
  """What a schedule runs, and when it would if all tasks took equally long."""

  step: ScheduledStep
  start: float
  end: float


class Call(NamedTuple):
  """A run of a unit; `when` is None for one that is outside of the loop."""

  unit: Unit
  inputs: list[Place]
  outputs: list[Place]
  when: Timed | None = None


class Send(NamedTuple):
  """A transfer of places to another rank."""

  places: list[Place]
  rank: int

  @property
  def arrived(self) -> list[Place]:
    """What the places are there."""
    return [(value, microbatch, self.rank) for value, microbatch, _ in self.places]


class Linked(NamedTuple):
  """A whole step.

  Attributes:
    calls: what is run and sent, in order.
    results: per result of the step that is computed, the places that it is in.
  """

  calls: list[Call | Send]
  results: dict[Value, list[Place]]


class Linker:
  """Makes the list.

  Args:
    joined, placed: the rest of the step.
    programs: the tasks.
    order: what the schedule runs, over all ranks, by its start.
    owners: per stage, its rank.
    arguments: those of the step.
    told: whether small results are sent to all ranks, since these are several processes'.
  """

  def __init__(
    self,
    joined: Joined,
    placed: Placed,
    programs: Programs,
    order: Sequence[Timed],
    owners: Sequence[int],
    arguments: Iterable[Value],
    told: bool = False,
  ):
    self._joined, self._placed, self._programs = joined, placed, programs
    self._order, self._owners, self._told = order, owners, told
    self._arguments = set(arguments)
    self._ranks = range(max(owners) + 1)
    self._maker = programs.made_by()
    self._before = {one.before: one for one in programs.accumulators}
    self._after = {one.after: one for one in programs.accumulators}
    self._users = _users(programs)
    self._units: dict[tuple[tuple[str, int, int], ...], Unit] = {}
    self._passes: dict[Accumulator, int] = dict.fromkeys(programs.accumulators, 0)
    self._runs = Counter((task.kind, task.stage) for one in order for task in one.step.tasks)

  def link(self) -> Linked:
    """The whole step."""
    starts = {rank: self._placed.closure(self._needed_by_loop(rank)) for rank in self._ranks}
    ends, results = self._ends(starts)
    calls = [self._call_once(unit) for unit in self._starts(starts, ends)]
    calls += [call for timed in self._order for call in self._loop_call(timed)]
    calls += [self._call_once(unit) for unit in self._limited(ends, results)]
    found: dict[Value, list[Place]] = {
      value: [(value, None, rank) for rank in ranks] for value, ranks in results.items()
    }
    return Linked(_with_sends(calls, found), found)

  # -- the loop

  def _loop_call(self, timed: Timed) -> list[Call]:
    """A scheduled step as a call, if there is something to do."""
    tasks = [task for task in timed.step.tasks if (task.kind, task.stage) in self._programs.tasks]
    if not tasks:
      return []
    slots = list(dict.fromkeys(task.microbatch for task in tasks))
    key = tuple((task.kind, task.stage, slots.index(task.microbatch)) for task in tasks)
    if key not in self._units:
      self._units[key] = self._unit(key)
    unit = self._units[key]
    inputs = [self._place(*unit.ports[value], slots, unit.rank) for value in unit.inputs]
    for accumulator in {self._after[one]: None for one, _ in unit.ports.values() if one in self._after}:
      self._passes[accumulator] += sum((one.kind, one.stage) == accumulator.task for one in tasks)
    outputs = [self._place(*unit.ports[value], slots, unit.rank) for value in unit.outputs]
    return [Call(unit, inputs, outputs, timed)]

  def _unit(self, key: tuple[tuple[str, int, int], ...]) -> Unit:
    """The unit of tasks that run as one program; `key` has kind, stage and which microbatch of each."""
    names: dict[Port, Value] = {}
    equations: list[Equation] = []
    ports: dict[Value, Port] = {}
    inside = {(kind, stage, slot) for kind, stage, slot in key}
    outputs: list[Value] = []
    for kind, stage, slot in key:
      task = self._programs.tasks[kind, stage]  # type: ignore[index]
      for one in task.equations:
        known = {
          value: self._inner(value, slot, names, ports)
          for value in one.values
          if not isinstance(value, Constant)
        }
        made = [names.setdefault((value, slot), Value(value.aval)) for value in one.outputs]
        equations.append(dataclasses.replace(one.replaced(known), outputs=made))
      for value in task.outputs:
        inner = names[value, slot]
        if value in self._after:  # the next task of this unit goes on with it
          names[self._after[value].before, 0] = inner
          outputs = [one for one in outputs if ports[one][0] is not value]
        elif value not in self._joined.kept and all(
          (*user, slot) in inside for user in self._users[value]
        ):
          continue
        ports[inner] = value, slot
        outputs.append(inner)
    inputs = [value for value in eq.free_values(equations) if not isinstance(value, Constant)]
    name = '_'.join(f'{kind}_{stage}' for kind, stage, _ in key)
    constants = [value for value in eq.free_values(equations) if isinstance(value, Constant)]
    ports.update((value, (value, 0)) for value in constants)
    return Unit(name, self._owners[key[0][1]], equations, inputs + constants, outputs, ports)

  def _inner(self, value: Value, slot: int, names: dict[Port, Value], ports: dict[Value, Port]) -> Value:
    """What a value is called in a unit: values of other microbatches are other values."""
    own = value in self._maker or value in self._joined.slices or (value, slot) in names
    port = value, slot if own else 0
    if port not in names:
      names[port] = Value(value.aval)
      ports[names[port]] = port
    return names[port]

  def _place(self, value: Value, slot: int, slots: Sequence[int], rank: int) -> Place:
    """Where a unit finds what it needs, or puts what it makes."""
    microbatch = slots[slot]
    if value in self._before or value in self._after:
      accumulator = self._before.get(value) or self._after[value]
      number = self._passes[accumulator]
      if value in self._after and number == self._runs[accumulator.task]:
        return self._joined.final[accumulator], None, rank
      start = self._joined.start[accumulator]
      return (start, None, rank) if number == 0 else (accumulator.before, number, rank)
    if value in self._joined.slices:
      return self._joined.slices[value][microbatch], None, rank
    if value in self._joined.kept:
      return self._joined.kept[value][microbatch], None, rank
    return (value, microbatch if value in self._maker else None, rank)

  # -- before and after it

  def _needed_by_loop(self, rank: int) -> list[Value]:
    """What the tasks of a rank need of the rest of the step."""
    needed: dict[Value, None] = {}
    for (_, stage), task in self._programs.tasks.items():
      if self._owners[stage] != rank:
        continue
      for value in task.inputs:
        if value in self._before:
          needed[self._joined.start[self._before[value]]] = None
        elif value in self._joined.slices:
          needed.update(dict.fromkeys(self._joined.slices[value]))
        elif value not in self._maker:
          needed[value] = None
    return list(needed)

  def _ends(self, starts: Mapping[int, list[Equation]]):
    """What each rank does after the loop, by level; and on which ranks the results are."""
    ends = {key: list(equations) for key, equations in self._placed.bound.items()}
    wanted: dict[int, list[Value]] = defaultdict(list)
    for (_, rank), equations in ends.items():
      wanted[rank] += [value for value in eq.free_values(equations) if value not in self._placed.home]
    uses = {
      rank: set(eq.free_values([*starts[rank], *self._placed.closure(wanted[rank])]))
      | set(self._needed_by_loop(rank))
      | set(wanted[rank])
      for rank in self._ranks
    }
    results: dict[Value, list[int]] = {}
    for value in dict.fromkeys(self._joined.results):
      if not isinstance(value, Value) or value in self._arguments or isinstance(value, Constant):
        continue
      results[value] = self._ranks_of(value, uses)
      for rank in results[value] if value not in self._placed.home else ():
        wanted[rank].append(value)
    for rank in self._ranks:
      done = set(starts[rank])
      free = [one for one in self._placed.closure(wanted[rank]) if one not in done]
      if free:
        ends[0, rank] = [*free, *ends.get((0, rank), ())]
    return dict(sorted(ends.items())), results

  def _ranks_of(self, value: Value, uses: Mapping[int, set[Value]]) -> list[int]:
    """The ranks that a result is on: where it is made, or where its arguments are used anyway."""
    if value in self._placed.home:
      home = self._placed.home[value]
      others = [rank for rank in self._ranks if rank != home]
      return [home, *others] if self._told and value.bytes <= _SMALL_RESULT else [home]
    needs = set(eq.free_values(self._placed.closure([value])))
    ranks = [rank for rank in self._ranks if not needs.isdisjoint(uses[rank])]
    ranks = ranks or list(self._ranks)
    return ranks if value.bytes <= _LARGE_RESULT else ranks[:1]

  def _starts(self, starts: Mapping[int, list[Equation]], ends) -> list[Unit]:
    """A unit for each rank that has something to do before the loop."""
    units = []
    for rank, equations in starts.items():
      later = {value for (_, at), each in ends.items() if at == rank for value in eq.free_values(each)}
      wanted = later | set(self._needed_by_loop(rank)) | set(self._joined.results)
      outputs = [value for one in equations for value in one.outputs if value in wanted]
      if outputs or equations:
        units.append(_plain(f'start_{rank}', rank, equations, outputs))
    return units

  def _limited(self, ends: Mapping[tuple[int, int], list[Equation]], results) -> list[Unit]:
    """The units after the loop, with those outputs that somebody uses."""
    used: dict[Value, set[tuple[int, int]]] = defaultdict(set)
    for key, equations in ends.items():
      for value in eq.free_values(equations):
        used[value].add(key)
    units = []
    for (level, rank), equations in ends.items():
      made = [value for one in equations for value in one.outputs]
      outputs = [
        value for value in made if rank in results.get(value, ()) or used[value] - {(level, rank)}
      ]
      if outputs or any(one.has_effects for one in equations):
        units.append(_plain(f'end_{rank}' + (f'_{level}' if level else ''), rank, equations, outputs))
    return units

  def _call_once(self, unit: Unit) -> Call:
    inputs: list[Place] = [(one, None, unit.rank) for one in unit.inputs]
    outputs: list[Place] = [(one, None, unit.rank) for one in unit.outputs]
    return Call(unit, inputs, outputs)


def _plain(name: str, rank: int, equations: list[Equation], outputs: list[Value]) -> Unit:
  inputs = eq.free_values(equations)
  return Unit(name, rank, equations, inputs, outputs, {one: (one, 0) for one in [*inputs, *outputs]})


def _users(programs: Programs) -> dict[Value, list[tuple[str, int]]]:
  """The tasks that use a value."""
  users: dict[Value, list[tuple[str, int]]] = defaultdict(list)
  for key, task in programs.tasks.items():
    for value in task.inputs:
      users[value].append(key)
  return users


def _with_sends(calls: Sequence[Call], results: Mapping[Value, Sequence[Place]]) -> list[Call | Send]:
  """The calls, and what other ranks need of their results, in the order of time.

  A result is sent when its task ends. So a rank that waits for it when its turn comes, as processes do,
  has nothing else that it could run.
  """
  makers: dict[tuple[Value, int | None], set[int]] = defaultdict(set)
  for call in calls:
    for value, microbatch, rank in call.outputs:
      makers[value, microbatch].add(rank)
  wanted: dict[tuple[Value, int | None], dict[int, None]] = defaultdict(dict)
  for places in (*(call.inputs for call in calls), *results.values()):
    for value, microbatch, rank in places:
      if makers[value, microbatch] and rank not in makers[value, microbatch]:
        wanted[value, microbatch][rank] = None
  timed: list[tuple[tuple[float, bool], Call | Send]] = []
  for call in calls:
    sends: dict[int, list[Place]] = defaultdict(list)
    for value, microbatch, rank in call.outputs:
      if rank == min(makers[value, microbatch]):
        for other in wanted[value, microbatch]:
          sends[other].append((value, microbatch, rank))
    begin, end = _times(call, timed)
    timed.append((begin, call))
    timed += [(end, Send(places, rank)) for rank, places in sends.items()]
  return [one for _, one in sorted(timed, key=lambda item: item[0])]


def _times(call: Call, before: Sequence[Any]) -> tuple[tuple[float, bool], tuple[float, bool]]:
  """When a call comes, and what it sends: of the loop by time, what ends before what begins; what is
  before the loop first, and what is after it last, one by one.
  """
  if call.when is not None:
    return (call.when.start, True), (call.when.end, False)
  begun = any(isinstance(one, Call) and one.when is not None for _, one in before)
  at = math.inf if begun else -math.inf
  return (at, True), (at, True)


def timeline(runs: Iterable[Iterable[Run]]) -> list[Timed]:
  """What all ranks run, by its start."""
  found = [Timed(run.step, run.start, run.end) for each in runs for run in each]
  return sorted(found, key=lambda one: one.start)
