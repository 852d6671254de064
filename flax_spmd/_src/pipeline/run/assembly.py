"""Assembling: a linked step and its compiled programs as a machine of registers.

Each process gets the instructions of its own ranks, and those of the transfers that it has a part in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.pipeline.cut import equations as eq
from flax_spmd._src.pipeline.cut.equations import Constant, Value
from flax_spmd._src.pipeline.run.call_list import Call, Linked, Place, Send, Unit
from flax_spmd._src.pipeline.run.compilation import Executable
from flax_spmd._src.pipeline.run.dispatch_threads import Crew
from flax_spmd._src.pipeline.run.lowering import Preparer
from flax_spmd._src.pipeline.run.machine import Instruction, Machine, Result, Use
from flax_spmd._src.pipeline.run.process_transfer import Crossing, is_here, processes_of
from flax_spmd._src.pipeline.run.submeshes import submesh


class Assembler:
  """Gives every place a register, and every register an end.

  Args:
    linked: the step.
    preparer: knows how places lie.
    executables: of the units.
    mesh, axis: the whole mesh, and the axis of the stages.
  """

  def __init__(
    self,
    linked: Linked,
    preparer: Preparer,
    executables: Mapping[Unit, Executable],
    mesh: Mesh,
    axis: str,
  ):
    self._linked, self._preparer, self._executables = linked, preparer, executables
    self._mesh, self._axis = mesh, axis
    self._ranks = [submesh(mesh, axis, [rank]) for rank in range(mesh.shape[axis])]
    self._registers: dict[Place, int] = {}

  def machine(self, arguments: Sequence[Value], results: Sequence[Value], threads: bool) -> Machine:
    """The step as a machine.

    Args:
      arguments, results: those of the step.
      threads: whether each rank has a thread of its own.
    """
    code = self._code()
    given = {value: number for number, value in enumerate(arguments)}
    uses, constants = self._outside()
    return Machine(
      code,
      [uses.get(value, []) for value in arguments],
      [self._result(atom, given) for atom in results],
      constants,
      len(self._registers),
      Crew(code) if threads else None,
      functools.partial(_crossing, self._mesh, self._axis),
    )

  def _register(self, place: Place) -> int:
    return self._registers.setdefault(place, len(self._registers))

  def _here(self, place: Place) -> bool:
    return is_here(self._ranks[place[2]])

  def _code(self) -> list[Instruction]:
    """The instructions of this process."""
    ends = self._ends()
    code = []
    for number, one in enumerate(self._linked.calls):
      dead = tuple(map(self._register, ends.get(number, ())))
      if isinstance(one, Call):
        inputs, outputs, rank = one.inputs, one.outputs, one.unit.rank
        function, step = self._executables[one.unit].compiled, one.when and one.when.step
      else:
        inputs, outputs, rank = one.places, one.arrived, one.places[0][2]
        function, step = self._sender(one), None
      if function is not None:
        inputs, outputs = (
          tuple(self._register(place) for place in places if self._here(place))
          for places in (inputs, outputs)
        )
        code.append(Instruction(function, inputs, outputs, dead, rank, isinstance(one, Send), step))
    return code

  def _ends(self) -> dict[int, list[Place]]:
    """The places that nobody reads any more after a call or send, by its number."""
    last: dict[Place, int] = {}
    for number, one in enumerate(self._linked.calls):
      inputs, outputs = (one.inputs, one.outputs) if isinstance(one, Call) else (one.places, one.arrived)
      last.update(dict.fromkeys((*inputs, *outputs), number))
    for place in (place for places in self._linked.results.values() for place in places):
      last.pop(place, None)
    ends: dict[int, list[Place]] = {}
    for place, number in last.items():
      ends.setdefault(number, []).append(place)
    return ends

  def _sender(self, send: Send) -> Callable[..., Sequence[Any]] | None:
    """What does a transfer; None if this process has no part in it."""
    source, target = self._ranks[send.places[0][2]], self._ranks[send.rank]
    avals = [value.aval for value, _, _ in send.places]
    if len(processes_of(source) | processes_of(target)) > 1:
      if not is_here(source) and not is_here(target):
        return None
      specs = [self._preparer.spec(place) or PartitionSpec() for place in send.places]
      return Crossing(self._mesh, self._axis, send.places[0][2], send.rank, avals, specs)
    if not is_here(source):
      return None
    sender = compat.Sender(avals, [self._preparer.sharding(place) for place in send.arrived])
    return lambda *arrays: sender(list(arrays))

  def _outside(self) -> tuple[dict[Value, list[Use]], dict[int, jax.Array]]:
    """Which registers arguments fill, and which closed-over arrays do."""
    made = {
      place
      for one in self._linked.calls
      for place in (one.outputs if isinstance(one, Call) else one.arrived)
    }
    used = dict.fromkeys(
      place for one in self._linked.calls if isinstance(one, Call) for place in one.inputs
    )
    uses: dict[Value, list[Use]] = {}
    constants: dict[int, jax.Array] = {}
    for place in used:
      if isinstance(place[0], Constant) and self._here(place):
        sharding = self._preparer.sharding(place)
        constants[self._register(place)] = jax.device_put(place[0].array, sharding)
      elif place not in made:
        use = Use(self._register(place), self._preparer.sharding(place), place[2])
        uses.setdefault(place[0], []).append(use)
    return uses, constants

  def _result(self, atom: Value, given: Mapping[Value, int]) -> Result:
    if isinstance(atom, Constant):
      return Result(constant=jnp.asarray(atom.array))
    if atom in given:
      return Result(argument=given[atom])
    places = self._linked.results[atom]
    spec = self._preparer.spec(places[0]) or PartitionSpec()
    joint = submesh(self._mesh, self._axis, [rank for _, _, rank in places])
    here = tuple(self._register(place) for place in places if self._here(place))
    return Result(here, NamedSharding(joint, spec), eq.abstract(atom))


def _crossing(mesh: Mesh, axis: str, leaf: Any, sharding: Any, rank: int) -> Crossing | None:
  """What sends an argument to a rank from one that is another process's; None if it need not be."""
  if not isinstance(leaf, jax.Array) or leaf.sharding.device_set >= sharding.device_set:
    return None
  for source in range(mesh.shape[axis]):
    there = submesh(mesh, axis, [source])
    if leaf.sharding.device_set >= set(there.devices.flat):
      several = len(processes_of(there) | processes_of(sharding.mesh)) > 1
      part = several and (is_here(there) or is_here(sharding.mesh))
      return Crossing(mesh, axis, source, rank, [leaf], [sharding.spec]) if part else None
  return None
