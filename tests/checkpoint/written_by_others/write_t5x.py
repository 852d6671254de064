"""Writes t5x.tar.xz with T5X's own Checkpointer; see README.md.

PYTHONPATH=<clone of google-research/t5x> python write_t5x.py <empty folder>
"""

import os
import pathlib
import shutil
import sys
from unittest import mock

os.environ |= {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '--xla_force_host_platform_device_count=8'}
for name in (
  'airio',
  'airio.core',
  'seqio',
  'jestimator',
):  # T5X imports them, and its checkpoints do not
  sys.modules[name] = mock.MagicMock()

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.linen import partitioning as names
from t5x import adafactor, checkpoints, optimizers, partitioning, train_state


class Model(nn.Module):
  @nn.compact
  def __call__(self, x):
    init = nn.initializers.normal()
    x = x @ names.param_with_axes('embedding', init, (16, 8), axes=('vocab', 'embed'))
    for layer in range(2):
      kernel = names.param_with_axes(f'layers_{layer}', init, (8, 16), axes=('embed', 'mlp'))
      scale = names.param_with_axes(f'scale_{layer}', init, (8,), axes=('embed',))
      x = (x * scale @ kernel) @ kernel.T
    return x


def factored():
  rules = adafactor.standard_logical_factor_rules()
  return adafactor.Adafactor(
    decay_rate=0.8, step_offset=0, logical_factor_rules=rules, min_dim_size_to_factor=8
  )


def write(folder, optimizer, dtype, on_host=False):
  variables = flax.core.freeze(Model().init(jax.random.key(0), jnp.ones((2, 16))))
  if optimizer is None:
    state = train_state.InferenceState.create(variables)
  else:
    state = train_state.FlaxOptimTrainState.create(optimizer, variables)
    gradients = jax.tree.map(lambda x: x / 2, state.params)
    state = state.apply_gradient(gradients, learning_rate=0.1)
  rules = partitioning.standard_logical_axis_rules(parameter_partitioning_dims=2)
  partitioner = partitioning.PjitPartitioner(num_partitions=2, logical_axis_rules=rules)
  axes = partitioner.get_mesh_axes(state)
  shard = partitioner.partition(lambda x: x, in_axis_resources=(None,), out_axis_resources=axes)
  saved = jax.tree.map(np.asarray, state) if on_host else shard(state)
  checkpoints.Checkpointer(saved, partitioner, os.fspath(folder), save_dtype=dtype).save(saved)
  arrays = flax.traverse_util.flatten_dict(flax.core.unfreeze(state.state_dict()), sep='/')
  np.savez(folder / 'state.npz', **{path: x for path, x in arrays.items() if x is not None})


out = pathlib.Path(sys.argv[1])
for folder, arguments in {
  'adafactor': (factored(), np.float32),
  'adafactor_on_host': (factored(), np.float32, True),
  'adamw_bfloat16': (optimizers.wrap_optax_optimizer(optax.adamw)(learning_rate=1e-3), jnp.bfloat16),
  'inference': (None, np.float32),
}.items():
  (out / folder).mkdir()
  write(out / folder, *arguments)
shutil.make_archive(os.fspath(pathlib.Path(__file__).with_name('t5x')), 'xztar', out)
