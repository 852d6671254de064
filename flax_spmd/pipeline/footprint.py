"""Footprint: how much memory the devices of each rank need for a pipeline, known before anything runs.

What is alive is known from the list of calls: arguments that the caller keeps, and every other array until its
last use. While a program runs there is its working memory too, which the compiler tells.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from flax_spmd.errors import PipelineError
from flax_spmd.pipeline.equations import Value
from flax_spmd.pipeline.executables import Compiler, Executable
from flax_spmd.pipeline.linking import Call, Linked, Place, Unit
from flax_spmd.report import size_text


def peaks(
  linked: Linked,
  compiler: Compiler,
  executables: Mapping[Unit, Executable],
  arguments: Sequence[Value],
  ranks: int,
) -> list[int]:
  """The most bytes that a device of each rank holds at once.

  Args:
    linked: the step.
    compiler: knows how places lie.
    executables: of the units.
    arguments: those of the step; they stay until the end, unless a program may overwrite them.
    ranks: how many there are.
  """
  places = [
    (one.inputs, one.outputs) if isinstance(one, Call) else (one.places, one.arrived)
    for one in linked.calls
  ]
  last = {
    place: number for number, (inputs, outputs) in enumerate(places) for place in (*inputs, *outputs)
  }
  given = set(arguments)
  results = {place for each in linked.results.values() for place in each}
  sizes = {place: _piece(compiler.sharding(place), place[0].aval) for place in last}
  alive = [0] * ranks
  for place in last:
    if place[0] in given:
      alive[place[2]] += sizes[place]
  found = list(alive)
  for number, (one, (inputs, outputs)) in enumerate(zip(linked.calls, places)):
    donated = _donated(one, executables)
    for place in outputs:
      alive[place[2]] += sizes[place]
    for place in donated:
      alive[place[2]] -= sizes[place]
    rank = outputs[0][2] if outputs else inputs[0][2] if inputs else 0
    found[rank] = max(found[rank], alive[rank] + _working(one, executables))
    for place in {*inputs, *outputs} - donated:
      if last[place] == number and place[0] not in given and place not in results:
        alive[place[2]] -= sizes[place]
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


def _donated(one: Any, executables: Mapping[Unit, Executable]) -> set[Place]:
  """The places whose memory a call gives to its results."""
  if not isinstance(one, Call):
    return set()
  return {one.inputs[number] for number in executables[one.unit].donated}


def _working(one: Any, executables: Mapping[Unit, Executable]) -> int:
  """What a program needs beside its arguments and results."""
  compiled = executables[one.unit].compiled if isinstance(one, Call) else None
  analysis = None if compiled is None else compiled.memory_analysis()
  return 0 if analysis is None else analysis.temp_size_in_bytes
