"""Doubts of estimates, on machines with a compiler and without."""

from flax_spmd._src.estimate.doubts import particular
from flax_spmd._src.estimate.estimator import TPU_DOUBT


def doubts_of(outcome):
  """The doubts about a step and its layout, without that of every estimate whose step is not partitioned."""
  return tuple(one for one in particular(outcome.doubts) if one != TPU_DOUBT)
