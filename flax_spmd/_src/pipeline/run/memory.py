"""Memory footprint: the peak memory of each rank's devices, known before anything runs.

The call list gives the lifetime of every buffer: an argument lives throughout the step unless a program
may overwrite it, any other buffer from its write to its last read. The temporary memory of the running
program, which its compiler reports, comes on top. Copies in the memory of the host are counted apart.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding

from flax_spmd._src.pipeline.cut.equations import Value
from flax_spmd._src.pipeline.run.call_list import Buffer, Call, CallList, StageProgram
from flax_spmd._src.text import size_text
from flax_spmd.errors import PipelineError


class Footprint:
  """The memory of a call list's buffers.

  Args:
    call_list: the step.
    sharding: returns the sharding of a buffer.
    arguments: arguments of the step. They live until the end, unless a program may overwrite them.
    donated: indices of the arguments whose memory each program reuses for its results.
    ranks: number of ranks.

  Attributes:
    sizes: bytes of each buffer on one device.
  """

  def __init__(
    self,
    call_list: CallList,
    sharding: Callable[[Buffer], NamedSharding],
    arguments: Iterable[Value],
    donated: Mapping[StageProgram, Sequence[int]],
    ranks: int,
  ):
    self._call_list, self._donated, self._ranks = call_list, donated, ranks
    self._arguments = set(arguments)
    shard_bytes = functools.cache(_shard_bytes)
    self.sizes = {buffer: shard_bytes(sharding(buffer), buffer.value) for buffer in call_list.last_use}

  @property
  def held(self) -> list[Buffer]:
    """The buffers of the arguments."""
    return [buffer for buffer in self._call_list.last_use if buffer.value in self._arguments]

  def peaks(self, temporaries: Mapping[StageProgram, int]) -> tuple[list[int], list[int]]:
    """The peak memory of a device of each rank, and of its copies in the memory of the host, in bytes.

    Args:
      temporaries: bytes of temporary memory of each program, beside its arguments and results.
    """
    alive = Counter[tuple[int, bool]]()  # by rank, and whether it is on the host
    for buffer in self._call_list.given:
      alive[buffer.memory] += self.sizes[buffer]
    peaks = alive.copy()
    for number, one in enumerate(self._call_list.calls):
      inputs, outputs = one.inputs, one.outputs
      program = one.program if isinstance(one, Call) else None
      reused = set() if program is None else {inputs[index] for index in self._donated[program]}
      for buffer in outputs:
        alive[buffer.memory] += self.sizes[buffer]
      for buffer in reused:
        alive[buffer.memory] -= self.sizes[buffer]
      at = (outputs or inputs)[0].memory if outputs or inputs else (0, False)
      peaks[at] = max(peaks[at], alive[at] + (0 if program is None else temporaries[program]))
      for buffer in self._call_list.ends.get(number, ()):
        if buffer in self._call_list.written and buffer not in reused:
          alive[buffer.memory] -= self.sizes[buffer]
    device, host = ([peaks[rank, on_host] for rank in range(self._ranks)] for on_host in (False, True))
    return device, host


def check(needed: Sequence[int], meshes: Sequence[Any]) -> None:
  """Raises if a rank needs more memory than its devices have. CPU devices report no limit.

  Args:
    needed: peak memory of a device of each rank, in bytes.
    meshes: mesh of each rank.

  Raises:
    PipelineError: the ranks that do not fit, each with the bytes that it needs and has.
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
      'microbatches, a schedule that keeps fewer of them (schedule.simulate(n).peaks), or host_after=.'
    )


def _shard_bytes(sharding: Any, value: Value) -> int:
  """The bytes of an array on one device."""
  return math.prod(sharding.shard_shape(value.aval.shape)) * value.aval.dtype.itemsize


def temporary_bytes(compiled: Any) -> int:
  """The temporary memory of a compiled program in bytes; 0 for None, a program of another process."""
  analysis = None if compiled is None else compiled.memory_analysis()
  return 0 if analysis is None else analysis.temp_size_in_bytes
