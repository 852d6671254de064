"""Executables: the units of a linked step, compiled, each for the devices of its rank.

A unit can be compiled as soon as it is known how its arguments lie. That is said for what comes from
outside and for sums, and follows for the rest from the units before; so several compile at once, and no
program of the whole step is ever compiled. Units that are the same program (of the middle stages of a
model, mostly) are compiled once and loaded for each rank.
"""

from __future__ import annotations

import dataclasses
import itertools
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
from flax_spmd._src.pipeline.run.call_list import Call, Unit
from flax_spmd._src.pipeline.run.lowering import Preparer
from flax_spmd._src.pipeline.run.process_transfer import processes_of
from flax_spmd.errors import PipelineError


@dataclasses.dataclass(eq=False)
class Executable:
  """A compiled unit.

  Attributes:
    unit: what it does.
    compiled: a function of a list of arrays.
    specs: how its results lie.
    donated: which of its arguments may be overwritten.
    shared: whether it was compiled for another rank.
    seconds: how long compiling it took.
  """

  unit: Unit
  compiled: Any
  specs: list[PartitionSpec]
  donated: tuple[int, ...]
  shared: bool
  seconds: float


class Compiler:
  """Compiles the units of a linked step, for devices that are here.

  Args:
    preparer: lowers them; it is told how their results lie.
    meshes: per rank, its devices.
  """

  def __init__(self, preparer: Preparer, meshes: Sequence[Mesh]):
    self._preparer, self._meshes = preparer, meshes
    self._done: dict[Unit, Executable] = {}
    self._shared: dict[str, Future[tuple[Any, Mesh]]] = {}
    self._lock = threading.Lock()
    self._several = len(set().union(*map(processes_of, meshes))) > 1
    self._number = next(_numbers)  # the same on all processes, which compile the same in the same order

  def compile(self) -> dict[Unit, Executable]:
    """All units, each as soon as it can be, as many at once as there are cores."""
    waiting = list(self._preparer.first.values())
    running: dict[Future[Executable], Unit] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
      while waiting or running:
        ready = [call for call in waiting if None not in map(self._preparer.spec, call.inputs)]
        waiting = [call for call in waiting if call not in ready]
        running.update({pool.submit(self._compile, call): call.unit for call in ready})
        if not running:
          names = ', '.join(call.unit.name for call in waiting)
          raise AssertionError(f'programs wait for each other: {names}')
        finished, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in finished:
          unit = running.pop(future)
          self._done[unit] = future.result()
          self._preparer.results[unit] = self._done[unit].specs
    return self._done

  def _compile(self, call: Call) -> Executable:
    """A unit, compiled here; of another process's, what that one says of its results."""
    owners = sorted(processes_of(self._meshes[call.unit.rank]))
    topic = f'pipeline/{self._number}/{call.unit.rank}/{call.unit.name}'
    if jax.process_index() not in owners:
      told = json.loads(processes.told(topic, owners[0]))
      return Executable(call.unit, None, [_spec_from(each) for each in told], (), False, 0.0)
    made = self._compile_here(call)
    if self._several and jax.process_index() == owners[0]:
      processes.tell(topic, json.dumps([list(spec) for spec in made.specs]))
    return made

  def _compile_here(self, call: Call) -> Executable:
    begin = time.perf_counter()
    lowered, donated = self._preparer.prepared(call)
    compiled, shared = self._once(lowered, self._meshes[call.unit.rank])
    specs = [_spec_of(sharding) for sharding in compiled.output_shardings]
    return Executable(call.unit, compiled, specs, donated, shared, time.perf_counter() - begin)

  def _once(self, lowered: Any, mesh: Mesh) -> tuple[Any, bool]:
    """The compiled program, and whether it is another rank's that was loaded for this one's devices."""
    text = compat.program_text(lowered, locations=False)
    text = text[text.index('\n') :]  # the first line has the unit's name
    mine: Future[tuple[Any, Mesh]] = Future()
    with self._lock:
      other = self._shared.setdefault(text, mine)
    if other is mine:
      try:
        compiled = lowered.compile()
      except BaseException as error:
        mine.set_exception(error)
        raise
      mine.set_result((compiled, mesh))
      return compiled, False
    compiled, there = other.result()
    if compat.is_alone(compiled, text):
      return lowered.compile(), False
    if there == mesh:
      return compiled, True
    moved = compat.moved(compiled, list(there.devices.flat), list(mesh.devices.flat))
    return (lowered.compile(), False) if moved is None else (moved, True)


_numbers = itertools.count()


def _spec_from(entries: list[Any]) -> PartitionSpec:
  return PartitionSpec(*(tuple(each) if isinstance(each, list) else each for each in entries))


def _spec_of(sharding: Any) -> PartitionSpec:
  if not isinstance(sharding, NamedSharding):
    raise PipelineError(
      f'A program of this pipeline has a result that lies as {sharding}, which names no mesh.\n'
      'Fix: take what puts it there (device_put, jit with shardings) out of the step.'
    )
  return sharding.spec
