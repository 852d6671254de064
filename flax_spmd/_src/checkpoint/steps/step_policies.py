"""Step policies: which steps a run saves, and which it keeps, decided by Orbax's policies.

Each policy is called as Orbax's own `training.Checkpointer` calls it: with the history of the run, the
oldest step first. The step that is being saved is part of the history. Only a step that `BestN` ranks by NaN counts as one
without metrics: NaN is neither greater nor less than any number, so Orbax would keep the steps of a run that has diverged, and
remove the best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint.options import MultiprocessingOptions

from flax_spmd._src.text import value_text
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
      [self._ranked(step) for step in history],
      context=ocp.training.preservation_policies.PreservationContext(),
    )
    return [step for step, keep in zip(history, keeps, strict=True) if keep]

  def _ranked(self, step: ocp.training.CheckpointMetadata) -> ocp.training.CheckpointMetadata:
    """A step; without its metrics if a policy ranks it by NaN."""
    metrics = step.metrics
    if metrics is None or not any(_is_nan(best, metrics) for best in _bests(self._keep)):
      return step
    return ocp.training.CheckpointMetadata(
      step.step,
      step.path,
      metadata=None,
      metrics=None,
      commit_timestamp_nsecs=step.commit_timestamp_nsecs,
    )


def _bests(policy: Any) -> Iterator[Any]:
  """The policies of Orbax that rank steps by their metrics, within a policy."""
  policies = ocp.training.preservation_policies
  if isinstance(policy, policies.BestN):
    yield policy
  elif isinstance(policy, policies.AnyPreservationPolicy):
    for each in policy.policies:
      yield from _bests(each)


def _is_nan(best: Any, metrics: Any) -> bool:
  """Whether a policy ranks metrics by NaN."""
  try:
    value = best.get_metric_fn(metrics)
    return bool(value != value)
  except Exception:  # the policy raises it too, if it ranks the step
    return False


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
      f'{name}={value_text(value)} is neither a number nor a policy of Orbax.\nFix: pass a number of '
      f'{"steps" if name == "every" else "checkpoints"}, or a {protocol.__name__} of orbax.checkpoint.v1.training.'
    )
  return value
