"""Writes maxtext.tar.xz, or maxtext_linen.tar.xz, with MaxText's own code; see README.md.

PYTHONPATH=<folder of the package maxtext> python write_maxtext.py nnx|linen <empty folder>
"""

import os
import pathlib
import shutil
import sys
from functools import partial

os.environ |= {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '--xla_force_host_platform_device_count=8'}

import flax
import flax.linen as nn
import grain
import jax
import maxtext
import numpy as np
from flax import nnx
from maxtext.checkpoint_conversion.utils import utils as conversion
from maxtext.common import checkpointing, train_state_nnx
from maxtext.configs import pyconfig
from maxtext.optimizers import optimizers
from maxtext.utils import maxtext_utils, maxtext_utils_nnx, model_creation_utils, train_utils

SETTINGS = {
  'base_emb_dim': 8, 'base_num_query_heads': 2, 'base_num_kv_heads': 2, 'base_mlp_dim': 16, 'head_dim': 4,
  'base_num_decoder_layers': 2, 'vocab_size': 16, 'max_target_length': 8, 'per_device_batch_size': 1,
  'run_name': 'x', 'base_output_directory': 'unused', 'dataset_type': 'synthetic', 'hardware': 'cpu',
  'skip_jax_distributed_system': True, 'attention': 'dot_product', 'override_model_config': True,
  'decoder_block': 'llama2', 'enable_checkpointing': True, 'ici_fsdp_parallelism': 4, 'ici_tensor_parallelism': 2,
}  # fmt: skip
LINEN = {'enable_nnx': False, 'pure_nnx': False, 'pure_nnx_decoder': False}


def linen_state(config, mesh):
  model = model_creation_utils.create_model(config, mesh)
  tx = optimizers.get_optimizer(config, maxtext_utils.create_learning_rate_schedule(config), model)
  init = partial(maxtext_utils.init_initial_state, model, tx, config, True, jax.random.PRNGKey(0))
  with mesh, nn.logical_axis_rules(config.logical_axis_rules):
    return jax.jit(lambda: nn.unbox(init()))()


def nnx_state(config, mesh):
  create, _ = model_creation_utils.create_nnx_abstract_model(config, mesh)
  rngs = maxtext_utils_nnx.create_nnx_rngs(config, rng_key=jax.random.PRNGKey(0))
  model = model_creation_utils.from_config(config, mesh=mesh, rngs=rngs)
  _, tx = train_utils.create_training_optimizer(config, model)

  def init():
    model = create()
    return train_state_nnx.TrainStateNNX(model, nnx.Optimizer(model, tx, wrt=nnx.Param))

  with mesh:
    return nnx.state(maxtext_utils.setup_training_state(None, config, mesh, None, init)[0])


class GrainConfig:
  """MaxText's settings, with a data set of grain."""

  dataset_type = 'grain'

  def __init__(self, config):
    self._config = config

  def __getattr__(self, name):
    return getattr(self._config, name)


class DataIterator:
  """What MaxText saves of its loader."""

  def __init__(self):
    self.local_iterator = iter(grain.MapDataset.range(10).to_iter_dataset())
    next(self.local_iterator)


def numbers(key):
  is_typed = hasattr(key, 'dtype') and jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
  return np.asarray(jax.random.key_data(key) if is_typed else key)


def write(out, which, scan):
  settings = {**SETTINGS, 'scan_layers': scan, **(LINEN if which == 'linen' else {})}
  base = pathlib.Path(maxtext.__path__[0]) / 'configs' / 'base.yml'
  config = pyconfig.initialize(['', str(base), *(f'{name}={value}' for name, value in settings.items())])
  mesh = maxtext_utils.get_mesh_from_config(config)
  state = linen_state(config, mesh) if which == 'linen' else nnx_state(config, mesh)
  tree = state if which == 'linen' else train_state_nnx.to_checkpoint_dict(state)
  flat = flax.traverse_util.flatten_dict(flax.serialization.to_state_dict(tree), sep='/')
  np.savez(out / 'state.npz', **{path: numbers(x) for path, x in flat.items() if hasattr(x, 'shape')})

  manager = checkpointing.create_orbax_checkpoint_manager(
    str(out / 'run'), True, False, 1, 'grain', use_ocdbt=scan, use_zarr3=scan
  )
  checkpointing.save_checkpoint(manager, 5, state, GrainConfig(config), DataIterator(), force=True)
  checkpointing.wait_until_finished(manager)
  params = tree.params if which == 'linen' else tree['params']
  if scan:
    checkpointing.save_params_to_path(str(out / 'params'), params)
  elif which == 'nnx':
    weights = jax.tree.map(np.asarray, params['params'])
    conversion.save_weights_to_checkpoint(str(out / 'converted'), weights, 8, False, False)


kind, target = sys.argv[1], pathlib.Path(sys.argv[2])
for layers in ('scanned', 'unscanned'):
  (target / layers).mkdir()
  write(target / layers, kind, layers == 'scanned')
archive = 'maxtext' if kind == 'nnx' else 'maxtext_linen'
shutil.make_archive(os.fspath(pathlib.Path(__file__).with_name(archive)), 'xztar', target)
