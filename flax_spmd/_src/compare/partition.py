"""Partitions: FLOPs and collectives of a step under layouts, from the target's own partitioner.

    counts = partition(train_step, {'fsdp': layout}, parse_target('h100:8'))['fsdp']

A program is partitioned in a tenth of the time that its compilation takes, and is lowered before. Its FLOPs and bytes
on the wire are those of the compiled program; its memory and its memory traffic are not known.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from flax_spmd._src.compare.compilation import CompileJob, check_compiler, compile_jobs, default_jobs
from flax_spmd._src.compare.hardware import Target
from flax_spmd._src.compare.lowering import lower
from flax_spmd._src.compare.train_step import TrainStepLike
from flax_spmd._src.hlo.counts import Counts
from flax_spmd._src.layout import Layout
from flax_spmd.errors import TargetDeviceError


def can_partition(target: Target) -> bool:
  """Whether the target's compiler is installed, and can end after it has partitioned a program: only that for GPUs can."""
  if target.chip.platform != 'cuda':
    return False
  try:
    check_compiler(target)
  except TargetDeviceError:
    return False
  return True


def partition(
  train_step: TrainStepLike,
  layouts: Mapping[str, Layout],
  target: Target,
  *,
  hardware: str | os.PathLike[str] | None = None,
  jobs: int | None = None,
) -> dict[str, Counts]:
  """The work of a step under each layout, as partitioned by the target's compiler.

  Args:
    train_step: the step and its arguments, or a function from a layout to it.
    layouts: layouts by name.
    target: hardware for which `can_partition`.
    hardware: TOML file that describes the target's chip, if it is not built in.
    jobs: number of compilers that run in parallel. Default: half of the CPU's cores.

  Returns:
    The counts by name, without those of layouts under which the step cannot be lowered or partitioned. Their
    `hbm_bytes` are those of a program whose operations are not fused, far more than a compiled one moves.

  Raises:
    TargetDeviceError: a mesh and the target differ in their number of devices.
  """
  lowered = {}
  for name, layout in layouts.items():
    try:
      lowered[name] = lower(train_step, layout, target)
    except TargetDeviceError:
      raise
    except Exception:  # a compilation reports it
      continue
  parallel = jobs or default_jobs()
  programs = list(lowered.values())
  shares = [programs[first::parallel] for first in range(min(parallel, len(programs)))]
  work = [CompileJob(share, target, partition_only=True) for share in shares]
  results = compile_jobs(work, hardware=hardware, parallel=parallel)
  counts = [results[index % len(work)][index // len(work)].counts for index in range(len(programs))]
  return {name: one for name, one in zip(lowered, counts, strict=True) if one is not None}
