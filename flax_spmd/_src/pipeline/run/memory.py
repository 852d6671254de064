"""Footprint: how much memory the devices of each rank need for a pipeline, known before anything runs.

What is alive is known from the list of calls: arguments that the caller keeps, and every other array until its
last use. While a program runs there is its working memory too, which the compiler tells.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding

from flax_spmd._src.pipeline.cut.equations import Value
from flax_spmd._src.pipeline.run.call_list import Call, Linked, Place, Unit
from flax_spmd._src.text import size_text
from flax_spmd.errors import PipelineError


class Footprint:
  """The memory of a linked step.

  Args:
    linked: the step.
    sharding: how a place lies.
    arguments: those of the step; they stay until the end, unless a program may overwrite them.
    ranks: how many there are.
  """

  def __init__(
    self,
    linked: Linked,
    sharding: Callable[[Place], NamedSharding],
    arguments: Iterable[Value],
    ranks: int,
  ):
    self._calls, self._ranks = linked.calls, ranks
    self._places = [
      (one.inputs, one.outputs) if isinstance(one, Call) else (one.places, one.arrived)
      for one in linked.calls
    ]
    self._last = {
      place: number
      for number, (inputs, outputs) in enumerate(self._places)
      for place in (*inputs, *outputs)
    }
    self._given = set(arguments)
    self._results = {place for each in linked.results.values() for place in each}
    self.sizes = {place: _piece(sharding(place), place[0].aval) for place in self._last}

  @property
  def held(self) -> list[Place]:
    """Where the arguments are."""
    return [place for place in self._last if place[0] in self._given]

  def peaks(self, donated: Mapping[Unit, Sequence[int]], working: Mapping[Unit, int]) -> list[int]:
    """The most bytes that a device of each rank holds at once.

    Args:
      donated: per unit, those of its arguments whose memory it gives to its results.
      working: per unit, what it needs beside its arguments and results.
    """
    alive = [0] * self._ranks
    for place in self.held:
      alive[place[2]] += self.sizes[place]
    found = list(alive)
    for number, (one, (inputs, outputs)) in enumerate(zip(self._calls, self._places)):
      unit = one.unit if isinstance(one, Call) else None
      given = set() if unit is None else {inputs[index] for index in donated[unit]}
      for place in outputs:
        alive[place[2]] += self.sizes[place]
      for place in given:
        alive[place[2]] -= self.sizes[place]
      rank = outputs[0][2] if outputs else inputs[0][2] if inputs else 0
      found[rank] = max(found[rank], alive[rank] + (0 if unit is None else working[unit]))
      for place in {*inputs, *outputs} - given:
        if self._last[place] == number and place[0] not in self._given and place not in self._results:
          alive[place[2]] -= self.sizes[place]
    return found


def check(needed: Sequence[int], meshes: Sequence[Any]) -> None:
  """Raises if a rank's devices have less memory than it needs; devices of the host do not say.

  Raises:
    PipelineError: names every such rank, what it needs and what there is.
  """
  limits: dict[int, int] = defaultdict(int)
  for rank, mesh in enumerate(meshes):
    known = [one.memory_stats() or {} for one in mesh.local_devices]
    limits[rank] = min((one['bytes_limit'] for one in known if 'bytes_limit' in one), default=0)
  lines = [
    f'  rank {rank}: {size_text(size)} on a device that has {size_text(limits[rank])}'
    for rank, size in enumerate(needed)
    if limits[rank] and size > limits[rank]
  ]
  if lines:
    raise PipelineError(
      'Stages do not fit their devices:\n'
      + '\n'.join(lines)
      + '\nFix: use more stages, rules that shard more within a stage, nn.remat in the blocks, smaller '
      'microbatches, or a schedule that keeps fewer of them (schedule.simulate(n).peaks).'
    )


def _piece(sharding: Any, aval: Any) -> int:
  """The bytes of an array on one device."""
  return math.prod(sharding.shard_shape(aval.shape)) * aval.dtype.itemsize


def working(compiled: Any) -> int:
  """What a compiled program needs beside its arguments and results; None is another process's."""
  analysis = None if compiled is None else compiled.memory_analysis()
  return 0 if analysis is None else analysis.temp_size_in_bytes
