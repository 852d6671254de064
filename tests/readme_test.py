"""The README's example runs as it stands."""

import functools
import re
from pathlib import Path

import flax.linen as nn
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec

ROOT = Path(__file__).parent.parent


def test_the_examples_run(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('COLUMNS', '110')
  text = (ROOT / 'README.md').read_text()
  named, unnamed = re.findall(r'```python\n(.*?)```', text, re.DOTALL)
  (shown,) = re.findall(r'```text\n(.*?)```', text, re.DOTALL)
  names = {'__name__': 'readme'}
  exec(compile(named, 'README.md', 'exec'), names)
  printed = capsys.readouterr().out.replace('┃', '│').splitlines()
  assert shown and not set(shown.splitlines()) - set(printed)
  assert names['state'].params['w1'].value.sharding.spec == PartitionSpec('fsdp', None)
  assert (tmp_path / 'checkpoints' / '1').is_dir()

  names['create_state'] = functools.partial(create_state_without_names, nn.Dense(2048), optax.adam(1e-3))
  names['x'] = jnp.ones((16, 1024))
  exec(compile(unnamed, 'README.md', 'exec'), names)
  assert names['state'].opt_state[0].mu['kernel'].sharding.spec == PartitionSpec(None, 'data')


def create_state_without_names(model, optimizer, key, x):
  return TrainState.create(apply_fn=model.apply, params=model.init(key, x)['params'], tx=optimizer)


def test_the_two_commands_come_first():
  text = (ROOT / 'README.md').read_text()
  commands = re.findall(r'^pip install nox && nox -s \w+', text, re.MULTILINE)
  assert commands == ['pip install nox && nox -s demo', 'pip install nox && nox -s tests']
  assert text.index(commands[0]) < text.index('```python')
