"""Compilation of stage programs: each program of a call list, compiled for the devices of its rank.

The programs compile in parallel, while later ones are lowered; the whole step never compiles as one. Equal
programs, as of a model's middle stages, compile once and load on each rank.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from jax.sharding import Mesh

from flax_spmd._src import compat
from flax_spmd._src.pipeline.run.call_list import StageProgram
from flax_spmd._src.pipeline.run.stage_lowering import LoweredStages
from flax_spmd._src.pipeline.run.submeshes import is_local


class Executable(NamedTuple):
  """A compiled program.

  Attributes:
    program: its source.
    compiled: a function of arrays; None if the rank belongs to another process.
    shared: whether it was compiled for another rank.
  """

  program: StageProgram
  compiled: Any
  shared: bool


def compile_stages(stages: LoweredStages) -> dict[StageProgram, Executable]:
  """Lowers all programs, and compiles those of this process's ranks, as many in parallel as there are cores."""
  first: dict[str, tuple[Future[Executable], Mesh]] = {}
  running: dict[StageProgram, Future[Executable]] = {}
  with compat.shardy(), ThreadPoolExecutor(os.cpu_count()) as pool:
    compile_ = compat.with_settings(_compile)
    for program, stage in stages.lower():
      mesh: Any = stages.meshes[program.rank]
      if is_local(mesh):
        text = stage.lowered.as_text()
        text = text[text.index('\n') :]  # the first line has the program's name
        running[program] = pool.submit(compile_, stages, program, text, first.get(text))
        first.setdefault(text, (running[program], mesh))
    done = {program: future.result() for program, future in running.items()}
  return {program: done.get(program) or Executable(program, None, False) for program in stages.programs}


def _compile(
  stages: LoweredStages,
  program: StageProgram,
  text: str,
  first: tuple[Future[Executable], Mesh] | None,
) -> Executable:
  """Compiles a program, or loads the first one with this text for its own rank."""
  mesh: Any = stages.meshes[program.rank]
  compiled = None if first is None else _loaded(first[0].result().compiled, first[1], mesh, text)
  if compiled is not None:
    return Executable(program, compiled, True)
  return Executable(program, stages.programs[program].lowered.compile(), False)


def _loaded(compiled: Any, source: Mesh, mesh: Mesh, text: str) -> Any:
  """A compiled program on another mesh, or None if it has to be compiled anew."""
  if compat.needs_host_objects(compiled, text):
    return None
  if source == mesh:
    return compiled
  return compat.reloaded(compiled, list(source.devices.flat), list(mesh.devices.flat))
