"""Call list: a whole training step as one ordered list of program calls and transfers between ranks.

    Call(program, inputs, outputs)      runs a program on its rank
    Send(inputs, outputs)               copies results to another rank, as soon as they exist

Calls read and write *buffers*, one value each on one rank: `Buffer(value, microbatch, rank)`, where
`microbatch` is None outside the loop. The invariant: every buffer is written once. So its last reader is
known before anything runs, and with it when its memory is free.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core.primitives import convert_element_type_p

from flax_spmd._src.pipeline.cut import equations as eq
from flax_spmd._src.pipeline.cut.equations import Constant, Equation, Value
from flax_spmd._src.pipeline.cut.outside_loop import JoinedStep
from flax_spmd._src.pipeline.cut.task_programs import Accumulator, Key, TaskPrograms
from flax_spmd._src.pipeline.schedules.simulation import TimedStep
from flax_spmd._src.pipeline.schedules.tasks import Step
from flax_spmd._src.text import plural

_LARGE_RESULT = 1 << 16  # bytes; up to this size, a result of arguments alone is kept on several ranks
_SMALL_RESULT = 512  # bytes; up to this size, a result is sent to every process; of a state the scalars
_WIDTH = 28  # characters of the first column of a list

Port: TypeAlias = tuple[Value, int]
"""A value of the step, and an index into the microbatches of the program that uses it."""


class Buffer(NamedTuple):
  """A value on a rank.

  Attributes:
    value: the value.
    microbatch: its microbatch; None for a value outside the loop.
    rank: the rank.
    copy: 0 for the value as it was computed or received, 1 for its copy in the memory of the host, more for copies
      that came back from there.
  """

  value: Value
  microbatch: int | None
  rank: int
  copy: int = 0

  @property
  def memory(self) -> tuple[int, bool]:
    """Its rank, and whether it is in the memory of the host."""
    return self.rank, self.copy == 1

  def __str__(self) -> str:
    """`float32[4,32,64] of microbatch 0`."""
    text = self.value.aval.str_short()
    return text if self.microbatch is None else f'{text} of microbatch {self.microbatch}'


@dataclasses.dataclass(eq=False)
class StageProgram:
  """A program of one rank, called once per microbatch or once per step.

  Attributes:
    name: its name in profiles.
    rank: the rank that runs it.
    equations: its operations.
    inputs, outputs: the values of `equations` that are its arguments and results.
    ports: in a program of tasks, the value of the step that each input and output stands for.
  """

  name: str
  rank: int
  equations: list[Equation]
  inputs: list[Value]
  outputs: list[Value]
  ports: dict[Value, Port] = dataclasses.field(default_factory=dict)


class Call(NamedTuple):
  """A run of a program.

  Attributes:
    program: the program.
    inputs, outputs: the buffers that it reads and writes.
    when: its time in the schedule; None outside the loop.
    stores: whether it only stores the results of these tasks, right after them.
  """

  program: StageProgram
  inputs: list[Buffer]
  outputs: list[Buffer]
  when: TimedStep | None = None
  stores: bool = False

  @property
  def step(self) -> Step | None:
    """The tasks that it runs, if any."""
    return None if self.when is None or self.stores else self.when.step

  def __str__(self) -> str:
    return str(self.step or self.program.name)

  @property
  def columns(self) -> tuple[str, str]:
    """Its rank and tasks, and the numbers of arrays, as text."""
    inputs, outputs = plural(len(self.inputs), 'array'), plural(len(self.outputs), 'array')
    return f'rank {self.program.rank}: {self}', f'{inputs} -> {outputs}'


class Send(NamedTuple):
  """A transfer of buffers of one rank to another, or to the other memory of the same rank."""

  inputs: list[Buffer]
  outputs: list[Buffer]

  @property
  def ranks(self) -> tuple[int, int]:
    """The rank that sends, and the one that receives."""
    return self.inputs[0].rank, self.outputs[0].rank

  def __str__(self) -> str:
    """`rank 0 -> rank 1: float32[8,4] of microbatch 0`."""
    return ': '.join(self.columns)

  @property
  def columns(self) -> tuple[str, str]:
    """Its ranks, and its arrays, as text."""
    ends = (self.inputs[0].memory, self.outputs[0].memory)
    ranks = (f'{"host of " if on_host else ""}rank {rank}' for rank, on_host in ends)
    return ' -> '.join(ranks), ', '.join(map(str, self.inputs))


@dataclasses.dataclass(frozen=True)
class CallList:
  """A whole step.

  Attributes:
    calls: calls and sends, in order.
    results: the buffers of each result, one per rank that has it. Empty for an argument that stays where it is, as one
      that no rank uses.
  """

  calls: list[Call | Send]
  results: dict[Value, list[Buffer]]

  def __str__(self) -> str:
    """One line per call or send."""
    return '\n'.join(f'{first:{_WIDTH}}{rest}' for first, rest in (one.columns for one in self.calls))

  @functools.cached_property
  def first_calls(self) -> dict[StageProgram, Call]:
    """The first call of each program, in order."""
    first: dict[StageProgram, Call] = {}
    for one in self.calls:
      if isinstance(one, Call):
        first.setdefault(one.program, one)
    return first

  @functools.cached_property
  def last_use(self) -> dict[Buffer, int]:
    """The index of the last call or send that reads or writes each buffer; in the order of their first use."""
    return {
      buffer: number for number, one in enumerate(self.calls) for buffer in (*one.inputs, *one.outputs)
    }

  @functools.cached_property
  def ends(self) -> dict[int, list[Buffer]]:
    """The buffers whose last use is a call or send, by its index; those of results have none."""
    returned = set().union(*self.results.values())
    ends: dict[int, list[Buffer]] = {}
    for buffer, number in self.last_use.items():
      if buffer not in returned:
        ends.setdefault(number, []).append(buffer)
    return ends

  @functools.cached_property
  def written(self) -> set[Buffer]:
    """The buffers that calls and sends write."""
    return {buffer for one in self.calls for buffer in one.outputs}

  @functools.cached_property
  def given(self) -> list[Buffer]:
    """The other buffers: arguments and closed-over arrays."""
    return [buffer for buffer in self.last_use if buffer not in self.written]


class CallListBuilder:
  """Builds the call list of a step.

  Args:
    joined, programs: the step, with its loop replaced by task programs.
    order: the tasks of all ranks in the schedule's order, by start.
    stage_ranks, arguments: the rank of each stage, and the arguments of the step.
    succeeded: the argument whose place each result takes in the next step. The result is sent to the
      ranks that use the argument.
    broadcast_small: whether results up to 512 bytes, of a state the scalars, are sent to every rank, and arguments of
      this size that are returned stay where they are. Set when ranks belong to several processes.
  """

  def __init__(
    self,
    joined: JoinedStep,
    programs: TaskPrograms,
    order: Sequence[TimedStep],
    stage_ranks: Sequence[int],
    arguments: Iterable[Value],
    succeeded: Mapping[Value, Value],
    broadcast_small: bool = False,
  ):
    self._joined, self._programs = joined, programs
    self._order, self._stage_ranks, self._broadcast_small = order, stage_ranks, broadcast_small
    self._arguments, self._succeeded = set(arguments), succeeded
    self._ranks = range(max(stage_ranks) + 1)
    self._producer = programs.producers()
    self._before = {one.before: one for one in programs.accumulators}
    self._after = {one.after: one for one in programs.accumulators}
    self._readers = eq.readers((key, task.inputs) for key, task in programs.tasks.items())
    self._results = {*joined.kept, *joined.stacks}
    self._stage_programs: dict[tuple[Any, ...], StageProgram] = {}
    self._shared: dict[StageProgram, dict[Value, Buffer]] = defaultdict(dict)
    self._stack_programs: dict[tuple[Key, bool], StageProgram] = {}
    self._stored: Counter[Key] = Counter()
    # the microbatches in the order of a task's runs, each with the one before; and in the order of the batch
    self._turns: dict[Key, dict[int, int | None]] = defaultdict(dict)
    for task in (task for one in order for task in one.step.tasks):
      turns = self._turns[task.kind, task.stage]
      turns[task.microbatch] = next(reversed(turns), None)
    self._in_order = {number: number - 1 if number else None for number in range(len(joined.indices))}
    self._has_passed = any(one.passed for one in programs.accumulators)
    self._needed = self._needed_by_loop()

  def build(self) -> CallList:
    """The whole step."""
    starts = {rank: self._joined.closure(values) for rank, values in self._needed.items()}
    ends, result_ranks = self._ends(starts)
    read = {key: eq.free_values(equations) for key, equations in ends.items()}
    reduced = [
      StageProgram(f'reduce_{rank}', rank, equations, eq.free_values(equations), values)
      for rank, (equations, values) in self._joined.reduced.items()
    ]
    calls = [_call_once(program) for program in [*reduced, *self._start_programs(starts, read)]]
    calls += [call for scheduled in self._order for call in self._loop_call(scheduled)]
    calls += [_call_once(program) for program in self._end_programs(ends, read, result_ranks)]
    results = {
      value: [Buffer(value, None, rank) for rank in ranks] for value, ranks in result_ranks.items()
    }
    given = {buffer for call in calls for buffer in call.inputs if buffer.value in self._arguments}
    for value in self._arguments.intersection(self._joined.results):
      every = [Buffer(value, None, rank) for rank in self._ranks]
      # every process can read its own arguments
      stays = self._broadcast_small and value.bytes <= _SMALL_RESULT
      results[value] = [] if stays else [each for each in every if each in given]
    return CallList(_with_sends(calls, results), results)

  # -- the loop

  def _loop_call(self, scheduled: TimedStep) -> list[Call]:
    """A scheduled step as a call; empty if its tasks have no program."""
    tasks = [task for task in scheduled.step.tasks if (task.kind, task.stage) in self._programs.tasks]
    if not tasks:
      return []
    microbatches = list(dict.fromkeys(task.microbatch for task in tasks))
    key = tuple((task.kind, task.stage, microbatches.index(task.microbatch)) for task in tasks)
    before = [microbatches.index(one - 1) if one - 1 in microbatches else None for one in microbatches]
    before = tuple(before if self._has_passed else [None] * len(before))
    if (key, before) not in self._stage_programs:
      self._stage_programs[key, before] = self._stage_program(key, before)
    program = self._stage_programs[key, before]
    shared = self._shared[program]
    inputs = [shared.get(one) or self._read(program, one, microbatches) for one in program.inputs]
    ports = [program.ports[one] for one in program.outputs]
    outputs = [self._of_microbatch(one, microbatches[slot], program.rank) for one, slot in ports]
    return [Call(program, inputs, outputs, scheduled), *self._stack_calls(outputs, scheduled)]

  def _stack_calls(self, outputs: Sequence[Buffer], scheduled: TimedStep) -> list[Call]:
    """The calls that store results of microbatches as rows of their stacks, right after their task."""
    rows: dict[tuple[int | None, Key], list[Buffer]] = defaultdict(list)
    for buffer in outputs:
      if buffer.value in self._joined.stacks:
        rows[buffer.microbatch, self._producer[buffer.value]].append(buffer)
    return [self._stack_call(task, buffers, scheduled) for (_, task), buffers in rows.items()]

  def _stack_call(self, task: Key, rows: list[Buffer], when: TimedStep) -> Call:
    """The call for the results of a task and one microbatch. The first one creates the stacks."""
    (_, microbatch, rank, _), done = rows[0], self._stored[task]
    self._stored[task] += 1
    stacks = [self._joined.stacks[row.value] for row in rows]
    if (task, done == 0) not in self._stack_programs:
      values = [row.value for row in rows]
      self._stack_programs[task, done == 0] = _stack_program(task, values, stacks, rank, done == 0)
    inputs = list(rows)
    if done:
      index = self._joined.indices[microbatch or 0]
      inputs += [Buffer(index, None, rank), *(Buffer(stack, done, rank) for stack in stacks)]
    version = None if done + 1 == len(self._joined.indices) else done + 1
    outputs = [Buffer(stack, version, rank) for stack in stacks]
    return Call(self._stack_programs[task, done == 0], inputs, outputs, when, stores=True)

  def _stage_program(
    self, key: tuple[tuple[str, int, int], ...], before: tuple[int | None, ...]
  ) -> StageProgram:
    """One program of several tasks.

    Args:
      key: kind, stage and microbatch index of each task.
      before: for the index of each microbatch, that of the microbatch before, if it is among them.
    """
    inner: dict[Port, Value] = {}
    equations: list[Equation] = []
    ports: dict[Value, Port] = {}
    own_tasks = set(key)
    outputs: list[Value] = []
    latest: dict[tuple[str, int], int] = {}  # the slot of a task that ran last
    for kind, stage, slot in key:
      task = self._programs.tasks[kind, stage]  # pyright: ignore[reportArgumentType]
      for one in task.equations:
        known = {
          value: self._inner_value(value, slot, before[slot], latest, inner, ports)
          for value in one.values
          if not isinstance(value, Constant)
        }
        results = [inner.setdefault((value, slot), Value(value.aval)) for value in one.outputs]
        equations.append(
          one.on(
            [known.get(atom, atom) if isinstance(atom, Value) else atom for atom in one.inputs], results
          )
        )
      for value in task.outputs:
        result = inner[value, slot]
        if value in self._after:
          if not self._after[value].passed:  # of several updates, only the last one is read later
            outputs = [one for one in outputs if ports[one][0] is not value]
        elif value not in self._results and all(
          (*reader, slot) in own_tasks for reader in self._readers[value]
        ):
          continue
        ports[result] = value, slot
        outputs.append(result)
      latest[kind, stage] = slot
    inputs = [value for value in eq.free_values(equations) if not isinstance(value, Constant)]
    name = '_'.join(f'{kind}_{stage}' for kind, stage, _ in key)
    constants = [value for value in eq.free_values(equations) if isinstance(value, Constant)]
    ports.update((value, (value, 0)) for value in constants)
    rank = self._stage_ranks[key[0][1]]
    return StageProgram(name, rank, equations, inputs + constants, outputs, ports)

  def _inner_value(
    self,
    value: Value,
    slot: int,
    before: int | None,
    latest: Mapping[tuple[str, int], int],
    inner: dict[Port, Value],
    ports: dict[Value, Port],
  ) -> Value:
    """The value inside a program that stands for one of the step: a separate one per microbatch."""
    if one := self._before.get(value):
      earlier = before if one.passed else latest.get(one.task)
      if earlier is not None:
        value, slot = one.after, earlier
    own = value in self._producer or value in self._before or value is self._programs.body.index
    per_microbatch = own or (value, slot) in inner
    port = value, slot if per_microbatch else 0
    if port not in inner:
      inner[port] = Value(value.aval)
      ports[inner[port]] = port
    return inner[port]

  def _read(self, program: StageProgram, inner: Value, microbatches: Sequence[int]) -> Buffer:
    """The buffer that a program reads for one of its inputs."""
    value, slot = program.ports[inner]
    if one := self._before.get(value):
      earlier = self._turns_of(one)[microbatches[slot]]
      if earlier is None:
        return Buffer(self._joined.start[one], None, program.rank)
      return self._of_microbatch(one.after, earlier, program.rank)
    if value is self._programs.body.index:
      return Buffer(self._joined.indices[microbatches[slot]], None, program.rank)
    if value in self._producer:
      return self._of_microbatch(value, microbatches[slot], program.rank)
    self._shared[program][inner] = Buffer(value, None, program.rank)
    return self._shared[program][inner]

  def _of_microbatch(self, value: Value, microbatch: int, rank: int) -> Buffer:
    kept, one = self._joined.kept.get(value), self._after.get(value)
    if one and microbatch == next(reversed(self._turns_of(one))):
      kept = one.final
    return Buffer(value, microbatch, rank) if kept is None else Buffer(kept, None, rank)

  def _turns_of(self, one: Accumulator) -> Mapping[int, int | None]:
    """The microbatches in the order in which a value is updated, each with the one before."""
    return self._in_order if one.passed else self._turns[one.task]

  # -- before and after the loop

  def _needed_by_loop(self) -> dict[int, dict[Value, None]]:
    """For each rank, the values from outside the loop that its tasks read, in order."""
    needed: dict[int, dict[Value, None]] = {rank: {} for rank in self._ranks}
    for (_, stage), task in self._programs.tasks.items():
      for value in task.inputs:
        if value in self._before:
          value = self._joined.start[self._before[value]]
        elif value in self._producer or value is self._programs.body.index:
          continue
        needed[self._stage_ranks[stage]][value] = None
    return needed

  def _ends(self, starts: Mapping[int, list[Equation]]):
    """The equations after the loop, by level and rank; and the ranks of each result."""
    ends = {key: list(equations) for key, equations in self._joined.bound.items()}
    needed: dict[int, list[Value]] = defaultdict(list)
    for (_, rank), equations in ends.items():
      needed[rank] += [value for value in eq.free_values(equations) if value not in self._joined.rank_of]
    uses = {
      rank: set(eq.free_values([*starts[rank], *self._joined.closure(needed[rank])]))
      | {*self._needed[rank], *needed[rank]}
      for rank in self._ranks
    }
    for rank, (equations, values) in self._joined.reduced.items():
      uses[rank].update(eq.free_values(equations), values)
    result_ranks: dict[Value, list[int]] = {}
    for value in dict.fromkeys(self._joined.results):
      if value in self._arguments or isinstance(value, Constant):
        continue
      result_ranks[value] = self._ranks_of(value, uses)
      for rank in result_ranks[value] if value not in self._joined.rank_of else ():
        needed[rank].append(value)
    for rank in self._ranks:
      done = set(starts[rank])
      free = [one for one in self._joined.closure(needed[rank]) if one not in done]
      if free:
        ends[0, rank] = [*free, *ends.get((0, rank), ())]
    return dict(sorted(ends.items())), result_ranks

  def _ranks_of(self, value: Value, uses: Mapping[int, set[Value]]) -> list[int]:
    """The ranks that keep a result: its producer and the ranks that use it in the next step.

    A result of arguments alone is kept by the ranks that use its arguments anyway.
    """
    if value in self._joined.rank_of:
      producer, argument = self._joined.rank_of[value], self._succeeded.get(value)
      # of a state the scalars alone: its biases and norms would be sent by every rank to every other
      small = value.bytes <= _SMALL_RESULT and (argument is None or not value.aval.shape)
      everywhere = self._broadcast_small and small
      return [rank for rank in self._ranks if everywhere or rank == producer or argument in uses[rank]]
    needs = set(eq.free_values(self._joined.closure([value])))
    ranks = [rank for rank in self._ranks if not needs.isdisjoint(uses[rank])]
    ranks = ranks or list(self._ranks)
    return ranks if value.bytes <= _LARGE_RESULT else ranks[:1]

  def _start_programs(
    self, starts: Mapping[int, list[Equation]], read_at_end: Mapping[tuple[int, int], list[Value]]
  ) -> list[StageProgram]:
    """A program before the loop, for each rank that needs one."""
    programs = []
    for rank, equations in starts.items():
      later = {value for (_, at), values in read_at_end.items() if at == rank for value in values}
      read = later | {*self._needed[rank], *self._joined.results}
      outputs = [value for one in equations for value in one.outputs if value in read]
      if outputs or equations:
        inputs = eq.free_values(equations)
        programs.append(StageProgram(f'start_{rank}', rank, equations, inputs, outputs))
    return programs

  def _end_programs(
    self, ends: Mapping[tuple[int, int], list[Equation]], read, result_ranks
  ) -> list[StageProgram]:
    """The programs after the loop, with only those outputs that are read."""
    readers = eq.readers(read.items())
    programs = []
    for (level, rank), equations in ends.items():
      outputs = [
        value
        for one in equations
        for value in one.outputs
        if rank in result_ranks.get(value, ()) or {*readers[value]} - {(level, rank)}
      ]
      if outputs or any(one.has_effects for one in equations):
        name = f'end_{rank}' + (f'_{level}' if level else '')
        programs.append(StageProgram(name, rank, equations, read[level, rank], outputs))
    return programs


def _call_once(program: StageProgram) -> Call:
  inputs = [Buffer(one, None, program.rank) for one in program.inputs]
  outputs = [Buffer(one, None, program.rank) for one in program.outputs]
  return Call(program, inputs, outputs)


def _stack_program(
  task: Key, values: Sequence[Value], stacks: Sequence[Value], rank: int, first: bool
) -> StageProgram:
  """Stores results of a microbatch in stacks; the first time it creates them, with the results in all rows."""
  equations: list[Equation] = []
  outputs: list[Value] = []
  index = Value(jax.typeof(np.uint32(0)))
  for value, stack in zip(values, stacks, strict=True):
    if first:
      new, results = eq.traced(lambda row: jnp.broadcast_to(row, stack.aval.shape), value)  # noqa: B023
    else:
      new, results = eq.traced(_with_row, stack, value, index)
    equations += new
    outputs += results
  inputs = [*values] if first else [*values, index, *stacks]
  name = f'stack_{task[0]}_{task[1]}' + ('_first' if first else '')
  return StageProgram(name, rank, equations, inputs, outputs)


def _with_row(stack: Any, row: Any, index: Any) -> Any:
  new = lax.dynamic_update_index_in_dim(stack, row, index, 0)
  if jax.typeof(stack).weak_type:  # the update has none
    new = convert_element_type_p.bind(new, new_dtype=new.dtype, weak_type=True, sharding=None)
  return new


def _with_sends(calls: Sequence[Call], results: Mapping[Value, Sequence[Buffer]]) -> list[Call | Send]:
  """The calls, with the sends of their results to other ranks, in order of time.

  Calls of the loop sort by time, with ends before starts; those without a duration keep their order. Calls
  before the loop come first and calls after it last, in the order given.

  A result is sent as soon as its task ends. So when a rank waits for one (as a process does), no other
  call of that rank could have run instead.
  """
  written = {buffer for call in calls for buffer in call.outputs}
  receivers: dict[Value, dict[int | None, dict[int, None]]] = defaultdict(lambda: defaultdict(dict))
  for buffers in (*(call.inputs for call in calls), *results.values()):
    for buffer in buffers:
      if buffer not in written:
        receivers[buffer.value][buffer.microbatch][buffer.rank] = None
  senders: dict[tuple[Value, int | None], int] = {}
  for value, microbatch, rank, _ in written:
    if value in receivers:
      senders[value, microbatch] = min(senders.get((value, microbatch), rank), rank)
  timed: list[tuple[tuple[float, bool], Call | Send]] = []
  outside = -math.inf
  for call in calls:
    sends: dict[int, list[Buffer]] = defaultdict(list)
    for buffer in call.outputs:
      if buffer.value in receivers and buffer.rank == senders[buffer[:2]]:
        for receiver in receivers[buffer.value].get(buffer.microbatch, ()):
          sends[receiver].append(buffer)
    if call.when is None:
      begin = end = outside, True
    else:
      start, stop = (call.when.end if call.stores else call.when.start), call.when.end
      begin, end = (start, True), (stop, start == stop)
      outside = math.inf
    timed.append((begin, call))
    timed += [
      (end, Send(buffers, [one._replace(rank=receiver) for one in buffers]))
      for receiver, buffers in sends.items()
    ]
  return [one for _, one in sorted(timed, key=lambda item: item[0])]
