"""From text to a served model: every command of the README, as it stands, in its order; the loader."""

import importlib.util
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.examples.conftest import imported
from tests.examples.jobs import EXAMPLES, LOSS_LINE, ROOT

FOLDER = EXAMPLES / 'bytes'
HELD_OUT = re.compile(r'step (\d+)  held-out loss (\d+\.\d+)')


class Shell:
  """The README's commands, in a folder that has the examples; `python` is this one.

  Args:
    folder: folder to run in.
  """

  def __init__(self, folder):
    (folder / 'examples').symlink_to(EXAMPLES)
    (folder / 'bin').mkdir()
    python = folder / 'bin' / 'python'
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    blocks = re.findall(r'```sh\n(.*?)```', (FOLDER / 'README.md').read_text(), re.DOTALL)
    self.exports, *self.commands = ''.join(blocks).splitlines()
    self._folder = folder
    own = {'PATH': f'{folder / "bin"}{os.pathsep}{os.environ["PATH"]}', 'PYTHONPATH': str(ROOT)}
    own |= {'XLA_FLAGS': '--xla_backend_optimization_level=1'}  # of steps that are many
    self._environment = {name: os.environ[name] for name in ('HOME',) if name in os.environ} | own

  def start(self, command):
    """Starts a command; its process replaces the shell."""
    return subprocess.Popen(
      ['bash', '-ec', f'{self.exports}\nexec {command}'],
      cwd=self._folder,
      env=self._environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )

  def run(self, command):
    """Runs a command to its end; returns its output."""
    done = subprocess.run(
      ['bash', '-ec', f'{self.exports}\n{command}'],
      cwd=self._folder,
      env=self._environment,
      capture_output=True,
      text=True,
    )
    assert done.returncode == 0, f'{command}\n{done.stdout}\n{done.stderr}'
    return done.stdout


@pytest.mark.slow
@pytest.mark.new_jax
def test_the_readme_leads_from_text_to_a_served_model(tmp_path):
  shell = Shell(tmp_path)
  train, again, evaluate, publish, serve, grain = shell.commands

  begun, lines = shell.start(train), []
  for line in begun.stdout:
    lines.append(line)
    if line.startswith('step 20 '):
      begun.send_signal(signal.SIGTERM)
  assert begun.wait() == 143, ''.join(lines)
  saved = int(re.fullmatch(r'SIGTERM: saved step (\d+)', lines[-1].strip())[1])

  following = shell.start(evaluate)
  resumed = shell.run(again)
  evaluated = following.communicate()[0]
  assert resumed.startswith(f"{saved} of 100 steps are done, over {{'data': 4, 'model': 2}}\n")
  losses = [float(loss) for _, loss in LOSS_LINE.findall(resumed)]
  held_out = {int(step): float(loss) for step, loss in HELD_OUT.findall(evaluated)}
  assert following.returncode == 0 and {saved, 100} <= held_out.keys(), evaluated
  assert losses[-1] < 2.8 and held_out[100] < held_out[saved] - 0.3
  assert len(re.findall('^The ', resumed, re.MULTILINE)) == 1  # a sample

  assert shell.run(publish) == 'step 100 is in served\n'
  served = shell.run(serve)
  assert served.startswith('The with statement ') and len(served) > 40

  if importlib.util.find_spec('grain'):
    assert 'step 20 ' in shell.run(grain)
  assert '--grain' in grain


def test_batches_are_the_same_for_any_number_of_processes():
  """Every window once in an epoch, and from any position on."""
  with imported('bytes') as trainer:
    windows = np.arange(30).reshape(10, 3)
    shard = trainer.spmd.Layout({'data': 1}, (('batch', 'data'),)).data_shard('batch')
    whole = trainer.Batches(windows, 4, shard)
    batches = [next(whole) for _ in range(5)]
    assert sorted(np.concatenate(batches)[:10, 0]) == sorted(windows[:, 0])
    assert not np.array_equal(np.concatenate(batches)[:10], np.concatenate(batches)[10:])
    parts = [trainer.Batches(windows, 4, type(shard)(index, 2, (index,))) for index in range(2)]
    for part in parts:
      part.set_state(3)
    np.testing.assert_array_equal(np.concatenate([next(part) for part in parts]), batches[3])
    assert [part.get_state() for part in parts] == [4, 4]
