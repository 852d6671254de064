"""Preparing: how everything in a linked step lies, and its units as programs that wait for a compiler.

It is said how arguments and sums lie. How the results of a unit lie is known when the unit is compiled, or
by Shardy's propagation, which is what the compiler does first. So units are prepared in an order in which
each finds what it needs known: `executables` compiles them on the way, for devices that are here;
`offline` does not, for devices that may be anywhere.
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
from flax_spmd._src.pipeline.run.call_list import Call, Linked, Place, Unit


class Prepared(NamedTuple):
  """A unit that can be compiled: `jax.stages.Lowered`, and which of its arguments may be overwritten."""

  lowered: Any
  donated: tuple[int, ...]


class Preparer:
  """Lowers the units of a linked step.

  Args:
    linked: the step.
    meshes: per rank, its devices; abstract ones, if nothing is compiled for these.
    specs: how values lie, as far as it is known: arguments, sums, and what is to lie like them.
    donatable: arguments that may be overwritten.

  Attributes:
    first: per unit, its first call, in the order of the step.
    results: per unit that is known, how its results lie; whoever learns it puts it here.
  """

  def __init__(
    self,
    linked: Linked,
    meshes: Sequence[MeshLike],
    specs: Mapping[Value, PartitionSpec],
    donatable: set[Value],
  ):
    self.meshes = meshes
    self.first: dict[Unit, Call] = {}
    self.results: dict[Unit, list[PartitionSpec]] = {}
    self._given, self._donatable = specs, donatable
    self._origin: dict[Place, tuple[Unit, int]] = {}
    for one in linked.calls:
      if isinstance(one, Call):
        self.first.setdefault(one.unit, one)
        self._origin.update((place, (one.unit, number)) for number, place in enumerate(one.outputs))
      else:
        self._origin.update((new, self._origin[old]) for old, new in zip(one.places, one.arrived))
    self._last = _used_last(linked, donatable)

  def spec(self, place: Place) -> PartitionSpec | None:
    """How a place lies; None while that is not known."""
    if place[0] in self._given:
      return self._given[place[0]]
    unit, number = self._origin.get(place, (None, 0))
    if unit is None:  # a closed-over array
      return PartitionSpec()
    return self.results[unit][number] if unit in self.results else None

  def sharding(self, place: Place) -> NamedSharding:
    """The same, of a place that is known, on the devices of its rank."""
    return NamedSharding(self.meshes[place[2]], self.spec(place) or PartitionSpec())

  def prepared(self, call: Call, platform: str | None = None) -> Prepared:
    """The program of a call whose arguments are known; for a platform, or the one of its devices."""
    unit, mesh = call.unit, self.meshes[call.unit.rank]
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
    donated = self._donated(call, results)
    jitted = jax.jit(
      _function(unit),
      out_shardings=[None if spec is None else NamedSharding(mesh, spec) for spec in results],
      donate_argnums=donated,
      keep_unused=True,
    )
    platforms = None if platform is None else (platform,)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      lowered = jitted.trace(*arguments).lower(lowering_platforms=platforms)
    return Prepared(lowered, donated)

  def _donated(self, call: Call, results: Sequence[PartitionSpec | None]) -> tuple[int, ...]:
    unit = call.unit
    free = [
      (number, unit.inputs[number].aval, self.sharding(place).spec, place[0] in self._donatable)
      for number, place in enumerate(call.inputs)
      if number in self._last[unit]
    ]
    return _matched(
      free, [(value.aval, spec) for value, spec in zip(unit.outputs, results, strict=True)]
    )


def _function(unit: Unit) -> Callable[..., list[Any]]:
  """A unit as a function of its inputs."""

  def function(*arrays):
    return eq.run(unit.equations, dict(zip(unit.inputs, arrays, strict=True)), unit.outputs)

  function.__name__ = unit.name
  return function


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
