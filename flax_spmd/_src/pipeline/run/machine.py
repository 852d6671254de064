"""Running: a compiled step, called with arrays.

What is run was linked before: here are only registers, a loop over instructions, and the arguments'
way to the ranks that use them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from flax_spmd._src.pipeline.run.dispatch_threads import Crew
from flax_spmd._src.pipeline.run.process_transfer import is_here
from flax_spmd._src.pipeline.run.submeshes import union, view
from flax_spmd._src.pipeline.schedules.tasks import Step, Task


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


class Use(NamedTuple):
  """A register that an argument fills: how it lies there, and on which rank."""

  register: int
  sharding: Any
  rank: int


class Result(NamedTuple):
  """A result.

  Attributes:
    registers: where it is, on the ranks that are here; it is the same on each.
    sharding: how it lies, on all its ranks.
    like: its shape and dtype.
    argument: the argument that it is, by its number.
    constant: what it is, if it is always the same.
  """

  registers: tuple[int, ...] = ()
  sharding: NamedSharding | None = None
  like: Any = None
  argument: int | None = None
  constant: Any = None


@dataclasses.dataclass
class Machine:
  """A step that can be run.

  Attributes:
    code: the instructions.
    arguments: where each is used.
    results: where each comes from.
    constants: registers that are filled from the beginning.
    size: how many registers there are.
    crew: the threads that run it; None: the caller's.
    cross: makes what sends an argument from one rank to another, between processes.
  """

  code: list[Instruction]
  arguments: list[list[Use]]
  results: list[Result]
  constants: dict[int, jax.Array]
  size: int
  crew: Crew | None
  cross: Callable[[Any, NamedSharding, int], Any]

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
    for leaf, uses in zip(leaves, self.arguments, strict=True):
      for number, sharding, rank in uses:
        if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
          registers[number] = leaf
        elif (part := view(leaf, sharding)) is not None:
          registers[number] = part
        elif (crossing := self.cross(leaf, sharding, rank)) is not None:
          for array in crossing(leaf):
            registers[number] = array
        elif is_here(sharding.mesh):
          moved.append((number, leaf, sharding))
    if moved:
      numbers, arrays, shardings = zip(*moved)
      for number, array in zip(numbers, jax.device_put(list(arrays), list(shardings))):
        registers[number] = array
    return registers

  def _result(self, result: Result, registers: Sequence[Any], leaves: Sequence[Any]) -> Any:
    if result.argument is not None:
      leaf = leaves[result.argument]
      return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    if result.sharding is None:
      return result.constant
    parts = [registers[number] for number in result.registers]
    if len(parts) == 1 and parts[0].sharding.device_set == result.sharding.device_set:
      return parts[0]
    return union(parts, result.sharding, result.like)
