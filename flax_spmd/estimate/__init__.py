"""Estimating: what a step would do under a layout, without compiling it.

estimator = Estimator(train_step, create_state, batch)
estimator.estimate(layout, parse('h100:64'))
"""

from flax_spmd.estimate.estimator import Estimator as Estimator
