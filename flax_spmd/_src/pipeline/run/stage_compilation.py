"""Compilation of stage programs: each program of a call list, compiled for the devices of its rank.

A program compiles as soon as the specs of its inputs are known; those it reads from other programs are
known once these are compiled. So independent programs compile in parallel, and the whole step never
compiles as one. Equal programs, as of a model's middle stages, compile once and load on each rank.
"""

from __future__ import annotations

import contextvars
import dataclasses
import json
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_spmd._src import compat
from flax_spmd._src import multihost as processes
from flax_spmd._src.pipeline.run.call_list import Call, StageProgram
from flax_spmd._src.pipeline.run.stage_lowering import StageLowerer
from flax_spmd._src.pipeline.run.submeshes import processes_of
from flax_spmd.errors import PipelineError


@dataclasses.dataclass(eq=False)
class Executable:
  """A compiled program.

  Attributes:
    program: its source.
    compiled: a function of arrays; None if the rank belongs to another process.
    specs: specs of its results.
    donated: indices of the arguments that may be overwritten.
    shared: whether it was compiled for another rank.
    seconds: compilation time in seconds.
  """

  program: StageProgram
  compiled: Any
  specs: list[PartitionSpec]
  donated: tuple[int, ...]
  shared: bool
  seconds: float


class StageCompiler:
  """Compiles the programs of a call list.

  Args:
    lowerer: lowers the programs; receives the specs of their results.
    meshes: mesh of each rank.
  """

  def __init__(self, lowerer: StageLowerer, meshes: Sequence[Mesh]):
    self._lowerer, self._meshes = lowerer, meshes
    self._numbers = {program: number for number, program in enumerate(lowerer.first)}
    self._done: dict[StageProgram, Executable] = {}
    self._shared: dict[str, Future[tuple[Any, Mesh]]] = {}
    self._lock = threading.Lock()
    self._several = len(set().union(*map(processes_of, meshes))) > 1

  def compile(self) -> dict[StageProgram, Executable]:
    """Compiles all programs, as many in parallel as there are cores."""
    waiting = list(self._lowerer.first.values())
    running: dict[Future[Executable], StageProgram] = {}
    compile_ = compat.with_settings(self._compile)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
      while waiting or running:
        ready = [call for call in waiting if None not in map(self._lowerer.spec, call.inputs)]
        waiting = [call for call in waiting if call not in ready]
        for call in ready:  # each thread is in the joint call of this one
          running[pool.submit(contextvars.copy_context().run, compile_, call)] = call.program
        if not running:
          names = ', '.join(call.program.name for call in waiting)
          raise AssertionError(f'programs wait for each other: {names}')
        finished, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in finished:
          program = running.pop(future)
          self._done[program] = future.result()
          self._lowerer.results[program] = self._done[program].specs
    return self._done

  def _compile(self, call: Call) -> Executable:
    """Compiles a program; for another process's rank, receives the specs of its results instead."""
    owners = sorted(processes_of(self._meshes[call.program.rank]))
    topic = str(self._numbers[call.program])
    if jax.process_index() not in owners:
      specs = [_spec_from(each) for each in json.loads(processes.received(topic, owners[0]))]
      return Executable(call.program, None, specs, (), False, 0.0)
    executable = self._compile_here(call)
    if self._several and jax.process_index() == owners[0]:
      processes.report(topic, json.dumps([list(spec) for spec in executable.specs]))
    return executable

  def _compile_here(self, call: Call) -> Executable:
    begin = time.perf_counter()
    lowered, donated = self._lowerer.lower(call)
    compiled, shared = self._once(lowered, self._meshes[call.program.rank])
    specs = [_spec_of(sharding) for sharding in compiled.output_shardings]
    return Executable(call.program, compiled, specs, donated, shared, time.perf_counter() - begin)

  def _once(self, lowered: Any, mesh: Mesh) -> tuple[Any, bool]:
    """The compiled program, and whether it was compiled for another rank and loaded for this one."""
    text = compat.program_text(lowered, locations=False)
    text = text[text.index('\n') :]  # the first line has the program's name
    own: Future[tuple[Any, Mesh]] = Future()
    with self._lock:
      first = self._shared.setdefault(text, own)
    if first is own:
      try:
        compiled = lowered.compile()
      except BaseException as error:
        own.set_exception(error)
        raise
      own.set_result((compiled, mesh))
      return compiled, False
    compiled, source_mesh = first.result()
    if compat.needs_host_objects(compiled, text):
      return lowered.compile(), False
    if source_mesh == mesh:
      return compiled, True
    moved = compat.reloaded(compiled, list(source_mesh.devices.flat), list(mesh.devices.flat))
    return (lowered.compile(), False) if moved is None else (moved, True)


def _spec_from(entries: list[Any]) -> PartitionSpec:
  return PartitionSpec(*(tuple(each) if isinstance(each, list) else each for each in entries))


def _spec_of(sharding: Any) -> PartitionSpec:
  if not isinstance(sharding, NamedSharding):
    raise PipelineError(
      f'A program of this pipeline has a result with the sharding {sharding}, which has no mesh.\n'
      'Fix: take the call that sets it (device_put, jit with shardings) out of the step.'
    )
  return sharding.spec
