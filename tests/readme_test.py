"""The README's examples run as they stand, on one device and on eight."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec

import flax_spmd as spmd

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / 'README.md').read_text()
FIRST, UNNAMED, TRAIN = re.findall(r'```python\n(.*?)```', TEXT, re.DOTALL)


def run(code, **names):
  names['__name__'] = 'readme'
  exec(compile(code, 'README.md', 'exec'), names)
  return names


def test_the_first_example(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('COLUMNS', '110')
  (shown,) = re.findall(r'```text\n(.*?)```', TEXT, re.DOTALL)
  names = run(FIRST)
  printed = capsys.readouterr().out.replace('┃', '│').splitlines()
  assert shown and not set(shown.splitlines()) - set(printed)
  assert not [line for line in printed if line.startswith('- ')]  # a finding
  kernel = names['params']['params']['layers_0']['kernel']
  assert kernel.value.sharding.spec == PartitionSpec(None, 'data')
  assert (tmp_path / 'checkpoints' / '1').is_dir()
  assert len([line for line in FIRST.splitlines() if line.strip()]) <= 15


def test_the_first_example_on_one_device(tmp_path):
  environment = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '', 'PYTHONPATH': str(ROOT)}
  done = subprocess.run(
    [sys.executable, '-c', FIRST],
    cwd=tmp_path,
    env=environment,
    capture_output=True,
    text=True,
    check=True,
  )
  assert "Layout({'data': 1}" in done.stdout and '\n- ' not in done.stdout


def test_the_example_without_names():
  create = functools.partial(create_state_without_names, nn.Dense(2048), optax.adam(1e-3))
  names = run(
    UNNAMED,
    spmd=spmd,
    create_state=create,
    key=jax.random.key(0),
    x=jnp.ones((16, 1024)),
    train_step=step,
  )
  assert names['state'].opt_state[0].mu['kernel'].sharding.spec == PartitionSpec(None, 'data')


def test_the_example_of_compare_and_search():
  here = TRAIN.replace("'h100:64', memory='60GiB'", "'cpu:8', candidates=8, top=1").replace(
    'h100:64', 'cpu:8'
  )
  create = functools.partial(create_state_without_names, nn.Dense(64), optax.adam(1e-3))
  layouts = {
    name: spmd.Layout(spmd.abstract_mesh({name: 8}), (('batch', name), *more))
    for name, more in (('data', ()), ('fsdp', (spmd.fsdp('fsdp', min_size=1),)))
  }
  names = run(
    here,
    spmd=spmd,
    create_state=create,
    key=jax.random.key(0),
    x=jnp.ones((16, 64)),
    train_step=step,
    **layouts,
  )
  assert names['comparison']['fsdp'].memory.peak < names['comparison']['data'].memory.peak
  assert names['result'].layout is not None


def create_state_without_names(model, optimizer, key, x):
  return TrainState.create(apply_fn=model.apply, params=model.init(key, x)['params'], tx=optimizer)


def step(state, x):
  grads = jax.grad(lambda params: jnp.mean(state.apply_fn({'params': params}, x) ** 2))(state.params)
  return state.apply_gradients(grads=grads)


def test_the_two_commands_come_first():
  commands = re.findall(r'^pip install nox && nox -s \w+', TEXT, re.MULTILINE)
  assert commands == ['pip install nox && nox -s demo', 'pip install nox && nox -s tests']
  assert TEXT.index(commands[0]) < TEXT.index('```python')
