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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_spmd import compat, processes
from flax_spmd.errors import PipelineError
from flax_spmd.pipeline import equations as eq
from flax_spmd.pipeline.between import processes_of
from flax_spmd.pipeline.equations import Value
from flax_spmd.pipeline.linking import Call, Linked, Place, Unit


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
  """Compiles the units of a linked step.

  Args:
    linked: the step.
    meshes: per rank, its devices.
    specs: how values lie, as far as it is known: arguments, sums, and what is to lie like them.
    donatable: arguments that may be overwritten.
  """

  def __init__(
    self,
    linked: Linked,
    meshes: Sequence[Mesh],
    specs: Mapping[Value, PartitionSpec],
    donatable: set[Value],
  ):
    self._meshes, self._given = meshes, specs
    self._first: dict[Unit, Call] = {}
    self._origin: dict[Place, tuple[Unit, int]] = {}
    for one in linked.calls:
      if isinstance(one, Call):
        self._first.setdefault(one.unit, one)
        self._origin.update((place, (one.unit, number)) for number, place in enumerate(one.outputs))
      else:
        self._origin.update((new, self._origin[old]) for old, new in zip(one.places, one.arrived))
    self._last, self._donatable = _used_last(linked, donatable), donatable
    self._done: dict[Unit, Executable] = {}
    self._shared: dict[str, Future[tuple[Any, Mesh]]] = {}
    self._lock = threading.Lock()
    self._several = len(set().union(*map(processes_of, meshes))) > 1
    self._number = next(_numbers)  # the same on all processes, which compile the same in the same order

  def spec(self, place: Place) -> PartitionSpec | None:
    """How a place lies; None while that is not known."""
    if place[0] in self._given:
      return self._given[place[0]]
    unit, number = self._origin.get(place, (None, 0))
    if unit is None:  # a closed-over array
      return PartitionSpec()
    return self._done[unit].specs[number] if unit in self._done else None

  def sharding(self, place: Place) -> NamedSharding:
    """The same, of a place that is known, on the devices of its rank."""
    return NamedSharding(self._meshes[place[2]], self.spec(place) or PartitionSpec())

  def compile(self) -> dict[Unit, Executable]:
    """All units, each as soon as it can be, as many at once as there are cores."""
    waiting = list(self._first.values())
    running: dict[Future[Executable], Unit] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
      while waiting or running:
        ready = [call for call in waiting if None not in map(self.spec, call.inputs)]
        waiting = [call for call in waiting if call not in ready]
        running.update({pool.submit(self._compile, call): call.unit for call in ready})
        if not running:
          names = ', '.join(call.unit.name for call in waiting)
          raise AssertionError(f'programs wait for each other: {names}')
        finished, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in finished:
          self._done[running.pop(future)] = future.result()
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
    unit, mesh = call.unit, self._meshes[call.unit.rank]
    arguments = [
      jax.ShapeDtypeStruct(
        value.aval.shape,
        value.aval.dtype,
        sharding=self.sharding(place),
        weak_type=getattr(value.aval, 'weak_type', False),
      )
      for value, place in zip(unit.inputs, call.inputs, strict=True)
    ]
    results = [self._given.get(place[0]) for place in call.outputs]
    if not arguments:  # nothing else says on which devices it runs
      results = [spec or PartitionSpec() for spec in results]
    donated = _matched(
      [
        (number, unit.inputs[number].aval, self.sharding(place).spec, place[0] in self._donatable)
        for number, place in enumerate(call.inputs)
        if number in self._last[unit]
      ],
      [(value.aval, spec) for value, spec in zip(unit.outputs, results, strict=True)],
    )
    jitted = jax.jit(
      _function(unit),
      out_shardings=[None if spec is None else NamedSharding(mesh, spec) for spec in results],
      donate_argnums=donated,
      keep_unused=True,
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      lowered = jitted.lower(*arguments)
    compiled, shared = self._once(lowered, mesh)
    specs = [_spec_of(sharding) for sharding in compiled.output_shardings]
    return Executable(unit, compiled, specs, donated, shared, time.perf_counter() - begin)

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


def _function(unit: Unit) -> Callable[..., list[Any]]:
  """A unit as a function of its inputs."""

  def function(*arrays):
    return eq.run(unit.equations, dict(zip(unit.inputs, arrays, strict=True)), unit.outputs)

  function.__name__ = unit.name
  return function


def _spec_of(sharding: Any) -> PartitionSpec:
  if not isinstance(sharding, NamedSharding):
    raise PipelineError(
      f'A program of this pipeline has a result that lies as {sharding}, which names no mesh.\n'
      'Fix: take what puts it there (device_put, jit with shardings) out of the step.'
    )
  return sharding.spec


def _used_last(linked: Linked, donatable: set[Value]) -> dict[Unit, set[int]]:
  """Per unit, those of its arguments that nobody uses after any of its calls."""
  last: dict[Place, int] = {}
  for number, one in enumerate(linked.calls):
    last.update(dict.fromkeys(one.inputs if isinstance(one, Call) else one.places, number))
  made = {place for one in linked.calls if isinstance(one, Call) for place in one.outputs}
  made.update(place for one in linked.calls if not isinstance(one, Call) for place in one.arrived)
  results = {place for places in linked.results.values() for place in places}
  found: dict[Unit, set[int]] = {}
  for number, one in enumerate(linked.calls):
    if isinstance(one, Call):
      free = {
        index
        for index, place in enumerate(one.inputs)
        if last[place] == number
        and place not in results
        and (place in made or place[0] in donatable)
        and one.inputs.count(place) == 1
      }
      found[one.unit] = found.get(one.unit, free) & free
  return found


def _matched(
  free: Sequence[tuple[int, Any, PartitionSpec, bool]], results: Sequence[tuple[Any, Any]]
) -> tuple[int, ...]:
  """Those free arguments whose memory a result can have; the caller's first, as others end anyhow.

  Args:
    free: number, aval, spec, and whether it is the caller's, of each free argument.
    results: aval and spec of each result; None where the compiler says how it lies.
  """
  room = Counter((aval.shape, aval.dtype, spec) for aval, spec in results)
  found = []
  for number, aval, spec, _ in sorted(free, key=lambda one: (not one[3], one[0])):
    for lies in (spec, None):
      if room[aval.shape, aval.dtype, lies]:
        room[aval.shape, aval.dtype, lies] -= 1
        found.append(number)
        break
  return tuple(sorted(found))
