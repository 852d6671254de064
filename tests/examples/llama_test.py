"""The trainer to copy: it learns, resumes, compares layouts, and runs in several processes."""

import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from flax_spmd import checkpoint
from tests.examples.jobs import EXAMPLES, LOSS_LINE, Slurm, until_sigterm

FOLDER = EXAMPLES / 'llama'
LAYOUTS = FOLDER / 'layouts'
SMALL = ['--batch=8', '--length=16', '--steps=1000', '--warmup=5', '--log-every=1', '--dtype=float32']
LAST = 12  # the step after which a run gets SIGTERM

# Of losses printed with five digits, of 10 steps in float32: sums are taken in another order.
TOLERANCE = 1e-4


def train(trainer, monkeypatch, run, layout, until):
  """Runs the trainer until SIGTERM, which comes during a step; returns its losses, by step."""
  losses = {}

  def record(*text, flush):
    match = LOSS_LINE.match(str(text[0]))
    if match:
      losses[int(match[1])] = float(match[2])
    if until in losses:
      os.kill(os.getpid(), signal.SIGTERM)

  monkeypatch.setattr(trainer, 'print', record, raising=False)
  with pytest.raises(SystemExit) as ended:
    trainer.main([f'--run={run}', f'--layout={LAYOUTS / layout}.toml', *SMALL])
  assert ended.value.code == 143
  return losses


def close(some, others, steps):
  """Whether two runs have the same losses."""
  np.testing.assert_allclose(
    [some[step] for step in steps], [others[step] for step in steps], atol=TOLERANCE
  )
  return True


@pytest.fixture(scope='module')
def undisturbed(trainer, tmp_path_factory):
  """The losses of a run of one process, on eight devices."""
  with pytest.MonkeyPatch.context() as monkeypatch:
    return train(trainer, monkeypatch, tmp_path_factory.mktemp('run'), 'fsdp', LAST)


@pytest.fixture(scope='module')
def stopped(trainer, tmp_path_factory):
  """The folder of a run that was stopped after three steps, and its losses."""
  run = tmp_path_factory.mktemp('run')
  with pytest.MonkeyPatch.context() as monkeypatch:
    return run, train(trainer, monkeypatch, run, 'fsdp', 3)


@pytest.mark.slow
def test_it_learns_and_resumes_after_sigterm(trainer, undisturbed, stopped, monkeypatch, tmp_path):
  assert undisturbed[LAST] < undisturbed[1] - 0.3
  folder, before = stopped
  assert checkpoint.verify(folder / '3') == [] and list(before) == [1, 2, 3]
  run = shutil.copytree(folder, tmp_path / 'run')
  after = train(trainer, monkeypatch, run, 'fsdp', LAST)
  assert before | after == undisturbed and min(after) == 4


@pytest.mark.slow
def test_it_resumes_under_another_layout(trainer, undisturbed, stopped, monkeypatch, tmp_path):
  run = shutil.copytree(stopped[0], tmp_path / 'run')
  after = train(trainer, monkeypatch, run, 'fsdp_tensor', LAST)
  assert list(after) == list(range(4, LAST + 1)) and close(after, undisturbed, after)


def test_processes_read_the_rows_of_their_devices(trainer):
  """Any subset of rows, from any step on, belongs to the same batches."""
  whole = list(trainer.batches(trainer.__file__, range(3), (8, 16), np.arange(8)))
  assert whole[0].shape == (8, 16) and whole[0].dtype == np.int32
  assert not np.array_equal(whole[0], whole[1])
  some = list(trainer.batches(trainer.__file__, range(1, 3), (8, 16), np.array([2, 5])))
  np.testing.assert_array_equal(some, [batch[[2, 5]] for batch in whole[1:]])
  text = Path(trainer.__file__).read_bytes()
  assert all(bytes(row.tolist()) in text for row in whole[0])


@pytest.mark.slow
@pytest.mark.old_jax
def test_layouts_are_compared_for_absent_hardware(trainer, capsys):
  trainer.main(['--batch=8', '--length=16', '--compare=cpu:4'])
  rows = [line.split() for line in capsys.readouterr().out.splitlines()]
  assert [row[:2] for row in rows if row[:1] in (['fsdp'], ['fsdp_tensor'])] == [
    ['fsdp', 'yes'],
    ['fsdp_tensor', 'yes'],
  ]  # without 'single', which is not a layout for four devices


# -- several processes


@pytest.mark.exhaustive
def test_several_processes_train_as_one_does(undisturbed, tmp_path):
  """Two processes of the local launcher begin the run, and two SLURM tasks resume it."""
  run = [f'--run={tmp_path / "run"}', f'--layout={LAYOUTS / "fsdp_tensor.toml"}', *SMALL]
  script = FOLDER / 'train.py'
  local = [sys.executable, EXAMPLES / 'launch_local.py', '--processes=2', '--devices=4', script]
  begun = until_sigterm([*local, *run], 3)
  slurm = Slurm(tmp_path / 'bin', tasks=2)
  resumed = until_sigterm(
    ['bash', EXAMPLES / 'launch_slurm.sbatch', script, *run], max(begun) + 3, slurm
  )
  assert min(begun) == 1 and min(resumed) == max(begun) + 1
  assert slurm.was_requeued()
  both = begun | resumed
  assert min(resumed) < LAST and close(both, undisturbed, both.keys() & undisturbed)
