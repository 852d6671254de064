"""Partitioned steps: the work and memory of a whole step, as XLA partitions, fuses and schedules it.

That takes several times as long as an estimate, and for GPUs a fraction of a compilation. To fuse a softmax into one kernel of
Triton's takes most of a compilation, so it is done only where a softmax can decide the memory.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from typing import NamedTuple

from flax_spmd._src.compare.compilation import peak_of
from flax_spmd._src.compare.hardware import Target
from flax_spmd._src.compare.outcome import Outcome
from flax_spmd._src.compare.partitioner import PartitionedProgram, partitioner
from flax_spmd._src.hlo.counts import Counts, count_module
from flax_spmd._src.hlo.parser import Computation, HloModule, Instruction, parse

_SMALL = 0.07  # share of the memory; smaller softmaxes do not decide it


class PartitionedStep(NamedTuple):
  """The costs of a step on one device.

  Attributes:
    counts: FLOPs, memory traffic and collectives.
    memory: peak memory in bytes, with the arguments.
    doubts: kernels with unknown costs, one line each.
  """

  counts: Counts
  memory: int
  doubts: tuple[str, ...] = ()


def partitioned_step(code: bytes, sizes: Mapping[str, int], target: Target) -> PartitionedStep | None:
  """A step as the target's XLA partitions it; None if it cannot.

  Args:
    code: the step as MLIR bytecode, with shardings.
    sizes: size per mesh axis, in order.
    target: hardware to partition for.
  """
  shape, its = tuple(sizes.values()), partitioner(target.chip.platform)
  found = _assigned(its.with_memory(code, shape, target), sizes, target)
  if target.chip.platform == 'cuda' and found and _decides(found[0], found[1].memory):
    found = _assigned(its.with_memory(code, shape, target, fuse_softmax=True), sizes, target) or found
  return found and found[1]


def is_as_slow_as_compilation(target: Target, compiled: Outcome) -> bool:
  """Whether to partition a step takes as long as to compile it: for TPUs, and where a softmax has to be fused.

  Args:
    target: hardware to partition for.
    compiled: an outcome of the step that the target's compiler compiled.
  """
  if target.chip.platform != 'cuda':
    return target.chip.platform == 'tpu'
  result, memory = compiled.compiled, compiled.memory
  if result is None or result.hlo is None or memory is None:
    return False
  try:
    text = gzip.decompress(result.hlo.read_bytes()).decode()
  except OSError:  # the cache was cleared meanwhile
    return False
  return _decides(parse(text), memory.peak, stored=True)


def _assigned(
  program: PartitionedProgram | None, sizes: Mapping[str, int], target: Target
) -> tuple[HloModule, PartitionedStep] | None:
  if program is None or program.memory is None:
    return None
  module = parse(program.text)
  return module, PartitionedStep(count_module(module, sizes), peak_of(program.memory, target))


def _decides(module: HloModule, memory: int, stored: bool = False) -> bool:
  """Whether a softmax can decide the memory of a program; arguments as of `_largest_softmax`."""
  return _largest_softmax(module, stored) > _SMALL * memory


def _largest_softmax(module: HloModule, stored: bool) -> float:
  """The bytes of the largest softmax that a kernel computes on the way to its result, and so does not store.

  As one kernel of Triton's it would be stored, and the operations after it would be kernels of their own.

  Args:
    module: the program.
    stored: whether those count, too, that a kernel stores, as in a program where they are fused.
  """
  inner = (
    one
    for computation in module.computations.values()
    for name, one in computation.instructions.items()
    if (stored or name != computation.root) and one.op == 'divide' and _is_of_rows(one, computation)
  )
  return max((one.bytes for one in inner), default=0.0)


def _is_of_rows(one: Instruction, computation: Computation) -> bool:
  """Whether the last operand of an instruction has one number per row."""
  rows = computation.instructions.get(one.operands[-1])
  if rows is None or rows.op != 'broadcast' or len(one.shapes[0].dims) < 2:
    return False
  return rows.attributes['dimensions'] == f'{{{",".join(map(str, range(len(one.shapes[0].dims) - 1)))}}}'
