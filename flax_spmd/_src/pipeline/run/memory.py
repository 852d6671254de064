"""Memory footprint: the peak memory of each rank's devices, known before anything runs.

The call list gives the lifetime of every buffer: an argument lives throughout the step unless a program
may overwrite it, any other buffer from its write to its last read. The temporary memory of the running
program, which its compiler reports, comes on top. Copies in the memory of the host are counted apart.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from flax_spmd._src.pipeline.cut.equations import Value
from flax_spmd._src.pipeline.run.call_list import Buffer, Call, StageProgram
from flax_spmd._src.pipeline.run.stage_lowering import LoweredStages
from flax_spmd._src.text import size_text
from flax_spmd.errors import PipelineError


def sizes(stages: LoweredStages) -> dict[Buffer, int]:
  """The bytes of each buffer on one device."""
  shard_bytes = functools.cache(_shard_bytes)
  return {
    buffer: shard_bytes(stages.sharding(buffer), buffer.value) for buffer in stages.call_list.last_use
  }


def peaks(stages: LoweredStages, temporaries: Mapping[StageProgram, int]) -> tuple[list[int], list[int]]:
  """The peak memory of a device of each rank, and of its copies in the memory of the host, in bytes.

  Args:
    stages: the step, lowered.
    temporaries: bytes of temporary memory of each program, beside its arguments and results.
  """
  call_list, bytes_of = stages.call_list, sizes(stages)
  alive = Counter[tuple[int, bool]]()  # by rank, and whether it is on the host
  for buffer in call_list.given:
    alive[buffer.memory] += bytes_of[buffer]
  highest = alive.copy()
  for number, one in enumerate(call_list.calls):
    inputs, outputs = one.inputs, one.outputs
    program = one.program if isinstance(one, Call) else None
    reused = set() if program is None else {inputs[index] for index in stages.programs[program].donated}
    for buffer in outputs:
      alive[buffer.memory] += bytes_of[buffer]
    for buffer in reused:
      alive[buffer.memory] -= bytes_of[buffer]
    at = (outputs or inputs)[0].memory if outputs or inputs else (0, False)
    highest[at] = max(highest[at], alive[at] + (0 if program is None else temporaries[program]))
    for buffer in call_list.ends.get(number, ()):
      if buffer in call_list.written and buffer not in reused:
        alive[buffer.memory] -= bytes_of[buffer]
  device, host = (
    [highest[rank, on_host] for rank in range(len(stages.meshes))] for on_host in (False, True)
  )
  return device, host


def check(needed: Sequence[int], meshes: Sequence[Any]) -> None:
  """Raises PipelineError with the ranks whose devices need more bytes than they have. CPU devices report no limit."""
  lines = []
  for rank, (size, mesh) in enumerate(zip(needed, meshes, strict=True)):
    known = [(one.memory_stats() or {}).get('bytes_limit') for one in mesh.local_devices]
    limit = min(filter(None, known), default=math.inf)
    if size > limit:
      lines.append(f'  rank {rank}: {size_text(size)} on a device that has {size_text(limit)}')
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
