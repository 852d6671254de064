"""Lowering of stage programs: each program of a call list, lowered for arguments with known shardings.

The specs of arguments and of gradient sums are given. The compiler chooses the specs of a program's
results, which other programs read. So programs are lowered in order, each once the specs of its inputs
are known: `stage_compilation` takes them from compiled programs, `offline` from Shardy's propagation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from flax_spmd._src.mesh import MeshLike
from flax_spmd._src.pipeline.cut import equations as eq
from flax_spmd._src.pipeline.cut.equations import Value
from flax_spmd._src.pipeline.run.call_list import Buffer, Call, CallList, StageProgram


class LoweredStage(NamedTuple):
  """A program ready to compile.

  Attributes:
    lowered: the `jax.stages.Lowered`.
    donated: indices of the arguments that may be overwritten.
  """

  lowered: Any
  donated: tuple[int, ...]


class StageLowerer:
  """Lowers the programs of a call list.

  Args:
    call_list: the step.
    meshes: mesh of each rank; abstract if nothing is compiled.
    specs: the specs that are fixed beforehand: arguments, sums, and the values sharded like them.
    donatable: arguments that may be overwritten.

  Attributes:
    first: the first call of each program, in the order of the step.
    results: specs of the results of each program. The caller adds them as they become known.
  """

  def __init__(
    self,
    call_list: CallList,
    meshes: Sequence[MeshLike],
    specs: Mapping[Value, PartitionSpec],
    donatable: set[Value],
  ):
    self.meshes = meshes
    self.first: dict[StageProgram, Call] = {}
    self.results: dict[StageProgram, list[PartitionSpec]] = {}
    self._given, self._donatable = specs, donatable
    self._origin: dict[Buffer, tuple[StageProgram, int]] = {}
    for one in call_list.calls:
      if isinstance(one, Call):
        self.first.setdefault(one.program, one)
        self._origin.update((buffer, (one.program, number)) for number, buffer in enumerate(one.outputs))
      else:
        self._origin.update((new, self._origin[old]) for old, new in zip(one.inputs, one.outputs))
    self._last = _used_last(call_list, donatable)

  def spec(self, buffer: Buffer) -> PartitionSpec | None:
    """The spec of a buffer; None while it is unknown."""
    if buffer.value in self._given:
      return self._given[buffer.value]
    program, number = self._origin.get(buffer, (None, 0))
    if program is None:  # a closed-over array
      return PartitionSpec()
    return self.results[program][number] if program in self.results else None

  def sharding(self, buffer: Buffer) -> NamedSharding:
    """The sharding of a buffer, whose spec has to be known, on the mesh of its rank."""
    return NamedSharding(self.meshes[buffer.rank], self.spec(buffer) or PartitionSpec())

  def lower(self, call: Call, platform: str | None = None) -> LoweredStage:
    """Lowers the program of a call whose input specs are known.

    Args:
      call: the call.
      platform: the platform to lower for; None: that of the mesh's devices.
    """
    program, mesh = call.program, self.meshes[call.program.rank]
    arguments = [
      jax.ShapeDtypeStruct(
        value.aval.shape,
        value.aval.dtype,
        sharding=self.sharding(buffer),
        weak_type=getattr(value.aval, 'weak_type', False),
      )
      for value, buffer in zip(program.inputs, call.inputs, strict=True)
    ]
    old = {buffer.value: self.spec(buffer) for buffer in call.inputs}  # a new version keeps its spec
    results = [old.get(buffer.value, self._given.get(buffer.value)) for buffer in call.outputs]
    if not arguments:  # then only the results place it on its devices
      results = [spec or PartitionSpec() for spec in results]
    donated = self._donated(call, results)
    jitted = jax.jit(
      _function(program),
      out_shardings=[None if spec is None else NamedSharding(mesh, spec) for spec in results],
      donate_argnums=donated,
      keep_unused=True,
    )
    platforms = None if platform is None else (platform,)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      lowered = jitted.trace(*arguments).lower(lowering_platforms=platforms)
    return LoweredStage(lowered, donated)

  def _donated(self, call: Call, results: Sequence[PartitionSpec | None]) -> tuple[int, ...]:
    program = call.program
    free = [
      (number, program.inputs[number].aval, self.sharding(buffer).spec, buffer.value in self._donatable)
      for number, buffer in enumerate(call.inputs)
      if number in self._last[program]
    ]
    return _donations(
      free, [(value.aval, spec) for value, spec in zip(program.outputs, results, strict=True)]
    )


def _function(program: StageProgram) -> Callable[..., list[Any]]:
  """A program as a function of its inputs."""

  def function(*arrays):
    return eq.run(program.equations, dict(zip(program.inputs, arrays, strict=True)), program.outputs)

  function.__name__ = program.name
  return function


def _used_last(call_list: CallList, donatable: set[Value]) -> dict[StageProgram, set[int]]:
  """Per program, the indices of the inputs that have no later reader, in any of its calls."""
  used_last: dict[StageProgram, set[int]] = {}
  for number, one in enumerate(call_list.calls):
    if isinstance(one, Call):
      free = {
        index
        for index, buffer in enumerate(one.inputs)
        if call_list.last_use[buffer] == number
        and buffer not in call_list.returned
        and (buffer in call_list.written or buffer.value in donatable)
        and one.inputs.count(buffer) == 1
      }
      used_last[one.program] = used_last.get(one.program, free) & free
  return used_last


def _donations(
  free: Sequence[tuple[int, Any, PartitionSpec, bool]], results: Sequence[tuple[Any, Any]]
) -> tuple[int, ...]:
  """The free arguments whose memory a result can reuse. The caller's come first: others are freed
  anyway.

  Args:
    free: index, aval, spec, and whether it is the caller's, of each free argument.
    results: aval and spec of each result; None where the compiler chooses the spec.
  """
  room = Counter((aval.shape, aval.dtype, spec) for aval, spec in results)
  donated = []
  for number, aval, spec, _ in sorted(free, key=lambda one: (not one[3], one[0])):
    for result_spec in (spec, None):
      if room[aval.shape, aval.dtype, result_spec]:
        room[aval.shape, aval.dtype, result_spec] -= 1
        donated.append(number)
        break
  return tuple(sorted(donated))
