"""Corrections: estimates with the factors of an estimate check, and the doubts that it leaves."""

from __future__ import annotations

from flax_spmd._src.compare.costs import cost
from flax_spmd._src.compare.hardware import Target
from flax_spmd._src.compare.outcome import ESTIMATED, Outcome
from flax_spmd._src.estimate.doubts import particular
from flax_spmd._src.hlo.counts import Collective, scaled
from flax_spmd._src.mesh import axis_sizes
from flax_spmd._src.search.estimate_check import EstimateCheck, corrected_peak
from flax_spmd._src.search.operation_classes import class_of
from flax_spmd._src.text import size_text


def corrected(
  outcome: Outcome, check: EstimateCheck, target: Target, memory: int, dtype: str
) -> Outcome:
  """An estimate with the corrections of a check; an outcome of the compiler, or of its partitioner, as it is.

  Args:
    outcome: the estimate.
    check: what compiled layouts say about estimates.
    target: the hardware.
    memory: bytes available to the step on each device.
    dtype: operands' dtype of most matrix products.
  """
  if not outcome.counts or not outcome.memory or outcome.source != ESTIMATED:
    return outcome
  factors = check.factors
  temporaries = int(outcome.memory.temporaries * factors.get('temporaries', 1.0))
  peak = corrected_peak(outcome, factors)
  counts = scaled(outcome.counts, factors.get('flops', 1.0), factors.get('hbm', 1.0))
  counts = counts._replace(
    collectives=tuple(_scaled(one, factors.get(class_of(one), 1.0)) for one in counts.collectives)
  )
  return outcome._replace(
    memory=outcome.memory._replace(temporaries=temporaries, peak=peak),
    counts=counts,
    cost=cost(counts, target, axis_sizes(outcome.layout.mesh), dtype, outcome.memory.host),
    fits=peak <= memory,
    doubts=(*particular(outcome.doubts), *check.doubts(outcome), *_memory_doubts(peak, memory, check)),
  )


def _scaled(one: Collective, factor: float) -> Collective:
  return one._replace(bytes=one.bytes * factor, wire=one.wire * factor)


def _memory_doubts(peak: int, memory: int, check: EstimateCheck) -> tuple[str, ...]:
  """A doubt if the error that the check leaves could change the verdict."""
  error = check.within[1]
  if abs(peak / memory - 1) >= error:
    return ()
  return (
    f'memory: {size_text(peak)} of {size_text(memory)}, and estimates are off by up to {100 * error:.0f} %',
  )
