"""Lowering and compilation of stage programs: each program of a call list, for arguments with known shardings.

    step = layout.pipeline_jit(train_step)                 # the layout's mesh may be abstract
    stages = step.lower(state, batch).offline('cuda')      # lowered for GPUs; nothing is compiled

The specs of arguments and of gradient sums are given. Those of a program's other results follow from the program,
and the next program depends on them. Shardy makes the choice, and its passes ship with JAX: they run alone in
milliseconds. So all programs are lowered one after the other, before any of them is compiled. The compiler is then
required to keep these specs; it simplifies a program first, and could choose others.

The programs compile in parallel, while later ones are lowered; the whole step never compiles as one. Equal
programs, as of a model's middle stages, compile once and load on each rank.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src.mesh import MeshLike
from flax_spmd._src.pipeline.cut import equations as eq
from flax_spmd._src.pipeline.cut.equations import Value
from flax_spmd._src.pipeline.run.call_list import Buffer, Call, CallList, StageProgram
from flax_spmd._src.pipeline.run.submeshes import is_local
from flax_spmd._src.rules.clauses import HOST_MEMORY


class LoweredStage(NamedTuple):
  """A program ready to compile.

  Attributes:
    lowered: the `jax.stages.Lowered`.
    donated: indices of the arguments that may be overwritten.
    specs: specs of the results.
  """

  lowered: Any
  donated: tuple[int, ...]
  specs: list[PartitionSpec]


class Executable(NamedTuple):
  """A compiled program.

  Attributes:
    compiled: a function of arrays; None if the rank belongs to another process.
    shared: whether it was compiled for another rank.
  """

  compiled: Any = None
  shared: bool = False


class LoweredStages:
  """The programs of a call list, lowered for the meshes of their ranks.

  Args:
    call_list: the step.
    meshes: mesh of each rank; abstract if nothing is compiled.
    specs: the specs that are fixed beforehand: arguments, sums, and the values sharded like them.
    arguments: arguments of the step, in the order of their leaves.
    donatable: arguments that may be overwritten.

  Attributes:
    call_list, meshes, arguments: see above.
    programs: the programs that are lowered, in the order of the step.
  """

  def __init__(
    self,
    call_list: CallList,
    meshes: Sequence[MeshLike],
    specs: Mapping[Value, PartitionSpec],
    arguments: Sequence[Value],
    donatable: set[Value],
  ):
    self.call_list, self.meshes, self.arguments = call_list, meshes, arguments
    self.programs: dict[StageProgram, LoweredStage] = {}
    self._specs, self._donatable = dict(specs), donatable
    self._shardings: dict[tuple[PartitionSpec, int, bool], NamedSharding] = {}
    self._origin: dict[Buffer, Value] = {}  # the value that the programs of a buffer compute
    for one in call_list.calls:
      for number, buffer in enumerate(one.outputs):
        if isinstance(one, Call):
          inner = one.program.outputs[number]
          self._origin[buffer], _ = one.program.ports.get(inner, (buffer.value, 0))
        else:
          self._origin[buffer] = self._origin.get(one.inputs[number], buffer.value)
    self._last = _used_last(call_list, donatable)

  def lower(self, platform: str | None = None) -> Iterator[tuple[StageProgram, LoweredStage]]:
    """Lowers the programs that are not lowered yet; returns all, in the order of their first calls.

    Args:
      platform: the platform to lower for; None: that of the meshes' devices.
    """
    for program, call in self.call_list.first_calls.items():
      if program not in self.programs:
        self.programs[program] = self._lower(call, platform)
      yield program, self.programs[program]

  def compile(self) -> dict[StageProgram, Executable]:
    """Lowers all programs, and compiles those of this process's ranks, as many in parallel as there are cores."""
    first: dict[str, tuple[Future[Executable], Mesh]] = {}
    running: dict[StageProgram, Future[Executable]] = {}
    with compat.shardy(), ThreadPoolExecutor(os.cpu_count()) as pool:
      compile_ = compat.with_settings(_compiled)
      for program, stage in self.lower():
        mesh: Any = self.meshes[program.rank]
        if is_local(mesh):
          text = stage.lowered.as_text()
          text = text[text.index('\n') :]  # the first line has the program's name
          compilation = compat.separate_compilation(stage.lowered)
          running[program] = pool.submit(compile_, compilation, text, mesh, first.get(text))
          first.setdefault(text, (running[program], mesh))
      done = {program: future.result() for program, future in running.items()}
    return {program: done.get(program, Executable()) for program in self.programs}

  def sharding(self, buffer: Buffer) -> NamedSharding:
    """The sharding of a buffer, on the mesh of its rank."""
    key = self.spec(buffer), *buffer.memory
    if key not in self._shardings:
      spec, rank, on_host = key
      memory = HOST_MEMORY if on_host else None
      self._shardings[key] = NamedSharding(self.meshes[rank], spec, memory_kind=memory)
    return self._shardings[key]

  def spec(self, buffer: Buffer) -> PartitionSpec:
    """The spec of a buffer, whose program is lowered."""
    spec = self._known_spec(buffer)
    return PartitionSpec() if spec is None else spec  # that of a closed-over array

  def _known_spec(self, buffer: Buffer) -> PartitionSpec | None:
    """The spec of a buffer that is given, or that another program of its value has; None if a program may choose it."""
    spec = self._specs.get(buffer.value)
    return self._specs.get(self._origin.get(buffer, buffer.value)) if spec is None else spec

  def _lower(self, call: Call, platform: str | None) -> LoweredStage:
    results = [self._known_spec(buffer) for buffer in call.outputs]
    if not call.inputs:  # then only the results place it on its devices
      results = [spec or PartitionSpec() for spec in results]
    donated = self._donated(call, results)
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
    jitted = jax.jit(
      _function(program),
      out_shardings=[None if spec is None else NamedSharding(mesh, spec) for spec in results],
      donate_argnums=donated,
      keep_unused=True,
    )
    # a block around the call may have set a mesh of another size
    with compat.without_mesh(), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      traced = jitted.trace(*arguments)
      if platform is None:
        lowered = traced.lower()
      else:
        lowered = compat.lower_for_target(traced, platform, mesh.abstract_mesh)
    specs = compat.required_results(lowered, mesh)
    for buffer, spec in zip(call.outputs, specs, strict=True):
      self._specs.setdefault(self._origin[buffer], spec)
    return LoweredStage(lowered, donated, specs)

  def _donated(self, call: Call, results: Sequence[PartitionSpec | None]) -> tuple[int, ...]:
    """The inputs whose memory a result can reuse. The caller's arguments come first: others are freed anyway."""
    program, donated = call.program, []
    room = Counter(
      (value.aval.shape, value.aval.dtype, spec)
      for value, spec in zip(program.outputs, results, strict=True)
    )
    free = self._last[program]
    for number in sorted(free, key=lambda at: (call.inputs[at].value not in self._donatable, at)):
      aval = program.inputs[number].aval
      for spec in (self.spec(call.inputs[number]), None):  # None: the compiler chooses
        if room[aval.shape, aval.dtype, spec]:
          room[aval.shape, aval.dtype, spec] -= 1
          donated.append(number)
          break
    return tuple(sorted(donated))


