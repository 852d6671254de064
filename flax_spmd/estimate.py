"""Estimating: what a step would do under a layout, without compiling it.

    estimator = Estimator(train_step, create_state, batch)
    estimator.estimate(layout, parse('h100:64'))

A step is lowered once; an estimate is a walk over it, and says where it is in doubt.
"""

from flax_spmd._src.estimate.estimator import Estimator as Estimator
