"""Assembly: a call list and its compiled programs as instructions on numbered registers.

Every buffer of the call list becomes a register, emptied after its last reader. Each process gets the
instructions of its own ranks, and of the transfers to and from them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from flax_spmd._src import compat
from flax_spmd._src.data.host_values import put
from flax_spmd._src.pipeline.cut import equations as eq
from flax_spmd._src.pipeline.cut.equations import Constant, Value
from flax_spmd._src.pipeline.run.call_list import Buffer, Call, Send, StageProgram
from flax_spmd._src.pipeline.run.machine import DispatchThreads, Machine, MachineInstruction, Result, Use
from flax_spmd._src.pipeline.run.process_transfer import (
  CrossHostCopy,
  ProcessTransfer,
  ProcessTransfers,
  is_copied_by_jax,
)
from flax_spmd._src.pipeline.run.stage_lowering import Executable, LoweredStages
from flax_spmd._src.pipeline.run.submeshes import is_local, processes_of, submesh, view


class Assembler:
  """Assembles the lowered and compiled programs of a step into a machine, on the whole mesh and its stage axis."""

  def __init__(
    self, stages: LoweredStages, executables: Mapping[StageProgram, Executable], mesh: Mesh, axis: str
  ):
    self._stages, self._call_list, self._executables = stages, stages.call_list, executables
    self._mesh, self._axis = mesh, axis
    self._ranks: Sequence[Any] = stages.meshes
    self._local = [is_local(mesh) for mesh in self._ranks]
    self._registers: defaultdict[Buffer, int] = defaultdict(itertools.count().__next__)
    self._transfers = ProcessTransfers(mesh, axis)

  def machine(self, results: Sequence[Value], threads: bool) -> Machine:
    """The step as a machine that returns some results; with `threads`, each rank is dispatched by its own thread."""
    code = self._code()
    numbers = {value: number for number, value in enumerate(self._stages.arguments)}
    uses, constants = self._initial_registers()
    return Machine(
      code,
      [uses.get(value, []) for value in self._stages.arguments],
      [self._result(atom, numbers) for atom in results],
      constants,
      len(self._registers),
      DispatchThreads(code) if threads else None,
      self._transfers,
    )

  def _numbers(self, buffers: Sequence[Buffer]) -> tuple[int, ...]:
    """The registers of buffers of one rank; none if it belongs to another process."""
    local = buffers and self._local[buffers[0].rank]
    return tuple(map(self._registers.__getitem__, buffers)) if local else ()

  def _code(self) -> list[MachineInstruction]:
    """The instructions of this process."""
    code: list[MachineInstruction] = []
    # by register, the instruction that waits for a transfer: of those that are received, and of those that are sent
    coming: dict[int, MachineInstruction] = {}
    going: dict[int, MachineInstruction] = {}
    for number, one in enumerate(self._call_list.calls):
      donated: Iterable[int] = ()
      if isinstance(one, Call):
        function, rank, step = self._executables[one.program].compiled, one.program.rank, one.step
        donated = self._stages.programs[one.program].donated
      else:
        function, rank, step = self._sender(one), one.ranks[0], None
      if function is None:
        continue
      inputs, outputs = self._numbers(one.inputs), self._numbers(one.outputs)
      overwritten = [inputs[index] for index in donated]
      code += self._ended(coming, inputs) + self._ended(going, overwritten)
      if isinstance(function, (CrossHostCopy, ProcessTransfer)) and function.has_to_wait:
        wait = MachineInstruction(function.wait, (), outputs, (), rank, True, None)
        coming.update(dict.fromkeys(outputs, wait))
        going.update(dict.fromkeys(inputs, wait))
        outputs = ()
      dead = tuple(map(self._registers.__getitem__, self._call_list.ends.get(number, ())))
      code.append(MachineInstruction(function, inputs, outputs, dead, rank, isinstance(one, Send), step))
    return [*code, *dict.fromkeys([*coming.values(), *going.values()])]

  def _ended(
    self, transfers: dict[int, MachineInstruction], registers: Iterable[int]
  ) -> list[MachineInstruction]:
    """The instructions that wait for the transfers of some registers, which leave `transfers`."""
    waits = list(dict.fromkeys(transfers[one] for one in registers if one in transfers))
    for register in [register for register, wait in transfers.items() if wait in waits] if waits else ():
      del transfers[register]
    return waits

  def _sender(self, send: Send) -> Callable[..., Sequence[Any]] | None:
    """The function that does a transfer; None if this process takes no part in it."""
    source, target = (self._ranks[rank] for rank in send.ranks)
    avals = [buffer.value.aval for buffer in send.inputs]
    several = source != target and len(processes_of(source) | processes_of(target)) > 1
    if several and is_copied_by_jax(self._mesh, source, target, avals):
      both = zip(map(self._stages.sharding, send.inputs), map(self._stages.sharding, send.outputs))
      return CrossHostCopy(self._transfers, send.ranks[0], avals, list(both), str(send))
    if not any(self._local[rank] for rank in send.ranks):
      return None
    if several:
      specs = [self._stages.spec(buffer) for buffer in send.inputs]
      return ProcessTransfer(self._transfers, *send.ranks, avals, specs, str(send))
    sender = compat.DeviceCopy(avals, [self._stages.sharding(buffer) for buffer in send.outputs])
    return lambda *arrays: sender(list(arrays))

  def _initial_registers(self) -> tuple[dict[Value, list[Use]], dict[int, jax.Array]]:
    """The registers filled before the first instruction: with arguments, and with closed-over arrays."""
    uses: dict[Value, list[Use]] = {}
    constants: dict[int, tuple[Any, NamedSharding]] = {}
    for buffer in self._call_list.given:
      if isinstance(buffer.value, Constant) and self._local[buffer.rank]:
        sharding, array = self._stages.sharding(buffer), buffer.value.array
        part = view(array, sharding)
        constants[self._registers[buffer]] = array if part is None else part, sharding
      else:
        use = Use(self._registers[buffer], self._stages.sharding(buffer), buffer.rank)
        uses.setdefault(buffer.value, []).append(use)
    arrays, shardings = zip(*constants.values()) if constants else ((), ())
    return uses, dict(zip(constants, put(arrays, shardings)))

  def _result(self, atom: Value, numbers: Mapping[Value, int]) -> Result:
    if isinstance(atom, Constant):
      return Result(constant=jnp.asarray(atom.array))
    buffers = self._call_list.results[atom]
    if not buffers:
      return Result(argument=numbers[atom])
    spec = self._stages.spec(buffers[0])
    joint = submesh(self._mesh, self._axis, [buffer.rank for buffer in buffers])
    local = tuple(self._registers[buffer] for buffer in buffers if self._local[buffer.rank])
    return Result(local, NamedSharding(joint, spec), eq.abstract(atom))
