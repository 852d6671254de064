"""The command line, and a small run of the demo."""

import io
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from rich.console import Console

import flax_spmd as spmd
from flax_spmd import checkpoint, cli
from flax_spmd.demo.model import Transformer
from flax_spmd.demo.run import layouts, run
from flax_spmd.demo.text import batches, corpus, decode
from flax_spmd.demo.training import TrainingConfig


@pytest.mark.slow
def test_a_small_demo(tmp_path):
  console = Console(file=io.StringIO(), width=120)
  with jax.numpy_rank_promotion('allow'):
    model = Transformer(embed=32, heads=4, mlp=64, layers=1, ngrams=64)
    assert run(TrainingConfig(steps=4, batch=8, length=8), console, tmp_path, model)
  text = console.file.getvalue()
  for heading in (
    '1. Sharded from the start',
    '2. Half',
    '3. Saved',
    '4. The other half',
    '5. The two runs',
    '6. A sample',
  ):
    assert heading in text
  assert 'blocks/up' in text and 'layers, embed, mlp → model' in text
  assert (tmp_path / 'half').is_dir()


def test_the_demo_command_reports_failure(monkeypatch):
  monkeypatch.setattr('flax_spmd.demo.run.run', lambda *_: False)
  assert cli.main(['demo']) == 1


def test_batches_are_the_same_in_every_run():
  data = corpus()
  assert len(data) > 100_000 and data.max() < 128
  first = [next(windows) for windows in (batches(data, 4, 8, start=3), batches(data, 4, 8, start=3))]
  np.testing.assert_array_equal(*first)
  assert first[0].shape == (4, 9)
  whole = decode(data)
  assert all(decode(window) in whole for window in first[0])


@pytest.mark.parametrize('devices', [1, 2, 3, 4, 6, 8])
def test_the_demo_layouts_fit_any_number_of_devices(devices):
  if devices <= jax.device_count():
    for layout in layouts(devices):
      assert layout.mesh.size <= devices


@pytest.mark.parametrize(
  'arguments, message', [([], 'required'), (['demo', '--steps', '1'], 'at least 4 steps')]
)
def test_wrong_arguments(arguments, message, capsys):
  with pytest.raises(SystemExit) as caught:
    cli.main(arguments)
  assert caught.value.code == 2
  assert message in capsys.readouterr().err


def test_eight_devices_are_emulated_by_default():
  environment = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}
  code = 'from flax_spmd.cli.devices import emulate; emulate(8); import jax; print(jax.device_count())'
  done = subprocess.run(
    [sys.executable, '-c', code], env=environment, capture_output=True, text=True, check=True
  )
  assert done.stdout.strip() == '8'


MODEL = """
import jax
import jax.numpy as jnp

PLATFORMS = jax.config.jax_platforms

def of_step():
  return lambda state, x: (state, x.sum()), lambda: {'w': jnp.ones(8)}, jax.ShapeDtypeStruct((8,), jnp.float32)
"""


@pytest.fixture
def no_platforms():
  """JAX without `JAX_PLATFORMS`."""
  before = jax.config.jax_platforms
  jax.config.update('jax_platforms', None)
  yield
  jax.config.update('jax_platforms', before)


@pytest.mark.usefixtures('no_platforms')
def test_commands_leave_accelerators_to_training_runs(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  layout = spmd.Layout({'data': 8}, (('batch', 'data'),))
  (tmp_path / 'layout.toml').write_text(layout.to_toml())
  saved = [str(tmp_path / name) for name in ('one', 'other')]
  for path in saved:
    checkpoint.save(path, layout.shard({'w': np.ones(8)}), layout)
  (tmp_path / 'model_on_cpus.py').write_text(MODEL)
  for command in (
    ['explain', 'model_on_cpus:of_step', str(tmp_path / 'layout.toml')],
    ['checkpoint', 'diff', *saved],
    ['checkpoint', 'verify', saved[0]],
    ['checkpoint', 'convert', saved[0], str(tmp_path / 'new')],
  ):
    jax.config.update('jax_platforms', None)
    assert cli.main(command) == 0
    assert jax.config.jax_platforms == 'cpu', command
  assert sys.modules['model_on_cpus'].PLATFORMS == 'cpu'  # before the model's own code


@pytest.mark.parametrize(
  ('values', 'text'),
  [
    (
      ['(', '1GiB'],
      "REGEX: '(' is not a regular expression: missing ), unterminated subpattern at position 0.",
    ),
    (['params', 'much'], "'much' is not a size; write it as 14GiB"),
  ],
)
def test_limits_of_replicated_arrays_are_checked_before_anything_runs(values, text, capsys):
  with pytest.raises(SystemExit):
    cli.main(['explain', 'no_module:no_function', 'no_file.toml', '--fail-if-replicated', *values])
  assert capsys.readouterr().err.splitlines()[-1] == (
    f'flax-spmd explain: error: argument --fail-if-replicated: {text}'
  )


def test_output_that_nobody_reads_any_more():
  reader, writer = os.pipe()
  os.close(reader)
  code = 'import sys; from flax_spmd import cli; sys.exit(cli.main(["targets"]))'
  done = subprocess.run(
    [sys.executable, '-c', code], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
  )
  os.close(writer)
  assert (done.returncode, done.stderr) == (141, '')
