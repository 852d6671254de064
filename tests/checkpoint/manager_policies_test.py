"""The manager's policies against Orbax's Checkpointer as the oracle: the same saves, and the same survivors."""

import contextlib
import datetime
import math
import operator
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orbax.checkpoint import v1 as ocp

import flax_spmd as spmd
from flax_spmd import checkpoint

LAYOUT = spmd.Layout({'data': 8})
STATE = {'w': np.arange(8.0, dtype=np.float32)}
every = ocp.training.save_decision_policies
keep = ocp.training.preservation_policies
NUMBERS = st.integers(1, 4)


class Sparse:
  """A policy of the user's own: every second step of those that come a while after the last one."""

  def should_save(self, step, previous_steps, *, context):
    last = previous_steps[-1].step if previous_steps else -2
    return step.step % 2 == 0 and step.step - last >= 2 and not context.reached_preemption


class FirstAndLast:
  """A policy of the user's own, which looks at metrics and times."""

  def should_preserve(self, checkpoints, *, context):
    newest = max(info.time for info in checkpoints)
    return [
      number == 0 or info.time == newest or (info.metrics or {}).get('loss') == 0
      for number, info in enumerate(checkpoints)
    ]


SINGLE_DECISIONS = st.one_of(
  st.builds(every.FixedIntervalPolicy, NUMBERS),
  st.builds(every.SpecificStepsPolicy, st.sets(st.integers(0, 12))),
  st.builds(every.ContinuousCheckpointingPolicy, minimum_interval_secs=st.sampled_from([None, 0, 3600])),
  st.builds(every.InitialSavePolicy),
  st.builds(every.PreemptionCheckpointingPolicy),
  st.builds(Sparse),
)
DECISIONS = SINGLE_DECISIONS | st.builds(
  every.AnySavePolicy, st.lists(SINGLE_DECISIONS, min_size=1, max_size=3)
)
SINGLE_PRESERVATIONS = st.one_of(
  st.builds(keep.PreserveAll),
  st.builds(keep.LatestN, st.none() | NUMBERS),
  st.builds(keep.EveryNSeconds, st.sampled_from([0, 3600])),
  st.builds(keep.EveryNSteps, NUMBERS, exact_interval=st.booleans(), max_to_keep=st.none() | NUMBERS),
  st.builds(keep.EveryNStepsClosest, NUMBERS, max_to_keep=st.none() | NUMBERS),
  st.builds(keep.CustomSteps, st.sets(st.integers(0, 12))),
  st.builds(
    keep.BestN,
    get_metric_fn=st.just(operator.itemgetter('loss')),
    reverse=st.booleans(),
    n=st.none() | st.integers(0, 3),
    keep_checkpoints_without_metrics=st.booleans(),
  ),
  st.builds(keep.LatestDuration, st.sampled_from([datetime.timedelta(0), datetime.timedelta(hours=1)])),
  st.builds(FirstAndLast),
)
PRESERVATIONS = SINGLE_PRESERVATIONS | st.builds(
  keep.AnyPreservationPolicy, st.lists(SINGLE_PRESERVATIONS, min_size=1, max_size=3)
)
# The steps of a run: how far each one is from the last, whether it is forced, its metrics, whether the run is
# started again before it.
RUNS = st.lists(
  st.tuples(
    st.sampled_from([1, 1, 1, 2, 3, -1]),
    st.sampled_from([False, False, False, True]),
    st.none() | st.integers(0, 5).map(lambda loss: {'loss': loss / 4}),
    st.sampled_from([False, False, False, True]),
  ),
  min_size=2,
  max_size=7,
)


def numbered(run):
  step = 0
  for distance, *rest in run:
    step = max(step + distance, 0)
    yield step, *rest


def steps_on_disk(root):
  return sorted(int(child.name) for child in root.iterdir() if child.name.isdecimal())


def run_ours(root, decision, preservation, run):
  outcomes = []
  with contextlib.ExitStack() as stack:
    manager = None
    for step, force, metrics, is_restarted in numbered(run):
      if manager is None or is_restarted:
        stack.close()
        manager = stack.enter_context(
          checkpoint.Manager(root, LAYOUT, every=decision, keep=preservation, durable=False)
        )
      saved = manager.save(step, STATE, force=force, metrics=metrics)
      manager.wait()
      assert manager.steps == steps_on_disk(root)
      outcomes.append((step, saved, manager.steps))
  return outcomes


def run_orbax(root, decision, preservation, run):
  outcomes = []
  with contextlib.ExitStack() as stack:
    manager = None
    for step, force, metrics, is_restarted in numbered(run):
      if manager is None or is_restarted:
        stack.close()
        manager = ocp.training.Checkpointer(
          root, save_decision_policy=decision, preservation_policy=preservation
        )
        stack.callback(manager.close)
      exists = any(saved.step == step for saved in manager.checkpoints)  # Orbax then raises
      saved = not exists and manager.save(step, STATE, force=force, metrics=metrics)
      manager.wait()
      outcomes.append((step, saved, steps_on_disk(root)))
  return outcomes


@settings(max_examples=25)
@given(decision=DECISIONS, preservation=PRESERVATIONS, run=RUNS)
def test_the_same_saves_and_survivors_as_orbax(decision, preservation, run):
  with tempfile.TemporaryDirectory() as folder:
    ours = run_ours(Path(folder, 'ours'), decision, preservation, run)
    assert ours == run_orbax(Path(folder, 'orbax'), decision, preservation, run)


@pytest.mark.parametrize('reverse', [False, True])
@pytest.mark.parametrize('keeps_others', [False, True])
def test_a_run_that_diverges_keeps_its_best_steps(tmp_path, reverse, keeps_others):
  """Orbax ranks NaN by its place in the history, so steps of such a run would replace the best."""
  best = keep.BestN(
    get_metric_fn=operator.itemgetter('loss'),
    reverse=reverse,
    n=2,
    keep_checkpoints_without_metrics=keeps_others,
  )
  losses = [0.1, 0.9, 0.2, math.nan, 0.8, math.nan, 0.3, math.nan]
  ranked = sorted((loss, step) for step, loss in enumerate(losses) if loss == loss)
  expected = {step for _, step in (ranked[:2] if reverse else ranked[-2:])}
  expected |= {step for step, loss in enumerate(losses) if keeps_others and loss != loss}
  policy = keep.AnyPreservationPolicy([best])
  with checkpoint.Manager(tmp_path, LAYOUT, every=1, keep=policy, durable=False) as manager:
    for step, loss in enumerate(losses):
      manager.save(step, STATE, metrics={'loss': loss})
  assert set(steps_on_disk(tmp_path)) == expected
