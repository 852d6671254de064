"""Step outcomes: the outcome of a lowered step from the work and memory of its program, compiled or partitioned."""

from __future__ import annotations

from flax_spmd._src.compare.costs import cost
from flax_spmd._src.compare.hardware import Target
from flax_spmd._src.compare.lowering import LoweredStep
from flax_spmd._src.compare.outcome import Memory, Outcome
from flax_spmd._src.hlo.counts import Counts


def step_outcome(
  name: str, lowered: LoweredStep, counts: Counts, peak: int, temporaries: int, target: Target
) -> Outcome:
  """The outcome of a step.

  Args:
    name: its name.
    lowered: the step.
    counts: the work of its program.
    peak: peak memory of the program in bytes, with the arguments that it uses.
    temporaries: those of it that are no arguments.
    target: hardware of the program.
  """
  peak += lowered.unused_bytes
  host = host_bytes(lowered)
  return Outcome(
    name,
    lowered.layout,
    Memory(*argument_bytes(lowered), max(0, temporaries), peak, host),
    counts,
    cost(counts, target, lowered.mesh, lowered.dtype, host),
    peak <= target.chip.memory,
    None,
    None,
    None,
    doubts=counts.doubts(),
  )


def host_bytes(lowered: LoweredStep) -> int:
  """Bytes of the state in the memory of the host, for one device."""
  return sum(row.bytes_per_device for row in lowered.rows if row.memory is not None)


def argument_bytes(lowered: LoweredStep) -> tuple[int, int, int, int]:
  """Bytes on a device of the parameters, the optimizer state, the rest of the state, and the batch."""
  sizes = {'params': 0, 'opt_state': 0, '': 0}
  for row, part in zip(lowered.rows, lowered.parts, strict=True):
    sizes[part] += row.bytes_per_device if row.memory is None else 0
  return sizes['params'], sizes['opt_state'], sizes[''], lowered.batch_bytes
