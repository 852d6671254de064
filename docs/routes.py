"""Prints how far each kind of call travels through the package: files, and crossings from one to another.

    python docs/routes.py

A crossing is a call from a function of one file to a function of another. Both are counted for a small model,
once: they show how often a reader who follows the call has to change files, not how long it takes.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('XLA_FLAGS', '--xla_force_host_platform_device_count=8')
os.environ.setdefault('FLAX_SPMD_CACHE', tempfile.mkdtemp())

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import flax_spmd as spmd
from flax_spmd import checkpoint, explore, pipeline

PACKAGE = str(Path(spmd.__file__).parent) + os.sep


def route(call: Callable[[], Any]) -> tuple[int, int]:
  """The number of files of the package that a call runs through, and of crossings between them."""
  files: set[str] = set()
  crossings = 0

  def profile(frame: FrameType, event: str, _: Any) -> None:
    nonlocal crossings
    file = frame.f_code.co_filename
    if event != 'call' or not file.startswith(PACKAGE) or frame.f_code.co_name == '<module>':
      return
    files.add(file)
    caller = frame.f_back
    while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
      caller = caller.f_back
    crossings += caller is not None and caller.f_code.co_filename != file

  sys.setprofile(profile)
  try:
    call()
  finally:
    sys.setprofile(None)
  return len(files), crossings


class Model(nn.Module):
  """Two dense layers, with an end of a stage between them."""

  @nn.compact
  def __call__(self, x):
    """Applies the layers."""
    for number, names in enumerate((('embed', 'mlp'), ('mlp', 'embed'))):
      init = spmd.with_logical_partitioning(nn.initializers.lecun_normal(), names)
      x = nn.Dense(64, kernel_init=init, name=f'dense_{number}')(x)
      x = x if number else pipeline.stage_end(x)
    return x


def create() -> TrainState:
  """A state."""
  model = Model()
  params = model.init(jax.random.key(0), jnp.ones((1, 64)))['params']
  return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))


def loss(params, apply, x):
  """The mean square of the outputs."""
  return jnp.mean(apply({'params': params}, x) ** 2)


def step(state, x):
  """One update."""
  value, grads = jax.value_and_grad(loss)(state.params, state.apply_fn, x)
  return state.apply_gradients(grads=grads), value


def staged_step(state, x):
  """One update, over microbatches."""

  def gradients(x):
    return jax.value_and_grad(loss)(state.params, state.apply_fn, x)

  value, grads = pipeline.accumulate(
    gradients, x, microbatches=4, schedule=pipeline.OneFOneB(ranks=2), op=pipeline.Mean
  )
  return state.apply_gradients(grads=grads), value


def main() -> None:
  """Prints the table."""
  rules = (('batch', 'data'), ('mlp', 'model'))
  layout = spmd.Layout({'data': 2, 'model': 4}, rules)
  x = layout.shard(jnp.ones((16, 64)), ('batch', None))
  train = explore.TrainStep(step, create, jax.ShapeDtypeStruct((16, 64), jnp.float32))
  folder, text = Path(tempfile.mkdtemp()) / 'checkpoint', layout.to_toml()
  state = layout.init(create)
  jitted = layout.jit(step)
  stages = spmd.Layout({'stage': 2, 'data': 4}, (('batch', 'data'),))
  staged, staged_state = stages.pipeline_jit(staged_step), stages.init(create)
  staged_x = stages.shard(jnp.ones((16, 64)), ('batch', None))
  abstract = spmd.Layout(spmd.abstract_mesh({'data': 2, 'model': 4}), rules)
  calls = {
    'names to shardings': lambda: layout.sharding(jax.eval_shape(create)),
    'TOML to explain': lambda: str(spmd.explain(spmd.Layout.from_toml(text), state)),
    'jit, first call': lambda: jitted(state, x),
    'jit, later call': lambda: jitted(state, x),
    'save': lambda: checkpoint.save(folder, state, layout=layout),
    'restore': lambda: checkpoint.restore(folder, layout.abstract(create)),
    'compare': lambda: spmd.compare(train, {'one': abstract}, 'cpu:8'),
    'search': lambda: spmd.search(train, 'cpu:8', candidates=20, top=1),
    'pipeline, first call': lambda: staged(staged_state, staged_x),
    'pipeline, later call': lambda: staged(staged_state, staged_x),
  }
  print(f'{"":22} files crossings')
  for name, call in calls.items():
    files, crossings = route(call)
    print(f'{name:22} {files:5} {crossings:9,}')


if __name__ == '__main__':
  main()
