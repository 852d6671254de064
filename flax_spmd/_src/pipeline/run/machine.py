"""Register machine: runs an assembled step on arrays.

A step is a fixed list of instructions. Each reads arrays from numbered registers, dispatches a program
or a transfer, and writes the results to other registers. Everything else was decided before; a run only
puts the arguments on the ranks that use them, loops over the instructions, and collects the results.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from flax_spmd._src import compat
from flax_spmd._src.data.host_values import put
from flax_spmd._src.pipeline.run.process_transfer import ProcessTransfers
from flax_spmd._src.pipeline.run.submeshes import is_local, union, view
from flax_spmd._src.pipeline.schedules.tasks import Step, Task


class MachineInstruction(NamedTuple):
  """A program call or a transfer, on registers.

  Attributes:
    function: a function from arrays to arrays.
    inputs, outputs: numbers of the registers that it reads and writes.
    dead: registers that have no later reader; they are emptied.
    rank: the rank that runs the program, or sends.
    sends: whether it is a transfer, or waits for one.
    step: the tasks that it runs; None outside the loop.
  """

  function: Callable[..., Sequence[Any]]
  inputs: tuple[int, ...]
  outputs: tuple[int, ...]
  dead: tuple[int, ...]
  rank: int
  sends: bool
  step: Step | None

  def run(self, registers: list[Any]) -> Sequence[Any]:
    """Executes the instruction on the registers; returns its results."""
    results = self.function(*[registers[number] for number in self.inputs])
    for number, result in zip(self.outputs, results):
      registers[number] = result
    for number in self.dead:
      registers[number] = None
    return results


class DispatchThreads:
  """One thread for each rank, so that ranks overlap on the CPU.

  There, dispatching a small program runs it, and so does dispatching one with Python callbacks. A thread waits for
  transfers from other ranks before it dispatches their reader.

  Args:
    code: instructions of all ranks, each after those that it depends on.
  """

  def __init__(self, code: Sequence[MachineInstruction]):
    self._parts: dict[int, list[MachineInstruction]] = defaultdict(list)  # by rank
    for one in code:
      self._parts[one.rank].append(one)
    self._sent = [number for one in code if one.sends for number in one.outputs]
    self._pool = ThreadPoolExecutor(len(self._parts), thread_name_prefix='pipeline')

  def run(self, registers: list[Any]) -> None:
    """Runs all instructions once.

    Raises:
      Exception: the first one raised in any thread.
    """
    arrived = {number: threading.Event() for number in self._sent}
    failed: list[BaseException] = []

    def work(part: Sequence[MachineInstruction]) -> None:
      try:
        for instruction in part:
          for number in arrived.keys() & instruction.inputs:
            arrived[number].wait()
          if failed:
            return
          instruction.run(registers)
          for number in arrived.keys() & instruction.outputs:
            arrived[number].set()
      except BaseException as error:
        failed.append(error)
      finally:
        if failed:
          for one in arrived.values():
            one.set()

    with_settings = compat.with_settings(work)
    for future in [self._pool.submit(with_settings, part) for part in self._parts.values()]:
      future.result()
    if failed:
      raise failed[0]


class Use(NamedTuple):
  """A register to fill with an argument, with its rank and sharding there."""

  register: int
  sharding: Any
  rank: int


class Result(NamedTuple):
  """The source of a result: registers, an argument or a constant.

  Attributes:
    registers: one register for each of this process's ranks that has the result.
    sharding: its sharding over the devices of all its ranks.
    like: its shape and dtype.
    argument: number of the argument that it is, if this stays where it is.
    constant: the array, if it does not depend on the arguments.
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
    arguments: the registers of each argument.
    results: the source of each result.
    constants: registers that are filled once, with closed-over arrays.
    size: number of registers.
    threads: the dispatching threads; None: the caller's thread dispatches everything.
    transfers: what the transfers between processes share.
  """

  code: list[MachineInstruction]
  arguments: list[list[Use]]
  results: list[Result]
  constants: dict[int, jax.Array]
  size: int
  threads: DispatchThreads | None
  transfers: ProcessTransfers

  def __call__(self, leaves: Sequence[Any]) -> list[Any]:
    """Runs the step on its arguments' leaves."""
    registers = self._loaded(leaves)
    if self.threads is not None:
      self.threads.run(registers)
    else:
      for instruction in self.code:
        instruction.run(registers)
    return [self._result(one, registers, leaves) for one in self.results]

  def measure(self, leaves: Sequence[Any]) -> tuple[list[Any], dict[Task, float]]:
    """Runs the step one instruction at a time; returns the results and the seconds per task."""
    registers, seconds = self._loaded(leaves), {}
    for one in self.code:
      if one.sends:
        one.run(registers)  # its reader waits; between processes the transfer does, under the watch
        continue
      jax.block_until_ready([registers[number] for number in one.inputs])
      begin = time.perf_counter()
      jax.block_until_ready(one.run(registers))
      taken = time.perf_counter() - begin
      if one.step is not None:
        seconds.update(dict.fromkeys(one.step.tasks, taken / len(one.step.tasks)))
    return [self._result(one, registers, leaves) for one in self.results], seconds

  def _loaded(self, leaves: Sequence[Any]) -> list[Any]:
    """Registers filled with the arguments, on the ranks that use them."""
    registers: list[Any] = [None] * self.size
    for number, array in self.constants.items():
      registers[number] = array
    to_put: list[tuple[int, Any, NamedSharding]] = []
    for leaf, uses in zip(leaves, self.arguments, strict=True):
      for number, sharding, rank in uses:
        if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
          registers[number] = leaf
        elif (part := view(leaf, sharding)) is not None:
          registers[number] = part
        elif (transfer := self.transfers.of_argument(leaf, sharding, rank)) is not None:
          for array in transfer(leaf) or transfer.wait():
            registers[number] = array
        elif is_local(sharding.mesh):
          to_put.append((number, leaf, sharding))
    if to_put:
      numbers, arrays, shardings = zip(*to_put)
      for number, array in zip(numbers, put(arrays, shardings)):
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