def _function(program: StageProgram) -> Callable[..., list[Any]]:
  """A program as a function of its inputs."""

  def function(*arrays):
    return eq.run(program.equations, dict(zip(program.inputs, arrays, strict=True)), program.outputs)

  function.__name__ = program.name
  return function


def _compiled(
  compilation: Callable[[], Any], text: str, mesh: Mesh, first: tuple[Future[Executable], Mesh] | None
) -> Executable:
  """Compiles a program, or loads the first one with this text for its own rank, where that is possible."""
  if first is not None:
    compiled, source = first[0].result().compiled, first[1]
    if not compat.needs_host_objects(compiled, text):
      same = source == mesh
      devices = list(source.devices.flat), list(mesh.devices.flat)
      compiled = compiled if same else compat.reloaded(compiled, *devices)
      if compiled is not None:
        return Executable(compiled, True)
  return Executable(compilation(), False)


def _used_last(call_list: CallList, donatable: set[Value]) -> dict[StageProgram, set[int]]:
  """Per program, the indices of the inputs that have no later reader, in any of its calls."""
  used_last: dict[StageProgram, set[int]] = {}
  for number, one in enumerate(call_list.calls):
    if isinstance(one, Call):
      ends = {
        buffer
        for buffer in call_list.ends.get(number, ())
        if buffer in call_list.written or buffer.value in donatable
      }
      used_last[one.program] = {
        index
        for index in used_last.get(one.program, range(len(one.inputs)))
        if one.inputs[index] in ends and one.inputs.count(one.inputs[index]) == 1
      }
  return used_last
