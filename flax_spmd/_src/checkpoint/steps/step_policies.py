"""Step policies: which steps a run saves, and which it keeps, decided by Orbax's policies.

Each policy is called as Orbax's own `training.Checkpointer` calls it: with the history of the run, the
oldest step first. The step that is being saved is part of the history.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint.options import MultiprocessingOptions

from flax_spmd.errors import CheckpointError

History = Sequence[ocp.training.CheckpointMetadata]


class StepPolicies:
  """The policies of one run.

  Args:
    every: number of steps between checkpoints, or a policy of `ocp.training.save_decision_policies`.
    keep: number of checkpoints to keep, or a policy of `ocp.training.preservation_policies`.

  Raises:
    CheckpointError: an argument is neither a positive number nor a policy.
  """

  def __init__(self, every: Any, keep: Any):
    decisions, preservation = ocp.training.save_decision_policies, ocp.training.preservation_policies
    self._every = _policy('every', every, decisions.FixedIntervalPolicy, decisions.SaveDecisionPolicy)
    self._keep = _policy('keep', keep, preservation.LatestN, preservation.PreservationPolicy)

  def is_due(
    self, step: ocp.training.CheckpointMetadata, history: History, *, is_saving: bool, is_preempted: bool
  ) -> bool:
    """Whether to save a step. A step that does not come after the last one is never due."""
    if history and history[-1].step >= step.step:
      return False
    context = ocp.training.save_decision_policies.DecisionContext(
      is_saving_in_progress=is_saving,
      reached_preemption=is_preempted,
      multiprocessing_options=MultiprocessingOptions(),
    )
    return bool(self._every.should_save(step, list(history), context=context))

  def kept(self, history: History) -> list[ocp.training.CheckpointMetadata]:
    """The steps of a history to keep, in order."""
    keeps = self._keep.should_preserve(
      list(history), context=ocp.training.preservation_policies.PreservationContext()
    )
    return [step for step, keep in zip(history, keeps, strict=True) if keep]


def _policy(name: str, value: Any, of_number: Any, protocol: Any) -> Any:
  """The policy of an argument, which may be a number."""
  if isinstance(value, (int, np.integer)):
    if value < 1:
      raise CheckpointError(
        f'{name}={value} is not positive.\nFix: pass 1 or more, or a policy of Orbax.'
      )
    return of_number(int(value))
  if not isinstance(value, protocol) or isinstance(value, type):
    raise CheckpointError(
      f'{name}={value!r} is neither a number nor a policy of Orbax.\nFix: pass a number of '
      f'{"steps" if name == "every" else "checkpoints"}, or a {protocol.__name__} of orbax.checkpoint.v1.training.'
    )
  return value
