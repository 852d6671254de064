"""Running: a compiled step, called with arrays.

What is run was linked before: here are only registers, a loop over instructions, and the arguments'
way to the ranks that use them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal
from jax.sharding import NamedSharding, PartitionSpec

from flax_spmd import compat
from flax_spmd.pipeline.crew import Crew
from flax_spmd.pipeline.equations import Atom, Constant, Value
from flax_spmd.pipeline.executables import Compiler, Executable
from flax_spmd.pipeline.linking import Call, Linked, Place, Send, Unit
from flax_spmd.pipeline.submeshes import union, view
from flax_spmd.pipeline.tasks import Step, Task


class Instruction(NamedTuple):
  """Arrays of registers into a program, or onto other devices, and what comes of it into registers.

  Attributes:
    function: of arrays one by one.
    inputs, outputs: the numbers of the registers.
    dead: registers that nobody reads after this.
    rank: the one that runs it, or that it sends from.
    sends: whether it sends.
    step: the tasks that it is, if it is of the loop.
  """

  function: Callable[..., Sequence[Any]]
  inputs: tuple[int, ...]
  outputs: tuple[int, ...]
  dead: tuple[int, ...]
  rank: int
  sends: bool
  step: Step | None

  def run(self, registers: list[Any]) -> None:
    """Does it."""
    results = self.function(*[registers[number] for number in self.inputs])
    for number, result in zip(self.outputs, results):
      registers[number] = result
    for number in self.dead:
      registers[number] = None


class Argument(NamedTuple):
  """Where an argument is used: a register and a sharding for each of its ranks."""

  uses: tuple[tuple[int, NamedSharding], ...]
  ranks: tuple[int, ...]


class Result(NamedTuple):
  """A result: of registers, joined on one mesh; or of an argument, by its number; or a constant."""

  registers: tuple[int, ...] = ()
  sharding: NamedSharding | None = None
  argument: int | None = None
  constant: Any = None


@dataclasses.dataclass
class Machine:
  """A step that can be run.

  Attributes:
    code: the instructions.
    arguments: what is done with each.
    results: where each comes from.
    constants: registers that are filled from the beginning.
    size: how many registers there are.
    crew: the threads that run it; None: the caller's.
  """

  code: list[Instruction]
  arguments: list[Argument]
  results: list[Result]
  constants: dict[int, jax.Array]
  size: int
  crew: Crew | None

  def __call__(self, leaves: Sequence[Any]) -> list[Any]:
    """Runs the step on its arguments' leaves."""
    registers = self._loaded(leaves)
    if self.crew is not None:
      self.crew.run(registers)
    else:
      for instruction in self.code:
        instruction.run(registers)
    return [self._result(one, registers, leaves) for one in self.results]

  def measured(self, leaves: Sequence[Any]) -> tuple[list[Any], dict[Task, float]]:
    """The same, one instruction after another, and how many seconds each task took."""
    registers, seconds = self._loaded(leaves), {}
    for one in self.code:
      values = jax.block_until_ready([registers[number] for number in one.inputs])
      begin = time.perf_counter()
      results = jax.block_until_ready(one.function(*values))
      taken = time.perf_counter() - begin
      if one.step is not None:
        seconds.update(dict.fromkeys(one.step.tasks, taken / len(one.step.tasks)))
      for number, result in zip(one.outputs, results):
        registers[number] = result
      for number in one.dead:
        registers[number] = None
    return [self._result(one, registers, leaves) for one in self.results], seconds

  def _loaded(self, leaves: Sequence[Any]) -> list[Any]:
    """Registers with the arguments in them, on the ranks that use them."""
    registers: list[Any] = [None] * self.size
    for number, array in self.constants.items():
      registers[number] = array
    moved: list[tuple[int, Any, NamedSharding]] = []
    for leaf, argument in zip(leaves, self.arguments, strict=True):
      for number, sharding in argument.uses:
        if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
          registers[number] = leaf
        elif (part := view(leaf, sharding)) is not None:
          registers[number] = part
        else:
          moved.append((number, leaf, sharding))
    if moved:
      numbers, arrays, shardings = zip(*moved)
      for number, array in zip(numbers, jax.device_put(list(arrays), list(shardings))):
        registers[number] = array
    return registers

  def _result(self, result: Result, registers: Sequence[Any], leaves: Sequence[Any]) -> Any:
    if result.argument is not None:
      return leaves[result.argument]
    if not result.registers:
      return result.constant
    parts = [registers[number] for number in result.registers]
    return parts[0] if result.sharding is None else union(parts, result.sharding)


def _sender(send: Send, compiler: Compiler) -> Callable[..., Sequence[Any]]:
  sender = compat.Sender(
    [value.aval for value, _, _ in send.places], [*map(compiler.sharding, send.arrived)]
  )
  return lambda *arrays: sender(list(arrays))


def assemble(
  linked: Linked,
  compiler: Compiler,
  executables: Mapping[Unit, Executable],
  arguments: Sequence[Value],
  results: Sequence[Atom],
  joint: Callable[[Sequence[int]], Any],
  threads: bool,
) -> Machine:
  """Gives every place a register, and every register an end.

  Args:
    linked: the step.
    compiler: knows how places lie.
    executables: of the units.
    arguments, results: those of the step.
    joint: from ranks to the mesh of all of them.
    threads: whether each rank has a thread of its own.
  """
  registers: dict[Place, int] = {}

  def register(place: Place) -> int:
    return registers.setdefault(place, len(registers))

  last: dict[Place, int] = {}
  for number, one in enumerate(linked.calls):
    inputs = one.inputs if isinstance(one, Call) else one.places
    outputs = one.outputs if isinstance(one, Call) else one.arrived
    last.update(dict.fromkeys((*inputs, *outputs), number))
  for places in linked.results.values():
    for place in places:
      last.pop(place, None)
  ends: dict[int, list[int]] = {}
  for place, number in last.items():
    ends.setdefault(number, []).append(register(place))
  code: list[Instruction] = []
  for number, one in enumerate(linked.calls):
    if isinstance(one, Call):
      function, inputs, outputs = executables[one.unit].compiled, one.inputs, one.outputs
      rank, step = one.unit.rank, one.when and one.when.step
    else:
      function, inputs, outputs = _sender(one, compiler), one.places, one.arrived
      rank, step = one.places[0][2], None
    code.append(
      Instruction(
        function,
        tuple(map(register, inputs)),
        tuple(map(register, outputs)),
        tuple(ends.get(number, ())),
        rank,
        isinstance(one, Send),
        step,
      )
    )
  uses: dict[Value, list[tuple[int, Place]]] = {}
  constants: dict[int, jax.Array] = {}
  made = {place for one in linked.calls if isinstance(one, Call) for place in one.outputs}
  made.update(place for one in linked.calls if not isinstance(one, Call) for place in one.arrived)
  for place, number in registers.items():
    if isinstance(place[0], Constant):
      constants[number] = jax.device_put(place[0].array, compiler.sharding(place))
    elif place not in made:
      uses.setdefault(place[0], []).append((number, place))
  given = {value: number for number, value in enumerate(arguments)}

  def result(atom: Atom) -> Result:
    if isinstance(atom, Literal):
      return Result(constant=jax.numpy.asarray(atom.val, atom.aval.dtype))
    if isinstance(atom, Constant):
      return Result(constant=jax.numpy.asarray(atom.array))
    if atom in given:
      return Result(argument=given[atom])
    places = linked.results[atom]
    sharding = None
    if len(places) > 1:
      spec = compiler.spec(places[0]) or PartitionSpec()
      sharding = NamedSharding(joint([rank for _, _, rank in places]), spec)
    return Result(tuple(map(register, places)), sharding)

  found = [result(atom) for atom in results]
  taken = [
    Argument(
      tuple((number, compiler.sharding(place)) for number, place in uses.get(value, ())),
      tuple(rank for _, (_, _, rank) in uses.get(value, ())),
    )
    for value in arguments
  ]
  crew = Crew(code) if threads else None
  return Machine(code, taken, found, constants, len(registers), crew)
